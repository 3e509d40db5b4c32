import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from craw4llm.artifact import Artifact
from craw4llm.configs import CorpusConfig, HtmlLimits
from craw4llm.corpus.html_tree import FileChunk, list_files, open_web, page_url
from craw4llm.corpus.reader import Corpus
from craw4llm.corpus.records import LinkFlag, Page, Reject, Signal
from craw4llm.corpus.stage import run
from craw4llm.errors import InputError
from craw4llm.execution import Execution
from craw4llm.fingerprint import External
from craw4llm.stage import Stage

WriteTree = Callable[..., Path]
Build = Callable[[Stage], Artifact]


def corpus_of(build: Build, folder: Path, **fields: Any) -> Corpus:
    return Corpus(build(Stage(CorpusConfig(source=External(name="corpus", path=str(folder)), **fields))))


def records_of(folder: Path) -> list[Page | Reject]:
    return [record for chunk in open_web(folder).chunks for record in chunk.read()]


def links(corpus: Corpus, url: str) -> list[str]:
    return [corpus.url(int(target)) for target in corpus.outlinks(corpus.find([url]))[1]]


def body(text: str) -> str:
    return f"<!doctype html><html><head><title>t</title></head><body><main><p>{text}</p></main></body></html>"


def test_pages_and_links_within_and_between_sites(html_tree: WriteTree, build: Build) -> None:
    folder = html_tree(
        {
            "one": {
                "index.html": body('Welcome. <a href="guide/">guide</a> <a href="guide/a.html#s">a</a> <a href="/index.html">me</a>'),
                "guide/index.htm": body('The guide. <a href="a.html">a</a> <a href="../index.html">home</a>'),
                "guide/a.html": '<base href="/other/"><p>Based.</p><a href="x.html">x</a><map><area href="/guide/"></map>',
                "notes.txt": "not a page",
                "page with space.xhtml": body("Odd name."),
            },
            "two": {
                "index.html": body(
                    '<a href="http://one.example/guide/index.html">one</a> <a href="https://one.example/v1.2/guide/a.html">old</a>'
                )
            },
        },
        one={"aliases": ["https://one.example/v*/"]},
    )
    corpus = corpus_of(build, folder)
    assert corpus.urls.to_pylist() == [
        "https://one.example/",
        "https://one.example/guide/",
        "https://one.example/guide/a.html",
        "https://one.example/page%20with%20space.xhtml",
        "https://two.example/",
    ]
    assert links(corpus, "https://one.example/") == ["https://one.example/guide/", "https://one.example/guide/a.html"]
    assert links(corpus, "https://one.example/guide/") == ["https://one.example/", "https://one.example/guide/a.html"]
    assert links(corpus, "https://one.example/guide/a.html") == ["https://one.example/guide/", "https://one.example/other/x.html"]
    assert links(corpus, "https://two.example/") == ["https://one.example/guide/", "https://one.example/guide/a.html"]
    assert corpus.column("source").to_pylist() == ["one-doc"] * 4 + ["two-doc"]
    assert "Welcome" in corpus.text(0)
    notes = corpus.artifact.manifest["notes"]
    assert notes["origin"] == "pages made for a test"
    assert [site["pages"] for site in notes["sites"]] == [4, 1]


def test_cap_is_breadth_first_from_the_index_page(html_tree: WriteTree) -> None:
    pages = {
        "index.html": '<a href="m.html"><a href="z.html">',
        "a.html": "alone",
        "m.html": '<a href="y.html"><a href="index.html">',
        "z.html": '<a href="x.html">',
        "y.html": "",
        "x.html": "",
    }

    def kept(max_pages: int | None) -> list[str]:
        folder = html_tree({"one": pages}, one={"max_pages": max_pages})
        return [str(record.url).rpartition("/")[2] for record in records_of(folder)]

    assert kept(3) == ["", "m.html", "z.html"]
    assert kept(4) == ["", "m.html", "y.html", "z.html"]
    assert kept(6) == kept(None) == ["a.html", "", "m.html", "x.html", "y.html", "z.html"]
    folder = html_tree({"one": pages}, one={"max_pages": 4})
    assert open_web(folder).notes["sites"][0]["left_out_by_max_pages"] == 2


def test_cap_without_an_index_page_goes_by_path(html_tree: WriteTree) -> None:
    folder = html_tree({"one": {"b.html": '<a href="d.html">', "c.html": "", "d.html": ""}}, one={"max_pages": 2})
    assert [str(record.url) for record in records_of(folder)] == ["https://one.example/b.html", "https://one.example/d.html"]


def test_hostile_pages(shared: Path, html_tree: WriteTree, build: Build) -> None:
    """BL-21: whatever a page does, the build ends; what can be read is read."""
    cases = sorted((shared / "cases" / "BL-21").glob("*.html"))
    folder = html_tree({"evil": {path.name: path.read_bytes() for path in cases}})
    corpus = corpus_of(build, folder)
    assert corpus.artifact.count("records") == len(cases) == 8
    assert corpus.artifact.count("rejects") == 0

    def text(name: str) -> str:
        return corpus.text(int(corpus.find([f"https://evil.example/{name}"])[0]))

    for name in ("colspan_bomb.html", "deep_nesting.html", "unclosed_comment.html"):
        assert text(name).startswith("Answer history by treaty"), name
    assert text("empty.html") == text("forbidden.html") == ""
    assert text("one_long_line.html").startswith("wordword")


def test_encodings_reach_the_text(shared: Path, html_tree: WriteTree, build: Build) -> None:
    cases = shared / "cases" / "BL-22"
    expected = json.loads((cases / "expected.json").read_text())
    names = [name for name, case in expected.items() if "charset" not in case["http_content_type"]]
    corpus = corpus_of(build, html_tree({"codes": {name: (cases / name).read_bytes() for name in names}}))
    for name in names:
        page = int(corpus.find([f"https://codes.example/{name}"])[0])
        assert expected[name]["must_contain"] in corpus.text(page), name


def test_rejects(html_tree: WriteTree) -> None:
    """Each reason is for the page that it names; the pages beside it are read."""
    spam = "".join(f"<b>{k}</b>" for k in range(40_000))
    pages = {
        "a.html": "fine",
        "b.html": "x" * 1_000_001,
        "c.html": "<p>" * 20 + spam,
        "d.html": "x" * 1_000_000,
        "e.html": "gone",
        "f.html": "f",
    }
    folder = html_tree({"one": pages})
    (chunk,) = open_web(folder, HtmlLimits(page_bytes=1_000_000, page_seconds=0.01)).chunks
    assert isinstance(chunk, FileChunk)
    (folder / "one" / "e.html").unlink()
    outcome = {str(r.url).rpartition("/")[2]: r.reason if isinstance(r, Reject) else r.text for r in chunk.read()}
    assert outcome["c.html"] == "timeout"
    del outcome["c.html"], outcome["d.html"]
    assert outcome == {"a.html": "fine", "b.html": "too_large", "e.html": "unreadable", "f.html": "f"}


def test_what_the_pages_say_of_their_links(html_tree: WriteTree) -> None:
    """Anchors, places and signals; a meta refresh is no link of a tree."""
    page = (
        '<head><meta name=robots content="noindex"><link rel=canonical href="/main"><meta http-equiv=refresh content="0; url=/next"></head>'
        '<nav><a href="/a.html">Home</a></nav>'
        '<main><p>Some text with <a href="b.html" rel=nofollow>a <i>fine</i> link</a> in it.</p></main>'
    )
    (record,) = records_of(html_tree({"one": {"a.html": page}}))
    assert isinstance(record, Page)
    assert list(record.links) == ["https://one.example/a.html", "https://one.example/b.html"]
    assert list(record.anchors) == ["Home", "a fine link"]
    assert list(record.link_flags) == [LinkFlag.BOILERPLATE, LinkFlag.BODY | LinkFlag.NOFOLLOW]
    assert (record.canonical, record.signals) == ("/main", Signal.NOINDEX)


def test_two_sites_with_one_address(html_tree: WriteTree, build: Build) -> None:
    folder = html_tree(
        {"one": {"a.html": body("first"), "c.html": ""}, "two": {"a.html": body("second")}}, two={"base_url": "https://one.example/"}
    )
    corpus = corpus_of(build, folder)
    assert corpus.artifact.manifest["notes"]["rejects_by_reason"] == {"duplicate_url": 1}
    assert corpus.text(0) == "first"
    assert pq.read_table(corpus.artifact.file("rejects.parquet"))["source"].to_pylist() == ["two-doc"]


def test_links_in_the_file_system_are_not_followed(html_tree: WriteTree, tmp_path: Path) -> None:
    (tmp_path / "secret.html").write_text("secret")
    folder = html_tree({"one": {"a.html": ""}})
    (folder / "one" / "b.html").symlink_to(tmp_path / "secret.html")
    (folder / "one" / "c").symlink_to(tmp_path)
    assert list_files(folder / "one") == ["a.html"]


def test_page_urls() -> None:
    base = "https://one.example/docs/"
    assert page_url(base, "index.html") == base
    assert page_url(base, "a/INDEX.XHTML") == f"{base}a/"
    assert page_url(base, "a/index.en.html") == f"{base}a/index.en.html"
    assert page_url(base, "100%?#.html") == f"{base}100%25%3F%23.html"
    assert page_url(base, "ü.html") == f"{base}%C3%BC.html"
    assert page_url(base, "\udcff.html") == f"{base}%FF.html"


def test_same_bytes_for_any_number_of_workers(html_tree: WriteTree, tmp_path: Path, digest: Callable[[Path], str]) -> None:
    pages = {f"p{k:03d}.html": body(f'Page {k} says something. <a href="p{(k * 7) % 200:03d}.html">') for k in range(200)}
    config = CorpusConfig(source=External(name="corpus", path=str(html_tree({"one": pages}))))
    digests = []
    for workers in (1, 2):
        out = tmp_path / f"workers{workers}"
        out.mkdir()
        run(config, {}, out, Execution(workers=workers, report=lambda line: None))
        digests.append(digest(out))
    assert digests[0] == digests[1]


def test_web_json_of_a_synthetic_web(tmp_path: Path, build: Build) -> None:
    (tmp_path / "web.json").write_text(json.dumps({"kind": "synthetic", "reason": "no apt-get here", "pages": 300, "seed": 5}))
    artifact = build(Stage(CorpusConfig(source=External(name="corpus", path=str(tmp_path)))))
    assert artifact.count("pages") == 300
    assert "synthetic web" in artifact.manifest["notes"]["origin"]
    assert "no apt-get here" in artifact.manifest["notes"]["origin"]


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ("not json", "cannot be read"),
        ([], "is of kind 'list'"),
        ({"kind": "gopher"}, "is of kind 'gopher'"),
        ({"kind": "synthetic", "reason": "x", "pages": "many", "seed": 0}, "pages is 'many'"),
        ({"kind": "html_tree", "origin": "x"}, "sites is None"),
        ({"kind": "html_tree", "origin": "x", "sites": []}, "has no sites"),
        ({"kind": "html_tree", "sites": [{}], "origin": "x"}, r"sites\[0\].folder is None"),
    ],
)
def test_faults_in_web_json_are_named(tmp_path: Path, record: object, message: str) -> None:
    (tmp_path / "web.json").write_text(record if isinstance(record, str) else json.dumps(record))
    with pytest.raises(InputError, match=message) as raised:
        open_web(tmp_path)
    assert "web.json" in str(raised.value)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"folder": "../elsewhere"}, "leads out of"),
        ({"folder": "missing"}, "is no folder"),
        ({"base_url": "https://one.example/docs"}, "ends with /"),
        ({"base_url": "ftp://one.example/"}, "base_url is 'ftp://one.example/'"),
        ({"max_pages": 0}, "max_pages is 0"),
        ({"aliases": "https://x.example/"}, "aliases is"),
        ({"aliases": ["x"]}, "aliases is 'x'"),
    ],
)
def test_faults_of_a_site_are_named(html_tree: WriteTree, change: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        open_web(html_tree({"one": {"a.html": ""}}, one=change))


def test_a_tree_without_pages_is_refused(html_tree: WriteTree) -> None:
    folder = html_tree({"one": {"a.html": ""}})
    shutil.rmtree(folder / "one")
    (folder / "one").mkdir()
    with pytest.raises(InputError, match="hold no file"):
        open_web(folder)
