import json
import time
from pathlib import Path

import pytest
from resiliparse.parse.html import HTMLTree, NodeType

from craw4llm.corpus.html_links import decode, header_canonical, header_signals, links_of, place_links, read_markup
from craw4llm.corpus.records import LinkFlag, Signal


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
        ('<!---><a href="yes.html"><!----><a href="too.html"><!-- - -- ><a href="no.html">--->', ["yes.html", "too.html"]),
        ('<SCRIPT src="a>b">"</scripts><a href=no.html>" </ScRiPt x><a href="yes.html">', ["yes.html"]),
        ("<script><!-- <a href=no.html>", []),
        ('<li title="<a href=no>">x</li><span\n><td/><h2><b=\'><a href="yes.html">\'>', ["yes.html"]),
        ('<a href="x&amp;y" class="k">a</a><a class="k" rel="nofollow" href="z">b</a><a HREF="up">', ["x&y", "z", "up"]),
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


@pytest.mark.parametrize(
    ("charset", "data", "text"),
    [
        ("iso-8859-1", b"\xef\xbb\xbf" + "ü".encode(), "ü"),  # a byte order mark is above the header
        ("windows-1251", b"<meta charset=utf-8>" + "я".encode("cp1251"), "<meta charset=utf-8>я"),  # the header above the meta element
        (" 'UTF-8' ", "<meta charset=latin1>ü".encode(), "<meta charset=latin1>ü"),
        ("utf-8", b"<meta charset=latin1>\xfc\xdf", "<meta charset=latin1>üß"),  # but for UTF-8 that is none
        ("utf-8", "<meta charset=latin1>üöäß".encode() + b"\xfc", "<meta charset=latin1>üöäß�"),  # or hardly none
        ("no-such-thing", b"<meta charset=latin1>\xfc", "<meta charset=latin1>ü"),
        ("utf-8", b"broken \xff", "broken �"),
        ("gb2312", "简单".encode("gb18030"), "简单"),
    ],
)
def test_the_charset_of_the_header(charset: str, data: bytes, text: str) -> None:
    assert decode(data, charset) == text


@pytest.mark.parametrize(
    ("content", "target"),
    [
        ("0; url=next.html", "next.html"),
        ("5;URL='a b.html' ", "a b.html"),
        ('0; url="x"y', "x"),
        ("0,next", "next"),
        ("1.5 ; Url = /n?a=1&amp;b=2", "/n?a=1&b=2"),
        ("5", None),
        ("5;", None),
        ("", None),
        ("5; url=", None),
        ("5; url=''", None),
    ],
)
def test_meta_refresh(content: str, target: str | None) -> None:
    quote = "'" if '"' in content else '"'
    markup = read_markup(f"<meta http-equiv=Refresh content={quote}{content}{quote}><a href=x>")
    assert list(zip(markup.links, markup.flags, strict=True))[:-1] == ([(target, LinkFlag.REFRESH)] if target else [])
    assert links_of(f"<meta http-equiv=Refresh content={quote}{content}{quote}><a href=x>") == (None, ["x"])


@pytest.mark.parametrize(
    ("meta", "signals"),
    [
        ('name="robots" content="noindex, nofollow"', Signal.NOINDEX | Signal.NOFOLLOW),
        ("name=ROBOTS content=NONE", Signal.NOINDEX | Signal.NOFOLLOW),
        ('name="robots" content="index, follow, max-snippet:5, noarchive"', Signal.NOARCHIVE),
        ('name="robots" content="noimageai"', Signal.NOAI),
        ('name="googlebot" content="noindex"', 0),
        ('name="description" content="noindex"', 0),
        ('name="tdm-reservation" content="1"', Signal.TDM_RESERVED),
        ('name="tdm-reservation" content="0"', 0),
        ('http-equiv="Content-Usage" content="train-ai=n, search=y"', Signal.NO_TRAIN),
    ],
)
def test_signals_of_meta_elements(meta: str, signals: int) -> None:
    assert read_markup(f"<meta {meta}><p>").signals == signals
    assert read_markup(f"<script><meta {meta}></script><!-- <meta {meta}> -->").signals == 0


@pytest.mark.parametrize(
    ("name", "value", "signals"),
    [
        ("x-robots-tag", "noindex", Signal.NOINDEX),
        ("x-robots-tag", "BadBot: noindex, nofollow", 0),
        ("x-robots-tag", "BadBot: noindex, *: nofollow", Signal.NOFOLLOW),
        ("x-robots-tag", "unavailable_after: 25 Jun 2010 15:00:00 PST, nosnippet", Signal.NOSNIPPET),
        ("content-signal", "search=yes, ai-train=no", Signal.NO_TRAIN),
        ("content-signal", "ai-train=yes", 0),
        ("content-usage", "train-ai=n", Signal.NO_TRAIN),
        ("content-usage", "train-ai=y", 0),
        ("tdm-reservation", "1", Signal.TDM_RESERVED),
        ("robots", "noindex", 0),
    ],
)
def test_signals_of_headers(name: str, value: str, signals: int) -> None:
    assert header_signals([(name, value)]) == signals


def test_canonical_address() -> None:
    assert (
        read_markup('<link rel="alternate" href=a><link REL="x Canonical" href=" b&amp;c "><link rel=canonical href=d>').canonical == "b&c"
    )
    assert read_markup("<link rel=canonical>").canonical is None
    assert header_canonical([("link", "<a>; rel=next"), ("link", '<b>; title="x"; rel="canonical"')]) == "b"
    assert header_canonical([("link", "<a>; rel=notcanonical2")]) is None


@pytest.mark.parametrize(
    ("page", "anchors"),
    [
        ("<a href=x> two\n words </a>", ["two words"]),
        ("<a href=x>a <b>bold</b> one<br>more &amp; more</a>", ["a bold one more & more"]),
        ("<a href=x><img alt=picture></a>", [""]),
        ("<a href=x>first<a href=y>second</a>third</a>", ["first", "second"]),
        ("<a href=x>never closed", [""]),
        ("<a name=x>no link</a><a href=y>link</A>", ["link"]),
        ("<area href=x alt=' a  map '><a href=y><script>no()</script>yes</a>", ["a map", "yes"]),
        (f"<a href=x>{'w ' * 500}</a>", [("w " * 128).strip()]),
        ("<a href=x><span>a</span><!-- <b>no</b> --></a>", ["a"]),
    ],
)
def test_anchors(page: str, anchors: list[str]) -> None:
    assert read_markup(page).anchors == anchors


def test_places_of_links() -> None:
    page = (
        "<nav><a href=1>one</a></nav><header><a href=2>two</a></header><div><a href=3>Home</a></div>"
        "<main><header><a href=4>title</a></header>"
        "<p>text <a href=5>Home town</a> and <a href=6>town</a><aside><a href=7>text</a></aside><a href=8><img></a></p></main>"
        "<a href=9>elsewhere</a><footer><a href=10>text</a></footer><nav><a href=11>x</a><article><a href=12>end</a></article>"
    )
    markup = read_markup(page)
    place_links(markup, "title\n\ntext Home\n town and town. end")
    body, boilerplate = LinkFlag.BODY, LinkFlag.BOILERPLATE
    # 3 is in no <nav>, but "Home" stands in the text (that of link 5): the mistake that this way of looking makes.
    assert markup.flags == [
        boilerplate,
        boilerplate,
        body,
        boilerplate,
        boilerplate,
        body,
        boilerplate,
        0,
        boilerplate,
        boilerplate,
        boilerplate,
        body,
    ]
