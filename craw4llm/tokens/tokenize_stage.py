"""Stage `tokenize`: the texts of a selection, or of the held-out pages, as MDS shards of equally long samples of token ids.

    pages in order -> ids of each text + end-of-text -> one packed stream -> samples -> seeded shuffle -> shards

The order of everything is fixed by the config, so the shards have the same bytes for any number of workers; the workers are the
threads of the tokenizer library.
"""

import contextlib
import os
from collections.abc import Iterator, Mapping
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
from craw4llm.tokens.packing import pack, seeded_order, token_dtype
from craw4llm.tokens.shards import FOLDER, write_shards
from craw4llm.tokens.tokenizer import Tokenizer

BLOCK_PAGES = 256
ROW_GROUP_ROWS = 1 << 16
BYTES_PER_TOKEN = 4.3  # English web text under GPT-NeoX's vocabulary; only for estimates

Count = tuple[float | int | None, str]


def run(config: TokenizeConfig, inputs: Mapping[str, Artifact], out: Path, execution: Execution) -> Result:
    corpus = Corpus(inputs["corpus"])
    tokenizer = Tokenizer(inputs["tokenizer"])
    chosen = _chosen(config, corpus, inputs)
    pages = chosen[corpus.n_bytes[chosen] > 0]
    if not len(pages):
        raise StageError(f"tokenize: {_what(config)} {len(chosen):,} pages and none of them has text; there is nothing to train on")
    scratch = out / "stream.scratch"
    cut_at = config.max_page_chars
    n_bytes = corpus.n_bytes[pages].astype(np.uint64)
    with execution.progress("tokenize", total=len(pages), unit="page") as progress, _threads(execution.workers):

        def documents() -> Iterator[NDArray[np.uint32]]:
            for start in range(0, len(pages), BLOCK_PAGES):
                block = pages[start : start + BLOCK_PAGES]
                texts = corpus.texts(block)
                if cut_at is not None:
                    texts = [text[:cut_at] for text in texts]
                    n_bytes[start : start + len(block)] = [len(text.encode()) for text in texts]
                yield from tokenizer.encode_documents(texts)
                progress.update(len(block))

        packed = pack(
            documents(),
            end_of_text_id=tokenizer.end_of_text_id,
            sample_tokens=config.sample_tokens,
            last_sample=config.last_sample,
            dtype=token_dtype(tokenizer.vocab_size),
            scratch=scratch,
        )
    count = len(packed.samples)
    if not count:
        raise StageError(
            f"tokenize: {len(pages):,} pages give {packed.tokens:,} tokens, fewer than one sample of {config.sample_tokens}; "
            "select more pages, or take shorter samples"
        )
    order = np.arange(count) if config.pages == "heldout" else seeded_order(count, config.shuffle_seed)
    write_shards(out / FOLDER, packed.samples, order)
    scratch.unlink()
    first = np.concatenate(([0], np.cumsum(packed.n_tokens)[:-1]))
    _write(
        out / "documents.parquet",
        page=pages.astype(np.uint32),
        n_bytes=n_bytes,
        first_token=first.astype(np.uint64),
        n_tokens=packed.n_tokens.astype(np.uint32),
    )
    _write(out / "samples.parquet", packed=order.astype(np.uint64))
    return Result(
        counts={
            "documents": (len(pages), "documents"),
            "empty_documents": (len(chosen) - len(pages), "documents"),
            "tokens": (packed.tokens, "tokens"),
            "samples": (count, "samples"),
            "sample_tokens": (config.sample_tokens, "tokens"),
            "vocab_size": (tokenizer.vocab_size, "ids"),
            "dropped_tokens": (packed.dropped_tokens, "tokens"),
            "padding_tokens": (packed.padding_tokens, "tokens"),
            "text_bytes": (int(n_bytes.sum()), "bytes"),
        }
    )


def estimate(config: TokenizeConfig, inputs: Mapping[str, Mapping[str, Count]]) -> dict[str, Count]:
    """Tokens and disk, where the bytes of the selected texts are known."""
    text_bytes = inputs.get("selection", {}).get("kept_text_bytes", (None, ""))[0]
    if config.pages != "selection" or text_bytes is None:
        return {}
    vocab_size = inputs.get("tokenizer", {}).get("vocab_size", (None, ""))[0]
    tokens = int(text_bytes / BYTES_PER_TOKEN)
    width = 4 if vocab_size is not None and vocab_size > 65_536 else 2
    return {
        "tokens": (tokens, f"tokens, at {BYTES_PER_TOKEN} bytes a token (assumed)"),
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


@contextlib.contextmanager
def _threads(workers: int) -> Iterator[None]:
    """Lets the tokenizer library use `workers` threads; it reads these variables, the second once per process."""
    wanted = {"TOKENIZERS_PARALLELISM": "true" if workers > 1 else "false", "RAYON_NUM_THREADS": str(max(workers, 1))}
    before = {name: os.environ.get(name) for name in wanted}
    os.environ.update(wanted)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
