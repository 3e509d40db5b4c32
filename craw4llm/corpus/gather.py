"""Reads the rows of a CSR graph: the links of given pages, from arrays that may be larger than memory.

    rows = RowReader(offsets, targets)
    starts, links = rows.read(pages)            the links of pages[k] are links[starts[k]:starts[k + 1]]

One thread gathers what is in memory. Where the first pages of a call wait for a disk, the rest is read by many
threads, in the order of the file: each waits for one page of the file at a time, so that the disk has many reads to order. NumPy's `take`
lets other threads run. The result is the same either way.
"""

import mmap
import resource
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

_PROBE = 256  # rows that tell whether the rest is in memory
_SLOW_S = 20e-6  # a row; from memory it takes 0.5 us, from a disk 50 or more
_THREADS = 16


class RowReader:
    """offsets: integers[n + 1]; targets: any array; both may be memory-mapped, and are then advised that reads are random."""

    def __init__(self, offsets: NDArray[Any], targets: NDArray[Any]) -> None:
        self._offsets, self._targets = np.asarray(offsets), np.asarray(targets)
        mapped = (getattr(array, "_mmap", None) for array in (offsets, targets))
        self._mapped = [one for one in mapped if one is not None and hasattr(mmap, "MADV_RANDOM")]
        for one in self._mapped:
            one.madvise(mmap.MADV_RANDOM)  # else the kernel reads the neighbourhood of every row
        self._pool: ThreadPoolExecutor | None = None
        self._was_fast = False  # the last call found its rows in memory, so the next one reads without a trial

    def release(self) -> None:
        """Takes what was read off this process's memory; the kernel keeps it as long as there is room, and it can be read again."""
        for one in self._mapped:
            one.madvise(mmap.MADV_DONTNEED)

    def read(self, pages: ArrayLike) -> tuple[NDArray[np.int64], NDArray[Any]]:
        """(starts int64[len(pages) + 1], links): the rows of `pages`, concatenated in the order given."""
        ids = np.asarray(pages, dtype=np.int64)
        if len(ids) < 2 * _PROBE:
            return self._read(ids)
        were_there = self._was_fast or self._try(ids)
        began = time.perf_counter()
        found = self._read(ids)
        self._was_fast = were_there and time.perf_counter() - began <= len(ids) * _SLOW_S
        return found

    def _try(self, ids: NDArray[np.int64]) -> bool:
        """Reads some rows. Whether they were in memory; where they were not, the rest is brought there."""
        # The first rows in the order of the file, so that the rest is read in that order too.
        order = np.argsort(ids)
        began, waits = time.perf_counter(), _waits()
        self._read(ids[order[:_PROBE]])
        # On a busy machine the time alone says nothing.
        were_there = time.perf_counter() - began <= _PROBE * _SLOW_S or _waits() == waits
        if not were_there:
            self._touch(ids[order[_PROBE:]])
        return were_there

    def _read(self, ids: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[Any]]:
        first = np.take(self._offsets, ids).astype(np.int64)
        lengths = np.take(self._offsets, ids + 1).astype(np.int64) - first
        starts = np.zeros(len(ids) + 1, dtype=np.int64)
        np.cumsum(lengths, out=starts[1:])
        rows = np.repeat(first - starts[:-1], lengths)
        rows += np.arange(starts[-1], dtype=np.int64)
        return starts, np.take(self._targets, rows)

    def _touch(self, ids: NDArray[np.int64]) -> None:
        """Brings sorted rows into memory."""
        if self._pool is None:
            self._pool = ThreadPoolExecutor(_THREADS)
        list(self._pool.map(self._read, np.array_split(ids, 4 * _THREADS)))


def _waits() -> int:
    """How often this process has waited for a page of a file."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_majflt
