"""From a source's records to the files of a corpus artifact (docs/artifacts.md, "corpus").

    built = build(source, out, config, execution)   -> Built(counts, rejects_by_reason, skipped)
    build_part(source, out, config, execution, part=2, of=8)      one of several tasks that prepare a share of it

1. The source's chunks are cut into parts; each is prepared by one process into sorted runs on disk (craw4llm.corpus.parts). What an
   interrupted attempt, or another task, finished is taken as it is.
2. The runs are merged in page-id order (craw4llm.corpus.merge): pages, links, texts, rejects.
3. The account is checked: records read = pages + rejects + skipped.

Memory is bounded by `execution.memory_bytes`, whatever the size of the source. Workers, memory and parts change how long it takes,
never a byte.
"""

import dataclasses
import shutil
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import as_completed
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path

import pyarrow.parquet as pq

from craw4llm.configs import CorpusConfig
from craw4llm.corpus import parts
from craw4llm.corpus.merge import FOLDER as MERGE
from craw4llm.corpus.merge import MAX_BUCKET_BYTES, Merged, merge
from craw4llm.corpus.records import REASONS, Source
from craw4llm.errors import InputError, StageError
from craw4llm.execution import Execution
from craw4llm.processes import worker_pool

FOLDER = "parts"


@dataclasses.dataclass(frozen=True)
class Built:
    """What was written. counts: name -> (value, unit), as the manifest has them."""

    counts: dict[str, tuple[int | float | None, str]]
    rejects_by_reason: dict[str, int]
    skipped: dict[str, int]


def build(source: Source, out: Path, config: CorpusConfig, execution: Execution) -> Built:
    """Writes the corpus of `source` into the folder `out`. Raises InputError where too few records are pages."""
    for path in out.iterdir():  # of an attempt that was interrupted while it merged
        if path.name not in (FOLDER, MERGE):
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    tasks = _plan(source, out, config, execution)
    done = _prepare(tasks, source, execution)
    if not any(part.pages for part in done):
        raise InputError(f"corpus: {source.origin} gives no page at all; rejected: {_said(_reasons(done))}")
    _check_rejects(source, config, done)
    merged = merge(done, out, config, execution)
    shutil.rmtree(out / FOLDER)
    by_reason: Counter[str] = Counter()
    for batch in pq.ParquetFile(out / "rejects.parquet").iter_batches(columns=["reason"]):
        by_reason.update(batch.column("reason").to_pylist())
    skipped: Counter[str] = Counter()
    for part in done:
        skipped.update(part.skipped)
    counts = {
        **merged.counts,
        "unusable_links": (sum(part.unusable_links for part in done), "links"),
        "nofollow_links": (sum(part.nofollow_links for part in done), "links"),
        "records": (sum(part.records for part in done), "records"),
        "rejects": (sum(by_reason.values()), "records"),
        "skipped": (sum(skipped.values()), "records"),
    }
    _balance(source, counts, by_reason, merged)
    return Built(counts=counts, rejects_by_reason=dict(sorted(by_reason.items())), skipped=dict(sorted(skipped.items())))


def build_part(source: Source, out: Path, config: CorpusConfig, execution: Execution, *, part: int, of: int) -> int:
    """Prepares every `of`-th part of the source, from number `part` (1 to `of`) on. Returns the number of records in them."""
    tasks = _plan(source, out, config, execution)
    done = _prepare(tasks[part - 1 :: of], source, execution)
    return sum(finished.records for finished in done)


def _plan(source: Source, out: Path, config: CorpusConfig, execution: Execution) -> list[parts.Task]:
    if source.list_ahead is not None:
        source.list_ahead(execution.workers)
    return parts.plan_parts(source, out / FOLDER, config, _run_bytes(execution))


def _run_bytes(execution: Execution) -> int:
    return min(MAX_BUCKET_BYTES, execution.memory_bytes // (4 * max(1, execution.workers)))


def _prepare(tasks: Sequence[parts.Task], source: Source, execution: Execution) -> list[parts.Part]:
    """All parts in order: those that are there, and the missing ones, written here or in a pool."""
    for task in tasks[:1]:
        task.folder.mkdir(parents=True, exist_ok=True)
        for path in task.folder.glob("*.reading"):
            path.unlink(missing_ok=True)  # another share, begun at the same time, may be doing this too
    done = {task.number: part for task in tasks if (part := parts.find(task)) is not None}
    todo = [task for task in tasks if task.number not in done]
    total = sum(task.records for task in tasks)
    with execution.progress("corpus", total=total, unit="page") as progress:
        progress.update(sum(part.records for part in done.values()))
        if not source.isolated and (execution.workers <= 1 or len(todo) < 2):
            for task in todo:
                done[task.number] = parts.write(task)
                progress.update(done[task.number].records)
        elif todo:
            try:
                with worker_pool(max(1, min(execution.workers, len(todo)))) as pool:
                    for future in as_completed([pool.submit(parts.write, task) for task in todo]):
                        part = future.result()
                        done[part.number] = part
                        progress.update(part.records)
            except BrokenProcessPool as error:
                where = " or ".join(parts.being_read(todo[0].folder)) or "a file that it had not begun to read"
                raise StageError(
                    f"corpus: a process that reads pages died (a crash in a library, or it was killed, e.g. for memory) on {where}; "
                    "look at these files, take out the one that does it, or give the machine more memory"
                ) from error
    return [done[task.number] for task in tasks]


def _reasons(done: Sequence[parts.Part]) -> Counter[str]:
    """Rejects of the parts by reason; repeats of a URL are not known yet."""
    by_reason: Counter[str] = Counter()
    for part in done:
        for run in part.runs:
            by_reason.update(run.table("rejects").column("reason").to_pylist())
    return by_reason


def _said(by_reason: Counter[str]) -> str:
    return ", ".join(f"{count:,} {reason} ({REASONS.get(reason, reason)})" for reason, count in sorted(by_reason.items())) or "none"


def _check_rejects(source: Source, config: CorpusConfig, done: Sequence[parts.Part]) -> None:
    pages, rejects = sum(part.pages for part in done), sum(part.rejects for part in done)
    if rejects > config.max_reject_share * (pages + rejects):
        raise InputError(
            f"corpus: of {source.origin} only {pages:,} records are pages; rejected: {_said(_reasons(done))}. With more than "
            f"{config.max_reject_share:.0%} unusable it is taken for the wrong input; if it is not, raise max_reject_share"
        )


def _balance(source: Source, counts: dict[str, tuple[int | float | None, str]], by_reason: Counter[str], merged: Merged) -> None:
    """Records in = records out; StageError otherwise."""
    value = {name: int(number or 0) for name, (number, _) in counts.items()}
    identities = {
        "pages + rejects + skipped = records read": (value["pages"] + value["rejects"] + value["skipped"], value["records"]),
        "repeats found = repeats listed": (merged.repeats, by_reason["duplicate_url"]),
    }
    if source.records is not None:
        identities["records read = records of the source"] = (value["records"], source.records)
    for name, (left, right) in identities.items():
        if left != right:
            raise StageError(f"corpus: the account does not balance: {name}, but {left:,} is not {right:,}; has the source changed?")
