"""Columns as mapped files give what columns in memory give; names as Arrow strings have the numbers that a dictionary gives them."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from craw4llm.artifact import Artifact
from craw4llm.configs import CorpusConfig
from craw4llm.corpus import merge, names, page_columns
from craw4llm.corpus.names import Names, ascending, first_seen
from craw4llm.corpus.page_columns import Strings, places_among
from craw4llm.corpus.reader import Corpus
from craw4llm.crawl.caps import Caps
from craw4llm.fingerprint import External
from craw4llm.stage import Stage

WriteParquet = Callable[..., Path]
Build = Callable[[Stage], Artifact]


@pytest.fixture
def artifact(parquet: WriteParquet, build: Build, monkeypatch: pytest.MonkeyPatch) -> Artifact:
    """200 pages of 13 hosts in row groups of 16, with dead links before, between and after them."""
    monkeypatch.setattr(merge, "ROW_GROUP_PAGES", 16)
    rows = [
        (
            f"https://h{k % 13}.example.org/\u00fc{k}",
            f"text {k}" * (k % 5),
            [f"https://h{k % 17}.example.org/gone{k}", "https://a.a/", "https://z.z/"],
        )
        for k in range(200)
    ]
    path = parquet(rows, extra={"doc_id": [f"d{k % 150}" if k % 3 else None for k in range(200)], "language": ["en", None] * 100})
    return build(Stage(CorpusConfig(source=External(name="corpus", path=str(path)), heldout_min_chars=0)))


def test_mapped_columns_are_those_in_memory(artifact: Artifact, monkeypatch: pytest.MonkeyPatch) -> None:
    small = Corpus(artifact)
    expected = {name: getattr(small, name) for name in ("n_bytes", "n_chars", "signals", "host_ids", "domain_ids", "dead_places")}
    monkeypatch.setattr(page_columns, "MAPPED_FROM", 0)
    large = Corpus(artifact)
    for name, values in expected.items():
        assert getattr(large, name).tolist() == values.tolist(), name
        assert getattr(large, name).dtype == values.dtype, name
    assert isinstance(large.n_bytes, np.memmap) and isinstance(large.host_ids, np.memmap)
    assert isinstance(large.urls, Strings) and len(large.urls.batches) > 10
    for name in ("urls", "dead_urls", "doc_ids"):
        assert getattr(large, name).to_pylist() == getattr(small, name).to_pylist(), name
    assert list(large.hosts) == list(small.hosts) and list(large.domains) == list(small.domains) == ["example.org"]
    pages = np.array([199, 3, 3, 77, 16, 15, 0])
    assert large.names(pages) == small.names(pages)
    assert large.languages_of(pages).to_pylist() == small.languages_of(pages).to_pylist()
    assert large.host_pages(pages) == small.host_pages(pages)
    wanted = [*small.urls.to_pylist()[::7], "https://a.a/", "https://nowhere.example/", "no url", "https://z.z/"]
    assert large.find(wanted).tolist() == small.find(wanted).tolist()
    assert large.find_targets(wanted).tolist() == small.find_targets(wanted).tolist()
    assert large.find_doc_ids(["d1", "d149", "none"]).tolist() == small.find_doc_ids(["d1", "d149", "none"]).tolist()
    assert [large.source_row(page) for page in (0, 15, 16, 199)] == [small.source_row(page) for page in (0, 15, 16, 199)]
    assert [large.url(target) for target in range(large.n_targets)] == [small.url(target) for target in range(small.n_targets)]
    targets = np.arange(large.n_targets, dtype=np.uint32)
    caps = [Caps(one, per_host=3, per_domain=100) for one in (small, large)]
    admitted = [cap.admit(targets, targets < large.n_pages) for cap in caps]
    assert admitted[0].tolist() == admitted[1].tolist() and 0 < admitted[0].sum() < len(targets)


@pytest.mark.parametrize("cut", [1, 2, 5, 100])
def test_places_among_many(cut: int) -> None:
    few = pa.array(["a", "c", "c1", "m", "z", "zz"])
    many = pa.array(["b", "d", "e", "l", "n", "y"])
    merged = sorted([*few.to_pylist(), *many.to_pylist()])
    batches = Strings([many.slice(k, cut) for k in range(0, len(many), cut)])
    assert places_among(few, batches).tolist() == places_among(few, many).tolist() == [merged.index(name) for name in few.to_pylist()]


def test_names_without_python_objects(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(names, "STEP", 3)
    monkeypatch.setattr(names, "_MERGE_FROM", 2)
    arrays = [pa.array(["b", "a", "b", None]), pa.array(["c", "a"]), pa.array([""]), pa.array(["\u00e9", "z", "b"])]
    found = first_seen(arrays)
    assert found.to_pylist() == ["b", "a", "c", "", "\u00e9", "z"]
    table = Names(ascending(found))
    assert list(table) == ["", "a", "b", "c", "z", "\u00e9"] and len(table) == 6 and table[3] == "c"
    assert table.ids(pa.array(["z", "nothing", "", "b"])).tolist() == [4, -1, 0, 2]
    assert Names(pa.array([], pa.string())).ids(pa.array(["x"])).tolist() == [-1]


def test_two_names_that_share_a_hash(monkeypatch: pytest.MonkeyPatch) -> None:
    real = names._hashes
    monkeypatch.setattr(names, "_hashes", lambda given, seed: real(given, seed) % np.uint64(4 if seed == 0 else 2**20))
    table = Names(pa.array(["a", "b", "c", "d", "e"]))  # of five, two share one of four hashes: the next seed is taken
    assert table.ids(pa.array(["e", "a", "c"])).tolist() == [4, 0, 2]
    assert table._table[0] == 1
    monkeypatch.setattr(names, "_hashes", lambda given, seed: np.arange(len(given), dtype=np.uint64))
    assert Names(pa.array(["a", "b"])).ids(pa.array(["b", "a", "x"])).tolist() == [-1, -1, -1]  # a shared hash is not a name found
