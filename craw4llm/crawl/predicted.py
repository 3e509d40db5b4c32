"""The policy `predicted`: an online estimate of what a fetch is worth, from what is known before it.

    policy.learn(fetched, worth)           what the last batch turned out to be
    policy.priorities(seen)                estimates for targets that were linked to
    policy.renewed(waiting)                new estimates for all that wait, when policy.is_due(): when enough was learnt

A fetch is worth the score of its page; 0 where there is no page (a dead link), or one that cannot be scored and so is never kept.

The model is linear in the features below, fitted by ridge regression to every target that was fetched after it was linked to, with its
features as they were before its own worth was known: nothing is learnt from the answer. It corrects `parent_mean`: it is fitted to
worth - parent mean, and shrinks to that while little is known. Features of a target:

    parents     mean (shrunk as in `parent_mean`), highest and lowest score of the crawled pages that link here, and their number
    siblings    mean worth of the fetches that were first met on the page that first linked here, and on the one that last did
    host        mean worth and number of its fetches; `folder` the same for the URL up to its last slash, shrunk to the host's mean
    words       mean and highest of the mean worths of the fetches whose paths have the same words
    URL, depth  length, parts of the path, links from a seed
    anchor      mean and highest of the mean worths of the fetches whose first anchor text has the same words (0 where the source has no
                anchors, as for the two below)
    body        share of the links here that stand in their page's main text, among those of which the source says where they stand
    products    of the means with each other

An `explore_share` of the targets, drawn by a hash of (rng_seed, target), is crawled as soon as it is met: what is learnt from them owes
nothing to the model.

What is known of a target is in one row of a table that grows with what is met: 108 bytes each, and 4 for each target of the corpus.

Sums run in a fixed order in float64, and the normal equations are solved by a Cholesky decomposition of our own: no BLAS, so equal crawls
on any machine. Estimates of waiting targets are renewed when the number of fetches has grown by a twentieth.
"""

import re
from collections.abc import Sequence
from typing import Any, ClassVar

import numba
import numpy as np
from numpy.typing import NDArray

from craw4llm.corpus.npy import distinct
from craw4llm.corpus.records import LinkFlag
from craw4llm.crawl.hashing import hash_bytes, uniform
from craw4llm.crawl.policies import Live, Priorities, Seen, Targets

BUCKETS = 1 << 18  # of hosts, folders and words: a collision shares a mean
WORDS = 6  # of a path at most, the last ones
ANCHOR_WORDS = 4  # of an anchor at most, the first ones
FEATURES = 32
RIDGE = 2.0
GROWTH = 1.05

_PARTS = re.compile(r"[A-Za-z]+|[0-9]+")


class Predicted:
    """See the module's docstring. One row a target that was met, two sums a bucket."""

    name: ClassVar[str] = "predicted"
    moves: ClassVar[bool] = True
    reads_scores: ClassVar[bool] = True
    learns: ClassVar[bool] = True
    per_target: ClassVar[tuple[str, ...]] = (
        "_sum",
        "_count",
        "_high",
        "_low",
        "_first",
        "_last",
        "_place",
        "_shape",
        "_child_sum",
        "_child_count",
        "_anchor",
        "_body",
        "_placed",
    )
    whole: ClassVar[tuple[str, ...]] = ("_means", "_counts", "_gram", "_moment", "_weights", "_progress")

    def __init__(self, known: Live, explore_share: float) -> None:
        self._explore_share = explore_share
        self._seed = known.rng_seed
        self._nobody = known.n_targets
        self._row = np.zeros(known.n_targets, dtype=np.uint32)  # of each target, plus 1; 0: not met
        self._n_rows = 0
        self._sum = np.zeros(0, dtype=np.float64)
        self._count = np.zeros(0, dtype=np.uint32)
        self._high = np.zeros(0, dtype=np.float32)  # NaN: none, as in `_low`
        self._low = np.zeros(0, dtype=np.float32)
        self._first = np.zeros(0, dtype=np.uint32)  # a page; _nobody: never linked to
        self._last = np.zeros(0, dtype=np.uint32)
        self._place = np.zeros((0, 2 + WORDS), dtype=np.int32)  # buckets of host, folder and words; -1: none
        self._shape = np.zeros((0, 3), dtype=np.float32)  # length of the URL, parts of its path, depth
        self._child_sum = np.zeros(0, dtype=np.float64)
        self._child_count = np.zeros(0, dtype=np.uint32)
        self._anchor = np.zeros((0, ANCHOR_WORDS), dtype=np.int32)  # buckets of words, plus 1; 0: none
        self._body = np.zeros(0, dtype=np.uint32)  # links in the main text
        self._placed = np.zeros(0, dtype=np.uint32)  # links of which is known where they stand
        self._means = np.zeros(BUCKETS, dtype=np.float64)  # sums of worths
        self._counts = np.zeros(BUCKETS, dtype=np.float64)
        self._gram = np.zeros((FEATURES, FEATURES), dtype=np.float64)
        self._moment = np.zeros(FEATURES, dtype=np.float64)
        self._weights = np.zeros(FEATURES, dtype=np.float64)
        self._progress = np.zeros(3, dtype=np.float64)  # fetches: sum of their worth, number; number at the last renewal

    def rows(self, targets: Targets) -> NDArray[np.int64]:
        """int64: the row of each target in the arrays of `per_target`; a new one where it had none."""
        found = self._row[targets]
        unmet = distinct(targets[found == 0])
        if len(unmet):
            self._grow(self._n_rows + len(unmet))
            self._row[unmet] = np.arange(self._n_rows + 1, self._n_rows + len(unmet) + 1, dtype=np.uint32)
            self._n_rows += len(unmet)
            found = self._row[targets]
        return found.astype(np.int64) - 1

    def _grow(self, needed: int) -> None:
        held = len(self._sum)
        if needed <= held:
            return
        fill = {"_high": np.nan, "_low": np.nan, "_first": self._nobody, "_last": self._nobody}
        for name in self.per_target:
            old = getattr(self, name)
            new = np.full((max(needed, held + held // 2), *old.shape[1:]), fill.get(name, 0), dtype=old.dtype)
            new[:held] = old
            setattr(self, name, new)

    def priorities(self, seen: Seen) -> Priorities:
        rows = self.rows(seen.targets)
        self.rows(seen.link_page)
        new = seen.new
        if len(new):
            ids = rows[new]
            self._place[ids], self._shape[ids, :2] = _read_urls(seen.urls)
            self._shape[ids, 2] = seen.depth[new]
        linked = rows[seen.link_target]
        self._read_links(linked, seen)
        _meet(
            linked, seen.link_page, seen.link_score, self._nobody,
            self._sum, self._count, self._high, self._low, self._first, self._last,
        )  # fmt: skip
        return self._estimate(seen.targets)

    def _read_links(self, linked: NDArray[np.int64], seen: Seen) -> None:
        if len(seen.link_flags):
            body, placed = seen.link_flags & LinkFlag.BODY, seen.link_flags & (LinkFlag.BODY | LinkFlag.BOILERPLATE)
            np.add.at(self._body, linked[body != 0], 1)
            np.add.at(self._placed, linked[placed != 0], 1)
        for row, anchor in zip(linked.tolist() if seen.link_anchors else (), seen.link_anchors, strict=True):
            if anchor and not self._anchor[row, 0]:
                words = _PARTS.findall(anchor.lower())[:ANCHOR_WORDS]
                self._anchor[row, : len(words)] = [hash_bytes(f"a{word}".encode()) % BUCKETS + 1 for word in words]

    def learn(self, fetched: Targets, worth: NDArray[np.float32]) -> None:
        """What the last batch fetched, in fetch order, with what it was worth."""
        values = worth.astype(np.float64)
        rows = self.rows(fetched)
        linked = self._first[rows] != self._nobody  # all but seeds
        features = self._features(rows[linked])
        _accumulate(features, values[linked] - features[:, 1], self._gram, self._moment)
        _remember(
            rows, values, linked, self._row, self._place, self._anchor, self._first, self._last,
            self._means, self._counts, self._child_sum, self._child_count, self._progress,
        )  # fmt: skip
        self._weights[...] = _solve(self._gram, self._moment, RIDGE)

    def is_due(self) -> bool:
        return bool(self._progress[1] >= GROWTH * self._progress[2])

    def renewed(self, waiting: Targets) -> Priorities:
        self._progress[2] = self._progress[1]
        return self._estimate(waiting)

    def _estimate(self, targets: Targets) -> Priorities:
        features = self._features(self.rows(targets))
        estimate = (features[:, 1] + _times(features, self._weights)).astype(np.float32)
        drawn = uniform(self._seed, targets)
        estimate[drawn < self._explore_share] = np.inf
        return estimate

    def _features(self, rows: NDArray[np.int64]) -> NDArray[np.float64]:
        mean = self._progress[0] / self._progress[1] if self._progress[1] else 0.0
        out = np.zeros((len(rows), FEATURES), dtype=np.float64)
        _fill(
            rows, mean, self._nobody, self._row, self._sum, self._count, self._high, self._low, self._first, self._last, self._place,
            self._shape, self._means, self._counts, self._child_sum, self._child_count, self._anchor, self._body, self._placed, out,
        )  # fmt: skip
        return out


def _read_urls(urls: Sequence[str]) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
    """(buckets int32[n, 2 + WORDS], shape float32[n, 2]) of URLs."""
    places = np.full((len(urls), 2 + WORDS), -1, dtype=np.int32)
    shapes = np.empty((len(urls), 2), dtype=np.float32)
    for row, url in enumerate(urls):
        _, _, rest = url.partition("://")
        host, _, path = rest.partition("/")
        folder = rest.rpartition("/")[0]
        words = _PARTS.findall(path.lower())[-WORDS:]
        names = [f"h{host}", f"f{folder}", *(f"w{word}" for word in words)]
        places[row, : len(names)] = [hash_bytes(name.encode()) % BUCKETS for name in names]
        shapes[row] = len(url), path.count("/")
    return places, shapes


@numba.njit(cache=True)
def _meet(
    rows: Any, pages: Any, scores: Any, nobody: Any, total: Any, count: Any, high: Any, low: Any, first: Any, last: Any
) -> None:  # fmt: skip
    for k in range(len(rows)):
        t = rows[k]
        if first[t] == nobody:
            first[t] = pages[k]
        last[t] = pages[k]
        s = scores[k]
        if np.isnan(s):
            continue
        total[t] += s
        count[t] += 1
        if not high[t] >= s:
            high[t] = s
        if not low[t] <= s:
            low[t] = s


@numba.njit(cache=True)
def _fill(
    rows: Any, mean: Any, nobody: Any, row_of: Any,
    total: Any, count: Any, high: Any, low: Any, first: Any, last: Any, place: Any, shape: Any,
    means: Any, counts: Any, child_sum: Any, child_count: Any, anchor: Any, body: Any, placed: Any, out: Any,
) -> None:  # fmt: skip
    for k in range(len(rows)):
        t = rows[k]
        row = out[k]
        parents = (total[t] + mean) / (count[t] + 1.0)
        top = high[t] if count[t] else mean
        bottom = low[t] if count[t] else mean
        h, f = place[t, 0], place[t, 1]
        host = (means[h] + 2.0 * mean) / (counts[h] + 2.0)
        folder = (means[f] + 2.0 * host) / (counts[f] + 2.0)
        words, best, n = 0.0, 0.0, 0
        for w in range(2, place.shape[1]):
            b = place[t, w]
            if b >= 0:
                value = (means[b] + 2.0 * mean) / (counts[b] + 2.0)
                words += value
                best = max(best, value)
                n += 1
        words = words / n if n else mean
        best = best if n else mean
        siblings, recent, children = parents, parents, np.uint32(0)
        if first[t] != nobody:
            p, q = row_of[first[t]] - 1, row_of[last[t]] - 1
            children = child_count[p]
            siblings = (child_sum[p] + 2.0 * parents) / (child_count[p] + 2.0)
            recent = (child_sum[q] + 2.0 * parents) / (child_count[q] + 2.0)
        row[0] = 1.0
        row[1] = parents
        row[2] = top
        row[3] = bottom
        row[4] = np.log1p(np.float64(count[t]))
        row[5] = siblings
        row[6] = recent
        row[7] = host
        row[8] = np.log1p(counts[h])
        row[9] = folder
        row[10] = np.log1p(counts[f])
        row[11] = words
        row[12] = best
        row[13] = shape[t, 0] / 100.0
        row[14] = shape[t, 1] / 10.0
        row[15] = np.log1p(np.float64(shape[t, 2]))
        row[16] = folder * folder
        row[17] = parents * parents
        row[18] = folder * parents
        row[19] = siblings * siblings
        row[20] = siblings * folder
        row[21] = words * words
        row[22] = words * siblings
        row[23] = top * top
        row[24] = folder * np.log1p(counts[f])
        if anchor[t, 0]:
            said, loudest, n = 0.0, 0.0, 0
            for w in range(anchor.shape[1]):
                if anchor[t, w]:
                    b = anchor[t, w] - 1
                    value = (means[b] + 2.0 * mean) / (counts[b] + 2.0)
                    said += value
                    loudest = max(loudest, value)
                    n += 1
            row[26] = 1.0
            row[27] = said / n
            row[28] = loudest
            row[29] = said / n * parents
        if placed[t]:
            row[30] = body[t] / placed[t]
            row[31] = row[30] * parents
        row[25] = siblings * np.log1p(np.float64(children))


@numba.njit(cache=True)
def _accumulate(rows: Any, values: Any, gram: Any, moment: Any) -> None:
    d = rows.shape[1]
    for k in range(len(rows)):
        for i in range(d):
            moment[i] += rows[k, i] * values[k]
            for j in range(i + 1):
                gram[i, j] += rows[k, i] * rows[k, j]


@numba.njit(cache=True)
def _remember(
    fetched: Any, values: Any, linked: Any, row_of: Any, place: Any, anchor: Any, first: Any, last: Any,
    means: Any, counts: Any, child_sum: Any, child_count: Any, progress: Any,
) -> None:  # fmt: skip
    for k in range(len(fetched)):
        progress[0] += values[k]
        progress[1] += 1.0
        if not linked[k]:
            continue
        t = fetched[k]
        for w in range(place.shape[1]):
            b = place[t, w]
            if b >= 0:
                means[b] += values[k]
                counts[b] += 1.0
        for w in range(anchor.shape[1]):
            if anchor[t, w]:
                means[anchor[t, w] - 1] += values[k]
                counts[anchor[t, w] - 1] += 1.0
        p, q = row_of[first[t]] - 1, row_of[last[t]] - 1
        child_sum[p] += values[k]
        child_count[p] += 1
        if q != p:
            child_sum[q] += values[k]
            child_count[q] += 1


@numba.njit(cache=True)
def _solve(gram: Any, moment: Any, ridge: Any) -> Any:
    """Weights that minimise squared error + ridge * squared weights (the constant's too), by Cholesky's method."""
    d = len(moment)
    lower = np.zeros((d, d), dtype=np.float64)
    for i in range(d):
        for j in range(i + 1):
            total = gram[i, j] + (ridge if i == j else 0.0)
            for k in range(j):
                total -= lower[i, k] * lower[j, k]
            lower[i, j] = np.sqrt(total) if i == j else total / lower[j, j]
    half = np.zeros(d, dtype=np.float64)
    for i in range(d):
        total = moment[i]
        for k in range(i):
            total -= lower[i, k] * half[k]
        half[i] = total / lower[i, i]
    weights = np.zeros(d, dtype=np.float64)
    for i in range(d - 1, -1, -1):
        total = half[i]
        for k in range(i + 1, d):
            total -= lower[k, i] * weights[k]
        weights[i] = total / lower[i, i]
    return weights


@numba.njit(cache=True)
def _times(rows: Any, weights: Any) -> Any:
    out = np.zeros(len(rows), dtype=np.float64)
    for k in range(len(rows)):
        for i in range(rows.shape[1]):
            out[k] += rows[k, i] * weights[i]
    return out
