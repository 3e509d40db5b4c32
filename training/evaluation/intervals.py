"""How sure the evaluation's numbers are, and which of two arms is better: per task, per group, for Core and for held-out pages.

    results  = {("a", 0): read_results(folder), ("b", 0): ..., ("a", 1): ..., ("b", 1): ...}      (arm, replicate) -> a finished evaluation
    measures = measures_of(results)                      each with the value and the bootstrap draws of every model
    pair     = verdict_of(measures[0], "a", "b")         training.report.verdict.Pair: better, worse, can't tell
    intervals(items, core=True)                          of one evaluation, for its summary

A draw takes the items of each task anew, with replacement, as many as there are (within each category, where the task has categories: its
accuracy is the mean over categories). Every model gets the same items in the same draw, so what makes an item hard for both arms cancels,
and the two HellaSwag entries, which have the same items, are drawn together. Group means and Core are computed from each draw.

A bootstrap of few differing answers is too sure of itself: where two arms differ on four items, all in favour of one, it would decide,
and the exact sign test says p = 0.125. So each accuracy's draws get a normal noise of NOISE_ITEMS items (of the category's n), independent
between models. It acts like the pseudo-items that Agresti and Min add to a paired comparison (Statistics in Medicine 24, 2005), is nothing
beside the spread of many differing items, and is set so that five items of one mind do not decide and six do, as by the sign test.
Tasks of fewer than FEWEST_ITEMS items get no verdict. The spread over training seeds and the verdict itself: training/report/verdict.py.
"""

import dataclasses
import math
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from craw4llm.errors import InputError
from training.evaluation.aggregate import GROUPS, centered
from training.evaluation.results import Results, likelihoods
from training.evaluation.tasks import CORE, TASKS
from training.report.verdict import DRAWS, LEVEL, SEED, Cell, Floats, Pair, bits_per_byte, compare, page_draws, resampled_sums, seed_spread

FEWEST_ITEMS = 30
NOISE_ITEMS = 1.5**0.5  # standard deviation
MAX_UNITS = 4_000  # items of a task (or category) beyond this are drawn in groups, to bound time


@dataclasses.dataclass(frozen=True, kw_only=True)
class Measure:
    """One number that models are compared by.

    name: "core_v1", "arc_easy", "world" ... kind: "accuracy", "right_loss", "margin", "centered", "bits_per_byte". values, draws: of every
    model. items: drawn for it (pages for bits per byte). why: the reason if there is no verdict, else "".
    """

    name: str
    kind: str
    unit: str
    higher_is_better: bool
    values: Mapping[Cell, float]
    draws: Mapping[Cell, Floats]
    items: int
    why: str = ""

    def interval(self, cell: Cell) -> tuple[float, float]:
        """95% over items, of one model."""
        return quantiles(self.draws[cell])


def measures_of(results: Mapping[Cell, Results], draws: int = DRAWS) -> list[Measure]:
    """All that the models can be compared by: bits per byte, Core, raw means, groups, tasks.

    Raises InputError where they were not evaluated on the same pages, task files, few-shot seed or context: nothing could be paired.
    """
    _check_alike(results)
    measures = _page_measure(results, draws)
    tables = {cell: r.items for cell, r in results.items()}
    labels = [label for label in TASKS if any(r.items.num_rows for r in results.values()) and label in _labels(results)]
    tasks = {label: _task_measures(label, tables, draws) for label in labels}
    if all(r.summary.get("core_v1") is not None for r in results.values()):
        measures += _means({label: found[0] for label, found in tasks.items()})
    return measures + [measure for found in tasks.values() for measure in found]


def verdict_of(measure: Measure, a: str, b: str) -> Pair:
    """Arm a against arm b, with the spread over training seeds that all arms' replicates show."""
    named: dict[str, Any] = {"unit": measure.unit, "higher_is_better": measure.higher_is_better}
    named["sampled"] = "held-out pages" if measure.kind == "bits_per_byte" else "items"
    if measure.why:
        return Pair(a=a, b=b, missing=measure.why, **named)
    return compare(a, b, measure.values, measure.draws, seed_spread(measure.values), **named)


def intervals(items: pa.Table, core: bool, draws: int = DRAWS) -> dict[str, dict[str, tuple[float, float]]]:
    """95% over items of one evaluation: kind -> name -> (low, high). core: whether its means exist (all tasks complete)."""
    cell = ("", 0)
    labels = list(dict.fromkeys(items.column("task").to_pylist()))
    tasks = {label: _task_measures(label, {cell: items}, draws) for label in labels}
    found = (_means({label: of[0] for label, of in tasks.items()}) if core else []) + [m for of in tasks.values() for m in of]
    made: dict[str, dict[str, tuple[float, float]]] = {}
    for measure in found:
        if cell in measure.draws:
            low, high = measure.interval(cell)
            if measure.kind == "accuracy":  # the noise reaches beyond what an accuracy can be
                low, high = max(low, 0.0), min(high, 1.0)
            made.setdefault(measure.kind, {})[measure.name] = (low, high)
    return made


def quantiles(drawn: Floats) -> tuple[float, float]:
    low, high = np.quantile(drawn, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return float(low), float(high)


def _labels(results: Mapping[Cell, Results]) -> set[str]:
    return set.intersection(*(set(r.items.column("task").to_pylist()) for r in results.values()))


def _check_alike(results: Mapping[Cell, Results]) -> None:
    (first_cell, first), *others = results.items()
    for cell, other in others:
        for field in ("task_files", "few_shot_seed", "context"):
            mine, its = first.summary.get(field), other.summary.get(field)
            if mine != its:
                raise InputError(
                    f"compare: {first_cell[0]}#{first_cell[1]} ({first.where}) and {cell[0]}#{cell[1]} ({other.where}) were evaluated with "
                    f"other {field}{'' if field == 'task_files' else f': {mine} and {its}'}; evaluate both alike"
                )


def _page_measure(results: Mapping[Cell, Results], draws: int) -> list[Measure]:
    pages = {cell: r.pages for cell, r in results.items() if r.pages is not None and r.pages.num_rows}
    if len(pages) < len(results):
        return []
    first = next(iter(pages.values()))
    for cell, table in pages.items():
        if not (table["page"].equals(first["page"]) and table["n_bytes"].equals(first["n_bytes"])):
            raise InputError(f"compare: {results[cell].where} has other held-out pages than {results[next(iter(pages))].where}")
    n_bytes = first["n_bytes"].to_numpy()
    nll = {cell: table["nll"].to_numpy() for cell, table in pages.items()}
    return [
        Measure(
            name="bits_per_byte",
            kind="bits_per_byte",
            unit="bits per byte",
            higher_is_better=False,
            values={cell: bits_per_byte(x, n_bytes) for cell, x in nll.items()},
            draws=page_draws(nll, n_bytes, draws=draws),
            items=len(n_bytes),
            why="" if len(n_bytes) >= FEWEST_ITEMS else f"{len(n_bytes)} pages, fewer than {FEWEST_ITEMS}",
        )
    ]


def _task_measures(label: str, tables: Mapping[Cell, pa.Table], draws: int) -> list[Measure]:
    """Accuracy, loss of the right answer and margin of one task. The last two over the items that every model could score."""
    cells = sorted(tables)
    columns = []
    index: list[tuple[int, str | None]] | None = None
    for cell in cells:
        rows = _rows_of(tables[cell], label)
        keys = [(row["item"], row["category"]) for row in rows]
        if index is not None and keys != index:
            raise InputError(f"compare: {cell[0]}#{cell[1]} has other items of {label}; evaluate both with the same files")
        index = keys
        pairs = [likelihoods(row["losses"], row["gold"]) for row in rows]
        values = [[float(row["correct"]), *(np.nan if v is None else v for v in pair)] for row, pair in zip(rows, pairs, strict=True)]
        columns.append(np.array(values, dtype=np.float64).reshape(len(rows), 3))
    assert index is not None
    values_NC3 = np.stack(columns, axis=1)
    categories = np.array([category or "" for _, category in index])
    scored = ~np.isnan(values_NC3[:, :, 1]).any(axis=1)
    has_margin = TASKS[label].kind != "lm"
    few = "" if len(index) >= FEWEST_ITEMS else f"{len(index)} items, fewer than {FEWEST_ITEMS}"
    made = []
    for column, (kind, higher, unit) in enumerate(
        (("accuracy", True, "accuracy"), ("right_loss", False, "nats per token"), ("margin", True, "nats per token"))
    ):
        used = np.ones(len(index), dtype=bool) if kind == "accuracy" else scored
        if (kind == "margin" and not has_margin) or not used.any() or set(categories[used]) != set(categories):
            continue
        point, drawn = _resample(label, values_NC3[used, :, column], categories[used], draws, noisy=kind == "accuracy")
        made.append(
            Measure(
                name=label,
                kind=kind,
                unit=unit,
                higher_is_better=higher,
                values={cell: float(point[c]) for c, cell in enumerate(cells)},
                draws={cell: drawn[:, c] for c, cell in enumerate(cells)},
                items=int(used.sum()),
                why=few,
            )
        )
    return made


def _rows_of(table: pa.Table, label: str) -> list[dict[str, Any]]:
    chosen = table.filter(pc.equal(table["task"], label))
    return chosen.select(["item", "category", "gold", "correct", "losses"]).to_pylist()


def _resample(label: str, values_NC: Floats, categories: NDArray[Any], draws: int, *, noisy: bool) -> tuple[Floats, Floats]:
    """(values float64[C], draws float64[draws, C]) of the mean over categories of the means of their items."""
    names = sorted(set(categories.tolist()))
    point = np.zeros(values_NC.shape[1])
    drawn = np.zeros((draws, values_NC.shape[1]))
    for name in names:
        of = values_NC[categories == name]
        n = len(of)
        # By file, not by task: two entries with the same items draw the same ones.
        rng = np.random.default_rng([SEED, zlib.crc32(f"{TASKS[label].file_name}/{name}".encode())])
        group = np.arange(n) % min(n, MAX_UNITS)
        units = np.stack([np.bincount(group, weights=column) for column in (*of.T, np.ones(n))], axis=1).astype(np.float64)
        sums = resampled_sums(units, draws, rng)
        means = sums[:, :-1] / sums[:, -1:]
        if noisy:
            own = np.random.default_rng([SEED, zlib.crc32(f"{label}/{name}/noise".encode())])
            means = means + own.standard_normal(means.shape) * NOISE_ITEMS / n
        point += of.mean(axis=0) / len(names)
        drawn += means / len(names)
    return point, drawn


def _means(tasks: Mapping[str, Measure]) -> list[Measure]:
    """Core, raw means and groups from the accuracies of all 23 entries."""

    def mean(name: str, kind: str, labels: Sequence[str], of: Callable[[str, Any], Any]) -> Measure:
        cells = tasks[labels[0]].values
        return Measure(
            name=name,
            kind=kind,
            unit="centered accuracy" if kind == "centered" else "accuracy",
            higher_is_better=True,
            values={cell: math.fsum(of(label, tasks[label].values[cell]) for label in labels) / len(labels) for cell in cells},
            draws={cell: np.mean([of(label, tasks[label].draws[cell]) for label in labels], axis=0) for cell in cells},
            items=sum(tasks[label].items for label in labels),
        )

    def plain(label: str, value: Any) -> Any:
        return value

    made = [
        mean("core_v1", "centered", CORE, lambda label, value: centered(label, value, "v1")),
        mean("core_v2", "centered", CORE, lambda label, value: centered(label, value, "v2")),
        mean("raw_mean_22", "accuracy", CORE, plain),
        mean("raw_mean_23", "accuracy", tuple(TASKS), plain),
    ]
    for group in GROUPS:
        members = tuple(label for label, task in TASKS.items() if task.group == group)
        made.append(mean(f"{group}_v1", "centered", members, lambda label, value: centered(label, value, "v1")))
        made.append(mean(f"{group}_v2", "centered", members, lambda label, value: centered(label, value, "v2")))
    return made
