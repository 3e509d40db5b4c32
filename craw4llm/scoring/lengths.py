"""Plain scorers: the length of a page's text, and numbers read from its URL.

A page of white space has no length score (EMPTY); lengths are exact in float32 up to 2^24.
"""

from collections.abc import Callable, Sequence
from urllib.parse import parse_qsl, urlsplit

import numpy as np

from craw4llm.artifact import Artifact
from craw4llm.scoring.scorer import EMPTY, SCORED, Reads, Reasons, Scores
from craw4llm.tokens.tokenizer import Tokenizer

_LENGTHS: dict[str, Callable[[str], int]] = {
    "chars": len,
    "bytes": lambda text: len(text.encode("utf-8", "surrogatepass")),
    "words": lambda text: len(text.split()),
}
_FEATURES: dict[str, Callable[[str], int]] = {
    "length": len,
    "depth": lambda url: sum(1 for part in urlsplit(url).path.split("/") if part),
    "digits": lambda url: sum(map(str.isdecimal, url)),
    "parameters": lambda url: len(parse_qsl(urlsplit(url).query, keep_blank_values=True)),
}


class LengthScorer:
    """unit: chars, bytes, words, or tokens of `tokenizer` (end-of-text not counted)."""

    reads: Reads = "text"

    def __init__(self, unit: str, tokenizer: Artifact | None) -> None:
        self._tokenizer = Tokenizer(tokenizer) if tokenizer is not None else None
        self._length = _LENGTHS.get(unit)

    def score(self, texts: Sequence[str], urls: Sequence[str], pages: Sequence[int] = ()) -> tuple[Scores, Reasons]:
        if self._tokenizer is not None:
            lengths = [len(ids) for ids in self._tokenizer.encode_documents(texts)]
        else:
            assert self._length is not None
            lengths = [self._length(text) for text in texts]
        scores = np.array(lengths, dtype=np.float32)
        empty = np.array([not text or text.isspace() for text in texts], dtype=np.bool_)
        scores[empty] = np.nan
        return scores, np.where(empty, EMPTY, SCORED).astype(np.uint8)


class UrlScorer:
    """feature: length, depth, digits or parameters of the canonical URL."""

    reads: Reads = "url"

    def __init__(self, feature: str) -> None:
        self._feature = _FEATURES[feature]

    def score(self, texts: Sequence[str], urls: Sequence[str], pages: Sequence[int] = ()) -> tuple[Scores, Reasons]:
        return np.array([self._feature(url) for url in urls], dtype=np.float32), np.full(len(urls), SCORED, dtype=np.uint8)
