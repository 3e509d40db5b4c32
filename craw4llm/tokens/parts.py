"""Parts of a tokenize stage: ranges of pages whose streams are written independently, in any process, and laid end to end.

    done = encode_parts(work, pages, n_bytes, execution)      -> [Part, ...] in the order of the stream

A part is two files: the stream of its pages, and `.npz` with the tokens and bytes of each document, the range and a hash of the stream.
Both are written under names of their own and renamed into place, the second last; a stream without it is nothing, and one that does not
fit it is written again. So `kill -9` at any moment costs the parts that were being written, and no others, and several hosts may write
into one folder: what they write for a part is the same.
"""

import tempfile
import zipfile
from collections.abc import Iterator
from concurrent.futures import as_completed
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import numpy as np
import xxhash
from numpy.typing import NDArray

from craw4llm.artifact import Artifact
from craw4llm.corpus.reader import Corpus
from craw4llm.execution import Execution
from craw4llm.processes import worker_pool
from craw4llm.tokens.packing import as_tokens, token_dtype
from craw4llm.tokens.tokenizer import Tokenizer

FOLDER = "parts"
PART_BYTES = 1 << 24  # of text; about 4 seconds of one core


@dataclass(frozen=True)
class Work:
    """What every part is made from. cut_at: characters kept of a page, None: all. specials: as in `Tokenizer.document`."""

    corpus: Artifact
    tokenizer: Artifact
    folder: Path
    cut_at: int | None
    specials: bool


@dataclass(frozen=True)
class Part:
    """A finished part. n_tokens, n_bytes: int64, one per document, in order: tokens with end-of-text, bytes of the text encoded."""

    path: Path
    n_tokens: NDArray[np.int64]
    n_bytes: NDArray[np.int64]

    @property
    def tokens(self) -> int:
        return int(self.n_tokens.sum())


def ranges(n_bytes: NDArray[np.integer], part_bytes: int = PART_BYTES) -> list[tuple[int, int]]:
    """Consecutive ranges of documents, [start, stop), each of about `part_bytes` bytes of text and at least one document."""
    found, start, size = [], 0, 0
    for i, n in enumerate(n_bytes.tolist()):
        if i > start and size + n > part_bytes:
            found.append((start, i))
            start, size = i, 0
        size += n
    return [*found, (start, len(n_bytes))]


def encode_parts(
    work: Work,
    pages: NDArray[np.int64],
    n_bytes: NDArray[np.integer],
    execution: Execution,
    part_bytes: int = PART_BYTES,
    share: tuple[int, int] = (1, 1),
) -> list[Part]:
    """Encodes what is missing, in `execution.workers` processes, and returns all parts in order. n_bytes: of the pages' texts.

    share (i, n): only every n-th part, from the i-th (counted from 1) on, is looked for, encoded and returned.
    """
    work.folder.mkdir(parents=True, exist_ok=True)
    spans = dict(list(enumerate(ranges(n_bytes, part_bytes)))[share[0] - 1 :: share[1]])
    done: dict[int, Part] = {}
    for number, (start, stop) in spans.items():
        part = find(work, number, pages[start:stop])
        if part is not None:
            done[number] = part
    todo = [(number, pages[start:stop]) for number, (start, stop) in spans.items() if number not in done]
    with execution.progress("tokenize", total=sum(stop - start for start, stop in spans.values()), unit="page") as progress:
        progress.update(sum(len(part.n_tokens) for part in done.values()))
        if execution.workers <= 1 or len(todo) <= 1:
            corpus, tokenizer = Corpus(work.corpus), Tokenizer(work.tokenizer)
            for number, ids in todo:
                done[number] = encode(work, number, ids, corpus, tokenizer, execution.workers)
                progress.update(len(ids))
        else:
            with worker_pool(min(execution.workers, len(todo)), initializer=_open, initargs=(work,)) as pool:
                for future in as_completed([pool.submit(_encode, number, ids) for number, ids in todo]):
                    number, part = future.result()
                    done[number] = part
                    progress.update(len(part.n_tokens))
    return [done[number] for number in spans]


def encode(work: Work, number: int, pages: NDArray[np.int64], corpus: Corpus, tokenizer: Tokenizer, threads: int = 1) -> Part:
    """Writes one part. threads: for a very long document."""
    dtype = token_dtype(tokenizer.vocab_size)
    end = np.array([tokenizer.end_of_text_id], dtype=dtype).tobytes()
    n_tokens = np.zeros(len(pages), dtype=np.int64)
    n_bytes = np.zeros(len(pages), dtype=np.int64)
    path, record = _files(work, number)
    hashed = xxhash.xxh64()
    with _unfinished(work) as stream:
        for i, page in enumerate(pages.tolist()):
            text = corpus.text(page)[: work.cut_at]
            n_bytes[i] = len(text.encode())
            for ids in tokenizer.document(text, specials=work.specials, threads=threads):
                block = as_tokens(ids, dtype).tobytes()
                stream.write(block)
                hashed.update(block)
                n_tokens[i] += len(ids)
            stream.write(end)
            hashed.update(end)
            n_tokens[i] += 1
    Path(stream.name).replace(path)
    with _unfinished(work) as stream:
        np.savez(stream, pages=pages, n_tokens=n_tokens, n_bytes=n_bytes, xxh64=np.array(hashed.hexdigest()))
    Path(stream.name).replace(record)
    return Part(path, n_tokens, n_bytes)


def find(work: Work, number: int, pages: NDArray[np.int64]) -> Part | None:
    """The finished part of these pages, if it is there and whole."""
    path, record = _files(work, number)
    try:
        with np.load(record) as stored:
            part = Part(path, stored["n_tokens"], stored["n_bytes"])
            fits = np.array_equal(stored["pages"], pages) and str(stored["xxh64"]) == _hash(path)
    except (OSError, ValueError, KeyError, zipfile.BadZipFile):
        return None  # not finished, or damaged: it is written again
    return part if fits else None


def _files(work: Work, number: int) -> tuple[Path, Path]:
    return work.folder / f"{number:06}.stream", work.folder / f"{number:06}.npz"


def _unfinished(work: Work) -> IO[bytes]:
    """A new file that no other process writes; it goes with the folder if it is never renamed."""
    return tempfile.NamedTemporaryFile(dir=work.folder, suffix=".unfinished", delete=False)


def _hash(path: Path) -> str:
    hashed = xxhash.xxh64()
    for block in _blocks(path):
        hashed.update(block)
    return hashed.hexdigest()


def _blocks(path: Path) -> Iterator[bytes]:
    with path.open("rb") as stream:
        while block := stream.read(1 << 22):
            yield block


_opened: tuple[Work, Corpus, Tokenizer] | None = None


def _open(work: Work) -> None:
    global _opened
    _opened = work, Corpus(work.corpus), Tokenizer(work.tokenizer)


def _encode(number: int, pages: NDArray[np.int64]) -> tuple[int, Part]:
    assert _opened is not None, "the pool's initializer opens these"
    work, corpus, tokenizer = _opened
    return number, encode(work, number, pages, corpus, tokenizer)
