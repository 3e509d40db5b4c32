"""The task that runs a stage: what it passes on, how it follows its job, what it says about failures, and what it publishes."""

import dataclasses
import json
import math
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import airflow_env
import psutil
import pytest
from airflow.sdk import Asset, AssetAlias
from airflow.sdk.exceptions import AirflowException, AirflowFailException

import stage_job
import stage_operator
from launchers import LocalLauncher
from stage_operator import StageOperator, inert, job_folder, republished

sys.path.insert(0, str(airflow_env.PROJECT / "scripts"))
import airflow_kills

PARAMETERS = ("corpus", "pages", "share", "fast")
VALUES = {"corpus": "web", "pages": 60, "share": 0.5, "fast": False}


class Command(StageOperator):
    """Runs any Python code instead of a stage."""

    code = ""
    arguments: tuple[str, ...] = ()

    def command(self, params: Any) -> list[str]:
        return [sys.executable, "-c", self.code, *self.arguments]


class Store(dict[str, Any]):
    """Airflow's task state."""

    def set(self, key: str, value: Any) -> None:
        self[key] = json.loads(json.dumps(value))

    def delete(self, key: str) -> None:
        self.pop(key, None)


def operator(tmp_path: Path, code: str = "", *arguments: str, kind: type[StageOperator] = Command, **more: Any) -> Any:
    task = kind(
        task_id="crawl", stage="crawl", experiment="tiny", replicates=2, parameters=PARAMETERS, cwd=str(tmp_path), **more
    )  # fmt: skip
    if isinstance(task, Command):
        task.code, task.arguments = code, arguments
    return task


def context(store: Store | None = None, *, attempt: int = 1, cleared: int = 0, conf: dict[str, Any] | None = None) -> dict[str, Any]:
    ti = SimpleNamespace(dag_id="tiny", run_id="manual__2026 ../../x", task_id="crawl", map_index=-1, try_number=attempt, stats_tags={})
    run = SimpleNamespace(conf=conf or {}, clear_number=cleared)
    return {"ti": ti, "dag_run": run, "params": VALUES, "task_state_store": Store() if store is None else store, "outlet_events": {}}


def record(path: Path) -> dict[str, Any]:
    """What `craw4llm run --json` prints, with an artifact behind it."""
    path.mkdir(parents=True, exist_ok=True)
    (path / "manifest.json").write_text("{}")
    return {
        "node": "crawl", "stage": "crawl", "fingerprint": "3f9c2a71b0de", "digest": "00", "path": str(path),
        "counts": {"pages": 3, "mean_score": None}, "built": True,
    }  # fmt: skip


def prints(made: dict[str, Any], before: str = "") -> str:
    return f"{before}\nprint({json.dumps(made)!r})"


def wait_for(true: Callable[[], Any], seconds: float = 20.0) -> None:
    until = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < until, "it did not happen in time"
        time.sleep(0.02)


@pytest.fixture(autouse=True)
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CRAW4LLM_ROOT", str(tmp_path / "artifacts"))
    monkeypatch.delenv("CRAW4LLM_WARM_START", raising=False)


def jobs(tmp_path: Path) -> list[Path]:
    return sorted((tmp_path / "artifacts").glob("logs/jobs/tiny/*/crawl/0*"))


# --- what it passes on


def test_values_become_single_arguments_and_nothing_is_interpreted(tmp_path: Path) -> None:
    hostile = "a b; $(touch x) {{ 1 + 1 }} `id` --root=/ \n= é"
    params = {"corpus": hostile, "pages": 60, "share": 3e-4, "fast": True, "unused": 1}
    command = operator(tmp_path, kind=StageOperator).command(params)
    assert command[1:3] == ["-m", "craw4llm"]
    assert command[3:] == [
        "run", "--json", "--jobs=1", "--only=crawl", "--replicates=2",
        "--set", f"corpus={hostile}", "--set", "pages=60", "--set", "share=0.0003", "--set", "fast=true", "--", "tiny",
    ]  # fmt: skip


def test_no_value_of_a_run_is_a_template() -> None:
    assert not {"parameters", "fields", "params", "cwd"} & set(StageOperator.template_fields)


def test_a_list_and_an_empty_field(tmp_path: Path) -> None:
    command = operator(tmp_path, kind=StageOperator).command(VALUES | {"corpus": None, "pages": ["quality", "random"]})
    assert not any(argument.startswith("corpus=") for argument in command)
    assert "pages=quality,random" in command


def test_a_part_and_another_node(tmp_path: Path) -> None:
    command = operator(tmp_path, kind=StageOperator, node="quality.crawl", part="2/8").command(VALUES)
    assert {"--only=quality.crawl", "--part=2/8"} <= set(command)


@pytest.mark.parametrize("text", ["nul \0", "half a pair \ud800"])
def test_a_text_that_no_argument_can_hold_is_refused_by_name(tmp_path: Path, text: str) -> None:
    with pytest.raises(AirflowFailException, match="corpus is"):
        operator(tmp_path, kind=StageOperator).command(VALUES | {"corpus": text})


def test_a_value_for_an_unknown_parameter_is_refused(tmp_path: Path) -> None:
    with pytest.raises(AirflowFailException, match="no parameter page; it has: corpus, fast, pages, share"):
        operator(tmp_path).execute(context(conf={"page": 3}))


def test_the_id_of_a_run_is_no_path(tmp_path: Path) -> None:
    folder = job_folder(tmp_path, context()["ti"])
    assert folder.resolve().is_relative_to(tmp_path / "artifacts" / "logs" / "jobs" / "tiny")
    assert len(folder.relative_to(tmp_path / "artifacts" / "logs" / "jobs").parts) == 3


def test_a_stage_sees_its_folder_and_none_of_airflows_settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AIRFLOW__API_AUTH__JWT_SECRET", "secret")
    made = record(tmp_path / "made")
    code = f"import os, json; open('seen', 'w').write(json.dumps([os.getcwd(), *os.environ])); print({json.dumps(made)!r})"
    operator(tmp_path, code).execute(context())
    cwd, *names = json.loads((tmp_path / "seen").read_text())
    assert cwd == str(tmp_path) and "CRAW4LLM_ROOT" in names
    assert not [name for name in names if "AIRFLOW" in name]
    assert "secret" not in "".join(p.read_text() for p in jobs(tmp_path)[0].iterdir())


# --- what comes back


def test_the_artifact_comes_back_as_small_plain_values_and_all_else_goes_to_the_log(tmp_path: Path) -> None:
    made = record(tmp_path / "made")
    task = operator(
        tmp_path, prints(made, "import sys; print('hello', file=sys.stderr); print('::group::x \\x1b[31m'); print('{\"not\": 1}')")
    )
    lines: list[str] = []
    task._say = lambda line, last: lines.append(inert(line)) if not line.startswith('{"node') else None
    found = task.execute(context())
    assert found["counts"] == {"pages": 3} and list(found["missing"]) == ["mean_score"]
    assert {name: found[name] for name in ("fingerprint", "path", "built")} == {
        name: made[name] for name in ("fingerprint", "path", "built")
    }
    assert json.loads(json.dumps(found, allow_nan=False)) == found
    assert sorted(lines) == [": :group::x \\x1b[31m", "hello", '{"not": 1}']


def test_a_number_that_is_none_is_missing_with_a_reason(tmp_path: Path) -> None:
    made = record(tmp_path / "made") | {"counts": {"pages": 3, "mean_score": math.nan, "worst": -math.inf, "core": None}}
    found = operator(tmp_path, prints(made)).execute(context())
    assert found["counts"] == {"pages": 3}
    assert found["missing"] == {
        "mean_score": "it is nan, no number", "worst": "it is -inf, no number", "core": "the stage has no value for it",
    }  # fmt: skip
    json.dumps(found, allow_nan=False)


def test_a_stage_publishes_where_its_manifest_is_and_its_counts(tmp_path: Path) -> None:
    made = record(tmp_path / "made")
    outlet, events = Asset(name="a", uri="x-craw4llm://tiny/crawl"), {}
    events[outlet] = SimpleNamespace(extra={})
    operator(tmp_path, prints(made), outlets=[outlet]).execute(context() | {"outlet_events": events})
    assert events[outlet].extra["manifest"] == f"{made['path']}/manifest.json"
    assert events[outlet].extra["fingerprint"] == "3f9c2a71b0de" and events[outlet].extra["counts"] == {"pages": 3}


def test_a_corpus_is_news_when_its_content_has_changed(tmp_path: Path) -> None:
    assert [republished(tmp_path, "craw4llm corpus 1", print_) for print_ in ("aa", "aa", "bb", "bb", "aa")] == [
        False,
        False,
        True,
        False,
        True,
    ]
    alias, added = AssetAlias("craw4llm corpus 1"), []
    events = {alias: SimpleNamespace(add=lambda asset, extra: added.append((asset.uri, extra["fingerprint"])))}
    republished(tmp_path / "artifacts", alias.name, "another")
    operator(tmp_path, prints(record(tmp_path / "made")), outlets=[alias]).execute(context() | {"outlet_events": events})
    assert added == [("x-craw4llm://published/corpus/1", "3f9c2a71b0de")]


FAILURES = [(1, AirflowException), (5, AirflowException), (2, AirflowFailException), (3, AirflowFailException)]


@pytest.mark.parametrize(("code", "error"), FAILURES)
def test_a_failure_says_the_last_lines_and_only_hopeless_ones_are_not_tried_again(tmp_path: Path, code: int, error: type) -> None:
    with pytest.raises(AirflowException, match=rf"crawl: exit code {code}[^0-9](.|\n)*no space left") as caught:
        operator(tmp_path, f"import sys; print('error: no space left', file=sys.stderr); sys.exit({code})").execute(context())
    assert type(caught.value) is error


@pytest.mark.parametrize(
    ("number", "expected"), [(signal.SIGKILL, r"killed by signal 9.*\(peak memory"), (signal.SIGSEGV, "ended by SIGSEGV")]
)
def test_a_crash_is_a_failure_that_names_its_signal(tmp_path: Path, number: int, expected: str) -> None:
    with pytest.raises(AirflowException, match=expected):
        operator(tmp_path, f"import os; os.kill(os.getpid(), {int(number)})").execute(context())


def test_an_out_of_memory_kill_is_never_a_success(tmp_path: Path) -> None:
    outcome = stage_operator.Outcome(code=None, signal=9, stopped="", out_of_memory=True, peak_memory_bytes=3 << 30, output=())
    assert "out-of-memory killer ended it or one of its processes (peak memory of one process: 3.00 GiB)" in str(
        stage_operator.failure("crawl", outcome, ["step 3"])
    )
    for code in (2, 3, 75):  # it said itself why it ended: the kernel's victim was another process
        other = stage_operator.failure("crawl", dataclasses.replace(outcome, code=code, signal=None), [])
        assert "out of memory" not in str(other)


TAKES = """
import pathlib, time
pathlib.Path("started").touch()
while not pathlib.Path("go").exists():
    time.sleep(0.02)
taken = [bytearray(b"x" * (1 << 20)) for _ in range(256)]
"""


def test_a_stage_that_the_kernel_kills_for_want_of_memory_fails_with_this_cause(tmp_path: Path) -> None:
    """For real: its job is put into a control group of 64 MiB."""
    try:
        group = airflow_kills.MemoryGroup(64 << 20)
    except airflow_kills.Unavailable as error:
        pytest.skip(str(error))
    try:
        _, thread, errors = started(tmp_path, Store(), TAKES)
        airflow_kills.confine(jobs(tmp_path)[0].parent, group)
        (tmp_path / "go").touch()
        thread.join(30)
        assert group.kills() == 1
        assert len(errors) == 1 and type(errors[0]) is AirflowException, "it is tried again"
        assert str(errors[0]).startswith("crawl: out of memory: the kernel's out-of-memory killer ended it or one of its processes (peak")
        record = json.loads((jobs(tmp_path)[0] / "exit.json").read_text())
        assert (record["signal"], record["code"], record["out_of_memory"]) == (9, None, True)
    finally:
        group.close()


@pytest.mark.parametrize(
    ("groups", "expected"),
    [
        ("0::/user.slice/a", ["user.slice/a/memory.events", "memory.events"]),
        ("0::/", ["memory.events", "memory.events"]),  # the top, or the top of a container
        ("4:memory:/box\n0::/", ["memory/box/memory.oom_control", "memory/memory.oom_control", "memory.events", "memory.events"]),
        ("3:cpu,memory:/\n1:name=systemd:/", []),
    ],
)
def test_kills_are_counted_in_the_groups_of_either_version(groups: str, expected: list[str]) -> None:
    assert stage_job.memory_counts(groups) == [Path("/sys/fs/cgroup") / name for name in expected]


def test_success_without_an_artifact_is_a_failure(tmp_path: Path) -> None:
    with pytest.raises(AirflowException, match="did not say what it made"):
        operator(tmp_path, "print('done')").execute(context())


# --- who follows the job


WAITS = """
import pathlib, signal, sys, time
def save(number, frame):
    pathlib.Path("saved").touch()
    sys.exit(75)
signal.signal(signal.SIGTERM, save)
pathlib.Path("started").touch()
while not pathlib.Path("go").exists():
    time.sleep(0.02)
"""


def started(tmp_path: Path, store: Store, code: str = WAITS, **how: Any) -> tuple[Any, threading.Thread, list[BaseException]]:
    """A task whose job runs, in a thread of its own."""
    task, errors = operator(tmp_path, prints(record(tmp_path / "made"), code)), []

    def execute() -> None:
        try:
            task.execute(context(store, **how))
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=execute, daemon=True)
    thread.start()
    wait_for(lambda: (tmp_path / "started").exists() and task.external_id_key in store and jobs(tmp_path)[-1].joinpath("owner").exists())
    return task, thread, errors


def follows(tmp_path: Path, task: Any, store: Store) -> tuple[threading.Thread, list[Any]]:
    """A second try in a thread of its own, once it follows the job that runs; and what it will have made."""
    made: list[Any] = []
    thread = threading.Thread(target=lambda: made.append(task.execute(context(store, attempt=2))), daemon=True)
    thread.start()
    wait_for(lambda: task._owner and (jobs(tmp_path)[0] / "owner").read_text() == task._owner)
    return thread, made


def taken_over(tmp_path: Path, task: Any, store: Store) -> dict[str, Any]:
    """What a second try makes of the job that runs. The job may end only when it is followed: one that is over before is no running job,
    and a busy machine ends it first."""
    thread, made = follows(tmp_path, task, store)
    (tmp_path / "go").touch()
    thread.join(20)
    assert made, "the second try failed, or did not end"
    return dict(made[0])


def test_the_next_try_follows_the_job_of_a_task_that_was_killed(tmp_path: Path) -> None:
    store = Store()
    _, first, errors = started(tmp_path, store)
    second = operator(tmp_path, "raise SystemExit('a second copy')")
    assert taken_over(tmp_path, second, store)["fingerprint"] == "3f9c2a71b0de"
    first.join(10)
    assert not errors and len(jobs(tmp_path)) == 1
    assert second.external_id_key not in store, "a task that is cleared after its success must work again"


def test_a_job_is_not_started_twice_where_its_id_was_lost(tmp_path: Path) -> None:
    _, first, errors = started(tmp_path, Store())
    assert taken_over(tmp_path, operator(tmp_path, "raise SystemExit('a second copy')"), Store())["fingerprint"] == "3f9c2a71b0de"
    first.join(10)
    assert not errors and len(jobs(tmp_path)) == 1


def test_a_task_that_is_told_to_stop_lets_its_job_save(tmp_path: Path) -> None:
    task, thread, errors = started(tmp_path, Store())
    began = time.monotonic()
    task.on_kill()
    thread.join(5)
    assert "told to stop" in str(errors[0]) and time.monotonic() - began < 2
    wait_for((jobs(tmp_path)[0] / "exit.json").exists, 12)
    assert (tmp_path / "saved").exists()
    assert json.loads((jobs(tmp_path)[0] / "exit.json").read_text())["stopped"] == "released"


def test_a_job_that_a_new_try_has_taken_over_is_not_ended_by_the_old_one(tmp_path: Path) -> None:
    """A scheduler that restarts starts a new try, and the old task is told to stop: in whatever order."""
    store = Store()
    old, thread, errors = started(tmp_path, store)
    follower, made = follows(tmp_path, operator(tmp_path), store)
    old.on_kill()
    thread.join(5)
    time.sleep(1.5)
    assert not (tmp_path / "saved").exists()
    (tmp_path / "go").touch()
    follower.join(10)
    assert made and len(jobs(tmp_path)) == 1 and errors


def test_a_run_that_was_cleared_starts_its_job_again_when_the_old_one_has_saved(tmp_path: Path) -> None:
    store = Store()
    _, thread, errors = started(tmp_path, store)
    again = operator(tmp_path, prints(record(tmp_path / "made"), "import pathlib; assert pathlib.Path('saved').exists()"))
    again.execute(context(store, attempt=2, cleared=1))
    thread.join(10)
    assert "cancelled" in str(errors[0]) and len(jobs(tmp_path)) == 2


def test_a_job_that_has_succeeded_unseen_is_not_done_again_unless_its_artifact_is_gone(tmp_path: Path) -> None:
    store, made = Store(), record(tmp_path / "made")
    task = operator(tmp_path, prints(made))
    job = task.submit_job(context(store))
    store.set("job", job)
    wait_for(lambda: LocalLauncher().status(job) == "succeeded")
    assert operator(tmp_path, "raise SystemExit(1)").execute(context(store, attempt=2))["built"]
    store.set("job", job)
    (tmp_path / "made" / "manifest.json").unlink()
    with pytest.raises(AirflowException, match="exit code 1"):
        operator(tmp_path, "raise SystemExit(1)").execute(context(store, attempt=3))


def test_a_stage_that_leaves_a_process_behind_loses_it(tmp_path: Path) -> None:
    code = """
import subprocess, sys
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
open("pids", "w").write(str(child.pid))
"""
    operator(tmp_path, prints(record(tmp_path / "made"), code)).execute(context())
    pid = int((tmp_path / "pids").read_text())
    wait_for(lambda: not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE)


def test_lines_of_a_log_are_inert() -> None:
    assert (
        inert("::group::a ::endgroup:: \x1b]8;;javascript:x\x07 \u202e") == ": :group::a : :endgroup:: \\x1b]8;;javascript:x\\x07 \\x202e"
    )
    assert len(inert("x" * 10_000)) == stage_operator.LINE_CHARS
    assert os.linesep not in inert("a\nb")
