"""Text to ids and back: the GPT-NeoX vectors, literal special tokens, and the byte-level BPE."""

import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from tokenizers import Tokenizer as Engine
from tokenizers import models, pre_tokenizers

from craw4llm.artifact import Artifact, Result, Store
from craw4llm.configs import TokenizerConfig
from craw4llm.corpus.reader import Corpus
from craw4llm.errors import InputError, StageError
from craw4llm.execution import Execution
from craw4llm.fingerprint import External
from craw4llm.stage import Stage
from craw4llm.tokens import tokenizer_stage
from craw4llm.tokens.tokenizer import Tokenizer

TEXT = "the quick brown fox jumps over the lazy dog while seven wizards quietly mix odd potions"
WORDS = TEXT.split()
HARD = ["", "\x00\x7f\t\r\n", "  two   three    ", "żółć 日本語 👩‍👩‍👧‍👦 e\u0301", "a\u00a0b\u2003c\ufeff", "<|endoftext|>x<|endoftext|>"]

MakeCorpus = Callable[..., Artifact]


def prose(pages: int) -> list[str]:
    return [" ".join(WORDS[(i * 7 + j * j) % len(WORDS)] for j in range(60)) for i in range(pages)]


def train_stage(corpus: Artifact, execution: Execution, name: str = "bpe", vocab_size: int = 300, train_bytes: int = 10**6) -> Artifact:
    config = TokenizerConfig(vocab_size=vocab_size, train_bytes=train_bytes)

    def write(out: Path) -> Result:
        return tokenizer_stage.run(config, {"corpus": corpus}, out, execution)

    return Store(execution.root).build("tokenizer", name, version=1, config={}, inputs={"corpus": corpus}, write=write)[0]


def test_reference_vectors(neox: Artifact, shared: Path) -> None:
    tokenizer = Tokenizer(neox)
    vectors = [json.loads(line) for line in (shared / "tokenizer" / "test_vectors.jsonl").read_text().split("\n") if line]
    assert len(vectors) == 18
    for vector in vectors:
        assert tokenizer.encode(vector["text"], specials=True) == vector["ids"], vector["name"]
        if "<|" not in vector["text"]:
            assert tokenizer.encode(vector["text"]) == vector["ids"], vector["name"]
    texts = [v["text"] for v in vectors]
    assert tokenizer.encode_batch(texts, specials=True) == [v["ids"] for v in vectors]
    assert tokenizer.encode_batch(texts) == [tokenizer.encode(t) for t in texts]


def test_neox_facts(neox: Artifact) -> None:
    tokenizer = Tokenizer(neox)
    assert (tokenizer.vocab_size, tokenizer.end_of_text_id, tokenizer.end_of_text) == (50277, 0, "<|endoftext|>")
    assert neox.count("vocab_size") == 50277
    assert neox.count("training_bytes") is None


def test_literal_special_tokens_are_text(neox: Artifact, shared: Path) -> None:
    """Case BL-24: no page can end its own document."""
    tokenizer = Tokenizer(neox)
    docs = [json.loads(line)["text"] for line in (shared / "cases" / "BL-24" / "docs.jsonl").read_text().split("\n") if line]
    assert sum("<|endoftext|>" in text for text in docs) == 4
    for text in docs:
        ids = tokenizer.encode(text)
        assert not {0, 1} & set(ids)
        assert tokenizer.decode(ids) == text
        assert (0 in tokenizer.encode(text, specials=True)) == ("<|endoftext|>" in text)


def test_trained_bpe_is_lossless_and_ends_documents_with_0(make_corpus: MakeCorpus, execution: Execution) -> None:
    artifact = train_stage(make_corpus(prose(30)), execution)
    assert set(pre_tokenizers.ByteLevel.alphabet()) <= set(json.loads(artifact.file("tokenizer.json").read_text())["model"]["vocab"])
    tokenizer = Tokenizer(artifact)
    assert tokenizer.end_of_text_id == 0
    assert tokenizer.vocab_size == 300
    for text in [*HARD, *prose(2)]:
        assert tokenizer.decode(tokenizer.encode(text)) == text
        assert 0 not in tokenizer.encode(text)
    assert tokenizer.encode("<|endoftext|>", specials=True) == [0]
    assert len(tokenizer.encode(prose(1)[0])) < len(prose(1)[0]) / 2


def test_trained_on_pages_that_are_not_held_out_until_train_bytes(make_corpus: MakeCorpus, execution: Execution) -> None:
    corpus = make_corpus(prose(200), heldout_fraction=0.2)
    opened = Corpus(corpus)
    assert 10 < len(opened.heldout) < 80
    pages, n_bytes = tokenizer_stage.training_pages(opened, 5000)
    assert not set(pages.tolist()) & set(opened.heldout.tolist())
    assert n_bytes == int(opened.n_bytes[pages].sum())
    assert n_bytes >= 5000 > n_bytes - int(opened.n_bytes[pages[-1]])
    assert pages.tolist() != sorted(pages.tolist())
    more, _ = tokenizer_stage.training_pages(opened, 20_000)
    assert more[: len(pages)].tolist() == pages.tolist()
    everything, total = tokenizer_stage.training_pages(opened, 10**9)
    assert len(everything) == 200 - len(opened.heldout)
    assert train_stage(corpus, execution, train_bytes=5000).count("training_bytes") == n_bytes < total


def test_same_bytes_for_any_hash_seed_and_threads(make_corpus: MakeCorpus, execution: Execution) -> None:
    corpus = make_corpus(prose(60))
    code = (
        "import sys, pathlib; from craw4llm.artifact import Store; from craw4llm.execution import Execution;"
        "from craw4llm.configs import TokenizerConfig; from craw4llm.tokens import tokenizer_stage as s;"
        "root, out = map(pathlib.Path, sys.argv[1:3]); out.mkdir();"
        "c = Store(root).open('corpus', sys.argv[3]);"
        "s.run(TokenizerConfig(vocab_size=400), {'corpus': c}, out, Execution(root=root, report=print))"
    )
    digests = set()
    for seed, threads in (("0", "1"), ("1", "2")):
        out = execution.root / f"out{seed}"
        env = os.environ | {"PYTHONHASHSEED": seed, "RAYON_NUM_THREADS": threads}
        subprocess.run([sys.executable, "-c", code, str(execution.root), str(out), corpus.fingerprint], check=True, env=env)
        digests.add(hashlib.sha256((out / "tokenizer.json").read_bytes()).hexdigest())
    assert len(digests) == 1


@pytest.mark.parametrize("content", ["", "{}", '{"version": "1.0"}', "\x80"])
def test_a_file_that_is_no_tokenizer(tmp_path: Path, build: Callable[[Stage], Artifact], content: str) -> None:
    path = tmp_path / "tokenizer.json"
    path.write_bytes(content.encode("latin-1"))
    with pytest.raises(InputError, match=r"tokenizer.*json.*no tokenizer"):
        build(Stage(TokenizerConfig(source=External(name="tokenizer", path=str(path)))))


def test_a_tokenizer_without_the_end_of_text_token(tmp_path: Path, build: Callable[[Stage], Artifact]) -> None:
    path = tmp_path / "t.json"
    Engine(models.WordLevel({"a": 0, "<eod>": 1}, unk_token="a")).save(str(path))
    with pytest.raises(InputError, match=r"no token '<\|endoftext\|>'"):
        build(Stage(TokenizerConfig(source=External(name="tokenizer", path=str(path)))))
    with pytest.raises(InputError, match="ordinary token"):
        build(Stage(TokenizerConfig(source=External(name="tokenizer", path=str(path)), end_of_text="<eod>")))


def test_plain_text_that_gives_a_special_id_is_refused(tmp_path: Path, build: Callable[[Stage], Artifact]) -> None:
    """A word-level model has the special token among its words."""
    path = tmp_path / "t.json"
    engine = Engine(models.WordLevel({"a": 0, "<eod>": 1}, unk_token="a"))
    engine.add_special_tokens(["<eod>"])
    engine.save(str(path))
    tokenizer = Tokenizer(build(Stage(TokenizerConfig(source=External(name="tokenizer", path=str(path)), end_of_text="<eod>"))))
    assert [d.tolist() for d in tokenizer.encode_documents(["a"])] == [[0]]
    with pytest.raises(StageError, match="special token"):
        tokenizer.encode_documents(["a", "<eod>"])


def test_no_text_to_train_on(make_corpus: MakeCorpus, execution: Execution) -> None:
    with pytest.raises(StageError, match="nothing to train on"):
        train_stage(make_corpus(["", ""]), execution)


def test_padding_truncation_and_templates_of_the_file_are_left_out(tmp_path: Path, build: Callable[[Stage], Artifact]) -> None:
    from tokenizers.processors import TemplateProcessing

    path = tmp_path / "t.json"
    engine = Engine(models.WordLevel({"a": 0, "<eod>": 1}, unk_token="a"))
    engine.add_special_tokens(["<eod>"])
    engine.enable_padding(length=8)
    engine.enable_truncation(1)
    engine.post_processor = TemplateProcessing(single="<eod> $A", special_tokens=[("<eod>", 1)])
    engine.save(str(path))
    tokenizer = Tokenizer(build(Stage(TokenizerConfig(source=External(name="tokenizer", path=str(path)), end_of_text="<eod>"))))
    texts: Sequence[str] = ["a"]
    assert tokenizer.encode_batch(texts) == [[0]]
    assert tokenizer.encode("a", specials=True) == [0]
