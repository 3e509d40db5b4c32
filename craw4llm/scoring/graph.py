"""Scores of a page's place in the link graph: in-degree, PageRank, harmonic centrality. They belong to one corpus.

    pagerank(links, n, damping=0.85, tolerance=1e-6)    float64[n], and what it took
    harmonic(links, n, registers=64)                    float64[n]

Nodes are all targets of the corpus, dead links among them (they have no links of their own), as whoever holds the whole graph would see
them. The links stay on disk: they are read in blocks, once an iteration, in their order. PageRank keeps two numbers a node, from 134
million nodes on in mapped files without a name; HyperBall keeps `registers` bytes a node twice, in memory. One thread: the sums are the
same on any machine.

**PageRank** (Brin, Page, 1998): power iteration; the rank of nodes without links is spread evenly. The rest of an iteration is under
tolerance * damping / (1 - damping) from the fixed point, in L1.

**HyperBall** (Boldi, Vigna, 2013): each node keeps a HyperLogLog counter of the nodes that reach it in t steps or fewer; harmonic
centrality is the sum over t of (new ones) / t. Unreachable nodes count 0, itself not.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numba
import numpy as np
from numpy.typing import NDArray

from craw4llm.artifact import Artifact
from craw4llm.corpus.reader import Corpus
from craw4llm.crawl.hashing import hash_ids
from craw4llm.errors import StageError
from craw4llm.scoring.mapped import zeros
from craw4llm.scoring.scorer import SCORED, Reads, Reasons, Scores

_BLOCK_LINKS = 1 << 24
_MOST_ITERATIONS = 1000

Tick = Callable[[str], None]


@dataclass(frozen=True)
class Block:
    """Links of the nodes `first` to `first + len(offsets) - 2`; offsets int64 count from 0 in `targets` uint32."""

    first: int
    offsets: NDArray[np.int64]
    targets: NDArray[np.uint32]


class ColumnScorer:
    """One stored number for each page of one corpus."""

    reads: Reads = "page"

    def __init__(self, artifact: Artifact) -> None:
        self.corpus_fingerprint = str(artifact.manifest["inputs"]["corpus"]["fingerprint"])
        self.column: NDArray[np.float32] = np.load(artifact.file("column.npy"), mmap_mode="r")

    def score(self, texts: Sequence[str], urls: Sequence[str], pages: Sequence[int] = ()) -> tuple[Scores, Reasons]:
        return np.asarray(self.column[np.asarray(pages, dtype=np.int64)]), np.full(len(pages), SCORED, dtype=np.uint8)


def links_of(corpus: Corpus, block_links: int = _BLOCK_LINKS) -> Callable[[], Iterator[Block]]:
    """A function that reads all links of a corpus anew, in blocks of about `block_links`."""
    offsets = np.load(corpus.artifact.file("links_offsets.npy"), mmap_mode="r")
    targets = np.load(corpus.artifact.file("links_targets.npy"), mmap_mode="r")

    def read() -> Iterator[Block]:
        first, n = 0, len(offsets) - 1
        while first < n:
            last = int(np.searchsorted(offsets, offsets[first] + np.uint64(block_links), side="right")) - 1
            last = min(max(last, first + 1), n)
            part = np.asarray(offsets[first : last + 1]).astype(np.int64)
            yield Block(first, part - part[0], np.asarray(targets[part[0] : part[-1]]))
            first = last

    return read


def pagerank(
    links: Callable[[], Iterator[Block]], n: int, *, damping: float, tolerance: float, tick: Tick = lambda text: None
) -> tuple[NDArray[np.float64], dict[str, Any]]:
    """float64[n] ranks that sum to 1, and {"iterations", "change"}: L1 change of the last iteration."""
    rank = zeros(n, np.float64)
    rank[:] = 1 / n
    for iteration in range(1, _MOST_ITERATIONS + 1):
        new = zeros(n, np.float64)
        given = 0.0
        for block in links():
            given = _push(block.first, block.offsets, block.targets, rank, new, given)
        change = _finish(rank, new, damping, 1.0 - given)
        rank = new
        tick(f"iteration {iteration}, change {change:.3g}")
        if change < tolerance:
            return rank, {"iterations": iteration, "change": change}
    raise StageError(f"scorer: PageRank did not come under the tolerance {tolerance:g} in {_MOST_ITERATIONS} iterations; raise it")


def harmonic(
    links: Callable[[], Iterator[Block]], n: int, *, registers: int, tick: Tick = lambda text: None
) -> tuple[NDArray[np.float64], dict[str, Any]]:
    """float64[n] estimated harmonic centralities, and {"iterations"}: steps until no counter changed."""
    bits = registers.bit_length() - 1
    hashes = hash_ids(0, np.arange(n, dtype=np.uint64))
    old = np.zeros((n, registers), dtype=np.uint8)
    _insert(hashes, bits, old)
    sizes = np.empty(n, dtype=np.float64)
    _sizes(old, sizes)
    total = np.zeros(n, dtype=np.float64)
    for iteration in range(1, n + 1):
        new = old.copy()
        changed = False
        for block in links():
            changed |= _merge(block.first, block.offsets, block.targets, old, new)
        if not changed:
            return total, {"iterations": iteration}
        before = sizes.copy()
        _sizes(new, sizes)
        total += (sizes - before) / iteration
        old = new
        tick(f"distance {iteration}")
    return total, {"iterations": n}


@numba.njit(cache=True)
def _push(first: Any, offsets: Any, targets: Any, rank: Any, new: Any, given: Any) -> float:
    """Adds each node's share to its targets; returns `given` plus the rank given away here (one sum over all blocks)."""
    for k in range(len(offsets) - 1):
        count = offsets[k + 1] - offsets[k]
        if count:
            share = rank[first + k] / count
            given += rank[first + k]
            for i in range(offsets[k], offsets[k + 1]):
                new[targets[i]] += share
    return given


@numba.njit(cache=True)
def _finish(rank: Any, new: Any, damping: Any, kept: Any) -> float:
    """new = (1 - damping) / n + damping * (new + kept / n); returns the L1 distance from `rank`."""
    n = len(new)
    change = 0.0
    base = (1.0 - damping + damping * max(kept, 0.0)) / n
    for k in range(n):
        new[k] = base + damping * new[k]
        change += abs(new[k] - rank[k])
    return change


@numba.njit(cache=True)
def _insert(hashes: Any, bits: Any, counters: Any) -> None:
    for node in range(len(hashes)):
        h = hashes[node]
        register = np.int64(h & np.uint64((1 << bits) - 1))
        rest = h >> np.uint64(bits)
        zeros = 1
        while zeros < 64 - bits and rest & np.uint64(1) == 0:
            zeros += 1
            rest >>= np.uint64(1)
        counters[node, register] = zeros


@numba.njit(cache=True)
def _merge(first: Any, offsets: Any, targets: Any, old: Any, new: Any) -> bool:
    """new[target] = max(new[target], old[source]) for each link; whether anything changed."""
    changed = False
    for k in range(len(offsets) - 1):
        for i in range(offsets[k], offsets[k + 1]):
            target = targets[i]
            for r in range(old.shape[1]):
                if old[first + k, r] > new[target, r]:
                    new[target, r] = old[first + k, r]
                    changed = True
    return changed


@numba.njit(cache=True)
def _sizes(counters: Any, sizes: Any) -> None:
    """HyperLogLog estimates (Flajolet, Fusy, Gandouet, Meunier, 2007), with linear counting for small sets."""
    m = counters.shape[1]
    alpha = 0.673 if m == 16 else 0.697 if m == 32 else 0.709 if m == 64 else 0.7213 / (1 + 1.079 / m)
    for node in range(len(sizes)):
        total, empty = 0.0, 0
        for r in range(m):
            value = counters[node, r]
            total += 2.0 ** -np.float64(value)
            empty += value == 0
        estimate = alpha * m * m / total
        if estimate <= 2.5 * m and empty:
            estimate = m * np.log(m / empty)
        sizes[node] = estimate
