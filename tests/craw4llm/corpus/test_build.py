import json
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from craw4llm.artifact import Artifact
from craw4llm.configs import CorpusConfig, SyntheticWeb
from craw4llm.corpus.build import build
from craw4llm.corpus.heldout import is_heldout
from craw4llm.corpus.prepare import Gathered
from craw4llm.corpus.reader import Corpus
from craw4llm.corpus.records import REASONS, Page, Reject, Skipped, Source
from craw4llm.errors import InputError, StageError
from craw4llm.execution import Execution
from craw4llm.fingerprint import External
from craw4llm.stage import Stage

WriteParquet = Callable[..., Path]
Build = Callable[[Stage], Artifact]
CONFIG = CorpusConfig(source=SyntheticWeb())  # the source is given apart; the other fields count
FILES = {
    "pages.parquet",
    "text.zst",
    "text_offsets.npy",
    "links_offsets.npy",
    "links_targets.npy",
    "links_flags.npy",
    "link_anchors.zst",
    "link_anchors_offsets.npy",
    "indegree.npy",
    "dead_links.parquet",
    "heldout.npy",
    "rejects.parquet",
}
QUIET = Execution(workers=1, report=lambda line: None)


@dataclass(frozen=True)
class Records:
    """A chunk that holds what it is given; with `dies` it takes its process down."""

    given: list[Page | Reject]
    dies: bool = False
    label: str = "the records"
    records: int | None = None

    def read(self) -> Iterator[Page | Reject]:
        if self.dies:
            os._exit(9)
        yield from self.given


def source_of(pages: list[Page | Reject | Skipped]) -> Source:
    return Source(chunks=[Records(pages)], records=len(pages), origin="a list")


def built(tmp_path: Path, pages: list[Page | Reject], config: CorpusConfig = CONFIG) -> tuple[Path, dict[str, object]]:
    out = tmp_path / "out"
    out.mkdir()
    done = build(source_of(pages), out, config, QUIET)
    assert {path.name for path in out.iterdir()} <= FILES
    return out, {name: value for name, (value, _) in done.counts.items()}


def page(url: object, text: object = "", links: tuple[object, ...] = (), position: int = 0) -> Page:
    return Page("list", position, url, text, links)


def corpus_of(build: Build, path: Path, **fields: object) -> Corpus:
    return Corpus(build(Stage(CorpusConfig(source=External(name="corpus", path=str(path)), **fields))))  # type: ignore[arg-type]


def test_round_trip(parquet: WriteParquet, build: Build) -> None:
    path = parquet(
        [
            ("https://b.example/x", "the second page", ["https://a.example/", "/y", "#top", "https://b.example/x", "/y"]),
            ("https://a.example/", "the first page: ü", ["HTTPS://B.example:443/x", "https://gone.example/1", "mailto:me@a.example"]),
            ("https://b.example/y", "", None),
        ]
    )
    corpus = corpus_of(build, path, heldout_fraction=0.0)
    assert corpus.urls.to_pylist() == ["https://a.example/", "https://b.example/x", "https://b.example/y"]
    assert corpus.texts([2, 0, 1]) == ["", "the first page: ü", "the second page"]
    assert corpus.n_chars.tolist() == [17, 15, 0]
    assert corpus.n_bytes.tolist() == [18, 15, 0]
    offsets, targets = corpus.outlinks([1, 0, 2])
    assert offsets.tolist() == [0, 2, 4, 4]
    assert targets.tolist() == [0, 2, 1, 3]  # no self-link, no repeat, ascending
    assert corpus.url(3) == "https://gone.example/1"
    assert corpus.n_targets == 4
    assert corpus.indegree.tolist() == [1, 1, 1, 1]
    assert [corpus.hosts[h] for h in corpus.host_ids] == ["a.example", "b.example", "b.example"]
    assert corpus.find(["http://b.example/x", "https://b.example/x#part", "nonsense"]).tolist() == [-1, 1, -1]
    count = corpus.artifact.count
    assert [count(n) for n in ("pages", "hosts", "links", "dead_links", "dead_link_uses", "outside_links")] == [3, 2, 3, 1, 1, 0]
    assert [count(n) for n in ("unusable_links", "empty_pages", "cut_pages", "text_bytes", "records", "rejects")] == [1, 1, 0, 33, 3, 0]
    assert corpus.artifact.manifest["notes"]["origin"] == "the Parquet file web.parquet, 3 rows"
    assert corpus.artifact.verify() == []


def test_links_that_leave_the_corpus_can_be_outside(parquet: WriteParquet, build: Build) -> None:
    path = parquet(
        [("https://a.example/", "x", ["https://gone.example/1", "https://gone.example/2", "/b"]), ("https://a.example/b", "y", [])]
    )
    corpus = corpus_of(build, path, dangling_links="outside")
    assert corpus.n_targets == corpus.n_pages == 2
    assert corpus.outlinks([0, 1])[1].tolist() == [1]
    assert corpus.artifact.count("outside_links") == 2
    assert corpus.artifact.count("dead_links") == corpus.artifact.count("dead_link_uses") == 0
    assert len(corpus.dead_urls) == 0


def test_a_relative_link_depends_on_its_page(tmp_path: Path) -> None:
    pages: list[Page | Reject] = [
        page("https://a.example/one/p", links=("q", "?n=2", "../r", " ?n=3")),
        page("https://a.example/two/p", links=("q", "?n=2", "../r")),
        page("https://a.example/one/s?n=9", links=("?n=2", "q")),
        Page("list", 0, "https://a.example/based", "", ("q",), "https://b.example/base/"),
    ]
    out, counts = built(tmp_path, pages)
    assert pq.read_table(out / "dead_links.parquet")["url"].to_pylist() == [
        "https://a.example/one/p?n=2",
        "https://a.example/one/p?n=3",
        "https://a.example/one/q",
        "https://a.example/one/s?n=2",
        "https://a.example/r",
        "https://a.example/two/p?n=2",
        "https://a.example/two/q",
        "https://b.example/base/q",
    ]
    assert counts["dead_link_uses"] == 10


def test_every_reject_reason_of_a_record(tmp_path: Path) -> None:
    good: list[Page | Reject] = [page(f"https://a.example/{k}", "fine", position=k) for k in range(20)]
    bad: list[Page | Reject] = [
        page(None, "x", position=20),
        page("", "x", position=21),
        page("ftp://a.example/", "x", position=22),
        page(7, "x", position=23),
        page("https://A.example/0#again", "the repeat", ("https://only-in-the-repeat.example/",), position=24),
        page("https://n.example/", 12345, position=25),
        page("https://s.example/", "lone \ud800 surrogate", position=26),
        page("https://s.example/\ud800", "x", position=27),
        page("https://u.example/", b"broken \xff bytes", position=28),
        Reject("list", 29, "https://big.example/", "too_large"),
    ]
    out, counts = built(tmp_path, good + bad)
    assert (counts["records"], counts["pages"], counts["rejects"]) == (30, 20, 10)
    rejects = pq.read_table(out / "rejects.parquet").sort_by("position").to_pydict()
    assert rejects["position"] == list(range(20, 30))
    assert rejects["reason"] == [
        "no_url",
        "no_url",
        "bad_url",
        "bad_url",
        "duplicate_url",
        "text_not_string",
        "invalid_unicode",
        "invalid_unicode",
        "invalid_unicode",
        "too_large",
    ]
    assert rejects["url"][2] == "ftp://a.example/"
    assert set(rejects["reason"]) <= set(REASONS)
    assert counts["dead_links"] == 0  # the rejected repeat's links do not count
    texts = pq.read_table(out / "pages.parquet")
    assert texts["n_chars"].to_pylist() == [4] * 20  # of the pair with one URL, the first is kept


def test_cases_of_odd_texts(shared: Path, tmp_path: Path) -> None:
    """BL-05: null and missing text are empty texts, a number is no text; blank and odd ones are kept as they are."""
    lines = [json.loads(line) for line in (shared / "cases" / "BL-05" / "docs.jsonl").read_text().splitlines()]
    pages: list[Page | Reject] = [Page("docs", k, line["url"], line.get("text")) for k, line in enumerate(lines)]
    out, counts = built(tmp_path, pages)
    given = {line["url"]: line.get("text") for line in lines}
    assert [r for r in pq.read_table(out / "rejects.parquet").to_pylist()] == [
        {"source": "docs", "position": len(lines) - 1, "url": "http://sc.example/number", "reason": "text_not_string"}
    ]
    kept = pq.read_table(out / "pages.parquet")
    sizes = dict(zip(kept["url"].to_pylist(), kept["n_bytes"].to_pylist(), strict=True))
    assert sizes == {url: len((text or "").encode()) for url, text in given.items() if not isinstance(text, int)}
    assert counts["empty_pages"] == 3  # empty, null, missing


def test_cases_of_invalid_unicode(shared: Path, tmp_path: Path) -> None:
    """BL-08: a lone surrogate is rejected; NUL, combining and direction marks are kept; what is written is valid UTF-8."""
    lines = [json.loads(line) for line in (shared / "cases" / "BL-08" / "docs.jsonl").read_text().splitlines()]
    out, _ = built(tmp_path, [Page("docs", k, line["url"], line["text"]) for k, line in enumerate(lines)])
    rejects = pq.read_table(out / "rejects.parquet").to_pylist()
    assert [(r["url"], r["reason"]) for r in rejects] == [("http://u.example/1", "invalid_unicode")]
    kept = pq.read_table(out / "pages.parquet").to_pylist()
    assert {p["url"]: p["n_bytes"] for p in kept} == {line["url"]: len(line["text"].encode()) for line in lines[1:]}


def test_broken_utf8_in_a_parquet_file_is_rejected(tmp_path: Path, build: Build) -> None:
    import pyarrow as pa

    def as_string(values: list[bytes]) -> pa.Array:
        binary = pa.array(values, pa.binary())
        return pa.StringArray.from_buffers(len(values), binary.buffers()[1], binary.buffers()[2])

    links = pa.ListArray.from_arrays([0, 2, 2, 2, 2], as_string([b"https://b.example/\xff", b"https://a.example/2"]))
    table = pa.table(
        {
            "url": as_string([b"https://a.example/1", b"https://a.example/2", b"https://a.example/3\xff", b"https://a.example/4"]),
            "text": as_string([b"good", b"cut off \xe2\x82", b"good", b"surrogate \xed\xa0\x80"]),
            "outlinks": links,
        }
    )
    many = pa.table(
        {"url": [f"https://c.example/{k}" for k in range(9)], "text": ["x"] * 9, "outlinks": pa.array([[]] * 9, pa.list_(pa.string()))}
    )
    path = tmp_path / "broken.parquet"
    pq.write_table(pa.concat_tables([table, many]), path)
    corpus = corpus_of(build, path)
    rejects = pq.read_table(corpus.artifact.file("rejects.parquet")).to_pylist()
    assert [(r["position"], r["reason"]) for r in rejects] == [(1, "invalid_unicode"), (2, "invalid_unicode"), (3, "invalid_unicode")]
    assert corpus.texts(corpus.find(["https://a.example/1"])) == ["good"]
    assert corpus.artifact.count("unusable_links") == 1


def test_texts_are_cut_by_characters(parquet: WriteParquet, build: Build) -> None:
    path = parquet([("https://a.example/1", "ü" * 11, []), ("https://a.example/2", "ü" * 10, [])])
    corpus = corpus_of(build, path, max_text_chars=10)
    assert corpus.texts([0, 1]) == ["ü" * 10] * 2
    assert corpus.column("cut").to_pylist() == [True, False]
    assert corpus.artifact.count("cut_pages") == 1


def test_heldout_pages_depend_on_url_and_length_alone(parquet: WriteParquet, build: Build) -> None:
    long, short = "word " * 40, "word"
    path = parquet([(f"https://a.example/{k}", long if k % 2 else short, []) for k in range(2000)])
    corpus = corpus_of(build, path, heldout_fraction=0.1)
    expected = [k for k in range(2000) if is_heldout(corpus.url(k), 0.1) and corpus.n_chars[k] == 200]
    assert corpus.heldout.tolist() == expected
    assert 70 < len(expected) < 130
    assert corpus.column("heldout").to_pylist() == [k in set(expected) for k in range(2000)]
    urls = [corpus.url(k) for k in range(2000)]
    assert {u for u in urls if is_heldout(u, 0.05)} < {u for u in urls if is_heldout(u, 0.1)}
    assert not any(is_heldout(u, 0.0) for u in urls)


def test_a_source_of_hardly_any_pages_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="gives no page at all; rejected: 3 bad_url"):
        built(tmp_path, [page("nonsense")] * 3)
    (tmp_path / "out").rename(tmp_path / "first")
    with pytest.raises(InputError, match="only 1 records are pages; rejected: 2 bad_url"):
        built(tmp_path, [page("https://a.example/"), page("x"), page("y")])
    (tmp_path / "out").rename(tmp_path / "second")
    _, counts = built(tmp_path, [page("https://a.example/")] * 9)  # repeats say nothing against the source
    assert (counts["pages"], counts["rejects"]) == (1, 8)


def test_same_bytes_for_any_number_of_workers(parquet: WriteParquet, tmp_path: Path, digest: Callable[[Path], str]) -> None:
    from craw4llm.corpus.stage import run

    rows = [
        (f"https://h{k % 7}.example/{k * 7919 % 5000}", f"text {k} " * (k % 40), [f"/{k * 31 % 5000}", f"https://gone.example/{k % 99}"])
        for k in range(4000)
    ]
    config = CorpusConfig(source=External(name="corpus", path=str(parquet(rows))))
    digests = []
    for workers in (1, 2):
        out = tmp_path / f"workers{workers}"
        out.mkdir()
        run(config, {}, out, Execution(workers=workers, report=lambda line: None))
        digests.append(digest(out))
    assert digests[0] == digests[1]


def test_a_worker_that_dies_is_named(tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    chunks = [
        Records([page("https://a.example/")], label="good.html to better.html"),
        Records([], dies=True, label="bad.html to worse.html"),
    ]
    with pytest.raises(StageError, match=r"process that reads pages died.*bad.html to worse.html"):
        build(Source(chunks=chunks, records=2, origin="a list", isolated=True), out, CONFIG, Execution(workers=1, report=lambda line: None))


def test_a_page_keeps_each_link_once() -> None:
    gathered = Gathered(CONFIG)
    gathered.take(page("https://a.example/", "x", ("/c", "/b", "/c")), 0)
    gathered.take(page("https://a.example/2", "y", ("/c", None)), 1)
    run = gathered.sorted()
    assert run.urls.to_pylist() == ["https://a.example/b", "https://a.example/c"]
    assert run.links["url"].to_pylist() == [1, 0, 1]
    assert run.pages["links"].to_pylist() == [2, 1]
    assert gathered.unusable_links == 1
