"""Stage `tokenizer`: a given tokenizer.json, checked; or a byte-level BPE trained on the corpus.

    corpus without held-out pages -> pages in the order of a hash of their URL, until train_bytes -> BPE -> tokenizer.json

The BPE has all 256 bytes in its alphabet, so every text can be encoded and comes back unchanged; GPT-2's regular expression splits
words; there is no normalisation. Id 0 is the end-of-text token.
"""

import hashlib
import json
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer as Engine
from tokenizers import decoders, models, pre_tokenizers, trainers

from craw4llm.artifact import Artifact, Result
from craw4llm.configs import TokenizerConfig
from craw4llm.corpus.reader import Corpus
from craw4llm.errors import InputError, StageError
from craw4llm.execution import Execution
from craw4llm.externals import locate
from craw4llm.tokens.tokenizer import FILE, META, special_ids

Count = tuple[float | int | None, str]


def run(config: TokenizerConfig, inputs: Mapping[str, Artifact], out: Path, execution: Execution) -> Result:
    notes: dict[str, Any] = {}
    training_bytes: int | None = None
    if config.source is not None:
        source = locate(config.source)
        engine = load(source)
        shutil.copyfile(source, out / FILE)
        notes["origin"] = f"given: {config.source.name}"
        if config.end_of_text not in engine.get_vocab():
            raise InputError(f"tokenizer: {source} has no token {config.end_of_text!r}; name the token that ends a document (end_of_text)")
    else:
        engine, training_bytes, pages = train(config, Corpus(inputs["corpus"]), execution)
        engine.save(str(out / FILE))
        notes["origin"] = f"byte-level BPE trained on {pages:,} pages of the corpus, held-out pages left out"
    vocabulary = engine.get_vocab(with_added_tokens=True)
    end_of_text_id = vocabulary[config.end_of_text]
    if config.source is not None and end_of_text_id not in special_ids(engine):
        raise InputError(
            f"tokenizer: {config.source.path} has {config.end_of_text!r} as an ordinary token, so that a text could spell it; "
            "declare it as a special token there, or name another one (end_of_text)"
        )
    vocab_size = max(vocabulary.values()) + 1
    meta = {
        "vocab_size": vocab_size,
        "end_of_text_id": end_of_text_id,
        "end_of_text": config.end_of_text,
        "trained": config.source is None,
    }
    (out / META).write_text(json.dumps(meta, indent=2, sort_keys=True) + "\n")
    return Result(counts={"vocab_size": (vocab_size, "ids"), "training_bytes": (training_bytes, "bytes")}, notes=notes)


def estimate(config: TokenizerConfig, inputs: Mapping[str, Mapping[str, Count]]) -> dict[str, Count]:
    """What is known before: the size asked for, where the tokenizer is trained."""
    return {} if config.source is not None else {"vocab_size": (config.vocab_size, "ids")}


def load(path: Path) -> Engine:
    """The tokenizer of a file; InputError if it is none."""
    try:
        return Engine.from_file(str(path))
    except Exception as error:  # the library raises bare Exception for unreadable files and for wrong content
        raise InputError(
            f"tokenizer: {path} is no tokenizer that the `tokenizers` library can load ({error}); expected its tokenizer.json"
        ) from error


def train(config: TokenizerConfig, corpus: Corpus, execution: Execution) -> tuple[Engine, int, int]:
    """A BPE trained on the corpus. Returns (tokenizer, bytes of text it was trained on, pages)."""
    pages, n_bytes = training_pages(corpus, config.train_bytes)
    if not len(pages):
        raise StageError("tokenizer: the corpus has no page with text outside the held-out ones; there is nothing to train on")
    engine = Engine(models.BPE())
    engine.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    engine.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=config.vocab_size,
        special_tokens=[config.end_of_text],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    with execution.progress("tokenizer", total=len(pages), unit="page") as progress:

        def texts() -> Iterator[str]:
            for page in pages.tolist():
                yield corpus.text(page)
                progress.update(1)

        engine.train_from_iterator(texts(), trainer=trainer)
    return engine, n_bytes, len(pages)


_STEP = 1 << 16  # pages whose names, or sizes, are held at a time


def training_pages(corpus: Corpus, train_bytes: int) -> tuple[NDArray[np.int64], int]:
    """Pages that the BPE is trained on, in order, and the bytes of their texts.

    Whole pages with text, not held-out, by a hash of their URL (so a page's place does not depend on the others), until at least
    `train_bytes` are reached.
    """
    usable = np.flatnonzero(corpus.has_text & ~corpus.heldout_mask[: corpus.n_pages])
    keys = np.empty(len(usable), dtype=">u8")
    for start in range(0, len(usable), _STEP):  # names are many, and few are needed at a time
        names = corpus.names(usable[start : start + _STEP])
        hashed = b"".join(hashlib.blake2b(name.encode(), digest_size=8, person=b"tokenizer").digest() for name in names)
        keys[start : start + len(names)] = np.frombuffer(hashed, dtype=">u8")
    order = usable[np.lexsort((usable, keys))]
    total = 0
    for start in range(0, len(order), _STEP):
        sums = total + np.cumsum(corpus.text_bytes(order[start : start + _STEP]), dtype=np.int64)
        if sums[-1] >= train_bytes:
            count = int(np.searchsorted(sums, train_bytes))
            return order[: start + count + 1], int(sums[count])
        total = int(sums[-1])
    return order, total
