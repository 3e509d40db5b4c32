"""The score stage in shares, as several hosts do it: each share only once, and the bytes of one process."""

import numpy as np
import pytest

from craw4llm.configs import CorpusConfig, ScoreConfig, ScorerConfig, SyntheticText, SyntheticWeb
from craw4llm.scoring import score_stage
from craw4llm.scoring.memo import PageScores
from craw4llm.stage import Stage

WEB = Stage(CorpusConfig(source=SyntheticWeb(pages=400, hosts=9)))
SCORER = Stage(ScorerConfig(kind="train_fasttext", source=SyntheticText(lines=200), dim=8, buckets=500))


@pytest.mark.parametrize("order", [(1, 2, 3), (3, 1)])
def test_shares_give_the_bytes_of_one_process(order, shared_build, build, execution, tmp_path, monkeypatch):
    whole = shared_build(Stage(ScoreConfig(), corpus=WEB, scorer=SCORER))
    monkeypatch.setattr(score_stage, "_STEP_PAGES", 32)  # 13 steps: 5, 4 and 4
    inputs = {"corpus": build(WEB), "scorer": build(SCORER)}
    said = [score_stage.run_part(ScoreConfig(), inputs, tmp_path, execution, part=part, of=3) for part in order]
    sizes = {1: 144, 2: 128, 3: 128}
    assert said == [f"{sizes[part]} pages, {sizes[part]} of them scored now" for part in order]
    assert score_stage.run_part(ScoreConfig(), inputs, tmp_path, execution, part=order[0], of=3).endswith("pages, 0 of them scored now")
    computed = []
    real = PageScores._compute
    monkeypatch.setattr(PageScores, "_compute", lambda self, pages: computed.extend(pages.tolist()) or real(self, pages))
    assert build(Stage(ScoreConfig(), corpus=WEB, scorer=SCORER)).digest == whole.digest
    assert len(computed) == 400 - sum(sizes[part] for part in order)
    assert np.load(whole.file("scores.npy")).dtype == np.float32 and whole.count("scored") + whole.count("empty") == 400
