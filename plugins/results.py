"""What the results page shows, read from the artifact root: experiments, runs, leaderboards, verdicts, artifacts and their curves.

Plain values only; nothing here knows Airflow or HTML. A report's own numbers are shown, none is computed anew: from `summary.json`
(docs/artifacts.md), or from the tables of a report that was made before there was one.
"""

import csv
import dataclasses
import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from craw4llm.artifact import Artifact, Store
from craw4llm.errors import ArtifactError, Craw4LLMError
from craw4llm.experiment import kept_names, load, names
from craw4llm.runner import read_index

STAGE, FINGERPRINT = re.compile(r"[a-z][a-z0-9_]{0,40}"), re.compile(r"[0-9a-f]{12}")
CURVE_POINTS = 600


@dataclasses.dataclass(frozen=True, kw_only=True)
class Run:
    """One recorded set of values of an experiment. finished, stages: how many. report: fingerprint; ready: whether it is there."""

    parameters: Mapping[str, Any]
    replicates: int
    arms: tuple[str, ...]
    finished: int
    stages: int
    report: str
    ready: bool


@dataclasses.dataclass(frozen=True, kw_only=True)
class Row:
    """An arm of a leaderboard, best first; a missing number is None."""

    rank: int | None
    arm: str
    comparison: str
    replicates: int
    bits_per_byte: float | None
    low: float | None
    high: float | None
    core_v1: float | None
    core_v2: float | None
    pages_crawled: int | None
    fetches: int | None
    mean_score: float | None
    missing: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class Verdict:
    """A compared pair. difference: arm minus against; low, high: its 95% interval."""

    comparison: str
    heldout: str
    arm: str
    against: str
    verdict: str
    difference: float | None
    low: float | None
    high: float | None
    replicates: int | None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Report:
    fingerprint: str
    title: str
    question: str
    answers: tuple[tuple[str, str], ...]
    rows: tuple[Row, ...]
    verdicts: tuple[Verdict, ...]
    decided: int
    undecided: int
    finished: str


def experiments(root: Path) -> list[str]:
    """Names: declared, kept by the form, and recorded ones that are no longer declared."""
    known = [*names(), *kept_names(root)]
    return known + sorted({p.stem for p in (root / "index").glob("*.json")} - set(known))


def runs(name: str, root: Path) -> list[Run]:
    """The recorded runs of an experiment, newest first."""
    store, found = Store(root), []
    for entry in reversed(read_index(root / "index" / f"{name}.json")):
        groups = [entry["shared"], *(stages for arms in entry["arms"].values() for stages in arms.values())]
        stages = {(s["stage"], s["fingerprint"]) for group in groups for s in group.values()}
        done = sum((store.path(*stage) / "manifest.json").is_file() for stage in stages)
        arms = tuple(dict.fromkeys(arm for by_replicate in entry["arms"].values() for arm in by_replicate))
        ready = (store.path("report", entry["report"]) / "manifest.json").is_file()
        found.append(
            Run(
                parameters=entry["parameters"],
                replicates=entry["replicates"],
                arms=arms,
                finished=done,
                stages=len(stages),
                report=entry["report"],
                ready=ready,
            )
        )
    return found


def about(name: str, root: Path) -> tuple[str, str]:
    """(question in one line, whole documentation) of an experiment; empty where it is not declared any more."""
    try:
        doc = load(name, root).doc
    except Craw4LLMError:
        return "", ""
    question = " ".join(doc.partition("\n\n")[0].split()).removeprefix("Question: ")
    return question[:1].upper() + question[1:], doc


def artifact(stage: str, fingerprint: str, root: Path) -> Artifact:
    """A finished artifact. ArtifactError for names that are none, and for what is not there."""
    if not STAGE.fullmatch(stage) or not FINGERPRINT.fullmatch(fingerprint):
        raise ArtifactError(f"{stage[:40]!r} {fingerprint[:40]!r}: expected the name of a stage and 12 hexadecimal digits")
    return Store(root).open(stage, fingerprint)


def file_of(found: Artifact, name: str) -> Path:
    """A file that the manifest lists; nothing else can be had."""
    if name not in {entry["path"] for entry in found.manifest["files"]} and name != "manifest.json":
        raise ArtifactError(f"{found.stage} {found.fingerprint} has no file {name[:100]!r}")
    return found.file(name)


def report(fingerprint: str, root: Path) -> Report:
    found = artifact("report", fingerprint, root)
    count = {name: entry["value"] for name, entry in found.manifest["counts"].items()}
    shared: dict[str, Any] = {
        "fingerprint": fingerprint,
        "title": str(found.config["title"]),
        "question": str(found.config["question"]),
        "decided": count.get("pairs_decided") or 0,
        "undecided": count.get("pairs_undecided") or 0,
        "finished": str(found.manifest["finished"]),
    }
    if (found.path / "summary.json").is_file():
        return _from_summary(json.loads((found.path / "summary.json").read_text()), shared)
    answers = tuple(_split(text) for text in found.manifest["notes"].get("answers", ()))
    rows = [_row_of_table(line) for line in _table(found, "arms")]
    rows.sort(key=lambda row: (row.bits_per_byte is None, row.bits_per_byte or 0.0, row.arm))
    ranked = tuple(dataclasses.replace(row, rank=None if row.bits_per_byte is None else n) for n, row in enumerate(rows, 1))
    return Report(answers=answers, rows=ranked, verdicts=tuple(_verdict_of_table(line) for line in _table(found, "pairs")), **shared)


def _from_summary(summary: Mapping[str, Any], shared: Mapping[str, Any]) -> Report:
    def row(arm: Mapping[str, Any]) -> Row:
        metric = {name: arm["metrics"].get(name) or {} for name in ("bits_per_byte", "core_v1", "core_v2", "mean_score_kept")}
        return Row(
            rank=arm["rank"],
            arm=arm["arm"],
            comparison=arm["comparison"],
            replicates=_many(arm["replicates"]),
            bits_per_byte=metric["bits_per_byte"].get("mean"),
            low=metric["bits_per_byte"].get("low"),
            high=metric["bits_per_byte"].get("high"),
            core_v1=metric["core_v1"].get("mean"),
            core_v2=metric["core_v2"].get("mean"),
            pages_crawled=arm["costs"].get("pages_crawled"),
            fetches=arm["costs"].get("fetches"),
            mean_score=metric["mean_score_kept"].get("mean"),
            missing=arm["missing"],
        )

    def verdict(pair: Mapping[str, Any]) -> Verdict:
        fields = ("comparison", "heldout", "arm", "against", "verdict", "difference", "low", "high")
        return Verdict(**{name: pair[name] for name in fields}, replicates=_many(pair["replicates"]))

    return Report(
        answers=tuple((a["heading"], a["text"]) for a in summary["answers"]),
        rows=tuple(row(arm) for arm in summary["arms"]),
        verdicts=tuple(verdict(pair) for pair in summary["verdicts"] if pair["metric"] == summary["measure"]["name"]),
        **shared,
    )


def _many(value: Any) -> int:
    return len(value) if isinstance(value, list) else int(value)


def _table(found: Artifact, name: str) -> list[dict[str, str]]:
    path = found.path / "tables" / f"{name}.csv"
    if not path.is_file():
        return []
    with path.open(newline="", encoding="utf-8") as stream:
        return list(csv.DictReader(stream))


def _row_of_table(line: Mapping[str, str]) -> Row:
    return Row(
        rank=None,
        arm=line["arm"],
        comparison=line["comparison"],
        replicates=int(line["replicates"] or 0),
        bits_per_byte=_float(line["bits_per_byte_mean"]),
        low=None,
        high=None,
        core_v1=_float(line["core_v1"]),
        core_v2=_float(line["core_v2"]),
        pages_crawled=_int(line["pages_crawled"]),
        fetches=_int(line["fetches"]),
        mean_score=_float(line["mean_score_kept"]),
        missing=line["missing"],
    )


def _verdict_of_table(line: Mapping[str, str]) -> Verdict:
    return Verdict(
        comparison=line["comparison"],
        heldout=line["heldout"],
        arm=line["arm"],
        against=line["against"],
        verdict=line["verdict"],
        difference=_float(line["difference_bits_per_byte"]),
        low=_float(line["interval_low"]),
        high=_float(line["interval_high"]),
        replicates=_int(line["replicates"]),
    )


def _split(text: str) -> tuple[str, str]:
    heading, colon, rest = text.partition(": ")
    return (heading, rest) if colon else ("", text)


def _float(text: str | None) -> float | None:
    return float(text) if text else None


def _int(text: str | None) -> int | None:
    return int(float(text)) if text else None


# --- curves


@dataclasses.dataclass(frozen=True)
class Curve:
    """Points of one line, x ascending."""

    title: str
    x_label: str
    y_label: str
    x: tuple[float, ...]
    y: tuple[float, ...]


def curves(found: Artifact) -> list[Curve]:
    """Of training: loss and learning rate by step, held-out losses, tokens a second. Of evaluation: bits per byte over the held-out
    pages."""
    if found.stage == "train":
        return [
            *_lines(found, "metrics.jsonl", "step", {"loss": "training loss, nats per token", "learning_rate": "learning rate"}),
            *_lines(found, "validation.jsonl", "step", {"heldout_loss": "held-out loss, nats per token"}),
            *_lines(found, "speed.jsonl", "step", {"tokens_per_s": "tokens per second"}),
        ]
    if found.stage == "evaluate" and (found.path / "pages.parquet").is_file():
        import pyarrow.parquet as pq  # the API server reads Parquet for this page alone

        table = pq.read_table(found.path / "pages.parquet", columns=["nll", "n_bytes"])
        pairs = zip(table.column("nll").to_pylist(), table.column("n_bytes").to_pylist(), strict=True)
        values = sorted(nll / math.log(2) / size for nll, size in pairs if nll is not None and size)
        shares = [(i + 0.5) / len(values) for i in range(len(values))]
        return [_curve("bits per byte of the held-out pages", "share of the pages", "bits per byte", shares, values)] if values else []
    return []


def scores(found: Artifact) -> list[tuple[str, Any]]:
    """Of evaluation: means and groups, by name."""
    if found.stage != "evaluate" or not (found.path / "summary.json").is_file():
        return []
    summary = json.loads((found.path / "summary.json").read_text())
    rows = [(name, summary.get(name)) for name in ("bits_per_byte", "core_v1", "core_v2", "raw_mean_22", "raw_mean_23", "task_source")]
    return rows + [(f"{group}, centered (v1)", values.get("centered_v1")) for group, values in (summary.get("groups") or {}).items()]


def _lines(found: Artifact, name: str, x: str, fields: Mapping[str, str]) -> Iterable[Curve]:
    path = found.path / name
    if not path.is_file():
        return
    records = [json.loads(line) for line in path.read_text().splitlines() if line.strip()]
    for field, label in fields.items():
        points = [(r[x], r[field]) for r in records if isinstance(r.get(field), int | float) and isinstance(r.get(x), int | float)]
        if len(points) > 1:
            yield _curve(label.partition(",")[0], x, label, [p[0] for p in points], [p[1] for p in points])


def _curve(title: str, x_label: str, y_label: str, x: Sequence[float], y: Sequence[float]) -> Curve:
    """At most CURVE_POINTS points: the mean of each bin of neighbours, at the bin's first x."""
    size = max(1, math.ceil(len(x) / CURVE_POINTS))
    bins = [range(i, min(i + size, len(x))) for i in range(0, len(x), size)]

    def mean(values: Sequence[float], places: range) -> float:
        return sum(values[i] for i in places) / len(places)

    return Curve(title, x_label, y_label, tuple(x[b[0]] for b in bins), tuple(mean(y, b) for b in bins))
