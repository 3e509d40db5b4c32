"""From page records to the files of a corpus artifact (docs/artifacts.md, "corpus").

    built = build(source, out, config, execution)   -> Built(counts, rejects_by_reason)

1. Chunks of records are prepared, in a pool of processes where that pays: URLs and links canonical, texts cut and compressed.
2. The results are taken in the source's order: the first record of a canonical URL is the page, texts go to a spool file.
3. Pages are sorted by URL, which gives the page ids; links become targets; everything is written in page-id order.

The pool changes how long it takes, never a byte. Memory: URLs and links of the whole corpus, texts of a few chunks.
"""

import dataclasses
import hashlib
import itertools
from collections import Counter, deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from craw4llm.configs import CorpusConfig
from craw4llm.corpus.records import REASONS, Chunk, Page, Reject, Skipped, Source
from craw4llm.corpus.urls import MAX_URL_BYTES, canonical_url, host_of
from craw4llm.errors import InputError, StageError
from craw4llm.execution import Execution
from craw4llm.processes import worker_pool

ROW_GROUP_PAGES = 65_536
MAX_PAGES = 2**32 - 1  # page ids are uint32
MAX_REJECT_SHARE = 0.5  # beyond it (repeats of a URL not counted) the source is not what it is taken for
POOL_FROM_CHUNKS = 4  # starting a pool costs about a second; less work than this is done before it is up
SPOOL = "text.spool"

_ZSTD = pa.Codec("zstd")
_FOLDER_DECIDES = frozenset("/.abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789")  # unlike "?query", "#part" and ""


@dataclasses.dataclass(frozen=True)
class Built:
    """What was written. counts: name -> (value, unit), as the manifest has them."""

    counts: dict[str, tuple[int | float | None, str]]
    rejects_by_reason: dict[str, int]


@dataclasses.dataclass
class Prepared:
    """A chunk, ready to be merged. Lists run over the pages kept; the links of all pages are concatenated in `link_index`, as
    positions in `link_urls` (each URL once; no self-links, no repeats within a page)."""

    rejects: list[Reject] = dataclasses.field(default_factory=list)
    sources: list[str] = dataclasses.field(default_factory=list)
    positions: list[int] = dataclasses.field(default_factory=list)
    urls: list[str] = dataclasses.field(default_factory=list)
    n_chars: list[int] = dataclasses.field(default_factory=list)
    n_bytes: list[int] = dataclasses.field(default_factory=list)
    cut: list[bool] = dataclasses.field(default_factory=list)
    frames: list[bytes] = dataclasses.field(default_factory=list)
    link_counts: list[int] = dataclasses.field(default_factory=list)
    link_urls: list[str] = dataclasses.field(default_factory=list)
    link_index: NDArray[np.int32] = dataclasses.field(default_factory=lambda: np.empty(0, dtype=np.int32))
    unusable_links: int = 0


def build(source: Source, out: Path, config: CorpusConfig, execution: Execution) -> Built:
    """Writes the corpus of `source` into the folder `out`. Raises InputError where hardly any record is a page."""
    merged = _Merged()
    spool = out / SPOOL
    with spool.open("wb") as stream, execution.progress("corpus", total=source.records, unit="page") as progress:
        for records, prepared in _prepared(source, config.max_text_chars, execution):
            merged.add(prepared, stream.write)
            progress.update(records)
    by_reason = Counter(reject.reason for reject in merged.rejects)
    _check_rejects(source, len(merged.urls), by_reason)
    counts = merged.write(out, spool, config)
    spool.unlink()
    return Built(counts=counts, rejects_by_reason=dict(sorted(by_reason.items())))


def prepare(chunk: Chunk, max_text_chars: int) -> Prepared:
    """Checks and canonicalises a chunk's records. Runs in any process; the result depends on the arguments alone."""
    done = Prepared()
    place: dict[str, int] = {}  # canonical link -> its position in link_urls
    known: dict[tuple[str, str], str | None] = {}  # links repeat within a site: (folder or base, link) -> canonical
    index: list[int] = []
    for record in chunk.read():
        if isinstance(record, Reject):
            done.rejects.append(record)
            continue
        if isinstance(record, Skipped):
            continue
        url, text, reason = _checked(record)
        if reason:
            done.rejects.append(Reject(record.source, record.position, _printable(record.url), reason))
            continue
        cut = len(text) > max_text_chars
        text = text[:max_text_chars] if cut else text
        data = text.encode()
        targets: dict[int, None] = {}
        base = record.base or url
        folder = base.partition("?")[0].rpartition("/")[0]  # what a relative path is resolved against
        for link in record.links:
            if not isinstance(link, str):
                done.unusable_links += 1
                continue
            key = (folder if link[:1] in _FOLDER_DECIDES else base, link)
            if key in known:
                target = known[key]
            else:
                target = known[key] = canonical_url(link, base)
            if target is None:
                done.unusable_links += 1
            elif target != url:
                targets[place.setdefault(target, len(place))] = None
        done.sources.append(record.source)
        done.positions.append(record.position)
        done.urls.append(url)
        done.n_chars.append(len(text))
        done.n_bytes.append(len(data))
        done.cut.append(cut)
        done.frames.append(_ZSTD.compress(data, asbytes=True) if data else b"")
        done.link_counts.append(len(targets))
        index.extend(targets)
    done.link_urls = list(place)
    done.link_index = np.array(index, dtype=np.int32)
    return done


def is_heldout(url: str, fraction: float) -> bool:
    """Whether a page is drawn as held-out: a hash of its canonical URL, taken as a fraction of 2^64, is below `fraction`."""
    drawn = int.from_bytes(hashlib.blake2b(f"heldout:{url}".encode(), digest_size=8).digest(), "big")
    return drawn < fraction * 2.0**64


def _checked(record: Page) -> tuple[str, str, str]:
    """(canonical URL, text, "") of a record, or a reason."""
    if record.url is None or record.url == "":
        return "", "", "no_url"
    if isinstance(record.url, bytes) or isinstance(record.text, bytes):  # a source's mark for undecodable text
        return "", "", "invalid_unicode"
    if not isinstance(record.url, str):
        return "", "", "bad_url"
    if not _is_unicode(record.url):
        return "", "", "invalid_unicode"
    url = canonical_url(record.url)
    if url is None:
        return "", "", "bad_url"
    if record.text is None:
        return url, "", ""
    if not isinstance(record.text, str):
        return "", "", "text_not_string"
    if not _is_unicode(record.text):
        return "", "", "invalid_unicode"
    return url, record.text, ""


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


def _prepared(source: Source, max_text_chars: int, execution: Execution) -> Iterator[tuple[int, Prepared]]:
    """The chunks of `source`, prepared, in order, each with the number of its records."""
    chunks = iter(source.chunks)
    first = list(itertools.islice(chunks, POOL_FROM_CHUNKS))
    if not source.isolated and (execution.workers <= 1 or len(first) < POOL_FROM_CHUNKS):
        for chunk in itertools.chain(first, chunks):
            yield chunk.records, prepare(chunk, max_text_chars)
        return
    workers = max(1, execution.workers)
    waiting: deque[tuple[Chunk, Future[Prepared]]] = deque()
    with worker_pool(workers) as pool:
        for chunk in itertools.chain(first, chunks):
            waiting.append((chunk, pool.submit(prepare, chunk, max_text_chars)))
            if len(waiting) > 2 * workers:
                yield _next(waiting, workers)
        while waiting:
            yield _next(waiting, workers)


def _next(waiting: deque[tuple[Chunk, Future[Prepared]]], workers: int) -> tuple[int, Prepared]:
    chunk, future = waiting.popleft()
    try:
        return chunk.records, future.result()
    except BrokenProcessPool as error:
        others = [c.label for c, f in waiting if isinstance(f.exception(), BrokenProcessPool)]
        where = " or ".join([chunk.label, *others][:workers])
        raise StageError(
            f"corpus: a process that reads pages died (a crash in a library, or it was killed, e.g. for memory) on {where}; "
            "look at these files, take out the one that does it, or give the machine more memory"
        ) from error


def _check_rejects(source: Source, n_pages: int, by_reason: Counter[str]) -> None:
    said = ", ".join(f"{count:,} {reason} ({REASONS[reason]})" for reason, count in sorted(by_reason.items())) or "none"
    if n_pages == 0:
        raise InputError(f"corpus: {source.origin} gives no page at all; rejected: {said}")
    unusable = sum(by_reason.values()) - by_reason["duplicate_url"]
    if unusable > MAX_REJECT_SHARE * (n_pages + unusable):
        raise InputError(
            f"corpus: of {source.origin} only {n_pages:,} records are pages; rejected: {said}. "
            f"With more than {MAX_REJECT_SHARE:.0%} unusable it is taken for the wrong input"
        )
    if n_pages > MAX_PAGES:
        raise InputError(f"corpus: {source.origin} has {n_pages:,} pages; page ids go up to {MAX_PAGES:,}")


class _Merged:
    """Pages and links of all chunks so far. URLs are known by number, in the order of their first appearance as page or link."""

    def __init__(self) -> None:
        self.number: dict[str, int] = {}
        self.is_page = bytearray()  # by number
        self.rejects: list[Reject] = []
        self.urls: list[str] = []  # from here on, by page in the order of arrival
        self.sources: list[str] = []
        self.n_chars: list[int] = []
        self.n_bytes: list[int] = []
        self.cut: list[bool] = []
        self.frame_sizes: list[int] = []
        self.link_counts: list[int] = []
        self.links: list[NDArray[np.int64]] = []
        self.unusable_links = 0

    def add(self, chunk: Prepared, write: Callable[[bytes], object]) -> None:
        """Takes a chunk in; `write` gets the texts of its pages."""
        self.rejects += chunk.rejects
        self.unusable_links += chunk.unusable_links
        kept = np.ones(len(chunk.urls), dtype=np.bool_)
        for k, url in enumerate(chunk.urls):
            number = self._number(url)
            if self.is_page[number]:
                kept[k] = False
                self.rejects.append(Reject(chunk.sources[k], chunk.positions[k], url, "duplicate_url"))
                continue
            self.is_page[number] = 1
            write(chunk.frames[k])
            self.urls.append(url)
            self.sources.append(chunk.sources[k])
            self.n_chars.append(chunk.n_chars[k])
            self.n_bytes.append(chunk.n_bytes[k])
            self.cut.append(chunk.cut[k])
            self.frame_sizes.append(len(chunk.frames[k]))
            self.link_counts.append(chunk.link_counts[k])
        numbers = np.fromiter((self._number(url) for url in chunk.link_urls), dtype=np.int64, count=len(chunk.link_urls))
        links = numbers[chunk.link_index]
        self.links.append(links[np.repeat(kept, chunk.link_counts)])

    def write(self, out: Path, spool: Path, config: CorpusConfig) -> dict[str, tuple[int | float | None, str]]:
        n_pages = len(self.urls)
        order = np.array(sorted(range(n_pages), key=self.urls.__getitem__), dtype=np.int64)  # page id -> arrival
        page_of = np.empty(n_pages, dtype=np.int64)  # arrival -> page id
        page_of[order] = np.arange(n_pages)
        urls = [self.urls[k] for k in order.tolist()]

        links = np.concatenate([np.empty(0, dtype=np.int64), *self.links])
        from_page = page_of[np.repeat(np.arange(n_pages), self.link_counts)]
        target_of = np.full(len(self.number), -1, dtype=np.int64)  # number -> target
        target_of[np.fromiter((self.number[url] for url in urls), dtype=np.int64, count=n_pages)] = np.arange(n_pages)
        dead_urls: list[str] = []
        dangling_uses = int(np.count_nonzero(target_of[links] < 0))
        if config.dangling_links == "dead":
            linked = np.zeros(len(self.number), dtype=np.bool_)
            linked[links] = True
            dead = np.flatnonzero(linked & (target_of < 0)).tolist()
            names = list(self.number)
            dead.sort(key=names.__getitem__)
            dead_urls = [names[number] for number in dead]
            target_of[np.array(dead, dtype=np.int64)] = n_pages + np.arange(len(dead))
            if n_pages + len(dead) > MAX_PAGES:
                raise InputError(
                    f"corpus: {n_pages:,} pages and {len(dead):,} dead links; targets go up to {MAX_PAGES:,}: use dangling_links='outside'"
                )
        targets = target_of[links]
        inside = targets >= 0
        from_page, targets = from_page[inside], targets[inside]
        by_page = np.lexsort((targets, from_page))
        targets = targets[by_page]
        offsets = np.zeros(n_pages + 1, dtype=np.uint64)
        offsets[1:] = np.cumsum(np.bincount(from_page, minlength=n_pages)[:n_pages])
        indegree = np.bincount(targets, minlength=n_pages + len(dead_urls)).astype(np.uint32)

        n_chars = np.array(self.n_chars, dtype=np.uint32)[order]
        n_bytes = np.array(self.n_bytes, dtype=np.uint32)[order]
        cut = np.array(self.cut, dtype=np.bool_)[order]
        drawn = np.fromiter((is_heldout(url, config.heldout_fraction) for url in urls), dtype=np.bool_, count=n_pages)
        heldout = drawn & (n_chars >= config.heldout_min_chars)
        hosts = [host_of(url) for url in urls]

        pages = pa.table(
            {
                "url": pa.array(urls, pa.string()),
                "host": pa.array(hosts, pa.string()),
                "n_chars": n_chars,
                "n_bytes": n_bytes,
                "heldout": heldout,
                "cut": cut,
                "source": pa.array([self.sources[k] for k in order.tolist()], pa.string()),
            }
        )
        _write_parquet(pages, out / "pages.parquet")
        self._write_texts(out, spool, order)
        np.save(out / "links_offsets.npy", offsets)
        np.save(out / "links_targets.npy", targets.astype(np.uint32))
        np.save(out / "indegree.npy", indegree)
        np.save(out / "heldout.npy", np.flatnonzero(heldout).astype(np.uint32))
        _write_parquet(pa.table({"url": pa.array(dead_urls, pa.string())}), out / "dead_links.parquet")
        rejects = pa.table(
            {
                "source": pa.array([r.source for r in self.rejects], pa.string()),
                "position": pa.array([r.position for r in self.rejects], pa.uint64()),
                "url": pa.array([r.url for r in self.rejects], pa.string()),
                "reason": pa.array([r.reason for r in self.rejects], pa.string()),
            }
        )
        _write_parquet(rejects, out / "rejects.parquet")
        dead_uses = dangling_uses if config.dangling_links == "dead" else 0
        return {
            "pages": (n_pages, "pages"),
            "heldout_pages": (int(heldout.sum()), "pages"),
            "hosts": (len(set(hosts)), "hosts"),
            "links": (len(targets) - dead_uses, "links"),
            "dead_links": (len(dead_urls), "URLs"),
            "dead_link_uses": (dead_uses, "links"),
            "outside_links": (dangling_uses - dead_uses, "links"),
            "unusable_links": (self.unusable_links, "links"),
            "text_bytes": (int(n_bytes.sum(dtype=np.int64)), "bytes"),
            "empty_pages": (int((n_bytes == 0).sum()), "pages"),
            "cut_pages": (int(cut.sum()), "pages"),
            "records": (n_pages + len(self.rejects), "records"),
            "rejects": (len(self.rejects), "records"),
        }

    def _number(self, url: str) -> int:
        number = self.number.setdefault(url, len(self.number))
        if number == len(self.is_page):
            self.is_page.append(0)
        return number

    def _write_texts(self, out: Path, spool: Path, order: NDArray[np.int64]) -> None:
        """text.zst and text_offsets.npy: the frames of the spool, from the order of arrival to page-id order."""
        sizes = np.array(self.frame_sizes, dtype=np.int64)
        starts = np.cumsum(sizes) - sizes
        with spool.open("rb") as given, (out / "text.zst").open("wb") as ordered:
            for k in order.tolist():
                given.seek(starts[k])
                ordered.write(given.read(sizes[k]))
        offsets = np.zeros(len(order) + 1, dtype=np.uint64)
        offsets[1:] = np.cumsum(sizes[order])
        np.save(out / "text_offsets.npy", offsets)


def _write_parquet(table: pa.Table, path: Path) -> None:
    pq.write_table(table, path, compression="zstd", row_group_size=ROW_GROUP_PAGES)
