"""A small corpus from given texts, and selections of its pages."""

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from craw4llm.artifact import Artifact, Result, Store
from craw4llm.configs import CorpusConfig, TokenizeConfig, TokenizerConfig
from craw4llm.corpus.reader import Corpus
from craw4llm.execution import Execution
from craw4llm.fingerprint import External
from craw4llm.stage import Stage
from craw4llm.tokens import tokenize_stage

MakeCorpus = Callable[..., Artifact]
MakeSelection = Callable[[Artifact, Sequence[int]], Artifact]
Tokenize = Callable[..., Artifact]


@pytest.fixture
def make_corpus(tmp_path: Path, build: Callable[[Stage], Artifact]) -> MakeCorpus:
    """texts -> corpus artifact; page i is texts[i]."""

    def make(texts: Sequence[str], heldout_fraction: float = 0.0, heldout_min_chars: int = 1) -> Artifact:
        urls = [f"http://example.org/{i:06}" for i in range(len(texts))]
        links = pa.array([[] for _ in texts], type=pa.list_(pa.string()))
        number = len(list(tmp_path.glob("web-*.parquet")))
        path = tmp_path / f"web-{number}.parquet"
        pq.write_table(pa.table({"url": urls, "text": list(texts), "outlinks": links}), path)
        source = External(name="corpus", path=str(path))
        config = CorpusConfig(source=source, heldout_fraction=heldout_fraction, heldout_min_chars=heldout_min_chars)
        artifact = build(Stage(config))
        assert Corpus(artifact).urls.to_pylist() == urls
        return artifact

    return make


@pytest.fixture
def make_selection(execution: Execution) -> MakeSelection:
    """corpus, page ids in order -> select artifact."""

    def make(corpus: Artifact, pages: Sequence[int]) -> Artifact:
        def write(out: Path) -> Result:
            n = len(pages)
            columns = {
                "page": np.array(pages, dtype=np.uint32),
                "rank": np.arange(n, dtype=np.uint32),
                "score": pa.nulls(n, pa.float32()),
            }
            pq.write_table(pa.table(columns), out / "kept.parquet")
            return Result()

        name = f"{abs(hash((corpus.fingerprint, tuple(pages)))):x}"[:12]
        store = Store(execution.root)
        return store.build("select", name, version=1, config={}, inputs={"corpus": corpus}, write=write)[0]

    return make


@pytest.fixture
def tokenize(execution: Execution) -> Tokenize:
    """Runs the stage on artifacts: tokenize(config, corpus=..., tokenizer=..., selection=...)."""

    def make(config: TokenizeConfig, fingerprint: str = "tokens", workers: int = 1, **inputs: Artifact) -> Artifact:
        import dataclasses

        where = dataclasses.replace(execution, workers=workers)

        def write(out: Path) -> Result:
            return tokenize_stage.run(config, inputs, out, where)

        store = Store(execution.root)
        return store.build("tokenize", fingerprint, version=1, config={}, inputs=inputs, write=write)[0]

    return make


@pytest.fixture
def neox(shared: Path, build: Callable[[Stage], Artifact]) -> Artifact:
    """The GPT-NeoX tokenizer."""
    source = External(name="tokenizer", path=str(shared / "tokenizer" / "20B_tokenizer.json"))
    return build(Stage(TokenizerConfig(source=source)))
