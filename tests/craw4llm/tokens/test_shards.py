"""MDS shards: the same samples as mosaicml-streaming reads, and every kind of damage found by name."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from craw4llm.errors import ArtifactError
from craw4llm.tokens.shards import INDEX, Shards, verify_shards, write_shards
from craw4llm.tokens.streaming_shim import streaming

SAMPLES = np.random.default_rng(0).integers(0, 65_536, size=(100, 33)).astype(np.uint16)
ORDER = np.random.default_rng(1).permutation(100)


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("mds") / "shards"
    write_shards(folder, SAMPLES, ORDER, shard_bytes=2000)
    return folder


@pytest.fixture
def copy(written: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(written, tmp_path / "shards"))


def test_reads_what_was_written(written: Path) -> None:
    shards = Shards(written)
    assert len(list(written.glob("*.mds"))) > 3
    assert (len(shards), shards.sample_tokens, shards.dtype) == (100, 33, np.uint16)
    assert np.array_equal(shards[range(100)], SAMPLES[ORDER])
    some = [99, 0, 50, 50, 3]
    assert np.array_equal(shards[some], SAMPLES[ORDER][some])
    assert shards[[]].shape == (0, 33)
    for outside in (-1, 100):
        with pytest.raises(IndexError):
            shards[[0, outside]]


def test_streaming_reads_the_same(written: Path) -> None:
    dataset = streaming().LocalDataset(str(written))
    shards = Shards(written)
    assert len(dataset) == len(shards)
    assert all(np.array_equal(dataset[i]["tokens"], shards[[i]][0]) for i in range(100))


def test_streaming_dataset_iterates_the_same(written: Path) -> None:
    code = (
        "import sys; from craw4llm.tokens.streaming_shim import streaming; s = streaming()\n"
        "d = s.StreamingDataset(local=sys.argv[1], shuffle=False, batch_size=1, num_canonical_nodes=1)\n"
        "print([int(x['tokens'].sum()) for x in d])"
    )
    done = subprocess.run([sys.executable, "-c", code, str(written)], check=True, capture_output=True, text=True)
    assert json.loads(done.stdout) == SAMPLES[ORDER].sum(axis=1, dtype=np.int64).tolist()


def test_wide_ids(tmp_path: Path) -> None:
    samples = np.array([[70_000, 1], [2, 3]], dtype=np.int32)
    write_shards(tmp_path / "s", samples, np.array([1, 0]))
    assert np.array_equal(Shards(tmp_path / "s")[[0, 1]], samples[::-1])
    assert verify_shards(tmp_path / "s", 2) == 2


def test_two_writings_have_the_same_bytes(written: Path, tmp_path: Path) -> None:
    write_shards(tmp_path / "elsewhere", SAMPLES, ORDER, shard_bytes=2000)
    names = sorted(p.name for p in written.iterdir())
    assert names == sorted(p.name for p in (tmp_path / "elsewhere").iterdir())
    assert all((written / n).read_bytes() == (tmp_path / "elsewhere" / n).read_bytes() for n in names)


def test_whole_shards_pass(written: Path) -> None:
    assert verify_shards(written) == verify_shards(written, 100) == 100


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("truncate", r"shard\.\d+\.mds has \d+ bytes, index\.json says"),
        ("remove", r"shard\.\d+\.mds is missing"),
        ("stale", r"shard\.\d+\.mds is not listed in index\.json"),
        ("swap", r"shard\.\d+\.mds"),
        ("empty-index", r"index\.json is no index"),
    ],
)
def test_damage_is_named(copy: Path, shared: Path, how: str, message: str) -> None:
    """Case BL-28."""
    subprocess.run([sys.executable, str(shared / "cases" / "BL-28" / "damage.py"), str(copy), how], check=True, capture_output=True)
    with pytest.raises(ArtifactError, match=message):
        verify_shards(copy)


def test_one_changed_byte_is_named(copy: Path) -> None:
    path = sorted(copy.glob("*.mds"))[1]
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    with pytest.raises(ArtifactError, match=r"shard\.00001\.mds: its xxh64 is"):
        verify_shards(copy)


def test_other_totals(copy: Path) -> None:
    with pytest.raises(ArtifactError, match="lists 100 samples, the manifest says 101"):
        verify_shards(copy, 101)
    (copy / INDEX).unlink()
    with pytest.raises(ArtifactError, match=r"index\.json is missing"):
        Shards(copy)
    (copy / INDEX).write_text('{"version": 2, "shards": []}')
    with pytest.raises(ArtifactError, match="lists no shards"):
        verify_shards(copy)


def test_other_columns_are_refused(tmp_path: Path) -> None:
    writer = streaming().MDSWriter(columns={"text": "str"}, out=str(tmp_path / "s"), hashes=["xxh64"])
    writer.write({"text": "a"})
    writer.finish()
    with pytest.raises(ArtifactError, match="expected one, 'tokens'"):
        Shards(tmp_path / "s")


@pytest.fixture
def compressed(tmp_path: Path) -> Path:
    write_shards(tmp_path / "zstd", SAMPLES, ORDER, shard_bytes=2000, compression="zstd")
    return tmp_path / "zstd"


def test_compressed_shards_hold_the_same(compressed: Path, tmp_path: Path) -> None:
    assert {p.suffix for p in compressed.iterdir()} == {".zstd", ".json"}
    assert verify_shards(compressed, 100) == 100
    assert np.array_equal(Shards(compressed)[range(100)], SAMPLES[ORDER])
    code = (
        "import sys; from craw4llm.tokens.streaming_shim import streaming; s = streaming()\n"
        "d = s.StreamingDataset(remote=sys.argv[1], local=sys.argv[2], shuffle=False, batch_size=1, num_canonical_nodes=1)\n"
        "print([int(x['tokens'].sum()) for x in d])"
    )
    command = [sys.executable, "-c", code, str(compressed), str(tmp_path / "local")]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    assert json.loads(done.stdout) == SAMPLES[ORDER].sum(axis=1, dtype=np.int64).tolist()


@pytest.mark.parametrize("how", ["truncate", "remove", "stale", "swap", "empty-index"])
def test_damage_of_compressed_shards_is_named(compressed: Path, shared: Path, how: str) -> None:
    subprocess.run([sys.executable, str(shared / "cases" / "BL-28" / "damage.py"), str(compressed), how], check=True, capture_output=True)
    with pytest.raises(ArtifactError, match=r"index\.json is no index" if how == "empty-index" else r"shard\.\d+\.mds\.zstd"):
        verify_shards(compressed)
