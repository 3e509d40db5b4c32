"""Reads a corpus artifact of ClueWeb22: the page table is in the artifact, texts (and with links="in_place" links) are in the folder.

    corpus = Corpus(artifact)               a ClueWeb22Corpus, where the artifact is one
    corpus.texts([3, 8])                    read by offset, sorted by file, given in the order asked for
    corpus.find(["clueweb22-en0000-00-00003"])   -> page ids; document ids are arithmetic, there is no dictionary

A page id is the place of a document among the pages in the order of document ids: its slot (the records of the files before it, plus its
own number) minus the slots before it whose record was rejected. URLs are read from the texts' records when they are asked for.

The folder is where it was when the corpus was built, or in $CRAW4LLM_CLUEWEB22. A file that is gone, or whose size is another, ends the run
with its name; a record that cannot be read does too.
"""

import json
import os
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import orjson
from numpy.typing import ArrayLike, NDArray

from craw4llm.artifact import Artifact
from craw4llm.corpus.clueweb22_files import (
    FILES_PER_LANGUAGE,
    KINDS,
    LANGUAGES,
    RECORDS_PER_FILE,
    DataFile,
    allowed_streams,
    format_id,
    parse_id,
)
from craw4llm.corpus.clueweb22_slots import Slots, format_ids, spell_ids
from craw4llm.corpus.json_bounds import too_rich
from craw4llm.corpus.names import STEP, Names, first_seen
from craw4llm.corpus.reader import CLUEWEB22, Corpus
from craw4llm.errors import ConfigError, InputError

if TYPE_CHECKING:
    from craw4llm.corpus.clueweb22_records import RecordFiles

FOLDER = "CRAW4LLM_CLUEWEB22"
_READ_AT_ONCE = 4096  # texts that are held while their lengths are counted
_STRINGS = 1 << 26  # document ids in an Arrow array of strings, which holds 2 GB


class ClueWeb22Corpus(Corpus):
    """A corpus artifact that a ClueWeb22 folder was read into."""

    has_document_ids = True

    def __init__(self, artifact: Artifact) -> None:
        super().__init__(artifact)
        about = json.loads(artifact.file(CLUEWEB22).read_text())
        self.in_place = about["links"] == "in_place"
        self.has_indegree = not self.in_place
        self._max_chars = int(about["max_text_chars"])
        self._files = [DataFile(name, folder, number) for name, folder, number, *_ in about["files"]]
        base = np.zeros(len(self._files) + 1, dtype=np.int64)
        np.cumsum([row[3] for row in about["files"]], out=base[1:])
        self._slots = Slots(
            numbers=np.array([file.number for file in self._files], dtype=np.int64),
            base=base,
            allowed=np.array(allowed_streams(tuple(about["streams"]))),
        )
        self._sizes = {(kind, row[2]): size for row in about["files"] for kind, size in zip(KINDS, row[4:], strict=True) if size >= 0}

    @cached_property
    def _records(self) -> "RecordFiles":
        from craw4llm.corpus.clueweb22_records import RecordFiles  # with what unpacks: a crawl over known scores reads none

        return RecordFiles(Path(os.environ.get(FOLDER) or self.artifact.manifest["notes"]["root"]), self._sizes)

    # Document ids

    def document_ids(self, targets: ArrayLike) -> list[str]:
        """Document ids of pages and dead links."""
        return format_ids(self._keys(np.asarray(targets, dtype=np.int64)))

    def name_lines(self, targets: ArrayLike, ends: Sequence[int]) -> list[bytes]:
        text, line_ends = spell_ids(self._keys(np.asarray(targets, dtype=np.int64)), end="\n")
        cuts = [0, *(int(line_ends[end - 1]) if end else 0 for end in ends)]
        return [text[start:stop].tobytes() for start, stop in pairwise(cuts)]

    def languages_of(self, pages: ArrayLike) -> Any:
        """pa.array of strings: what stands in the document ids."""
        import pyarrow as pa

        keys = self._keys(np.asarray(pages, dtype=np.int64)) // (RECORDS_PER_FILE * FILES_PER_LANGUAGE)
        return pa.array([LANGUAGES[language] for language in keys.tolist()], pa.string())

    @property
    def doc_ids(self) -> "_Names":  # type: ignore[override]
        """`doc_ids.take(pages)`: their document ids."""
        return _DocumentIds(self.n_pages, self._keys)

    def find_doc_ids(self, doc_ids: Sequence[str]) -> NDArray[np.int64]:
        return self.find(doc_ids)

    def find(self, urls: Sequence[str]) -> NDArray[np.int64]:
        """int64: page ids of document ids (or of URLs, where links were resolved by them), -1 for those not in the corpus."""
        return self._find(urls, dead=False)

    def find_targets(self, urls: Sequence[str]) -> NDArray[np.int64]:
        return self._find(urls, dead=True)

    def names(self, pages: ArrayLike) -> list[str]:
        """Document ids: what a draw by hash goes by, as no URL is known without reading the page's record."""
        return self.document_ids(pages)

    def _find(self, names: Sequence[str], *, dead: bool) -> NDArray[np.int64]:
        keys = np.array([-1 if (key := parse_id(name.strip())) is None else key for name in names], dtype=np.int64)
        found = np.full(len(keys), -1, dtype=np.int64)
        is_id = keys >= 0
        slots = self._slots.of_keys(keys[is_id])
        pages = self._pages(np.maximum(slots, 0))
        pages[slots < 0] = -1
        if dead and len(self._dead_keys):
            at = np.minimum(np.searchsorted(self._dead_keys, keys[is_id]), len(self._dead_keys) - 1)
            pages = np.where((pages < 0) & (self._dead_keys[at] == keys[is_id]), self.n_pages + at, pages)
        found[is_id] = pages
        if not is_id.all() and (self.artifact.path / "url_hashes.npy").exists():
            found[~is_id] = self._by_url([name for name, known in zip(names, is_id.tolist(), strict=True) if not known])
        return found

    def _by_url(self, urls: Sequence[str]) -> NDArray[np.int64]:
        from craw4llm.corpus.clueweb22_parts import hash_url

        hashes = np.load(self.artifact.file("url_hashes.npy"), mmap_mode="r")
        wanted = np.array([hash_url(url) for url in urls], dtype=np.uint64)
        at = np.minimum(np.searchsorted(hashes, wanted), len(hashes) - 1)
        pages = np.load(self.artifact.file("url_pages.npy"), mmap_mode="r")[at].astype(np.int64)
        return np.where((hashes[at] == wanted) & (wanted != 0), pages, -1)

    @property
    def dead_places(self) -> NDArray[np.uint32]:
        """As in Corpus, in the order of document ids. A search among the pages' slots for each dead link."""
        number, record = np.divmod(self._dead_keys, RECORDS_PER_FILE)
        file = np.searchsorted(self._slots.numbers, number)  # of the first file with this number or a higher one
        base = self._slots.base
        inside = self._slots.numbers[np.minimum(file, len(self._files) - 1)] == number
        ends = base[np.minimum(file + 1, len(self._files))]
        slot = np.where(inside, np.minimum(base[file] + record, ends), base[file])
        before = slot - np.searchsorted(self._absent, slot)  # pages before it
        return (before + np.arange(len(before))).astype(np.uint32)

    @cached_property
    def _absent(self) -> NDArray[np.int64]:
        return np.load(self.artifact.file("absent.npy")).astype(np.int64)

    @cached_property
    def _dead_keys(self) -> NDArray[np.int64]:
        return np.load(self.artifact.file("dead_keys.npy"), mmap_mode="r")

    def without_record(self, targets: NDArray[np.uint32]) -> NDArray[np.bool_]:
        known = self._without_record
        if not len(known):
            return np.zeros(len(targets), dtype=np.bool_)
        return known[np.minimum(np.searchsorted(known, targets), len(known) - 1)] == targets

    @cached_property
    def _without_record(self) -> NDArray[np.uint32]:
        return np.load(self.artifact.file("without_record.npy"))

    def _slot(self, pages: NDArray[np.int64]) -> NDArray[np.int64]:
        """Slots of pages: each page comes after as many absent slots as have that many pages or fewer before them."""
        return pages + np.searchsorted(self._absent - np.arange(len(self._absent)), pages, side="right")

    def _pages(self, slots: NDArray[np.int64]) -> NDArray[np.int64]:
        """Pages of slots; -1 for a slot that holds none."""
        if not len(self._absent):
            return slots.copy()
        before = np.searchsorted(self._absent, slots)
        return np.where(self._absent[np.minimum(before, len(self._absent) - 1)] == slots, -1, slots - before)

    def _keys(self, targets: NDArray[np.int64]) -> NDArray[np.int64]:
        keys = np.empty(len(targets), dtype=np.int64)
        live = targets < self.n_pages
        keys[live] = self._slots.keys(self._slot(targets[live]))
        keys[~live] = self._dead_keys[targets[~live] - self.n_pages]
        return keys

    # The page table

    @property
    def urls(self) -> "_Names":  # type: ignore[override]
        """`urls.take(pages)`: their URLs, read from their records ("clueweb22:<document id>" for a page without a usable URL)."""
        return _Names(self.n_pages, self._urls_of)

    @property
    def dead_urls(self) -> "_Names":  # type: ignore[override]
        """`dead_urls.take(rows)`: document ids, the one name that a dead link has."""
        return _DocumentIds(self.n_targets - self.n_pages, lambda rows: self._keys(rows + self.n_pages))

    @cached_property
    def hosts(self) -> Names:
        """Names of the hosts; none where the texts were not read."""
        import pyarrow as pa
        import pyarrow.parquet as pq

        if self.in_place:
            return Names(pa.array([], pa.string()))
        return Names(pq.read_table(self.artifact.file("hosts.parquet")).column("host").cast(pa.large_string()).combine_chunks())

    def host_pages(self, pages: ArrayLike) -> dict[str, int]:
        """As in Corpus; where the texts were not read beforehand, by the URLs in the records of these pages."""
        if not self.in_place:
            return super().host_pages(pages)
        from craw4llm.corpus.urls import host_of

        found = Counter(host_of(url) if "//" in url else "" for url in self._urls_of(pages))
        return dict(sorted(found.items()))

    @property
    def has_text(self) -> NDArray[np.bool_]:
        if not self.in_place:
            return super().has_text
        found = np.ones(self.n_pages, dtype=np.bool_)
        found[self._without_record] = False
        return found

    def text_bytes(self, pages: ArrayLike) -> NDArray[np.uint32]:
        """As in Corpus; where the texts were not read beforehand, they are read here."""
        if not self.in_place:
            return super().text_bytes(pages)
        ids = np.asarray(pages, dtype=np.int64)
        found = np.empty(len(ids), dtype=np.uint32)
        for start in range(0, len(ids), _READ_AT_ONCE):
            some = self.texts(ids[start : start + _READ_AT_ONCE])
            found[start : start + len(some)] = [len(text.encode()) for text in some]
        return found

    @cached_property
    def host_ids(self) -> NDArray[np.int32]:
        return self._compiled("host_ids")

    @cached_property
    def n_bytes(self) -> NDArray[np.uint32]:
        return self._compiled("n_bytes")

    @cached_property
    def n_chars(self) -> NDArray[np.uint32]:
        return self._compiled("n_chars")

    @cached_property
    def indegree(self) -> NDArray[np.uint32]:
        return self._compiled("indegree")

    @cached_property
    def signals(self) -> NDArray[np.uint16]:
        """ClueWeb22 says nothing of what owners ask for."""
        return np.zeros(self.n_pages, dtype=np.uint16)

    @property
    def domains(self) -> Names:  # type: ignore[override]
        return self._host_domains[0]

    @property
    def domain_ids(self) -> NDArray[np.int32]:  # type: ignore[override]
        return self._host_domains[1][self.host_ids]

    @cached_property
    def _host_domains(self) -> tuple[Names, NDArray[np.int32]]:
        """(registered domains, the domain of each host)."""
        import pyarrow as pa

        from craw4llm.corpus.urls import domain_of

        hosts = self.hosts.array
        of_hosts = pa.chunked_array(
            [
                pa.array([domain_of(host) for host in hosts.slice(start, STEP).to_pylist()], pa.large_string())
                for start in range(0, len(hosts), STEP)
            ],
            pa.large_string(),
        )
        domains = Names(first_seen(of_hosts.chunks))
        return domains, domains.ids(of_hosts.combine_chunks())

    def languages(self) -> dict[str, int]:
        """Pages of each language, by their document ids."""
        pages = np.diff(self._slots.base - np.searchsorted(self._absent, self._slots.base))
        found: dict[str, int] = {}
        for file, count in zip(self._files, pages.tolist(), strict=True):
            language = LANGUAGES[file.number // FILES_PER_LANGUAGE]
            found[language] = found.get(language, 0) + count
        return found

    def source_row(self, page: int) -> dict[str, Any]:
        doc_id = self.document_ids([page])[0]
        cut = len(self.text(page)) == self._max_chars
        name = doc_id.removeprefix("clueweb22-").rpartition("-")[0]
        return {"source": name, "doc_id": doc_id, "language": name.partition("-")[0][:-4], "canonical": None, "signals": 0, "cut": cut}

    def column(self, name: str) -> Any:
        """Columns that are stored: n_chars, n_bytes, heldout."""
        import pyarrow as pa

        if name == "heldout":
            return pa.chunked_array([pa.array(self.heldout_mask[: self.n_pages])])
        return pa.chunked_array([pa.array(self._compiled(name))])

    def _compiled(self, name: str) -> NDArray[Any]:
        self._require_compiled(name)
        return np.load(self.artifact.file(f"{name}.npy"), mmap_mode="r")

    def _require_compiled(self, name: str) -> None:
        if self.in_place:
            raise ConfigError(
                f"the corpus {self.artifact.fingerprint} was built with links='in_place', which reads no texts or links beforehand and so "
                f"does not know {name}; build it with links='compiled'"
            )

    # Records

    def text(self, page: int) -> str:
        return self.texts([page])[0]

    def texts(self, pages: ArrayLike) -> list[str]:
        texts: list[str] = [""] * np.size(pages)
        for place, key, data in self._read("txt", pages):
            if not data or data.isspace():  # a page without a record
                continue
            texts[place] = self._checked(data, key)["Clean-Text"] or ""
            if len(texts[place]) > self._max_chars:
                texts[place] = texts[place][: self._max_chars]
        return texts

    def url(self, target: int) -> str:
        return self.document_ids([target])[0] if target >= self.n_pages else self._urls_of([target])[0]

    def outlinks(self, pages: ArrayLike) -> tuple[NDArray[np.int64], NDArray[np.uint32]]:
        if not self.in_place:
            return super().outlinks(pages)
        ids = np.asarray(pages, dtype=np.int64)
        rows, targets = [np.empty(0, dtype=np.int64)], [np.empty(0, dtype=np.int64)]
        for part_rows, part_targets in self._links_in_place(ids):
            rows.append(part_rows)
            targets.append(part_targets)
        row, target = np.concatenate(rows), np.concatenate(targets)
        pairs = np.unique(row[target != ids[row]] << 32 | target[target != ids[row]])
        offsets = np.zeros(len(ids) + 1, dtype=np.int64)
        np.cumsum(np.bincount(pairs >> 32, minlength=len(ids)), out=offsets[1:])
        return offsets, (pairs & 0xFFFFFFFF).astype(np.uint32)

    def inlinks(self, targets: ArrayLike) -> tuple[NDArray[np.int64], NDArray[np.uint32]]:
        self._require_compiled("links into a page")
        return super().inlinks(targets)

    def _links_in_place(self, ids: NDArray[np.int64]) -> Iterator[tuple[NDArray[np.int64], NDArray[np.int64]]]:
        """(rows, target pages) of the links of pages, some pages at a time."""
        from craw4llm.corpus.clueweb22_scan import BROKEN, OK, STATE, scan_links

        def scan(part: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
            read = [(place, key, data) for place, key, data in self._read("outlink", ids[part])]
            keys, counts, facts, own = scan_links([data for _, _, data in read])
            wanted = np.array([key for _, key, _ in read], dtype=np.int64)
            usable = (facts[:, STATE] != BROKEN) & ((facts[:, STATE] != OK) | (own == wanted))
            rows = np.repeat(part[np.array([place for place, _, _ in read], dtype=np.int64)], counts)
            kept = np.repeat(usable, counts)
            slots = self._slots.of_keys(keys[kept])
            found = self._pages(np.maximum(slots, 0))
            live = (slots >= 0) & (found >= 0)
            return rows[kept][live], found[live]

        parts = [part for part in np.array_split(np.argsort(ids, kind="stable"), max(1, len(ids) // 256)) if len(part)]
        with ThreadPoolExecutor(2) as pool:  # unpacking and scanning let go of the interpreter
            yield from pool.map(scan, parts)

    def _read(self, kind: str, pages: ArrayLike, *, unusable_is_none: bool = False) -> Iterator[tuple[int, int, bytes]]:
        """(place in `pages`, document key, unpacked record; b"" where there is none), by file.

        InputError for a record that is damaged or larger than one may be; with `unusable_is_none` it counts as none.
        """
        from craw4llm.corpus.clueweb22_records import DAMAGED, MAX_UNPACKED_BYTES, unpack

        keys = self._keys(np.asarray(pages, dtype=np.int64))
        order = np.argsort(keys, kind="stable")
        numbers, records = np.divmod(keys[order], RECORDS_PER_FILE)
        at = np.searchsorted(self._slots.numbers, numbers)
        bounds = np.flatnonzero(np.diff(at)) + 1
        for chosen in np.split(np.arange(len(order)), bounds):
            if not len(chosen):
                continue
            file = self._files[int(at[chosen[0]])]
            packed = self._records.read(file, kind, records[chosen])
            for place, key, one in zip(order[chosen].tolist(), keys[order[chosen]].tolist(), packed, strict=True):
                data = unpack(one, MAX_UNPACKED_BYTES[kind]) if one else b""
                if isinstance(data, str) and unusable_is_none:
                    data = b""
                if isinstance(data, str):
                    raise InputError(
                        f"{file.path(self._records.root, kind)}: the record of {format_id(key)} is "
                        f"{'damaged or cut off' if data == DAMAGED else 'larger than a record may be'}; "
                        "put back the file that the corpus was built from"
                        + (", or build it with links='compiled', which leaves such documents out" if self.in_place else "")
                    )
                yield place, key, data

    def _checked(self, data: bytes, key: int) -> dict[str, Any]:
        try:
            record = {} if too_rich(data) else orjson.loads(data)
            if parse_id(record["ClueWeb22-ID"]) == key and isinstance(record["Clean-Text"], str | None):
                return record  # type: ignore[no-any-return]
        except (ValueError, KeyError, TypeError):
            pass
        raise InputError(
            f"the txt record of {format_id(key)} below {self._records.root} is not that document's (no JSON, another id, or no text); "
            "put back the files that the corpus was built from"
            + (", or build it with links='compiled', which leaves such documents out" if self.in_place else "")
        )

    def _urls_of(self, pages: ArrayLike) -> list[str]:
        from craw4llm.corpus.clueweb22_parts import whole_url
        from craw4llm.corpus.urls import canonical_url

        ids = np.asarray(pages, dtype=np.int64)
        urls: list[str] = [""] * len(ids)
        for place, key, data in self._read("txt", ids):
            given = None if not data or data.isspace() else self._checked(data, key).get("URL")
            urls[place] = given.strip() if isinstance(given, str) else ""
        # A link record that the build could not use (it counted it) names no URL either.
        for place, key, data in self._read("outlink", ids, unusable_is_none=not self.in_place):
            if data and not data.isspace() and not too_rich(data):
                try:
                    record = orjson.loads(data)
                    if parse_id(record["ClueWeb22-ID"]) == key:
                        urls[place] = whole_url(urls[place], record.get("url")) or ""
                except (ValueError, KeyError, TypeError):
                    pass  # txt's URL stands
        named = zip(self.document_ids(ids), urls, strict=True)
        return [(canonical_url(url) if url else None) or f"clueweb22:{doc_id}" for doc_id, url in named]


class _Names:
    """A column of names that are made when they are taken, in the place of an Arrow array."""

    def __init__(self, count: int, make: Any) -> None:
        self._count, self._make = count, make

    def __len__(self) -> int:
        return self._count

    def to_pylist(self) -> list[str]:
        return list(self._make(np.arange(self._count)))

    def take(self, rows: Any) -> Any:
        """pa.array of strings."""
        import pyarrow as pa

        return pa.array(self._make(np.asarray(rows, dtype=np.int64)), pa.string())


class _DocumentIds(_Names):
    """Document ids by their keys, without Python's strings."""

    def to_pylist(self) -> list[str]:
        return format_ids(self._make(np.arange(self._count)))

    def take(self, rows: Any) -> Any:
        import pyarrow as pa

        rows = np.asarray(rows, dtype=np.int64)
        if len(rows) > _STRINGS:
            return pa.chunked_array([self.take(rows[start : start + _STRINGS]) for start in range(0, len(rows), _STRINGS)])
        text, ends = spell_ids(self._make(rows))
        offsets = np.zeros(len(ends) + 1, dtype=np.int32)
        offsets[1:] = ends
        return pa.Array.from_buffers(pa.string(), len(ends), [None, pa.py_buffer(offsets), pa.py_buffer(text)])
