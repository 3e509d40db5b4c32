"""Packing keeps every token; orders are permutations that never change."""

from pathlib import Path

import numpy as np
import pytest

from craw4llm.tokens.packing import pack, seeded_order, token_dtype


@pytest.mark.parametrize("last_sample", ["drop", "pad"])
@pytest.mark.parametrize("sample_tokens", [2, 3, 7, 30, 31, 1000])
def test_stream_and_samples(tmp_path: Path, sample_tokens: int, last_sample: str) -> None:
    documents = [np.arange(1, n + 1, dtype=np.uint32) for n in (5, 1, 12, 8)]  # 26 ids and 4 ends: 30 tokens
    stream = np.concatenate([np.append(d, 0) for d in documents])
    packed = pack(
        documents,
        end_of_text_id=0,
        sample_tokens=sample_tokens,
        last_sample=last_sample,  # type: ignore[arg-type]
        dtype=np.dtype(np.uint16),
        scratch=tmp_path / "s",
    )
    assert packed.tokens == 30
    assert packed.n_tokens.tolist() == [6, 2, 13, 9]
    flat = packed.samples.reshape(-1)
    assert flat.size == 30 - packed.dropped_tokens + packed.padding_tokens
    assert packed.samples.dtype == np.uint16
    assert flat.size % sample_tokens == 0
    assert np.array_equal(flat[:30], stream[: flat.size])
    assert not flat[30:].any()
    if last_sample == "drop":
        assert packed.padding_tokens == 0
        assert packed.dropped_tokens == 30 % sample_tokens
    else:
        assert packed.dropped_tokens == 0
        assert packed.padding_tokens == -30 % sample_tokens


def test_no_documents(tmp_path: Path) -> None:
    packed = pack([], end_of_text_id=0, sample_tokens=4, last_sample="pad", dtype=np.dtype(np.uint16), scratch=tmp_path / "s")
    assert packed.samples.shape == (0, 4)
    assert packed.tokens == packed.padding_tokens == 0


def test_dtype() -> None:
    assert token_dtype(65_536) == np.uint16
    assert token_dtype(65_537) == np.int32


def test_orders_are_permutations_that_depend_on_the_seeds() -> None:
    for count in (0, 1, 2, 1000):
        assert sorted(seeded_order(count, 42)) == list(range(count))
    base = seeded_order(1000, 42, 0)
    assert np.array_equal(base, seeded_order(1000, 42, 0))
    for other in (seeded_order(1000, 43, 0), seeded_order(1000, 42, 1), seeded_order(1000, 0, 42)):
        assert (base == other).mean() < 0.02
    assert abs(np.corrcoef(base, np.arange(1000))[0, 1]) < 0.1


def test_an_order_never_changes() -> None:
    """Pinned: another value here means that equal configs no longer give equal shards."""
    assert seeded_order(8, 42).tolist() == [3, 5, 6, 0, 2, 4, 7, 1]
