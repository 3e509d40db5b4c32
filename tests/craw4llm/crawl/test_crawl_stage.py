"""The crawl stage on reference webs: known mean scores, mass ties, equal bytes whatever the memo, workers and hash seed."""

import dataclasses
import importlib.util
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from craw4llm.artifact import Artifact
from craw4llm.configs import NEEDS_SCORER, CorpusConfig, CrawlConfig, ScoreConfig, ScorerConfig, SelectConfig
from craw4llm.corpus.reader import Corpus
from craw4llm.crawl.trace import Trace
from craw4llm.errors import ArtifactError
from craw4llm.execution import Execution
from craw4llm.fingerprint import External
from craw4llm.scoring import memo
from craw4llm.stage import Stage

ROOT = Path(__file__).resolve().parents[3]


def builder(execution: Execution) -> Callable[[Stage], Artifact]:
    """`builder` of tests/conftest.py, by its path: other folders have a conftest too."""
    spec = importlib.util.spec_from_file_location("root_conftest", ROOT / "tests/conftest.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.builder(execution)


@pytest.fixture(scope="session")
def docweb(shared: Path) -> tuple[Stage, Stage, External]:
    """(corpus, table of scores, seeds): 30,145 real pages, held-out off, as the reference numbers were taken."""
    folder = shared / "corpus"
    web = Stage(CorpusConfig(source=External(name="corpus", path=str(folder / "docweb.parquet")), heldout_fraction=0))
    table = Stage(ScorerConfig(kind="table", source=External(name="scores", path=str(folder / "docweb_scores.parquet"))))
    return web, table, External(name="seeds", path=str(folder / "seeds.txt"))


def docweb_crawl(docweb, build, policy: str, **fields: object) -> Artifact:
    """3,014 pages (a tenth) in batches of 150. The scorer is an input of every crawl here, so that every mean is known."""
    web, table, seeds = docweb
    return build(Stage(CrawlConfig(policy=policy, budget_pages=3014, batch_pages=150, seeds=seeds, **fields), corpus=web, scorer=table))


@pytest.mark.parametrize(
    ("policy", "mean"), [("quality", 0.32), ("indegree", 0.14), ("breadth_first", 0.12), ("random", 0.135), ("parent_mean", 0.15)]
)
def test_docweb_mean_scores(docweb, shared_build, policy, mean):
    """Reference values of the first four; that of parent_mean is our own. Measured: .3234, .1409, .1189, .1463 (seed 0), .1503."""
    crawl = docweb_crawl(docweb, shared_build, policy)
    assert crawl.count("crawled_pages") == 3014
    assert crawl.count("seeds") == 50
    assert crawl.count("mean_score_crawled") == pytest.approx(mean, abs=0.02)
    trace = Trace(crawl)
    assert np.nanmean(trace.prefix().crawled_scores, dtype=np.float64) == pytest.approx(crawl.count("mean_score_crawled"), rel=1e-12)


def test_docweb_fetches_of_look_ahead(docweb, shared_build):
    """About 6,480 live pages are read to crawl 3,014 (measured: 6,476), and 19,687 dead links are requested."""
    crawl = docweb_crawl(docweb, shared_build, "quality")
    assert crawl.count("fetched_pages") == pytest.approx(6480, abs=60)
    assert crawl.count("fetches") == crawl.count("fetched_pages") + crawl.count("dead_links") == crawl.count("discovered")


def test_docweb_spread_of_random(docweb, shared_build):
    """Over 20 rng seeds: mean .1379, standard deviation .0055, from .1266 to .1463 (measured)."""
    means = [docweb_crawl(docweb, shared_build, "random", rng_seed=seed).count("mean_score_crawled") for seed in range(20)]
    assert np.mean(means) == pytest.approx(0.135, abs=0.01)
    assert 0.002 < np.std(means, ddof=1) < 0.01


def test_docweb_best_pages(docweb, shared_build):
    web, table, _ = docweb
    scores = Stage(ScoreConfig(), corpus=web, scorer=table)
    best = shared_build(Stage(SelectConfig(pool="corpus", keep="top", keep_pages=3014), corpus=web, scores=scores))
    assert best.count("mean_score") == pytest.approx(0.815, abs=0.02)
    assert best.count("dropped_empty") == 381


@pytest.fixture(scope="session")
def mini(shared: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Paths of the 240 pages of _mini_web as Parquet, its 12 seeds as URLs, its planted quality as a table, and the toy training text."""
    folder, out = shared / "cases/_mini_web", tmp_path_factory.mktemp("mini")
    docs = [json.loads(line) for line in (folder / "docs.jsonl").read_text().splitlines()]
    url_of = {doc["id"]: doc["url"] for doc in docs}
    links = [[url_of.get(i, f"http://nowhere.example/{i}") for i in doc["outlinks"]] for doc in docs]
    pq.write_table(pa.table({"url": list(url_of.values()), "text": [d["text"] for d in docs], "outlinks": links}), out / "web.parquet")
    (out / "seeds.txt").write_text("".join(f"{url_of[i]}\n" for i in (folder / "seeds.txt").read_text().split()))
    planted = json.loads((folder / "planted_quality.json").read_text())
    pq.write_table(pa.table({"url": [url_of[i] for i in planted], "score": list(planted.values())}), out / "planted.parquet")
    paths = {name: str(out / file) for name, file in (("web", "web.parquet"), ("seeds", "seeds.txt"), ("planted", "planted.parquet"))}
    return {**paths, "text": str(shared / "cases/_toy_scorer/train.txt")}


def mini_crawl(mini: dict[str, str], policy: str, scorer: str = "text", rng_seed: int = 0) -> Stage:
    web = Stage(CorpusConfig(source=External(name="corpus", path=mini["web"]), heldout_fraction=0))
    kind = "train_fasttext" if scorer == "text" else "table"
    rater = Stage(ScorerConfig(kind=kind, source=External(name="source", path=mini[scorer])))
    seeds = External(name="seeds", path=mini["seeds"])
    config = CrawlConfig(policy=policy, budget_pages=60, batch_pages=6, seeds=seeds, rng_seed=rng_seed)
    return Stage(config, corpus=web, **({"scorer": rater} if policy in NEEDS_SCORER else {}))


def planted_mean(mini: dict[str, str], crawl: Artifact) -> float:
    table = pq.read_table(mini["planted"]).to_pydict()
    planted = dict(zip(table["url"], table["score"], strict=True))
    corpus, trace = Corpus(crawl.input("corpus")), Trace(crawl)
    assert trace.n_crawled == 60 and crawl.count("seeds") == 12
    return float(np.mean([planted[corpus.url(int(page))] for page in trace.crawled]))


@pytest.mark.parametrize(
    ("policy", "scorer", "low", "high"),
    [
        ("quality", "text", 0.70, 0.82),
        ("quality", "planted", 0.75, 0.82),
        ("indegree", "text", 0.30, 0.43),
        ("breadth_first", "text", 0.20, 0.50),
    ],
)
def test_mini_web(mini, build, policy, scorer, low, high):
    """Mean planted quality of the first 60 pages, seeds counted."""
    assert low <= planted_mean(mini, build(mini_crawl(mini, policy, scorer))) <= high


def test_mini_web_random(mini, build):
    means = [planted_mean(mini, build(mini_crawl(mini, "random", rng_seed=seed))) for seed in range(10)]
    assert all(0.2 <= mean <= 0.5 for mean in means)


SUBPROCESS = """
import json, sys
from pathlib import Path
from craw4llm.execution import Execution
from craw4llm import processes
from craw4llm.scoring import memo
root, workers, paths = sys.argv[1], int(sys.argv[2]), json.loads(sys.argv[3])
sys.path.append("tests/craw4llm/crawl")
if __name__ == "__main__":
    import test_crawl_stage as here
    started = []
    new_pool = processes.new_pool
    def counted(*args, **options):
        started.append(args)
        return new_pool(*args, **options)
    processes.new_pool, memo._POOL_AFTER_PAGES, memo._TASK_PAGES = counted, 1, 8
    build = here.builder(Execution(root=Path(root), workers=workers, report=lambda line: None))
    for policy in ("quality", "parent_mean", "random", "breadth_first", "indegree"):
        print(policy, build(here.mini_crawl(paths, policy)).digest)
    assert bool(started) == (workers > 1), started
"""


def test_equal_digests_for_any_hash_seed_and_number_of_workers(mini, tmp_path):
    script = tmp_path / "digests.py"  # a file: the workers are started by spawn, which imports the main module
    script.write_text(SUBPROCESS)

    def digests(hash_seed: str, workers: int) -> str:
        root = tmp_path / f"root-{hash_seed}-{workers}"
        done = subprocess.run(
            [sys.executable, str(script), str(root), str(workers), json.dumps(mini)],
            env={**os.environ, "PYTHONHASHSEED": hash_seed, "PYTHONPATH": str(ROOT)},
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=300,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    first = digests("0", 1)
    assert len(set(line.split()[1] for line in first.splitlines())) == 5
    assert digests("1", 1) == first
    assert digests("0", 2) == first


@pytest.mark.parametrize("policy", ["quality", "parent_mean"])
def test_the_memo_changes_no_byte(mini, execution, policy, tmp_path, monkeypatch):
    """Cold, warm (all pages scored before), damaged, and lazy: a cold crawl scores only what it fetches."""
    scored: list[int] = []
    real = memo.score_pages
    monkeypatch.setattr(memo, "score_pages", lambda corpus, scorer, pages: scored.extend(pages.tolist()) or real(corpus, scorer, pages))
    stage = mini_crawl(mini, policy)
    cold = builder(execution)(stage)
    assert sorted(scored) == sorted(Trace(cold).fetched.tolist())
    scored.clear()
    other = dataclasses.replace(execution, root=tmp_path / "warm")
    build = builder(other)
    build(Stage(ScoreConfig(), corpus=stage.inputs["corpus"], scorer=stage.inputs["scorer"]))
    assert len(scored) == 240
    warm = build(stage)
    assert len(scored) == 240
    assert (warm.fingerprint, warm.digest) == (cold.fingerprint, cold.digest)
    for segment in other.memo.glob("*/*.scores"):
        segment.write_bytes(segment.read_bytes()[:-3])
    shutil.rmtree(warm.path)
    assert build(stage).digest == cold.digest
    assert len(scored) > 240


def test_bl_09_mass_ties(shared, build, tmp_path):
    """40 pages with one and the same text: every score ties, so URLs decide, and the manifest says so."""
    docs = [json.loads(line) for line in (shared / "cases/BL-09/docs.jsonl").read_text().splitlines()]
    url_of = {doc["id"]: doc["url"] for doc in docs}
    assert len({doc["text"] for doc in docs}) == 1
    table = pa.table(
        {"url": list(url_of.values()), "text": [d["text"] for d in docs], "outlinks": [[url_of[i] for i in d["outlinks"]] for d in docs]}
    )
    pq.write_table(table, tmp_path / "web.parquet")
    (tmp_path / "seeds.txt").write_text("\n".join(url_of[i] for i in (shared / "cases/BL-09/seeds.txt").read_text().split()))
    web = Stage(CorpusConfig(source=External(name="corpus", path=str(tmp_path / "web.parquet")), heldout_fraction=0))
    text = External(name="text", path=str(shared / "cases/_toy_scorer/train.txt"))
    rater = Stage(ScorerConfig(kind="train_fasttext", source=text))
    seeds = External(name="seeds", path=str(tmp_path / "seeds.txt"))
    crawl = build(Stage(CrawlConfig(policy="quality", budget_pages=30, batch_pages=4, seeds=seeds), corpus=web, scorer=rater))
    trace = Trace(crawl)
    corpus = Corpus(crawl.input("corpus"))
    batch, waiting, known, expected = trace.crawled[:3].tolist(), set(), set(trace.crawled[:3].tolist()), trace.crawled[:3].tolist()
    while len(expected) < 30:
        new = set(corpus.outlinks(batch)[1].tolist()) - known
        known |= new
        waiting |= new
        batch = sorted(waiting)[: min(4, 30 - len(expected))]
        waiting -= set(batch)
        expected += batch
    assert trace.crawled.tolist() == expected
    assert any("27 of 27 pages were popped with one and the same priority" in w for w in crawl.manifest["notes"]["warnings"])


def test_inputs_of_another_corpus_are_refused(build, make_web, make_table):
    one = make_web([("https://a.example/", "text", []), ("https://b.example/", "text", [])], "one")
    two = make_web([("https://a.example/", "other", []), ("https://c.example/", "text", [])], "two")
    crawl = Stage(CrawlConfig(policy="random", budget_pages=1, seed_count=1), corpus=one)
    matched = CrawlConfig(policy="random", match_fetches=True, seed_count=1)
    with pytest.raises(ArtifactError, match=r"was made from the corpus .* but is used with the corpus"):
        build(Stage(matched, corpus=two, match=crawl))
    with pytest.raises(ArtifactError, match="give both the same corpus"):
        build(Stage(SelectConfig(pool="crawled"), corpus=two, crawl=crawl))
    table = make_table({"https://a.example/": 0.5})
    scores = Stage(ScoreConfig(), corpus=one, scorer=table)
    with pytest.raises(ArtifactError, match=r"the score .* was made from the corpus"):
        build(Stage(SelectConfig(pool="corpus", keep="top", keep_pages=1), corpus=two, scores=scores))
