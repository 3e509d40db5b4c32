"""What is compiled, against the same in Python: on pieces that meet at random."""

import random
from collections.abc import Iterator

from craw4llm.corpus import html_links
from craw4llm.corpus.html_library import library
from craw4llm.corpus.html_links import read_markup
from craw4llm.corpus.records import LinkFlag

WHITE = [chr(c) for c in range(0x3001) if chr(c).isspace()]
LETTERS = ["a", "Z", "word", "é", "\u017f", "漢", "\u2060", "\u200b", "😀", "\0", "\ud800", "&amp;", "&", "&#x41;", "&nbsp;", "-", "!"]


def texts(pieces: list[str], count: int, most: int) -> Iterator[str]:
    rng = random.Random(0)
    for _ in range(count):
        yield "".join(rng.choice(pieces) for _ in range(rng.randrange(most)))


def test_folding() -> None:
    for text in texts(WHITE + LETTERS + [" ", "\n", "x", "y"] * 8, 5000, 30):
        assert library().fold(text.encode("utf-8", "surrogatepass")) == " ".join(text.split())


def test_attributes() -> None:
    """In tags whose quotes all belong to a value, so that they end where they seem to."""
    values = ["", "=u", "=\xa0'x y'", '="v>w"', "= 'ugc x'", "=nofollow", '="no&#102;ollow"', "='a/b'", '=" q "', "=/", "=漢"]
    names = ["href", "HREF", "rel", "Rel", "alt", "data-href", "hre", "hreff", "x", "\u017f", "\0"]
    attributes = [name + value for name in names for value in values]
    links = nofollow = 0
    for inside in texts(attributes + [*WHITE, " ", "/", "\n "] * 8, 20_000, 12):
        given = html_links._attributes(inside + " ")
        for tag in ("a", "area"):
            markup = read_markup(f"<{tag} {inside} >")
            assert markup.links == ([given["href"].strip()] if "href" in given else []), inside
            if markup.links:
                links += 1
                nofollow += bool(markup.flags[0] & LinkFlag.NOFOLLOW)
                assert bool(markup.flags[0] & LinkFlag.NOFOLLOW) == bool({"nofollow", "ugc"} & set(given.get("rel", "").lower().split()))
                assert markup.anchors == [html_links._folded(given.get("alt", "")) if tag == "area" else ""]
    assert links > 2000 and nofollow > 200


def test_anchors_and_values() -> None:
    tags = [
        "<b>",
        "</b>",
        "<br>",
        "<BR/>",
        "<strong>",
        "<STRIKE x='&'>",
        "<!-- x -->",
        "<!-->",
        "<style>s</style>",
        "<SCRIPT>s</SCRIPT>",
        "<1",
        "< ",
    ]
    for inside in texts(WHITE + LETTERS + tags + [" ", "x", "<i>"] * 9, 20_000, 20):
        assert read_markup(f"<a href=x>{inside}</a>").anchors == [html_links._anchor(inside)], inside
        assert read_markup(f'<a href="{inside}">').links == [html_links._href(inside)], inside
