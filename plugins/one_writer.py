"""With SQLite, changes that come to the API server at the same time are made one after the other.

SQLite has one writer at a time, and two faults of Airflow 3.3 come to light there:

    A change by a person is noted in the audit log by code that holds up the whole server until the database is free. Where another request
    has the database, which cannot be answered for the same reason, both wait until SQLite's time-out: 60 s without an answer to anybody,
    heartbeats included, then an internal server error.

    A task that asks a person writes its request, then pauses. An answer may come between the two, and both sides look for the other under a
    lock of rows, which SQLite does not have: when each looked before the other wrote, the task paused for ever, its answer in the database.

`OneWriter`, a middleware of the API server, has no two changes under way. There is one server process with SQLite; other databases lock
rows, and their changes pass at once.
"""

import asyncio
from typing import Any

from airflow.configuration import conf

from asgi import Receive, Scope, Send, is_change, read_body

MOST_BYTES = 1 << 20  # of a body that is read before its turn, so that who sends slowly holds nobody up


class OneWriter:
    """ASGI middleware."""

    def __init__(self, app: Any) -> None:
        self.app = app
        self._turn = asyncio.Lock()
        self._needed = conf.get_mandatory_value("database", "sql_alchemy_conn").startswith("sqlite")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if not self._needed or not is_change(scope):
            await self.app(scope, receive, send)
            return
        _, receive = await read_body(receive, MOST_BYTES)
        async with self._turn:
            await self.app(scope, receive, send)
