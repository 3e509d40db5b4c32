"""One file of ClueWeb22 at a time: its txt, outlink and inlink records, read once, into a part.

    read_part(work, 17)     writes <parts>/en0000-17.npz, unless it is there; any process, the result depends on `work` alone

A **slot** is a record's place in the collection: the records of the files before it, plus its number. Slots are known from the `.offset`
files alone, so links become slots at once. Which slots hold a page is known when every part is read (craw4llm.corpus.clueweb22_build).

| array of a part | |
|---|---|
| `state` uint8[records] | PAGE, NO_RECORD (a page without text: its txt record is empty), or REJECTED + the reason's place in REASONS |
| `n_chars`, `n_bytes` uint32[records] | of the text as kept |
| `host` int32[records], `hosts` | index into the file's own host names (joined by line ends); -1 for a page whose URL is unusable |
| `counts` int64[records], `slots` uint32 | links to slots, each once, ascending, no self-link |
| `dead_row` int32, `dead_key` int64 | links to ids of the collection that no file can hold, each once |
| `link_row` int32, `link_hash` uint64; `url_hash` uint64[records] | instead, where links are resolved by URLs: hashes of canonical URLs |
| `anchors` uint32[records] | anchors of the inlink record (0 where in-degrees are not counted from them) |
| `facts` int64, `faults` int64 | sums over links, by form; counts of what was wrong |
"""

import itertools
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import orjson
import xxhash
from numpy.typing import NDArray

from craw4llm.corpus.clueweb22_files import RECORDS_PER_FILE, DataFile, parse_id
from craw4llm.corpus.clueweb22_records import (
    MAX_PACKED_BYTES,
    MAX_UNPACKED_BYTES,
    MISSING,
    REASONS,
    TOO_LARGE,
    load_offsets,
    parse_text,
    stated_bytes,
    unpack,
)
from craw4llm.corpus.clueweb22_scan import BROKEN, N_FACTS, NO_ID_LONG, NO_ID_SHORT, OK, STATE, scan_links
from craw4llm.corpus.clueweb22_slots import FOREIGN, OUT, Slots
from craw4llm.corpus.json_bounds import too_rich
from craw4llm.corpus.npy import distinct
from craw4llm.corpus.urls import canonical_url, host_of
from craw4llm.execution import process_name

PAGE, NO_RECORD, REJECTED = 0, 1, 2
NO_HASH = np.uint64(0)
BATCH_RECORDS, BATCH_BYTES = 512, 32 << 20
_MAY_BE_LARGE = BATCH_BYTES // 8 // 1032  # packed: deflate makes at most so many bytes of one
CUT_OFF = "cut_off"  # a record that reaches over its file's end

FAULTS = (
    "url_line_ends",  # txt URLs that end with a line end
    "unusable_urls",  # txt URLs that are no web page's
    "damaged_link_records",
    "misplaced_link_records",  # another document's id stands in them
    "foreign_link_ids",  # links that leave the collection by their id
    "cut_texts",
    "too_large_link_records",
)

Part = dict[str, NDArray]
Ints = NDArray[np.int64]


@dataclass(frozen=True, kw_only=True)
class Work:
    """All that a process needs to read parts. sizes: (kind, file number) -> bytes of the data file."""

    root: Path
    files: list[DataFile]
    slots: Slots
    parts: Path
    by_urls: bool
    count_anchors: bool
    max_text_chars: int


def part_path(work: Work, index: int) -> Path:
    return work.parts / f"{work.files[index].name}.npz"


def read_part(work: Work, index: int) -> int:
    """Writes the part of the file at `index`; returns its records. A part appears when it is whole."""
    path = part_path(work, index)
    if not path.exists():
        part = _read(work, index)
        partial = path.with_suffix(f".{process_name()}.partial")
        with partial.open("wb") as stream:
            np.savez(stream, **part)  # type: ignore[arg-type]
            stream.flush()
            os.fsync(stream.fileno())
        partial.rename(path)
    return int(work.slots.base[index + 1] - work.slots.base[index])


def load_part(work: Work, index: int, *names: str) -> Part:
    """Arrays of a finished part."""
    with np.load(part_path(work, index), allow_pickle=False) as stored:
        return {name: stored[name] for name in (names or stored.files)}


def packed_records(work: Work, file: DataFile, kind: str) -> Iterator[bytes | str]:
    """The records of a file as they are packed: b"" for one of no bytes, else CUT_OFF or TOO_LARGE. Nothing where there is no file."""
    path = file.path(work.root, kind)
    if not path.exists():
        return
    offsets, _ = load_offsets(file.path(work.root, kind, ".offset"), path)
    size = path.stat().st_size
    with path.open("rb") as stream:
        for first in range(0, len(offsets) - 1, BATCH_RECORDS):
            bounds = offsets[first : first + BATCH_RECORDS + 1]
            if bounds[-1] - bounds[0] <= BATCH_BYTES:
                stream.seek(bounds[0])
                data = memoryview(stream.read(int(bounds[-1] - bounds[0])))
                for begin, end in itertools.pairwise((bounds - bounds[0]).tolist()):
                    yield CUT_OFF if end + bounds[0] > size else bytes(data[begin:end])
                continue
            for begin, end in itertools.pairwise(bounds.tolist()):  # large records, or offsets that are no records'
                if end > size:
                    yield CUT_OFF
                elif end - begin > MAX_PACKED_BYTES:
                    yield TOO_LARGE
                else:
                    stream.seek(begin)
                    yield stream.read(end - begin)


def unpacked(packed: bytes | str, kind: str) -> bytes | str:
    """A record of `packed_records`, unpacked; else the reason why there is none. b"" for one of no bytes."""
    return packed if not packed or isinstance(packed, str) else unpack(packed, MAX_UNPACKED_BYTES[kind])


def _read(work: Work, index: int) -> Part:
    file = work.files[index]
    first, stop = int(work.slots.base[index]), int(work.slots.base[index + 1])
    faults = dict.fromkeys(FAULTS, 0)
    part, urls = _texts(work, file, stop - first, faults)
    part["facts"] = np.zeros(N_FACTS, dtype=np.int64)
    if work.by_urls:
        part |= _links_by_urls(work, file, part, urls, faults)
    else:
        part |= _links_by_ids(work, file, part, first, faults)
    part["anchors"] = _anchors(work, file, stop - first, faults)
    part["faults"] = np.array([faults[name] for name in FAULTS], dtype=np.int64)
    return part


def _texts(work: Work, file: DataFile, records: int, faults: dict[str, int]) -> tuple[Part, list[str | None]]:
    """The part's page table, and the URL of each page."""
    state = np.full(records, NO_RECORD, dtype=np.uint8)
    n_chars, n_bytes = np.zeros(records, dtype=np.uint32), np.zeros(records, dtype=np.uint32)
    host = np.full(records, -1, dtype=np.int32)
    hosts: dict[str, int] = {}
    known: dict[str, int] = {}  # a URL up to its path -> host
    urls: list[str | None] = [None] * records
    reasons = {reason: REJECTED + k for k, reason in enumerate(REASONS)}
    limit = work.max_text_chars
    prefix = f"clueweb22-{file.name}-"
    for row, packed in enumerate(packed_records(work, file, "txt")):
        if not packed:
            continue
        data = unpacked(packed, "txt")
        found = data if isinstance(data, str) else parse_text(data, f"{prefix}{row:05d}", limit + 1)
        if isinstance(found, str):
            if found != MISSING:
                state[row] = reasons[found]
            continue
        text, url = found.text, found.url
        if len(text) > limit:
            text = text[:limit]
            faults["cut_texts"] += 1
        state[row] = PAGE
        n_chars[row] = len(text)
        n_bytes[row] = len(text) if text.isascii() else len(text.encode())
        if url is None:
            faults["unusable_urls"] += 1
            continue
        faults["url_line_ends"] += found.line_end
        site = url[: url.find("/", 8) + 1 or None]
        place = known.get(site)
        if place is None:
            usable = canonical_url(site)
            place = known[site] = -1 if usable is None else hosts.setdefault(host_of(usable), len(hosts))
        if place < 0:
            faults["unusable_urls"] += 1
        host[row] = place
        urls[row] = url
    names = np.frombuffer("\n".join(hosts).encode(), dtype=np.uint8)
    return {"state": state, "n_chars": n_chars, "n_bytes": n_bytes, "host": host, "hosts": names}, urls


def link_batches(
    work: Work, file: DataFile, kind: str, records: int, faults: dict[str, int], batch_records: int = BATCH_RECORDS
) -> Iterator[tuple[int, list[bytes]]]:
    """(first row, unpacked link records) of a file; b"" for those that are empty or damaged (counted)."""
    batch: list[bytes] = []
    row = held = 0
    for packed in packed_records(work, file, kind):
        if row >= records:
            break
        if len(packed) > _MAY_BE_LARGE and batch and not isinstance(packed, str) and stated_bytes(packed) > BATCH_BYTES // 8:
            yield row - len(batch), batch  # so that those before a large record are not worked on while it is held
            batch, held = [], 0
        data = unpacked(packed, kind)
        if isinstance(data, str):
            faults["too_large_link_records" if data == TOO_LARGE else "damaged_link_records"] += 1
            data = b""
        if batch and len(data) > BATCH_BYTES // 8:  # alone: a batch is laid end to end
            yield row - len(batch), batch
            batch, held = [], 0
        batch.append(data)
        row, held = row + 1, held + len(data)
        del data  # the batch alone has it, and whoever reads the batch may empty it
        if len(batch) == batch_records or held > BATCH_BYTES // 8:
            yield row - len(batch), batch
            batch, held = [], 0
    if batch:
        yield row - len(batch), batch


def own_links(first_key: int, batch: list[bytes], faults: dict[str, int]) -> tuple[Ints, Ints, Ints]:
    """(keys, the row of each in the batch, facts summed) of a batch of link records; what is broken or another document's is counted.

    Empties the batch: a large record is not held while its links are looked up.
    """
    records = len(batch)
    keys, counts, facts, own = scan_links(batch)
    batch.clear()
    broken = facts[:, STATE] == BROKEN
    misplaced = (facts[:, STATE] == OK) & (own != first_key + np.arange(records))
    faults["damaged_link_records"] += int(broken.sum())
    faults["misplaced_link_records"] += int(misplaced.sum())
    rows = np.repeat(np.arange(records), counts)
    kept = ~misplaced[rows]
    return keys[kept], rows[kept], facts[~misplaced].sum(axis=0)


def _links_by_ids(work: Work, file: DataFile, part: Part, first_slot: int, faults: dict[str, int]) -> Part:
    is_page = part["state"] < REJECTED
    records = len(is_page)
    counts = np.zeros(records, dtype=np.int64)
    targets, dead_rows, dead_keys = [], [], []
    first_key = file.number * RECORDS_PER_FILE
    for first, batch in link_batches(work, file, "outlink", records, faults):
        keys, rows, facts = own_links(first_key + first, batch, faults)
        part["facts"] += facts
        rows += first
        slots = work.slots.of_keys(keys)
        faults["foreign_link_ids"] += int(np.count_nonzero(slots == FOREIGN))
        kept = is_page[rows]
        inside = kept & (slots >= 0) & (slots != first_slot + rows)
        pairs = distinct(rows[inside] << 32 | slots[inside])
        counts += np.bincount(pairs >> 32, minlength=records)
        targets.append((pairs & 0xFFFFFFFF).astype(np.uint32))
        out = kept & (slots == OUT)
        dead = np.unique(np.stack([rows[out], keys[out]]), axis=1)
        dead_rows.append(dead[0].astype(np.int32))
        dead_keys.append(dead[1])
    return {
        "counts": counts,
        "slots": _joined(targets, np.uint32),
        "dead_row": _joined(dead_rows, np.int32),
        "dead_key": _joined(dead_keys, np.int64),
    }


def _links_by_urls(work: Work, file: DataFile, part: Part, urls: list[str | None], faults: dict[str, int]) -> Part:
    """As `_links_by_ids`, with hashes of canonical URLs. A page's URL that txt has cut at a comma is made whole from its link record."""
    is_page = part["state"] < REJECTED
    records = len(is_page)
    link_rows: list[int] = []
    link_hashes: list[int] = []
    known: dict[str, int] = {}
    hash_of = _memo(known)
    for first, batch in link_batches(work, file, "outlink", records, faults):
        for row, data in enumerate(batch, first):
            if not data or data.isspace():
                continue
            if too_rich(data):
                faults["too_large_link_records"] += 1
                continue
            try:
                record = orjson.loads(data)
                entries, own, whole = record["outlinks"], parse_id(str(record.get("ClueWeb22-ID"))), record.get("url")
            except (ValueError, KeyError, TypeError, AttributeError):
                faults["damaged_link_records"] += 1
                continue
            if own != file.number * RECORDS_PER_FILE + row:
                faults["misplaced_link_records"] += 1
                continue
            if not is_page[row]:
                continue
            urls[row] = whole_url(urls[row], whole)
            for entry in entries if type(entries) is list else ():
                if type(entry) is not list or not entry or type(entry[0]) is not str:
                    continue
                part["facts"][0] += 1
                part["facts"][NO_ID_SHORT if len(entry) < 6 else NO_ID_LONG] += 1
                hashed = hash_of(entry[0])
                if hashed:
                    link_rows.append(row)
                    link_hashes.append(hashed)
    hashes = np.fromiter((hash_of(url) if url is not None else 0 for url in urls), dtype=np.uint64, count=records)
    return {
        "url_hash": hashes,
        "link_row": np.array(link_rows, dtype=np.int32),
        "link_hash": np.array(link_hashes, dtype=np.uint64),
    }


def whole_url(url: str | None, of_links: object) -> str | None:
    """A page's URL: txt's, or the one of the page's link record where txt has none, or has cut it at its first comma."""
    if type(of_links) is str and (not url or of_links.strip().startswith(f"{url},")):
        return of_links.strip()
    return url


def _memo(known: dict[str, int]) -> Callable[[str], int]:
    """url -> hash of its canonical form, remembered; 0 for one that is no web page's."""

    def hash_of(url: str) -> int:
        if url not in known:
            known[url] = hash_url(url)
        return known[url]

    return hash_of


def hash_url(url: str) -> int:
    """uint64: XXH3 of a URL's canonical form; 0 where it has none. Among 900 million URLs two share a hash with a chance of 2%."""
    canonical = canonical_url(url)
    return xxhash.xxh3_64_intdigest(canonical.encode()) or 1 if canonical else 0


def _anchors(work: Work, file: DataFile, records: int, faults: dict[str, int]) -> NDArray[np.uint32]:
    """uint32[records]: anchors of each inlink record whose page is of the collection, delivered or not."""
    counts = np.zeros(records, dtype=np.uint32)
    if work.count_anchors:
        for first, batch in link_batches(work, file, "inlink", records, faults):
            end = first + len(batch)
            keys, rows, _ = own_links(file.number * RECORDS_PER_FILE + first, batch, faults)
            kept = work.slots.of_keys(keys) != FOREIGN
            counts[first:end] = np.bincount(rows[kept], minlength=end - first)
    return counts


def _joined(arrays: list[NDArray], dtype: type) -> NDArray:
    return np.concatenate([np.empty(0, dtype=dtype), *arrays])
