"""The crawl loop on a synthetic graph with scores known: pages a second and bytes a page, against a plain heap.

    python benchmarks/crawl.py            2 million pages, 60 million links, crawl of 200,000 (batches of 10,000)
    python benchmarks/crawl.py --quick    500,000 pages, 15 million links, crawl of 50,000
    python benchmarks/crawl.py --pages 100000000 --mean-links 11.5 --crawl 2000000     about 15 GB of memory

Links have a log-normal number a page and prefer targets of like quality; 40% of them go anywhere. Scores are known (an array), so that
what is measured is the crawl: reading links, the frontier, priorities, the trace. Peer: the released code's structures, heapq of tuples and
a set of what was visited, over the same arrays (without its files, processes and strings, so kind to it); its pages must be the same.

Last line: JSON with loop_ratio (rate of ours / the heap's, policy `quality`), pages_per_s of some policies, and bytes_per_page.
"""

import argparse
import heapq
import json
import time
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from craw4llm.crawl.loop import Budget, Crawler


class Graph:
    """The part of craw4llm.corpus.reader.Corpus that a crawl reads, in memory."""

    def __init__(self, n: int, mean_links: float, seed: int) -> None:
        rng = np.random.default_rng(seed)
        self.n_pages = self.n_targets = n
        degree = np.minimum(rng.lognormal(np.log(mean_links) - 0.5, 1.0, n), 500).astype(np.int64)
        self.offsets = np.zeros(n + 1, dtype=np.int64)
        np.cumsum(degree, out=self.offsets[1:])
        self.scores = rng.beta(0.5, 1.2, n).astype(np.float32)
        by_score = np.argsort(self.scores, kind="stable").astype(np.uint32)
        place = np.empty(n, dtype=np.int64)
        place[by_score] = np.arange(n)
        self.targets = np.empty(self.offsets[-1], dtype=np.uint32)
        step = 1 << 20
        for first in range(0, n, step):
            last = min(first + step, n)
            source = np.repeat(np.arange(first, last), degree[first:last])
            near = np.clip(place[source] + rng.normal(0, n / 40, len(source)), 0, n - 1).astype(np.int64)
            anywhere = rng.integers(0, n, len(source))
            self.targets[self.offsets[first] : self.offsets[last]] = np.where(rng.random(len(source)) < 0.4, anywhere, by_score[near])
        self.heldout_mask = np.zeros(n, dtype=np.bool_)
        self.hosts = [""]
        self.host_ids = np.zeros(n, dtype=np.int32)
        self.indegree = np.bincount(self.targets, minlength=n).astype(np.uint32)
        self.dead_urls = pa.array([], pa.string())

    def outlinks(self, pages: NDArray[Any]) -> tuple[NDArray[np.int64], NDArray[np.uint32]]:
        starts = self.offsets[pages]
        lengths = self.offsets[np.asarray(pages, dtype=np.int64) + 1] - starts
        offsets = np.zeros(len(pages) + 1, dtype=np.int64)
        np.cumsum(lengths, out=offsets[1:])
        rows = np.arange(offsets[-1], dtype=np.int64) + np.repeat(starts - offsets[:-1], lengths)
        return offsets, self.targets[rows]


class Scores:
    """Stands in for PageScores."""

    def __init__(self, scores: NDArray[np.float32]) -> None:
        self._scores = scores

    def scores(self, pages: NDArray[Any]) -> NDArray[np.float32]:
        return self._scores[pages]


def plain(graph: Graph, seeds: NDArray[np.uint32], pages: int, batch: int) -> list[int]:
    """The same crawl, one page at a time."""
    heap: list[tuple[float, int]] = []
    seen, crawled = set(seeds.tolist()), seeds.tolist()
    last = crawled
    while len(crawled) < pages:
        for page in last:
            for target in graph.targets[graph.offsets[page] : graph.offsets[page + 1]].tolist():
                if target not in seen:
                    seen.add(target)
                    heapq.heappush(heap, (-float(graph.scores[target]), target))
        last = [heapq.heappop(heap)[1] for _ in range(min(batch, pages - len(crawled), len(heap)))]
        if not last:
            break
        crawled += last
    return crawled


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--pages", type=int)
    parser.add_argument("--mean-links", type=float, default=30.0)
    parser.add_argument("--crawl", type=int)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    n = options.pages or (500_000 if options.quick else 2_000_000)
    pages = options.crawl or n // 10
    batch = max(100, min(10_000, pages // 20))
    graph = Graph(n, options.mean_links, 0)
    seeds = np.sort(np.random.default_rng(1).choice(n, batch, replace=False)).astype(np.uint32)
    print(f"{n:,} pages, {len(graph.targets):,} links; crawl of {pages:,} in batches of {batch:,}; cpu seconds, median of {options.rounds}")
    policies = ("quality", "indegree", "breadth_first", "random", "seen_indegree", "parent_mean", "parent_max")
    spent: dict[str, list[float]] = {policy: [] for policy in (*policies, "heap")}
    state = 0
    expected: list[int] = []
    for _ in range(options.rounds):
        for policy in policies:
            start = time.process_time()
            crawler = Crawler(graph, policy, Scores(graph.scores), seeds=seeds, budget=Budget(pages=pages), batch_pages=batch)  # type: ignore[arg-type]
            crawl = crawler.run()
            spent[policy].append(time.process_time() - start)
            if policy == "quality":
                state = sum(value.nbytes for value in vars(crawler).values() if isinstance(value, np.ndarray))
                state += sum(run.nbytes for run in crawler._frontier._runs)
                ours, visited, waiting = crawl.crawled.tolist(), len(crawl.fetched), len(crawler._frontier)
        start = time.process_time()
        expected = plain(graph, seeds, pages, batch)
        spent["heap"].append(time.process_time() - start)
    assert ours == expected, "the loop and the plain heap must crawl the same pages in the same order"
    rates = {name: pages / float(np.median(seconds)) for name, seconds in spent.items()}
    for name, rate in rates.items():
        print(f"{name:15}{np.median(spent[name]):9.2f} s{rate:12,.0f} pages/s")
    print(f"quality: {visited:,} pages discovered, {waiting:,} waiting at the end; arrays {state / n:.1f} bytes a page of the graph")
    result = {"loop_ratio": round(float(np.median([h / o for h, o in zip(spent["heap"], spent["quality"], strict=True)])), 2)}
    print(json.dumps({**result, "pages_per_s": {name: round(rate) for name, rate in rates.items()}, "bytes_per_page": round(state / n, 2)}))


if __name__ == "__main__":
    main()
