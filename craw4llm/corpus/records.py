"""What a source gives to the build: chunks of records, each a page or a reject with its reason.

    Source(chunks=[chunk, chunk, ...], records=30145, origin="docweb.parquet")
    chunk.read() -> Page(source, position, url, text, links), Reject(source, position, url, reason), Skipped(kind), ...

A chunk can be sent to another process (it pickles) and is read there; the records come in the source's order.
"""

import dataclasses
import enum
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol

from craw4llm.dataclass import dataclass

# Why a record is no page of the corpus. Every reject has one of these.
REASONS: Mapping[str, str] = {
    "no_url": "the URL is null or empty",
    "bad_url": "the URL cannot be parsed, or is not http or https",
    "duplicate_url": "a record before it has the same canonical URL",
    "text_not_string": "the text is neither a string nor null",
    "invalid_unicode": "the text or the URL is no valid Unicode (broken UTF-8, a lone surrogate)",
    "links_misaligned": "anchors or link_flags has not one entry for each link",
    "bad_field": "a field has a type that it cannot have",
    "not_json": "the line is no JSON object",
    "cut_off": "the file ends within the record",
    "damaged": "the file cannot be read from here on",
    "too_large": "the file or record is larger than a page may be",
    "wrong_id": "another document's id stands in the record, or none",
    "unparsable": "the HTML parser or the text extraction failed",
    "unreadable": "the file cannot be read",
    "misframed": "the record's stated length does not lead to its end",
    "bad_digest": "the record has not the digest that it states",
    "truncated": "the crawler kept only the beginning of the page (WARC-Truncated, other than by length)",
    "bad_encoding": "the HTTP body is not in the transfer or content coding that its header names",
    "timeout": "reading the page took more processor time than a page may",
    "out_of_memory": "reading the page took more memory than a page may",
    "crashed": "reading the page ended the process that did it",
}


class LinkFlag(enum.IntFlag):
    """What a source says of a link (bits of uint8). Neither BODY nor BOILERPLATE: it says nothing of the link's place."""

    BODY = 1  # in the page's main text
    BOILERPLATE = 2  # in a header, a footer or the navigation
    NOFOLLOW = 4  # rel=nofollow, ugc or sponsored
    REFRESH = 8  # a meta refresh


class Signal(enum.IntFlag):
    """What a page's owner asks for, in its HTTP header or in its meta elements (bits of uint16)."""

    NOINDEX = 1
    NOFOLLOW = 2
    NOARCHIVE = 4
    NOSNIPPET = 8
    NOAI = 16  # robots: noai, noimageai
    TDM_RESERVED = 32  # tdm-reservation: 1
    NO_TRAIN = 64  # Content-Usage / Content-Signal: train-ai=n, ai-train=no


@dataclasses.dataclass(frozen=True, slots=True)
class Page:
    """One record as its source has it; nothing is checked yet.

    source: file or package. position: record or row in the source, from 0. text: null is an empty text.
    links: URLs as written, resolved against `base`, or against the page's URL where `base` is None.
    anchors, link_flags: one per link (anchor text, LinkFlag bits), or empty where the source has none.
    canonical: the page's rel=canonical URL as written. signals: Signal bits. doc_id, language, score: the source's own, where it has them.
    resolved: the links are canonical URLs (by `UrlRules()`) already, or None.
    """

    source: str
    position: int
    url: object
    text: object
    links: Sequence[object] = ()
    base: str | None = None
    anchors: Sequence[str | None] = ()
    link_flags: Sequence[int] = ()
    canonical: str | None = None
    signals: int = 0
    doc_id: str | None = None
    language: str | None = None
    score: float | None = None
    resolved: bool = False


@dataclasses.dataclass(frozen=True, slots=True)
class Reject:
    """A record that is no page. reason: a key of REASONS."""

    source: str
    position: int
    url: str
    reason: str


@dataclasses.dataclass(frozen=True, slots=True)
class Skipped:
    """Records that are neither page nor reject: what they are is no page in this source (a WARC request, an image)."""

    kind: str
    records: int = 1


class Chunk(Protocol):
    """Some records of a source: says what to read and holds none of it, so that a million chunks can be listed and sent about.

    label: names the chunk in an error and in the record of a finished part, so equal for equal content and different from every other's.
    records: how many it holds; None: not known before it is read.
    """

    @property
    def label(self) -> str: ...

    @property
    def records(self) -> int | None: ...

    def read(self) -> Iterator[Page | Reject | Skipped]: ...


class ReadAgain(Exception):
    """Raised by a chunk's `read` that finds too late that what it gave may be wrong (a checksum at the end). The part that reads it drops
    what it has, and begins again with `chunk`, of the same label, in its place."""

    def __init__(self, chunk: Chunk) -> None:
        super().__init__(chunk)
        self.chunk = chunk


@dataclass(frozen=True, kw_only=True)
class Source:
    """An opened source.

    chunks: can be iterated more than once, each time the same. records: how many records there are in all, None where nobody knows
        before they are read; a number is checked against what was read. origin: a sentence on where the pages come from.
    isolated: its chunks run code that can take its process down (HTML extraction), so they always run in a child process.
    list_ahead: finds the chunks with so many processes, where finding them takes long; iterating over `chunks` does it alone.
    part_records: about how many records make a part: what one worker does at a time, and what an interruption can cost.
    """

    chunks: Iterable[Chunk]
    records: int | None
    origin: str
    isolated: bool = False
    list_ahead: Callable[[int], None] | None = None
    part_records: int = 4096
    notes: Mapping[str, Any] = dataclasses.field(default_factory=dict)
