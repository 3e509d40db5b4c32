"""The paper's Table 1 from one's own runs, the published rows beside it; multiples of a baseline's pool; tasks at chance.

table1_table(study, "DCLM")          arms x (commonsense, language, reading, symbolic, world, Core v1), centered; per cent of oracle; ...
multiples_table(study, measures)     the pool that a baseline would need to match the reference, by the paper's own least-squares line
tasks_table(study)                   accuracy of every task by arm, and whether any arm is above chance
"""

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pyarrow.parquet as pq

from craw4llm.artifact import Artifact
from training.evaluation.aggregate import GROUPS
from training.evaluation.tasks import TASKS
from training.report.analysis import Line, fit_doublings
from training.report.comparisons import Measured
from training.report.lineage import EQUAL_PAGES, ORACLE, OTHER_POOLS, Arm, Study
from training.report.published import Run, published
from training.report.tables import Costs, Table, Value, mean_core, summary_of, table, task_source

MEASURED = "measured"


def table1_table(study: Study, best: Study | None, by: Mapping[str, Measured], scorer: str) -> Table:
    """One row an arm, each reproduced one followed by the published row. `source` says which a row is.

    best: the study on the best tenth of the held-out pages. by: measures by name, for intervals. scorer: of the published rows, or "none".
    """
    rows = published(scorer) if scorer != "none" else {}
    oracle = next((arm for arm in study.arms.values() if arm.comparison == ORACLE), None)
    whole = mean_core(oracle, "core_v1") if oracle else None
    published_oracle = rows[("oracle", 0)].core_v1 if rows else None
    records = []
    for name, arm in study.arms.items():
        records.append(_measured_row(study, best, name, arm, whole, by))
        twin = rows.get(_published_key(arm))
        if twin is not None and published_oracle is not None:
            records.append(_published_row(twin, published_oracle))
    return table("table1", records)


def _published_key(arm: Arm) -> tuple[str, int]:
    if arm.comparison == ORACLE:
        return "oracle", 0
    if arm.comparison in (EQUAL_PAGES, OTHER_POOLS) and arm.pool_multiple is not None:
        return arm.policy, round(arm.pool_multiple)
    return "", 0


def _measured_row(
    study: Study, best: Study | None, name: str, arm: Arm, oracle: float | None, by: Mapping[str, Measured]
) -> dict[str, Value]:
    core = mean_core(arm, "core_v1")
    cores = by["core_v1"].of_arm(name) if "core_v1" in by else []
    bits = study.of_arm(name)
    on_best = best.of_arm(name) if best else []
    return {
        "arm": name,
        "source": MEASURED,
        "policy": arm.policy or ("oracle" if arm.comparison == ORACLE else ""),
        "pool_multiple": arm.pool_multiple,
        **{group: _group(arm, group) for group in GROUPS},
        "core_v1": core,
        "core_v1_sd": statistics.stdev(cores) if len(cores) > 1 else None,
        "percent_of_oracle": 100 * core / oracle if core is not None and oracle is not None and oracle > 0 else None,
        "core_v2": mean_core(arm, "core_v2"),
        "raw_mean_22": _mean(arm, lambda s: s.get("raw_mean_22")),
        "raw_mean_23": _mean(arm, lambda s: s.get("raw_mean_23")),
        "bits_per_byte": statistics.fmean(bits) if bits else None,
        "bits_per_byte_sd": statistics.stdev(bits) if len(bits) > 1 else None,
        "bits_per_byte_top_tenth": statistics.fmean(on_best) if on_best else None,
        "replicates": len(bits),
        "task_source": task_source(arm.first.results) if arm.first else "",
    }


def _published_row(run: Run, oracle: float) -> dict[str, Value]:
    return {
        "arm": f"{run.policy} {run.pool_multiple}x",
        "source": run.source,
        "policy": run.policy,
        "pool_multiple": float(run.pool_multiple),
        **{group: run.means.groups[group].centered_v1 for group in GROUPS},
        "core_v1": run.core_v1,
        "core_v1_sd": None,
        "percent_of_oracle": 100 * run.core_v1 / oracle,
        "core_v2": run.means.core_v2,
        "raw_mean_22": run.means.raw_mean_22,
        "raw_mean_23": run.means.raw_mean_23,
        "bits_per_byte": None,
        "bits_per_byte_sd": None,
        "bits_per_byte_top_tenth": None,
        "replicates": 1,
        "task_source": "llm-foundry's files",
    }


def _group(arm: Arm, group: str) -> float | None:
    return _mean(arm, lambda s: ((s.get("groups") or {}).get(group) or {}).get("centered_v1"))


def _mean(arm: Arm, of: Callable[[Mapping[str, Any]], float | None]) -> float | None:
    """Mean of a value of the summaries over the models that count; None where one of them has none."""
    values = [of(summary_of(run.results)) for run in arm.counted.values()]
    known = [v for v in values if v is not None]
    return statistics.fmean(known) if known and len(known) == len(values) else None


def multiples_table(
    study: Study, costs: Mapping[str, Costs], measures: Sequence[Measured]
) -> tuple[Table, dict[tuple[str, str, str], Line]]:
    """(table, (measure, by, policy) -> line): for every policy with pools of at least two sizes, the pages crawled and the fetches (in
    multiples of the reference's) at which its line of the measure on log2 of them reaches the reference's value."""
    records: list[dict[str, Value]] = []
    lines: dict[tuple[str, str, str], Line] = {}
    reference = study.reference
    for measured in measures:
        target = measured.of_arm(reference)
        for by in ("pages_crawled", "fetches"):
            own = getattr(costs[reference], by) if reference in costs else None
            for policy in sorted({arm.policy for arm in study.arms.values() if arm.policy}):
                points = []
                for name, arm in study.arms.items():
                    amount, values = getattr(costs[name], by), measured.of_arm(name)
                    if arm.policy == policy and arm.comparison in (EQUAL_PAGES, OTHER_POOLS) and amount and values and own:
                        points.append((amount / own, statistics.fmean(values)))
                line = fit_doublings(sorted(points))
                if line is None or not target:
                    continue
                lines[measured.name, by, policy] = line
                multiple = line.multiple(statistics.fmean(target))
                records.append(
                    {
                        "metric": measured.name,
                        "by": by,
                        "policy": policy,
                        "points": len(points),
                        "per_doubling": line.slope,
                        "at_reference_amount": line.intercept,
                        "reference": reference,
                        "reference_value": statistics.fmean(target),
                        "multiple_to_match": multiple,
                        "extrapolated": None if multiple is None else "yes" if line.extrapolates(multiple) else "no",
                    }
                )
    return table("multiples", records), lines


def tasks_table(study: Study) -> Table:
    """One row a task and arm: mean accuracy over its models. `at_chance`: "yes" where no arm's accuracy is above its random baseline (v2)
    by more than 1.96 binomial standard errors of all items that the arm's models answered."""
    records: list[dict[str, Value]] = []
    above: set[str] = set()
    for name, arm in study.arms.items():
        by_task: dict[str, list[dict[str, Any]]] = {}
        for run in arm.counted.values():
            if not (run.results.path / "tasks.parquet").is_file():
                continue
            for row in pq.read_table(run.results.file("tasks.parquet")).to_pylist():
                by_task.setdefault(str(row["task"]), []).append(row)
        for task, rows in by_task.items():
            baseline = TASKS[task].v2 / 100
            accuracy = statistics.fmean(row["accuracy"] for row in rows)
            items = sum(row["items"] for row in rows)
            spread = max(baseline * (1 - baseline), accuracy * (1 - accuracy) if not baseline else 0.0)
            if accuracy - baseline > 1.96 * math.sqrt(spread / items):
                above.add(task)
            records.append(
                {
                    "task": task,
                    "group": TASKS[task].group,
                    "arm": name,
                    "items": rows[0]["items"],
                    "state": str(rows[0]["state"]),
                    "accuracy": accuracy,
                    "random_baseline_v2": baseline,
                    "centered_v1": statistics.fmean(row["centered_v1"] for row in rows),
                    "right_loss": _of(rows, "right_loss"),
                    "margin": _of(rows, "margin"),
                    "models": len(rows),
                }
            )
    for record in records:
        record["at_chance"] = "no" if record["task"] in above else "yes"
    return table("tasks", sorted(records, key=lambda r: (list(TASKS).index(str(r["task"])), list(study.arms).index(str(r["arm"])))))


def _of(rows: Sequence[Mapping[str, Any]], column: str) -> float | None:
    known = [row[column] for row in rows if row[column] is not None]
    return statistics.fmean(known) if len(known) == len(rows) else None


def summary_tasks(results: Artifact, column: str) -> float | None:
    """Mean over the tasks that have the value ("right_loss", "margin"), of one evaluation; None where no task ran."""
    path = results.path / "tasks.parquet"
    if not path.is_file():
        return None
    values = [v for v in pq.read_table(path, columns=[column])[column].to_pylist() if v is not None]
    return statistics.fmean(values) if values else None
