"""From a selection to shards: every token accounted for, every sample traceable to its page."""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest

from craw4llm.artifact import Artifact
from craw4llm.configs import TokenizeConfig
from craw4llm.corpus.reader import Corpus
from craw4llm.errors import StageError
from craw4llm.tokens.shards import Shards
from craw4llm.tokens.tokenize_stage import estimate
from craw4llm.tokens.tokenizer import Tokenizer

MakeCorpus = Callable[..., Artifact]
MakeSelection = Callable[[Artifact, Sequence[int]], Artifact]
Tokenize = Callable[..., Artifact]


def stream_of(tokens: Artifact) -> list[int]:
    """The packed stream, put back together from shards and samples.parquet."""
    packed = pq.read_table(tokens.file("samples.parquet")).column("packed").to_numpy()
    samples = Shards.of(tokens)
    assert sorted(packed.tolist()) == list(range(len(samples)))
    return list(samples[np.argsort(packed)].reshape(-1).tolist())


def texts_of(path: Path) -> list[str]:
    return [json.loads(line)["text"] for line in path.read_text().split("\n") if line]


def check(tokens: Artifact, corpus: Artifact, tokenizer: Artifact) -> None:
    """What must hold for any tokenize artifact."""
    encoder, pages = Tokenizer(tokenizer), Corpus(corpus)
    documents = pq.read_table(tokens.file("documents.parquet")).to_pydict()
    stream = stream_of(tokens)
    whole: list[int] = []
    for page, n_bytes, first, n in zip(*(documents[c] for c in ("page", "n_bytes", "first_token", "n_tokens")), strict=True):
        text = pages.text(page)
        assert n_bytes == len(text.encode())
        assert first == len(whole)
        whole += [*encoder.encode(text), encoder.end_of_text_id]
        assert n == len(whole) - first
    assert tokens.count("documents") == len(documents["page"])
    assert tokens.count("tokens") == len(whole)
    assert tokens.count("text_bytes") == sum(documents["n_bytes"])
    dropped, padding = tokens.count("dropped_tokens"), tokens.count("padding_tokens")
    assert len(stream) == tokens.count("samples") * tokens.count("sample_tokens") == len(whole) - dropped + padding
    assert stream == (whole + [encoder.end_of_text_id] * padding)[: len(stream)]
    assert max(dropped, padding) < tokens.count("sample_tokens")


def test_bookkeeping(shared: Path, make_corpus: MakeCorpus, make_selection: MakeSelection, tokenize: Tokenize, neox: Artifact) -> None:
    """Case BL-30: nine documents of known length at 32 tokens a sample, with the GPT-NeoX tokenizer."""
    case = shared / "cases" / "BL-30"
    expected = json.loads((case / "expected.json").read_text())
    texts = texts_of(case / "docs.jsonl")
    corpus = make_corpus(texts)
    for last_sample in ("drop", "pad"):
        config = TokenizeConfig(sample_tokens=expected["sequence_length"], last_sample=last_sample)  # type: ignore[arg-type]
        order = [4, 0, 7, 8, 1, 2, 3, 6, 5]
        tokens = tokenize(config, last_sample, corpus=corpus, tokenizer=neox, selection=make_selection(corpus, order))
        check(tokens, corpus, neox)
        full = expected["documents"] - expected["empty_documents"]
        assert tokens.count("empty_documents") == expected["empty_documents"]
        assert tokens.count("documents") == full
        assert tokens.count("tokens") == expected["words"] + full == 497
        assert tokens.count("dropped_tokens") == (497 % 32 if last_sample == "drop" else 0)
        assert tokens.count("padding_tokens") == (-497 % 32 if last_sample == "pad" else 0)
        pages = pq.read_table(tokens.file("documents.parquet")).column("page").to_pylist()
        assert pages == [page for page in order if texts[page]]
        assert not (tokens.path / "stream.scratch").exists()


def test_special_tokens_in_pages_end_no_document(
    shared: Path, make_corpus: MakeCorpus, make_selection: MakeSelection, tokenize: Tokenize, neox: Artifact
) -> None:
    texts = texts_of(shared / "cases" / "BL-24" / "docs.jsonl")
    corpus = make_corpus(texts)
    selection = make_selection(corpus, range(len(texts)))
    tokens = tokenize(TokenizeConfig(sample_tokens=16, last_sample="pad"), corpus=corpus, tokenizer=neox, selection=selection)
    check(tokens, corpus, neox)
    assert stream_of(tokens).count(0) == len(texts) + tokens.count("padding_tokens")


def test_samples_are_shuffled_by_the_seed(
    make_corpus: MakeCorpus, make_selection: MakeSelection, tokenize: Tokenize, neox: Artifact
) -> None:
    corpus = make_corpus([f"page number {i} of many, with a few words" for i in range(100)])
    inputs = {"corpus": corpus, "tokenizer": neox, "selection": make_selection(corpus, range(100))}
    first = tokenize(TokenizeConfig(sample_tokens=8), "a", **inputs)
    other = tokenize(TokenizeConfig(sample_tokens=8, shuffle_seed=43), "b", **inputs)
    assert stream_of(first) == stream_of(other)
    orders = [pq.read_table(a.file("samples.parquet")).column("packed").to_numpy() for a in (first, other)]
    assert (orders[0] == orders[1]).mean() < 0.1
    assert (orders[0] == np.arange(len(orders[0]))).mean() < 0.1


def test_heldout_pages_in_order(make_corpus: MakeCorpus, tokenize: Tokenize, neox: Artifact) -> None:
    corpus = make_corpus([f"page number {i} of many, with a few words" for i in range(200)], heldout_fraction=0.2)
    config = TokenizeConfig(pages="heldout", sample_tokens=16, last_sample="pad")
    tokens = tokenize(config, corpus=corpus, tokenizer=neox)
    check(tokens, corpus, neox)
    heldout = Corpus(corpus).heldout.tolist()
    assert pq.read_table(tokens.file("documents.parquet")).column("page").to_pylist() == heldout != []
    assert pq.read_table(tokens.file("samples.parquet")).column("packed").to_pylist() == list(range(tokens.count("samples")))


def test_nothing_to_write(shared: Path, make_corpus: MakeCorpus, make_selection: MakeSelection, tokenize: Tokenize, neox: Artifact) -> None:
    """Case BL-27, and the neighbours of it."""
    empty = make_corpus(texts_of(shared / "cases" / "BL-27" / "all_empty.jsonl"))
    for pages in ([], range(5)):
        with pytest.raises(StageError, match=f"selection holds {len(pages)} pages and none of them has text"):
            tokenize(TokenizeConfig(), corpus=empty, tokenizer=neox, selection=make_selection(empty, pages))
    with pytest.raises(StageError, match="corpus holds out 0 pages"):
        tokenize(TokenizeConfig(pages="heldout"), corpus=empty, tokenizer=neox)
    short = make_corpus(["a few words"])
    with pytest.raises(StageError, match="give 4 tokens, fewer than one sample of 5"):
        tokenize(TokenizeConfig(sample_tokens=5), corpus=short, tokenizer=neox, selection=make_selection(short, [0]))
    with pytest.raises(StageError, match="holds page 7, the corpus has 1 pages"):
        tokenize(TokenizeConfig(), corpus=short, tokenizer=neox, selection=make_selection(short, [7]))


def test_same_bytes_for_any_hash_seed_and_workers(make_corpus: MakeCorpus, make_selection: MakeSelection, neox: Artifact) -> None:
    corpus = make_corpus([f"page number {i} of many, with a few words" * (1 + i % 5) for i in range(600)])
    selection = make_selection(corpus, range(0, 600, 2))
    code = (
        "import sys, pathlib, hashlib; from craw4llm.artifact import Store; from craw4llm.execution import Execution;"
        "from craw4llm.configs import TokenizeConfig; from craw4llm.tokens import tokenize_stage as s;"
        "root, out = map(pathlib.Path, sys.argv[1:3]); out.mkdir(); store = Store(root);"
        "i = dict(zip(('corpus', 'selection', 'tokenizer'), (store.open(*a.split(':')) for a in sys.argv[4:])));"
        "s.run(TokenizeConfig(sample_tokens=32), i, out, Execution(root=root, workers=int(sys.argv[3]), report=print));"
        "print(sorted((p.name, hashlib.sha256(p.read_bytes()).hexdigest()) for p in out.rglob('*') if p.is_file()))"
    )
    inputs = [f"{a.stage}:{a.fingerprint}" for a in (corpus, selection, neox)]
    found = set()
    for seed, workers in (("0", "1"), ("1", "2")):
        command = [sys.executable, "-c", code, str(corpus.root), str(corpus.root / f"out{seed}"), workers, *inputs]
        env = os.environ | {"PYTHONHASHSEED": seed}
        found.add(subprocess.run(command, check=True, env=env, capture_output=True, text=True).stdout.strip().split("\n")[-1])
    assert len(found) == 1
    assert len(eval(found.pop())) == 4  # a shard, its index, documents and samples


def test_estimate() -> None:
    known = {"selection": {"kept_text_bytes": (43_000_000, "bytes")}, "tokenizer": {"vocab_size": (2048, "ids")}}
    assert estimate(TokenizeConfig(), known)["tokens"][0] == 10_000_000
    assert estimate(TokenizeConfig(), known)["disk_bytes"] == (20_000_000, "bytes")
    assert estimate(TokenizeConfig(), {}) == {}
    budget = {"selection": {"kept_text_bytes": (43_000_000, "bytes"), "kept_tokens": (9_000_000, "tokens")}}
    assert estimate(TokenizeConfig(), budget)["tokens"] == (9_000_000, "tokens")
    assert estimate(TokenizeConfig(pages="heldout"), known) == {}
