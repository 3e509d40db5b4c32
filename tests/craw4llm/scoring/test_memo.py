"""The memo: complete blocks survive, torn ones are ignored, and no number depends on what it holds."""

import dataclasses
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from craw4llm.configs import ScorerConfig
from craw4llm.fingerprint import External
from craw4llm.scoring.memo import Memo, PageScores, encode
from craw4llm.stage import Stage

ROOT = Path(__file__).resolve().parents[3]


def ids(*pages: int) -> np.ndarray:
    return np.array(pages, dtype=np.int64)


def add(memo: Memo, *pages: int) -> None:
    memo.add(ids(*pages), np.array([p / 100 for p in pages], dtype=np.float32), np.zeros(len(pages), dtype=np.uint8))


def test_entries_outlive_their_writer(tmp_path):
    memo = Memo(tmp_path / "m", 100)
    assert memo.missing(ids(5, 3, 5)).tolist() == [3, 5]
    add(memo, 3, 5)
    memo.add(ids(7), np.array([np.nan], dtype=np.float32), np.array([1], dtype=np.uint8))
    memo.close()
    read = Memo(tmp_path / "m", 100)
    assert read.missing(ids(3, 4, 5, 7)).tolist() == [4]
    scores, reasons = read.get(ids(7, 5, 3))
    np.testing.assert_array_equal(scores, np.array([np.nan, 0.05, 0.03], dtype=np.float32))
    assert reasons.tolist() == [1, 0, 0]
    assert read.damaged_bytes == 0


def test_reading_creates_nothing(tmp_path):
    memo = Memo(tmp_path / "m", 10)
    memo.close()
    assert not (tmp_path / "m").exists()


def test_every_cut_of_a_segment_keeps_its_whole_blocks(tmp_path):
    block = encode(ids(1, 2), np.array([0.1, 0.2], dtype=np.float32), np.zeros(2, dtype=np.uint8))
    data = block + encode(ids(3), np.array([0.3], dtype=np.float32), np.zeros(1, dtype=np.uint8))
    folder = tmp_path / "m"
    folder.mkdir()
    for cut in range(len(data) + 1):
        (folder / "w.scores").write_bytes(data[:cut])
        memo = Memo(folder, 10)
        whole = 0 if cut < len(block) else 1 if cut < len(data) else 2
        assert memo.missing(ids(1, 2, 3)).tolist() == [[1, 2, 3], [3], []][whole]
        assert memo.damaged_bytes == cut - [0, len(block), len(data)][whole]


def test_a_changed_bit_is_noticed(tmp_path):
    folder = tmp_path / "m"
    folder.mkdir()
    block = encode(ids(1, 2), np.array([0.1, 0.2], dtype=np.float32), np.zeros(2, dtype=np.uint8))
    for position in range(len(block)):
        spoiled = bytearray(block)
        spoiled[position] ^= 1
        (folder / "w.scores").write_bytes(bytes(spoiled))
        memo = Memo(folder, 10)
        assert memo.missing(ids(1, 2)).tolist() == [1, 2], position
        assert memo.damaged_bytes == len(block)


def test_a_writer_never_appends_behind_damage(tmp_path):
    folder = tmp_path / "m"
    folder.mkdir()
    (folder / "torn.scores").write_bytes(b"C4SB\x05")
    first, second = Memo(folder, 10), Memo(folder, 10)
    add(first, 1)
    add(second, 2)
    add(first, 3)
    assert len(list(folder.glob("*.scores"))) == 3
    first.close()
    second.close()
    third = Memo(folder, 10)
    assert third.missing(ids(1, 2, 3)).tolist() == []
    assert third.damaged_bytes == 5


WRITER = """
import sys, numpy as np
from pathlib import Path
from craw4llm.scoring.memo import Memo
memo = Memo(Path(sys.argv[1]), 1 << 20)
page = int(sys.argv[2])
while True:
    pages = np.arange(page, page + 1000) % (1 << 20)
    memo.add(pages, (pages / (1 << 20)).astype(np.float32), np.zeros(1000, dtype=np.uint8))
    page += 1000
"""


def test_kill_9_of_several_writers(tmp_path):
    folder = tmp_path / "m"
    writers = [subprocess.Popen([sys.executable, "-c", WRITER, str(folder), str(k * 500_000)], cwd=ROOT) for k in range(2)]
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and len(list(folder.glob("*.scores"))) < 2:
        time.sleep(0.02)
    time.sleep(0.1)
    for writer in writers:
        os.kill(writer.pid, signal.SIGKILL)
        writer.wait()
    memo = Memo(folder, 1 << 20)
    every = np.arange(1 << 20)
    known = np.setdiff1d(every, memo.missing(every))
    assert len(known) >= 2000
    np.testing.assert_array_equal(memo.get(known)[0], (known / (1 << 20)).astype(np.float32))


@pytest.fixture
def scored_web(build, make_web, tmp_path):
    """(corpus, scorer) artifacts of 300 pages and a small model."""
    text = tmp_path / "train.txt"
    text.write_text("".join(f"__label__hq proof lemma w{k}\n__label__cc sale cheap w{k}\n" for k in range(50)))
    web = make_web([(f"https://w.example/{k}", " ".join(["proof"] * (k % 7) + ["sale"] * (k % 5) + [f"w{k}"]), []) for k in range(300)])
    scorer = Stage(ScorerConfig(kind="train_fasttext", source=External(name="t", path=str(text)), dim=8, buckets=500))
    return build(web), build(scorer)


def test_only_what_is_missing_is_computed(scored_web, execution):
    with PageScores(*scored_web, execution) as first:
        some = first.scores([5, 2, 5])
        assert first.computed == 2
    with PageScores(*scored_web, execution) as second:
        np.testing.assert_array_equal(second.scores([5, 2, 5]), some)
        assert second.computed == 0
        second.scores([2, 9])
        assert second.computed == 1
    shutil.rmtree(execution.memo)
    with PageScores(*scored_web, execution) as third:
        np.testing.assert_array_equal(third.scores([5, 2, 5]), some)
        assert third.computed == 2


def test_two_workers_give_the_same_numbers(scored_web, execution, tmp_path):
    pages = np.arange(300)[::-1]
    with PageScores(*scored_web, execution) as alone:
        expected, why = alone.with_reasons(pages)
    assert len(np.unique(expected)) > 20
    two = dataclasses.replace(execution, workers=2)
    shutil.rmtree(execution.memo)
    with PageScores(*scored_web, two, pool_after=1) as together:
        scores, reasons = together.with_reasons(pages)
        assert together._pool is not None
    np.testing.assert_array_equal(scores, expected)
    np.testing.assert_array_equal(reasons, why)
