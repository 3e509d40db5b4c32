"""How likely a model finds the continuations of items.

    scores = score_prompts(encoded, model)                    one ItemScore per item, in the order given
    result = score_task(file, encoded, model, Batching())     its items and its accuracy

mc and schema: mean cross-entropy (nats) over the tokens of each option's continuation; the lowest wins, the first on ties. lm: correct
if the likeliest token is the target at every position of the continuation, all earlier targets given. Both over all columns of the logits,
also those that no token of the tokenizer uses. As in llm-foundry's `InContextLearningMultipleChoiceAccuracy` and
`InContextLearningLMAccuracy`.

What makes it fast, and changes no result:
- the beginning that an item's options share (examples and question) is read once: a row is that beginning and, beside it, what follows
  in each option, which sees the beginning and itself (`training.model.Branches`). Models that cannot do that get a row per option;
- equal inputs share a row: four options that are letters differ in their last token, which the model never reads;
- rows of a block of items are sorted by length and batched within a budget of tokens;
- logits are computed at the scored positions only.
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
from training.model import Branches

# Tokens of a batch. One core is as fast with 4,096 as with 16,384 and pads less: 40 items of piqa have 14% padding instead of 38%.
BATCH_TOKENS = {"cpu": 4_096, "cuda": 16_384}
# Elements of the logits matrix at once. A CPU keeps 4 MiB in its cache: 3.6 us a token for the toy's head, 9.7 us at 32 MiB and more.
LOGITS_AT_ONCE = {"cpu": 1 << 20, "cuda": 1 << 26}
BLOCK_ITEMS = 512  # items in memory at once, between which batches are not shared
SHARED_SHARE = 0.25  # options share a row where it saves at least this share of their tokens; below it the mask costs as much
LENGTH_STEP = 32  # rows whose beginnings are of like length, rounded up to this, are sorted by the length of their branches

TOO_LONG = "the continuation leaves no room for context in the model; counted as wrong"
NO_TOKENS = "the tokenizer gives no token for its context or a continuation; counted as wrong"
NOT_FINITE = "the model's loss is not a finite number; counted as wrong"


class Model(Protocol):
    """What scoring needs of a causal language model. takes_branches: `hidden` can do with `branches`."""

    vocab_size: int
    context: int
    takes_branches: bool

    def hidden(self, tokens: torch.Tensor, branches: Branches | None = None) -> torch.Tensor:
        """tokens int64[B, T], padded on the right -> states [B, T, ...], where [b, t] depends on tokens[b, : t + 1] alone, or with
        `branches` on the columns that [b, t] sees."""
        ...

    def logits(self, states: torch.Tensor) -> torch.Tensor:
        """states [N, ...] -> float32[N, vocab_size]."""
        ...


@dataclasses.dataclass(frozen=True, kw_only=True)
class Batching:
    """tokens: padded tokens of a batch. sequences: rows of a batch at most; 0: no limit."""

    tokens: int = BATCH_TOKENS["cpu"]
    sequences: int = 0

    @staticmethod
    def on(device: torch.device, sequences: int = 0) -> "Batching":
        return Batching(tokens=BATCH_TOKENS.get(device.type, BATCH_TOKENS["cpu"]), sequences=sequences)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ItemScore:
    """Result of one item.

    losses: float32, mean nats per continuation token, one per option. choice: of the options, None for lm. argmax: int64, the
    likeliest token at each position, lm only. fault: why the item could not be scored, "" where it was; it then has no losses and no
    choice, and counts as wrong.
    """

    losses: NDArray[np.float32]
    choice: int | None
    argmax: NDArray[np.int64] | None
    correct: bool
    fault: str = ""


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
        yield from score_block(block, model, batching)
        if done is not None:
            done(len(block))


def score_block(block: Sequence[EncodedPrompt], model: Model, batching: Batching) -> list[ItemScore]:
    """Scores items, whose rows are sorted and batched together."""
    wanted: list[tuple[NDArray[np.int64], int]] = []
    places: list[tuple[int, int]] = []
    for number, item in enumerate(block):
        if not _unusable(item):
            for option, (before, after) in enumerate(zip(item.contexts, item.continuations, strict=True)):
                wanted.append((np.concatenate([before, after]), len(after)))
                places.append((number, option))
    scored = dict(zip(places, token_losses(wanted, model, batching, groups=[number for number, _ in places]), strict=True))
    return [
        _failed(_unusable(item)) if _unusable(item) else _judge(item, [scored[number, option] for option in range(len(item.contexts))])
        for number, item in enumerate(block)
    ]


def token_losses(
    sequences: Sequence[tuple[NDArray[np.int64], int]],
    model: Model,
    batching: Batching,
    groups: Sequence[int] | None = None,
) -> list[tuple[NDArray[np.float32], NDArray[np.int64]]]:
    """Scores the last tokens of sequences.

    sequences: (ids, number of last tokens to score), with at least one id before the first scored one and at most `model.context`
    ids before the last. groups: sequences with the same number are looked at for a beginning that they share; None: no two are.
    Returns for each (cross-entropy in nats float32[n], likeliest token int64[n]).
    """
    results: dict[int, tuple[NDArray[np.float32], NDArray[np.int64]]] = {}
    for batch in _batches(_rows(sequences, groups, model.takes_branches), batching):
        tokens, branches, starts = _layout(batch)
        order, at_row, at_column, targets = [], [], [], []
        for row, members in enumerate(batch):
            for branch, indices in enumerate(members.members):
                for index in indices:
                    ids, scored = sequences[index]
                    column = np.arange(len(ids) - 1 - scored, len(ids) - 1, dtype=np.int64)
                    behind = column >= len(members.beginning)
                    column[behind] += starts[row][branch] - len(members.beginning)
                    order.append((index, scored))
                    at_row.append(np.full(scored, row, dtype=np.int64))
                    at_column.append(column)
                    targets.append(ids[-scored:])
        places = (np.concatenate(at_row), np.concatenate(at_column))
        losses, likeliest = _score(model, tokens, branches, *places, np.concatenate(targets))
        start = 0
        for index, scored in order:
            results[index] = (losses[start : start + scored], likeliest[start : start + scored])
            start += scored
    return [results[index] for index in range(len(sequences))]


def choose(losses: NDArray[np.float32]) -> int:
    """Index of the lowest loss, the first on ties."""
    return int(np.argmin(losses))


@dataclasses.dataclass(frozen=True, eq=False)
class _Row:
    """One row of a batch: ids that are read once, and the ids that follow in each branch (none, where there is nothing to share).

    members: of each branch, the indices of the sequences that it serves.
    """

    beginning: NDArray[np.int64]
    branches: Sequence[NDArray[np.int64]]
    members: Sequence[list[int]]

    @property
    def behind(self) -> int:
        """Tokens of the branches."""
        return sum(len(branch) for branch in self.branches)


def _rows(sequences: Sequence[tuple[NDArray[np.int64], int]], groups: Sequence[int] | None, share: bool) -> list[_Row]:
    """The rows that serve all sequences, in the order in which they are batched."""
    by_group: dict[int, dict[bytes, list[int]]] = {}
    for index, (ids, _) in enumerate(sequences):
        group = index if groups is None else groups[index]
        by_group.setdefault(group, {}).setdefault(ids[:-1].tobytes(), []).append(index)
    rows: dict[tuple[int, tuple[bytes, ...]], _Row] = {}
    for by_input in by_group.values():
        inputs = [sequences[indices[0]][0][:-1] for indices in by_input.values()]
        common = _common(inputs) if share and len(inputs) > 1 else 0
        if common * (len(inputs) - 1) >= max(1, SHARED_SHARE * sum(len(ids) for ids in inputs)):
            made = {(common, tuple(by_input)): _Row(inputs[0][:common], [i[common:] for i in inputs], [[] for _ in inputs])}
        else:
            made = {(0, (key,)): _Row(ids, [], [[]]) for key, ids in zip(by_input, inputs, strict=True)}
        for key, row in made.items():
            kept = rows.setdefault(key, row)
            for members, source in zip(kept.members, key[1], strict=True):
                members.extend(by_input[source])

    def order(row: _Row) -> tuple[int, ...]:
        first = min(members[0] for members in row.members)
        if not row.branches:
            return 1, -len(row.beginning), first
        return 0, -math.ceil(len(row.beginning) / LENGTH_STEP), -row.behind, -len(row.beginning), first

    return sorted(rows.values(), key=order)


def _common(inputs: Sequence[NDArray[np.int64]]) -> int:
    """Length of the longest common beginning."""
    shortest = min(len(ids) for ids in inputs)
    same = np.ones(shortest, dtype=bool)
    for ids in inputs[1:]:
        same &= ids[:shortest] == inputs[0][:shortest]
    return shortest if same.all() else int(np.argmin(same))


def _batches(rows: Sequence[_Row], batching: Batching) -> Iterator[list[_Row]]:
    """Cuts rows into batches within the budget, rows with and without branches apart; a row beyond the budget is a batch of its own."""
    batch: list[_Row] = []
    width = behind = 0
    for row in rows:
        wider, longer = max(width, len(row.beginning)), max(behind, row.behind)
        full = (len(batch) + 1) * (wider + longer) > batching.tokens or len(batch) == (batching.sequences or -1)
        if batch and (full or bool(batch[0].branches) != bool(row.branches)):
            yield batch
            batch, wider, longer = [], len(row.beginning), row.behind
        batch.append(row)
        width, behind = wider, longer
    if batch:
        yield batch


def _layout(batch: Sequence[_Row]) -> tuple[torch.Tensor, Branches | None, list[list[int]]]:
    """tokens int64[B, T] of a batch, its branches, and per row the column where each branch starts."""
    width = max(len(row.beginning) for row in batch)
    behind = max(row.behind for row in batch)
    tokens = torch.zeros((len(batch), width + behind), dtype=torch.int64)
    if not batch[0].branches:
        for number, row in enumerate(batch):
            tokens[number, : len(row.beginning)] = torch.from_numpy(row.beginning)
        return tokens, None, [[len(row.beginning)] for row in batch]
    position = torch.arange(width + behind).expand(len(batch), -1).clone()
    position[:, width:] = 0
    branch_of = torch.full((len(batch), behind), -1)
    starts: list[list[int]] = []
    for number, row in enumerate(batch):
        tokens[number, : len(row.beginning)] = torch.from_numpy(row.beginning)
        column = width
        starts.append([])
        for branch, ids in enumerate(row.branches):
            starts[-1].append(column)
            tokens[number, column : column + len(ids)] = torch.from_numpy(ids)
            position[number, column : column + len(ids)] = torch.arange(len(row.beginning), len(row.beginning) + len(ids))
            branch_of[number, column - width : column - width + len(ids)] = branch
            column += len(ids)
    lengths = torch.tensor([len(row.beginning) for row in batch])
    sees_beginning = (torch.arange(width) < lengths[:, None])[:, None, :].expand(-1, behind, -1)
    sees_branch = (branch_of[:, :, None] == branch_of[:, None, :]) & torch.ones((behind, behind), dtype=torch.bool).tril()
    sees = torch.cat((sees_beginning, sees_branch), dim=2)[:, None]
    return tokens, Branches(width, position, sees), starts


@torch.inference_mode()
def _score(
    model: Model,
    tokens: torch.Tensor,
    branches: Branches | None,
    rows: NDArray[np.int64],
    columns: NDArray[np.int64],
    targets: NDArray[np.int64],
) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
    states = model.hidden(tokens) if branches is None else model.hidden(tokens, branches)
    states = states[torch.from_numpy(rows).to(states.device), torch.from_numpy(columns).to(states.device)]
    losses, likeliest = [], []
    step = max(1, LOGITS_AT_ONCE.get(states.device.type, 1 << 20) // model.vocab_size)
    for start in range(0, len(targets), step):
        logits = model.logits(states[start : start + step])
        target = torch.from_numpy(targets[start : start + step]).to(logits.device)
        losses.append(torch.nn.functional.cross_entropy(logits, target, reduction="none").cpu().numpy())
        likeliest.append(logits.argmax(dim=1).cpu().numpy())
    return np.concatenate(losses), np.concatenate(likeliest)


def _unusable(item: EncodedPrompt) -> str:
    """Why an item cannot be scored by the model, or ""."""
    if not all(len(ids) for ids in (*item.contexts, *item.continuations)):
        return NO_TOKENS
    return TOO_LONG if item.too_long else ""


def _failed(fault: str) -> ItemScore:
    return ItemScore(losses=np.empty(0, dtype=np.float32), choice=None, argmax=None, correct=False, fault=fault)


def _judge(item: EncodedPrompt, options: Sequence[tuple[NDArray[np.float32], NDArray[np.int64]]]) -> ItemScore:
    means = np.array([float(losses.mean(dtype=np.float64)) for losses, _ in options], dtype=np.float32)
    if not np.isfinite(means).all():
        return _failed(NOT_FINITE)
    if item.prompt.gold is None:
        argmax = options[0][1]
        return ItemScore(losses=means, choice=None, argmax=argmax, correct=bool(np.array_equal(argmax, item.continuations[0])))
    choice = choose(means)
    return ItemScore(losses=means, choice=choice, argmax=None, correct=choice == item.prompt.gold)
