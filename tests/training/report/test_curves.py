"""Curves of a tiny crawl, against values worked out by hand."""

import math

import numpy as np
import pytest

from training.report.curves import Scores, Trace, curves_of, grid, mean_of_best, mean_of_first, top_tenth

NAN = math.nan
# Fetches:       rank 0  1  2(dead)  3     4    5(dead)  6
# page                5  7           2     9             4
# score              .1 .8          none  .3            .6
# crawl rank          1  0           2    -             3
TRACE = Trace(
    policy="quality",
    replicate=0,
    page=np.array([5, 7, 2, 9, 4]),
    fetch_rank=np.array([0, 1, 3, 4, 6]),
    crawl_rank=np.array([1, 0, 2, -1, 3]),
    score=np.array([0.1, 0.8, NAN, 0.3, 0.6]),
    dead_rank=np.array([2, 5]),
    scored=True,
)


def test_counts_of_a_prefix() -> None:
    assert TRACE.fetches == 7
    assert TRACE.within(3) == (2, 1)
    assert TRACE.within(7) == (5, 2)
    assert TRACE.page[TRACE.in_crawl_order].tolist() == [7, 5, 2, 4]


def test_mean_of_the_pages_crawled_leaves_out_pages_without_a_score() -> None:
    x, y = mean_of_first(TRACE.score[TRACE.in_crawl_order], np.array([1, 2, 3, 4]))
    assert x.tolist() == [1, 2, 3, 4]
    assert y.tolist() == pytest.approx([0.8, 0.45, 0.45, 0.5])  # .8 | .8 .1 | .8 .1 none | .8 .1 none .6


def test_mean_of_nothing_is_no_point() -> None:
    x, y = mean_of_first(np.array([NAN, 0.5]), np.array([1, 2]))
    assert (x.tolist(), y.tolist()) == ([2], [0.5])


def test_mean_of_the_best_fetched_starts_where_enough_are_fetched() -> None:
    x, y = mean_of_best(TRACE.fetch_rank, TRACE.score, 2, np.arange(1, 8))
    assert x.tolist() == [2, 3, 4, 5, 6, 7]
    assert y.tolist() == pytest.approx([0.45, 0.45, 0.45, 0.55, 0.55, 0.7])  # {.8 .1} | {.8 .3} | {.8 .6}


def test_the_top_tenth_leaves_out_pages_that_no_crawl_may_fetch_and_breaks_ties_by_id() -> None:
    by_page = np.array([0.9, 0.5, 0.5, *([0.1] * 17), NAN, 0.99])
    among = np.isfinite(by_page)
    among[21] = False  # held-out, the best of all
    assert np.flatnonzero(top_tenth(by_page, among)).tolist() == [0, 1]


def test_curves_of_a_tiny_crawl() -> None:
    by_page = np.full(20, 0.05)
    by_page[[5, 7, 9, 4]] = [0.1, 0.8, 0.3, 0.6]
    by_page[2] = NAN
    scores = Scores(by_page, np.isfinite(by_page), top_tenth(by_page, np.isfinite(by_page)))
    assert np.flatnonzero(scores.top).tolist() == [7]  # a tenth of 19 scored pages, rounded down
    assert scores.mean_of_best(2) == pytest.approx(0.7)
    assert scores.mean_of_best(20) is None
    found = {c.measure: dict(zip(c.x.tolist(), c.y.tolist(), strict=True)) for c in curves_of([TRACE], scores, keep=2)}
    assert found["top_decile_by_fetches"] == {1: 0.0, 2: 1.0, 3: 1.0, 4: 1.0, 5: 1.0, 6: 1.0, 7: 1.0}
    assert found["top_decile_by_pages"] == {1: 1.0, 2: 1.0, 3: 1.0, 4: 1.0}
    assert found["mean_score_best"][7] == pytest.approx(0.7)
    assert found["mean_score_crawled"][4] == pytest.approx(0.5)


def test_without_scores_a_crawl_that_used_none_has_no_curve() -> None:
    blind = Trace("random", 0, TRACE.page, TRACE.fetch_rank, TRACE.crawl_rank, np.full(5, NAN), TRACE.dead_rank, scored=False)
    assert curves_of([blind], None, keep=2) == []
    assert {c.policy for c in curves_of([blind, TRACE], None, keep=2)} == {"quality"}


def test_a_grid_ends_at_the_crawls_own_end() -> None:
    assert grid(1000, 1000)[[0, -1]].tolist() == [1, 1000]
    short = grid(1000, 333)
    assert short[-1] == 333 and set(short[:-1].tolist()) <= set(grid(1000, 1000).tolist())
    assert len(grid(1000, 0)) == 0
