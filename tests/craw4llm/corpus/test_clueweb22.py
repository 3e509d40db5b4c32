"""ClueWeb22 as delivered: forms of links, faults of the release, document ids, resuming, and what happens when files change."""

import gzip
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner

from craw4llm.__main__ import cli
from craw4llm.configs import (
    ClueWeb22,
    CorpusConfig,
    CrawlConfig,
    Length,
    ScoreConfig,
    ScorerConfig,
    SelectConfig,
    TokenizeConfig,
    TokenizerConfig,
)
from craw4llm.corpus import clueweb22_build, clueweb22_parts
from craw4llm.corpus.clueweb22_files import LANGUAGES, delivered, digest, format_id, parse_id
from craw4llm.corpus.clueweb22_slots import format_ids
from craw4llm.corpus.edges import export_edges
from craw4llm.corpus.reader import Corpus
from craw4llm.corpus.show import describe, page_lines
from craw4llm.errors import ConfigError, InputError
from craw4llm.execution import Execution
from craw4llm.externals import ExternalDigests
from craw4llm.fingerprint import External
from craw4llm.page_life import page_life
from craw4llm.selection.export import export
from craw4llm.stage import Stage
from tests.conftest import builder
from tests.craw4llm.corpus.clueweb22_writer import LAYOUTS, Doc, entry, pack, write_clueweb22, write_records


def stage(root: Path, **fields: object) -> Stage:
    """A corpus stage; fields of ClueWeb22, and those of CorpusConfig that are named here."""
    config = {"heldout_fraction": 0.0, "dangling_links": "dead"}
    config |= {
        name: fields.pop(name)
        for name in list(fields)
        if name in ("heldout_fraction", "heldout_min_chars", "dangling_links", "max_text_chars")
    }
    return Stage(CorpusConfig(source=ClueWeb22(folder=External(name="corpus", path=str(root)), **fields), **config))  # type: ignore[arg-type]


def doc_id(number: int, name: str = "en0000-00") -> str:
    return f"clueweb22-{name}-{number:05d}"


def links_of(corpus: Corpus, page: int) -> list[str]:
    return corpus.document_ids(corpus.outlinks([page])[1])


@pytest.fixture
def small(tmp_path: Path) -> list[Doc]:
    """Two files of en00 and one of en01: links between them, to nowhere, out of the collection, twice, to itself; a page without text."""
    return [
        Doc(doc_id(0), "http://a.example/", "first page", [doc_id(2), doc_id(1), doc_id(2), doc_id(0), None]),
        Doc(doc_id(1), "http://a.example/x,y", "second page", [doc_id(3), "clueweb22-de0000-00-00000", "clueweb22-en0999-00-00000"]),
        Doc(doc_id(2), "http://b.example/é", "third ünïcode page", None),
        Doc(doc_id(3), "http://b.example/3", None, [doc_id(0)]),
        Doc(doc_id(0, "en0000-01"), "http://c.example/", "a page of the second file", [doc_id(0), doc_id(99)]),
        Doc(doc_id(1, "en0100-00"), "http://d.example/", "a page of another stream", [doc_id(0), doc_id(0, "en0100-00")]),
    ]


def test_ids_and_keys() -> None:
    names = ["clueweb22-en0041-36-03476", "clueweb22-zh_chs0000-00-00001", "clueweb22-other0102-99-99999", "clueweb22-de0000-00-00000"]
    keys = [parse_id(name) for name in names]
    assert [format_id(key) for key in keys if key is not None] == names == format_ids(np.array(keys))
    assert [name for _, name in sorted(zip(keys, names, strict=True))] == sorted(names)
    assert list(LANGUAGES) == sorted(LANGUAGES)
    for wrong in ("clueweb22-en0041-36-3476", "clueweb22-xx0041-36-03476", "clueweb22-en0041-36-034767", "http://a.example/", ""):
        assert parse_id(wrong) is None


@pytest.mark.parametrize("layout", ["id_first", "six_fields"])
def test_pages_links_and_counts(small, tmp_path, build, layout):
    corpus = Corpus(build(stage(write_clueweb22(tmp_path / "w", small, layout), streams=("en",), indegree="inlink")))
    assert corpus.n_pages == 7  # en0100-00 has a record 0 that no document fills
    assert corpus.document_ids(range(7))[3:6] == [doc_id(3), doc_id(0, "en0000-01"), doc_id(0, "en0100-00")]
    assert links_of(corpus, 0) == [doc_id(1), doc_id(2)]
    assert links_of(corpus, 1) == [doc_id(3), "clueweb22-en0999-00-00000"]
    assert links_of(corpus, 2) == []
    assert links_of(corpus, 3) == [doc_id(0)]  # a page without text has links
    assert corpus.texts([2, 0, 3]) == ["third ünïcode page", "first page", ""]
    assert corpus.n_bytes[:4].tolist() == [10, 11, 20, 0] and corpus.n_chars[2] == 18
    assert [corpus.hosts[h] for h in corpus.host_ids[:5]] == ["a.example", "a.example", "b.example", "", "c.example"]
    assert corpus.url(1) == "http://a.example/x,y" and corpus.url(3) == "http://b.example/3"
    artifact = corpus.artifact
    forms = artifact.manifest["notes"]["link_entries_by_form"]
    assert sum(forms.values()) == 13 and forms["null in place of the document id"] == 1
    assert {
        name: artifact.count(name) for name in ("links", "dead_links", "dead_link_uses", "outside_links", "unusable_links", "rejects")
    } == {
        "links": 7,
        "dead_links": 2,
        "dead_link_uses": 2,
        "outside_links": 1,
        "unusable_links": 1,
        "rejects": 0,
    }
    assert artifact.count("records") == artifact.count("pages") + artifact.count("rejects")
    # anchors: with multiplicity and self-links, as the released code counts them; the graph's in-degrees differ
    assert corpus.indegree[:3].tolist() == [4, 1, 2]
    assert artifact.manifest["notes"]["indegree"] == {"anchors": 8, "linking_pages": 7, "pages_that_differ": 3, "largest_difference": 1}
    by_graph = Corpus(build(stage(tmp_path / "w", streams=("en",))))
    assert by_graph.indegree[:3].tolist() == [3, 1, 1]
    assert corpus.find([doc_id(3), doc_id(99), "http://a.example/", " " + doc_id(0) + "\n"]).tolist() == [3, -1, -1, 0]
    assert corpus.find_targets([doc_id(99), "clueweb22-en0999-00-00000"]).tolist() == [7, 8]
    assert corpus.dead_places.tolist() == [4, 8]  # after en0000-00-00003, and after en0100-00


def test_streams_and_languages(small, tmp_path, build):
    small += [
        Doc(doc_id(0, "zh_chs0001-02"), "http://zh.example/", "一", [doc_id(0, "other0000-00"), doc_id(0)]),
        Doc(doc_id(0, "other0000-00"), "http://other.example/", "x", [doc_id(0, "zh_chs0001-02")]),
    ]
    root = write_clueweb22(tmp_path / "w", small)
    assert [file.name for file in delivered(root, ("en00", "zh_chs"))] == ["en0000-00", "en0000-01", "zh_chs0001-02"]
    corpus = Corpus(build(stage(root, streams=("other", "zh_chs"), dangling_links="outside")))
    assert corpus.document_ids([0, 1]) == [doc_id(0, "other0000-00"), doc_id(0, "zh_chs0001-02")]
    assert links_of(corpus, 1) == [doc_id(0, "other0000-00")]
    assert corpus.artifact.count("outside_links") == 1
    assert Corpus(build(stage(root, streams=("en00",)))).n_pages == 5
    assert Corpus(build(Stage(CorpusConfig(source=External(name="corpus", path=str(root)))))).n_pages == 9  # all that is delivered
    with pytest.raises(InputError, match=r"has no \.json\.gz files of fr"):
        build(stage(root, streams=("fr",)))
    with pytest.raises(ConfigError, match="'e' is no language"):
        stage(root, streams=("e",))


def test_links_without_ids_are_resolved_by_urls(small, tmp_path, build):
    small[5].links = [doc_id(0)]  # a page without a record has no URL that a link could name
    small[0].links = [doc_id(2), doc_id(1), "HTTP://B.example:80/%C3%A9#top", "http://nowhere.example/"]
    by_ids = Corpus(build(stage(write_clueweb22(tmp_path / "ids", small), streams=("en",), dangling_links="outside")))
    artifact = build(stage(write_clueweb22(tmp_path / "urls", small, "five_fields"), streams=("en",)))
    corpus = Corpus(artifact)
    assert artifact.manifest["notes"]["link_targets"] == "urls"
    for page in range(corpus.n_pages):
        assert links_of(corpus, page) == links_of(by_ids, page)
    assert artifact.count("outside_links") == 4
    assert corpus.find(["http://a.example/x,y", "http://b.example/é", "http://a.example/x"]).tolist() == [1, 2, -1]
    with pytest.raises(ConfigError, match="links='in_place'"):
        stage(tmp_path / "urls", links="in_place")
    with pytest.raises(InputError, match="five fields, no document id"):
        build(stage(tmp_path / "urls", links="in_place", dangling_links="outside"))


def test_a_share_of_links_must_resolve(tmp_path, build):
    docs = [Doc(doc_id(k), f"http://a.example/{k}", "text", [f"http://nowhere.example/{j}" for j in range(20)]) for k in range(3)]
    root = write_clueweb22(tmp_path / "w", docs, "five_fields")
    with pytest.raises(InputError, match=r"0.0% of 60 links .* at least 5% is expected; their form: 100% five fields, no document id"):
        build(stage(root))
    assert build(stage(root, min_resolved=0.0)).count("outside_links") == 60
    docs[0].links = ["clueweb22-de0000-00-00000"] * 30
    with pytest.raises(InputError, match=r"0.0% of 30 links .*their form: 100% a document id first"):
        build(stage(write_clueweb22(tmp_path / "foreign", docs[:1]), streams=("en",)))


def read_case(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in gzip.decompress(path.read_bytes()).splitlines() if line.strip()]


def test_case_bl16(shared, build):
    """Oddities of the release; expected.json says which records they touch."""
    case = shared / "cases" / "BL-16"
    expected = json.loads((case / "expected.json").read_text())
    corpus = Corpus(build(stage(case / "clueweb22", streams=("en0",), indegree="inlink")))
    records, outlinks = (read_case(case / f"clueweb22/{kind}/en/en00/en0000/en0000-00.json.gz") for kind in ("txt", "outlink"))
    notes = corpus.artifact.manifest["notes"]
    empty = np.flatnonzero(corpus.n_bytes == 0)
    assert corpus.document_ids(empty) == expected["records_without_text"]
    assert corpus.n_pages == 60 and corpus.artifact.count("pages_without_record") == len(empty)
    linked = {e[0] for r in outlinks for e in r["outlinks"]}  # 00440 is linked by a document whose outlink record is missing
    assert corpus.document_ids(range(60, corpus.n_targets)) == [i for i in expected["link_targets_outside_corpus"] if i in linked]
    pages = corpus.find([r["ClueWeb22-ID"] for r in records])
    assert corpus.texts(pages) == [r["Clean-Text"] for r in records]  # the two whose offsets run together among them
    no_links = [k for k in range(60) if not len(corpus.outlinks([k])[1])]
    assert set(corpus.document_ids(no_links)) >= set(expected["outlink_records_missing"])
    assert notes["loose_offset_files"] == ["en0000-00"]
    assert notes["faults"]["url_line_ends"] == len(records)
    whole = {r["ClueWeb22-ID"]: r["url"] for r in outlinks}
    with_comma = [i for i, url in whole.items() if "," in url]
    assert with_comma and [corpus.url(int(corpus.find([i])[0])) for i in with_comma] == [whole[i] for i in with_comma]


def test_damaged_and_misplaced_records(small, tmp_path, build):
    """Each is rejected or left out by name, counted, and listed with file and record; the rest of the file is kept."""
    more = [Doc(doc_id(k, "en0000-01"), f"http://more.example/{k}", "more", ()) for k in range(6)]
    root = write_clueweb22(tmp_path / "w", [*small[:4], *more])
    good = {"URL": "http://a.example/0\n", "ClueWeb22-ID": doc_id(0), "Clean-Text": "good"}
    whole = pack({**good, "ClueWeb22-ID": doc_id(7), "Clean-Text": "x" * 400})
    texts = [
        pack(good),
        whole[:60] + b"\0\0\0\0" + whole[64:],
        pack({**good, "ClueWeb22-ID": doc_id(9)}),
        pack(b"{ no json\n"),
        pack({**good, "ClueWeb22-ID": doc_id(4), "Clean-Text": 7}),
        pack(b'{"ClueWeb22-ID": "%s", "Clean-Text": "\\ud800"}\n' % doc_id(5).encode()),
        pack({**good, "ClueWeb22-ID": doc_id(6), "Clean-Text": None}),
        whole,
    ]
    path = write_records(root, "txt", "en0000-00", texts)
    path.write_bytes(path.read_bytes()[:-20])  # the file is cut within its last record
    link = {"ClueWeb22-ID": doc_id(0), "outlinks": [entry("id_first", doc_id(k), "http://x.example/") for k in (1, 6, 7)]}
    other = {"ClueWeb22-ID": doc_id(5), "outlinks": [entry("id_first", doc_id(0), "http://x.example/")]}
    write_records(root, "outlink", "en0000-00", [pack(link), b"", pack(link)[:30], b"", b"", b"", pack(other), b""])
    artifact = build(stage(root))
    corpus = Corpus(artifact)
    assert corpus.document_ids([0, 1, 2]) == [doc_id(0), doc_id(6), doc_id(0, "en0000-01")] and corpus.n_pages == 8
    assert corpus.texts([1, 0]) == ["", "good"]
    rejects = pq.read_table(artifact.file("rejects.parquet")).to_pylist()
    reasons = ["damaged", "wrong_id", "not_json", "text_not_string", "invalid_unicode", "cut_off"]
    assert [(r["source"], r["position"], r["reason"]) for r in rejects] == [
        ("en0000-00", row, reason) for row, reason in zip([1, 2, 3, 4, 5, 7], reasons, strict=True)
    ]
    assert artifact.count("records") == artifact.count("pages") + artifact.count("rejects") == 14
    assert links_of(corpus, 0) == [doc_id(6), doc_id(1), doc_id(7)]  # rejected documents are dead links
    assert corpus.dead_places.tolist() == [1, 3]
    faults = artifact.manifest["notes"]["faults"]
    assert faults["damaged_link_records"] == 1 and faults["misplaced_link_records"] == 1


def test_a_folder_of_rejects_is_refused(small, tmp_path, build):
    root = write_clueweb22(tmp_path / "w", small[:2])
    write_records(root, "txt", "en0000-00", [pack(b"no\n")] * 2)
    with pytest.raises(InputError, match=r"none of the 2 records .* is a page; rejected: \{'not_json': 2\}"):
        build(stage(root))
    offsets = root / "txt/en/en00/en0000/en0000-00.offset"
    offsets.write_text("0000000000\n000000002")
    with pytest.raises(InputError, match=r"en0000-00\.offset has 20 bytes"):
        build(stage(root))
    offsets.unlink()
    with pytest.raises(InputError, match=r"every data file has an \.offset file"):
        build(stage(root))


def web(pages: int, per_file: int = 20) -> list[Doc]:
    """A web of several files, with some dead links and pages without text."""
    ids = [doc_id(k % per_file, f"en00{k // per_file:02d}-00") for k in range(pages)]
    links = [
        [ids[(k * 7 + j * j) % pages] for j in range(k % 6)] + ([f"clueweb22-en0999-00-{k:05d}"] if k % 9 == 0 else [])
        for k in range(pages)
    ]
    return [
        Doc(
            ids[k],
            f"http://h{k % 5}.example/{k}",
            None if k % 17 == 5 else f"text {' '.join(f'word{k * j % 997}' for j in range(k % 40))}",
            links[k],
        )
        for k in range(pages)
    ]


def test_equal_bytes_for_any_number_of_workers(tmp_path):
    root = write_clueweb22(tmp_path / "w", web(100))
    digests = set()
    for workers in (1, 2, 3):
        execution = Execution(root=tmp_path / f"a{workers}", workers=workers, report=lambda line: None)
        digests.add(builder(execution)(stage(root, indegree="inlink", heldout_fraction=0.2, heldout_min_chars=1)).digest)
    assert len(digests) == 1


def test_kill_9_and_go_on(tmp_path, monkeypatch):
    """A build that is killed after two of five files reads the other three alone, and writes the same bytes."""
    root = write_clueweb22(tmp_path / "w", web(100))
    undisturbed = builder(Execution(root=tmp_path / "b", workers=1, report=lambda line: None))(stage(root))
    script = """
import os, signal, sys
from pathlib import Path
from craw4llm.corpus import clueweb22_build, clueweb22_parts
from craw4llm.execution import Execution
from tests.conftest import builder
from tests.craw4llm.corpus.test_clueweb22 import stage
whole = clueweb22_parts.read_part
def dies(work, index):
    if index == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    return whole(work, index)
clueweb22_build.read_part = dies
builder(Execution(root=Path(sys.argv[2]), workers=1, report=lambda line: None))(stage(Path(sys.argv[1])))
"""
    here = Path(__file__).resolve().parents[3]
    env = {**os.environ, "PYTHONPATH": str(here)}
    done = subprocess.run([sys.executable, "-c", script, str(root), str(tmp_path / "a")], env=env, cwd=here, capture_output=True, text=True)
    assert done.returncode == -signal.SIGKILL, done.stderr
    read = []

    def counted(work: clueweb22_parts.Work, index: int) -> int:
        read.append(index)
        return clueweb22_parts.read_part(work, index)

    monkeypatch.setattr(clueweb22_build, "read_part", counted)
    artifact = builder(Execution(root=tmp_path / "a", workers=1, report=lambda line: None))(stage(root))
    assert read == [2, 3, 4] and artifact.digest == undisturbed.digest
    assert not (artifact.path / "parts").exists()


@pytest.mark.parametrize("option", [{"nofollow": "drop"}, {"obey": ("noai",)}, {"duplicates": "last"}])
def test_options_that_do_nothing_here_are_refused(small, tmp_path, build, option):
    """Silence would leave a reader believing that the pages were left out."""
    (name,) = option
    with pytest.raises(ConfigError, match=f"{name} is .* does nothing for ClueWeb22"):
        build(Stage(CorpusConfig(source=External(name="corpus", path=str(write_clueweb22(tmp_path / "w", small, "id_first"))), **option)))


def test_what_identifies_the_folder(small, tmp_path, build, monkeypatch):
    root = write_clueweb22(tmp_path / "w", small)
    before = digest(root)
    copied = tmp_path / "elsewhere"
    root.rename(copied)
    assert digest(copied) == before
    memory = ExternalDigests(tmp_path / "externals.json")
    external = External(name="corpus", path=str(copied))
    assert memory(external) == before
    artifact = build(stage(copied))
    data = copied / "txt/en/en00/en0000/en0000-01.json.gz"
    # gone, then back elsewhere
    copied.rename(root)
    with pytest.raises(InputError, match="stay in its own files: put the folder back, or set CRAW4LLM_CLUEWEB22"):
        Corpus(artifact).texts([0])
    monkeypatch.setenv("CRAW4LLM_CLUEWEB22", str(root))
    assert Corpus(artifact).texts([0, 4]) == ["first page", "a page of the second file"]
    # changed in size
    data = root / "txt/en/en00/en0000/en0000-01.json.gz"
    write_records(root, "txt", "en0000-01", [pack({"ClueWeb22-ID": doc_id(0, "en0000-01"), "Clean-Text": "another text"})])
    assert digest(root) != before and memory(External(name="corpus", path=str(root))) != before
    with pytest.raises(InputError, match=r"en0000-01.json.gz has \d+ bytes, but the corpus was built from a file of \d+"):
        Corpus(artifact).texts([4])
    # changed in place, of the same size: the record's checksum tells
    data = root / "txt/en/en00/en0000/en0000-00.json.gz"
    content = bytearray(data.read_bytes())
    content[40] ^= 0xFF
    data.write_bytes(bytes(content))
    with pytest.raises(InputError, match=f"the record of {doc_id(0)} is damaged or cut off"):
        Corpus(artifact).texts([0])


def test_held_out_pages_and_long_texts(tmp_path, build):
    docs = [Doc(doc_id(k), f"http://a.example/{k}", "x" * k, [doc_id((k + 1) % 400)]) for k in range(400)]
    root = write_clueweb22(tmp_path / "w", docs)
    corpus = Corpus(build(stage(root, heldout_fraction=0.25, heldout_min_chars=100, max_text_chars=300)))
    assert 40 < len(corpus.heldout) < 110 and corpus.heldout.min() >= 100
    again = Corpus(build(stage(root, heldout_fraction=0.5, heldout_min_chars=100)))
    assert set(corpus.heldout.tolist()) < set(again.heldout.tolist())
    assert corpus.n_chars.max() == 300 and len(corpus.text(399)) == 300 and corpus.artifact.count("cut_pages") == 99


def test_in_place_reads_what_compiled_holds(tmp_path, build):
    root = write_clueweb22(tmp_path / "w", web(100))
    compiled = Corpus(build(stage(root, streams=("en00",), dangling_links="outside")))
    lazy = Corpus(build(stage(root, streams=("en00",), dangling_links="outside", links="in_place")))
    assert lazy.n_pages == compiled.n_pages == lazy.n_targets
    some = np.array([99, 3, 41, 7, 7, 0])
    for a, b in zip(compiled.outlinks(some), lazy.outlinks(some), strict=True):
        assert a.tolist() == b.tolist()
    assert lazy.texts(some) == compiled.texts(some) and lazy.document_ids(some) == compiled.document_ids(some)
    everyone = np.arange(100, dtype=np.uint32)
    assert lazy.without_record(everyone).tolist() == compiled.without_record(everyone).tolist() == [k % 17 == 5 for k in range(100)]
    assert "links read in place" in describe(lazy)
    with pytest.raises(ConfigError, match="does not know n_bytes; build it with links='compiled'"):
        _ = lazy.n_bytes
    with pytest.raises(ConfigError, match="does not know links into a page; build it with links='compiled'"):
        lazy.inlinks([0])


def test_the_chain_with_links_in_place(tmp_path, build):
    """Drawn seeds, crawls, scores, a tokenizer, selections and tokens: those of the compiled corpus, byte for byte."""
    root = write_clueweb22(tmp_path / "w", web(120))
    scorer = Stage(ScorerConfig(kind="length", source=Length()))
    made = []
    for links in ("compiled", "in_place"):
        corpus = stage(root, dangling_links="outside", links=links)
        config = CrawlConfig(policy="quality", budget_pages=40, batch_pages=10, seed_count=5)
        crawl = Stage(config, corpus=corpus, scorer=scorer)
        random = Stage(CrawlConfig(policy="random", budget_pages=30, batch_pages=10, seed_count=5), corpus=corpus)
        selection = Stage(SelectConfig(pool="crawled", keep="top", keep_pages=10), corpus=corpus, crawl=crawl, scorer=scorer)
        oracle = Stage(
            SelectConfig(pool="corpus", keep="sample_top", keep_pages=5),
            corpus=corpus,
            scores=Stage(ScoreConfig(), corpus=corpus, scorer=scorer),
        )
        tokenizer = Stage(TokenizerConfig(vocab_size=300, train_bytes=2000), corpus=corpus)
        tokens = Stage(TokenizeConfig(sample_tokens=17), corpus=corpus, tokenizer=tokenizer, selection=selection)
        built = [build(one) for one in (random, selection, oracle, tokenizer, tokens)]
        files = ("pages.parquet", "statistics.json", "statistics.json", "tokenizer.json", "documents.parquet")
        made.append([one.file(name).read_bytes() for one, name in zip(built, files, strict=True)])
        told = "\n".join(page_lines(Corpus(build(corpus)), 3))
        assert ("links in are not known" in told) == (links == "in_place")
    assert made[0] == made[1]
    capped = CrawlConfig(policy="random", budget_pages=30, batch_pages=10, seed_count=5, pages_per_host=2)
    with pytest.raises(ConfigError, match="need the hosts of all pages"):
        build(Stage(capped, corpus=corpus))
    with pytest.raises(ConfigError, match="does not know indegree"):
        build(Stage(CrawlConfig(policy="indegree", budget_pages=30, batch_pages=10, seed_count=5), corpus=corpus))
    shown = CliRunner().invoke(
        cli, ["corpus", str(root), "--links", "in_place", "--streams", "en00", "--root", str(tmp_path / "r")], catch_exceptions=False
    )
    assert "links read in place" in shown.output


@pytest.mark.parametrize("indegree", ["links", "inlink"])
def test_links_in_and_the_graph_as_parquet(small, tmp_path, build, indegree):
    """In-links are those of the graph, whatever the in-degrees count."""
    root = write_clueweb22(tmp_path / "w", small)
    corpus = Corpus(build(stage(root, indegree=indegree)))
    edges = {(page, target) for page in range(corpus.n_pages) for target in corpus.outlinks([page])[1].tolist()}
    found = {(page, target) for target in range(corpus.n_targets) for page in corpus.inlinks([target])[1].tolist()}
    assert found == edges and len(edges) == len(corpus.inlinks(np.arange(corpus.n_targets))[1])
    assert export_edges(corpus.artifact, tmp_path / "graph") == (corpus.n_targets, len(edges))
    nodes = pq.read_table(tmp_path / "graph" / "nodes.parquet").to_pylist()
    assert [node["doc_id"] or node["url"] for node in nodes] == corpus.document_ids(np.arange(corpus.n_targets))
    assert [node["page"] for node in nodes] == [target < corpus.n_pages for target in range(corpus.n_targets)]
    assert nodes[0]["url"] == "http://a.example/" and nodes[1]["url"] == "http://a.example/x,y"
    assert {node["language"] for node in nodes if node["page"]} == {"en"}
    written = pq.read_table(tmp_path / "graph" / "edges.parquet")
    assert set(zip(written["source"].to_pylist(), written["target"].to_pylist(), strict=True)) == edges


def test_the_chain_downstream(tmp_path, build, execution):
    """Seeds of ids, a crawl with dead links, scores, a selection, tokens, exports and a page's life."""
    root = write_clueweb22(tmp_path / "w", web(120))
    seeds = tmp_path / "seeds.txt"
    seeds.write_text("\ufeff# ids\r\n" + "\r\n".join([doc_id(0), doc_id(3), "clueweb22-en0999-00-00000"]) + "\r\n")
    corpus = stage(root, heldout_fraction=0.1, heldout_min_chars=50)
    scorer = Stage(ScorerConfig(kind="length", source=Length()))
    config = CrawlConfig(policy="quality", budget_pages=40, batch_pages=10, seeds=External(name="seeds", path=str(seeds)))
    crawl = Stage(config, corpus=corpus, scorer=scorer)
    made = build(crawl)
    assert made.count("crawled_pages") == 40 and made.count("dead_links") > 0
    assert made.manifest["notes"]["seeds_unknown"] == [[4, "clueweb22-en0999-00-00000"]]
    dead = pq.read_table(made.file("dead_links.parquet")).column("url").to_pylist()
    assert all(name.startswith("clueweb22-en0999-00-") for name in dead)
    for policy in ("indegree", "parent_mean", "breadth_first", "predicted", "random"):
        assert (
            build(Stage(CrawlConfig(policy=policy, budget_pages=30, batch_pages=10, seed_count=5), corpus=corpus, scorer=scorer)).count(
                "crawled_pages"
            )
            == 30
        )
    scores = Stage(ScoreConfig(), corpus=corpus, scorer=scorer)
    assert build(scores).count("empty") == build(corpus).count("empty_pages")
    selection = Stage(SelectConfig(pool="crawled", keep="top", keep_pages=10), corpus=corpus, crawl=crawl, scorer=scorer)
    kept = build(selection)
    tokenizer = Stage(TokenizerConfig(vocab_size=300), corpus=corpus)
    tokens = build(Stage(TokenizeConfig(sample_tokens=17), corpus=corpus, tokenizer=tokenizer, selection=selection))
    assert tokens.count("documents") == 10
    out = tmp_path / "out.jsonl"
    assert export(kept, out) == 10
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    opened = Corpus(build(corpus))
    assert all(row["doc_id"] == opened.document_ids([row["page"]])[0] and row["text"] == opened.text(row["page"]) for row in rows)
    told = describe(opened, seeds)
    assert "languages  en 100.0%" in told and "from the seeds of" in told and "h1.example" in told
    life = page_life(rows[0]["doc_id"], [build(corpus), made, kept, tokens])
    assert rows[0]["doc_id"] in life and "selected at rank 0" in life and "tokens in" in life


def test_layouts_are_all_written() -> None:
    assert {len(entry(layout, "clueweb22-en0000-00-00000", "http://a.example/")) for layout in LAYOUTS} == {5, 6}


def test_parts_on_several_hosts(tmp_path, execution, monkeypatch):
    """Three shares of a build, done apart in the unfinished artifact; the build merges them and reads nothing again."""
    root = write_clueweb22(tmp_path / "w", web(100))
    whole = builder(Execution(root=tmp_path / "b", workers=1, report=lambda line: None))(stage(root))
    one = stage(root)
    config = one.config
    assert isinstance(config, CorpusConfig) and isinstance(config.source, ClueWeb22)
    out = tmp_path / "out"
    out.mkdir()
    assert sum(clueweb22_build.build_part(config.source, out, config, execution, part=k, of=3) for k in (2, 3, 1)) == 100
    monkeypatch.setattr(clueweb22_build, "read_part", lambda work, index: pytest.fail("read again"))
    clueweb22_build.build(config.source, out, config, execution)
    for path in sorted(whole.path.iterdir()):
        if path.name != "manifest.json":
            assert (out / path.name).read_bytes() == path.read_bytes(), path.name


def test_whole_hosts_are_held_out(tmp_path, build):
    root = write_clueweb22(tmp_path / "w", web(100))
    source = ClueWeb22(folder=External(name="corpus", path=str(root)))
    config = CorpusConfig(source=source, heldout_fraction=0.5, heldout_by="host", heldout_min_chars=0)
    corpus = Corpus(build(Stage(config)))
    held = {corpus.hosts[h] for h in corpus.host_ids[corpus.heldout]}
    rest = {corpus.hosts[h] for h in corpus.host_ids[~corpus.heldout_mask[: corpus.n_pages]]}
    assert held and rest and not held & rest
