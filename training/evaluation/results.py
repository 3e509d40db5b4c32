"""The files of a finished evaluation: their tables, writing and reading them.

    counts, sums = write_results(out, items, files, bpb, source, settings)
    results      = read_results(folder)

Imports no torch, so that results can be looked at and compared anywhere. Columns: docs/artifacts.md, "evaluate".
"""

import dataclasses
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from craw4llm.errors import InputError
from training.evaluation.aggregate import Aggregates, aggregate, centered
from training.evaluation.tasks import TASKS, TaskFile

ROW_GROUP_ROWS = 1 << 16
INTERVAL_DRAWS = 2_000

ITEMS = pa.schema(
    [
        ("task", pa.string()),
        ("item", pa.uint32()),
        ("category", pa.string()),
        ("choice", pa.int32()),
        ("gold", pa.int32()),
        ("correct", pa.bool_()),
        ("losses", pa.list_(pa.float32())),
        ("n_context_tokens", pa.list_(pa.uint32())),
        ("n_continuation_tokens", pa.list_(pa.uint32())),
        ("cropped", pa.bool_()),
        ("fault", pa.string()),
    ]
)
TASK_ROWS = pa.schema(
    [
        ("task", pa.string()),
        ("items", pa.uint32()),
        ("scored", pa.uint32()),
        ("accuracy", pa.float64()),
        ("centered_v1", pa.float64()),
        ("centered_v2", pa.float64()),
        ("right_loss", pa.float64()),
        ("margin", pa.float64()),
        ("group", pa.string()),
        ("state", pa.string()),
    ]
)
REJECTS = pa.schema([("task", pa.string()), ("item", pa.uint32()), ("reason", pa.string()), ("counted_as_wrong", pa.bool_())])


@dataclasses.dataclass(frozen=True, kw_only=True)
class Results:
    """A finished evaluation as read: items of the schema ITEMS, pages (page, n_bytes, nll) or None, summary.json."""

    where: str
    items: pa.Table
    pages: pa.Table | None
    summary: Mapping[str, Any]


def write_results(
    out: Path, items: pa.Table, files: Mapping[str, TaskFile], bpb: float | None, source: str, settings: Mapping[str, Any]
) -> tuple[dict[str, tuple[int, str]], Aggregates]:
    """Writes items.parquet, tasks.parquet, rejects.parquet and summary.json; returns counts of items, and the means.

    bpb: bits per byte of held-out pages, None where none were scored. source: what the items are called. settings: more for the summary.
    """
    from training.evaluation.intervals import intervals

    tasks, rejects = task_rows(items, files), _rejects(items, files)
    accuracies = dict(zip(tasks.column("task").to_pylist(), tasks.column("accuracy").to_pylist(), strict=True))
    sums = aggregate(accuracies, {label: f.why for label, f in files.items() if f.state != "complete"})
    write(out / "items.parquet", items)
    write(out / "tasks.parquet", tasks)
    write(out / "rejects.parquet", rejects)
    summary = {
        "bits_per_byte": bpb,
        "core_v1": sums.core_v1,
        "core_v2": sums.core_v2,
        "raw_mean_22": sums.raw_mean_22,
        "raw_mean_23": sums.raw_mean_23,
        "groups": {name: dataclasses.asdict(group) for name, group in sums.groups.items()},
        "intervals": intervals(items, core=sums.raw_mean_23 is not None, draws=INTERVAL_DRAWS),
        "why": list(sums.why) if files else ["suite is none: no task was run"],
        "task_source": source,
        "task_files": {TASKS[label].file_name: file.sha256 for label, file in files.items()},
        **settings,
    }
    (out / "summary.json").write_text(json.dumps(summary, indent=2, sort_keys=True, allow_nan=False) + "\n")
    counts = {
        "items": (items.num_rows, "items"),
        "cropped_items": (sum(items.column("cropped").to_pylist()), "items"),
        "rejected_items": (rejects.num_rows, "items"),
    }
    return counts, sums


def write(path: Path, table: pa.Table) -> None:
    pq.write_table(table, path, compression="zstd", row_group_size=ROW_GROUP_ROWS)


def read_results(folder: Path) -> Results:
    """An evaluation's folder (an artifact or the output of `craw4llm evaluate`). Raises InputError if it holds none."""
    try:
        summary = json.loads((folder / "summary.json").read_text())
        items = pq.read_table(folder / "items.parquet")
        pages = pq.read_table(folder / "pages.parquet") if (folder / "pages.parquet").is_file() else None
    except (OSError, ValueError) as error:
        raise InputError(f"{folder} holds no results of an evaluation ({error}); give the folder of an evaluate artifact") from error
    return Results(where=str(folder), items=items, pages=pages, summary=summary)


def task_rows(items: pa.Table, files: Mapping[str, TaskFile]) -> pa.Table:
    """TASK_ROWS in the order of `files`: means over a task's items, or over its categories' means where it has categories."""
    by_task: dict[str, list[dict[str, Any]]] = {label: [] for label in files}
    for row in items.select(["task", "category", "gold", "correct", "losses"]).to_pylist():
        by_task[row["task"]].append(row)
    made = []
    for label, rows in by_task.items():
        right, margin = zip(*(likelihoods(row["losses"], row["gold"]) for row in rows), strict=True)
        categories = [row["category"] for row in rows]
        accuracy = macro_mean(categories, [float(row["correct"]) for row in rows])
        assert accuracy is not None
        made.append(
            {
                "task": label,
                "items": len(rows),
                "scored": sum(value is not None for value in right),
                "accuracy": accuracy,
                "centered_v1": centered(label, accuracy, "v1"),
                "centered_v2": centered(label, accuracy, "v2"),
                "right_loss": macro_mean(categories, right),
                "margin": macro_mean(categories, margin),
                "group": files[label].task.group,
                "state": files[label].state,
            }
        )
    return pa.Table.from_pylist(made, schema=TASK_ROWS)


def likelihoods(losses: Sequence[float], gold: int | None) -> tuple[float | None, float | None]:
    """(loss of the right answer, loss of the best wrong answer minus it), nats per token; None where there is none."""
    if not len(losses):
        return None, None
    if gold is None:
        return losses[0], None
    return losses[gold], min(loss for option, loss in enumerate(losses) if option != gold) - losses[gold]


def macro_mean(categories: Sequence[str | None], values: Sequence[float | None]) -> float | None:
    """Plain mean over the categories of the plain mean of each; values that are None are left out; None where a category has none left."""
    by_category: dict[str | None, list[float]] = {category: [] for category in categories}
    for category, value in zip(categories, values, strict=True):
        if value is not None:
            by_category[category].append(value)
    if not all(by_category.values()):
        return None
    return math.fsum(math.fsum(group) / len(group) for group in by_category.values()) / len(by_category)


def _rejects(items: pa.Table, files: Mapping[str, TaskFile]) -> pa.Table:
    """Bad lines of the files, and items that could not be scored, by task and line."""
    rows: list[dict[str, Any]] = [
        {"task": label, "item": reject.line, "reason": reject.reason, "counted_as_wrong": False}
        for label, file in files.items()
        for reject in file.rejects
    ]
    for row in items.select(["task", "item", "fault"]).filter(items["fault"].is_valid()).to_pylist():
        rows.append({"task": row["task"], "item": row["item"], "reason": row["fault"], "counted_as_wrong": True})
    place = {label: number for number, label in enumerate(files)}
    return pa.Table.from_pylist(sorted(rows, key=lambda row: (place[row["task"]], row["item"])), schema=REJECTS)
