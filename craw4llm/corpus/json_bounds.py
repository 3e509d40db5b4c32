"""How large a record may be, and whether a JSON text may be parsed: a parser's objects take up to thirty times the text.

    too_rich(b'[[],[],[], ...')      -> True

Sixteen megabytes of `[],` become half a gigabyte of lists (measured with orjson). So before a long text is parsed its values are counted,
as bytes: brackets that open and commas, outside of strings. A page's record has a few for each of its links.
"""

import numpy as np

MAX_RECORD_BYTES = 16 << 20  # of a text, or a line: what is larger is no page, and Python's strings may take four times as much
MAX_VALUES = 1 << 20  # some 80 MB as Python's objects
_SHORT_BYTES = 1 << 20  # what is shorter can't hold so many
_BLOCK_BYTES = 1 << 18
_QUOTE, _COMMA, _BRACKET, _BACKSLASH, _BRACE = b'",[\\{'


def too_rich(data: bytes) -> bool:
    """Whether a JSON text holds more than MAX_VALUES values."""
    if len(data) <= _SHORT_BYTES or data.count(b",") + data.count(b"[") + data.count(b"{") <= MAX_VALUES:
        return False
    return count_values(data) > MAX_VALUES


def count_values(data: bytes) -> int:
    """Opening brackets and commas outside of strings. Of what is no JSON, as far as a parser would read."""
    found = start = 0
    inside = False
    while start < len(data):
        end = start + _BLOCK_BYTES
        while end < len(data) and data[end - 1] == _BACKSLASH:  # an escape is not cut
            end += 1
        block = np.frombuffer(data[start:end].replace(b"\\\\", b"").replace(b'\\"', b""), dtype=np.uint8)
        in_string = np.logical_xor.accumulate(np.concatenate([[inside], block == _QUOTE]))[1:]
        found += int(np.count_nonzero(((block == _COMMA) | (block == _BRACKET) | (block == _BRACE)) & ~in_string))
        inside = bool(in_string[-1]) if len(block) else inside
        start = end
    return found
