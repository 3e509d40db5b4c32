"""Worker processes that never outlive the process that started them.

    with worker_pool(2, initializer=open_corpus, initargs=(path,)) as pool:
        for result in pool.map(work, chunks): ...

`concurrent.futures` with fresh interpreters (spawn: no inherited locks or threads). After `kill -9` of the parent an ordinary pool's
workers would wait for work for ever; these notice that their parent has changed and end.
"""

import contextlib
import multiprocessing
import os
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from typing import Any

WATCH_EVERY_S = 0.5


def end_with_parent() -> None:
    """Ends this process within a second after its parent is gone, whatever it is doing."""
    parent = os.getppid()

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(WATCH_EVERY_S)
        os._exit(1)

    threading.Thread(target=watch, daemon=True, name="end-with-parent").start()


def _start(initializer: Callable[..., None] | None, initargs: tuple[Any, ...]) -> None:
    end_with_parent()
    if initializer is not None:
        initializer(*initargs)


@contextlib.contextmanager
def worker_pool(
    workers: int, *, initializer: Callable[..., None] | None = None, initargs: tuple[Any, ...] = ()
) -> Iterator[ProcessPoolExecutor]:
    """A pool of `workers` fresh processes. On an error or interruption inside the block they are ended at once."""
    context = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(workers, mp_context=context, initializer=_start, initargs=(initializer, initargs))
    try:
        yield pool
    except BaseException:
        processes = list((pool._processes or {}).values())
        pool.shutdown(wait=False, cancel_futures=True)
        for process in processes:
            process.terminate()
        raise
    pool.shutdown(wait=True)
