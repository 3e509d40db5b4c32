"""A synthetic link graph of any size without texts, written as fast as the disk takes it: 100 million pages, 1 billion links.

    facts = write_graph(Path("graph"), pages=100_000_000, links_per_page=10, seed=0)
    python benchmarks/graph.py FOLDER --pages 1000000

    graph/links_offsets.npy   uint64[pages + 1]   CSR of the out-links, as in a corpus artifact (docs/artifacts.md)
    graph/links_targets.npy   uint32[links]       each page's targets ascending, no repeats, no self-link
    graph/scores.npy          float32[pages]      planted quality, of a Beta(0.5, 1.2) distribution: most pages are poor

A page's number of links is log-normal (at most MAX_LINKS). Of them, the share `near` stays within NEAR_PAGES page ids, as links within a
host do; `homophily` leads to pages of like quality (a normal distance of LIKE of all pages, in the order of quality); `hubs` to few
pages, by a power law; the rest anywhere. All is a hash of (seed, page, number of the link): equal bytes for any number of threads.
The order of quality is a permutation of page ids by arithmetic, so that memory does not grow with the graph but for a block of pages.
"""

import argparse
import json
import math
import time
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numba
import numpy as np
from numpy.typing import NDArray

from craw4llm.corpus.npy import NpyWriter

BLOCK_PAGES = 1 << 20
MAX_LINKS = 500
NEAR_PAGES = 200
LIKE = 0.025
SIGMA = 1.0  # of the logarithm of a page's number of links


def write_graph(
    folder: Path,
    pages: int,
    links_per_page: float = 10.0,
    seed: int = 0,
    *,
    near: float = 0.4,
    homophily: float = 0.3,
    hubs: float = 0.15,
    threads: int = 2,
) -> dict[str, Any]:
    """Writes the three files. Returns pages, links and seconds."""
    if not 2 <= pages < 2**32:
        raise SystemExit(f"pages is {pages}; expected 2 to 2^32 - 1")
    folder.mkdir(parents=True, exist_ok=True)
    began = time.perf_counter()
    step = _step(pages)
    quantiles = _quantiles()
    shares = np.cumsum([near, homophily, hubs])
    starts = range(0, pages, BLOCK_PAGES)

    def block(start: int) -> tuple[NDArray[np.uint32], NDArray[np.int64], NDArray[np.float32]]:
        n = min(BLOCK_PAGES, pages - start)
        degrees = _degrees(start, n, links_per_page, seed)
        targets = np.empty(int(degrees.sum()), dtype=np.uint32)
        kept = _links(start, degrees, targets, pages, step, pow(step, -1, pages), shares, seed)
        rank = ((np.arange(start, start + n, dtype=np.uint64) * np.uint64(step)) % np.uint64(pages)).astype(np.float64)
        scores = np.interp((rank + 0.5) / pages, np.linspace(0, 1, len(quantiles)), quantiles).astype(np.float32)
        return targets[: int(kept.sum())], kept, scores

    total = 0
    with (
        NpyWriter(folder / "links_offsets.npy", np.uint64) as offsets,
        NpyWriter(folder / "links_targets.npy", np.uint32) as links,
        NpyWriter(folder / "scores.npy", np.float32) as quality,
        ThreadPoolExecutor(threads) as pool,
    ):
        offsets.append([0])
        waiting: deque[Future[Any]] = deque()
        for start in starts:
            waiting.append(pool.submit(block, start))
            if len(waiting) > threads:
                total = _append(waiting.popleft().result(), total, offsets, links, quality)
        while waiting:
            total = _append(waiting.popleft().result(), total, offsets, links, quality)
    return {"pages": pages, "links": total, "seconds": round(time.perf_counter() - began, 1)}


def _append(done: Any, total: int, offsets: NpyWriter, links: NpyWriter, quality: NpyWriter) -> int:
    targets, kept, scores = done
    ends = total + np.cumsum(kept)
    offsets.append(ends.astype(np.uint64))
    links.append(targets)
    quality.append(scores)
    return int(ends[-1])


def _step(pages: int) -> int:
    """A factor near the golden section of `pages` and prime to it: page -> page * step % pages is the order of quality."""
    step = int(pages * 0.6180339887) | 1
    while math.gcd(step, pages) != 1:
        step += 1
    return step % pages or 1


def _quantiles() -> NDArray[np.float64]:
    from scipy.stats import beta

    return np.asarray(beta(0.5, 1.2).ppf(np.linspace(0, 1, 4097)), dtype=np.float64)


@numba.njit(nogil=True, cache=True)
def _mixed(a: np.uint64, b: np.uint64) -> np.uint64:
    """splitmix64's finaliser on two numbers."""
    z = a * np.uint64(0x9E3779B97F4A7C15) + b * np.uint64(0xD1B54A32D192ED03) + np.uint64(0x632BE59BD9B4E019)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


@numba.njit(nogil=True, cache=True)
def _unit(bits: np.uint64) -> float:
    """In (0, 1)."""
    return (float(bits >> np.uint64(11)) + 0.5) / 9007199254740992.0


@numba.njit(nogil=True, cache=True)
def _normal(key: np.uint64, number: np.uint64) -> float:
    u, v = _unit(_mixed(key, number)), _unit(_mixed(key, number + np.uint64(1)))
    return math.sqrt(-2.0 * math.log(u)) * math.cos(2.0 * math.pi * v)


@numba.njit(nogil=True, cache=True)
def _degrees(start: int, n: int, mean: float, seed: int) -> NDArray[np.int64]:
    degrees = np.empty(n, dtype=np.int64)
    base = math.log(mean) - SIGMA * SIGMA / 2 if mean > 0 else -50.0
    for i in range(n):
        key = _mixed(np.uint64(seed), np.uint64(start + i))
        drawn = math.exp(base + SIGMA * _normal(key, np.uint64(1)))
        whole = math.floor(drawn)
        degrees[i] = min(MAX_LINKS, whole + (1 if _unit(_mixed(key, np.uint64(3))) < drawn - whole else 0))
    return degrees


@numba.njit(nogil=True, cache=True)
def _links(
    start: int,
    degrees: NDArray[np.int64],
    targets: NDArray[np.uint32],
    pages: int,
    step: int,
    inverse: int,
    shares: NDArray[np.float64],
    seed: int,
) -> NDArray[np.int64]:
    """Fills `targets` from its start. Returns the links kept of each page: sorted, no repeats, no self-link."""
    kept = np.zeros(len(degrees), dtype=np.int64)
    drawn = np.empty(MAX_LINKS, dtype=np.int64)
    n = np.uint64(pages)
    at = 0
    for i in range(len(degrees)):
        page = start + i
        key = _mixed(np.uint64(seed), np.uint64(page))
        rank = int(np.uint64(page) * np.uint64(step) % n)
        for k in range(degrees[i]):
            number = np.uint64(8 + 4 * k)
            kind, where = _unit(_mixed(key, number)), _unit(_mixed(key, number + np.uint64(1)))
            if kind < shares[0]:
                target = page - NEAR_PAGES + int(where * (2 * NEAR_PAGES + 1))
            elif kind < shares[1]:
                place = abs(int(rank + LIKE * pages * _normal(key, number + np.uint64(2))))
                if place >= pages:
                    place = max(2 * (pages - 1) - place, 0)
                target = int(np.uint64(place) * np.uint64(inverse) % n)
            elif kind < shares[2]:
                target = int(_mixed(np.uint64(seed + 1), np.uint64(int(pages * where**5))) % n)
            else:
                target = int(where * pages)
            drawn[k] = min(max(target, 0), pages - 1)
        listed = drawn[: degrees[i]]
        listed.sort()
        last = -1
        for target in listed:
            if target != last and target != page:
                targets[at] = target
                at += 1
                kept[i] += 1
            last = target
    return kept


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--pages", type=int, default=1_000_000)
    parser.add_argument("--links-per-page", type=float, default=10.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    print(json.dumps(write_graph(options.folder, options.pages, options.links_per_page, options.seed, threads=options.threads)))


if __name__ == "__main__":
    main()
