"""WARC archives as a source: Common Crawl, own crawls, ClueWeb09 and the like; with WET texts and WAT links where they are given.

    source = open_warc(Path("crawl-data"))                     a file, or a folder with .warc, .wet and .wat files, also .gz
    source = open_warc(Path("crawl-data"), text="wet")         the text of the WET record instead of the page's main content

A page is a `response` record with HTTP status 200 and HTML: Content-Type text/html or application/xhtml+xml; where the header names no
type, WARC-Identified-Payload-Type, else a body that begins as HTML does. Everything else is skipped by kind: warcinfo, request, metadata,
resource, revisit (its page is the record that it refers to), continuation, conversion; not_http (DNS), status_3xx and so on, not_html.
Damage is rejected with file and offset (craw4llm.corpus.warc_records), as is a page whose block has not its WARC-Block-Digest; where
there is none, the payload must have the WARC-Payload-Digest, as stored, with its chunks joined, or decoded (writers differ). A page that
the crawler cut at its limit of length (`WARC-Truncated: length`) is kept, since its beginning is right (and Common Crawl said so of whole
pages in 2017); one cut by a lost connection or by time is rejected.

Files are read in the order of their paths, records in the order of the file; of several captures of one URL the build takes the first or
the last in that order (`CorpusConfig.duplicates`).

WET and WAT files belong to the WARC file of the same name in a folder that differs from its own at most in a part called warc, wet or
wat, as Common Crawl has them. Their records are found by WARC-Refers-To (the page's WARC-Record-ID), else by address and date.
"""

import dataclasses
import functools
import re
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import orjson

from craw4llm.configs import HtmlLimits
from craw4llm.corpus.extraction import BATCH_BYTES, BATCH_PAGES, DEFAULT_LIMITS, extractor
from craw4llm.corpus.extraction_http import BodyError, decode_body
from craw4llm.corpus.extraction_page import NOT_HTML, Headers, HtmlPage
from craw4llm.corpus.json_bounds import too_rich
from craw4llm.corpus.records import LinkFlag, Page, Reject, Skipped, Source
from craw4llm.corpus.warc_records import (
    CHUNK_BYTES,
    Damage,
    WarcRecord,
    boundaries,
    candidates,
    check_kind,
    digest_fits,
    following,
    parse_headers,
    read_records,
)
from craw4llm.errors import InputError
from craw4llm.processes import worker_pool

Item = Page | Reject | Skipped
Given = tuple[bytes, Headers]  # an HTTP body and its headers, as the extractor takes them

_NAME = re.compile(r"(?P<stem>.+?)(?:\.warc)?(?:\.(?P<kind>wet|wat))?(?:\.gz)?", re.I)
_IS_ARCHIVE = re.compile(r".*\.(?:warc|wet|wat|arc)(?:\.gz)?", re.I)
_HTTP_HEAD_END = re.compile(rb"\r?\n\r?\n")
_STATUS = re.compile(rb"HTTP/\d(?:\.\d)?[ \t]+(\d{3})(?=[ \t\r\n]|\Z)")
_HTML = ("text/html", "application/xhtml+xml")
_KINDS = frozenset(("warcinfo", "request", "metadata", "resource", "revisit", "conversion", "continuation"))
LIST_AHEAD_FROM = 4  # stretches of 32 MB; fewer are unpacked in the time in which processes start
WHOLE_FROM_FILES = 64  # so many files are work enough for many processes: none is unpacked beforehand to be divided
_HTTP_SPARE_BYTES = 1 << 17  # a response's head, and what a coding adds to a page that it cannot shorten


@dataclasses.dataclass(frozen=True)
class Files:
    """The files of one name. source: name in page tables and rejects, relative to the archive's folder."""

    source: str
    warc: Path | None
    wet: Path | None
    wat: Path | None


@dataclasses.dataclass(frozen=True)
class WarcChunk:
    """The records that begin in the bytes [start, end) of a WARC file, or of a WET file whose WARC file is not there."""

    root: Path
    files: Files
    start: int
    end: int
    text: Literal["html", "wet"]
    links: Literal["html", "wat"]
    limits: HtmlLimits

    @property
    def label(self) -> str:
        return f"{self.files.source}, bytes {self.start:,} to {self.end:,}"

    @property
    def records(self) -> None:
        return None

    def read(self) -> Iterator[Item]:
        path = self.files.warc or self.files.wet
        assert path is not None
        try:
            records = read_records(path, self.start, self.end, self.limits.page_bytes + _HTTP_SPARE_BYTES)
            yield from self._pages(records) if self.files.warc else self._texts(records)
            if self.start == 0:
                yield from self._derived_records()
        except OSError as error:
            raise InputError(f"corpus: {path} cannot be read: {error.strerror or error}") from error

    def _pages(self, records: Iterator[WarcRecord | Damage]) -> Iterator[Item]:
        waiting: list[Item | WarcRecord] = []
        batch: list[Given] = []
        size = 0
        for record in records:
            taken = self._given(record)
            if isinstance(taken, tuple):
                assert isinstance(record, WarcRecord)
                record.block = b""
                waiting.append(record)
                batch.append(taken)
                size += len(taken[0])
            else:
                waiting.append(taken)
            if len(batch) >= BATCH_PAGES or size >= BATCH_BYTES or len(waiting) >= 64 * BATCH_PAGES:
                yield from self._read(waiting, batch)
                waiting, batch, size = [], [], 0
        yield from self._read(waiting, batch)

    def _given(self, record: WarcRecord | Damage) -> Given | Reject | Skipped:
        """A response that is a page, as the extractor takes it; else what becomes of the record."""
        source = self.files.source
        if isinstance(record, Damage):
            return Reject(source, record.offset, record.url, record.reason)
        if record.kind != "response":
            return Skipped(record.kind if record.kind in _KINDS else "other_type")
        given = _http(record)
        if isinstance(given, Skipped):
            return given
        reason = _fault(record, given, self.limits.page_bytes)
        return Reject(source, record.offset, record.url, reason) if reason else given

    def _read(self, waiting: list[Item | WarcRecord], batch: list[Given]) -> Iterator[Item]:
        answers = iter(extractor(self.limits).read(batch))
        for item in waiting:
            if not isinstance(item, WarcRecord):
                yield item
                continue
            page = next(answers)
            if page == NOT_HTML:
                yield Skipped(NOT_HTML)
            elif isinstance(page, str):
                yield Reject(self.files.source, item.offset, item.url, page)
            else:
                yield self._page(item, page)

    def _page(self, record: WarcRecord, page: HtmlPage) -> Page:
        text, base, links, anchors, flags = page.text, page.base, page.links, page.anchors, page.flags
        language = None
        if self.files.wet and (derived := _find(self.files.wet, record)) is not None:
            language = _language(derived)
            if self.text == "wet":
                text = derived.block.decode(errors="replace").strip()
        if self.files.wat and self.links == "wat" and (derived := _find(self.files.wat, record)) is not None:
            given = wat_links(derived.block)
            if given is not None:
                base, links, anchors, flags = given
        return Page(
            self.files.source,
            record.offset,
            record.url,
            text,
            links,
            base=base,
            anchors=anchors,
            link_flags=flags,
            canonical=page.canonical,
            signals=page.signals,
            language=language,
        )

    def _texts(self, records: Iterator[WarcRecord | Damage]) -> Iterator[Item]:
        """Pages of a WET file alone."""
        for record in records:
            if isinstance(record, Damage):
                yield Reject(self.files.source, record.offset, record.url, record.reason)
            elif record.kind != "conversion":
                yield Skipped(record.kind if record.kind in _KINDS else "other_type")
            elif not record.whole:
                yield Reject(self.files.source, record.offset, record.url, "too_large")
            elif digest_fits(record.headers.get("warc-block-digest", ""), record.block) is False:
                yield Reject(self.files.source, record.offset, record.url, "bad_digest")
            else:
                page = HtmlPage(record.block.decode(errors="replace").strip(), None, [], [], [], None, 0)
                found = _find(self.files.wat, record) if self.files.wat else None
                given = wat_links(found.block) if found is not None else None
                if given is not None:
                    page = HtmlPage(page.text, *given, None, 0)
                yield Page(
                    self.files.source,
                    record.offset,
                    record.url,
                    page.text,
                    page.links,
                    base=page.base,
                    anchors=page.anchors,
                    link_flags=page.flags,
                    language=_language(record),
                )

    def _derived_records(self) -> Iterator[Item]:
        """What the WET and WAT files hold beside pages, said once per file: with the first chunk."""
        for path in (self.files.wet if self.files.warc else None, self.files.wat):
            if path is not None:
                index = _index(path)
                for damage in index.damages:
                    yield Reject(path.relative_to(self.root).as_posix(), damage.offset, damage.url, damage.reason)
                for kind, records in sorted(index.kinds.items()):
                    yield Skipped(kind, records)


class _Chunks:
    """The chunks of an archive, listed when they are asked for, the same every time."""

    def __init__(
        self, root: Path, files: list[Files], text: Literal["html", "wet"], links: Literal["html", "wat"], limits: HtmlLimits
    ) -> None:
        self._root, self._files, self._text, self._links, self._limits = root, files, text, links, limits
        self._known: dict[Path, list[int]] = {}

    @property
    def _whole(self) -> bool:
        return len(self._files) >= WHOLE_FROM_FILES

    def list_ahead(self, workers: int) -> None:
        """Finds where large gzip files are divided, with so many processes: each unpacks a stretch of a file."""
        paths = [path for files in self._files if (path := files.warc or files.wet) is not None and path not in self._known]
        if self._whole or workers < 2:
            return
        try:
            starts = [(path, start) for path in paths for start in candidates(path, CHUNK_BYTES)]
            if len(starts) < LIST_AHEAD_FROM:
                return
            known: dict[Path, dict[int, int | None]] = defaultdict(dict)
            with worker_pool(min(workers, len(starts))) as pool:
                asked = [pool.submit(following, path, start, CHUNK_BYTES) for path, start in starts]
                for (path, start), answer in zip(starts, asked, strict=True):
                    known[path][start] = answer.result()
            for path, answers in known.items():
                self._known[path] = boundaries(path, CHUNK_BYTES, answers)
        except OSError as error:
            raise InputError(f"corpus: {error.filename or 'an archive'} cannot be read: {error.strerror or error}") from error

    def __iter__(self) -> Iterator[WarcChunk]:
        for files in self._files:
            path = files.warc or files.wet
            assert path is not None
            try:
                if path not in self._known:
                    self._known[path] = [0] if self._whole else boundaries(path, CHUNK_BYTES)
                starts = self._known[path]
                size = path.stat().st_size
            except OSError as error:
                raise InputError(f"corpus: {path} cannot be read: {error.strerror or error}") from error
            for start, end in zip(starts, [*starts[1:], max(size, 1)], strict=True):
                yield WarcChunk(self._root, files, start, end, self._text, self._links, self._limits)


def open_warc(
    path: Path,
    text: Literal["html", "wet"] = "html",
    links: Literal["html", "wat"] = "html",
    limits: HtmlLimits = DEFAULT_LIMITS,
) -> Source:
    """A file or folder as a source. Raises InputError where it holds no WARC or WET file, an ARC file, or what is no WARC at all."""
    if path.is_dir():
        root, paths = path, list_archive(path)
    elif path.is_file():
        root, paths = path.parent, [path]
    else:
        raise InputError(f"corpus: {path} does not exist (looked in {Path.cwd()}); give a WARC file or a folder of WARC files")
    for given in paths:
        if given.name.lower().endswith((".arc", ".arc.gz")):
            raise InputError(f"corpus: {given} is an ARC file by its name; only WARC is read (`warcio recompress` makes WARC of ARC)")
    files = _paired(root, paths)
    for one in files:
        for archive in (one.warc, one.wet, one.wat):
            if archive is not None:
                try:
                    with archive.open("rb") as stream:
                        check_kind(archive, stream)
                except OSError as error:
                    raise InputError(f"corpus: {archive} cannot be read: {error.strerror or error}") from error
    if not any(one.warc or one.wet for one in files):
        what = "only WAT files, which hold no text" if files else "no .warc or .wet file (also .gz)"
        raise InputError(f"corpus: {path} holds {what}; give the WARC files, or WET files beside them")
    for wanted, kind in ((text, "wet"), (links, "wat")):
        if wanted == kind and not any(getattr(one, kind) for one in files):
            raise InputError(f"corpus: {'text' if kind == 'wet' else 'links'}={kind!r}, but {path} holds no {kind.upper()} file")
    readable = [one for one in files if one.warc or one.wet]
    counted = Counter(kind for one in files for kind in ("warc", "wet", "wat") if getattr(one, kind))
    chunks = _Chunks(root, readable, text, links, limits)
    return Source(
        chunks=chunks,
        list_ahead=chunks.list_ahead,
        records=None,
        origin=f"the archive {path.name}: "
        + ", ".join(f"{counted[kind]:,} {kind.upper()} files" for kind in ("warc", "wet", "wat") if counted[kind]),
        notes={
            "archive": {"text": text, "links": links, "files": dict(counted), "wat_alone": sum(not (one.warc or one.wet) for one in files)}
        },
    )


def is_archive(name: str) -> bool:
    """Whether a file is taken for WARC, WET, WAT or ARC by its name."""
    return _IS_ARCHIVE.fullmatch(name) is not None


def list_archive(folder: Path) -> list[Path]:
    """The archive files below a folder, sorted by path. Symbolic links are not followed."""
    return sorted(p for p in folder.rglob("*") if is_archive(p.name) and p.is_file() and not p.is_symlink())


def wat_links(block: bytes) -> tuple[str | None, list[str], list[str], list[int]] | None:
    """(base, links, anchors, flags) of a WAT record's JSON; None where it describes no HTML response."""
    if too_rich(block):
        return None
    try:
        envelope = orjson.loads(block)["Envelope"]["Payload-Metadata"]["HTTP-Response-Metadata"]
    except (ValueError, KeyError, TypeError):
        return None
    html = _mapping(envelope).get("HTML-Metadata")
    if not isinstance(html, dict):
        return None
    base = _mapping(html.get("Head")).get("Base")
    links, anchors, flags = [], [], []
    for link in html.get("Links") or []:
        link = _mapping(link)
        url, path = link.get("url"), link.get("path")
        if not isinstance(url, str) or path not in ("A@/href", "AREA@/href"):
            continue
        rel = link.get("rel")
        nofollow = isinstance(rel, str) and not {"nofollow", "ugc", "sponsored"}.isdisjoint(rel.lower().split())
        text = link.get("text")
        links.append(url.strip())
        anchors.append(" ".join(text.split()) if isinstance(text, str) else "")
        flags.append(int(LinkFlag.NOFOLLOW) if nofollow else 0)
    return (base if isinstance(base, str) else None), links, anchors, flags


@dataclasses.dataclass(frozen=True)
class _Index:
    """Where the records of a WET or WAT file are: by the id that they refer to, and by (address, date)."""

    by_id: dict[str, int]
    by_address: dict[tuple[str, str], int]
    damages: list[Damage]
    kinds: Counter[str]


@functools.lru_cache(maxsize=2)  # the chunks of a file come one after the other
def _index(path: Path) -> _Index:
    index = _Index({}, {}, [], Counter())
    for record in read_records(path):
        if isinstance(record, Damage):
            index.damages.append(record)
            continue
        index.kinds[record.kind if record.kind in _KINDS else "other_type"] += 1
        if record.kind in ("conversion", "metadata"):
            refers, address = record.headers.get("warc-refers-to", ""), (record.url, record.headers.get("warc-date", ""))
            if refers:
                index.by_id.setdefault(refers, record.offset)
            else:
                index.by_address.setdefault(address, record.offset)
    return index


def _find(path: Path, page: WarcRecord) -> WarcRecord | None:
    """The record of a WET or WAT file that was made from a page's record (or, for a WET record, from the same page)."""
    index = _index(path)
    date = page.headers.get("warc-date", "")
    wanted = page.headers.get("warc-refers-to" if page.kind == "conversion" else "warc-record-id", "")
    offset = index.by_id.get(wanted) if wanted else None
    if offset is None:
        wanted, offset = "", index.by_address.get((page.url, date))
    if offset is None:
        return None
    for record in read_records(path, offset):  # the first, but in a file with many records in one gzip member
        if isinstance(record, WarcRecord) and record.kind in ("conversion", "metadata"):
            refers = record.headers.get("warc-refers-to", "")
            if refers == wanted if wanted else not refers and (record.url, record.headers.get("warc-date", "")) == (page.url, date):
                fits = record.whole and digest_fits(record.headers.get("warc-block-digest", ""), record.block) is not False
                return record if fits else None
    return None


def _http(record: WarcRecord) -> Given | Skipped:
    """Body and headers of a response that is an HTML page; else why it is none."""
    declared = record.headers.get("content-type", "").lower().replace(" ", "")
    if declared and not declared.startswith("application/http"):
        return Skipped("not_http")
    status = _STATUS.match(record.block)
    head_end = _HTTP_HEAD_END.search(record.block, 0, _HTTP_SPARE_BYTES)
    end = head_end.end() if head_end else len(record.block)
    if status:
        if status[1] != b"200":
            return Skipped(f"status_{status[1][:1].decode()}xx")
        headers = parse_headers(record.block[record.block.find(b"\n", 0, end) + 1 : end])
    elif record.version.startswith("0.") and head_end:
        headers = parse_headers(record.block[:end])  # derivatives of ClueWeb09, which holds pages with status 200 only, lack the line
    else:
        return Skipped("not_http")
    if not _is_html(record, headers):
        return Skipped(NOT_HTML)
    return record.block[end:], headers


def _is_html(record: WarcRecord, headers: Headers) -> bool:
    """By the HTTP header; where that names no type by the archive's; where that does not either it is for the extractor to see."""
    for name, value in headers:
        if name == "content-type" and value.strip():
            return value.partition(";")[0].strip().lower() in _HTML
    identified = record.headers.get("warc-identified-payload-type", "").partition(";")[0].strip().lower()
    if identified in _HTML:
        headers.append(("content-type", identified))
    return not identified or identified in _HTML


def _fault(record: WarcRecord, given: Given, page_bytes: int) -> str:
    """The reason to reject a page's record, or ""."""
    if not record.whole:
        return "too_large"
    if record.headers.get("warc-truncated", "length").lower() != "length":
        return "truncated"
    fits = digest_fits(record.headers.get("warc-block-digest", ""), record.block)
    if fits is None and (stated := record.headers.get("warc-payload-digest", "")):
        body, headers = given
        fits = digest_fits(stated, body)
        if fits is False and headers is not None:
            try:
                chunked = [(name, value) for name, value in headers if name == "transfer-encoding"]
                fits = digest_fits(stated, decode_body(chunked, body, page_bytes), decode_body(headers, body, page_bytes))
            except BodyError as error:
                return str(error.args[0])
    return "bad_digest" if fits is False else ""


def _language(record: WarcRecord) -> str | None:
    """The first of WARC-Identified-Content-Language (ISO 639-3)."""
    return record.headers.get("warc-identified-content-language", "").partition(",")[0].strip() or None


def _mapping(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _paired(root: Path, paths: list[Path]) -> list[Files]:
    """Files by name, in the order of the first path of each."""
    found: dict[tuple[tuple[str, ...], str], dict[str, Path]] = {}
    for path in paths:
        name = _NAME.fullmatch(path.name)
        assert name is not None
        kind = (name["kind"] or "warc").lower()
        folder = tuple(part for part in path.relative_to(root).parent.parts if part not in ("warc", "wet", "wat"))
        group = found.setdefault((folder, name["stem"]), {})
        if kind in group:
            raise InputError(f"corpus: {path} and {group[kind]} are both the {kind.upper()} file of {name['stem']}; take one away")
        group[kind] = path
    return [
        Files(
            (group.get("warc") or group.get("wet") or group["wat"]).relative_to(root).as_posix(),
            *(group.get(k) for k in ("warc", "wet", "wat")),
        )
        for group in found.values()
    ]
