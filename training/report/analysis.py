"""How scores, links and hosts go together, and what it takes to match an arm: the numbers behind the paper's figures.

    relation = related(in_degree, score)             Spearman's rho with a 95% interval, and binned means
    one, two = hop_means(links, score, pages)        mean score of the pages one link and two links away
    line     = fit_doublings(pools, values)          least squares on log2(pool); line.multiple(value) -> pool that reaches it
    gini(counts)                                     concentration over hosts

Sources: Craw4LLM (arXiv 2502.13347), Figure 2 (own score against the mean score of outlinks), Figure 5 (in-degree against score and
PageRank) and section 4 ("indegree needs 4.8 times as many pages": the least-squares line of Core on log2 of the pool).
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence

import numpy as np
import scipy.sparse
import scipy.stats
from numpy.typing import NDArray

from craw4llm.corpus.reader import Corpus
from training.report.verdict import Floats

SAMPLE = 20_000  # pages that a relation is measured on; all where there are fewer
BINS = 12
FEWEST_IN_BIN = 5
_CHUNK = 500
_SEED = 20250219


@dataclasses.dataclass(frozen=True)
class Relation:
    """Two measures of the same pages.

    rho: Spearman's rank correlation; None where one of them is constant or there are fewer than three pages. low, high: 95% interval by
    Fisher's transformation with the standard error of Bonett and Wright (Psychometrika 65, 2000), sqrt((1 + rho^2 / 2) / (n - 3)).
    bins: rows of (pages, mean of x, mean of y, 10th and 90th percentile of y), by rising x.
    """

    pages: int
    rho: float | None
    low: float | None
    high: float | None
    bins: tuple[tuple[int, float, float, float, float], ...]
    why: str = ""  # there is no relation: a measure that the corpus does not know


def unknown(why: str) -> Relation:
    """A relation that cannot be had."""
    return Relation(0, None, None, None, (), why)


def related(x: Floats, y: Floats) -> Relation:
    """x, y: float64[n] of the same pages; pairs with a value that is not finite are left out. Equal x always share a bin."""
    both = np.isfinite(x) & np.isfinite(y)
    x, y = x[both], y[both]
    n = len(x)
    if n < 3 or np.ptp(x) == 0 or np.ptp(y) == 0:
        return Relation(n, None, None, None, _binned(x, y))
    rho = float(scipy.stats.spearmanr(x, y).statistic)
    low = high = None
    if n > 3 and abs(rho) < 1:
        error = 1.959964 * math.sqrt((1 + rho**2 / 2) / (n - 3))
        low, high = math.tanh(math.atanh(rho) - error), math.tanh(math.atanh(rho) + error)
    return Relation(n, rho, low, high, _binned(x, y))


def _binned(x: Floats, y: Floats) -> tuple[tuple[int, float, float, float, float], ...]:
    if not len(x):
        return ()
    edges = np.unique(np.quantile(x, np.linspace(0, 1, BINS + 1)))
    place = np.clip(np.searchsorted(edges, x, side="right") - 1, 0, max(len(edges) - 2, 0))
    made = []
    for k in range(max(len(edges) - 1, 1)):
        inside = place == k
        if inside.sum() >= min(FEWEST_IN_BIN, len(x)):
            low, high = np.quantile(y[inside], [0.1, 0.9])
            made.append((int(inside.sum()), float(x[inside].mean()), float(y[inside].mean()), float(low), float(high)))
    return tuple(made)


def sample_of(pages: NDArray[np.int64], most: int = SAMPLE) -> NDArray[np.int64]:
    """At most so many of the pages, drawn with a fixed seed, ascending."""
    if len(pages) <= most:
        return pages
    return np.sort(np.random.default_rng(_SEED).choice(pages, size=most, replace=False))


def hop_means(corpus: Corpus, score: Floats, pages: NDArray[np.int64]) -> tuple[Floats, Floats]:
    """(one, two), float64[len(pages)]: mean score of the distinct pages that are one link, and exactly two links, away.

    Dead links and pages without a score are in no mean; a page without such neighbours has NaN. Two links away: reached by following two
    links, and neither the page itself nor one of its own outlinks.
    """
    one, two = np.full(len(pages), np.nan), np.full(len(pages), np.nan)
    known = np.isfinite(score)
    value = np.where(known, score, 0.0)
    n = corpus.n_pages
    for start in range(0, len(pages), _CHUNK):
        some = pages[start : start + _CHUNK]
        near = _live_links(corpus, some)
        middle = np.unique(near.indices)
        if not len(middle):
            continue
        next_links = _live_links(corpus, middle.astype(np.int64))
        far = near[:, middle] @ next_links
        far.data[:] = 1.0
        own = scipy.sparse.csr_matrix((np.ones(len(some)), (np.arange(len(some)), some)), shape=(len(some), n))
        closer = near + own
        closer.data[:] = 1.0
        far = far - far.multiply(closer)
        far.eliminate_zeros()
        for hop, result in ((near, one), (far, two)):
            count = hop @ known.astype(np.float64)
            total = hop @ value
            result[start : start + len(some)] = np.divide(total, count, out=np.full(len(some), np.nan), where=count > 0)
    return one, two


def _live_links(corpus: Corpus, pages: NDArray[np.int64]) -> scipy.sparse.csr_matrix:
    """float64 0/1 matrix [len(pages), n_pages]: links between pages of the corpus."""
    offsets, targets = corpus.outlinks(pages)
    live = targets < corpus.n_pages
    kept = np.concatenate([[0], np.cumsum(live)])[offsets]
    indices = targets[live].astype(np.int64)
    return scipy.sparse.csr_matrix((np.ones(len(indices)), indices, kept), shape=(len(pages), corpus.n_pages))


@dataclasses.dataclass(frozen=True)
class Line:
    """value = intercept + slope * log2(pool), fitted through `points` (pool, value)."""

    slope: float
    intercept: float
    points: tuple[tuple[float, float], ...]

    def at(self, pool: float) -> float:
        return self.intercept + self.slope * math.log2(pool)

    def multiple(self, value: float) -> float | None:
        """The pool at which the line reaches the value; None for a flat line or beyond a million."""
        if self.slope == 0:
            return None
        exponent = (value - self.intercept) / self.slope
        return 2.0**exponent if abs(exponent) < 20 else None

    def extrapolates(self, pool: float) -> bool:
        """Whether the pool lies outside the points that the line was fitted to."""
        pools = [x for x, _ in self.points]
        return not min(pools) <= pool <= max(pools)


def fit_doublings(points: Sequence[tuple[float, float]]) -> Line | None:
    """Least squares of the value on log2(pool). None with fewer than two different pools."""
    if len({x for x, _ in points}) < 2:
        return None
    x = np.log2([p for p, _ in points])
    y = np.array([v for _, v in points])
    slope = float(np.sum((x - x.mean()) * (y - y.mean())) / np.sum((x - x.mean()) ** 2))
    return Line(slope, float(y.mean() - slope * x.mean()), tuple(points))


def gini(counts: NDArray[np.int64]) -> float | None:
    """Gini coefficient of non-negative counts: 0 all equal, towards 1 all on one. None for no counts."""
    ordered = np.sort(np.asarray(counts, dtype=np.float64))
    n, total = len(ordered), float(ordered.sum())
    if not n or total == 0:
        return None
    return float(2 * np.sum(np.arange(1, n + 1) * ordered) / (n * total) - (n + 1) / n)


def t_interval(values: Sequence[float]) -> tuple[float, float] | None:
    """95% interval of the mean by Student's t; None for fewer than two values."""
    if len(values) < 2:
        return None
    mean = float(np.mean(values))
    half = float(scipy.stats.t.ppf(0.975, len(values) - 1)) * float(np.std(values, ddof=1)) / math.sqrt(len(values))
    return mean - half, mean + half


def histogram(scores: Mapping[str, Floats], bins: int = 20) -> tuple[Floats, dict[str, Floats]]:
    """(edges float64[bins + 1], name -> share of its scored pages in each bin), on edges that all share."""
    finite = {name: values[np.isfinite(values)] for name, values in scores.items()}
    everything = np.concatenate([v for v in finite.values() if len(v)] or [np.array([0.0, 1.0])])
    low, high = float(everything.min()), float(everything.max())
    if low >= 0 and high <= 1:
        low, high = 0.0, 1.0
    edges = np.linspace(low, high if high > low else low + 1, bins + 1)
    return edges, {name: np.histogram(v, bins=edges)[0] / len(v) for name, v in finite.items() if len(v)}
