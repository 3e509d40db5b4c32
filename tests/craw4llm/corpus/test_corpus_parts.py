"""Parts, runs and buckets: equal bytes however the work is cut, killed and resumed."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner

from craw4llm.configs import CorpusConfig
from craw4llm.corpus import merge, parts
from craw4llm.corpus.build import FOLDER, build, build_part
from craw4llm.corpus.parquet import open_parquet
from craw4llm.corpus.stage import run
from craw4llm.execution import Execution
from craw4llm.fingerprint import External

WriteParquet = Callable[..., Path]
Digest = Callable[[Path], str]


@pytest.fixture
def web(parquet: WriteParquet) -> Path:
    """3,000 rows with links of every kind, repeats of URLs, rejects; in 30 row groups."""
    rows: list[tuple[object, object, object]] = []
    for k in range(3000):
        url = f"https://h{k % 7}.example/{k * 7919 % 2900:05}" if k < 2900 else rows[k - 2900][0]  # 100 repeats
        links = [f"/{k * 31 % 2900:05}", f"https://h{k % 5}.example/{k % 2900:05}", f"https://gone.example/{k % 99}", "mailto:x"]
        rows.append(("nonsense" if k % 200 == 5 else url, f"text {k} " * (k % 40), links))
    anchors = [[f"anchor {k % 50}", None, "", "mail"] for k in range(3000)]
    flags = [[k % 16, 1, 2, 0] for k in range(3000)]
    return parquet(rows, extra={"anchors": anchors, "link_flags": flags}, row_group_size=100)


def config_of(path: Path) -> CorpusConfig:
    return CorpusConfig(source=External(name="corpus", path=str(path)))


def quiet(workers: int = 1, memory_bytes: int = 1 << 30) -> Execution:
    return Execution(workers=workers, memory_bytes=memory_bytes, report=lambda line: None)


def built(path: Path, out: Path, execution: Execution, part_records: int = 4096) -> Path:
    out.mkdir(exist_ok=True)
    source = open_parquet(path)
    object.__setattr__(source, "part_records", part_records)
    build(source, out, config_of(path), execution)
    return out


def test_equal_bytes_for_any_parts_runs_buckets_and_workers(
    web: Path, tmp_path: Path, digest: Digest, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = digest(built(web, tmp_path / "whole", quiet()))
    assert len(pq.read_table(tmp_path / "whole" / "rejects.parquet")) > 50
    seen: dict[str, int] = {}
    real = merge._bounds

    def watched(runs: object, kind: str, splitters: list[str]) -> object:
        seen["runs"], seen["buckets"] = len(runs), len(splitters) + 1  # type: ignore[arg-type]
        return real(runs, kind, splitters)  # type: ignore[arg-type]

    monkeypatch.setattr(merge, "_bounds", watched)
    assert digest(built(web, tmp_path / "parts", quiet(), 100)) == expected
    assert seen == {"runs": 30, "buckets": 1}
    assert digest(built(web, tmp_path / "small", quiet(memory_bytes=1 << 20), 700)) == expected
    assert seen["runs"] > 5
    assert seen["buckets"] > 5  # more memory than that is not taken, so the sort is external
    monkeypatch.setattr(merge, "POOL_FROM_BYTES", 0)
    monkeypatch.setattr(merge, "ROW_GROUP_PAGES", 65_536)
    for workers in (2, 3):
        assert digest(built(web, tmp_path / f"workers{workers}", quiet(workers, 2 << 20), 400)) == expected


def test_row_groups_do_not_depend_on_buckets(web: Path, tmp_path: Path, digest: Digest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(merge, "ROW_GROUP_PAGES", 64)
    one = built(web, tmp_path / "one", quiet())
    many = built(web, tmp_path / "many", quiet(memory_bytes=1 << 19), 300)
    assert pq.ParquetFile(one / "pages.parquet").num_row_groups > 40
    assert digest(one) == digest(many)


def test_finished_parts_are_taken_up_and_damaged_ones_are_not(
    web: Path, tmp_path: Path, digest: Digest, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = digest(built(web, tmp_path / "whole", quiet()))
    source = open_parquet(web)
    object.__setattr__(source, "part_records", 500)
    out = tmp_path / "out"
    out.mkdir()
    assert build_part(source, out, config_of(web), quiet(), part=1, of=2) == 1500
    assert sorted(p.name for p in (out / FOLDER).glob("*.json")) == ["000000.json", "000002.json", "000004.json"]
    with (out / FOLDER / "000002-000.text").open("r+b") as stream:
        stream.seek(100)
        stream.write(b"damaged")
    (out / "pages.parquet").write_bytes(b"of an attempt that was killed while it merged")
    written: list[int] = []
    real = parts.write

    def watched(task: parts.Task) -> parts.Part:
        written.append(task.number)
        return real(task)

    monkeypatch.setattr(parts, "write", watched)
    build(source, out, config_of(web), quiet())
    assert written == [1, 2, 3, 5]
    assert digest(out) == expected


def test_killed_at_half_and_resumed(web: Path, tmp_path: Path, digest: Digest) -> None:
    expected = digest(built(web, tmp_path / "whole", quiet()))
    out = tmp_path / "out"
    out.mkdir()
    code = (
        "import sys, time; from pathlib import Path\n"
        "from craw4llm.corpus import parts, build; from craw4llm.corpus.parquet import open_parquet\n"
        "from craw4llm.configs import CorpusConfig; from craw4llm.execution import Execution; from craw4llm.fingerprint import External\n"
        "path, out = sys.argv[1:]; write = parts.write\n"
        "def slow(task):\n    time.sleep(0.1); return write(task)\n"
        "parts.write = slow; source = open_parquet(Path(path)); object.__setattr__(source, 'part_records', 100)\n"
        "build.build(source, Path(out), CorpusConfig(source=External(name='corpus', path=path)), Execution(workers=1, report=print))\n"
    )
    process = subprocess.Popen([sys.executable, "-c", code, str(web), str(out)], cwd=os.getcwd())
    deadline = time.monotonic() + 60
    while len(list(out.glob("parts/*.json"))) < 15 and time.monotonic() < deadline:
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL
    left = {path.name: path.stat().st_mtime_ns for path in out.glob("parts/*.json")}
    assert 15 <= len(left) < 30
    source = open_parquet(web)
    object.__setattr__(source, "part_records", 100)
    tasks = parts.plan_parts(source, out / FOLDER, config_of(web), 1 << 28)
    assert sum(parts.find(task) is not None for task in tasks) == len(left)
    build(source, out, config_of(web), quiet())
    assert digest(out) == expected


def test_a_share_of_a_stage_from_the_command_line(web: Path, tmp_path: Path, digest: Digest) -> None:
    from craw4llm.__main__ import cli

    model = tmp_path / "model.bin"
    model.write_bytes(b"not read when the corpus is built")
    root = tmp_path / "root"
    base = ["run", "tiny", "--root", str(root), "--set", f"corpus={web}", "--set", f"scorer={model}", "--workers", "1"]
    runner = CliRunner()
    for part in ("2/2", "1/2"):
        done = runner.invoke(cli, [*base, "--only", "corpus", "--part", part, "--json"], catch_exceptions=False)
        assert json.loads(done.output.splitlines()[-1])["part"] == [int(n) for n in part.split("/")]
    partial = next((root / "corpus").glob(".partial-*"))
    expected = partial / FOLDER
    assert list(expected.glob("*.json"))
    runner.invoke(cli, [*base, "--only", "corpus", "--memory", "4M"], catch_exceptions=False)
    artifact = next(p for p in (root / "corpus").iterdir() if not p.name.startswith("."))
    assert not (artifact / FOLDER).exists()
    again = runner.invoke(cli, [*base, "--only", "corpus", "--part", "1/2"], catch_exceptions=False)
    assert "the stage is finished" in again.output
    out = tmp_path / "out"
    out.mkdir()
    run(CorpusConfig(**{**config_of(web).__dict__, "dangling_links": "outside", "heldout_fraction": 0.07}), {}, out, quiet())
    (artifact / "manifest.json").unlink()
    assert digest(artifact) == digest(out)
    shutil.rmtree(root)
    for arguments, message in (
        (["--part", "1/2"], "--part 1/2 needs --only with one stage"),
        (["--only", "report", "--part", "1/2"], "is not made in parts"),
    ):
        failed = runner.invoke(cli, [*base, *arguments])
        assert message in str(failed.exception)


def test_a_mark_that_another_share_takes_away_first(web: Path, tmp_path: Path, digest: Digest, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "out"
    (out / FOLDER).mkdir(parents=True)
    mark = out / FOLDER / "000003.elsewhere-7.reading"
    mark.write_text("rows 300 to 399")
    real = Path.glob

    def glob(self: Path, pattern: str) -> list[Path]:
        found = list(real(self, pattern))
        if pattern == "*.reading":
            mark.unlink(missing_ok=True)
        return found

    monkeypatch.setattr(Path, "glob", glob)
    assert digest(built(web, out, quiet())) == digest(built(web, tmp_path / "alone", quiet()))


def test_few_results_of_a_pass_wait_in_memory() -> None:
    submitted: list[int] = []

    class Pool:
        def submit(self, function: Callable[[str, int], int], job: str, number: int) -> Future[int]:
            submitted.append(number)
            future: Future[int] = Future()
            future.set_result(function(job, number))
            return future

    workers = merge._Workers(quiet(workers=3))
    workers._pool = Pool()
    seen = []
    for taken in workers.map(lambda job, number: number * len(job), "ab", range(100)):
        seen.append(taken)
        assert len(submitted) - len(seen) <= 3
    assert seen == [2 * number for number in range(100)]
