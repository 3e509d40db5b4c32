"""The link graph of a corpus as plain Parquet, out and in again.

    export_edges(artifact, Path("graph"))      -> (nodes, edges)
    source = open_linked(Path("graph"))        a corpus of these pages and links, without texts

    graph/nodes.parquet   url string, page bool (false: a dead link), of page also doc_id, language; row k is node k
    graph/edges.parquet   source uint32, target uint32 (rows of nodes.parquet), ascending; flags uint8 and anchor string where there are any

Only `url`, `source` and `target` are needed to read them: without `page` every node is a page. Edges may come in any order.
"""

import dataclasses
import functools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from craw4llm.artifact import Artifact
from craw4llm.corpus.reader import Corpus
from craw4llm.corpus.records import Page, Reject, Source
from craw4llm.errors import InputError

NODES, EDGES = "nodes.parquet", "edges.parquet"
CHUNK_NODES = 8192
_BLOCK_PAGES = 1 << 16
_NODE_SCHEMA = pa.schema({"url": pa.string(), "page": pa.bool_(), "doc_id": pa.string(), "language": pa.string()})


@dataclasses.dataclass(frozen=True)
class NodeChunk:
    """The nodes start to stop - 1 that are pages, with their links."""

    folder: str
    start: int
    stop: int
    records: int

    @property
    def label(self) -> str:
        return f"nodes {self.start:,} to {self.stop - 1:,}"

    def read(self) -> Iterator[Page | Reject]:
        folder = Path(self.folder)
        nodes, is_page = _nodes(self.folder)
        source = pc.field("source")
        edges = pq.read_table(folder / EDGES, filters=(source >= self.start) & (source < self.stop))
        order = np.lexsort((edges["target"].to_numpy(), edges["source"].to_numpy()))
        edges = edges.take(order)
        ends = np.searchsorted(edges["source"].to_numpy(), np.arange(self.start, self.stop + 1))
        links = nodes["url"].take(edges["target"])
        extra = [edges[name].to_pylist() if name in edges.column_names else None for name in ("anchor", "flags")]
        rows = nodes.slice(self.start, self.stop - self.start)
        doc_ids, languages = (rows[name].to_pylist() if name in rows.column_names else None for name in ("doc_id", "language"))
        for k, url in enumerate(rows["url"].to_pylist()):
            if not is_page[self.start + k]:
                continue
            low, high = int(ends[k]), int(ends[k + 1])
            anchors, flags = (values[low:high] if values else () for values in extra)
            yield Page(
                NODES,
                self.start + k,
                url,
                None,
                links.slice(low, high - low).to_pylist(),
                anchors=anchors,
                link_flags=[flag or 0 for flag in flags],
                doc_id=doc_ids[k] if doc_ids else None,
                language=languages[k] if languages else None,
            )


def is_linked(folder: Path) -> bool:
    return (folder / NODES).is_file() and (folder / EDGES).is_file()


def open_linked(folder: Path) -> Source:
    """The folder as a source. Raises InputError where the columns are others, or an edge leads to no node."""
    try:
        schemas = [pq.read_schema(folder / name) for name in (NODES, EDGES)]
    except (pa.ArrowException, OSError) as error:
        raise InputError(f"corpus: {folder}: {NODES} and {EDGES} cannot be read as Parquet: {error}") from error
    for schema, wanted, name in zip(schemas, (("url",), ("source", "target")), (NODES, EDGES), strict=True):
        if not set(wanted) <= set(schema.names):
            raise InputError(f"corpus: {folder / name} has the columns {', '.join(schema.names)}; expected {', '.join(wanted)}")
    nodes, is_page = _nodes(str(folder))
    edges = 0
    for batch in pq.ParquetFile(folder / EDGES).iter_batches(1 << 20, columns=["source", "target"]):
        for name in ("source", "target"):
            found = pc.min_max(batch.column(name)).as_py()
            if batch.column(name).null_count or (found["min"] is not None and not 0 <= found["min"] <= found["max"] < len(nodes)):
                raise InputError(f"corpus: {folder / EDGES}: {name} holds numbers that are no rows of {NODES} (0 to {len(nodes) - 1:,})")
        edges += batch.num_rows
    counts = np.add.reduceat(is_page, np.arange(0, len(nodes), CHUNK_NODES), dtype=np.int64)
    chunks = [
        NodeChunk(str(folder), start, min(start + CHUNK_NODES, len(nodes)), int(count))
        for start, count in zip(range(0, len(nodes), CHUNK_NODES), counts, strict=True)
    ]
    pages = int(is_page.sum())
    return Source(chunks=chunks, records=pages, origin=f"the link graph {folder.name}, {pages:,} pages and {edges:,} edges, no texts")


def export_edges(artifact: Artifact, folder: Path) -> tuple[int, int]:
    """Writes nodes.parquet and edges.parquet of a corpus. Returns (nodes, edges)."""
    corpus = Corpus(artifact)
    folder.mkdir(parents=True, exist_ok=True)
    with pq.ParquetWriter(folder / NODES, _NODE_SCHEMA, compression="zstd") as nodes:
        for block in _node_blocks(corpus):
            nodes.write_table(block)
    writer: pq.ParquetWriter | None = None
    edges = 0
    for first in range(0, max(1, corpus.n_pages), _BLOCK_PAGES):
        pages = np.arange(first, min(first + _BLOCK_PAGES, corpus.n_pages))
        offsets, targets = corpus.outlinks(pages)
        table: dict[str, Any] = {"source": np.repeat(pages, np.diff(offsets)).astype(np.uint32), "target": targets}
        flags, anchors = corpus.link_flags(pages), corpus.anchors(pages)
        if flags is not None:
            table["flags"] = flags
        if anchors is not None:
            table["anchor"] = pa.array(anchors, pa.string())
        block = pa.table(table)
        writer = writer or pq.ParquetWriter(folder / EDGES, block.schema, compression="zstd")
        writer.write_table(block)
        edges += len(targets)
    assert writer is not None
    writer.close()
    return corpus.n_targets, edges


def _node_blocks(corpus: Corpus) -> Iterator[pa.Table]:
    """Pages, then dead links."""
    for first in range(0, corpus.n_pages, _BLOCK_PAGES):
        pages = np.arange(first, min(first + _BLOCK_PAGES, corpus.n_pages))
        columns = (
            corpus.urls.take(pa.array(pages)),
            pa.repeat(True, len(pages)),
            corpus.doc_ids.take(pa.array(pages)),
            corpus.languages_of(pages),
        )
        yield pa.table(list(columns), schema=_NODE_SCHEMA)
    n_dead = corpus.n_targets - corpus.n_pages
    for first in range(0, n_dead, _BLOCK_PAGES):
        rows = np.arange(first, min(first + _BLOCK_PAGES, n_dead))
        nothing = pa.nulls(len(rows), pa.string())
        yield pa.table([corpus.dead_urls.take(pa.array(rows)), pa.repeat(False, len(rows)), nothing, nothing], schema=_NODE_SCHEMA)


@functools.lru_cache(maxsize=1)
def _nodes(folder: str) -> tuple[pa.Table, np.ndarray]:
    """(the nodes, whether each is a page)."""
    table = pq.read_table(Path(folder) / NODES)
    is_page = np.ones(len(table), dtype=np.bool_)
    if "page" in table.column_names:
        is_page = pc.fill_null(table["page"], False).to_numpy()
    if not len(table):
        raise InputError(f"corpus: {Path(folder) / NODES} has no rows")
    return table, is_page
