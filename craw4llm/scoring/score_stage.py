"""The stage `score`: one float32 column over all pages of a corpus, through the memo.

Writes scores.npy and reasons.npy (docs/artifacts.md, "score"). What a crawl has scored before is not scored again.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from craw4llm.artifact import Artifact, Result
from craw4llm.configs import ScoreConfig
from craw4llm.execution import Execution
from craw4llm.scoring.memo import PageScores
from craw4llm.scoring.scorer import EMPTY, NOT_IN_TABLE, NOT_READ, SCORED, UNREADABLE

_STEP_PAGES = 4096


def run(config: ScoreConfig, inputs: Mapping[str, Artifact], out: Path, execution: Execution) -> Result:
    n_pages = int(inputs["corpus"].count("pages"))
    scores = np.empty(n_pages, dtype=np.float32)
    reasons = np.empty(n_pages, dtype=np.uint8)
    with (
        PageScores(inputs["corpus"], inputs["scorer"], execution) as page_scores,
        execution.progress("score", total=n_pages, unit="page") as progress,
    ):
        for start in range(0, n_pages, _STEP_PAGES):
            pages = np.arange(start, min(start + _STEP_PAGES, n_pages))
            scores[pages], reasons[pages] = page_scores.with_reasons(pages)
            progress.update(len(pages))
    np.save(out / "scores.npy", scores)
    np.save(out / "reasons.npy", reasons)
    scored = scores[reasons == SCORED]
    return Result(
        counts={
            "pages": (n_pages, "pages"),
            "scored": (len(scored), "pages"),
            "empty": (int(np.sum(reasons == EMPTY)), "pages"),
            "not_in_table": (int(np.sum(reasons == NOT_IN_TABLE)), "pages"),
            "unreadable": (int(np.sum(reasons == UNREADABLE)), "pages"),
            "not_read": (int(np.sum(reasons == NOT_READ)), "pages"),
            "mean_score": (float(np.mean(scored, dtype=np.float64)) if len(scored) else None, "score"),
        }
    )


def run_part(config: ScoreConfig, inputs: Mapping[str, Artifact], out: Path, execution: Execution, *, part: int, of: int) -> str:
    """Scores the `part`-th of `of` ranges of page ids. The scores stay in the memo, where `run` finds them: `out` stays empty."""
    n_pages = int(inputs["corpus"].count("pages"))
    first, end = n_pages * (part - 1) // of, n_pages * part // of
    with (
        PageScores(inputs["corpus"], inputs["scorer"], execution) as page_scores,
        execution.progress(f"score, part {part} of {of}", total=end - first, unit="page") as progress,
    ):
        for start in range(first, end, _STEP_PAGES):
            pages = np.arange(start, min(start + _STEP_PAGES, end))
            page_scores.with_reasons(pages)
            progress.update(len(pages))
    return f"{end - first:,} pages scored"


def estimate(config: ScoreConfig, inputs: Mapping[str, Mapping[str, Any]]) -> dict[str, tuple[int, str]]:
    """As many pages as the corpus, where that is known."""
    corpus = inputs.get("corpus", {})
    return {"pages": corpus["pages"]} if "pages" in corpus else {}
