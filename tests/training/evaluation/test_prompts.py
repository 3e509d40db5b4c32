"""Prompts: the reference harness's, and hand-worked ones."""

import json
import random
from collections.abc import Callable
from pathlib import Path

import pytest
from standins import file_of, golden_file, letters, sha256

from training.evaluation.prompts import Prompt, encode_prompt, few_shot_indices, prompts
from training.evaluation.tasks import TASKS, parse_task_file


def test_all_golden_prompts(shared: Path, neox: Callable[[str], list[int]]):
    """The reference harness's own prompts: examples and their order, texts, ids, left crop."""
    golden = [json.loads(line) for line in (shared / "eval_samples" / "golden_prompts.jsonl").read_text().splitlines()]
    assert len(golden) == 49
    made: dict[str, dict[tuple[str, int], Prompt]] = {}
    for row in golden:
        label = row["label"]
        if label not in made:
            made[label] = {(p.category or "", p.example): p for p in prompts(golden_file(shared, label))}
        prompt = made[label][row["category"], row["example"]]
        assert list(prompt.shots) == row["fewshot_idx"]
        assert sha256(prompt.preamble) == row["preamble_sha256"]
        encoded = encode_prompt(prompt, neox, 2048)
        assert len(row["items"]) == len(prompt.contexts)
        for k, item in enumerate(row["items"]):
            assert (prompt.contexts[k], prompt.continuations[k]) == (item["context"], item["continuation"])
            before, after = encoded.contexts[k].tolist(), encoded.continuations[k].tolist()
            assert after == item["continuation_ids"] and before[-len(item["context_ids_tail"]) :] == item["context_ids_tail"]
            assert len(before) == item["n_context_ids"] and encoded.cropped == item["truncated"]
            assert sha256(json.dumps(before + after, separators=(",", ":"))) == item["ids_sha256"]


@pytest.mark.parametrize(
    ("items", "shots", "expected"),
    [
        (2376, 10, [[71, 969, 1452, 1805, 143, 371, 343, 403, 30, 478], [64, 608, 1417, 1898, 749, 468, 373, 59, 126, 1983]]),
        (230, 3, [[112, 29, 199], [149, 206, 23]]),
        (32, 10, [[1, 2, 3, 6, 18, 21, 22, 25, 28, 31], [0, 7, 11, 15, 19, 20, 22, 25, 28, 29]]),
    ],
)
def test_examples_stand_in_the_order_of_a_set(items: int, shots: int, expected: list[list[int]]):
    """Vectors of CPython 3.11 with seed 1234 (reference data, spec/training_evaluation.md C)."""
    stream = random.Random(1234)
    assert [few_shot_indices(items, shots, example, stream) for example in (0, 1)] == expected


def test_an_item_is_never_its_own_example():
    for items in range(1, 14):
        stream = random.Random(1234)
        for example in range(items):
            chosen = few_shot_indices(items, 10, example, stream)
            assert example not in chosen and len(chosen) == len(set(chosen)) == min(items - 1, 10)


def test_a_task_smaller_than_its_shots_uses_what_it_has(shared: Path):
    """Case BL-40: three items, ten shots."""
    content = (shared / "cases" / "BL-40" / "three_items.jsonl").read_bytes()
    made = list(prompts(parse_task_file(TASKS["arc_easy"], "three_items.jsonl", content, own=True)))
    assert [p.shots for p in made] == [(1, 2), (0, 2), (0, 1)]
    assert made[1].preamble == (
        "Question 0: which comes first, one or two?\nAnswer: one\nQuestion 2: which comes first, dawn or noon?\nAnswer: dawn"
    )
    assert made[1].contexts[0] == "\nQuestion 1: which comes first, May or June?\nAnswer:"


def test_multiple_choice_by_hand():
    rows = [
        {"query": "One plus one?", "choices": ["two", " three"], "gold": 0},
        {"query": "Two plus one?", "choices": ["two", "three"], "gold": 1},
    ]
    first, second = prompts(file_of("arc_easy", *rows))
    assert first.preamble == "Two plus one?\nAnswer: three" and first.gold == 0
    assert first.contexts == ("\nOne plus one?\nAnswer:",) * 2 and first.continuations == (" two", " three")  # no second space
    assert second.preamble == "One plus one?\nAnswer: two"


def test_language_modelling_by_hand():
    rows = [{"context": "one two", "continuation": "three"}, {"context": "two three", "continuation": "four"}]
    shot = next(prompts(file_of("bigbench_qa_wikidata", *rows)))
    assert (shot.preamble, shot.contexts, shot.continuations) == ("two three four", ("\none two",), (" three",))
    zero = next(prompts(file_of("lambada_openai", *rows)))
    assert (zero.preamble, zero.contexts, zero.continuations, zero.gold) == ("", ("one two",), (" three",), None)


def test_schema_by_hand():
    row = {"context_options": ["Ann fell. Ann", "Ann fell. Bob"], "continuation": "cried.", "gold": 0}
    prompt = next(prompts(file_of("winograd", row)))
    assert prompt.contexts == ("Ann fell. Ann", "Ann fell. Bob") and prompt.continuations == (" cried.", " cried.")


def test_categories_have_their_own_pools_and_streams():
    rows = [{"context": f"{c}{i}", "continuation": "x", "category": c} for i in range(4) for c in "ba"]
    made = list(prompts(file_of("jeopardy", *rows)))
    assert [p.category for p in made] == ["a"] * 4 + ["b"] * 4 and [p.line for p in made] == [1, 3, 5, 7, 0, 2, 4, 6]
    for a, b in zip(made[:4], made[4:], strict=True):
        assert a.shots == b.shots and set(a.preamble.replace("a", "b").split("\n")) == set(b.preamble.split("\n"))


def test_a_long_prompt_keeps_its_last_tokens_and_all_of_the_continuation():
    row = {"query": "abcdefgh", "choices": ["xy", "xyz"], "gold": 0}
    prompt = next(prompts(file_of("copa", row)))
    encoded = encode_prompt(prompt, letters, 8)
    assert ["".join(map(chr, ids)) for ids in encoded.contexts] == ["defgh", "efgh"]
    assert [len(ids) for ids in encoded.continuations] == [3, 4] and encoded.cropped and not encoded.too_long
    exact = encode_prompt(prompt, letters, 12)
    assert not exact.cropped and len(exact.contexts[1]) + len(exact.continuations[1]) == 12


def test_a_continuation_without_room_for_context_is_too_long():
    row = {"query": "abc", "choices": ["w", "xyz"], "gold": 0}
    prompt = next(prompts(file_of("copa", row)))
    assert encode_prompt(prompt, letters, 4).too_long
    barely = encode_prompt(prompt, letters, 5)
    assert not barely.too_long and barely.contexts[1].tolist() == [ord("c")]
