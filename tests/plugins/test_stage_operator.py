"""The task that runs a stage: what it passes on, what it says about failures, and that nothing of it stays behind."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
from airflow.sdk.exceptions import AirflowException, AirflowFailException

from stage_operator import GUARD, StageOperator

RECORD = {"node": "crawl", "stage": "crawl", "fingerprint": "3f9c2a71b0de", "digest": "00", "path": "/p", "counts": {}, "built": True}
# A stage with a child of its own; both ignore SIGTERM. Writes their process ids to the file given.
STUBBORN = """
import os, signal, subprocess, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])  # SIG_IGN is inherited
with open(sys.argv[1] + ".tmp", "w") as stream:
    stream.write(f"{os.getpid()} {child.pid}")
os.rename(sys.argv[1] + ".tmp", sys.argv[1])
time.sleep(600)
"""


def operator(tmp_path: Path, grace_s: float = 5.0) -> StageOperator:
    return StageOperator(
        task_id="crawl",
        stage="crawl",
        experiment="tiny",
        replicates=2,
        parameters=("corpus", "pages", "share", "fast"),
        cwd=str(tmp_path),
        grace_s=grace_s,
    )


def python(code: str, *arguments: str) -> list[str]:
    return [sys.executable, "-c", code, *arguments]


def pids_in(path: Path) -> list[int]:
    wait_for(path.exists)
    return [int(text) for text in path.read_text().split()]


def wait_for(true: Callable[[], bool], seconds: float = 20.0) -> None:
    until = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < until, "it did not happen in time"
        time.sleep(0.05)


def gone(pids: list[int]) -> bool:
    return not any(psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE for pid in pids)


def test_values_become_single_arguments_and_nothing_is_interpreted(tmp_path: Path) -> None:
    hostile = "a b; $(touch x) {{ 1 + 1 }} `id` --root=/ \n= é"
    command = operator(tmp_path).command({"corpus": hostile, "pages": 60, "share": 3e-4, "fast": True, "unused": 1})
    assert command[1:3] == ["-m", "craw4llm"]
    assert command[3:] == [
        "run", "--json", "--jobs=1", "--only=crawl", "--replicates=2",
        "--set", f"corpus={hostile}", "--set", "pages=60", "--set", "share=0.0003", "--set", "fast=true", "--", "tiny",
    ]  # fmt: skip


def test_no_field_is_a_template() -> None:
    assert not StageOperator.template_fields


def test_an_empty_field_is_left_to_the_default(tmp_path: Path) -> None:
    command = operator(tmp_path).command({"corpus": None, "pages": 60, "share": 0.5, "fast": False})
    assert not any(argument.startswith("corpus=") for argument in command)


@pytest.mark.parametrize("text", ["nul \0", "half a pair \ud800"])
def test_a_text_that_no_argument_can_hold_is_refused_by_name(tmp_path: Path, text: str) -> None:
    with pytest.raises(AirflowFailException, match="corpus is"):
        operator(tmp_path).command({"corpus": text, "pages": 60, "share": 0.5, "fast": False})


def test_a_value_for_an_unknown_parameter_is_refused(tmp_path: Path) -> None:
    context: Any = {"dag_run": SimpleNamespace(conf={"page": 3}), "params": {}}
    with pytest.raises(AirflowFailException, match="no parameter page; it has: corpus, fast, pages, share"):
        operator(tmp_path).execute(context)


def test_the_artifact_comes_back_as_plain_values_and_all_else_goes_to_the_log(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    code = f"import sys; print('hello', file=sys.stderr); print('{{\"not\": 1}}'); print({json.dumps(RECORD)!r}); print('late')"
    task = operator(tmp_path)
    lines: list[str] = []
    task._say = lambda line, last: lines.append(line.rstrip())  # type: ignore[method-assign]
    assert task.run_command(python(code)) == RECORD
    assert sorted(lines) == ["hello", "late", '{"not": 1}']


def test_a_stage_sees_its_folder_and_none_of_airflows_settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AIRFLOW__API_AUTH__JWT_SECRET", "secret")
    monkeypatch.setenv("CRAW4LLM_ROOT", "/somewhere")
    code = f"import os, json; print(json.dumps({RECORD!r} | {{'path': [os.getcwd(), os.environ['CRAW4LLM_ROOT'], *os.environ]}}))"
    cwd, root, *names = operator(tmp_path).run_command(python(code))["path"]
    assert (cwd, root) == (str(tmp_path), "/somewhere")
    assert not [name for name in names if "AIRFLOW" in name]


ONE_OF_EACH = [(1, AirflowException), (5, AirflowException), (2, AirflowFailException), (3, AirflowFailException)]


@pytest.mark.parametrize(("code", "error"), ONE_OF_EACH)
def test_a_failure_says_the_last_lines_and_only_hopeless_ones_are_not_tried_again(tmp_path: Path, code: int, error: type) -> None:
    with pytest.raises(AirflowException, match=rf"crawl: exit code {code}[^0-9](.|\n)*no space left") as caught:
        operator(tmp_path).run_command(python(f"import sys; print('error: no space left', file=sys.stderr); sys.exit({code})"))
    assert type(caught.value) is error


def test_an_out_of_memory_kill_is_a_failure_that_says_so(tmp_path: Path) -> None:
    with pytest.raises(AirflowException, match=r"killed by signal 9 \(out of memory"):
        operator(tmp_path).run_command(python("import os; os.kill(os.getpid(), 9)"))


def test_a_crash_names_its_signal(tmp_path: Path) -> None:
    with pytest.raises(AirflowException, match="ended by SIGSEGV"):
        operator(tmp_path).run_command(python("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)"))


def test_success_without_an_artifact_is_a_failure(tmp_path: Path) -> None:
    with pytest.raises(AirflowException, match="did not say what it made"):
        operator(tmp_path).run_command(python("print('done')"))


def test_on_kill_lets_a_stage_save_and_ends_it(tmp_path: Path) -> None:
    code = """
import pathlib, signal, sys, time
def save(number, frame):
    pathlib.Path("saved").touch()
    sys.exit(130)
signal.signal(signal.SIGTERM, save)
pathlib.Path("started").touch()
time.sleep(600)
"""
    task = operator(tmp_path)
    threading.Thread(target=lambda: (wait_for((tmp_path / "started").exists), task.on_kill())).start()
    with pytest.raises(AirflowException, match="stopped on request"):
        task.run_command(python(code))
    assert (tmp_path / "saved").exists()


def test_what_ignores_sigterm_is_killed_with_its_children(tmp_path: Path) -> None:
    task = operator(tmp_path, grace_s=0.5)
    threading.Thread(target=lambda: (wait_for((tmp_path / "pids").exists), task.on_kill())).start()
    with pytest.raises(AirflowException, match="stopped on request"):
        task.run_command(python(STUBBORN, str(tmp_path / "pids")))
    wait_for(lambda: gone(pids_in(tmp_path / "pids")), seconds=5)


def test_on_kill_before_the_start_stops_the_stage_too(tmp_path: Path) -> None:
    task = operator(tmp_path, grace_s=0.5)
    task.on_kill()
    with pytest.raises(AirflowException, match="stopped on request"):
        task.run_command(python("import time; time.sleep(600)"))


def test_a_time_out_ends_the_stage(tmp_path: Path) -> None:
    """Airflow raises its time-out inside execute, from a signal's handler."""

    class TimeOut(BaseException):
        pass

    def raise_it(number: int, frame: object) -> None:
        raise TimeOut

    task = operator(tmp_path, grace_s=0.5)
    previous = signal.signal(signal.SIGALRM, raise_it)
    try:
        signal.setitimer(signal.ITIMER_REAL, 2)
        with pytest.raises(TimeOut):
            task.run_command(python(STUBBORN, str(tmp_path / "pids")))
    finally:
        signal.signal(signal.SIGALRM, previous)
    wait_for(lambda: gone(pids_in(tmp_path / "pids")), seconds=5)


def test_a_stage_that_leaves_a_process_behind_loses_it(tmp_path: Path) -> None:
    code = f"""
import subprocess, sys
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
open("pids", "w").write(str(child.pid))
print({json.dumps(RECORD)!r})
"""
    operator(tmp_path).run_command(python(code))
    wait_for(lambda: gone(pids_in(tmp_path / "pids")))


def test_the_stage_ends_when_the_task_is_killed_outright(tmp_path: Path) -> None:
    """As by the kernel's out-of-memory killer, or by a supervisor that has waited its five seconds."""
    code = (
        "import subprocess, sys\n"
        "p = subprocess.Popen([sys.executable, '-I', '-S', *sys.argv[1:]], stdin=subprocess.PIPE, start_new_session=True)\n"
        "p.wait()"
    )
    task = subprocess.Popen(python(code, str(GUARD), "0.5", *python(STUBBORN, str(tmp_path / "pids"))))
    pids = pids_in(tmp_path / "pids")
    guard = psutil.Process(task.pid).children()[0].pid
    os.kill(task.pid, signal.SIGKILL)
    task.wait()
    wait_for(lambda: gone([guard, *pids]))
