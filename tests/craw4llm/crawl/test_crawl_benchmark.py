"""benchmarks/crawl.py on a small graph: its stand-ins for corpus and scores are what the loop reads, and its peer crawls the same pages."""

import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).resolve().parents[3] / "benchmarks"


@pytest.fixture
def benchmark(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import crawl

    yield crawl
    for name in ("crawl", "graph"):
        sys.modules.pop(name, None)


def test_the_loop_and_the_plain_heap_crawl_the_same(benchmark, tmp_path):
    benchmark.write_graph(tmp_path, 3000, 10.0, 0)
    graph = benchmark.Graph(tmp_path)
    for policy in ("quality", "indegree", "parent_mean"):
        watch = benchmark.Watch()
        watch.crawler = benchmark.make_crawler(graph, policy, 600, 50)
        crawled = watch.crawler.run(watch).crawled.tolist()
        assert len(set(crawled)) == 600 and watch.frontier > 0
        assert (crawled == benchmark.plain(graph, crawled[:50], 600, 50)) == (policy == "quality")
