"""Mode `released` gives the page lists of the released code.

The lists were taken from cxcscmu/Craw4LLM at f63f927, `crawl.py crawl` with the seed 42, on the ClueWeb22 folders of shared/cases/_mini_web
and BL-09, and on _mini_web with the records of every document whose number leaves 5 when divided by 6 taken out ("cut"). Numbers are the
last five digits of document ids; a list is one iter_K.docids.txt. The corpus here has the same pages under URLs in the order of the ids.
"""

import gzip
import json
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from craw4llm.configs import CorpusConfig, CrawlConfig, Length, ScorerConfig
from craw4llm.corpus.reader import Corpus
from craw4llm.crawl.trace import Trace
from craw4llm.errors import ConfigError, InputError
from craw4llm.fingerprint import External
from craw4llm.stage import Stage

EXPECTED = json.loads((Path(__file__).parent / "released_lists.json").read_text())
FOLDERS = {"mini": "_mini_web", "cut": "_mini_web", "mass": "BL-09"}
SIZES = {"mini": (6, 60), "cut": (6, 60), "mass": (3, 30)}  # documents per iteration, target


def url(docid: str) -> str:
    return f"https://clueweb22.example/{docid}"


@pytest.fixture
def case(shared, tmp_path):
    """case(name) -> (corpus stage, seed file, table of anchor counts from the inlink files)."""

    def make(name: str) -> tuple[Stage, External, Stage]:
        folder = shared / "cases" / FOLDERS[name]
        gone = lambda docid: name == "cut" and int(docid[-5:]) % 6 == 5  # noqa: E731
        docs = [json.loads(line) for line in (folder / "docs.jsonl").read_text().splitlines()]
        docs = [doc for doc in docs if not gone(doc["id"])]
        links = [[url(i) for i in doc["outlinks"]] for doc in docs]
        table = pa.table({"url": [url(d["id"]) for d in docs], "text": [d["text"] for d in docs], "outlinks": links})
        pq.write_table(table, tmp_path / "web.parquet")
        (tmp_path / "seeds.txt").write_text("\n".join(map(url, (folder / "seeds.txt").read_text().split())) + "\n")
        inlinks = (folder / "clueweb22/inlink/en/en00/en0000/en0000-00.json.gz").read_bytes()
        records = gzip.decompress(inlinks).decode().splitlines()
        counts = {r["ClueWeb22-ID"]: sum(not gone(a[0]) for a in r["anchors"]) for r in map(json.loads, records)}
        counts = {url(i): n for i, n in counts.items() if not gone(i)}
        pq.write_table(pa.table({"url": list(counts), "score": pa.array(counts.values(), pa.float32())}), tmp_path / "inlinks.parquet")
        web = Stage(CorpusConfig(source=External(name="corpus", path=str(tmp_path / "web.parquet")), heldout_fraction=0))
        inlinks = Stage(ScorerConfig(kind="table", source=External(name="inlinks", path=str(tmp_path / "inlinks.parquet"))))
        return web, External(name="seeds", path=str(tmp_path / "seeds.txt")), inlinks

    return make


def stage_of(case, shared, name: str, rater: str, **fields: object) -> Stage:
    web, seeds, inlinks = case(name)
    n, target = SIZES[name]
    config = {"policy": "indegree" if rater == "inlink" else "quality", "mode": "released", "budget_pages": target, "batch_pages": n}
    config |= {"seeds": seeds, "rng_seed": 42, **fields}
    inputs = {"corpus": web}
    if rater == "inlink":
        inputs["rank"] = inlinks
    elif rater == "length":
        inputs["scorer"] = Stage(ScorerConfig(kind="length", source=Length()))
    else:
        model = External(name="model", path=str(shared / "scorer/docweb_hq.ftz"))
        inputs["scorer"] = Stage(ScorerConfig(kind="fasttext", source=model, reading="released"))
    return Stage(CrawlConfig(**config), **inputs)


def lists(artifact) -> list[list[int]]:
    """Documents by iteration and crawl rank, ghosts among them."""
    trace = Trace(artifact)
    corpus = Corpus(artifact.input("corpus"))
    rows = [(r["crawl_rank"], r["page"]) for r in trace.pages.to_pylist()]
    rows += [(r["crawl_rank"], r["target"]) for r in trace.dead_links.to_pylist()]
    order = [int(corpus.url(target)[-5:]) for rank, target in sorted(row for row in rows if row[0] is not None)]
    sizes = np.cumsum(trace.iterations.column("crawled").to_pylist()[:-1])
    return [part.tolist() for part in np.split(order, sizes) if len(part)]


@pytest.mark.parametrize("key", sorted(EXPECTED))
def test_lists_of_the_released_code(case, shared, build, key):
    name, rater = key.split("-")
    crawl = build(stage_of(case, shared, name, rater))
    assert lists(crawl) == EXPECTED[key]
    assert crawl.count("crawled_pages") == sum(map(len, EXPECTED[key]))


def test_a_run_that_dies_in_the_released_code(case, shared, build):
    """_mini_web, fastText: it finds nothing new after 42 of 60 pages and ends with ZeroDivisionError, its queue not empty."""
    crawl = build(stage_of(case, shared, "mini", "fasttext"))
    assert crawl.count("crawled_pages") == 42
    assert crawl.manifest["notes"]["stop"] == "exhausted"
    assert any("the released code ends with an error" in w for w in crawl.manifest["notes"]["warnings"])
    assert Trace(crawl).iterations.column("frontier").to_pylist()[-1] > 0


def test_whole_batches_ghosts_and_retries(case, shared, build):
    """`cut`: a target that is missing is asked for again and again by look-ahead, and crawled by in-degree; 65 pages for a target of 60."""
    look_ahead = build(stage_of(case, shared, "cut", "fasttext"))
    assert look_ahead.count("crawled_pages") == 65 and look_ahead.count("seeds") == 5
    dead = Trace(look_ahead).dead_links
    assert len(dead) > len(set(dead.column("target").to_pylist())) > 10
    assert dead.column("crawl_rank").null_count == len(dead)
    by_links = build(stage_of(case, shared, "cut", "inlink"))
    ghosts = [r for r in Trace(by_links).dead_links.to_pylist() if r["crawl_rank"] is not None]
    assert [int(r["url"][-5:]) for r in ghosts] == [155]  # sampled as a seed; the others have no links in and come last
    assert by_links.count("crawled_pages") == 60 and by_links.count("fetched_pages") == 59


def test_configs_that_mode_released_refuses(case, shared, build, tmp_path):
    for fields, match in (
        ({"policy": "breadth_first"}, "quality, indegree or random in mode released"),
        ({"seeds": None}, "a file of seeds"),
        ({"budget_fetches": 9}, "a budget in pages crawled alone"),
    ):
        with pytest.raises(ConfigError, match=match):
            stage_of(case, shared, "mini", "inlink", **fields)
    with pytest.raises(InputError, match="has 12 lines; mode released samples batch_pages = 13"):
        build(stage_of(case, shared, "mini", "inlink", batch_pages=13))
    stage = stage_of(case, shared, "mini", "inlink")
    heldout = Stage(CorpusConfig(source=stage.inputs["corpus"].config.source, heldout_fraction=0.2, heldout_min_chars=1))
    with pytest.raises(ConfigError, match="give the corpus heldout_fraction=0"):
        build(Stage(stage.config, corpus=heldout, rank=stage.inputs["rank"]))
    model = External(name="model", path=str(shared / "scorer/docweb_hq.ftz"))
    clean = Stage(ScorerConfig(kind="fasttext", source=model))
    released = stage_of(case, shared, "mini", "fasttext")
    with pytest.raises(ConfigError, match="give its scorer reading='released'"):
        build(Stage(released.config, corpus=released.inputs["corpus"], scorer=clean))
    seeds = tmp_path / "repeated.txt"
    seeds.write_text((url("clueweb22-en0000-00-00060") + "\n") * 8)
    with pytest.raises(InputError, match="names a page more than once"):
        build(stage_of(case, shared, "mini", "inlink", seeds=External(name="seeds", path=str(seeds))))
