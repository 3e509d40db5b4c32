"""Selections: pools, prefixes and what is kept, on a web whose crawl is known by hand.

A chain p0 -> p1 -> ... -> p9, each page also linking to a dead link of its own and to q0 ... q9, which link nowhere; scores
p_k = k / 10, q_k = .95 - k / 10. q3 is empty, q5 is not in the table.
"""

import numpy as np
import pyarrow.parquet as pq
import pytest

from craw4llm.configs import NEEDS_SCORER, CrawlConfig, ScoreConfig, SelectConfig
from craw4llm.corpus.reader import Corpus
from craw4llm.crawl.hashing import hash_ids
from craw4llm.crawl.trace import Trace
from craw4llm.errors import ConfigError
from craw4llm.fingerprint import External
from craw4llm.stage import Stage

URL = "https://w.example/"
SCORES = {f"p{k}": k / 10 for k in range(10)} | {f"q{k}": 0.95 - k / 10 for k in range(10) if k != 5}


@pytest.fixture
def web(make_web):
    pages = []
    for k in range(10):
        links = [f"{URL}p{k + 1}"] if k < 9 else []
        pages.append((f"{URL}p{k}", f"text of p{k}", [*links, f"{URL}q{k}", f"{URL}z{k}"]))
        pages.append((f"{URL}q{k}", "" if k == 3 else f"text of q{k}", []))
    return make_web(pages)


@pytest.fixture
def table(make_table):
    return make_table({URL + name: score for name, score in SCORES.items()})


@pytest.fixture
def crawl(web, table, tmp_path):
    """crawl(policy, **fields) -> the crawl stage from p0, one page at a time."""
    path = tmp_path / "seeds.txt"
    path.write_text(f"{URL}p0\n")

    def stage(policy: str, **fields: object) -> Stage:
        config = CrawlConfig(policy=policy, batch_pages=1, seeds=External(name="seeds", path=str(path)), **fields)
        return Stage(config, corpus=web, **({"scorer": table} if policy in NEEDS_SCORER else {}))

    return stage


def kept(artifact) -> list[tuple[str, float | None]]:
    corpus = Corpus(artifact.input("corpus"))
    rows = pq.read_table(artifact.file("kept.parquet")).to_pylist()
    assert [row["rank"] for row in rows] == list(range(len(rows)))
    assert artifact.count("kept_pages") == len(rows)
    assert artifact.count("kept_text_bytes") == sum(len(corpus.text(row["page"])) for row in rows)
    return [(corpus.url(row["page"]).removeprefix(URL), row["score"]) for row in rows]


def names(artifact) -> list[str]:
    return [name for name, _ in kept(artifact)]


# breadth_first, by hand: each p_k brings p_k+1, q_k and the dead z_k, in this order
BFS = ["p0", "p1", "q0", "p2", "q1", "p3", "q2", "p4", "q3", "p5", "q4", "p6", "q5", "p7", "q6"]
BFS_FETCHES = [x for k in range(7) for x in ([f"p{k}"] if k == 0 else []) + [f"p{k + 1}", f"q{k}", f"z{k}"]]


def test_the_crawl_is_as_said(build, crawl):
    trace = Trace(build(crawl("breadth_first", budget_pages=15)))
    corpus = Corpus(trace.artifact.input("corpus"))
    assert [corpus.url(int(p)).removeprefix(URL) for p in trace.crawled] == BFS
    assert trace.n_fetches == 21


@pytest.mark.parametrize("pages", [1, 4, 9, 15])
def test_all_of_a_prefix_by_pages(build, crawl, web, pages):
    """In crawl order, empty pages dropped; without a scorer there are no scores."""
    artifact = build(Stage(SelectConfig(pool="crawled", prefix_pages=pages), corpus=web, crawl=crawl("breadth_first", budget_pages=15)))
    assert names(artifact) == [name for name in BFS[:pages] if name != "q3"]
    assert all(score is None for _, score in kept(artifact))
    assert artifact.count("pool_pages") == pages
    assert artifact.count("pool_fetches") == BFS_FETCHES.index(BFS[pages - 1]) + 1
    assert artifact.count("dropped_empty") == (pages >= 9)
    assert artifact.count("mean_score") is None and artifact.count("hosts") == 1


@pytest.mark.parametrize("fetches", [1, 4, 5, 13, 20])
def test_all_of_a_prefix_by_fetches(build, crawl, web, table, fetches):
    config = SelectConfig(pool="crawled", prefix_fetches=fetches)
    artifact = build(Stage(config, corpus=web, scorer=table, crawl=crawl("breadth_first", budget_pages=15)))
    expected = [name for name in BFS_FETCHES[:fetches] if name[0] != "z" and name != "q3"]
    assert names(artifact) == expected
    np.testing.assert_array_equal([s for _, s in kept(artifact)], np.float32([SCORES.get(name, np.nan) for name in expected]))
    assert artifact.count("pool_fetches") == fetches
    scored = [SCORES[name] for name in expected if name in SCORES]
    assert artifact.count("mean_score") == pytest.approx(np.mean(scored), rel=1e-6)


def test_top_of_what_was_fetched(build, crawl, web, table):
    """Score descending; unscored and empty pages dropped and counted."""
    config = SelectConfig(pool="fetched", prefix_fetches=20, keep="top", keep_pages=4)
    artifact = build(Stage(config, corpus=web, scorer=table, crawl=crawl("breadth_first", budget_pages=15)))
    pool = [name for name in BFS_FETCHES[:20] if name[0] != "z"]
    usable = [name for name in pool if name not in ("q3", "q5")]
    assert names(artifact) == sorted(usable, key=lambda name: -SCORES[name])[:4]
    assert (artifact.count("pool_pages"), artifact.count("dropped_empty"), artifact.count("dropped_unscored")) == (len(pool), 1, 1)


def test_match_fetches(build, crawl, web, table):
    """The pool is what another policy fetched with as many requests as quality made."""
    quality = crawl("quality", budget_pages=4)
    n = build(quality).count("fetches")
    config = SelectConfig(pool="fetched", match_fetches=True, keep="top", keep_pages=3)
    stage = Stage(config, corpus=web, scorer=table, crawl=crawl("breadth_first", budget_pages=15), match=quality)
    artifact = build(stage)
    assert artifact.count("pool_fetches") == n
    pool = [name for name in BFS_FETCHES[:n] if name in SCORES and name != "q3"]
    assert names(artifact) == sorted(pool, key=lambda name: -SCORES[name])[:3]
    own = build(Stage(config, corpus=web, scorer=table, crawl=quality, match=quality))
    assert own.count("pool_fetches") == n and own.count("pool_pages") == build(quality).count("fetched_pages")


def test_scores_of_the_crawl_are_used_where_no_scorer_is_given(build, crawl, web):
    artifact = build(Stage(SelectConfig(pool="crawled", prefix_pages=3), corpus=web, crawl=crawl("quality", budget_pages=3)))
    assert [s for _, s in kept(artifact)] == pytest.approx([SCORES[name] for name in names(artifact)])


def test_fetched_pool_of_a_look_ahead_prefix(build, crawl, web):
    """The pages that quality had fetched when it crawled its second page: the seed, then q0 (.95) and p1, before z0."""
    artifact = build(Stage(SelectConfig(pool="fetched", prefix_pages=2), corpus=web, crawl=crawl("quality", budget_pages=6)))
    assert names(artifact) == ["p0", "p1", "q0"] and artifact.count("pool_fetches") == 4


def test_prefixes_longer_than_the_crawl(build, crawl, web):
    """Both numbers, and why the crawl ended."""
    short, dry = crawl("breadth_first", budget_pages=15), crawl("breadth_first", budget_pages=100)
    with pytest.raises(ConfigError, match=r"\(breadth_first\) has 15 pages crawled \(that was its budget\), but its first 16 are wanted"):
        build(Stage(SelectConfig(pool="crawled", prefix_pages=16), corpus=web, crawl=short))
    with pytest.raises(ConfigError, match=r"has 21 fetches \(that was its budget\), but its first 22 are wanted"):
        build(Stage(SelectConfig(pool="fetched", prefix_fetches=22), corpus=web, crawl=short))
    with pytest.raises(ConfigError, match=r"has 20 pages crawled \(it ran out of pages to crawl\), but its first 1,000"):
        build(Stage(SelectConfig(pool="crawled", prefix_pages=1000), corpus=web, crawl=dry))
    with pytest.raises(ConfigError, match=r"prefix of 0 pages crawled"):
        build(Stage(SelectConfig(pool="crawled", prefix_pages=0), corpus=web, crawl=dry))


def test_too_few_pages_to_keep(build, crawl, web, table):
    config = SelectConfig(pool="crawled", keep="top", keep_pages=14)
    with pytest.raises(ConfigError, match="keep_pages is 14 but the pool 'crawled' has 13 pages with text and a score"):
        build(Stage(config, corpus=web, scorer=table, crawl=crawl("breadth_first", budget_pages=15)))


def test_oracle_is_a_sample_of_the_top(build, web, table):
    """18 pages have text and a score; the best half are 9; the sample is seeded, sorted by page, and moves with its seed."""
    scores = Stage(ScoreConfig(), corpus=web, scorer=table)

    def oracle(**fields: object):
        return build(Stage(SelectConfig(pool="corpus", keep="sample_top", **{"top_fraction": 0.5, **fields}), corpus=web, scores=scores))

    best = sorted((name for name in SCORES if name != "q3"), key=lambda name: -SCORES[name])[:9]
    assert sorted(names(oracle(keep_pages=9))) == sorted(best)
    five = oracle(keep_pages=5)
    corpus = Corpus(five.input("corpus"))
    ids = corpus.find([URL + name for name in best])
    drawn = [best[k] for k in np.argsort(hash_ids(0, ids))[:5]]
    assert names(five) == sorted(drawn)
    assert names(five) != names(oracle(keep_pages=5, sample_seed=1))
    assert five.count("pool_fetches") is None and five.count("dropped_unscored") == 1
    with pytest.raises(
        ConfigError, match=r"best 0.5 of 18 pages with text and a score are 9; lower keep_pages or raise top_fraction \(to 0.556\)"
    ):
        oracle(keep_pages=10)
    assert len(names(oracle(keep_pages=10, top_fraction=0.556))) == 10


def test_ties_break_by_page(build, web, make_table):
    flat = make_table({URL + name: 0.5 for name in SCORES})
    scores = Stage(ScoreConfig(), corpus=web, scorer=flat)
    artifact = build(Stage(SelectConfig(pool="corpus", keep="top", keep_pages=12), corpus=web, scores=scores))
    assert names(artifact) == [f"p{k}" for k in range(10)] + ["q0", "q1"]


def test_heldout_pages_are_never_selected(build, make_web, make_table):
    pages = [(f"{URL}{k:03}", "text", []) for k in range(200)]
    web = make_web(pages, "held", heldout_fraction=0.3, heldout_min_chars=1)
    scores = Stage(ScoreConfig(), corpus=web, scorer=make_table({url: 0.5 for url, _, _ in pages}))
    heldout = Corpus(build(web)).heldout
    usable = 200 - len(heldout)
    artifact = build(Stage(SelectConfig(pool="corpus", keep="top", keep_pages=usable), corpus=web, scores=scores))
    rows = pq.read_table(artifact.file("kept.parquet")).column("page").to_pylist()
    assert len(heldout) > 30 and not set(rows) & set(heldout.tolist())
    assert artifact.count("dropped_heldout") == len(heldout)
