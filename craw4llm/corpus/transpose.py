"""In-links: the transposed link graph of a corpus, made on demand in bounded memory.

    offsets, pages = in_links(artifact, n_targets)     memory-mapped

    <root>/memo/inlinks-<fingerprint>/offsets.npy   uint64[n_targets + 1]
    <root>/memo/inlinks-<fingerprint>/pages.npy     uint32[n_links]: the pages that link to target t, ascending, are [o[t], o[t + 1])

It can be computed from the corpus at any time, so it belongs to execution and may be deleted. A counting sort: the links to each target are
counted (the corpus' own in-degrees may count something else: the anchors of ClueWeb22's inlink records), which gives the offsets; then one
pass over all links per range of targets that fits the memory puts each page in its place.
"""

import shutil
from pathlib import Path

import numba
import numpy as np
from numpy.typing import NDArray

from craw4llm.artifact import Artifact
from craw4llm.corpus.npy import NpyWriter
from craw4llm.execution import process_name

MEMORY_BYTES = 1 << 30
_BLOCK_PAGES = 1 << 20


def in_links(artifact: Artifact, n_targets: int) -> tuple[NDArray[np.uint64], NDArray[np.uint32]]:
    """(offsets, pages); computed and kept where they are not there."""
    folder = artifact.root / "memo" / f"inlinks-{artifact.fingerprint}"
    if not folder.is_dir():
        temporary = folder.with_name(f".{folder.name}.{process_name()}")
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(parents=True)
        transpose(artifact.path, temporary, n_targets)
        try:
            temporary.rename(folder)
        except OSError:  # another process was faster
            shutil.rmtree(temporary)
    return np.load(folder / "offsets.npy", mmap_mode="r"), np.load(folder / "pages.npy", mmap_mode="r")


def transpose(corpus: Path, out: Path, n_targets: int, memory_bytes: int = MEMORY_BYTES) -> None:
    """Writes offsets.npy and pages.npy into `out` from the CSR arrays in the folder `corpus`."""
    from craw4llm.corpus.merge import write_indegree

    links_offsets = np.load(corpus / "links_offsets.npy", mmap_mode="r")
    links_targets = np.load(corpus / "links_targets.npy", mmap_mode="r")
    counted = out / "counted.npy"
    write_indegree(counted, links_targets, n_targets, memory_bytes)
    indegree = np.load(counted, mmap_mode="r")
    block = 1 << 22
    with NpyWriter(out / "offsets.npy", np.uint64) as offsets:
        at = 0
        offsets.append([0])
        for start in range(0, n_targets, block):
            ends = at + np.cumsum(indegree[start : start + block], dtype=np.int64)
            offsets.append(ends.astype(np.uint64))
            at = int(ends[-1])
    counted.unlink()
    all_offsets = np.load(out / "offsets.npy", mmap_mode="r")
    n_pages = len(links_offsets) - 1
    with NpyWriter(out / "pages.npy", np.uint32) as pages:
        low = 0
        while low < n_targets:
            # Up to so many targets that their pages (4 bytes each) and cursors (8 bytes each) fit.
            high = min(n_targets, low + memory_bytes // 16)
            fits = int(np.searchsorted(all_offsets[low + 1 : high + 1], int(all_offsets[low]) + memory_bytes // 8, side="right"))
            high = min(high, low + max(1, fits))
            base = int(all_offsets[low])
            cursor = np.asarray(all_offsets[low:high]).astype(np.int64) - base
            found = np.empty(int(all_offsets[high]) - base, dtype=np.uint32)
            for first in range(0, n_pages, _BLOCK_PAGES):
                some = np.asarray(links_offsets[first : first + _BLOCK_PAGES + 1]).astype(np.int64)
                _scatter(some - some[0], np.asarray(links_targets[some[0] : some[-1]]), first, low, high, cursor, found)
            pages.append(found)
            low = high


@numba.njit(nogil=True, cache=True)
def _scatter(
    offsets: NDArray[np.int64],
    targets: NDArray[np.uint32],
    first: int,
    low: int,
    high: int,
    cursor: NDArray[np.int64],
    found: NDArray[np.uint32],
) -> None:
    for i in range(len(offsets) - 1):
        for k in range(offsets[i], offsets[i + 1]):
            target = np.int64(targets[k])
            if low <= target < high:
                found[cursor[target - low]] = first + i
                cursor[target - low] += 1


@numba.njit(nogil=True, cache=True)
def count_into(found: NDArray[np.uint32], targets: NDArray[np.uint32], low: int) -> None:
    """Adds to found[k] how often low + k is among the targets."""
    n = len(found)
    for target in targets:
        k = np.int64(target) - low
        if 0 <= k < n:
            found[k] += np.uint32(1)
