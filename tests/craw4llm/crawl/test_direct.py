"""`craw4llm crawl`: one crawl without an experiment file, and the lists that it leaves."""

import importlib.metadata
import os
import subprocess
import sys
from pathlib import Path

import pytest

from craw4llm.crawl.direct import Wanted, crawl, write_lists
from craw4llm.errors import ConfigError, InputError
from craw4llm.execution import Execution
from craw4llm.stage import ENTRY_POINTS, OWN_STAGES
from tests.craw4llm.conftest import write_web
from tests.craw4llm.corpus.clueweb22_writer import Doc, write_clueweb22

HERE = Path(__file__).resolve().parents[3]


def ids(count: int) -> list[str]:
    return [f"clueweb22-en0000-00-{k:05d}" for k in range(count)]


@pytest.fixture
def folder(tmp_path):
    """60 pages; page k links to k + 1 and 2 k, and is linked from fewer pages the later it comes. A seed file of every second id."""
    names = ids(60)
    docs = [Doc(names[k], f"http://a.example/{k}", f"text {k} " * (k % 7 + 1), [names[(k + 1) % 60], names[2 * k % 60]]) for k in range(60)]
    (tmp_path / "seeds.txt").write_text("".join(f"{name}\n" for name in names[::2]))
    return write_clueweb22(tmp_path / "w", docs)


def wanted(tmp_path: Path, **fields: object) -> Wanted:
    given = {
        "corpus": str(tmp_path / "w"),
        "policy": "indegree",
        "pages": 25,
        "batch_pages": 10,
        "mode": "paper",
        "seeds": str(tmp_path / "seeds.txt"),
        "seed_count": 10,
        "rng_seed": 42,
        "scorer": "",
        "label": "__label__hq",
        "route": "projected",
        "streams": (),
        "links": "compiled",
        "indegree": "links",
        "dangling_links": "dead",
        "heldout_fraction": 0.0,
        "lists": tmp_path / "lists",
        **fields,
    }
    return Wanted(**given)  # type: ignore[arg-type]


def read_lists(folder: Path) -> list[list[str]]:
    return [(folder / f"iter_{k}.docids.txt").read_text().split() for k in range(len(list(folder.iterdir())))]


def test_lists_of_ids(folder, tmp_path, execution, monkeypatch):
    artifact = crawl(wanted(tmp_path, mode="released"), execution)
    lists = read_lists(tmp_path / "lists")
    assert [len(part) for part in lists] == [10, 10, 10] and artifact.count("crawled_pages") == 30  # whole batches
    assert set(lists[0]) <= set(ids(60)[::2]) and len({name for part in lists for name in part}) == 30
    for at_once in (1, 11):
        monkeypatch.setattr("craw4llm.crawl.direct._NAMED_AT_ONCE", at_once)
        write_lists(artifact, tmp_path / f"again{at_once}")
        assert read_lists(tmp_path / f"again{at_once}") == lists
    paper = crawl(wanted(tmp_path, lists=tmp_path / "paper", seeds="", policy="breadth_first"), execution)
    assert sum(map(len, read_lists(tmp_path / "paper"))) == 25 == paper.count("crawled_pages")


def test_a_corpus_of_urls(tmp_path, execution):
    write_web(tmp_path / "web.parquet", [(f"http://a.example/{k}", "text", [f"http://a.example/{k + 1}"]) for k in range(9)])
    fields = {"corpus": str(tmp_path / "web.parquet"), "seeds": "", "seed_count": 1, "pages": 3, "policy": "breadth_first"}
    crawl(wanted(tmp_path, **fields), execution)
    lists = read_lists(tmp_path / "lists")
    assert all(name.startswith("http://a.example/") for part in lists for name in part) and sum(map(len, lists)) <= 3


def test_what_is_refused(folder, tmp_path, execution):
    with pytest.raises(ConfigError, match="give --scorer"):
        crawl(wanted(tmp_path, policy="quality"), execution)
    (tmp_path / "lists").mkdir()
    (tmp_path / "lists" / "iter_0.docids.txt").write_text("")
    with pytest.raises(ConfigError, match="is not empty"):
        crawl(wanted(tmp_path), execution)
    with pytest.raises(ConfigError, match="is no ClueWeb22 folder"):
        crawl(wanted(tmp_path, corpus=str(tmp_path), streams=("en",), lists=None), execution)
    with pytest.raises(InputError, match="does not exist"):
        crawl(wanted(tmp_path, corpus=str(tmp_path / "gone"), lists=None), execution)


def test_the_command_and_what_it_imports(folder, tmp_path):
    """A further crawl over finished stages imports neither numba nor fastText nor pyarrow.compute: they would be most of its time."""
    script = """
import sys
from craw4llm.__main__ import cli
cli(sys.argv[1:], standalone_mode=False)
heavy = ("numba", "fasttext", "pyarrow.compute", "pyarrow.dataset", "pyarrow.fs", "ssl", "shutil", "isal", "importlib.metadata", "tqdm")
print(*(name for name in heavy if name in sys.modules))
"""
    arguments = ["crawl", "--corpus", str(folder), "--policy", "indegree", "--batch", "10", "--seeds", str(tmp_path / "seeds.txt")]
    arguments += ["--root", str(tmp_path / "a"), "--workers", "1"]
    env = {**os.environ, "PYTHONPATH": str(HERE)}
    seen = []
    for pages in ("20", "30"):
        command = [sys.executable, "-c", script, *arguments, "--pages", pages, "--lists", str(tmp_path / f"lists{pages}")]
        done = subprocess.run(command, env=env, capture_output=True, text=True, check=True)
        seen.append(done.stdout.splitlines())
    assert seen[0][0].startswith("20 pages crawled, ") and seen[1][0].startswith("30 pages crawled, ")
    assert seen[1][1].split() == []


def test_own_stages_are_the_entry_points() -> None:
    declared = {
        entry.name: entry.value for entry in importlib.metadata.entry_points(group=ENTRY_POINTS) if entry.value.startswith("craw4llm.")
    }
    assert declared == OWN_STAGES


def test_finished_stages_are_used_again(folder, tmp_path, execution):
    first = crawl(wanted(tmp_path, lists=None), execution)
    corpus = first.input("corpus").path / "manifest.json"
    before = corpus.stat().st_mtime_ns
    again = crawl(wanted(tmp_path, lists=None, pages=40), Execution(root=execution.root, workers=1, report=lambda line: None))
    assert again.input("corpus").fingerprint == first.input("corpus").fingerprint and corpus.stat().st_mtime_ns == before
