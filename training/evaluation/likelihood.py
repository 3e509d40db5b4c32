"""How likely a model finds the continuations of items.

    result = score_task(file, encoded, model, Batching())     its items and its accuracy
    scores = score_prompts(encoded, model)                    one ItemScore per item, in the order given

mc and schema: mean cross-entropy (nats) over the tokens of each option's continuation; the lowest wins, the first on ties. lm: correct
if the likeliest token is the target at every position of the continuation, all earlier targets given. Both over all columns of the logits,
also those that no token of the tokenizer uses. As in llm-foundry's `InContextLearningMultipleChoiceAccuracy` and
`InContextLearningLMAccuracy`.

Sequences of a block of items are sorted by length and batched within a budget of tokens, padded on the right, which a causal model
does not see. Logits are computed at the scored positions only. Sequences with equal model input share one row of a batch: the four
options of an item that is answered by a letter differ in their last token, which the model never reads.
"""

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from training.evaluation.prompts import EncodedPrompt
from training.evaluation.tasks import TaskFile
from training.model import Transformer

BATCH_TOKENS = 16_384  # 64 sequences of the toy's context; on one core its speed is the same from 4,096 to 16,384
# Elements of the logits matrix at once. A CPU keeps 4 MiB in its cache: 3.6 us a token for the toy's head, 9.7 us at 32 MiB and more.
LOGITS_AT_ONCE = {"cpu": 1 << 20, "cuda": 1 << 26}
BLOCK_ITEMS = 512  # items in memory at once, between which batches are not shared


class Model(Protocol):
    """What scoring needs of a causal language model."""

    vocab_size: int
    context: int

    def hidden(self, tokens: torch.Tensor) -> torch.Tensor:
        """tokens int64[B, T], padded on the right -> states [B, T, ...], where [b, t] depends on tokens[b, : t + 1] alone."""
        ...

    def logits(self, states: torch.Tensor) -> torch.Tensor:
        """states [N, ...] -> float32[N, vocab_size]."""
        ...


class TorchModel:
    """A trained model as a `likelihood.Model`: states and logits apart, so that logits are computed only where they are scored."""

    def __init__(self, model: Transformer, device: torch.device) -> None:
        self._model = model
        self.vocab_size = model.vocab_size
        self.context = model.shape.context
        self.device = device

    def hidden(self, tokens: torch.Tensor) -> torch.Tensor:
        return self._model.hidden(tokens.to(self.device))

    def logits(self, states: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self._model.head(states).float()
        return logits


@dataclasses.dataclass(frozen=True, kw_only=True)
class Batching:
    """tokens: padded tokens of a batch. sequences: of a batch at most; 0: no limit."""

    tokens: int = BATCH_TOKENS
    sequences: int = 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class ItemScore:
    """Result of one item.

    losses: float32, mean nats per continuation token, one per option. choice: of the options, None for lm. argmax: int64, the
    likeliest token at each position, lm only. An item whose continuation does not fit into the model has no losses and no choice,
    and counts as wrong.
    """

    losses: NDArray[np.float32]
    choice: int | None
    argmax: NDArray[np.int64] | None
    correct: bool


@dataclasses.dataclass(frozen=True, kw_only=True)
class TaskResult:
    """One task, scored: items in file order, accuracy by the task's rule."""

    file: TaskFile
    items: Sequence[tuple[EncodedPrompt, ItemScore]]
    accuracy: float


def score_task(
    file: TaskFile, encoded: Iterable[EncodedPrompt], model: Model, batching: Batching, done: Callable[[int], None] | None = None
) -> TaskResult:
    """Scores all items of a task. accuracy: share of correct items; with categories the plain mean of the categories' shares."""
    kept: list[EncodedPrompt] = []

    def keep() -> Iterator[EncodedPrompt]:
        for item in encoded:
            kept.append(item)
            yield item

    scores = list(score_prompts(keep(), model, batching, done))
    by_category: dict[str | None, list[bool]] = {}
    for item, score in zip(kept, scores, strict=True):
        by_category.setdefault(item.prompt.category, []).append(score.correct)
    accuracy = math.fsum(sum(marks) / len(marks) for marks in by_category.values()) / len(by_category)
    items = sorted(zip(kept, scores, strict=True), key=lambda pair: pair[0].prompt.line)
    return TaskResult(file=file, items=items, accuracy=accuracy)


def score_prompts(
    items: Iterable[EncodedPrompt],
    model: Model,
    batching: Batching = Batching(),
    done: Callable[[int], None] | None = None,
) -> Iterator[ItemScore]:
    """Scores items in blocks. done: called with the number of items scored since the last call."""
    stream = iter(items)
    while block := list(itertools.islice(stream, BLOCK_ITEMS)):
        yield from _score_block(block, model, batching)
        if done is not None:
            done(len(block))


def token_losses(
    sequences: Sequence[tuple[NDArray[np.int64], int]], model: Model, batching: Batching
) -> list[tuple[NDArray[np.float32], NDArray[np.int64]]]:
    """Scores the last tokens of sequences.

    sequences: (ids, number of last tokens to score), with at least one id before the first scored one and at most `model.context`
    ids before the last. Returns for each (cross-entropy in nats float32[n], likeliest token int64[n]).
    """
    by_input: dict[bytes, list[int]] = {}
    for index, (ids, _) in enumerate(sequences):
        by_input.setdefault(ids[:-1].tobytes(), []).append(index)
    rows = sorted(by_input.values(), key=lambda members: (-len(sequences[members[0]][0]), members[0]))
    results: dict[int, tuple[NDArray[np.float32], NDArray[np.int64]]] = {}
    for batch in _batches(rows, [len(ids) - 1 for ids, _ in sequences], batching):
        width = len(sequences[batch[0][0]][0]) - 1
        tokens = torch.zeros((len(batch), width), dtype=torch.int64)
        order, at_row, at_column, targets = [], [], [], []
        for row, members in enumerate(batch):
            ids = sequences[members[0]][0][:-1]
            tokens[row, : len(ids)] = torch.from_numpy(ids)
            for index in members:
                ids, scored = sequences[index]
                order.append((index, scored))
                at_row.append(np.full(scored, row, dtype=np.int64))
                at_column.append(np.arange(len(ids) - 1 - scored, len(ids) - 1, dtype=np.int64))
                targets.append(ids[-scored:])
        losses, likeliest = _score(model, tokens, np.concatenate(at_row), np.concatenate(at_column), np.concatenate(targets))
        start = 0
        for index, scored in order:
            results[index] = (losses[start : start + scored], likeliest[start : start + scored])
            start += scored
    return [results[index] for index in range(len(sequences))]


def choose(losses: NDArray[np.float32]) -> int:
    """Index of the lowest loss, the first on ties."""
    return int(np.argmin(losses))


def _score_block(block: Sequence[EncodedPrompt], model: Model, batching: Batching) -> Iterator[ItemScore]:
    wanted: dict[tuple[int, int], tuple[NDArray[np.int64], int]] = {}
    for number, item in enumerate(block):
        if not item.too_long:
            for option, (before, after) in enumerate(zip(item.contexts, item.continuations, strict=True)):
                wanted[number, option] = (np.concatenate([before, after]), len(after))
    scored = dict(zip(wanted, token_losses(list(wanted.values()), model, batching), strict=True))
    for number, item in enumerate(block):
        if item.too_long:
            yield ItemScore(losses=np.empty(0, dtype=np.float32), choice=None, argmax=None, correct=False)
            continue
        options = [scored[number, option] for option in range(len(item.continuations))]
        means = np.array([float(losses.mean(dtype=np.float64)) for losses, _ in options], dtype=np.float32)
        if item.prompt.gold is None:
            argmax = options[0][1]
            correct = bool(np.array_equal(argmax, item.continuations[0]))
            yield ItemScore(losses=means, choice=None, argmax=argmax, correct=correct)
        else:
            choice = choose(means)
            yield ItemScore(losses=means, choice=choice, argmax=None, correct=choice == item.prompt.gold)


def _batches(rows: Sequence[list[int]], lengths: Sequence[int], batching: Batching) -> Iterator[list[list[int]]]:
    """Cuts rows, longest first, into batches within the budget; a row that is longer than the budget is a batch of its own."""
    batch: list[list[int]] = []
    width = 0
    for members in rows:
        width = width if batch else lengths[members[0]]
        if batch and ((len(batch) + 1) * width > batching.tokens or len(batch) == batching.sequences):
            yield batch
            batch, width = [], lengths[members[0]]
        batch.append(members)
    if batch:
        yield batch


@torch.inference_mode()
def _score(
    model: Model, tokens: torch.Tensor, rows: NDArray[np.int64], columns: NDArray[np.int64], targets: NDArray[np.int64]
) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
    states = model.hidden(tokens)
    states = states[torch.from_numpy(rows).to(states.device), torch.from_numpy(columns).to(states.device)]
    losses, likeliest = [], []
    step = max(1, LOGITS_AT_ONCE.get(states.device.type, 1 << 20) // model.vocab_size)
    for start in range(0, len(targets), step):
        logits = model.logits(states[start : start + step])
        target = torch.from_numpy(targets[start : start + step]).to(logits.device)
        losses.append(torch.nn.functional.cross_entropy(logits, target, reduction="none").cpu().numpy())
        likeliest.append(logits.argmax(dim=1).cpu().numpy())
    return np.concatenate(losses), np.concatenate(likeliest)
