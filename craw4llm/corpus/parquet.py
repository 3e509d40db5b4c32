"""A Parquet file as a source: the columns url, text, outlinks; further columns are ignored.

    source = open_parquet(Path("web.parquet"))

    url       string
    text      string; null is an empty text
    outlinks  list of strings, absolute or relative to the page; null is no links
    package   string, optional: becomes the page table's `source` (otherwise the file's name)

Read in batches of rows, so memory does not grow with the file.
"""

import dataclasses
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pyarrow.types as pt

from craw4llm.corpus.records import Page, Reject, Source
from craw4llm.errors import InputError

BATCH_ROWS = 512
_BUFFER_BYTES = 1 << 20  # column chunks are streamed in pieces of this size, not read whole

_EXPECTED = "a corpus has the columns url (string), text (string) and outlinks (list of strings)"


@dataclasses.dataclass(frozen=True)
class RowChunk:
    """Rows of a file. start: the first row's number."""

    file: str
    start: int
    rows: pa.RecordBatch

    @property
    def label(self) -> str:
        return f"{self.file}, rows {self.start:,} to {self.start + self.records - 1:,}"

    @property
    def records(self) -> int:
        return int(self.rows.num_rows)

    def read(self) -> Iterator[Page | Reject]:
        columns = {name: _values(self.rows.column(name)) for name in self.rows.schema.names}
        sources = columns.get("package", [None] * self.records)
        rows = zip(sources, columns["url"], columns["text"], columns["outlinks"], strict=True)
        for k, (source, url, text, links) in enumerate(rows):
            yield Page(source if isinstance(source, str) and source else self.file, self.start + k, url, text, links or ())


def open_parquet(path: Path) -> Source:
    """The file as a source. Raises InputError where it is no Parquet file or has other columns."""
    try:
        file = pq.ParquetFile(path, buffer_size=_BUFFER_BYTES)
    except (pa.ArrowException, OSError) as error:
        raise InputError(f"corpus: {path} cannot be read as Parquet: {error}; {_EXPECTED}") from error
    schema = file.schema_arrow
    _check_columns(path, schema)
    columns = ["url", "text", "outlinks"]
    if "package" in schema.names and _is_string(schema.field("package").type):
        columns.append("package")
    return Source(
        chunks=_chunks(path, file, columns),
        records=file.metadata.num_rows,
        origin=f"the Parquet file {path.name}, {file.metadata.num_rows:,} rows",
    )


def _chunks(path: Path, file: pq.ParquetFile, columns: list[str]) -> Iterator[RowChunk]:
    start = 0
    try:
        for batch in file.iter_batches(batch_size=BATCH_ROWS, columns=columns):
            yield RowChunk(path.name, start, batch)
            start += batch.num_rows
    except (pa.ArrowException, OSError) as error:
        raise InputError(f"corpus: {path} is damaged after row {start:,}: {error}; get the file anew") from error


def _check_columns(path: Path, schema: pa.Schema) -> None:
    wanted: dict[str, Callable[[pa.DataType], bool]] = {"url": _is_string, "text": _is_string, "outlinks": _is_string_list}
    found = ", ".join(f"{field.name} ({field.type})" for field in schema) or "none"
    for name, fits in wanted.items():
        if name not in schema.names:
            raise InputError(f"corpus: {path} has no column {name!r}; its columns are: {found}; {_EXPECTED}")
        if schema.names.count(name) > 1:
            raise InputError(f"corpus: {path} has the column {name!r} more than once; its columns are: {found}; {_EXPECTED}")
        if not fits(schema.field(name).type):
            raise InputError(f"corpus: the column {name!r} of {path} is {schema.field(name).type}; {_EXPECTED}")


def _is_string(kind: pa.DataType) -> bool:
    if pt.is_dictionary(kind):
        return _is_string(kind.value_type)
    return bool(pt.is_string(kind) or pt.is_large_string(kind) or pt.is_string_view(kind))


def _is_string_list(kind: pa.DataType) -> bool:
    is_list = pt.is_list(kind) or pt.is_large_list(kind) or pt.is_fixed_size_list(kind)
    return bool(is_list and (_is_string(kind.value_type) or pt.is_null(kind.value_type)))


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
