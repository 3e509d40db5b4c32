"""What a part of Airflow leaves behind when it is killed: idle workers are ended, those that run a task go on until they are idle."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import airflow_env
import psutil
import pytest

sys.path.insert(0, str(airflow_env.PROJECT / "scripts"))
import airflow_server

# A leader with three children, named as LocalExecutor names its workers: one idle, one at work, one that says idle but has a child yet.
PART = """
exec -a "airflow worker -- LocalExecutor: <idle>" sleep 300 &
exec -a "airflow worker -- LocalExecutor: 01a2-task" sleep 301 &
bash -c 'sleep 302; true' "airflow worker -- LocalExecutor: <idle>" &
echo ready
wait
"""


@pytest.fixture
def killed() -> Iterator[dict[str, float]]:
    """Identity of a part that was killed by signal 9, with its workers."""
    part = subprocess.Popen(["bash", "-c", PART], stdout=subprocess.PIPE, start_new_session=True)
    assert part.stdout is not None and part.stdout.readline() == b"ready\n"
    known = airflow_server.identity(part.pid)
    until = time.monotonic() + 20
    while len(psutil.Process(part.pid).children(recursive=True)) < 4:
        assert time.monotonic() < until
        time.sleep(0.05)
    part.kill()
    part.wait()
    part.stdout.close()
    yield known
    with contextlib.suppress(ProcessLookupError):
        os.killpg(part.pid, signal.SIGKILL)


def arguments(session: dict[str, float]) -> set[str]:
    """Last arguments of the living members."""
    found = set()
    for process in airflow_server.members_of(session):
        with contextlib.suppress(psutil.NoSuchProcess):
            found.update(process.cmdline()[-1:])  # one that is just ending has none
    return found


def soon(session: dict[str, float], wanted: set[str]) -> bool:
    until = time.monotonic() + 10
    while (found := arguments(session)) != wanted and time.monotonic() < until:
        time.sleep(0.05)
    return found == wanted


AT_WORK = {"301", "302", "airflow worker -- LocalExecutor: <idle>"}


def test_idle_workers_of_a_scheduler_end_and_others_go_on_until_they_are_idle(killed: dict[str, float]) -> None:
    session = {**killed, "part": "scheduler"}
    assert soon(session, AT_WORK | {"300"})
    assert airflow_server.end_idle([session]) == [session]
    assert soon(session, AT_WORK), "the idle one has ended"
    next(p for p in airflow_server.members_of(session) if p.cmdline()[-1:] == ["302"]).kill()
    assert soon(session, {"301"}), "bash ends with its child"
    assert airflow_server.end_idle([session]) == [session]
    assert arguments(session) == {"301"}
    airflow_server.members_of(session)[0].kill()
    assert soon(session, set())
    assert airflow_server.end_idle([session]) == []


def test_of_other_parts_all_is_ended(killed: dict[str, float]) -> None:
    session = {**killed, "part": "triggerer"}
    airflow_server.end_idle([session])
    assert soon(session, set())


@pytest.mark.parametrize("where", ["parts", "bereft"])
def test_after_the_server_was_killed_too_the_next_start_ends_them(
    killed: dict[str, float], where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CRAW4LLM_ROOT", str(tmp_path / "artifacts"))
    session = {**killed, "part": "scheduler"}
    state = {"boot": airflow_server.boot(), "parts": {"scheduler": killed} if where == "parts" else {}, "bereft": [session]}
    (tmp_path / "server.json").write_text(json.dumps(state if where == "bereft" else {**state, "bereft": []}))
    assert airflow_server.end_leftovers(tmp_path)
    assert soon(session, set())
    assert not airflow_server.end_leftovers(tmp_path)


def test_ids_of_another_boot_or_of_a_later_process_are_left_alone(
    killed: dict[str, float], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CRAW4LLM_ROOT", str(tmp_path / "artifacts"))
    state = {"boot": "another", "parts": {"scheduler": killed}, "bereft": []}
    (tmp_path / "server.json").write_text(json.dumps(state))
    assert not airflow_server.end_leftovers(tmp_path)
    later = {"pid": killed["pid"], "started": killed["started"] + 60}
    assert airflow_server.members_of(later) == []
    assert len(airflow_server.members_of(killed)) == 4


def test_two_parts_that_die_at_once_are_recorded(tmp_path: Path) -> None:
    """The second is dead and reaped while the first is started again: its identity can no longer be asked for."""
    parts = {name: subprocess.Popen(["sleep", "60"], start_new_session=True) for name in ("scheduler", "triggerer")}
    airflow_server.record(tmp_path, 1, parts, [])
    known = json.loads((tmp_path / "server.json").read_text())["parts"]
    for part in parts.values():
        part.kill()
        part.wait()
    airflow_server.record(tmp_path, 1, parts, [])
    assert json.loads((tmp_path / "server.json").read_text())["parts"] == known
