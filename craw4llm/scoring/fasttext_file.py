"""Reads a fastText model file (.bin, .ftz) with NumPy: what the fast scoring routes need of it.

    parts = read_model(path)
    parts.projection("__label__hq")    float32[rows]: what each input row adds to the log-odds of the label

Layout: fastText::saveModel, Args::save, Dictionary::save, DenseMatrix::save, QuantMatrix::save and ProductQuantizer::save of
facebookresearch/fastText (file version 12; little-endian):

    int32 magic, version | 12 int32 and a double of arguments | dictionary | bool quantised, input matrix | bool quantised, output matrix

The matrix of a plain model is not read but mapped: 800 MB for two million rows of 100 numbers, shared by all processes through the page
cache. A quantised matrix is decoded row by row, with the arithmetic of ProductQuantizer::addcode (a float32 product per number).
"""

import mmap
import struct
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from craw4llm.errors import InputError
from craw4llm.scoring import kernels

_MAGIC, _VERSION = 793712314, 12
_SOFTMAX, _SUPERVISED = 3, 3  # fastText's enums loss_name and model_name
_ARGS = struct.Struct("<12i d")
_WORD = 0  # entry_type::word
_CENTROIDS = 256
_CHUNK_ROWS = 1 << 16


@dataclass(frozen=True, kw_only=True)
class Parts:
    """words: bytes of each word, in the order of ids. pruned: (hashed bucket -> row after the words) of a pruned dictionary, else None.
    output: float32[labels, dim]. rows: of the input matrix."""

    path: Path
    dim: int
    word_ngrams: int
    loss: int
    buckets: int
    subwords: bool
    words: list[bytes]
    labels: list[str]
    pruned: NDArray[np.int32] | None
    rows: int
    output: NDArray[np.float32]
    dense_at: int | None
    quantised: "Quantised | None"

    def unsupported(self) -> str | None:
        """Why the fast routes cannot score with this model; None if they can."""
        if len(self.labels) != 2:
            return f"it has {len(self.labels)} labels"
        if self.loss != _SOFTMAX:
            return "its loss is not softmax"
        if self.subwords:
            return "it reads parts of words (maxn > 0)"
        if self.word_ngrams > 1 and self.buckets < 1:
            return "it has word n-grams without buckets"
        return None

    def matrix(self) -> NDArray[np.float32]:
        """float32[rows, dim]: the input matrix; mapped from the file, or decoded into memory where it is quantised."""
        if self.quantised is not None:
            return self.quantised.decode(0, self.rows)
        assert self.dense_at is not None
        return np.asarray(np.memmap(self.path, dtype=np.float32, mode="r", offset=self.dense_at, shape=(self.rows, self.dim)))

    def projection(self, label: str) -> NDArray[np.float32]:
        """float32[rows]: row . (output[label] - output[other]), summed in float64; its mean over a text's rows is the log-odds."""
        chosen = self.labels.index(label)
        direction = self.output[chosen].astype(np.float64) - self.output[1 - chosen].astype(np.float64)
        result = np.empty(self.rows, dtype=np.float32)
        dense = self.matrix() if self.quantised is None else None
        for start in range(0, self.rows, _CHUNK_ROWS):
            stop = min(start + _CHUNK_ROWS, self.rows)
            part = dense[start:stop] if dense is not None else self.quantised.decode(start, stop)  # type: ignore[union-attr]
            kernels.dot_rows(part, direction, result[start:stop])
        return result


@dataclass(frozen=True, kw_only=True)
class Quantised:
    """A product-quantised matrix. codes uint8[rows, parts]; centroids float32; norms float32[rows] or None."""

    dim: int
    width: int
    last_width: int
    codes: NDArray[np.uint8]
    centroids: NDArray[np.float32]
    norms: NDArray[np.float32] | None

    def decode(self, start: int, stop: int) -> NDArray[np.float32]:
        """float32[stop - start, dim]."""
        rows = np.empty((stop - start, self.dim), dtype=np.float32)
        parts = self.codes.shape[1]
        for part in range(parts):
            width = self.last_width if part == parts - 1 else self.width
            at = part * _CENTROIDS * self.width
            table = self.centroids[at : at + _CENTROIDS * width].reshape(_CENTROIDS, width)
            rows[:, part * self.width : part * self.width + width] = table[self.codes[start:stop, part]]
        if self.norms is not None:
            rows *= self.norms[start:stop, None]
        return rows


def read_model(path: Path) -> Parts:
    """The parts of a supervised model file. Raises InputError for a file of another kind or that ends too early."""
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as stream:
            return _read(path, stream)
    except (struct.error, ValueError, EOFError) as error:
        raise InputError(f"scorer model: {path} cannot be read as a fastText model file of version {_VERSION}: {error}") from error


def _read(path: Path, stream: mmap.mmap) -> Parts:
    magic, version = _unpack(stream, "<2i")
    if (magic, version) != (_MAGIC, _VERSION):
        raise ValueError(f"it begins with {magic}, {version}; expected {_MAGIC}, {_VERSION}")
    dim, _, _, _, _, ngrams, loss, model, buckets, _, maxn, _, _ = _ARGS.unpack(_exactly(stream, _ARGS.size))
    if model != _SUPERVISED:
        raise ValueError("it holds word vectors, no classifier")
    size, n_words, _, _, n_pruned = _unpack(stream, "<3i2q")
    words: list[bytes] = []
    labels: list[str] = []
    for _ in range(size):
        word = _until_zero(stream)
        _, kind = _unpack(stream, "<qb")
        if kind == _WORD:
            words.append(word)
        else:
            labels.append(word.decode("utf-8", "replace"))
    if len(words) != n_words:
        raise ValueError(f"it holds {len(words)} words and says {n_words}")
    pruned = None
    if n_pruned >= 0:
        pairs = np.frombuffer(_exactly(stream, 8 * n_pruned), "<i4").reshape(-1, 2)
        pruned = np.full(max(buckets, 1), -1, dtype=np.int32)
        pruned[pairs[:, 0]] = pairs[:, 1]
    dense_at, quantised, rows = None, None, 0
    if _unpack(stream, "<?")[0]:
        quantised = _quantised(stream)
        rows = len(quantised.codes)
    else:
        rows, columns = _unpack(stream, "<2q")
        dense_at = stream.tell()
        if dense_at + 4 * rows * columns > len(stream):
            raise EOFError(f"it ends within the matrix of {rows} rows")
        stream.seek(4 * rows * columns, 1)
    if _unpack(stream, "<?")[0]:
        output_codes = _quantised(stream)
        output = output_codes.decode(0, len(output_codes.codes))
    else:
        out_rows, columns = _unpack(stream, "<2q")
        output = np.frombuffer(_exactly(stream, 4 * out_rows * columns), "<f4").reshape(out_rows, columns).astype(np.float32)
    return Parts(
        path=path,
        dim=dim,
        word_ngrams=ngrams,
        loss=loss,
        buckets=buckets,
        subwords=maxn > 0,
        words=words,
        labels=labels,
        pruned=pruned,
        rows=rows,
        output=output,
        dense_at=dense_at,
        quantised=quantised,
    )


def _quantised(stream: mmap.mmap) -> Quantised:
    with_norms, rows, columns, n_codes = _unpack(stream, "<?2qi")
    codes = np.frombuffer(_exactly(stream, n_codes), np.uint8).reshape(rows, -1)
    width, last_width, centroids = _quantiser(stream)
    norms = None
    if with_norms:
        norm_codes = np.frombuffer(_exactly(stream, rows), np.uint8)
        _, _, norm_table = _quantiser(stream)
        norms = norm_table[norm_codes]
    return Quantised(dim=columns, width=width, last_width=last_width, codes=codes, centroids=centroids, norms=norms)


def _quantiser(stream: mmap.mmap) -> tuple[int, int, NDArray[np.float32]]:
    dim, _, width, last_width = _unpack(stream, "<4i")
    return width, last_width, np.frombuffer(_exactly(stream, 4 * dim * _CENTROIDS), "<f4").astype(np.float32)


def _unpack(stream: mmap.mmap, layout: str) -> tuple[int, ...]:
    return struct.unpack(layout, _exactly(stream, struct.calcsize(layout)))


def _exactly(stream: mmap.mmap, count: int) -> bytes:
    data = stream.read(count)
    if len(data) != count:
        raise EOFError(f"it ends after {len(data)} of {count} bytes that should follow")
    return data


def _until_zero(stream: mmap.mmap) -> bytes:
    start = stream.tell()
    end = stream.find(b"\0", start)
    if end < 0:
        raise EOFError("it ends within the dictionary")
    stream.seek(end + 1)
    return stream[start:end]
