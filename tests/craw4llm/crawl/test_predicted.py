"""The policy `predicted`: its arithmetic by hand and against NumPy, that it learns, and that it learns nothing it may not know."""

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from craw4llm.configs import CorpusConfig, CrawlConfig, ScorerConfig, SyntheticText, SyntheticWeb
from craw4llm.corpus.reader import Corpus
from craw4llm.crawl.policies import Live, Seen, policy_state, restore_policy
from craw4llm.crawl.predicted import BUCKETS, FEATURES, RIDGE, Predicted, _accumulate, _read_urls, _solve
from craw4llm.crawl.trace import Trace
from craw4llm.errors import ConfigError
from craw4llm.fingerprint import External
from craw4llm.stage import Stage

NAN = float("nan")


def test_the_fit_is_ridge_regression():
    rng = np.random.default_rng(0)
    rows, values = rng.normal(size=(400, FEATURES)), rng.normal(size=400)
    rows[:, 5] = rows[:, 4]  # collinear: the ridge decides
    gram, moment = np.zeros((FEATURES, FEATURES)), np.zeros(FEATURES)
    _accumulate(rows[:150], values[:150], gram, moment)
    _accumulate(rows[150:], values[150:], gram, moment)
    expected = np.linalg.solve(rows.T @ rows + RIDGE * np.eye(FEATURES), rows.T @ values)
    np.testing.assert_allclose(_solve(gram, moment, RIDGE), expected, rtol=1e-9)


def test_what_a_url_tells():
    places, shapes = _read_urls(["https://a.example/docs/how-to/page7.html?x=1", "https://a.example/docs/how-to/", "https://b.example/"])
    assert shapes.tolist() == [[44, 2], [30, 2], [18, 0]]
    assert places[0, 0] == places[1, 0] != places[2, 0]  # host
    assert places[0, 1] == places[1, 1] != places[2, 1]  # folder
    assert set(places[1, 2:5].tolist()) <= {*places[0, 2:].tolist(), *places[1, 2:].tolist()}
    assert (places[0, 2:] >= 0).all() and places[2, 2:].tolist() == [-1] * 6
    assert places.max() < BUCKETS


def links(
    policy: Predicted, batch: list[tuple[int, int, float]], urls: dict[int, str], known: set[int], depth: int = 1, **texts: object
) -> dict[int, float]:
    """Hands over links (target, linking page, its score) and returns the priorities."""
    targets, inverse = np.unique([t for t, _, _ in batch], return_inverse=True)
    new = np.array([k for k, t in enumerate(targets.tolist()) if t not in known], dtype=np.int64)
    known |= set(targets.tolist())
    seen = Seen(
        targets=targets.astype(np.uint32),
        first_rank=np.zeros(len(targets), dtype=np.int64),
        link_target=inverse,
        link_score=np.array([s for _, _, s in batch], dtype=np.float32),
        mean_score=0.5,
        link_page=np.array([p for _, p, _ in batch], dtype=np.uint32),
        new=new,
        urls=[urls[int(t)] for t in targets[new]],
        depth=np.full(len(targets), depth, dtype=np.uint32),
        **texts,
    )
    return dict(zip(targets.tolist(), policy.priorities(seen).tolist(), strict=True))


def test_it_begins_as_the_parents_mean():
    """Before anything but seeds was fetched: (sum + m) / (n + 1), m the mean worth of the seeds."""
    policy = Predicted(Live(20, 0), 0.0)
    policy.learn(np.array([0, 1], dtype=np.uint32), np.array([0.25, 0.75], dtype=np.float32))
    given = links(policy, [(5, 0, 0.25), (5, 1, 0.75), (6, 1, 0.75), (7, 1, NAN)], {k: f"https://w.example/{k}" for k in (5, 6, 7)}, set())
    assert given == pytest.approx({5: (1.0 + 0.5) / 3, 6: (0.75 + 0.5) / 2, 7: 0.5})


def test_features_by_hand():
    policy, known = Predicted(Live(20, 0), 0.0), set()
    policy.learn(np.array([0, 1], dtype=np.uint32), np.array([0.2, 0.6], dtype=np.float32))
    urls = {5: "https://w.example/a/x", 6: "https://w.example/a/y", 7: "https://v.example/z", 8: "https://w.example/a/x9"}
    links(policy, [(5, 0, 0.2), (6, 0, 0.2), (6, 1, 0.6), (7, 1, 0.6)], urls, known)
    policy.learn(np.array([5, 7], dtype=np.uint32), np.array([1.0, 0.0], dtype=np.float32))
    links(policy, [(8, 0, 0.2), (6, 5, 1.0)], urls, known, depth=2)
    rows = policy._features(policy.rows(np.array([6, 8], dtype=np.uint32)))
    m = (0.2 + 0.6 + 1.0 + 0.0) / 4
    host = (1.0 + 2 * m) / 3
    folder = (1.0 + 2 * host) / 3
    parents = [(0.2 + 0.6 + 1.0 + m) / 4, (0.2 + m) / 2]
    np.testing.assert_allclose(rows[:, 0], 1)
    np.testing.assert_allclose(rows[:, 1], parents, rtol=1e-6)
    np.testing.assert_allclose(rows[:, 2], [1.0, 0.2], rtol=1e-6)  # highest
    np.testing.assert_allclose(rows[:, 3], [0.2, 0.2], rtol=1e-6)  # lowest
    np.testing.assert_allclose(rows[:, 4], np.log([4, 2]))
    # 5 was first and last met on 0, 7 on 1; 6 was first met on 0, last on 5, which has no children yet
    np.testing.assert_allclose(rows[:, 5], [(1 + 2 * parents[0]) / 3, (1 + 2 * parents[1]) / 3], rtol=1e-6)
    np.testing.assert_allclose(rows[:, 6], [parents[0], (1 + 2 * parents[1]) / 3], rtol=1e-6)
    np.testing.assert_allclose(rows[:, 7], host)
    np.testing.assert_allclose(rows[:, 8], np.log(2))
    np.testing.assert_allclose(rows[:, 9], folder)
    known_word = (1.0 + 2 * m) / 3  # "a" and, for 8, "x"; "y" and "9" are new: they have m
    np.testing.assert_allclose(rows[:, 11], [(known_word + m) / 2, (2 * known_word + m) / 3])
    np.testing.assert_allclose(rows[:, 12], known_word)
    np.testing.assert_allclose(rows[:, 13:16], [[0.21, 0.1, np.log(2)], [0.22, 0.1, np.log(3)]], rtol=1e-6)


def test_it_learns_only_from_what_it_knew_before():
    """The row that the fit gets for a page is the one from before its worth was known, also within a batch."""
    policy, known = Predicted(Live(20, 0), 0.0), set()
    policy.learn(np.array([0], dtype=np.uint32), np.array([0.5], dtype=np.float32))
    links(policy, [(5, 0, 0.5), (6, 0, 0.5)], {5: "https://w.example/a", 6: "https://w.example/b"}, known)
    before = policy._features(policy.rows(np.array([5, 6], dtype=np.uint32)))
    policy.learn(np.array([5, 6], dtype=np.uint32), np.array([1.0, 0.0], dtype=np.float32))
    np.testing.assert_allclose(np.tril(policy._gram), np.tril(before.T @ before))
    np.testing.assert_allclose(policy._moment, before.T @ (np.array([1.0, 0.0]) - before[:, 1]))


def test_explored_targets_come_first():
    policy = Predicted(Live(5000, 3), 0.1)
    policy.learn(np.array([0], dtype=np.uint32), np.array([0.5], dtype=np.float32))
    urls = {k: f"https://w.example/{k}" for k in range(1, 5000)}
    given = links(policy, [(k, 0, 0.5) for k in urls], urls, set())
    assert sum(np.isinf(list(given.values()))) == pytest.approx(500, abs=70)


def test_its_state_can_be_kept():
    one, other, known = Predicted(Live(30, 0), 0.0), Predicted(Live(30, 0), 0.0), set()
    rng = np.random.default_rng(1)
    urls = {k: f"https://h{k % 3}.example/{'ab'[k % 2]}/{k}" for k in range(3, 30)}
    one.learn(np.array([0, 1, 2], dtype=np.uint32), rng.random(3).astype(np.float32))
    links(one, [(k, k % 3, 0.3) for k in range(3, 25)], urls, known)
    one.learn(np.arange(3, 15, dtype=np.uint32), rng.random(12).astype(np.float32))
    every = np.arange(30, dtype=np.uint32)
    restore_policy(other, every, {name: array.copy() for name, array in policy_state(one, every).items()})
    np.testing.assert_array_equal(one.renewed(every[3:]), other.renewed(every[3:]))
    assert one.is_due() == other.is_due() is False


def test_what_anchors_and_places_tell():
    """Three targets that differ in their links' texts and places alone."""
    policy, known = Predicted(Live(20, 0), 0.0), set()
    policy.learn(np.array([0], dtype=np.uint32), np.array([0.5], dtype=np.float32))
    urls = {k: f"https://w{k}.example/" for k in range(3, 9)}
    body, edge, unknown = (np.array([flag], dtype=np.uint8) for flag in (1, 2, 4))
    links(policy, [(3, 0, 0.5)], urls, known, link_anchors=["Good proof"], link_flags=body)
    links(policy, [(3, 0, 0.5)], urls, known, link_anchors=["cheap sale"], link_flags=edge)  # the first anchor stays, the place counts
    policy.learn(np.array([3], dtype=np.uint32), np.array([0.9], dtype=np.float32))
    links(policy, [(4, 0, 0.5)], urls, known, link_anchors=["good"], link_flags=body)
    links(policy, [(5, 0, 0.5)], urls, known, link_anchors=[None], link_flags=unknown)
    links(policy, [(6, 0, 0.5)], urls, known)
    mean = (0.5 + 0.9) / 2
    row = dict(zip((3, 4, 5, 6), policy._features(policy.rows(np.array([3, 4, 5, 6], dtype=np.uint32))), strict=True))
    good = (0.9 + 2 * mean) / 3  # one fetch, shrunk by two
    assert row[4][26:30] == pytest.approx([1, good, good, good * row[4][1]]) and row[4][30:] == pytest.approx([1, row[4][1]])
    assert row[3][27] == pytest.approx(good) and row[3][30] == 0.5
    assert row[5][26:].tolist() == row[6][26:].tolist() == [0] * 6


def test_anchors_help_where_nothing_else_does(build, make_table, tmp_path):
    """One host, one folder, links that go anywhere: only the words of a link, or its place in the page, say that the target is good."""
    n, rng = 600, np.random.default_rng(0)
    urls = [f"https://w.example/{k:03}" for k in range(n)]
    good = rng.random(n) < 0.3
    targets = [[int(t) for t in rng.choice(n, 6, replace=False)] for _ in range(n)]
    columns = {"url": urls, "text": ["text"] * n, "outlinks": [[urls[t] for t in row] for row in targets]}
    said = {
        "nothing": {},
        "anchors": {"anchors": [[f"{'theorem' if good[t] else 'coupon'} {t}" for t in row] for row in targets]},
        "flags": {"link_flags": pa.array([[1 if good[t] else 2 for t in row] for row in targets], pa.list_(pa.uint8()))},
    }
    table = make_table({u: 0.9 if good[k] else 0.1 for k, u in enumerate(urls)})
    share = {}
    for name, extra in said.items():
        pq.write_table(pa.table({**columns, **extra}), tmp_path / f"{name}.parquet")
        web = Stage(CorpusConfig(source=External(name="corpus", path=str(tmp_path / f"{name}.parquet")), heldout_fraction=0))
        config = CrawlConfig(policy="predicted", budget_pages=200, batch_pages=10, seed_count=5, explore_share=0.0)
        share[name] = float(good[Trace(build(Stage(config, corpus=web, scorer=table))).crawled].mean())
    assert share["nothing"] < 0.4 and share["anchors"] > 0.6 and share["flags"] > 0.6, share


@pytest.fixture(scope="module")
def planted():
    """A synthetic web where links follow quality, with dead links; scores from a model of its words."""
    web = Stage(CorpusConfig(source=SyntheticWeb(pages=3000, hosts=60, homophily=0.7, dead_share=0.2, seed=3), heldout_fraction=0))
    return web, Stage(ScorerConfig(kind="train_fasttext", source=SyntheticText(lines=1000)))


def test_it_beats_chance_and_its_parents_mean(planted, shared_build):
    """At equal fetches: mean worth of a fetch, dead links counted as 0."""
    web, scorer = planted
    worth = {}
    for policy in ("random", "parent_mean", "predicted"):
        config = CrawlConfig(policy=policy, budget_fetches=1200, batch_pages=30, seed_count=10)
        trace = Trace(shared_build(Stage(config, corpus=web, scorer=scorer)))
        worth[policy] = float(np.nansum(trace.prefix().fetched_scores)) / trace.n_fetches
    assert worth["predicted"] > worth["parent_mean"] > worth["random"]
    assert worth["predicted"] > worth["random"] + 0.1


def test_dead_links_are_learnt(shared_build, make_web, make_table, build):
    """Half of the links go to a host that is gone: it soon stops asking there, from the URLs alone."""
    n = 400
    pages = [f"https://live.example/d{k % 7}/{k}" for k in range(n)]
    web = make_web(
        [
            (u, "text", [pages[(k * 3 + j) % n] for j in (1, 2, 5)] + [f"https://gone.example/{k}/{j}" for j in range(3)])
            for k, u in enumerate(pages)
        ]
    )
    table = make_table({u: 0.4 + 0.2 * (k % 2) for k, u in enumerate(pages)})

    def dead(policy: str, **fields) -> int:
        config = CrawlConfig(policy=policy, budget_fetches=300, batch_pages=10, seed_count=3, **fields)
        return build(Stage(config, corpus=web, scorer=table)).count("dead_links")

    assert dead("parent_mean") > 100
    assert dead("predicted", explore_share=0.0) < 30


def test_rng_seed_moves_only_what_is_explored(planted, shared_build):
    web, scorer = planted
    runs = [
        Trace(shared_build(Stage(CrawlConfig(policy="predicted", budget_pages=300, seed_count=5, **fields), corpus=web, scorer=scorer)))
        for fields in ({"explore_share": 0.0}, {"explore_share": 0.0, "rng_seed": 1}, {}, {"rng_seed": 1})
    ]
    crawled = [trace.crawled.tolist() for trace in runs]
    assert crawled[0] == crawled[1]
    assert crawled[2] != crawled[3]
    with pytest.raises(ConfigError, match="explore_share is 1"):
        CrawlConfig(policy="predicted", budget_pages=1, explore_share=1)
    assert Corpus(runs[0].artifact.input("corpus")).n_pages == 3000


def test_its_table_holds_what_was_met_and_no_more():
    policy, known = Predicted(Live(1_000_000, 0), 0.0), set()
    urls = {k: f"https://w.example/{k}" for k in range(500_000, 500_400)}
    policy.learn(np.array([7], dtype=np.uint32), np.array([0.5], dtype=np.float32))
    links(policy, [(k, 7, 0.5) for k in urls], urls, known)
    before = policy._features(policy.rows(np.array([500_000, 500_399], dtype=np.uint32)))
    policy.rows(np.arange(100, 4000, dtype=np.uint32))  # the table grows, what is in it stays
    np.testing.assert_array_equal(policy._features(policy.rows(np.array([500_000, 500_399], dtype=np.uint32))), before)
    assert policy.rows(np.array([500_001, 7, 500_001], dtype=np.uint32)).tolist() == [2, 0, 2]
    assert all(len(getattr(policy, name)) < 10_000 for name in policy.per_target)
