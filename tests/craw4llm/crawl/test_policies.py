"""Policies: their arithmetic, and that none can know more than configs.KNOWLEDGE grants it."""

import dataclasses
import gc
from contextlib import ExitStack
from types import FunctionType, ModuleType

import numpy as np
import pytest

from craw4llm.configs import KNOWLEDGE
from craw4llm.corpus.reader import Corpus
from craw4llm.crawl.hashing import hash_ids, uniform
from craw4llm.crawl.loop import Budget, Crawler
from craw4llm.crawl.policies import KNOWLEDGE_CLASS, FullGraph, Live, Seen, TargetText, make_policy
from craw4llm.errors import ConfigError
from craw4llm.scoring.memo import PageScores

NAN = float("nan")
LIVE = [name for name, knowledge in KNOWLEDGE.items() if knowledge == "live"]


def seen(links: list[tuple[int, float]], mean: float = 0.5, first_rank: int = 0) -> Seen:
    """What links (target, score of the linking page), in crawl order, show."""
    targets, inverse = np.unique([t for t, _ in links], return_inverse=True)
    scores = np.array([s for _, s in links], dtype=np.float32)
    ranks = np.array([first_rank + next(k for k, (t, _) in enumerate(links) if t == target) for target in targets])
    return Seen(targets=targets.astype(np.uint32), first_rank=ranks, link_target=inverse, link_score=scores, mean_score=mean)


def grants(name: str, n_targets: int = 10) -> Live:
    knowledge = KNOWLEDGE[name]
    if knowledge == "full_graph":
        return FullGraph(n_targets, 0, np.arange(n_targets, dtype=np.uint32)[::-1])
    if knowledge == "target_text":
        return TargetText(n_targets, 0, lambda pages: pages.astype(np.float32) / 10)
    return Live(n_targets, 0)


def priorities(name: str, *batches: Seen) -> list[list[float]]:
    policy = make_policy(name, grants(name))
    return [policy.priorities(batch).tolist() for batch in batches]


FIRST = seen([(3, 0.25), (5, NAN), (3, 0.75), (7, 0.5)], mean=0.5)
SECOND = seen([(3, 0.125), (5, NAN), (5, 0.25), (7, NAN)], mean=0.375)


@pytest.mark.parametrize(
    ("name", "first", "second"),
    [
        ("seen_indegree", [2, 1, 1], [3, 3, 2]),
        ("parent_first", [0.25, NAN, 0.5], [0.25, 0.25, 0.5]),
        ("parent_mean", [1.5 / 3, 0.5, 1.0 / 2], [(1.125 + 0.375) / 4, (0.25 + 0.375) / 2, (0.5 + 0.375) / 2]),
        ("parent_max", [0.75, NAN, 0.5], [0.75, 0.25, 0.5]),
        ("parent_min", [0.25, NAN, 0.5], [0.125, 0.25, 0.5]),
    ],
)
def test_moving_priorities_by_hand(name, first, second):
    """Targets 3, 5, 7. A page without a score counts for nothing as a parent."""
    got = priorities(name, FIRST, SECOND)
    np.testing.assert_array_equal(np.float32(got), np.float32([first, second]))


def test_static_priorities_by_hand():
    assert priorities("indegree", FIRST) == [[6, 4, 2]]
    np.testing.assert_array_equal(priorities("quality", FIRST), [np.float32([0.3, 0.5, 0.7]).tolist()])
    assert priorities("breadth_first", FIRST, seen([(9, 0.1)], first_rank=4)) == [[0, -1, -3], [-4]]
    assert priorities("random", FIRST) == [uniform(0, [3, 5, 7]).tolist()]


def test_parent_mean_before_anything_is_scored():
    assert np.isnan(priorities("parent_mean", seen([(1, NAN)], mean=NAN))).all()


def test_random_is_uniform_and_seeded():
    draws = uniform(0, np.arange(100_000))
    assert draws.dtype == np.float32 and draws.min() >= 0 and draws.max() < 1
    assert np.histogram(draws, bins=10, range=(0, 1))[0] == pytest.approx(np.full(10, 10_000), rel=0.05)
    assert abs(np.corrcoef(draws[:-1], draws[1:])[0, 1]) < 0.02
    assert abs(np.corrcoef(draws, uniform(1, np.arange(100_000)))[0, 1]) < 0.02
    np.testing.assert_array_equal(uniform(3, [8]), uniform(3, np.arange(10))[8:9])


def test_hash_is_splitmix64():
    """First outputs of SplitMix64 from the state 1234567 (the published check values of the reference implementation)."""
    golden, mask = 0x9E3779B97F4A7C15, 2**64 - 1

    def mix(z: int) -> int:
        z = (z + golden) & mask
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & mask
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & mask
        return z ^ (z >> 31)

    assert mix(1234567) == 6457827717110365317
    assert hash_ids(5, [0, 1, 2]).tolist() == [mix((mix(5) + k * golden) & mask) for k in range(3)]


def test_every_policy_declares_what_it_knows():
    for name in KNOWLEDGE:
        assert make_policy(name, grants(name)).name == name


@pytest.mark.parametrize("name", sorted(KNOWLEDGE))
def test_a_policy_takes_exactly_its_knowledge(name):
    """Neither more (a live policy with in-degrees or target scores) nor less."""
    offers = {"live": grants("random"), "full_graph": grants("indegree"), "target_text": grants("quality")}
    for knowledge, offer in offers.items():
        assert type(offer) is KNOWLEDGE_CLASS[knowledge]
        if knowledge == KNOWLEDGE[name]:
            make_policy(name, offer)
        else:
            with pytest.raises(ConfigError, match=f"the policy {name} was given {type(offer).__name__}; it may know '{KNOWLEDGE[name]}'"):
                make_policy(name, offer)


def test_an_unknown_policy():
    with pytest.raises(ConfigError, match="policy is 'best'; expected one of quality, "):
        make_policy("best", Live(1, 0))


def reachable(start: object) -> list[object]:
    """All objects that can be got at from `start`, but for modules, classes and what functions see as globals."""
    found, queue = {id(start): start}, [start]
    while queue:
        holder = queue.pop()
        held = [holder.__closure__, holder.__defaults__] if isinstance(holder, FunctionType) else gc.get_referents(holder)
        for item in held:
            if not isinstance(item, ModuleType | type) and id(item) not in found:
                found[id(item)] = item
                queue.append(item)
    return list(found.values())


@pytest.fixture
def crawler(build, make_web, make_table, execution):
    """crawler(policy) -> a Crawler in the middle of a crawl over a ring of 30 pages."""
    urls = [f"https://ring.example/{k:02}" for k in range(30)]
    web = build(make_web([(u, "text", [urls[(k + 1) % 30], urls[(k + 7) % 30]]) for k, u in enumerate(urls)]))
    table = build(make_table({u: k / 30 for k, u in enumerate(urls)}))

    def make(policy: str) -> Crawler:
        corpus = Corpus(web)
        made = Crawler(
            corpus,
            policy,
            stack.enter_context(PageScores(web, table, execution)),
            seeds=np.array([0], dtype=np.uint32),
            budget=Budget(pages=12),
            batch_pages=3,
        )
        made.run()
        return made

    with ExitStack() as stack:
        yield make


@pytest.mark.parametrize("name", LIVE)
def test_a_live_policy_holds_no_way_to_what_it_may_not_know(crawler, name):
    """From the policy object, after a crawl, neither corpus, scores, in-degrees nor any function of the crawler can be reached."""
    made = crawler(name)
    held = reachable(made._policy)
    assert not any(isinstance(item, Corpus | PageScores | Crawler) or callable(item) for item in held)
    arrays = [item for item in held if isinstance(item, np.ndarray)]
    assert not any(np.shares_memory(item, made._corpus.indegree) for item in arrays)
    state = sum(item.size for item in arrays)
    if name != "predicted":
        assert state <= 2 * made._corpus.n_targets  # only its own sums and counts


def test_the_walk_would_find_them(crawler):
    """The test above can fail: a look-ahead policy does reach scores, a full-graph policy does hold the in-degrees."""
    assert any(isinstance(item, PageScores) for item in reachable(crawler("quality")._policy))
    made = crawler("indegree")
    assert any(isinstance(item, np.ndarray) and np.shares_memory(item, made._corpus.indegree) for item in reachable(made._policy))


def test_look_ahead_reads_no_page_that_was_not_fetched(crawler):
    made = crawler("quality")
    everything = np.arange(made._corpus.n_targets, dtype=np.uint32)
    unfetched = everything[~np.isin(everything, made._fetched.array())]
    assert len(unfetched)
    with pytest.raises(AssertionError, match="not fetched"):
        made._policy.priorities(dataclasses.replace(FIRST, targets=unfetched))
