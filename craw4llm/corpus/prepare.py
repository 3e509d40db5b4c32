"""Records become pages: checked, their URLs and links canonical, their texts cut and compressed, gathered into a sorted run.

    gathered = Gathered(config)
    for record in chunk.read(): gathered.take(record, order)
    gathered.pages, gathered.size_bytes        -> when it is large enough:
    run = gathered.sorted()                    -> tables and frames in the order of URLs (craw4llm.corpus.parts writes them)

A run's link targets are a table of distinct URLs and, for each link, its row there; resolving them to pages is the merge's work.
Several links of a page to one URL are one link. Its flags: in the body if one of them is; nofollow and refresh only if all are. Its
anchor: the first that has text.
"""

import dataclasses
import functools
import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from craw4llm.configs import CorpusConfig
from craw4llm.corpus.records import LinkFlag, Page, Reject, Signal, Skipped
from craw4llm.corpus.urls import AS_WRITTEN, MAX_URL_BYTES, LinkMemory, canonical_url

MAX_ANCHOR_CHARS = 500

PAGES = pa.schema(
    {
        "url": pa.string(),
        "order": pa.int64(),  # number of the record in its part
        "source": pa.string(),
        "position": pa.uint64(),
        "n_chars": pa.uint32(),
        "n_bytes": pa.uint32(),
        "cut": pa.bool_(),
        "first_byte": pa.int64(),  # of the text's frame in the run's text file
        "size": pa.int64(),
        "first_link": pa.int64(),
        "links": pa.int64(),
        "doc_id": pa.string(),
        "language": pa.string(),
        "canonical": pa.string(),
        "signals": pa.uint16(),
        "score": pa.float32(),
    }
)
REJECTS = pa.schema({"order": pa.int64(), "source": pa.string(), "position": pa.uint64(), "url": pa.string(), "reason": pa.string()})

_ZSTD = pa.Codec("zstd")
_BODY, _BOILERPLATE, _NOFOLLOW = (int(flag) for flag in (LinkFlag.BODY, LinkFlag.BOILERPLATE, LinkFlag.NOFOLLOW))  # an enum's own & is slow
_BOTH = int(LinkFlag.NOFOLLOW | LinkFlag.REFRESH)  # a flag of the link only if all of its mentions have it
_CONTROL = dict.fromkeys([*range(32), 127], " ")
# Estimates of what Python's objects take: a page's row, a distinct link URL (in two dictionaries), a link, an anchor beside its text.
_PAGE_BYTES, _URL_BYTES, _LINK_BYTES, _ANCHOR_BYTES = 800, 350, 30, 57


@dataclasses.dataclass(frozen=True)
class Run:
    """pages: PAGES, sorted by (url, order). frames: their texts' zstd frames. urls: string, distinct link targets, ascending.
    links: `url` uint32 (row in urls), and `flags` uint8 and `anchor` string where the source has them. rejects: REJECTS."""

    pages: pa.Table
    frames: list[bytes]
    urls: pa.Array
    links: pa.Table
    rejects: pa.Table


class Gathered:
    """Pages and rejects, in the order in which they are taken."""

    def __init__(self, config: CorpusConfig) -> None:
        self._config = config
        self._rules = AS_WRITTEN if config.url_rules == AS_WRITTEN else config.url_rules  # one object, which is told without comparing
        self._obeyed = 0  # bits of Signal
        for name in config.obey:
            self._obeyed |= int(Signal[name.upper()])
        self._rejects: list[tuple[int, str, int, str, str]] = []
        self._rows: list[tuple[Any, ...]] = []
        self._frames: list[bytes] = []
        self._link_counts: list[int] = []
        self._place = _Numbers()  # of canonical links
        self._memory = LinkMemory(lambda link, base: canonical_url(link, base, self._rules))
        self._index: list[int] = []
        self._flags: list[int] = []  # from the first page that has any: one per link
        self._anchors: list[str | None] = []
        self._text_bytes = 0
        self.skipped: Counter[str] = Counter()
        self.unusable_links = 0
        self.nofollow_links = 0

    @property
    def pages(self) -> int:
        return len(self._rows)

    @property
    def rejects(self) -> int:
        return len(self._rejects)

    @property
    def size_bytes(self) -> int:
        """About what it takes in memory."""
        known = _PAGE_BYTES * (len(self._rows) + len(self._rejects)) + _URL_BYTES * len(self._memory) + _LINK_BYTES * len(self._index)
        return self._text_bytes + known

    def take(self, record: Page | Reject | Skipped, order: int) -> int:
        """Takes a record in. order: number of the record in its part. Returns how many records it stands for."""
        if isinstance(record, Page):
            self._page(record, order)
            return 1
        if isinstance(record, Reject):
            self._reject(order, record.source, record.position, record.url, record.reason)
            return 1
        self.skipped[record.kind] += record.records
        return record.records

    def sorted(self) -> Run:
        """What was taken, in the order of URLs."""
        columns: list[Any] = list(zip(*self._rows, strict=True))
        names = ("url", "order", "source", "position", "n_chars", "n_bytes", "cut", "doc_id", "language", "canonical", "signals", "score")
        columns = columns if self._rows else [()] * len(names)
        table = {name: pa.array(column, PAGES.field(name).type) for name, column in zip(names, columns, strict=True)}
        by_url = pc.sort_indices(table["url"]).to_numpy()  # stable: of one URL, the first record stays first
        frames = [self._frames[k] for k in by_url.tolist()]
        sizes = np.fromiter(map(len, frames), dtype=np.int64, count=len(frames))
        counts = np.array(self._link_counts, dtype=np.int64)
        links, kept = _gathered(counts, by_url)
        table = {name: column.take(by_url) for name, column in table.items()}
        table |= {"first_byte": _starts(sizes), "size": sizes, "first_link": _starts(kept), "links": kept}
        urls = pa.array(self._place, pa.string())
        order = pc.sort_indices(urls).to_numpy()
        row = np.empty(len(order), dtype=np.uint32)
        row[order] = np.arange(len(order), dtype=np.uint32)
        link_columns = {"url": pa.array(row[np.array(self._index, dtype=np.int64)[links]])}
        if self._flags:
            link_columns["flags"] = pa.array(np.array(self._flags, dtype=np.uint8)[links])
        if self._anchors:
            link_columns["anchor"] = pa.array(self._anchors, pa.string()).take(links)
        rejects = list(zip(*self._rejects, strict=True)) or [()] * len(REJECTS)
        return Run(
            pages=pa.table({name: table[name] for name in PAGES.names}, schema=PAGES),
            frames=frames,
            urls=urls.take(order),
            links=pa.table(link_columns),
            rejects=pa.table([pa.array(c, f.type) for c, f in zip(rejects, REJECTS, strict=True)], schema=REJECTS),
        )

    def _page(self, record: Page, order: int) -> None:
        url, text, data, reason = self._checked(record)
        if reason:
            self._reject(order, record.source, record.position, record.url, reason)
            return
        signals = int(record.signals)
        if signals & self._obeyed:
            asked = next(name for name in self._config.obey if signals & Signal[name.upper()])
            self.skipped[f"owner asks {asked}"] += 1
            return
        cut = len(text) > self._config.max_text_chars
        if cut:
            text = text[: self._config.max_text_chars]
            data = text.encode()
        frame = _ZSTD.compress(data, asbytes=True) if data else b""
        self._text_bytes += len(frame)
        self._frames.append(frame)
        self._link_counts.append(self._links(record, url))
        canonical = canonical_url(record.canonical, record.base or url, self._rules) if isinstance(record.canonical, str) else None
        self._rows.append(
            (
                url,
                order,
                record.source,
                record.position,
                len(text),
                len(data),
                cut,
                _text_or_none(record.doc_id),
                _text_or_none(record.language),
                canonical,
                signals,
                record.score,
            )
        )

    def _links(self, record: Page, url: str) -> int:
        """Takes a page's links in. Returns how many there are."""
        config = self._config
        if config.nofollow == "drop" and int(record.signals) & Signal.NOFOLLOW:
            self.nofollow_links += len(record.links)
            return 0
        if record.resolved and self._rules is AS_WRITTEN:
            found: Sequence[Any] = record.links
        else:
            found = self._memory.of(record.links, record.base or url)
        self.unusable_links += found.count(None)
        if not record.anchors and not record.link_flags:
            targets, anchors = dict.fromkeys(found, 0), dict[Any, str | None]()
            targets.pop(None, None)
            targets.pop(url, None)
        else:
            drop = _NOFOLLOW if config.nofollow == "drop" else 0
            targets, anchors, dropped = _distinct(record, found, url, drop)
            if not are_folded(anchors.values()):
                targets, anchors, dropped = _distinct(record, found, url, drop, folded)
            self.nofollow_links += dropped
        if record.link_flags or self._flags:
            self._optional(self._flags, bool(record.link_flags), 0, list(targets.values()))
        if record.anchors or self._anchors:
            self._text_bytes += _ANCHOR_BYTES * len(anchors) + sum(map(len, filter(None, anchors.values())))
            self._optional(self._anchors, bool(record.anchors), None, list(map(anchors.get, targets)))
        self._index += map(self._place.__getitem__, targets)
        return len(targets)

    def _optional(self, column: list[Any], given: bool, missing: Any, values: list[Any]) -> None:
        """Adds a page's values to a column that begins with the first page that has it."""
        if given and values and not column:  # a page whose links are all dropped says nothing, wherever its run ends
            column.extend([missing] * len(self._index))
        column.extend(values if given else [missing] * len(values))

    def _reject(self, order: int, source: str, position: int, url: object, reason: str) -> None:
        self._rejects.append((order, source, position, _printable(url), reason))

    def _checked(self, record: Page) -> tuple[str, str, bytes, str]:
        """(canonical URL, text, its UTF-8, "") of a record, or a reason."""
        if record.url is None or record.url == "":
            return "", "", b"", "no_url"
        if isinstance(record.url, bytes) or isinstance(record.text, bytes):  # a source's mark for undecodable text
            return "", "", b"", "invalid_unicode"
        if not isinstance(record.url, str):
            return "", "", b"", "bad_url"
        if not _is_unicode(record.url):
            return "", "", b"", "invalid_unicode"
        url = canonical_url(record.url, rules=self._rules)
        if url is None:
            return "", "", b"", "bad_url"
        for column in (record.anchors, record.link_flags):
            if column and len(column) != len(record.links):
                return "", "", b"", "links_misaligned"
        if record.text is None:
            return url, "", b"", ""
        if not isinstance(record.text, str):
            return "", "", b"", "text_not_string"
        try:
            return url, record.text, record.text.encode(), ""
        except UnicodeEncodeError:
            return "", "", b"", "invalid_unicode"


class _Numbers(dict[str, int]):
    """Strings -> their numbers, in the order in which they are asked for."""

    def __missing__(self, string: str) -> int:
        number = self[string] = len(self)
        return number


def folded(anchor: str) -> str:
    """An anchor text in one line: control characters and runs of white space are one space, at most MAX_ANCHOR_CHARS characters."""
    if are_folded((anchor,)):
        return anchor
    line = " ".join(anchor[: 8 * MAX_ANCHOR_CHARS].translate(_CONTROL).split())[:MAX_ANCHOR_CHARS]
    return line if _is_unicode(line) else line.encode(errors="replace").decode()


def _distinct(
    record: Page, found: Sequence[Any], url: str, drop: int, fold: Callable[[str], str] | None = None
) -> tuple[dict[Any, int], dict[Any, str | None], int]:
    """(target -> flags, target -> anchor, links dropped) of a page's links; found: where they lead; drop: a flag of those to be dropped."""
    targets: dict[Any, int] = {}
    anchors: dict[Any, str | None] = {}
    dropped = 0
    flags: Iterable[int] = bytes(record.link_flags) or itertools.repeat(0)
    for target, flag, anchor in zip(found, flags, record.anchors or itertools.repeat(None), strict=False):
        if target is None or target == url:
            continue
        if flag & drop:
            dropped += 1
            continue
        if fold and anchor:
            anchor = fold(anchor)
        if target not in targets:
            targets[target], anchors[target] = flag, anchor
            continue
        targets[target] = _together(targets[target], flag)
        if anchor is not None and not anchors[target]:
            anchors[target] = anchor
    return targets, anchors, dropped


def are_folded(anchors: Iterable[str | None]) -> bool:
    """Whether `folded` would leave all of them as they are; looks at all at once."""
    given = list(filter(None, anchors))
    line = " | ".join(given)  # a space at the edge of one is beside another
    # Nothing printable but the space is white space, a control character or a lone surrogate.
    is_line = line.isprintable() and "  " not in line and line[:1] != " " and line[-1:] != " "
    return is_line and (len(line) <= MAX_ANCHOR_CHARS or max(map(len, given)) <= MAX_ANCHOR_CHARS)


@functools.cache
def _together(a: int, b: int) -> int:
    """Flags of two links to one URL."""
    place = (a | b) & _BODY or (a | b) & _BOILERPLATE
    return place | (a & b & _BOTH)


def _gathered(counts: NDArray[np.int64], order: NDArray[Any]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """(positions of the items, their number per group) of groups of so many items each, taken in another order."""
    starts, kept = _starts(counts)[order], counts[order]
    return np.arange(kept.sum(), dtype=np.int64) + np.repeat(starts - _starts(kept), kept), kept


def _starts(counts: NDArray[np.int64]) -> NDArray[np.int64]:
    starts: NDArray[np.int64] = np.cumsum(counts) - counts
    return starts


def _text_or_none(value: object) -> str | None:
    return value if isinstance(value, str) and value and _is_unicode(value) else None


def _is_unicode(text: str) -> bool:
    if text.isascii():
        return True
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _printable(url: object) -> str:
    """A rejected record's URL as it can be stored."""
    text = "" if url is None else url.decode(errors="replace") if isinstance(url, bytes) else str(url)
    return text[:MAX_URL_BYTES].encode(errors="replace").decode()
