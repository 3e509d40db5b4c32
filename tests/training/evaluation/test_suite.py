"""The suite in parts: the same rows for any number of ranks and after an interruption; faults; means."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
import torch
from standins import Mixer, file_of, letters

from craw4llm.errors import StageError
from training.evaluation import suite
from training.evaluation.bits_per_byte import HeldoutPages
from training.evaluation.likelihood import NO_TOKENS, NOT_FINITE, Batching
from training.evaluation.parts import Parts
from training.evaluation.results import likelihoods, macro_mean, task_rows
from training.evaluation.suite import Scorer, blocks, gather_items, gather_pages, run_items, run_pages
from training.evaluation.tasks import TaskFile
from training.model import Branches


def encode_batch(texts: Sequence[str]) -> list[list[int]]:
    return [letters(text) for text in texts]


@pytest.fixture
def files(monkeypatch: pytest.MonkeyPatch) -> dict[str, TaskFile]:
    """Three tasks, cut into five parts."""
    monkeypatch.setattr(suite, "BLOCK_ITEMS", 5)
    mc = [{"query": f"tree {k}", "choices": ["oak", "a birch", "elm"][: 2 + k % 2], "gold": k % 2} for k in range(9)]
    lm = [{"context": f"{c} {k}", "continuation": "so it is", "category": c} for k in range(4) for c in "ba"]
    schema = [{"context_options": [f"{k} the cat", f"{k} the cow"], "continuation": "slept", "gold": k % 2} for k in range(6)]
    return {"piqa": file_of("piqa", *mc), "jeopardy": file_of("jeopardy", *lm), "winograd": file_of("winograd", *schema)}


def scorer(model: object | None = None, **batching: int) -> Scorer:
    return Scorer(
        model=model or Mixer(context=200),  # type: ignore[arg-type]
        encode_batch=encode_batch,
        context=200,
        few_shot_seed=1234,
        batching=Batching(**batching),
    )


class Failing(Mixer):
    """Stops at the n-th batch, or gives losses that are not finite from then on."""

    def __init__(self, after: int, *, stop: bool) -> None:
        super().__init__(context=200)
        self.left, self.stop = after, stop

    def hidden(self, tokens: torch.Tensor, branches: Branches | None = None) -> torch.Tensor:
        self.left -= 1
        if self.left < 0 and self.stop:
            raise KeyboardInterrupt
        return super().hidden(tokens, branches) * (1 if self.left >= 0 else torch.nan)


def test_rows_are_by_task_and_line_and_parts_are_blocks(files: dict[str, TaskFile], tmp_path: Path):
    parts = Parts(tmp_path, {})
    seen: list[int] = []
    count = run_items(files, scorer(), parts, lambda n, note: seen.append(n))
    assert count == len(list(blocks(files, 1234))) == 5 and seen == [5, 5, 5, 5, 3]
    rows = gather_items(parts, count, files).to_pylist()
    assert [(row["task"], row["item"]) for row in rows] == [
        (label, k) for label, n in (("piqa", 9), ("jeopardy", 8), ("winograd", 6)) for k in range(n)
    ]
    assert all(len(row["losses"]) == len(row["n_continuation_tokens"]) == len(row["n_context_tokens"]) for row in rows)
    assert rows[0]["n_continuation_tokens"] == [4, 8] and {row["fault"] for row in rows} == {None}


def test_any_number_of_ranks_gives_the_same_bytes(files: dict[str, TaskFile], tmp_path: Path):
    alone = Parts(tmp_path / "one", {})
    expected = gather_items(alone, run_items(files, scorer(), alone), files)
    ranks = [Parts(tmp_path / "three", {}, rank, 3) for rank in range(3)]
    counts = [run_items(files, scorer(), parts) for parts in reversed(ranks)]
    assert counts == [5, 5, 5] and gather_items(ranks[0], 5, files).equals(expected)


@pytest.mark.parametrize("batching", [{"sequences": 1}, {"sequences": 8}, {"tokens": 120}])
def test_any_batch_size_gives_the_same_choices(files: dict[str, TaskFile], tmp_path: Path, batching: dict[str, int]):
    parts = [Parts(tmp_path / name, {}) for name in ("default", "other")]
    a, b = (gather_items(p, run_items(files, s, p), files).to_pylist() for p, s in zip(parts, (scorer(), scorer(**batching)), strict=True))
    for one, other in zip(a, b, strict=True):
        assert (one["choice"], one["correct"]) == (other["choice"], other["correct"])
        assert np.abs(np.array(one["losses"]) - np.array(other["losses"])).max() < 1e-5


@pytest.mark.parametrize("after", [0, 1, 3])
def test_an_interrupted_run_goes_on_where_it_was(files: dict[str, TaskFile], tmp_path: Path, after: int):
    parts = Parts(tmp_path / "whole", {})
    expected = gather_items(parts, run_items(files, scorer(), parts), files)
    broken = Parts(tmp_path / "broken", {})
    with pytest.raises(KeyboardInterrupt):
        run_items(files, scorer(Failing(after, stop=True)), broken)
    kept = sorted(p.name for p in (tmp_path / "broken").glob("items-*"))
    before = {name: (tmp_path / "broken" / name).stat().st_mtime_ns for name in kept}
    assert gather_items(broken, run_items(files, scorer(), broken), files).equals(expected)
    assert before == {name: (tmp_path / "broken" / name).stat().st_mtime_ns for name in kept}


def test_losses_that_are_not_finite_stop_the_stage(files: dict[str, TaskFile], tmp_path: Path):
    with pytest.raises(StageError, match=r"\d of 9 items of piqa have losses that are not finite"):
        run_items(files, scorer(Failing(0, stop=False)), Parts(tmp_path, {}))


def test_a_few_losses_that_are_not_finite_are_faults_and_wrong(files: dict[str, TaskFile], tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(suite, "MAX_BAD_SHARE", 0.9)
    parts = Parts(tmp_path, {})
    model = Failing(len(list(blocks(files, 1234))), stop=False)  # some batches of the last parts
    items = gather_items(parts, run_items(files, scorer(model), parts), files)
    bad = [row for row in items.to_pylist() if row["fault"]]
    assert bad and {row["fault"] for row in bad} == {NOT_FINITE}
    assert all((row["losses"], row["choice"], row["correct"]) == ([], None, False) for row in bad)
    rows = {row["task"]: row for row in task_rows(items, files).to_pylist()}
    assert sum(row["scored"] for row in rows.values()) == 23 - len(bad) and rows["winograd"]["items"] == 6


def test_a_text_without_tokens_is_a_fault(tmp_path: Path):
    rows = [{"context": "who", "continuation": "me"}, {"context": "♞", "continuation": "me"}, {"context": "who", "continuation": "♞"}]
    files = {"lambada_openai": file_of("lambada_openai", *rows)}
    deaf = Scorer(
        model=Mixer(),
        encode_batch=lambda texts: [letters(t) if "♞" not in t else [] for t in texts],
        context=96,
        few_shot_seed=1234,
    )
    parts = Parts(tmp_path, {})
    found = gather_items(parts, run_items(files, deaf, parts), files).to_pylist()
    assert [row["fault"] for row in found] == [None, NO_TOKENS, NO_TOKENS] and not found[1]["correct"]


def test_likelihood_forms_by_hand():
    assert likelihoods([1.5, 1.0, 3.0], 1) == (1.0, 0.5) and likelihoods([1.5, 1.0, 3.0], 2) == (3.0, -2.0)
    assert likelihoods([2.0], None) == (2.0, None) and likelihoods([], 0) == (None, None)
    assert macro_mean(["a", "a", "b"], [1.0, 2.0, 4.0]) == pytest.approx(2.75)
    assert macro_mean(["a", "a", "b"], [1.0, None, 4.0]) == pytest.approx(2.5)
    assert macro_mean(["a", "b"], [1.0, None]) is None


def test_task_rows_are_the_means_of_the_items(files: dict[str, TaskFile], tmp_path: Path):
    parts = Parts(tmp_path, {})
    items = gather_items(parts, run_items(files, scorer(), parts), files)
    rows = {row["task"]: row for row in task_rows(items, files).to_pylist()}
    piqa = [row for row in items.to_pylist() if row["task"] == "piqa"]
    right = [row["losses"][row["gold"]] for row in piqa]
    margins = [min(loss for k, loss in enumerate(row["losses"]) if k != row["gold"]) - row["losses"][row["gold"]] for row in piqa]
    assert rows["piqa"]["right_loss"] == pytest.approx(np.mean(right)) and rows["piqa"]["margin"] == pytest.approx(np.mean(margins))
    assert rows["piqa"]["accuracy"] == pytest.approx(np.mean([m > 0 for m in margins]))
    assert rows["jeopardy"]["margin"] is None and rows["jeopardy"]["right_loss"] > 0


def test_pages_in_parts_are_the_pages_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    rng = np.random.default_rng(0)
    tokens = [rng.integers(1, 300, n).astype(np.int64) for n in (5, 40, 300, 7, 90)]
    pages = HeldoutPages(page=np.arange(5, dtype=np.uint32), n_bytes=np.full(5, 9, dtype=np.uint64), tokens=tokens)
    whole = Parts(tmp_path / "whole", {})
    assert run_pages(pages, scorer(), 0, whole) == 1
    monkeypatch.setattr(suite, "BLOCK_PAGE_TOKENS", 100)
    cut = [Parts(tmp_path / "cut", {}, rank, 2) for rank in (0, 1)]
    assert [run_pages(pages, scorer(), 0, parts) for parts in cut] == [3, 3]  # 45, 300, 97 tokens
    assert gather_pages(cut[0], 3) == pytest.approx(gather_pages(whole, 1), abs=1e-3)
    assert gather_pages(whole, 1).shape == (5,) and isinstance(pa.array(gather_pages(whole, 1)), pa.Array)


def test_pages_whose_loss_is_not_finite_stop_the_stage(tmp_path: Path):
    pages = HeldoutPages(page=np.array([7], dtype=np.uint32), n_bytes=np.array([3], dtype=np.uint64), tokens=[np.array([1, 2])])
    with pytest.raises(StageError, match="held-out page 7 is nan"):
        run_pages(pages, scorer(Failing(0, stop=False)), 0, Parts(tmp_path, {}))
