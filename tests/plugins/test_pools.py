"""Pools that a task would wait for in vain: found from the DAG's tasks, answered to tasks by the API server alone."""

import asyncio
import json
from types import SimpleNamespace
from typing import Any

import pytest
from airflow.models.pool import Pool
from airflow.sdk import Variable
from airflow.utils.db import initdb
from airflow.utils.session import create_session

import pools
from pools import Need, PoolsAnswer, Slots, lacking, needs_of


def test_needs_are_counted_by_pool_and_the_largest_task_is_named() -> None:
    tasks = [SimpleNamespace(task_id=str(n), pool=pool, pool_slots=n) for n, pool in ((1, "cpu"), (4, "gpu"), (2, "gpu"))]
    assert needs_of(tasks) == {"cpu": Need(1, 1, "1"), "gpu": Need(2, 4, "4")}


def test_what_lacks_is_told_from_what_waits() -> None:
    needs = {"a": Need(3, 1, "x"), "b": Need(1, 2, "y"), "c": Need(1)}
    enough = {"a": Slots(2, 1), "b": Slots(-1, -1), "c": Slots(1, 1), "other": Slots(0, 0)}
    assert lacking(needs, enough) == ([], [])
    never, later = lacking(needs, {"a": Slots(2, 0), "b": Slots(1, 1)})
    assert [line.partition(":")[0] for line in never] == ["The pool 'b' has 1 slot", "The pool 'c' is missing"]
    assert "y takes 2" in never[0] and "its tasks will not start" in never[1]
    assert later == ["The pool 'a': 0 of its 2 slots are open now; 3 tasks of this run will wait for others to end."]


def get(path: str, status: int, method: str = "GET") -> tuple[int, bytes]:
    """What a client gets where the application behind answers with this status."""
    sent: list[Any] = []

    async def behind(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": status, "headers": []})
        await send({"type": "http.response.body", "body": b"theirs"})

    async def send(message: Any) -> None:
        sent.append(message)

    asyncio.run(PoolsAnswer(behind)({"type": "http", "method": method, "path": path}, lambda: None, send))
    return sent[0]["status"], b"".join(message.get("body", b"") for message in sent)


def test_the_pools_are_the_answer_where_airflow_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    initdb()
    with create_session() as session:
        session.add(Pool(pool="test_two", slots=2, description="", include_deferred=False))
        session.add(Pool(pool="test_any", slots=-1, description="", include_deferred=False))
    status, body = get("/base/execution/variables/craw4llm_pools", 404)
    answer = json.loads(body)
    assert status == 200 and answer["key"] == "craw4llm_pools"
    monkeypatch.setattr(Variable, "get", lambda key, default=None: answer["value"])
    found = pools.ask()
    assert found is not None
    assert (found["test_two"], found["test_any"]) == (Slots(2, 2), Slots(-1, -1)) and "default_pool" in found


@pytest.mark.parametrize(
    ("path", "status", "method"),
    [
        ("/execution/variables/craw4llm_pools", 401, "GET"),  # a stranger
        ("/execution/variables/craw4llm_pools", 200, "GET"),  # somebody has set it
        ("/execution/variables/craw4llm_pools", 404, "DELETE"),
        ("/execution/variables/another", 404, "GET"),
        ("/api/v2/variables/craw4llm_pools", 404, "GET"),
    ],
)
def test_all_else_is_airflows_own_answer(path: str, status: int, method: str) -> None:
    assert get(path, status, method) == (status, b"theirs")


@pytest.mark.parametrize("value", [None, "", "no json", "3", '{"cpu": 3}', '{"cpu": [1, 2, 3]}'])
def test_an_answer_that_is_none_is_none(monkeypatch: pytest.MonkeyPatch, value: str | None) -> None:
    monkeypatch.setattr(Variable, "get", lambda key, default=None: value)
    assert pools.ask() is None
