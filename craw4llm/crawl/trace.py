"""The trace of a crawl: its Parquet files, written once, and read as prefixes.

    trace = Trace(artifact)
    prefix = trace.prefix(pages=600)       what the crawl with that budget would have fetched and crawled
    prefix.crawled, prefix.fetched         uint32, in crawl order and in fetch order

Columns: docs/artifacts.md, "crawl". A crawl with a smaller budget is a prefix of one with a larger (craw4llm.crawl.loop), so one crawl
at the largest budget serves every smaller one.
"""

from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from craw4llm.artifact import Artifact
from craw4llm.configs import KNOWLEDGE
from craw4llm.corpus.reader import Corpus
from craw4llm.crawl.loop import NOBODY, Crawl
from craw4llm.dataclass import dataclass
from craw4llm.errors import ConfigError
from craw4llm.parquet_file import ParquetFile
from craw4llm.parquet_file import write as write_parquet

ROW_GROUP_ROWS = 1 << 17

_ITERATIONS = pa.schema(
    [
        ("iteration", pa.uint32()),
        *((name, pa.uint64()) for name in ("discovered", "fetched", "crawled", "dead", "frontier", "links", "new_targets")),
        ("heldout_links", pa.uint64()),
        ("mean_score_crawled", pa.float64()),
        ("mean_score_discovered", pa.float64()),
        ("hosts", pa.uint64()),
    ]
)


def write_trace(
    crawl: Crawl,
    corpus: Corpus,
    scores: NDArray[np.float32] | None,
    out: Path,
    *,
    others: Mapping[str, NDArray[np.float32]] | None = None,
    ghosts: bool = False,
) -> None:
    """Writes pages.parquet, dead_links.parquet and iterations.parquet.

    scores: float32, of the fetched pages in fetch order; None where the crawl had no scorer. others: name -> the same of further scorers,
    which go into the columns `score_<name>`. ghosts: targets without a page may have been crawled (mode `released`), so dead_links.parquet
    has a column `crawl_rank`.
    """
    is_live = crawl.fetched < corpus.n_pages
    live, dead = np.flatnonzero(is_live), np.flatnonzero(~is_live)  # taken by number, not by mask: half the time
    pages = crawl.fetched[live]
    crawl_rank = crawl.crawl_rank[live]
    crawled = crawl_rank != NOBODY
    depth = crawl.depth[live]
    crawled_in = np.zeros(len(pages), dtype=np.uint32)
    crawled_in[crawled] = crawl.crawled_in[crawl_rank[crawled]]
    columns = {
        "page": _plain(pages, pa.uint32()),
        "iteration": _plain(crawl.fetched_in[live], pa.uint32()),
        "fetch_rank": _plain(live.view(np.uint64), pa.uint64()),
        "crawl_rank": _nullable(crawl_rank, crawled),
        "crawl_iteration": _nullable(crawled_in, crawled),
        "parent": _nullable(crawl.parent[live], depth != 0),
        "depth": _plain(depth, pa.uint32()),
        "priority": _plain(crawl.fetched_priority[live], pa.float32()),
        "score": pa.nulls(len(pages), pa.float32()) if scores is None else _plain(scores, pa.float32()),
        **{f"score_{name}": _plain(column, pa.float32()) for name, column in (others or {}).items()},
    }
    if crawl.crawled_tokens is not None:
        tokens = np.zeros(len(pages), dtype=np.uint32)
        tokens[crawled] = crawl.crawled_tokens[crawl_rank[crawled]]
        columns["tokens"] = _nullable(tokens, crawled)
    with ThreadPoolExecutor(1) as pool:  # Arrow lets Python go on
        written = pool.submit(_write, pa.table(columns), out / "pages.parquet", ["iteration", "crawl_iteration", "depth", "parent"])
        targets = crawl.fetched[dead]
        urls = corpus.dead_urls.take(targets.astype(np.int64) - corpus.n_pages)
        columns = {
            "target": _plain(targets, pa.uint32()),
            "url": urls if urls.type == pa.string() else urls.cast(pa.string()),
            "iteration": _plain(crawl.fetched_in[dead], pa.uint32()),
            "fetch_rank": _plain(dead.view(np.uint64), pa.uint64()),
        }
        if ghosts:
            rank = crawl.crawl_rank[dead]
            columns["crawl_rank"] = _nullable(rank, rank != NOBODY)
        _write(pa.table(columns), out / "dead_links.parquet", ["iteration", "url"])
        _write(pa.Table.from_pylist([vars(row) for row in crawl.iterations], schema=_ITERATIONS), out / "iterations.parquet")
        written.result()


def crawled_by_iteration(artifact: Artifact) -> Iterator[tuple[int, NDArray[np.uint32]]]:
    """(iteration, targets in crawl order) of every iteration of a crawl that crawled any; targets without a page are among them in mode
    `released`."""
    sizes = ParquetFile(artifact.file("iterations.parquet")).read(["crawled"]).column(0).to_numpy()
    ends = np.cumsum(sizes)
    targets = np.empty(int(ends[-1]) if len(ends) else 0, dtype=np.uint32)
    for name, column in (("pages.parquet", "page"), ("dead_links.parquet", "target")):
        path = artifact.file(name)
        stored = ParquetFile(path)
        if "crawl_rank" in stored.schema.names:
            table = stored.read([column, "crawl_rank"])
            ranks, known = _with_nulls(table.column("crawl_rank").combine_chunks())
            crawled = np.flatnonzero(known)
            targets[ranks[crawled]] = table.column(column).to_numpy()[crawled]
    for iteration, (end, size) in enumerate(zip(ends.tolist(), sizes.tolist(), strict=True)):
        if size:
            yield iteration, targets[end - size : end]


@dataclass(frozen=True)
class Prefix:
    """crawled: uint32, pages in crawl order. fetched: uint32, pages in fetch order. scores: float32, of the same pages as the crawl
    stored them (NaN: none), or None where the crawl had no scorer. fetches: requests made, dead links included."""

    crawled: NDArray[np.uint32]
    fetched: NDArray[np.uint32]
    crawled_scores: NDArray[np.float32] | None
    fetched_scores: NDArray[np.float32] | None
    fetches: int


class Trace:
    """A crawl artifact, opened for reading."""

    def __init__(self, artifact: Artifact) -> None:
        self.artifact = artifact
        self.n_crawled = int(artifact.count("crawled_pages"))
        self.n_fetches = int(artifact.count("fetches"))
        self.stop = str(artifact.manifest["notes"]["stop"])

    @cached_property
    def pages(self) -> pa.Table:
        """One row per fetched page, in fetch order."""
        return _read_all(self.artifact.file("pages.parquet"))

    @cached_property
    def dead_links(self) -> pa.Table:
        """One row per dead link that was requested, in fetch order."""
        return _read_all(self.artifact.file("dead_links.parquet"))

    @cached_property
    def iterations(self) -> pa.Table:
        """One row per iteration."""
        return _read_all(self.artifact.file("iterations.parquet"))

    @cached_property
    def config(self) -> Mapping[str, Any]:
        return self.artifact.config

    @property
    def crawled(self) -> NDArray[np.uint32]:
        """uint32[n_crawled]: pages in crawl order."""
        return self.prefix().crawled

    @property
    def fetched(self) -> NDArray[np.uint32]:
        """uint32: pages in fetch order."""
        return self.prefix().fetched

    def scores(self, name: str) -> NDArray[np.float32]:
        """float32, of the fetched pages in fetch order: what the crawl's input `score_<name>` says of them (NaN: no score)."""
        if f"score_{name}" not in self.pages.column_names:
            known = ", ".join(c.removeprefix("score_") for c in self.pages.column_names if c.startswith("score_"))
            raise ConfigError(f"the crawl {self.artifact.fingerprint} kept no scores named {name!r}; it kept {known or 'none'}")
        return self._column(f"score_{name}", np.float32)

    def prefix(self, *, pages: int | None = None, fetches: int | None = None, tokens: int | None = None) -> Prefix:
        """What the crawl with this budget, of pages, fetches or tokens, would have fetched and crawled; without one, all of it.

        A crawl ends at the first event that covers its budget. So the prefix of all fetches of a look-ahead crawl lacks the pages that were
        crawled after the last of them; the prefix without a budget has them. Raises ConfigError for a prefix that is longer than the crawl.
        """
        assert sum(budget is not None for budget in (pages, fetches, tokens)) <= 1, "one prefix at a time"
        if tokens is not None:
            pages = self._pages_of(tokens)
        fetch_rank = self._column("fetch_rank", np.uint64)
        is_crawled = ~self.pages.column("crawl_rank").is_null().to_numpy(zero_copy_only=False)
        crawl_rank = self._column("crawl_rank", np.uint32)
        look_ahead = KNOWLEDGE[self.config["policy"]] == "target_text"
        seed = self.pages.column("parent").is_null().to_numpy(zero_copy_only=False)
        if self.config["mode"] == "released":  # its seeds are fetched, queued and popped like other pages
            seed = np.zeros(len(seed), dtype=np.bool_)
        n_fetches = self.n_fetches
        is_fetched = np.ones(len(fetch_rank), dtype=np.bool_)
        if pages is not None:
            self._check(pages, self.n_crawled, "pages crawled")
            is_crawled &= crawl_rank < pages
            last = int(np.flatnonzero(is_crawled)[np.argmax(crawl_rank[is_crawled])])
            crawl_iteration = int(self._column("crawl_iteration", np.uint32)[last])
            if look_ahead and not seed[last]:  # all fetches of an iteration come before its crawls
                n_fetches = int(np.searchsorted(self._fetch_iterations, crawl_iteration, side="right"))
            else:
                n_fetches = int(fetch_rank[last]) + 1
            is_fetched = fetch_rank < n_fetches
        elif fetches is not None:
            self._check(fetches, self.n_fetches, "fetches")
            n_fetches = fetches
            is_fetched = fetch_rank < fetches
            is_crawled &= is_fetched
            if look_ahead:
                iteration = int(self._fetch_iterations[fetches - 1])
                # an iteration's fetches come before its crawls; only a seed is fetched and crawled at once
                is_crawled &= (self._column("crawl_iteration", np.uint32) < iteration) | seed
        page = self._column("page", np.uint32)
        crawled = np.flatnonzero(is_crawled)
        crawled = crawled[np.argsort(crawl_rank[crawled], kind="stable")]
        scores = None
        if self.pages.column("score").null_count == 0:
            scores = self.pages.column("score").to_numpy()
        return Prefix(
            page[crawled],
            page[is_fetched],
            None if scores is None else scores[crawled],
            None if scores is None else scores[is_fetched],
            n_fetches,
        )

    def _pages_of(self, tokens: int) -> int:
        """How many pages were crawled when their tokens reached this number."""
        if "tokens" not in self.pages.column_names:
            raise ConfigError(f"the crawl {self.artifact.fingerprint} counted no tokens; give it budget_tokens and the input `lengths`")
        crawled = self.pages.filter(self.pages.column("crawl_rank").is_valid()).sort_by("crawl_rank")
        totals = np.cumsum(crawled.column("tokens").to_numpy(), dtype=np.int64)
        self._check(tokens, int(totals[-1]), "tokens crawled")
        return int(np.searchsorted(totals, tokens)) + 1

    @cached_property
    def _fetch_iterations(self) -> NDArray[np.uint32]:
        """uint32[n_fetches]: the iteration of every fetch, ascending."""
        fetches = self.iterations.column("fetched").to_numpy() + self.iterations.column("dead").to_numpy()
        return np.repeat(np.arange(len(fetches), dtype=np.uint32), fetches.astype(np.int64))

    def _column(self, name: str, dtype: type) -> NDArray[Any]:
        """A column of `pages`; null as 0."""
        return self.pages.column(name).fill_null(0).to_numpy().astype(dtype)

    def _check(self, wanted: int, there: int, what: str) -> None:
        if wanted < 1:
            raise ConfigError(f"a prefix of {wanted} {what} is wanted; expected at least 1")
        if wanted > there:
            why = "it ran out of pages to crawl" if self.stop == "exhausted" else "that was its budget"
            raise ConfigError(
                f"the crawl {self.artifact.fingerprint} ({self.config['policy']}) has {there:,} {what} ({why}), but its first {wanted:,} "
                "are wanted; " + ("use a smaller prefix or more seeds" if self.stop == "exhausted" else "raise the crawl's budget")
            )


def _plain(values: NDArray[Any], dtype: pa.DataType) -> pa.Array:
    """What pa.array(values, dtype) gives, which imports numpy.ma."""
    held = np.ascontiguousarray(values, dtype=dtype.to_pandas_dtype())
    return pa.Array.from_buffers(dtype, len(held), [None, pa.py_buffer(held)])


def _nullable(values: NDArray[np.uint32], known: NDArray[np.bool_]) -> pa.Array:
    """uint32 with nulls where not `known`: what pa.array(values, mask=~known) gives, which imports numpy.ma."""
    kept = np.where(known, values, np.uint32(0)).astype(np.uint32, copy=False)
    bits = np.packbits(known, bitorder="little")
    return pa.Array.from_buffers(pa.uint32(), len(kept), [pa.py_buffer(bits), pa.py_buffer(kept)])


def _with_nulls(array: pa.Array) -> tuple[NDArray[np.uint32], NDArray[np.bool_]]:
    """(values, which of them are known) of uint32 as it was read from a file: the other way of `_nullable`."""
    assert array.offset == 0
    bits, values = array.buffers()
    known = np.ones(len(array), dtype=np.bool_)
    if bits is not None:
        known = np.unpackbits(np.frombuffer(bits, dtype=np.uint8), count=len(array), bitorder="little").view(np.bool_)
    return np.frombuffer(values, dtype=np.uint32, count=len(array)), known


def _write(table: pa.Table, path: Path, repeating: list[str] | bool = True) -> None:
    """repeating: columns of few values; a dictionary of the others costs half of the time and a third of the file."""
    write_parquet(table, path, row_group_rows=ROW_GROUP_ROWS, dictionary=repeating)


def _read_all(path: Path) -> pa.Table:
    import pyarrow.parquet as pq  # with all processors, and what that brings along

    return pq.read_table(path)
