"""A build of the whole beside live shares of it, in real processes that share a root: none takes the other's files away."""

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from craw4llm import browse, runner
from craw4llm.artifact import Store
from craw4llm.configs import CorpusConfig
from craw4llm.execution import Execution
from craw4llm.fingerprint import External

WriteParquet = Callable[..., Path]

# argv: corpus, root, a file whose appearance lets the work go on, then nothing (the whole) or a share "1 2".
SCRIPT = """
import logging, sys, time
from pathlib import Path
from craw4llm import runner
from craw4llm.configs import CorpusConfig
from craw4llm.corpus import build, merge, parquet, parts
from craw4llm.execution import Execution
from craw4llm.fingerprint import External
path, root, go, *share = sys.argv[1:]
logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stdout)
def slowly(function):
    def run(*given):
        print("at work", flush=True)
        while not Path(go).exists():
            time.sleep(0.02)
        return function(*given)
    return run
parts.write, build.merge = slowly(parts.write), slowly(build.merge)
opened = parquet.open_parquet
def small(*given, **named):
    source = opened(*given, **named)
    object.__setattr__(source, "part_records", 100)
    return source
import craw4llm.corpus.stage as stage
stage.open_parquet = small
execution = Execution(root=Path(root), workers=1, report=lambda line: None)
work = runner.single(CorpusConfig(source=External(name="corpus", path=path)), execution)
print(runner.build_share(work, execution, *map(int, share)) if share else runner.build(work, execution), flush=True)
"""


@pytest.fixture
def web(parquet: WriteParquet) -> Path:
    rows = [(f"https://h{k % 3}.example/{k:04}", f"text {k}", [f"/{(k * 7) % 800:04}"]) for k in range(800)]
    return parquet(rows, row_group_size=100)


class Started:
    """Processes of the script, ended with the test."""

    def __init__(self, web: Path, root: Path) -> None:
        self.web, self.root = web, root
        self.processes: list[subprocess.Popen[str]] = []

    def __call__(self, *share: int) -> "subprocess.Popen[str]":
        here = Path(__file__).resolve().parents[3]
        arguments = [sys.executable, "-c", SCRIPT, str(self.web), str(self.root), str(self.root / "go"), *map(str, share)]
        env = {**os.environ, "PYTHONPATH": str(here)}
        process = subprocess.Popen(arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env, cwd=here)
        self.processes.append(process)
        return process

    def go_on(self) -> None:
        (self.root / "go").touch()


@pytest.fixture
def start(web: Path, tmp_path: Path) -> Iterator[Started]:
    started = Started(web, tmp_path / "root")
    yield started
    for process in started.processes:
        process.kill()
        process.communicate()


def first_line(process: "subprocess.Popen[str]") -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def last_line(process: "subprocess.Popen[str]") -> str:
    out, err = process.communicate(timeout=300)
    assert process.returncode == 0, err
    return out.splitlines()[-1]


def digests(web: Path, root: Path, alone: Path) -> tuple[str, str]:
    """Of the corpus in `root`, and of one that is built undisturbed."""
    config = CorpusConfig(source=External(name="corpus", path=str(web)))
    found = []
    for one in (root, alone):
        execution = Execution(root=one, workers=1, report=lambda line: None)
        work = runner.single(config, execution)
        runner.build(work, execution)
        found.append(runner.built(work, execution).digest)
    return found[0], found[1]


def test_the_whole_waits_for_a_live_share(start: Started, web: Path, tmp_path: Path) -> None:
    """Without waiting, the whole merges what the share has finished and deletes the folder under its hands."""
    share = start(1, 2)
    assert first_line(share) == "at work"
    whole = start()
    assert f"part-1-of-2 is being built by process {share.pid}" in first_line(whole)
    start.go_on()
    assert last_line(share) == "400 records prepared"
    assert last_line(whole) == "True"
    built, alone = digests(web, start.root, tmp_path / "alone")
    assert built == alone


def test_a_share_waits_for_a_live_build_of_the_whole(start: Started, web: Path, tmp_path: Path) -> None:
    whole = start()
    assert first_line(whole) == "at work"
    shares = [start(1, 3), start(3, 3)]
    for share in shares:
        assert f"is being built by process {whole.pid}" in first_line(share)
    start.go_on()
    assert [last_line(share) for share in shares] == ["the stage was finished by another process"] * 2
    assert last_line(whole) == "True"
    built, alone = digests(web, start.root, tmp_path / "alone")
    assert built == alone


def test_a_killed_share_holds_nobody_up(start: Started, web: Path, tmp_path: Path) -> None:
    share = start(2, 2)
    assert first_line(share) == "at work"
    share.send_signal(signal.SIGKILL)
    share.wait()
    built, alone = digests(web, start.root, tmp_path / "alone")
    assert built == alone


def test_what_a_live_share_makes_is_no_garbage(start: Started) -> None:
    share = start(1, 2)
    assert first_line(share) == "at work"
    store = Store(start.root)
    partial = next((start.root / "corpus").glob(".partial-*"))
    assert "1 folders are being written by other processes" in browse.collect_garbage(store, delete=True, forget=())
    start.go_on()
    assert last_line(share) == "400 records prepared"
    assert list(partial.glob("parts/*.json"))
    assert "deleted" in browse.collect_garbage(store, delete=True, forget=())
    assert not partial.exists()
