"""Stage `tokenize`: the texts of a selection, or of the held-out pages, as MDS shards of equally long samples of token ids.

    pages in order -> parts (ranges of pages, in processes) -> one packed stream -> samples -> seeded shuffle -> shards

A part is the stream of its pages (ids of each text, end-of-text) in a file of its own; the samples are cut when the parts lie end to
end, so neither their number nor who wrote them changes a byte. A finished part is kept when the stage is interrupted, an unfinished
one has another name (craw4llm.tokens.parts). `craw4llm run --only STAGE --part 2/8` makes a share of them.
"""

import shutil
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from craw4llm.artifact import Artifact, Result
from craw4llm.configs import TokenizeConfig
from craw4llm.corpus.reader import Corpus
from craw4llm.errors import StageError
from craw4llm.execution import Execution
from craw4llm.tokens import parts
from craw4llm.tokens.packing import Joined, seeded_order, token_dtype
from craw4llm.tokens.shards import FOLDER, verify_shards, write_shards
from craw4llm.tokens.tokenizer import Tokenizer

RESUMES = True
ROW_GROUP_ROWS = 1 << 16
BYTES_PER_TOKEN = 4.3  # English web text under GPT-NeoX's vocabulary; only for estimates

Count = tuple[float | int | None, str]


def run(config: TokenizeConfig, inputs: Mapping[str, Artifact], out: Path, execution: Execution) -> Result:
    corpus = Corpus(inputs["corpus"])
    tokenizer = Tokenizer(inputs["tokenizer"])
    chosen, pages = _pages(config, corpus, inputs)
    shutil.rmtree(out / FOLDER, ignore_errors=True)  # of an attempt that was interrupted while it wrote them
    done = parts.encode_parts(_work(config, inputs, out), pages, corpus.text_bytes(pages), execution)
    n_tokens = np.concatenate([part.n_tokens for part in done])
    n_bytes = np.concatenate([part.n_bytes for part in done])
    samples = Joined(
        [(part.path, part.tokens) for part in done],
        end_of_text_id=tokenizer.end_of_text_id,
        sample_tokens=config.sample_tokens,
        last_sample=config.last_sample,
        dtype=token_dtype(tokenizer.vocab_size),
    )
    count = len(samples)
    if not count:
        raise StageError(
            f"tokenize: {len(pages):,} pages give {samples.tokens:,} tokens, fewer than one sample of {config.sample_tokens}; "
            "select more pages, or take shorter samples"
        )
    order = np.arange(count) if config.pages == "heldout" else seeded_order(count, config.shuffle_seed)
    write_shards(out / FOLDER, samples, order, compression=None if config.compression == "none" else config.compression)
    first = np.concatenate(([0], np.cumsum(n_tokens)[:-1]))
    _write(
        out / "documents.parquet",
        page=pages.astype(np.uint32),
        n_bytes=n_bytes.astype(np.uint64),
        first_token=first.astype(np.uint64),
        n_tokens=n_tokens.astype(np.uint32),
    )
    _write(out / "samples.parquet", packed=order.astype(np.uint64))
    counts = {
        "documents": (len(pages), "documents"),
        "empty_documents": (len(chosen) - len(pages), "documents"),
        "tokens": (samples.tokens, "tokens"),
        "end_of_text_tokens": (len(n_tokens), "tokens"),
        "samples": (count, "samples"),
        "sample_tokens": (config.sample_tokens, "tokens"),
        "vocab_size": (tokenizer.vocab_size, "ids"),
        "dropped_tokens": (samples.dropped_tokens, "tokens"),
        "padding_tokens": (samples.padding_tokens, "tokens"),
        "text_bytes": (int(n_bytes.sum()), "bytes"),
    }
    _balance(counts, len(chosen), n_tokens, verify_shards(out / FOLDER))
    shutil.rmtree(out / parts.FOLDER)
    return Result(counts=counts, notes={"tokenizer": _identity(inputs["tokenizer"]), "fast_route": tokenizer.fast is not None})


def run_part(config: TokenizeConfig, inputs: Mapping[str, Artifact], out: Path, execution: Execution, *, part: int, of: int) -> str:
    """Encodes every `of`-th part of the pages, from the `part`-th on; `run` lays all parts end to end."""
    corpus = Corpus(inputs["corpus"])
    _, pages = _pages(config, corpus, inputs)
    done = parts.encode_parts(_work(config, inputs, out), pages, corpus.text_bytes(pages), execution, share=(part, of))
    return f"{sum(len(p.n_tokens) for p in done):,} pages, {sum(p.tokens for p in done):,} tokens"


def _work(config: TokenizeConfig, inputs: Mapping[str, Artifact], out: Path) -> parts.Work:
    return parts.Work(
        corpus=inputs["corpus"],
        tokenizer=inputs["tokenizer"],
        folder=out / parts.FOLDER,
        cut_at=config.max_page_chars,
        specials=config.specials == "ids",
    )


def _pages(config: TokenizeConfig, corpus: Corpus, inputs: Mapping[str, Artifact]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """(pages given, those with text), in packing order. StageError where none has text."""
    chosen = _chosen(config, corpus, inputs)
    pages = chosen[corpus.text_bytes(chosen) > 0]
    if not len(pages):
        raise StageError(f"tokenize: {_what(config)} {len(chosen):,} pages and none of them has text; there is nothing to train on")
    return chosen, pages


def _balance(counts: Mapping[str, tuple[int, str]], chosen: int, n_tokens: NDArray[np.int64], written: int) -> None:
    """Tokens in = tokens out, documents in = documents out; StageError otherwise. written: samples that the shards hold, re-read."""
    value = {name: number for name, (number, _) in counts.items()}
    identities = {
        "documents + empty_documents = pages given": (value["documents"] + value["empty_documents"], chosen),
        "every document has its end-of-text": (value["end_of_text_tokens"], value["documents"]),
        "tokens of the documents = tokens": (int(n_tokens.sum()), value["tokens"]),
        "samples in the shards = samples": (written, value["samples"]),
        "samples * sample_tokens = tokens - dropped_tokens + padding_tokens": (
            value["samples"] * value["sample_tokens"],
            value["tokens"] - value["dropped_tokens"] + value["padding_tokens"],
        ),
    }
    for name, (left, right) in identities.items():
        if left != right:
            raise StageError(f"tokenize: the account does not balance: {name}, but {left:,} is not {right:,}; run the stage again")


def _identity(tokenizer: Artifact) -> dict[str, str]:
    return {"fingerprint": tokenizer.fingerprint, "digest": tokenizer.digest}


def estimate(config: TokenizeConfig, inputs: Mapping[str, Mapping[str, Count]]) -> dict[str, Count]:
    """Tokens and disk, where the bytes of the selected texts are known."""
    selection = inputs.get("selection", {})
    text_bytes, exact = selection.get("kept_text_bytes", (None, ""))[0], selection.get("kept_tokens", (None, ""))[0]
    if text_bytes is None:  # as many bytes a page as the corpus has
        kept, corpus = selection.get("kept_pages", (None, ""))[0], inputs.get("corpus", {})
        all_bytes, pages = corpus.get("text_bytes", (None, ""))[0], corpus.get("pages", (None, ""))[0]
        text_bytes = kept * all_bytes / pages if kept and all_bytes and pages else None
    if config.pages != "selection" or (text_bytes is None and exact is None):
        return {}
    vocab_size = inputs.get("tokenizer", {}).get("vocab_size", (None, ""))[0]
    if exact is not None:
        tokens, unit = int(exact), "tokens"
    else:
        assert text_bytes is not None
        tokens, unit = int(text_bytes / BYTES_PER_TOKEN), f"tokens, at {BYTES_PER_TOKEN} bytes a token (assumed)"
    width = 4 if vocab_size is not None and vocab_size > 65_536 else 2
    return {
        "tokens": (tokens, unit),
        "disk_bytes": (tokens * width, "bytes"),
    }


def _chosen(config: TokenizeConfig, corpus: Corpus, inputs: Mapping[str, Artifact]) -> NDArray[np.int64]:
    """Page ids in packing order."""
    if config.pages == "heldout":
        return corpus.heldout.astype(np.int64)
    kept = pq.read_table(inputs["selection"].file("kept.parquet"), columns=["page"])
    pages: NDArray[np.int64] = kept.column("page").to_numpy().astype(np.int64)
    if len(pages) and int(pages.max()) >= corpus.n_pages:
        raise StageError(
            f"tokenize: the selection holds page {int(pages.max())}, the corpus has {corpus.n_pages} pages; "
            "selection and corpus must be of one chain"
        )
    return pages


def _what(config: TokenizeConfig) -> str:
    return "the corpus holds out" if config.pages == "heldout" else "the selection holds"


def _write(path: Path, **columns: NDArray[np.generic]) -> None:
    pq.write_table(pa.table(columns), path, compression="zstd", row_group_size=ROW_GROUP_ROWS)
