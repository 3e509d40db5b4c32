"""The inner loops of the fast fastText routes, compiled with numba (cached beside this file, or in NUMBA_CACHE_DIR).

    rows = rows_of(...)          which input rows a text reads, in fastText's order
    project, exact               log-odds, or the two outputs bit by bit, for a batch of texts

A text is UTF-8 as a page has it. The scan does what `craw4llm.scoring.scorer.normalise` and fastText's Dictionary::getLine do together:
words end at white space of any kind that Python's `str.split` knows, or at NUL; a word `</s>` and the label prefix are split after their
first byte; each word's 32-bit FNV-1a hash finds its row, and word n-grams are hashed into the buckets; the end of the text is the word
`</s>`. Measured on one core, 668 words a page, two million buckets: docs/performance.md.
"""

# mypy: disallow-untyped-defs=false, disallow-incomplete-defs=false
# numba types these functions by what they are called with.

import math

import numba
import numpy as np

# Dictionary::hash: 32-bit FNV-1a over signed bytes. numba widens uint32 arithmetic, so it runs in uint64, and the low
# 32 bits count.
_FNV_START, _FNV_STEP, _LOW = np.uint64(2166136261), np.uint64(16777619), np.uint64(0xFFFFFFFF)
_ONE = np.uint64(1)
_NGRAM_STEP = np.uint64(116049371)  # Dictionary::addWordNgrams


@numba.njit(cache=True, nogil=True, inline="always")
def _white(data, at, stop):
    """Bytes of the white space that begins at `at`; 0 where there is none."""
    b = data[at]
    if b <= 32:
        return 1 if b == 32 or b == 0 or 9 <= b <= 13 or 28 <= b <= 31 else 0
    if b < 0xC2:
        return 0
    if b == 0xC2:
        return 2 if at + 1 < stop and (data[at + 1] == 0x85 or data[at + 1] == 0xA0) else 0
    if b < 0xE1 or b > 0xE3 or at + 2 >= stop:
        return 0
    c, d = data[at + 1], data[at + 2]
    if b == 0xE1:
        return 3 if c == 0x9A and d == 0x80 else 0  # U+1680
    if b == 0xE2:
        if c == 0x80:  # U+2000 to U+200A, U+2028, U+2029, U+202F
            return 3 if 0x80 <= d <= 0x8A or d == 0xA8 or d == 0xA9 or d == 0xAF else 0
        return 3 if c == 0x81 and d == 0x9F else 0  # U+205F
    return 3 if c == 0x80 and d == 0x80 else 0  # U+3000


@numba.njit(cache=True, nogil=True, inline="always")
def _white_released(data, at, stop):
    """As `_white`, of what ends a word in the released code: its `splitlines`, then what fastText takes for white space."""
    b = data[at]
    if b <= 32:
        return 1 if b == 32 or b == 0 or 9 <= b <= 13 or 28 <= b <= 30 else 0
    if b == 0xC2:
        return 2 if at + 1 < stop and data[at + 1] == 0x85 else 0
    if b == 0xE2 and at + 2 < stop and data[at + 1] == 0x80:
        return 3 if data[at + 2] == 0xA8 or data[at + 2] == 0xA9 else 0  # U+2028, U+2029
    return 0


@numba.njit(cache=True, nogil=True, inline="always")
def _add(h, byte):
    """The hash h, one byte further; its low 32 bits count."""
    return (h ^ np.uint64(np.int64(np.int8(byte)))) * _FNV_STEP


@numba.njit(cache=True, nogil=True, inline="always")
def _signed(h):
    """fastText keeps the hashes of words as int32, so they are sign-extended when n-grams are hashed."""
    return h | (_LOW << np.uint64(32)) if h >> np.uint64(31) else h


@numba.njit(cache=True, nogil=True, inline="always")
def _find(data, start, stop, h, packed, slots, blob, word_at):
    """Id of the word data[start:stop]; -1 where it is not in the dictionary.

    h: its hash. packed: its bytes as one number, 0 for more than eight. slots uint64[size, 2]: hash << 32 | id + 1 (0: free), packed.
    Most words are found, or told from others, without looking at their bytes in `blob`: one cache line a word.
    """
    mask = np.uint64(len(slots) - 1)
    at = h & mask
    while slots[at, 0] != 0:
        entry = slots[at, 0]
        if entry >> np.uint64(32) == h and slots[at, 1] == packed:
            word = np.int64(entry & _LOW) - 1
            if packed:
                return word
            begin = word_at[word]
            if word_at[word + 1] - begin == stop - start:
                same = True
                for k in range(stop - start):
                    if blob[begin + k] != data[start + k]:
                        same = False
                        break
                if same:
                    return word
        at = (at + np.uint64(1)) & mask
    return np.int64(-1)


@numba.njit(cache=True, nogil=True, inline="always")
def _pack(data, start, stop):
    if stop - start > 8:
        return np.uint64(0)
    packed = np.uint64(0)
    for k in range(start, stop):
        packed = packed << np.uint64(8) | np.uint64(data[k])
    return packed


@numba.njit(cache=True, nogil=True)
def build_slots(blob, word_at, slots):
    """Fills the hash table of the words. slots: uint64[size, 2] zeros, size a power of two, at least twice the number of words."""
    mask = np.uint64(len(slots) - 1)
    for word in range(len(word_at) - 1):
        h = _FNV_START
        for k in range(word_at[word], word_at[word + 1]):
            h = _add(h, blob[k])
        h &= _LOW
        at = h & mask
        while slots[at, 0] != 0:
            at = (at + np.uint64(1)) & mask
        slots[at, 0] = (h << np.uint64(32)) | np.uint64(word + 1)
        slots[at, 1] = _pack(blob, word_at[word], word_at[word + 1])


@numba.njit(cache=True, nogil=True, inline="always")
def _hash(data, start, stop):
    h = _FNV_START
    for k in range(start, stop):
        h = _add(h, data[k])
    return h & _LOW


@numba.njit(cache=True, nogil=True, inline="always")
def _starts_with(data, start, stop, what):
    if stop - start < len(what):
        return False
    for k in range(len(what)):  # noqa: SIM110  (numba compiles no generator)
        if data[start + k] != what[k]:
            return False
    return True


@numba.njit(cache=True, nogil=True)
def words_of(data, start, stop, prefix, end, released, hashes, packs, begins, ends):
    """Finds the words of the text data[start:stop]: hash, packed bytes (see `_find`), first byte and end of each. Returns their number.

    released: as the released code reads a text: other white space, and fastText's markers act (one ends the text, the other is no word).
    """
    words = 0
    # One flat loop over bytes with an unsigned position: 2.4 times as fast as a loop over words with a loop over bytes in it.
    at, last = np.uint64(start), np.uint64(stop)
    begin = at
    h, packed = _FNV_START, np.uint64(0)
    while at <= last:
        step = 1  # at the end of the text, as if white space followed
        if at < last:
            b = data[at]
            if b > 32 and b < 0xC2:
                h = _add(h, b)
                packed = packed << np.uint64(8) | np.uint64(b)
                at += _ONE
                continue
            step = _white_released(data, np.int64(at), stop) if released else _white(data, np.int64(at), stop)
            if step == 0:
                h = _add(h, b)
                packed = packed << np.uint64(8) | np.uint64(b)
                at += _ONE
                continue
        if at > begin:
            first, until = np.int64(begin), np.int64(at)
            h &= _LOW
            if until - first > 8:
                packed = np.uint64(0)
            if data[first] == prefix[0] or data[first] == end[0]:
                # a word, or its beginning, that fastText would take for its own marker: split after its first character
                marker = until - first == len(end) and _starts_with(data, first, until, end)
                if released:
                    if marker:
                        return words
                    if _starts_with(data, first, until, prefix):
                        h, packed = _FNV_START, np.uint64(0)
                        at += np.uint64(step)
                        begin = at
                        continue
                while marker or _starts_with(data, first, until, prefix):
                    marker = False
                    hashes[words], packs[words] = _hash(data, first, first + 1), np.uint64(data[first])
                    begins[words], ends[words] = first, first + 1
                    words += 1
                    first += 1
                    h, packed = _hash(data, first, until), _pack(data, first, until)
            hashes[words], packs[words], begins[words], ends[words] = h, packed, first, until
            words += 1
            h, packed = _FNV_START, np.uint64(0)
        at += np.uint64(step)
        begin = at
    return words


@numba.njit(cache=True, nogil=True)
def rows_of(data, start, stop, slots, blob, word_at, ngrams, buckets, pruned, prefix, end, released, rows, hashes, packs, begins, ends):
    """Writes the rows that the text data[start:stop] reads into `rows`; returns (rows, words), the end of the text not counted.

    Room: rows int64[(bytes + 2) * ngrams]; hashes, packs uint64, begins, ends int64[bytes + 2]. pruned: int32[buckets], or empty.
    Words are found first and looked up after: so the look-ups, which wait for memory, run side by side (1.5 times as fast).
    """
    words = words_of(data, start, stop, prefix, end, released, hashes, packs, begins, ends)
    n = 0
    for k in range(words):
        row = _find(data, begins[k], ends[k], hashes[k], packs[k], slots, blob, word_at)
        hashes[k] = _signed(hashes[k])
        rows[n] = row
        n += row >= 0
    h = _hash(end, 0, len(end))
    row = _find(end, 0, len(end), h, _pack(end, 0, len(end)), slots, blob, word_at)
    if row >= 0:
        rows[n] = row
        n += 1
    hashes[words] = _signed(h)
    if ngrams > 1:
        first = np.int64(len(word_at) - 1)
        for i in range(words + 1):
            g = hashes[i]
            for j in range(i + 1, min(words + 1, i + ngrams)):
                g = g * _NGRAM_STEP + hashes[j]
                bucket = np.int64(g % np.uint64(buckets))
                if len(pruned):
                    bucket = np.int64(pruned[bucket])
                    if bucket < 0:
                        continue
                rows[n] = first + bucket
                n += 1
    return n, words


@numba.njit(cache=True, nogil=True)
def dot_rows(rows, direction, out):
    """out float32[n] = rows float32[n, dim] . direction float64[dim], summed in float64 from the left: the same on any machine."""
    for k in range(len(rows)):
        total = 0.0
        for j in range(len(direction)):
            total += rows[k, j] * direction[j]
        out[k] = total


@numba.njit(cache=True, nogil=True)
def _room(offsets, ngrams):
    """rows, hashes, packs, begins, ends of `rows_of`, with room for the longest of the texts."""
    longest = 0
    for text in range(len(offsets) - 1):
        longest = max(longest, offsets[text + 1] - offsets[text])
    rows = np.empty((longest + 2) * ngrams, dtype=np.int64)
    hashes, packs = np.empty(longest + 2, dtype=np.uint64), np.empty(longest + 2, dtype=np.uint64)
    begins, ends = np.empty(longest + 2, dtype=np.int64), np.empty(longest + 2, dtype=np.int64)
    return rows, hashes, packs, begins, ends


@numba.njit(cache=True, nogil=True)
def project(data, offsets, slots, blob, word_at, ngrams, buckets, pruned, prefix, end, released, projection, out, words_out):
    """out float64[texts]: mean of the projection over the text's rows (NaN: it reads none). words_out int64[texts]: words of each."""
    rows, hashes, packs, begins, ends = _room(offsets, ngrams)
    for text in range(len(offsets) - 1):
        n, words_out[text] = rows_of(
            data, offsets[text], offsets[text + 1], slots, blob, word_at, ngrams, buckets, pruned, prefix, end, released,
            rows, hashes, packs, begins, ends,
        )  # fmt: skip
        total = 0.0
        for k in range(n):
            total += projection[rows[k]]
        out[text] = total / n if n else np.nan


@numba.njit(cache=True, nogil=True)
def exact(data, offsets, slots, blob, word_at, ngrams, buckets, pruned, prefix, end, released, matrix, output, chosen, out, words_out):
    """out float32[texts]: what the library's predict gives for the label, in its own order of float32 operations (NaN: no rows).

    released: of the label with the higher probability instead; minus it where that is not the label `chosen`.
    """
    rows, hashes, packs, begins, ends = _room(offsets, ngrams)
    dim = matrix.shape[1]
    hidden = np.empty(dim, dtype=np.float32)
    for text in range(len(offsets) - 1):
        n, words_out[text] = rows_of(
            data, offsets[text], offsets[text + 1], slots, blob, word_at, ngrams, buckets, pruned, prefix, end, released,
            rows, hashes, packs, begins, ends,
        )  # fmt: skip
        if n == 0:
            out[text] = np.nan
            continue
        hidden[:] = np.float32(0)
        # Four rows at a time, each sum in the rows' order: their fetches from memory overlap, and the sums are loaded and stored once.
        for k in range(0, n - n % 4, 4):
            row0, row1, row2, row3 = rows[k], rows[k + 1], rows[k + 2], rows[k + 3]
            for j in range(dim):
                hidden[j] = (((hidden[j] + matrix[row0, j]) + matrix[row1, j]) + matrix[row2, j]) + matrix[row3, j]
        for k in range(n - n % 4, n):
            row = rows[k]
            for j in range(dim):
                hidden[j] += matrix[row, j]
        share = np.float32(1.0 / n)
        for j in range(dim):
            hidden[j] *= share
        this, other = np.float32(0), np.float32(0)
        for j in range(dim):  # Matrix::dotRow: a running float32 sum
            this += output[chosen, j] * hidden[j]
            other += output[1 - chosen, j] * hidden[j]
        # SoftmaxLoss::computeOutput (C's exp, of doubles), then std_log(x) = log(x + 1e-5) and std::exp of a float, in fastText's types
        top = max(this, other)
        this = np.float32(math.exp(np.float64(np.float32(this - top))))
        other = np.float32(math.exp(np.float64(np.float32(other - top))))
        first, second = (this, other) if chosen == 0 else (other, this)
        total = np.float32(first + second)
        log_this = np.float32(math.log(np.float64(np.float32(this / total)) + 1e-5))
        if released:
            log_other = np.float32(math.log(np.float64(np.float32(other / total)) + 1e-5))
            # of two equal ones fastText keeps the label that comes later
            if log_other > log_this or (log_other == log_this and chosen == 0):
                out[text] = -np.float32(math.exp(log_other))
                continue
        out[text] = np.float32(math.exp(log_this))
