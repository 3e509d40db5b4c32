"""What holds for every kind of source: equal bytes for any number of workers, after kill -9, and after a disk that was full."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from craw4llm.configs import CorpusConfig, SyntheticWeb
from craw4llm.corpus import merge, stage
from craw4llm.corpus.build import FOLDER
from craw4llm.execution import Execution
from craw4llm.fingerprint import External
from tests.craw4llm.corpus import round_trip
from tests.craw4llm.corpus.clueweb22_writer import Doc, write_clueweb22

Digest = Callable[[Path], str]

HERE = Path(__file__).resolve().parents[3]


def written(kind: str, folder: Path) -> Path:
    """The 200 pages in this form; of an edge list as many nodes."""
    folder.mkdir()
    if kind == "edges":
        rng = np.random.default_rng(3)
        path = folder / "edges.parquet"
        pq.write_table(pa.table({"source": rng.integers(0, 5000, 40_000), "target": rng.integers(0, 5000, 40_000)}), path)
        return path
    if kind == "clueweb22":
        ids = [f"clueweb22-en00{k // 20:02}-00-{k % 20:05}" for k in range(200)]
        pages = zip(ids, round_trip.sample_pages(), strict=True)
        return write_clueweb22(folder, [Doc(one, page.url, page.text, [ids[hash_of(link)] for link in page.links]) for one, page in pages])
    return round_trip.WRITERS[kind].write(round_trip.sample_pages(), folder)


def hash_of(url: str) -> int:
    return sum(url.encode()) % 200


def config_of(kind: str, path: Path) -> CorpusConfig:
    if kind == "synthetic":
        return CorpusConfig(source=SyntheticWeb(pages=300, hosts=10))
    return CorpusConfig(source=External(name="corpus", path=str(path)))


def in_small_parts(monkeypatch: pytest.MonkeyPatch, records: int) -> None:
    opened = stage.open_source

    def open_source(*given: object) -> object:
        source = opened(*given)  # type: ignore[arg-type]
        object.__setattr__(source, "part_records", records)
        return source

    monkeypatch.setattr(stage, "open_source", open_source)


def built(kind: str, path: Path, out: Path, workers: int = 1) -> Path:
    out.mkdir(exist_ok=True)
    stage.run(config_of(kind, path), {}, out, Execution(workers=workers, report=lambda line: None))
    return out


@pytest.mark.parametrize(
    ("kind", "workers"), [("jsonl", (2, 3)), ("folder of jsonl.gz", (3,)), ("html_tree", (2, 3)), ("warc", (2,)), ("graph", (3,))]
)
def test_equal_bytes_for_any_number_of_workers(
    kind: str, workers: tuple[int, ...], tmp_path: Path, digest: Digest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """(Parquet, ClueWeb22, synthetic: in their own tests; a graph without texts is written by one process.)"""
    in_small_parts(monkeypatch, 40)
    path = written(kind, tmp_path / "source")
    expected = digest(built(kind, path, tmp_path / "one"))
    for number in workers:
        assert digest(built(kind, path, tmp_path / f"workers{number}", number)) == expected


KILLED = """
import os, signal, sys
from pathlib import Path
from craw4llm.configs import CorpusConfig
from craw4llm.corpus import parts
from craw4llm.execution import Execution
from craw4llm.fingerprint import External
from craw4llm.corpus import stage
kind, path, out, wanted = sys.argv[1:]
from tests.craw4llm.corpus.test_every_source import built, in_small_parts
class Patch:
    setattr = staticmethod(setattr)
in_small_parts(Patch, 40)
whole = parts.write
def dies(task):
    if task.number == int(wanted):
        os.kill(os.getpid(), signal.SIGKILL)
    return whole(task)
parts.write = dies
built(kind, Path(path), Path(out))
"""


@pytest.mark.parametrize("kind", ["jsonl", "folder of jsonl.gz", "html_tree", "warc", "graph", "synthetic"])
def test_killed_at_half_and_resumed(kind: str, tmp_path: Path, digest: Digest, monkeypatch: pytest.MonkeyPatch) -> None:
    """(Parquet and ClueWeb22: in their own tests.)"""
    in_small_parts(monkeypatch, 40)
    path = tmp_path if kind == "synthetic" else written(kind, tmp_path / "source")
    expected = digest(built(kind, path, tmp_path / "whole"))
    out = tmp_path / "out"
    one_part = kind in ("jsonl", "graph", "synthetic")  # small enough for one chunk: killed before it is written
    arguments = [sys.executable, "-c", KILLED, kind, str(path), str(out), "0" if one_part else "2"]
    done = subprocess.run(arguments, env={**os.environ, "PYTHONPATH": str(HERE)}, cwd=HERE, capture_output=True, text=True, check=False)
    assert done.returncode == -signal.SIGKILL, done.stderr
    left = {found.name: found.stat().st_mtime_ns for found in (out / FOLDER).glob("*.json")}
    assert len(left) == (0 if one_part else 2)
    seen: list[int] = []
    real = stage.build.__globals__["parts"].write

    def watched(task: object) -> object:
        seen.append(task.number)  # type: ignore[attr-defined]
        return real(task)

    monkeypatch.setattr(stage.build.__globals__["parts"], "write", watched)
    assert digest(built(kind, path, out)) == expected
    assert seen[0] == len(left) or kind in ("html_tree", "warc")  # these are read by child processes


FULL = """
import json, resource, sys
from pathlib import Path
from craw4llm import runner
from craw4llm.corpus import merge
from craw4llm.errors import StorageError
from craw4llm.execution import Execution
from tests.craw4llm.corpus.test_every_source import config_of
kind, path, folder = sys.argv[1:]
def build(root, limit):
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
    execution = Execution(root=Path(folder) / root, workers=1, report=lambda line: None)
    work = runner.single(config_of(kind, Path(path)), execution)
    try:
        runner.build(work, execution)
        return runner.built(work, execution).digest
    except StorageError as error:
        assert not (Path(folder) / root / "corpus" / work.fingerprint).exists()
        return str(error)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
said = {str(limit): build("full", limit) for limit in map(int, (1000, 4000, 8000, 12000, 16000, 24000, 40000, 80000))}
print(json.dumps([said, build("full", hard), build("whole", hard)]))
"""


@pytest.mark.parametrize("kind", ["parquet", "jsonl", "html_tree", "warc", "graph", "edges", "clueweb22"])
def test_a_full_disk_is_said_and_loses_nothing(kind: str, tmp_path: Path) -> None:
    """Files may grow to ever larger limits, so that every kind of file is the one that meets its limit: each time it is said, no artifact
    is there, and the build that has room goes on to the bytes of an undisturbed one."""
    path = written(kind, tmp_path / "source")
    arguments = [sys.executable, "-c", FULL, kind, str(path), str(tmp_path)]
    done = subprocess.run(arguments, env={**os.environ, "PYTHONPATH": str(HERE)}, cwd=HERE, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    said, resumed, whole = json.loads(done.stdout.splitlines()[-1])
    assert resumed == whole
    refused = [message for message in said.values() if message != whole]
    assert len(refused) >= 2
    assert all(message.startswith("no space left while writing ") for message in refused)


def test_a_merge_that_is_killed_goes_on(tmp_path: Path, digest: Digest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Buckets that were done are not done again, unless the machine was started anew since."""
    path = written("parquet", tmp_path / "source")
    config = config_of("parquet", path)
    execution = Execution(workers=1, memory_bytes=1 << 17, report=lambda line: None)

    def build(out: Path) -> str:
        out.mkdir(exist_ok=True)
        stage.run(config, {}, out, execution)
        return digest(out)

    expected = build(tmp_path / "whole")
    code = """
import os, signal, sys
from pathlib import Path
from craw4llm.corpus import merge, stage
from craw4llm.execution import Execution
from tests.craw4llm.corpus.test_every_source import config_of
path, out, name, number = sys.argv[1:]
real = getattr(merge, name)
def dies(given, b):
    if b == int(number):
        os.kill(os.getpid(), signal.SIGKILL)
    return real(given, b)
setattr(merge, name, dies)
Path(out).mkdir()
stage.run(config_of("parquet", Path(path)), {}, Path(out), Execution(workers=1, memory_bytes=1 << 17, report=print))
"""

    def killed(out: Path, name: str, number: int) -> int:
        arguments = [sys.executable, "-c", code, str(path), str(out), name, str(number)]
        return subprocess.run(arguments, env={**os.environ, "PYTHONPATH": str(HERE)}, cwd=HERE, check=False).returncode

    done_again: list[str] = []
    for function in (merge._sort_pages, merge._resolve):
        plain = function.__wrapped__  # type: ignore[attr-defined]

        def counting(given: object, b: int, plain: Callable[..., tuple[int, ...]] = plain) -> tuple[int, ...]:
            done_again.append(f"{plain.__name__.strip('_')}-{b:06}.json")
            return plain(given, b)

        counting.__name__ = plain.__name__
        monkeypatch.setattr(merge, plain.__name__, merge._once(counting))
    for name, number, least in (("_sort_pages", 2, 2), ("_resolve", 1, 4), ("_rows", 3, 6)):
        out = tmp_path / name
        assert killed(out, name, number) == -signal.SIGKILL
        kept = {found.name for found in (out / merge.FOLDER).glob("*-*.json")}
        assert len(kept) >= least
        done_again.clear()
        assert build(out) == expected
        assert not set(done_again) & kept
        assert bool(done_again) == (name != "_rows")
    out = tmp_path / "elsewhere"
    assert killed(out, "_rows", 0) == -signal.SIGKILL
    (out / merge.FOLDER / "urls-000001").write_bytes(b"lost with the power")
    (tmp_path / "boot").write_text("another boot")
    monkeypatch.setattr(merge, "BOOT", tmp_path / "boot")
    assert build(out) == expected
