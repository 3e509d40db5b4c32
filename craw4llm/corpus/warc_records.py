"""WARC files as records: where each begins and ends, checked; what is damaged is named and the rest of the file is read.

    for record in read_records(Path("CC-MAIN-00000.warc.gz")):
        record   -> WarcRecord(offset=940, version="1.0", headers={"warc-type": "response", ...}, block=b"HTTP/1.1 200 OK...", length=36578)
                    Damage(offset=12685, url="http://...", reason="cut_off")

    file -> segments (gzip members from one that begins with "WARC/" up to the next such; a plain file is one segment)
         -> records (head, Content-Length bytes, CRLF CRLF)

A record is given out only if what follows its Content-Length bytes is the end of a record: an empty line pair and the next record's first
line, or the end of its segment. Anything else is a `Damage`, after which reading goes on at the next segment or at the next line
that begins a record. A record never reaches over the beginning of a member that begins a record of its own, so a length that is too long
takes no other page's text. gzip's checksum is verified before a record is given out; where many records share one member, the member is
read once more for that, and in one that fails only records with a valid WARC-Block-Digest are given out.

Most files hold one record in each gzip member. A member that is one whole record, with nothing wrong about it, is given out as isal unpacks
it, without the search for borders; from the first member that is anything else the careful reader has the word, for its segment.

Framing is not left to FastWARC: on a wrong length or a damaged member its iterator ends, and the rest of the file is lost (tests compare
the two on every intact sample). Files of WARC 0.x (ClueWeb09 and its derivatives) may have wrong lengths throughout: there a record
whose length is wrong ends where the next line `WARC/0.x` begins.

An offset is that of the gzip member in the compressed file, or of the record in a plain file.
"""

import base64
import bisect
import dataclasses
import hashlib
import os
import re
import zlib
from collections.abc import Generator, Iterator, Mapping
from pathlib import Path
from typing import BinaryIO, Literal

from isal import isal_zlib

from craw4llm.errors import InputError

Ended = Literal["clean", "cut_off", "damaged"]

MAX_HEAD_BYTES = 65_536
BLOCK_BYTES = 16 << 20  # more of a block is not kept
CHUNK_BYTES = 32 << 20
_READ_BYTES = 65_536
_PIECE_BYTES = 1 << 20
_CAREFUL_BYTES = 512
_GZIP = b"\x1f\x8b\x08"

_HEAD_END = re.compile(rb"\r?\n\r?\n")
_VERSION = re.compile(rb"WARC/(\d\.\d+)[ \t]*\r?\n")
_RECORD_LINE = re.compile(rb"\n(?=WARC/\d\.\d+[ \t]*\r?\n[A-Za-z-]+[ \t]*:)")
_LINE_REACH = 256  # so many bytes decide whether a line begins a record
_OLD_RECORD_LINE = re.compile(rb"\n(?=WARC/0\.\d+[ \t]*\r?\n)")
_SEPARATORS = (b"\r\n\r\n", b"\n\n", b"\r\n", b"\n", b"")  # the last three only at the end of a segment
_LENGTHS = {"md5": 16, "sha1": 20, "sha224": 28, "sha256": 32, "sha384": 48, "sha512": 64}


@dataclasses.dataclass(slots=True)
class WarcRecord:
    """headers: by lower-case name, the first of each. block: what follows the head, at most `block_bytes` of it. length: all of it, bytes.

    whole: `block` has all of it.
    """

    offset: int
    version: str
    headers: dict[str, str]
    block: bytes
    length: int

    @property
    def whole(self) -> bool:
        return len(self.block) == self.length

    @property
    def kind(self) -> str:
        return self.headers.get("warc-type", "").lower()

    @property
    def url(self) -> str:
        """WARC-Target-URI, without the angle brackets that some writers put around it."""
        return self.headers.get("warc-target-uri", "").strip("<>")


@dataclasses.dataclass(slots=True)
class Damage:
    """A record that cannot be read. url: "" where its head does not tell. reason: "cut_off", "misframed" or "damaged"."""

    offset: int
    url: str
    reason: str


def read_records(path: Path, start: int = 0, end: int | None = None, block_bytes: int = BLOCK_BYTES) -> Iterator[WarcRecord | Damage]:
    """The records that begin in the bytes [start, end) of a file, in order. start: 0, one of `boundaries`, or a record's offset.

    Raises OSError, InputError.
    """
    with path.open("rb") as file:
        check_kind(path, file)
        source = _gzip_or_plain(file, start)
        while (offset := source.next_segment()) is not None:
            if source.gap is not None:
                yield Damage(source.gap, "", "damaged")
                source.gap = None
            if end is not None and offset >= end:
                return
            if isinstance(source, _Gzip):
                following = yield from _single(file, offset, end, block_bytes)
                if following is None:
                    return
                if following != offset:
                    source = _Gzip(file, following)
                    source.next_segment()
            yield from _records(source, end, block_bytes)
        if source.gap is not None:
            yield Damage(source.gap, "", "damaged")


def boundaries(path: Path, chunk_bytes: int = CHUNK_BYTES, known: Mapping[int, int | None] | None = None) -> list[int]:
    """Offsets at which a file may be divided for `read_records`: 0, and the first segment or record after every `chunk_bytes`.

    A gzip file that is larger is decompressed once, since only so its members are known for certain. known: what `following` says of some
    offsets, where it was asked before (by many processes, each from one of the `candidates` on). Raises OSError, InputError.
    """
    found = [0]
    with path.open("rb") as file:
        is_gzip = check_kind(path, file)
        if path.stat().st_size <= chunk_bytes:
            return found
        if is_gzip:
            known = known or {}
            while (after := known[found[-1]] if found[-1] in known else following(path, found[-1], chunk_bytes)) is not None:
                found.append(after)
            return found
        offset = 0
        while (after := _next_plain(file, offset)) is not None:
            offset = after
            if offset - found[-1] >= chunk_bytes:
                found.append(offset)
    return found


def candidates(path: Path, chunk_bytes: int = CHUNK_BYTES) -> list[int]:
    """Where a large gzip file is probably divided: 0, and every `chunk_bytes` the next bytes that unpack to the beginning of a record. They
    may lie within a record that holds such a file, so `boundaries` takes an offset only if the one before it leads there."""
    found: list[int] = []
    with path.open("rb") as file:
        if not check_kind(path, file) or path.stat().st_size <= chunk_bytes:
            return found
        source = _Gzip(file, 0)
        at: int | None = 0
        while at is not None:
            found.append(at)
            at = source.search(at + chunk_bytes)
    return found


def following(path: Path, start: int, chunk_bytes: int = CHUNK_BYTES) -> int | None:
    """Of a gzip file, the first segment that begins `chunk_bytes` or more after the one at `start`; what lies between is unpacked."""
    with path.open("rb") as file:
        source = _Gzip(file, start)
        while (offset := source.next_segment()) is not None:
            if offset - start >= chunk_bytes:
                return offset
            source.exhaust()
    return None


def check_kind(path: Path, file: BinaryIO) -> bool:
    """Whether the file is gzip. Raises InputError for ARC and for what is no WARC file from its first byte on."""
    file.seek(0)
    first = file.read(_READ_BYTES)
    is_gzip = first.startswith(_GZIP)
    if is_gzip:
        try:
            first = zlib.decompressobj(31).decompress(first, 1024)
        except zlib.error:
            first = b"WARC/"  # a damaged beginning: the reader says so, and goes on behind it
    if first.startswith(b"filedesc://"):
        raise InputError(f"corpus: {path} is an ARC file; only WARC is read: convert it (`warcio recompress` makes WARC of ARC)")
    if first.startswith(b"\x28\xb5\x2f\xfd"):
        raise InputError(f"corpus: {path} is compressed with zstd; expected .warc.gz (one gzip member per record) or .warc")
    if first and not first.lstrip(b"\r\n").startswith(b"WARC/"):
        raise InputError(f"corpus: {path} begins with {first[:20]!r}; a WARC file begins with WARC/ and its version")
    return is_gzip


def parse_headers(lines: bytes) -> list[tuple[str, str]]:
    """(lower-case name, value) of every line `Name: value`; a line that begins with white space continues the one before.

    WARC heads are UTF-8 (WARC 1.1, 4), HTTP heads Latin-1 (RFC 9110, 5.5) or whatever a server sends: bytes that are not UTF-8 are Latin-1.
    """
    try:
        text = lines.decode()
    except UnicodeDecodeError:
        text = lines.decode("latin-1")
    found: list[tuple[str, str]] = []
    for line in text.replace("\r\n", "\n").split("\n"):
        if line[:1] in (" ", "\t") and found:
            found[-1] = (found[-1][0], f"{found[-1][1]} {line.strip()}")
            continue
        name, colon, value = line.partition(":")
        if colon:
            found.append((name.strip().lower(), value.strip()))
    return found


def digest_fits(stated: str, *candidates: bytes) -> bool | None:
    """Whether one of the candidates has the digest `sha1:BASE32` (or hexadecimal); None where its form or algorithm is not known."""
    name, _, value = stated.partition(":")
    name = name.strip().lower().replace("-", "")
    size = _LENGTHS.get(name)
    if size is None:
        return None
    value = value.strip()
    try:
        wanted = bytes.fromhex(value) if len(value) == 2 * size else base64.b32decode(value.upper() + "=" * (-len(value) % 8))
    except ValueError:
        return None
    if len(wanted) != size:
        return None
    return any(hashlib.new(name, candidate, usedforsecurity=False).digest() == wanted for candidate in candidates)


class _Segments:
    """Bytes of a file, segment by segment. data: the part of the segment that is held, which begins at `base` within the segment.

    ended: None while the segment has more. verified: bytes of the segment whose checksum was right.
    """

    def __init__(self) -> None:
        self.data = bytearray()
        self.base = 0
        self.ended: Ended | None = None
        self.gap: int | None = None  # where bytes of no record lay before this segment

    def next_segment(self) -> int | None:
        """Goes to the next segment; its offset, or None at the end of the file."""
        raise NotImplementedError

    def more(self) -> bool:
        """Holds more of the segment; False where it has ended."""
        raise NotImplementedError

    def offset_of(self, position: int) -> int:
        """Offset in the file for a position in the segment."""
        raise NotImplementedError

    def rewind(self, position: int) -> None:
        """Holds the segment from `position` on again."""
        raise NotImplementedError

    def can_reach(self, position: int) -> bool:
        """False where it is certain that the segment ends before `position`."""
        return True

    def is_border(self, position: int) -> bool:
        """Whether a gzip member begins at `position`."""
        return False

    def skip_to(self, position: int) -> bool:
        """Holds the segment from `position` on; False where it ends before. What is passed over is not held."""
        while self.base + len(self.data) < position:
            self.drop(self.base + len(self.data))
            if not self.more():
                return False
        self.drop(position)
        return True

    def is_verified(self, position: int) -> bool:
        """Whether the checksum over the byte before `position` is right."""
        return True

    def fill(self, position: int) -> bool:
        """Holds the segment up to `position`; False where it ends before."""
        while self.base + len(self.data) < position:
            if not self.more():
                return False
        return True

    def drop(self, position: int) -> None:
        """Lets go of what is before `position`."""
        if position > self.base:
            del self.data[: position - self.base]
            self.base = position

    def exhaust(self) -> None:
        while self.more():
            self.drop(self.base + len(self.data))


class _Plain(_Segments):
    """A file that is not compressed: one segment, positions in it are those in the file."""

    def __init__(self, file: BinaryIO, start: int) -> None:
        super().__init__()
        self._file = file
        self._start: int | None = start
        self._size = file.seek(0, 2)

    def next_segment(self) -> int | None:
        start, self._start = self._start, None
        if start is None or start >= self._size:
            return None
        self.rewind(start)
        return start

    def more(self) -> bool:
        piece = self._file.read(_READ_BYTES if len(self.data) < _PIECE_BYTES else _PIECE_BYTES)
        self.data += piece
        if not piece:
            self.ended = "clean"
        return bool(piece)

    def offset_of(self, position: int) -> int:
        return position

    def rewind(self, position: int) -> None:
        self._file.seek(position)
        self.data.clear()
        self.base, self.ended = position, None

    def can_reach(self, position: int) -> bool:
        return position <= self._size

    def skip_to(self, position: int) -> bool:
        self.rewind(position)
        return True


class _Gzip(_Segments):
    """A sequence of gzip members."""

    def __init__(self, file: BinaryIO, start: int) -> None:
        super().__init__()
        self._file = file
        self._next: int | None = start
        self._first = True
        self._pending = b""
        self._piece, self._skip = _PIECE_BYTES, 0
        self._open(start)
        self._members: list[tuple[int, int]] = []  # (position in the segment, offset in the file) of each
        self._verified = 0
        self._checked: dict[int, bool] = {}  # offset of a member with many records -> whether its checksum is right

    def next_segment(self) -> int | None:
        if not self._first:
            self.exhaust()
        if self._next is None:
            return None
        offset = self._next
        if self._first:
            self._first = False
            if not self._begins_record(offset):
                following = self.search(offset + 1)
                self.gap = offset
                if following is None:
                    self._next = None
                    return None
                offset = following
        self._open(offset)
        self.data.clear()
        self.base, self.ended, self._verified = 0, None, 0
        self._members = [(0, offset)]
        self._next = None
        return offset

    def more(self) -> bool:
        if self.ended is not None:
            return False
        at = self._members[-1][1]
        while True:
            compressed = self._pending or self._file.read(_READ_BYTES)
            self._pending = b""
            if not compressed:
                self.ended, self._next = "cut_off", self.search(at + 1)  # a wrong length in gzip's own blocks can look like the end
                return False
            try:
                out = self._inflate.decompress(compressed, self._piece)
            except zlib.error:
                if (
                    self._piece > _CAREFUL_BYTES
                ):  # zlib keeps what it has of a piece with a fault: once more, in small ones, up to the fault
                    held = self.base + len(self.data) - self._members[-1][0]
                    self._open(at)
                    self._piece, self._skip = _CAREFUL_BYTES, held
                    continue
                self.ended, self._next = "damaged", self.search(at + 1)
                return False
            self._pending = self._inflate.unconsumed_tail
            if self._skip:
                known = min(self._skip, len(out))
                out, self._skip = out[known:], self._skip - known
            self.data += out
            if self._inflate.eof:
                self._member_ended(self._file.tell() - len(self._inflate.unused_data))
                return bool(out) or self.ended is None
            if out:
                return True

    def offset_of(self, position: int) -> int:
        return self._members[bisect.bisect_right(self._members, position, key=lambda member: member[0]) - 1][1]

    def rewind(self, position: int) -> None:
        start, offset = self._members[bisect.bisect_right(self._members, position, key=lambda member: member[0]) - 1]
        self._members = [member for member in self._members if member[0] <= start]
        self._open(offset)
        self.data.clear()
        self.base, self.ended, self._next, self._verified = start, None, None, start
        while self.base < position:
            if not self.fill(self.base + 1):
                return
            self.drop(min(position, self.base + len(self.data)))

    def is_border(self, position: int) -> bool:
        return any(start == position for start, _ in self._members[1:])

    def is_verified(self, position: int) -> bool:
        if position <= self._verified:
            return True
        if self.ended is not None:
            return self.ended == "clean"
        offset = self.offset_of(position - 1)
        if offset not in self._checked:
            self._checked[offset] = self._check(offset)
        return self._checked[offset]

    def _open(self, offset: int) -> None:
        self._file.seek(offset)
        self._inflate = zlib.decompressobj(31)
        self._pending = b""
        self._piece, self._skip = _PIECE_BYTES, 0

    def _member_ended(self, end: int) -> None:
        """Decides what comes after a member that is whole: another of the segment, a new segment, or nothing."""
        self._verified = self.base + len(self.data)
        self._file.seek(end)
        beginning = self._file.read(len(_GZIP))
        if not beginning:
            self.ended, self._next = "clean", None
        elif beginning != _GZIP:
            self.ended, self._next = "clean", self.search(end)
            self._file.seek(end)
            padding = self._file.read(min((self._next or end + _PIECE_BYTES) - end, _PIECE_BYTES))
            if padding.strip(b"\0"):
                self.gap = end
        elif self._begins_record(end):
            self.ended, self._next = "clean", end
        else:
            if self._members[-1][0] == self._verified:  # the member was empty: of many such, only the last is remembered
                self._members.pop()
            self._members.append((self._verified, end))
            self._open(end)

    def _begins_record(self, offset: int) -> bool:
        self._file.seek(offset)
        inflate, compressed, out = zlib.decompressobj(31), self._file.read(512), b""
        try:
            while compressed and len(out) < 5:
                out += inflate.decompress(compressed, 5 - len(out))
                compressed = inflate.unconsumed_tail or (b"" if inflate.eof else self._file.read(512))
        except zlib.error:
            return False
        return out == b"WARC/"

    def search(self, offset: int) -> int | None:
        """The next member at or after `offset` that begins a record."""
        while True:
            self._file.seek(offset)
            piece = self._file.read(_PIECE_BYTES)
            at = piece.find(_GZIP)
            while at >= 0:
                if self._begins_record(offset + at):
                    return offset + at
                at = piece.find(_GZIP, at + 1)
            if len(piece) < _PIECE_BYTES:
                return None
            offset += len(piece) - len(_GZIP) + 1

    def _check(self, offset: int) -> bool:
        """Whether the member at `offset` is whole, with the right checksum. Leaves the place in the file as it is."""
        place = self._file.tell()
        self._file.seek(offset)
        inflate, compressed = zlib.decompressobj(31), b""
        try:
            while not inflate.eof:
                compressed = inflate.unconsumed_tail or self._file.read(_READ_BYTES)
                if not compressed:
                    return False
                inflate.decompress(compressed, _PIECE_BYTES)
        except zlib.error:
            return False
        finally:
            self._file.seek(place)
        return True


def _gzip_or_plain(file: BinaryIO, start: int) -> _Segments:
    file.seek(0)
    return _Gzip(file, start) if file.read(len(_GZIP)) == _GZIP else _Plain(file, start)


def _single(file: BinaryIO, offset: int, end: int | None, block_bytes: int) -> Generator[WarcRecord, None, int | None]:
    """The records of the gzip members from `offset` on, as long as each member is one whole record and nothing else.

    Returns the offset of the first member that is not, which the careful reader takes; None where the file, or the range, is at its end.
    A record is given out only when it is known that the file ends behind its member, or that the next member begins a record. Leaves the
    place in the file as it is.
    """
    members = _Members(file.fileno(), block_bytes + MAX_HEAD_BYTES)
    member = members.read(offset)
    while member is not None:
        content, after = member
        record = _only_record(offset, content, block_bytes)
        if record is None:
            return offset
        following = members.read(after) if members.is_member(after) else None
        if following is not None and not following[0].startswith(b"WARC/"):
            return offset
        if following is None and not members.is_end(after):
            return offset
        yield record
        if following is None or (end is not None and after >= end):
            return None
        offset, member = after, following
    return offset


def _only_record(offset: int, content: bytes, block_bytes: int) -> WarcRecord | None:
    """The record that `content` is from its first to its last byte; None where it is not exactly one."""
    head_end = _HEAD_END.search(content, 0, MAX_HEAD_BYTES)
    version = _VERSION.match(content)
    if not head_end or not version or not content.endswith(b"\r\n\r\n"):
        return None
    body = head_end.end()
    headers = dict(reversed(parse_headers(content[version.end() : body])))
    length = len(content) - body - 4
    stated = headers.get("content-length", "")
    if length > block_bytes or not (stated.isascii() and stated.isdigit() and len(stated) < 19) or int(stated) != length:
        return None
    return WarcRecord(offset, version[1].decode(), headers, content[body:-4], length)


class _Members:
    """Whole gzip members of a file, unpacked by isal, their checksums verified. limit: of a member's content, in bytes."""

    def __init__(self, descriptor: int, limit: int) -> None:
        self._descriptor, self._limit = descriptor, limit
        self._at, self._held = 0, b""  # a piece of the file, and where it begins

    def read(self, offset: int) -> tuple[bytes, int] | None:
        """(content, where the member ends); None for one that is cut, damaged or larger than the limit."""
        inflate = isal_zlib.decompressobj(31)
        parts: list[bytes] = []
        room, at = self._limit + 1, offset
        try:
            while not inflate.eof:
                compressed = inflate.unconsumed_tail
                if not compressed:
                    compressed = self._piece(at)
                    at += len(compressed)
                if not compressed:
                    return None
                parts.append(inflate.decompress(compressed, room))
                room -= len(parts[-1])
                if room <= 0:
                    return None
        except isal_zlib.IsalError:  # type: ignore[misc]
            return None
        return (parts[0] if len(parts) == 1 else b"".join(parts)), at - len(inflate.unused_data)

    def is_member(self, offset: int) -> bool:
        return self._piece(offset).startswith(_GZIP)

    def is_end(self, offset: int) -> bool:
        return not self._piece(offset)

    def _piece(self, offset: int) -> bytes:
        """Bytes from `offset` on, three at least where the file has them; none at its end."""
        within = offset - self._at
        if not 0 <= within <= len(self._held) - len(_GZIP):
            self._at, self._held, within = offset, os.pread(self._descriptor, _READ_BYTES, offset), 0
        return self._held[within:] if within else self._held


def _records(source: _Segments, end: int | None, block_bytes: int) -> Iterator[WarcRecord | Damage]:
    """The records of the segment that `source` stands in."""
    at = source.base
    said = False
    while True:
        while source.fill(at + 1) and source.data[at - source.base] in b"\r\n":
            at += 1
        source.drop(at)
        if not source.fill(at + 1):
            if source.ended in ("cut_off", "damaged") and not said:
                yield Damage(source.offset_of(at), "", source.ended)
            return
        offset = source.offset_of(at)
        if end is not None and offset >= end and isinstance(source, _Plain):
            return
        record, following = _record(source, at, offset, block_bytes)
        yield record
        said = isinstance(record, Damage)
        if said:
            found = _next_line(source, following)
            if found is None:
                return
            following = found
        at = following


def _record(source: _Segments, at: int, offset: int, block_bytes: int) -> tuple[WarcRecord | Damage, int]:
    """The record that begins at `at`, and where reading goes on: at its end, or, after damage, in search of a record's first line."""
    while not (head_end := _HEAD_END.search(source.data, at - source.base, at - source.base + MAX_HEAD_BYTES)):
        if source.base + len(source.data) - at >= MAX_HEAD_BYTES or not source.more():
            return Damage(offset, "", _why(source, "misframed")), at + 1
    body = source.base + head_end.end()
    head = bytes(source.data[at - source.base : head_end.end()])
    version = _VERSION.match(head)
    if not version:
        return Damage(offset, "", "misframed"), at + 1
    headers: dict[str, str] = {}
    for name, value in parse_headers(head[version.end() :]):
        headers.setdefault(name, value)
    record = WarcRecord(offset, version[1].decode(), headers, b"", 0)
    stated = headers.get("content-length", "")
    if not (stated.isascii() and stated.isdigit() and len(stated) < 19):
        return Damage(offset, record.url, "misframed"), body
    record.length = int(stated)
    end = body + record.length
    whole = source.can_reach(end)
    if whole and (whole := source.fill(min(end, body + block_bytes))):
        record.block = bytes(source.data[body - source.base : min(end, body + block_bytes) - source.base])
        whole = record.whole or source.skip_to(end)
    if whole and _is_end(source, end):
        if source.is_verified(end) or (record.whole and _block_fits(record)):
            return record, end
        return Damage(offset, record.url, _why(source, "damaged")), end
    if source.base > body:
        source.rewind(body)
    if record.version.startswith("0.") and (old := _old_record(source, body, record, block_bytes)):
        return record, old
    return Damage(offset, record.url, "misframed" if whole else _why(source, "cut_off")), body


def _why(source: _Segments, otherwise: str) -> str:
    return source.ended if source.ended in ("cut_off", "damaged") else otherwise


def _is_end(source: _Segments, end: int) -> bool:
    """Whether a record can end at `end`: what is there, and what comes after."""
    source.fill(end + 16)
    rest = bytes(source.data[end - source.base : end - source.base + 16])
    for separator in _SEPARATORS:
        if rest.startswith(separator):
            after = rest[len(separator) :].lstrip(b"\r\n") if len(separator) == 4 else rest[len(separator) :]  # more empty lines
            if (after.startswith(b"WARC/") or source.is_border(end + len(separator))) and separator in _SEPARATORS[:2]:
                return True
            if not after and source.ended is not None:
                return True
    return False


def _block_fits(record: WarcRecord) -> bool:
    return digest_fits(record.headers.get("warc-block-digest", ""), record.block) is True


def _old_record(source: _Segments, body: int, record: WarcRecord, block_bytes: int) -> int | None:
    """A record of WARC 0.x with a wrong length: up to the next record's first line, or the end of the segment. None: none such."""
    searched = body
    while not (found := _OLD_RECORD_LINE.search(source.data, max(0, searched - source.base - 16))):
        searched = source.base + len(source.data)
        if searched - body > block_bytes:
            return None
        if not source.more():
            if source.ended != "clean":
                return None
            break
    end = source.base + (found.end() if found else len(source.data))
    if not source.is_verified(end):
        return None
    record.block = bytes(source.data[body - source.base : end - source.base]).rstrip(b"\r\n")
    record.length = len(record.block)
    return end


def _next_line(source: _Segments, at: int) -> int | None:
    """The next position in the segment, at or after `at`, where a line begins a record."""
    at -= 1  # the end of the line before
    if source.base > at:
        source.rewind(at)
    while not (found := _RECORD_LINE.search(source.data, at - source.base)):
        at = max(at, source.base + len(source.data) - _LINE_REACH)
        source.drop(at)
        if not source.more():
            return None
    return source.base + found.end()


def _next_plain(file: BinaryIO, offset: int) -> int | None:
    """Where the record after the one at `offset` begins in a plain file; None where that is not clear, and at the end."""
    file.seek(offset)
    head = file.read(MAX_HEAD_BYTES)
    head_end = _HEAD_END.search(head)
    if not head_end or not _VERSION.match(head):
        return None
    stated = dict(reversed(parse_headers(head[: head_end.end()]))).get("content-length", "")
    if not (stated.isascii() and stated.isdigit()):
        return None
    end = offset + head_end.end() + int(stated)
    file.seek(end)
    rest = file.read(16)
    for separator in _SEPARATORS[:2]:
        if rest.startswith(separator + b"WARC/"):
            return end + len(separator)
    return None
