"""The scan of an HTML page for links, and the folding of a text's white space: over UTF-8, compiled by numba.

    count = scan(page, size, hrefs, anchors, flags, others, most_others)
    size = fold(text, size, folded)

Nobody calls these functions as Python, or imports this module to read pages: `html_object` makes machine code of them, once a machine, and
`html_library` loads that without numba. So they work on plain pointers, allocate nothing and raise nothing. A pointer has no bounds: each
text ends with a byte 0 (which may stand within it too), so that the byte at `size` can be read, and no UTF-8 sequence is cut.
"""

# mypy: disallow-untyped-defs=false, disallow-incomplete-defs=false
# numba types these functions by what they are called with.

import numba
from numba import types

from craw4llm.corpus.html_library import (
    MAX_ANCHOR_CHARS,
    OTHER_ALT,
    OTHER_ANCHOR,
    OTHER_BASE,
    OTHER_FIELDS,
    OTHER_HEAD,
    OTHER_HREF,
    OTHER_LINK,
    OTHER_META,
    OTHER_META_IN_ANCHOR,
    OTHER_REL,
)
from craw4llm.corpus.records import LinkFlag

BYTES, NUMBERS, NUMBER = types.CPointer(types.uint8), types.CPointer(types.int64), types.int64
SIGNATURES = {
    "scan": NUMBER(BYTES, NUMBER, BYTES, BYTES, BYTES, NUMBERS, NUMBER),
    "fold": NUMBER(BYTES, NUMBER, BYTES),
}


def _number(name: str) -> int:
    """A name of at most 8 letters as one number: what `_name` makes of it."""
    return int.from_bytes(name.encode(), "big")


_A, _AREA, _BASE, _LINK, _META = map(_number, ("a", "area", "base", "link", "meta"))
_NAV, _HEADER, _FOOTER, _ASIDE, _MAIN, _ARTICLE = map(_number, ("nav", "header", "footer", "aside", "main", "article"))
# Elements that hold text only: HTML standard, 13.2.6.
_HOLDS_TEXT = tuple(map(_number, ("script", "style", "title", "textarea", "xmp", "iframe", "noembed", "noframes")))
_HREF, _REL, _ALT = map(_number, ("href", "rel", "alt"))
# The first letters of canonical; of robots, refresh, tdm-reservation, content-usage and content-signal.
_CANONICA, _ROBOTS, _REFRESH, _TDM_RESE, _CONTENT_ = map(_number, ("canonica", "robots", "refresh", "tdm-rese", "content-"))

_LINE_END, _BLANK, _EXCLAMATION, _QUOTE, _AND, _APOSTROPHE, _DASH, _SLASH, _LESS, _EQUALS, _GREATER = map(ord, "\n !\"&'-/<=>")
_B, _C, _R, _S, _T, _Y = map(ord, "bcrsty")
_MOST_OF_A_TAG = 4  # rows of `others`: OTHER_ANCHOR of the link before, OTHER_HREF, OTHER_REL, OTHER_ALT
_PLAIN_ANCHOR_BYTES = MAX_ANCHOR_CHARS
_BOILERPLATE = int(LinkFlag.BOILERPLATE)


def scan(page, size, hrefs, anchors, flags, others, most_others):
    """Finds the links of a page (every <a> and <area> with an href), and whatever else says something about them. Returns their number, or
    -1 if `others` has not enough room; the other arrays need `size` bytes.

    hrefs: of each link the value, ended by "\\n". anchors: likewise the inside of the <a>, without tags and its white space folded.
    flags: LinkFlag.BOILERPLATE, if a navigation, header, footer or aside is around the link, else 0.
    others: their number, the bytes of hrefs and of anchors, then a row of OTHER_FIELDS for each: its kind, where it begins and ends, how
        many links are before it. Of the elements meta, base and link that is the tag behind its name, of the attributes rel and alt the
        value. An href or the inside of a link is here if it is not that plain (entities, comments, ...), and "" above.
    Whatever does not end swallows the rest of the page, as in a browser. Time is linear in the page.
    """
    n = m = 0
    href_at = anchor_at = 0
    nav = header = footer = aside = 0  # how many of each are open
    content = 0  # depth of <main> and <article>, whose headers and footers are their own
    anchor = -1  # where the inside of the link that is open begins
    at = 0
    while True:
        while at < size and page[at] != _LESS:
            at += 1
        if at >= size:
            break
        if m + _MOST_OF_A_TAG > most_others:
            return -1
        begin = at
        first = page[at + 1]
        closed = first == _SLASH
        if not closed and not _is_letter(first):
            if first == _EXCLAMATION and page[at + 2] == _DASH and page[at + 3] == _DASH:
                at = _comment_end(page, at + 2, size)  # "<!-->" is a whole comment
                if at < 0:
                    break
            else:
                at += 1
            continue
        tag, behind = _name(page, at + 2 if closed else at + 1, size, _GREATER)
        end = 0
        if closed:
            at = at + 2
            if behind >= size:
                continue
        else:
            end = _tag_end(page, behind, size)
            if end < 0:
                break
            at = end + 1

        if tag == _A or (tag == _AREA and not closed):
            if anchor >= 0:  # a link within a link ends it: HTML standard, 13.2.6.4.7
                anchor_at, plain = _write_anchor(page, anchor, begin, anchors, anchor_at)
                if not plain:
                    m = _note(others, m, OTHER_ANCHOR, anchor, begin, n - 1)
                anchor = -1
            if closed:
                continue
            href = rel = alt = False
            value = behind
            while True:
                name, value, value_end, behind = _attribute(page, behind, end)
                if name == 0:
                    break
                if name == _HREF and not href:
                    href = True
                    href_at, plain = _write_href(page, value, value_end, hrefs, href_at)
                    if not plain:
                        m = _note(others, m, OTHER_HREF, value, value_end, n)
                elif name == _REL and not rel:
                    rel = True
                    m = _note(others, m, OTHER_REL, value, value_end, n)
                elif name == _ALT and not alt and tag == _AREA:
                    alt = True
                    m = _note(others, m, OTHER_ALT, value, value_end, n)
            if not href:
                m -= rel + alt
                continue
            flags[n] = _BOILERPLATE if nav + header + footer + aside > 0 else 0
            n += 1
            if tag == _A:
                anchor = at
            else:
                anchor_at = _ended(anchors, anchor_at)
        elif tag == _NAV:
            nav = max(0, nav - 1) if closed else nav + 1
        elif tag == _ASIDE:
            aside = max(0, aside - 1) if closed else aside + 1
        elif tag == _HEADER:
            header = max(0, header - 1) if closed else header + (content == 0)
        elif tag == _FOOTER:
            footer = max(0, footer - 1) if closed else footer + (content == 0)
        elif tag in (_MAIN, _ARTICLE):
            if closed:
                content = max(0, content - 1)
            else:
                content += 1
                nav = header = footer = aside = 0  # neither stands within a navigation; one that is open was not closed
        elif closed:
            pass
        elif tag in _HOLDS_TEXT:
            at = _end_tag(page, at, size, tag)
            if at < 0:
                break
        elif tag == _BASE:
            m = _note(others, m, OTHER_BASE, behind, end, n)
        elif tag in (_META, _LINK) and _is_read(page, behind, end, tag):
            kind = OTHER_LINK
            if tag == _META:
                kind = OTHER_META if anchor < 0 else OTHER_META_IN_ANCHOR
            m = _note(others, m, kind, behind, end, n)
    if anchor >= 0:  # never closed
        anchor_at = _ended(anchors, anchor_at)
    others[0] = m
    others[1] = href_at
    others[2] = anchor_at
    return n


def fold(text, size, folded):
    """Writes a text with a blank for any run of white space, and none at its ends; returns the bytes written, at most `size`."""
    n = at = 0
    gap = True
    while at < size:  # without a branch for each end of a word: half the time
        c = text[at]
        width = 1
        white = (c >= 0x1C) & (c <= 0x20) | (c >= 0x09) & (c <= 0x0D)
        if c >= 0xC2:
            found = _white(text, at)
            white = found > 0
            width = max(1, found)
        folded[n] = _BLANK if white else c
        n += 1 - (white & gap)
        gap = white
        at += width
    return n - (gap and n > 0)


@numba.njit
def _white(text, at):
    """How many bytes the character at `at` takes if it is white space (`str.isspace`), else 0."""
    c = text[at]
    if 0x20 < c < 0x80:  # most
        return 0
    if c <= 0x20:
        return 1 if c == 0x20 or 0x09 <= c <= 0x0D or 0x1C <= c <= 0x1F else 0
    if c == 0xC2:  # U+0085, U+00A0
        return 2 if text[at + 1] == 0x85 or text[at + 1] == 0xA0 else 0
    if c == 0xE1:  # U+1680
        return 3 if text[at + 1] == 0x9A and text[at + 2] == 0x80 else 0
    if c == 0xE2:  # U+2000 to U+200A, U+2028, U+2029, U+202F; U+205F
        d = text[at + 2]
        if text[at + 1] == 0x80:
            return 3 if d <= 0x8A or d == 0xA8 or d == 0xA9 or d == 0xAF else 0
        return 3 if text[at + 1] == 0x81 and d == 0x9F else 0
    if c == 0xE3:  # U+3000
        return 3 if text[at + 1] == 0x80 and text[at + 2] == 0x80 else 0
    return 0


@numba.njit
def _is_letter(c):
    return 97 <= c | 0x20 <= 122


@numba.njit
def _behind_white(text, at, end):
    while at < end:
        width = _white(text, at)
        if not width:
            break
        at += width
    return at


@numba.njit
def _name(page, at, end, stop):
    """The name that begins at `at`, as a number (0: longer than 8 letters), and where it ends: at white space, "/" or `stop`."""
    begin = at
    name = 0
    while at < end:
        c = page[at]
        if c in (_SLASH, stop) or _white(page, at):
            break
        name = name << 8 | c | 0x20  # lower case; no other character becomes a letter
        at += 1
    return name if at - begin <= 8 else 0, at


@numba.njit
def _tag_end(page, at, size):
    """Where the ">" of a tag stands, `at` being behind its name; -1 if it never ends. Quotes count behind "=" alone."""
    while at < size:
        c = page[at]
        if c == _GREATER:
            return at
        at += 1
        if c == _EQUALS:
            at = _behind_white(page, at, size)
            quote = page[at]
            if at < size and quote in (_QUOTE, _APOSTROPHE):
                at += 1
                while at < size and page[at] != quote:
                    at += 1
                at += 1
    return -1


@numba.njit
def _attribute(page, at, end):
    """(name as a number, where the value begins and ends, where to go on) of the next attribute of the tag that ends at `end`.

    The name is 0 where there is none, and 1 where it is longer than any of interest.
    """
    while at < end:
        width = _white(page, at)
        if width:
            at += width
        elif page[at] == _SLASH or page[at] == _EQUALS:
            at += 1
        else:
            break
    begin = at
    name, at = _name(page, at, end, _EQUALS)
    if at - begin > 4:
        name = 1
    value = _behind_white(page, at, end)
    if value >= end or page[value] != _EQUALS:
        return name, at, at, at
    value = _behind_white(page, value + 1, end)
    quote = page[value]
    if quote in (_QUOTE, _APOSTROPHE):
        at = value + 1
        while at < end and page[at] != quote:
            at += 1
        if at < end:
            return name, value + 1, at, at + 1
    at = value
    while at < end and page[at] != _GREATER and not _white(page, at):
        at += 1
    return name, value, at, at


@numba.njit
def _is_read(page, at, end, tag):
    """Whether a <meta> or <link> may say something of interest: whether one of these words stands in it, or an entity, which may be any."""
    last = 0  # eight bytes, in lower case
    while at < end:
        c = page[at]
        last = last << 8 | c | 0x20
        if c == _AND:
            return True
        if tag == _LINK:
            if last == _CANONICA:
                return True
        elif last in (_TDM_RESE, _CONTENT_) or last & 0xFFFFFFFFFFFFFF == _REFRESH or last & 0xFFFFFFFFFFFF == _ROBOTS:
            return True
        at += 1
    return False


@numba.njit
def _comment_end(page, at, size):
    while at + 2 < size:
        if page[at + 2] == _GREATER and page[at] == _DASH and page[at + 1] == _DASH:
            return at + 3
        at += 1
    return -1


@numba.njit
def _end_tag(page, at, size, tag):
    """Behind the name of the next end tag of this name; -1 if there is none."""
    while at < size:
        if page[at] == _LESS and page[at + 1] == _SLASH:
            name, behind = _name(page, at + 2, size, _GREATER)
            if name == tag and behind < size:
                return behind
        at += 1
    return -1


@numba.njit
def _ended(lines, at):
    """Ends a line; returns where the next one begins."""
    lines[at] = _LINE_END
    return at + 1


@numba.njit
def _write_href(page, begin, end, hrefs, at):
    """Writes the value without white space at its ends, and "\\n"; (where to go on, whether it was plain)."""
    while begin < end and (page[begin] == _BLANK or page[begin] == _LINE_END):
        begin += 1
    while begin < end and (page[end - 1] == _BLANK or page[end - 1] == _LINE_END):
        end -= 1
    start = at
    plain = begin == end or (_BLANK < page[begin] < 0x80 and _BLANK < page[end - 1] < 0x80)  # other white space
    for k in range(begin, end):
        c = page[k]
        if c in (_AND, _LINE_END):
            plain = False
        hrefs[at] = c
        at += 1
    return _ended(hrefs, at if plain else start), plain


@numba.njit
def _write_anchor(page, begin, end, anchors, at):
    """Writes the text of a link's inside, and "\\n"; (where to go on, whether it was plain)."""
    start = at
    plain = end - begin <= _PLAIN_ANCHOR_BYTES
    gap = False
    while plain and begin < end:
        c = page[begin]
        width = _white(page, begin)
        if width:
            begin += width
            gap = at > start
        elif c == _LESS and _begins_tag(page[begin + 1]):
            plain = _is_plain_tag(page, begin)
            begin += 1
            while begin < end and page[begin] != _GREATER:
                if page[begin] == _LESS:
                    plain = False
                begin += 1
            if begin == end:
                plain = False
            begin += 1
        else:
            if c == _AND:
                plain = False
            if gap:
                anchors[at] = _BLANK
                at += 1
                gap = False
            anchors[at] = c
            at += 1
            begin += 1
    return _ended(anchors, at if plain else start), plain


@numba.njit
def _begins_tag(c):
    """Whether this may follow the "<" of a tag. Of other letters than ASCII Python is asked."""
    return c in (_SLASH, _EXCLAMATION) or _is_letter(c) or c >= 0x80


@numba.njit
def _is_plain_tag(page, at):
    """Whether a tag within a link is left out, and no more than it: not so of comments, scripts and styles. <br> becomes a blank."""
    first, second, third = page[at + 1], page[at + 2] | 0x20, page[at + 3] | 0x20
    if first == _EXCLAMATION or first >= 0x80:
        return False
    if first | 0x20 == _S:
        return not (second == _C or (second == _T and third == _Y))
    return not (first | 0x20 == _B and second == _R)


@numba.njit
def _note(others, m, kind, begin, end, links):
    """Writes a row of `others`; returns the number of rows."""
    row = OTHER_HEAD + OTHER_FIELDS * m
    others[row] = kind
    others[row + 1] = begin
    others[row + 2] = end
    others[row + 3] = links
    return m + 1
