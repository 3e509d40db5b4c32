"""The exact fast route for byte-level BPEs of GPT-NeoX's kind: tiktoken's engine with the rules of a `tokenizer.json`.

    fast = FastEncoder.of(path)          -> None where the file asks for something that this route does not do
    for ids in fast.pieces(text): ...    -> uint32 arrays; put together they are the library's ids of the text

The `tokenizers` library cuts a text at its added tokens (GPT-NeoX: runs of 2 to 24 spaces, cut greedily from the left), normalises (NFC),
splits with GPT-2's expression and merges. Here the runs are the first branch of the expression, and white space ends before a run:

     {2,24} | 's|'t|... | ?\\p{L}+ | ?\\p{N}+ | ?[^\\s\\p{L}\\p{N}]+ | W+(?!\\S) | W+        with W = (?!  )\\s

tiktoken merges the pair whose *joined bytes* have the lowest rank, the library the pair whose *merge* has. The two are the same where
(1) the parts of every merge have lower ranks than it, and (2) a token's bytes, merged with the ranks below its own, give the two parts of
its merge: then no other pair can ever make these bytes. Both are checked when a file is opened, as is that the rest of the file asks for
nothing else; a file that fails a check is left to the library.

Long texts go in pieces of about PIECE_CHARS, cut where no token can cross (`cuts`), so memory does not grow with the text.
"""

import json
import re
import unicodedata
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import lru_cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import tiktoken
from numpy.typing import NDArray

PIECE_CHARS = 1 << 18
THREADS_FROM_CHARS = 1 << 22
GPT2_SPLIT = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+"  # the ByteLevel pre-tokenizer's, up to white space
NO_SPECIAL = "\ufdd0 no special token \ufdd0"  # tiktoken wants one; it is never asked for
# Between these two characters every rule above ends a piece: before a single space, after a single line's end (of several the last goes
# apart, which the first part of a cut text could not know), between a digit and a letter.
_CUT = re.compile(r"(?<=[^\s])(?= [^\s])|(?<=[^\s]\n)(?=[A-Za-z0-9])|(?<=[0-9])(?=[A-Za-z])|(?<=[A-Za-z])(?=[0-9])")


class FastEncoder:
    """Encodes text as the `tokenizers` library does with special tokens taken as plain text."""

    def __init__(self, encoding: tiktoken.Encoding, *, nfc: bool) -> None:
        self._encoding = encoding
        self._nfc = nfc

    @classmethod
    def of(cls, path: Path) -> "FastEncoder | None":
        """The encoder of a tokenizer.json, or None where the file asks for anything that this route does not do exactly."""
        status = path.stat()
        return _open(str(path.resolve()), status.st_size, status.st_mtime_ns)

    def encode(self, text: str) -> NDArray[np.uint32]:
        """Ids of a text, uint32."""
        if len(text) <= PIECE_CHARS:
            return self._encode(text)
        return np.concatenate(list(self.pieces(text)))

    def pieces(self, text: str, threads: int = 1) -> Iterator[NDArray[np.uint32]]:
        """The ids of a text in several arrays, in order. threads: for a text of many pieces (tiktoken lets go of the GIL)."""
        if len(text) <= PIECE_CHARS:
            yield self._encode(text)
        elif threads <= 1 or len(text) < THREADS_FROM_CHARS:
            yield from (self._encode(text[start:stop]) for start, stop in pairwise([0, *cuts(text, PIECE_CHARS)]))
        else:
            waiting: deque[Future[NDArray[np.uint32]]] = deque()
            with ThreadPoolExecutor(threads) as pool:
                for start, stop in pairwise([0, *cuts(text, PIECE_CHARS)]):
                    waiting.append(pool.submit(self._encode, text[start:stop]))
                    if len(waiting) > 2 * threads:
                        yield waiting.popleft().result()
                while waiting:
                    yield waiting.popleft().result()

    def _encode(self, text: str) -> NDArray[np.uint32]:
        if self._nfc and not text.isascii():
            text = unicodedata.normalize("NFC", text)
        return self._encoding.encode_to_numpy(text, disallowed_special=())


def cuts(text: str, size: int) -> Iterator[int]:
    """Where to cut `text` into pieces of at least `size` characters, but for the last: ends of the pieces, ascending, len(text) last."""
    start = 0
    while len(text) - start > size:
        found = _CUT.search(text, start + size)
        if found is None:
            break
        start = found.start()
        yield start
    yield len(text)


@lru_cache(maxsize=4)
def _open(path: str, size: int, mtime_ns: int) -> FastEncoder | None:
    content = json.loads(Path(path).read_text(encoding="utf-8"))
    form = _form(content)
    if form is None:
        return None
    ranks, runs = form
    nfc = content["normalizer"] is not None
    white = r"(?:(?!  )\s)" if runs else r"\s"
    first = rf" {{2,{len(runs) + 1}}}|" if runs else ""
    pattern = f"{first}{GPT2_SPLIT}|{white}+(?!\\S)|{white}+"
    special = max(max(ranks.values()), *runs.values(), 0) + 1
    # the base vocabulary's own runs of spaces are out of reach once runs are cut out; the added tokens take their place
    mergeable = ranks | {b" " * k: i for k, i in runs.items()}
    encoding = tiktoken.Encoding("craw4llm", pat_str=pattern, mergeable_ranks=mergeable, special_tokens={NO_SPECIAL: special})
    return FastEncoder(encoding, nfc=nfc)


def _form(content: dict[str, Any]) -> tuple[dict[bytes, int], dict[int, int]] | None:
    """(rank = id of every token's bytes, id of every run of spaces), or None if the file is not of the kind described above."""
    model, split = content["model"], content["pre_tokenizer"]
    plain_model = {"dropout": None, "unk_token": None, "continuing_subword_prefix": None, "end_of_word_suffix": None}
    if model.get("type") != "BPE" or any(model.get(k) not in (v, "") for k, v in plain_model.items()):
        return None
    if any(model.get(k) for k in ("fuse_unk", "byte_fallback", "ignore_merges")):
        return None
    if not split or split.get("type") != "ByteLevel" or split.get("add_prefix_space") or not split.get("use_regex", True):
        return None
    if content["normalizer"] not in (None, {"type": "NFC"}):
        return None
    runs = {}
    added = set()
    for token in content["added_tokens"]:
        added.add(token["content"])
        if token["special"]:
            continue
        if token["content"].strip(" ") or any(token[k] for k in ("single_word", "lstrip", "rstrip")):
            return None
        runs[len(token["content"])] = int(token["id"])
    if sorted(runs) != list(range(2, len(runs) + 2)):
        return None
    pairs = (m.split(" ") if isinstance(m, str) else m for m in model["merges"])
    ranks = _ranks(model["vocab"], [(a, b) for a, b in pairs], added)
    return None if ranks is None else (ranks, runs)


def _ranks(vocab: dict[str, int], merges: list[tuple[str, str]], added: set[str]) -> dict[bytes, int] | None:
    """Rank of every token's bytes: its id, where ids rise with the order of merges and both conditions of the module hold."""
    to_byte = {character: byte for byte, character in byte_characters().items()}
    letters = {a: i for a, i in vocab.items() if len(a) == 1 and a in to_byte}
    first = max(letters.values(), default=-1) + 1
    previous = first - 1
    merged: dict[str, int] = dict(letters)
    pairs: dict[tuple[str, str], int] = {}
    for a, b in merges:
        rank = vocab.get(a + b)
        if rank is None or rank <= previous or a not in merged or b not in merged:
            return None
        if _merge(a + b, pairs) != [a, b]:
            return None
        previous = merged[a + b] = pairs[a, b] = rank
    if any(token not in merged and token not in added for token in vocab):
        return None
    return {bytes(to_byte[c] for c in token): i for token, i in merged.items()}


def _merge(token: str, pairs: dict[tuple[str, str], int]) -> list[str]:
    """The parts of a token after all merges known so far."""
    parts = list(token)
    while True:
        best, at = None, -1
        for i in range(len(parts) - 1):
            rank = pairs.get((parts[i], parts[i + 1]))
            if rank is not None and (best is None or rank < best):
                best, at = rank, i
        if best is None:
            return parts
        parts[at : at + 2] = [parts[at] + parts[at + 1]]


def byte_characters() -> dict[int, str]:
    """The character by which a byte-level vocabulary writes each byte (GPT-2's encoder.py, bytes_to_unicode)."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [b for b in range(256) if b not in printable]
    return {b: chr(b) for b in printable} | {b: chr(256 + k) for k, b in enumerate(others)}
