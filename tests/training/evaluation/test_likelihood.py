"""Scoring: the reference harness's results under a model given by a formula, hand-worked items, batching."""

import itertools
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from standins import FormulaModel, Mixer, NextToken, file_of, golden_file, letters, sha256

from training.configs import Shape
from training.evaluation.aggregate import aggregate, centered
from training.evaluation.likelihood import Batching, score_prompts, score_task, token_losses
from training.evaluation.models import TorchModel
from training.evaluation.prompts import EncodedPrompt, encode_prompt, prompts
from training.evaluation.tasks import CORE, TASKS, parse_task_file
from training.model import Branches, Transformer


@pytest.fixture(scope="module")
def golden(shared: Path) -> dict[str, list[dict]]:
    rows = [json.loads(line) for line in (shared / "eval_samples" / "golden_scores.jsonl").read_text().splitlines()]
    assert len(rows) == 904
    return {kind: [row for row in rows if row["kind"] == kind] for kind in ("item", "task", "core")}


@pytest.fixture(scope="module")
def accuracies() -> dict[str, float]:
    """Filled by the tests of the tasks, read by the test of the aggregates after them."""
    return {}


@pytest.mark.parametrize("label", TASKS)
def test_golden_scores(label: str, golden: dict, accuracies: dict, shared: Path, neox: Callable[[str], list[int]]):
    """Every example of the task's sample file: ids, losses, choice, likeliest tokens, and the task's accuracy."""
    expected = [row for row in golden["item"] if row["label"] == label]
    file = golden_file(shared, label)
    result = score_task(file, (encode_prompt(p, neox, 2048) for p in prompts(file)), FormulaModel(), Batching(tokens=4096))
    scored = {(e.prompt.category or "", e.prompt.example): (e, score) for e, score in result.items}
    assert len(scored) == len(expected) == len(file.rows)
    for row in expected:
        encoded, score = scored[row["category"], row["example"]]
        ids = [[*before.tolist(), *after.tolist()] for before, after in zip(encoded.contexts, encoded.continuations, strict=True)]
        assert sha256(json.dumps(ids, separators=(",", ":"))) == row["ids_sha256"]
        assert score.correct == bool(row["correct"])
        if "losses" in row:
            assert np.abs(score.losses - np.array(row["losses"])).max() < 1e-3
            assert (score.choice, encoded.prompt.gold) == (row["choice"], row["gold"])
        else:
            assert score.argmax is not None and score.argmax.tolist() == row["argmax"]
            assert encoded.continuations[0].tolist() == row["target"]
    (task,) = (row for row in golden["task"] if row["label"] == label)
    assert result.accuracy == pytest.approx(task["accuracy"], abs=1e-6) and len(result.items) == task["n"]
    accuracies[label] = result.accuracy


def test_golden_core(golden: dict, accuracies: dict):
    if set(accuracies) != set(TASKS):
        pytest.skip("needs the results of test_golden_scores of all tasks, in the same run")
    sums = aggregate(accuracies)
    for row in golden["core"]:
        assert (sums.core_v1 if row["version"] == "v1" else sums.core_v2) == pytest.approx(row["core"], abs=1e-6)
        assert sums.raw_mean_22 == pytest.approx(row["raw_mean_22"], abs=1e-6)
        for label in CORE:
            assert centered(label, accuracies[label], row["version"]) == pytest.approx(row["centered"][label], abs=1e-6)


def following(text: str) -> NextToken:
    """A model that has learnt one thing: each letter of `text` is followed by the next one. 128 ids, p = 0.9."""
    after = dict(itertools.pairwise(text))
    return NextToken(lambda token: ord(after.get(chr(token), "?")), vocab_size=128)


RIGHT, WRONG = -math.log(0.9), -math.log(0.1 / 127)


def encoded_items(label: str, *rows: object, context: int = 64) -> list[EncodedPrompt]:
    return [encode_prompt(p, letters, context) for p in prompts(file_of(label, *rows))]


def test_multiple_choice_takes_the_mean_per_token_not_the_sum():
    # " b" is one letter of two expected; " bcdx" is four of five: its sum is higher, its mean lower.
    row = {"query": "q", "choices": ["bx", "bcdefx"], "gold": 1}
    (score,) = score_prompts(encoded_items("copa", row), following("q bcdefgh"))
    assert score.losses.tolist() == pytest.approx([(2 * RIGHT + WRONG) / 3, (6 * RIGHT + WRONG) / 7], rel=1e-5)
    assert 2 * RIGHT + WRONG < 6 * RIGHT + WRONG and score.choice == 1 and score.correct


def test_the_first_of_equal_options_wins():
    row = {"query": "q", "choices": ["x", "z", "y"], "gold": 1}
    (score,) = score_prompts(encoded_items("copa", row), following("q b"))
    assert len(set(score.losses.tolist())) == 1 and score.choice == 0 and not score.correct


def test_schema_scores_the_same_ending_after_each_context():
    row = {"context_options": ["it was the q", "it was the z"], "continuation": "bc", "gold": 0}
    (score,) = score_prompts(encoded_items("winograd", row), following("q bc"))
    assert score.losses.tolist() == pytest.approx([RIGHT, (WRONG + 2 * RIGHT) / 3], rel=1e-5) and score.correct


@pytest.mark.parametrize(("continuation", "correct"), [("bcd", True), ("bcx", False), ("xbc", False)])
def test_language_modelling_needs_every_token(continuation: str, correct: bool):
    row = {"context": "q", "continuation": continuation}
    (score,) = score_prompts(encoded_items("lambada_openai", row), following("q bcd"))
    assert score.correct is correct and score.choice is None
    # Teacher forcing: what the model says at a place follows the given tokens, also wrong ones.
    assert score.argmax is not None and len(score.argmax) == 4 and chr(score.argmax[0]) == " "


def test_an_item_that_cannot_fit_is_wrong_and_has_no_losses():
    rows = [{"context": "a", "continuation": "b" * 9}, {"context": "q", "continuation": "bc"}]
    long, fits = score_prompts(encoded_items("lambada_openai", *rows, context=8), following("q bc"))
    assert (long.correct, len(long.losses), long.choice, long.argmax) == (False, 0, None, None) and fits.correct


def mixed_items() -> list[EncodedPrompt]:
    words = ["oak", "a tall birch tree", "elm", "the old willow by the river", "fir"]
    rows = [{"query": f"{w} {k}", "choices": words[k % 3 :] + words[: k % 2], "gold": k % 2} for k, w in enumerate(words * 5)]
    return encoded_items("piqa", *rows, context=96)


@pytest.mark.parametrize("batching", [Batching(sequences=8), Batching(tokens=300), Batching()])
def test_batches_change_no_choice(batching: Batching):
    items, model = mixed_items(), Mixer()
    alone = list(score_prompts(items, model, Batching(sequences=1)))
    together = list(score_prompts(items, model, batching))
    assert len({score.choice for score in alone}) > 1 and any(item.cropped for item in items)
    for a, b in zip(alone, together, strict=True):
        assert a.choice == b.choice and np.abs(a.losses - b.losses).max() < 1e-4


def test_results_are_those_of_the_whole_logits():
    """Against the plain definition: one sequence at a time, no padding, all positions."""
    model = Mixer()
    for item, score in zip(items := mixed_items(), score_prompts(items, model), strict=True):
        for option, (before, after) in enumerate(zip(item.contexts, item.continuations, strict=True)):
            ids = torch.from_numpy(np.concatenate([before, after]))[None]
            log_p = model.logits(model.hidden(ids))[0].log_softmax(-1)
            losses = [-log_p[len(before) + k - 1, token].item() for k, token in enumerate(after)]
            assert score.losses[option] == pytest.approx(np.mean(losses), abs=1e-4)


def test_equal_inputs_share_a_row_and_batches_keep_to_the_budget():
    shapes: list[tuple[int, ...]] = []

    class Counting(Mixer):
        def hidden(self, tokens: torch.Tensor, branches: Branches | None = None) -> torch.Tensor:
            shapes.append(tuple(tokens.shape))
            return super().hidden(tokens, branches)

    model = Counting()
    stem = np.arange(1, 21)
    four = [(np.append(stem, letter), 1) for letter in range(50, 54)]
    results = token_losses([*four, (stem, 3)], model, Batching())
    assert shapes == [(2, 20)]  # one row for the four letters, one for the stem
    assert results[0][1] == results[3][1] and results[0][0] != results[3][0]
    shapes.clear()
    token_losses([(np.arange(k, k + 11), 2) for k in range(9)], model, Batching(tokens=40))
    assert shapes == [(4, 10), (4, 10), (1, 10)]


def test_nothing_to_score():
    assert list(score_prompts([], Mixer())) == [] and token_losses([], Mixer(), Batching()) == []


# Shared beginnings


def plain(sequences: list[tuple[np.ndarray, int]], model: Any) -> list[list[float]]:
    """Cross-entropies of the last tokens by the plain definition: one sequence at a time, all positions."""
    found = []
    for ids, scored in sequences:
        log_p = model.logits(model.hidden(torch.from_numpy(ids)[None])[0]).log_softmax(-1)
        found.append([-log_p[len(ids) - 1 - scored + k, ids[len(ids) - scored + k]].item() for k in range(scored)])
    return found


def small(vocab_size: int, context: int) -> TorchModel:
    """Untrained, of this project's architecture."""
    shape = Shape(d_model=32, n_layers=2, n_heads=2, d_hidden=64, context=context)
    return TorchModel(Transformer(shape, vocab_size, seed=3).eval(), torch.device("cpu"))


def toy() -> TorchModel:
    return small(300, context=64)


def options(rng: np.random.Generator, groups: int) -> tuple[list[tuple[np.ndarray, int]], list[int]]:
    """Groups of sequences with a common beginning, among them equal ones, ones that begin others, and some that share nothing."""
    sequences, numbers = [], []
    for group in range(groups):
        stem = rng.integers(1, 300, rng.integers(2, 40))
        tail = rng.integers(1, 300, 6)
        for k in range(2 + group % 3):
            after = [tail[: k + 1], rng.integers(1, 300, 1 + group % 7), tail[:3]][(group + k) % 3]
            before = rng.integers(1, 300, 9) if group % 5 == 4 else stem
            sequences.append((np.concatenate([before, after]), len(after)))
            numbers.append(group)
    return sequences, numbers


@torch.no_grad()
@pytest.mark.parametrize("make", [Mixer, toy])
@pytest.mark.parametrize("batching", [Batching(), Batching(tokens=70), Batching(sequences=1)])
def test_sharing_a_beginning_changes_no_loss(make: Callable[[], Any], batching: Batching):
    model = make()
    sequences, groups = options(np.random.default_rng(1), 40)
    shared = token_losses(sequences, model, batching, groups)
    for (losses, likeliest), expected, (_, scored) in zip(shared, plain(sequences, model), sequences, strict=True):
        assert losses.tolist() == pytest.approx(expected, abs=1e-4) and len(likeliest) == scored


def test_a_beginning_is_read_once():
    """Rows, columns: 20 tokens read once, then 2 + 3 + 0 of the branches (the last token of a sequence is never read)."""
    shapes: list[tuple[int, ...]] = []

    class Counting(Mixer):
        def hidden(self, tokens: torch.Tensor, branches: Branches | None = None) -> torch.Tensor:
            shapes.append((*tokens.shape, branches.width if branches else 0))
            return super().hidden(tokens, branches)

    stem = np.arange(1, 21)
    three = [(np.append(stem, [31, 32, 33]), 3), (np.append(stem, [41, 42, 43, 44]), 4), (np.append(stem, 51), 1)]
    model = Counting()
    token_losses(three, model, Batching(), [0, 0, 0])
    assert shapes == [(1, 25, 20)]
    shapes.clear()
    token_losses(three, model, Batching())  # nothing said of belonging together
    assert shapes == [(3, 23, 0)]
    shapes.clear()
    far = [(np.append(np.arange(k, k + 20), k), 1) for k in (1, 100)]
    token_losses(far, model, Batching(), [0, 0])  # together, and nothing in common
    assert shapes == [(2, 20, 0)]


def test_a_model_that_takes_no_branches_gets_none():
    class Plain(Mixer):
        takes_branches = False

        def hidden(self, tokens: torch.Tensor, branches: Branches | None = None) -> torch.Tensor:
            assert branches is None
            return super().hidden(tokens)

    items = mixed_items()
    shared, alone = list(score_prompts(items, Mixer())), list(score_prompts(items, Plain()))
    for a, b in zip(shared, alone, strict=True):
        assert a.choice == b.choice and np.abs(a.losses - b.losses).max() < 1e-4


def test_options_that_begin_one_another_and_equal_options():
    row = {"query": "q", "choices": ["b", "bc", "bcd", "bc"], "gold": 2}
    (score,) = score_prompts(encoded_items("copa", row), following("q bcd"))
    assert score.losses.tolist() == pytest.approx([RIGHT] * 4, rel=1e-5) and score.choice == 0
    (score,) = score_prompts(encoded_items("copa", row), Mixer())
    assert score.losses[1] == score.losses[3] and len(set(score.losses.tolist())) == 3


def test_equal_choices_for_batches_of_one_and_eight(shared: Path, neox: Callable[[str], list[int]]):
    """Case BL-40: a task smaller than its shots."""
    content = (shared / "cases" / "BL-40" / "three_items.jsonl").read_bytes()
    file = parse_task_file(TASKS["arc_easy"], "three_items.jsonl", content, own=True)
    model = small(50_432, context=256)
    items = [encode_prompt(p, neox, 256) for p in prompts(file)]
    one, eight = (list(score_prompts(items, model, Batching(sequences=n))) for n in (1, 8))
    assert [s.choice for s in one] == [s.choice for s in eight]
    assert max(np.abs(a.losses - b.losses).max() for a, b in zip(one, eight, strict=True)) < 1e-5


def test_all_sample_items_with_and_without_sharing(shared: Path, neox: Callable[[str], list[int]]):
    """Real items of every kind, cropped ones included: the same choices, losses to 1e-5."""
    model = small(50_432, context=256)
    apart = small(50_432, context=256)
    apart.takes_branches = False  # type: ignore[misc]
    cropped = 0
    for label in ("hellaswag_zeroshot", "winograd", "piqa", "copa"):
        items = [encode_prompt(p, neox, 256) for p in prompts(golden_file(shared, label))][:12]
        cropped += sum(item.cropped for item in items)
        for a, b in zip(score_prompts(items, model), score_prompts(items, apart), strict=True):
            assert a.choice == b.choice and np.abs(a.losses - b.losses).max() < 1e-5
    assert cropped
