"""Values that cannot be meant are refused alike by the form's schema, at the API's door and on the command line, with the field named."""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from airflow.dag_processing.dagbag import DagBag
from airflow.sdk.exceptions import AirflowFailException
from airflow_env import PROJECT
from click.testing import CliRunner

from craw4llm.__main__ import cli
from craw4llm.errors import ArtifactError, ConfigError
from stage_operator import refuse_unknown, settings
from trigger_check import TriggerCheck, refusal

# Fields of cases/BL-44 -> ours; a single policy is a list of one.
NAMES = {"max_pages": "budget", "policy": "policies", "global_batch": "batch_tokens", "max_page": "budge", "ranks": None}


def cases(shared: Path) -> list[tuple[str, dict[str, Any]]]:
    found = []
    for line in (shared / "cases" / "BL-44" / "bad_params.jsonl").read_text().splitlines():
        case = json.loads(line)
        conf = {NAMES.get(name, name): value for name, value in case["conf"].items() if NAMES.get(name, name)}
        if isinstance(conf.get("policies"), str):
            conf["policies"] = [conf["policies"]]
        found.append((case["why"], conf))
    return found


def trigger(conf: Any, dag: str = "crawl_arms") -> str:
    return refusal(dag, json.dumps({"logical_date": None, "conf": conf}).encode())


def test_every_case_is_refused_alike_by_form_api_and_command_line(shared: Path) -> None:
    params = DagBag(PROJECT / "dags" / "crawl_arms.py").dags["crawl_arms"].params
    fields = tuple(params)
    for why, conf in cases(shared):
        good = why.startswith("good")
        (field,) = conf
        assert (trigger(conf) == "") == good, (why, trigger(conf))
        if not good:
            assert field in trigger(conf), why
        given = [
            f"--set={name}={json.dumps(v) if isinstance(v, dict) else ','.join(v) if isinstance(v, list) else v}"
            for name, v in conf.items()
        ]
        done = CliRunner().invoke(cli, ["plan", "crawl_arms", "--set=corpus=synthetic", *given])
        text = isinstance(conf[field], str) and why.startswith("scientific")  # on a command line everything is text
        assert (done.exception is None) == (good or text), (why, done.output)
        if done.exception is not None:
            assert isinstance(done.exception, ConfigError) and field in str(done.exception)
        if field not in fields:
            with pytest.raises(AirflowFailException, match=field):
                refuse_unknown("crawl_arms", fields, {"dag_run": type("Run", (), {"conf": conf})})
        elif not (good or why == "batch does not divide"):
            with pytest.raises(Exception, match=f"Invalid input for param {field}"):
                params.update(conf)


@pytest.mark.parametrize(
    ("conf", "expected"),
    [
        ({"batch_tokens": 300}, "batch_tokens is 300; expected a multiple of the context length, 256"),
        ({"size": "11M"}, "batch_tokens is 512; expected a multiple of the context length, 2048"),
        ({"token_multiple": 0.001, "size": "toy", "batch_tokens": 8192}, "token_multiple is 0.001"),
        ({"budget_unit": "fetches", "comparisons": ["equal_fetches"]}, "keep_pages is 0"),
        ({"budget_unit": "fetches", "keep_pages": 5}, "comparisons has equal_pages"),
        ({"policies": "quality"}, "policies is 'quality'; expected a list"),
        ({"heldout_fraction": 0.9}, "heldout_fraction is 0.9"),
    ],
)
def test_fields_that_do_not_go_together_are_refused_by_name(conf: dict[str, Any], expected: str) -> None:
    assert expected in trigger(conf)


def test_what_is_not_ours_is_for_airflow_to_judge() -> None:
    assert trigger({"anything": 1}, dag="somebody_elses") == ""
    assert refusal("crawl_arms", b"no json") == refusal("crawl_arms", b'{"conf": 3}') == refusal("crawl_arms", b"{}") == ""
    assert trigger({"replicates": 2, "launcher": "local"}) == ""
    assert "no parameter 'pages'" in trigger({"pages": 3}) and "no parameter 'page'" in trigger({"page": 3}, dag="tiny_reruns")


def call(body: bytes, path: str = "/api/v2/dags/crawl_arms/dagRuns", pieces: int = 1, login: bool = True) -> tuple[int, bytes, bytes]:
    """(status, body of the answer, body that the application behind got)."""
    sent: list[Any] = []
    got = b""

    async def behind(scope: Any, receive: Any, send: Any) -> None:
        nonlocal got
        while True:
            message = await receive()
            got += message.get("body", b"")
            if not message.get("more_body"):
                break
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"ok"})

    size = max(1, len(body) // pieces)
    parts = [body[i : i + size] for i in range(0, len(body), size)]
    messages = [{"type": "http.request", "body": p, "more_body": i < len(parts) - 1} for i, p in enumerate(parts)]

    async def receive() -> Any:
        return messages.pop(0)

    async def send(message: Any) -> None:
        sent.append(message)

    headers = [(b"authorization", b"Bearer x")] if login else []
    asyncio.run(TriggerCheck(behind)({"type": "http", "method": "POST", "path": path, "headers": headers}, receive, send))
    return sent[0]["status"], b"".join(m.get("body", b"") for m in sent), got


def test_the_request_passes_whole_or_is_answered_here() -> None:
    good = json.dumps({"conf": {"budget": 40}}).encode()
    assert call(good) == call(good, pieces=7) == (200, b"ok", good)
    bad = json.dumps({"conf": {"budget": -1}}).encode()
    status, answer, got = call(bad, pieces=3)
    assert (status, got) == (400, b"") and "budget is -1" in json.loads(answer)["detail"]
    assert call(bad, path="/api/v2/dags/crawl_arms/dagRuns/list")[0] == 200
    assert call(bad, login=False)[0] == 200, "a stranger learns nothing of the fields: Airflow refuses him"


def test_values_reach_the_command_line_as_they_are() -> None:
    hostile = "$(x) {{ 1 }} --set a=b"
    assert settings(("corpus", "policies"), {"corpus": hostile, "policies": ["random"]}) == [
        "--set", f"corpus={hostile}", "--set", "policies=random",
    ]  # fmt: skip


def test_what_the_form_has_kept_is_an_experiment_like_a_declared_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its name works for show, plan and run; report says that nothing is finished, as of any other."""
    monkeypatch.chdir(PROJECT)
    values = {
        "corpus": "synthetic",
        "synthetic_pages": "300",
        "budget": "20",
        "batch_pages": "5",
        "policies": "quality,random",
        "seeds": "",
    }
    root = f"--root={tmp_path}"

    def say(*command: str) -> Any:
        return CliRunner().invoke(cli, [*command, root], catch_exceptions=True)

    name = say("declare", "crawl_arms", "--replicates=2", *(f"--set={key}={value}" for key, value in values.items())).output.strip()
    assert name.startswith("crawl_arms_")
    plan = json.loads(say("plan", name, "--json").output)
    assert plan["replicates"] == 2 and plan["parameters"]["policies"] == "quality,random" and plan["parameters"]["budget"] == 20
    assert name in say("show").output
    assert say("run", name, "--only=scorer", "--jobs=1").exit_code == 0
    assert "scorer" in say("show", name).output
    done = say("report", name)
    assert isinstance(done.exception, ArtifactError | ConfigError) and "finished" in str(done.exception)
