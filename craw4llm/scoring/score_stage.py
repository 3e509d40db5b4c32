"""The stage `score`: one float32 column over all pages of a corpus, through the memo.

Writes scores.npy and reasons.npy (docs/artifacts.md, "score"). What a crawl has scored before is not scored again. The memo is also how
several hosts share the work: each fills it with its share of the pages (`run_part`), and `run` reads them all, and scores what is missing.
"""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from craw4llm.artifact import Artifact, Result
from craw4llm.configs import ScoreConfig
from craw4llm.corpus.npy import NpyWriter
from craw4llm.execution import Execution
from craw4llm.scoring.means import exact_sum
from craw4llm.scoring.memo import PageScores
from craw4llm.scoring.scorer import EMPTY, NOT_IN_TABLE, NOT_READ, SCORED, UNREADABLE

RESUMES = True  # what was scored is in the memo
_STEP_PAGES = 4096


def run(config: ScoreConfig, inputs: Mapping[str, Artifact], out: Path, execution: Execution) -> Result:
    n_pages = int(inputs["corpus"].count("pages"))
    found = np.zeros(256, dtype=np.int64)  # pages by reason
    sums: list[float] = []
    with (
        PageScores(inputs["corpus"], inputs["scorer"], execution) as page_scores,
        NpyWriter(out / "scores.npy", np.float32) as scores,
        NpyWriter(out / "reasons.npy", np.uint8) as reasons,
        execution.progress("score", total=n_pages, unit="page") as progress,
    ):
        for pages in _steps(n_pages, 1, 1):
            values, why = page_scores.with_reasons(pages)
            scores.append(values)
            reasons.append(why)
            found += np.bincount(why, minlength=256)
            sums.append(exact_sum(values)[0])
            progress.update(len(pages))
    return Result(
        counts={
            "pages": (n_pages, "pages"),
            "scored": (int(found[SCORED]), "pages"),
            "empty": (int(found[EMPTY]), "pages"),
            "not_in_table": (int(found[NOT_IN_TABLE]), "pages"),
            "unreadable": (int(found[UNREADABLE]), "pages"),
            "not_read": (int(found[NOT_READ]), "pages"),
            "mean_score": (math.fsum(sums) / int(found[SCORED]) if found[SCORED] else None, "score"),
        }
    )


def run_part(config: ScoreConfig, inputs: Mapping[str, Artifact], out: Path, execution: Execution, *, part: int, of: int) -> str:
    """Scores every `of`-th step of pages, from the `part`-th on, into the memo."""
    n_pages = int(inputs["corpus"].count("pages"))
    done = 0
    with (
        PageScores(inputs["corpus"], inputs["scorer"], execution) as page_scores,
        execution.progress(f"score, part {part} of {of}", total=-(-n_pages // of), unit="page") as progress,
    ):
        for pages in _steps(n_pages, part, of):
            page_scores.with_reasons(pages)
            done += len(pages)
            progress.update(len(pages))
        return f"{done:,} pages, {page_scores.computed:,} of them scored now"


def _steps(n_pages: int, part: int, of: int) -> list[NDArray[np.int64]]:
    """Every `of`-th step of pages, from the `part`-th (1 to `of`) on."""
    return [np.arange(start, min(start + _STEP_PAGES, n_pages)) for start in range((part - 1) * _STEP_PAGES, n_pages, of * _STEP_PAGES)]


def estimate(config: ScoreConfig, inputs: Mapping[str, Mapping[str, Any]]) -> dict[str, tuple[int, str]]:
    """As many pages as the corpus, where that is known."""
    corpus = inputs.get("corpus", {})
    return {"pages": corpus["pages"]} if "pages" in corpus else {}
