"""Copies and evaluation items: what is dropped, what is only counted, and that a farm of copies cannot fill a selection."""

import json
import os
import random
import subprocess
import sys

import numpy as np
import pytest

from craw4llm.artifact import Store
from craw4llm.configs import OverlapConfig
from craw4llm.corpus.reader import Corpus
from craw4llm.errors import ConfigError, InputError
from craw4llm.execution import Execution
from craw4llm.fingerprint import External
from craw4llm.selection import overlap_stage
from craw4llm.selection.items import read_items
from craw4llm.selection.near_copies import NearCopies, Similarity, signature
from craw4llm.selection.words import grams, text_hash
from tests.craw4llm.selection.conftest import dropped_names, kept_names

VOCABULARY = [f"w{i}" for i in range(4000)]


def prose(seed: int, n: int = 600) -> str:
    return " ".join(random.Random(seed).choices(VOCABULARY, k=n))


def near(text: str, changes: int, seed: int = 0) -> str:
    """`text` with so many of its words replaced."""
    words, rng = text.split(), random.Random(seed)
    for at in rng.sample(range(len(words)), changes):
        words[at] = "changed"
    return " ".join(words)


def jaccard(a: str, b: str, n: int = 5) -> float:
    x, y = set(grams(a, n).tolist()), set(grams(b, n).tolist())
    return len(x & y) / len(x | y)


def test_words_and_hashes():
    assert grams("The cat, sat on the MAT.", 5).tolist() == grams("the cat sat on the mat", 5).tolist()
    assert len(grams("the cat sat on the mat", 5)) == 2 and not len(grams("a b", 3))
    assert grams("a b", 2).tolist() != grams("b a", 2).tolist()
    assert text_hash(" A b\n") == text_hash("a  B") != text_hash("a c")


@pytest.mark.parametrize("changes", [0, 1, 2, 10, 40])
def test_the_estimate_is_near_the_jaccard_similarity(changes):
    one, other = prose(1, 1000), near(prose(1, 1000), changes)
    similarity = Similarity()
    estimate = np.mean(signature(one, similarity) == signature(other, similarity))
    assert abs(estimate - jaccard(one, other)) < 4 * 0.5 / 128**0.5
    copies = NearCopies(similarity)
    copies.add(7, signature(one, similarity))
    if jaccard(one, other) > 0.93 or jaccard(one, other) < 0.7:
        assert (copies.of(signature(other, similarity)) == 7) == (jaccard(one, other) > 0.8)


def test_texts_without_words_are_no_copies():
    similarity = Similarity()
    copies = NearCopies(similarity)
    copies.add(0, signature("!!! ...", similarity))
    assert signature("!!! ...", similarity) is None and copies.of(signature("???", similarity)) is None


@pytest.fixture
def farm(make_pages):
    """Twenty near-copies and ten exact ones with the best scores, five pages of their own."""
    base = prose(0)
    pages = {f"farm{i:02}": (near(base, 2, seed=i), 0.9 - i / 1000) for i in range(20)}
    pages |= {f"mirror{i}": ("  " + prose(50).upper() if i else prose(50), 0.8 - i / 1000) for i in range(10)}
    pages |= {f"own{i}": (prose(100 + i), 0.5 - i / 100) for i in range(5)}
    return make_pages(pages)


def test_a_farm_of_copies_does_not_fill_a_selection(farm):
    artifact = farm.select(keep_pages=7, exact_duplicates="drop", near_duplicates="drop")
    assert kept_names(artifact) == ["farm00", "mirror0", *(f"own{i}" for i in range(5))]
    dropped = dropped_names(artifact)
    assert dropped == {f"farm{i:02}": ("near_duplicate", "farm00") for i in range(1, 20)} | {
        f"mirror{i}": ("duplicate", "mirror0") for i in range(1, 10)
    }
    assert (artifact.count("dropped_near_duplicate"), artifact.count("dropped_duplicate")) == (19, 9)


def test_copies_are_reported_and_kept_by_default(farm):
    artifact = farm.select(keep_pages=32)
    assert len(kept_names(artifact)) == 32
    assert (artifact.count("near_duplicates"), artifact.count("exact_duplicates")) == (19, 9)
    assert artifact.count("dropped_duplicate") == artifact.count("dropped_near_duplicate") == 0
    off = farm.select(keep_pages=32, exact_duplicates="off", near_duplicates="off", heldout_copies="off")
    assert kept_names(off) == kept_names(artifact)
    assert off.count("near_duplicates") is off.count("exact_duplicates") is off.count("heldout_copies") is None
    exact = farm.select(keep_pages=26, exact_duplicates="drop", near_duplicates="off")
    assert kept_names(exact) == [*(f"farm{i:02}" for i in range(20)), "mirror0", *(f"own{i}" for i in range(5))]


def test_too_few_pages_when_copies_are_dropped(farm):
    with pytest.raises(ConfigError, match=r"keep_pages is 8 but only 7 of 35 pages are left when 9 \(duplicate\), 19 \(near_duplicate\)"):
        farm.select(keep_pages=8, exact_duplicates="drop", near_duplicates="drop")


def test_copies_of_heldout_pages_are_never_selected(make_pages):
    """Pages i and i + 100 are near-copies; whichever of the two is held out, the other is dropped."""
    pages = {f"{i:03}": (prose(i) if i < 100 else near(prose(i - 100), 2, seed=i), 0.5) for i in range(200)}
    web = make_pages(pages, heldout_fraction=0.1, heldout_min_chars=1)
    heldout = {f"{page:03}" for page in Corpus(web.build(web.web)).heldout.tolist()}
    copies = {f"{(int(name) + 100) % 200:03}" for name in heldout} - heldout
    assert len(copies) > 8
    usable = 200 - len(heldout)
    artifact = web.select(keep="threshold", min_score=0.0)
    assert set(kept_names(artifact)) == set(pages) - heldout - copies
    assert artifact.count("dropped_heldout_copy") == artifact.count("heldout_copies") == len(copies)
    assert {name for name, (reason, of) in dropped_names(artifact).items() if reason == "heldout_copy" and of in heldout} == copies
    reported = web.select(keep_pages=usable, heldout_copies="report")
    assert reported.count("heldout_copies") == len(copies) and reported.count("dropped_heldout_copy") == 0


QUESTION = "Which of the seven bridges over the old river did the mathematician cross twice on his way home that evening"


def test_pages_with_evaluation_items_are_dropped(make_pages, write_tasks):
    folder = write_tasks(
        bridges=[{"query": QUESTION, "choices": ["all", "none"]}, {"query": "too short"}], other=[{"deep": [{"er": prose(7)}]}]
    )
    items = read_items(folder, 13)
    assert items.names == ["bridges", "other"] and items.items == [("bridges", 0), ("bridges", 1), ("other", 0)]
    assert items.short.tolist() == [False, True, False]
    twelve, thirteen = " ".join(QUESTION.split()[:12]), " ".join(QUESTION.split()[:13])
    pages = {
        "a": (f"{prose(1)} {thirteen.upper()}! {prose(2)}", 0.9),
        "b": (f"{prose(3)} {twelve} {prose(4)}", 0.8),
        "c": (" ".join(prose(7).split()[100:150]), 0.7),
        "d": (prose(5), 0.6),
    }
    web = make_pages(pages)
    tasks = External(name="tasks", path=str(folder))
    artifact = web.select(keep_pages=2, decontaminate=tasks)
    assert kept_names(artifact) == ["b", "d"]
    assert artifact.count("dropped_contaminated") == 2
    assert kept_names(web.select(keep_pages=3, decontaminate=tasks, ngram_words=60)) == ["a", "b", "c"]


def run_overlap(config: OverlapConfig, selection, execution: Execution, name: str = "overlap"):
    inputs = {"corpus": selection.input("corpus"), "selection": selection}
    return Store(execution.root).build(
        "overlap", name, version=1, config={}, inputs=inputs, write=lambda out: overlap_stage.run(config, inputs, out, execution)
    )[0]


def test_overlap_is_reported_per_task(make_pages, write_tasks, execution):
    folder = write_tasks(
        bridges=[{"query": QUESTION}, {"query": "short"}, {"query": prose(9)}], clean=[{"query": prose(8)}], tiny=[{"query": "a b c"}]
    )
    copy = near(prose(5), 2)
    pages = {"a": (f"{QUESTION} {prose(1)}", 0.9), "b": (f"{prose(2)} {QUESTION}", 0.8), "c": (prose(5), 0.7), "d": (copy, 0.6)}
    pages |= {"e": (prose(5), 0.5), "f": (prose(6), 0.4)}
    selection = make_pages(pages).select(keep_pages=6)
    artifact = run_overlap(OverlapConfig(tasks=External(name="tasks", path=str(folder))), selection, execution)
    import pyarrow.parquet as pq

    rows = {row["task"]: row for row in pq.read_table(artifact.file("tasks.parquet")).to_pylist()}
    assert rows["bridges"] == {"task": "bridges", "items": 3, "short_items": 1, "overlapping_items": 1, "pages": 2}
    assert rows["clean"] == {"task": "clean", "items": 1, "short_items": 0, "overlapping_items": 0, "pages": 0}
    assert rows["tiny"]["short_items"] == rows["tiny"]["items"] == 1
    assert [(r["task"], r["item"], r["page"]) for r in pq.read_table(artifact.file("hits.parquet")).to_pylist()] == [
        ("bridges", 0, 0),
        ("bridges", 0, 1),
    ]
    assert pq.read_table(artifact.file("duplicates.parquet")).to_pylist() == [
        {"page": 3, "group": 2, "kind": "near"},
        {"page": 4, "group": 2, "kind": "exact"},
    ]
    assert (artifact.count("overlapping_pages"), artifact.count("near_duplicates"), artifact.count("exact_duplicates")) == (2, 1, 1)


def test_evaluation_files_that_are_none(tmp_path):
    with pytest.raises(InputError, match=r"holds no \*\.jsonl"):
        read_items(tmp_path, 13)
    (tmp_path / "t.jsonl").write_text("\n")
    with pytest.raises(InputError, match="hold no items"):
        read_items(tmp_path, 13)
    (tmp_path / "t.jsonl").write_text('{"a": 1}\nnot json\n')
    with pytest.raises(InputError, match=r"t\.jsonl is no UTF-8 JSON lines file"):
        read_items(tmp_path, 13)


def test_same_bytes_for_any_workers_and_hash_seed(farm, monkeypatch):
    """The pool is made to start at once, with small blocks."""
    selection = farm.select(keep_pages=7, exact_duplicates="drop", near_duplicates="drop")
    code = (
        "import sys, pathlib, hashlib; from craw4llm.artifact import Store; from craw4llm.execution import Execution;"
        "from craw4llm.configs import SelectConfig; from craw4llm.selection import stage, facts;"
        "facts.POOL_FROM_PAGES = 1; facts.BLOCK_PAGES = 4; root, out = map(pathlib.Path, sys.argv[1:3]); out.mkdir(); store = Store(root);"
        "i = {k: store.open(*a.split(':')) for k, a in zip(('corpus', 'scores'), sys.argv[4:])};"
        "c = SelectConfig(pool='corpus', keep='top', keep_pages=7, exact_duplicates='drop', near_duplicates='drop');"
        "r = stage.run(c, i, out, Execution(root=root, workers=int(sys.argv[3]), report=lambda line: None));"
        "print(sorted((p.name, hashlib.sha256(p.read_bytes()).hexdigest()) for p in out.iterdir()), r.counts)"
    )
    inputs = [f"{a.stage}:{a.fingerprint}" for a in (selection.input("corpus"), selection.input("scores"))]
    found = set()
    for seed, workers in (("0", "1"), ("1", "2")):
        command = [sys.executable, "-c", f"if __name__ == '__main__':\n {code.replace(chr(10), ' ')}", str(selection.root)]
        command += [str(selection.root / f"out{seed}"), workers, *inputs]
        done = subprocess.run(command, check=True, env=os.environ | {"PYTHONHASHSEED": seed}, capture_output=True, text=True)
        found.add(done.stdout.strip())
    assert len(found) == 1 and "kept.parquet" in found.pop()


def test_statistics(farm):
    artifact = farm.select(keep_pages=10, top_fraction=0.2)
    statistics = json.loads(artifact.file("statistics.json").read_text())
    assert statistics["pages"] == 10 and statistics["hosts"] == {"count": 1, "top": [{"host": "s.example", "pages": 10}]}
    assert sum(statistics["scores"]["pages"]) == 10 and len(statistics["scores"]["edges"]) == 21
    corpus = Corpus(artifact.input("corpus"))
    sizes = sorted(len(corpus.text(p)) for p in range(10))
    assert statistics["text_bytes"]["p0"] == sizes[0] and statistics["text_bytes"]["p100"] == sizes[-1]
    assert statistics["best"] == {"best_pages": 7, "shared_pages": 7, "precision": 0.7, "recall": 1.0, "recall_ceiling": 1.0}
    small = farm.select(keep_pages=3, top_fraction=0.2)
    assert small.count("precision") == 1.0 and small.count("recall") == small.count("recall_ceiling") == 3 / 7
