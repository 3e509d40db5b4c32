"""Pools that tasks wait for in vain: said by a run's first task and on the results page, not found out hours later.

    needs = needs_of(dag.tasks)                      # pool -> how many tasks want it, how many slots one of them takes
    never, later = lacking(needs, slots)             # sentences: what can never run; what has to wait

Airflow leaves a task whose pool is absent or too small in the state `scheduled`, without a word. The API server and the scheduler see the
pools; a task does not, since its one way to Airflow is the execution API, which has none of them. So `PoolsAnswer`, a middleware of the API
server, answers the variable `craw4llm_pools` where nobody has set it: a task asks for it as for any variable, with its own rights.
"""

import asyncio
import dataclasses
import json
from collections.abc import Iterable, Mapping
from typing import Any

from asgi import Message, Receive, Scope, Send

VARIABLE = "craw4llm_pools"
PATH = f"/execution/variables/{VARIABLE}"
UNLIMITED = -1


@dataclasses.dataclass(frozen=True)
class Need:
    """tasks: how many want the pool. slots: the most that one of them takes; of: that task."""

    tasks: int
    slots: int = 1
    of: str = ""


@dataclasses.dataclass(frozen=True)
class Slots:
    """all, and how many are open now; -1: without limit."""

    all: int
    open: int


def needs_of(tasks: Iterable[Any]) -> dict[str, Need]:
    found: dict[str, Need] = {}
    for task in tasks:
        before = found.get(task.pool, Need(0, 0))
        most = max((before.slots, before.of), (int(task.pool_slots), str(task.task_id)), key=lambda pair: pair[0])
        found[task.pool] = Need(before.tasks + 1, *most)
    return dict(sorted(found.items()))


def lacking(needs: Mapping[str, Need], there: Mapping[str, Slots]) -> tuple[list[str], list[str]]:
    """(what can never run, what has to wait for others), a sentence each."""
    never, later = [], []
    for name, need in needs.items():
        wait = f"{need.tasks} task{'s' if need.tasks > 1 else ''} of this run" if need.of else "its tasks"
        found = there.get(name)
        if found is None:
            never.append(f"The pool {name!r} is missing: {wait} will not start. Make it under Admin → Pools.")
        elif found.all == UNLIMITED:
            continue
        elif found.all < need.slots:
            wants = f"{need.of} takes {need.slots}" if found.all and need.of else f"{wait} will not start"
            never.append(
                f"The pool {name!r} has {found.all} slot{'' if found.all == 1 else 's'}: {wants}. Give it more under Admin → Pools."
            )
        elif found.open < need.slots:
            later.append(
                f"The pool {name!r}: {max(0, found.open)} of its {found.all} slots are open now; {wait} will wait for others to end."
            )
    return never, later


def read() -> dict[str, Slots]:
    """From Airflow's database: in the API server."""
    from airflow.models.pool import Pool
    from airflow.utils.session import create_session

    with create_session() as session:
        stats = Pool.slots_stats(session=session)
    return {name: Slots(*(UNLIMITED if n == float("inf") else int(n) for n in (s["total"], s["open"]))) for name, s in stats.items()}


def ask() -> dict[str, Slots] | None:
    """From the API server: in a task. None where it does not say, since it does not have this plugin."""
    from airflow.sdk import Variable

    answer = Variable.get(VARIABLE, default=None)
    try:
        return {str(name): Slots(*map(int, slots)) for name, slots in json.loads(answer or "").items()}
    except (ValueError, TypeError, AttributeError):
        return None


class PoolsAnswer:
    """ASGI middleware: where a task asks for the variable and Airflow has none of this name, the answer is the pools."""

    def __init__(self, app: Any) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] != "GET" or not scope["path"].endswith(PATH):
            await self.app(scope, receive, send)
            return
        absent = False

        async def unless_absent(message: Message) -> None:
            nonlocal absent
            if message["type"] == "http.response.start":
                absent = message["status"] == 404  # Airflow has let the task in, and found nothing
            if not absent:
                await send(message)

        await self.app(scope, receive, unless_absent)
        if absent:
            slots = {name: dataclasses.astuple(found) for name, found in (await asyncio.to_thread(read)).items()}
            content = json.dumps({"key": VARIABLE, "value": json.dumps(slots)}).encode()
            headers = [(b"content-type", b"application/json"), (b"content-length", str(len(content)).encode())]
            await send({"type": "http.response.start", "status": 200, "headers": headers})
            await send({"type": "http.response.body", "body": content})
