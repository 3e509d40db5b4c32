"""The fast route gives the library's ids: on real pages, hard inputs and random text; and it stands aside where it would not."""

import gzip
import json
import os
import random
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from tokenizers import Tokenizer as Engine

from craw4llm.tokens.fast import FastEncoder, cuts
from craw4llm.tokens.tokenizer import plain_engine

EVERY_PAGE = "CRAW4LLM_EVERY_PAGE"  # set to 1 to compare all pages and code points (several minutes), not a sample


@pytest.fixture(scope="module")
def path(shared: Path) -> Path:
    return shared / "tokenizer" / "20B_tokenizer.json"


@pytest.fixture(scope="module")
def engine(path: Path) -> Engine:
    return plain_engine(path)


@pytest.fixture(scope="module")
def fast(path: Path) -> FastEncoder:
    encoder = FastEncoder.of(path)
    assert encoder is not None
    return encoder


def same(fast: FastEncoder, engine: Engine, texts: list[str]) -> None:
    for start in range(0, len(texts), 256):
        block = texts[start : start + 256]
        for text, reference in zip(block, engine.encode_batch_fast(block, add_special_tokens=False), strict=True):
            assert fast.encode(text).tolist() == reference.ids, repr(text[:200])


def test_real_pages(shared: Path, fast: FastEncoder, engine: Engine) -> None:
    """Every 40th page of the real corpus, or every one."""
    step = 1 if os.environ.get(EVERY_PAGE) == "1" else 40
    file = pq.ParquetFile(shared / "corpus" / "docweb.parquet")
    seen = 0
    for batch in file.iter_batches(batch_size=2048, columns=["text"]):
        texts = [text for text in batch.column(0).to_pylist()[::step] if text]
        same(fast, engine, texts)
        seen += len(texts)
    assert seen > 29_000 // step


def test_reference_vectors(shared: Path, fast: FastEncoder) -> None:
    vectors = [json.loads(line) for line in (shared / "tokenizer" / "test_vectors.jsonl").read_text().split("\n") if line]
    for vector in vectors:
        if "<|" not in vector["text"]:
            assert fast.encode(vector["text"]).tolist() == vector["ids"], vector["name"]


def test_random_text(fast: FastEncoder, engine: Engine) -> None:
    """Runs of spaces around every length, all kinds of white space, marks, contractions, literals, in any order."""
    rng = random.Random(5)
    pool = [
        " ",
        "  ",
        "   ",
        " " * 24,
        " " * 25,
        " " * 49,
        "\n",
        "\n\n",
        "\t",
        "\r\n",
        "\u00a0",
        "\u2003",
        "\u0085",
        "\x1c",
        "a",
        "Z",
        "word",
    ]
    pool += [
        "'s",
        "'ll",
        "'",
        "1",
        "42",
        "!",
        "...",
        "é",
        "e\u0301",
        "\u0301",
        "A\u030a",
        "日本",
        "한",
        "\u1112\u1161",
        "👩\u200d👧",
        "\ufeff",
        "\x00",
    ]
    pool += ["<|endoftext|>", "<|padding|>", "٣", "ǆ", "ﬁ", "\U00016d67\U00016d67", "\U0001e030"]
    same(fast, engine, ["".join(rng.choices(pool, k=rng.randrange(1, 40))) for _ in range(20_000)])


def test_code_points(fast: FastEncoder, engine: Engine) -> None:
    """Every code point (or every 61st) between letters, digits, symbols, spaces and itself: both engines class it alike."""
    step = 1 if os.environ.get(EVERY_PAGE) == "1" else 61
    points = [chr(c) for c in range(0, 0x110000, step) if not 0xD800 <= c < 0xE000]
    same(fast, engine, [f"a{c}a 1{c}1 !{c}! {c} \n{c}\n{c}  {c}s'{c}{c}" for c in points])


def hard_texts(shared: Path) -> Iterator[tuple[str, str]]:
    with gzip.open(shared / "cases" / "BL-29" / "docs.jsonl.gz", "rt", encoding="utf-8") as stream:
        for line in stream:
            yield json.loads(line)["id"], json.loads(line)["text"]


def test_runs_without_a_space(shared: Path, fast: FastEncoder, engine: Engine) -> None:
    """Case BL-29: within 5 s each, the library's ids, and back to the text (NFC of it)."""
    import unicodedata

    for name, text in hard_texts(shared):
        started = time.monotonic()
        ids = fast.encode(text).tolist()
        assert time.monotonic() - started < 5, name
        assert engine.decode(ids) == unicodedata.normalize("NFC", text), name
        assert ids == engine.encode(text, add_special_tokens=False).ids, name


def test_cuts_change_nothing(shared: Path, fast: FastEncoder, engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Cut after every few characters, wherever a cut is allowed, on pages and on random text; in threads too."""
    rng = random.Random(6)
    pool = [
        " ",
        "  ",
        "\n",
        "\n\n",
        "\t",
        "a",
        "Zed",
        "'s",
        "'",
        "1",
        "42",
        "!",
        "é",
        "e\u0301",
        "\u0301",
        "日本",
        "\u00a0",
        "\x1c",
        "\u1112\u1161",
    ]
    texts = ["".join(rng.choices(pool, k=200)) for _ in range(300)]
    table = pq.read_table(shared / "corpus" / "docweb.parquet", columns=["text"]).column(0)
    texts += [text[:20_000] for text in table[::1500].to_pylist() if text]
    for text in texts:
        ends = [0, *cuts(text, 3)]
        assert "".join(text[a:b] for a, b in pairwise(ends)) == text and (len(ends) > 10 or len(text) < 2000)
    monkeypatch.setattr("craw4llm.tokens.fast.PIECE_CHARS", 3)
    monkeypatch.setattr("craw4llm.tokens.fast.THREADS_FROM_CHARS", 3)
    same(fast, engine, texts)
    for text in texts[::10]:
        assert [i for ids in fast.pieces(text, threads=3) for i in ids.tolist()] == fast.encode(text).tolist()


LONG = """
import resource, sys, time
from pathlib import Path
from craw4llm.tokens.fast import FastEncoder
fast = FastEncoder.of(Path(sys.argv[1]))
text = {text}
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
started = time.monotonic()
tokens = sum(len(ids) for ids in fast.pieces(text, threads=2))
print(tokens, time.monotonic() - started, (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024)
"""


@pytest.mark.parametrize(
    "text",
    [
        "('The quick brown fox, aged 12, jumps over the lazy dog.\\n' * 1_000_000)[:50_000_000]",
        "__import__('base64').b64encode(__import__('random').Random(1).randbytes(1_500_000)).decode() * 25",
        "('x' * 79 + '\\n') * 625_000",
    ],
    ids=["prose", "base64", "lines"],
)
def test_fifty_megabytes_need_little_memory(path: Path, text: str) -> None:
    """Memory beyond the text itself stays small; the speed is measured by benchmarks/tokenize.py, not here."""
    done = subprocess.run([sys.executable, "-c", LONG.format(text=text), str(path)], check=True, capture_output=True, text=True)
    tokens, _, grown = (float(x) for x in done.stdout.split())
    assert tokens > 5_000_000
    assert grown < 200e6, f"{grown / 1e6:.0f} MB"


def test_trained_bpe_takes_the_fast_route(tmp_path: Path) -> None:
    from tokenizers import decoders, models, pre_tokenizers, trainers

    rng = random.Random(2)
    engine = Engine(models.BPE())
    engine.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    engine.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(vocab_size=600, special_tokens=["<|endoftext|>"], initial_alphabet=alphabet, show_progress=False)
    words = ["".join(rng.choices("abcdefg", k=rng.randrange(1, 9))) for _ in range(200)]
    engine.train_from_iterator([" ".join(rng.choices(words, k=100)) for _ in range(100)], trainer=trainer)
    engine.save(str(tmp_path / "t.json"))
    fast = FastEncoder.of(tmp_path / "t.json")
    assert fast is not None
    pool = [*words[:50], " ", "  ", "\n", "e\u0301", "日本", "<|endoftext|>"]
    same(fast, plain_engine(tmp_path / "t.json"), ["".join(rng.choices(pool, k=30)) for _ in range(2000)])


@pytest.mark.parametrize(
    "change",
    [
        lambda c: c.update(normalizer={"type": "NFKC"}),
        lambda c: c["pre_tokenizer"].update(add_prefix_space=True),
        lambda c: c["pre_tokenizer"].update(use_regex=False),
        lambda c: c["model"].update(dropout=0.1),
        lambda c: c["model"].update(ignore_merges=True),
        lambda c: c["added_tokens"].append({**c["added_tokens"][2], "id": 50277, "content": "word"}),
        lambda c: c["added_tokens"].pop(5),
        lambda c: c["model"]["merges"].reverse(),
        lambda c: c["model"]["merges"].pop(),
    ],
)
def test_other_files_are_left_to_the_library(path: Path, tmp_path: Path, change: Callable[[dict], None]) -> None:
    content = json.loads(path.read_text())
    change(content)
    (tmp_path / "t.json").write_text(json.dumps(content))
    assert FastEncoder.of(tmp_path / "t.json") is None
