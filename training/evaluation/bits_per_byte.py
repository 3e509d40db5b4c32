"""Bits per byte of held-out pages: how well a model predicts text that it never saw, for any tokenizer.

    pages = read_pages(heldout)
    nats = page_losses(pages, model, end_of_text_id, context=256)
    bits_per_byte(nats, pages.n_bytes)           -> 2.31

Each page is scored on its own. Its tokens t[0..n-1], the last of which is the end-of-text, stand behind one end-of-text as the first
context, so that all n are predicted: t[i] from the end-of-text and t[0..i-1]. A page longer than the model's context C is cut into
windows that do not overlap: window k predicts t[kC..kC+C-1] and reads the tokens one place before them, so each token is predicted
once, and at a window's start from little context, as in training on packed text.

bits per byte = nats of all tokens / ln 2 / UTF-8 bytes of the text. The end-of-text counts in the nats and has no byte.
"""

import dataclasses
import math
from collections.abc import Callable, Sequence

import numpy as np
import pyarrow.parquet as pq
from numpy.typing import NDArray

from craw4llm.artifact import Artifact
from craw4llm.errors import ArtifactError
from craw4llm.tokens.shards import Shards
from training.evaluation.likelihood import Batching, Model, token_losses

BLOCK_TOKENS = 1 << 16  # tokens whose windows are batched together, between two reports of progress


@dataclasses.dataclass(frozen=True, kw_only=True)
class HeldoutPages:
    """page uint32, n_bytes uint64: one per page. tokens: int64 ids of each page, end-of-text last."""

    page: NDArray[np.uint32]
    n_bytes: NDArray[np.uint64]
    tokens: Sequence[NDArray[np.int64]]


def read_pages(heldout: Artifact) -> HeldoutPages:
    """The held-out pages of a tokenize artifact, by page id.

    Raises ArtifactError if the artifact holds something else than held-out pages, or if the end of the last page was dropped.
    """
    if heldout.config.get("pages") != "heldout":
        raise ArtifactError(
            f"evaluate: its heldout input {heldout.fingerprint} holds the pages {heldout.config.get('pages')!r}; give the tokens of "
            "TokenizeConfig(pages='heldout')"
        )
    documents = pq.read_table(heldout.file("documents.parquet"))
    first = documents.column("first_token").to_numpy().astype(np.int64)
    count = documents.column("n_tokens").to_numpy().astype(np.int64)
    stream = _packed_stream(heldout)
    short = np.flatnonzero(first + count > len(stream))
    if len(short):
        pages = ", ".join(str(p) for p in documents.column("page").to_numpy()[short][:5])
        raise ArtifactError(
            f"tokenize {heldout.fingerprint}: the last {int((first + count).max()) - len(stream)} tokens were dropped, of page {pages}; "
            "make held-out tokens with last_sample='pad'"
        )
    order = np.argsort(documents.column("page").to_numpy(), kind="stable")
    return HeldoutPages(
        page=documents.column("page").to_numpy().astype(np.uint32)[order],
        n_bytes=documents.column("n_bytes").to_numpy().astype(np.uint64)[order],
        tokens=[np.asarray(stream[first[i] : first[i] + count[i]], dtype=np.int64) for i in order],
    )


def windows(tokens: NDArray[np.int64], end_of_text_id: int, context: int) -> list[tuple[NDArray[np.int64], int]]:
    """A page as sequences of at most context + 1 ids, with the number of last ids to score: all but the first."""
    whole = np.concatenate([np.array([end_of_text_id], dtype=np.int64), tokens])
    cuts = range(0, len(tokens), context)
    return [(whole[start : start + context + 1], len(whole[start : start + context + 1]) - 1) for start in cuts]


def page_losses(
    pages: HeldoutPages,
    model: Model,
    end_of_text_id: int,
    context: int,
    batching: Batching = Batching(),  # noqa: B008  frozen
    done: Callable[[int], None] | None = None,
) -> NDArray[np.float64]:
    """float64[pages]: nats of each page, summed over its tokens. done: called with the number of pages scored since the last call."""
    nats = np.zeros(len(pages.page), dtype=np.float64)
    start = 0
    while start < len(pages.page):
        stop, size = start, 0
        while stop < len(pages.page) and (stop == start or size + len(pages.tokens[stop]) <= BLOCK_TOKENS):
            size += len(pages.tokens[stop])
            stop += 1
        parts = [(page, *window) for page in range(start, stop) for window in windows(pages.tokens[page], end_of_text_id, context)]
        scored = token_losses([(ids, count) for _, ids, count in parts], model, batching)
        for (page, _, _), (losses, _) in zip(parts, scored, strict=True):
            nats[page] += losses.sum(dtype=np.float64)
        if done is not None:
            done(stop - start)
        start = stop
    return nats


def bits_per_byte(nats: NDArray[np.float64], n_bytes: NDArray[np.uint64]) -> float | None:
    """Over all pages together; None where they hold no bytes."""
    total = int(n_bytes.sum())
    return math.fsum(nats.tolist()) / math.log(2) / total if total else None


def _packed_stream(tokens: Artifact) -> NDArray[np.integer]:
    """The packed stream of a tokenize artifact, one id after the other: samples in the order they had before the shuffle."""
    samples = Shards.of(tokens)
    packed = pq.read_table(tokens.file("samples.parquet")).column("packed").to_numpy().astype(np.int64)
    if not np.array_equal(np.sort(packed), np.arange(len(samples))):
        raise ArtifactError(
            f"tokenize {tokens.fingerprint}: samples.parquet does not give a place to each of the {len(samples)} samples; "
            "delete the artifact's folder and run its stage again"
        )
    return samples[np.argsort(packed)].reshape(-1)
