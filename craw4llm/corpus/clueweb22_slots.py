"""Where a document stands in a collection of ClueWeb22: keys (craw4llm.corpus.clueweb22_files) <-> slots.

    slots = Slots(numbers=..., base=[0, 18000, 37500], allowed=...)
    slots.of_keys(keys)     -> int64, the slot of each document; OUT or FOREIGN for one that has none

A slot is the number of records in the files before a document's own, plus its record number. The counts come from the `.offset` files.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from craw4llm.corpus.clueweb22_files import FILES_PER_LANGUAGE, LANGUAGES, RECORDS_PER_FILE

FOREIGN, OUT = -2, -1  # what is no slot: of another language or stream; of the collection, but in no file

Ints = NDArray[np.int64]


def format_ids(keys: Ints) -> list[str]:
    """Document ids of keys: craw4llm.corpus.clueweb22_files.format_id, for many."""
    ids = np.empty(len(keys), dtype=object)
    languages = keys // (FILES_PER_LANGUAGE * RECORDS_PER_FILE)
    for language in sorted(set(languages.tolist())):
        chosen = np.flatnonzero(languages == language)
        name = f"clueweb22-{LANGUAGES[language]}0000-00-00000"
        text = np.tile(np.frombuffer(name.encode(), dtype=np.uint8), (len(chosen), 1))
        left = keys[chosen]
        for k in range(1, 14):
            if name[-k] == "0":
                left, digit = np.divmod(left, 10)
                text[:, -k] += digit.astype(np.uint8)
        ids[chosen] = np.ascontiguousarray(text).view(f"S{len(name)}").ravel().astype(str)
    return list(ids)


@dataclass(frozen=True, kw_only=True)
class Slots:
    """Document keys <-> slots. numbers: int64, of the files, ascending; base: int64[files + 1]; allowed: bool, by language and stream."""

    numbers: Ints
    base: Ints
    allowed: NDArray[np.bool_]

    @property
    def count(self) -> int:
        return int(self.base[-1])

    def of_keys(self, keys: Ints) -> Ints:
        """The slot of each key; OUT or FOREIGN for those that have none."""
        numbers, records = np.divmod(keys, RECORDS_PER_FILE)
        at = np.minimum(self._place(numbers), len(self.numbers) - 1)
        slots = self.base[at] + records
        slots[(self.numbers[at] != numbers) | (slots >= self.base[at + 1])] = OUT
        slots[~self.allowed[numbers // (FILES_PER_LANGUAGE // 100)]] = FOREIGN
        return slots

    def keys(self, slots: Ints) -> Ints:
        at = np.searchsorted(self.base, slots, side="right") - 1
        return self.numbers[at] * RECORDS_PER_FILE + slots - self.base[at]

    def _place(self, numbers: Ints) -> Ints:
        """Where each file number stands. Files mostly follow each other: then it is a subtraction."""
        first = int(self.numbers[0])
        if int(self.numbers[-1]) - first == len(self.numbers) - 1:
            return np.clip(numbers - first, 0, len(self.numbers))
        return np.searchsorted(self.numbers, numbers)
