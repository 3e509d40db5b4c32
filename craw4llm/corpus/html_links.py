"""Links, wishes of the owner and character encoding of an HTML page.

    page = decode(data, "iso-8859-2")   the charset of the HTTP header, where there was one
    markup = read_markup(page)          -> Markup(base="https://example.org/docs/" or None, links=["a.html", ...], anchors, flags, ...)
    place_links(markup, text)           -> sets LinkFlag.BODY or BOILERPLATE of each link, text being the page's main text

A scan for tags (craw4llm.corpus.html_scan, compiled), not a DOM: it skips what the standard's tokenizer skips (comments, script, style,
title, text areas) and reads a link that no parser's tree repair can lose. On documentation pages it finds what the DOM has (tests compare
them); resiliparse's element collections take quadratic time to walk (a page with 3,800 links: minutes).
"""

import dataclasses
import html
import re
from collections.abc import Callable
from typing import Any

from resiliparse.parse.encoding import bytes_to_str, detect_encoding, map_encoding_to_html5

from craw4llm.corpus.html_library import (
    MAX_ANCHOR_CHARS,
    OTHER_ALT,
    OTHER_ANCHOR,
    OTHER_BASE,
    OTHER_FIELDS,
    OTHER_HREF,
    OTHER_LINK,
    OTHER_META,
    OTHER_REL,
    library,
)
from craw4llm.corpus.records import LinkFlag, Signal

_BOMS = ((b"\xef\xbb\xbf", "utf-8"), (b"\xfe\xff", "utf-16-be"), (b"\xff\xfe", "utf-16-le"))
_META = re.compile(rb"<meta\b[^>]*?\bcharset\s*=\s*[\"']?\s*([A-Za-z0-9_.:-]+)", re.I)
_META_BYTES = 1024  # HTML standard, 13.2.3.2: the prescan looks at the first 1,024 bytes

_ATTRIBUTE = re.compile(r"([^\s/=]+)(?:\s*=\s*(?:\"([^\"]*)\"|'([^']*)'|([^\s>]*)))?")
_TAG_IN_ANCHOR = re.compile(r"<!--.*?-->|<(script|style)\b.*?</\1[^>]*>|<[A-Za-z/!][^>]*>", re.I | re.S)

_REFRESH = re.compile(
    r"\s*+[\d.]*+\s*+[;,]?+\s*+(?:url\s*+=\s*+)?+(?:\"([^\"]+)|'([^']+)|([^\s\"'].*))", re.I | re.S
)  # HTML standard, 4.2.5.3

_ROBOTS = {
    "noindex": Signal.NOINDEX,
    "nofollow": Signal.NOFOLLOW,
    "none": Signal.NOINDEX | Signal.NOFOLLOW,
    "noarchive": Signal.NOARCHIVE,
    "nosnippet": Signal.NOSNIPPET,
    "noai": Signal.NOAI,
    "noimageai": Signal.NOAI,
}
_ROBOTS_WITH_VALUE = frozenset(("unavailable_after", "max-snippet", "max-image-preview", "max-video-preview"))
_NO_TRAINING = re.compile(r"(?:^|[\s,;])(?:ai-train|train-ai|train-genai)\s*=\s*(?:n|no)(?:$|[\s,;])", re.I)
_BODY, _BOILERPLATE, _NOFOLLOW, _REFRESHED = (
    int(flag) for flag in (LinkFlag.BODY, LinkFlag.BOILERPLATE, LinkFlag.NOFOLLOW, LinkFlag.REFRESH)
)
_MAX_KNOWN, _MAX_KNOWN_CHARS = 1 << 14, 256
_NO_FOLLOWING = frozenset(("nofollow", "ugc", "sponsored"))
_UNFLAGGED_REACH = 20_000  # an anchor is looked for in so many characters of the main text, behind the one before


@dataclasses.dataclass(slots=True)
class Markup:
    """What the tags of a page say. Lists run over the links, in page order.

    base: href of the first <base> that has one. links: href of every <a> and <area>, and the target of every meta refresh, as written.
    anchors: text of the link, white space folded, cut at MAX_ANCHOR_CHARS; "" where it has none. flags: LinkFlag bits.
    canonical: href of the first <link rel=canonical>. signals: Signal bits of the meta elements.
    """

    base: str | None = None
    links: list[str] = dataclasses.field(default_factory=list)
    anchors: list[str] = dataclasses.field(default_factory=list)
    flags: list[int] = dataclasses.field(default_factory=list)
    canonical: str | None = None
    signals: int = 0


def decode(data: bytes, charset: str | None = None) -> str:
    """The page as text. Encoding: byte order mark, else the HTTP header's, else <meta charset>, else UTF-8 where valid, else detected.

    A header that says UTF-8 of bytes that hardly are (servers add it to whatever they send) gives way to the meta element, where there is
    one. Bytes that the encoding does not have become U+FFFD.
    """
    for mark, encoding in _BOMS:
        if data.startswith(mark):
            return data[len(mark) :].decode(encoding, errors="replace")
    named = _encoding(charset) if charset else None
    if named and named != "utf-8":
        return data.decode(named, errors="replace")
    utf8 = _utf8(data)
    if named and utf8 is not None:
        return utf8
    if named and _is_mostly_utf8(data):
        return data.decode("utf-8", errors="replace")
    declared = _META.search(data, 0, _META_BYTES)
    if declared:
        named = _encoding(declared[1].decode("ascii"))
        if named and named.startswith("utf-16"):
            named = "utf-8"  # HTML standard, 13.2.3.2: a page whose bytes could be read as ASCII to find this is no UTF-16
        if named and not (named == "utf-8" and utf8 is not None):
            return data.decode(named, errors="replace")
    if utf8 is not None:
        return utf8
    if named:
        return data.decode(named, errors="replace")
    return str(bytes_to_str(data, detect_encoding(data) or "cp1252", errors="replace"))


def read_markup(page: str) -> Markup:
    """Links, base, canonical address and signals of a page. Time is linear in the page."""
    data = _bytes(page)
    links, anchors, flags, others = library().scan(data)
    found = Markup(None, links, anchors, flags)
    refreshes = 0  # links so far that are none of the scan's
    for kind, begin, end, before in zip(*(others[k::OTHER_FIELDS] for k in range(OTHER_FIELDS)), strict=True):
        text = _text(data[begin:end])
        link = before + refreshes
        if kind == OTHER_HREF:
            links[link] = _HREFS[text]
        elif kind == OTHER_ANCHOR:
            anchors[link] = _ANCHORS[text]
        elif kind == OTHER_REL:
            flags[link] |= _REL_FLAGS[text]
        elif kind == OTHER_ALT:
            anchors[link] = _folded(_value(text))
        elif kind == OTHER_BASE:
            if found.base is None and "href" in (given := _attributes(text)):
                found.base = given["href"].strip()
        elif kind == OTHER_LINK:
            if found.canonical is None and "canonical" in (given := _attributes(text)).get("rel", "").lower().split():
                found.canonical = given.get("href", "").strip() or None
        else:
            target = _meta(_attributes(text), found)
            if target and kind == OTHER_META:  # one within a link is not followed
                links.insert(link, target)
                anchors.insert(link, "")
                flags.insert(link, _REFRESHED)
                refreshes += 1
    return found


def links_of(page: str) -> tuple[str | None, list[str]]:
    """(base, hrefs of every <a> and <area>) of a page, as written."""
    markup = read_markup(page)
    return markup.base, [link for link, flag in zip(markup.links, markup.flags, strict=True) if not flag & _REFRESHED]


def place_links(markup: Markup, text: str) -> None:
    """Says of each link that has a text, and is not in a page's header, footer, navigation or aside, whether it is in the main text.

    It is BODY if its text is found in the main text behind that of the link before, else BOILERPLATE. So a link of the navigation that
    is no <nav> is told from one of the text, and a link without text (an image) has neither flag.
    """
    text = library().fold(_bytes(text))
    flags = markup.flags
    place = 0
    for k, anchor in enumerate(markup.anchors):
        if not anchor or flags[k] & (_BOILERPLATE | _REFRESHED):
            continue
        at = text.find(anchor, place, place + _UNFLAGGED_REACH)
        if at >= 0:
            at = _whole_words(text, anchor, at, place + _UNFLAGGED_REACH)
        if at < 0:
            flags[k] |= _BOILERPLATE
        else:
            flags[k] |= _BODY
            place = at + len(anchor)


def header_signals(headers: list[tuple[str, str]]) -> int:
    """Signal bits of HTTP headers, given as (lower-case name, value)."""
    signals = Signal(0)
    for name, value in headers:
        if name == "x-robots-tag":
            signals |= _robots(value)
        elif name == "tdm-reservation" and value.strip() == "1":
            signals |= Signal.TDM_RESERVED
        elif name in ("content-usage", "content-signal") and _NO_TRAINING.search(value):
            signals |= Signal.NO_TRAIN
    return int(signals)


def header_canonical(headers: list[tuple[str, str]]) -> str | None:
    """The target of `Link: <target>; rel="canonical"` (RFC 8288)."""
    for name, value in headers:
        if name == "link":
            for target, parameters in re.findall(r"<([^>]*)>([^<]*)", value):
                if re.search(r";\s*rel\s*=\s*\"?[^\";,]*\bcanonical\b", parameters, re.I):
                    return str(target).strip() or None
    return None


def _robots(value: str) -> Signal:
    """Directives of a robots meta element or header that are for all robots (`otherbot: noindex` is not)."""
    signals = Signal(0)
    for_all = True
    for part in value.lower().split(","):
        name, colon, rest = part.partition(":")
        if colon and name.strip() not in _ROBOTS_WITH_VALUE:
            for_all = name.strip() == "*"
            part = rest
        if for_all:
            signals |= _ROBOTS.get(part.strip(), Signal(0))
    return signals


def _meta(attributes: dict[str, str], found: Markup) -> str:
    """Adds the signals of a meta element; returns the target of a refresh, "" where it is none."""
    name = (attributes.get("name") or attributes.get("http-equiv") or "").strip().lower()
    content = attributes.get("content", "")
    if name == "robots":
        found.signals |= int(_robots(content))
    elif name == "tdm-reservation" and content.strip() == "1":
        found.signals |= int(Signal.TDM_RESERVED)
    elif name in ("content-usage", "content-signal") and _NO_TRAINING.search(content):
        found.signals |= int(Signal.NO_TRAIN)
    elif attributes.get("http-equiv", "").strip().lower() == "refresh" and (target := _REFRESH.match(content)):
        return (target[1] or target[2] or target[3] or "").strip()
    return ""


def _attributes(tag: str) -> dict[str, str]:
    """Attributes by lower-case name, the first of each, entities resolved."""
    found: dict[str, str] = {}
    for name, *values in reversed(_ATTRIBUTE.findall(tag)):
        found[name.lower()] = _value("".join(values))  # one of them, in double quotes, in single quotes, or without
    return found


def _anchor(inside: str) -> str:
    """The text of a link of which this is the inside."""
    text = inside[: 16 * MAX_ANCHOR_CHARS]
    if "<" in text:
        text = _TAG_IN_ANCHOR.sub(" " if "<br" in text else "", text)
    return _folded(_value(text))


def _href(value: str) -> str:
    return _value(value).strip()


def _rel_flag(value: str) -> int:
    return 0 if _NO_FOLLOWING.isdisjoint(_value(value).lower().split()) else _NOFOLLOW


def _value(text: str) -> str:
    return html.unescape(text) if "&" in text else text


def _folded(text: str) -> str:
    return " ".join(text.split())[:MAX_ANCHOR_CHARS].rstrip()


def _whole_words(text: str, anchor: str, at: int, reach: int) -> int:
    """Where `anchor`, which is found at `at`, stands in `text` up to `reach` not as a part of a longer word; -1: nowhere."""
    while at >= 0:
        end = at + len(anchor)
        if not (at and text[at - 1].isalnum() and anchor[0].isalnum()) and not (
            end < len(text) and text[end].isalnum() and anchor[-1].isalnum()
        ):
            return at
        at = text.find(anchor, at + 1, reach)
    return -1


def _encoding(label: str) -> str | None:
    """Python's name of the encoding that browsers take a label for; None for one that they do not know."""
    return map_encoding_to_html5(label.strip(" \t\"'"), fallback_utf8=False)


class _Known(dict[str, Any]):
    """What pieces of pages become, each worked out once: many stand on every page of a site."""

    def __init__(self, become: Callable[[str], Any]) -> None:
        self._become = become

    def __missing__(self, piece: str) -> Any:
        value = self._become(piece)
        if len(piece) <= _MAX_KNOWN_CHARS:
            if len(self) >= _MAX_KNOWN:
                self.clear()
            self[piece] = value
        return value


_HREFS, _ANCHORS, _REL_FLAGS = _Known(_href), _Known(_anchor), _Known(_rel_flag)


def _bytes(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")


def _text(data: bytes) -> str:
    return data.decode("utf-8", "surrogatepass")


def _utf8(data: bytes) -> str | None:
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError:
        return None


def _is_mostly_utf8(data: bytes) -> bool:
    """Whether at least four of five characters beyond ASCII are UTF-8: a page that was cut, or quotes another encoding, still is."""
    text = data.decode("utf-8", errors="replace")
    return 5 * text.count("\ufffd") <= sum(character > "\x7f" for character in text)
