"""Pools of processes: they end with their parent, and a job that catches SIGTERM keeps nobody waiting."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from craw4llm.processes import worker_pool

PROGRAM = """
import os, signal, sys, time
from pathlib import Path
from craw4llm.processes import worker_pool

def save_and_end(folder):
    asked = []
    signal.signal(signal.SIGTERM, lambda *_: asked.append(1))
    Path(folder, f"busy-{os.getpid()}").touch()
    while not asked:
        time.sleep(0.05)
    time.sleep(1)
    Path(folder, "saved").touch()

def idle(folder):
    Path(folder, f"idle-{os.getpid()}").touch()

if __name__ == "__main__":
    folder = sys.argv[1]
    with worker_pool(2) as pool:
        pool.submit(save_and_end, folder)
        pool.submit(idle, folder).result()
        while not list(Path(folder).glob("busy-*")):
            time.sleep(0.05)
        time.sleep(0.5)          # the idle worker waits for work now, and holds the lock of the queue
        if sys.argv[2] == "wait":
            time.sleep(600)
        raise KeyboardInterrupt
"""


def run(folder: Path, how: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, _program(folder), str(folder), how], stderr=subprocess.DEVNULL, cwd=os.getcwd())


def _program(folder: Path) -> str:
    path = folder / "program.py"
    path.write_text(PROGRAM)
    return str(path)


def workers(folder: Path) -> list[int]:
    return [int(path.name.partition("-")[2]) for path in folder.glob("*-*")]


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def gone(pids: list[int], within_s: float) -> bool:
    until = time.monotonic() + within_s
    while any(map(is_running, pids)) and time.monotonic() < until:
        time.sleep(0.1)
    return not any(map(is_running, pids))


def test_a_job_that_catches_sigterm_is_finished_and_then_all_end(tmp_path: Path) -> None:
    process = run(tmp_path, "interrupt")
    assert process.wait(timeout=60) != 0
    assert (tmp_path / "saved").exists()
    assert workers(tmp_path) and gone(workers(tmp_path), 20)


def test_workers_end_with_a_killed_parent(tmp_path: Path) -> None:
    process = run(tmp_path, "wait")
    until = time.monotonic() + 60
    while len(workers(tmp_path)) < 2 and time.monotonic() < until:
        time.sleep(0.1)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert len(workers(tmp_path)) == 2 and gone(workers(tmp_path), 20)


def test_results_errors_and_order() -> None:
    with worker_pool(2) as pool:
        assert list(pool.map(abs, range(-5, 0))) == [5, 4, 3, 2, 1]
        with pytest.raises(ZeroDivisionError):
            pool.submit(divmod, 1, 0).result()
