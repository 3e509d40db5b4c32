"""What selecting needs to know of pages' texts, computed in order, in several processes where that pays.

    for fact in facts(wanted, pages, execution): ...        -> one PageFacts per page, in the order of `pages`

The consumer may stop early: pages are read a window ahead, never all of them.
"""

from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from craw4llm.artifact import Artifact
from craw4llm.corpus.reader import Corpus
from craw4llm.execution import Execution
from craw4llm.processes import worker_pool
from craw4llm.selection.items import Items
from craw4llm.selection.near_copies import Signature, Similarity, signature
from craw4llm.selection.words import text_hash
from craw4llm.tokens.tokenizer import Tokenizer

BLOCK_PAGES = 128
POOL_FROM_PAGES = 4096  # starting a pool costs about two seconds; a page about a millisecond


@dataclass(frozen=True)
class Wanted:
    """similarity, items, tokenizer: None where that fact is not needed."""

    corpus: Artifact
    similarity: Similarity | None = None
    items: Items | None = None
    tokenizer: Artifact | None = None


@dataclass(frozen=True)
class PageFacts:
    """page: its id. text_hash: craw4llm.selection.words. signature: None without words, or where not wanted. hits: items that it overlaps
    with. n_tokens: end-of-text included, 0 where not wanted."""

    page: int
    text_hash: bytes
    signature: Signature | None
    hits: NDArray[np.int64]
    n_tokens: int


class Reader:
    """Computes facts in this process."""

    def __init__(self, wanted: Wanted) -> None:
        self._wanted = wanted
        self._corpus = Corpus(wanted.corpus)
        self._tokenizer = Tokenizer(wanted.tokenizer) if wanted.tokenizer is not None else None

    def read(self, page: int) -> PageFacts:
        wanted, text = self._wanted, self._corpus.text(page)
        return PageFacts(
            page,
            text_hash(text),
            signature(text, wanted.similarity) if wanted.similarity else None,
            wanted.items.hits(text) if wanted.items else np.empty(0, dtype=np.int64),
            sum(len(ids) for ids in self._tokenizer.document(text)) + 1 if self._tokenizer else 0,
        )


def facts(wanted: Wanted, pages: NDArray[np.integer], execution: Execution) -> Iterator[PageFacts]:
    """Facts of `pages`, in that order."""
    blocks = (pages[start : start + BLOCK_PAGES].tolist() for start in range(0, len(pages), BLOCK_PAGES))
    if execution.workers <= 1 or len(pages) < POOL_FROM_PAGES:
        reader = Reader(wanted)
        for block in blocks:
            yield from map(reader.read, block)
        return
    waiting: deque[Future[list[PageFacts]]] = deque()
    with worker_pool(execution.workers, initializer=_open, initargs=(wanted,)) as pool:
        for block in blocks:
            waiting.append(pool.submit(_read, block))
            if len(waiting) > 4 * execution.workers:
                yield from waiting.popleft().result()
        while waiting:
            yield from waiting.popleft().result()


_reader: Reader | None = None


def _open(wanted: Wanted) -> None:
    global _reader
    _reader = Reader(wanted)


def _read(pages: list[int]) -> list[PageFacts]:
    assert _reader is not None, "the pool's initializer opens it"
    return [_reader.read(page) for page in pages]
