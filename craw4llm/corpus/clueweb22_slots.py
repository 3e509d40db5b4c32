"""Where a document stands in a collection of ClueWeb22: keys (craw4llm.corpus.clueweb22_files) <-> slots.

    slots = Slots(numbers=..., base=[0, 18000, 37500], allowed=...)
    slots.of_keys(keys)     -> int64, the slot of each document; OUT or FOREIGN for one that has none

A slot is the number of records in the files before a document's own, plus its record number. The counts come from the `.offset` files.
"""

import numpy as np
from numpy.typing import NDArray

from craw4llm.corpus.clueweb22_files import FILES_PER_LANGUAGE, LANGUAGES, RECORDS_PER_FILE
from craw4llm.dataclass import dataclass

_PAIRS = np.array([f"{k:02d}" for k in range(100)], dtype="S2").view(np.uint16)  # two digits in ASCII, as they lie in memory
FOREIGN, OUT = -2, -1  # what is no slot: of another language or stream; of the collection, but in no file

Ints = NDArray[np.int64]


def format_ids(keys: Ints) -> list[str]:
    """Document ids of keys: craw4llm.corpus.clueweb22_files.format_id, for many."""
    if not len(keys):
        return []
    text, ends = spell_ids(keys)
    lengths = np.diff(ends, prepend=0)
    if (lengths == lengths[0]).all():
        return list(text.view(f"S{lengths[0]}").astype(str).tolist())
    whole = text.tobytes().decode()
    return [whole[end - length : end] for end, length in zip(ends.tolist(), lengths.tolist(), strict=True)]


def spell_ids(keys: Ints, end: str = "") -> tuple[NDArray[np.uint8], Ints]:
    """(document ids one after the other, in ASCII, each with `end` behind it; where each ends)."""
    numbers, records = (part.astype(np.uint32) for part in np.divmod(keys, RECORDS_PER_FILE))
    languages, files = numbers // np.uint32(FILES_PER_LANGUAGE), numbers % np.uint32(FILES_PER_LANGUAGE)
    used = np.flatnonzero(np.bincount(languages, minlength=len(LANGUAGES)))
    names = [f"clueweb22-{LANGUAGES[language]}0000-00-00000{end}".encode() for language in used]
    width = max(map(len, names), default=0)
    # Flush right, so that digits stand in the same columns in every language; NUL before.
    forms = np.zeros((len(LANGUAGES), width), dtype=np.uint8)
    for language, name in zip(used, names, strict=True):
        forms[language, width - len(name) :] = np.frombuffer(name, dtype=np.uint8)
    text = forms.take(languages, axis=0)
    for left, pairs in ((records, (2, 4)), (files, (8, 11, 13))):
        for pair in pairs if len(keys) else ():
            rest = left // np.uint32(100)
            column = np.ndarray(len(keys), np.uint16, text, offset=width - len(end) - pair, strides=(width,))
            column[:] = _PAIRS.take(left - rest * np.uint32(100))
            left = rest
    if len(keys):
        text[:, width - len(end) - 5] += (records // np.uint32(10_000)).astype(np.uint8)
    lengths = np.zeros(len(LANGUAGES), dtype=np.int64)
    lengths[used] = [len(name) for name in names]
    ends = np.cumsum(lengths[languages])
    return text.ravel() if len(used) == 1 else text[text != 0], ends


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
