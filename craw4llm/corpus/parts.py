"""Parts of a corpus build: ranges of a source's chunks, each prepared by one process into sorted runs on disk.

    tasks = plan_parts(source, folder, config, run_bytes)      the same for any number of workers
    part = find(task) or write(task)

    000012.json              the part: what was counted, and size and hash of each of its files; written last, renamed into place
    000012-000.pages.arrow   a run's pages, sorted by URL (craw4llm.corpus.prepare.PAGES)
    000012-000.text          their texts' zstd frames, in that order
    000012-000.urls.arrow    distinct URLs that the pages link to, sorted
    000012-000.links.arrow   for each link, page by page: its row in urls; flags and anchors where there are any
    000012-000.rejects.arrow

A part has one run, or more where its pages would not fit the memory. So `kill -9` costs the parts that were being written and no
others, and parts may be prepared by any process on any machine that shares the folder. What is merged from them does not depend on how the
source was cut (craw4llm.corpus.merge).
"""

import dataclasses
import hashlib
import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import xxhash

from craw4llm.configs import CorpusConfig
from craw4llm.corpus.prepare import Gathered, Run
from craw4llm.corpus.records import Chunk, ReadAgain, Source
from craw4llm.errors import StageError
from craw4llm.execution import process_name

FORMAT = 1  # of the files; raised when they change, so that those of an older version are written again
MAX_PARTS = 4096  # a larger source gets larger parts
SAMPLES = 64  # URLs of a run that tell the merge where its middle lies


@dataclasses.dataclass(frozen=True)
class Task:
    """A part to be written. run_bytes: how much memory its pages may take before they become a run."""

    folder: Path
    number: int
    chunks: tuple[Chunk, ...]
    config: CorpusConfig
    run_bytes: int

    @property
    def key(self) -> str:
        """Tells whether a part found on disk is this one."""
        return hashlib.sha256("\n".join([str(FORMAT), *(chunk.label for chunk in self.chunks)]).encode()).hexdigest()

    @property
    def records(self) -> int:
        """As far as the chunks say."""
        return sum(chunk.records or 0 for chunk in self.chunks)


@dataclasses.dataclass(frozen=True)
class RunFiles:
    """A run on disk. stem: path without the endings. samples: (URL, about what the rows up to it take in memory) of pages and links."""

    stem: Path
    pages: int
    urls: int
    links: int
    has: tuple[str, ...]  # of "flags", "anchor", "score"
    samples: list[tuple[str, int]]

    def table(self, kind: str) -> pa.RecordBatch:
        """kind: pages, urls, links or rejects; memory-mapped."""
        return pa.ipc.open_file(pa.memory_map(f"{self.stem}.{kind}.arrow")).get_batch(0)

    @property
    def text(self) -> Path:
        return self.stem.with_name(f"{self.stem.name}.text")


@dataclasses.dataclass(frozen=True)
class Part:
    """A finished part. records: how many it read; skipped by kind."""

    number: int
    records: int
    pages: int
    rejects: int
    skipped: dict[str, int]
    unusable_links: int
    nofollow_links: int
    runs: list[RunFiles]


def plan_parts(source: Source, folder: Path, config: CorpusConfig, run_bytes: int) -> list[Task]:
    """Consecutive chunks, together about `source.part_records` records; a chunk that does not know its number is a part of its own."""
    wanted = max(source.part_records, (source.records or 0) // MAX_PARTS)
    chunks = list(source.chunks)
    at_least = -(-len(chunks) // MAX_PARTS)
    groups = list(_groups(chunks, wanted, at_least))
    return [Task(folder, number, tuple(group), config, run_bytes) for number, group in enumerate(groups)]


def write(task: Task) -> Part:
    """Reads the chunks and writes the part. Runs in any process; what it writes depends on the task alone."""
    try:
        return _write(task)
    except ReadAgain as again:
        chunks = tuple(again.chunk if chunk.label == again.chunk.label else chunk for chunk in task.chunks)
        return write(dataclasses.replace(task, chunks=chunks))


def _write(task: Task) -> Part:
    task.folder.mkdir(parents=True, exist_ok=True)
    record = _record_path(task)
    record.unlink(missing_ok=True)
    reading = _reading_path(task)
    gathered = Gathered(task.config)
    runs: list[dict[str, Any]] = []
    skipped: Counter[str] = Counter()
    counts = Counter(records=0, pages=0, rejects=0, unusable_links=0, nofollow_links=0)

    def flush() -> None:
        nonlocal gathered
        counts.update(
            pages=gathered.pages,
            rejects=gathered.rejects,
            unusable_links=gathered.unusable_links,
            nofollow_links=gathered.nofollow_links,
        )
        skipped.update(gathered.skipped)
        if gathered.pages or gathered.rejects:
            runs.append(_write_run(gathered.sorted(), task.folder / f"{task.number:06}-{len(runs):03}"))
        gathered = Gathered(task.config)

    for chunk in task.chunks:
        reading.write_text(chunk.label, errors="replace")
        before = counts["records"]
        for item in chunk.read():
            counts["records"] += gathered.take(item, counts["records"])
            if gathered.size_bytes > task.run_bytes:
                flush()
        read = counts["records"] - before
        if chunk.records is not None and read != chunk.records:
            raise StageError(f"corpus: {chunk.label}: {read:,} records were read, {chunk.records:,} were announced; a file has changed")
    flush()
    content = {"key": task.key, "number": task.number, **counts, "skipped": dict(sorted(skipped.items())), "runs": runs}
    temporary = record.with_suffix(f".{process_name()}.tmp")
    temporary.write_text(json.dumps(content))
    temporary.replace(record)
    reading.unlink(missing_ok=True)
    return _part(task.folder, content)


def find(task: Task) -> Part | None:
    """The finished part, if it is there, is this task's, and its files are whole."""
    try:
        content = json.loads(_record_path(task).read_text())
        if content["key"] != task.key:
            return None
        for run in content["runs"]:
            for name, (size, hashed) in run["files"].items():
                path = task.folder / name
                if path.stat().st_size != size or _hash(path) != hashed:
                    return None
        return _part(task.folder, content)
    except (OSError, ValueError, KeyError, TypeError):
        return None  # not finished, or damaged: it is written again


def being_read(folder: Path) -> list[str]:
    """Labels of the chunks that were being read by processes which did not finish."""
    return [path.read_text(errors="replace") for path in sorted(folder.glob("*.reading"))]


def _groups(chunks: list[Chunk], wanted: int, at_least: int) -> Iterator[list[Chunk]]:
    group: list[Chunk] = []
    size = 0
    for chunk in chunks:
        group.append(chunk)
        size += wanted if chunk.records is None else chunk.records
        if size >= wanted and len(group) >= at_least:
            yield group
            group, size = [], 0
    if group:
        yield group


def _write_run(run: Run, stem: Path) -> dict[str, Any]:
    paths = {kind: stem.with_name(f"{stem.name}.{kind}.arrow") for kind in ("pages", "urls", "links", "rejects")}
    _write_table(run.pages, paths["pages"])
    _write_table(pa.table({"url": run.urls}), paths["urls"])
    _write_table(run.links, paths["links"])
    _write_table(run.rejects, paths["rejects"])
    text = stem.with_name(f"{stem.name}.text")
    with _replacing(text) as temporary, temporary.open("wb") as stream:
        stream.writelines(run.frames)
    has = [name for name in ("flags", "anchor") if name in run.links.column_names]
    if run.pages["score"].null_count < len(run.pages):
        has.append("score")
    size = pc.add(pc.binary_length(run.pages["url"]).cast(pa.int64()), pc.multiply(run.pages["links"], 48))
    files = [*paths.values(), text]
    return {
        "stem": stem.name,
        "pages": len(run.pages),
        "urls": len(run.urls),
        "links": len(run.links),
        "has": has,
        "files": {path.name: [path.stat().st_size, _hash(path)] for path in files},
        "samples": [
            *_samples(run.pages["url"].combine_chunks(), size.to_numpy() + 300),
            *_samples(run.urls, pc.binary_length(run.urls).to_numpy(zero_copy_only=False).astype(np.int64) + 60),
        ],
    }


def _samples(urls: pa.Array, sizes: np.ndarray) -> list[tuple[str, int]]:
    """At most SAMPLES of the URLs, ascending, each with the sizes of the rows since the one before it."""
    if not len(urls):
        return []
    ends = np.unique(np.linspace(0, len(urls) - 1, min(SAMPLES, len(urls))).astype(np.int64))
    summed = np.cumsum(sizes)[ends]
    return list(zip(urls.take(pa.array(ends)).to_pylist(), np.diff(summed, prepend=0).tolist(), strict=True))


def _write_table(table: pa.Table, path: Path) -> None:
    """One record batch, which can be mapped into memory and cut without copying."""
    batches = table.combine_chunks().to_batches()
    with (
        _replacing(path) as temporary,
        pa.OSFile(str(temporary), "wb") as sink,
        pa.ipc.new_file(sink, table.schema) as writer,
    ):
        writer.write_batch(batches[0] if batches else pa.RecordBatch.from_pylist([], table.schema))


class _replacing:
    """A temporary path that takes the place of `path` at the end: two processes that write the same part do no harm."""

    def __init__(self, path: Path) -> None:
        self._path, self._temporary = path, path.with_name(f"{path.name}.{process_name()}.tmp")

    def __enter__(self) -> Path:
        return self._temporary

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        if kind is None:
            self._temporary.replace(self._path)


def _part(folder: Path, content: dict[str, Any]) -> Part:
    runs = [
        RunFiles(
            stem=folder / run["stem"],
            pages=run["pages"],
            urls=run["urls"],
            links=run["links"],
            has=tuple(run["has"]),
            samples=[(url, size) for url, size in run["samples"]],
        )
        for run in content["runs"]
    ]
    counts = {name: content[name] for name in ("number", "records", "pages", "rejects", "skipped", "unusable_links", "nofollow_links")}
    return Part(**counts, runs=runs)


def _record_path(task: Task) -> Path:
    return task.folder / f"{task.number:06}.json"


def _reading_path(task: Task) -> Path:
    return task.folder / f"{task.number:06}.{process_name()}.reading"


def _hash(path: Path) -> str:
    hashed = xxhash.xxh64()
    with path.open("rb") as stream:
        while block := stream.read(1 << 22):
            hashed.update(block)
    return hashed.hexdigest()
