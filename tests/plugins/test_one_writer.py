"""With SQLite, changes are made one after the other; what only reads passes, and so does everything with other databases."""

import asyncio
from typing import Any

import pytest
from airflow.configuration import conf

from one_writer import OneWriter

ANSWER = ("PATCH", "/api/v2/dags/d/dagRuns/r/taskInstances/plan/-1/hitlDetails")
PAUSE = ("PATCH", "/base/execution/task-instances/0198/state")
START = ("PATCH", "/base/execution/task-instances/0198/run")
LOOK = ("GET", ANSWER[1])


def database(monkeypatch: pytest.MonkeyPatch, address: str) -> None:
    monkeypatch.setattr(conf, "get_mandatory_value", lambda section, key: address)


@pytest.fixture(autouse=True)
def sqlite(monkeypatch: pytest.MonkeyPatch) -> None:
    database(monkeypatch, "sqlite:////home/airflow.db?timeout=60")


async def nothing() -> Any:
    return {"type": "http.request", "body": b"", "more_body": False}


def order(*requests: tuple[str, str]) -> list[str]:
    """Begins and ends of requests that are sent at once, each of which takes a few turns of the loop."""
    seen: list[str] = []

    async def behind(scope: Any, receive: Any, send: Any) -> None:
        seen.append(f"begin {scope['number']}")
        for _ in range(5):
            await asyncio.sleep(0)
        seen.append(f"end {scope['number']}")

    async def run() -> None:
        app: Any = OneWriter(behind)
        await asyncio.gather(
            *(
                app({"type": "http", "method": method, "path": path, "number": number}, nothing, None)
                for number, (method, path) in enumerate(requests)
            )
        )

    asyncio.run(run())
    return seen


def test_changes_never_overlap() -> None:
    for requests in ((PAUSE, ANSWER), (ANSWER, PAUSE), (ANSWER, ANSWER), (START, ANSWER), (PAUSE, START)):
        assert order(*requests) == ["begin 0", "end 0", "begin 1", "end 1"]


def test_what_only_reads_waits_for_nothing() -> None:
    assert order(ANSWER, LOOK)[:2] == order(LOOK, ANSWER)[:2] == ["begin 0", "begin 1"]


def test_other_databases_lock_rows_themselves(monkeypatch: pytest.MonkeyPatch) -> None:
    database(monkeypatch, "postgresql+psycopg2://airflow@host/airflow")
    assert order(PAUSE, ANSWER) == ["begin 0", "begin 1", "end 0", "end 1"]


def test_who_sends_slowly_holds_up_nobody_and_is_heard_whole() -> None:
    heard: list[bytes] = []

    async def behind(scope: Any, receive: Any, send: Any) -> None:
        body, more = b"", True
        while more:
            message = await receive()
            body, more = body + message["body"], message["more_body"]
        heard.append(body)

    async def run() -> None:
        app: Any = OneWriter(behind)
        rest = asyncio.Event()
        parts = [b"slow, ", b"but whole"]

        async def slowly() -> Any:
            if len(parts) == 1:
                await rest.wait()
            return {"type": "http.request", "body": parts.pop(0), "more_body": bool(parts)}

        slow = asyncio.create_task(app({"type": "http", "method": "POST", "path": "/"}, slowly, None))
        await asyncio.sleep(0)
        await asyncio.wait_for(app({"type": "http", "method": "POST", "path": "/"}, nothing, None), 5)
        rest.set()
        await slow

    asyncio.run(run())
    assert heard == [b"", b"slow, but whole"]


def test_a_request_that_fails_holds_up_no_other() -> None:
    async def behind(scope: Any, receive: Any, send: Any) -> None:
        raise ValueError

    async def run() -> list[Any]:
        app: Any = OneWriter(behind)
        return [
            await asyncio.gather(app({"type": "http", "method": m, "path": p}, nothing, None), return_exceptions=True)
            for m, p in (PAUSE, ANSWER, PAUSE, ANSWER)
        ]

    assert [type(error) for (error,) in asyncio.run(asyncio.wait_for(run(), 5))] == [ValueError] * 4


def test_what_is_no_request_passes() -> None:
    seen: list[str] = []

    async def behind(scope: Any, receive: Any, send: Any) -> None:
        seen.append(scope["type"])

    app: Any = OneWriter(behind)
    asyncio.run(app({"type": "lifespan"}, None, None))
    assert seen == ["lifespan"]
