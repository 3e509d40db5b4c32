"""Parquet as a source: a file, or a folder of files, with the columns url, text, outlinks and any of craw4llm.corpus.fields.

    source = open_parquet(Path("web.parquet"))
    source = open_parquet(Path("web"), files=[...], columns=(("url", "link"),))

A chunk is a row group (of a large one, a range of its rows), read where it is prepared, in batches of few megabytes.
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

from craw4llm.corpus.fields import MAX_RECORD_BYTES, REQUIRED, field_names, page_of
from craw4llm.corpus.records import Page, Reject, Source
from craw4llm.errors import InputError

CHUNK_ROWS = 16_384  # of a larger row group, chunks are ranges of so many rows; each skips the rows before it
BATCH_ROWS, BATCH_BYTES = 512, 16 << 20
_BUFFER_BYTES = 1 << 20  # column chunks are streamed in pieces of this size, not read whole

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
            for batch in file.iter_batches(self.batch_rows, row_groups=[self.row_group], columns=columns):
                if skip >= batch.num_rows:
                    skip -= batch.num_rows
                    continue
                rows = batch.slice(skip, left)
                skip, left = 0, left - rows.num_rows
                rows, too_large = _without_giants(rows, self.names["text"])
                for k, values in enumerate(_rows(rows, self.names)):
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


def _opened(path: Path) -> pq.ParquetFile:
    try:
        return pq.ParquetFile(path, buffer_size=_BUFFER_BYTES)
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


def _without_giants(batch: pa.RecordBatch, column: str) -> tuple[pa.RecordBatch, frozenset[int]]:
    """(the rows, texts over MAX_RECORD_BYTES taken out; the rows that had them)."""
    texts = batch.column(column)
    if texts.nbytes <= MAX_RECORD_BYTES or pt.is_dictionary(texts.type):
        return batch, frozenset()
    giant = pc.fill_null(pc.greater(pc.binary_length(texts), MAX_RECORD_BYTES), False)
    rows = np.flatnonzero(giant.to_numpy(zero_copy_only=False))
    if len(rows):
        batch = batch.set_column(batch.schema.get_field_index(column), column, pc.if_else(giant, None, texts))
    return batch, frozenset(rows.tolist())


def _rows(batch: pa.RecordBatch, names: dict[str, str]) -> Iterator[dict[str, Any]]:
    columns = [_values(batch.column(column)) for column in names.values()]
    for values in zip(*columns, strict=True):
        yield dict(zip(names, values, strict=True))


def _values(column: pa.Array) -> list[Any]:
    """The column as Python values; a string that is no valid UTF-8 (Parquet does not check) as its bytes."""
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
