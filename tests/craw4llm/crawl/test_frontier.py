"""The frontier: a total order, moved priorities, and the same answers as a plain sort."""

import numpy as np
import pytest

from craw4llm.crawl.frontier import Frontier, from_keys, to_keys

SPECIAL = [np.inf, 3.4e38, 1.0, np.nextafter(np.float32(1), np.float32(0)), 1e-45, 0.0, -0.0, -1e-45, -1.0, -3.4e38, -np.inf, np.nan]


def test_keys_are_in_the_order_of_priorities_then_places():
    keys = to_keys(np.arange(len(SPECIAL)), SPECIAL)
    assert keys.tolist() == sorted(keys.tolist())
    places, values = from_keys(keys)
    assert places.tolist() == list(range(len(SPECIAL)))
    np.testing.assert_array_equal(values, np.array(SPECIAL, dtype=np.float32))
    assert to_keys([7], [0.0]) == to_keys([7], [-0.0])
    assert to_keys([7], [np.nan]) == to_keys([7], [-np.nan])  # a NaN of either sign
    assert to_keys([2**32 - 1], [np.inf]) < to_keys([0], [1.0])


def test_pop_breaks_ties_by_place():
    frontier = Frontier(10, moves=False)
    frontier.push([9, 4], [0.5, 0.5])
    frontier.push([7, 1, 2], [0.5, np.nan, 0.9])
    frontier.push([0], [-np.inf])
    assert len(frontier) == 6
    places, priorities = frontier.pop(3)
    assert places.tolist() == [2, 4, 7]
    np.testing.assert_array_equal(priorities, np.array([0.9, 0.5, 0.5], dtype=np.float32))
    assert frontier.pop(10)[0].tolist() == [9, 0, 1]
    assert len(frontier) == 0
    assert frontier.pop(1)[0].tolist() == []


def test_moved_priorities():
    frontier = Frontier(10, moves=True)
    frontier.push([1, 2, 3], [0.1, 0.2, 0.3])
    frontier.push([1, 4], [0.9, 0.25])
    frontier.push([1, 3], [0.1, 0.05])  # there and back again, and down
    assert len(frontier) == 4
    assert frontier.pop(2)[0].tolist() == [4, 2]
    frontier.push([2], [0.5])  # a place that was popped waits anew
    assert frontier.entries()[0].tolist() == [2, 1, 3]
    assert frontier.pop(5)[0].tolist() == [2, 1, 3]


@pytest.mark.parametrize("moves", [False, True])
@pytest.mark.parametrize("restart", [False, True])
def test_against_a_sorted_dictionary(moves, restart):
    rng = np.random.default_rng(7)
    frontier, waiting, unused = Frontier(20_000, moves=moves), {}, list(rng.permutation(20_000))
    for step in range(150):
        fresh = [unused.pop() for _ in range(int(rng.integers(0, 130)))]
        moved = list(rng.choice(sorted(waiting), min(len(waiting), 40), replace=False)) if moves and waiting else []
        places = np.array(sorted([*fresh, *moved]), dtype=np.uint32)
        priorities = np.round(rng.random(len(places)), 1).astype(np.float32)  # many ties
        priorities[rng.random(len(places)) < 0.1] = np.nan
        frontier.push(places, priorities)
        waiting |= dict(zip(places.tolist(), priorities.tolist(), strict=True))
        assert len(frontier) == len(waiting)
        if restart:
            keys = frontier.keys()
            frontier = Frontier(20_000, moves=moves)
            frontier.restore(keys.copy())
        count = int(rng.integers(0, 110))
        order = sorted(waiting, key=lambda p: (np.isnan(waiting[p]), -np.nan_to_num(waiting[p]), p))
        got, values = frontier.pop(count)
        assert got.tolist() == order[:count], step
        np.testing.assert_array_equal(values, np.array([waiting.pop(p) for p in got.tolist()], dtype=np.float32))
    rest = sorted(waiting, key=lambda p: (np.isnan(waiting[p]), -np.nan_to_num(waiting[p]), p))
    assert frontier.entries()[0].tolist() == rest
    assert frontier.pop(10**6)[0].tolist() == rest


def test_a_pruned_frontier_pops_what_a_sorted_dictionary_does(monkeypatch):
    """What can no more be popped is dropped, at the prune and when it is pushed later; all that waits is counted."""
    monkeypatch.setattr("craw4llm.crawl.frontier._MIN_PRUNED", 0)
    for unscored in (0.1, 0.9):  # with 0.9 the last that is kept has no priority
        rng = np.random.default_rng(3)
        frontier, waiting, unused, left, dropped = Frontier(20_000, moves=False), {}, list(rng.permutation(20_000)), 400, 0
        while left:
            places = np.array(sorted(unused.pop() for _ in range(100)), dtype=np.uint32)
            priorities = np.round(rng.random(len(places)), 1).astype(np.float32)  # many ties
            priorities[rng.random(len(places)) < unscored] = np.nan
            held = frontier._held
            frontier.push(places, priorities)
            dropped += held + len(places) - frontier._held
            frontier.prune(left)
            waiting |= dict(zip(places.tolist(), priorities.tolist(), strict=True))
            assert len(frontier) == len(waiting) and frontier._held <= 1.5 * left
            order = sorted(waiting, key=lambda p: (np.isnan(waiting[p]), -np.nan_to_num(waiting[p]), p))
            got, values = frontier.pop(min(left, 20))
            assert got.tolist() == order[: min(left, 20)]
            np.testing.assert_array_equal(values, np.array([waiting.pop(p) for p in got.tolist()], dtype=np.float32))
            left -= len(got)
        assert frontier.pruned and (dropped > 500) == (unscored < 0.5)
