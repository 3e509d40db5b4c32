"""Which samples a training step sees: a function of the seed and the step, so that a run that was killed goes on where it was.

    batches = Batches(Shards.of(tokens), batch_sequences=16, seed=124)
    inputs, targets = batches[step]

Every epoch is its own permutation of all samples; steps take them in turn, across the ends of epochs. Nothing is kept in memory or
shared between processes: samples are read by position from memory-mapped shards (`craw4llm.tokens.shards` says why).
"""

import collections
import functools
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np
import pyarrow.parquet as pq
import torch
from numpy.typing import NDArray
from torch import Tensor

from craw4llm.artifact import Artifact
from craw4llm.tokens.packing import seeded_order
from craw4llm.tokens.shards import Shards


class Batches:
    """The batches of a run, by step.

    batches[step]: (inputs, targets), int64[batch_sequences, context] each; the targets are the inputs moved on by one token.
    """

    def __init__(self, shards: Shards, *, batch_sequences: int, seed: int) -> None:
        self._shards, self._batch = shards, batch_sequences
        # two: the batches read ahead may stand on both sides of an epoch's end
        self._epoch_order = functools.lru_cache(maxsize=2)(functools.partial(seeded_order, len(shards), seed))

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


class Prefetch:
    """Reads the batches of the next steps while this one is computed, in threads; on CUDA into pinned memory.

    data[step]: (inputs, targets, seconds waited) on `device`, int64; the steps first, first + 1, ... last - 1 in this order.
    workers: threads, which is also the number of batches read ahead; 0 reads each batch when it is asked for. The batches are the same.
    """

    def __init__(self, batches: Batches, rows: slice, device: torch.device, first: int, last: int, workers: int = 1) -> None:
        self._batches, self._rows, self._device, self._last = batches, rows, device, last
        self._threads = ThreadPoolExecutor(workers, thread_name_prefix="prefetch") if workers else None
        self._ahead = collections.deque[Future[tuple[Tensor, Tensor]]]()
        self._next = first
        for _ in range(workers):
            self._ask()

    def __getitem__(self, step: int) -> tuple[Tensor, Tensor, float]:
        began = time.monotonic()
        inputs, targets = self._ahead.popleft().result() if self._threads else self._read(step)
        waited = time.monotonic() - began
        self._ask()
        return inputs.to(self._device, non_blocking=True), targets.to(self._device, non_blocking=True), waited

    def close(self) -> None:
        if self._threads is not None:
            self._threads.shutdown(cancel_futures=True)

    def _ask(self) -> None:
        if self._threads is not None and self._next < self._last:
            self._ahead.append(self._threads.submit(self._read, self._next))
            self._next += 1

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


def heldout_bytes(heldout: Artifact, tokens: int) -> float:
    """UTF-8 bytes of the text behind the first `tokens` of the held-out stream; of a page that is cut, its tokens' share of it."""
    table = pq.read_table(heldout.file("documents.parquet"), columns=["n_bytes", "first_token", "n_tokens"])
    n_bytes, first, count = (table.column(name).to_numpy().astype(np.float64) for name in table.column_names)
    share = np.clip((tokens - first) / count, 0.0, 1.0)
    return float(n_bytes @ share)
