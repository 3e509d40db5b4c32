"""Core: the published runs, the cases of missing and limited tasks."""

import csv
import json
from pathlib import Path

import pytest

from craw4llm.errors import ArtifactError
from training.evaluation.aggregate import aggregate, centered
from training.evaluation.tasks import TASKS

# The paper's Table 1 (arXiv 2502.13347): commonsense, language, reading, symbolic, world, Core.
TABLE_1 = {
    "oracle_dclm": (0.2438, 0.2209, 0.1483, 0.2039, 0.2403, 0.2239),
    "random_1x": (0.1906, 0.1890, 0.0244, 0.1834, 0.1930, 0.1748),
    "indeg_1x": (0.1730, 0.1680, 0.0326, 0.1616, 0.1668, 0.1556),
    "craw_dclm": (0.2116, 0.2311, 0.0826, 0.1979, 0.2486, 0.2133),
    "craw_fwe": (0.2122, 0.1867, 0.0368, 0.2055, 0.2837, 0.2043),
}
# Mean of all 23 raw accuracies, and Core on version 2 (reference data, spec/craw4llm.md 2.3).
RAW_23 = {"oracle_dclm": 0.3817, "craw_dclm": 0.3734, "random_1x": 0.3460, "indeg_1x": 0.3318, "oracle_fwe": 0.3782, "craw_fwe": 0.3748}


@pytest.fixture(scope="module")
def published(shared: Path) -> dict[str, dict[str, float]]:
    with (shared / "spec" / "published_task_accuracy.csv").open() as stream:
        return {row.pop("run"): {label: float(value) for label, value in row.items()} for row in csv.DictReader(stream)}


def test_published_accuracies_give_every_published_core(published: dict, shared: Path):
    with (shared / "spec" / "expected_core.csv").open() as stream:
        expected = list(csv.DictReader(stream))
    assert len(expected) == len(published) == 12
    for row in expected:
        sums = aggregate(published[row["run"]])
        assert (f"{sums.core_v1:.4f}", f"{sums.core_v2:.4f}") == (row["core_v1"], row["core_v2"]), row["run"]
        assert sums.why == ()


@pytest.mark.parametrize("run", TABLE_1)
def test_published_group_means(run: str, published: dict):
    sums = aggregate(published[run])
    groups = ("commonsense", "language", "reading", "symbolic", "world")
    # The accuracies are printed to four decimals: an error of up to 0.5e-4 each, of twice that where the baseline is 0.5.
    assert [sums.groups[g].centered_v1 for g in groups] == pytest.approx(TABLE_1[run][:5], abs=1.2e-4)
    assert sums.core_v1 == pytest.approx(TABLE_1[run][5], abs=6e-5)


@pytest.mark.parametrize("run", RAW_23)
def test_raw_mean_with_mmlu(run: str, published: dict):
    sums = aggregate(published[run])
    assert sums.raw_mean_23 == pytest.approx(RAW_23[run], abs=6e-5)
    assert sums.raw_mean_22 == pytest.approx((23 * sums.raw_mean_23 - published[run]["mmlu_fewshot"]) / 22)


def test_case_bl_38(shared: Path):
    case = shared / "cases" / "BL-38"
    expected = json.loads((case / "expected.json").read_text())
    whole = aggregate(json.loads((case / "accuracies.json").read_text()))
    assert whole.core_v1 == pytest.approx(expected["core_v1_old_baselines"], abs=1e-6)
    assert whole.core_v2 == pytest.approx(expected["core_v2_fixed_baselines"], abs=1e-6)
    short = aggregate(json.loads((case / "accuracies_missing_squad.json").read_text()))
    assert (short.core_v1, short.core_v2, short.raw_mean_22, short.raw_mean_23) == (None,) * 4
    assert short.why == ("squad is missing",)
    assert short.groups["reading"].raw is None and short.groups["world"].raw == whole.groups["world"].raw


def test_without_mmlu_there_is_core_and_no_mean_over_23():
    sums = aggregate({label: 0.5 for label in TASKS if label != "mmlu_fewshot"})
    assert sums.core_v1 is not None and sums.raw_mean_22 == 0.5 and sums.raw_mean_23 is None
    assert sums.groups["world"].centered_v1 is None and sums.why == ("mmlu_fewshot is missing",)


def test_a_limited_task_enters_no_mean():
    sums = aggregate(dict.fromkeys(TASKS, 0.5), {"piqa": "piqa is limited: 40 usable items of 1838"})
    assert sums.core_v1 is None and sums.groups["commonsense"].raw is None and sums.groups["language"].raw == 0.5
    assert sums.why == ("piqa is limited: 40 usable items of 1838",)


def test_centered_is_0_at_the_baseline_and_1_at_full_marks():
    for label, task in TASKS.items():
        assert centered(label, task.v1 / 100, "v1") == pytest.approx(0) and centered(label, 1.0, "v2") == 1.0
    assert centered("commonsense_qa", 0.403, "v2") == pytest.approx(0) and centered("commonsense_qa", 0.6, "v1") == pytest.approx(0.5)


def test_what_is_no_accuracy_is_refused():
    with pytest.raises(ArtifactError, match="no task is called 'arc'"):
        aggregate({"arc": 0.5})
    for value in (1.01, -0.1, float("nan")):
        with pytest.raises(ArtifactError, match="expected a share"):
            aggregate({"copa": value})
