"""A task that goes on after a pause starts when the process that paused it has ended, and the scheduler leaves it alone until then; and
the scheduler waits for news unless it has just found work."""

from types import SimpleNamespace
from typing import Any

import pytest
from airflow.models.taskinstancekey import TaskInstanceKey
from airflow.utils.state import TaskInstanceState

import local_executor
from local_executor import LocalExecutor


def key(task: str, attempt: int = 1) -> TaskInstanceKey:
    return TaskInstanceKey("dag", task, "run", attempt, -1)


@pytest.fixture
def executor(monkeypatch: pytest.MonkeyPatch) -> Any:
    """One whose workers only note what they are given."""
    made: Any = LocalExecutor(parallelism=4)
    made.given = []

    def start(self: Any, workloads: Any) -> None:
        for workload in workloads:
            self.given.append(workload.key)
            del self.queued_tasks[workload.key]

    monkeypatch.setattr(local_executor.local_executor.LocalExecutor, "_process_workloads", start)
    return made


def queue(executor: Any, *keys: TaskInstanceKey) -> None:
    for each in keys:
        executor.queued_tasks[each] = SimpleNamespace(key=each, ti=SimpleNamespace(priority_weight=1))
    executor.trigger_tasks(4)


def known(executor: Any, each: TaskInstanceKey) -> bool:
    """What the scheduler asks before it takes a queued task for lost."""
    return bool(executor.has_task(SimpleNamespace(id="1", key=each)))


def test_the_second_process_of_a_try_waits_for_the_end_of_the_first(executor: Any) -> None:
    queue(executor, key("plan"))
    queue(executor, key("plan"), key("other"))  # the answer came at once
    assert executor.given == [key("plan"), key("other")] and known(executor, key("plan"))
    executor.change_state(key("plan"), TaskInstanceState.RUNNING)
    executor.trigger_tasks(4)
    assert executor.given == [key("plan"), key("other")]
    executor.change_state(key("plan"), TaskInstanceState.SUCCESS)
    assert known(executor, key("plan")), "while the scheduler looks at the end of the first"
    executor.trigger_tasks(4)
    assert executor.given == [key("plan"), key("other"), key("plan")]
    executor.change_state(key("plan"), TaskInstanceState.SUCCESS)
    assert not known(executor, key("plan"))


def test_another_try_waits_for_nothing(executor: Any) -> None:
    queue(executor, key("plan"))
    queue(executor, key("plan", attempt=2))
    assert executor.given == [key("plan"), key("plan", attempt=2)]


def test_a_process_that_never_reports_its_end_is_given_up(executor: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    queue(executor, key("plan"))
    queue(executor, key("plan"))
    monkeypatch.setattr(local_executor, "GIVEN_UP_AFTER_S", -1.0)
    executor.trigger_tasks(4)
    assert executor.given == [key("plan"), key("plan")]


def test_a_look_that_found_no_work_waits_for_news(executor: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    steps: list[str] = []
    monkeypatch.setattr(local_executor.local_executor.LocalExecutor, "sync", lambda self: steps.append("look at the workers"))
    monkeypatch.setattr(executor, "_bell", SimpleNamespace(wait=lambda: steps.append("wait")))
    executor.sync()
    queue(executor, key("plan"))
    executor.sync()
    executor.sync()
    assert steps == ["wait", "look at the workers", "look at the workers", "wait", "look at the workers"]
