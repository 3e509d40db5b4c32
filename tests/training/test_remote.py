"""Shards kept elsewhere: the same bytes here afterwards, or an error before the first step."""

# ruff: noqa: F811  (fixtures of another module are names of this one)

import dataclasses
import functools
import http.server
import json
import re
import shutil
import sys
import threading
import urllib.parse
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from test_train import _size, config_for, fit, inputs  # noqa: F401

from craw4llm.artifact import Artifact
from craw4llm.errors import ArtifactError, ConfigError
from craw4llm.execution import Execution
from training.remote import fetch_missing


@pytest.fixture
def elsewhere(inputs: dict[str, Artifact], execution: Execution, tmp_path: Path) -> Path:
    """A copy of the artifact root; here, the inputs lose all files but the manifest."""
    copy = tmp_path / "elsewhere"
    shutil.copytree(execution.root, copy)
    for artifact in inputs.values():
        shutil.rmtree(artifact.path / "shards")
        (artifact.path / "documents.parquet").unlink()
    return copy


def test_training_on_fetched_shards_is_training_on_local_ones(inputs: dict[str, Artifact], execution: Execution, elsewhere: Path) -> None:
    there = {name: Artifact(elsewhere, a.stage, a.fingerprint, a.manifest) for name, a in inputs.items()}
    local = fit(config_for(18), there, dataclasses.replace(execution, root=elsewhere), "local")
    fetched = fit(config_for(18), inputs, dataclasses.replace(execution, shards_from=str(elsewhere), workers=3), "fetched")
    assert fetched.digest == local.digest
    assert all(not artifact.verify() for artifact in inputs.values())


def test_without_an_address_the_missing_file_is_named(inputs: dict[str, Artifact], execution: Execution, elsewhere: Path) -> None:
    with pytest.raises(ArtifactError, match="has no file 'shards'"):
        fit(config_for(3), inputs, execution)


class Bucket(http.server.SimpleHTTPRequestHandler):
    """As much of S3 as downloads need: HEAD and GET of /bucket/key, whole or a range."""

    def do_HEAD(self) -> None:
        self.answer(body=False)

    def do_GET(self) -> None:
        self.answer(body=True)

    def answer(self, *, body: bool) -> None:
        path = Path(self.directory, urllib.parse.unquote(urllib.parse.urlparse(self.path).path).removeprefix("/bucket/"))
        if not path.is_file():
            self.send_error(404)
            return
        content, status = path.read_bytes(), 200
        asked = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))
        whole = len(content)
        if asked:
            first, last = int(asked[1]), int(asked[2] or whole - 1)
            content, status = content[first : last + 1], 206
        self.send_response(status)
        if asked:
            self.send_header("Content-Range", f"bytes {first}-{first + len(content) - 1}/{whole}")
        self.send_header("Content-Length", str(len(content)))
        self.send_header("ETag", '"x"')
        self.end_headers()
        if body:
            self.wfile.write(content)

    def log_message(self, format: str, *args: object) -> None: ...


@pytest.fixture
def without_s3fs(monkeypatch: pytest.MonkeyPatch) -> None:
    """s3:// by mosaicml-streaming's downloader; by fsspec: tests/clusters/test_mirror.py."""
    monkeypatch.setattr("training.remote._has_s3fs", lambda: False)


@pytest.mark.usefixtures("without_s3fs")
def test_s3(inputs: dict[str, Artifact], elsewhere: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("boto3")
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Bucket, directory=str(elsewhere)))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    for name, value in {
        "S3_ENDPOINT_URL": f"http://127.0.0.1:{server.server_port}",
        "AWS_ACCESS_KEY_ID": "test",
        "AWS_SECRET_ACCESS_KEY": "test",
        "AWS_DEFAULT_REGION": "us-east-1",
    }.items():
        monkeypatch.setenv(name, value)
    try:
        assert fetch_missing(inputs["tokens"], "s3://bucket", 2) > 2
        assert inputs["tokens"].verify() == []
        (elsewhere / "tokenize" / "heldout" / "shards" / "index.json").unlink()
        with pytest.raises(ArtifactError, match=r"s3://bucket/tokenize/heldout/shards/index.json cannot be fetched"):
            fetch_missing(inputs["heldout"], "s3://bucket")
    finally:
        server.shutdown()
        server.server_close()


@pytest.mark.usefixtures("without_s3fs")
def test_a_client_that_is_not_installed_is_named(inputs: dict[str, Artifact], elsewhere: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "boto3", None)
    monkeypatch.setitem(sys.modules, "boto3.s3.transfer", None)
    with pytest.raises(ConfigError, match="shards_from is 's3://bucket', which needs the package boto3: pip install boto3"):
        fetch_missing(inputs["tokens"], "s3://bucket")


@pytest.mark.parametrize("damage", ["flipped", "cut", "missing"])
def test_a_damaged_copy_is_found_before_the_first_step(
    inputs: dict[str, Artifact], execution: Execution, elsewhere: Path, damage: str
) -> None:
    shard = elsewhere / "tokenize" / "tokens" / "shards" / "shard.00000.mds"
    content = shard.read_bytes()
    if damage == "missing":
        shard.unlink()
    else:
        shard.write_bytes(content[:-1] + (b"\xff" if damage == "flipped" else b""))
    expected = "cannot be fetched .FileNotFoundError" if damage == "missing" else "the copy is damaged or of another run; copy it anew"
    with pytest.raises(ArtifactError, match=rf"{shard} .*{expected}"):
        fit(config_for(3), inputs, dataclasses.replace(execution, shards_from=str(elsewhere)))
    assert not list(inputs["tokens"].path.rglob(".fetching-*"))
    assert not (inputs["tokens"].path / "shards" / "shard.00000.mds").exists()
    assert not (execution.root / "train" / ".partial-model" / "metrics.jsonl").exists()


def test_two_that_fetch_the_same_do_not_meet(inputs: dict[str, Artifact], elsewhere: Path) -> None:
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda _: fetch_missing(inputs["tokens"], str(elsewhere), 2), range(8)))
    assert inputs["tokens"].verify() == []
    assert fetch_missing(inputs["tokens"], str(elsewhere)) == 0


def test_a_manifest_writes_nothing_outside_of_its_artifact(inputs: dict[str, Artifact], elsewhere: Path) -> None:
    tokens = inputs["tokens"]
    outside = {"path": "../../planted", "size_bytes": 1, "sha256": "0" * 64}
    (elsewhere / "planted").write_text("x")
    hostile = Artifact(tokens.root, tokens.stage, tokens.fingerprint, {**tokens.manifest, "files": [outside]})
    with pytest.raises(ArtifactError, match=r"names '../../planted', which is outside of the artifact"):
        fetch_missing(hostile, str(elsewhere))


def test_an_address_that_nothing_serves(inputs: dict[str, Artifact], elsewhere: Path) -> None:
    with pytest.raises(ConfigError, match="shards_from is 'gopher://x'; expected a folder, or an address that begins with s3://"):
        fetch_missing(inputs["tokens"], "gopher://x")
    assert json.loads((inputs["tokens"].path / "manifest.json").read_text())
