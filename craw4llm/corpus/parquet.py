"""Parquet as a source: a file, or a folder of files, with the columns url, text, outlinks and any of craw4llm.corpus.fields.

    source = open_parquet(Path("web.parquet"))
    source = open_parquet(Path("web"), files=[...], columns=(("url", "link"),))

A chunk is a row group (of a large one, a range of its rows), read where it is prepared, in batches of few megabytes. A few bytes of
Parquet can stand for gigabytes: a text that is stored once in a dictionary and meant by every row. So a batch has so few rows that they fit
even if each is the largest value of its dictionary, and becomes Python's objects in pieces of few megabytes. A cell over MAX_RECORD_BYTES
is a reject; what one row holds is decoded whole, though, before it is measured.
"""

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pyarrow.types as pt

from craw4llm.corpus.fields import REQUIRED, field_names, page_of
from craw4llm.corpus.json_bounds import MAX_RECORD_BYTES
from craw4llm.corpus.records import Page, Reject, Source
from craw4llm.errors import InputError

CHUNK_ROWS = 16_384  # of a larger row group, chunks are ranges of so many rows; each skips the rows before it
BATCH_ROWS, BATCH_BYTES = 512, 16 << 20
_BUFFER_BYTES = 1 << 20  # column chunks are streamed in pieces of this size, not read whole
_DECODED_BYTES = 32 << 20  # of a batch, if every row held its column's largest value
_OBJECT_BYTES = 60  # of a link, beside its text, as Python's object

_EXPECTED = "a corpus has the columns url (string), text (string) and outlinks (list of strings)"


@dataclasses.dataclass(frozen=True)
class RowChunk:
    """Rows of a file. start: the first row's number in the file; skip: in its row group. names: our name -> the column's."""

    path: str
    file: str
    row_group: int
    start: int
    skip: int
    records: int
    batch_rows: int
    names: dict[str, str]

    @property
    def label(self) -> str:
        return f"{self.file}, rows {self.start:,} to {self.start + self.records - 1:,}"

    def read(self) -> Iterator[Page | Reject]:
        file = _opened(Path(self.path))
        row = self.start
        columns = list(dict.fromkeys(self.names.values()))
        skip, left = self.skip, self.records
        try:
            fit = _rows_that_fit(Path(self.path), self.row_group, file.metadata.row_group(self.row_group), columns)
            for batch in file.iter_batches(min(self.batch_rows, fit), row_groups=[self.row_group], columns=columns):
                if skip >= batch.num_rows:
                    skip -= batch.num_rows
                    continue
                rows = batch.slice(skip, left)
                skip, left = 0, left - rows.num_rows
                for piece, too_large in _pieces(rows):
                    for k, values in enumerate(_rows(piece, self.names)):
                        if k in too_large:
                            yield Reject(self.file, row, str(values.get("url") or ""), "too_large")
                        else:
                            yield page_of(self.file, row, values)
                        row += 1
                if not left:
                    break
        except (pa.ArrowException, OSError) as error:
            raise InputError(f"corpus: {self.path} is damaged after row {row:,}: {error}; get the file anew") from error


def open_parquet(path: Path, files: Sequence[Path] = (), columns: Sequence[tuple[str, str]] = ()) -> Source:
    """A file, or the `files` of the folder `path`. Raises InputError where one is no Parquet file or has other columns."""
    chunks: list[RowChunk] = []
    records = 0
    for file_path in files or [path]:
        file = _opened(file_path)
        names = _checked_columns(file_path, file.schema_arrow, columns)
        name = file_path.relative_to(path).as_posix() if files else path.name
        start = 0
        for g in range(file.num_row_groups):
            group = file.metadata.row_group(g)
            per_row = max(1, group.total_byte_size // max(1, group.num_rows))
            batch_rows = max(1, min(BATCH_ROWS, BATCH_BYTES // per_row))
            for skip in range(0, group.num_rows, CHUNK_ROWS):
                rows = min(CHUNK_ROWS, group.num_rows - skip)
                chunks.append(RowChunk(str(file_path), name, g, start + skip, skip, rows, batch_rows, names))
            start += group.num_rows
        records += start
    what = f"{len(files):,} Parquet files of {path.name}" if files else f"the Parquet file {path.name}"
    return Source(chunks=chunks, records=records, origin=f"{what}, {records:,} rows")


def _opened(path: Path, dictionaries: Sequence[str] = ()) -> pq.ParquetFile:
    """dictionaries: columns of strings that are read as indices and a dictionary."""
    try:
        return pq.ParquetFile(path, buffer_size=_BUFFER_BYTES, read_dictionary=list(dictionaries))
    except (pa.ArrowException, OSError) as error:
        raise InputError(f"corpus: {path} cannot be read as Parquet: {error}; {_EXPECTED}") from error


def _checked_columns(path: Path, schema: pa.Schema, columns: Sequence[tuple[str, str]]) -> dict[str, str]:
    """Our name -> the column's, of those that can be read."""
    needed: dict[str, Callable[[pa.DataType], bool]] = {"url": _is_string, "text": _is_string, "outlinks": _is_string_list}
    optional: dict[str, Callable[[pa.DataType], bool]] = {
        "anchors": _is_string_list,
        "link_flags": _is_integer_list,
        "doc_id": lambda kind: _is_string(kind) or pt.is_integer(kind),
        "signals": pt.is_integer,
        "score": lambda kind: pt.is_floating(kind) or pt.is_integer(kind),
    }
    found = ", ".join(f"{field.name} ({field.type})" for field in schema) or "none"
    names = field_names(columns, schema.names, str(path))
    for name in REQUIRED:
        if name not in names:
            raise InputError(f"corpus: {path} has no column {name!r}; its columns are: {found}; {_EXPECTED}")
    given = {name for name, _ in columns}
    for name, column in list(names.items()):
        if schema.names.count(column) > 1:
            raise InputError(f"corpus: {path} has the column {column!r} more than once; its columns are: {found}; {_EXPECTED}")
        if (needed.get(name) or optional.get(name, _is_string))(schema.field(column).type):
            continue
        if name in needed or name in given:
            raise InputError(f"corpus: the column {column!r} of {path} is {schema.field(column).type}; {_EXPECTED}")
        del names[name]  # a column that happens to be called so
    return names


def _is_string(kind: pa.DataType) -> bool:
    if pt.is_dictionary(kind):
        return _is_string(kind.value_type)
    return bool(pt.is_string(kind) or pt.is_large_string(kind) or pt.is_string_view(kind))


def _is_list(kind: pa.DataType) -> bool:
    return bool(pt.is_list(kind) or pt.is_large_list(kind) or pt.is_fixed_size_list(kind))


def _is_string_list(kind: pa.DataType) -> bool:
    return _is_list(kind) and bool(_is_string(kind.value_type) or pt.is_null(kind.value_type))


def _is_integer_list(kind: pa.DataType) -> bool:
    return _is_list(kind) and bool(pt.is_integer(kind.value_type) or pt.is_null(kind.value_type))


def _rows_that_fit(path: Path, row_group: int, group: pq.RowGroupMetaData, names: Sequence[str]) -> int:
    """How many rows of a row group fit _DECODED_BYTES, if each were the largest value of its columns' dictionaries.

    A dictionary's size stands in its page's own header (parquet.thrift, PageHeader, in the compact protocol: field 1 the type, field 2 the
    size); only a large one is looked into.
    """
    large = []
    with path.open("rb") as stream:
        for k in range(group.num_columns):
            column = group.column(k)
            # A list's column has another path (outlinks.list.element); its values are counted when the batch is there.
            if column.physical_type != "BYTE_ARRAY" or column.dictionary_page_offset is None or column.path_in_schema not in names:
                continue
            stream.seek(column.dictionary_page_offset)
            size = _page_bytes(stream.read(16))
            if size is None or size > _DECODED_BYTES // BATCH_ROWS:
                large.append(column.path_in_schema)
    largest = 1
    for name in large:
        first = next(_opened(path, [name]).iter_batches(1, row_groups=[row_group], columns=[name]), None)
        if first is not None and pt.is_dictionary(first.column(0).type):
            largest = max(largest, int(_row_bytes(first.column(0).dictionary).max(initial=0)))
    return max(1, _DECODED_BYTES // largest)


def _page_bytes(header: bytes) -> int | None:
    """The uncompressed size in a page's header; None where it is not understood."""
    at, value = 0, 0
    for _ in range(2):
        if header[at : at + 1] != b"\x15":  # the next field, an i32
            return None
        at, value, shift = at + 1, 0, 0
        while at < len(header):
            value |= (header[at] & 127) << shift
            at, shift = at + 1, shift + 7
            if header[at - 1] < 128:
                break
    return value >> 1  # zigzag


def _pieces(batch: pa.RecordBatch) -> Iterator[tuple[pa.RecordBatch, frozenset[int]]]:
    """(some rows, cells over MAX_RECORD_BYTES taken out; which of the rows had such) of a batch, each of about BATCH_BYTES."""
    if sum(_at_most(column) for column in batch.columns) <= BATCH_BYTES:
        yield batch, frozenset()
        return
    total = np.zeros(batch.num_rows, dtype=np.int64)
    giant = np.zeros(batch.num_rows, dtype=np.bool_)
    for k, column in enumerate(batch.columns):
        size = _row_bytes(column)
        over = size > MAX_RECORD_BYTES
        if over.any():
            batch = batch.set_column(k, batch.schema.field(k), _nulled(column, pa.array(over)))
            size[over] = 0
        giant |= over
        total += size
    number = (np.cumsum(total) - total) // BATCH_BYTES  # of the piece that each row begins in
    starts = np.flatnonzero(np.diff(number, prepend=-1))
    for start, stop in zip(starts.tolist(), [*starts[1:].tolist(), batch.num_rows], strict=True):
        yield batch.slice(start, stop - start), frozenset(np.flatnonzero(giant[start:stop]).tolist())


def _nulled(column: pa.Array, rows: pa.Array) -> pa.Array:
    if pt.is_dictionary(column.type):
        return pa.DictionaryArray.from_arrays(_nulled(column.indices, rows), column.dictionary)
    return pc.if_else(rows, pa.scalar(None, column.type), column)


def _at_most(column: pa.Array) -> int:
    """Bytes that the column's Python objects take at most, but for a constant per row."""
    if pt.is_dictionary(column.type):
        return len(column) * int(_row_bytes(column.dictionary).max(initial=0))
    if _is_list(column.type):
        return column.nbytes + _OBJECT_BYTES * len(column.flatten())
    return int(column.nbytes)


def _row_bytes(column: pa.Array) -> np.ndarray:
    """int64, of each row: bytes of its string, or of its list of strings with what Python adds to each."""
    if pt.is_dictionary(column.type):
        sizes = _row_bytes(column.dictionary)
        return sizes[column.indices.fill_null(0).to_numpy()] if len(sizes) else np.zeros(len(column), dtype=np.int64)
    if _is_list(column.type):
        counts = pc.fill_null(pc.list_value_length(column), 0).to_numpy(zero_copy_only=False).astype(np.int64)
        inner = np.concatenate([[0], np.cumsum(_row_bytes(column.flatten()) + _OBJECT_BYTES)])
        ends = np.cumsum(counts)
        return inner[ends] - inner[ends - counts]
    if _is_string(column.type):
        kind = pa.large_string() if pt.is_string_view(column.type) else column.type
        return pc.fill_null(pc.binary_length(column.cast(kind)), 0).to_numpy(zero_copy_only=False).astype(np.int64)
    return np.full(len(column), 8, dtype=np.int64)


def _rows(batch: pa.RecordBatch, names: dict[str, str]) -> Iterator[dict[str, Any]]:
    columns = [_values(batch.column(column)) for column in names.values()]
    for values in zip(*columns, strict=True):
        yield dict(zip(names, values, strict=True))


def _values(column: pa.Array) -> list[Any]:
    """The column as Python values; a string that is no valid UTF-8 (Parquet does not check) as its bytes."""
    if pt.is_dictionary(column.type):
        column = column.dictionary_decode()
    try:
        return list(column.to_pylist())
    except UnicodeDecodeError:
        return [_value(scalar) for scalar in column]


def _value(scalar: Any) -> Any:
    try:
        return scalar.as_py()
    except UnicodeDecodeError:
        if isinstance(scalar, pa.ListScalar | pa.LargeListScalar | pa.FixedSizeListScalar):
            return [_value(item) for item in scalar.values]
        return bytes(scalar.cast(pa.binary()).as_buffer())
