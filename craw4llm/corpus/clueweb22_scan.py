"""Reads the link lists of outlink and inlink records, as bytes, with numba: 5 times as fast as a JSON parser that builds objects.

    keys, counts, facts, own = scan_links([b'{"url": ..., "outlinks": [[...], ...]}', ...])

Each entry of a list is told apart by looking at it: a first field that is a document id is the released code's layout; otherwise the
first field is a URL, and a document id may stand in the sixth (ClueWeb22 as its users describe it), or there is none (five fields).
A record is a whole JSON object; one that does not parse is reported as broken, and its entries do not count.
"""

# mypy: disallow-untyped-defs=false, disallow-incomplete-defs=false
# numba types these functions by what they are called with.

from collections.abc import Sequence

import numba
import numpy as np
from numpy.typing import NDArray

from craw4llm.corpus.clueweb22_files import FILES_PER_LANGUAGE, LANGUAGES, RECORDS_PER_FILE

# Columns of `facts`, a row per record.
ENTRIES, ID_FIRST, ID_SIXTH, NO_ID_SHORT, NO_ID_LONG, NULL_ID, STATE = range(7)
N_FACTS = 7
OK, BLANK, BROKEN = 0, 1, 2  # values of STATE

_PREFIX = np.frombuffer(b"clueweb22-", np.uint8)
_NAMES = np.frombuffer("".join(LANGUAGES).encode(), np.uint8)
_NAME_AT = np.cumsum([0, *(len(name) for name in LANGUAGES)]).astype(np.int64)
_OUTLINKS = np.frombuffer(b"outlinks", np.uint8)
_ANCHORS = np.frombuffer(b"anchors", np.uint8)
_OWN_ID = np.frombuffer(b"ClueWeb22-ID", np.uint8)
_ONE, _TWO = np.uint64(1), np.uint64(2)
_FIELDS = 6  # of an entry, that are looked at
_LEAST_ID = 26  # bytes of the shortest document id with its quotes and comma


def scan_links(records: Sequence[bytes]) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
    """(keys int64: document ids of the links, concatenated, with repeats, in their order; counts int64[records]: keys of each record;
    facts int64[records, N_FACTS]: entries by form, and STATE; own int64[records]: the key of the record's own id, -1 where it has none).
    """
    data = np.frombuffer(records[0] if len(records) == 1 else b"".join(records), dtype=np.uint8)  # of a large record no copy
    ends = np.cumsum(np.fromiter(map(len, records), dtype=np.int64, count=len(records)))
    keys = np.empty(len(data) // _LEAST_ID + 1, dtype=np.int64)
    counts = np.zeros(len(records), dtype=np.int64)
    facts = np.zeros((len(records), N_FACTS), dtype=np.int64)
    own = np.full(len(records), -1, dtype=np.int64)
    used = _scan(data, ends, keys, counts, facts, own)
    return keys[:used], counts, facts, own


@numba.njit(cache=True, nogil=True, inline="always")
def _is(data, start, stop, what):
    if stop - start != len(what):
        return False
    for k in range(len(what)):  # noqa: SIM110  (numba compiles no generator)
        if data[start + k] != what[k]:
            return False
    return True


@numba.njit(cache=True, nogil=True, inline="always")
def _number(data, start, digits):
    value = np.int64(0)
    for k in range(start, start + digits):
        if data[k] < 48 or data[k] > 57:
            return np.int64(-1)
        value = value * 10 + np.int64(data[k]) - 48
    return value


@numba.njit(cache=True, nogil=True)
def _key(data, start, stop):
    """The key of the document id data[start:stop]; -1 for anything else."""
    tail = stop - 13  # <SSDD>-<FF>-<RRRRR>
    if tail <= start + 10 or data[start] != 99:  # "c"
        return np.int64(-1)
    for k in range(10):
        if data[start + k] != _PREFIX[k]:
            return np.int64(-1)
    language = np.int64(-1)
    for k in range(len(_NAME_AT) - 1):
        if _is(data, start + 10, tail, _NAMES[_NAME_AT[k] : _NAME_AT[k + 1]]):
            language = np.int64(k)
            break
    if language < 0 or data[tail + 4] != 45 or data[tail + 7] != 45:
        return np.int64(-1)
    folder, file, record = _number(data, tail, 4), _number(data, tail + 5, 2), _number(data, tail + 8, 5)
    if folder < 0 or file < 0 or record < 0:
        return np.int64(-1)
    return (language * FILES_PER_LANGUAGE + folder * 100 + file) * RECORDS_PER_FILE + record


@numba.njit(cache=True, nogil=True)
def _scan(data, ends, keys, counts, facts, own):
    used = 0
    starts = np.zeros(_FIELDS, dtype=np.int64)  # of an entry's fields; 0: no string
    stops = np.zeros(_FIELDS, dtype=np.int64)
    begin = np.int64(0)
    for row in range(len(ends)):
        end = ends[row]
        first = used
        depth, at = 0, begin
        in_list, is_key, closed, broken, blank = False, False, False, False, True
        meaning = 0  # of the value that follows at depth 1: 1 the list, 2 the record's id
        field = 0
        while at < end:
            c = data[at]
            if c == 32 or c == 10 or c == 13 or c == 9:
                at += 1
                continue
            blank = False
            if closed:  # something stands after the object
                broken = True
                break
            if c == 34:  # a string
                start = at + 1
                place = np.uint64(start)  # unsigned: numba then need not look for negative indices; half the time
                stop = np.uint64(end)
                while place < stop:
                    b = data[place]
                    if b == 34:
                        break
                    place += _TWO if b == 92 else _ONE
                at = np.int64(place)
                if at >= end or depth == 0:
                    broken = True
                    break
                if depth == 1:
                    if is_key:
                        meaning = 0
                        if _is(data, start, at, _OUTLINKS) or _is(data, start, at, _ANCHORS):
                            meaning = 1
                        elif _is(data, start, at, _OWN_ID):
                            meaning = 2
                    elif meaning == 2:
                        own[row] = _key(data, start, at)
                elif depth == 3 and in_list and field < _FIELDS:
                    starts[field], stops[field] = start, at
            elif c == 123:  # {
                depth += 1
                is_key = depth == 1
            elif c == 91:  # [
                depth += 1
                if depth == 1:
                    broken = True
                    break
                if depth == 2:
                    in_list = meaning == 1
                elif depth == 3 and in_list:
                    field = 0
                    starts[:] = 0
            elif c == 93 or c == 125:
                if depth == 3 and in_list and c == 93:  # an entry ends
                    facts[row, ENTRIES] += 1
                    key = np.int64(-1)
                    if starts[0]:
                        key = _key(data, starts[0], stops[0])
                    if key >= 0:
                        facts[row, ID_FIRST] += 1
                    elif field >= 5:
                        if starts[5]:
                            key = _key(data, starts[5], stops[5])
                        if key >= 0:
                            facts[row, ID_SIXTH] += 1
                        elif starts[0] == 0 or starts[5] == 0:
                            facts[row, NULL_ID] += 1
                        else:
                            facts[row, NO_ID_LONG] += 1
                    elif starts[0] == 0:
                        facts[row, NULL_ID] += 1
                    else:
                        facts[row, NO_ID_SHORT] += 1
                    if key >= 0:
                        keys[used] = key
                        used += 1
                elif depth == 2:
                    in_list = False
                depth -= 1
                if depth < 0:
                    broken = True
                    break
                closed = depth == 0
            elif c == 44:  # ,
                if depth == 3:
                    field += 1
                elif depth == 1:
                    is_key = True
            elif c == 58 and depth == 1:  # :
                is_key = False
            elif depth == 0:
                broken = True
                break
            at += 1
        if blank:
            facts[row, STATE] = BLANK
        elif broken or depth != 0:
            facts[row, :] = 0
            facts[row, STATE] = BROKEN
            used = first
        counts[row] = used - first
        begin = end
    return used
