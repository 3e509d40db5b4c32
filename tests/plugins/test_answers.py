"""An answer waits for changes of state that are under way, and these for it; all else passes."""

import asyncio
from typing import Any

from answers import OneAfterTheOther

ANSWER = ("PATCH", "/api/v2/dags/d/dagRuns/r/taskInstances/plan/-1/hitlDetails")
PAUSE = ("PATCH", "/base/execution/task-instances/0198/state")
LOOK = ("GET", ANSWER[1])


def order(*requests: tuple[str, str]) -> list[str]:
    """Begins and ends of requests that are sent at once, each of which takes a few turns of the loop."""
    seen: list[str] = []

    async def behind(scope: Any, receive: Any, send: Any) -> None:
        seen.append(f"begin {scope['number']}")
        for _ in range(5):
            await asyncio.sleep(0)
        seen.append(f"end {scope['number']}")

    async def run() -> None:
        app = OneAfterTheOther(behind)
        await asyncio.gather(
            *(
                app({"type": "http", "method": method, "path": path, "number": number}, None, None)
                for number, (method, path) in enumerate(requests)
            )
        )

    asyncio.run(run())
    return seen


def test_an_answer_and_a_pause_never_overlap() -> None:
    assert order(PAUSE, ANSWER) == ["begin 0", "end 0", "begin 1", "end 1"]
    assert order(ANSWER, PAUSE) == ["begin 0", "end 0", "begin 1", "end 1"]
    assert order(ANSWER, ANSWER) == ["begin 0", "end 0", "begin 1", "end 1"]
    seen = order(PAUSE, ANSWER, PAUSE, PAUSE, ANSWER)
    for number in (1, 4):
        assert seen.index(f"end {number}") == seen.index(f"begin {number}") + 1


def test_changes_of_state_and_all_else_run_together() -> None:
    assert order(PAUSE, PAUSE) == ["begin 0", "begin 1", "end 0", "end 1"]
    assert order(ANSWER, LOOK) == ["begin 0", "begin 1", "end 0", "end 1"]
    assert order(LOOK, PAUSE) == ["begin 0", "begin 1", "end 0", "end 1"]


def test_a_request_that_fails_holds_up_no_other() -> None:
    async def behind(scope: Any, receive: Any, send: Any) -> None:
        raise ValueError

    async def run() -> list[Any]:
        app = OneAfterTheOther(behind)
        return [
            await asyncio.gather(app({"type": "http", "method": m, "path": p}, None, None), return_exceptions=True)
            for m, p in (PAUSE, ANSWER, PAUSE, ANSWER)
        ]

    assert [type(error) for (error,) in asyncio.run(asyncio.wait_for(run(), 5))] == [ValueError] * 4
