"""Wakes the scheduler when something has changed, so that it looks at once then, and seldom otherwise.

    $CRAW4LLM_DOORBELL    a pipe with a name, made by scripts/airflow_server.py in a folder that only its owner can enter

Airflow's scheduler looks for work at a fixed interval. Each look costs 0.04 s of a core, and each task of a chain waits half an interval
for it. Here the API server rings once it has answered a request that gives the scheduler something to do: a task has ended, a person has
triggered a run, answered or cleared a task. The scheduler waits for that in its executor (plugins/local_executor.py), but no longer than
LOOK_EVERY_S: a ring that is lost delays work by as much, and time-outs, retries and schedules are seen by that look.
"""

import contextlib
import os
import re
import select
from typing import Any

from asgi import Receive, Scope, Send, is_change

DOORBELL = "CRAW4LLM_DOORBELL"
LOOK_EVERY_S = 1.0
NEWS = re.compile(r"/execution/task-instances/[^/]+/state$|/api/v\d+/")  # the end of a task; whatever a person changes


class Doorbell:
    """The scheduler's side. Where there is no bell, every wait is as long as it may be."""

    def __init__(self) -> None:
        self._pipe: int | None = None
        self._poll = select.poll()
        with contextlib.suppress(OSError):
            self._pipe = os.open(os.environ.get(DOORBELL, ""), os.O_RDWR | os.O_NONBLOCK)  # also for writing: it has no end then
            self._poll.register(self._pipe, select.POLLIN)

    def wait(self, seconds: float = LOOK_EVERY_S) -> None:
        """Returns when the bell was rung since the last time, or after `seconds`."""
        if self._poll.poll(1000 * seconds) and self._pipe is not None:
            with contextlib.suppress(BlockingIOError):
                os.read(self._pipe, 1 << 16)


def ring() -> None:
    """Wakes the scheduler, where one listens."""
    path = os.environ.get(DOORBELL)
    if path:
        with contextlib.suppress(OSError):
            pipe = os.open(path, os.O_WRONLY | os.O_NONBLOCK)
            try:
                os.write(pipe, b"!")
            finally:
                os.close(pipe)


class RingsAfterChanges:
    """ASGI middleware of the API server: rings when a change is answered, and so in the database."""

    def __init__(self, app: Any) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self.app(scope, receive, send)
        if is_change(scope) and NEWS.search(scope["path"]):
            ring()
