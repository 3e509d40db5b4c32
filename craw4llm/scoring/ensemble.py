"""Ensembles: weighted sums of other scorers, each normalised by constants that were given or fitted.

    EnsembleScorer([{"name": "dclm", "weight": 0.7, "shift": 0.1, "scale": 0.2}, ...], scorers).combine(results)

score = sum of weight * (score - shift) / scale, in float64, in the order of the weights. z-score: shift is the mean, scale the standard
deviation; min-max: shift is the low, scale is high - low; without normalisation 0 and 1. A page that a member does not score has no
score, for the reason of the first such member.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from craw4llm.artifact import Artifact
from craw4llm.configs import Ensemble
from craw4llm.corpus.reader import Corpus
from craw4llm.crawl.hashing import hash_text
from craw4llm.errors import InputError
from craw4llm.execution import Execution
from craw4llm.scoring.scorer import SCORED, Reads, Reasons, Scorer, Scores


class EnsembleScorer:
    """members: the opened scorers, in the order of `about`."""

    reads: Reads = "members"

    def __init__(self, about: Sequence[Mapping[str, Any]], members: Sequence[Scorer]) -> None:
        self.members = list(members)
        self._about = list(about)

    def combine(self, results: Sequence[tuple[Scores, Reasons]]) -> tuple[Scores, Reasons]:
        """Scores and reasons from those of the members, in their order."""
        total = np.zeros(len(results[0][0]), dtype=np.float64)
        reasons = np.full(len(total), SCORED, dtype=np.uint8)
        for about, (scores, why) in zip(self._about, results, strict=True):
            total += about["weight"] * ((scores.astype(np.float64) - about["shift"]) / about["scale"])
            reasons = np.where(reasons == SCORED, why, reasons)
        total[reasons != SCORED] = np.nan
        return total.astype(np.float32), reasons

    def score(self, texts: Sequence[str], urls: Sequence[str], pages: Sequence[int] = ()) -> tuple[Scores, Reasons]:
        raise AssertionError("an ensemble is scored member by member (craw4llm.scoring.memo.score_pages)")


def members_of(ensemble: Ensemble, inputs: Mapping[str, Artifact], execution: Execution) -> list[dict[str, Any]]:
    """What scorer.json says of the members: name, weight, shift, scale. Fits the constants where they are not given."""
    constants = {name: (a, b) for name, a, b in ensemble.constants}
    if ensemble.normalise != "none" and not constants:
        constants = {name: _fit(ensemble, name, inputs, execution) for name, _ in ensemble.weights}
    members = []
    for name, weight in ensemble.weights:
        first, second = constants.get(name, (0.0, 1.0))
        scale = second - first if ensemble.normalise == "minmax" else second
        members.append({"name": name, "weight": weight, "shift": first, "scale": scale})
    return members


def _fit(ensemble: Ensemble, name: str, inputs: Mapping[str, Artifact], execution: Execution) -> tuple[float, float]:
    """Mean and deviation, or low and high, over `fit_pages` pages of the corpus that are not held out and have a score."""
    from craw4llm.scoring.memo import PageScores

    corpus = Corpus(inputs["corpus"])
    usable = np.flatnonzero(~corpus.heldout_mask[: corpus.n_pages])
    names = corpus.names(usable)
    drawn = sorted(zip((hash_text(0, name) for name in names), usable.tolist(), strict=True))[: ensemble.fit_pages]
    with PageScores(inputs["corpus"], inputs[name], execution) as page_scores:
        scores = page_scores.scores(np.sort([page for _, page in drawn])).astype(np.float64)
    scores = scores[~np.isnan(scores)]
    low, high = (scores.min(), scores.max()) if len(scores) else (0.0, 0.0)
    if low == high:
        raise InputError(
            f"scorer: the ensemble's member {name!r} has one and the same score, or none, on all {len(drawn)} pages that it was fitted to; "
            "leave it out or give constants"
        )
    return (float(scores.mean()), float(scores.std())) if ensemble.normalise == "zscore" else (float(low), float(high))
