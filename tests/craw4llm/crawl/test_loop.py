"""The loop: crawls worked out by hand on twelve pages, and a plain one-page-at-a-time crawler as the reference on random webs.

The web (a score after each page; cc and da are dead links, k has no text and no score, l is not reachable):

    a .9 -> c d cc    b .1 -> d e k    c .2 -> f      d .8 -> g h da    e .5 -> i j    f .7
    g .3 -> a b       h .6 -> j        i .4           j .95 -> c        k   -> i       l .99 -> a

Seeds in the order b, a; batches of two live pages. In the order of URLs, cc stands between c and d, and da between d and e.
"""

import collections
import heapq
import math
from dataclasses import dataclass, field

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest

from craw4llm.configs import KNOWLEDGE, NEEDS_RANK, NEEDS_SCORER, CorpusConfig, CrawlConfig, GraphMeasure, ScorerConfig, SyntheticWeb
from craw4llm.corpus.reader import Corpus
from craw4llm.crawl.hashing import uniform
from craw4llm.crawl.loop import distinct_targets
from craw4llm.crawl.seeds import seed_order
from craw4llm.crawl.trace import Trace
from craw4llm.errors import ArtifactError, ConfigError
from craw4llm.fingerprint import External
from craw4llm.scoring.graph import harmonic, links_of, pagerank
from craw4llm.stage import Stage

POLICIES = sorted(KNOWLEDGE)
PLAIN_POLICIES = [
    policy for policy in POLICIES if policy != "predicted"
]  # those with a formula of one line; test_predicted.py has the other
LINKS = {
    **{"a": "c d cc", "b": "d e k", "c": "f", "d": "g h da", "e": "i j", "f": ""},
    **{"g": "a b", "h": "j", "i": "", "j": "c", "k": "i", "l": "a"},
}
SCORES = {"a": 0.9, "b": 0.1, "c": 0.2, "d": 0.8, "e": 0.5, "f": 0.7, "g": 0.3, "h": 0.6, "i": 0.4, "j": 0.95, "l": 0.99}
URL = "https://w.example/"


@pytest.fixture
def crawl_stage(make_web, make_table, tmp_path):
    """crawl_stage(policy, seeds="b a", match=None, **fields of CrawlConfig) -> a crawl over the hand-made web."""
    web = make_web([(URL + page, "" if page == "k" else f"text {page}", [URL + t for t in links.split()]) for page, links in LINKS.items()])
    table = make_table({URL + page: score for page, score in SCORES.items()})

    def stage(policy: str, seeds: str = "b a", match: Stage | None = None, **fields: object) -> Stage:
        path = tmp_path / f"seeds {seeds}.txt"
        path.write_text("\n".join(URL + s for s in seeds.split()))
        config = CrawlConfig(policy=policy, seeds=External(name="seeds", path=str(path)), **{"batch_pages": 2, **fields})
        inputs = {"scorer": table} if policy in NEEDS_SCORER else {}
        if match is not None:
            inputs["match"] = match
        return Stage(config, corpus=web, **inputs)

    return stage


@pytest.fixture
def crawl(build, crawl_stage):
    """Like crawl_stage, run: a Trace."""
    return lambda *args, **fields: Trace(build(crawl_stage(*args, **fields)))


def names(trace: Trace, ids: np.ndarray) -> str:
    corpus = Corpus(trace.artifact.input("corpus"))
    return " ".join(corpus.url(int(i)).removeprefix(URL) for i in ids)


def all_fetches(trace: Trace) -> str:
    """Pages and dead links by fetch rank."""
    corpus = Corpus(trace.artifact.input("corpus"))
    rows = [(r["fetch_rank"], r["page"]) for r in trace.pages.to_pylist()]
    rows += [(r["fetch_rank"], r["target"]) for r in trace.dead_links.to_pylist()]
    assert [rank for rank, _ in sorted(rows)] == list(range(trace.n_fetches))
    return " ".join(corpus.url(t).removeprefix(URL) for _, t in sorted(rows))


BY_HAND = {  # policy: (crawled, fetched)
    "quality": ("b a d e j h i g c k f", "b a c cc d e k da g h i j f"),
    "indegree": ("b a c d e f i j g h k", "b a c d cc da e f i j g h k"),
    "breadth_first": ("b a d e k c g h i j f", "b a d e k c cc da g h i j f"),
    "seen_indegree": ("b a d c e f g h j i k", "b a d c cc da e f g h j i k"),
    "parent_first": ("b a c d g h j f e k i", "b a c cc d da g h j f e k i"),
    "parent_mean": ("b a c d g h j f e k i", "b a c cc d da g h j f e k i"),
    "parent_max": ("b a c d g h j f e k i", "b a c cc d da g h j f e k i"),
    "parent_min": ("b a c d g h j f e k i", "b a c cc d da g h j f e k i"),
}


@pytest.mark.parametrize("policy", sorted(BY_HAND))
def test_the_right_crawl_by_hand(crawl, policy):
    """A budget of 11 pages is covered; of 12, the frontier runs dry: the same crawl, saved, with another reason to stop."""
    crawled, fetched = BY_HAND[policy]
    for pages, stop in ((11, "budget"), (12, "exhausted")):
        trace = crawl(policy, budget_pages=pages)
        assert names(trace, trace.crawled) == crawled
        assert all_fetches(trace) == fetched
        assert names(trace, trace.fetched) == " ".join(t for t in fetched.split() if t not in ("cc", "da"))
        assert trace.stop == stop
        counts = {name: entry["value"] for name, entry in trace.artifact.manifest["counts"].items()}
        assert (counts["seeds"], counts["discovered"], counts["fetched_pages"], counts["dead_links"]) == (2, 13, 11, 2)
        assert (counts["fetches"], counts["crawled_pages"]) == (13, 11)
    assert (
        "nothing was left to crawl after 11 pages and 13 fetches; the budget was 12 pages" in trace.artifact.manifest["notes"]["warnings"]
    )


def test_random_by_hand(crawl):
    """The seeds, then pair by pair the highest draws of what is known."""
    trace = crawl("random", budget_pages=11, rng_seed=3)
    corpus = Corpus(trace.artifact.input("corpus"))
    ids = dict(zip(LINKS, range(12), strict=True)) | {"cc": 12, "da": 13}
    draw = {name: float(uniform(3, [i])[0]) for name, i in ids.items()}
    known, crawled, batch = {"b", "a"}, ["b", "a"], ["b", "a"]
    waiting: set[str] = set()
    while batch:
        new = {t for page in batch for t in LINKS[page].split()} - known
        known |= new
        waiting |= new
        batch = []
        for name in sorted(waiting, key=lambda t: -draw[t]):
            if len(batch) < 2:
                waiting.remove(name)
                batch += [name] if name in LINKS else []
        crawled += batch
    assert names(trace, trace.crawled) == " ".join(crawled)
    assert len(corpus.dead_urls) == 2


def test_rows_of_a_crawl_by_hand(crawl):
    """parent_mean, row by row. Mean scores m of all pages crawled when links are followed: .5, .5, 2.9 / 6, 4.55 / 8, 5.05 / 9."""
    trace = crawl("parent_mean", budget_pages=11)
    m1, m2, m3, m5 = (0.1 + 0.9) / 2, (0.1 + 0.9 + 0.2 + 0.8) / 4, 2.9 / 6, 5.05 / 9
    rows = {names(trace, np.array([r["page"]])): r for r in trace.pages.to_pylist()}
    expected = {  # parent, depth, fetch rank, crawl rank, iteration, priority
        "b": (None, 0, 0, 0, 0, math.nan),
        "a": (None, 0, 1, 1, 0, math.nan),
        "c": ("a", 1, 2, 2, 1, (0.9 + m1) / 2),
        "d": ("b", 1, 4, 3, 1, (0.1 + 0.9 + m1) / 3),
        "g": ("d", 2, 6, 4, 2, (0.8 + m2) / 2),
        "h": ("d", 2, 7, 5, 2, (0.8 + m2) / 2),
        "j": ("h", 3, 8, 6, 3, (0.6 + m3) / 2),
        "f": ("c", 2, 9, 7, 3, (0.2 + m2) / 2),
        "e": ("b", 1, 10, 8, 4, (0.1 + m1) / 2),
        "k": ("b", 1, 11, 9, 4, (0.1 + m1) / 2),
        "i": ("e", 2, 12, 10, 5, (0.5 + m5) / 2),  # k links to it too, but has no score
    }
    assert list(rows) == list(expected)
    for page, (parent, depth, fetch_rank, crawl_rank, iteration, priority) in expected.items():
        row = rows[page]
        assert row["parent"] == (None if parent is None else list(LINKS).index(parent)), page
        assert (row["depth"], row["fetch_rank"], row["crawl_rank"]) == (depth, fetch_rank, crawl_rank), page
        assert row["iteration"] == row["crawl_iteration"] == iteration, page
        assert row["priority"] == pytest.approx(priority, rel=1e-6, nan_ok=True), page
        assert row["score"] == pytest.approx(SCORES.get(page, math.nan), rel=1e-6, nan_ok=True), page
    assert [(r["url"], r["iteration"], r["fetch_rank"]) for r in trace.dead_links.to_pylist()] == [(URL + "cc", 1, 3), (URL + "da", 2, 5)]
    assert trace.artifact.count("mean_score_crawled") == pytest.approx(5.45 / 10)


def test_rows_of_a_look_ahead(crawl):
    """Fetched at discovery, crawled later or never; the scores of what was fetched only are kept as well."""
    trace = crawl("quality", budget_pages=7)
    rows = {names(trace, np.array([r["page"]])): r for r in trace.pages.to_pylist()}
    assert names(trace, trace.crawled) == "b a d e j h i"
    assert {p for p, r in rows.items() if r["crawl_rank"] is None} == {"c", "k", "g"}
    assert (rows["g"]["iteration"], rows["g"]["crawl_iteration"], rows["i"]["iteration"], rows["i"]["crawl_iteration"]) == (2, None, 2, 3)
    assert rows["g"]["priority"] == rows["g"]["score"] == pytest.approx(0.3)
    assert math.isnan(rows["k"]["priority"]) and math.isnan(rows["k"]["score"])


def test_columns_are_those_of_the_contract(crawl):
    """docs/artifacts.md, "crawl"."""
    trace = crawl("quality", budget_pages=7)
    ranks = {"page": "uint32", "iteration": "uint32", "fetch_rank": "uint64", "crawl_rank": "uint32", "crawl_iteration": "uint32"}
    rest = {"parent": "uint32", "depth": "uint32", "priority": "float", "score": "float"}
    types = lambda table: {field.name: str(field.type) for field in table.schema}  # noqa: E731
    assert types(trace.pages) == ranks | rest
    assert types(trace.dead_links) == {"target": "uint32", "url": "string", "iteration": "uint32", "fetch_rank": "uint64"}
    counts = ("discovered", "fetched", "crawled", "dead", "frontier", "links", "new_targets", "heldout_links")
    means = {"mean_score_crawled": "double", "mean_score_discovered": "double"}
    assert types(trace.iterations) == {"iteration": "uint32", **dict.fromkeys(counts, "uint64"), **means, "hosts": "uint64"}
    assert crawl("random", budget_pages=7).pages.column("score").null_count == 7


def test_iterations_by_hand(crawl):
    trace = crawl("quality", budget_pages=11)
    rows = trace.iterations.to_pylist()
    columns = ("discovered", "fetched", "dead", "crawled", "frontier", "links", "new_targets", "hosts")
    assert [tuple(r[c] for c in columns) for r in rows] == [
        (2, 2, 0, 2, 0, 0, 0, 1),
        (5, 4, 1, 2, 2, 6, 5, 1),
        (5, 4, 1, 2, 4, 5, 5, 1),
        (0, 0, 0, 2, 2, 2, 0, 1),
        (0, 0, 0, 2, 0, 2, 0, 1),
        (1, 1, 0, 1, 0, 2, 1, 1),
    ]
    assert rows[1]["mean_score_discovered"] == pytest.approx((0.2 + 0.8 + 0.5) / 3)
    assert rows[1]["mean_score_crawled"] == pytest.approx((0.8 + 0.5) / 2)
    assert rows[3]["mean_score_discovered"] is None
    live = crawl("breadth_first", budget_pages=11).iterations.to_pylist()
    assert [(r["discovered"], r["fetched"], r["dead"], r["frontier"]) for r in live] == [
        (2, 2, 0, 0),
        (5, 2, 0, 3),
        (5, 2, 0, 6),
        (1, 2, 2, 3),
        (0, 2, 0, 1),
        (0, 1, 0, 0),
    ]
    assert all(r["mean_score_crawled"] is None and r["mean_score_discovered"] is None for r in live)


@pytest.mark.parametrize(
    ("policy", "budget", "crawled", "fetches"),
    [
        ("breadth_first", {"budget_pages": 1}, "b", 1),  # seeds are cut too
        ("breadth_first", {"budget_fetches": 1}, "b", 1),
        ("breadth_first", {"budget_pages": 5}, "b a d e k", 5),  # half a batch
        ("breadth_first", {"budget_fetches": 7}, "b a d e k c", 7),  # ends on a dead link
        ("breadth_first", {"budget_fetches": 9}, "b a d e k c g", 9),  # half a batch, after its dead links
        ("breadth_first", {"budget_pages": 3, "budget_fetches": 9}, "b a d e k c g", 9),
        ("breadth_first", {"budget_pages": 7, "budget_fetches": 3}, "b a d e k c g", 9),
        ("quality", {"budget_fetches": 4}, "b a", 4),  # c and cc are looked at, then it ends
        ("quality", {"budget_fetches": 7}, "b a", 7),  # all that was discovered is fetched; none is popped
        ("quality", {"budget_fetches": 8}, "b a d e", 8),
        ("quality", {"budget_pages": 3}, "b a d", 7),
        ("quality", {"budget_pages": 3, "budget_fetches": 9}, "b a d e", 9),  # whole batches until the fetches are made
        ("quality", {"budget_pages": 5, "budget_fetches": 9}, "b a d e j", 12),
        ("quality", {"budget_pages": 10, "budget_fetches": 13}, "b a d e j h i g c k", 13),
    ],
)
def test_the_crawl_ends_exactly_where_every_budget_is_covered(crawl, policy, budget, crawled, fetches):
    trace = crawl(policy, **budget)
    assert names(trace, trace.crawled) == crawled
    assert all_fetches(trace) == " ".join(BY_HAND[policy][1].split()[:fetches])
    assert trace.stop == "budget"
    assert trace.artifact.count("fetches") == fetches


def test_only_one_budget_can_be_met_where_the_frontier_runs_dry(crawl):
    trace = crawl("quality", budget_pages=5, budget_fetches=14)
    assert (trace.stop, trace.n_crawled, trace.n_fetches) == ("exhausted", 11, 13)


def test_a_seed_without_links(crawl):
    trace = crawl("indegree", seeds="f", budget_pages=5)
    assert (trace.stop, names(trace, trace.crawled), trace.n_fetches) == ("exhausted", "f", 1)


def test_match_fetches(crawl, crawl_stage):
    """As many fetches as another crawl made; a larger budget of the crawl's own is covered as well."""
    quality = crawl_stage("quality", budget_pages=6)
    assert crawl("quality", budget_pages=6).n_fetches == 12
    matched = crawl("breadth_first", budget_pages=6, match=quality, match_fetches=True)
    assert (matched.n_fetches, matched.n_crawled) == (12, 10)
    assert crawl("breadth_first", budget_pages=11, match=quality, match_fetches=True).n_fetches == 13
    assert crawl("breadth_first", budget_fetches=13, match=quality, match_fetches=True).n_fetches == 13


@pytest.mark.parametrize("policy", sorted(NEEDS_SCORER))
def test_a_policy_that_reads_scores_needs_a_scorer(policy):
    with pytest.raises(ConfigError, match=r"needs no scores, or the input `scorer`"):
        Stage(CrawlConfig(policy=policy, budget_pages=1), corpus=Stage(CorpusConfig(source=SyntheticWeb())))


# ---- the reference: one page at a time, with dictionaries -------------------------------------------------------------------


@dataclass
class Reference:
    """Algorithm 1 in its plainest form. Events: ("fetch", target) and ("crawl", target)."""

    links: list[list[int]]
    n_pages: int
    heldout: set[int]
    place: list[int]
    scores: list[float]
    rank: list[float]
    policy: str
    rng_seed: int
    batch_pages: int
    groups: list[list[str]] = field(default_factory=list)  # with caps: a name for each target
    caps: list[int] = field(default_factory=list)
    restart_seeds: int = 0
    order: list[int] = field(default_factory=list)  # in which seeds are drawn
    events: list[tuple[str, int]] = field(default_factory=list)

    def full(self, target: int) -> bool:
        crawled = [page for kind, page in self.events if kind == "crawl"]
        pairs = zip(self.groups, self.caps, strict=True)
        return any(sum(names[page] == names[target] for page in crawled) >= cap for names, cap in pairs)

    def run(self, seeds: list[int]) -> list[tuple[str, int]]:
        """All events of the crawl without a budget."""
        look_ahead = self.policy == "quality"
        parents: dict[int, list[int]] = {}
        seen, waiting, fetched = set(seeds), dict[int, float](), set(seeds)
        crawled: list[int] = []
        for seed in seeds:
            self.events += [("fetch", seed), ("crawl", seed)]
        batch = list(seeds)
        while batch:
            crawled += batch
            new, touched = [], set()
            for page in batch:
                for target in self.links[page]:
                    if target in self.heldout or target in fetched:
                        continue
                    parents.setdefault(target, []).append(page)
                    touched.add(target)
                    if target not in seen:
                        seen.add(target)
                        new.append(target)
            if look_ahead:
                for target in sorted(new, key=lambda t: self.place[t]):
                    if self.full(target):
                        continue
                    self.events.append(("fetch", target))
                    if target < self.n_pages:
                        waiting[target] = self.scores[target]
                    touched.discard(target)
            else:
                for target in touched:
                    waiting[target] = self.priority(target, parents[target], crawled)
            heap = [(math.isnan(p), -p if not math.isnan(p) else 0.0, self.place[t], t) for t, p in waiting.items()]
            heapq.heapify(heap)
            batch = []
            while heap and len(batch) < self.batch_pages:
                target = heapq.heappop(heap)[-1]
                del waiting[target]
                fetched.add(target)
                if self.full(target):
                    continue
                if not look_ahead:
                    self.events.append(("fetch", target))
                if target < self.n_pages:
                    batch.append(target)
                    self.events.append(("crawl", target))
            if not batch and self.restart_seeds:
                batch = [page for page in self.order if page not in seen][: self.restart_seeds]
                seen.update(batch)
                fetched.update(batch)
                for page in batch:
                    self.events += [("fetch", page), ("crawl", page)]
        return self.events

    def priority(self, target: int, parents: list[int], crawled: list[int]) -> float:
        scores = [self.scores[p] for p in parents if not math.isnan(self.scores[p])]
        known = [self.scores[p] for p in crawled if not math.isnan(self.scores[p])]
        if self.policy in ("indegree", "pagerank", "harmonic"):
            return self.rank[target]
        if self.policy == "breadth_first":
            return -crawled.index(parents[0])
        if self.policy == "random":
            return float(uniform(self.rng_seed, [target])[0])
        if self.policy == "seen_indegree":
            return len(parents)
        if self.policy == "parent_mean":
            return float(np.float32((sum(scores) + math.fsum(known) / len(known)) / (len(scores) + 1))) if known else math.nan
        if not scores:
            return math.nan
        return {"parent_first": scores[0], "parent_max": max(scores), "parent_min": min(scores)}[self.policy]


@pytest.fixture(scope="module")
def random_web(tmp_path_factory, shared_build):
    """(corpus stage, table stage, Corpus): 400 synthetic pages, dead links and held-out pages, few distinct scores, a tenth without one."""
    source = SyntheticWeb(pages=400, hosts=12, mean_links=4.0, dead_share=0.25, seed=5)
    web = Stage(CorpusConfig(source=source, heldout_fraction=0.1, heldout_min_chars=1))
    corpus = Corpus(shared_build(web))
    rng = np.random.default_rng(1)
    path = tmp_path_factory.mktemp("table") / "scores.parquet"
    scored = np.flatnonzero(rng.random(corpus.n_pages) < 0.9)
    values = np.round(rng.random(len(scored)), 1).astype(np.float32)  # many ties
    pq.write_table(pa.table({"url": corpus.urls.take(scored), "score": values}), path)
    return web, Stage(ScorerConfig(kind="table", source=External(name="scores", path=str(path)))), corpus


def rank_of(random_web, policy: str) -> list[float]:
    """The full-graph measure that a policy orders by. In-degree is counted here; the others are tested in scoring/test_more_scorers.py."""
    corpus = random_web[2]
    n = corpus.n_targets
    if policy == "pagerank":
        return pagerank(links_of(corpus), n, damping=0.85, tolerance=1e-6)[0].astype(np.float32).tolist()
    if policy == "harmonic":
        return harmonic(links_of(corpus), n, registers=64)[0].astype(np.float32).tolist()
    return np.bincount(corpus.outlinks(np.arange(corpus.n_pages))[1], minlength=n).tolist()


def reference(
    random_web, policy: str, batch_pages: int, seeds: list[int], score_of: dict[int, float], **options: object
) -> list[tuple[str, int]]:
    corpus = random_web[2]
    urls = corpus.urls.to_pylist() + corpus.dead_urls.to_pylist()
    places = {t: k for k, t in enumerate(sorted(range(len(urls)), key=lambda t: urls[t].encode()))}
    return Reference(
        links=[corpus.outlinks([p])[1].tolist() for p in range(corpus.n_pages)],
        n_pages=corpus.n_pages,
        heldout=set(corpus.heldout.tolist()),
        place=[places[t] for t in range(len(urls))],
        scores=[score_of.get(p, math.nan) for p in range(corpus.n_pages)],
        rank=rank_of(random_web, policy),
        policy=policy,
        rng_seed=4,
        batch_pages=batch_pages,
        **options,
    ).run(seeds)


def run_stage(random_web, shared_build, policy: str, **fields: object) -> Trace:
    web, table, _ = random_web
    inputs = {"scorer": table} if policy in NEEDS_SCORER else {}
    if policy in NEEDS_RANK:
        inputs["rank"] = Stage(ScorerConfig(kind=policy, source=GraphMeasure()), corpus=web)
    config = CrawlConfig(policy=policy, **{"seed_count": 6, "rng_seed": 4, **fields})
    return Trace(shared_build(Stage(config, corpus=web, **inputs)))


@pytest.mark.parametrize("batch_pages", [1, 7, 60])
@pytest.mark.parametrize("policy", PLAIN_POLICIES)
def test_against_the_reference(random_web, shared_build, policy, batch_pages):
    """The whole crawl, to the last page that can be reached."""
    trace = run_stage(random_web, shared_build, policy, batch_pages=batch_pages, budget_pages=1000)
    events = reference(random_web, policy, batch_pages, trace.crawled[:6].tolist(), scores_of(random_web))
    assert trace.stop == "exhausted" and trace.n_crawled > 200 and len(trace.dead_links) > 100
    assert_events(trace, events)


def scores_of(random_web) -> dict[int, float]:
    _, table, corpus = random_web
    rows = pq.read_table(table.config.source.path).to_pydict()
    return dict(zip(corpus.find(rows["url"]).tolist(), rows["score"], strict=True))


def assert_events(trace: Trace, events: list[tuple[str, int]]) -> None:
    assert trace.crawled.tolist() == [t for kind, t in events if kind == "crawl"]
    rows = [(r["fetch_rank"], r["page"]) for r in trace.pages.to_pylist()]
    rows += [(r["fetch_rank"], r["target"]) for r in trace.dead_links.to_pylist()]
    assert [t for _, t in sorted(rows)] == [t for kind, t in events if kind == "fetch"]


OPTIONS = {
    "host cap": {"pages_per_host": 9},
    "domain cap": {"pages_per_domain": 25},
    "both caps, restarts": {"pages_per_host": 12, "pages_per_domain": 40, "restart_seeds": 7},
    "restarts": {"restart_seeds": 3},
}


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("policy", ["quality", "random", "breadth_first", "parent_mean", "seen_indegree"])
def test_caps_and_restarts_against_the_reference(random_web, shared_build, policy, options):
    """The whole crawl, with every page's and dead link's host and registered domain."""
    corpus, fields = random_web[2], OPTIONS[options]
    hosts = [url.split("/")[2] for url in corpus.urls.to_pylist() + corpus.dead_urls.to_pylist()]
    domains = [".".join(host.split(".")[-2:]) for host in hosts]
    named = {"pages_per_host": hosts, "pages_per_domain": domains}
    trace = run_stage(random_web, shared_build, policy, batch_pages=20, budget_pages=1000, **fields)
    events = reference(
        random_web,
        policy,
        20,
        trace.crawled[:6].tolist(),
        scores_of(random_web),
        groups=[names for field, names in named.items() if field in fields],
        caps=[fields[field] for field in named if field in fields],
        restart_seeds=fields.get("restart_seeds", 0),
        order=seed_order(corpus, 0).tolist(),
    )
    assert_events(trace, events)
    assert trace.stop == "exhausted"
    if "pages_per_host" in fields:
        seeds = [hosts[page] for page in trace.pages.filter(pc.is_null(trace.pages["parent"]))["page"].to_pylist()]
        most = max(collections.Counter(hosts[page] for page in trace.crawled.tolist()).values())
        assert fields["pages_per_host"] <= most <= fields["pages_per_host"] + len(seeds)
        assert trace.artifact.count("capped") > 50
    if "restart_seeds" in fields and "pages_per_host" not in fields:
        assert set(seed_order(corpus, 0).tolist()) <= set(trace.crawled.tolist())  # every page that has text and is not held out
        assert trace.pages["parent"].null_count > 6


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("policy", ["quality", "random", "parent_mean", "predicted"])
def test_prefixes_with_caps_and_restarts(random_web, shared_build, policy, options):
    fields = {"batch_pages": 20, "seed_count": 2, **OPTIONS[options]}
    long = run_stage(random_web, shared_build, policy, budget_pages=1000, **fields)
    assert long.stop == "exhausted"
    n, fetches = long.n_crawled, long.n_fetches
    for pages in (1, 2, 3, 30, n // 2, n - 4, n - 1, n):
        short = run_stage(random_web, shared_build, policy, budget_pages=pages, **fields)
        prefix = long.prefix(pages=pages)
        assert short.crawled.tolist() == long.crawled[:pages].tolist() == prefix.crawled.tolist()
        assert short.fetched.tolist() == prefix.fetched.tolist() and short.n_fetches == prefix.fetches
    for made in (1, 2, 3, 31, fetches // 2, fetches - 5, fetches - 1, fetches):
        short = run_stage(random_web, shared_build, policy, budget_fetches=made, **fields)
        prefix = long.prefix(fetches=made)
        assert short.n_fetches == made and short.fetched.tolist() == prefix.fetched.tolist()
        assert short.crawled.tolist() == prefix.crawled.tolist()


@pytest.mark.parametrize("policy", POLICIES)
def test_heldout_pages_are_never_fetched(random_web, shared_build, policy):
    corpus = random_web[2]
    trace = run_stage(random_web, shared_build, policy, budget_pages=1000)
    assert len(corpus.heldout) > 20
    assert not set(trace.fetched.tolist()) & set(corpus.heldout.tolist())
    offsets, targets = corpus.outlinks(trace.crawled)
    heldout_links = int(corpus.heldout_mask[targets].sum())
    assert heldout_links > 10
    assert sum(trace.iterations.column("heldout_links").to_pylist()) == heldout_links
    assert sum(trace.iterations.column("links").to_pylist()) == len(targets) - heldout_links
    assert offsets[-1] == len(targets)


@pytest.mark.parametrize("policy", POLICIES)
def test_a_shorter_crawl_is_a_prefix_of_a_longer_one(random_web, shared_build, policy):
    """By pages, by fetches and by both; with every field that does not say how the crawl went on; `Trace.prefix` gives the same."""
    long = run_stage(random_web, shared_build, policy, batch_pages=20, budget_pages=180)
    kept = ["page", "iteration", "fetch_rank", "parent", "depth"]
    for pages in (1, 5, 6, 7, 25, 26, 27, 59, 133, 180):
        short = run_stage(random_web, shared_build, policy, batch_pages=20, budget_pages=pages)
        assert short.n_crawled == pages and short.stop == "budget"
        prefix = long.prefix(pages=pages)
        assert short.crawled.tolist() == long.crawled[:pages].tolist() == prefix.crawled.tolist()
        assert short.fetched.tolist() == prefix.fetched.tolist() == long.fetched[: len(short.fetched)].tolist()
        assert short.n_fetches == prefix.fetches
        assert short.pages.select(kept).equals(long.pages.select(kept)[: len(short.pages)])
        assert short.dead_links.equals(long.dead_links[: len(short.dead_links)])
        np.testing.assert_array_equal(short.pages["score"].to_numpy(), long.pages["score"].to_numpy()[: len(short.pages)])
    for fetches in (1, 5, 6, 7, 40, 41, 150, long.n_fetches - 1, long.n_fetches):
        short = run_stage(random_web, shared_build, policy, batch_pages=20, budget_fetches=fetches)
        assert short.n_fetches == fetches and short.stop == "budget"
        prefix = long.prefix(fetches=fetches)
        assert short.fetched.tolist() == prefix.fetched.tolist() == long.fetched[: len(short.fetched)].tolist()
        assert short.crawled.tolist() == prefix.crawled.tolist() == long.crawled[: short.n_crawled].tolist()
        assert short.pages.select(kept).equals(long.pages.select(kept)[: len(short.pages)])
    for pages, fetches in ((60, 100), (60, min(220, long.n_fetches)), (150, 100), (30, 31)):
        both = run_stage(random_web, shared_build, policy, batch_pages=20, budget_pages=pages, budget_fetches=fetches)
        assert both.n_crawled >= pages and both.n_fetches >= fetches
        by_pages, by_fetches = long.prefix(pages=pages), long.prefix(fetches=fetches)
        later = max((by_pages, by_fetches), key=lambda p: (p.fetches, len(p.crawled)))
        assert both.crawled.tolist() == later.crawled.tolist() and both.fetched.tolist() == later.fetched.tolist()


@pytest.mark.parametrize("policy", sorted(KNOWLEDGE))
def test_a_live_crawl_does_not_depend_on_pages_it_has_not_crawled(random_web, shared_build, tmp_path, policy):
    """Other scores for every page that is not crawled: only look-ahead can tell."""
    web, table, corpus = random_web
    before = run_stage(random_web, shared_build, policy, budget_pages=90, batch_pages=15)
    rows = pq.read_table(table.config.source.path).to_pydict()
    crawled = set(before.crawled.tolist())
    pages = corpus.find(rows["url"]).tolist()
    changed = [s if p in crawled else 1 - s for p, s in zip(pages, rows["score"], strict=True)]
    path = tmp_path / "changed.parquet"
    pq.write_table(pa.table({"url": rows["url"], "score": pa.array(changed, pa.float32())}), path)
    other = (web, Stage(ScorerConfig(kind="table", source=External(name="scores", path=str(path)))), corpus)
    after = run_stage(other, shared_build, policy, budget_pages=90, batch_pages=15)
    same = before.crawled.tolist() == after.crawled.tolist()
    assert same == (KNOWLEDGE[policy] != "target_text")


def test_a_rank_must_be_of_the_policys_kind_and_corpus(random_web, shared_build, build, make_web):
    web, _, _ = random_web
    ranked = Stage(ScorerConfig(kind="harmonic", source=GraphMeasure()), corpus=web)
    with pytest.raises(ConfigError, match="is given the scorer harmonic as its input `rank`; give it pagerank"):
        shared_build(Stage(CrawlConfig(policy="pagerank", budget_pages=5, seed_count=2), corpus=web, rank=ranked))
    other = make_web([("https://w.example/", "text", [])])
    with pytest.raises(ArtifactError, match="give both the same corpus"):
        build(Stage(CrawlConfig(policy="harmonic", budget_pages=1, seed_count=1), corpus=other, rank=ranked))
    with pytest.raises(ConfigError, match="exactly when the input `rank` is given"):
        Stage(CrawlConfig(policy="pagerank", budget_pages=1), corpus=web)
    with pytest.raises(ConfigError, match="exactly when the input `rank` is given"):
        Stage(CrawlConfig(policy="indegree", budget_pages=1), corpus=web, rank=ranked)


def test_distinct_targets_are_those_of_np_unique():
    rng = np.random.default_rng(0)
    for size in (0, 1, 7, 5000):
        targets = rng.integers(0, 1 + size // 3, size).astype(np.uint32) * np.uint32(700_001)
        expected = np.unique(targets, return_index=True, return_inverse=True)
        for got, wanted in zip(distinct_targets(targets, with_inverse=True), expected, strict=True):
            np.testing.assert_array_equal(got, wanted)
        assert len(distinct_targets(targets, with_inverse=False)[2]) == 0
