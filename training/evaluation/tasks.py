"""The 23 task entries of the evaluation, and reading their items.

    TASKS["arc_easy"].shots                      -> 10
    files = read_task_files(Path("local_data"))  -> label -> TaskFile(rows, rejects, state)

The table is DCLM's `eval/mmlu_and_lowvar.yaml` (mlfoundations/dclm): the 22 entries of its low-variance set, which make Core, and
`mmlu_fewshot`. HellaSwag is in it twice, so there are 22 data sets. Shots, delimiters and categories: that file. Groups and random
baselines: DCLM's `eval/eval_meta_data.csv`; version 1 is the file before September 2025, which the paper's numbers follow, version 2 the
corrected one. boolq's 62 and commonsense_qa's 40.3 are rates of the majority answer. Numbers of items: counted in llm-foundry's files
(arc_challenge is misprinted as 2,376 in DCLM's table), or, for mmlu, hellaswag, squad and coqa, from DCLM's table.

File names and contents are those of mosaicml/llm-foundry, `scripts/eval/local_data`, at commit 8c8dd48f (2025-07-21); `blob` is the git
object id there, SHA-1 over `blob <size>\\0` and the bytes. A folder may hold the files flat or in llm-foundry's sub-folders.

Three schemas, one JSON object a line:
    mc      {"query", "choices": [...], "gold"}                  which choice is the likeliest
    lm      {"context", "continuation"}                          is every token of the continuation the likeliest
    schema  {"context_options": [...], "continuation", "gold"}   after which context is the continuation the likeliest
and "category" where the task has categories.

Who may use the data: the licence named in the table is that of the original data set as commonly stated; llm-foundry's packaging is
Apache-2.0. The project ships none of these files, only items written for it (`sample_items/`).
"""

import dataclasses
import hashlib
import importlib.resources
import json
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, Literal

from craw4llm.errors import InputError

Kind = Literal["mc", "lm", "schema"]
Group = Literal["commonsense", "language", "reading", "symbolic", "world"]
State = Literal["complete", "limited", "altered"]
Row = Mapping[str, Any]

ANSWER = "\nAnswer: "
MAX_BAD_SHARE = 0.01  # of a task's lines; above it the file is not what it should be and the stage fails
OWN_ITEMS = "self-written sample items"  # what the shipped items are called wherever their results are shown


@dataclasses.dataclass(frozen=True, kw_only=True)
class Task:
    """One entry of the suite.

    shots: examples before the item. delimiter: between question and answer. categories: pools, random streams and accuracies are kept
    apart by category. v1, v2: random baseline in percent. items: lines of the full file. file: in llm-foundry's `local_data`.
    """

    label: str
    kind: Kind
    shots: int
    delimiter: str = " "
    categories: bool = False
    v1: float
    v2: float
    items: int
    group: Group
    file: str
    blob: str
    source: str
    licence: str

    @property
    def file_name(self) -> str:
        return self.file.rsplit("/", 1)[1]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Reject:
    """A line that is no usable item: `line` counts from 0 in the file."""

    line: int
    reason: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class TaskFile:
    """The items of one task as read.

    rows, lines: usable rows in file order, with every top-level string stripped, and the line that each came from (from 0).
    rejects: the other lines. state: "complete"; "limited" where the number of usable items is not the full file's; "altered"
    where the number is right but the bytes are not llm-foundry's. why: one sentence unless complete. sha256: of the file.
    """

    task: Task
    rows: tuple[Row, ...]
    lines: tuple[int, ...]
    rejects: tuple[Reject, ...]
    state: State
    why: str
    sha256: str


def _task(
    label: str, kind: Kind, shots: int, v1: float, v2: float, items: int, group: Group, file: str, blob: str, source: str, licence: str,
    delimiter: str = " ", categories: bool = False,
) -> Task:  # fmt: skip
    return Task(
        label=label, kind=kind, shots=shots, delimiter=delimiter, categories=categories, v1=v1, v2=v2, items=items, group=group,
        file=file + ".jsonl", blob=blob, source=source, licence=licence,
    )  # fmt: skip


# fmt: off
# In DCLM's order: label, kind, shots, baseline v1, v2, items, group, file, blob, source, licence.
_TABLE = (
    _task("mmlu_fewshot", "mc", 5, 25, 25, 14_042, "world", "world_knowledge/mmlu",
          "4466b2dfb2a13d00a33f4d1b7ffc5d06a4c9b34f", "MMLU (Hendrycks et al. 2021)", "MIT", ANSWER, categories=True),
    _task("hellaswag_zeroshot", "mc", 0, 25, 25, 10_042, "language", "language_understanding/hellaswag",
          "448321079fdc140bd8566b16b24eda9ceacd3501", "HellaSwag (Zellers et al. 2019)", "MIT"),
    _task("jeopardy", "lm", 10, 0, 0, 2_117, "world", "world_knowledge/jeopardy_all",
          "2f771918dbc8b68550df204171b14d2648b5d494", "Jeopardy! (J! Archive)", "none stated", ANSWER, categories=True),
    _task("bigbench_qa_wikidata", "lm", 10, 0, 0, 20_321, "world", "world_knowledge/bigbench_qa_wikidata",
          "5e1be72797ba082fd4f6efa42f7d759d2d23339a", "BIG-bench (Srivastava et al. 2022)", "Apache-2.0"),
    _task("arc_easy", "mc", 10, 25, 25, 2_376, "world", "world_knowledge/arc_easy",
          "b5fd1bf87a24246a6be67230b721541688f5c349", "ARC (Clark et al. 2018)", "CC BY-SA 4.0", ANSWER),
    _task("arc_challenge", "mc", 10, 25, 25, 1_172, "world", "world_knowledge/arc_challenge",
          "ce66b8dcfb4bac892a404a0dda8b4e8ed0f84b89", "ARC (Clark et al. 2018)", "CC BY-SA 4.0", ANSWER),
    _task("copa", "mc", 0, 50, 50, 100, "commonsense", "commonsense_reasoning/copa",
          "b22f96e08ae9d0e97e1ae58f67b6425c77ef200a", "COPA (Roemmele et al. 2011)", "BSD-2-Clause"),
    _task("commonsense_qa", "mc", 10, 20, 40.3, 1_221, "commonsense", "commonsense_reasoning/commonsense_qa",
          "f1cc16a88b05ab0934aab2ec2d02a6869e6e5520", "CommonsenseQA (Talmor et al. 2019), cut to 4 options", "MIT"),
    _task("piqa", "mc", 10, 50, 50, 1_838, "commonsense", "commonsense_reasoning/piqa",
          "a9992adfdefde366fe7ccff871f5aa62449a09cf", "PIQA (Bisk et al. 2020)", "AFL-3.0", ANSWER),
    _task("openbook_qa", "mc", 0, 25, 25, 500, "commonsense", "commonsense_reasoning/openbook_qa",
          "a8aff255a64cbc72a85252acf00df25a315686c2", "OpenBookQA (Mihaylov et al. 2018)", "Apache-2.0"),
    _task("lambada_openai", "lm", 0, 0, 0, 5_153, "language", "language_understanding/lambada_openai",
          "4da02dd53b9e7385871d06ab855471d77b2f7dda", "LAMBADA, OpenAI's variant (Paperno et al. 2016)", "CC BY 4.0, MIT"),
    _task("hellaswag", "mc", 10, 25, 25, 10_042, "language", "language_understanding/hellaswag",
          "448321079fdc140bd8566b16b24eda9ceacd3501", "HellaSwag (Zellers et al. 2019)", "MIT"),
    _task("winograd", "schema", 0, 50, 50, 273, "language", "language_understanding/winograd_wsc",
          "762fe030ac6938ecba438c47a04057247c6ab891", "Winograd schema challenge (Levesque et al. 2012)", "CC BY 4.0"),
    _task("winogrande", "schema", 0, 50, 50, 1_267, "language", "language_understanding/winogrande",
          "316e87ae4659f0c402b0f00551fdec83ab0a0986", "WinoGrande (Sakaguchi et al. 2020)", "CC BY"),
    _task("bigbench_dyck_languages", "lm", 10, 0, 0, 1_000, "symbolic", "symbolic_problem_solving/bigbench_dyck_languages",
          "27a4ac2b3b18716add92f4ecd62475c4f8d77768", "BIG-bench (Srivastava et al. 2022)", "Apache-2.0"),
    _task("agi_eval_lsat_ar", "mc", 3, 20, 25, 230, "symbolic", "symbolic_problem_solving/agi_eval_lsat_ar",
          "d663b427ba310d3f877f09a6830198ca7c856189", "AGIEval (Zhong et al. 2023), LSAT analytical reasoning, cut to 4 options", "MIT"),
    _task("bigbench_cs_algorithms", "lm", 10, 0, 0, 1_320, "symbolic", "symbolic_problem_solving/bigbench_cs_algorithms",
          "7ecee0f270f3de8b6558da14ae02181f3d950a40", "BIG-bench (Srivastava et al. 2022)", "Apache-2.0"),
    _task("bigbench_operators", "lm", 10, 0, 0, 210, "symbolic", "symbolic_problem_solving/bigbench_operators",
          "a982dc4f962725c9dc4abb07d3cc333c99959290", "BIG-bench (Srivastava et al. 2022)", "Apache-2.0"),
    _task("bigbench_repeat_copy_logic", "lm", 10, 0, 0, 32, "symbolic", "symbolic_problem_solving/bigbench_repeat_copy_logic",
          "86621f10e7124ed6f3a61fb91493c1256c008f60", "BIG-bench (Srivastava et al. 2022)", "Apache-2.0"),
    _task("squad", "lm", 10, 0, 0, 10_570, "reading", "reading_comprehension/squad",
          "dc733b8f58ec666c53fd946198c434b819a00680", "SQuAD (Rajpurkar et al. 2016)", "CC BY-SA 4.0"),
    _task("coqa", "lm", 0, 0, 0, 7_983, "reading", "reading_comprehension/coqa",
          "028bd4e51326cc43f8394987ae47fbb271aeba9d", "CoQA (Reddy et al. 2019)", "per source: CC BY-SA 4.0, MSR-LA, others"),
    _task("boolq", "mc", 10, 62, 62, 3_270, "reading", "reading_comprehension/boolq",
          "f42083a58713d00ef4600118cfdf79618c269190", "BoolQ (Clark et al. 2019)", "CC BY-SA 3.0", ANSWER),
    _task("bigbench_language_identification", "mc", 10, 9.1, 25, 10_000, "language",
          "language_understanding/bigbench_language_identification", "1f132fbbb12a67ce267b7b92b458175632c265f3",
          "BIG-bench (Srivastava et al. 2022)", "Apache-2.0"),
)
# fmt: on
_FIELDS: dict[Kind, Mapping[str, type]] = {
    "mc": {"query": str, "choices": list, "gold": int},
    "lm": {"context": str, "continuation": str},
    "schema": {"context_options": list, "continuation": str, "gold": int},
}
# Tokens that the model reads for the 23 full files, shared beginnings once. An estimate: with GPT-NeoX ids and a context of 2048 one
# sequence per option comes to about 190 million; on the first 40 items of each file, weighted by all items, sharing leaves 41% of them.
SUITE_TOKENS = 79_000_000
TASKS: dict[str, Task] = {task.label: task for task in _TABLE}
CORE: tuple[str, ...] = tuple(label for label in TASKS if label != "mmlu_fewshot")


def read_task_files(folder: Path, labels: Collection[str] = ()) -> dict[str, TaskFile]:
    """The items of all 23 entries (or of those in `labels`) from a folder of task files, in the order of TASKS.

    Raises InputError naming every missing file; naming file, line and field for a line that is not of the task's schema; and for a
    file of which more than MAX_BAD_SHARE of the lines are no usable items.
    """
    found = {task.label: find_task_file(folder, task) for task in TASKS.values() if not labels or task.label in labels}
    missing = sorted({TASKS[label].file_name for label, path in found.items() if path is None})
    if missing:
        raise InputError(
            f"tasks: {folder} lacks {', '.join(missing)}; expected the files of llm-foundry's scripts/eval/local_data, flat or in its "
            "sub-folders; add them, or leave `tasks` out to use the self-written sample items"
        )
    return {
        label: parse_task_file(TASKS[label], str(path), path.read_bytes(), own=False) for label, path in found.items() if path is not None
    }


def read_own_items() -> dict[str, TaskFile]:
    """The self-written items that the project ships: complete sets of their own, and no data set's."""
    folder = importlib.resources.files("training.evaluation") / "sample_items"
    return {label: parse_task_file(task, task.file_name, (folder / task.file_name).read_bytes(), own=True) for label, task in TASKS.items()}


def own_item_count() -> int:
    """How many items the shipped set has over the 23 entries."""
    return sum(len(file.rows) for file in read_own_items().values())


def parse_task_file(task: Task, name: str, content: bytes, *, own: bool) -> TaskFile:
    """The items of one file's bytes. name: for messages. own: self-written items, complete as they are. Raises InputError as above."""
    rows: list[Row] = []
    lines: list[int] = []
    rejects: list[Reject] = []
    try:
        text = content.decode()
    except UnicodeDecodeError as error:
        raise InputError(f"{name} is not UTF-8 ({error}); it is not a task file of {task.label}") from error
    # Only a line feed ends a line: str.splitlines would also cut at U+2028 and its like, which JSON allows inside a string.
    for number, line in enumerate(text.removesuffix("\n").split("\n") if text else []):
        row = _row(task, line, f"{name}, line {number + 1}")
        fault = _fault(task, row)
        if fault is None:
            rows.append(row)
            lines.append(number)
        else:
            rejects.append(Reject(line=number, reason=fault))
    total = len(rows) + len(rejects)
    if total == 0:
        raise InputError(f"{name} holds no items; expected {task.items} of {task.label}")
    if len(rejects) > MAX_BAD_SHARE * total:
        first = rejects[0]
        raise InputError(
            f"{name}: {len(rejects)} of {total} items cannot be used (at most {MAX_BAD_SHARE:.0%} may be), first line {first.line + 1}: "
            f"{first.reason}; get the file of {task.label} again"
        )
    state: State = "complete"
    why = ""
    if not own:
        state, why = _state(task, len(rows), content)
    return TaskFile(
        task=task,
        rows=tuple(rows),
        lines=tuple(lines),
        rejects=tuple(rejects),
        state=state,
        why=why,
        sha256=hashlib.sha256(content).hexdigest(),
    )


def git_blob(content: bytes) -> str:
    """The object id that git gives to a file of this content."""
    return hashlib.sha1(b"blob %d\0" % len(content) + content, usedforsecurity=False).hexdigest()


def find_task_file(folder: Path, task: Task) -> Path | None:
    """Where a folder holds the file of a task: flat, or in llm-foundry's sub-folders; None if nowhere."""
    for path in (folder / task.file_name, folder / task.file):
        if path.is_file():
            return path
    return None


def _state(task: Task, usable: int, content: bytes) -> tuple[State, str]:
    if usable != task.items:
        return "limited", f"{task.label} is limited: {usable} usable items of {task.items}"
    blob = git_blob(content)
    if blob != task.blob:
        return "altered", f"{task.label} is altered: {task.file_name} is git blob {blob}, llm-foundry's is {task.blob}"
    return "complete", ""


def _row(task: Task, line: str, where: str) -> dict[str, Any]:
    """One line as a row of the task's schema, its top-level strings stripped (list items stay as they are)."""
    try:
        row = json.loads(line)
    except ValueError as error:
        raise InputError(f"{where} is not JSON ({error}); get the file of {task.label} again") from error
    if not isinstance(row, dict):
        raise InputError(f"{where} is not a JSON object; expected an item of {task.label}")
    types: dict[str, type] = dict(_FIELDS[task.kind])
    if task.categories:
        types["category"] = str
    for field, wanted in types.items():
        value = row.get(field)
        if type(value) is not wanted or (isinstance(value, list) and not all(isinstance(option, str) for option in value)):
            kind = "list of strings" if wanted is list else wanted.__name__
            raise InputError(f"{where}: {field} is {value!r:.80}; an item of {task.label} ({task.kind}) has a {kind} there")
    return {key: value.strip() if isinstance(value, str) else value for key, value in row.items()}


def _fault(task: Task, row: Row) -> str | None:
    """Why a row of the right schema is no usable item, or None."""
    if task.kind == "lm":
        options, answers = [row["context"]], [row["continuation"]]
    elif task.kind == "mc":
        options, answers = [row["query"]], row["choices"]
    else:
        options, answers = row["context_options"], [row["continuation"]]
    if not all(option.strip() for option in options):
        return "empty context"
    if not all(answer.strip() for answer in answers):
        return "empty continuation"
    if task.kind != "lm":
        several = answers if task.kind == "mc" else options
        if len(several) < 2:
            return f"{len(several)} options; expected at least 2"
        if not 0 <= row["gold"] < len(several):
            return f"gold {row['gold']} is out of range: {len(several)} options"
    if task.categories and not row["category"]:
        return "empty category"
    return None
