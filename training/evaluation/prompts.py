"""Prompt assembly, equal to llm-foundry's in-context-learning data sets (0.9.0 and its head of 2025-07-21) token for token.

    for prompt in prompts(task_file):            one per item, in the order of evaluation
        ids = encode_prompt(prompt, tokenizer.encode, context=2048)      (encode_prompts: many at once)

An item's text is three parts that are encoded apart and concatenated: the preamble (the few-shot examples), the context (the item's
own question) and the continuation. A space belongs to the continuation, because byte-level BPEs make one token of " word". Nothing
else is added: no begin or end of text. A prompt that is too long keeps its last tokens.

The examples come from the item's own file (its category, where the task has categories), by one `random.Random(seed)` stream that is
consumed in file order, and they stand in the iteration order of a CPython set of their indices. That order is part of the protocol.
Rules: llm-foundry `llmfoundry/eval/datasets/in_context_learning_evaluation.py`, written anew here.
"""

import dataclasses
import random
from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from training.evaluation.tasks import Row, Task, TaskFile

EXAMPLE_DELIMITER = "\n"
FEW_SHOT_SEED = 1234  # llm-foundry's default, which DCLM keeps

Encode = Callable[[str], Sequence[int]]
EncodeBatch = Callable[[Sequence[str]], Sequence[Sequence[int]]]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Prompt:
    """One item as text.

    line: of the file, from 0. example: position within the category (or file). shots: examples used, positions in the same pool,
    in order. contexts, continuations: one per option; equal contexts (mc) or equal continuations (schema) are repeated.
    gold: None for lm.
    """

    line: int
    example: int
    category: str | None
    gold: int | None
    shots: tuple[int, ...]
    preamble: str
    contexts: tuple[str, ...]
    continuations: tuple[str, ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class EncodedPrompt:
    """One item as token ids.

    contexts, continuations: int64, one per option; the contexts include the preamble and are cropped from the left so that context and
    continuation fit. cropped: any was. too_long: a continuation leaves no room for one token of context, so the item cannot be
    scored by this model (its contexts are then left as they were).
    """

    prompt: Prompt
    contexts: tuple[NDArray[np.int64], ...]
    continuations: tuple[NDArray[np.int64], ...]
    cropped: bool
    too_long: bool


def prompts(file: TaskFile, seed: int = FEW_SHOT_SEED) -> Iterator[Prompt]:
    """The prompts of a task: categories in sorted order, items in file order within."""
    task = file.task
    pools: dict[str | None, list[tuple[int, Row]]] = {}
    for line, row in zip(file.lines, file.rows, strict=True):
        pools.setdefault(row["category"] if task.categories else None, []).append((line, row))
    for category in sorted(pools, key=lambda name: name or ""):
        pool = [row for _, row in pools[category]]
        stream = random.Random(seed)
        for example, (line, row) in enumerate(pools[category]):
            shots = few_shot_indices(len(pool), task.shots, example, stream)
            preamble = EXAMPLE_DELIMITER.join(_solved(task, pool[j]) for j in shots)
            contexts, continuations = _open(task, row, after=bool(preamble))
            yield Prompt(
                line=line,
                example=example,
                category=category,
                gold=row.get("gold") if task.kind != "lm" else None,
                shots=tuple(shots),
                preamble=preamble,
                contexts=contexts,
                continuations=continuations,
            )


def few_shot_indices(items: int, shots: int, example: int, stream: random.Random) -> list[int]:
    """Indices of the examples for item `example` of a pool of `items`, in prompt order; at most items - 1 of them.

    Draws from `stream` also where the item itself was drawn and must be replaced, so items have to be asked for in order.
    """
    if shots == 0:
        return []
    chosen = set(stream.sample(range(items), min(items - 1, shots)))
    if example in chosen:
        chosen.remove(example)
        if len(chosen) < items - 1:
            other = stream.choice(range(items))
            while other in chosen or other == example:
                other = stream.choice(range(items))
            chosen.add(other)
    return list(chosen)  # in the set's own order: part of the protocol


def encode_prompt(prompt: Prompt, encode: Encode, context: int) -> EncodedPrompt:
    """Token ids of an item for a model that takes `context` tokens (context and continuation together)."""
    return encode_prompts([prompt], lambda texts: [encode(text) for text in texts], context)[0]


def encode_prompts(items: Sequence[Prompt], encode_batch: EncodeBatch, context: int) -> list[EncodedPrompt]:
    """`encode_prompt` of several items with one call of the tokenizer, which may use all processors."""
    texts = dict.fromkeys(text for p in items for text in (p.preamble, *p.contexts, *p.continuations) if text)
    ids = {"": np.empty(0, dtype=np.int64)}
    ids.update((text, np.asarray(i, dtype=np.int64)) for text, i in zip(texts, encode_batch(list(texts)), strict=True))
    return [_encoded(item, ids, context) for item in items]


def _encoded(prompt: Prompt, ids: Mapping[str, NDArray[np.int64]], context: int) -> EncodedPrompt:
    contexts = {text: np.concatenate([ids[prompt.preamble], ids[text]]) for text in dict.fromkeys(prompt.contexts)}
    too_long = any(len(ids[text]) >= context for text in prompt.continuations)
    cut = []
    cropped = False
    for before, after in zip(prompt.contexts, prompt.continuations, strict=True):
        whole, room = contexts[before], context - len(ids[after])
        if len(whole) > room and not too_long:
            whole, cropped = whole[-room:], True
        cut.append(whole)
    return EncodedPrompt(
        prompt=prompt,
        contexts=tuple(cut),
        continuations=tuple(ids[after] for after in prompt.continuations),
        cropped=cropped,
        too_long=too_long,
    )


def _solved(task: Task, row: Row) -> str:
    """An item with its answer, as an example."""
    if task.kind == "mc":
        return str(row["query"] + task.delimiter + row["choices"][row["gold"]])
    if task.kind == "lm":
        return str(row["context"] + task.delimiter + row["continuation"])
    return str(row["context_options"][row["gold"]] + task.delimiter + row["continuation"])


def _open(task: Task, row: Row, *, after: bool) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Contexts and continuations of an item, one per option. after: examples stand before it."""
    lead = EXAMPLE_DELIMITER if after else ""
    if task.kind == "schema":
        options = row["context_options"]
        # Without examples the delimiter is left out: llm-foundry does so for this schema alone.
        contexts = [lead + option + task.delimiter.rstrip() for option in options] if after else options
        return tuple(contexts), (_spaced(row["continuation"]),) * len(options)
    question, answers = (row["query"], row["choices"]) if task.kind == "mc" else (row["context"], [row["continuation"]])
    return ((lead + question + task.delimiter).rstrip(),) * len(answers), tuple(_spaced(answer) for answer in answers)


def _spaced(answer: str) -> str:
    return answer if answer.startswith(" ") else " " + answer
