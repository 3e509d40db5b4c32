import gzip
import json
import random
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from warc_making import http, members, page, record, record_id, response, sha1, write

from craw4llm.artifact import Artifact
from craw4llm.configs import (
    CorpusConfig,
    CrawlConfig,
    HtmlLimits,
    Length,
    ScorerConfig,
    SelectConfig,
    WarcArchive,
)
from craw4llm.corpus import warc as module
from craw4llm.corpus.html_tree import open_web
from craw4llm.corpus.reader import Corpus
from craw4llm.corpus.records import REASONS, LinkFlag, Page, Reject, Skipped
from craw4llm.corpus.stage import open_source, run
from craw4llm.corpus.warc import open_warc, wat_links
from craw4llm.errors import InputError
from craw4llm.execution import Execution
from craw4llm.fingerprint import External
from craw4llm.stage import Stage

Build = Callable[[Stage], Artifact]
WriteTree = Callable[..., Path]

SAMPLES: dict[str, dict[str, Any]] = json.loads(Path(__file__).with_name("web_samples.json").read_text())["files"]


def read(path: Path, **options: Any) -> tuple[list[Page], list[Reject], Counter[str]]:
    pages, rejects, skipped = [], [], Counter[str]()
    for chunk in open_warc(path, **options).chunks:
        for one in chunk.read():
            if isinstance(one, Page):
                pages.append(one)
            elif isinstance(one, Reject):
                assert one.reason in REASONS
                rejects.append(one)
            else:
                assert isinstance(one, Skipped)
                skipped[one.kind] += one.records
    return pages, rejects, skipped


def one(path: Path, data: bytes, **options: Any) -> Page | Reject | Skipped:
    """What becomes of the only record of a file."""
    pages, rejects, skipped = read(write(path / "one.warc.gz", data), **options)
    found = [*pages, *rejects, *(Skipped(kind) for kind in skipped.elements())]
    assert len(found) == 1
    return found[0]


def corpus_config(path: Path, **fields: Any) -> CorpusConfig:
    return CorpusConfig(source=External(name="corpus", path=str(path)), **fields)


@pytest.mark.parametrize("name", SAMPLES)
def test_samples(shared: Path, name: str) -> None:
    """All files of web_samples, against what was found in them by other means (web_samples.json says how)."""
    path, expected = shared / "web_samples" / name, SAMPLES[name]
    if "refused" in expected:
        with pytest.raises(InputError, match=expected["refused"]):
            open_source(External(name="corpus", path=str(path)))
        return
    pages, rejects, skipped = read(path)
    assert len(pages) == expected["pages"]
    assert len({str(one.url) for one in pages}) == expected.get("urls", expected["pages"])
    assert sum(len(one.links) for one in pages) == expected["links"]
    assert [[one.position, one.reason] for one in rejects] == expected.get("rejects", [])
    assert dict(skipped) == expected["skipped"]
    assert all(str(one.url).startswith("http") for one in pages)
    assert all(len(one.links) == len(one.anchors) == len(one.link_flags) or not one.anchors for one in pages)
    if pages:
        assert any(expected["contains"] in str(one.text) for one in pages)


def test_no_sample_is_left_out(shared: Path) -> None:
    assert sorted(SAMPLES) == sorted(path.name for path in (shared / "web_samples").iterdir() if path.name != "README.md")


def test_the_same_pages_as_tree_and_as_archive(html_tree: WriteTree, tmp_path: Path, build: Build) -> None:
    """200 pages in both forms: equal URLs, texts, links and what is said of links; as corpora, equal ids, texts and links."""
    drawn = random.Random(5)
    files = {}
    for k in range(200):
        links = [f"p{drawn.randrange(220):03d}.html" for _ in range(drawn.randrange(12))]
        files[f"p{k:03d}.html"] = page(f"Page {k} says: {' '.join(drawn.choices(['wide', 'öde', '雪', 'web'], k=40))}.", links)
    folder = html_tree({"one": files})
    tree = [one for chunk in open_web(folder).chunks for one in chunk.read()]
    records = [response(f"https://one.example/{name}", text) for name, text in files.items()]
    drawn.shuffle(records)
    archive = write(tmp_path / "archive" / "a.warc.gz", members(records))
    pages, rejects, skipped = read(archive.parent)
    assert not rejects and not skipped

    def said(given: Sequence[Any]) -> dict[str, Any]:
        return {
            str(one.url): (one.text, [str(one.url).rpartition("/")[0] + "/" + str(link).rpartition("/")[2] for link in one.links],
                           list(one.anchors), list(one.link_flags), one.canonical, one.signals)
            for one in given
        }  # fmt: skip

    assert said(pages) == said(tree)
    corpora = [Corpus(build(Stage(corpus_config(path)))) for path in (folder, archive.parent)]
    assert corpora[0].urls.to_pylist() == corpora[1].urls.to_pylist()
    for k in range(200):
        assert corpora[0].text(k) == corpora[1].text(k)
        assert corpora[0].outlinks([k])[1].tolist() == corpora[1].outlinks([k])[1].tolist()


def test_same_bytes_for_any_number_of_workers(tmp_path: Path, digest: Callable[[Path], str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Damage, a hanging page and duplicates included; many chunks a file."""
    for name in "cab":
        records = [
            response(f"https://{name}{k % 30}.example/", page(f"page {name} {k} " * 50, [f"https://a{k}.example/"])) for k in range(40)
        ]
        records[7] = response("https://x.example/", "page", length=50)
        data = members(records)
        write(tmp_path / "web" / f"{name}.warc.gz", data[:-40])
    monkeypatch.setattr(module, "CHUNK_BYTES", 3500)
    assert len(list(open_warc(tmp_path / "web").chunks)) > 5
    digests = []
    for workers in (1, 3):
        out = tmp_path / f"workers{workers}"
        out.mkdir()
        result = run(corpus_config(tmp_path / "web"), {}, out, Execution(workers=workers, report=lambda line: None))
        digests.append(digest(out))
    monkeypatch.setattr(module, "WHOLE_FROM_FILES", 3)
    assert len(list(open_warc(tmp_path / "web").chunks)) == 3
    out = tmp_path / "whole"
    out.mkdir()
    result = run(corpus_config(tmp_path / "web"), {}, out, Execution(workers=1, report=lambda line: None))
    digests.append(digest(out))
    assert len(set(digests)) == 1
    assert result.counts["pages"][0] == 90
    assert result.notes["rejects_by_reason"] == {"cut_off": 3, "duplicate_url": 24, "misframed": 3}
    rejects = pq.read_table(out / "rejects.parquet").to_pylist()
    cut = sorted((one["source"], one["reason"]) for one in rejects if one["reason"] != "duplicate_url")
    assert cut == sorted((f"{name}.warc.gz", reason) for name in "abc" for reason in ("cut_off", "misframed"))


def test_the_first_or_the_last_capture_of_a_url(tmp_path: Path, build: Build) -> None:
    """In the order of files by path, then of records."""
    write(tmp_path / "web" / "b.warc", response("https://one.example/", page("third")) + response("https://two.example/", page("two")))
    write(tmp_path / "web" / "a.warc.gz", members([response("https://one.example/", page(text)) for text in ("first", "second")]))
    for rule, text in (("first", "first"), ("last", "third")):
        corpus = Corpus(build(Stage(corpus_config(tmp_path / "web", duplicates=rule, heldout_fraction=0.0))))
        assert [corpus.text(0), corpus.text(1)] == [text, "two"]
        assert corpus.artifact.manifest["notes"]["rejects_by_reason"] == {"duplicate_url": 2}


@pytest.mark.parametrize(
    ("http_headers", "body", "outcome"),
    [
        ([("Content-Type", "text/html")], "<p>x", "page"),
        ([("content-type", "TEXT/HTML; charset=utf-8")], "<p>x", "page"),
        ([("Content-Type", "application/xhtml+xml")], "<p>x", "page"),
        ([("Content-Type", "text/plain")], "<html>", "not_html"),
        ([("Content-Type", "application/pdf")], "%PDF", "not_html"),
        ([], "<!doctype html><p>x", "page"),
        ([("Content-Type", "")], "\n<html><p>x", "page"),
        ([], "%PDF-1.4", "not_html"),
        ([], "", "not_html"),
    ],
)
def test_what_is_html(tmp_path: Path, http_headers: list[tuple[str, str]], body: str, outcome: str) -> None:
    found = one(tmp_path, response("https://one.example/", body, http_headers=http_headers))
    assert (found.kind if isinstance(found, Skipped) else "page") == outcome


def test_the_archives_word_on_a_body_without_type(tmp_path: Path) -> None:
    identified = [("WARC-Identified-Payload-Type", "text/html")]
    assert isinstance(one(tmp_path, response("https://one.example/", "plain words", http_headers=[], headers=identified)), Page)
    identified = [("WARC-Identified-Payload-Type", "image/png")]
    assert one(tmp_path, response("https://one.example/", "<html>", http_headers=[], headers=identified)) == Skipped("not_html")


@pytest.mark.parametrize(
    ("status", "kind"),
    [("301 Moved", "status_3xx"), ("304 Not Modified", "status_3xx"), ("404 Not Found", "status_4xx"), ("503", "status_5xx"),
     ("206 Partial", "status_2xx")],
)  # fmt: skip
def test_other_status(tmp_path: Path, status: str, kind: str) -> None:
    assert one(tmp_path, response("https://one.example/", page("x"), status=status)) == Skipped(kind)


@pytest.mark.parametrize("kind", ["warcinfo", "request", "metadata", "resource", "revisit", "conversion", "continuation", "novelty"])
def test_other_records_are_skipped_by_kind(tmp_path: Path, kind: str) -> None:
    found = one(tmp_path, record(kind, "https://one.example/", http(page("x").encode())))
    assert found == Skipped("other_type" if kind == "novelty" else kind)


def test_what_is_no_http(tmp_path: Path) -> None:
    assert one(tmp_path, record("response", "dns:one.example", b"20240101 one.example. A 1.2.3.4\n", content_type="text/dns")) == Skipped(
        "not_http"
    )
    assert one(tmp_path, record("response", "gopher://x", b"i welcome")) == Skipped("not_http")


@pytest.mark.parametrize(
    ("headers", "outcome"),
    [
        ([], "page"),
        ([("WARC-Block-Digest", sha1(b"other"))], "bad_digest"),
        ([("WARC-Block-Digest", sha1(b"other")), ("WARC-Payload-Digest", sha1(page("x").encode()))], "bad_digest"),
        ([("WARC-Payload-Digest", sha1(page("x").encode()))], "page"),
        ([("WARC-Payload-Digest", sha1(b"other"))], "bad_digest"),
        ([("WARC-Block-Digest", "blake3:whatever")], "page"),
        ([("WARC-Truncated", "length")], "page"),
        ([("WARC-Truncated", "disconnect")], "truncated"),
        ([("WARC-Truncated", "time")], "truncated"),
    ],
)
def test_digests_and_truncation(tmp_path: Path, headers: list[tuple[str, str]], outcome: str) -> None:
    digest = not any(name.endswith("Digest") for name, _ in headers)
    found = one(tmp_path, response("https://one.example/", page("x"), headers=headers, digest=digest))
    assert (found.reason if isinstance(found, Reject) else "page") == outcome


def test_a_payload_digest_of_any_stage_of_coding(tmp_path: Path) -> None:
    """Writers take it of the body as stored, with its chunks joined, or decoded."""
    text = page("coded").encode()
    packed = gzip.compress(text)
    stored = f"{len(packed):x}\r\n".encode() + packed + b"\r\n0\r\n\r\n"
    coded = [("Content-Type", "text/html"), ("Transfer-Encoding", "chunked"), ("Content-Encoding", "gzip")]
    for digested in (stored, packed, text):
        headers = [("WARC-Payload-Digest", sha1(digested))]
        found = one(tmp_path, response("https://one.example/", stored, http_headers=coded, headers=headers, digest=False))
        assert isinstance(found, Page) and found.text == "coded"
    cut = [("Content-Type", "text/html"), ("Content-Encoding", "gzip")]
    found = one(tmp_path, response("https://one.example/", packed[:-9], http_headers=cut))
    assert isinstance(found, Reject) and found.reason == "bad_encoding"


def test_limits_of_a_page(tmp_path: Path) -> None:
    small = HtmlLimits(page_bytes=200_000)
    coded = [("Content-Type", "text/html"), ("Content-Encoding", "gzip")]
    records = [
        response("https://one.example/", page("x" * 300_000)),  # its record is held, its page too large
        response("https://two.example/", page("x" * 900_000)),  # more than is held of a record
        response("https://three.example/", gzip.compress(b" " * 50_000_000), http_headers=coded),
        response("https://four.example/", b"\0" * 900_000, http_headers=[("Content-Type", "video/mp4")]),
        response("https://five.example/", page("five")),
    ]  # fmt: skip
    pages, rejects, skipped = read(write(tmp_path / "a.warc.gz", members(records)), limits=small)
    assert [one.text for one in pages] == ["five"]
    assert [(one.url, one.reason) for one in rejects] == [(f"https://{n}.example/", "too_large") for n in ("one", "two", "three")]
    assert skipped == {"not_html": 1}


def test_a_page_that_takes_too_long_is_rejected_and_the_rest_is_read(tmp_path: Path) -> None:
    """resiliparse takes quadratic time for nested elements: two seconds here, minutes for 60,000 of them."""
    slow = "".join(f"<div class=c{k}>" for k in range(15_000))
    records = [response(f"https://s{k}.example/", page(f"page {k}") if k != 3 else slow) for k in range(6)]
    pages, rejects, _ = read(write(tmp_path / "a.warc.gz", members(records)), limits=HtmlLimits(page_seconds=0.2))
    assert [one.text for one in pages] == [f"page {k}" for k in (0, 1, 2, 4, 5)]
    assert [(one.source, one.position, one.url, one.reason) for one in rejects] == [
        ("a.warc.gz", len(members(records[:3])), "https://s3.example/", "timeout")
    ]


def test_links_signals_and_places_of_a_page(tmp_path: Path) -> None:
    html = (
        '<html><head><base href="/base/"><meta name="robots" content="noarchive, NOAI"><meta name="tdm-reservation" content="1">'
        '<link rel="canonical" href="https://one.example/main"><meta http-equiv="refresh" content="5; URL=\'later.html\'"></head><body>'
        '<header><a href="/home">Home</a></header><article><p>In the text stands <a href="inside.html">a link of the text</a>, '
        'and <a href="//two.example/x" rel="ugc">one more</a>, long enough to be the main content of this page.</p></article>'
        '<footer><a href="/imprint" rel="nofollow">Imprint</a></footer></body></html>'
    )
    headers = [("Content-Type", "text/html"), ("X-Robots-Tag", "noindex"), ("Content-Signal", "search=yes, ai-train=no")]
    found = one(tmp_path, response("https://one.example/dir/page", html, http_headers=headers))
    assert isinstance(found, Page)
    assert found.base == "/base/"
    assert list(found.links) == ["later.html", "/home", "inside.html", "//two.example/x", "/imprint"]
    assert list(found.anchors) == ["", "Home", "a link of the text", "one more", "Imprint"]
    assert list(found.link_flags) == [
        LinkFlag.REFRESH,
        LinkFlag.BOILERPLATE,
        LinkFlag.BODY,
        LinkFlag.BODY | LinkFlag.NOFOLLOW,
        LinkFlag.BOILERPLATE | LinkFlag.NOFOLLOW,
    ]
    assert found.canonical == "https://one.example/main"
    assert found.signals == 1 | 4 | 16 | 32 | 64


def conversion(url: str, text: str, *, refers: bool = True, language: str = "deu,eng") -> bytes:
    headers = [("WARC-Refers-To", record_id("response" + url))] if refers else []
    headers += [("WARC-Identified-Content-Language", language)]
    return record("conversion", url, text.encode(), headers=headers, content_type="text/plain")


def wat(url: str, links: list[dict[str, str]], *, refers: bool = True, base: str | None = None) -> bytes:
    head = {"Base": base} if base else {}
    described = {"HTTP-Response-Metadata": {"HTML-Metadata": {"Head": head, "Links": links}}}
    block = json.dumps({"Envelope": {"Payload-Metadata": described}}).encode()
    headers = [("WARC-Refers-To", record_id("response" + url))] if refers else []
    return record("metadata", url, block, headers=headers, content_type="application/json")


@pytest.fixture
def crawl(tmp_path: Path) -> Path:
    """Common Crawl's layout: warc, wet and wat folders; a second WARC file without, and a WET file whose WARC file is not there."""
    root = tmp_path / "crawl-data"
    urls = [f"https://s{k}.example/" for k in range(4)]
    pages = [response(url, page(f"html of {url}", ["/from-html"])) for url in urls]
    texts = [conversion(url, f"wet of {url}", refers=bool(k % 2)) for k, url in enumerate(urls) if k != 3]
    links = [
        wat(
            url,
            [{"path": "A@/href", "url": "/from-wat", "text": " of  it ", "rel": "nofollow"}, {"path": "IMG@/src", "url": "x.png"}],
            refers=bool(k % 2),
        )
        for k, url in enumerate(urls)
        if k != 0
    ]
    write(root / "segments" / "1" / "warc" / "CC-00000.warc.gz", members(pages))
    write(root / "segments" / "1" / "wet" / "CC-00000.warc.wet.gz", members(texts))
    write(root / "segments" / "1" / "wat" / "CC-00000.warc.wat.gz", members(links))
    write(root / "segments" / "2" / "warc" / "CC-00000.warc.gz", members([response("https://other.example/", page("other"))]))
    write(root / "segments" / "3" / "wet" / "CC-00001.warc.wet.gz", members([conversion("https://wet.example/", "only wet")]))
    write(
        root / "segments" / "3" / "wat" / "CC-00001.warc.wat.gz",
        members([wat("https://wet.example/", [{"path": "A@/href", "url": "a"}], base="/b/")]),
    )
    return root


@pytest.mark.parametrize(("text", "links"), [("html", "html"), ("wet", "html"), ("html", "wat"), ("wet", "wat")])
def test_wet_texts_and_wat_links(crawl: Path, text: str, links: str) -> None:
    pages, rejects, skipped = read(crawl, text=text, links=links)
    assert not rejects
    urls = [f"https://s{k}.example/" for k in range(4)]
    assert {str(one.url): one.text for one in pages} == {
        **{url: f"wet of {url}" if text == "wet" and k != 3 else f"html of {url}" + "\n\nto /from-html" for k, url in enumerate(urls)},
        "https://other.example/": "other",
        "https://wet.example/": "only wet",
    }
    assert {str(one.url): list(one.links) for one in pages} == {
        **{url: ["/from-wat"] if links == "wat" and k != 0 else ["/from-html"] for k, url in enumerate(urls)},
        "https://other.example/": [],
        "https://wet.example/": ["a"],
    }
    last = pages[-1]
    assert (last.source, last.base, last.language) == ("segments/3/wet/CC-00001.warc.wet.gz", "/b/", "deu")
    assert [one.language for one in pages[:5]] == ["deu", "deu", "deu", None, None]
    if links == "wat":
        assert (list(pages[1].anchors), list(pages[1].link_flags)) == (["of it"], [LinkFlag.NOFOLLOW])
    assert skipped == {"conversion": 3, "metadata": 4}


def test_damage_of_wet_and_wat_files_is_named_once(crawl: Path) -> None:
    path = crawl / "segments" / "1" / "wet" / "CC-00000.warc.wet.gz"
    path.write_bytes(path.read_bytes()[:-30])
    pages, rejects, _ = read(crawl, text="wet")
    assert [(one.source, one.reason) for one in rejects] == [("segments/1/wet/CC-00000.warc.wet.gz", "cut_off")]
    assert [str(one.text).partition(" ")[0] for one in pages[:4]] == ["wet", "wet", "html", "html"]


def test_the_choices_are_part_of_the_config(crawl: Path, build: Build) -> None:
    files = External(name="corpus", path=str(crawl))
    artifacts = [build(Stage(CorpusConfig(source=WarcArchive(files=files, text=text)))) for text in ("html", "wet")]
    assert len({artifact.fingerprint for artifact in artifacts}) == 2
    assert "wet of" in Corpus(artifacts[1]).text(int(Corpus(artifacts[1]).find(["https://s1.example/"])[0]))


def test_wat_links_of_other_records() -> None:
    assert wat_links(b"no json") is None
    assert wat_links(b"[]") is None
    assert wat_links(b'{"Envelope": {"Payload-Metadata": {"HTTP-Request-Metadata": {}}}}') is None
    assert wat_links(b'{"Envelope": {"Payload-Metadata": {"HTTP-Response-Metadata": {"HTML-Metadata": {"Links": [1, {"path": 2}]}}}}}') == (
        None,
        [],
        [],
        [],
    )


@pytest.mark.parametrize(
    ("files", "options", "message"),
    [
        ({}, {}, "holds no .warc or .wet file"),
        ({"a.arc.gz": b""}, {}, "is an ARC file by its name"),
        ({"a.warc": b"filedesc://x"}, {}, "is an ARC file"),
        ({"a.warc": b"<html>"}, {}, "a WARC file begins with"),
        ({"a.wat": b"WARC/1.0\r\n"}, {}, "only WAT files"),
        ({"a.warc": b"WARC/1.0\r\n"}, {"text": "wet"}, "holds no WET file"),
        ({"a.warc": b"WARC/1.0\r\n"}, {"links": "wat"}, "holds no WAT file"),
        ({"a.warc": b"WARC/1.0\r\n", "a.warc.gz": b"WARC/1.0\r\n"}, {}, "are both the WARC file of a"),
    ],
)
def test_refusals(tmp_path: Path, files: dict[str, bytes], options: dict[str, Any], message: str) -> None:
    (tmp_path / "web").mkdir()
    for name, data in files.items():
        write(tmp_path / "web" / name, data)
    with pytest.raises(InputError, match=message):
        open_warc(tmp_path / "web", **options)


def test_an_archive_in_a_crawl(shared: Path, build: Build, tmp_path: Path) -> None:
    """Samples as one folder of WARC files, scored, crawled and selected from."""
    folder = tmp_path / "web"
    folder.mkdir()
    for name in ("bl-govuk.warc.gz", "dolma-sample-0001.warc.gz", "warcio-iana-chunked.warc", "clueweb09-sample.warc.gz"):
        (folder / name).write_bytes((shared / "web_samples" / name).read_bytes())
    web = Stage(corpus_config(folder, heldout_fraction=0.0, dangling_links="outside"))
    scorer = Stage(ScorerConfig(kind="length", source=Length(unit="words")))
    crawled = Stage(CrawlConfig(policy="quality", budget_pages=12, batch_pages=4, seed_count=6), corpus=web, scorer=scorer)
    kept = build(Stage(SelectConfig(pool="crawled", near_duplicates="off"), corpus=web, crawl=crawled))
    corpus = build(web)
    assert corpus.count("pages") == 32 + 13 + 1 + 100
    assert corpus.manifest["notes"]["rejects_by_reason"] == {"duplicate_url": 2}
    assert kept.count("kept_pages") + kept.count("dropped_empty") == 12
