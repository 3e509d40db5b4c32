"""Every source kind gives the same corpus of the same 200 pages, as far as it carries them (tests/craw4llm/corpus/round_trip.py)."""

import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from craw4llm.artifact import Artifact
from craw4llm.configs import CorpusConfig
from craw4llm.corpus.reader import Corpus
from craw4llm.fingerprint import External
from craw4llm.stage import Stage
from tests.craw4llm.corpus.clueweb22_writer import Doc, write_clueweb22

# By path: test folders are no packages, and this works from any working directory.
_SPEC = importlib.util.spec_from_file_location("corpus_round_trip", Path(__file__).with_name("round_trip.py"))
assert _SPEC is not None and _SPEC.loader is not None
round_trip: Any = importlib.util.module_from_spec(_SPEC)
sys.modules["corpus_round_trip"] = round_trip
_SPEC.loader.exec_module(round_trip)


@pytest.mark.parametrize("kind", list(round_trip.WRITERS))
def test_round_trip(kind: str, tmp_path: Path, build: Callable[[Stage], Artifact]) -> None:
    pages = round_trip.sample_pages()
    writer = round_trip.WRITERS[kind]
    folder = tmp_path / "source"
    folder.mkdir()
    path = writer.write(pages, folder)
    corpus = Corpus(build(Stage(CorpusConfig(source=External(name="corpus", path=str(path)), heldout_fraction=0.0))))
    wanted = sorted(pages, key=lambda page: page.url)
    carries = writer.carries
    assert (corpus.n_pages, corpus.artifact.count("rejects"), corpus.artifact.count("skipped")) == (200, 0, 0)
    assert corpus.urls.to_pylist() == [page.url for page in wanted]
    assert corpus.find([page.url for page in wanted]).tolist() == list(range(200))
    offsets, targets = corpus.outlinks(range(200))
    flags, anchors = corpus.link_flags(range(200)), corpus.anchors(range(200))
    for k, page in enumerate(wanted):
        rows = range(int(offsets[k]), int(offsets[k + 1]))
        by_url = sorted(rows, key=lambda row: corpus.url(int(targets[row])))
        assert [corpus.url(int(targets[row])) for row in by_url] == list(page.links)
        if "flags" in carries:
            assert flags is not None
            assert [int(flags[row]) for row in by_url] == list(page.flags)
        if "anchors" in carries:
            assert anchors is not None
            assert [anchors[row] for row in by_url] == list(page.anchors)
    if "text" in carries:
        assert corpus.texts(range(200)) == [page.text for page in wanted]
    if "doc_id" in carries:
        assert corpus.find_doc_ids([page.doc_id for page in wanted]).tolist() == list(range(200))
    for name in ("language", "signals", "canonical", "score"):
        if name in carries:
            assert corpus.column(name).to_pylist() == [getattr(page, name) for page in wanted]


def test_round_trip_of_clueweb22(tmp_path: Path, build: Callable[[Stage], Artifact]) -> None:
    """Pages are in the order of document ids here, and links to nowhere are ids that no file holds."""
    pages = round_trip.sample_pages()
    ids = {page.url: f"clueweb22-en0000-{k // 60:02}-{k % 60:05}" for k, page in enumerate(pages)}
    name_of = {one: url for url, one in ids.items()}
    for page in pages:
        for link in page.links:
            if link not in ids:
                ids[link] = f"clueweb22-en0001-00-{len(ids):05}"
                name_of[ids[link]] = link
    docs = [Doc(ids[page.url], page.url, page.text, [ids[link] for link in page.links]) for page in pages]
    root = write_clueweb22(tmp_path / "cw", docs, "six_fields")
    corpus = Corpus(build(Stage(CorpusConfig(source=External(name="corpus", path=str(root)), heldout_fraction=0.0))))
    assert (corpus.n_pages, corpus.artifact.count("rejects"), corpus.artifact.count("skipped")) == (200, 0, 0)
    assert corpus.document_ids(range(200)) == [ids[page.url] for page in pages]
    assert corpus.urls.to_pylist() == [page.url for page in pages]
    assert corpus.texts(range(200)) == [page.text for page in pages]
    offsets, targets = corpus.outlinks(range(200))
    for k, page in enumerate(pages):
        linked = corpus.document_ids(targets[offsets[k] : offsets[k + 1]])
        assert sorted(name_of[one] for one in linked) == list(page.links)


def test_round_trips_agree_with_each_other(tmp_path: Path, build: Callable[[Stage], Artifact]) -> None:
    """Where two forms carry everything, the files of the artifact are the same but for the source's name."""
    digests = []
    for kind in ("parquet", "jsonl"):
        folder = tmp_path / kind
        folder.mkdir()
        path = round_trip.WRITERS[kind].write(round_trip.sample_pages(), folder)
        artifact = build(Stage(CorpusConfig(source=External(name=kind, path=str(path)))))
        digests.append({f["path"]: f["sha256"] for f in artifact.manifest["files"] if f["path"] != "pages.parquet"})
    assert digests[0] == digests[1]
