"""Which pairs of arms are compared, under which heading, and by which measure.

bpb   = by_bytes(study)                       held-out bits per byte; lower is better
core  = by_core(study)                        Core v1 and v2, where every model ran the full task files
found = compare_arms(study, costs, bpb)       each pair once, under the first heading that asks for it
"""

import dataclasses
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from training.evaluation.intervals import measures_of
from training.evaluation.results import read_results
from training.evaluation.tasks import OWN_ITEMS
from training.report.lineage import EQUAL_FETCHES, EQUAL_PAGES, ORACLE, OTHER_POOLS, Study
from training.report.tables import Costs, Table, table, task_source
from training.report.verdict import Cell, Floats, Pair, compare, page_draws, seed_spread


@dataclasses.dataclass(frozen=True)
class Comparison:
    """One pair with the heading that it stands under. unequal: what the two arms do not have in common although the heading says so."""

    group: str
    pair: Pair
    unequal: str = ""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Measured:
    """A number that arms are compared by. values, draws: of every model that counts."""

    name: str
    unit: str
    higher_is_better: bool
    sampled: str
    values: Mapping[Cell, float]
    draws: Mapping[Cell, Floats]

    def of_arm(self, arm: str) -> list[float]:
        return [value for (name, _), value in sorted(self.values.items()) if name == arm]

    def pair(self, a: str, b: str) -> Pair:
        """The verdict on two arms, with the spread over training seeds that all arms' replicates show."""
        spread = seed_spread(self.values)
        named: dict[str, Any] = {"unit": self.unit, "sampled": self.sampled, "higher_is_better": self.higher_is_better}
        return compare(a, b, self.values, self.draws, spread, **named)

    def best(self, names: Sequence[str]) -> str | None:
        """The arm with the best mean; ties by name. None where no arm has results.

        Only arms with the most replicates of all that are given: a mean over fewer models is no like for like.
        """
        most = max((len(self.of_arm(name)) for name in names), default=0)
        sign = -1 if self.higher_is_better else 1
        means = {name: sign * statistics.fmean(self.of_arm(name)) for name in names if most and len(self.of_arm(name)) == most}
        return min(means, key=lambda name: (means[name], name)) if means else None


def by_bytes(study: Study) -> Measured:
    return Measured(
        name="bits_per_byte",
        unit="bits per byte",
        higher_is_better=False,
        sampled="held-out pages",
        values=study.values,
        draws=page_draws(study.nll, study.n_bytes),
    )


def by_core(study: Study) -> list[Measured]:
    """Core v1 and v2 and the five groups (v1); [] where a model lacks them, or where the items are the few self-written ones."""
    runs = {(name, r): run.results for name, arm in study.arms.items() for r, run in arm.runs.items() if (name, r) in study.nll}
    if not runs or any(a.count("core_v1") is None or task_source(a) == OWN_ITEMS for a in runs.values()):
        return []
    found = measures_of({cell: dataclasses.replace(read_results(a.path), pages=None) for cell, a in runs.items()})
    names = {"core_v1": "Core v1", "core_v2": "Core v2"}
    return [
        Measured(
            name=m.name,
            unit=names.get(m.name, m.name.replace("_v1", ", centered (v1)")),
            higher_is_better=True,
            sampled="items",
            values=m.values,
            draws=m.draws,
        )
        for m in found
        if m.kind == "centered" and (m.name in names or m.name.endswith("_v1"))
    ]


def compare_arms(study: Study, costs: Mapping[str, Costs], by: Measured) -> list[Comparison]:
    """The pairs that the report answers with, each once, under the first heading that asks for it.

    Equal pages crawled: every arm against the reference. Other pools: against the reference. Equal fetches: every arm against the
    reference, and against the reference's policy selecting the same way. In the first and the last: the rest against the best arm. The
    oracle against the reference.
    """
    wanted: list[tuple[str, str, str]] = []
    reference = study.reference
    for comparison in (EQUAL_PAGES, OTHER_POOLS, EQUAL_FETCHES):
        members = study.members(comparison)
        if reference:
            wanted += [(f"{comparison}, against {reference}", name, reference) for name in members if name != reference]
        if comparison == EQUAL_FETCHES and reference in study.arms:
            policy = study.arms[reference].policy or reference.split("/")[0]  # by its name where it has no results
            for same in (name for name in members if policy and study.arms[name].policy == policy):
                wanted += [(f"{comparison}, same selection, against {same}", name, same) for name in members if name != same]
        best = by.best(members)
        if best and comparison != OTHER_POOLS:
            wanted += [(f"{comparison}, against the best of them, {best}", name, best) for name in members if name != best]
    if reference:
        wanted += [(f"{ORACLE}, against {reference}", name, reference) for name in study.members(ORACLE)]
        wanted += [("Without results", name, reference) for name, arm in study.arms.items() if not arm.runs and name != reference]
    found: list[Comparison] = []
    seen: set[frozenset[str]] = set()
    for group, a, b in wanted:
        if frozenset((a, b)) not in seen:
            seen.add(frozenset((a, b)))
            found.append(Comparison(group, _with_reason(by.pair(a, b), study), _unequal(group, costs[a], costs[b])))
    return found


def _with_reason(pair: Pair, study: Study) -> Pair:
    """A pair without a difference says why its arms have no results."""
    if not pair.missing:
        return pair
    why = [
        f"{name}: {', '.join(dict.fromkeys(study.arms[name].missing.values()))}" for name in (pair.a, pair.b) if study.arms[name].missing
    ]
    return dataclasses.replace(pair, missing="; ".join(why) or pair.missing)


def _unequal(group: str, a: Costs, b: Costs) -> str:
    """What is not equal although the comparison's name says so; "" where all is."""
    pairs = {EQUAL_PAGES: ("pages crawled", a.pages_crawled, b.pages_crawled), EQUAL_FETCHES: ("fetches", a.fetches, b.fetches)}
    for name, (what, of_a, of_b) in pairs.items():
        if group.startswith(name) and of_a is not None and of_b is not None and of_a != of_b:
            return f"{of_a:,} {what} against {of_b:,}"
    return ""


def grouped(comparisons: Sequence[Comparison]) -> dict[str, list[Comparison]]:
    """heading -> its comparisons, in order."""
    groups: dict[str, list[Comparison]] = {}
    for c in comparisons:
        groups.setdefault(c.group, []).append(c)
    return groups


def pairs_table(found: Mapping[tuple[str, str], Sequence[Comparison]]) -> Table:
    """found: (measure, set of held-out pages or "") -> the pairs compared by it."""
    return table(
        "pairs",
        (
            {
                "metric": metric,
                "heldout": heldout,
                "comparison": c.group,
                "arm": c.pair.a,
                "against": c.pair.b,
                "verdict": c.pair.verdict,
                "difference": c.pair.difference,
                "interval_low": c.pair.low,
                "interval_high": c.pair.high,
                "unit": c.pair.unit,
                "replicates": len(c.pair.replicates),
                "seed_spread_known": "yes" if c.pair.seeds_known else "no",
                "more_replicates": c.pair.more,
                "remark": "; ".join(part for part in (c.pair.missing, c.unequal) if part),
            }
            for (metric, heldout), some in found.items()
            for c in some
        ),
    )
