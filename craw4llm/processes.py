"""Worker processes that never outlive the process that started them.

    with worker_pool(2, initializer=open_corpus, initargs=(path,)) as pool:
        for result in pool.map(work, chunks): ...

`concurrent.futures` with fresh interpreters (spawn: no inherited locks or threads), and two faults of it mended. After `kill -9` of the
parent its workers would wait for work for ever. And a worker that catches SIGTERM, to save what it has, would wait for ever after its
job for the lock of the queue of work, if another worker was ended while it held that; its parent then never ends either. So each worker
watches a pipe from its parent, and ends when that closes: at once if it has no job, else when the job is done.
"""

import contextlib
import multiprocessing
import os
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from multiprocessing.connection import Connection, wait
from typing import Any, ParamSpec, TypeVar

_SENDING_S = 2.0  # for a finished job's result to leave the process

P = ParamSpec("P")
T = TypeVar("T")


class Pool(ProcessPoolExecutor):
    """An executor whose workers end with their parent, or when they are told to."""

    def __init__(self, workers: int, initializer: Callable[..., None] | None = None, initargs: tuple[Any, ...] = ()) -> None:
        reader, self._alive = multiprocessing.Pipe(duplex=False)
        context = multiprocessing.get_context("spawn")
        super().__init__(workers, mp_context=context, initializer=_start, initargs=(reader, initializer, initargs))

    def submit(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        return super().submit(_job, fn, args, kwargs)

    def end(self) -> None:
        """Ends all workers: SIGTERM, and no further job for one that catches it."""
        processes = list((self._processes or {}).values())
        self.shutdown(wait=False, cancel_futures=True)
        for process in processes:
            process.terminate()
        self._alive.close()


def new_pool(workers: int, *, initializer: Callable[..., None] | None = None, initargs: tuple[Any, ...] = ()) -> Pool:
    """A pool of `workers` fresh processes, for owners that shut it down themselves."""
    return Pool(workers, initializer, initargs)


@contextlib.contextmanager
def worker_pool(workers: int, *, initializer: Callable[..., None] | None = None, initargs: tuple[Any, ...] = ()) -> Iterator[Pool]:
    """A pool for the block. On an error or interruption inside the block its processes are told to end."""
    pool = new_pool(workers, initializer=initializer, initargs=initargs)
    try:
        yield pool
    except BaseException:
        pool.end()
        raise
    pool.shutdown(wait=True)


_working = threading.Lock()  # held while this process does a job


def _job(fn: Callable[..., T], args: tuple[Any, ...], kwargs: dict[str, Any]) -> T:
    with _working:
        return fn(*args, **kwargs)


def _start(alive: Connection, initializer: Callable[..., None] | None, initargs: tuple[Any, ...]) -> None:
    threading.Thread(target=_end_with, args=(alive,), daemon=True, name="end-with-parent").start()
    if initializer is not None:
        initializer(*initargs)


def _end_with(alive: Connection) -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    with contextlib.suppress(OSError):
        wait([alive, parent.sentinel])
    while parent.is_alive() and not _working.acquire(timeout=0.2):
        pass
    if parent.is_alive():
        time.sleep(_SENDING_S)
    os._exit(1)
