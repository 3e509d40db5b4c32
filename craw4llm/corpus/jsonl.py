"""JSON lines as a source: a file, or a folder of files (.jsonl, .ndjson; plain, .gz or .zst), an object a line (craw4llm.corpus.fields).

    source = open_jsonl(Path("pages.jsonl.gz"))

    {"url": "https://a.example/", "text": "...", "outlinks": ["/b", "https://c.example/"]}

A plain file is cut into ranges of bytes, which are read anywhere; a compressed one is read from its start. The `position` of a page or
reject is the byte, in the uncompressed file, where its line begins. A line that is no object, has broken UTF-8, is longer than
MAX_LINE_BYTES, holds too many values (craw4llm.corpus.json_bounds), or is cut off by the file's end is one reject; the lines after it are
read. Where a compressed file is damaged, all after the last gzip member whose checksum is right is one reject: it may be wrong without
looking so. A file that is only cut off is read up to there. A line that goes on for MAX_SKIPPED_BYTES (a decompression bomb) ends its file.
"""

import dataclasses
import gzip
import json
import zlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO, get_args

import orjson
import pyarrow as pa

from craw4llm.configs import Column
from craw4llm.corpus.fields import field_names, page_of
from craw4llm.corpus.json_bounds import MAX_RECORD_BYTES, too_rich
from craw4llm.corpus.records import Page, ReadAgain, Reject, Skipped, Source
from craw4llm.errors import InputError

ENDINGS = tuple(f"{name}{packed}" for name in (".jsonl", ".ndjson") for packed in ("", ".gz", ".zst"))
CHUNK_BYTES = 32 << 20
MAX_LINE_BYTES = MAX_RECORD_BYTES
MAX_SKIPPED_BYTES = 1 << 30
_BLOCK = 1 << 20
_LOOK_LINES = 16  # lines at the beginning of the first file that show its fields


@dataclasses.dataclass(frozen=True)
class LineChunk:
    """The lines that begin in the bytes [start, stop) of a file; stop None: to its end, which is decompressed where its name says so."""

    path: str
    file: str
    start: int
    stop: int | None
    names: dict[str, str]
    records: int | None = None
    sound: int | None = None  # of a damaged file: so many uncompressed bytes are proved right by their checksums

    @property
    def label(self) -> str:
        return self.file if self.stop is None else f"{self.file}, bytes {self.start:,} to {self.stop:,}"

    def read(self) -> Iterator[Page | Reject | Skipped]:
        with _open(Path(self.path)) as stream:
            yield from self._read(stream)

    def _read(self, stream: BinaryIO) -> Iterator[Page | Reject | Skipped]:
        if self.start:  # the line that begins before `start` is another chunk's, unless it ends exactly there
            stream.seek(self.start - 1)
            position = self.start - 1
            lines = _lines(stream, position)
            next(lines)
        else:
            lines = _lines(stream, 0)
        for position, line, reason in lines:
            if self.stop is not None and position >= self.stop:
                break
            if reason == "damaged" and self.sound is None and self.file.lower().endswith((".gz", ".zst")):
                # Damage shows after it was decompressed: lines before it may be wrong without looking so.
                raise ReadAgain(dataclasses.replace(self, sound=_sound_bytes(Path(self.path))))
            if self.sound is not None and position + max(1, len(line)) > self.sound:
                yield Reject(self.file, position, "", "damaged")
                break
            if reason:
                yield Reject(self.file, position, "", reason)
            elif line.isspace():
                yield Skipped("empty line")
            else:
                yield self._page(position, line)

    def _page(self, position: int, line: bytes) -> Page | Reject:
        if too_rich(line):
            return Reject(self.file, position, "", "too_large")
        try:
            record = orjson.loads(line)
        except orjson.JSONDecodeError:
            record = _second_look(line)
            if isinstance(record, str):
                return Reject(self.file, position, "", "cut_off" if record == "not_json" and not line.endswith(b"\n") else record)
        if not isinstance(record, dict):
            return Reject(self.file, position, "", "not_json")
        names = self.names
        return page_of(self.file, position, {name: record.get(field) for name, field in names.items()})


def open_jsonl(path: Path, files: Sequence[Path] = (), columns: Sequence[tuple[str, str]] = ()) -> Source:
    """A file, or the `files` of the folder `path`. Raises InputError where the first lines have no url."""
    listed = list(files) or [path]
    has = _fields(listed)
    names = field_names(columns, has, str(path))
    if "url" not in names:
        raise InputError(
            f"corpus: the first lines of {path} have no field 'url'; they have {', '.join(has) or 'none'}; expected a JSON object a line "
            "with url, text and outlinks; name other fields with `columns`"
        )
    names = {name: name for name in get_args(Column)} | names  # the other fields may come later
    chunks = []
    for file_path in listed:
        name = file_path.relative_to(path).as_posix() if files else path.name
        if name.lower().endswith((".gz", ".zst")):
            chunks.append(LineChunk(str(file_path), name, 0, None, names))
            continue
        size = file_path.stat().st_size
        for start in range(0, size, CHUNK_BYTES):
            chunks.append(LineChunk(str(file_path), name, start, min(start + CHUNK_BYTES, size), names))
    what = f"{len(files):,} JSON lines files of {path.name}" if files else f"the JSON lines file {path.name}"
    return Source(chunks=chunks, records=None, origin=what)


def _fields(files: Sequence[Path]) -> list[str]:
    """Names of the fields in the first lines that can be read."""
    found: dict[str, None] = {}
    for path in files:
        looked = 0
        with _open(path) as stream:
            for _, line, reason in _lines(stream, 0):
                if looked >= _LOOK_LINES:
                    break
                looked += 1
                try:
                    record = None if reason or too_rich(line) else orjson.loads(line)
                except orjson.JSONDecodeError:
                    record = _second_look(line)
                if isinstance(record, dict):
                    found |= dict.fromkeys(record)
        if found:
            break
    return list(found)


def _open(path: Path) -> BinaryIO:
    name = path.name.lower()
    if name.endswith(".gz"):
        return gzip.open(path, "rb")  # type: ignore[return-value]
    if name.endswith(".zst"):
        return pa.CompressedInputStream(pa.OSFile(str(path), "rb"), "zstd")  # type: ignore[no-any-return]
    return path.open("rb")


def _sound_bytes(path: Path) -> int:
    """Uncompressed bytes of the gzip members before the first that is damaged; 0 for other packings, which prove nothing."""
    if not path.name.lower().endswith(".gz"):
        return 0
    sound = 0
    with path.open("rb") as stream:
        member, size, block = zlib.decompressobj(31), 0, b""
        while block := block or stream.read(_BLOCK):
            try:
                while block and not member.eof:
                    size += len(member.decompress(block, _BLOCK))
                    block = member.unconsumed_tail
            except zlib.error:
                break
            if member.eof:
                sound, block = sound + size, member.unused_data
                member, size = zlib.decompressobj(31), 0
    return sound


def _lines(stream: BinaryIO, at: int) -> Iterator[tuple[int, bytes, str]]:
    """(byte where the line begins, the line with its end, "") or (byte, b"", reason); in bounded memory. `at`: where the stream stands."""
    waiting = bytearray()
    begin = at
    too_long = skipped = 0
    searched = 0
    while True:
        try:
            block = stream.read(_BLOCK)
        except (EOFError, gzip.BadGzipFile, zlib.error, pa.ArrowException, OSError) as error:
            if too_long:
                yield begin, b"", "too_large"
                begin += too_long
            elif waiting:
                begin += len(waiting)
            yield begin, b"", "cut_off" if isinstance(error, EOFError) or "truncated" in str(error).lower() else "damaged"
            return
        if not block:
            break
        if too_long:
            end = block.find(b"\n")
            if end < 0:
                too_long += len(block)
                skipped += len(block)
                if skipped > MAX_SKIPPED_BYTES:
                    yield begin, b"", "too_large"
                    yield begin + too_long, b"", "damaged"
                    return
                continue
            too_long += end + 1
            yield begin, b"", "too_large"
            begin += too_long
            too_long = skipped = 0
            block = block[end + 1 :]
        waiting += block
        first = 0
        while (end := waiting.find(b"\n", max(first, searched))) >= 0:
            yield begin, bytes(memoryview(waiting)[first : end + 1]), ""
            begin += end + 1 - first
            first = searched = end + 1
        del waiting[:first]
        searched = len(waiting)
        if len(waiting) > MAX_LINE_BYTES:
            too_long = len(waiting)
            waiting.clear()
            searched = 0
    if too_long:
        yield begin, b"", "too_large"
    elif waiting:
        yield begin, bytes(waiting), ""


def _second_look(line: bytes) -> Any:
    """What a line that orjson refuses is: an object with lone surrogates (the build says so), or a reason."""
    try:
        text = line.decode()
    except UnicodeDecodeError:
        return "invalid_unicode"
    try:
        return json.loads(text, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return "not_json"


def _refuse(constant: str) -> Callable[[], None]:
    raise ValueError(f"{constant} is no JSON")
