"""A corpus artifact from a ClueWeb22 folder: references to its files, page table, link graph (docs/artifacts.md, "corpus of ClueWeb22").

    result = build(ClueWeb22(folder=External(...), streams=("en0",)), out, config, execution)

1. The `.offset` files give every document a slot. With links="in_place" that is nearly all.
2. Each file's records are read once, in worker processes, into a part (craw4llm.corpus.clueweb22_parts). Parts are kept in the
   unfinished artifact: a build that was killed goes on with the files that are missing.
3. Slots whose record was rejected are known now. Pages are the other slots, in their order; links become page ids, file by file.

Memory: parts of a few files, and for the whole collection the rejected slots (8 bytes each), the dead links (8 bytes each), the names of
the hosts (their bytes and 20 more each, never as Python's objects), and links' in-degrees as a mapped file. The same bytes for any number
of workers.
"""

import json
import shutil
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import xxhash
from numpy.typing import NDArray

from craw4llm.artifact import Result
from craw4llm.configs import ClueWeb22, CorpusConfig
from craw4llm.corpus.clueweb22_files import LANGUAGES, RECORDS_PER_FILE, DataFile, allowed_streams, delivered, format_id
from craw4llm.corpus.clueweb22_parts import (
    FAULTS,
    NO_RECORD,
    REJECTED,
    Part,
    Work,
    link_batches,
    load_part,
    own_links,
    part_path,
    read_part,
)
from craw4llm.corpus.clueweb22_records import BLANK_BYTES, REASONS, RecordFiles, give_back, load_offsets, unpack
from craw4llm.corpus.clueweb22_scan import ENTRIES, ID_FIRST, ID_SIXTH, N_FACTS, NO_ID_LONG, NO_ID_SHORT, NULL_ID
from craw4llm.corpus.clueweb22_slots import Slots
from craw4llm.corpus.heldout import is_heldout
from craw4llm.corpus.merge import RowGroups
from craw4llm.corpus.names import STEP, Names, ascending, first_seen
from craw4llm.corpus.npy import NpyWriter, distinct, reserve
from craw4llm.corpus.reader import CLUEWEB22
from craw4llm.corpus.urls import domain_of
from craw4llm.crawl.hashing import hash_ids
from craw4llm.errors import ConfigError, InputError, StageError
from craw4llm.execution import Execution
from craw4llm.externals import locate
from craw4llm.processes import worker_pool

PARTS = "parts-2"  # with the number of their form: those of an older one are made again
FORMAT = 1
MAX_TARGETS = 2**32 - 1  # ids of pages and dead links are uint32
HELDOUT_SEED = 22  # of the draw of held-out pages, by their document keys
LOOK_FILES, LOOK_RECORDS = 8, 200  # of the first look at links
LOOK_AT_MOST = 10_000  # records of a file, to find as many that are not empty
POOL_FROM_FILES = 3  # starting a process takes as long as reading a good part of a file
_REJECTS = pa.schema({"source": pa.string(), "position": pa.uint64(), "url": pa.string(), "reason": pa.string()})

FORMS = {
    ID_FIRST: "a document id first (the released code's layout)",
    ID_SIXTH: "six fields, a document id last",
    NO_ID_SHORT: "five fields, no document id",
    NO_ID_LONG: "six fields or more, no document id where one is expected",
    NULL_ID: "null in place of the document id",
}


NOT_FOR_CLUEWEB22 = ("html", "columns", "url_rules", "duplicates", "nofollow", "obey")  # options of CorpusConfig


def build(source: ClueWeb22, out: Path, config: CorpusConfig, execution: Execution) -> Result:
    """Writes the corpus of `source` into `out`. InputError for a folder that is not what it is taken for."""
    for path in out.iterdir():  # of an attempt that was interrupted while it merged, or of an older form
        if path.name != PARTS:
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    work, opened, seen = _plan(source, out, config)
    root, files = work.root, work.files
    about: dict[str, Any] = {
        "format": FORMAT,
        "links": source.links,
        "indegree": source.indegree if source.links == "compiled" else None,
        "streams": list(source.streams),
        "max_text_chars": config.max_text_chars,
        "files": [[f.name, f.folder, f.number, int(n), *sizes] for f, n, sizes in zip(files, opened.records, opened.sizes, strict=True)],
    }
    notes: dict[str, Any] = {
        "origin": f"ClueWeb22, {len(files):,} files of {', '.join(sorted({LANGUAGES[f.number // 1_000_000] for f in files}))}",
        "root": str(root.resolve()),
        "link_targets": "urls" if work.by_urls else "ids",
        "files_without_outlinks": int(sum(sizes[1] < 0 for sizes in opened.sizes)),
        "loose_offset_files": opened.loose,
        "bytes_in": {kind: int(sum(max(0, s[k]) for s in opened.sizes)) for k, kind in enumerate(("txt", "outlink", "inlink"))},
    }
    if source.links == "in_place":
        _check_share(seen, int(seen[ID_FIRST] + seen[ID_SIXTH]), source, root)
        counts = _in_place(work, opened, out)
    else:
        _read_all(work, range(len(files)), execution)
        give_back()
        counts = _Merge(work, source, config, out, notes).write()
        shutil.rmtree(work.parts)
    (out / CLUEWEB22).write_text(json.dumps(about))
    return Result(counts=counts, notes=notes)


def build_part(source: ClueWeb22, out: Path, config: CorpusConfig, execution: Execution, *, part: int, of: int) -> int:
    """Reads every `of`-th file from number `part` (1 to `of`) on, for the build that merges them. Returns the number of records."""
    work, _, _ = _plan(source, out, config)
    indices = [] if source.links == "in_place" else range(part - 1, len(work.files), of)
    return _read_all(work, indices, execution)


def _plan(source: ClueWeb22, out: Path, config: CorpusConfig) -> "tuple[Work, _Opened, NDArray[np.int64]]":
    """What is to be read, the files as they are, and the facts of a first look at their links."""
    root = locate(source.folder)
    for name in NOT_FOR_CLUEWEB22:
        default = CorpusConfig.__dataclass_fields__[name].default
        if getattr(config, name) != default:
            raise ConfigError(
                f"corpus: {name} is {getattr(config, name)!r}, which does nothing for ClueWeb22 ({root}): its pages are known by document "
                f"ids, and its records name neither headers nor nofollow; expected {default!r}"
            )
    if source.indegree == "inlink" and not (root / "inlink").is_dir():
        raise InputError(f"corpus: {root} has no folder inlink; get it, or use indegree='links'")
    files = delivered(root, source.streams)
    opened = _open(root, files)
    base = np.zeros(len(files) + 1, dtype=np.int64)
    np.cumsum(opened.records, out=base[1:])
    numbers = np.array([file.number for file in files], dtype=np.int64)
    slots = Slots(numbers=numbers, base=base, allowed=np.array(allowed_streams(source.streams)))
    if slots.count > MAX_TARGETS:
        raise InputError(f"corpus: {root} has {slots.count:,} records; ids go up to {MAX_TARGETS:,}: choose fewer streams")
    seen = _first_look(root, files, slots)
    by_urls = source.targets == "urls" or (source.targets == "auto" and seen[ENTRIES] > 0 and seen[ID_FIRST] + seen[ID_SIXTH] == 0)
    if source.links == "in_place" and by_urls:
        raise InputError(f"corpus: the links of {root} hold no document ids ({_forms(seen)}); links='in_place' needs them: use 'compiled'")
    work = Work(
        root=root,
        files=files,
        slots=slots,
        parts=out / PARTS,
        by_urls=bool(by_urls),
        count_anchors=source.indegree == "inlink",
        max_text_chars=config.max_text_chars,
    )
    return work, opened, seen


@dataclass
class _Opened:
    records: list[int] = field(default_factory=list)
    sizes: list[tuple[int, int, int]] = field(default_factory=list)  # bytes of txt, outlink, inlink; -1: not there
    loose: list[str] = field(default_factory=list)  # .offset files whose rows ran together
    short: list[NDArray[np.int64]] = field(default_factory=list)  # by file, records of so few bytes that they may be empty lines


def _open(root: Path, files: list[DataFile]) -> _Opened:
    """Record counts from the .offset files of the texts, before any long work. InputError for one that cannot be understood."""
    opened = _Opened()
    for file in files:
        path = file.path(root, "txt", ".offset")
        try:
            offsets, loose = load_offsets(path)
        except OSError as error:
            raise InputError(f"corpus: {path} cannot be read ({error.strerror}); every data file has an .offset file beside it") from error
        if len(offsets) - 1 > RECORDS_PER_FILE:
            raise InputError(f"corpus: {path} has {len(offsets) - 1:,} records; a document id counts to {RECORDS_PER_FILE:,}")
        opened.records.append(len(offsets) - 1)
        opened.short.append(np.flatnonzero(np.diff(offsets) <= BLANK_BYTES))
        opened.sizes.append(tuple(_size(file.path(root, kind)) for kind in ("txt", "outlink", "inlink")))  # type: ignore[arg-type]
        for kind in ("outlink", "inlink"):
            other = file.path(root, kind, ".offset")
            if other.exists():
                loose |= load_offsets(other)[1]
        if loose:
            opened.loose.append(file.name)
    return opened


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else -1


def _first_look(root: Path, files: list[DataFile], slots: Slots) -> NDArray[np.int64]:
    """Facts (craw4llm.corpus.clueweb22_scan) of the first link records with content of a few files, spread over all."""
    facts = np.zeros(N_FACTS, dtype=np.int64)
    work = Work(root=root, files=files, slots=slots, parts=root, by_urls=False, count_anchors=False, max_text_chars=1)
    for index in sorted({round(k * (len(files) - 1) / (LOOK_FILES - 1)) for k in range(LOOK_FILES)}):
        seen = 0
        for first, batch in link_batches(work, files[index], "outlink", LOOK_AT_MOST, dict.fromkeys(FAULTS, 0), LOOK_RECORDS):
            some = sum(not record.isspace() for record in batch if record)
            if some:
                facts += own_links(files[index].number * RECORDS_PER_FILE + first, batch, dict.fromkeys(FAULTS, 0))[2]
                seen += some
            if seen >= LOOK_RECORDS:
                break
    return facts


def _read_all(work: Work, indices: Sequence[int], execution: Execution) -> int:
    """The parts of the files at `indices`, by as many processes as may be used. Returns their records."""
    work.parts.mkdir(exist_ok=True)
    todo = [k for k in indices if not part_path(work, k).exists()]
    sizes = np.diff(work.slots.base)
    total = int(sizes[list(indices)].sum())
    with execution.progress("corpus", total=total, unit="record") as progress:
        progress.update(total - int(sizes[todo].sum()))
        if execution.workers <= 1 or len(todo) < POOL_FROM_FILES:
            for index in todo:
                progress.update(read_part(work, index))
            return total
        waiting: deque[tuple[int, Future[int]]] = deque()
        with worker_pool(min(execution.workers, len(todo)), initializer=_start, initargs=(work,)) as pool:
            for index in todo:
                waiting.append((index, pool.submit(_read_in_worker, index)))
                if len(waiting) > 4 * execution.workers:
                    progress.update(_result(work, *waiting.popleft()))
            while waiting:
                progress.update(_result(work, *waiting.popleft()))
    return total


_work: Work | None = None


def _start(work: Work) -> None:
    global _work
    _work = work


def _read_in_worker(index: int) -> int:
    assert _work is not None
    return read_part(_work, index)


def _result(work: Work, index: int, future: Future[int]) -> int:
    try:
        return future.result()
    except BrokenProcessPool as error:
        raise StageError(
            f"corpus: a process that reads ClueWeb22 died near {work.files[index].name} (out of memory?); finished files are kept: "
            "run again, with fewer workers if memory is short"
        ) from error


def _in_place(work: Work, opened: _Opened, out: Path) -> dict[str, tuple[int | float | None, str]]:
    """Every slot is a page. Those whose txt record is plainly empty are known beforehand; all else is found out when it is read."""
    without: list[NDArray[np.int64]] = []
    texts = RecordFiles(work.root, {("txt", file.number): sizes[0] for file, sizes in zip(work.files, opened.sizes, strict=True)})
    for file, base, short in zip(work.files, work.slots.base.tolist(), opened.short, strict=False):
        if len(short):
            packed = zip(short.tolist(), texts.read(file, "txt", short), strict=True)
            blank = [row for row, one in packed if not one or _is_blank(unpack(one, 1 << 20))]
            without.append(base + np.array(blank, dtype=np.int64))
    pages = np.concatenate([np.empty(0, dtype=np.int64), *without])
    np.save(out / "without_record.npy", pages.astype(np.uint32))
    np.save(out / "absent.npy", np.empty(0, dtype=np.uint32))
    np.save(out / "dead_keys.npy", np.empty(0, dtype=np.int64))
    np.save(out / "heldout.npy", np.empty(0, dtype=np.uint32))
    return {
        "pages": (work.slots.count, "pages"),
        "heldout_pages": (0, "pages"),
        "hosts": (None, "hosts"),
        "links": (None, "links"),
        "dead_links": (0, "ids"),
        "dead_link_uses": (0, "links"),
        "outside_links": (None, "links"),
        "unusable_links": (None, "links"),
        "text_bytes": (None, "bytes"),
        "empty_pages": (None, "pages"),
        "cut_pages": (None, "pages"),
        "records": (work.slots.count, "records"),
        "rejects": (None, "records"),
        "skipped": (0, "records"),
        "pages_without_record": (len(pages), "pages"),
    }


class _Merge:
    """Parts -> the files of the artifact, in two passes over the parts."""

    def __init__(self, work: Work, source: ClueWeb22, config: CorpusConfig, out: Path, notes: dict[str, Any]) -> None:
        self.work, self.source, self.config, self.out, self.notes = work, source, config, out, notes
        self.slots = work.slots
        self.facts = np.zeros(N_FACTS, dtype=np.int64)
        self.faults = np.zeros(len(FAULTS), dtype=np.int64)
        self.rejects: dict[str, int] = {}

    def write(self) -> dict[str, tuple[int | float | None, str]]:
        names = self._absent_and_hosts()
        self.n_pages = self.slots.count - len(self.absent)
        if self.n_pages == 0:
            raise InputError(f"corpus: none of the {self.slots.count:,} records of {self.work.root} is a page; rejected: {self.rejects}")
        if sum(self.rejects.values()) > self.config.max_reject_share * (self.n_pages + sum(self.rejects.values())):
            raise InputError(
                f"corpus: of {self.work.root} only {self.n_pages:,} records are pages; rejected: {self.rejects}. With more than "
                f"{self.config.max_reject_share:.0%} unusable it is taken for the wrong input (max_reject_share)"
            )
        keep_dead = self.config.dangling_links == "dead" and not self.work.by_urls
        self.dead = self._dead_keys() if keep_dead else np.empty(0, dtype=np.int64)
        self.n_targets = self.n_pages + len(self.dead)
        if self.n_targets > MAX_TARGETS:
            raise InputError(f"corpus: {self.n_pages:,} pages and {len(self.dead):,} dead links; ids go up to {MAX_TARGETS:,}")
        counts = self._pages_and_links(names)
        np.save(self.out / "absent.npy", self.absent.astype(np.uint32))
        np.save(self.out / "dead_keys.npy", self.dead)
        self._write_rejects()
        _write_hosts(names, self.out / "hosts.parquet")
        links, dead_uses, outside = counts.pop("_links"), counts.pop("_dead"), counts.pop("_outside")
        entries = int(self.facts[ENTRIES])
        with_id = int(self.facts[ID_FIRST] + self.facts[ID_SIXTH])
        foreign = int(self.faults[FAULTS.index("foreign_link_ids")])
        outside += foreign
        _check_share(self.facts, self._resolved if self.work.by_urls else with_id - foreign, self.source, self.work.root)
        self.notes["link_entries_by_form"] = {FORMS[k]: int(self.facts[k]) for k in FORMS}
        self.notes["faults"] = dict(zip(FAULTS, self.faults.tolist(), strict=True))
        self.notes["rejects_by_reason"] = dict(sorted(self.rejects.items()))
        return {
            "pages": (self.n_pages, "pages"),
            "heldout_pages": (counts["heldout"], "pages"),
            "hosts": (len(names), "hosts"),
            "domains": (_count_domains(names), "domains"),
            "links": (links, "links"),
            "dead_links": (len(self.dead), "ids"),
            "dead_link_uses": (dead_uses, "links"),
            "outside_links": (outside, "links"),
            "unusable_links": (0 if self.work.by_urls else entries - with_id, "links"),
            "text_bytes": (counts["text_bytes"], "bytes"),
            "empty_pages": (counts["empty"], "pages"),
            "cut_pages": (int(self.faults[FAULTS.index("cut_texts")]), "pages"),
            "records": (self.slots.count, "records"),
            "rejects": (sum(self.rejects.values()), "records"),
            "skipped": (0, "records"),
            "pages_without_record": (counts["without_record"], "pages"),
        }

    def _absent_and_hosts(self) -> Names:
        """Slots that hold no page; the names of all hosts, ascending. Sums what the parts say."""
        absent: list[NDArray[np.int64]] = []
        reasons = list(REASONS)
        nameless = False

        def hosts() -> Iterator[pa.Array]:
            nonlocal nameless
            for index in range(len(self.work.files)):
                part = self._take_in(index, absent, reasons)
                yield _names(part["hosts"])
                nameless |= bool((part["host"][part["state"] < REJECTED] < 0).any())
            if nameless:
                yield pa.array([""])  # the host of pages without a usable URL

        names = Names(ascending(first_seen(hosts())))
        self.absent = np.concatenate(absent)
        return names

    def _take_in(self, index: int, absent: list[NDArray[np.int64]], reasons: list[str]) -> Part:
        """Adds a part's sums, rejects and absent slots to those of the whole."""
        part = load_part(self.work, index, "state", "host", "hosts", "facts", "faults")
        absent.append(self.slots.base[index] + np.flatnonzero(part["state"] >= REJECTED))
        self.facts += part["facts"]
        self.faults += part["faults"]
        for code, count in zip(*np.unique(part["state"][part["state"] >= REJECTED], return_counts=True), strict=True):
            reason = reasons[int(code) - REJECTED]
            self.rejects[reason] = self.rejects.get(reason, 0) + int(count)
        return part

    def _dead_keys(self) -> NDArray[np.int64]:
        """int64, ascending: keys of the linked ids of the collection that are no pages."""
        found = [np.empty(0, dtype=np.int64)]
        for index in range(len(self.work.files)):
            part = load_part(self.work, index, "slots", "dead_key")
            slots = part["slots"].astype(np.int64)
            found.append(np.unique(np.concatenate([part["dead_key"], self.slots.keys(np.unique(slots[self._is_absent(slots)]))])))
            if len(found) > 256:
                found = [np.unique(np.concatenate(found))]
        return np.unique(np.concatenate(found))

    def _is_absent(self, slots: NDArray[np.int64]) -> NDArray[np.bool_]:
        if not len(self.absent):
            return np.zeros(len(slots), dtype=np.bool_)
        at = np.minimum(np.searchsorted(self.absent, slots), len(self.absent) - 1)
        return self.absent[at] == slots

    def _pages_and_links(self, names: Names) -> dict[str, int]:
        types = {"n_chars": "<u4", "n_bytes": "<u4", "host_ids": "<i4", "links_offsets": "<u8", "links_targets": "<u4"}
        columns = {name: NpyWriter(self.out / f"{name}.npy", dtype) for name, dtype in types.items()}
        column = columns["links_offsets"]
        column.append(np.zeros(1, dtype=np.uint64))
        indegree = np.lib.format.open_memmap(self.out / "indegree.npy", mode="w+", dtype=np.uint32, shape=(self.n_targets,))
        with (self.out / "indegree.npy").open("r+b") as stream:
            reserve(stream, stream.seek(0, 2))
        anchors = np.zeros(self.n_pages if self.source.indegree == "inlink" else 0, dtype=np.uint32)
        heldout, without = [], []
        nameless = names.ids(pa.array([""]))
        url_map = self._url_map() if self.work.by_urls else None
        by_host = self.config.heldout_fraction > 0 and self.config.heldout_by == "host"
        held_hosts = np.fromiter(
            (is_heldout(name, self.config.heldout_fraction) for name in (names if by_host else ())),
            dtype=np.bool_,
            count=len(names) * by_host,
        )
        total = {"text_bytes": 0, "empty": 0, "_links": 0, "_dead": 0, "_outside": 0}
        self._resolved = 0
        end = 0
        for index, file in enumerate(self.work.files):
            part = load_part(self.work, index)
            is_page = part["state"] < REJECTED
            page = np.cumsum(is_page) - 1 + (int(self.slots.base[index]) - int(np.searchsorted(self.absent, self.slots.base[index])))
            columns["n_chars"].append(part["n_chars"][is_page])
            columns["n_bytes"].append(part["n_bytes"][is_page])
            of_file = np.concatenate([names.ids(_names(part["hosts"])), nameless])
            columns["host_ids"].append(of_file[part["host"][is_page]])
            total["text_bytes"] += int(part["n_bytes"].sum(dtype=np.int64))
            total["empty"] += int(np.count_nonzero(is_page & (part["n_bytes"] == 0)))
            rows, targets = self._targets(part, url_map, total)
            pairs = distinct(rows << 32 | targets)
            if url_map is not None:
                pairs = pairs[page[pairs >> 32] != (pairs & 0xFFFFFFFF)]
            targets = pairs & 0xFFFFFFFF
            is_dead = targets >= self.n_pages
            total["_dead"] += int(np.count_nonzero(is_dead))
            total["_links"] += int(np.count_nonzero(~is_dead))
            counts = np.bincount(pairs >> 32, minlength=len(is_page))[is_page]
            columns["links_targets"].append(targets)
            column.append((end + np.cumsum(counts)).astype(np.uint64))
            end += len(targets)
            np.add.at(indegree, targets, np.uint32(1))
            if len(anchors):
                anchors[page[is_page]] = part["anchors"][is_page]
            without.append(page[part["state"] == NO_RECORD])
            if self.config.heldout_fraction:
                drawn = self._drawn(file, is_page, of_file[part["host"][is_page]], held_hosts)
                heldout.append(page[is_page][drawn & (part["n_chars"][is_page] >= self.config.heldout_min_chars)])
        for one in columns.values():
            one.close()
        held = np.concatenate([np.empty(0, dtype=np.int64), *heldout]).astype(np.uint32)
        np.save(self.out / "heldout.npy", held)
        no_record = np.concatenate([np.empty(0, dtype=np.int64), *without]).astype(np.uint32)
        np.save(self.out / "without_record.npy", no_record)
        total["without_record"] = len(no_record)
        if len(anchors):
            graph = indegree[: self.n_pages]
            self.notes["indegree"] = {
                "anchors": int(anchors.sum(dtype=np.int64)),
                "linking_pages": int(graph.sum(dtype=np.int64)),
                "pages_that_differ": int(np.count_nonzero(anchors != graph)),
                "largest_difference": int(np.abs(anchors.astype(np.int64) - graph).max()),
            }
            indegree[: self.n_pages] = anchors
            indegree[self.n_pages :] = 0  # what does not exist has no inlink record
        indegree.flush()
        total["heldout"] = len(held)
        return total

    def _drawn(
        self, file: DataFile, is_page: NDArray[np.bool_], hosts: NDArray[np.int32], held_hosts: NDArray[np.bool_]
    ) -> NDArray[np.bool_]:
        """Of a file's pages, which are drawn as held-out: by a hash of the document key, or of the host."""
        if self.config.heldout_by == "host":
            return held_hosts[hosts]
        keys = file.number * RECORDS_PER_FILE + np.flatnonzero(is_page)
        return hash_ids(HELDOUT_SEED, keys) < np.uint64(self.config.heldout_fraction * 2.0**64)

    def _targets(self, part: Part, url_map: "tuple[NDArray, NDArray] | None", total: dict[str, int]) -> tuple[NDArray, NDArray]:
        """(row in the file int64, target int64) of a part's links, in no order."""
        if url_map is not None:
            hashes, pages = url_map
            at = np.minimum(np.searchsorted(hashes, part["link_hash"]), max(0, len(hashes) - 1))
            found = hashes[at] == part["link_hash"] if len(hashes) else np.zeros(len(part["link_hash"]), dtype=np.bool_)
            total["_outside"] += int(np.count_nonzero(~found))
            self._resolved += int(np.count_nonzero(found))
            return part["link_row"][found].astype(np.int64), pages[at[found]].astype(np.int64)
        rows = np.repeat(np.arange(len(part["state"]), dtype=np.int64), part["counts"])
        slots = part["slots"].astype(np.int64)
        absent = self._is_absent(slots)
        live = ~absent
        pages = slots[live] - np.searchsorted(self.absent, slots[live])
        if not len(self.dead):
            total["_outside"] += int(np.count_nonzero(absent)) + len(part["dead_key"])
            return rows[live], pages
        keys = np.concatenate([part["dead_key"], self.slots.keys(slots[absent])])
        dead = self.n_pages + np.searchsorted(self.dead, keys)
        return np.concatenate([rows[live], part["dead_row"].astype(np.int64), rows[absent]]), np.concatenate([pages, dead])

    def _url_map(self) -> tuple[NDArray, NDArray]:
        """(hashes uint64, ascending; pages uint32): of all canonical URLs; of two pages of one URL the first."""
        hashes, pages, first = [], [], 0
        for index in range(len(self.work.files)):
            part = load_part(self.work, index, "state", "url_hash")
            is_page = part["state"] < REJECTED
            known = part["url_hash"][is_page] != 0
            hashes.append(part["url_hash"][is_page][known])
            pages.append((first + np.flatnonzero(known)).astype(np.uint32))
            first += int(np.count_nonzero(is_page))
        distinct, at = np.unique(np.concatenate(hashes), return_index=True)
        chosen = np.concatenate(pages)[at]
        np.save(self.out / "url_hashes.npy", distinct)
        np.save(self.out / "url_pages.npy", chosen)
        return distinct, chosen

    def _write_rejects(self) -> None:
        reasons = np.array(list(REASONS))
        path = self.out / "rejects.parquet"
        if not self.rejects:
            pq.write_table(_REJECTS.empty_table(), path, compression="zstd")
            return
        with RowGroups(path, _REJECTS) as rejects:
            for index, file in enumerate(self.work.files):
                state = load_part(self.work, index, "state")["state"]
                rows = np.flatnonzero(state >= REJECTED)
                columns = {
                    "source": pa.repeat(file.name, len(rows)),
                    "position": pa.array(rows, pa.uint64()),
                    "url": pa.array([format_id(file.number * RECORDS_PER_FILE + row) for row in rows.tolist()], pa.string()),
                    "reason": pa.array(reasons[state[rows].astype(np.int64) - REJECTED].tolist(), pa.string()),
                }
                rejects.append(pa.table(columns, schema=_REJECTS))


def _is_blank(unpacked: bytes | str) -> bool:
    """Whether an unpacked record is an empty line; one that is damaged or large is none."""
    return isinstance(unpacked, bytes) and not unpacked.strip()


def _names(joined: NDArray[np.uint8]) -> pa.Array:
    return pa.array(joined.tobytes().decode().split("\n") if len(joined) else [], pa.string())


def _write_hosts(names: Names, path: Path) -> None:
    schema = pa.schema({"host": pa.string()})
    with pq.ParquetWriter(path, schema, compression="zstd") as writer:
        for start in range(0, max(1, len(names)), STEP):
            writer.write_table(pa.table({"host": names.array.slice(start, STEP).cast(pa.string())}, schema=schema))


def _count_domains(names: Names) -> int:
    """How many registered domains there are, by 128-bit hashes of their names."""
    found = np.empty(0, dtype="V16")
    for start in range(0, len(names), STEP):
        some = {domain_of(name) for name in names.array.slice(start, STEP).to_pylist()}
        hashes = np.frombuffer(b"".join(xxhash.xxh3_128_digest(name) for name in some), dtype="V16")
        found = np.unique(np.concatenate([found, hashes]))
    return len(found)


def _forms(facts: NDArray[np.int64]) -> str:
    entries = max(1, int(facts[ENTRIES]))
    return ", ".join(f"{facts[k] / entries:.0%} {FORMS[k]}" for k in FORMS if facts[k]) or "no links at all"


def _check_share(facts: NDArray[np.int64], resolved: int, source: ClueWeb22, root: Path) -> None:
    """Refuses a folder whose links hardly ever lead anywhere: its form is not what it is taken for."""
    entries = int(facts[ENTRIES])
    if resolved < source.min_resolved * entries or not entries:
        share = f"{resolved / entries:.1%} of {entries:,} links" if entries else "no link"
        raise InputError(
            f"corpus: {share} of {root} could be resolved to documents of the collection, of which at least {source.min_resolved:.0%} is "
            f"expected; their form: {_forms(facts)}. Choose `targets` (ids or urls) and `streams` to fit, or lower `min_resolved`"
        )
