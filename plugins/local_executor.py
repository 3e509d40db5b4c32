"""Airflow's LocalExecutor, which takes up a task that goes on only when the process that had paused it has ended, and waits for news.

    [core] executor = LocalExecutor:local_executor.LocalExecutor        scripts/airflow_server.py sets it

A task that waits for a person pauses, and goes on under the same try when the answer is there. Airflow 3.3 hears of the end of the pausing
process up to a heartbeat later (and later still on a busy machine). An answer within that time was lost: the scheduler took the end of the
one process for the end of the other, "finished with state success, but the task instance's state is queued", failed the try, and the next
try asked the person again. Here the second process of a try waits in the queue until the first has reported its end, and a task in the
queue is one that the scheduler leaves alone.

Between two looks the scheduler waits in here for plugins/doorbell.py, which ends the wait when there is something to do.
"""

import time
from typing import Any

from airflow.executors import local_executor
from airflow.utils.state import TaskInstanceState

from doorbell import Doorbell

GIVEN_UP_AFTER_S = 60.0  # a process that was killed never reports its end
ENDS = (TaskInstanceState.SUCCESS, TaskInstanceState.FAILED)


class LocalExecutor(local_executor.LocalExecutor):
    """One process for a try of a task at a time."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._at_work: set[Any] = set()  # keys of what was given to a process and has not ended
        self._waits_since: dict[Any, float] = {}
        self._bell = Doorbell()
        self._found_work = False  # in this look

    def sync(self) -> None:
        """The last step of a look of the scheduler."""
        if not self._found_work:
            self._bell.wait()
        self._found_work = False
        super().sync()

    def order_queued_tasks_by_priority(self) -> list[Any]:
        return [(key, workload) for key, workload in super().order_queued_tasks_by_priority() if self._may_start(key)]

    def _may_start(self, key: Any) -> bool:
        if key not in self._at_work:
            return True
        return time.monotonic() - self._waits_since.setdefault(key, time.monotonic()) > GIVEN_UP_AFTER_S

    def _process_workloads(self, workload_list: Any) -> None:
        self._found_work = True
        for workload in workload_list:
            self._at_work.add(workload.key)
            self._waits_since.pop(workload.key, None)
        super()._process_workloads(workload_list)

    def change_state(self, key: Any, state: Any, info: Any = None, remove_running: bool = True) -> None:
        if state in ENDS:
            self._at_work.discard(key)
            self._waits_since.pop(key, None)
        super().change_state(key, state, info, remove_running)
