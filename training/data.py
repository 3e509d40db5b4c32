"""Which samples a training step sees: a function of the seed and the step, so that a run that was killed goes on where it was.

    batches = Batches(Shards.of(tokens), batch_sequences=16, seed=124)
    inputs, targets = batches[step]

Every epoch is its own permutation of all samples; steps take them in turn, across the ends of epochs. Nothing is kept in memory or
shared between processes: samples are read by position from memory-mapped shards (`craw4llm.tokens.shards` says why).
"""

import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from craw4llm.tokens.packing import seeded_order
from craw4llm.tokens.shards import Shards


class Batches:
    """The batches of a run, by step.

    batches[step]: (inputs, targets), int64[batch_sequences, context] each; the targets are the inputs moved on by one token.
    """

    def __init__(self, shards: Shards, *, batch_sequences: int, seed: int) -> None:
        self._shards, self._batch, self._seed = shards, batch_sequences, seed
        self._epoch, self._order = -1, np.empty(0, dtype=np.int64)

    def __getitem__(self, step: int) -> tuple[Tensor, Tensor]:
        return self.rows(step, slice(None))

    def rows(self, step: int, rows: slice) -> tuple[Tensor, Tensor]:
        """The same for some rows of the batch: what one of several ranks takes."""
        return inputs_and_targets(self._shards[self.positions(step)[rows]])

    def positions(self, step: int) -> NDArray[np.int64]:
        """Positions in the shards of the samples of `step`, in the order in which they stand in the batch."""
        place = np.arange(step * self._batch, (step + 1) * self._batch, dtype=np.int64)
        epochs, within = np.divmod(place, len(self._shards))
        return np.concatenate([self._epoch_order(e)[within[epochs == e]] for e in np.unique(epochs).tolist()])

    def _epoch_order(self, epoch: int) -> NDArray[np.int64]:
        if epoch != self._epoch:
            self._epoch, self._order = epoch, seeded_order(len(self._shards), self._seed, epoch)
        return self._order


class Prefetch:
    """Reads the batch of the next step while this one is computed, in a thread; on CUDA into pinned memory.

    data[step]: (inputs, targets, seconds waited) on `device`, int64; the steps first, first + 1, ... last - 1 in this order.
    """

    def __init__(self, batches: Batches, rows: slice, device: torch.device, first: int, last: int) -> None:
        self._batches, self._rows, self._device, self._last = batches, rows, device, last
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="prefetch")
        self._next: Future[tuple[Tensor, Tensor]] | None = None
        if first < last:
            self._next = self._thread.submit(self._read, first)

    def __getitem__(self, step: int) -> tuple[Tensor, Tensor, float]:
        assert self._next is not None
        began = time.monotonic()
        inputs, targets = self._next.result()
        waited = time.monotonic() - began
        self._next = self._thread.submit(self._read, step + 1) if step + 1 < self._last else None
        return inputs.to(self._device, non_blocking=True), targets.to(self._device, non_blocking=True), waited

    def close(self) -> None:
        self._thread.shutdown(cancel_futures=True)

    def _read(self, step: int) -> tuple[Tensor, Tensor]:
        inputs, targets = self._batches.rows(step, self._rows)
        if self._device.type == "cuda":
            inputs, targets = inputs.pin_memory(), targets.pin_memory()
        return inputs, targets


def inputs_and_targets(samples: NDArray[np.uint16] | NDArray[np.int32]) -> tuple[Tensor, Tensor]:
    """Samples [B, context + 1] -> inputs and targets, int64[B, context] each."""
    tokens = torch.from_numpy(samples.astype(np.int64))
    return tokens[:, :-1], tokens[:, 1:]


def heldout_batches(shards: Shards, tokens: int, batch_sequences: int, limit_tokens: int) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """(inputs, targets, mask) over the held-out samples in their order: whole samples until `limit_tokens` targets are covered.

    tokens: length of the packed stream without its padding; the mask is false on padding.
    """
    context = shards.sample_tokens - 1
    count = min(len(shards), max(1, -(-limit_tokens // context)))
    for start in range(0, count, batch_sequences):
        rows = np.arange(start, min(start + batch_sequences, count))
        inputs, targets = inputs_and_targets(shards[rows])
        place = rows[:, None] * shards.sample_tokens + np.arange(1, shards.sample_tokens)
        yield inputs, targets, torch.from_numpy(place < tokens)
