"""Relations, hops, lines and concentration against values worked out by hand, and the paper's 4.8 from its own rows."""

import csv
import math
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import ArrayLike, NDArray

from training.report.analysis import fit_doublings, gini, histogram, hop_means, related, sample_of, t_interval
from training.report.published import published

NAN = math.nan


class Links:
    """Stands for a corpus: links of each page; targets from n_pages on are dead."""

    def __init__(self, links: list[list[int]]) -> None:
        self.links = links
        self.n_pages = len(links)

    def outlinks(self, pages: ArrayLike) -> tuple[NDArray[np.int64], NDArray[np.uint32]]:
        some = [sorted(self.links[p]) for p in np.asarray(pages).tolist()]
        return np.cumsum([0, *map(len, some)]), np.array([t for one in some for t in one], dtype=np.uint32)


def test_indegree_needs_4_803_times_the_pages_by_the_papers_rows(shared: Path) -> None:
    """`spec/craw4llm.md` 2.2: .15772 + .02455 log2(x) = .2133 gives 4.803; random by the same rule 4.89."""
    rows = {row["run"]: float(row["core_v1"]) for row in csv.DictReader((shared / "spec" / "expected_core.csv").read_text().splitlines())}
    line = fit_doublings([(1, rows["indeg_1x"]), (2, rows["indeg_2x_d"]), (4, rows["indeg_4x_d"])])
    assert line is not None
    assert (line.intercept, line.slope) == (pytest.approx(0.15772, abs=5e-6), pytest.approx(0.02455, abs=5e-6))
    multiple = line.multiple(rows["craw_dclm"])
    assert multiple == pytest.approx(4.803, abs=0.001) and multiple is not None and line.extrapolates(multiple)
    line = fit_doublings([(1, rows["random_1x"]), (2, rows["random_2x_d"]), (4, rows["random_4x_d"])])
    assert line is not None and line.multiple(rows["craw_dclm"]) == pytest.approx(4.89, abs=0.005)


def test_published_runs_are_the_papers_table_1(shared: Path) -> None:
    rows = {row["run"]: row for row in csv.DictReader((shared / "spec" / "expected_core.csv").read_text().splitlines())}
    for scorer in ("DCLM", "FineWeb-Edu"):
        runs = published(scorer)
        for run in runs.values():
            assert run.core_v1 == pytest.approx(float(rows[run.name]["core_v1"]), abs=6e-5)
            assert run.means.core_v2 == pytest.approx(float(rows[run.name]["core_v2"]), abs=6e-5)
            assert run.in_table_1 == rows[run.name]["published"].startswith("yes")
    quality, oracle = published("DCLM")["quality", 1], published("DCLM")["oracle", 0]
    assert 100 * quality.core_v1 / oracle.core_v1 == pytest.approx(95.3, abs=0.05)
    assert quality.means.groups["reading"].centered_v1 == pytest.approx(0.0826, abs=5e-4)


def test_a_line_needs_two_pools_and_a_slope() -> None:
    assert fit_doublings([(1, 0.2), (1, 0.3)]) is None
    flat = fit_doublings([(1, 0.2), (2, 0.2)])
    assert flat is not None and flat.multiple(0.3) is None
    line = fit_doublings([(1, 2.0), (2, 1.9), (4, 1.8)])  # bits per byte fall
    assert line is not None and line.multiple(1.85) == pytest.approx(2**1.5) and not line.extrapolates(2**1.5)


def test_a_monotone_relation_has_rho_one_and_bins_that_rise() -> None:
    x = np.arange(200.0)
    relation = related(x, x**3)
    assert relation.rho == pytest.approx(1) and relation.low is None and relation.pages == 200
    means = [b[2] for b in relation.bins]
    assert means == sorted(means) and sum(b[0] for b in relation.bins) == 200


def test_missing_and_constant_values_have_no_correlation() -> None:
    relation = related(np.array([1.0, NAN, 3.0, 4.0]), np.array([1.0, 2.0, NAN, 3.0]))
    assert (relation.pages, relation.rho) == (2, None)
    assert related(np.ones(50), np.arange(50.0)).rho is None
    assert related(np.empty(0), np.empty(0)).bins == ()


def test_the_interval_of_a_correlation_holds_its_level() -> None:
    rng = np.random.default_rng(1)
    inside = 0
    for _ in range(200):
        relation = related(rng.standard_normal(60), rng.standard_normal(60))
        assert relation.low is not None and relation.high is not None
        inside += relation.low < 0 < relation.high
    assert 180 <= inside <= 199


def test_hops_by_hand() -> None:
    """0 links to 1, 2 and a dead link; 1 links to 0 and 3; 2 links to 3, 4 (no score) and 1; 3 and 4 link nowhere."""
    links = Links([[1, 2, 5], [0, 3], [1, 3, 4], [], []])
    score = np.array([0.1, 0.2, 0.6, 0.8, NAN])
    one, two = hop_means(links, score, np.arange(5))  # type: ignore[arg-type]
    assert one == pytest.approx([0.4, 0.45, 0.5, NAN, NAN], nan_ok=True)
    # two links away and no nearer: of 0: {3, 4 without a score}; of 1: {2}; of 2: {0}
    assert two == pytest.approx([0.8, 0.6, 0.1, NAN, NAN], nan_ok=True)


def test_gini_by_hand() -> None:
    assert gini(np.array([3, 3, 3])) == pytest.approx(0)
    assert gini(np.array([0, 0, 0, 8])) == pytest.approx(0.75)
    assert gini(np.array([1, 3])) == pytest.approx(0.25)
    assert gini(np.array([], dtype=np.int64)) is None


def test_small_helpers() -> None:
    assert t_interval([1.0]) is None
    low, high = t_interval([1.0, 2.0, 3.0]) or (NAN, NAN)
    assert (low, high) == (pytest.approx(2 - 2.4841, abs=1e-3), pytest.approx(2 + 2.4841, abs=1e-3))
    edges, shares = histogram({"a": np.array([0.0, 0.5, NAN, 1.0]), "none": np.array([NAN])})
    assert edges[[0, -1]].tolist() == [0.0, 1.0] and shares["a"].sum() == pytest.approx(1) and "none" not in shares
    assert sample_of(np.arange(9)).tolist() == list(range(9))
    assert np.array_equal(sample_of(np.arange(100), 10), sample_of(np.arange(100), 10)) and len(sample_of(np.arange(100), 10)) == 10
