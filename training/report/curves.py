"""What each crawl found, along the crawl: per page crawled and per fetch (request).

    scores = Scores.read(study.corpus, study.scores)
    curves = curves_of(read_traces(study, scores), scores, keep=600)
    for curve in curves: curve.policy, curve.replicate, curve.measure, curve.x, curve.y

Five measures, for every crawl alike, from its artifact's pages.parquet and dead_links.parquet and the scores of all pages:

    mean_score_crawled      mean score of the first x pages crawled
    mean_score_best         mean score of the best `keep` pages among the first x fetches: what selecting after x requests gives.
                            It starts where `keep` scored pages have been fetched; the mean of fewer would be no like for like.
    top_decile_by_pages     pages of the corpus's top tenth by score among the first x pages crawled, as a share of that tenth
    top_decile_by_fetches   the same among the first x fetches, dead links counted
    precision_by_pages      pages of the top tenth among the first x pages crawled, as a share of these x

The top tenth is taken over the scored pages that a crawl may fetch (held-out pages left out), ties by page id. Pages without a score
(empty text) count as pages and fetches and are in no mean. Without a `scores` input only the crawls that used a scorer have the
first two measures, from the scores that they stored.
"""

import dataclasses
import math
from collections.abc import Sequence
from typing import Literal

import numpy as np
import pyarrow.compute as pc
import pyarrow.parquet as pq
import scipy.stats
from numpy.typing import NDArray

from craw4llm.artifact import Artifact
from training.report.lineage import Study
from training.report.verdict import Floats

Measure = Literal["mean_score_crawled", "mean_score_best", "top_decile_by_pages", "top_decile_by_fetches", "precision_by_pages"]
TOP_SHARE = 0.1
POINTS = 200  # of a curve, at most one more for its end

Ids = NDArray[np.int64]


@dataclasses.dataclass(frozen=True)
class Trace:
    """A crawl as the curves need it; all arrays in fetch order, one element per fetched page.

    page; fetch_rank (dead links counted); crawl_rank (-1: only fetched); score (NaN: none).
    dead_rank: fetch ranks of the dead links, ascending. scored: scores are known (else all are NaN).
    """

    policy: str
    replicate: int
    page: Ids
    fetch_rank: Ids
    crawl_rank: Ids
    score: Floats
    dead_rank: Ids
    scored: bool

    @property
    def fetches(self) -> int:
        return len(self.page) + len(self.dead_rank)

    @property
    def in_crawl_order(self) -> Ids:
        """Rows of the crawled pages by crawl rank."""
        crawled = np.flatnonzero(self.crawl_rank >= 0)
        return crawled[np.argsort(self.crawl_rank[crawled], kind="stable")]

    def within(self, fetches: int) -> tuple[int, int]:
        """(pages fetched, dead links requested) among the first so many fetches."""
        return int(np.sum(self.fetch_rank < fetches)), int(np.sum(self.dead_rank < fetches))


@dataclasses.dataclass(frozen=True)
class Curve:
    """x: pages crawled or fetches, int64, ascending. y: float64."""

    policy: str
    replicate: int
    measure: Measure
    x: Ids
    y: Floats


@dataclasses.dataclass(frozen=True)
class Scores:
    """The scores of all pages as the report uses them.

    by_page float64[n_pages] (NaN: no score). open_to_crawls bool[n_pages]: scored and not held-out. top bool[n_pages]: the top tenth
    of these.
    """

    by_page: Floats
    open_to_crawls: NDArray[np.bool_]
    top: NDArray[np.bool_]

    @classmethod
    def read(cls, corpus: Artifact, scores: Artifact) -> "Scores":
        by_page = np.load(scores.file("scores.npy")).astype(np.float64)
        open_to_crawls = np.isfinite(by_page)
        open_to_crawls[np.load(corpus.file("heldout.npy"))] = False
        return cls(by_page, open_to_crawls, top_tenth(by_page, open_to_crawls))

    def mean_of_best(self, keep: int) -> float | None:
        """Mean score of the best `keep` pages of all that a crawl may fetch; None where there are fewer."""
        candidates = self.by_page[self.open_to_crawls]
        return float(np.sort(candidates)[-keep:].mean()) if 0 < keep <= len(candidates) else None


def top_tenth(by_page: Floats, among: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """bool[n_pages]: the tenth (rounded down, as the oracle arm has it) of the pages in `among` with the highest score, ties by page id."""
    ids = np.flatnonzero(among)
    best = ids[np.lexsort((ids, -by_page[ids]))][: math.floor(TOP_SHARE * len(ids))]
    top = np.zeros(len(by_page), dtype=np.bool_)
    top[best] = True
    return top


def read_trace(policy: str, replicate: int, crawl: Artifact, scores: Scores | None) -> Trace:
    """A crawl's fetches in order, with the corpus's scores where given, else with those that the crawl stored."""
    columns = ["page", "fetch_rank", "crawl_rank", "score"]
    table = pq.read_table(crawl.file("pages.parquet"), columns=columns)
    dead = pq.read_table(crawl.file("dead_links.parquet"), columns=["fetch_rank"])

    def ids(name: str) -> Ids:
        return pc.fill_null(table[name].cast("int64"), -1).to_numpy().astype(np.int64)

    page = ids("page")
    stored = table["score"]
    if scores is not None:
        score, scored = scores.by_page[page], True
    else:
        score = pc.fill_null(stored.cast("float64"), math.nan).to_numpy().astype(np.float64)
        scored = stored.null_count < len(stored)
    return Trace(
        policy,
        replicate,
        page,
        ids("fetch_rank"),
        ids("crawl_rank"),
        score,
        np.sort(dead["fetch_rank"].cast("int64").to_numpy()),
        scored,
    )


def read_traces(study: Study, scores: Scores | None) -> list[Trace]:
    """All crawls that were given to the report, by policy and replicate."""
    return [
        read_trace(policy, replicate, crawl, scores)
        for policy in sorted(study.crawls)
        for replicate, crawl in sorted(study.crawls[policy].items())
    ]


def curves_of(traces: Sequence[Trace], scores: Scores | None, keep: int | None) -> list[Curve]:
    """Every measure of every crawl that can be had. keep: pages that an arm keeps; None leaves out mean_score_best."""
    most_pages = max((len(t.in_crawl_order) for t in traces), default=0)
    most_fetches = max((t.fetches for t in traces), default=0)
    found = []
    for t in traces:
        rows = t.in_crawl_order
        pages, fetches = grid(most_pages, len(rows)), grid(most_fetches, t.fetches)
        if t.scored:
            found.append(Curve(t.policy, t.replicate, "mean_score_crawled", *mean_of_first(t.score[rows], pages)))
            if keep is not None:
                found.append(Curve(t.policy, t.replicate, "mean_score_best", *mean_of_best(t.fetch_rank, t.score, keep, fetches)))
        if scores is not None and scores.top.any():
            total = int(scores.top.sum())
            top = scores.top[t.page]
            by_pages = np.searchsorted(np.flatnonzero(top[rows]), pages) / total
            by_fetches = np.searchsorted(t.fetch_rank[top], fetches) / total
            found.append(Curve(t.policy, t.replicate, "top_decile_by_pages", pages, by_pages))
            found.append(Curve(t.policy, t.replicate, "precision_by_pages", pages, by_pages * total / np.maximum(pages, 1)))
            found.append(Curve(t.policy, t.replicate, "top_decile_by_fetches", fetches, by_fetches))
    return found


def grid(most: int, end: int) -> Ids:
    """At most POINTS evenly spaced counts from 1 to `most`, those up to `end`, and `end` itself."""
    even = np.unique(np.linspace(1, max(most, 1), POINTS).round().astype(np.int64))
    return np.unique(np.append(even[even < end], end)) if end else np.empty(0, dtype=np.int64)


def mean_of_first(score: Floats, counts: Ids) -> tuple[Ids, Floats]:
    """(counts, mean of the first so many scores), NaN scores left out; counts without any score are dropped."""
    finite = np.isfinite(score)
    sums = np.concatenate([[0.0], np.cumsum(np.where(finite, score, 0.0))])[counts]
    number = np.concatenate([[0], np.cumsum(finite)])[counts]
    return counts[number > 0], sums[number > 0] / number[number > 0]


def mean_of_best(fetch_rank: Ids, score: Floats, keep: int, counts: Ids) -> tuple[Ids, Floats]:
    """(counts, mean of the best `keep` scores among the first so many fetches) where so many scored pages have been fetched.

    fetch_rank: ascending, of each page; dead links take ranks without a page. counts: ascending.
    """
    x, y = [], []
    best = np.empty(0)
    start = 0
    for count in counts.tolist():
        stop = int(np.searchsorted(fetch_rank, count))
        new = score[start:stop]
        best = np.concatenate([best, new[np.isfinite(new)]])
        if len(best) > keep:
            best = np.partition(best, len(best) - keep)[-keep:]
        start = stop
        if len(best) == keep:
            x.append(count)
            y.append(float(np.sort(best).mean()))
    return np.array(x, dtype=np.int64), np.array(y, dtype=np.float64)


@dataclasses.dataclass(frozen=True)
class Band:
    """A policy's curve over its replicates: the mean, and where there are several replicates, the 95% t interval of the mean.

    Points that not every replicate reaches are left out.
    """

    policy: str
    measure: Measure
    replicates: int
    x: Ids
    y: Floats
    low: Floats | None
    high: Floats | None


def bands(curves: Sequence[Curve], measure: Measure) -> list[Band]:
    """One a policy that has the measure, by name."""
    found = []
    for policy in sorted({c.policy for c in curves if c.measure == measure}):
        own = [c for c in curves if c.policy == policy and c.measure == measure and len(c.x)]
        if not own:
            continue
        x = own[0].x
        for c in own[1:]:
            x = np.intersect1d(x, c.x)
        if not len(x):
            continue
        values = np.stack([c.y[np.searchsorted(c.x, x)] for c in own])
        low = high = None
        if len(own) > 1:
            half = scipy.stats.t.ppf(0.975, len(own) - 1) * values.std(axis=0, ddof=1) / math.sqrt(len(own))
            low, high = values.mean(axis=0) - half, values.mean(axis=0) + half
        found.append(Band(policy, measure, len(own), x, values.mean(axis=0), low, high))
    return found
