"""Evaluation files, and which of their items a text overlaps with: runs of 13 words that both have.

    items = read_items(Path("tasks"), ngram_words=13)
    items.hits(text)       -> rows of `items.items` that share a run of words with the text

A folder of JSON lines files, one per task; every string in an item, however deep, counts on its own. 13 words is the length that GPT-3
(arXiv 2005.14165, appendix C) and many after it use. An item without a string of so many words cannot be checked: it is counted as short,
and never as free of overlap.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from craw4llm.errors import InputError
from craw4llm.selection.words import grams


@dataclass(frozen=True)
class Items:
    """names: of the tasks, sorted. items: (task, line from 0) of every item, by task and line. short: bool[items], cannot be checked.

    known: uint64, ascending, the hashes of all runs; owners: int64[len(known)], the item of each (a run of two items is there twice).
    """

    names: list[str]
    items: list[tuple[str, int]]
    short: NDArray[np.bool_]
    known: NDArray[np.uint64]
    owners: NDArray[np.int64]
    ngram_words: int

    def hits(self, text: str) -> NDArray[np.int64]:
        """int64, ascending: the items that share a run of words with `text`."""
        runs = np.unique(grams(text, self.ngram_words))
        left = np.searchsorted(self.known, runs, side="left")
        right = np.searchsorted(self.known, runs, side="right")
        found = [self.owners[a:b] for a, b in zip(left.tolist(), right.tolist(), strict=True) if b > a]
        return np.unique(np.concatenate(found)) if found else np.empty(0, dtype=np.int64)


def read_items(folder: Path, ngram_words: int) -> Items:
    """The items of all `*.jsonl` files of a folder (or of one file). InputError for a folder without any, or a line that is no JSON."""
    files = [folder] if folder.is_file() else sorted(folder.rglob("*.jsonl"), key=lambda p: p.relative_to(folder).as_posix())
    if not files:
        raise InputError(f"evaluation files: {folder} holds no *.jsonl; give a folder of JSON lines files, one per task")
    names = [path.stem if folder.is_file() else path.relative_to(folder).with_suffix("").as_posix() for path in files]
    items: list[tuple[str, int]] = []
    short, runs, owners = [], [], []
    for name, path in zip(names, files, strict=True):
        for line, item in _lines(path):
            hashes = [grams(text, ngram_words) for text in strings(item)]
            unique = np.unique(np.concatenate(hashes)) if hashes else np.empty(0, dtype=np.uint64)
            runs.append(unique)
            owners.append(np.full(len(unique), len(items), dtype=np.int64))
            short.append(not len(unique))
            items.append((name, line))
    if not items:
        raise InputError(f"evaluation files: the files of {folder} hold no items; expected one JSON object a line")
    known, of = np.concatenate(runs), np.concatenate(owners)
    order = np.lexsort((of, known))
    return Items(names, items, np.array(short, dtype=np.bool_), known[order], of[order], ngram_words)


def strings(value: Any) -> Iterator[str]:
    """Every string in a JSON value."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for key in value:
            yield from strings(value[key])
    elif isinstance(value, list):
        for one in value:
            yield from strings(one)


def _lines(path: Path) -> Iterator[tuple[int, Any]]:
    with path.open(encoding="utf-8") as stream:
        try:
            for number, line in enumerate(stream):
                if line.strip():
                    yield number, json.loads(line)
        except ValueError as error:
            raise InputError(f"evaluation files: {path} is no UTF-8 JSON lines file ({error}); expected one JSON object a line") from error
