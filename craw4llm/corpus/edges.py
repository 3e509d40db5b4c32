"""The link graph of a corpus as plain Parquet, out and in again.

    export_edges(artifact, Path("graph"))      -> (nodes, edges)
    source = open_linked(Path("graph"))        a corpus of these pages and links, without texts

    graph/nodes.parquet   url string, page bool (false: a dead link), of page also doc_id, language; row k is node k
    graph/edges.parquet   source uint32, target uint32 (rows of nodes.parquet), ascending; flags uint8 and anchor string where there are any

Only `url`, `source` and `target` are needed to read them: without `page` every node is a page. Edges may come in any order:

    edges.parquet -> buckets by ranges of sources (of about BUCKET_BYTES) -> each sorted in memory -> a record batch for each chunk of nodes

so each edge is read twice (the first time by `open_linked`, which checks it), whatever the number of chunks. The sorted edges lie in the
system's folder for temporary files (TMPDIR): 8 bytes an edge, flags and anchors, until the source is let go of.
"""

import dataclasses
import functools
import itertools
import shutil
import tempfile
import weakref
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
BUCKET_BYTES = 64 << 20  # of edges that are sorted in memory at a time
MAX_BUCKETS = 512  # files open at a time; of a larger graph the buckets are larger
_BATCH_EDGES = 1 << 18
_BLOCK_PAGES = 1 << 16
_NODE_SCHEMA = pa.schema({"url": pa.string(), "page": pa.bool_(), "doc_id": pa.string(), "language": pa.string()})


@dataclasses.dataclass(frozen=True)
class NodeChunk:
    """The nodes start to stop - 1 that are pages, with their links: a record batch of the Arrow file `edges`, sorted."""

    folder: str
    start: int
    stop: int
    records: int
    edges: str
    batch: int

    @property
    def label(self) -> str:
        return f"nodes {self.start:,} to {self.stop - 1:,}"

    def read(self) -> Iterator[Page | Reject]:
        nodes, is_page = _nodes(self.folder)
        edges = pa.ipc.open_file(pa.memory_map(self.edges)).get_batch(self.batch)
        ends = np.searchsorted(edges["source"].to_numpy(), np.arange(self.start, self.stop + 1))
        links = nodes["url"].take(edges["target"])
        extra = [edges[name].to_pylist() if name in edges.schema.names else None for name in ("anchor", "flags")]
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


class _NodeChunks:
    """The chunks of a folder; its edges are sorted when they are first asked for. of_chunk: edges of each chunk."""

    def __init__(self, folder: Path, is_page: np.ndarray, of_chunk: np.ndarray) -> None:
        self._folder, self._of_chunk, self._nodes = folder, of_chunk, len(is_page)
        self._pages = np.add.reduceat(is_page, np.arange(0, len(is_page), CHUNK_NODES), dtype=np.int64).tolist()
        self._sorted = ""  # the folder

    def __iter__(self) -> Iterator[NodeChunk]:
        bounds = _bucket_bounds(self._folder / EDGES, self._of_chunk)
        if not self._sorted:
            self._sorted = tempfile.mkdtemp(prefix="craw4llm-edges-")
            weakref.finalize(self, shutil.rmtree, self._sorted, ignore_errors=True)
            _sort_edges(self._folder / EDGES, Path(self._sorted), bounds)
        for bucket, (first, stop) in enumerate(itertools.pairwise(bounds)):
            for chunk in range(first, stop):
                start = chunk * CHUNK_NODES
                edges = f"{self._sorted}/{bucket:04}.arrow"
                yield NodeChunk(str(self._folder), start, min(start + CHUNK_NODES, self._nodes), self._pages[chunk], edges, chunk - first)


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
    of_chunk = np.zeros(-(-len(nodes) // CHUNK_NODES), dtype=np.int64)
    for batch in _batches(folder / EDGES, ["source", "target"]):
        for name in ("source", "target"):
            found = pc.min_max(batch.column(name)).as_py()
            if batch.column(name).null_count or (found["min"] is not None and not 0 <= found["min"] <= found["max"] < len(nodes)):
                raise InputError(f"corpus: {folder / EDGES}: {name} holds numbers that are no rows of {NODES} (0 to {len(nodes) - 1:,})")
        edges += batch.num_rows
        of_chunk += np.bincount(_chunk_of(batch), minlength=len(of_chunk))
    chunks = _NodeChunks(folder, is_page, of_chunk)
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


def _batches(path: Path, columns: list[str]) -> Iterator[pa.RecordBatch]:
    return pq.ParquetFile(path).iter_batches(_BATCH_EDGES, columns=columns)  # type: ignore[no-any-return]


def _chunk_of(edges: pa.RecordBatch) -> np.ndarray:
    return edges.column("source").to_numpy().astype(np.int64) // CHUNK_NODES


def _bucket_bounds(path: Path, of_chunk: np.ndarray) -> list[int]:
    """Bucket b is the chunks bounds[b] to bounds[b + 1] - 1: about as many edges each, of BUCKET_BYTES or less where they can be."""
    metadata = pq.read_metadata(path)
    size = sum(metadata.row_group(k).total_byte_size for k in range(metadata.num_row_groups)) + 16 * metadata.num_rows
    buckets = min(MAX_BUCKETS, len(of_chunk), -(-size // BUCKET_BYTES))
    before = np.cumsum(of_chunk) - of_chunk
    bounds = np.searchsorted(before, np.arange(1, buckets) * (metadata.num_rows / max(buckets, 1)))
    return [0, *sorted({*bounds.tolist()} - {0, len(of_chunk)}), len(of_chunk)]


def _sort_edges(path: Path, out: Path, bounds: list[int]) -> None:
    """Writes a file for each bucket: its edges sorted by (source, target), in a record batch for each of its chunks of nodes."""
    has = pq.read_schema(path)
    fields = [has.field(name) for name in ("source", "target", "flags") if name in has.names]
    schema = pa.schema([*fields, *([pa.field("anchor", pa.string())] if "anchor" in has.names else [])])
    names = [out / f"{bucket:04}.arrow" for bucket in range(len(bounds) - 1)]
    streams = [pa.ipc.new_stream(str(name.with_suffix(".unsorted")), schema) for name in names]
    try:
        for batch in _batches(path, schema.names):
            batch = batch.select(schema.names).cast(schema)
            bucket = np.searchsorted(np.array(bounds), _chunk_of(batch), side="right") - 1
            order = np.argsort(bucket, kind="stable")
            ends = np.cumsum(np.bincount(bucket, minlength=len(streams)))
            shared = batch.take(pa.array(order))
            for stream, start, end in zip(streams, [0, *ends[:-1].tolist()], ends.tolist(), strict=True):
                if end > start:
                    stream.write_batch(shared.slice(start, end - start))
    finally:
        for stream in streams:
            stream.close()
    for name, first, stop in zip(names, bounds[:-1], bounds[1:], strict=True):
        unsorted = name.with_suffix(".unsorted")
        with pa.ipc.open_stream(str(unsorted)) as stream:
            edges = stream.read_all()
        unsorted.unlink()
        edges = edges.take(pa.array(np.lexsort((edges["target"].to_numpy(), edges["source"].to_numpy())))).combine_chunks()
        ends = np.searchsorted(edges["source"].to_numpy(), np.arange(first, stop + 1) * CHUNK_NODES)
        with pa.ipc.new_file(str(name), schema) as writer:
            for start, end in zip(ends[:-1].tolist(), ends[1:].tolist(), strict=True):
                some = edges.slice(start, end - start).combine_chunks().to_batches()
                writer.write_batch(some[0] if some else pa.RecordBatch.from_pylist([], schema))


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
