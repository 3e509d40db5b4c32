"""What a person reads who is asked whether a run may start: what is short, the cost of each arm as a table, then the whole plan.

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
    parts += [costs(facts), as_markdown(costs_first(inert_lines(text))[:PLAN_LINES])]
    return subject, "\n\n".join(parts)


def costs(facts: Mapping[str, Any]) -> str:
    """A row an arm, with what is known of it before it runs; the disk is that of all its stages, which arms may share."""
    columns = [column for column in COLUMNS if any(arm.get(column[1]) is not None for arm in facts["arms"].values())]
    rows = [["arm", *(heading for heading, _, _ in columns)], ["---", *("--:" for _ in columns)]]
    for name, arm in facts["arms"].items():
        values = [arm.get(key) for _, key, _ in columns]
        shown = [amount(value / by) if value is not None else "" for value, (_, _, by) in zip(values, columns, strict=True)]
        rows.append([span(inert(name).replace("|", "¦")), *shown])
    many = f"For each of {facts['replicates']} replicates:\n\n" if facts["replicates"] > 1 else ""
    return many + "\n".join(f"| {' | '.join(row)} |" for row in rows)


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
