"""Can a small model decide? How often each smaller size and each metric ranks two arms as the largest size does, and what that costs.

    table = decisions_table(study, best)

As in DataDecide (arXiv 2504.11393): of all pairs of recipes (what models are trained on), the share that the smaller size puts in the
order of the largest, once with the mean over replicates and once on average for a single replicate. There one small size ranks about 80%
of pairs right, and likelihood metrics need far less compute than accuracy.
"""

import itertools
import statistics
from collections.abc import Callable, Mapping

from training.evaluation.tasks import OWN_ITEMS
from training.report.lineage import Arm, Run, Scale, Study
from training.report.table1 import summary_tasks
from training.report.tables import Table, Value, summary_of, table

Values = dict[str, dict[int, float]]  # recipe -> replicate -> value

HIGHER: Mapping[str, bool] = {
    "bits_per_byte": False,
    "bits_per_byte_top_tenth": False,
    "core_v1": True,
    "core_v2": True,
    "raw_mean_23": True,
    "right_loss": False,
    "margin": True,
}
TARGETS = ("core_v1", "bits_per_byte", "bits_per_byte_top_tenth")


def decisions_table(study: Study, best: Study | None) -> Table:
    """One row a smaller scale, metric and target (a metric of the largest scale). study: with all scales. Accuracies of the few
    self-written items are no target."""
    if len(study.scales) < 2:
        return table("decisions", ())
    *smaller, largest = study.scales
    metrics = {name: of for name, of in _metrics(study, best).items()}
    truths = {name: _values(study, largest, metrics[name]) for name in TARGETS}
    records: list[dict[str, Value]] = []
    for scale in smaller:
        for target, truth in truths.items():
            if target == "core_v1" and _own_items(study):
                continue
            for name, of in metrics.items():
                guess = _values(study, scale, of)
                recipes = sorted(set(guess) & set(truth))
                if len(recipes) < 2:
                    continue
                means = {recipe: statistics.fmean(guess[recipe].values()) for recipe in recipes}
                right = _share(recipes, means, truth, HIGHER[name], HIGHER[target])
                singles = []
                for replicate in sorted({r for recipe in recipes for r in guess[recipe]}):
                    some = [recipe for recipe in recipes if replicate in guess[recipe]]
                    if len(some) > 1:
                        one = {recipe: guess[recipe][replicate] for recipe in some}
                        singles.append(_share(some, one, truth, HIGHER[name], HIGHER[target]))
                runs = statistics.fmean(len(guess[recipe]) for recipe in recipes)
                whole = statistics.fmean(len(truth[recipe]) for recipe in recipes)
                records.append(
                    {
                        "size": scale.size,
                        "tokens": scale.tokens,
                        "metric": name,
                        "target": target,
                        "target_size": largest.size,
                        "recipes": len(recipes),
                        "pairs": len(recipes) * (len(recipes) - 1) // 2,
                        "right_share": right,
                        "right_share_one_replicate": statistics.fmean(singles) if singles else None,
                        "flops_a_decision": 2 * scale.flops * runs,
                        "share_of_target_flops": scale.flops * runs / (largest.flops * whole),
                    }
                )
    return table("decisions", records)


def _share(recipes: list[str], guess: Mapping[str, float], truth: Values, guess_up: bool, truth_up: bool) -> float:
    """Share of the pairs put in the right order; a tie of the guess is half right."""
    points = 0.0
    pairs = list(itertools.combinations(recipes, 2))
    for a, b in pairs:
        said = (guess[a] - guess[b]) * (1 if guess_up else -1)
        true = (statistics.fmean(truth[a].values()) - statistics.fmean(truth[b].values())) * (1 if truth_up else -1)
        points += 0.5 if said == 0 or true == 0 else float((said > 0) == (true > 0))
    return points / len(pairs)


Metric = Callable[[Arm, int, Run], float | None]


def _metrics(study: Study, best: Study | None) -> dict[str, Metric]:
    def summary(name: str) -> Metric:
        return lambda arm, replicate, run: summary_of(run.results).get(name)

    def tasks(name: str) -> Metric:
        return lambda arm, replicate, run: summary_tasks(run.results, name)

    found: dict[str, Metric] = {"bits_per_byte": lambda arm, replicate, run: study.values.get((arm.name, replicate))}
    found["bits_per_byte_top_tenth"] = lambda arm, replicate, run: best.values.get((arm.name, replicate)) if best else None
    found |= {name: summary(name) for name in ("core_v1", "core_v2", "raw_mean_23")}
    found |= {name: tasks(name) for name in ("right_loss", "margin")}
    return found


def _values(study: Study, scale: Scale, of: Metric) -> Values:
    """Of the models of one scale that have the value."""
    found: Values = {}
    for arm in study.arms.values():
        if arm.scale == scale:
            for replicate, run in arm.runs.items():
                value = of(arm, replicate, run)
                if value is not None and (arm.name, replicate) in study.nll:
                    found.setdefault(arm.recipe, {})[replicate] = value
    return found


def _own_items(study: Study) -> bool:
    return any(summary_of(r.results).get("task_source") == OWN_ITEMS for arm in study.arms.values() for r in arm.runs.values())
