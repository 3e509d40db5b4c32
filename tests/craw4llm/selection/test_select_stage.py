"""Selections: pools, prefixes and what is kept, on a web whose crawl is known by hand.

A chain p0 -> p1 -> ... -> p9, each page also linking to a dead link of its own and to q0 ... q9, which link nowhere; scores
p_k = k / 10, q_k = .95 - k / 10. q3 is empty, q5 is not in the table.
"""

import json

import numpy as np
import pyarrow.parquet as pq
import pytest

from craw4llm.configs import NEEDS_SCORER, CrawlConfig, ScoreConfig, SelectConfig, TokenizerConfig
from craw4llm.corpus.reader import Corpus
from craw4llm.crawl.hashing import hash_ids
from craw4llm.crawl.trace import Trace
from craw4llm.errors import ConfigError, InputError
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
    pages = [(f"{URL}{k:03}", f"text {k}", []) for k in range(200)]
    web = make_web(pages, "held", heldout_fraction=0.3, heldout_min_chars=1)
    scores = Stage(ScoreConfig(), corpus=web, scorer=make_table({url: 0.5 for url, _, _ in pages}))
    heldout = Corpus(build(web)).heldout
    usable = 200 - len(heldout)
    artifact = build(Stage(SelectConfig(pool="corpus", keep="top", keep_pages=usable), corpus=web, scores=scores))
    rows = pq.read_table(artifact.file("kept.parquet")).column("page").to_pylist()
    assert len(heldout) > 30 and not set(rows) & set(heldout.tolist())
    assert artifact.count("dropped_heldout") == len(heldout)


def test_threshold(build, crawl, web, table):
    """All with at least that score, best first; a float32 score equal to the threshold is kept."""
    config = SelectConfig(pool="crawled", keep="threshold", min_score=0.3)
    artifact = build(Stage(config, corpus=web, scorer=table, crawl=crawl("breadth_first", budget_pages=15)))
    good = [name for name in BFS if name != "q3" and SCORES.get(name, 0) >= 0.3]
    assert names(artifact) == sorted(good, key=lambda name: -SCORES[name]) and "p3" in good
    assert artifact.count("dropped_under_threshold") == len([n for n in BFS if n not in ("q3", "q5")]) - len(good)


def test_strict_oracle_and_recall_ceiling(build, web, table):
    """18 pages can be selected; the best 5 of them, against the best half (9): recall is N / 9 and no more."""
    scores = Stage(ScoreConfig(), corpus=web, scorer=table)
    best = sorted((name for name in SCORES if name != "q3"), key=lambda name: -SCORES[name])
    artifact = build(Stage(SelectConfig(pool="corpus", keep="top", keep_pages=5, top_fraction=0.5), corpus=web, scores=scores))
    assert names(artifact) == best[:5]
    assert artifact.count("precision") == 1 and artifact.count("recall") == artifact.count("recall_ceiling") == 5 / 9


def test_a_crawl_against_the_best_pages_and_another_selection(build, crawl, web, table):
    scores = Stage(ScoreConfig(), corpus=web, scorer=table)
    first = Stage(SelectConfig(pool="crawled", prefix_pages=4), corpus=web, crawl=crawl("breadth_first", budget_pages=15))
    config = SelectConfig(pool="crawled", prefix_pages=8, keep="top", keep_pages=6, top_fraction=0.5)
    artifact = build(Stage(config, corpus=web, scores=scores, crawl=crawl("breadth_first", budget_pages=15), other=first))
    assert names(artifact) == sorted(BFS[:8], key=lambda name: -SCORES[name])[:6]
    best = set(sorted((name for name in SCORES if name != "q3"), key=lambda name: -SCORES[name])[:9])
    shared = len(best & set(names(artifact)))
    assert (artifact.count("precision"), artifact.count("recall")) == (shared / 6, shared / 9)
    other = json.loads(artifact.file("statistics.json").read_text())["other"]
    assert other["pages"] == 4 and other["shared_pages"] == len(set(names(artifact)) & set(BFS[:4]))
    alone = build(Stage(config, corpus=web, scorer=table, crawl=crawl("breadth_first", budget_pages=15)))
    assert names(alone) == names(artifact) and alone.count("precision") is None


@pytest.mark.parametrize("keep", ["all", "top"])
def test_a_number_of_tokens(build, crawl, web, table, keep):
    """Pages in order until they have that many tokens; the page that reaches it is kept whole."""
    tokenizer = Stage(TokenizerConfig(vocab_size=257), corpus=web)  # one token a byte
    stage = crawl("breadth_first", budget_pages=15)
    each = len("text of p0") + 1

    def select(tokens: int):
        inputs = {"corpus": web, "scorer": table, "crawl": stage, "tokenizer": tokenizer}
        return build(Stage(SelectConfig(pool="crawled", keep=keep, keep_tokens=tokens), **inputs))

    order = [n for n in BFS if n != "q3"] if keep == "all" else sorted((n for n in BFS if n not in ("q3", "q5")), key=lambda n: -SCORES[n])
    for tokens, pages in ((1, 1), (each, 1), (each + 1, 2), (5 * each, 5)):
        artifact = select(tokens)
        assert names(artifact) == order[:pages] and artifact.count("kept_tokens") == pages * each
    with pytest.raises(ConfigError, match=f"keep_tokens is 1,000 but the {len(order)} pages .* have {len(order) * each} tokens"):
        select(1000)


def test_a_list_of_ids(build, web, table, tmp_path):
    """The released code's files in the order of their numbers, URLs in any spelling; unknown and repeated lines are counted."""
    folder = tmp_path / "released"
    folder.mkdir()
    lists = {0: ["p3", "p1"], 1: ["p0", "missing"], 2: ["q3"], 10: ["p9"]} | {k: ["p1"] for k in range(3, 10)}
    for number, lines in lists.items():
        (folder / f"iter_{number}.docids.txt").write_text("".join(f"{URL}{name}\n" for name in lines))
    (folder / "config.yaml").write_text("not a list")
    (folder / "iter_0.docids.txt").write_text(f"HTTPS://W.example:443/p3\n\n{URL}p1\n")

    def select(path, **fields):
        return build(Stage(SelectConfig(pool="listed", ids=External(name="ids", path=str(path)), **fields), corpus=web, scorer=table))

    artifact = select(folder)
    assert names(artifact) == ["p3", "p1", "p0", "p9"]
    assert artifact.count("dropped_empty") == 1 and artifact.count("pool_fetches") is None
    assert artifact.manifest["notes"]["listed"] == {"unknown": 1, "repeated": 7}
    assert names(select(folder, keep="top", keep_pages=2)) == ["p9", "p3"]
    assert names(select(folder, prefix_pages=2)) == ["p3", "p1"]
    with pytest.raises(ConfigError, match=r"prefix_pages is 6 but .* lists 5 pages"):
        select(folder, prefix_pages=6)
    plain = tmp_path / "ids.txt"
    plain.write_text(f"{URL}q2\n{URL}q1")
    assert names(select(plain)) == ["q2", "q1"]
    (folder / "iter_1.docids.txt").unlink()
    with pytest.raises(InputError, match=r"up to 10 but no iter_1\.docids\.txt"):
        select(folder.rename(tmp_path / "torn"))
    plain = tmp_path / "docids.txt"
    plain.write_text("clueweb22-en0000-00-00000\n")
    with pytest.raises(InputError, match=r"holds none of the 1 pages .*it has no document ids"):
        select(plain)


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"pool": "listed"}, "ids"),
        ({"pool": "crawled", "keep": "threshold"}, "min_score"),
        ({"pool": "crawled", "min_score": 0.5}, "min_score"),
        ({"pool": "crawled", "keep": "top", "keep_pages": 1, "keep_tokens": 1}, "keep_tokens"),
        ({"pool": "crawled", "near_duplicates": "delete"}, "near_duplicates"),
        ({"pool": "crawled", "near_threshold": 0.0}, "near_threshold"),
        ({"pool": "corpus", "keep": "all"}, "keep"),
        ({"pool": "crawled", "keep": "best"}, "keep"),
    ],
)
def test_configs_that_cannot_be_meant(fields, field):
    with pytest.raises(ConfigError, match=f"select: {field} is"):
        SelectConfig(**fields)
