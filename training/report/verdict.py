"""Which of two arms gives the better model, and how sure that is.

    draws  = page_draws(nll, n_bytes)                 # the same resampled held-out pages for every model
    spread = seed_spread(values)                      # how much the training seed alone moves a model, over all arms
    pair   = compare("a", "b", values, draws, spread) # pair.sentence(): "a beats b by 0.012 bits per byte, 95% interval ..."

The measure is held-out bits per byte, sum(nll) / ln 2 / sum(bytes): lower is better, and models with different tokenizers can be
compared by it. Accuracies and losses of the evaluation's tasks are compared by the same functions, with draws over items
(training/evaluation/intervals.py) in place of draws over pages. The difference between two arms is the mean, over the replicates that
both have, of their difference in one replicate. Its 95% interval takes in both things that would differ if all were done again, as two
levels of one resampling:

1. other held-out pages (non-parametric bootstrap): each draw takes as many pages as there are, with replacement, the same for both
   arms and for every replicate, since all models are measured on the same pages. What makes a page hard for both arms cancels.
2. other training seeds (parametric): each draw adds sigma * sqrt(2 / R) * t, with R replicates and t from Student's distribution.
   sigma is the residual of "arm + seed" in the additive model of all arms' bits per byte (two-way analysis of variance), so what a
   seed does to both arms alike cancels too, and every arm's replicates help to estimate it.

Why replicates are not resampled like pages: two values resampled with replacement give an interval that ends at the two values, so
two equal arms would be called different whenever both replicates point the same way, which is every other time
(tests/training/report/test_verdict.py measures it). Level 2 assumes that seeds move every arm about equally and nearly normally.

The interval does not cover another set of crawl seeds, another corpus or pages of one site that resemble each other; and at 95% about
one in twenty pairs of equal arms comes out as decided.
"""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import scipy.stats
from numpy.typing import NDArray

LEVEL = 0.95
MOST_REPLICATES = 100  # beyond this many further replicates "run more of them" is no advice
DRAWS = 10_000
SEED = 20250219  # of all resampling: a report that is made again says the same
MAX_UNITS = 20_000  # held-out pages beyond this are resampled in groups of pages, to bound time and memory
_CHUNK_DRAWS = 250

Floats = NDArray[np.float64]
Cell = tuple[str, int]  # (arm, replicate)


@dataclasses.dataclass(frozen=True)
class SeedSpread:
    """sigma: standard deviation, in the unit of the measure, that the training seed gives one model, beyond what it gives all arms alike.
    degrees: degrees of freedom of that estimate."""

    sigma: float
    degrees: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Pair:
    """Two arms compared. `difference` is a's value minus b's: below 0, a is better (with `higher_is_better`: above 0).

    low, high: ends of the 95% interval of the difference; None where there is nothing to compare, or nothing to draw an interval from.
    replicates: those that both arms have. seeds_known: the interval takes in the spread over training seeds; without it the
        interval is over held-out pages alone, and nothing is decided.
    missing: why there is no difference; "" where there is one.
    more: about how many further replicates would decide the pair if its difference stays as it is (`replicates_needed`); None where it is
        decided, or where no number of them would.
    unit: of the values. sampled: what the draws take anew.
    """

    a: str
    b: str
    difference: float | None = None
    low: float | None = None
    high: float | None = None
    replicates: tuple[int, ...] = ()
    seeds_known: bool = False
    missing: str = ""
    more: int | None = None
    unit: str = "bits per byte"
    sampled: str = "held-out pages"
    higher_is_better: bool = False

    @property
    def decided(self) -> bool:
        """The interval leaves out 0 and takes in both pages and training seeds."""
        return self.seeds_known and self.low is not None and self.high is not None and (self.low > 0 or self.high < 0)

    @property
    def winner(self) -> str | None:
        """The better arm of a decided pair."""
        if not self.decided or self.difference is None:
            return None
        return self.a if (self.difference > 0) == self.higher_is_better else self.b

    @property
    def verdict(self) -> str:
        """ "better", "worse" (a, against b), "can't tell", "one replicate" or "missing"."""
        if self.missing:
            return "missing"
        if not self.seeds_known:
            return "one replicate"
        return "can't tell" if self.winner is None else "better" if self.winner == self.a else "worse"

    def sentence(self) -> str:
        """The verdict with its numbers."""
        if self.missing or self.difference is None:
            return f"{self.a} against {self.b}: no verdict ({self.missing})"
        count = f"{len(self.replicates)} replicate{'s' if len(self.replicates) != 1 else ''}"
        if self.low is None or self.high is None:
            return f"{self.a} against {self.b}: can't tell from {count}; {self.difference:+.4f} {self.unit}; {self.needed()}"
        low, high = sorted((abs(self.low), abs(self.high)))
        if self.decided:
            word = "beats" if self.winner == self.a else "loses to"
            return f"{self.a} {word} {self.b} by {abs(self.difference):.4f} {self.unit}, 95% interval {low:.4f} to {high:.4f}, {count}"
        numbers = f"{self.difference:+.4f} {self.unit}, 95% interval {self.low:+.4f} to {self.high:+.4f}"
        if not self.seeds_known:
            return (
                f"{self.a} against {self.b}: can't tell from {count}; {numbers} over {self.sampled} alone, "
                f"the spread over training seeds is unknown; {self.needed()}"
            )
        return f"{self.a} against {self.b}: can't tell at 95%; {numbers}, {count}; {self.needed()}"

    def needed(self) -> str:
        """What it would take to decide an undecided pair, in words; "" for others."""
        if self.decided or self.missing:
            return ""
        if not self.seeds_known:
            return "at least 1 more replicate needed"
        if self.more is None:
            return f"more replicates alone would not decide it: more {self.sampled} are needed, or there is no difference to find"
        return f"about {self.more} more replicate{'s' if self.more != 1 else ''} needed"


def bits_per_byte(nll: Floats, n_bytes: NDArray[np.unsignedinteger]) -> float:
    """sum(nll) / ln 2 / sum(bytes). nll: nats, summed over each page."""
    return float(np.sum(nll) / math.log(2) / np.sum(n_bytes, dtype=np.float64))


def page_draws(
    nll: Mapping[Cell, Floats], n_bytes: NDArray[np.unsignedinteger], draws: int = DRAWS, seed: int = SEED
) -> dict[Cell, Floats]:
    """Bits per byte of every model on resampled held-out pages; draw d takes the same pages for every model.

    nll: (arm, replicate) -> float64[pages], nats. n_bytes: of the same pages in the same order. Returns (arm, replicate) ->
    float64[draws]. Of more than MAX_UNITS pages, every MAX_UNITS-th page forms a group, and groups are resampled.
    """
    cells = sorted(nll)
    if not cells:
        return {}
    units = min(len(n_bytes), MAX_UNITS)
    group = np.arange(len(n_bytes)) % units
    columns = [np.bincount(group, weights=nll[cell], minlength=units) for cell in cells]
    values = np.stack([*columns, np.bincount(group, weights=n_bytes.astype(np.float64), minlength=units)], axis=1)
    sums = resampled_sums(values, draws, np.random.default_rng(seed))
    ratios = sums[:, :-1] / sums[:, -1:] / math.log(2)
    return {cell: ratios[:, column] for column, cell in enumerate(cells)}


def resampled_sums(values: Floats, draws: int, rng: np.random.Generator) -> Floats:
    """Column sums of rows drawn with replacement, as many as there are: float64[units, columns] -> float64[draws, columns]."""
    units = len(values)
    sums = np.empty((draws, values.shape[1]))
    for start in range(0, draws, _CHUNK_DRAWS):
        rows = min(_CHUNK_DRAWS, draws - start)
        picks = rng.integers(0, units, size=(rows, units)) + np.arange(rows)[:, None] * units
        counts = np.bincount(picks.ravel(), minlength=rows * units).reshape(rows, units)
        sums[start : start + rows] = counts.astype(np.float64) @ values
    return sums


def seed_spread(values: Mapping[Cell, float]) -> SeedSpread | None:
    """Residual spread of the additive model value = arm + replicate, fitted by least squares; gaps are allowed.

    None where nothing is left to estimate it from: fewer than two arms with two replicates in common.
    """
    cells = sorted(values)
    arms = sorted({arm for arm, _ in cells})
    replicates = sorted({replicate for _, replicate in cells})
    design = np.zeros((len(cells), len(arms) + len(replicates)))
    for row, (arm, replicate) in enumerate(cells):
        design[row, arms.index(arm)] = 1
        design[row, len(arms) + replicates.index(replicate)] = 1
    degrees = len(cells) - int(np.linalg.matrix_rank(design)) if cells else 0
    if degrees < 1:
        return None
    y = np.array([values[cell] for cell in cells])
    y = y - y.mean()
    fitted = design @ np.linalg.lstsq(design, y, rcond=None)[0]
    return SeedSpread(math.sqrt(float(np.sum((y - fitted) ** 2)) / degrees), degrees)


def compare(
    a: str,
    b: str,
    values: Mapping[Cell, float],
    draws: Mapping[Cell, Floats],
    spread: SeedSpread | None,
    seed: int = SEED,
    **measure: Any,
) -> Pair:
    """The verdict on two arms over the replicates that both have.

    values: (arm, replicate) -> bits per byte, finished models only. draws: of `page_draws`, for the same cells.
    spread: of `seed_spread`; used with at least two common replicates. measure: `unit`, `sampled` and `higher_is_better` of the pair.
    """
    of_a, of_b = ({replicate for arm, replicate in values if arm == name} for name in (a, b))
    common = tuple(sorted(of_a & of_b))
    if not common:
        without = [name for name, found in ((a, of_a), (b, of_b)) if not found]
        reason = f"no results of {' and '.join(without)}" if without else "no replicate that both arms have"
        return Pair(a=a, b=b, missing=reason, **measure)
    difference = float(np.mean([values[a, r] - values[b, r] for r in common]))
    drawn = np.mean([draws[a, r] - draws[b, r] for r in common], axis=0)
    sampling_sd = float(np.std(drawn))
    seeds_known = len(common) > 1 and spread is not None
    if seeds_known and spread is not None:
        rng = np.random.default_rng(seed + 1)
        drawn = drawn + spread.sigma * math.sqrt(2 / len(common)) * rng.standard_t(spread.degrees, size=len(drawn))
    low, high = np.quantile(drawn, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    pair = Pair(a=a, b=b, difference=difference, low=float(low), high=float(high), replicates=common, seeds_known=seeds_known, **measure)
    if pair.seeds_known and not pair.decided and spread is not None:
        pair = dataclasses.replace(pair, more=replicates_needed(difference, sampling_sd, spread, len(common)))
    return pair


def replicates_needed(difference: float, sampling_sd: float, spread: SeedSpread, replicates: int) -> int | None:
    """The smallest number of further replicates that would put 0 outside the 95% interval, if nothing else changes.

    difference: of the means so far. sampling_sd: standard deviation of the draws over pages or items, which replicates do not lower.
    With R' replicates the half-width is sqrt((1.96 sampling_sd)^2 + (t sigma)^2 2 / R'), t with degrees of freedom that grow as R' does.
    None where even MOST_REPLICATES would not do.
    """
    per_replicate = spread.degrees / max(replicates - 1, 1)
    normal = float(scipy.stats.norm.ppf((1 + LEVEL) / 2))
    for more in range(1, MOST_REPLICATES + 1):
        total = replicates + more
        t = float(scipy.stats.t.ppf((1 + LEVEL) / 2, per_replicate * (total - 1)))
        if math.hypot(normal * sampling_sd, t * spread.sigma * math.sqrt(2 / total)) < abs(difference):
            return more
    return None


def arm_interval(arm: str, values: Mapping[Cell, float], draws: Mapping[Cell, Floats], seed: int = SEED) -> tuple[float, float] | None:
    """95% interval of one arm's mean, over pages (or items) and training seeds. None with fewer than two replicates.

    The seeds' spread here is that within arms, pooled over all of them: what a seed does to all arms alike does not cancel.
    """
    cells = sorted(cell for cell in values if cell[0] == arm)
    if len(cells) < 2:
        return None
    squares, degrees = 0.0, 0
    for name in sorted({name for name, _ in values}):
        own = [value for (other, _), value in sorted(values.items()) if other == name]
        squares += float(np.sum((np.array(own) - np.mean(own)) ** 2))
        degrees += len(own) - 1
    drawn = np.mean([draws[cell] for cell in cells], axis=0)
    rng = np.random.default_rng(seed + 2)
    drawn = drawn + math.sqrt(squares / degrees / len(cells)) * rng.standard_t(degrees, size=len(drawn))
    low, high = np.quantile(drawn, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return float(low), float(high)
