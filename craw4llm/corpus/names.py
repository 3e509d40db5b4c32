"""Names of hosts and domains by the tens of millions: Arrow strings, never Python's objects, and numbers for them.

    names = Names(pa.array(["a.example", "b.example"]))
    names[1]                     -> "b.example"
    names.ids(pa.array([...]))   -> int32, -1 for names that are not there
    first_seen(arrays)           -> large_string: the distinct values of many arrays, in the order of their first appearance

A name takes its bytes, 8 for its offset, and, once numbers are looked up, 12 for a hash and its place. Lookups go by 64-bit hashes; that no
two of the names share one is checked when the table is made (another seed is taken where two do).
"""

from collections.abc import Iterable, Iterator
from functools import cached_property

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from craw4llm.errors import StageError

STEP = 1 << 20  # names that are Python's strings at a time
_MERGE_FROM = 256  # arrays that wait until their repeats are dropped
_SEEDS = 8


class Names:
    """A sequence of different names. array: string or large_string, without nulls."""

    def __init__(self, array: pa.Array) -> None:
        self.array = array.cast(pa.large_string())

    def __len__(self) -> int:
        return len(self.array)

    def __getitem__(self, k: int) -> str:
        return str(self.array[int(k)].as_py())

    def __iter__(self) -> Iterator[str]:
        for start in range(0, len(self.array), STEP):
            yield from self.array.slice(start, STEP).to_pylist()

    def take(self, ids: NDArray[np.integer]) -> list[str]:
        return list(self.array.take(pa.array(ids)).to_pylist())

    def ids(self, wanted: pa.Array) -> NDArray[np.int32]:
        """int32[len(wanted)]: the place of each name, -1 for one that is not there."""
        import pyarrow.compute as pc  # not with the module: most crawls over finished stages need none of it

        seed, hashes, places = self._table
        found = np.full(len(wanted), -1, dtype=np.int32)
        if not len(hashes):
            return found
        hashed = _hashes(wanted, seed)
        at = np.minimum(np.searchsorted(hashes, hashed), len(hashes) - 1)
        known = hashes[at] == hashed
        found[known] = places[at[known]]
        # A name that is not there may share a hash with one that is.
        rows = np.flatnonzero(known)
        same = pc.equal(self.array.take(pa.array(found[rows])), wanted.take(pa.array(rows)).cast(pa.large_string()))
        found[rows[~same.to_numpy(zero_copy_only=False)]] = -1
        return found

    @cached_property
    def _table(self) -> tuple[int, NDArray[np.uint64], NDArray[np.int32]]:
        """(seed, hashes ascending, the names' places)."""
        for seed in range(_SEEDS):
            hashes = _hashes(self.array, seed)
            order = np.argsort(hashes)
            hashes = hashes[order]
            if not (hashes[1:] == hashes[:-1]).any():
                return seed, hashes, order.astype(np.int32)
        raise StageError(f"corpus: two of {len(self.array):,} names share a hash for each of {_SEEDS} seeds; are they all different?")


def first_seen(arrays: Iterable[pa.Array]) -> pa.Array:
    """large_string: the distinct values of the arrays, in the order of their first appearance; nulls are left out."""
    import pyarrow.compute as pc  # not with the module: most crawls over finished stages need none of it

    waiting: list[pa.Array] = [pa.array([], pa.large_string())]
    for array in arrays:
        waiting.append(pc.unique(array).cast(pa.large_string()).drop_null())
        if len(waiting) > _MERGE_FROM:
            waiting = [pc.unique(pa.concat_arrays(waiting))]
    return pc.unique(pa.concat_arrays(waiting))


def ascending(names: pa.Array) -> pa.Array:
    """The names in the order of their UTF-8 bytes."""
    import pyarrow.compute as pc  # not with the module: most crawls over finished stages need none of it

    return names.take(pc.sort_indices(names))


def _hashes(names: pa.Array, seed: int) -> NDArray[np.uint64]:
    import xxhash

    found = np.empty(len(names), dtype=np.uint64)
    for start in range(0, len(names), STEP):
        some = names.slice(start, STEP).to_pylist()
        found[start : start + len(some)] = [xxhash.xxh3_64_intdigest(name, seed) for name in some]
    return found
