"""The crawl loop on a synthetic graph with scores known: pages a second and memory, against a plain heap.

    python benchmarks/crawl.py            2 million pages, 60 million links, crawl of 200,000 (batches of 10,000)
    python benchmarks/crawl.py --quick    500,000 pages, 15 million links, crawl of 50,000
    python benchmarks/crawl.py --pages 100000000 [--folder FOLDER]     100 million pages, 1 billion links on disk (6 GB, kept in FOLDER):
                                          crawls of 2 and 20 million by `quality`, each in a process of its own, the former also with
                                          the links not in memory; extrapolated to 900 million pages
    python benchmarks/crawl.py --official CHECKOUT [--official-pythonpath FOLDER]     against the released code (crawl_official.py)

The graph is that of benchmarks/graph.py, links preferring targets of like quality among others. Scores are known (an array), so that what
is measured is the crawl: reading links, the frontier, priorities, the order of everything fetched and crawled with parents and depths.
Peer of the first two: the released code's structures, heapq of tuples and a set of what was visited, over the same arrays (without its
files, processes and strings, so kind to it); its pages must be the same. Seconds are of the processor, one core, but for the cold crawl.

Last line: JSON with loop_ratio (rate of ours / the heap's, policy `quality`), pages_per_s of some policies, and bytes_per_page of the graph
that the crawl keeps; for the large graph one entry a crawl.
"""

import argparse
import heapq
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from graph import write_graph
from numpy.typing import NDArray

from craw4llm.corpus.gather import RowReader
from craw4llm.crawl.budget import Budget
from craw4llm.crawl.loop import Crawler

FILES = ("links_offsets.npy", "links_targets.npy", "scores.npy")


class Graph:
    """The part of craw4llm.corpus.reader.Corpus that a crawl reads, over the files of write_graph."""

    def __init__(self, folder: Path) -> None:
        offsets, targets, scores = (np.load(folder / name, mmap_mode="r") for name in FILES)
        self.n_pages = self.n_targets = len(offsets) - 1
        self.n_links = len(targets)
        self.offsets, self.targets = np.asarray(offsets), np.asarray(targets)
        self.outlinks = RowReader(offsets, targets).read
        self.scores = np.asarray(scores)
        self.heldout = np.empty(0, dtype=np.uint32)
        self.n_hosts = 1
        self.host_ids = np.broadcast_to(np.int32(0), self.n_pages)
        self.dead_urls = pa.array([], pa.string())

    @property
    def indegree(self) -> NDArray[np.uint32]:
        return np.bincount(self.outlinks(np.arange(self.n_pages))[1], minlength=self.n_pages).astype(np.uint32)


class Scores:
    """Stands in for PageScores."""

    def __init__(self, scores: NDArray[np.float32]) -> None:
        self._scores = scores

    def scores(self, pages: NDArray[Any]) -> NDArray[np.float32]:
        return np.take(self._scores, pages)


class Watch:
    """Stands in for the progress bar: the largest frontier, and the most memory that is no file's."""

    def __init__(self) -> None:
        self.crawler: Crawler | None = None
        self.frontier = self.visited = 0

    def update(self, count: int, note: str = "") -> None:
        assert self.crawler is not None
        self.frontier = max(self.frontier, self.crawler._frontier.nbytes)
        self.visited = self.crawler._seen.nbytes


def make_crawler(graph: Graph, policy: str, pages: int, batch: int) -> Crawler:
    seeds = np.sort(np.random.default_rng(1).choice(graph.n_pages, batch, replace=False)).astype(np.uint32)
    rank = graph.indegree.astype(np.float32) if policy == "indegree" else None
    scores: Any = Scores(graph.scores)
    return Crawler(graph, policy, scores, seeds=seeds, budget=Budget(pages=pages), batch_pages=batch, rank=rank)  # type: ignore[arg-type]


def plain(graph: Graph, seeds: list[int], pages: int, batch: int) -> list[int]:
    """The same crawl, one page at a time."""
    heap: list[tuple[float, int]] = []
    seen, crawled = set(seeds), list(seeds)
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


def compare(options: argparse.Namespace, folder: Path) -> None:
    n = 500_000 if options.quick else 2_000_000
    pages = options.crawl or n // 10
    batch = max(100, min(10_000, pages // 20))
    write_graph(folder, n, 30.0, 0)
    graph = Graph(folder)
    links = f"{graph.n_links:,} links"
    print(f"{n:,} pages, {links}; crawl of {pages:,} in batches of {batch:,}; cpu seconds, median of {options.rounds}")
    policies = ("quality", "indegree", "breadth_first", "random", "seen_indegree", "parent_mean", "parent_max")
    spent: dict[str, list[float]] = {policy: [] for policy in (*policies, "heap")}
    ours: Any = None
    for _ in range(options.rounds):
        for policy in policies:
            crawler, watch = make_crawler(graph, policy, pages, batch), Watch()
            watch.crawler = crawler
            start = time.process_time()
            crawl = crawler.run(watch)  # type: ignore[arg-type]
            spent[policy].append(time.process_time() - start)
            if policy == "quality":
                ours = crawl
                kept = watch.frontier + watch.visited + crawler._fetched.nbytes + crawler._linked_by.nbytes
        seeds = ours.crawled[:batch].tolist()
        start = time.process_time()
        expected = plain(graph, seeds, pages, batch)
        spent["heap"].append(time.process_time() - start)
        assert ours.crawled.tolist() == expected, "the loop and the plain heap must crawl the same pages in the same order"
    rates = {name: pages / float(np.median(seconds)) for name, seconds in spent.items()}
    for name, rate in rates.items():
        print(f"{name:15}{np.median(spent[name]):9.2f} s{rate:12,.0f} pages/s")
    print(f"quality: {len(ours.fetched):,} pages discovered; {kept / n:.2f} bytes a page of the graph for visited, frontier and order")
    result = {"loop_ratio": round(float(np.median([h / o for h, o in zip(spent["heap"], spent["quality"], strict=True)])), 2)}
    print(json.dumps({**result, "pages_per_s": {name: round(rate) for name, rate in rates.items()}, "bytes_per_page": round(kept / n, 2)}))


# ---- the large graph --------------------------------------------------------------------------------------------------------


def one(folder: Path, pages: int, cold: bool) -> dict[str, float]:
    """A crawl by `quality` in this process."""
    for name in FILES:
        with (folder / name).open("rb") as stream:
            if cold:
                os.fsync(stream.fileno())
                os.posix_fadvise(stream.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            else:
                while stream.read(1 << 24):
                    pass
    crawler, watch = make_crawler(Graph(folder), "quality", pages, 10_000), Watch()
    watch.crawler = crawler
    wall, cpu = time.perf_counter(), time.process_time()
    crawl = crawler.run(watch)  # type: ignore[arg-type]
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    assert len(crawl.crawled) == pages == len(np.unique(crawl.crawled))
    return {
        "crawled": pages,
        "discovered": len(crawl.fetched),
        "links": sum(row.links for row in crawl.iterations),
        "wall_s": round(wall, 2),
        "cpu_s": round(cpu, 2),
        "pages_per_s_cpu": round(pages / cpu),
        "pages_per_s_wall": round(pages / wall),
        "visited_bytes": watch.visited,
        "frontier_bytes": watch.frontier,
        "peak_rss_bytes": int(status["VmHWM"].split()[0]) * 1024,
        "end_anonymous_bytes": int(status["RssAnon"].split()[0]) * 1024,
    }


def large(options: argparse.Namespace, folder: Path) -> None:
    n = options.pages
    if not all((folder / name).exists() for name in FILES):
        print(write_graph(folder, n, options.mean_links, 0), flush=True)
    runs = {"2%": (n // 50, False), "2% cold": (n // 50, True), "20%": (n // 5, False)}
    if options.crawl:
        runs = {f"{options.crawl:,}": (options.crawl, False), "cold": (options.crawl, True)}
    found = {}
    for name, (pages, cold) in runs.items():
        command = [sys.executable, __file__, "--one", str(folder), "--crawl", str(pages), *(["--cold"] if cold else [])]
        lines = subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()
        found[name] = json.loads(lines[-1])
        print(f"{name:8}" + "  ".join(f"{key} {value:,}" for key, value in found[name].items()), flush=True)
    last = list(found.values())[-1]
    scale = 900_000_000
    print(f"extrapolated to {scale:,} pages, {last['crawled']:,} crawled, discovered as above:")
    for what, size in (
        ("visited, a bit a page", scale / 8),
        ("frontier, the largest as above", last["frontier_bytes"]),
        ("order of fetches and first links, 8 bytes a page discovered", 8 * last["discovered"]),
        ("order of crawls and priorities, 8 bytes a page crawled", 8 * last["crawled"]),
        ("mapped: link offsets, 8 bytes a page", 8 * scale),
        ("mapped: link targets, 20 a page", 80 * scale),
        ("mapped: scores, 4 bytes a page", 4 * scale),
    ):
        print(f"  {what:62}{size / 1e9:8.2f} GB")
    print(json.dumps({name: run for name, run in found.items()}))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--pages", type=int, help="pages of the large graph")
    parser.add_argument("--mean-links", type=float, default=10.6)
    parser.add_argument("--folder", type=Path, help="where the large graph is, or is kept (default: a temporary folder)")
    parser.add_argument("--crawl", type=int, help="pages to crawl")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--official", type=Path, help="a checkout of the released code to compare with")
    parser.add_argument("--official-pythonpath", type=Path, help="a folder of modules that the released code needs")
    parser.add_argument("--one", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--cold", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.official is not None:
        from crawl_official import compare_with_official  # the corpus of its comparison takes minutes to make

        compare_with_official(options.official, options.official_pythonpath, quick=options.quick)
    elif options.one is not None:
        print(json.dumps(one(options.one, options.crawl, options.cold)))
    else:
        with tempfile.TemporaryDirectory() as temporary:
            (large if options.pages else compare)(options, options.folder or Path(temporary))


if __name__ == "__main__":
    main()
