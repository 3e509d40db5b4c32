"""Ending when asked: SIGTERM and SIGINT are noted, and the loop ends at the next place where it can save.

    with StopRequest() as stop:
        for step in ...:
            ...
            if stop.requested: save, raise Stopped

A second SIGINT (a person who presses Ctrl-C again) ends at once. SIGTERM may come several times, from an orchestrator to the whole
process group and from a parent to its workers, and changes nothing after the first.
"""

import signal
import threading
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any


class StopRequest:
    """Takes over SIGTERM and SIGINT for its block, in the main thread of a process; elsewhere it does nothing.

    forward: called at every signal, after it was noted.
    """

    def __init__(self, forward: Callable[[], None] | None = None) -> None:
        self.requested = False
        self._forward = forward
        self._before: dict[int, Any] = {}

    def __enter__(self) -> "StopRequest":
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGTERM, signal.SIGINT):
                self._before[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGINT and self.requested:
            raise KeyboardInterrupt
        self.requested = True
        if self._forward is not None:
            self._forward()
