"""Link graphs without texts as a corpus: BVGraph, and edge lists of integers. Node k is the page https://node.example/<k>.

    source = open_bvgraph(Path("cnr-2000.graph"))
    source = open_edges(Path("edges.parquet"))       columns source, target: unsigned integers, in any order
    build_graph(source, out, config, execution)      -> Built, the files of a corpus artifact (docs/artifacts.md)

The number is padded with zeros to the width of the largest, so that page ids, which follow the order of URLs, are the node numbers. The
pages have no text. Self-links and repeats are dropped. URLs never become Python objects, and links are read and written in blocks: the
graph may be larger than memory (a BVGraph's own links are decoded in memory).
"""

import base64
import dataclasses
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pyarrow.types as pt
from numpy.typing import NDArray

from craw4llm.configs import CorpusConfig
from craw4llm.corpus.build import Built
from craw4llm.corpus.heldout import is_heldout
from craw4llm.corpus.merge import MAX_PAGES, ROW_GROUP_PAGES, write_indegree
from craw4llm.corpus.npy import NpyWriter, distinct
from craw4llm.corpus.prepare import REJECTS
from craw4llm.errors import InputError
from craw4llm.execution import Execution

HOST = "node.example"
BLOCK_PAGES = 1 << 14  # so that arrays over a block's links stay in the processor's cache: half the time of 1 << 18
_SOURCE, _TARGET = (1, 0) if sys.byteorder == "little" else (0, 1)  # the halves of a key

# Of consecutive nodes: where the targets of each end, counted from the first; the targets, ascending, no repeats, no node its own; how many
# nodes' links to themselves were left out.
Block = tuple[NDArray[np.int64], NDArray[np.uint32], int]


@dataclasses.dataclass(frozen=True)
class GraphSource:
    """nodes: how many. blocks(folder, memory_bytes): consecutive nodes from 0 on; `folder` is free for temporary files."""

    nodes: int
    blocks: Callable[[Path, int], Iterator[Block]]
    origin: str

    @property
    def records(self) -> int:
        return self.nodes


def open_bvgraph(path: Path) -> GraphSource:
    """path: the .graph or .properties file, or both without their ending. Raises InputError."""
    from craw4llm.corpus.bvgraph import read_bvgraph  # brings numba, which takes half a second

    base = path.with_suffix("") if path.suffix in (".graph", ".properties") else path
    offsets, targets = read_bvgraph(base)

    def blocks(folder: Path, memory_bytes: int) -> Iterator[Block]:
        for first in range(0, len(offsets) - 1, BLOCK_PAGES):
            some = offsets[first : first + BLOCK_PAGES + 1]
            yield without_own(first, some - some[0], targets[some[0] : some[-1]])

    return GraphSource(len(offsets) - 1, blocks, f"the BVGraph {base.name}, {len(offsets) - 1:,} nodes and {len(targets):,} arcs, no texts")


def has_edges(path: Path) -> bool:
    """Whether a Parquet file is an edge list of node numbers; false for a file that is no Parquet."""
    try:
        schema = pq.read_schema(path)
    except (pa.ArrowException, OSError):
        return False
    fits = all(name in schema.names and pt.is_integer(schema.field(name).type) for name in ("source", "target"))
    return fits and "url" not in schema.names


def open_edges(path: Path) -> GraphSource:
    """A Parquet file with the integer columns source and target. Raises InputError for numbers that are no page ids."""
    file = pq.ParquetFile(path)
    highest = _highest_stated(file)
    if highest is None:  # no statistics, or such that the edges must be looked at
        highest = max((_checked(batch, path) for batch in _edges(file)), default=-1)
    if highest < 0:
        raise InputError(f"corpus: {path} has no edge")
    rows = file.metadata.num_rows

    def blocks(folder: Path, memory_bytes: int) -> Iterator[Block]:
        return _sorted_blocks(path, highest + 1, rows, folder, memory_bytes)

    return GraphSource(highest + 1, blocks, f"the edge list {path.name}, {rows:,} edges of {highest + 1:,} nodes, no texts")


def without_own(first: int, offsets: NDArray[np.int64], targets: NDArray[np.uint32]) -> Block:
    """A block of the nodes from `first` on, with offsets from 0, whose targets ascend, without repeats; their links to themselves go."""
    nodes = np.arange(first, first + len(offsets) - 1, dtype=np.uint32)
    own = np.flatnonzero(targets == np.repeat(nodes, np.diff(offsets)))
    ends = offsets[1:] - np.searchsorted(own, offsets[1:])
    return ends, _without(targets, own), len(own)


def node_urls(first: int, stop: int, nodes: int) -> pa.Array:
    """string: the URLs of the nodes first to stop - 1 of a graph of `nodes`. All of a length, so written digit by digit for all at once."""
    start = np.frombuffer(f"https://{HOST}/".encode(), dtype=np.uint8)
    rows = np.empty((stop - first, len(start) + len(str(nodes - 1))), dtype=np.uint8)
    rows[:, : len(start)] = start
    left = np.arange(first, stop, dtype=np.uint32)
    for place in range(rows.shape[1] - 1, len(start) - 1, -1):
        above = left // np.uint32(10)
        rows[:, place] = left - above * np.uint32(10) + np.uint32(ord("0"))
        left = above
    ends = np.arange(0, rows.size + 1, rows.shape[1], dtype=np.int32)
    return pa.StringArray.from_buffers(len(rows), pa.py_buffer(ends), pa.py_buffer(rows))


def build_graph(source: GraphSource, out: Path, config: CorpusConfig, execution: Execution) -> Built:
    """Writes the corpus of a graph into the folder `out`."""
    for path in out.iterdir():  # of an interrupted attempt
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    nodes, temporary = source.nodes, out / "edges"
    temporary.mkdir()
    links = page = self_links = 0
    # Counted while the links are at hand, where the counts fit the memory.
    indegree = np.zeros(nodes, dtype=np.uint32) if nodes <= execution.memory_bytes // 16 else None
    with (
        NpyWriter(out / "links_offsets.npy", np.uint64) as links_offsets,
        NpyWriter(out / "links_targets.npy", np.uint32) as links_targets,
        execution.progress("corpus", total=nodes, unit="page") as progress,
    ):
        links_offsets.append([0])
        for ends, targets, own in source.blocks(temporary, execution.memory_bytes):
            links_offsets.append((links + ends).astype(np.uint64))
            links_targets.append(targets)
            if indegree is not None:
                np.add.at(indegree, targets, np.uint32(1))
            links, page, self_links = links + len(targets), page + len(ends), self_links + own
            progress.update(len(ends))
    shutil.rmtree(temporary)
    assert page == nodes, "the blocks of a graph cover its nodes"
    if indegree is not None:
        np.save(out / "indegree.npy", indegree)
    else:
        write_indegree(out / "indegree.npy", np.load(out / "links_targets.npy", mmap_mode="r"), nodes, execution.memory_bytes)
    heldout = _write_pages(out, nodes, config)
    (out / "text.zst").touch()
    np.lib.format.open_memmap(out / "text_offsets.npy", mode="w+", dtype=np.uint64, shape=(nodes + 1,))  # zeros, which need no writing
    pq.write_table(pa.schema({"url": pa.string()}).empty_table(), out / "dead_links.parquet", compression="zstd")
    pq.write_table(REJECTS.remove(0).empty_table(), out / "rejects.parquet", compression="zstd")
    counts: dict[str, tuple[int | float | None, str]] = {
        "pages": (nodes, "pages"),
        "heldout_pages": (heldout, "pages"),
        "hosts": (1, "hosts"),
        "domains": (1, "domains"),
        "links": (links, "links"),
        "dead_links": (0, "URLs"),
        "dead_link_uses": (0, "links"),
        "outside_links": (0, "links"),
        "text_bytes": (0, "bytes"),
        "empty_pages": (nodes, "pages"),
        "cut_pages": (0, "pages"),
        "unusable_links": (0, "links"),
        "nofollow_links": (0, "links"),
        "self_links": (self_links, "links"),
        "records": (nodes, "records"),
        "rejects": (0, "records"),
        "skipped": (0, "records"),
    }
    return Built(counts=counts, rejects_by_reason={}, skipped={})


def _write_pages(out: Path, nodes: int, config: CorpusConfig) -> int:
    """pages.parquet and heldout.npy. Returns the number of held-out pages (none, unless pages without text may be)."""
    draws = config.heldout_min_chars == 0 and config.heldout_fraction > 0
    whole = draws and config.heldout_by == "host" and is_heldout(HOST, config.heldout_fraction)
    if whole:
        raise InputError(f"corpus: heldout_by='host' holds out {HOST}, the only host of a graph without URLs; use heldout_by='page'")
    most = min(nodes, ROW_GROUP_PAGES)
    constant = {
        "host": _constant(HOST, most),
        "domain": _constant(HOST, most),
        "n_chars": pa.array(np.zeros(most, dtype=np.uint32)),
        "n_bytes": pa.array(np.zeros(most, dtype=np.uint32)),
        "heldout": pa.array(np.zeros(most, dtype=np.bool_)),
        "cut": pa.array(np.zeros(most, dtype=np.bool_)),
        "source": _constant("graph", most),
        "doc_id": pa.nulls(most, pa.string()),
        "language": pa.nulls(most, pa.string()),
        "canonical": pa.nulls(most, pa.string()),
        "signals": pa.array(np.zeros(most, dtype=np.uint16)),
    }
    count = 0
    writer: pq.ParquetWriter | None = None
    with NpyWriter(out / "heldout.npy", np.uint32) as heldout:
        for first in range(0, nodes, ROW_GROUP_PAGES):
            n = min(ROW_GROUP_PAGES, nodes - first)
            urls = node_urls(first, first + n, nodes)
            columns = {"url": urls, **{name: column.slice(0, n) for name, column in constant.items()}}
            if draws and config.heldout_by == "page":
                drawn = np.fromiter((is_heldout(url, config.heldout_fraction) for url in urls.to_pylist()), dtype=np.bool_, count=n)
                columns["heldout"] = pa.array(drawn)
                found = np.flatnonzero(drawn)
                heldout.append(first + found)
                count += len(found)
            table = pa.table(columns)
            writer = writer or _table_writer(out / "pages.parquet", table.schema)
            writer.write_table(table, row_group_size=ROW_GROUP_PAGES)
    assert writer is not None, "a graph has nodes"
    writer.close()
    return count


def _constant(value: str, n: int) -> pa.DictionaryArray:
    return pa.DictionaryArray.from_arrays(np.zeros(n, dtype=np.int32), [value])


def _table_writer(path: Path, given: pa.Schema) -> pq.ParquetWriter:
    """Writes tables of the schema `given` as if its dictionaries were plain strings: the same bytes, without hashing each row again."""
    plain = pa.schema([field.with_type(field.type.value_type) if pt.is_dictionary(field.type) else field for field in given])
    writer = pq.ParquetWriter(path, given, compression="zstd", store_schema=False)
    writer.add_key_value_metadata({"ARROW:schema": base64.b64encode(plain.serialize()).decode()})  # what store_schema adds
    return writer


def _edges(file: pq.ParquetFile) -> Iterator[Any]:
    return file.iter_batches(1 << 17, columns=["source", "target"], use_threads=False)


def _highest_stated(file: pq.ParquetFile) -> int | None:
    """The highest number, by the statistics of the row groups; None where they are missing or say that a number is no page id.

    What they say is not believed: the edges are checked against it when they are read.
    """
    metadata, highest = file.metadata, -1
    columns = [k for k in range(metadata.num_columns) if metadata.schema.column(k).path in ("source", "target")]
    for k in range(metadata.num_row_groups):
        for column in columns:
            stated = metadata.row_group(k).column(column).statistics
            if stated is None or not stated.has_min_max or not stated.has_null_count or stated.null_count:
                return None
            if not 0 <= stated.min <= stated.max < MAX_PAGES:
                return None
            highest = max(highest, stated.max)
    return highest


def _checked(batch: Any, path: Path, below: int = MAX_PAGES) -> int:
    """The highest number of a batch of edges, -1 of none. Raises InputError for nulls, and for numbers outside 0 to below - 1."""
    highest = -1
    for name in ("source", "target"):
        column = batch.column(name)
        found = pc.min_max(column).as_py()
        if column.null_count or (found["min"] is not None and not 0 <= found["min"] <= found["max"] < below):
            raise InputError(f"corpus: the column {name!r} of {path} holds nulls or numbers outside 0 to {below - 1:,}")
        highest = max(highest, found["max"] if found["max"] is not None else -1)
    return highest


def _sorted_blocks(path: Path, nodes: int, rows: int, folder: Path, memory_bytes: int) -> Iterator[Block]:
    """Edges in any order, sorted on disk: shared out to files by ranges of sources, each of which is sorted in memory."""
    buckets = max(1, min(512, 32 * rows // memory_bytes + 1))
    if buckets == 1:
        keys, start = np.empty(rows, dtype=np.uint64), 0
        for batch in _edges(pq.ParquetFile(path)):
            _fill(keys[start : start + len(batch)], batch, path, nodes)
            start += len(batch)
        yield from _blocks(keys[:start], 0, nodes)
        return
    width = -(-nodes // buckets)
    streams = [(folder / f"{b:04}").open("wb") for b in range(buckets)]
    try:
        for batch in _edges(pq.ParquetFile(path)):
            keys = np.empty(len(batch), dtype=np.uint64)
            _fill(keys, batch, path, nodes)
            bucket = (_halves(keys)[:, _SOURCE] // np.uint32(width)).astype(np.int16)
            order = np.argsort(bucket, kind="stable")
            ends = np.cumsum(np.bincount(bucket, minlength=buckets))
            for b, some in enumerate(np.split(keys[order], ends[:-1])):
                streams[b].write(some.data)
    finally:
        for stream in streams:
            stream.close()
    for b in range(buckets):
        name = folder / f"{b:04}"
        keys = np.fromfile(name, dtype=np.uint64)
        name.unlink()
        yield from _blocks(keys, min(b * width, nodes), min((b + 1) * width, nodes))


def _fill(keys: NDArray[np.uint64], batch: Any, path: Path, nodes: int) -> None:
    """Makes of edges keys: source << 32 | target."""
    _checked(batch, path, nodes)
    halves = _halves(keys)
    halves[:, _SOURCE], halves[:, _TARGET] = (batch.column(name).to_numpy() for name in ("source", "target"))


def _halves(keys: NDArray[np.uint64]) -> NDArray[np.uint32]:
    """uint32[len(keys), 2]: the same memory; columns _SOURCE and _TARGET."""
    return keys.view(np.uint32).reshape(-1, 2)


def _blocks(keys: NDArray[np.uint64], first: int, stop: int) -> Iterator[Block]:
    """The nodes first to stop - 1, whose edges these are, in any order. Sorts the keys in place."""
    keys.sort()
    for low in range(first, stop, BLOCK_PAGES):
        high = min(low + BLOCK_PAGES, stop)
        begin, end = np.searchsorted(keys, [np.uint64(low << 32), np.uint64(high << 32)])
        some = keys[begin:end]
        own = np.flatnonzero(_halves(some)[:, _SOURCE] == _halves(some)[:, _TARGET])
        repeated = np.flatnonzero(some[1:] == some[:-1])
        nodes = (some >> np.uint64(32)).view(np.int64) - low  # int64, as bincount takes them
        counts = np.bincount(nodes, minlength=high - low)
        dropped = distinct(np.concatenate((own, repeated)))
        if len(dropped):
            counts -= np.bincount(nodes[dropped], minlength=high - low)
        yield np.cumsum(counts), _without(some.astype(np.uint32), dropped), len(distinct(nodes[own]))


def _without(values: NDArray[np.uint32], places: NDArray[np.int64]) -> NDArray[np.uint32]:
    """The values but for those at `places`, which ascend."""
    if 64 * len(places) > len(values):
        return np.delete(values, places)
    return np.concatenate([values[a:b] for a, b in zip([0, *(places + 1).tolist()], [*places.tolist(), len(values)], strict=True)])
