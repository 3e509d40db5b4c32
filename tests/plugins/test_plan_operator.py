"""The first task: it passes what is cheap, waits for a person above the limit, and fails where an input is missing."""

import datetime
import json
from types import SimpleNamespace
from typing import Any

import pytest
from airflow.providers.standard.operators import hitl
from airflow.sdk.exceptions import AirflowFailException, TaskAwaitingInput

from plan_operator import PlanOperator, as_markdown

FACTS: dict[str, Any] = {
    "experiment": "tiny", "stages": 3, "stages_to_do": 2, "gpu_hours": 63.9, "disk_bytes": 8e10, "shortfalls": ["disk: 2 of 1"],
    "absent": [],
    "text": "tiny: 3 stages ``` {{ 1 + 1 }}\n::group::x", "nodes": [], "results": {},
}  # fmt: skip


def operator(monkeypatch: pytest.MonkeyPatch, gpu_hours: float, **facts: Any) -> PlanOperator:
    task = PlanOperator(task_id="plan", experiment="tiny", replicates=2, parameters=("pages",), cwd="/", gpu_hours=gpu_hours)
    monkeypatch.setattr(task, "ask", lambda command: json.dumps(FACTS | facts))
    return task


def context(conf: dict[str, Any] | None = None) -> Any:
    ti = SimpleNamespace(id="1")
    return {"ti": ti, "task_instance": ti, "dag_run": SimpleNamespace(conf=conf or {}), "params": {"pages": 3}}


def test_a_cheap_run_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    found = operator(monkeypatch, 64.0).execute(context())
    assert found["gpu_hours"] == 63.9 and found["shortfalls"] == ["disk: 2 of 1"] and "text" not in found


def test_a_dear_run_waits_for_a_person_and_shows_the_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: dict[str, Any] = {}
    monkeypatch.setattr(hitl, "upsert_hitl_detail", lambda **given: asked.update(given))
    task = operator(monkeypatch, 24.0)
    with pytest.raises(TaskAwaitingInput):
        task.execute(context())
    assert asked["subject"] == "tiny: 63.9 GPU hours, 80.0 GB. Start it?" and asked["options"] == ["Approve", "Reject"]
    assert asked["body"] == "`tiny: 3 stages ''' {{ 1 + 1 }}`  \n`: :group::x`", "a span of code a line, which nothing in it ends"
    assert as_markdown(["a  b `", "", " c d"]) == "`a\u00a0\u00a0b '`  \n\u00a0  \n`\u00a0c d`"
    answer = {"chosen_options": ["Approve"], "params_input": {}, "responded_at": datetime.datetime.now(), "responded_by_user": "a"}
    assert task.execute_complete(context(), answer)["approved"] is True


def test_a_missing_input_is_named_before_any_work(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(AirflowFailException, match="nothing was started, inputs are missing:\ncorpus: data/clueweb22 does not exist"):
        operator(monkeypatch, 24.0, absent=["corpus: data/clueweb22 does not exist"]).execute(context())
    with pytest.raises(AirflowFailException, match="no parameter page"):
        operator(monkeypatch, 24.0).execute(context({"page": 1}))


def test_a_command_that_refuses_is_not_tried_again() -> None:
    task = PlanOperator(task_id="plan", experiment="no_such", replicates=1, parameters=(), cwd=".", gpu_hours=1.0)
    with pytest.raises(AirflowFailException, match="exit code 2"):
        task.execute(context() | {"params": {}})
