"""A person's answer and the pause that it ends, one after the other.

A task that asks a person writes its request, then pauses: two calls to the API server. An answer may come between them, and both sides look
for the other under a lock of rows, which SQLite does not have: when each looked before the other wrote, the task paused for ever, its
answer in the database. `OneAfterTheOther`, a middleware of the API server, lets an answer wait for the changes of state that are under
way, and these for it. It keeps to one server process, which is what there is with SQLite; other databases lock rows.
"""

import asyncio
import re
from collections.abc import MutableMapping
from typing import Any

ANSWER = re.compile(r"/hitlDetails$")
PAUSE = re.compile(r"/execution/task-instances/[^/]+/state$")


class OneAfterTheOther:
    """ASGI middleware: changes of state run together, an answer alone."""

    def __init__(self, app: Any) -> None:
        self.app = app
        self._turn = asyncio.Condition()
        self._changes = 0

    async def __call__(self, scope: MutableMapping[str, Any], receive: Any, send: Any) -> None:
        path = scope["path"] if scope["type"] == "http" and scope["method"] == "PATCH" else ""
        if PAUSE.search(path):
            async with self._turn:  # an answer holds it while it is given
                self._changes += 1
            try:
                await self.app(scope, receive, send)
            finally:
                async with self._turn:
                    self._changes -= 1
                    self._turn.notify_all()
        elif ANSWER.search(path):
            async with self._turn:
                await self._turn.wait_for(lambda: not self._changes)
                await self.app(scope, receive, send)
        else:
            await self.app(scope, receive, send)
