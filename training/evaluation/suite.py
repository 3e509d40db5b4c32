"""Runs the task entries and the held-out pages through a model, in parts (`training.evaluation.parts`).

    count = run_items(files, scorer, parts, progress)      this rank's parts
    items = gather_items(parts, count, files)              all parts: a table of the schema ITEMS
    count = run_pages(pages, scorer, end_of_text_id, parts, progress);  nats = gather_pages(parts, count)

Items are taken in blocks that are cut by the length of their text, across tasks, so that a part is a few seconds of a GPU. The next block
is encoded while the model works on the one before.
"""

import dataclasses
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from craw4llm.errors import StageError
from training.evaluation.bits_per_byte import HeldoutPages, page_losses
from training.evaluation.likelihood import NOT_FINITE, Batching, ItemScore, Model, score_block
from training.evaluation.parts import Parts
from training.evaluation.prompts import EncodeBatch, EncodedPrompt, Prompt, encode_prompts, prompts
from training.evaluation.results import ITEMS
from training.evaluation.tasks import MAX_BAD_SHARE, TaskFile

BLOCK_ITEMS = 512  # of a part, at most
BLOCK_CHARACTERS = 1_000_000  # of a part's prompts, about; a quarter as many tokens
BLOCK_PAGE_TOKENS = 1 << 18  # of held-out pages in a part

PAGE_NATS = pa.schema([("nll", pa.float64())])


@dataclasses.dataclass(frozen=True, kw_only=True)
class Scorer:
    """What scores: the model, its tokenizer (texts -> ids, control tokens spelt out become control ids), tokens of context, batches."""

    model: Model
    encode_batch: EncodeBatch
    context: int
    few_shot_seed: int
    batching: Batching = Batching()  # noqa: RUF009  frozen


def blocks(files: Mapping[str, TaskFile], seed: int) -> Iterator[list[tuple[str, Prompt]]]:
    """All prompts with their task's label, in the order of tasks, categories and lines, cut into the blocks that make the parts."""
    block: list[tuple[str, Prompt]] = []
    characters = 0
    for label, file in files.items():
        for prompt in prompts(file, seed):
            size = len(prompt.preamble) + sum(map(len, {*prompt.contexts, *prompt.continuations}))
            if block and (len(block) == BLOCK_ITEMS or characters + size > BLOCK_CHARACTERS):
                yield block
                block, characters = [], 0
            block.append((label, prompt))
            characters += size
    if block:
        yield block


def run_items(files: Mapping[str, TaskFile], scorer: Scorer, parts: Parts, done: Callable[..., None] | None = None) -> int:
    """Scores this rank's parts of all items that are not there yet; returns the number of parts of all ranks.

    done: called with a number of items, and note=label; items of other ranks count as done in passing. Raises StageError where more
    than MAX_BAD_SHARE of a task's losses are not finite.
    """
    broken: dict[str, int] = {}
    count = 0

    def encoded() -> Iterator[tuple[int, list[str], Future[list[EncodedPrompt]] | int]]:
        nonlocal count
        for number, block in enumerate(blocks(files, scorer.few_shot_seed)):
            count = number + 1
            labels = [label for label, _ in block]
            if parts.mine("items", number):
                yield number, labels, pool.submit(encode_prompts, [p for _, p in block], scorer.encode_batch, scorer.context)
            elif done is not None:
                done(len(block), note=labels[0])

    with ThreadPoolExecutor(1) as pool:
        for number, labels, future in _one_ahead(encoded()):
            items = future.result()
            scores = score_block(items, scorer.model, scorer.batching)
            for label, score in zip(labels, scores, strict=True):
                if score.fault == NOT_FINITE:
                    broken[label] = broken.get(label, 0) + 1
            _check_finite(broken, files)
            parts.write("items", number, item_table(labels, items, scores))
            if done is not None:
                done(len(items), note=labels[0])
    return count


def gather_items(parts: Parts, count: int, files: Mapping[str, TaskFile]) -> pa.Table:
    """All items of `count` parts, one row of ITEMS each, by task (in the order of `files`) and line; waits for other ranks."""
    table = parts.read("items", count, ITEMS)
    broken = table.filter(pc.equal(table["fault"], NOT_FINITE)).column("task").value_counts().to_pylist()
    _check_finite({row["values"]: row["counts"] for row in broken}, files)
    place = {label: number for number, label in enumerate(files)}
    tasks = np.array([place[label] for label in table.column("task").to_pylist()], dtype=np.int64)
    return table.take(np.lexsort((table.column("item").to_numpy(), tasks)))


def item_table(labels: Sequence[str], items: Sequence[EncodedPrompt], scores: Sequence[ItemScore]) -> pa.Table:
    """Rows of ITEMS."""
    rows = [
        {
            "task": label,
            "item": item.prompt.line,
            "category": item.prompt.category,
            "choice": score.choice,
            "gold": item.prompt.gold,
            "correct": score.correct,
            "losses": score.losses,
            "n_context_tokens": [len(ids) for ids in item.contexts],
            "n_continuation_tokens": [len(ids) for ids in item.continuations],
            "cropped": item.cropped,
            "fault": score.fault or None,
        }
        for label, item, score in zip(labels, items, scores, strict=True)
    ]
    return pa.Table.from_pylist(rows, schema=ITEMS)


def run_pages(pages: HeldoutPages, scorer: Scorer, end_of_text_id: int, parts: Parts, done: Callable[[int], None] | None = None) -> int:
    """Scores this rank's parts of the pages that are not there yet; returns the number of parts of all ranks."""
    cuts = [0]
    size = 0
    for number, tokens in enumerate(pages.tokens):
        if size and size + len(tokens) > BLOCK_PAGE_TOKENS:
            cuts.append(number)
            size = 0
        size += len(tokens)
    cuts = [*dict.fromkeys([*cuts, len(pages.page)])]
    for number, (start, stop) in enumerate(itertools.pairwise(cuts)):
        if parts.mine("pages", number):
            some = HeldoutPages(page=pages.page[start:stop], n_bytes=pages.n_bytes[start:stop], tokens=pages.tokens[start:stop])
            nats = page_losses(some, scorer.model, end_of_text_id, scorer.context, scorer.batching, done)
            bad = np.flatnonzero(~np.isfinite(nats))
            if len(bad):
                raise StageError(
                    f"evaluate: the loss of held-out page {some.page[bad[0]]} is {nats[bad[0]]}, and {len(bad) - 1} others are no better: "
                    "the model's weights or activations are not finite; look at its training"
                )
            parts.write("pages", number, pa.table({"nll": nats}, schema=PAGE_NATS))
        elif done is not None:
            done(stop - start)
    return len(cuts) - 1


def gather_pages(parts: Parts, count: int) -> NDArray[np.float64]:
    """float64[pages]: nats of each page, summed over its tokens; waits for other ranks."""
    return np.asarray(parts.read("pages", count, PAGE_NATS).column("nll").to_numpy(), dtype=np.float64)


def _one_ahead(stream: Iterator[Any]) -> Iterator[Any]:
    """The same elements, each asked for before the one before it is worked on."""
    before = next(stream, None)
    while before is not None:
        after = next(stream, None)
        yield before
        before = after


def _check_finite(broken: Mapping[str, int], files: Mapping[str, TaskFile]) -> None:
    for label, count in broken.items():
        if count > MAX_BAD_SHARE * len(files[label].rows):
            raise StageError(
                f"evaluate: {count} of {len(files[label].rows)} items of {label} have losses that are not finite (at most "
                f"{MAX_BAD_SHARE:.0%} may): the model's weights or activations are not finite; look at its training"
            )
