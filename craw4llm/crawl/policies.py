"""Policies: which waiting target a crawl takes next, and what it may know when it decides.

    policy = make_policy("parent_mean", Live(n_targets=..., rng_seed=0))
    priorities = policy.priorities(seen)        float32, one for each of seen.targets

Knowledge is handed over, never fetched: a policy gets one object with all that it may know beyond the links seen so far (`Live`,
`FullGraph`, `TargetText`: one class for each value of configs.Knowledge), and then, batch by batch, what the pages crawled so far showed
(`Seen`). A live policy holds no corpus, no scores and no in-degrees, so there is nothing that it could look into. `TargetText` answers for
pages that were fetched and for no others.

The formulas are in docs/artifacts.md, "Policies".
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import field
from typing import Any, ClassVar, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from craw4llm.configs import KNOWLEDGE
from craw4llm.crawl.hashing import uniform
from craw4llm.dataclass import dataclass
from craw4llm.errors import ConfigError

Targets = NDArray[np.uint32]
Priorities = NDArray[np.float32]


@dataclass(frozen=True)
class Live:
    """What a live crawler has before it fetches a page: nothing but the links it has seen, which come as `Seen`."""

    n_targets: int
    rng_seed: int


@dataclass(frozen=True)
class FullGraph(Live):
    """rank: uint32 or float32[n_targets], a measure over the whole link graph: in-degree, PageRank or harmonic centrality."""

    rank: NDArray[np.uint32] | NDArray[np.float32]


@dataclass(frozen=True)
class TargetText(Live):
    """scores: float32 scores of fetched pages (NaN: none). AssertionError for a page that was not fetched."""

    scores: Callable[[Targets], Priorities]


KNOWLEDGE_CLASS: dict[str, type[Live]] = {"live": Live, "full_graph": FullGraph, "target_text": TargetText}


@dataclass(frozen=True)
class Seen:
    """What the links of the last batch showed.

    targets: uint32, distinct, ascending: those met for the first time, and for policies whose
    priorities move also those that wait already. first_rank: int64, for each target the crawl rank of the first page of the batch that
    links to it. The links to them, in the order of their pages' crawl ranks (empty arrays for
    policies whose priorities do not move): link_target int64, index into `targets`; link_score float32, score of the linking page
    (NaN: none). mean_score: mean score of all scored pages crawled so far; NaN where there is none.

    For policies that learn: link_page uint32, the linking page of each link; new int64, rows of `targets` that are met for the first time;
    urls, their canonical URLs; depth uint32[len(targets)], links from a seed. Where the source has them, of each link: link_anchors, its
    text (None: none), and link_flags uint8, bits of craw4llm.corpus.records.LinkFlag; else empty.
    """

    targets: Targets
    first_rank: NDArray[np.int64]
    link_target: NDArray[np.int64]
    link_score: NDArray[np.float32]
    mean_score: float
    link_page: Targets = field(default_factory=lambda: np.empty(0, dtype=np.uint32))
    new: NDArray[np.int64] = field(default_factory=lambda: np.empty(0, dtype=np.int64))
    urls: Sequence[str] = ()
    depth: NDArray[np.uint32] = field(default_factory=lambda: np.empty(0, dtype=np.uint32))
    link_anchors: Sequence[str | None] = ()
    link_flags: NDArray[np.uint8] = field(default_factory=lambda: np.empty(0, dtype=np.uint8))


class Policy(Protocol):
    """moves: whether a waiting target that is linked to again gets a new priority. reads_scores: of crawled parents, or of targets.

    per_target: names of the attributes that hold one number for each target: what a checkpoint keeps of the policy.
    """

    name: ClassVar[str]
    moves: ClassVar[bool]
    reads_scores: ClassVar[bool]
    per_target: ClassVar[tuple[str, ...]]

    def priorities(self, seen: Seen) -> Priorities:
        """float32[len(seen.targets)]; the highest is crawled first, NaN comes last."""
        ...


class Quality:
    """The page's own score, read by look-ahead: the policy of Craw4LLM (arXiv 2502.13347)."""

    name: ClassVar[str] = "quality"
    moves: ClassVar[bool] = False
    reads_scores: ClassVar[bool] = True
    per_target: ClassVar[tuple[str, ...]] = ()

    def __init__(self, known: TargetText) -> None:
        self._scores = known.scores

    def priorities(self, seen: Seen) -> Priorities:
        return self._scores(seen.targets)


class Indegree:
    """In-degree over the whole corpus."""

    name: ClassVar[str] = "indegree"
    moves: ClassVar[bool] = False
    reads_scores: ClassVar[bool] = False
    per_target: ClassVar[tuple[str, ...]] = ()

    def __init__(self, known: FullGraph) -> None:
        self._rank = known.rank

    def priorities(self, seen: Seen) -> Priorities:
        return self._rank[seen.targets].astype(np.float32)


class PageRank(Indegree):
    """PageRank over the whole corpus."""

    name: ClassVar[str] = "pagerank"


class Harmonic(Indegree):
    """Harmonic centrality over the whole corpus."""

    name: ClassVar[str] = "harmonic"


class BreadthFirst:
    """A queue: minus the crawl rank of the page that first linked to the target (float32 is exact up to 2^24, then ties begin)."""

    name: ClassVar[str] = "breadth_first"
    moves: ClassVar[bool] = False
    reads_scores: ClassVar[bool] = False
    per_target: ClassVar[tuple[str, ...]] = ()

    def __init__(self, known: Live) -> None:
        pass

    def priorities(self, seen: Seen) -> Priorities:
        return -seen.first_rank.astype(np.float32)


class Random:
    """A hash of (rng_seed, target), uniform in [0, 1)."""

    name: ClassVar[str] = "random"
    moves: ClassVar[bool] = False
    reads_scores: ClassVar[bool] = False
    per_target: ClassVar[tuple[str, ...]] = ()

    def __init__(self, known: Live) -> None:
        self._seed = known.rng_seed

    def priorities(self, seen: Seen) -> Priorities:
        return uniform(self._seed, seen.targets)


class SeenIndegree:
    """Crawled pages that link to the target so far."""

    name: ClassVar[str] = "seen_indegree"
    moves: ClassVar[bool] = True
    reads_scores: ClassVar[bool] = False
    per_target: ClassVar[tuple[str, ...]] = ("_count",)

    def __init__(self, known: Live) -> None:
        self._count = np.zeros(known.n_targets, dtype=np.uint32)

    def priorities(self, seen: Seen) -> Priorities:
        self._count[seen.targets] += np.bincount(seen.link_target, minlength=len(seen.targets)).astype(np.uint32)
        return self._count[seen.targets].astype(np.float32)


class ParentFirst:
    """Score of the first scored page that linked to the target."""

    name: ClassVar[str] = "parent_first"
    moves: ClassVar[bool] = True
    reads_scores: ClassVar[bool] = True
    per_target: ClassVar[tuple[str, ...]] = ("_score",)

    def __init__(self, known: Live) -> None:
        self._score = np.full(known.n_targets, np.nan, dtype=np.float32)

    def priorities(self, seen: Seen) -> Priorities:
        scored = ~np.isnan(seen.link_score)
        first, row = np.unique(seen.link_target[scored], return_index=True)
        targets = seen.targets[first]
        unset = np.isnan(self._score[targets])
        self._score[targets[unset]] = seen.link_score[scored][row[unset]]
        return self._score[seen.targets]


class ParentMean:
    """Mean score of the crawled pages that link to the target, shrunk by one pseudo-link to the mean of all crawled pages."""

    name: ClassVar[str] = "parent_mean"
    moves: ClassVar[bool] = True
    reads_scores: ClassVar[bool] = True
    per_target: ClassVar[tuple[str, ...]] = ("_sum", "_count")

    def __init__(self, known: Live) -> None:
        self._sum = np.zeros(known.n_targets, dtype=np.float64)
        self._count = np.zeros(known.n_targets, dtype=np.uint32)

    def priorities(self, seen: Seen) -> Priorities:
        scored = ~np.isnan(seen.link_score)
        rows, scores = seen.link_target[scored], seen.link_score[scored].astype(np.float64)
        # bincount adds in the order of the links, so equal crawls have equal sums to the last bit
        self._sum[seen.targets] += np.bincount(rows, weights=scores, minlength=len(seen.targets))
        self._count[seen.targets] += np.bincount(rows, minlength=len(seen.targets)).astype(np.uint32)
        mean = (self._sum[seen.targets] + seen.mean_score) / (self._count[seen.targets].astype(np.float64) + 1)
        return mean.astype(np.float32)


class ParentMax:
    """Highest score of the crawled pages that link to the target."""

    name: ClassVar[str] = "parent_max"
    moves: ClassVar[bool] = True
    reads_scores: ClassVar[bool] = True
    per_target: ClassVar[tuple[str, ...]] = ("_score",)
    _better: ClassVar[np.ufunc] = np.fmax  # fmax and fmin pass over NaN

    def __init__(self, known: Live) -> None:
        self._score = np.full(known.n_targets, np.nan, dtype=np.float32)

    def priorities(self, seen: Seen) -> Priorities:
        self._better.at(self._score, seen.targets[seen.link_target], seen.link_score)
        return self._score[seen.targets]


class ParentMin(ParentMax):
    """Lowest score of the crawled pages that link to the target."""

    name: ClassVar[str] = "parent_min"
    _better: ClassVar[np.ufunc] = np.fmin


@runtime_checkable
class Learner(Policy, Protocol):
    """A policy that is told the scores of the pages crawled. What it knows of a target is in the row `rows` of the arrays `per_target`.
    whole: names of the arrays that a checkpoint keeps as they are."""

    learns: ClassVar[bool]
    whole: ClassVar[tuple[str, ...]]

    def rows(self, targets: Targets) -> NDArray[np.int64]:
        """int64: the row of each target."""
        ...

    def learn(self, fetched: Targets, worth: Priorities) -> None:
        """What the last batch fetched, in fetch order. worth: a page's score; 0 for one without, and for a dead link."""
        ...

    def is_due(self) -> bool:
        """Whether so much was learnt since the last `renewed` that all that wait should be estimated anew."""
        ...

    def renewed(self, waiting: Targets) -> Priorities:
        """New priorities for all that wait."""
        ...


def policy_state(policy: Policy, targets: Targets) -> dict[str, NDArray[Any]]:
    """What the policy knows of these targets (all that were met), for a checkpoint."""
    rows = policy.rows(targets) if isinstance(policy, Learner) else targets
    state = {f"policy{name}": getattr(policy, name)[rows] for name in policy.per_target}
    if isinstance(policy, Learner):
        state |= {f"policy{name}": getattr(policy, name) for name in policy.whole}
    return state


def restore_policy(policy: Policy, targets: Targets, state: Mapping[str, NDArray[Any]]) -> None:
    """Gives a new policy what `policy_state` gave of another."""
    rows = policy.rows(targets) if isinstance(policy, Learner) else targets
    for name in policy.per_target:
        getattr(policy, name)[rows] = state[f"policy{name}"]
    if isinstance(policy, Learner):
        for name in policy.whole:
            getattr(policy, name)[...] = state[f"policy{name}"]


_LIVE: tuple[Callable[[Live], Policy], ...] = (BreadthFirst, Random, SeenIndegree, ParentFirst, ParentMean, ParentMax, ParentMin)


def make_policy(name: str, known: Live, *, explore_share: float = 0.05) -> Policy:
    """explore_share: of the policy `predicted`.

    The policy of this name with its knowledge. ConfigError if `known` is not exactly what configs.KNOWLEDGE grants it."""
    if name not in KNOWLEDGE:
        raise ConfigError(f"crawl: policy is {name!r}; expected one of {', '.join(KNOWLEDGE)}")
    granted = KNOWLEDGE_CLASS[KNOWLEDGE[name]]
    if type(known) is not granted:
        raise ConfigError(
            f"crawl: the policy {name} was given {type(known).__name__}; it may know {KNOWLEDGE[name]!r} ({granted.__name__}), "
            "no more and no less (configs.KNOWLEDGE)"
        )
    if isinstance(known, TargetText):
        return Quality(known)
    if isinstance(known, FullGraph):
        return next(make for make in (Indegree, PageRank, Harmonic) if make.name == name)(known)
    if name == "predicted":
        from craw4llm.crawl.predicted import Predicted  # brings numba, which takes half a second

        return Predicted(known, explore_share)
    return next(make for make in _LIVE if getattr(make, "name", "") == name)(known)
