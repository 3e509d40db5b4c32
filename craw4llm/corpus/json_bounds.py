"""How large a record may be, and whether a JSON text may be parsed: a parser's objects take up to thirty times the text.

    too_rich(b'[[],[],[], ...')      -> True

Sixteen megabytes of `[],` become half a gigabyte of lists (measured with orjson). So before a long text is parsed its values are counted,
as bytes: brackets that open and commas, outside of strings. A page's record has a few for each of its links.
"""

# mypy: disallow-untyped-defs=false, disallow-incomplete-defs=false
# numba types these functions by what they are called with.

import numpy as np

MAX_RECORD_BYTES = 16 << 20  # of a text, or a line: what is larger is no page, and Python's strings may take four times as much
MAX_VALUES = 1 << 20  # some 80 MB as Python's objects
_SHORT_BYTES = 1 << 20  # what is shorter can't hold so many


def too_rich(data: bytes) -> bool:
    """Whether a JSON text holds more than MAX_VALUES values."""
    if len(data) <= _SHORT_BYTES or data.count(b",") + data.count(b"[") + data.count(b"{") <= MAX_VALUES:
        return False
    return count_values(data) > MAX_VALUES


def count_values(data: bytes) -> int:
    """Opening brackets and commas outside of strings."""
    import numba  # only texts that may be refused need the compiler

    global _counter
    if _counter is None:
        _counter = numba.njit(_count, cache=True)
    return int(_counter(np.frombuffer(data, dtype=np.uint8)))


_counter = None


def _count(data):
    found = 0
    inside = False
    k = 0
    while k < len(data):
        c = data[k]
        if inside:
            if c == 92:  # a backslash, and what it escapes
                k += 1
            elif c == 34:
                inside = False
        elif c == 34:
            inside = True
        elif c == 44 or c == 91 or c == 123:
            found += 1
        k += 1
    return found
