"""The memo of computed scores, and `PageScores`, which computes only what nobody has computed yet.

    with PageScores(corpus, scorer, execution) as page_scores:
        page_scores.scores([17, 4])     -> float32[2], NaN where a page has no score

Scores are a function of the page, not a stage in the way: crawls, selections and the score stage share one memo, in execution's
folder, outside all artifacts. It can be deleted at any time; a cold memo costs time and changes no number.

    <memo>/<corpus fingerprint>-<scorer fingerprint>/<host>-<pid>-<random>.scores

A segment has one writer and is only appended to, one checksummed block a write:

    b"C4SB" | uint32 n | uint32 page[n] | float32 score[n] | uint8 reason[n] | 8 bytes BLAKE2b of all before it       (little-endian)

A writer that is killed leaves at most one torn block at the end of its own segment. A reader takes the blocks up to the first that is
not whole, and counts the bytes after it as damaged. Two writers that computed the same page wrote the same numbers.
"""

import hashlib
import logging
import os
import struct
import threading
import zlib
from collections.abc import Iterator
from concurrent.futures import BrokenExecutor, Executor, ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from functools import cached_property
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO

import numpy as np
import pyarrow as pa
from numpy.typing import ArrayLike, NDArray

from craw4llm.artifact import Artifact
from craw4llm.corpus.npy import distinct
from craw4llm.corpus.reader import Corpus
from craw4llm.errors import ArtifactError, InputError, StageError
from craw4llm.execution import Execution, process_name
from craw4llm.scoring.ensemble import EnsembleScorer
from craw4llm.scoring.mapped import zeros
from craw4llm.scoring.scorer import NOT_READ, Reasons, Scorer, Scores, open_scorer

log = logging.getLogger(__name__)

MAGIC = b"C4SB"
_HEAD = struct.Struct("<4sI")
_ROW_BYTES = 4 + 4 + 1
_CHECK_BYTES = 8
_BLOCK_ROWS = 1 << 16
_TASK_PAGES = 64  # tasks of at least 50 pages: below, passing them costs more than scoring them
MAX_UNREADABLE = 0.01  # share of the pages asked for whose text cannot be read, above which a run stops...
_FEW_UNREADABLE = 10  # ...but not for so few
# What reading a text may raise: the disk, damaged compression, damaged UTF-8, a source that is gone.
_CANNOT_READ = (OSError, EOFError, UnicodeError, zlib.error, pa.ArrowException, InputError)
_FREE = nullcontext()
_POOL_AFTER_PAGES = 4000  # starting workers takes as long as scoring a few thousand pages here


class Memo:
    """One memo folder, opened for reading what is there and for appending to a segment of its own.

    damaged_bytes: bytes of segments that could not be read as whole blocks, and were ignored.
    """

    def __init__(self, folder: Path, n_pages: int) -> None:
        self.folder = folder
        self.damaged_bytes = 0
        # state is the reason + 1, and 0 for a page that nobody has scored
        self._scores = zeros(n_pages, np.float32, folder)
        self._state = zeros(n_pages, np.uint8, folder)
        self._stream: BinaryIO | None = None
        for segment in sorted(folder.glob("*.scores")) if folder.is_dir() else []:
            self._read(segment)
        if self.damaged_bytes:
            log.warning("score memo %s: %d bytes of torn or damaged blocks ignored", folder, self.damaged_bytes)

    def missing(self, pages: NDArray[np.int64]) -> NDArray[np.int64]:
        """The distinct pages that have no entry, ascending."""
        state = self._state.take(pages)
        return pages[:0] if state.all() else distinct(pages[state == 0])

    def get(self, pages: NDArray[np.int64]) -> tuple[Scores, Reasons]:
        """float32 scores and uint8 reasons of pages that have an entry."""
        state = self._state.take(pages)
        assert state.all(), "asked for a score that was not computed"
        state -= np.uint8(1)
        return self._scores.take(pages), state

    def add(self, pages: NDArray[np.int64], scores: Scores, reasons: Reasons) -> None:
        """Keeps new entries, here and on disk."""
        for start in range(0, len(pages), _BLOCK_ROWS):
            rows = slice(start, start + _BLOCK_ROWS)
            self._append(encode(pages[rows], scores[rows], reasons[rows]))
        self.hold(pages, scores, reasons)

    def hold(self, pages: NDArray[np.int64], scores: Scores, reasons: Reasons) -> None:
        """Keeps entries here, but not on disk."""
        self._scores[pages] = scores
        self._state[pages] = reasons + np.uint8(1)

    def close(self) -> None:
        if self._stream is not None:
            self._stream.close()
            self._stream = None

    def _append(self, block: bytes) -> None:
        if self._stream is None:
            self.folder.mkdir(parents=True, exist_ok=True)
            self._stream = (self.folder / f"{process_name()}-{os.urandom(4).hex()}.scores").open("xb", buffering=0)
        done = self._stream.write(block)
        while done < len(block):
            done += self._stream.write(block[done:])

    def _read(self, segment: Path) -> None:
        try:
            data = segment.read_bytes()
        except FileNotFoundError:  # deleted meanwhile
            return
        end = 0
        for pages, scores, reasons, end in blocks(data):
            if len(pages) and int(pages.max()) >= len(self._state):
                end = 0
                break
            self._scores[pages] = scores
            self._state[pages] = reasons + np.uint8(1)
        self.damaged_bytes += len(data) - end


def encode(pages: NDArray[np.int64], scores: Scores, reasons: Reasons) -> bytes:
    """One block of the memo."""
    body = b"".join(
        [
            _HEAD.pack(MAGIC, len(pages)),
            pages.astype("<u4").tobytes(),
            scores.astype("<f4").tobytes(),
            reasons.astype(np.uint8).tobytes(),
        ]
    )
    return body + _checksum(body)


def blocks(data: bytes) -> Iterator[tuple[NDArray[np.uint32], Scores, Reasons, int]]:
    """(pages, scores, reasons, where the block ends) of the whole blocks at the beginning of `data`."""
    start = 0
    while start + _HEAD.size <= len(data):
        magic, count = _HEAD.unpack_from(data, start)
        body_end = start + _HEAD.size + count * _ROW_BYTES
        end = body_end + _CHECK_BYTES
        if magic != MAGIC or end > len(data) or data[body_end:end] != _checksum(data[start:body_end]):
            return
        at = start + _HEAD.size
        yield (
            np.frombuffer(data, "<u4", count, at).astype(np.uint32),
            np.frombuffer(data, "<f4", count, at + 4 * count).astype(np.float32),
            np.frombuffer(data, np.uint8, count, at + 8 * count),
            end,
        )
        start = end


def _checksum(body: bytes) -> bytes:
    return hashlib.blake2b(body, digest_size=_CHECK_BYTES).digest()


class PageScores:
    """Scores of a corpus' pages by a scorer: read from the memo, computed where it has none. A context manager.

    With several workers, pages are scored in processes that open corpus and scorer once and stay; they are started when
    `pool_after` pages had to be scored. A scorer whose kernels let go of the interpreter (`threads`) is shared by threads of this process.
    The numbers are the same for any number of workers. The scorer is opened when the first page has to be scored.
    computed: pages scored here, so not found in the memo. unreadable: of them, pages whose text could not be read: NOT_READ, held for this
    run and never written to the memo. StageError where they are more than MAX_UNREADABLE of the pages asked for.
    """

    def __init__(self, corpus: Artifact, scorer: Artifact, execution: Execution, *, pool_after: int | None = None) -> None:
        self._artifacts = (corpus, scorer)
        self._device = execution.device
        self._execution_workers = execution.workers
        self._pool: Executor | None = None
        self._threads: ThreadPoolExecutor | None = None
        # Reading is the interpreter's work, and two threads at it hand its lock to and fro at each record: a tenth of the processor time
        # of a crawl with two workers. So half of the threads read while the others score.
        self._reading = threading.Semaphore(max(1, execution.workers // 2))
        self._pool_after = _POOL_AFTER_PAGES if pool_after is None else pool_after
        self.computed = self.unreadable = self._asked = 0
        self._memo = Memo(execution.memo / f"{corpus.fingerprint}-{scorer.fingerprint}", int(corpus.count("pages")))

    @cached_property
    def _corpus(self) -> Corpus:
        return Corpus(self._artifacts[0])

    @cached_property
    def _scorer(self) -> Scorer:
        scorer = open_scorer(self._artifacts[1], self._device)
        check_corpus(scorer, self._artifacts[0])
        return scorer

    @cached_property
    def _workers(self) -> int:
        # an encoder uses all processors, or the device, from one process
        return self._execution_workers if reads_text(self._scorer) and not uses_device(self._scorer) else 1

    def scores(self, pages: ArrayLike) -> Scores:
        """float32[len(pages)], in the order given; NaN where a page has no score."""
        return self.with_reasons(pages)[0]

    def with_reasons(self, pages: ArrayLike) -> tuple[Scores, Reasons]:
        """Scores, and for each the reason why there is none (0: there is one)."""
        ids = np.asarray(pages, dtype=np.int64)
        self._asked += len(ids)
        missing = self._memo.missing(ids)
        if len(missing):
            self._compute(missing)
        return self._memo.get(ids)

    @property
    def damaged_bytes(self) -> int:
        """Bytes of the memo that could not be read."""
        return self._memo.damaged_bytes

    def close(self) -> None:
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)
            self._pool = None
        if self._threads is not None:
            self._threads.shutdown(cancel_futures=True)
            self._threads = None
        self._memo.close()

    def __enter__(self) -> "PageScores":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def _compute(self, pages: NDArray[np.int64]) -> None:
        self.computed += len(pages)
        threads = self._workers > 1 and getattr(self._scorer, "threads", False)
        if threads and self._threads is None:
            self._threads = ThreadPoolExecutor(self._workers)
        if not threads and self._pool is None and self._workers > 1 and self.computed >= self._pool_after and len(pages) >= 2 * _TASK_PAGES:
            from craw4llm.processes import new_pool

            self._pool = new_pool(self._workers, initializer=_open_in_worker, initargs=self._artifacts)
        # Blocks of a few seconds' work, so that little is lost when this process is killed.
        step = 2048 * self._workers
        for start in range(0, len(pages), step):
            part = pages[start : start + step]
            if (self._pool is None and self._threads is None) or len(part) < 2 * _TASK_PAGES:
                scores, reasons = score_pages(self._corpus, self._scorer, part)
            else:
                size = max(_TASK_PAGES, -(-len(part) // (8 * self._workers)))
                tasks = [part[i : i + size] for i in range(0, len(part), size)]
                try:
                    if self._threads is not None:
                        results = list(self._threads.map(self._score_here, tasks))
                    else:
                        assert self._pool is not None
                        results = list(self._pool.map(_score_in_worker, tasks))
                except BrokenExecutor as error:
                    raise StageError(
                        "a scoring worker ended before its time (out of memory?); run again with fewer workers: "
                        "what was scored so far is kept"
                    ) from error
                scores = np.concatenate([s for s, _ in results])
                reasons = np.concatenate([r for _, r in results])
            read = reasons != NOT_READ
            self._memo.add(part[read], scores[read], reasons[read])
            if not read.all():
                self._unreadable(part[~read])

    def _score_here(self, pages: NDArray[np.int64]) -> tuple[Scores, Reasons]:
        return score_pages(self._corpus, self._scorer, pages, self._reading)

    def _unreadable(self, pages: NDArray[np.int64]) -> None:
        self._memo.hold(pages, np.full(len(pages), np.nan, dtype=np.float32), np.full(len(pages), NOT_READ, dtype=np.uint8))
        self.unreadable += len(pages)
        if self.unreadable > max(_FEW_UNREADABLE, MAX_UNREADABLE * self._asked):
            first = int(pages[0])
            raise StageError(
                f"{self.unreadable:,} of {self._asked:,} pages could not be read (one is page {first}, {self._corpus.url(first)}); at most "
                f"{MAX_UNREADABLE:.0%} are tolerated. `craw4llm verify` tells whether the corpus is damaged; see to its files and run again"
            )


def score_pages(
    corpus: Corpus, scorer: Scorer, pages: NDArray[np.int64], reading: AbstractContextManager[Any] = _FREE
) -> tuple[Scores, Reasons]:
    """Scores and reasons of pages, computed here. Only what the scorer reads is read. reading: entered while texts are read."""
    if isinstance(scorer, EnsembleScorer):
        return scorer.combine([score_pages(corpus, member, pages, reading) for member in scorer.members])
    if scorer.reads == "url":
        return scorer.score((), corpus.urls.take(pages).to_pylist())
    if scorer.reads == "page":
        return scorer.score((), (), pages.tolist())
    with reading:
        texts, unread = read_texts(corpus, pages)
    scores, reasons = scorer.score(texts, ())
    scores[unread], reasons[unread] = np.nan, NOT_READ
    return scores, reasons


def read_texts(corpus: Corpus, pages: NDArray[np.int64]) -> tuple[list[str], NDArray[np.int64]]:
    """(texts, rows that cannot be read): "" stands for the texts of those."""
    try:
        return corpus.texts(pages), np.empty(0, dtype=np.int64)
    except _CANNOT_READ:
        texts, unread = [], []
    for row, page in enumerate(pages.tolist()):
        try:
            texts += corpus.texts([page])
        except _CANNOT_READ as error:
            log.warning("page %d (%s) cannot be read: %s", page, corpus.url(page), error)
            texts.append("")
            unread.append(row)
    return texts, np.array(unread, dtype=np.int64)


def reads_text(scorer: Scorer) -> bool:
    """Whether the scorer, or a member of it, reads texts."""
    return any(map(reads_text, scorer.members)) if isinstance(scorer, EnsembleScorer) else scorer.reads == "text"


def uses_device(scorer: Scorer) -> bool:
    return any(map(uses_device, scorer.members)) if isinstance(scorer, EnsembleScorer) else hasattr(scorer, "device")


def check_corpus(scorer: Scorer, corpus: Artifact) -> None:
    """Raises ArtifactError for a scorer of page ids that was made from another corpus."""
    for member in scorer.members if isinstance(scorer, EnsembleScorer) else ():
        check_corpus(member, corpus)
    made_from = getattr(scorer, "corpus_fingerprint", corpus.fingerprint)
    if made_from != corpus.fingerprint:
        raise ArtifactError(
            f"the scorer holds numbers for the pages of the corpus {made_from}, but is used with the corpus {corpus.fingerprint}; "
            "give both the same corpus"
        )


_opened: tuple[Corpus, Scorer] | None = None


def _open_in_worker(corpus: Artifact, scorer: Artifact) -> None:
    global _opened
    _opened = (Corpus(corpus), open_scorer(scorer))


def _score_in_worker(pages: NDArray[np.int64]) -> tuple[Scores, Reasons]:
    assert _opened is not None
    return score_pages(*_opened, pages)
