"""Single records of ClueWeb22: read by offset, unpacked, and checked one by one.

    files = RecordFiles(root)
    files.read(file, "txt", [3, 8])       the two records, packed (b"" for one that takes no bytes)
    unpack(packed, limit)                 -> JSON bytes; DAMAGED, TOO_LARGE
    parse_text(json, doc_id)              -> Text(url, text), MISSING, or a reason of REASONS

Each record is a gzip member of its own. isal unpacks it in two thirds of zlib's time, with the CRC checked. Of what a member unpacks to no
more is held than a record may have, and of what an .offset file says of its length no more is read.
"""

import ctypes
import functools
import json
import os
import threading
from collections import OrderedDict
from pathlib import Path
from typing import NamedTuple

import numpy as np
import orjson
from isal import isal_zlib
from numpy.typing import ArrayLike, NDArray

from craw4llm.corpus.clueweb22_files import RECORDS_PER_FILE, ROW_BYTES, DataFile
from craw4llm.corpus.json_bounds import MAX_RECORD_BYTES, too_rich
from craw4llm.errors import InputError

MISSING = "missing"
DAMAGED, TOO_LARGE = "damaged", "too_large"  # what a member is that is not unpacked
# Why a record is no page.
REASONS = {
    "cut_off": "the file ends within the record",
    "damaged": "the record cannot be unpacked",
    "not_json": "the record is no JSON object",
    "wrong_id": "another document's id stands in the record, or none",
    "text_not_string": "the text is neither a string nor null",
    "invalid_unicode": "the record is no valid Unicode (broken UTF-8, a lone surrogate)",
    "too_large": "the record, unpacked, is larger than a page may be",
}
# By kind: links are scanned as bytes, texts become Python's objects.
MAX_UNPACKED_BYTES = {"txt": MAX_RECORD_BYTES, "outlink": 32 << 20, "inlink": 32 << 20}
MAX_PACKED_BYTES = 32 << 20
BLANK_BYTES = 40  # the gzip member of an empty line takes 21 bytes; a longer one holds a record
OPEN_FILES = 128  # of each thread
_GZIP = 31
_PIECE_BYTES = 2 << 20
_TRIM = getattr(ctypes.CDLL(None), "malloc_trim", None)
_had_large = False  # since free memory was last given back


class Text(NamedTuple):  # made in a third of a frozen dataclass' time
    """url: as the record has it, without white space around it; None where it is no string. line_end: whether it ended with one."""

    url: str | None
    text: str
    line_end: bool


def load_offsets(path: Path, named: Path | None = None) -> tuple[NDArray[np.int64], bool]:
    """`read_offsets` of a file, which is not read where it is far too long to be one. Errors name `named`, where given."""
    size = path.stat().st_size
    if size > (RECORDS_PER_FILE + 1) * (ROW_BYTES + 1):
        raise _bad_offsets(path, f"{size:,} bytes, more than the rows of {RECORDS_PER_FILE:,} records")
    return read_offsets(path.read_bytes(), named or path)


def read_offsets(data: bytes, path: Path) -> tuple[NDArray[np.int64], bool]:
    """(int64[records + 1], whether rows ran together) of an .offset file. InputError for one that cannot be understood."""
    loose = len(data) % ROW_BYTES != 0
    rows = np.frombuffer(data, dtype=np.uint8)
    if not loose:
        rows = rows.reshape(-1, ROW_BYTES)
        loose = bool((rows[:, -1] != 10).any())
        rows = rows[:, :-1]
    if loose:  # every number has ten digits, so they can be told apart without the line ends
        digits = np.frombuffer(b"".join(data.split()), dtype=np.uint8)
        if len(digits) % (ROW_BYTES - 1):
            raise _bad_offsets(path, f"{len(data)} bytes, no whole number of rows")
        rows = digits.reshape(-1, ROW_BYTES - 1)
    if len(rows) < 1 or (rows < 48).any() or (rows > 57).any():
        raise _bad_offsets(path, "no row, or one that is no number")
    offsets = np.zeros(len(rows), dtype=np.int64)
    for digit in np.ascontiguousarray(rows.T - np.uint8(48)):
        offsets *= 10
        offsets += digit
    if offsets[0] != 0 or (np.diff(offsets) < 0).any():
        raise _bad_offsets(path, "offsets that do not begin with 0 and ascend")
    return offsets, loose


@functools.lru_cache(OPEN_FILES)
def _loaded_offsets(path: Path, named: Path, size: int, changed: int) -> NDArray[np.int64]:
    """For all threads of the process, each of which opens the files for itself. size, changed: of the file, so that another one is read."""
    return load_offsets(path, named)[0]


def unpack(packed: bytes, limit: int) -> bytes | str:
    """The bytes of a gzip member; DAMAGED where it is damaged or cut off or something follows it, TOO_LARGE for more than `limit` bytes."""
    unpacker = isal_zlib.decompressobj(_GZIP)
    first = limit if limit < _PIECE_BYTES else _PIECE_BYTES
    try:
        data: bytes = unpacker.decompress(packed, first + 1)
        if len(data) > first:
            return TOO_LARGE if first == limit else _unpack_large(packed, limit)
    except isal_zlib.IsalError:  # type: ignore[misc]
        return DAMAGED
    return data if unpacker.eof and not unpacker.unused_data else DAMAGED


def _unpack_large(packed: bytes, limit: int) -> bytes | str:
    """As `unpack`. The member is measured before it is held: a bomb takes a piece and not its limit."""
    global _had_large
    unpacker = isal_zlib.decompressobj(_GZIP)
    size, rest = 0, packed
    while size <= limit and not unpacker.eof and (piece := len(unpacker.decompress(rest, _PIECE_BYTES))):
        size, rest = size + piece, unpacker.unconsumed_tail
    if size > limit:
        return TOO_LARGE
    if not unpacker.eof or unpacker.unused_data:
        return DAMAGED
    give_back()
    _had_large = True
    data: bytes = isal_zlib.decompress(packed, _GZIP, size + 1)  # with no room left it would double what it has
    return data


def give_back() -> None:
    """After a large record, free memory back to the system, where the C library has a call for it: glibc keeps up to 64 MB of it."""
    global _had_large
    if _had_large and _TRIM is not None:
        _TRIM(0)
    _had_large = False


def stated_bytes(packed: bytes) -> int:
    """What a gzip member says of its unpacked size (RFC 1952, 2.3.1: ISIZE, modulo 2^32): a hint, true of sound members alone."""
    return int.from_bytes(packed[-4:], "little")


def parse_text(data: bytes, doc_id: str, max_chars: int) -> Text | str:
    """A txt record; MISSING for an empty line; else the reason why it is no page. doc_id: of the document that must stand here."""
    if too_rich(data):
        return TOO_LARGE
    try:
        record = orjson.loads(data)
    except orjson.JSONDecodeError:
        if not data or data.isspace():
            return MISSING
        return _not_parsed(data)
    if type(record) is not dict:
        return MISSING if record is None else "not_json"
    if record.get("ClueWeb22-ID") != doc_id:
        return "wrong_id"
    text = record.get("Clean-Text")
    if text is None:
        text = ""
    elif type(text) is not str:
        return "text_not_string"
    url = record.get("URL")
    if type(url) is not str:
        return Text(None, text[:max_chars], False)
    return Text(url.strip(), text[:max_chars], url.endswith("\n"))  # a slice of the whole is no copy


def _not_parsed(data: bytes) -> str:
    """Why orjson refuses a record: lone surrogates and broken UTF-8, which a laxer parser lets pass, or no JSON."""
    try:
        json.loads(data.decode(errors="replace"), strict=False)
    except ValueError:
        return "not_json"
    return "invalid_unicode"


def _bad_offsets(path: Path, what: str) -> InputError:
    return InputError(
        f"corpus: {path} has {what}; expected rows of ten digits and a line end, one more than there are records. Get the file again"
    )


class _Open:
    """An open data file with its offsets."""

    def __init__(self, path: Path, size: int) -> None:
        try:
            self.handle = os.open(path, os.O_RDONLY)
        except OSError as error:
            raise InputError(
                f"corpus: {path} cannot be read ({error.strerror}); the texts of ClueWeb22 stay in its own files: "
                "put the folder back, or set CRAW4LLM_CLUEWEB22 to where it is now"
            ) from error
        self.size = os.fstat(self.handle).st_size
        offsets = path.with_name(path.name.replace(".json.gz", ".offset"))
        status = offsets.stat()
        self.offsets = _loaded_offsets(offsets, path, status.st_size, status.st_mtime_ns)
        if self.size != size:
            raise InputError(
                f"corpus: {path} has {self.size:,} bytes, but the corpus was built from a file of {size:,}; "
                "put that file back, or plan the corpus again (its fingerprint changes with its files)"
            )

    def __del__(self) -> None:
        if hasattr(self, "handle"):
            os.close(self.handle)


class RecordFiles:
    """Opened files, a few for each thread. sizes: (kind, file number) -> bytes that the data file must have."""

    def __init__(self, root: Path, sizes: dict[tuple[str, int], int]) -> None:
        self.root = root
        self._sizes = sizes
        self._local = threading.local()

    def read(self, file: DataFile, kind: str, records: ArrayLike) -> list[bytes]:
        """The packed records of a file, in the order given; b"" for one that the file does not have.

        Of one that is said to be longer than MAX_PACKED_BYTES no more than that is read, so that it unpacks to nothing.
        """
        opened = self._opened(file, kind)
        if opened is None:
            return [b""] * np.size(records)
        offsets, handle = opened.offsets, opened.handle
        last = len(offsets) - 1
        numbers = np.asarray(records, dtype=np.int64)
        inside = numbers < last
        begins = np.where(inside, offsets[np.minimum(numbers, last)], 0).tolist()
        ends = np.where(inside, offsets[np.minimum(numbers + 1, last)], 0).tolist()
        return [
            os.pread(handle, min(end - begin, MAX_PACKED_BYTES), begin) if end > begin else b""
            for begin, end in zip(begins, ends, strict=True)
        ]

    def _opened(self, file: DataFile, kind: str) -> _Open | None:
        cache: OrderedDict[tuple[str, int], _Open] | None = getattr(self._local, "cache", None)
        if cache is None:
            cache = self._local.cache = OrderedDict()
        place = kind, file.number
        found = cache.get(place)
        if found is None:
            size = self._sizes.get(place)
            if size is None:  # a file that was not delivered
                return None
            found = cache[place] = _Open(file.path(self.root, kind), size)
            if len(cache) > OPEN_FILES:
                cache.popitem(last=False)
        else:
            cache.move_to_end(place)
        return found

    def __getstate__(self) -> dict[str, object]:
        return {"root": self.root, "_sizes": self._sizes}

    def __setstate__(self, state: dict[str, object]) -> None:
        self.__init__(state["root"], state["_sizes"])  # type: ignore[misc]
