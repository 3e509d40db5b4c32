"""Links and character encoding of an HTML page.

    text = decode(data)
    base, links = links_of(text)     -> ("https://example.org/docs/" or None, ["a.html", "https://example.org/b", ...])

A scan for tags by one regular expression, not a DOM: it skips what the standard's tokenizer skips (comments, script, style, title,
text areas) and reads a link that no parser's tree repair can lose. On documentation pages it finds what the DOM has (tests compare
them) about 20 times as fast; resiliparse's element collections take quadratic time to walk (a page with 3,800 links: minutes).
"""

import html
import re

from resiliparse.parse.encoding import bytes_to_str, detect_encoding, map_encoding_to_html5

_BOMS = ((b"\xef\xbb\xbf", "utf-8"), (b"\xfe\xff", "utf-16-be"), (b"\xff\xfe", "utf-16-le"))
_META = re.compile(rb"<meta\b[^>]*?\bcharset\s*=\s*[\"']?\s*([A-Za-z0-9_.:-]+)", re.I)
_META_BYTES = 1024  # HTML standard, 13.2.3.2: the prescan looks at the first 1,024 bytes

# What is skipped ends with its end tag or with the page. Atomic groups: no backtracking, so the time is linear in the page.
_TAG = re.compile(
    r"<!--(?>.*?(?:-->|\Z))"
    r"|<(script|style|title|textarea|xmp|iframe|noembed|noframes)\b(?>.*?(?:</\1\b|\Z))"
    r"|<(a|area|base)(?=[\s/])((?>(?:[^>\"'=]+|=\s*\"[^\"]*\"|=\s*'[^']*'|[=\"'])*))>",
    re.I | re.S,
)
_HREF = re.compile(r"(?:^|[\s/\"'])href\s*=\s*(?:\"([^\"]*)\"|'([^']*)'|([^\s>\"']+))", re.I)


def decode(data: bytes) -> str:
    """The page as text. Encoding: byte order mark, else <meta charset>, else UTF-8 where it is valid, else detected.

    Bytes that the encoding does not have become U+FFFD.
    """
    for mark, encoding in _BOMS:
        if data.startswith(mark):
            return data[len(mark) :].decode(encoding, errors="replace")
    declared = _META.search(data, 0, _META_BYTES)
    if declared:
        encoding = map_encoding_to_html5(declared[1].decode("ascii"), fallback_utf8=False)
        if encoding:
            # HTML standard, 13.2.3.2: a page whose bytes could be read as ASCII to find this is no UTF-16
            return str(bytes_to_str(data, "utf-8" if encoding.startswith("utf-16") else encoding, errors="replace"))
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError:
        return str(bytes_to_str(data, detect_encoding(data), errors="replace"))


def links_of(page: str) -> tuple[str | None, list[str]]:
    """(href of the first <base> that has one, or None; href of every <a> and <area>, in page order, as written)."""
    base: str | None = None
    links: list[str] = []
    for tag in _TAG.finditer(page):
        if not tag[2]:
            continue
        found = _HREF.search(tag[3])
        if not found:
            continue
        href = html.unescape(found[1] or found[2] or found[3] or "").strip()
        if tag[2].lower() != "base":
            links.append(href)
        elif base is None:
            base = href
    return base, links
