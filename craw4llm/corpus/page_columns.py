"""Columns of a large page table as arrays in files: what a crawl asks of 900 million pages is mapped, not decoded into memory.

    n_bytes = numbers(artifact, "n_bytes", n_pages)        uint32[n_pages]
    names, ids = named(artifact, "host", n_pages)          Names, int32[n_pages]
    urls = strings(artifact, "pages.parquet", "url", n)    an Arrow array, or Strings, which has the same `take`

Up to MAPPED_FROM rows the column is read from its Parquet file. A larger one is written once, row group by row group:

    <root>/memo/columns-<fingerprint>/n_bytes.npy
    <root>/memo/columns-<fingerprint>/host.npy, host.arrow
    <root>/memo/columns-<fingerprint>/pages.url.arrow          a record batch a row group, as it lies in memory

These can be made from the corpus at any time, so they belong to execution and may be deleted.
"""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from craw4llm.artifact import Artifact
from craw4llm.corpus.names import Names, first_seen
from craw4llm.corpus.npy import NpyWriter
from craw4llm.execution import process_name
from craw4llm.parquet_file import ParquetFile

MAPPED_FROM = 1 << 22  # pages; below, a column takes at most 16 MB


def numbers(artifact: Artifact, column: str, n_pages: int) -> NDArray[Any]:
    """A column of numbers of the page table, in page-id order."""
    if n_pages < MAPPED_FROM:
        return ParquetFile(artifact.file("pages.parquet")).read([column]).column(0).to_numpy()

    def write(path: Path) -> None:
        kind = ParquetFile(artifact.file("pages.parquet")).schema.field(column).type.to_pandas_dtype()
        with NpyWriter(path, kind) as out:
            for rows in _row_groups(artifact, column):
                out.append(rows.to_numpy())

    return np.load(_kept(artifact, f"{column}.npy", write), mmap_mode="r")


def named(artifact: Artifact, column: str, n_pages: int) -> tuple[Names, NDArray[np.int32]]:
    """(the distinct strings of a column in the order of their first page, their numbers page by page)."""
    if n_pages < MAPPED_FROM:
        whole = ParquetFile(artifact.file("pages.parquet")).read([column]).column(0).combine_chunks().dictionary_encode()
        return Names(whole.dictionary), whole.indices.to_numpy(zero_copy_only=False).astype(np.int32)

    def write_names(path: Path) -> None:
        table = pa.table({column: first_seen(_row_groups(artifact, column))})
        with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_file(sink, table.schema) as writer:
            writer.write_table(table)

    names = _read_names(_kept(artifact, f"{column}.arrow", write_names))

    def write_ids(path: Path) -> None:
        with NpyWriter(path, np.int32) as out:
            for rows in _row_groups(artifact, column):
                encoded = rows.dictionary_encode()
                out.append(names.ids(encoded.dictionary)[encoded.indices.to_numpy(zero_copy_only=False)])

    return names, np.load(_kept(artifact, f"{column}.npy", write_ids), mmap_mode="r")


class Strings:
    """A column of strings in a mapped file of record batches: any number of rows, of which only those that are asked for are read."""

    def __init__(self, batches: Sequence[pa.Array]) -> None:
        self.batches = [batch for batch in batches if len(batch)]
        self.starts = np.zeros(len(self.batches) + 1, dtype=np.int64)
        np.cumsum([len(batch) for batch in self.batches], out=self.starts[1:])

    def __len__(self) -> int:
        return int(self.starts[-1])

    def __getitem__(self, row: int) -> pa.Scalar:
        if not 0 <= row < len(self):
            raise IndexError(f"row {row} of {len(self)}")
        b = int(np.searchsorted(self.starts, row, side="right")) - 1
        return self.batches[b][row - int(self.starts[b])]

    def take(self, rows: Any) -> pa.Array:
        """large_string: the rows, in the order given."""
        wanted = np.asarray(rows, dtype=np.int64)
        order = np.argsort(wanted, kind="stable")
        of = np.searchsorted(self.starts, wanted[order], side="right") - 1
        taken = [pa.array([], pa.large_string())]
        for some in np.split(np.arange(len(order)), np.flatnonzero(np.diff(of)) + 1) if len(order) else []:
            b = int(of[some[0]])
            taken.append(self.batches[b].take(pa.array(wanted[order[some]] - self.starts[b])).cast(pa.large_string()))
        back = np.empty(len(order), dtype=np.int64)
        back[order] = np.arange(len(order))
        return pa.concat_arrays(taken).take(pa.array(back))

    def to_pylist(self) -> list[str | None]:
        return [value for batch in self.batches for value in batch.to_pylist()]

    def first_at_least(self, wanted: str) -> int:
        """Of ascending strings without nulls, the row of the first that is not below `wanted`, in the order of UTF-8 bytes."""
        key, low, high = wanted.encode(), 0, len(self)
        while low < high:
            middle = (low + high) // 2
            if self[middle].as_py().encode() < key:
                low = middle + 1
            else:
                high = middle
        return low


Column = Any  # an Arrow array of strings, or Strings


def strings(artifact: Artifact, file: str, column: str, n_rows: int) -> Column:
    """A column of strings, in the order of the rows."""
    if n_rows < MAPPED_FROM:
        return ParquetFile(artifact.file(file)).read([column]).column(0).combine_chunks()

    def write(path: Path) -> None:
        with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_file(sink, pa.schema({column: pa.string()})) as writer:
            for rows in _row_groups(artifact, column, file):
                writer.write_table(pa.table({column: rows}))

    opened = pa.ipc.open_file(pa.memory_map(str(_kept(artifact, f"{Path(file).stem}.{column}.arrow", write))))
    return Strings([opened.get_batch(k).column(0) for k in range(opened.num_record_batches)])


def row(artifact: Artifact, page: int, names: Sequence[str]) -> dict[str, Any]:
    """Some columns of one page; of the table only its row group is read."""
    file = ParquetFile(artifact.file("pages.parquet"))
    first = 0
    for g, rows in enumerate(file.row_group_rows):
        if page < first + rows:
            found: dict[str, Any] = file.read_row_group(g, names).slice(page - first, 1).to_pylist()[0]
            return found
        first += rows
    raise IndexError(f"page {page} of {first}")


def find_ascending(column: Column, wanted: Sequence[str]) -> NDArray[np.int64]:
    """int64[len(wanted)]: the row of each, -1 where it is not there, in a column that ascends by UTF-8 bytes."""
    if not isinstance(column, Strings):
        return find_first(column, wanted)
    found = np.full(len(wanted), -1, dtype=np.int64)
    for k, name in enumerate(wanted):
        row = column.first_at_least(name)
        if row < len(column) and column[row].as_py() == name:
            found[k] = row
    return found


def find_first(column: Column, wanted: Sequence[str]) -> NDArray[np.int64]:
    """int64[len(wanted)]: the first row of each, -1 where it is not there, in a column in any order. Reads all of it."""
    import pyarrow.compute as pc  # not with the module: most crawls over finished stages need none of it

    batches, starts = (column.batches, column.starts) if isinstance(column, Strings) else ([column], np.zeros(1, dtype=np.int64))
    names = pa.array(wanted, type=pa.string())
    found = np.full(len(wanted), -1, dtype=np.int64)
    for batch, start in zip(batches, starts, strict=False):
        rows = pc.fill_null(pc.index_in(names, value_set=batch), -1).to_numpy(zero_copy_only=False).astype(np.int64)
        found = np.where((found < 0) & (rows >= 0), start + rows, found)
    return found


def places_among(few: Column, many: Column) -> NDArray[np.uint32]:
    """uint32[len(few)]: the place that each of `few` has among all strings of both columns, which ascend and share none."""
    import pyarrow.compute as pc  # not with the module: most crawls over finished stages need none of it

    if not isinstance(many, Strings) and not isinstance(few, Strings):
        order = pc.sort_indices(pa.chunked_array([many, few])).to_numpy()
        return np.flatnonzero(order >= len(many)).astype(np.uint32)
    few = few if isinstance(few, Strings) else Strings([few])
    many = many if isinstance(many, Strings) else Strings([many])
    found = np.empty(len(few), dtype=np.uint32)
    done = 0
    for b, batch in enumerate(many.batches):
        # Those that come before the next batch: the last takes all that are left.
        stop = len(few) if b == len(many.batches) - 1 else few.first_at_least(many.batches[b + 1][0].as_py())
        some = few.take(np.arange(done, stop))
        order = pc.sort_indices(pa.chunked_array([batch.cast(pa.large_string()), some])).to_numpy()
        found[done:stop] = int(many.starts[b]) + done + np.flatnonzero(order >= len(batch))
        done = stop
    return found


def _read_names(path: Path) -> Names:
    return Names(pa.ipc.open_file(pa.memory_map(str(path))).read_all().column(0).combine_chunks())


def _row_groups(artifact: Artifact, column: str, name: str = "pages.parquet") -> Iterator[pa.Array]:
    file = ParquetFile(artifact.file(name))
    for g in range(len(file.row_group_rows)):
        yield file.read_row_group(g, [column]).column(0).combine_chunks()


def _kept(artifact: Artifact, name: str, write: Callable[[Path], None]) -> Path:
    """The file, written where it is not there; two processes that write it at once do no harm."""
    folder = artifact.root / "memo" / f"columns-{artifact.fingerprint}"
    path = folder / name
    if not path.exists():
        folder.mkdir(parents=True, exist_ok=True)
        temporary = folder / f".{name}.{process_name()}"
        write(temporary)
        temporary.replace(path)
    return path
