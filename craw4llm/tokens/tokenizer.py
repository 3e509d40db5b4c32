"""Text to token ids and back, with the tokenizer of an artifact.

    tokenizer = Tokenizer(artifact)
    tokenizer.encode("two  spaces")            -> [9389, 50276, 31748]
    tokenizer.encode("<|endoftext|>")          -> plain text: several ids, never the control id
    tokenizer.encode("<|endoftext|>", specials=True) -> [0], as the reference harness does

A page that spells a special token must not be able to end its document, so that spelling is text like any other. Nothing is added
at the front or the end of a text, nothing is cut or padded, whatever the file of the tokenizer says.

Documents take the exact fast route (`craw4llm.tokens.fast`) where the tokenizer's file allows it; the ids are the library's.
"""

import json
from collections.abc import Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer as Engine

from craw4llm.artifact import Artifact
from craw4llm.errors import StageError
from craw4llm.tokens.fast import FastEncoder

FILE = "tokenizer.json"
META = "tokenizer_meta.json"


class Tokenizer:
    """A tokenizer artifact, opened for use.

    vocab_size: highest id + 1, special and added tokens included (a model's table may be larger). end_of_text_id: ends a document.
    fast: the fast route, or None where the tokenizer's file does not allow it.
    """

    def __init__(self, artifact: Artifact) -> None:
        self._path = artifact.file(FILE)
        meta = json.loads(artifact.file(META).read_text())
        self.vocab_size = int(meta["vocab_size"])
        self.end_of_text_id = int(meta["end_of_text_id"])
        self.end_of_text = str(meta["end_of_text"])
        self._engine = plain_engine(self._path)
        self._special_ids = np.array(sorted(special_ids(self._engine)), dtype=np.int64)
        self.fast = FastEncoder.of(self._path)

    def encode(self, text: str, specials: bool = False) -> list[int]:
        """Ids of a text. specials: the literal spelling of a special token gives its id."""
        engine = self._engine_with_specials if specials else self._engine
        return list(engine.encode(text, add_special_tokens=False).ids)

    def encode_batch(self, texts: Sequence[str], specials: bool = False) -> list[list[int]]:
        """Ids of several texts, in their order."""
        engine = self._engine_with_specials if specials else self._engine
        return [list(e.ids) for e in engine.encode_batch_fast(list(texts), add_special_tokens=False)]

    def encode_documents(self, texts: Sequence[str]) -> list[NDArray[np.uint32]]:
        """Ids of several documents, without end-of-text. StageError if a special token's id came out of plain text."""
        return [np.concatenate(list(self.document(text))) for text in texts]

    def document(self, text: str, *, specials: bool = False, threads: int = 1) -> Iterator[NDArray[np.uint32]]:
        """Ids of a document, without end-of-text, in one or more arrays, so that memory does not grow with a long text.

        specials: as in `encode`; otherwise StageError if a special token's id came out of plain text. threads: for a very long text.
        """
        if specials:
            yield np.array(self.encode(text, specials=True), dtype=np.uint32)
        elif self.fast is not None:  # special tokens are not among its ranks
            yield from self.fast.pieces(text, threads)
        else:
            ids = np.array(self._engine.encode_batch_fast([text], add_special_tokens=False)[0].ids, dtype=np.uint32)
            if len(self._special_ids) and np.isin(ids, self._special_ids).any():
                raise StageError(
                    f"tokenize: {self._path} gives the id of a special token for plain text; documents could not be told apart. "
                    "Use a tokenizer whose special tokens are only matched literally"
                )
            yield ids

    def decode(self, ids: Sequence[int]) -> str:
        """The text of ids, special tokens spelt out; bytes that are no UTF-8 become U+FFFD."""
        return str(self._engine.decode(list(ids), skip_special_tokens=False))

    @cached_property
    def _engine_with_specials(self) -> Engine:
        engine = plain_engine(self._path)
        engine.encode_special_tokens = False
        return engine


def plain_engine(path: Path) -> Engine:
    """The library's tokenizer of a file, set to encode special tokens as text and to neither cut nor pad."""
    engine = Engine.from_file(str(path))
    engine.no_truncation()
    engine.no_padding()
    engine.encode_special_tokens = True  # the library's name for "encode their spelling like other text"
    return engine


def special_ids(engine: Engine) -> set[int]:
    """Ids of the tokens that the tokenizer declares as special."""
    added: dict[int, Any] = engine.get_added_tokens_decoder()
    return {int(i) for i, token in added.items() if token.special}
