"""Links, wishes of the owner and character encoding of an HTML page.

    page = decode(data, "iso-8859-2")   the charset of the HTTP header, where there was one
    markup = read_markup(page)          -> Markup(base="https://example.org/docs/" or None, links=["a.html", ...], anchors, flags, ...)
    place_links(markup, text)           -> sets LinkFlag.BODY or BOILERPLATE of each link, text being the page's main text

A scan for tags by one regular expression, not a DOM: it skips what the standard's tokenizer skips (comments, script, style, title,
text areas) and reads a link that no parser's tree repair can lose. On documentation pages it finds what the DOM has (tests compare
them) about 20 times as fast; resiliparse's element collections take quadratic time to walk (a page with 3,800 links: minutes).
"""

import dataclasses
import html
import re
import string

from resiliparse.parse.encoding import bytes_to_str, detect_encoding, map_encoding_to_html5

from craw4llm.corpus.records import LinkFlag, Signal

MAX_ANCHOR_CHARS = 256

_BOMS = ((b"\xef\xbb\xbf", "utf-8"), (b"\xfe\xff", "utf-16-be"), (b"\xff\xfe", "utf-16-le"))
_META = re.compile(rb"<meta\b[^>]*?\bcharset\s*=\s*[\"']?\s*([A-Za-z0-9_.:-]+)", re.I)
_META_BYTES = 1024  # HTML standard, 13.2.3.2: the prescan looks at the first 1,024 bytes

_RAW_TEXT = "script style title textarea xmp iframe noembed noframes"  # elements that hold text only: HTML standard, 13.2.6
_PLACE_NAMES = "nav|header|footer|aside|main|article"
_READ_NAMES = f"a|area|base|link|meta|{_PLACE_NAMES}|{_RAW_TEXT.replace(' ', '|')}"


def _either_case(names: str) -> str:
    """A pattern for names in upper or lower case, by first letter, the longest first."""
    by_letter: dict[str, list[str]] = {}
    for name in sorted(names.split("|"), key=len, reverse=True):
        by_letter.setdefault(name[0], []).append("".join(f"[{letter}{letter.upper()}]" for letter in name[1:]))
    return "|".join(f"[{letter}{letter.upper()}](?:{'|'.join(rest)})" for letter, rest in by_letter.items())


_RAW_END = {name: re.compile(rf"</{_either_case(name)}(?=[\s/>])") for name in _RAW_TEXT.split()}


def _other_letters(names: str) -> str:
    """The letters, in both cases, that none of the names begins with."""
    return "".join(c for c in string.ascii_letters if c.lower() not in {name[0] for name in names.split("|")})


# The inside of a tag behind its name. Possessive, like all of this, so that a tag which never ends is read once.
_INSIDE = r"[^>=]*+(?:=\s*+(?:\"[^\"]*+\"|'[^']*+'|(?![\"']))[^>=]*+)*+"
# The inside of most <a> but for its one href: lower-case attributes in double quotes, none of them rel. (_ATTRIBUTE would read it alike.)
_COMMON = r"(?:\s++(?!(?:href|rel)=)[a-z-]++=\"[^\"]*+\")*+"
# Over text, tags of no interest (whole ones, since "<a href" in a quoted attribute is no tag) and lone "<" to what matters: a comment, the
# end of an element, or a tag with its inside (and what is within a link that none of these stands in). One match for each of these, not one
# for every tag; letters in both cases, not re.I: half the time. What is passed over, the most frequent first: the end of an element and a
# tag that one letter tells, tags by their names, whole scripts, styles and comments, any other. ("<!-->" is a whole comment.)
_CLOSED = _either_case(f"a|{_PLACE_NAMES}")
_OPENED = _either_case(_READ_NAMES)
_USUAL = "li|span|t[rdh]|h[1-6r]|br?|img|i|strong|small|input|label"
_WHOLE = "|".join(
    rf"{_either_case(n)}(?=[\s/>]){_INSIDE}>[^<]*+(?:<(?!/{_either_case(n)}[\s/>])[^<]*+)*+</{_either_case(n)}(?=[\s/>])"
    for n in ("script", "style")
)
_PASSED = (
    rf"(?:[^<]*+<(?:/[{_other_letters(f'a|{_PLACE_NAMES}')}]|[{_other_letters(_READ_NAMES)}][^\s/>]*+{_INSIDE}>|(?:{_USUAL})(?=[\s/>]){_INSIDE}>"
    rf"|!--(?:-?+>|[^-]*+(?:-(?!->)[^-]*+)*+-->)|{_WHOLE}"
    rf"|(?!(?:{_OPENED})[\s/>])[A-Za-z][^\s/>]*+{_INSIDE}>|/(?!(?:{_CLOSED})[\s/>])|(?!!--|/|[A-Za-z])))*+[^<]*+"
)
_NEXT = re.compile(
    rf"{_PASSED}<(?:([aA]){_COMMON}\s++href=\"([^\"]*+)\"{_COMMON}\s*+>(?:({_PASSED})</[aA]>)?"
    rf"|(!--)|/({_CLOSED})(?=[\s/>])|({_OPENED})(?=[\s/>])({_INSIDE})>(?:([^<]*+)</[aA]>)?)"
)
_TEXT_OF_PLAIN, _COMMENT, _END = 3, 4, 5  # groups of _NEXT; those before are of a plain link, those after of any other tag that matters
_ATTRIBUTE = re.compile(r"([^\s/=]+)(?:\s*=\s*(?:\"([^\"]*)\"|'([^']*)'|([^\s>]*)))?")
# What a <meta> or <link> has that is worth its attributes; an entity may stand for any of it.
_READ_META = re.compile("robots|tdm-reservation|content-usage|content-signal|refresh|&", re.I)
_MAYBE_CANONICAL = re.compile("canonical|&", re.I)
_TAG_IN_ANCHOR = re.compile(r"<!--.*?-->|<(script|style)\b.*?</\1[^>]*>|<[A-Za-z/!][^>]*>", re.I | re.S)

_PLACES = frozenset(_PLACE_NAMES.split("|"))
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
_NO_FOLLOWING = frozenset(("nofollow", "ugc", "sponsored"))
_MAX_KNOWN = 1 << 14
_ANCHORS: dict[str, str] = {}  # inside of a link -> its text: most of them stand on every page of a site
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
    found = Markup()
    links, anchors, flags = found.links, found.anchors, found.flags
    match, known = _NEXT.match, _ANCHORS.get
    boilerplate = {"nav": 0, "header": 0, "footer": 0, "aside": 0}  # how many of each are open
    place = 0  # _BOILERPLATE where any is
    content = 0  # depth of <main> and <article>, whose headers and footers are their own
    open_anchor = -1  # where the text of the last link begins
    at = 0
    # Whatever does not end swallows the rest of the page, as in a browser; so the time is linear in the page.
    while token := match(page, at):
        at = token.end()
        kind = token.lastindex or 0
        if kind <= _TEXT_OF_PLAIN:  # most of them
            if open_anchor >= 0:  # a link within a link ends it: HTML standard, 13.2.6.4.7
                anchors[-1] = _anchor(page[open_anchor : token.start(1) - 1])
                open_anchor = -1
            link, text = token.group(2, 3)
            links.append((html.unescape(link) if "&" in link else link).strip())
            flags.append(place)
            if text is not None:
                anchor = known(text)
                anchors.append(_anchor(text) if anchor is None else anchor)
            else:
                anchors.append("")
                open_anchor = at
            continue
        if kind == _COMMENT:
            at = page.find("-->", at - 2) + 3  # "<!-->" is a whole comment
            if at < 3:
                break
            continue
        closed, opened, attributes, text = token.group(5, 6, 7, 8)
        tag = (closed or opened).lower()
        if text is not None and tag != "a":
            at = token.end(7) + 1  # the text is that of a link around this element
        if tag in _PLACES:
            step = -1 if closed else 1
            if tag in ("main", "article"):
                content = max(0, content + step)
                if opened:
                    boilerplate = dict.fromkeys(boilerplate, 0)  # neither stands within a navigation; one that is open was not closed
            elif closed or not content or tag in ("nav", "aside"):
                boilerplate[tag] = max(0, boilerplate[tag] + step)
            place = _BOILERPLATE if any(boilerplate.values()) else 0
        elif tag in ("a", "area"):
            if open_anchor >= 0:
                anchors[-1] = _anchor(page[open_anchor : (token.start(5) - 2 if closed else token.start(6) - 1)])
                open_anchor = -1
            if closed:
                continue
            if "href" not in attributes.lower() or "href" not in (given := _attributes(attributes)):
                continue
            links.append(given["href"].strip())
            followed = "rel" not in given or _NO_FOLLOWING.isdisjoint(given["rel"].lower().split())
            flags.append(place if followed else place | _NOFOLLOW)
            if tag == "area":
                anchors.append(_folded(given.get("alt", "")))
            elif text is not None:
                anchors.append(_anchor(text))
            else:
                anchors.append("")
                open_anchor = at
        elif tag in _RAW_END:
            end = _RAW_END[tag].search(page, at)
            if not end:
                break
            at = end.end()
        elif tag == "meta":
            if _READ_META.search(attributes):
                _meta(_attributes(attributes), found, open_anchor >= 0)
        elif tag == "base":
            if found.base is None and "href" in (given := _attributes(attributes)):
                found.base = given["href"].strip()
        elif (
            found.canonical is None
            and _MAYBE_CANONICAL.search(attributes)
            and "canonical" in (given := _attributes(attributes)).get("rel", "").lower().split()
        ):
            found.canonical = given.get("href", "").strip() or None
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
    text = " ".join(text.split())
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


def _meta(attributes: dict[str, str], found: Markup, in_anchor: bool) -> None:
    name = (attributes.get("name") or attributes.get("http-equiv") or "").strip().lower()
    content = attributes.get("content", "")
    if name == "robots":
        found.signals |= int(_robots(content))
    elif name == "tdm-reservation" and content.strip() == "1":
        found.signals |= int(Signal.TDM_RESERVED)
    elif name in ("content-usage", "content-signal") and _NO_TRAINING.search(content):
        found.signals |= int(Signal.NO_TRAIN)
    elif attributes.get("http-equiv", "").strip().lower() == "refresh" and not in_anchor:
        target = _REFRESH.match(content)
        if target and (url := (target[1] or target[2] or target[3] or "").strip()):
            found.links.append(url)
            found.flags.append(_REFRESHED)
            found.anchors.append("")


def _attributes(tag: str) -> dict[str, str]:
    """Attributes by lower-case name, the first of each, entities resolved."""
    found: dict[str, str] = {}
    for name, *values in reversed(_ATTRIBUTE.findall(tag)):
        value = "".join(values)  # one of them, in double quotes, in single quotes, or without
        found[name.lower()] = html.unescape(value) if "&" in value else value
    return found


def _anchor(inside: str) -> str:
    """The text of a link of which this is the inside."""
    text = inside[: 16 * MAX_ANCHOR_CHARS]
    if "<" in text:
        text = _TAG_IN_ANCHOR.sub(" " if "<br" in text else "", text)
    text = _folded(html.unescape(text) if "&" in text else text)
    if len(inside) <= MAX_ANCHOR_CHARS:
        if len(_ANCHORS) >= _MAX_KNOWN:
            _ANCHORS.clear()
        _ANCHORS[inside] = text
    return text


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


def _utf8(data: bytes) -> str | None:
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError:
        return None


def _is_mostly_utf8(data: bytes) -> bool:
    """Whether at least four of five characters beyond ASCII are UTF-8: a page that was cut, or quotes another encoding, still is."""
    text = data.decode("utf-8", errors="replace")
    return 5 * text.count("\ufffd") <= sum(character > "\x7f" for character in text)
