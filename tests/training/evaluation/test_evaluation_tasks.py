"""The table of tasks and reading their files."""

import json
from pathlib import Path

import pytest
from standins import GOLDEN_FILES

from craw4llm.errors import InputError
from training.evaluation.tasks import CORE, TASKS, git_blob, parse_task_file, read_own_items, read_task_files

COPA = {"query": "The sun rose, therefore", "choices": ["it grew light.", "it grew dark."], "gold": 0}


def lines(*rows: object) -> bytes:
    return b"".join(json.dumps(row).encode() + b"\n" for row in rows)


def copa(*rows: object, own: bool = True):
    return parse_task_file(TASKS["copa"], "copa.jsonl", lines(*rows), own=own)


def test_the_suite_is_23_entries_of_22_files_and_core_leaves_mmlu_out():
    assert len(TASKS) == 23 and len(CORE) == 22 and "mmlu_fewshot" not in CORE
    assert len({task.file for task in TASKS.values()}) == 22
    sizes = {group: sum(t.group == group for t in TASKS.values()) for group in {t.group for t in TASKS.values()}}
    assert sizes == {"commonsense": 4, "language": 6, "reading": 3, "symbolic": 5, "world": 5}


def test_table_agrees_with_the_reference_on_shots_types_and_baselines(shared: Path):
    golden = [json.loads(line) for line in (shared / "eval_samples" / "golden_prompts.jsonl").read_text().splitlines()]
    assert {row["label"] for row in golden} == set(TASKS)
    for row in golden:
        task = TASKS[row["label"]]
        assert (task.kind, task.shots) == (row["type"], row["num_fewshot"])
        assert GOLDEN_FILES.get(task.label, task.file_name) == row["file"]
    expected = json.loads((shared / "cases" / "BL-38" / "expected.json").read_text())
    assert {label: TASKS[label].v1 for label in CORE} == expected["baselines_percent_v1"]
    assert {label: TASKS[label].v2 for label in CORE} == expected["baselines_percent_v2"]


def test_git_blob_is_gits():
    assert git_blob(b"") == "e69de29bb2d1d6434b8b29ae775ad8c2e48c5391"  # git's well-known id of the empty file


def test_a_complete_task_file_is_told_from_a_short_and_an_altered_one(shared: Path):
    name = "bigbench_repeat_copy_logic"  # the one file that the samples hold whole
    task, content = TASKS[name], (shared / "eval_samples" / f"{name}.jsonl").read_bytes()
    whole = parse_task_file(task, "f", content, own=False)
    assert (whole.state, whole.why, len(whole.rows)) == ("complete", "", 32)
    short = parse_task_file(task, "f", content[: content.rindex(b"\n", 0, -1) + 1], own=False)
    assert short.state == "limited" and "31 usable items of 32" in short.why
    altered = parse_task_file(task, "f", content.replace(b"watermelon", b"pumpkin", 1), own=False)
    assert altered.state == "altered" and task.blob in altered.why


def test_the_samples_of_the_reference_are_read_as_limited(shared: Path):
    files = read_task_files(shared / "eval_samples")
    assert list(files) == list(TASKS)
    assert {label for label, file in files.items() if file.state == "complete"} == {"bigbench_repeat_copy_logic"}
    assert all(not file.rejects for file in files.values())


def test_missing_files_are_all_named(tmp_path: Path):
    for task in TASKS.values():
        if task.label not in ("squad", "coqa"):
            path = tmp_path / task.file  # llm-foundry's sub-folders
            path.parent.mkdir(exist_ok=True)
            path.write_bytes(b"")
    with pytest.raises(InputError, match=r"lacks coqa\.jsonl, squad\.jsonl"):
        read_task_files(tmp_path)


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({**COPA, "gold": 2}, "gold 2 is out of range: 2 options"),
        ({**COPA, "gold": -1}, "gold -1 is out of range: 2 options"),
        ({**COPA, "choices": ["it grew light.", " "]}, "empty continuation"),
        ({**COPA, "choices": ["it grew light."]}, "1 options; expected at least 2"),
        ({**COPA, "query": "  "}, "empty context"),
    ],
)
def test_a_bad_item_is_listed_and_left_out(row: object, reason: str):
    file = copa(*[COPA] * 60, row, *[COPA] * 60)
    assert [(r.line, r.reason) for r in file.rejects] == [(60, reason)]
    assert len(file.rows) == 120 and 60 not in file.lines and file.lines[60] == 61


def test_a_full_file_with_a_bad_item_is_limited():
    file = copa(*[COPA] * 99, {**COPA, "gold": 5}, own=False)
    assert file.state == "limited" and "99 usable items of 100" in file.why


def test_too_many_bad_items_fail():
    with pytest.raises(InputError, match=r"2 of 100 items cannot be used .* line 1: gold 5 is out of range"):
        copa({**COPA, "gold": 5}, {**COPA, "gold": 6}, *[COPA] * 98)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"{", "line 1 is not JSON"),
        (b"[]\n", "line 1 is not a JSON object"),
        (b"", "holds no items; expected 100 of copa"),
        (b"\xff\n", "not UTF-8"),
        (lines(COPA, {**COPA, "gold": "0"}), "line 2: gold is '0'"),
        (lines({**COPA, "gold": True}), "line 1: gold is True"),
        (lines({**COPA, "choices": ["a", 1]}), "a list of strings there"),
        (lines({"context": "a", "continuation": "b"}), "line 1: query is None"),
    ],
)
def test_a_file_of_another_form_is_refused_with_its_line(content: bytes, message: str):
    with pytest.raises(InputError, match=message):
        parse_task_file(TASKS["copa"], "copa.jsonl", content, own=True)


def test_strings_are_stripped_and_list_items_are_not():
    row = copa({**COPA, "query": " a \n", "choices": [" b ", "c\n"]}).rows[0]
    assert row["query"] == "a" and row["choices"] == [" b ", "c\n"]


def test_a_line_separator_inside_a_string_ends_no_line():
    content = '{"query": "a\u2028b", "choices": ["c", "d"], "gold": 0}\n'.encode()
    assert len(parse_task_file(TASKS["copa"], "copa.jsonl", content, own=True).rows) == 1


def test_own_items_cover_every_task_and_are_no_reference_items(shared: Path):
    own = read_own_items()
    assert list(own) == list(TASKS)
    for label, file in own.items():
        assert file.state == "complete" and not file.rejects and 6 <= len(file.rows) <= 12, label
        if TASKS[label].kind != "lm":
            answers = {row["gold"] for row in file.rows}
            assert answers == set(range(max(answers) + 1)) and len(answers) > 1, f"{label}: one answer is never right"
        if TASKS[label].categories:
            assert len({row["category"] for row in file.rows}) == 2
    published = set()
    for path in (shared / "eval_samples").glob("*.jsonl"):
        if not path.name.startswith("golden"):
            published.update(path.read_text().splitlines())
    for file in own.values():
        assert not published & {json.dumps(row, ensure_ascii=False) for row in file.rows}


def test_own_symbolic_items_are_right():
    """The brackets close and the common subsequences have the stated length."""
    pairs = {"(": ")", "[": "]", "{": "}", "<": ">"}

    def still_open(text: str) -> list[str] | None:
        stack: list[str] = []
        for bracket in text.split():
            if bracket in pairs:
                stack.append(pairs[bracket])
            elif not stack or stack.pop() != bracket:
                return None
        return stack[::-1]

    def common(a: str, b: str) -> int:
        if not a or not b:
            return 0
        return 1 + common(a[1:], b[1:]) if a[0] == b[0] else max(common(a[1:], b), common(a, b[1:]))

    own = read_own_items()
    for row in own["bigbench_dyck_languages"].rows:
        assert still_open(row["context"].split("Input: ")[1].split("\n")[0]) == row["continuation"].split()
    for row in own["bigbench_cs_algorithms"].rows:
        if "Words: " in row["context"]:
            first, second = row["context"].split("Words: ")[1].split("\n")[0].split()
            assert str(common(first, second)) == row["continuation"]
        else:
            valid = still_open(row["context"].split("Sequence: ")[1].split("\n")[0]) == []
            assert row["continuation"] == ("Valid" if valid else "Invalid")
