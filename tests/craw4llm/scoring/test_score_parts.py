"""Parts of the score stage, in whatever order, give the column that one run gives, and leave it nothing to score."""

import dataclasses
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from craw4llm.artifact import Artifact
from craw4llm.configs import CorpusConfig, ScoreConfig, ScorerConfig, SyntheticText, SyntheticWeb
from craw4llm.execution import Execution
from craw4llm.scoring import score_stage
from craw4llm.scoring.memo import PageScores
from craw4llm.stage import Stage


def test_parts_give_the_same_column(
    build: Callable[[Stage], Artifact], execution: Execution, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    web = build(Stage(CorpusConfig(source=SyntheticWeb(pages=300, hosts=10))))
    rater = build(Stage(ScorerConfig(kind="train_fasttext", source=SyntheticText(lines=200))))
    inputs = {"corpus": web, "scorer": rater}
    whole, parted = tmp_path / "whole", tmp_path / "parted"
    for folder in (whole, parted):
        folder.mkdir()
    score_stage.run(ScoreConfig(), inputs, whole, dataclasses.replace(execution, root=tmp_path / "other"))
    said = [score_stage.run_part(ScoreConfig(), inputs, parted, execution, part=part, of=3) for part in (3, 1, 2)]
    assert said == ["100 pages scored"] * 3 and not list(parted.iterdir())
    monkeypatch.setattr(PageScores, "_compute", lambda self, pages: pytest.fail(f"{len(pages)} pages were scored again"))
    score_stage.run(ScoreConfig(), inputs, parted, execution)
    for name in ("scores.npy", "reasons.npy"):
        assert (whole / name).read_bytes() == (parted / name).read_bytes()
    assert np.isfinite(np.load(parted / "scores.npy")).sum() > 200
