"""Intervals and verdicts over items: made-up results whose right answer is known."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from craw4llm.errors import InputError
from training.evaluation.aggregate import aggregate
from training.evaluation.intervals import NOISE_ITEMS, Measure, intervals, measures_of, quantiles, verdict_of
from training.evaluation.results import ITEMS, Results, read_results
from training.evaluation.tasks import TASKS
from training.report.verdict import Cell

PAGES = pa.table({"page": np.arange(40, dtype=np.uint32), "n_bytes": np.full(40, 100, dtype=np.uint64), "nll": np.linspace(50, 90, 40)})
SUMMARY = {"task_files": {"a": "1"}, "few_shot_seed": 1234, "context": 256, "core_v1": None}


def items_of(label: str, correct: Any, right: float = 1.0, categories: Any = None) -> list[dict[str, Any]]:
    """Items with two options; the right one is 0.5 better or worse than the other."""
    lm = TASKS[label].kind == "lm"
    return [
        {
            "task": label,
            "item": k,
            "category": categories[k] if categories else None,
            "choice": None if lm else int(not ok),
            "gold": None if lm else 0,
            "correct": bool(ok),
            "losses": [right] if lm else [right, right + (0.5 if ok else -0.5)],
            "n_context_tokens": [4] if lm else [4, 4],
            "n_continuation_tokens": [1] if lm else [1, 1],
            "cropped": False,
            "fault": None,
        }
        for k, ok in enumerate(correct)
    ]


def results(rows: list[dict[str, Any]], pages: pa.Table | None = None, **summary: Any) -> Results:
    return Results(where="here", items=pa.Table.from_pylist(rows, schema=ITEMS), pages=pages, summary={**SUMMARY, **summary})


def measured(of: Mapping[Cell, Results], draws: int = 2000) -> dict[tuple[str, str], Measure]:
    return {(m.name, m.kind): m for m in measures_of(of, draws=draws)}


def accuracy(of: Mapping[Cell, list[bool]], label: str = "arc_easy") -> Measure:
    return measured({cell: results(items_of(label, marks)) for cell, marks in of.items()})[label, "accuracy"]


def test_the_interval_of_one_accuracy_is_the_binomial_one():
    marks = np.random.default_rng(0).random(2000) < 0.3
    low, high = accuracy({("a", 0): marks.tolist()}).interval(("a", 0))
    mean = marks.mean()
    half = 1.96 * np.sqrt(mean * (1 - mean) / 2000)
    assert low == pytest.approx(mean - half, rel=0.02) and high == pytest.approx(mean + half, rel=0.02)


def test_pairing_on_the_same_items_is_what_decides():
    """Two arms that agree on all but 60 of 1,000 items: the paired interval is a third of what unpaired ones would give."""
    rng = np.random.default_rng(1)
    base = rng.random(1000) < 0.5
    better = base.copy()
    better[np.flatnonzero(~base)[:60]] = True
    measure = accuracy({("a", 0): better.tolist(), ("b", 0): base.tolist(), ("a", 1): better.tolist(), ("b", 1): base.tolist()})
    pair = verdict_of(measure, "a", "b")
    assert pair.difference == pytest.approx(0.06) and pair.verdict == "better" and verdict_of(measure, "b", "a").verdict == "worse"
    apart = [measure.interval((arm, 0)) for arm in "ab"]
    assert apart[0][0] < apart[1][1]  # each arm's own interval overlaps the other's
    assert pair.high is not None and pair.low is not None and pair.high - pair.low < 0.5 * (apart[0][1] - apart[0][0])
    assert pair.sentence().startswith("a beats b by 0.0600 accuracy, 95% interval 0.04")


@pytest.mark.parametrize(("differing", "decided"), [(4, False), (5, False), (6, True), (12, True)])
def test_few_differing_items_decide_as_the_sign_test_does(differing: int, decided: bool):
    """All in favour of one: 5 have p = 0.0625, 6 have p = 0.031 (two-sided sign test). A plain bootstrap would decide at 4."""
    base = [False] * 200
    better = [k < differing for k in range(200)]
    measure = accuracy({(arm, r): marks for arm, marks in (("a", better), ("b", base)) for r in (0,)})
    drawn = measure.draws["a", 0] - measure.draws["b", 0]
    low, high = quantiles(drawn)
    assert (low > 0) is decided and high > 0


def test_equal_arms_are_seldom_decided():
    """Arms of the same accuracy, independent items and seeds: about 5% of verdicts may be wrong."""
    rng = np.random.default_rng(2)
    wrong = 0
    for _ in range(60):
        chance = rng.random(300)
        of = {(arm, r): (rng.random(300) < chance).tolist() for arm in "abc" for r in (0, 1, 2)}
        measure = measured({cell: results(items_of("arc_easy", marks)) for cell, marks in of.items()}, draws=400)["arc_easy", "accuracy"]
        wrong += verdict_of(measure, "a", "b").decided
    assert wrong <= 6


def test_one_replicate_and_few_items_decide_nothing():
    one = accuracy({("a", 0): [True] * 90, ("b", 0): [False] * 90})
    assert verdict_of(one, "a", "b").verdict == "one replicate"
    few = accuracy({(arm, r): [arm == "a"] * 20 for arm in "ab" for r in (0, 1)})
    pair = verdict_of(few, "a", "b")
    assert (pair.verdict, pair.missing, pair.decided) == ("missing", "20 items, fewer than 30", False)


def test_likelihood_moves_where_accuracy_does_not():
    of = {
        (arm, r): results(items_of("arc_easy", [True] * 100, right=1.0 + (0.1 + r / 1000 if arm == "b" else 0)))
        for arm in "ab"
        for r in (0, 1)
    }
    found = measured(of)
    assert verdict_of(found["arc_easy", "accuracy"], "a", "b").verdict == "can't tell"
    pair = verdict_of(found["arc_easy", "right_loss"], "a", "b")
    assert pair.verdict == "better" and pair.difference == pytest.approx(-0.1005) and "nats per token" in pair.sentence()
    assert found["arc_easy", "margin"].values["a", 0] == pytest.approx(0.5)


def test_items_that_one_model_could_not_score_leave_the_losses_and_stay_in_the_accuracy():
    rows = items_of("arc_easy", [True] * 50)
    faulty = [{**row, "losses": [], "choice": None, "correct": False, "fault": "x"} if row["item"] < 5 else row for row in rows]
    found = measured({("a", 0): results(rows), ("b", 0): results(faulty)})
    assert found["arc_easy", "accuracy"].values == {("a", 0): 1.0, ("b", 0): 0.9} and found["arc_easy", "accuracy"].items == 50
    assert found["arc_easy", "right_loss"].items == 45


def test_categories_weigh_alike_and_are_drawn_apart():
    categories = ["many"] * 90 + ["few"] * 10
    marks = [True] * 90 + [False] * 10
    measure = measured({("a", 0): results(items_of("jeopardy", marks, categories=categories))})["jeopardy", "accuracy"]
    assert measure.values["a", 0] == 0.5
    low, high = measure.interval(("a", 0))  # nothing varies within a category: what is left is the noise, of the ten items above all
    half = 1.96 * NOISE_ITEMS / 10 / 2
    assert low == pytest.approx(0.5 - half, abs=0.01) and high == pytest.approx(0.5 + half, abs=0.01)


def all_tasks(seed: int, lift: float = 0.0) -> list[dict[str, Any]]:
    rng = np.random.default_rng(seed)
    rows = []
    for label, task in TASKS.items():
        categories = [f"c{k % 3}" for k in range(90)] if task.categories else None
        rows += items_of(label, rng.random(90) < 0.4 + lift, right=2.0 - lift, categories=categories)
    return rows


def test_core_and_groups_are_those_of_the_aggregates():
    of = {(arm, r): results(all_tasks(10 * r + (arm == "a"), 0.2 if arm == "a" else 0), core_v1=0.1) for arm in "ab" for r in (0, 1)}
    found = measured(of)
    tasks = {label: found[label, "accuracy"].values["a", 1] for label in TASKS}
    sums = aggregate(tasks)
    assert found["core_v1", "centered"].values["a", 1] == pytest.approx(sums.core_v1)
    assert found["core_v2", "centered"].values["a", 1] == pytest.approx(sums.core_v2)
    assert found["raw_mean_23", "accuracy"].values["a", 1] == pytest.approx(sums.raw_mean_23)
    for name, group in sums.groups.items():
        assert found[f"{name}_v1", "centered"].values["a", 1] == pytest.approx(group.centered_v1)
    pair = verdict_of(found["core_v1", "centered"], "a", "b")
    assert pair.verdict == "better" and pair.low is not None and pair.difference is not None and 0 < pair.low < pair.difference
    single = intervals(of["a", 1].items, core=True, draws=2000)
    assert single["centered"]["core_v1"] == pytest.approx(found["core_v1", "centered"].interval(("a", 1)), abs=4e-3)  # other noise
    assert "centered" not in intervals(of["a", 1].items, core=False, draws=50)


def test_a_limited_run_has_no_core():
    of = {("a", 0): results(all_tasks(1), core_v1=0.1), ("b", 0): results(all_tasks(2), core_v1=None)}
    assert not [name for name, kind in measured(of, draws=50) if kind == "centered"]


def test_the_two_hellaswags_are_drawn_together():
    marks = (np.random.default_rng(3).random(200) < 0.5).tolist()
    rows = items_of("hellaswag", marks) + items_of("hellaswag_zeroshot", marks) + items_of("arc_easy", marks)
    found = measured({("a", 0): results(rows)})
    once, twice, other = (found[name, "margin"].draws["a", 0] for name in ("hellaswag", "hellaswag_zeroshot", "arc_easy"))
    assert np.corrcoef(once, twice)[0, 1] > 0.999 and abs(np.corrcoef(once, other)[0, 1]) < 0.1


def test_bits_per_byte_is_compared_on_the_same_pages():
    worse = PAGES.set_column(2, "nll", pa.array(PAGES["nll"].to_numpy() * 1.1))
    of = {(arm, r): results([], pages=PAGES if arm == "a" else worse) for arm in "ab" for r in (0, 1)}
    pair = verdict_of(measured(of)["bits_per_byte", "bits_per_byte"], "a", "b")
    assert pair.verdict == "better" and pair.unit == "bits per byte"
    with pytest.raises(InputError, match="other held-out pages"):
        measures_of({("a", 0): results([], pages=PAGES), ("b", 0): results([], pages=PAGES.slice(1))}, draws=10)


@pytest.mark.parametrize(("field", "value"), [("context", 128), ("few_shot_seed", 1), ("task_files", {"a": "2"})])
def test_runs_that_were_not_made_alike_are_refused(field: str, value: Any):
    rows = items_of("arc_easy", [True] * 3)
    with pytest.raises(InputError, match=f"other {field}"):
        measures_of({("a", 0): results(rows), ("b", 0): results(rows, **{field: value})}, draws=10)


def test_a_folder_without_results_is_refused(tmp_path: Path):
    with pytest.raises(InputError, match="holds no results of an evaluation"):
        read_results(tmp_path)
