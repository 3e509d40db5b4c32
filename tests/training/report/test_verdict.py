"""Verdicts on made-up losses whose right answer is known."""

import math

import numpy as np
import pytest

from training.report.verdict import MAX_UNITS, Cell, Floats, Pair, bits_per_byte, compare, page_draws, seed_spread

PAGES = 150


def losses(
    effects: dict[str, float], replicates: int, seed_noise: float, page_noise: float, seed: int
) -> tuple[dict[Cell, Floats], Floats]:
    """(arm, replicate) -> nats of each page, and the pages' bytes. Arms share the pages' hardness; every model has its own noise."""
    rng = np.random.default_rng(seed)
    n_bytes = rng.integers(200, 5000, PAGES).astype(np.uint64)
    hardness = 1.5 + 0.4 * rng.standard_normal(PAGES)
    common = seed_noise * rng.standard_normal(replicates)
    nll = {}
    for arm, effect in effects.items():
        for r in range(replicates):
            level = hardness + effect + common[r] + seed_noise * rng.standard_normal() + page_noise * rng.standard_normal(PAGES)
            nll[arm, r] = level * n_bytes * math.log(2)
    return nll, n_bytes


def verdict(nll: dict[Cell, Floats], n_bytes: Floats, a: str, b: str, draws: int = 2000) -> Pair:
    values = {cell: bits_per_byte(x, n_bytes) for cell, x in nll.items()}
    return compare(a, b, values, page_draws(nll, n_bytes, draws=draws), seed_spread(values))


def test_bits_per_byte_by_hand() -> None:
    assert bits_per_byte(np.array([2.0, 4.0]) * math.log(2), np.array([1, 2], dtype=np.uint64)) == pytest.approx(2.0)


def test_a_clear_win_is_decided_and_its_interval_holds_the_true_difference() -> None:
    nll, n_bytes = losses({"a": 0.0, "b": 0.1, "c": 0.0}, replicates=3, seed_noise=0.003, page_noise=0.02, seed=1)
    pair = verdict(nll, n_bytes, "a", "b")
    assert pair.decided and pair.winner == "a" and pair.verdict == "better"
    assert pair.low is not None and pair.high is not None
    assert pair.low < -0.1 < pair.high < 0
    assert pair.sentence().startswith("a beats b by 0.") and "3 replicates" in pair.sentence()
    other = verdict(nll, n_bytes, "b", "a")
    assert other.verdict == "worse" and other.winner == "a" and other.sentence().startswith("b loses to a by")


def test_a_tie_is_not_decided() -> None:
    nll, n_bytes = losses({"a": 0.0, "b": 0.0, "c": 0.0}, replicates=3, seed_noise=0.01, page_noise=0.02, seed=2)
    pair = verdict(nll, n_bytes, "a", "b")
    assert not pair.decided and pair.winner is None
    assert "can't tell at 95%" in pair.sentence()


def test_identical_models_differ_by_exactly_nothing() -> None:
    nll, n_bytes = losses({"a": 0.0}, replicates=2, seed_noise=0.01, page_noise=0.02, seed=3)
    nll |= {("b", r): nll["a", r] for r in (0, 1)}
    pair = verdict(nll, n_bytes, "a", "b")
    assert (pair.difference, pair.decided) == (0.0, False)


def test_one_replicate_decides_nothing_and_says_so() -> None:
    nll, n_bytes = losses({"a": 0.0, "b": 0.5}, replicates=1, seed_noise=0.001, page_noise=0.001, seed=4)
    pair = verdict(nll, n_bytes, "a", "b")
    assert pair.verdict == "one replicate" and not pair.decided and pair.winner is None
    assert "the spread over training seeds is unknown" in pair.sentence()


def test_only_replicates_that_both_arms_have_are_compared() -> None:
    nll, n_bytes = losses({"a": 0.0, "b": 0.1}, replicates=3, seed_noise=0.003, page_noise=0.01, seed=5)
    del nll["b", 1]
    pair = verdict(nll, n_bytes, "a", "b")
    assert pair.replicates == (0, 2)
    expected = np.mean([bits_per_byte(nll["a", r], n_bytes) - bits_per_byte(nll["b", r], n_bytes) for r in (0, 2)])
    assert pair.difference == pytest.approx(expected)


def test_no_common_replicate_is_missing_not_a_number() -> None:
    nll, n_bytes = losses({"a": 0.0, "b": 0.1}, replicates=2, seed_noise=0.003, page_noise=0.01, seed=6)
    del nll["a", 0], nll["b", 1]
    pair = verdict(nll, n_bytes, "a", "b")
    assert pair.verdict == "missing" and pair.difference is None and pair.low is None


def test_equal_arms_are_rarely_called_different_with_two_replicates() -> None:
    """The stated level holds with two replicates, where resampling the replicates themselves would decide a large share of ties."""
    decided = resampled = 0
    rounds = 200
    for k in range(rounds):
        nll, n_bytes = losses({f"arm{i}": 0.0 for i in range(6)}, replicates=2, seed_noise=0.005, page_noise=0.01, seed=1000 + k)
        values = {cell: bits_per_byte(x, n_bytes) for cell, x in nll.items()}
        draws = page_draws(nll, n_bytes, draws=500)
        decided += compare("arm0", "arm1", values, draws, seed_spread(values)).decided
        by_replicate = np.stack([draws["arm0", r] - draws["arm1", r] for r in (0, 1)], axis=1)
        picks = np.random.default_rng(k).integers(0, 2, size=(500, 2))
        low, high = np.quantile(np.take_along_axis(by_replicate, picks, axis=1).mean(axis=1), [0.025, 0.975])
        resampled += bool(low > 0 or high < 0)
    assert decided / rounds < 0.1
    assert resampled / rounds > 0.25


def test_the_interval_over_pages_has_the_width_of_the_standard_error() -> None:
    """Equal bytes: the difference is a plain mean over pages, so the bootstrap's spread is the standard error of a mean."""
    rng = np.random.default_rng(8)
    n_bytes = np.full(PAGES, 1000, dtype=np.uint64)
    delta = 0.05 * rng.standard_normal(PAGES)
    nll = {("a", 0): (2 + delta) * 1000 * math.log(2), ("b", 0): np.full(PAGES, 2 * 1000 * math.log(2))}
    draws = page_draws(nll, n_bytes, draws=20_000)
    assert np.std(draws["a", 0] - draws["b", 0]) == pytest.approx(np.std(delta) / math.sqrt(PAGES), rel=0.03)


def test_seed_spread_is_the_residual_of_arm_plus_seed() -> None:
    exact = {("a", 0): 1.0, ("a", 1): 1.3, ("b", 0): 2.0, ("b", 1): 2.3}
    spread = seed_spread(exact)
    assert spread is not None and spread.degrees == 1 and spread.sigma == pytest.approx(0, abs=1e-12)
    spread = seed_spread(exact | {("b", 1): 2.3 + 0.4})
    assert spread is not None and spread.sigma == pytest.approx(0.2)  # residuals 0.1 four times, one degree of freedom
    assert seed_spread({("a", 0): 1.0, ("b", 0): 2.0}) is None
    assert seed_spread({("a", 0): 1.0, ("b", 1): 2.0}) is None
    assert seed_spread({}) is None


def test_the_same_draws_whatever_the_order_of_the_models() -> None:
    nll, n_bytes = losses({"a": 0.0, "b": 0.1}, replicates=2, seed_noise=0.003, page_noise=0.01, seed=9)
    forward, backward = page_draws(nll, n_bytes, draws=100), page_draws(dict(reversed(nll.items())), n_bytes, draws=100)
    assert all(np.array_equal(forward[cell], backward[cell]) for cell in nll)


def test_many_pages_are_resampled_in_groups_with_the_same_spread() -> None:
    rng = np.random.default_rng(10)
    pages = 2 * MAX_UNITS
    n_bytes = np.full(pages, 100, dtype=np.uint64)
    delta = rng.standard_normal(pages)
    draws = page_draws({("a", 0): delta * 100 * math.log(2)}, n_bytes, draws=200)["a", 0]
    assert draws.mean() == pytest.approx(delta.mean(), abs=0.005)
    assert draws.std() == pytest.approx(delta.std() / math.sqrt(pages), rel=0.2)
