"""Copies of artifacts in an object store: moto's server on loopback, spoken to by s3fs as it would speak to S3."""

import logging
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("moto", reason="the extra `clusters-test` is not installed")
pytest.importorskip("s3fs", reason="the extra `clusters` is not installed")

from click.testing import CliRunner

from craw4llm.artifact import MANIFEST, Artifact, Result, Store
from craw4llm.errors import ArtifactError, ConfigError, StorageError
from craw4llm.mirror import listed, pull, push
from craw4llm.mirror_commands import mirror
from training.remote import fetch_missing


@pytest.fixture(scope="module")
def bucket() -> Iterator[str]:
    """A bucket of a server that wants no real credentials. The environment is restored."""
    from moto.server import ThreadedMotoServer

    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0)
    server.start()
    host, port = server.get_host_and_port()
    settings = {
        "AWS_ENDPOINT_URL": f"http://{host}:{port}",
        "AWS_ACCESS_KEY_ID": "x",
        "AWS_SECRET_ACCESS_KEY": "x",
        "AWS_DEFAULT_REGION": "us-east-1",
        "NO_PROXY": "127.0.0.1",
    }
    before = dict(os.environ)
    os.environ.update(settings)
    import fsspec

    fsspec.filesystem("s3").mkdir("artifacts")
    yield "s3://artifacts/craw4llm"
    os.environ.clear()
    os.environ.update(before)
    server.stop()


@pytest.fixture
def address(bucket: str, request: pytest.FixtureRequest) -> str:
    return f"{bucket}/{request.node.name}"


@pytest.fixture
def artifact(tmp_path: Path) -> Artifact:
    def write(out: Path) -> Result:
        (out / "shards").mkdir()
        for number in range(3):
            (out / "shards" / f"shard.{number:05d}.mds").write_bytes(bytes([number]) * 50_000)
        (out / "documents.parquet").write_bytes(b"documents")
        return Result(counts={"samples": (3, "samples")})

    made, _ = Store(tmp_path / "here").build("tokenize", "3f9c2a71b0de", version=1, config={}, inputs={}, write=write)
    return made


def test_what_was_pushed_comes_back_the_same(artifact: Artifact, address: str, tmp_path: Path) -> None:
    assert push(artifact, address) == 150_009
    assert push(artifact, address) == 0
    other = Store(tmp_path / "there")
    brought = pull("tokenize", "3f9c2a71b0de", address, other)
    assert brought.digest == artifact.digest and brought.verify() == []
    assert [m["fingerprint"] for m in listed(address)] == ["3f9c2a71b0de"]
    assert [p.name for p in (other.root / "tokenize").iterdir()] == ["3f9c2a71b0de"]


def test_a_machine_with_the_manifest_alone_fetches_its_shards(artifact: Artifact, address: str, tmp_path: Path) -> None:
    push(artifact, address)
    brought = pull("tokenize", "3f9c2a71b0de", address, Store(tmp_path / "there"), manifests_only=True)
    assert sorted(p.name for p in brought.path.iterdir()) == [MANIFEST]
    assert fetch_missing(brought, address, workers=2) == 4
    assert brought.verify() == [] and fetch_missing(brought, address) == 0  # the second time they are here


def test_a_push_that_was_interrupted_is_no_copy(artifact: Artifact, address: str, tmp_path: Path) -> None:
    shard = artifact.path / "shards" / "shard.00001.mds"
    content = shard.read_bytes()
    shard.write_bytes(b"x" * 50_000)
    with pytest.raises(ArtifactError, match=r"nothing damaged is pushed"):
        push(artifact, address)
    assert listed(address) == []
    with pytest.raises(ArtifactError, match="has no manifest"):
        pull("tokenize", "3f9c2a71b0de", address, Store(tmp_path / "there"))
    shard.write_bytes(content)
    assert push(artifact, address) > 0 and len(listed(address)) == 1


def test_a_damaged_copy_leaves_nothing_here(artifact: Artifact, address: str, tmp_path: Path) -> None:
    import fsspec

    push(artifact, address)
    fsspec.filesystem("s3").pipe_file(f"{address}/tokenize/3f9c2a71b0de/shards/shard.00002.mds", b"y" * 50_000)
    with pytest.raises(ArtifactError, match=r"shard.00002.mds is not what its manifest says"):
        pull("tokenize", "3f9c2a71b0de", address, Store(tmp_path / "there"))
    assert list((tmp_path / "there" / "tokenize").iterdir()) == []


def test_another_artifact_of_the_same_name_is_not_overwritten(artifact: Artifact, address: str, tmp_path: Path) -> None:
    push(artifact, address)

    def write(out: Path) -> Result:
        (out / "a").write_text("a")
        return Result()

    other, _ = Store(tmp_path / "else").build("tokenize", "3f9c2a71b0de", version=1, config={}, inputs={}, write=write)
    with pytest.raises(ArtifactError, match="has the digest"):
        push(other, address)


def test_files_of_another_artifact_do_not_complete_one(artifact: Artifact, tmp_path: Path) -> None:
    """The manifest here and the copy have one name and differ: their files would be mixed."""
    there = Store(tmp_path / "there")
    one, other = str(tmp_path / "one"), str(tmp_path / "other")
    push(artifact, one)
    brought = pull(artifact.stage, artifact.fingerprint, one, there, manifests_only=True)
    shutil.copytree(one, other)
    manifest = Path(other) / artifact.stage / artifact.fingerprint / MANIFEST
    manifest.write_text(manifest.read_text().replace(artifact.digest, "f" * 64))
    with pytest.raises(ArtifactError, match=r"the manifest here .* delete .* to take the copy"):
        pull(artifact.stage, artifact.fingerprint, other, there)
    assert not (brought.path / "shards").exists()
    pull(artifact.stage, artifact.fingerprint, one, there)
    assert len(list((brought.path / "shards").iterdir())) == 3


def test_a_manifest_cannot_write_outside_of_its_artifact(artifact: Artifact, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    push(artifact, str(copy))
    manifest = copy / "tokenize" / "3f9c2a71b0de" / MANIFEST
    manifest.write_text(manifest.read_text().replace('"documents.parquet"', '"../../../escaped"'))
    with pytest.raises(ArtifactError, match="outside of the artifact"):
        pull("tokenize", "3f9c2a71b0de", str(copy), Store(tmp_path / "there"))
    assert not (tmp_path / "there" / "escaped").exists()


def test_addresses_with_passwords_and_places_that_do_not_answer(
    artifact: Artifact, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ConfigError, match="holds a password"):
        push(artifact, "sftp://me:secret@host/folder")
    with pytest.raises(ConfigError, match="cannot be used"):
        push(artifact, "nonsense://bucket")
    shutil.rmtree(artifact.path / "shards")
    with pytest.raises(ArtifactError, match="is missing"):
        push(artifact, str(tmp_path / "copy"))
    (tmp_path / "file").touch()
    with pytest.raises(StorageError, match="check the address"):
        push(artifact, str(tmp_path / "file"))


def test_the_commands(artifact: Artifact, address: str, tmp_path: Path) -> None:
    runner = CliRunner()
    pushed = runner.invoke(mirror, ["push", "3f9c", "--to", address, "--root", str(artifact.root)], catch_exceptions=False)
    assert pushed.output.endswith(f"1 artifacts, 150,009 bytes sent to {address}\n")
    assert "tokenize   3f9c2a71b0de" in runner.invoke(mirror, ["list", "--from", address], catch_exceptions=False).output
    brought = runner.invoke(
        mirror, ["pull", "--kind", "tokenize", "--from", address, "--root", str(tmp_path / "there")], catch_exceptions=False
    )
    assert brought.output.splitlines() == ["tokenize 3f9c2a71b0de: 4 files brought", f"1 artifacts are in {tmp_path / 'there'}"]
    with pytest.raises(ArtifactError, match="no complete copy of zzz"):
        runner.invoke(mirror, ["pull", "zzz", "--from", address, "--root", str(tmp_path)], catch_exceptions=False)
