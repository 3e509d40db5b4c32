"""One HTML page into text, links and signals. What the extraction child reads pages with (craw4llm.corpus.extraction), and imports no more.

    read_page(html bytes, None, 5_000_000)                                                  -> HtmlPage(text, base, links, ...)
    read_page(HTTP body, [("content-type", "text/html; charset=..."), ...], 5_000_000)      likewise, or a reason why it is none

Text: resiliparse, main content (the same for every kind of source).
"""

import dataclasses
import marshal

from resiliparse.extract.html2text import extract_plain_text

from craw4llm.corpus.extraction_http import BodyError, decode_body, looks_like_html
from craw4llm.corpus.html_links import decode, header_canonical, header_signals, place_links, read_markup

Headers = list[tuple[str, str]]
NOT_HTML = "not_html"  # of a body whose type nothing states, and which does not begin as HTML does: no reject


@dataclasses.dataclass(frozen=True, slots=True)
class HtmlPage:
    """One page, read. The fields are those of `craw4llm.corpus.records.Page`."""

    text: str
    base: str | None
    links: list[str]
    anchors: list[str]
    flags: list[int]
    canonical: str | None
    signals: int


Answer = HtmlPage | str  # a page, or the reason why it is none (records.REASONS, or NOT_HTML)


def read_page(data: bytes, headers: Headers | None, page_bytes: int) -> Answer:
    """Reads one page in this process. Depends on the arguments alone."""
    charset = None
    if headers is not None:
        try:
            data = decode_body(headers, data, page_bytes)
        except BodyError as error:
            return str(error.args[0])
        content_type = next((value for name, value in headers if name == "content-type"), "")
        if not content_type.strip() and not looks_like_html(data):
            return NOT_HTML
        charset = content_type.lower().partition("charset=")[2].partition(";")[0] or None
    if len(data) > page_bytes:
        return "too_large"
    try:
        page = decode(data, charset)
        text = extract_plain_text(page, main_content=True).strip()
        markup = read_markup(page)
        place_links(markup, text)
    except MemoryError:
        return "out_of_memory"
    except Exception:  # a library's word on one page, whatever its class; a bug of ours would fail every page and so the stage
        return "unparsable"
    signals = markup.signals | (header_signals(headers) if headers else 0)
    canonical = markup.canonical or (header_canonical(headers) if headers else None)
    return HtmlPage(text, markup.base, markup.links, markup.anchors, markup.flags, canonical, signals)


def packed(answer: Answer) -> bytes:
    """An answer as bytes, for another process; the strings of a list as one, which takes a quarter of the time."""
    if isinstance(answer, str):
        return marshal.dumps(answer)
    lists = [_joined(answer.links), _joined(answer.anchors)]
    return marshal.dumps((answer.text, answer.base, *lists, bytes(answer.flags), answer.canonical, answer.signals))


def unpacked(data: bytes) -> Answer:
    """The answer that was `packed`."""
    answer = marshal.loads(data)
    if isinstance(answer, str):
        return answer
    text, base, links, anchors, flags, canonical, signals = answer
    return HtmlPage(text, base, _parted(links), _parted(anchors), list(flags), canonical, signals)


def _joined(strings: list[str]) -> str | list[str]:
    joined = "\n".join(strings)
    return joined if strings and joined.count("\n") == len(strings) - 1 else strings  # a link may have a line end in it


def _parted(joined: str | list[str]) -> list[str]:
    return joined.split("\n") if isinstance(joined, str) else joined
