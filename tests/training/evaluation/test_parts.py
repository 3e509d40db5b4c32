"""Parts: whose they are, that they are whole, and that those of something else are refused."""

import threading
from pathlib import Path

import pyarrow as pa
import pytest

from craw4llm.errors import ArtifactError
from training.evaluation import parts as module
from training.evaluation.parts import Parts

SCHEMA = pa.schema([("x", pa.int64())])


def table(*values: int) -> pa.Table:
    return pa.table({"x": values}, schema=SCHEMA)


def test_every_part_is_one_ranks_and_none_is_done_twice(tmp_path: Path):
    ranks = [Parts(tmp_path, {"a": 1}, rank, 3) for rank in range(3)]
    for number in range(7):
        assert [p.mine("items", number) for p in ranks] == [number % 3 == rank for rank in range(3)]
    ranks[1].write("items", 4, table(1))
    assert not ranks[1].mine("items", 4) and ranks[1].mine("pages", 4)
    assert not Parts(tmp_path, {"a": 1}).mine("items", 4) and Parts(tmp_path, {"a": 1}).mine("items", 5)


def test_parts_are_read_in_order_and_waited_for(tmp_path: Path):
    first, second = Parts(tmp_path, {}, 0, 2), Parts(tmp_path, {}, 1, 2)
    first.write("items", 0, table(1, 2))
    first.write("items", 2, table(5))
    timer = threading.Timer(0.2, lambda: second.write("items", 1, table(3, 4)))
    timer.start()
    assert first.read("items", 3, SCHEMA).column("x").to_pylist() == [1, 2, 3, 4, 5]
    timer.join()
    assert first.read("pages", 0, SCHEMA).num_rows == 0


def test_an_own_part_that_has_gone_is_an_error_not_a_wait(tmp_path: Path):
    with pytest.raises(ArtifactError, match="part items 0 has gone"):
        Parts(tmp_path, {}).read("items", 1, SCHEMA)


def test_a_damaged_part_is_made_again_and_an_unfinished_one_does_not_count(tmp_path: Path):
    parts = Parts(tmp_path, {})
    parts.write("items", 0, table(1))
    (tmp_path / "items-000000.parquet").write_bytes(b"PAR1 torn")
    (tmp_path / ".items-000001.parquet.77").write_bytes(b"half")
    assert parts.mine("items", 0) and parts.mine("items", 1)


def test_parts_of_another_evaluation_are_refused(tmp_path: Path):
    Parts(tmp_path, {"model": "a", "seed": 1})
    Parts(tmp_path, {"seed": 1, "model": "a"}, 1, 2)
    with pytest.raises(ArtifactError, match="parts of another evaluation"):
        Parts(tmp_path, {"model": "b", "seed": 1})


@pytest.mark.parametrize(("rank", "ranks"), [(-1, 2), (2, 2), (0, 0)])
def test_a_rank_that_cannot_be_is_refused(tmp_path: Path, rank: int, ranks: int):
    with pytest.raises(ArtifactError, match=f"rank is {rank} of {ranks}"):
        Parts(tmp_path, {}, rank, ranks)


def test_waiting_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture):
    monkeypatch.setattr(module, "SAY_EVERY_S", 0.05)
    timer = threading.Timer(0.4, lambda: Parts(tmp_path, {}, 1, 2).write("items", 1, table(2)))
    timer.start()
    first = Parts(tmp_path, {}, 0, 2)
    first.write("items", 0, table(1))
    with caplog.at_level("INFO"):
        first.read("items", 2, SCHEMA)
    timer.join()
    assert "waiting for part items 1 of 2, of rank 1" in caplog.text
