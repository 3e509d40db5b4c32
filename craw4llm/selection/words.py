"""Texts as words, and runs of words as 64-bit hashes: the common ground of near-copies and of overlap with evaluation items.

    grams("The cat sat on the mat.", 5)    -> uint64[2]: "the cat sat on the", "cat sat on the mat"

A word is a run of letters, digits and underscores in lower case, so case, punctuation and white space make no difference. Two different
runs of words share a hash with probability 2^-64.
"""

import re
from functools import lru_cache

import numpy as np
import xxhash
from numpy.typing import NDArray

_WORD = re.compile(r"\w+")
_FACTOR = np.uint64(0x9E37_79B9_7F4A_7C15)  # odd: no word's bits are lost


def words(text: str) -> list[str]:
    """The words of a text."""
    return _WORD.findall(text.lower())


def grams(text: str, n: int) -> NDArray[np.uint64]:
    """uint64: hashes of all runs of `n` words, in order, repeats kept; none for a text of fewer words."""
    hashes = np.array([_hash(word) for word in words(text)], dtype=np.uint64)
    count = len(hashes) - n + 1
    if count <= 0:
        return np.empty(0, dtype=np.uint64)
    out = np.zeros(count, dtype=np.uint64)
    for k in range(n):
        out = _mixed(out * _FACTOR + hashes[k : k + count])
    return out


def text_hash(text: str) -> bytes:
    """16 bytes: equal for texts that differ in case and white space only."""
    return xxhash.xxh3_128_digest(" ".join(text.casefold().split()).encode())


@lru_cache(maxsize=1 << 18)
def _hash(word: str) -> int:
    return xxhash.xxh3_64_intdigest(word.encode())


def _mixed(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """SplitMix64's finaliser (source: craw4llm.tokens.packing)."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58_476D_1CE4_E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D0_49BB_1331_11EB)
    return x ^ (x >> np.uint64(31))
