"""Seeded hashes of ids and URLs: draws that are the same on any machine and with any version of NumPy."""

import hashlib

import numpy as np
from numpy.typing import ArrayLike, NDArray


def hash_ids(seed: int, ids: ArrayLike) -> NDArray[np.uint64]:
    """uint64[len(ids)]: the output of SplitMix64 (Steele, Lea, Flood, OOPSLA 2014) for the stream `seed` at the position `id`."""
    with np.errstate(over="ignore"):
        start = _mix(np.array([seed & 0xFFFFFFFFFFFFFFFF], dtype=np.uint64))
        return _mix(start + np.asarray(ids, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15))


def uniform(seed: int, ids: ArrayLike) -> NDArray[np.float32]:
    """float32[len(ids)]: uniform in [0, 1), multiples of 2^-24 (what a float32 holds exactly)."""
    return (hash_ids(seed, ids) >> np.uint64(40)).astype(np.float32) * np.float32(2**-24)


def hash_bytes(data: bytes) -> int:
    """63 bits of BLAKE2b."""
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "little") >> 1


def hash_text(seed: int, text: str) -> bytes:
    """16 bytes: BLAKE2b of the seed and a text."""
    return hashlib.blake2b(f"{seed}\n{text}".encode(), digest_size=16).digest()


def _mix(z: NDArray[np.uint64]) -> NDArray[np.uint64]:
    z = z + np.uint64(0x9E3779B97F4A7C15)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))
