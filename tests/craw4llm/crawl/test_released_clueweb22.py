"""Mode `released` on ClueWeb22 folders as they lie gives the page lists of the released code.

The lists are those of test_released.py (released_lists.json), taken from the released code on the same folders. Here they come from the
folders themselves: links, anchor counts, document ids, seed files of ids.
"""

import json
from pathlib import Path

import numpy as np
import pytest

from craw4llm.configs import ClueWeb22, CorpusConfig, CrawlConfig, Length, ScorerConfig, SelectConfig
from craw4llm.corpus.reader import Corpus
from craw4llm.crawl.trace import Trace
from craw4llm.fingerprint import External
from craw4llm.stage import Stage
from tests.craw4llm.corpus.clueweb22_writer import Doc, write_clueweb22

EXPECTED = json.loads((Path(__file__).parent / "released_lists.json").read_text())
FOLDERS = {"mini": "_mini_web", "cut": "_mini_web", "mass": "BL-09"}
SIZES = {"mini": (6, 60), "cut": (6, 60), "mass": (3, 30)}  # documents per iteration, target


@pytest.fixture
def folder(shared, tmp_path):
    """folder(name) -> (ClueWeb22 folder, seed file)."""

    def make(name: str) -> tuple[Path, Path]:
        case = shared / "cases" / FOLDERS[name]
        if name != "cut" and (case / "clueweb22").is_dir():
            return case / "clueweb22", case / "seeds.txt"
        docs = [json.loads(line) for line in (case / "docs.jsonl").read_text().splitlines()]
        gone = lambda docid: name == "cut" and int(docid[-5:]) % 6 == 5  # noqa: E731
        kept = [Doc(d["id"], d["url"], d["text"], d["outlinks"]) for d in docs if not gone(d["id"])]
        return write_clueweb22(tmp_path / name, kept), case / "seeds.txt"

    return make


def crawl_stage(folder, shared, name: str, rater: str, **source: object) -> Stage:
    path, seeds = folder(name)
    given = {"streams": ("en0",), "indegree": "inlink", **source}
    in_place = given.get("links") == "in_place"
    if in_place:
        given["indegree"] = "links"
    web = Stage(
        CorpusConfig(
            source=ClueWeb22(folder=External(name="corpus", path=str(path)), **given),
            heldout_fraction=0,
            dangling_links="outside" if in_place else "dead",
        )
    )
    n, target = SIZES[name]
    config = CrawlConfig(
        policy="indegree" if rater == "inlink" else "quality",
        mode="released",
        budget_pages=target,
        batch_pages=n,
        seeds=External(name="seeds", path=str(seeds)),
        rng_seed=42,
    )
    if rater == "inlink":
        return Stage(config, corpus=web)
    model = External(name="model", path=str(shared / "scorer/docweb_hq.ftz"))
    scorer = (
        ScorerConfig(kind="length", source=Length())
        if rater == "length"
        else ScorerConfig(kind="fasttext", source=model, reading="released")
    )
    return Stage(config, corpus=web, scorer=Stage(scorer))


def lists(artifact) -> list[list[str]]:
    """Document ids by iteration and crawl rank, ghosts among them."""
    trace = Trace(artifact)
    rows = [(r["crawl_rank"], r["page"]) for r in trace.pages.to_pylist()]
    rows += [(r["crawl_rank"], r["target"]) for r in trace.dead_links.to_pylist()]
    targets = [target for _, target in sorted(row for row in rows if row[0] is not None)]
    sizes = np.cumsum(trace.iterations.column("crawled").to_pylist()[:-1])
    ids = Corpus(artifact.input("corpus")).document_ids(targets)
    return [part.tolist() for part in np.split(np.array(ids), sizes) if len(part)]


@pytest.mark.parametrize("key", sorted(EXPECTED))
def test_lists_of_the_released_code(folder, shared, build, key):
    name, rater = key.split("-")
    crawl = build(crawl_stage(folder, shared, name, rater))
    assert [[int(doc_id[-5:]) for doc_id in part] for part in lists(crawl)] == EXPECTED[key]


@pytest.mark.parametrize("key", ["mini-fasttext", "cut-fasttext", "mass-length"])
def test_links_read_in_place_give_the_same_lists(folder, shared, build, key):
    name, rater = key.split("-")
    if key not in EXPECTED:
        pytest.skip(f"no list {key}")
    crawl = build(crawl_stage(folder, shared, name, rater, links="in_place"))
    assert [[int(doc_id[-5:]) for doc_id in part] for part in lists(crawl)] == EXPECTED[key]


def test_lists_of_ids_are_read_back(folder, shared, build, tmp_path):
    """The released code's output folder as a selection's pool: the pages of our own crawl, in its order."""
    stage = crawl_stage(folder, shared, "mini", "inlink")
    crawl = build(stage)
    out = tmp_path / "lists"
    out.mkdir()
    for k, part in enumerate(lists(crawl)):
        (out / f"iter_{k}.docids.txt").write_text("".join(f"{doc_id}\n" for doc_id in part))
    listed = Stage(SelectConfig(pool="listed", ids=External(name="lists", path=str(out))), corpus=stage.inputs["corpus"])
    kept = build(listed)
    own = build(Stage(SelectConfig(pool="crawled"), corpus=stage.inputs["corpus"], crawl=stage))
    pages = [a.file("kept.parquet").read_bytes() for a in (kept, own)]
    assert pages[0] == pages[1] and kept.count("kept_pages") > 50
