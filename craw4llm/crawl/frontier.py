"""The frontier: targets that wait to be crawled, popped by priority (highest first), then by place (smallest first).

    frontier.push(places, priorities)      adds targets, or moves those that wait already
    places, priorities = frontier.pop(150)

An entry is one uint64: the inverted order-preserving bits of the float32 priority, then the place. So ascending keys are the order of
popping, and ties break by place for free. A **place** is a target's position in the order of canonical URLs, pages and dead links
alike: target ids would tell pages from dead links, which nobody knows before the fetch.

Keys are kept as a few sorted runs of falling size (a log-structured merge): a push sorts what is new and merges runs of like size; a pop
takes the smallest of the runs' heads. Where priorities move, the newest key of each place is kept aside, and older entries are dropped
when they come up.

**Pruning.** Where only the first R of what waits can ever be popped (craw4llm.crawl.loop says when), `prune(R)` drops the rest: what is
held never exceeds about 1.5 R entries of 8 bytes. What is pushed later and comes after the last of those R is dropped at once: so many
come before it, and R only falls, by what is popped. `len` still counts all that wait.
"""

import numpy as np
from numpy.typing import ArrayLike, NDArray

Keys = NDArray[np.uint64]
Places = NDArray[np.uint32]
Priorities = NDArray[np.float32]

_LOW = np.uint64(0xFFFFFFFF)
_SHIFT = np.uint64(32)
_SIGN = np.uint32(0x80000000)
_MIN_PRUNED = 4096


def to_keys(places: ArrayLike, priorities: ArrayLike) -> Keys:
    """Keys whose ascending order is: priority descending (NaN last, after -inf), then place ascending. -0.0 ties with 0.0."""
    values = np.asarray(priorities, dtype=np.float32) + np.float32(0)  # -0.0 + 0.0 is 0.0
    bits = values.view(np.uint32)
    ordered = np.where(bits & _SIGN, ~bits, bits | _SIGN)
    ordered[np.isnan(values)] = 0
    return ((~ordered).astype(np.uint64) << _SHIFT) | np.asarray(places, dtype=np.uint64)


def from_keys(keys: Keys) -> tuple[Places, Priorities]:
    """The places and priorities of keys."""
    ordered = ~(keys >> _SHIFT).astype(np.uint32)
    bits = np.where(ordered & _SIGN, ordered & ~_SIGN, ~ordered).astype(np.uint32)
    values = bits.view(np.float32).copy()
    values[ordered == 0] = np.nan
    return (keys & _LOW).astype(np.uint32), values


class Frontier:
    """n_places: places are below it. moves: whether waiting targets may be pushed again with another priority."""

    def __init__(self, n_places: int, *, moves: bool) -> None:
        self._runs: list[Keys] = []
        self._waiting = 0
        self._held = 0  # keys in the runs
        self.pruned = False
        self._bound: np.float32 | None = None  # lower priorities can no more be popped
        # The newest key of each place; 0 for a place that does not wait (no key is 0: that would need the bits of a NaN).
        self._newest = np.zeros(n_places, dtype=np.uint64) if moves else None

    def __len__(self) -> int:
        """Targets that wait."""
        return self._waiting

    def push(self, places: ArrayLike, priorities: ArrayLike) -> None:
        """Adds distinct places. Without `moves` they must be new."""
        if self._newest is None:
            values, index = np.asarray(priorities, dtype=np.float32), np.asarray(places)
            self._waiting += len(values)
            if self._bound is not None:
                near = np.flatnonzero(values >= self._bound)
                values, index = values.take(near), index.take(near)
            keys = to_keys(index, values)
        else:
            keys = to_keys(places, priorities)
            index = np.asarray(places)
            before = self._newest[index]
            self._waiting += int(np.count_nonzero(before == 0))
            self._newest[index] = keys
            keys = keys[keys != before]  # an unchanged priority has its entry already
        if len(keys):
            self._runs.append(np.sort(keys))
            self._held += len(keys)
            self._merge()

    def prune(self, keep: int) -> None:
        """Keeps at least the first `keep` of what waits, and not many more."""
        assert self._newest is None, "a priority that moves may bring any target to the front"
        if self._held > keep + keep // 2 + _MIN_PRUNED:
            last = self._key(keep)
            cuts = [int(np.searchsorted(run, last, side="right")) for run in self._runs]
            self._runs = [run[:cut].copy() for run, cut in zip(self._runs, cuts, strict=True) if cut]
            self._held, self.pruned = sum(cuts), True
            bound = from_keys(np.array([last]))[1][0]
            self._bound = None if np.isnan(bound) else bound  # what has no priority comes last, in the order of places

    def pop(self, count: int) -> tuple[Places, Priorities]:
        """The first `count` waiting targets in order; fewer where fewer wait (or, once pruned, are held)."""
        taken: list[Keys] = []
        left = min(count, self._held if self._newest is None else self._waiting)
        while left:
            keys = self._take(left)
            if self._newest is not None:
                keys = self._current(keys)
                self._newest[keys & _LOW] = 0
            taken.append(keys)
            left -= len(keys)
        keys = np.concatenate(taken) if taken else np.empty(0, dtype=np.uint64)
        self._waiting -= len(keys)
        return from_keys(keys)

    def entries(self) -> tuple[Places, Priorities]:
        """All waiting targets in order; they stay. Not once pruned."""
        return from_keys(self._all())

    def keys(self) -> Keys:
        """uint64: the keys of all that wait, ascending. What `restore` takes."""
        return self._all()

    def restore(self, keys: Keys) -> None:
        """Replaces the content by what `keys` gave."""
        self._runs = [keys] if len(keys) else []
        self._waiting = self._held = len(keys)
        self.pruned, self._bound = False, None
        if self._newest is not None:
            self._newest[:] = 0
            self._newest[keys & _LOW] = keys

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        return 8 * self._held + (0 if self._newest is None else self._newest.nbytes)

    def _all(self) -> Keys:
        assert not self.pruned, "what was dropped is not known here"
        keys = np.sort(np.concatenate(self._runs)) if self._runs else np.empty(0, dtype=np.uint64)
        return keys if self._newest is None else self._current(keys)

    def _current(self, keys: Keys) -> Keys:
        """Of sorted keys, those that still stand: the newest of their place, each once (a priority may have moved there and back)."""
        assert self._newest is not None
        keys = keys[self._newest[keys & _LOW] == keys]
        return keys[np.concatenate([[True], keys[1:] != keys[:-1]])] if len(keys) else keys

    def _take(self, count: int) -> Keys:
        """Removes and returns the `count` smallest keys of all runs, outdated ones and all repeats of the last one included."""
        heads = np.concatenate([run[:count] for run in self._runs])
        last = np.partition(heads, count - 1)[count - 1] if len(heads) > count else heads.max()
        taken, left = [], []
        for run in self._runs:
            cut = int(np.searchsorted(run, last, side="right"))
            taken.append(run[:cut])
            if cut < len(run):
                left.append(run[cut:])
        self._runs = left
        keys = np.concatenate(taken)
        self._held -= len(keys)
        return np.sort(keys)

    def _key(self, number: int) -> np.uint64:
        """The key that `number` of all keys do not exceed: no key repeats where priorities do not move."""
        low, high = 0, (1 << 64) - 1
        while low < high:
            middle = (low + high) // 2
            key = np.uint64(middle)
            if sum(int(np.searchsorted(run, key, side="right")) for run in self._runs) < number:
                low = middle + 1
            else:
                high = middle
        return np.uint64(low)

    def _merge(self) -> None:
        if self._newest is not None and self._held > 4 * self._waiting + 4096:
            self._runs = [run for run in [self._all()] if len(run)]  # mostly outdated entries: drop them
            self._held = sum(map(len, self._runs))
        while len(self._runs) > 1 and len(self._runs[-2]) <= 2 * len(self._runs[-1]):
            last, before = self._runs.pop(), self._runs.pop()
            self._runs.append(np.sort(np.concatenate([before, last]), kind="stable"))
