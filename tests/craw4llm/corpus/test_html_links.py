import json
import time
from pathlib import Path

import pytest
from resiliparse.parse.html import HTMLTree, NodeType

from craw4llm.corpus.html_links import decode, links_of


@pytest.mark.parametrize(
    ("page", "links"),
    [
        ("<a href=\"a.html\">a</a> <A HREF='b.html'>b</A> <a href=c.html>c</a>", ["a.html", "b.html", "c.html"]),
        ('<area shape=rect href="map.html">', ["map.html"]),
        ('<a\n  class="x"\n  href = "a.html" >', ["a.html"]),
        ('<a href="a?x=1&amp;y=2">', ["a?x=1&y=2"]),
        ('<a name="top"></a><a title="href=no.html">', []),
        ('<a data-href="no.html" href="yes.html">', ["yes.html"]),
        ('<a href="a>b.html">', ["a>b.html"]),
        ('<abbr href="no.html"><article href="no.html"><link href="no.css">', []),
        ('<!-- <a href="no.html"> --><a href="yes.html">', ["yes.html"]),
        ('<!--><a href="yes.html">', ["yes.html"]),
        ("<script>s = '<a href=\"no.html\">';</script><a href=yes.html>", ["yes.html"]),
        ('<style><a href="no.html"></style><textarea><a href="no.html"></textarea>', []),
        ('<img alt="<a href=no.html>"><a href=yes.html>', ["yes.html"]),
        ('<a href="">', [""]),
        ('<a href="one.html" href="two.html">', ["one.html"]),
        ("<a href=unclosed.html", []),
        ('<a href="unclosed.html>rest <a href=x>', []),
    ],
)
def test_links(page: str, links: list[str]) -> None:
    assert links_of(page) == (None, links)


def test_base() -> None:
    assert links_of('<base target=_top><base href="/docs/"><base href="/late/"><a href=x>') == ("/docs/", ["x"])


def test_agrees_with_the_dom(shared: Path) -> None:
    """Hostile and odd pages included: the same links as resiliparse's tree has, in the same order."""
    checked = 0
    for path in sorted((shared / "cases").glob("BL-2[12]/*.html")) + sorted((shared / "web_samples").glob("*.html")):
        page = decode(path.read_bytes())
        document = HTMLTree.parse(page).document
        found = []
        for node in document or ():
            if node.type == NodeType.ELEMENT and node.tag in ("a", "area") and node.getattr("href") is not None:
                found.append(node.getattr("href").strip())
        assert links_of(page)[1] == found, path.name
        checked += 1
    assert checked > 10


@pytest.mark.parametrize(
    "piece", ["<a href='", '<a x="', "<!--", "<script>", "<a '", "<a =\"'", "<a href=", "<a x x ", "<", "<a ", "</script", "<meta "]
)
def test_time_is_linear_in_the_page(piece: str) -> None:
    """Two million characters of what makes careless patterns go quadratic (hours): seconds at most."""
    page = piece * (2_000_000 // len(piece))
    started = time.monotonic()
    links_of(page)
    decode(page.encode())
    assert time.monotonic() - started < 20


def test_encodings(shared: Path) -> None:
    """BL-22, where the page itself says or shows its encoding; the cases that need the HTTP header come with WARC."""
    folder = shared / "cases" / "BL-22"
    checked = 0
    for name, expected in json.loads((folder / "expected.json").read_text()).items():
        if "charset" not in expected["http_content_type"]:
            assert expected["must_contain"] in decode((folder / name).read_bytes()), name
            checked += 1
    assert checked == 6


@pytest.mark.parametrize(
    ("data", "text"),
    [
        (b"\xef\xbb\xbfplain", "plain"),
        (b"<meta charset=latin1>" + "\xfc".encode("latin1"), "<meta charset=latin1>ü"),
        (b"<meta charset=utf-16>" + "ü".encode(), "<meta charset=utf-16>ü"),
        (b"<meta charset=no-such-thing>" + "ü".encode(), "<meta charset=no-such-thing>ü"),
        ("häufig".encode(), "häufig"),
        (b"", ""),
        (b"<meta charset=utf-8>broken \xff", "<meta charset=utf-8>broken �"),
    ],
)
def test_decode(data: bytes, text: str) -> None:
    assert decode(data) == text
