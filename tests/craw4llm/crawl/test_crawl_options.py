"""Budgets in tokens, further scorers, caps by registered domain, pruned frontiers, unreadable pages, refused priorities."""

import itertools
import math
import shutil

import numpy as np
import pyarrow.parquet as pq
import pytest

from craw4llm.artifact import Artifact
from craw4llm.configs import CorpusConfig, CrawlConfig, Length, ScoreConfig, ScorerConfig, SyntheticText, SyntheticWeb, TokenizerConfig
from craw4llm.corpus.gather import RowReader
from craw4llm.corpus.reader import Corpus
from craw4llm.crawl import frontier, loop
from craw4llm.crawl.bitset import BitSet
from craw4llm.crawl.budget import Budget
from craw4llm.crawl.caps import Caps
from craw4llm.crawl.loop import Crawler
from craw4llm.crawl.places import Places
from craw4llm.crawl.trace import Trace
from craw4llm.errors import ConfigError, StageError
from craw4llm.scoring import mapped
from craw4llm.scoring.means import exact_sum
from craw4llm.scoring.memo import PageScores
from craw4llm.scoring.scorer import NOT_READ, SCORED
from craw4llm.stage import Stage
from craw4llm.tokens.tokenizer import Tokenizer

WEB = Stage(CorpusConfig(source=SyntheticWeb(pages=300, hosts=10, mean_links=5.0, dead_share=0.2, seed=9), heldout_fraction=0.05))
SCORER = Stage(ScorerConfig(kind="train_fasttext", source=SyntheticText(lines=200), dim=8, buckets=500))
TOKENIZER = Stage(TokenizerConfig(vocab_size=300, train_bytes=50_000), corpus=WEB)
LENGTHS = Stage(ScorerConfig(kind="length", source=Length(unit="tokens")), tokenizer=TOKENIZER)
CHARS = Stage(ScorerConfig(kind="length", source=Length(unit="chars")))


def crawl(policy: str, *, web: Stage = WEB, others: dict[str, Stage] | None = None, **fields: object) -> Stage:
    inputs = {"scorer": SCORER, **(others or {}), **({"lengths": LENGTHS} if "budget_tokens" in fields else {})}
    return Stage(CrawlConfig(policy=policy, **{"seed_count": 5, "batch_pages": 8, **fields}), corpus=web, **inputs)


# ---- tokens -----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", ["quality", "parent_mean", "random"])
def test_a_budget_of_tokens_ends_with_the_page_that_reaches_it(shared_build, policy):
    """As the tokenizer counts them, one end-of-text a page; the crawl is the prefix of one by pages; `Trace.prefix` says the same."""
    corpus, tokenizer = Corpus(shared_build(WEB)), Tokenizer(shared_build(TOKENIZER))
    by_pages = Trace(shared_build(crawl(policy, budget_pages=120)))
    texts = corpus.texts(by_pages.crawled)
    totals = np.cumsum([len(ids) + 1 if text.strip() else 0 for ids, text in zip(tokenizer.encode_documents(texts), texts, strict=True)])
    long = Trace(shared_build(crawl(policy, budget_tokens=int(totals[100]))))
    assert long.n_crawled == 101 and long.artifact.count("crawled_tokens") == totals[100]
    for pages in (1, 4, 6, 13, 14, 60):
        for tokens in (int(totals[pages - 1]), int(totals[pages - 1]) + 1):
            short = Trace(shared_build(crawl(policy, budget_tokens=tokens)))
            assert short.n_crawled == pages + (tokens > totals[pages - 1]) and short.stop == "budget"
            prefix = by_pages.prefix(pages=short.n_crawled)
            assert short.crawled.tolist() == prefix.crawled.tolist() == long.prefix(tokens=tokens).crawled.tolist()
            assert short.fetched.tolist() == prefix.fetched.tolist() == long.prefix(tokens=tokens).fetched.tolist()
    both = Trace(shared_build(crawl(policy, budget_tokens=int(totals[20]), budget_pages=40)))
    assert both.n_crawled == 40
    rows = long.pages.filter(long.pages["crawl_rank"].is_valid()).sort_by("crawl_rank")
    assert np.cumsum(rows["tokens"].to_pylist()).tolist() == totals[:101].tolist()
    with pytest.raises(ConfigError, match="tokens crawled"):
        long.prefix(tokens=int(totals[100]) + 1)
    with pytest.raises(ConfigError, match="counted no tokens"):
        by_pages.prefix(tokens=1)


def test_a_budget_of_tokens_goes_on_from_its_checkpoint(shared_build, build, monkeypatch):
    monkeypatch.setattr(loop.Crawler.run, "__defaults__", (None, None, 0.0))
    real, done = loop.Crawler._go_on, []
    monkeypatch.setattr(loop.Crawler, "_go_on", lambda self, row: done.append(row.iteration) or real(self, row))
    for tokens in (40_000, 90_000):
        done.clear()
        assert build(crawl("quality", budget_tokens=tokens)).digest == shared_build(crawl("quality", budget_tokens=tokens)).digest
    assert done[0] > 1  # the longer one began where the shorter one was


def test_lengths_must_count_tokens(build):
    with pytest.raises(ConfigError, match="exactly when the input `lengths` is given"):
        Stage(CrawlConfig(policy="random", budget_tokens=5), corpus=WEB)
    with pytest.raises(ConfigError, match="exactly when the input `lengths` is given"):
        Stage(CrawlConfig(policy="random", budget_pages=5), corpus=WEB, lengths=LENGTHS)
    with pytest.raises(ConfigError, match=r"give it kind 'length' with Length\(unit='tokens'\)"):
        build(Stage(CrawlConfig(policy="random", budget_tokens=5), corpus=WEB, lengths=CHARS))


@pytest.mark.parametrize(
    ("budget", "end"),
    [
        ({"pages": 2}, 3),
        ({"fetches": 11}, 1),
        ({"fetches": 14}, 4),
        ({"tokens": 60}, 3),
        ({"tokens": 61}, 4),
        ({"pages": 1, "tokens": 61}, 4),
        ({"pages": 9}, 4),
    ],
)
def test_where_a_budget_ends(budget, end):
    """Events after which 1, 1, 2, 3 pages, 11 to 14 fetches and 50, 50, 60, 99 tokens are made."""
    assert Budget(**budget).end(np.array([1, 1, 2, 3]), np.array([11, 12, 13, 14]), np.array([50, 50, 60, 99])) == end


# ---- further scorers --------------------------------------------------------------------------------------------------------


def test_other_scorers_are_kept_beside_the_crawl(shared_build):
    plain = Trace(shared_build(crawl("quality", budget_pages=50)))
    kept = Trace(shared_build(crawl("quality", budget_pages=50, others={"score_chars": CHARS})))
    assert str(kept.pages.drop_columns("score_chars").to_pylist()) == str(plain.pages.to_pylist())  # text: NaN equals NaN
    corpus = Corpus(shared_build(WEB))
    lengths = [float(len(text)) if text.strip() else math.nan for text in corpus.texts(kept.fetched)]
    np.testing.assert_array_equal(kept.scores("chars"), np.array(lengths, dtype=np.float32))
    with pytest.raises(ConfigError, match="kept no scores named 'words'; it kept chars"):
        kept.scores("words")
    with pytest.raises(ConfigError, match=r"given the inputs corpus, scorerr; it takes corpus, \[scorer\]"):
        Stage(CrawlConfig(policy="random", budget_pages=5), corpus=WEB, scorerr=SCORER)
    with pytest.raises(ConfigError, match="an input named score_\\* is a tokenizer"):
        shared_build(crawl("quality", budget_pages=5, others={"score_x": TOKENIZER}))


# ---- caps -------------------------------------------------------------------------------------------------------------------


def test_caps_by_hand(build, make_web):
    names = ["a.x.co.uk/1", "a.x.co.uk/2", "b.x.co.uk/", "c.org/1", "c.org/2", "y.co.uk/"]
    web = make_web([(f"https://{name}", "text", ["https://b.x.co.uk/dead", "https://new.org/dead"]) for name in names])
    corpus = Corpus(build(web))
    target = {corpus.url(t).removeprefix("https://"): t for t in range(corpus.n_targets)}
    everything = np.array([target[name] for name in names], dtype=np.uint32)
    yes = np.ones(len(names), dtype=np.bool_)
    assert Caps(corpus, per_host=1, per_domain=None).admit(everything, yes).tolist() == [True, False, True, True, False, True]
    assert Caps(corpus, per_host=None, per_domain=1).admit(everything, yes).tolist() == [True, False, False, True, False, True]
    both = Caps(corpus, per_host=1, per_domain=2)
    assert both.admit(everything, yes).tolist() == [True, False, True, True, False, True]
    dead = np.array([target["b.x.co.uk/dead"], target["new.org/dead"]], dtype=np.uint32)
    assert both.full(dead).tolist() == [True, False]  # b.x.co.uk has had its one page
    assert both.admit(np.repeat(dead[1:], 3), np.zeros(3, dtype=np.bool_)).tolist() == [True] * 3  # dead links use up nothing
    assert both.full(dead).tolist() == [True, False]


@pytest.mark.parametrize("policy", ["quality", "parent_mean", "random"])
def test_capped_crawls_go_on_and_are_extended(shared_build, build, monkeypatch, policy):
    fields = {"pages_per_host": 14, "restart_seeds": 4, "seed_count": 2}
    monkeypatch.setattr(loop.Crawler.run, "__defaults__", (None, None, 0.0))
    for pages in (20, 61, 110, 1000):
        assert build(crawl(policy, budget_pages=pages, **fields)).digest == shared_build(crawl(policy, budget_pages=pages, **fields)).digest


def test_the_next_seeds_of_a_long_draw_are_found_in_few_steps():
    """All but the last three of the draw are met; a restart of one seed at a time does not begin at the front again and again."""
    crawler = object.__new__(Crawler)
    asked = []

    class Met(BitSet):
        def has(self, ids):
            asked.append(len(ids))
            return super().has(ids)

    n = 20_000
    crawler._drawn, crawler._restart_seeds, crawler._seen = np.arange(n, dtype=np.uint32)[::-1], 1, Met(n)
    crawler._seen.add(np.arange(3, n, dtype=np.uint32))
    for seed in (2, 1, 0):
        assert crawler._next_seeds().tolist() == [seed]
        crawler._seen.add(np.array([seed], dtype=np.uint32))
    assert crawler._next_seeds().tolist() == []
    assert sum(asked) < 4 * n


def test_options_that_are_refused():
    for field in ("pages_per_host", "pages_per_domain", "budget_tokens"):
        with pytest.raises(ConfigError, match=f"{field} is 0; expected at least 1"):
            CrawlConfig(policy="random", budget_pages=5, **{field: 0})
    with pytest.raises(ConfigError, match="restart_seeds is -1; expected 0 or more"):
        CrawlConfig(policy="random", budget_pages=5, restart_seeds=-1)


# ---- the frontier's pruning -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", ["quality", "indegree", "random", "breadth_first"])
def test_a_pruned_frontier_changes_nothing(shared_build, build, monkeypatch, policy):
    """Pruned at every chance: same bytes, also of crawls that go on from a pruned one's checkpoint with a budget that prunes nothing."""
    web = Stage(CorpusConfig(source=SyntheticWeb(pages=300, hosts=10, mean_links=5.0, seed=9), dangling_links="outside"))
    budgets = [{"budget_pages": 40}, {"budget_pages": 90}, {"budget_pages": 150, "budget_fetches": 220}, {"budget_pages": 1000}]
    expected = [shared_build(crawl(policy, web=web, **budget)).digest for budget in budgets]
    pruned: list[int] = []
    monkeypatch.setattr(frontier, "_MIN_PRUNED", 0)
    monkeypatch.setattr(loop.Crawler.run, "__defaults__", (None, None, 0.0))
    real = frontier.Frontier.prune

    def prune(self, keep):
        self_held = self._held
        real(self, keep)
        pruned.append(self_held - self._held)

    monkeypatch.setattr(frontier.Frontier, "prune", prune)
    assert [build(crawl(policy, web=web, **budget)).digest for budget in budgets] == expected
    assert sum(dropped > 0 for dropped in pruned) >= 2


def test_no_pruning_where_it_would_not_be_exact(shared_build):
    corpus, scores = Corpus(shared_build(WEB)), np.empty(0, dtype=np.float32)
    make = lambda policy, **budget: Crawler(  # noqa: E731
        corpus, policy, scores, seeds=np.array([0], dtype=np.uint32), budget=Budget(**budget), batch_pages=5, tokens=len
    )
    assert make("quality", pages=5)._prunes
    assert not make("quality", pages=5, fetches=5)._prunes
    assert not make("quality", tokens=5)._prunes
    assert not make("parent_mean", pages=5)._prunes
    assert not make("random", pages=5)._prunes  # dead links wait in its frontier


# ---- what cannot be read, and what is not finite ----------------------------------------------------------------------------


@pytest.fixture
def damaged(build, execution, tmp_path):
    """damaged(pages) -> the corpus artifact with damaged texts of these pages, beside a scorer."""
    whole, scorer = build(WEB), build(SCORER)

    def make(pages: list[int]) -> tuple[Artifact, Artifact]:
        folder = tmp_path / f"damaged-{len(pages)}"
        shutil.copytree(whole.path, folder)
        offsets = np.load(folder / "text_offsets.npy")
        data = bytearray((folder / "text.zst").read_bytes())
        for page in pages:
            data[int(offsets[page]) : int(offsets[page + 1])] = b"x" * int(offsets[page + 1] - offsets[page])
        (folder / "text.zst").write_bytes(data)
        return Artifact(whole.root, whole.stage, whole.fingerprint, whole.manifest), scorer

    def moved(pages: list[int]) -> tuple[Artifact, Artifact]:
        _, scorer = make(pages)
        shutil.rmtree(whole.path)
        shutil.move(tmp_path / f"damaged-{len(pages)}", whole.path)
        return whole, scorer

    return moved


def test_pages_that_cannot_be_read_have_no_score_and_are_counted(damaged, execution):
    corpus, scorer = damaged([3, 50])
    with PageScores(corpus, scorer, execution) as scores:
        values, reasons = scores.with_reasons(np.arange(100))
        assert np.flatnonzero(reasons == NOT_READ).tolist() == [3, 50]
        assert np.isnan(values[[3, 50]]).all() and (reasons == SCORED).sum() > 80
        assert scores.unreadable == 2
    with PageScores(corpus, scorer, execution) as again:  # nothing was written down: a disk may recover
        assert again._memo.missing(np.array([2, 3, 4, 50])).tolist() == [3, 50]


def test_too_many_unreadable_pages_stop_the_run(damaged, execution):
    corpus, scorer = damaged(list(range(0, 40, 2)))
    with (
        PageScores(corpus, scorer, execution) as scores,
        pytest.raises(StageError, match=r"20 of 300 pages could not be read \(one is page 0, http.*at most 1% are tolerated"),
    ):
        scores.scores(np.arange(300))


def test_the_score_stage_counts_them(damaged, build):
    damaged([7])
    scores = build(Stage(ScoreConfig(), corpus=WEB, scorer=SCORER))
    assert scores.count("not_read") == 1 and scores.count("unreadable") == 0
    trace = build(crawl("quality", budget_pages=250))
    assert trace.count("unreadable_pages") == int(7 in Trace(trace).fetched.tolist())


def test_infinite_priorities_are_refused(shared_build):
    corpus = Corpus(shared_build(WEB))
    rank = np.asarray(corpus.indegree).astype(np.float32)
    live = [corpus.outlinks([p])[1] for p in range(corpus.n_pages)]
    live = [links[(links < corpus.n_pages) & ~np.isin(links, corpus.heldout)] for links in live]
    seed = next(p for p, links in enumerate(live) if len(links) >= 4 and p not in links and p not in corpus.heldout)
    first, seeds = live[seed], np.array([seed], dtype=np.uint32)
    make = lambda rank: Crawler(corpus, "indegree", None, seeds=seeds, budget=Budget(pages=300), batch_pages=1, rank=rank)  # noqa: E731
    assert make(rank).run().refused == 0
    rank[first[0]] = np.inf
    rank[first[1]] = np.nan
    found = make(rank).run()
    assert found.refused == 1
    assert found.fetched[-2:].tolist() == sorted(first[:2].tolist())  # last, both


# ---- parts ------------------------------------------------------------------------------------------------------------------


def test_exact_sum_is_fsum():
    rng = np.random.default_rng(0)
    for size in (0, 1, 7, 3000):
        values = rng.integers(0, 1 << 32, size, dtype=np.uint64).astype(np.uint32).view(np.float32)  # every exponent, subnormal ones too
        values[~np.isfinite(values) | (np.abs(values) > 1e30)] = np.nan
        known = values[~np.isnan(values)]
        assert exact_sum(values) == (math.fsum(known.tolist()), len(known))
    assert exact_sum(np.array([np.inf, 1], dtype=np.float32)) == (math.inf, 2)


def test_bit_sets():
    rng = np.random.default_rng(0)
    ids = rng.integers(0, 1001, 400).astype(np.uint32)
    found = BitSet(1001)
    found.add(ids[:200])
    found.add(ids[200:])
    everything = np.arange(1001, dtype=np.uint32)
    assert np.flatnonzero(found.has(everything)).tolist() == sorted(set(ids.tolist()))
    assert found.nbytes == 126 and found.has(ids[:0]).tolist() == []


def test_places_are_positions_in_the_order_of_urls(shared_build):
    corpus = Corpus(shared_build(WEB))
    urls = corpus.urls.to_pylist() + corpus.dead_urls.to_pylist()
    order = sorted(range(len(urls)), key=lambda t: urls[t].encode())
    places, everything = Places(corpus), np.arange(len(urls), dtype=np.uint32)
    assert places.targets(everything).tolist() == order
    assert places.of(np.array(order, dtype=np.uint32)).tolist() == list(range(len(urls)))
    assert places.of(everything[::-1]).tolist() == np.argsort(order)[::-1].tolist()


def test_rows_are_the_same_from_memory_and_by_threads(monkeypatch, tmp_path):
    rng = np.random.default_rng(0)
    lengths = rng.integers(0, 9, 5000)
    offsets, targets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.uint64), np.arange(lengths.sum(), dtype=np.uint32)
    np.save(tmp_path / "t.npy", targets)
    pages = rng.permutation(5000)[:3000]
    expected = [list(range(int(offsets[p]), int(offsets[p + 1]))) for p in pages.tolist()]
    touched: list[int] = []
    real = RowReader._touch
    monkeypatch.setattr(RowReader, "_touch", lambda self, ids: (touched.append(len(ids)), real(self, ids)))
    # How long a row takes, and whether the process waited for a file: a busy machine is slow without.
    for slow, waits, by_threads in ((1.0, itertools.count(), False), (-1.0, itertools.repeat(0), False), (-1.0, itertools.count(), True)):
        monkeypatch.setattr("craw4llm.corpus.gather._SLOW_S", slow)
        monkeypatch.setattr("craw4llm.corpus.gather._waits", lambda waits=waits: next(waits))
        touched.clear()
        for array in (targets, np.load(tmp_path / "t.npy", mmap_mode="r")):
            reader = RowReader(offsets, array)
            starts, links = reader.read(pages)
            assert all(np.array_equal(*both) for both in zip(reader.read(pages), (starts, links), strict=True))
            assert [links[starts[k] : starts[k + 1]].tolist() for k in range(3000)] == expected
            assert links.dtype == np.uint32 and starts.dtype == np.int64
        assert bool(touched) is by_threads


def test_a_memo_in_a_file_without_a_name(monkeypatch, shared_build, execution):
    corpus, scorer = shared_build(WEB), shared_build(SCORER)
    with PageScores(corpus, scorer, execution) as scores:
        expected = scores.scores(np.arange(40))
    monkeypatch.setattr(mapped, "MAPPED", 0)
    before = sorted(execution.memo.rglob("*"))
    with PageScores(corpus, scorer, execution) as scores:
        assert isinstance(scores._memo._scores, np.memmap)
        np.testing.assert_array_equal(scores.scores(np.arange(40)), expected)
    assert scores.computed == 0 and sorted(execution.memo.rglob("*")) == before
    assert pq.read_table(corpus.file("pages.parquet")).num_rows == 300


def test_what_the_progress_bar_is_told(shared_build, execution):
    """Pages done, and beside them the frontier and the mean scores of what came in and went out; so that the sums are the crawl's."""
    told: list[tuple[int, str]] = []

    class Told:
        def update(self, count: int, note: str = "") -> None:
            told.append((count, note))

    corpus, scorer = shared_build(WEB), shared_build(SCORER)
    with PageScores(corpus, scorer, execution) as scores:
        seeds = np.array([p for p in range(9) if p not in Corpus(corpus).heldout], dtype=np.uint32)
        crawl = Crawler(Corpus(corpus), "quality", scores, seeds=seeds, budget=Budget(pages=60), batch_pages=20).run(Told())
    assert sum(count for count, _ in told) == 60 and len(told) == len(crawl.iterations)
    row = crawl.iterations[1]
    scores_told = f"score in {row.mean_score_discovered:.3f}, score out {row.mean_score_crawled:.3f}"
    assert told[1] == (20, f"iteration 1, frontier {row.frontier:,}, {scores_told}")
