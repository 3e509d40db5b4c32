"""The order of samples is a function of seed and step."""

import contextlib
from pathlib import Path

import numpy as np
import pytest
import torch

from craw4llm.tokens.shards import Shards, write_shards
from training.data import Batches, Prefetch, heldout_batches, inputs_and_targets

SAMPLES = np.arange(10 * 5, dtype=np.uint16).reshape(10, 5)


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> Shards:
    folder: Path = tmp_path_factory.mktemp("data") / "shards"
    write_shards(folder, SAMPLES, np.arange(10), shard_bytes=300)
    assert len(list(folder.glob("*.mds"))) > 1
    return Shards(folder)


def test_every_epoch_sees_every_sample_once_in_its_own_order(shards: Shards) -> None:
    batches = Batches(shards, batch_sequences=4, seed=124)
    places = np.concatenate([batches.positions(step) for step in range(5)])  # two epochs of 10
    assert sorted(places[:10]) == sorted(places[10:]) == list(range(10))
    assert places[:10].tolist() != places[10:].tolist()
    assert places[:10].tolist() != list(range(10))


def test_order_does_not_depend_on_what_was_read_before(shards: Shards) -> None:
    on = Batches(shards, batch_sequences=4, seed=124)
    whole = [on.positions(step).tolist() for step in range(12)]
    for start in (3, 7, 11):
        anew = Batches(shards, batch_sequences=4, seed=124)
        assert [anew.positions(step).tolist() for step in range(start, 12)] == whole[start:]
    back = Batches(shards, batch_sequences=4, seed=124)
    assert [back.positions(step).tolist() for step in reversed(range(12))] == whole[::-1]
    other = Batches(shards, batch_sequences=4, seed=125)
    assert [other.positions(step).tolist() for step in range(12)] != whole


def test_a_batch_larger_than_an_epoch(shards: Shards) -> None:
    places = Batches(shards, batch_sequences=25, seed=1).positions(0)
    assert sorted(places[:10]) == sorted(places[10:20]) == list(range(10))
    assert len(places) == 25


@pytest.mark.parametrize("workers", [0, 1, 2, 5])
def test_workers_read_the_same_batches(shards: Shards, workers: int) -> None:
    """From step 2 to 6: over the ends of two epochs, and fewer steps than workers would read ahead."""
    batches = Batches(shards, batch_sequences=4, seed=124)
    with contextlib.closing(Prefetch(batches, slice(1, 3), torch.device("cpu"), 2, 6, workers)) as data:
        for step in range(2, 6):
            inputs, targets, waited = data[step]
            expected = batches.rows(step, slice(1, 3))
            assert torch.equal(inputs, expected[0]) and torch.equal(targets, expected[1])
            assert waited >= 0


def test_inputs_and_targets(shards: Shards) -> None:
    inputs, targets = Batches(shards, batch_sequences=3, seed=1)[2]
    assert inputs.shape == targets.shape == (3, 4)
    assert inputs.dtype == targets.dtype == torch.int64
    assert torch.equal(targets, inputs + 1)
    wide, _ = inputs_and_targets(np.array([[65_535, 1]], dtype=np.uint16))
    assert wide.item() == 65_535


@pytest.mark.parametrize(("tokens", "limit", "expected"), [(50, 10**9, 40), (48, 10**9, 38), (45, 10**9, 36), (50, 8, 8), (50, 9, 12)])
def test_heldout_batches_leave_padding_out(shards: Shards, tokens: int, limit: int, expected: int) -> None:
    """Ten samples of five tokens: four predictions each; the padding after `tokens` is predicted by none."""
    batches = list(heldout_batches(shards, tokens, batch_sequences=4, limit_tokens=limit))
    assert sum(int(mask.sum()) for _, _, mask in batches) == expected
    kept = torch.cat([targets[mask] for _, targets, mask in batches])
    assert kept.tolist() == [t for t in range(tokens) if t % 5][:expected]
