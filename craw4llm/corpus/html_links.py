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

_OPENING = re.compile(r"<(?:!--|([A-Za-z][^\s/>]*+))")
_RAW_TEXT = "script style title textarea xmp iframe noembed noframes"  # elements that hold text only: HTML standard, 13.2.6
_RAW_END = {name: re.compile(rf"</{name}(?=[\s/>])", re.I) for name in _RAW_TEXT.split()}
# Possessive, so that a tag which never ends is read once.
_REST_OF_TAG = re.compile(r"(?:[^>=]++|=\s*+(?:\"[^\"]*+\"|'[^']*+'|(?![\"'])))*+>")
_ATTRIBUTE = re.compile(r"([^\s/=]+)(?:\s*=\s*(?:\"([^\"]*)\"|'([^']*)'|([^\s>]*)))?")


def decode(data: bytes) -> str:
    """The page as text. Encoding: byte order mark, else <meta charset>, else UTF-8 where it is valid, else detected.

    Bytes that the encoding does not have become U+FFFD.
    """
    for mark, encoding in _BOMS:
        if data.startswith(mark):
            return data[len(mark) :].decode(encoding, errors="replace")
    declared = _META.search(data, 0, _META_BYTES)
    if declared:
        named = map_encoding_to_html5(declared[1].decode("ascii"), fallback_utf8=False)
        if named:
            # HTML standard, 13.2.3.2: a page whose bytes could be read as ASCII to find this is no UTF-16
            return data.decode("utf-8" if named.startswith("utf-16") else named, errors="replace")
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError:
        return str(bytes_to_str(data, detect_encoding(data) or "cp1252", errors="replace"))


def links_of(page: str) -> tuple[str | None, list[str]]:
    """(href of the first <base> that has one, or None; href of every <a> and <area>, in page order, as written)."""
    base: str | None = None
    links: list[str] = []
    at = 0
    while opening := _OPENING.search(page, at):
        # Whatever does not end swallows the rest of the page, as in a browser; so the time is linear in the page.
        if not opening[1]:
            at = page.find("-->", opening.start() + 2) + 3  # "<!-->" is a whole comment
            if at < 3:
                break
            continue
        rest = _REST_OF_TAG.match(page, opening.end())
        if not rest:
            break
        at = rest.end()
        tag = opening[1].lower()
        if tag in _RAW_END:
            end = _RAW_END[tag].search(page, at)
            if not end:
                break
            at = end.end()
        elif tag in ("a", "area", "base"):
            href = _href(rest[0][:-1])
            if href is None:
                continue
            if tag != "base":
                links.append(href)
            elif base is None:
                base = href
    return base, links


def _href(attributes: str) -> str | None:
    for attribute in _ATTRIBUTE.finditer(attributes):
        if attribute[1].lower() == "href":
            return html.unescape(attribute[2] or attribute[3] or attribute[4] or "").strip()
    return None
