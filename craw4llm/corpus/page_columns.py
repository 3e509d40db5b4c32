"""Columns of a large page table as arrays in files: what a crawl asks of 900 million pages is mapped, not decoded into memory.

    n_bytes = numbers(artifact, "n_bytes", n_pages)        uint32[n_pages]
    names, ids = named(artifact, "host", n_pages)          Names, int32[n_pages]

Up to MAPPED_FROM pages the column is read from pages.parquet. A larger one is written once, row group by row group:

    <root>/memo/columns-<fingerprint>/n_bytes.npy
    <root>/memo/columns-<fingerprint>/host.npy, host.arrow

These can be made from the corpus at any time, so they belong to execution and may be deleted.
"""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from craw4llm.artifact import Artifact
from craw4llm.corpus.names import Names, first_seen
from craw4llm.corpus.npy import NpyWriter
from craw4llm.execution import process_name

MAPPED_FROM = 1 << 22  # pages; below, a column takes at most 16 MB


def numbers(artifact: Artifact, column: str, n_pages: int) -> NDArray[Any]:
    """A column of numbers of the page table, in page-id order."""
    if n_pages < MAPPED_FROM:
        return pq.read_table(artifact.file("pages.parquet"), columns=[column]).column(0).to_numpy()

    def write(path: Path) -> None:
        kind = pq.read_schema(artifact.file("pages.parquet")).field(column).type.to_pandas_dtype()
        with NpyWriter(path, kind) as out:
            for rows in _row_groups(artifact, column):
                out.append(rows.to_numpy())

    return np.load(_kept(artifact, f"{column}.npy", write), mmap_mode="r")


def named(artifact: Artifact, column: str, n_pages: int) -> tuple[Names, NDArray[np.int32]]:
    """(the distinct strings of a column in the order of their first page, their numbers page by page)."""
    if n_pages < MAPPED_FROM:
        whole = pq.read_table(artifact.file("pages.parquet"), columns=[column]).column(0).combine_chunks().dictionary_encode()
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


def _read_names(path: Path) -> Names:
    return Names(pa.ipc.open_file(pa.memory_map(str(path))).read_all().column(0).combine_chunks())


def _row_groups(artifact: Artifact, column: str) -> Iterator[pa.Array]:
    file = pq.ParquetFile(artifact.file("pages.parquet"))
    for g in range(file.num_row_groups):
        yield file.read_row_group(g, columns=[column]).column(0).combine_chunks()


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
