"""What a person reads who is asked whether a run may start: what is short, cost of each arm and needs of each stage as tables, the plan.

    subject, body = request(facts, text)         # facts: `craw4llm plan --json`; text: the same for a terminal

The UI shows Markdown. Names and texts come from declarations, forms and files, so they stand in spans of code, which nothing in them ends.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from stage_operator import inert

NO_BREAK_SPACE = "\u00a0"
PLAN_LINES = 400
# Facts of an arm: heading, name, and what a value is divided by.
COLUMNS = (
    ("pages crawled", "crawled_pages", 1),
    ("requests", "fetches", 1),
    ("pages kept", "kept_pages", 1),
    ("tokens trained on", "train_tokens", 1),
    ("FLOPs", "train_flops", 1),
    ("GPU hours", "gpu_hours", 1),
    ("disk, GB", "disk_bytes", 1e9),
)


def request(facts: Mapping[str, Any], text: str) -> tuple[str, str]:
    subject = f"{facts['experiment']}: {amount(facts['gpu_hours'])} GPU hours, {amount(facts['disk_bytes'] / 1e9)} GB. Start it?"
    short = [f"Short of {inert(line)}" for line in facts["shortfalls"]]
    parts = [as_markdown(short)] if short else []
    table = facts.get("needs", {}).get("table", [])
    shown = [" ".join(row).split() for row in table]  # as words: in the text the columns have widths
    lines = [line for line in inert_lines(text) if line.split() not in shown]
    parts += [costs(facts), *needs(table), as_markdown(costs_first(lines)[:PLAN_LINES])]
    return subject, "\n\n".join(parts)


def costs(facts: Mapping[str, Any]) -> str:
    """A row an arm, with what is known of it before it runs; the disk is that of all its stages, which arms may share."""
    columns = [column for column in COLUMNS if any(arm.get(column[1]) is not None for arm in facts["arms"].values())]
    rows = []
    for name, arm in facts["arms"].items():
        values = [arm.get(key) for _, key, _ in columns]
        shown = [amount(value / by) if value is not None else "" for value, (_, _, by) in zip(values, columns, strict=True)]
        rows.append([name, *shown])
    many = f"For each of {facts['replicates']} replicates:\n\n" if facts["replicates"] > 1 else ""
    return many + as_table(["arm", *(heading for heading, _, _ in columns)], rows)


def needs(table: Sequence[Sequence[str]]) -> list[str]:
    """The plan's needs of each stage, without the columns in which nothing is known or needed."""
    if len(table) < 2:
        return []
    told = [k for k, column in enumerate(zip(*table, strict=True)) if set(column[1:]) - {"?", "-"}]
    header, *rows = ([row[k] for k in told] for row in table)
    return ["Needs of each stage that is to do:", as_table(header, rows)]


def as_table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Markdown, the first column a name, the others numbers."""
    lines = [header, ["---", *("--:" for _ in header[1:])], *([span(inert(row[0]).replace("|", "¦")), *row[1:]] for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def costs_first(lines: Sequence[str]) -> list[str]:
    """The plan's paragraphs with the list of stages, the longest of them, at the end."""
    paragraphs: list[list[str]] = [[]]
    for line in lines:
        if line:
            paragraphs[-1].append(line)
        elif paragraphs[-1]:
            paragraphs.append([])
    head, stages, *rest = paragraphs if len(paragraphs) > 2 else (paragraphs[0], [], *paragraphs[1:])
    return [line for paragraph in (head, *rest, stages) if paragraph for line in (*paragraph, "")][:-1]


def amount(value: float) -> str:
    """Three digits at least, and no more than a person reads."""
    return f"{value:,.0f}" if 1000 <= abs(value) < 1e15 or (value == int(value) and abs(value) < 1e15) else f"{value:.3g}"


def inert_lines(text: str) -> list[str]:
    return [inert(line) for line in text.splitlines()]


def as_markdown(lines: Iterable[str]) -> str:
    """Lines as they are, in columns, for the UI's Markdown, whose code blocks lose line ends and spaces: a span of code a line."""
    return "  \n".join(map(span, lines))


def span(line: str) -> str:
    kept = re.sub("^ | {2,}", lambda spaces: NO_BREAK_SPACE * len(spaces[0]), line.rstrip().replace("`", "'"))
    return f"`{kept}`" if kept else NO_BREAK_SPACE
