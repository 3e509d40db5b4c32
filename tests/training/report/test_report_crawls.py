"""Burden on hosts and what a policy needs, against values worked out by hand."""

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from training.report.crawls import _best_mean, _burden_row, _first, _target, burden_of
from training.report.curves import Trace


def burden(tmp_path: Path, hosts: list[str], dead: list[str]) -> dict[str, Any]:
    """Of a crawl that fetched one page of each host, then the dead links."""
    pages, path = len(hosts), tmp_path / "dead_links.parquet"
    ranks = pa.array(range(pages, pages + len(dead)), pa.uint64())
    pq.write_table(pa.table({"url": pa.array(dead, pa.string()), "fetch_rank": ranks}), path)
    corpus: Any = SimpleNamespace(host_pages=lambda ids: dict.fromkeys(hosts, 1), text_bytes=lambda ids: np.full(len(ids), 100))
    crawl: Any = SimpleNamespace(file=lambda name: tmp_path / name)
    ids = np.arange(pages)
    trace = Trace("random", 0, ids, ids, ids, np.full(pages, 0.5), np.arange(pages, pages + len(dead)), True)
    return _burden_row("arm", burden_of(corpus, crawl, trace, pages + len(dead)), pages, 10)


def test_a_dead_link_counts_for_the_host_that_pages_of_it_have(tmp_path: Path) -> None:
    row = burden(tmp_path, ["a.example", "b.example:8080", "[::1]"], ["http://b.example:8080/x", "http://[::1]/y", "https://c.example/"])
    assert (row["requests"], row["hosts"], row["text_bytes"]) == (6, 4, 300)
    assert row["top_hosts"] == "[::1] 2, b.example:8080 2, a.example 1"


@pytest.mark.parametrize(("hosts", "dead"), [(["a.example"], ["clueweb22-en0000-00-00001"]), ([""], ["0000012"])])
def test_without_urls_hosts_are_missing_and_no_number(tmp_path: Path, hosts: list[str], dead: list[str]) -> None:
    row = burden(tmp_path, hosts, dead)
    assert (row["requests"], row["requests_per_kept_page"]) == (2, 2.0)
    names = ("hosts", "hosts_per_kept_page", "hosts_per_1000_kept_tokens", "gini_over_hosts", "top_host_share")
    assert [row[name] for name in names] == [None] * 5 and row["top_hosts"] == ""


def test_the_mean_of_fewer_pages_matches_nothing() -> None:
    nan = math.nan
    assert _target(np.array([0.9, nan, 0.7]), 3) == pytest.approx(0.8)  # the reference crawled three, one without a score
    assert _best_mean(np.array([0.9, nan, 0.7]), 3) is None
    score = np.array([0.9, 0.9, nan, 0.1, 0.9, 0.9])  # the best three are as good as 0.9 from the fifth page on
    assert _first(np.arange(1, 7), score, 3, 0.9) == 5
