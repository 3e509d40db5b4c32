"""Parts: the same bytes however many there are and whoever writes them; a kill costs the parts that were being written."""

import os
import signal
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
from craw4llm.errors import ArtifactError
from craw4llm.tokens import parts
from craw4llm.tokens.packing import Joined, as_tokens
from craw4llm.tokens.shards import Shards
from craw4llm.tokens.tokenizer import Tokenizer
from craw4llm.tokens.trace import TokenTrace

MakeCorpus = Callable[..., Artifact]
MakeSelection = Callable[[Artifact, Sequence[int]], Artifact]
Tokenize = Callable[..., Artifact]

RUN = """
import hashlib, os, pathlib, sys, time
from craw4llm.artifact import Store
from craw4llm.configs import TokenizeConfig
from craw4llm.execution import Execution
from craw4llm.tokens import parts, tokenize_stage
if __name__ == "__main__":
    root, out, workers, part_bytes, slow = pathlib.Path(sys.argv[1]), pathlib.Path(sys.argv[2]), *map(int, sys.argv[3:6])
    encode_parts, encode = parts.encode_parts, parts.encode
    parts.encode_parts = lambda *a, **k: encode_parts(*a, **k, part_bytes=part_bytes)
    def counted(*a):
        time.sleep(slow)
        print("part", a[1], flush=True)
        return encode(*a)
    parts.encode = counted
    out.mkdir(exist_ok=True)
    store = Store(root)
    inputs = dict(zip(("corpus", "selection", "tokenizer"), (store.open(*a.split(":")) for a in sys.argv[6:])))
    where = Execution(root=root, workers=workers, report=lambda line: None)
    config = TokenizeConfig(sample_tokens=32)
    if "PART" in os.environ:
        part, of = map(int, os.environ["PART"].split("/"))
        print(tokenize_stage.run_part(config, inputs, out, where, part=part, of=of))
        sys.exit()
    tokenize_stage.run(config, inputs, out, where)
    print(sorted((p.relative_to(out).as_posix(), hashlib.sha256(p.read_bytes()).hexdigest()) for p in out.rglob("*") if p.is_file()))
"""


@pytest.fixture
def command(make_corpus: MakeCorpus, make_selection: MakeSelection, neox: Artifact) -> Callable[..., list[str]]:
    corpus = make_corpus([f"page number {i} of many, with a few words" * (1 + i % 5) for i in range(600)])
    inputs = [f"{a.stage}:{a.fingerprint}" for a in (corpus, make_selection(corpus, range(0, 600, 2)), neox)]

    def make(out: str, workers: int = 1, part_bytes: int = 4000, slow: int = 0) -> list[str]:
        where = [str(corpus.root), str(corpus.root / out), str(workers), str(part_bytes), str(slow)]
        return [sys.executable, "-c", RUN, *where, *inputs]

    return make


def result(command: list[str], seed: str = "0") -> tuple[str, list[str]]:
    """(files and hashes, parts that were encoded in the process itself)."""
    done = subprocess.run(command, check=True, env=os.environ | {"PYTHONHASHSEED": seed}, capture_output=True, text=True)
    *said, last = done.stdout.strip().split("\n")
    return last, said


def test_same_bytes_for_workers_parts_and_hash_seeds(command: Callable[..., list[str]]) -> None:
    one, said = result(command("a", workers=1, part_bytes=10**9))
    assert said == ["part 0"] and "shards/shard.00000.mds" in one and "parts" not in one
    assert result(command("c", workers=2, part_bytes=4000), "1")[0] == one
    assert result(command("d", workers=3, part_bytes=1), "2")[0] == one


def test_killed_at_half_and_tried_again(command: Callable[..., list[str]], execution) -> None:
    """kill -9 while a part is written: finished parts are not redone, and the bytes are those of an undisturbed run."""
    undisturbed, all_parts = result(command("whole"))
    slow = subprocess.Popen(command("killed", slow=1), stdout=subprocess.PIPE, text=True)
    assert slow.stdout is not None
    for _ in range(len(all_parts) // 2):
        slow.stdout.readline()
    slow.send_signal(signal.SIGKILL)
    slow.wait()
    slow.stdout.close()
    out = execution.root / "killed"
    assert not (out / "shards").exists()
    finished = sorted(p.stem for p in (out / "parts").glob("*.npz"))
    assert 0 < len(finished) < len(all_parts)
    torn = sorted((out / "parts").glob("*.stream"))[0]
    torn.write_bytes(torn.read_bytes()[:-2])  # a finished part that was damaged is written again
    (out / "shards").mkdir()
    (out / "shards" / "shard.00000.mds").write_bytes(b"half")  # as if it had been killed later
    again, redone = result(command("killed"))
    assert again == undisturbed
    assert redone == ["part 0", *(f"part {i}" for i in range(len(finished), len(all_parts)))]


def test_shares_made_at_the_same_time_by_several_processes(command: Callable[..., list[str]]) -> None:
    """`--part`: the run that puts the shares together encodes nothing, and a share that is missing is made up for."""
    undisturbed, all_parts = result(command("whole"))
    made = [
        subprocess.Popen(command("shared"), env=os.environ | {"PART": f"{part}/3"}, stdout=subprocess.PIPE, text=True) for part in (1, 2, 3)
    ]
    said = [line for process in made for line in process.communicate(timeout=120)[0].splitlines()]
    assert all(process.returncode == 0 for process in made)
    assert sorted(line for line in said if line.startswith("part")) == sorted(all_parts)
    assert sum(int(line.split()[0]) for line in said if "pages" in line) == 300
    assert result(command("shared")) == (undisturbed, [])
    lacking = subprocess.run(command("lacking"), env=os.environ | {"PART": "2/3"}, check=True, capture_output=True, text=True)
    assert len(lacking.stdout.splitlines()) > 1
    again, redone = result(command("lacking"))
    assert again == undisturbed and redone == [line for i, line in enumerate(all_parts) if i % 3 != 1]


def test_ranges() -> None:
    sizes = np.array([5, 5, 5, 30, 1, 1, 9])
    assert parts.ranges(sizes, 10) == [(0, 2), (2, 3), (3, 4), (4, 6), (6, 7)]
    assert parts.ranges(sizes, 10**6) == [(0, 7)] and parts.ranges(sizes, 1) == [(i, i + 1) for i in range(7)]


@pytest.mark.parametrize("last_sample", ["drop", "pad"])
def test_joined_files_read_like_one(tmp_path: Path, last_sample) -> None:
    stream = np.arange(1, 104, dtype=np.uint16)
    files = []
    for i, piece in enumerate(np.split(stream, [1, 1, 40, 41, 90])):
        piece.tofile(tmp_path / str(i))
        files.append((tmp_path / str(i), len(piece)))
    joined = Joined(files, end_of_text_id=0, sample_tokens=25, last_sample=last_sample, dtype=np.dtype(np.uint16))
    whole = np.concatenate([stream, np.zeros(22, dtype=np.uint16)]) if last_sample == "pad" else stream[:100]
    assert np.array_equal(np.stack([joined[i] for i in range(len(joined))]), whole.reshape(-1, 25))
    assert (joined.dropped_tokens, joined.padding_tokens) == ((0, 22) if last_sample == "pad" else (3, 0))


def test_no_id_is_wrapped() -> None:
    assert as_tokens(np.array([65_535]), np.dtype(np.uint16)).tolist() == [65_535]
    with pytest.raises(ArtifactError, match="the id 65536 does not fit into uint16"):
        as_tokens(np.array([1, 65_536]), np.dtype(np.uint16))


@pytest.mark.parametrize("last_sample", ["drop", "pad"])
def test_every_page_is_found_in_its_samples(
    make_corpus: MakeCorpus, make_selection: MakeSelection, tokenize: Tokenize, neox: Artifact, last_sample
) -> None:
    """From page to samples and back, for every page and every token; and the page's text comes out again."""
    corpus = make_corpus([f"Page {i}. " + "words and more words, " * (i * 7 % 23) for i in range(150)])
    order = [(7 * i) % 150 for i in range(120)]
    config = TokenizeConfig(sample_tokens=32, last_sample=last_sample)
    artifact = tokenize(config, corpus=corpus, tokenizer=neox, selection=make_selection(corpus, order))
    trace, shards, tokenizer, texts = TokenTrace(artifact), Shards.of(artifact), Tokenizer(neox), Corpus(corpus)
    owners: dict[tuple[int, int], int] = {}
    for page in order:
        ids: list[int] = []
        for sample, start, stop in trace.samples_of(page):
            assert (page, start, stop) in trace.pages_in(sample)
            ids += shards[[sample]][0][start:stop].tolist()
            for at in range(start, stop):
                assert (sample, at) not in owners
                owners[sample, at] = page
        expected = [*tokenizer.encode(texts.text(page)), tokenizer.end_of_text_id]
        assert ids == expected or (page == order[-1] and last_sample == "drop" and ids == expected[: len(ids)])
        if ids == expected:
            assert tokenizer.decode(ids[:-1]) == texts.text(page)
    assert len(owners) == artifact.count("samples") * 32 - artifact.count("padding_tokens")
    assert not trace.samples_of((set(range(150)) - set(order)).pop())
    with pytest.raises(IndexError):
        trace.pages_in(artifact.count("samples"))


def test_options(make_corpus: MakeCorpus, make_selection: MakeSelection, tokenize: Tokenize, neox: Artifact) -> None:
    """Special tokens as ids, as the reference does; compressed shards with the same samples."""
    corpus = make_corpus(["one <|endoftext|> two", "three four five six"])
    inputs = {"corpus": corpus, "tokenizer": neox, "selection": make_selection(corpus, [0, 1])}
    plain = tokenize(TokenizeConfig(sample_tokens=4), "plain", **inputs)
    packed = tokenize(TokenizeConfig(sample_tokens=4, compression="zstd"), "packed", **inputs)
    assert np.array_equal(Shards.of(plain)[range(3)], Shards.of(packed)[range(3)])
    assert plain.manifest["notes"]["tokenizer"] == {"fingerprint": neox.fingerprint, "digest": neox.digest}
    ids = tokenize(TokenizeConfig(sample_tokens=4, specials="ids", last_sample="pad"), "ids", **inputs)
    lengths = [pq.read_table(a.file("documents.parquet")).column("n_tokens").to_pylist() for a in (plain, ids)]
    tokenizer = Tokenizer(neox)
    assert lengths[0][0] == len(tokenizer.encode("one <|endoftext|> two")) + 1
    assert lengths[1][0] == len(tokenizer.encode("one <|endoftext|> two", specials=True)) + 1 < lengths[0][0]
