"""What a source gives to the build: chunks of records, each a page or a reject with its reason.

    Source(chunks=[chunk, chunk, ...], records=30145, origin="docweb.parquet")
    chunk.read() -> Page(source, position, url, text, links), Reject(source, position, url, reason), ...

A chunk can be sent to another process (it pickles) and is read there; the records come in the source's order.
"""

import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol

# Why a record is no page of the corpus. Every reject has one of these.
REASONS: Mapping[str, str] = {
    "no_url": "the URL is null or empty",
    "bad_url": "the URL cannot be parsed, or is not http or https",
    "duplicate_url": "a record before it has the same canonical URL",
    "text_not_string": "the text is neither a string nor null",
    "invalid_unicode": "the text or the URL is no valid Unicode (broken UTF-8, a lone surrogate)",
    "too_large": "the file is larger than an HTML page may be",
    "unparsable": "the HTML parser or the text extraction failed",
    "unreadable": "the file cannot be read",
}


@dataclasses.dataclass(frozen=True, slots=True)
class Page:
    """One record as its source has it; nothing is checked yet.

    source: file or package. position: record or row in the source, from 0. text: null is an empty text.
    links: URLs as written, resolved against `base`, or against the page's URL where `base` is None.
    """

    source: str
    position: int
    url: object
    text: object
    links: Sequence[object] = ()
    base: str | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class Reject:
    """A record that is no page. reason: a key of REASONS."""

    source: str
    position: int
    url: str
    reason: str


class Chunk(Protocol):
    """Some records of a source. label: names the chunk in an error. records: how many it holds."""

    @property
    def label(self) -> str: ...

    @property
    def records(self) -> int: ...

    def read(self) -> Iterator[Page | Reject]: ...


@dataclasses.dataclass(frozen=True, kw_only=True)
class Source:
    """An opened source.

    records: how many records there are in all. origin: a sentence on where the pages come from.
    isolated: its chunks run code that can take its process down (HTML extraction), so they always run in a child process.
    """

    chunks: Iterable[Chunk]
    records: int
    origin: str
    isolated: bool = False
    notes: Mapping[str, Any] = dataclasses.field(default_factory=dict)
