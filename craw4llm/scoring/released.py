"""The fastText score of the released code (cxcscmu/Craw4LLM, document_rater.FasttextRater), for mode `released`.

The text is stripped and its lines are joined by a space; no other white space is touched, fastText's markers act, and an empty text is
scored like any other. The score is the probability of the first label; for `__label__cc` one minus it; any other label passes for the good
one. It is not clipped: fastText gives up to 1.00001, so scores run from -1e-5. With `text_normalize` punctuation is set apart, the text
is lowered and its white space folded first. A float32 holds these scores exactly for models of two labels.
"""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from craw4llm.errors import StageError
from craw4llm.scoring.scorer import SCORED, Reads, Reasons, Scores, load_model, without_surrogates

BAD_LABEL = "__label__cc"
_PUNCTUATION = re.compile(r"([.\!?,'/()])")
_SPACE = re.compile(r"\s+")


class ReleasedFastTextScorer:
    """text_normalize: the option of that name. model: the file's model, where it is loaded already."""

    reads: Reads = "text"

    def __init__(self, path: Path, label: str, *, text_normalize: bool, model: Any = None) -> None:
        self._model = load_model(path, label) if model is None else model
        self._text_normalize = text_normalize

    def score(self, texts: Sequence[str], urls: Sequence[str], pages: Sequence[int] = ()) -> tuple[Scores, Reasons]:
        scores = np.empty(len(texts), dtype=np.float32)
        for row, raw in enumerate(texts):
            text = " ".join(without_surrogates(raw).strip().splitlines())
            if self._text_normalize:
                text = _SPACE.sub(" ", _PUNCTUATION.sub(r" \1 ", text).lower()).strip()
            answers = self._model.f.predict(text + "\n", 1, 0.0, "strict")
            if not answers:
                raise StageError(f"scorer: fastText gives no label for the text {text[:60]!r}; the released code would end here")
            probability, label = answers[0]
            scores[row] = 1 - probability if label == BAD_LABEL else probability
        return scores, np.full(len(texts), SCORED, dtype=np.uint8)
