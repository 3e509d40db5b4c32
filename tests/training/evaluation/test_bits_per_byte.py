"""Bits per byte: hand-worked pages, windows, and reading the held-out tokens."""

import math

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from standins import Mixer, NextToken

from craw4llm.errors import ArtifactError
from training.evaluation.bits_per_byte import HeldoutPages, bits_per_byte, page_losses, read_pages, windows
from training.evaluation.likelihood import Batching

RIGHT, WRONG = -math.log(0.9), -math.log(0.1 / 9)


def pages_of(*tokens: list[int], n_bytes: list[int] | None = None) -> HeldoutPages:
    return HeldoutPages(
        page=np.arange(len(tokens), dtype=np.uint32),
        n_bytes=np.array(n_bytes or [len(t) for t in tokens], dtype=np.uint64),
        tokens=[np.array(t, dtype=np.int64) for t in tokens],
    )


def test_by_hand():
    """A model that knows 0 -> 1 -> 2 -> ... -> 9 -> 0, end-of-text 0, ten ids."""
    model = NextToken(lambda token: (token + 1) % 10, vocab_size=10)
    pages = pages_of([1, 2, 3, 0], [1, 5, 6, 7, 8, 9, 0], n_bytes=[6, 20])
    nats = page_losses(pages, model, end_of_text_id=0, context=64)
    # Page 0: only the end-of-text surprises. Page 1: only the 5 does. The first token is predicted from an end-of-text.
    assert nats.tolist() == pytest.approx([3 * RIGHT + WRONG, 6 * RIGHT + WRONG], rel=1e-6)
    assert bits_per_byte(nats, pages.n_bytes) == pytest.approx((9 * RIGHT + 2 * WRONG) / math.log(2) / 26, rel=1e-6)


def test_a_uniform_model_pays_the_logarithm_of_its_vocabulary():
    model = NextToken(lambda token: 0, vocab_size=256, context=16, p=1 / 256)
    pages = pages_of([*range(1, 101), 0])
    nats = page_losses(pages, model, end_of_text_id=0, context=16)
    assert bits_per_byte(nats, np.array([101], dtype=np.uint64)) == pytest.approx(8.0, rel=1e-6)


def test_windows_predict_each_token_once_from_the_one_before():
    tokens = np.arange(101, 112)
    cut = windows(tokens, 7, 4)
    assert [ids.tolist() for ids, _ in cut] == [[7, 101, 102, 103, 104], [104, 105, 106, 107, 108], [108, 109, 110, 111]]
    assert [count for _, count in cut] == [4, 4, 3]
    assert np.concatenate([ids[-count:] for ids, count in cut]).tolist() == tokens.tolist()
    assert [len(ids) for ids, _ in windows(tokens[:8], 7, 4)] == [5, 5]


def test_pages_do_not_see_each_other_and_batches_change_nothing():
    model = Mixer(context=20)
    generator = np.random.default_rng(0)
    texts = [generator.integers(1, 300, size=n).tolist() for n in (3, 45, 20, 7, 19, 1)]
    together = page_losses(pages_of(*texts), model, 0, context=20)
    for k, text in enumerate(texts):
        (alone,) = page_losses(pages_of(text), model, 0, context=20, batching=Batching(sequences=1))
        assert together[k] == pytest.approx(alone, rel=1e-6)
    reference = 0.0
    whole = torch.tensor([[0, *texts[1]]])
    for start in (0, 20, 40):
        part = whole[:, start : start + 21]
        log_p = model.logits(model.hidden(part[:, :-1])).log_softmax(-1)
        reference -= log_p.gather(2, part[:, 1:, None]).sum().item()
    assert together[1] == pytest.approx(reference, rel=1e-5)


def test_no_pages_have_no_bits_per_byte():
    empty = pages_of()
    assert bits_per_byte(page_losses(empty, Mixer(), 0, context=8), empty.n_bytes) is None


def test_progress_counts_the_pages():
    seen: list[int] = []
    page_losses(pages_of([1, 0], [2, 0], [3, 0]), Mixer(), 0, context=8, done=seen.append)
    assert sum(seen) == 3


def test_pages_are_read_back_from_shuffled_shards(heldout_artifact):
    documents = {9: list(range(1, 11)), 4: [11, 12], 30: list(range(21, 30))}  # 11 + 3 + 10 = 24 tokens: 4 samples of 7, padded
    pages = read_pages(heldout_artifact(documents, order=[2, 0, 3, 1], n_bytes={4: 50}))
    assert pages.page.tolist() == [4, 9, 30] and pages.n_bytes.tolist() == [50, 10, 9]
    assert [t.tolist() for t in pages.tokens] == [[11, 12, 0], [*range(1, 11), 0], [*range(21, 30), 0]]


def test_training_pages_are_refused(heldout_artifact):
    with pytest.raises(ArtifactError, match="holds the pages 'selection'"):
        read_pages(heldout_artifact({1: [1, 2, 3, 4, 5, 6]}, pages="selection"))


def test_a_page_whose_end_was_dropped_is_refused(heldout_artifact):
    with pytest.raises(ArtifactError, match=r"the last 3 tokens were dropped, of page 8; .*last_sample='pad'"):
        read_pages(heldout_artifact({1: [1, 2, 3], 8: [4, 5, 6, 7, 8]}, last_sample="drop"))


def test_an_order_that_is_none_is_refused(heldout_artifact):
    artifact = heldout_artifact({1: list(range(1, 21))})
    pq.write_table(pa.table({"packed": np.array([0, 1, 1], dtype=np.uint64)}), artifact.path / "samples.parquet")
    with pytest.raises(ArtifactError, match="does not give a place to each of the 3 samples"):
        read_pages(artifact)
