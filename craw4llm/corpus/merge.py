"""From sorted runs to the files of a corpus artifact, in memory that does not grow with the corpus: an external sort in buckets.

    merged = merge(parts, out, config, execution)

URLs are cut into ranges (buckets) so small that a bucket's rows, of all runs together, fit the memory; in every run a bucket is one
contiguous slice. Three passes over the buckets, each shared out to worker processes:

1. pages: the slices' pages sorted by (URL, order of the records); the first (or last) record of a URL is the page, the others
   are repeats. Page ids are positions in the order of URLs, so a bucket's begin where the bucket before it ends.
2. links: the distinct link URLs of all runs are looked up among the bucket's pages; what is not there is a dead link, numbered likewise.
3. rows: the page table, texts, links, flags and anchors of the bucket's pages, in page-id order.

A last sequential pass per range of targets counts in-links. A merge that was killed goes on with the buckets of passes 1 and 2 that it had
not done; pass 3, which lays the files end to end, begins again. Nothing that is written depends on the number of parts, runs, buckets
or workers. Files: docs/artifacts.md, "corpus".
"""

import dataclasses
import functools
import hashlib
import json
import mmap
import resource
import shutil
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import xxhash
from numpy.typing import NDArray

from craw4llm.configs import CorpusConfig
from craw4llm.corpus.anchors import AnchorWriter
from craw4llm.corpus.heldout import is_heldout
from craw4llm.corpus.npy import NpyWriter, reserve
from craw4llm.corpus.parts import Part, RunFiles
from craw4llm.corpus.prepare import REJECTS
from craw4llm.corpus.urls import domain_of, host_of
from craw4llm.errors import InputError
from craw4llm.execution import Execution
from craw4llm.processes import worker_pool

FOLDER = "merge"
BOOT = Path("/proc/sys/kernel/random/boot_id")
MAX_PAGES = 2**32 - 1  # page ids are uint32
ROW_GROUP_PAGES = 65_536
MAX_BUCKET_BYTES = 1 << 30  # more memory than this a bucket does not use: an Arrow array of strings ends at 2 GiB
POOL_FROM_BYTES = 64 << 20  # starting a pool takes about a second; less work than this is done before it is up

_NONE, _FIRST_DEAD = -1, -2  # codes of link targets before dead links are numbered: no target; dead link k of its bucket is -2 - k


@dataclasses.dataclass(frozen=True)
class Merged:
    """What was written. rejects: by reason, with the repeats of URLs."""

    counts: dict[str, tuple[int | float | None, str]]
    pages: int
    repeats: int


@dataclasses.dataclass(frozen=True)
class _Job:
    """What every pass needs. page_bounds, url_bounds: int64[runs, buckets + 1], where in a run's pages and URLs a bucket begins.
    page_starts, url_starts: int64[runs + 1], where a run's rows begin in the arrays over all runs."""

    runs: tuple[RunFiles, ...]
    folder: Path
    out: Path
    config: CorpusConfig
    page_bounds: NDArray[np.int64]
    url_bounds: NDArray[np.int64]
    page_starts: NDArray[np.int64]
    url_starts: NDArray[np.int64]

    @property
    def buckets(self) -> int:
        return self.page_bounds.shape[1] - 1

    def path(self, name: str, number: int) -> Path:
        return self.folder / f"{name}-{number:06}"

    def kept(self, mode: Any = "r") -> NDArray[np.uint8]:
        """uint8, over the pages of all runs: 1 for the record that is its URL's page."""
        return _mapped(self.folder / "kept", np.uint8, int(self.page_starts[-1]), mode)

    def codes(self, mode: Any = "r") -> NDArray[np.int64]:
        """int64, over the link URLs of all runs: the page id, or a code."""
        return _mapped(self.folder / "codes", np.int64, int(self.url_starts[-1]), mode)

    def has(self, name: str) -> bool:
        return any(name in run.has for run in self.runs)


@dataclasses.dataclass(frozen=True)
class _Bases:
    """Where a bucket's pages, dead links and text bytes begin: int64[buckets + 1] each."""

    pages: NDArray[np.int64]
    dead: NDArray[np.int64]
    text: NDArray[np.int64]


def merge(parts: Sequence[Part], out: Path, config: CorpusConfig, execution: Execution) -> Merged:
    """Writes the artifact's files into `out`. Raises InputError where there are more pages or targets than ids."""
    _many_files()
    runs = tuple(run for part in parts for run in part.runs)
    folder = out / FOLDER
    splitters = _splitters(runs, min(MAX_BUCKET_BYTES, execution.memory_bytes // (4 * max(1, execution.workers))))
    job = _Job(
        runs=runs,
        folder=folder,
        out=out,
        config=config,
        page_bounds=_bounds(runs, "pages", splitters),
        url_bounds=_bounds(runs, "urls", splitters),
        page_starts=_starts([run.pages for run in runs]),
        url_starts=_starts([run.urls for run in runs]),
    )
    weight = sum(size for run in runs for _, size in run.samples)
    buckets = range(job.buckets)
    with _Workers(execution if weight > POOL_FROM_BYTES and job.buckets > 1 else None) as workers:
        _begin(job, splitters)
        found = list(workers.map(_sort_pages, job, buckets))
        page_base, text_base = _starts([pages for pages, _ in found]), _starts([size for _, size in found])
        n_pages = int(page_base[-1])
        if n_pages > MAX_PAGES:
            raise InputError(f"corpus: the source has {n_pages:,} pages; page ids go up to {MAX_PAGES:,}")
        repeats = int(job.page_starts[-1]) - n_pages
        if repeats:
            list(workers.map(_mark_used, job, range(len(runs))))
        bases = _Bases(page_base, np.zeros(job.buckets + 1, dtype=np.int64), text_base)
        dead = [number for (number,) in workers.map(_resolve, (job, bases), buckets)]
        bases = dataclasses.replace(bases, dead=_starts(dead))
        n_dead = int(bases.dead[-1])
        if n_pages + n_dead > MAX_PAGES:
            raise InputError(
                f"corpus: {n_pages:,} pages and {n_dead:,} dead links; targets go up to {MAX_PAGES:,}: use dangling_links='outside'"
            )
        with (out / "text.zst").open("wb") as stream:
            reserve(stream, int(text_base[-1]))
        counts = _write(job, out, n_pages, n_dead, workers.map(_rows, (job, bases), buckets))
    _write_dead(job, out)
    _write_indegree(out, n_pages + n_dead, execution.memory_bytes)
    _write_rejects(job, parts, out)
    shutil.rmtree(folder)
    return Merged(counts=counts, pages=n_pages, repeats=repeats)


class _Workers:
    """map(function, job, numbers): in order, in a pool or, without an execution, here."""

    def __init__(self, execution: Execution | None) -> None:
        self._workers = execution.workers if execution is not None else 1
        self._context = worker_pool(self._workers) if self._workers > 1 else None
        self._pool: Any = None

    def __enter__(self) -> "_Workers":
        if self._context is not None:
            self._pool = self._context.__enter__()
        return self

    def __exit__(self, *exception: Any) -> None:
        if self._context is not None:
            self._context.__exit__(*exception)

    def map(self, function: Callable[[Any, int], Any], job: Any, numbers: Sequence[int]) -> Iterator[Any]:
        if self._pool is None:
            return (function(job, number) for number in numbers)
        return self._ahead(function, job, numbers)

    def _ahead(self, function: Callable[[Any, int], Any], job: Any, numbers: Sequence[int]) -> Iterator[Any]:
        """Few buckets are ahead of the one that is wanted: their results wait in this process' memory."""
        waiting: deque[Future[Any]] = deque()
        for number in numbers:
            waiting.append(self._pool.submit(function, job, number))
            if len(waiting) > self._workers:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()


def _splitters(runs: Sequence[RunFiles], bucket_bytes: int) -> list[str]:
    """URLs between buckets, so that each bucket has about `bucket_bytes`."""
    samples = sorted(sample for run in runs for sample in run.samples)
    found: list[str] = []
    size = 0
    for url, weight in samples:
        size += weight
        if size > bucket_bytes and (not found or url > found[-1]):
            found.append(url)
            size = 0
    return found


def _bounds(runs: Sequence[RunFiles], kind: str, splitters: Sequence[str]) -> NDArray[np.int64]:
    """int64[runs, len(splitters) + 2]: bucket b of run r is the rows [bounds[r, b], bounds[r, b + 1]) of its table."""
    bounds = np.zeros((len(runs), len(splitters) + 2), dtype=np.int64)
    for r, run in enumerate(runs):
        urls = run.table(kind).column("url")
        bounds[r, -1] = len(urls)
        low = 0
        for b, splitter in enumerate(splitters, 1):
            low = _first_at_least(urls, splitter, low)
            bounds[r, b] = low
    return bounds


def _first_at_least(urls: pa.Array, wanted: str, low: int) -> int:
    high = len(urls)
    while low < high:
        middle = (low + high) // 2
        if urls[middle].as_py() < wanted:
            low = middle + 1
        else:
            high = middle
    return low


def _begin(job: _Job, splitters: Sequence[str]) -> None:
    """The folder of a merge: that of a killed one with the same runs and buckets, or an empty one.

    The same boot, too: what a killed process wrote, the system still writes; what a machine wrote that lost its power, nobody knows.
    """
    told = hashlib.sha256("\n".join([BOOT.read_text() if BOOT.exists() else str(time.time()), *splitters]).encode())
    for run in job.runs:
        told.update(f"{run.stem.name}|{run.pages}|{run.urls}|{run.links}|{run.samples}\n".encode())
    name = job.folder / "merge.json"
    if name.exists() and name.read_text() == told.hexdigest():
        return
    shutil.rmtree(job.folder, ignore_errors=True)
    job.folder.mkdir()
    for array, dtype, length in (("kept", np.uint8, job.page_starts[-1]), ("codes", np.int64, job.url_starts[-1])):
        with (job.folder / array).open("wb") as stream:
            reserve(stream, int(length) * np.dtype(dtype).itemsize)
    name.write_text(told.hexdigest())


def _once(function: Callable[[Any, int], tuple[int, ...]]) -> Callable[[Any, int], tuple[int, ...]]:
    """A pass over a bucket that leaves its result behind when it is done, and is not done again where that is there."""

    @functools.wraps(function)
    def run(given: Any, b: int) -> tuple[int, ...]:
        job: _Job = given[0] if isinstance(given, tuple) else given
        name = job.path(function.__name__.strip("_"), b).with_suffix(".json")
        if name.exists():
            return tuple(json.loads(name.read_text()))
        found = function(given, b)
        temporary = name.with_suffix(".tmp")
        temporary.write_text(json.dumps(found))
        temporary.replace(name)
        return found

    return run


@_once
def _sort_pages(job: _Job, b: int) -> tuple[int, int]:
    """Pass 1. Returns (pages, bytes of their texts) of the bucket; writes which rows they are, in order, and their URLs."""
    slices = [run.table("pages").slice(*_span(job.page_bounds, r, b)) for r, run in enumerate(job.runs)]
    urls = _joined([rows.column("url") for rows in slices])
    sizes = _joined([rows.column("size") for rows in slices]).to_numpy()
    by_url = pc.sort_indices(urls).to_numpy()  # stable, and the runs come in the order of the records
    urls = urls.take(by_url)
    chosen = _firsts(urls) if job.config.duplicates == "first" else _lasts(urls)
    rows = by_url[chosen].astype(np.int64)
    kept = np.zeros(len(by_url), dtype=np.uint8)
    kept[rows] = 1
    everywhere = job.kept("r+")
    lengths = job.page_bounds[:, b + 1] - job.page_bounds[:, b]
    for r, start in enumerate(_starts(lengths)[:-1].tolist()):
        if lengths[r]:
            at = int(job.page_starts[r] + job.page_bounds[r, b])
            everywhere[at : at + lengths[r]] = kept[start : start + lengths[r]]
    np.save(f"{job.path('order', b)}.npy", rows)
    _write_arrow(pa.table({"url": urls.filter(pa.array(chosen))}), job.path("urls", b))
    return len(rows), int(sizes[rows].sum())


def _mark_used(job: _Job, r: int) -> None:
    """Between passes 1 and 2, of a run with repeats: which of its link URLs are linked from a page that is kept."""
    kept = job.kept()[job.page_starts[r] : job.page_starts[r + 1]].astype(np.bool_)
    if kept.all():
        return
    run = job.runs[r]
    counts = run.table("pages").column("links").to_numpy()
    links = run.table("links").column("url").to_numpy()
    used = np.zeros(run.urls, dtype=np.bool_)
    used[links[np.repeat(kept, counts)]] = True
    np.save(f"{job.path('used', r)}.npy", used)


@_once
def _resolve(given: tuple[_Job, _Bases], b: int) -> tuple[int]:
    """Pass 2. Returns the number of the bucket's dead links; writes their URLs, and a code for each link URL."""
    job, bases = given
    pages = _read_arrow(job.path("urls", b)).column("url")
    spans = [_span(job.url_bounds, r, b) for r in range(len(job.runs))]
    urls = _joined([run.table("urls").column("url").slice(*span) for run, span in zip(job.runs, spans, strict=True)])
    at = pc.index_in(urls, value_set=pages)
    codes = pc.fill_null(at, _NONE).to_numpy().astype(np.int64)
    codes = np.where(codes >= 0, codes + bases.pages[b], codes)
    dangling = codes < 0
    used = np.ones(len(urls), dtype=np.bool_)
    starts = _starts([length for _, length in spans])
    for r, (low, length) in enumerate(spans):
        path = Path(f"{job.path('used', r)}.npy")
        if length and path.exists():
            used[starts[r] : starts[r + 1]] = np.load(path, mmap_mode="r")[low : low + length]
    names = pa.array([], pa.string())
    if job.config.dangling_links == "dead":
        wanted = pa.array(dangling & used)
        found = urls.filter(wanted)
        names = pc.unique(found)
        names = names.take(pc.sort_indices(names))
        codes[dangling & used] = _FIRST_DEAD - pc.index_in(found, value_set=names).to_numpy().astype(np.int64)
    everywhere = job.codes("r+")
    for r, (low, length) in enumerate(spans):
        if length:
            at_run = int(job.url_starts[r] + low)
            everywhere[at_run : at_run + length] = codes[starts[r] : starts[r + 1]]
    _write_arrow(pa.table({"url": names}), job.path("dead", b))
    return (len(names),)


def _rows(given: tuple[_Job, _Bases], b: int) -> "_Rows":
    """Pass 3: the bucket's pages in page-id order. Writes their texts into text.zst, and returns the rest."""
    job, bases = given
    rows = np.load(f"{job.path('order', b)}.npy")
    spans = [_span(job.page_bounds, r, b) for r in range(len(job.runs))]
    tables = [pa.Table.from_batches([run.table("pages")]).slice(*span) for run, span in zip(job.runs, spans, strict=True)]
    joined = pa.concat_tables(tables)
    run_of = np.repeat(np.arange(len(spans)), [length for _, length in spans])
    first_byte, size = joined["first_byte"].to_numpy(), joined["size"].to_numpy()
    _copy_texts(job, run_of[rows], first_byte[rows], size[rows], int(bases.text[b]))

    counts = joined["links"].to_numpy()
    targets, flags, anchors = _targets(job, bases, tables)
    starts = _starts(counts)[:-1][rows]
    counts = counts[rows]
    order = np.arange(counts.sum(), dtype=np.int64) + np.repeat(starts - _starts(counts)[:-1], counts)
    page = np.repeat(np.arange(len(rows)), counts)
    targets = targets[order]
    inside = targets >= 0
    outside = len(targets) - int(np.count_nonzero(inside))
    order, page, targets = order[inside], page[inside], targets[inside]
    by_page = np.lexsort((targets, page))
    order, targets = order[by_page], targets[by_page]

    table = joined.take(rows)
    urls = table["url"].to_pylist()
    hosts = [host_of(url) for url in urls]
    by_host = dict.fromkeys(hosts)
    domains = {host: domain_of(host) for host in by_host}
    config = job.config
    by = urls if config.heldout_by == "page" else hosts
    drawn = {key: is_heldout(key, config.heldout_fraction) for key in dict.fromkeys(by)}
    heldout = np.fromiter((drawn[key] for key in by), dtype=np.bool_, count=len(by))
    heldout &= table["n_chars"].to_numpy() >= config.heldout_min_chars
    columns = {
        "url": table["url"],
        "host": pa.array(hosts, pa.string()),
        "domain": pa.array([domains[host] for host in hosts], pa.string()),
        "n_chars": table["n_chars"],
        "n_bytes": table["n_bytes"],
        "heldout": pa.array(heldout),
        "cut": table["cut"],
        "source": table["source"],
        "doc_id": table["doc_id"],
        "language": table["language"],
        "canonical": table["canonical"],
        "signals": table["signals"],
    }
    if job.has("score"):
        columns["score"] = table["score"]
    return _Rows(
        table=pa.table(columns),
        sizes=size[rows],
        degrees=np.bincount(page, minlength=len(rows)),
        targets=targets.astype(np.uint32),
        flags=flags[order] if job.has("flags") else None,
        anchors=anchors.take(pa.array(order)) if job.has("anchor") else None,
        outside=outside,
        hosts=_hashes(by_host),
        domains=_hashes(dict.fromkeys(domains.values())),
    )


@dataclasses.dataclass(frozen=True)
class _Rows:
    """Pages of a bucket in page-id order. sizes: of their texts' frames. hosts, domains: 128-bit hashes of the distinct names."""

    table: pa.Table
    sizes: NDArray[np.int64]
    degrees: NDArray[np.int64]
    targets: NDArray[np.uint32]
    flags: NDArray[np.uint8] | None
    anchors: pa.Array | None
    outside: int
    hosts: NDArray[np.void]
    domains: NDArray[np.void]


def _targets(job: _Job, bases: _Bases, tables: Sequence[pa.Table]) -> tuple[NDArray[np.int64], NDArray[np.uint8], pa.Array]:
    """(targets, -1 for none; flags; anchors) of the links of the pages in `tables` (one slice per run), in that order."""
    n_pages = int(bases.pages[-1])
    codes = job.codes()
    targets, flags, anchors = [np.empty(0, dtype=np.int64)], [np.empty(0, dtype=np.uint8)], [pa.array([], pa.string())]
    for r, (run, table) in enumerate(zip(job.runs, tables, strict=True)):
        counts = table["links"].to_numpy()
        if not counts.sum():
            continue
        links = run.table("links").slice(int(table["first_link"][0].as_py()), int(counts.sum()))
        urls = links.column("url").to_numpy().astype(np.int64)
        code = np.asarray(codes[job.url_starts[r] : job.url_starts[r + 1]])[urls]
        dead = code <= _FIRST_DEAD
        bucket = np.searchsorted(job.url_bounds[r], urls[dead], side="right") - 1
        code[dead] = n_pages + bases.dead[bucket] + (_FIRST_DEAD - code[dead])
        targets.append(code)
        if job.has("flags"):
            flags.append(links.column("flags").to_numpy() if "flags" in run.has else np.zeros(len(links), dtype=np.uint8))
        if job.has("anchor"):
            anchors.append(links.column("anchor") if "anchor" in run.has else pa.nulls(len(links), pa.string()))
    return np.concatenate(targets), np.concatenate(flags), pa.concat_arrays(anchors)


def _copy_texts(job: _Job, run_of: NDArray[Any], first: NDArray[Any], size: NDArray[Any], at: int) -> None:
    """Copies frames from the runs' text files to their place in text.zst, which begins at byte `at`."""
    maps: dict[int, mmap.mmap] = {}
    try:
        with (job.out / "text.zst").open("r+b") as stream:
            stream.seek(at)
            for r, begin, length in zip(run_of.tolist(), first.tolist(), size.tolist(), strict=True):
                if length:
                    if r not in maps:
                        with job.runs[r].text.open("rb") as given:
                            maps[r] = mmap.mmap(given.fileno(), 0, access=mmap.ACCESS_READ)
                    stream.write(maps[r][begin : begin + length])
    finally:
        for opened in maps.values():
            opened.close()


def _write(job: _Job, out: Path, n_pages: int, n_dead: int, pieces: Iterator[_Rows]) -> dict[str, tuple[int | float | None, str]]:
    """Lays the buckets' rows end to end. Returns the counts."""
    totals = dict.fromkeys(("links", "outside", "dead_uses", "text_bytes", "empty", "cut", "heldout"), 0)
    hosts, domains = [np.empty(0, dtype="V16")], [np.empty(0, dtype="V16")]
    text_at = link_at = page_at = 0
    with (
        NpyWriter(out / "text_offsets.npy", np.uint64) as text_offsets,
        NpyWriter(out / "links_offsets.npy", np.uint64) as links_offsets,
        NpyWriter(out / "links_targets.npy", np.uint32) as links_targets,
        NpyWriter(out / "heldout.npy", np.uint32) as heldout,
        RowGroups(out / "pages.parquet") as pages,
        _optional(job.has("flags"), lambda: NpyWriter(out / "links_flags.npy", np.uint8)) as links_flags,
        _optional(job.has("anchor"), lambda: AnchorWriter(out)) as links_anchors,
    ):
        text_offsets.append([0])
        links_offsets.append([0])
        for piece in pieces:
            pages.append(piece.table)
            text_offsets.append((text_at + np.cumsum(piece.sizes)).astype(np.uint64))
            links_offsets.append((link_at + np.cumsum(piece.degrees)).astype(np.uint64))
            links_targets.append(piece.targets)
            drawn = np.flatnonzero(piece.table["heldout"].to_numpy())
            heldout.append(page_at + drawn)
            if links_flags is not None:
                links_flags.append(piece.flags)
            if links_anchors is not None:
                links_anchors.append(piece.degrees, piece.anchors)
            n_bytes = piece.table["n_bytes"].to_numpy()
            totals["links"] += len(piece.targets)
            totals["outside"] += piece.outside
            totals["dead_uses"] += int(np.count_nonzero(piece.targets >= n_pages))
            totals["text_bytes"] += int(n_bytes.sum(dtype=np.int64))
            totals["empty"] += int(np.count_nonzero(n_bytes == 0))
            totals["cut"] += int(np.count_nonzero(piece.table["cut"].to_numpy()))
            totals["heldout"] += len(drawn)
            hosts.append(piece.hosts)
            domains.append(piece.domains)
            text_at += int(piece.sizes.sum())
            link_at += len(piece.targets)
            page_at += len(piece.sizes)
    return {
        "pages": (n_pages, "pages"),
        "heldout_pages": (totals["heldout"], "pages"),
        "hosts": (len(np.unique(np.concatenate(hosts))), "hosts"),
        "domains": (len(np.unique(np.concatenate(domains))), "domains"),
        "links": (totals["links"] - totals["dead_uses"], "links"),
        "dead_links": (n_dead, "URLs"),
        "dead_link_uses": (totals["dead_uses"], "links"),
        "outside_links": (totals["outside"], "links"),
        "text_bytes": (totals["text_bytes"], "bytes"),
        "empty_pages": (totals["empty"], "pages"),
        "cut_pages": (totals["cut"], "pages"),
    }


def _write_dead(job: _Job, out: Path) -> None:
    with RowGroups(out / "dead_links.parquet", pa.schema({"url": pa.string()})) as rows:
        for b in range(job.buckets):
            rows.append(pa.Table.from_batches([_read_arrow(job.path("dead", b))]))


def _write_indegree(out: Path, n_targets: int, memory_bytes: int) -> None:
    targets = np.load(out / "links_targets.npy", mmap_mode="r")
    write_indegree(out / "indegree.npy", targets, n_targets, memory_bytes)


def write_indegree(path: Path, targets: NDArray[np.uint32], n_targets: int, memory_bytes: int) -> None:
    """indegree.npy: uint32[n_targets], how often each target occurs. Reads `targets` once per range of targets that fits the memory."""
    width = max(1 << 16, memory_bytes // 16)
    block = 1 << 22
    with NpyWriter(path, np.uint32) as counted:
        for low in range(0, n_targets, width):
            high = min(low + width, n_targets)
            found = np.zeros(high - low, dtype=np.uint32)
            for start in range(0, len(targets), block):
                some = np.asarray(targets[start : start + block])
                if high - low <= block:
                    if high - low < n_targets:
                        some = some[(some >= low) & (some < high)] - np.uint32(low)
                    np.add.at(found, some, np.uint32(1))
                else:  # numpy would need a pass over all targets for each block
                    from craw4llm.corpus.transpose import count_into  # compiled: only large graphs need to load numba

                    count_into(found, some, low)
            counted.append(found)


def _write_rejects(job: _Job, parts: Sequence[Part], out: Path) -> None:
    """rejects.parquet: in the order of the records, the repeats of URLs among them."""
    kept = job.kept()
    r = 0
    with RowGroups(out / "rejects.parquet", pa.schema([field for field in REJECTS if field.name != "order"])) as rows:
        for part in parts:
            tables = []
            for run in part.runs:
                tables.append(pa.Table.from_batches([run.table("rejects")]))
                repeated = np.flatnonzero(kept[job.page_starts[r] : job.page_starts[r + 1]] == 0)
                if len(repeated):
                    pages = run.table("pages").take(pa.array(repeated))
                    columns = {name: pages.column(name) for name in ("order", "source", "position", "url")}
                    tables.append(pa.table({**columns, "reason": pa.array(["duplicate_url"] * len(repeated), pa.string())}, schema=REJECTS))
                r += 1
            if tables:
                rows.append(pa.concat_tables(tables).sort_by("order").drop_columns("order"))


class RowGroups:
    """A Parquet file of row groups of equal length, whatever the lengths of the tables appended."""

    def __init__(self, path: Path, schema: pa.Schema | None = None) -> None:
        self._path, self._schema = path, schema
        self._writer: pq.ParquetWriter | None = None
        self._waiting: list[pa.Table] = []
        self._rows = 0

    def append(self, table: pa.Table) -> None:
        self._schema = self._schema or table.schema
        self._waiting.append(table)
        self._rows += len(table)
        if self._rows >= ROW_GROUP_PAGES:
            self._flush()

    def _flush(self, *, rest: bool = False) -> None:
        assert self._schema is not None, "at least one table was appended"
        if self._writer is None:
            self._writer = pq.ParquetWriter(self._path, self._schema, compression="zstd")
        table = pa.concat_tables(self._waiting) if self._waiting else self._schema.empty_table()
        while len(table) >= ROW_GROUP_PAGES or (rest and len(table)):
            # copied, so that a row group's bytes do not depend on how its rows arrived
            rows = table.slice(0, ROW_GROUP_PAGES)
            self._writer.write_table(rows.take(pa.array(np.arange(len(rows)))).combine_chunks(), row_group_size=ROW_GROUP_PAGES)
            table = table.slice(ROW_GROUP_PAGES)
        self._waiting, self._rows = [table], len(table)

    def __enter__(self) -> "RowGroups":
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        if kind is None:
            self._flush(rest=True)
        if self._writer is not None:
            self._writer.close()


class _optional:
    """A context manager for a writer that is only there where `wanted`; otherwise None."""

    def __init__(self, wanted: bool, make: Callable[[], Any]) -> None:
        self._writer = make() if wanted else None

    def __enter__(self) -> Any:
        return self._writer and self._writer.__enter__()

    def __exit__(self, *exception: Any) -> None:
        if self._writer is not None:
            self._writer.__exit__(*exception)


def _firsts(urls: pa.Array) -> NDArray[np.bool_]:
    """bool: whether a sorted array's value differs from the one before it."""
    found = np.ones(len(urls), dtype=np.bool_)
    if len(urls) > 1:
        found[1:] = pc.not_equal(urls[1:], urls[:-1]).to_numpy(zero_copy_only=False)
    return found


def _lasts(urls: pa.Array) -> NDArray[np.bool_]:
    found = np.ones(len(urls), dtype=np.bool_)
    if len(urls) > 1:
        found[:-1] = pc.not_equal(urls[1:], urls[:-1]).to_numpy(zero_copy_only=False)
    return found


def _span(bounds: NDArray[np.int64], r: int, b: int) -> tuple[int, int]:
    """(first row, rows) of a bucket in a run."""
    return int(bounds[r, b]), int(bounds[r, b + 1] - bounds[r, b])


def _starts(counts: Any) -> NDArray[np.int64]:
    """int64[len(counts) + 1]: where each begins when all lie end to end."""
    starts = np.zeros(len(counts) + 1, dtype=np.int64)
    np.cumsum(counts, out=starts[1:])
    return starts


def _joined(arrays: Sequence[pa.Array]) -> pa.Array:
    return pa.concat_arrays(arrays)


def _hashes(names: Any) -> NDArray[np.void]:
    return np.frombuffer(b"".join(xxhash.xxh3_128_digest(name) for name in names), dtype="V16")


def _mapped(path: Path, dtype: Any, length: int, mode: Any) -> NDArray[Any]:
    """An array in a file; an empty one needs no file."""
    return np.memmap(path, dtype=dtype, mode=mode, shape=(length,)) if length else np.empty(0, dtype=dtype)


def _write_arrow(table: pa.Table, path: Path) -> None:
    batches = table.combine_chunks().to_batches()
    with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_file(sink, table.schema) as writer:
        writer.write_batch(batches[0] if batches else pa.RecordBatch.from_pylist([], table.schema))


def _read_arrow(path: Path) -> pa.RecordBatch:
    return pa.ipc.open_file(pa.memory_map(str(path))).get_batch(0)


def _many_files() -> None:
    """Lets this process and its children open as many files as the system allows: a merge has all runs open."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
