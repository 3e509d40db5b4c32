"""Worker processes that never outlive the process that started them.

    with worker_pool(2, initializer=open_corpus, initargs=(path,)) as pool:
        for result in pool.map(work, chunks): ...

`concurrent.futures` with fresh interpreters (spawn: no inherited locks or threads). After `kill -9` of the parent an ordinary pool's
workers would wait for work for ever; these watch their parent and end with it.
"""

import contextlib
import multiprocessing
import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from multiprocessing.connection import wait
from typing import Any


def new_pool(workers: int, *, initializer: Callable[..., None] | None = None, initargs: tuple[Any, ...] = ()) -> ProcessPoolExecutor:
    """A pool of `workers` fresh processes, for owners that shut it down themselves."""
    context = multiprocessing.get_context("spawn")
    return ProcessPoolExecutor(workers, mp_context=context, initializer=_start, initargs=(initializer, initargs))


@contextlib.contextmanager
def worker_pool(
    workers: int, *, initializer: Callable[..., None] | None = None, initargs: tuple[Any, ...] = ()
) -> Iterator[ProcessPoolExecutor]:
    """A pool for the block. On an error or interruption inside the block its processes are ended at once."""
    pool = new_pool(workers, initializer=initializer, initargs=initargs)
    try:
        yield pool
    except BaseException:
        processes = list((pool._processes or {}).values())
        pool.shutdown(wait=False, cancel_futures=True)
        for process in processes:
            process.terminate()
        raise
    pool.shutdown(wait=True)


def _start(initializer: Callable[..., None] | None, initargs: tuple[Any, ...]) -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    threading.Thread(target=_end_with, args=(parent.sentinel,), daemon=True, name="end-with-parent").start()
    if initializer is not None:
        initializer(*initargs)


def _end_with(sentinel: int) -> None:
    with contextlib.suppress(OSError):
        wait([sentinel])
    os._exit(1)
