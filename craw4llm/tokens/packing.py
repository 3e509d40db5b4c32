"""Documents packed into samples of equal length, and seeded orders of them.

    stream  = doc 0, end-of-text, doc 1, end-of-text, ...
    samples = the stream cut every `sample_tokens` tokens, without overlap; the last, partial one is dropped or filled up

The stream lies in a scratch file, so memory does not grow with it. Orders are sorts by a hash of (seed, position): equal on every
machine and for every version of every library.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

Tokens = NDArray[np.uint16] | NDArray[np.uint32]


def token_dtype(vocab_size: int) -> np.dtype[Any]:
    """uint16 where all ids fit (up to 65,536 of them), else uint32."""
    return np.dtype(np.uint16 if vocab_size <= 65_536 else np.uint32)


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
    last_sample: Literal["drop", "pad"],
    dtype: np.dtype[Any],
    scratch: Path,
) -> Packed:
    """Writes the stream of `documents` (ids without end-of-text) to the file `scratch` and cuts it into samples."""
    lengths = []
    end = np.array([end_of_text_id], dtype=dtype)
    with scratch.open("wb") as stream:
        for ids in documents:
            stream.write(ids.astype(dtype).tobytes())
            stream.write(end.tobytes())
            lengths.append(len(ids) + 1)
        tokens = sum(lengths)
        left = tokens % sample_tokens
        padding = sample_tokens - left if left and last_sample == "pad" else 0
        stream.write(np.full(padding, end_of_text_id, dtype=dtype).tobytes())
    dropped = left if last_sample == "drop" else 0
    count = (tokens - dropped + padding) // sample_tokens
    shape = (count, sample_tokens)
    samples: Tokens = np.memmap(scratch, dtype=dtype, mode="r", shape=shape) if count else np.empty(shape, dtype=dtype)
    return Packed(samples, np.array(lengths, dtype=np.int64), tokens, dropped, padding)


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
