"""Parquet files of this project's own, written and read as `pyarrow.parquet` does, byte for byte, by the classes that are below it.

    write(table, path, row_group_rows=1 << 17, dictionary=["depth"])
    ParquetFile(path).read(["page"])                -> pa.Table
    ParquetFile(path).read_row_group(0, ["page"])   -> pa.Table

`import pyarrow.parquet` brings pyarrow's filesystems, with the client libraries of S3 and OpenSSL, and its `read_table` the datasets and
the compute functions: 10 and 60 ms, where a crawl over known scores takes 170. What needs more than this (filters, encryption, other
filesystems, nested columns) takes `pyarrow.parquet`.
"""

from collections.abc import Sequence
from pathlib import Path

import pyarrow as pa
from pyarrow import _parquet


def write(table: pa.Table, path: Path, *, row_group_rows: int, dictionary: Sequence[str] | bool = True) -> None:
    """As write_table(table, path, row_group_size=row_group_rows, use_dictionary=dictionary, compression="zstd") of pyarrow.parquet."""
    writer = _parquet.ParquetWriter(
        path,
        table.schema,
        version="2.6",
        compression="zstd",
        use_dictionary=dictionary,
        write_statistics=True,
        data_page_version="1.0",
        writer_engine_version="V2",
    )
    try:
        writer.write_table(table, row_group_size=row_group_rows)
    finally:
        writer.close()


class ParquetFile:
    """A file of plain columns, opened for reading."""

    def __init__(self, path: Path) -> None:
        self._reader = _parquet.ParquetReader()
        self._reader.open(path, arrow_extensions_enabled=True, pre_buffer=False)  # no threads of its own
        self.schema: pa.Schema = self._reader.schema_arrow

    @property
    def row_group_rows(self) -> list[int]:
        """Rows of each row group."""
        metadata = self._reader.metadata
        return [metadata.row_group(k).num_rows for k in range(metadata.num_row_groups)]

    def read(self, columns: Sequence[str]) -> pa.Table:
        """Some columns, in the order given. KeyError for one that it has not. In this thread alone."""
        return self._reader.read_all(self._indices(columns), use_threads=False)

    def read_row_group(self, number: int, columns: Sequence[str]) -> pa.Table:
        """Some columns of one row group."""
        return self._reader.read_row_group(number, column_indices=self._indices(columns), use_threads=False)

    def _indices(self, columns: Sequence[str]) -> list[int]:
        names = self.schema.names
        if absent := set(columns) - set(names):
            raise KeyError(f"no column {', '.join(sorted(absent))}; there are {', '.join(names)}")
        return [names.index(column) for column in columns]
