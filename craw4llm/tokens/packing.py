"""Documents packed into samples of equal length, and seeded orders of them.

    stream  = doc 0, end-of-text, doc 1, end-of-text, ...
    samples = the stream cut every `sample_tokens` tokens, without overlap; the last, partial one is dropped or filled up

The stream lies in files (one, or a part after the other), so memory does not grow with it. Where a part ends changes nothing: its
remainder goes into the sample that the next part goes on with. Orders are sorts by a hash of (seed, position): equal on every
machine and for every version of every library.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from craw4llm.errors import ArtifactError

LastSample = Literal["drop", "pad"]
Tokens = NDArray[np.uint16] | NDArray[np.int32]


def token_dtype(vocab_size: int) -> np.dtype[Any]:
    """uint16 where all ids fit (up to 65,536 of them), else int32."""
    return np.dtype(np.uint16 if vocab_size <= 65_536 else np.int32)


def as_tokens(ids: NDArray[Any], dtype: np.dtype[Any]) -> Tokens:
    """`ids` as `dtype`; ArtifactError for an id that it cannot hold, which would come back as another one."""
    if len(ids) and int(ids.max()) > np.iinfo(dtype).max:
        raise ArtifactError(
            f"tokenize: the id {int(ids.max())} does not fit into {dtype.name}; the tokenizer's vocabulary is larger than its "
            "tokenizer_meta.json says; build the tokenizer again"
        )
    return ids.astype(dtype)


@dataclass(frozen=True)
class Packed:
    """The packed stream.

    samples: [n_samples, sample_tokens], memory-mapped. n_tokens: int64[documents], end-of-text included, in packing order.
    tokens = samples.size + dropped_tokens - padding_tokens.
    """

    samples: Tokens
    n_tokens: NDArray[np.int64]
    tokens: int
    dropped_tokens: int
    padding_tokens: int


def pack(
    documents: Iterable[NDArray[Any]],
    *,
    end_of_text_id: int,
    sample_tokens: int,
    last_sample: LastSample,
    dtype: np.dtype[Any],
    scratch: Path,
) -> Packed:
    """Writes the stream of `documents` (ids without end-of-text) to the file `scratch` and cuts it into samples."""
    lengths = []
    end = np.array([end_of_text_id], dtype=dtype)
    with scratch.open("wb") as stream:
        for ids in documents:
            stream.write(as_tokens(ids, dtype).tobytes())
            stream.write(end.tobytes())
            lengths.append(len(ids) + 1)
        tokens = sum(lengths)
        count, dropped, padding = cut(tokens, sample_tokens, last_sample)
        stream.write(np.full(padding, end_of_text_id, dtype=dtype).tobytes())
    shape = (count, sample_tokens)
    samples: Tokens = np.memmap(scratch, dtype=dtype, mode="r", shape=shape) if count else np.empty(shape, dtype=dtype)
    return Packed(samples, np.array(lengths, dtype=np.int64), tokens, dropped, padding)


def cut(tokens: int, sample_tokens: int, last_sample: LastSample) -> tuple[int, int, int]:
    """(samples, dropped tokens, padding tokens) of a stream of `tokens` tokens."""
    left = tokens % sample_tokens
    padding = sample_tokens - left if left and last_sample == "pad" else 0
    dropped = left if last_sample == "drop" else 0
    return (tokens - dropped + padding) // sample_tokens, dropped, padding


class Joined:
    """The samples of a stream that lies in several files, one after the other; reads like an array [n_samples, sample_tokens].

    files: (path, tokens in it), in the order of the stream. The last sample is filled up with `end_of_text_id` where it is padded.
    """

    def __init__(
        self,
        files: Sequence[tuple[Path, int]],
        *,
        end_of_text_id: int,
        sample_tokens: int,
        last_sample: LastSample,
        dtype: np.dtype[Any],
    ) -> None:
        files = [(path, n) for path, n in files if n]
        self.dtype = dtype
        self.tokens = sum(n for _, n in files)
        count, self.dropped_tokens, self.padding_tokens = cut(self.tokens, sample_tokens, last_sample)
        self.shape = (count, sample_tokens)
        self._arrays = [np.memmap(path, dtype=dtype, mode="r", shape=(n,)) for path, n in files]
        self._ends = np.cumsum([n for _, n in files], dtype=np.int64)
        self._fill = end_of_text_id

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, sample: int) -> Tokens:
        """Tokens [sample_tokens] of one sample."""
        width = self.shape[1]
        start, stop = sample * width, min((sample + 1) * width, self.tokens)
        out: Tokens = np.full(width, self._fill, dtype=self.dtype)
        file = int(np.searchsorted(self._ends, start, side="right"))
        done = 0
        while start < stop:
            array = self._arrays[file]
            offset = start - (int(self._ends[file]) - len(array))
            taken = array[offset : offset + stop - start]
            out[done : done + len(taken)] = taken
            done, start, file = done + len(taken), start + len(taken), file + 1
        return out


def seeded_order(count: int, *seeds: int) -> NDArray[np.int64]:
    """A permutation of 0 .. count - 1 that depends on the seeds alone: positions sorted by SplitMix64 of (seeds, position).

    SplitMix64: Steele, Lea, Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014.
    """
    state = np.zeros(1, dtype=np.uint64)
    for seed in seeds:
        state = _mix(state ^ np.uint64(seed & 0xFFFF_FFFF_FFFF_FFFF))
    keys = _mix(state + np.arange(count, dtype=np.uint64) * np.uint64(0x9E37_79B9_7F4A_7C15))
    return np.argsort(keys, kind="stable").astype(np.int64)


def _mix(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    x = x + np.uint64(0x9E37_79B9_7F4A_7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58_476D_1CE4_E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D0_49BB_1331_11EB)
    return x ^ (x >> np.uint64(31))
