"""The crawl loop: Algorithm 1 of Craw4LLM (Yu, Liu, Xiong, arXiv 2502.13347), mode `paper`, for every policy.

    crawl = Crawler(corpus, policy, page_scores, seeds=ids, budget=Budget(pages=3014), batch_pages=150).run(progress)

    iteration 0      all seeds are fetched and crawled, in the order given
    iteration k      the links of the pages crawled in k - 1 are followed; a look-ahead policy fetches what is new, to order it;
                     then a batch of the best `batch_pages` live pages is popped and crawled (and, but for look-ahead, fetched now)

**Events.** A crawl is a sequence of two kinds of events, fetches and crawls; it ends at the first event that covers every budget. So a
crawl with a smaller budget is a prefix of one with a larger budget, by pages, fetches and tokens alike, and the last batch's links are
not followed: they belong to an iteration that does not come. Within an iteration, a look-ahead policy's fetches are in the order of
places (canonical URLs, dead links among them), before the crawls; elsewhere a page is fetched when it is popped, in the order of popping.

A dead link costs a fetch and has no place in a batch: a look-ahead policy finds out when it wants to score it, the others when they
pop it. Held-out pages are never fetched; links to them are counted.

**Options**, off by default: caps (craw4llm.crawl.caps) drop targets of hosts that have had their share, before they cost a fetch; with
`restart_seeds` a frontier that has run dry is refilled by the next pages of the draw of seeds, in an iteration of their own.

**Memory.** What a crawl keeps grows with what it meets, not with the corpus: the order of fetches and of crawls, and for each target met
the crawl rank of the page that first linked to it. Of the corpus there is one bit a target (two where priorities move). The frontier is
pruned to the pages still to be crawled where none but they can be popped: priorities that do not move, a budget in pages alone, no dead
link in the frontier, no caps. Its dropped part follows from what was met, so checkpoints, extensions and traces are the same.
"""

import json
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from craw4llm.configs import KNOWLEDGE
from craw4llm.corpus.npy import distinct
from craw4llm.corpus.reader import Corpus
from craw4llm.crawl.bitset import BitSet
from craw4llm.crawl.budget import Budget
from craw4llm.crawl.caps import Caps
from craw4llm.crawl.checkpoint import Checkpoints, State
from craw4llm.crawl.frontier import Frontier
from craw4llm.crawl.growing import Growing
from craw4llm.crawl.places import Places
from craw4llm.crawl.policies import FullGraph, Learner, Live, Policy, Seen, TargetText, make_policy, policy_state, restore_policy
from craw4llm.dataclass import dataclass
from craw4llm.errors import ConfigError
from craw4llm.execution import Progress
from craw4llm.scoring.means import exact_sum, mean_score
from craw4llm.scoring.memo import PageScores

Targets = NDArray[np.uint32]
Numbers = NDArray[np.unsignedinteger[Any]]
NOBODY = np.uint32(0xFFFFFFFF)
_ONE = np.uint32(1)
_HALF, _LOW = np.uint64(32), np.uint64(0xFFFFFFFF)
_STEP = 1 << 18
WORTH_SAVING_S = 1.0  # a crawl that has taken less is made again sooner than its checkpoint is written and read
CHECKPOINT_EVERY_S = 60.0  # a checkpoint of a crawl of 20 million pages is about 1 GB


@dataclass(kw_only=True)
class Iteration:
    """One row of iterations.parquet (docs/artifacts.md, "crawl")."""

    iteration: int
    discovered: int = 0
    fetched: int = 0
    crawled: int = 0
    dead: int = 0
    frontier: int = 0
    links: int = 0
    new_targets: int = 0
    heldout_links: int = 0
    mean_score_crawled: float | None = None
    mean_score_discovered: float | None = None
    hosts: int | None = 0  # None: the corpus does not know its pages' hosts


@dataclass(frozen=True, kw_only=True)
class Crawl:
    """A finished crawl, in arrays.

    fetched: uint32, targets in fetch order, dead links among them; for each uint32 parent (the page that first linked to it; NOBODY: a
    seed) and crawl_rank (NOBODY: not crawled), its iteration fetched_in and its depth (0: a seed), in the smallest unsigned integers that
    hold the number of iterations, and its float32 priority when popped (at the end where it was not; NaN: a seed). crawled: uint32, pages
    in crawl order; crawled_in: like fetched_in. crawled_tokens: int64, of each crawled page;
    None without a budget in tokens. capped: targets that were dropped because of a cap. refused: priorities that were not finite.
    stop: "budget" or "exhausted".
    """

    fetched: Targets
    fetched_in: Numbers
    parent: NDArray[np.uint32]
    depth: Numbers
    crawl_rank: NDArray[np.uint32]
    fetched_priority: NDArray[np.float32]
    crawled: Targets
    crawled_in: Numbers
    priority: NDArray[np.float32]
    crawled_tokens: NDArray[np.int64] | None
    capped: int
    refused: int
    stop: str
    iterations: list[Iteration] = field(default_factory=list)


class Crawler:
    """The state of one crawl. `run` goes on until the budget is covered or nothing is left to crawl.

    seeds: uint32, distinct ids of live pages that are not held out, in the order of crawling. page_scores: needed by policies that
    read scores; with it, the scores of crawled pages are kept for any policy. rng_seed: of the random policy. rank: float32[n_targets], for
    the policies pagerank and harmonic. explore_share: of the policy predicted. tokens: the numbers of tokens of pages, for a budget in
    tokens. restart_seeds: where the frontier has run dry, so many pages that were not met yet, in the order of `seed_order`, are the
    next seeds (0: the crawl ends).
    """

    def __init__(
        self,
        corpus: Corpus,
        policy: str,
        page_scores: PageScores | None,
        *,
        seeds: Targets,
        budget: Budget,
        batch_pages: int,
        rng_seed: int = 0,
        rank: NDArray[np.float32] | None = None,
        explore_share: float = 0.05,
        tokens: Callable[[Targets], NDArray[np.int64]] | None = None,
        caps: Caps | None = None,
        restart_seeds: int = 0,
        seed_order: Callable[[], Targets] | None = None,
    ) -> None:
        assert (budget.tokens is None or tokens is not None) and (not restart_seeds or seed_order is not None)
        n = corpus.n_targets
        self._corpus, self._scores = corpus, page_scores
        self._budget, self._batch_pages = budget, batch_pages
        self._seeds = seeds
        self._tokens_of = tokens if budget.tokens is not None else None
        self._caps, self._restart_seeds, self._seed_order = caps, restart_seeds, seed_order
        self._drawn: Targets | None = None  # what is left of the order of seeds, once it was needed
        self._look_ahead = KNOWLEDGE[policy] == "target_text"
        self._policy = self._make_policy(policy, rng_seed, rank, explore_share)
        self._places = Places(corpus)
        self._frontier = Frontier(n, moves=self._policy.moves)
        self._prunes = (
            not self._policy.moves
            and (budget.fetches, budget.tokens, caps) == (None, None, None)
            and (self._look_ahead or n == corpus.n_pages)
        )
        self._heldout = BitSet(n) if len(corpus.heldout) else None
        if self._heldout is not None:
            self._heldout.add(corpus.heldout)
        self._seen = BitSet(n)  # V of Algorithm 1; for look-ahead what was fetched, which is the same
        # What waits no longer: links to it are not followed. Without moving priorities nor are those to what waits.
        self._closed = BitSet(n) if self._policy.moves else self._seen
        self._depth = np.zeros(n, dtype=np.uint32) if isinstance(self._policy, Learner) else None
        self._host_seen = np.zeros(corpus.n_hosts, dtype=np.bool_)
        self._n_hosts = 0
        # linked_by: the crawl rank of the page that first linked to each, for look-ahead of what was fetched, else of what was met.
        self._fetched, self._linked_by, self._met = (
            Growing(np.uint32, n),
            Growing(np.uint32, n),
            Growing(np.uint32, 0 if self._look_ahead else n),
        )
        pages = n if budget.pages is None else min(n, budget.pages)
        self._crawled, self._priority = Growing(np.uint32, pages), Growing(np.float32, pages)
        self._tokens: list[NDArray[np.int64]] = []
        self._capped: list[Targets] = []
        self._n_fetched = self._n_crawled = self._n_tokens = self._n_refused = 0
        self._score_sum, self._score_count = 0.0, 0
        self._looked_at: Targets = np.empty(0, dtype=np.uint32)  # by the last look-ahead, and their scores
        self._look_scores = np.empty(0, dtype=np.float32)
        self._batch: Targets = np.empty(0, dtype=np.uint32)
        self._rows: list[Iteration] = []
        self._ended = False

    def run(self, progress: Progress | None = None, checkpoints: Checkpoints | None = None, every_s: float = CHECKPOINT_EVERY_S) -> Crawl:
        """Goes on from the farthest checkpoint that lies before the end of this crawl, if there is one, and writes one every `every_s`
        seconds and, once it has taken WORTH_SAVING_S, before the iteration that may be the last."""
        stop = "exhausted"
        began = saved = time.monotonic()
        if checkpoints is not None and (state := checkpoints.newest(self._may_go_on_from)) is not None:
            self._restore(state)
            if progress is not None:
                progress.update(self._progress, note="from a checkpoint")
        while True:
            now = time.monotonic()
            due = now - saved >= every_s or (self._nearly_done and now - began >= WORTH_SAVING_S)
            if checkpoints is not None and self._rows and due:
                checkpoints.save(self._n_crawled, self._n_fetched, self._state())
                saved = time.monotonic()
            row = Iteration(iteration=len(self._rows))
            dry = bool(self._rows) and self._is_dry
            self._rows.append(row)
            before = self._progress
            goes_on = True
            if row.iteration == 0:
                self._start(row)
            elif dry:
                self._restart(row)
            else:
                goes_on = self._go_on(row)
            row.frontier = len(self._frontier)
            row.hosts = self._n_hosts if len(self._host_seen) else None
            if progress is not None:
                progress.update(self._progress - before, note=_note(row))
            if self._done:
                stop = "budget"
                break
            if not goes_on or (self._is_dry and not (self._restart_seeds and len(self._next_seeds()))):
                break
        return self._result(stop)

    @property
    def _progress(self) -> int:
        """Of the budget that is shown: fetches where they are one, else pages, else tokens."""
        if self._budget.fetches is not None:
            return self._n_fetched
        return self._n_crawled if self._budget.pages is not None else self._n_tokens

    @property
    def _is_dry(self) -> bool:
        return not len(self._batch) and not len(self._frontier)

    @property
    def _done(self) -> bool:
        return self._budget.covered(self._n_crawled, self._n_fetched, self._n_tokens)

    @property
    def _nearly_done(self) -> bool:
        """Whether the next iteration may reach a budget in pages or tokens: a longer crawl would go on from before it."""
        pages, fetches, tokens = self._budget.left(self._n_crawled, self._n_fetched, self._n_tokens)
        batches_of_tokens = tokens * max(1, self._n_crawled) / max(1, self._n_tokens * self._batch_pages)
        return pages <= self._batch_pages and not fetches and batches_of_tokens <= 2

    def _may_go_on_from(self, crawled: int, fetched: int, tokens: int) -> bool:
        return not self._budget.covered(crawled, fetched, tokens)

    def _state(self) -> State:
        """The crawl between two iterations, in arrays; of the targets only what was met."""
        sums = (self._score_sum, float(self._score_count))
        return {
            "fetched": self._fetched.array(),
            "met": self._met.array(),
            "linked_by": self._linked_by.array(),
            "capped": _joined(self._capped),
            "crawled": self._crawled.array(),
            "priority": self._priority.array(),
            "tokens": np.concatenate(self._tokens) if self._tokens else np.empty(0, dtype=np.int64),
            "n_tokens": np.array(self._n_tokens),
            "n_refused": np.array(self._n_refused),
            "batch": self._batch,
            "sums": np.array(sums, dtype=np.float64),
            "pruned": np.array(self._frontier.pruned),
            "waiting": np.empty(0, dtype=np.uint64) if self._frontier.pruned else self._frontier.keys(),
            "rows": np.frombuffer(json.dumps([asdict(row) for row in self._rows]).encode(), dtype=np.uint8),
            **policy_state(self._policy, self._all_met()),
        }

    def _restore(self, state: State) -> None:
        corpus = self._corpus
        fetched, met, crawled = state["fetched"], state["met"], state["crawled"]
        for name in ("fetched", "met", "linked_by", "crawled", "priority"):
            getattr(self, f"_{name}").append(state[name])
        self._capped = [state["capped"]]
        self._n_fetched, self._n_crawled = len(fetched), len(crawled)
        self._tokens, self._n_tokens, self._n_refused = [state["tokens"]], int(state["n_tokens"]), int(state["n_refused"])
        self._batch = state["batch"]
        self._score_sum, self._score_count = float(state["sums"][0]), int(state["sums"][1])
        self._rows = [Iteration(**row) for row in json.loads(state["rows"].tobytes())]
        for ids in (self._remembered(fetched), state["capped"]):
            self._seen.add(ids)
            self._closed.add(ids)
        self._seen.add(met)
        if state["pruned"]:
            targets, first_rank = self._waiting()
            self._frontier.push(self._places.of(targets), self._priorities(seen_first(targets, first_rank)))
        else:
            self._frontier.restore(state["waiting"])
        self._count_hosts(crawled[crawled < corpus.n_pages])
        if self._caps is not None:
            self._caps.count(crawled)
        restore_policy(self._policy, self._all_met(), state)
        if self._depth is not None:
            self._depth[fetched] = self._parents(self._first_links(), self._crawl_rank()[1])[1]
            self._depth[met] = self._depth[crawled[state["linked_by"]]] + 1

    def _all_met(self) -> Targets:
        return distinct(np.concatenate([self._fetched.array(), self._met.array()]))

    def _make_policy(self, name: str, rng_seed: int, rank: NDArray[np.float32] | None, explore_share: float) -> Policy:
        n, knowledge = self._corpus.n_targets, KNOWLEDGE[name]
        if knowledge == "full_graph":
            known: Live = FullGraph(n, rng_seed, self._corpus.indegree if rank is None else rank)
        elif knowledge == "target_text":
            known = TargetText(n, rng_seed, self._scores_of_fetched)
        else:
            known = Live(n, rng_seed)
        policy = make_policy(name, known, explore_share=explore_share)
        if policy.reads_scores and self._scores is None:
            raise ConfigError(f"crawl: the policy {name} orders pages by scores; give the crawl the input `scorer`")
        return policy

    def _scores_of_fetched(self, pages: Targets) -> NDArray[np.float32]:
        """What a look-ahead policy may read: the scores of pages whose fetch is already counted."""
        assert self._scores is not None
        if pages is not self._looked_at:  # those were fetched just now
            assert self._seen.has(pages).all(), "a look-ahead policy asked for a page that was not fetched"
            return self._scores.scores(pages)
        return self._look_scores

    def _go_on(self, row: Iteration) -> bool:
        """One iteration after the first; whether another can follow."""
        self._follow_links(row)
        if not self._done:
            self._crawl_batch(row)
        return True

    def _start(self, row: Iteration) -> None:
        """Iteration 0."""
        self._crawl_seeds(row, self._seeds)

    def _restart(self, row: Iteration) -> None:
        """An iteration of further seeds."""
        if isinstance(self._policy, Learner):
            self._teach(self._policy)
        self._crawl_seeds(row, self._next_seeds())

    def _next_seeds(self) -> Targets:
        """The next pages of the draw of seeds that were not met."""
        if self._drawn is None:
            assert self._seed_order is not None
            self._drawn = self._seed_order()
        count = end = self._restart_seeds
        while True:
            fresh = np.flatnonzero(~self._seen.has(self._drawn[:end]))
            if len(fresh) >= count:
                self._drawn = self._drawn[int(fresh[0]) :]
                return self._drawn[fresh[:count] - fresh[0]]
            if end >= len(self._drawn):
                self._drawn = self._drawn[fresh]
                return self._drawn
            end *= 2  # twice as far: of a long draw nearly all may be met

    def _crawl_seeds(self, row: Iteration, seeds: Targets) -> None:
        """Fetches and crawls seeds, each at once, up to the end of the crawl."""
        seeds = seeds[: self._end(np.ones(len(seeds), dtype=np.int64), np.ones(len(seeds), dtype=np.int64), seeds, 0)]
        self._seen.add(seeds)
        row.discovered = len(seeds)
        self._fetch(row, seeds, np.full(len(seeds), NOBODY, dtype=np.uint32))
        if self._caps is not None:
            self._caps.count(seeds)
        self._crawl(row, [seeds], [np.full(len(seeds), np.nan, dtype=np.float32)])
        if self._look_ahead:
            row.mean_score_discovered = row.mean_score_crawled

    def _end(self, pages: NDArray[np.int64], fetches: NDArray[np.int64], targets: Targets, crawled: int) -> int:
        """How many of the next events the crawl still makes.

        pages, fetches: int64, 1 where the event crawls a page, and where it makes a fetch. targets: of the events. crawled: pages of this
        batch before them.
        """
        tokens = np.zeros(len(targets), dtype=np.int64)
        if self._tokens_of is not None:
            is_page = pages > 0
            tokens[is_page] = self._tokens_of(targets[is_page])
        before = self._n_crawled + crawled, self._n_fetched, self._n_tokens
        counts = [start + np.cumsum(steps) for start, steps in zip(before, (pages, fetches, tokens), strict=True)]
        end = self._budget.end(*counts)
        if self._tokens_of is not None:
            self._tokens.append(tokens[:end][pages[:end] > 0])
            self._n_tokens += int(tokens[:end].sum())
        return end

    def _follow_links(self, row: Iteration) -> None:
        """Follows the links of the last batch: discovers targets, and moves the priorities of known ones."""
        learner = self._policy if isinstance(self._policy, Learner) else None
        if learner is not None:
            self._teach(learner)
        offsets, targets = self._corpus.outlinks(self._batch)
        # The linking page of each link, a place in the batch. Links are in the order of crawl ranks: the first linked first.
        link_source = np.repeat(np.arange(len(self._batch), dtype=np.uint32), np.diff(offsets))
        row.links = len(targets)
        moves = self._policy.moves
        if moves or self._heldout is not None:
            kept = np.ones(len(targets), dtype=np.bool_)
            if self._heldout is not None:
                kept = ~self._heldout.has(targets)
                row.links = int(np.count_nonzero(kept))
                row.heldout_links = len(targets) - row.links
            if moves:
                kept &= ~self._closed.has(targets)
            targets, link_source = targets[kept], link_source[kept]
        if moves:
            distinct, first, inverse = distinct_targets(targets, with_inverse=True)
            new = np.flatnonzero(~self._seen.has(distinct))
            source = link_source[first].astype(np.int64)
        else:  # only what is new matters
            distinct, source = self._new_targets(targets, link_source)
            new = np.arange(len(distinct))
        first_rank = self._n_crawled - len(self._batch) + source
        row.new_targets = len(new)
        if self._look_ahead:
            distinct, first_rank = self._look_at(row, distinct, first_rank)
        else:
            row.discovered = row.new_targets
            self._seen.add(distinct[new])
            self._met.append(distinct[new])
            self._linked_by.append(first_rank[new].astype(np.uint32))
        if self._depth is not None:
            self._depth[distinct[new]] = self._depth[self._batch[source[new]]] + 1
        if learner is not None and len(self._frontier) and learner.is_due():
            waiting = self._places.targets(self._frontier.entries()[0])
            self._frontier.push(self._places.of(waiting), learner.renewed(waiting))
        if not len(distinct):
            return
        seen = seen_first(distinct, first_rank)
        if moves:
            seen = replace(
                seen,
                link_target=inverse,
                link_score=self._scores_of_batch(link_source) if self._policy.reads_scores else seen.link_score,
                mean_score=self._score_sum / self._score_count if self._score_count else float("nan"),
            )
            if learner is not None:
                assert self._depth is not None
                urls, depth = self._urls(distinct[new]), self._depth[distinct]
                seen = replace(seen, link_page=self._batch[link_source], new=new, urls=urls, depth=depth, **self._link_texts(kept))
        self._frontier.push(self._places.of(distinct), self._priorities(seen))
        if self._prunes:
            self._frontier.prune(self._budget.left(self._n_crawled, 0)[0])

    def _new_targets(self, targets: Targets, source: NDArray[np.uint32]) -> tuple[Targets, NDArray[np.int64]]:
        """(distinct targets that were not met, ascending; the smallest source of each)."""
        keys = _packed(targets, source)
        keys.sort()
        ids = (keys >> _HALF).astype(np.uint32)
        fresh = self._seen.has(ids)  # sorted before it is looked up: a third of the time
        np.logical_not(fresh, out=fresh)
        fresh[1:] &= ids[1:] != ids[:-1]
        new = np.flatnonzero(fresh)  # `take` by number: half the time of a mask
        return ids.take(new), (keys.take(new) & _LOW).view(np.int64)

    def _link_texts(self, kept: NDArray[np.bool_]) -> dict[str, Any]:
        """Anchors and flags of the last batch's links, where the corpus has them. kept: which of its links."""
        anchors, flags = self._corpus.anchors(self._batch), self._corpus.link_flags(self._batch)
        found: dict[str, Any] = {} if flags is None else {"link_flags": flags[kept]}
        return found if anchors is None else {**found, "link_anchors": [anchors[k] for k in np.flatnonzero(kept).tolist()]}

    def _priorities(self, seen: Seen) -> NDArray[np.float32]:
        """Of the policy; infinite ones, which no score or measure means, are refused: counted, and last like those of unscored pages."""
        priorities = self._policy.priorities(seen)
        if not isinstance(self._policy, Learner):  # there infinity stands for what is explored
            infinite = np.isinf(priorities)
            if infinite.any():
                self._n_refused += int(np.count_nonzero(infinite))
                priorities = np.where(infinite, np.float32(np.nan), priorities)
        return priorities

    def _teach(self, learner: Learner) -> None:
        """Tells the policy what the last batch turned out to be."""
        fetched = self._fetched_last()
        worth = np.zeros(len(fetched), dtype=np.float32)
        live = fetched < self._corpus.n_pages
        assert self._scores is not None
        worth[live] = np.nan_to_num(self._scores.scores(fetched[live]))
        learner.learn(fetched, worth)

    def _fetched_last(self) -> Targets:
        """The targets that the iteration before this one fetched, in fetch order."""
        before = self._rows[-2]
        return self._fetched.array()[len(self._fetched) - before.fetched - before.dead :].copy()

    def _urls(self, targets: Targets) -> list[str]:
        live = targets < self._corpus.n_pages
        urls = np.empty(len(targets), dtype=object)
        urls[live] = self._corpus.urls.take(targets[live]).to_pylist()
        urls[~live] = self._corpus.dead_urls.take(targets[~live] - self._corpus.n_pages).to_pylist()
        return list(urls)

    def _scores_of_batch(self, source: NDArray[np.uint32]) -> NDArray[np.float32]:
        """Scores of the linking pages, which are crawled pages: float32[links]."""
        assert self._scores is not None
        return self._scores.scores(self._batch)[source]

    def _look_at(self, row: Iteration, targets: Targets, first_rank: NDArray[np.int64]) -> tuple[Targets, NDArray[np.int64]]:
        """Fetches new targets, in the order of places, up to the end of the crawl. Returns those that are live, ascending."""
        if not self._places.trivial:  # else they are in the order of places already
            order = np.argsort(self._places.of(targets))
            targets, first_rank = targets[order], first_rank[order]
        if self._caps is not None:
            full = self._caps.full(targets)
            self._drop(targets[full])
            targets, first_rank = targets[~full], first_rank[~full]
        pages_left, fetches_left, tokens_left = self._budget.left(self._n_crawled, self._n_fetched, self._n_tokens)
        if pages_left == tokens_left == 0:
            targets, first_rank = targets[:fetches_left], first_rank[:fetches_left]
        row.discovered = len(targets)
        self._fetch(row, targets, first_rank)
        if not self._places.trivial:
            live = np.flatnonzero(targets < self._corpus.n_pages)  # in the order of places, which is that of their ids
            targets, first_rank = targets[live], first_rank[live]
        self._read(targets)
        row.mean_score_discovered = mean_score(self._look_scores)
        return targets, first_rank

    def _read(self, pages: Targets) -> None:
        """Scores of pages that were fetched, for the policy to ask for."""
        assert self._scores is not None
        self._looked_at, self._look_scores = pages, self._scores.scores(pages)

    def _drop(self, targets: Targets) -> None:
        """Targets that a cap keeps out for good."""
        self._capped.append(targets)
        self._seen.add(targets)
        self._closed.add(targets)

    def _crawl_batch(self, row: Iteration) -> None:
        """Pops up to `batch_pages` live pages, fewer where the crawl ends."""
        popped: list[Targets] = []
        priorities: list[NDArray[np.float32]] = []
        live = 0
        while live < self._batch_pages:
            places, some = self._frontier.pop(self._batch_pages - live)
            if not len(places):
                break
            targets = self._places.targets(places)
            is_live = targets < self._corpus.n_pages
            taken = np.ones(len(targets), dtype=np.bool_) if self._caps is None else self._caps.admit(targets, is_live)
            is_page = is_live & taken
            requests = np.zeros(len(targets), dtype=np.int64) if self._look_ahead else taken.astype(np.int64)
            end = self._end(is_page.astype(np.int64), requests, targets, live)
            if end < len(targets):  # the crawl ends within this batch: the rest was not popped
                self._frontier.push(places[end:], some[end:])
                targets, some, is_page, taken = targets[:end], some[:end], is_page[:end], taken[:end]
            if self._caps is not None:
                self._drop(targets[~taken])
            if not self._look_ahead:
                self._fetch(row, targets[taken])
            popped.append(targets[is_page])
            priorities.append(some[is_page])
            live += len(popped[-1])
            if end < len(places) or self._budget.covered(self._n_crawled + live, self._n_fetched, self._n_tokens):
                break
        self._crawl(row, popped, priorities)

    def _fetch(self, row: Iteration, targets: Targets, linked_by: NDArray[Any] | None = None) -> None:
        """linked_by: of look-ahead, the crawl rank of the page that first linked to each (NOBODY: a seed)."""
        if self._look_ahead:
            assert linked_by is not None
            self._linked_by.append(linked_by)
        remembered = self._remembered(targets)
        self._seen.add(remembered)
        if self._closed is not self._seen:
            self._closed.add(remembered)
        self._fetched.append(targets)
        self._n_fetched += len(targets)
        dead = int(np.count_nonzero(targets >= self._corpus.n_pages))
        row.dead += dead
        row.fetched += len(targets) - dead

    def _remembered(self, fetched: Targets) -> Targets:
        """Those of fetched targets that are not fetched again."""
        return fetched

    def _crawl(self, row: Iteration, popped: list[Targets], priorities: list[NDArray[np.float32]]) -> None:
        pages = _joined(popped)
        self._batch = pages
        self._crawled.append(pages)
        for some in priorities:
            self._priority.append(some)
        self._n_crawled += len(pages)
        row.crawled = len(pages)
        live = pages[pages < self._corpus.n_pages]  # all of them, but in mode `released`
        self._count_hosts(live)
        if self._scores is not None:
            total, count = exact_sum(self._scores.scores(live))
            row.mean_score_crawled = total / count if count else None
            self._score_sum += total
            self._score_count += count

    def _count_hosts(self, pages: Targets) -> None:
        if not len(self._host_seen):
            return
        hosts = self._corpus.host_ids[pages]
        hosts = distinct(hosts[~self._host_seen[hosts]])
        self._host_seen[hosts] = True
        self._n_hosts += len(hosts)

    def _waiting(self) -> tuple[Targets, NDArray[np.int64]]:
        """Live pages that were met and not crawled, with the crawl rank of the page that first linked to each: where the frontier was
        pruned, what waits in it."""
        met, linked_by = (self._fetched if self._look_ahead else self._met).array(), self._linked_by.array()
        crawled = BitSet(self._corpus.n_targets)
        crawled.add(self._crawled.array())
        left = (met < self._corpus.n_pages) & ~crawled.has(met)
        return met[left], linked_by[left].astype(np.int64)

    def _first_links(self) -> NDArray[np.uint32]:
        """The crawl rank of the page that first linked to each target that was fetched (NOBODY: a seed)."""
        linked_by = self._linked_by.array()
        return linked_by if self._look_ahead else _of_first(self._fetched.array(), self._met.array(), linked_by)

    def _crawl_rank(self) -> tuple[NDArray[np.uint32], NDArray[np.int64]]:
        """(crawl rank of everything fetched, as in `Crawl`; place among everything fetched, by crawl rank)."""
        fetched, crawled = self._fetched.array(), self._crawled.array()
        is_crawled = BitSet(self._corpus.n_targets)
        for part in _slices(len(crawled)):
            is_crawled.add(crawled[part])
        rows = np.empty(len(crawled), dtype=np.int64)  # of `fetched`
        end = 0
        for part in _slices(len(fetched)):
            some = np.flatnonzero(is_crawled.has(fetched[part]))
            rows[end : end + len(some)] = some + part.start
            end += len(some)
        # The same targets in two orders: sorted, they pair up.
        rank = np.empty(len(crawled), dtype=np.uint32)
        rank[_sorted_by_id(fetched[rows])] = _sorted_by_id(crawled)
        crawl_rank = np.full(len(fetched), NOBODY, dtype=np.uint32)
        crawl_rank[rows] = rank
        row_of = np.empty_like(rows)
        row_of[rank] = rows
        return crawl_rank, row_of

    def _parents(self, first_links: NDArray[np.uint32], row_of: NDArray[np.int64]) -> tuple[NDArray[np.uint32], Numbers]:
        """(parent, depth) of everything fetched, as in `Crawl`. The parents are written over `first_links`."""
        # By crawl rank + 1, so that NOBODY + 1, which is 0, stands for what linked to a seed. A page that linked to another was crawled in
        # an iteration before; so depths are below the number of iterations.
        crawled = self._crawled.array()
        page_of = np.concatenate([np.array([NOBODY]), crawled])
        numbers = np.min_scalar_type(len(self._rows))
        one = numbers.type(1)
        depth_of = np.empty(len(crawled) + 1, dtype=numbers)
        depth_of[0] = np.iinfo(numbers).max
        start = 0
        for row in self._rows:
            end = start + row.crawled
            depth_of[start + 1 : end + 1] = depth_of[first_links[row_of[start:end]] + _ONE] + one
            start = end
        depth = np.empty(len(first_links), dtype=numbers)
        for part in _slices(len(first_links)):
            by = first_links[part] + _ONE
            first_links[part], depth[part] = page_of[by], depth_of[by] + one
        return first_links, depth

    def _last_priority(self, crawl_rank: NDArray[np.uint32], first_links: NDArray[np.uint32]) -> NDArray[np.float32]:
        """The priority of everything fetched when it was popped; of what a look-ahead policy only fetched, at the end."""
        fetched, priority = self._fetched.array(), self._priority.array()
        last = np.empty(len(fetched), dtype=np.float32)
        refused = self._n_refused
        for part in _slices(len(fetched)):
            ranks, some = crawl_rank[part], last[part]
            is_crawled = ranks != NOBODY
            some.fill(np.nan)
            some[is_crawled] = priority[ranks[is_crawled]]
            if self._look_ahead:  # what was only fetched waits: its priority does not move
                rows = np.flatnonzero(~is_crawled & (fetched[part] < self._corpus.n_pages))
                self._read(fetched[part][rows])
                some[rows] = self._priorities(seen_first(self._looked_at, first_links[part][rows].astype(np.int64)))
        self._n_refused = refused
        return last

    def _result(self, stop: str) -> Crawl:
        # In slices, and parents over first links: memory that is touched for the first time is what the end of a crawl spends its time on.
        assert not self._ended, "a crawl ends once: its parents are where its first links were"
        self._ended = True
        first_links = self._first_links()
        crawl_rank, row_of = self._crawl_rank()
        fetched_priority = self._last_priority(crawl_rank, first_links)
        parent, depth = self._parents(first_links, row_of)
        numbers = np.arange(len(self._rows), dtype=np.min_scalar_type(len(self._rows)))
        return Crawl(
            fetched=self._fetched.array(),
            fetched_in=np.repeat(numbers, [row.fetched + row.dead for row in self._rows]),
            parent=parent,
            depth=depth,
            crawl_rank=crawl_rank,
            fetched_priority=fetched_priority,
            crawled=self._crawled.array(),
            crawled_in=np.repeat(numbers, [row.crawled for row in self._rows]),
            priority=self._priority.array(),
            crawled_tokens=np.concatenate(self._tokens) if self._tokens_of is not None else None,
            capped=sum(map(len, self._capped)),
            refused=self._n_refused,
            stop=stop,
            iterations=self._rows,
        )


def distinct_targets(targets: Targets, *, with_inverse: bool) -> tuple[Targets, NDArray[np.int64], NDArray[np.int64]]:
    """(distinct targets, ascending; first position of each; index of each position's target, empty unless asked for).

    What np.unique gives, by a sort of packed (target, position) keys: 5 times as fast as its stable argsort.
    """
    keys = _packed(targets, np.arange(len(targets), dtype=np.uint32))
    keys.sort()
    sorted_targets = (keys >> _HALF).astype(np.uint32)
    begins = np.ones(len(keys), dtype=np.bool_)
    begins[1:] = sorted_targets[1:] != sorted_targets[:-1]
    positions = (keys & _LOW).astype(np.int64)
    inverse = np.empty(len(keys) if with_inverse else 0, dtype=np.int64)
    if with_inverse:
        inverse[positions] = np.cumsum(begins) - 1
    return sorted_targets[begins], positions[begins], inverse


def _note(row: Iteration) -> str:
    """What the progress bar says besides pages, their rate and the time left."""
    means = (("in", row.mean_score_discovered), ("out", row.mean_score_crawled))
    scores = "".join(f", score {name} {mean:.3f}" for name, mean in means if mean is not None)
    return f"iteration {row.iteration:,}, frontier {row.frontier:,}{scores}"


def seen_first(targets: Targets, first_rank: NDArray[np.int64]) -> Seen:
    """What a policy whose priorities do not move is shown."""
    none = np.empty(0, dtype=np.float32)
    return Seen(targets=targets, first_rank=first_rank, link_target=none.astype(np.int64), link_score=none, mean_score=float("nan"))


def _slices(n: int) -> Iterator[slice]:
    """0 to n in steps that fit a cache."""
    return (slice(start, min(start + _STEP, n)) for start in range(0, n, _STEP))


def _joined(parts: list[NDArray[np.uint32]]) -> NDArray[np.uint32]:
    return np.concatenate(parts) if parts else np.empty(0, dtype=np.uint32)


def _sorted_by_id(ids: Targets) -> NDArray[np.uint32]:
    """Positions of ids, in the order of the ids."""
    keys = _packed(ids, np.arange(len(ids), dtype=np.uint32))
    keys.sort()
    return keys.astype(np.uint32)  # the low half


def _packed(ids: Targets, low: NDArray[np.uint32]) -> NDArray[np.uint64]:
    """Keys that sort by id, then by the number in `low`."""
    keys = ids.astype(np.uint64)
    keys <<= _HALF
    keys |= low
    return keys


def _of_first(wanted: Targets, ids: Targets, values: NDArray[np.uint32]) -> NDArray[np.uint32]:
    """The value of each of `wanted`, where `ids` (distinct) has it; NOBODY elsewhere."""
    order = _sorted_by_id(ids)
    known = ids[order]
    by_id = _sorted_by_id(wanted)  # sorted look-ups stay in the cache
    at = np.searchsorted(known, wanted[by_id])
    at[at == len(known)] = 0
    found = known[at] == wanted[by_id] if len(known) else np.zeros(len(wanted), dtype=np.bool_)
    out = np.full(len(wanted), NOBODY, dtype=np.uint32)
    out[by_id[found]] = values[order[at[found]]]
    return out
