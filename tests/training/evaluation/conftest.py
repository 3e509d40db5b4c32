"""Fixtures of the evaluation's tests."""

import hashlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Literal

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from tokenizers import Tokenizer

from craw4llm.artifact import Artifact, Result, Store
from craw4llm.execution import Execution
from craw4llm.tokens.packing import pack
from craw4llm.tokens.shards import write_shards


@pytest.fixture(scope="session")
def neox(shared: Path) -> Callable[[str], list[int]]:
    tokenizer = Tokenizer.from_file(str(shared / "tokenizer" / "20B_tokenizer.json"))
    return lambda text: list(tokenizer.encode(text, add_special_tokens=False).ids)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Small tensors are slower on several threads, much slower where other processes want them too."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


HeldoutArtifact = Callable[..., Artifact]


@pytest.fixture
def heldout_artifact(execution: Execution) -> HeldoutArtifact:
    """Packs documents (ids without end-of-text 0) into a tokenize artifact; its samples are stored in the order `order`."""

    def make(
        documents: dict[int, list[int]],
        sample_tokens: int = 7,
        order: list[int] | None = None,
        last_sample: Literal["drop", "pad"] = "pad",
        pages: str = "heldout",
        n_bytes: dict[int, int] | None = None,
        **inputs: Artifact,
    ) -> Artifact:
        def write(out: Path) -> Result:
            ids = [np.array(tokens, dtype=np.uint16) for tokens in documents.values()]
            packed = pack(
                ids,
                end_of_text_id=0,
                sample_tokens=sample_tokens,
                last_sample=last_sample,
                dtype=np.dtype(np.uint16),
                scratch=out / "scratch",
            )
            place = np.arange(len(packed.samples)) if order is None else np.array(order)
            write_shards(out / "shards", packed.samples, place)
            (out / "scratch").unlink()
            columns = {
                "page": np.array(list(documents), dtype=np.uint32),
                "n_bytes": np.array([(n_bytes or {}).get(p, len(documents[p])) for p in documents], dtype=np.uint64),
                "first_token": np.concatenate(([0], np.cumsum(packed.n_tokens)[:-1])).astype(np.uint64),
                "n_tokens": packed.n_tokens.astype(np.uint32),
            }
            pq.write_table(pa.table(columns), out / "documents.parquet")
            pq.write_table(pa.table({"packed": place.astype(np.uint64)}), out / "samples.parquet")
            return Result(counts={"samples": (len(place), "samples"), "sample_tokens": (sample_tokens, "tokens")})

        name = hashlib.sha256(repr((documents, sample_tokens, order, last_sample, pages, n_bytes)).encode()).hexdigest()[:12]
        config = {"pages": pages}
        return Store(execution.root).build("tokenize", name, version=1, config=config, inputs=inputs, write=write)[0]

    return make
