"""The first task: it passes what is cheap, waits for a person above the limit, and fails where an input is missing."""

import datetime
import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import airflow_env
import pytest
from airflow.providers.standard.operators import hitl
from airflow.sdk.exceptions import AirflowFailException, TaskAwaitingInput

import pools
from plan_operator import PlanOperator
from plan_text import amount, as_markdown, costs_first, request
from pools import Slots
from training.configs import ReportConfig

FACTS: dict[str, Any] = {
    "experiment": "tiny", "stages": 3, "stages_to_do": 2, "gpu_hours": 63.9, "disk_bytes": 8e10, "shortfalls": ["disk: 2 of 1"],
    "absent": [],
    "replicates": 2, "arms": {"a|b": {"train_tokens": 32_929_300_480, "gpu_hours": 15.97, "disk_bytes": 4e9}, "c": {"kept_pages": 400}},
    "text": "tiny: 3 stages ``` {{ 1 + 1 }}\n::group::x", "nodes": [], "results": {},
}  # fmt: skip


POOLS = {"default_pool": Slots(128, 127), "cpu": Slots(2, 2), "gpu": Slots(2, 2)}


def operator(monkeypatch: pytest.MonkeyPatch, gpu_hours: float, there: dict[str, Slots] | None = POOLS, **facts: Any) -> PlanOperator:
    monkeypatch.setattr(pools, "ask", lambda: there)
    task = PlanOperator(task_id="plan", experiment="tiny", replicates=2, parameters=("pages",), cwd="/", gpu_hours=gpu_hours)
    monkeypatch.setattr(task, "ask", lambda command: json.dumps(FACTS | facts))
    return task


def context(conf: dict[str, Any] | None = None) -> Any:
    ti = SimpleNamespace(id="1")
    tasks = [SimpleNamespace(task_id=name, pool=pool, pool_slots=1) for name, pool in (("plan", "default_pool"), ("a.train", "gpu"))]
    dag = SimpleNamespace(tasks=[*tasks, SimpleNamespace(task_id="b.train", pool="gpu", pool_slots=2)])
    return {"ti": ti, "task_instance": ti, "dag_run": SimpleNamespace(conf=conf or {}), "params": {"pages": 3}, "dag": dag}


def test_a_cheap_run_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    found = operator(monkeypatch, 64.0).execute(context())
    assert found["gpu_hours"] == 63.9 and found["shortfalls"] == ["disk: 2 of 1"] and "text" not in found


def test_a_dear_run_waits_for_a_person_and_shows_the_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: dict[str, Any] = {}
    monkeypatch.setattr(hitl, "upsert_hitl_detail", lambda **given: asked.update(given))
    task = operator(monkeypatch, 24.0)
    with pytest.raises(TaskAwaitingInput):
        task.execute(context())
    assert asked["subject"] == "tiny: 63.9 GPU hours, 80 GB. Start it?" and asked["options"] == ["Approve", "Reject"]
    assert asked["body"].split("\n\n") == [
        "`Short of disk: 2 of 1`",
        "For each of 2 replicates:",
        "| arm | pages kept | tokens trained on | GPU hours | disk, GB |\n| --- | --: | --: | --: | --: |\n"
        "| `a¦b` |  | 32,929,300,480 | 16 | 4 |\n| `c` | 400 |  |  |  |",
        "`tiny: 3 stages ''' {{ 1 + 1 }}`  \n`: :group::x`",  # a span of code a line, which nothing in it ends
    ]
    assert as_markdown(["a  b `", "", " c d"]) == "`a\u00a0\u00a0b '`  \n\u00a0  \n`\u00a0c d`"
    assert costs_first(["head", "", "stage 1", "stage 2", "", "costs", "", "to do"]) == (
        ["head", "", "costs", "", "to do", "", "stage 1", "stage 2"]
    )
    answer = {"chosen_options": ["Approve"], "params_input": {}, "responded_at": datetime.datetime.now(), "responded_by_user": "a"}
    assert task.execute_complete(context(), answer)["approved"] is True


def test_the_needs_of_stages_are_a_table_too() -> None:
    table = [("stages", "parts", "core h", "h"), ("2 x crawl: a.crawl, b|c.crawl", "1", "0.5", "?"), ("score", "3", "-", "?")]
    text = "tiny: 3 stages\n\n  corpus  1f2e  to do\n\nNeeds of each stage:\n  stages    parts  core h  h\n"
    text += "  2 x crawl: a.crawl, b|c.crawl      1     0.5  ?\n  score      3       -  ?\n  all: 4 tasks"
    facts = {"experiment": "tiny", "gpu_hours": 1, "disk_bytes": 1, "shortfalls": [], "replicates": 1, "arms": {}}
    assert request(facts | {"needs": {"table": table}}, text)[1].split("\n\n")[1:] == [
        "Needs of each stage that is to do:",
        "| stages | parts | core h |\n| --- | --: | --: |\n| `2 x crawl: a.crawl, b¦c.crawl` | 1 | 0.5 |\n| `score` | 3 | - |",
        as_markdown(["tiny: 3 stages", "", "Needs of each stage:", "  all: 4 tasks", "", "  corpus  1f2e  to do"]),
    ]


@pytest.mark.parametrize(
    ("value", "text"),
    [(0.0, "0"), (2.2e-05, "2.2e-05"), (63.94, "63.9"), (191.66, "192"), (1234.5, "1,234"), (7.27e19, "7.27e+19"), (400, "400")],
)
def test_amounts_are_as_a_person_reads_them(value: float, text: str) -> None:
    assert amount(value) == text


def test_a_missing_input_is_named_before_any_work(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(AirflowFailException, match="nothing was started, inputs are missing:\ncorpus: data/clueweb22 does not exist"):
        operator(monkeypatch, 24.0, absent=["corpus: data/clueweb22 does not exist"]).execute(context())
    with pytest.raises(AirflowFailException, match="no parameter page"):
        operator(monkeypatch, 24.0).execute(context({"page": 1}))


def test_a_command_that_refuses_is_not_tried_again() -> None:
    task = PlanOperator(task_id="plan", experiment="no_such", replicates=1, parameters=(), cwd=".", gpu_hours=1.0)
    with pytest.raises(AirflowFailException, match="exit code 2"):
        task.execute(context() | {"params": {}})


def test_a_pool_that_no_task_could_ever_enter_fails_the_run_and_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    for there, said in (
        ({}, "The pool 'gpu' is missing: 2 tasks of this run will not start"),
        ({"gpu": Slots(0, 0)}, "The pool 'gpu' has 0 slots: 2 tasks of this run will not start"),
        ({"gpu": Slots(1, 1)}, "The pool 'gpu' has 1 slot: b.train takes 2"),
    ):
        task = operator(monkeypatch, 64.0, there={"default_pool": Slots(-1, -1), **there}, absent=["corpus: it is not there"])
        with pytest.raises(AirflowFailException) as caught:
            task.execute(context())
        assert "inputs are missing:\ncorpus: it is not there\nand tasks would wait for ever:\n" + said in str(caught.value)
        with pytest.raises(AirflowFailException, match=said):
            operator(monkeypatch, 0.0, there={"default_pool": Slots(128, 0), **there}).execute(context())


def test_slots_that_are_taken_are_said_in_the_log_the_request_and_the_result(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked: dict[str, Any] = {}
    monkeypatch.setattr(hitl, "upsert_hitl_detail", lambda **given: asked.update(given))
    there = POOLS | {"gpu": Slots(2, 0)}
    said = "slots: The pool 'gpu': 0 of its 2 slots are open now; 2 tasks of this run will wait for others to end."
    with pytest.raises(TaskAwaitingInput):
        operator(monkeypatch, 1.0, there=there).execute(context())
    assert f"`Short of disk: 2 of 1`  \n`Short of {said}`" in asked["body"]
    assert operator(monkeypatch, 64.0, there=there).execute(context())["shortfalls"] == ["disk: 2 of 1", said]
    assert f"short of {said}" in capsys.readouterr().out


def test_where_the_pools_cannot_be_asked_the_log_says_so(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert operator(monkeypatch, 64.0, there=None).execute(context())["gpu_hours"] == 63.9
    assert "whether the pools are there cannot be asked" in capsys.readouterr().out


HEAVY = ("torch", "scipy", "matplotlib", "datasketch", "numba", "redis")
PLAN = f"""
import sys
from craw4llm.__main__ import cli
cli(["plan", "--json", *sys.argv[1:]], standalone_mode=False)
sys.exit(", ".join(name for name in {HEAVY!r} if name in sys.modules))
"""


def test_plan_loads_nothing_heavy(tmp_path: Path) -> None:
    """It runs before every run, and in every form's first task: half a second of work, not four of imports."""
    for experiment in ("crawl_arms", "tiny"):
        done = subprocess.run(
            [sys.executable, "-c", PLAN, "--set=corpus=synthetic", f"--root={tmp_path}", experiment],
            capture_output=True, text=True, cwd=airflow_env.PROJECT,
        )  # fmt: skip
        assert json.loads(done.stdout)["stages"] > 20 and done.stderr.strip() == "", done.stderr


def test_the_stage_that_plan_does_not_look_at_has_no_estimate() -> None:
    source = (airflow_env.PROJECT / "training" / "report" / "stage.py").read_text()  # loading it takes two seconds
    assert not ReportConfig.estimated and "\ndef run(" in source and "\ndef estimate(" not in source
