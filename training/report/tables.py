"""The report's tables: rows of plain values, written as CSV and Parquet and shown in the page.

    arms       one row an arm: what it kept, what that cost in requests, how good its models are
    models     one row a model (arm and replicate), the ones that are missing with their reason
    curves     every point of every curve
    artifacts  every artifact behind the report: fingerprint, digest, config

The other tables stand where their numbers are made: comparisons (pairs), table1 (table1, multiples, tasks), crawls (policies,
policy_means, needs, burden), sizes (decisions), explain (kept), costs (stages, overlap), stage (relations, crawl_pairs).

A missing value is None: an empty cell in the CSV, a dash in the page. Text is made harmless for spreadsheets (`csv_cell`), since URLs
and notes come from other people's pages.
"""

import csv
import dataclasses
import io
import json
import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from craw4llm.artifact import Artifact
from craw4llm.crawl.trace import Trace as CrawlTrace
from training.report.curves import Curve, Scores, Trace, read_trace, top_tenth
from training.report.lineage import EQUAL_PAGES, OTHER_POOLS, Arm, Run, Study, policy_knows

Value = str | int | float | None


@dataclasses.dataclass(frozen=True)
class Table:
    """name: of the CSV file. columns: names with units. rows: one value a column."""

    name: str
    columns: tuple[str, ...]
    rows: list[tuple[Value, ...]]

    def records(self) -> list[dict[str, Value]]:
        return [dict(zip(self.columns, row, strict=True)) for row in self.rows]

    def arrow(self) -> pa.Table:
        """The table with a type a column: int64, float64 or string; a column without any value is one of strings."""
        columns = {}
        for place, name in enumerate(self.columns):
            values = [row[place] for row in self.rows]
            values = [None if isinstance(v, float) and not math.isfinite(v) else v for v in values]
            known = {type(v) for v in values if v is not None}
            kind = pa.int64() if known == {int} else pa.float64() if known and known <= {int, float} else pa.string()
            columns[name] = pa.array(values if kind != pa.string() else [None if v is None else str(v) for v in values], kind)
        return pa.table(columns)

    def csv(self) -> str:
        text = io.StringIO()
        writer = csv.writer(text, lineterminator="\n")
        writer.writerow(self.columns)
        writer.writerows([csv_cell(value) for value in row] for row in self.rows)
        return text.getvalue()


def csv_cell(value: Value) -> str:
    """Text of a cell. Numbers stay numbers; text that a spreadsheet would take for a formula gets an apostrophe before it.

    The first characters that spreadsheets act on: OWASP, "CSV Injection". Line breaks inside text become spaces.
    """
    if value is None or (isinstance(value, float) and not math.isfinite(value)):
        return ""
    if isinstance(value, float):
        return repr(round(value, 10))
    if isinstance(value, int):
        return str(value)
    text = " ".join(value.splitlines()) if "\n" in value or "\r" in value else value
    return f"'{text}" if text.lstrip()[:1] in ("=", "+", "-", "@") or text[:1] in ("\t", "\r", "\n") else text


def table(name: str, records: Iterable[Mapping[str, Value]]) -> Table:
    """A table of records that all have the same keys in the same order."""
    rows = [dict(record) for record in records]
    return Table(name, tuple(rows[0]) if rows else (), [tuple(row.values()) for row in rows])


def write_tables(tables: Sequence[Table], folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for table in tables:
        (folder / f"{table.name}.csv").write_text(table.csv(), encoding="utf-8", newline="")
        pq.write_table(table.arrow(), folder / f"{table.name}.parquet", compression="zstd")


@dataclasses.dataclass(frozen=True)
class Costs:
    """What an arm's selection was taken from. None: does not apply (oracle) or unknown (no results)."""

    pages_crawled: int | None = None
    fetched_pages: int | None = None
    dead_links: int | None = None
    fetches: int | None = None


def costs_of(arm: Arm, traces: Mapping[str, Trace]) -> Costs:
    """traces: fingerprint of a crawl -> its trace."""
    run = arm.first
    if run is None or run.crawl is None:
        return Costs()
    fetches = run.selection.count("pool_fetches")
    if fetches is None:
        return Costs()
    trace = traces[run.crawl.fingerprint]
    if arm.comparison in (EQUAL_PAGES, OTHER_POOLS):
        crawled = run.selection.count("pool_pages")
    elif fetches >= trace.fetches:  # all of the crawl, with the batch that came after its last fetch
        crawled = len(trace.in_crawl_order)
    else:
        crawled = len(CrawlTrace(run.crawl).prefix(fetches=fetches).crawled)
    fetched, dead = trace.within(fetches)
    return Costs(crawled, fetched, dead, fetches)


def traces_of(study: Study, given: Sequence[Trace], scores: Scores | None) -> dict[str, Trace]:
    """The traces of all crawls that arms were made from, by fingerprint; those given are not read again."""
    found = {study.crawls[t.policy][t.replicate].fingerprint: t for t in given}
    for arm in study.arms.values():
        for replicate, run in arm.runs.items():
            if run.crawl is not None and run.crawl.fingerprint not in found:
                found[run.crawl.fingerprint] = read_trace(arm.policy, replicate, run.crawl, scores)
    return found


def arms_table(
    study: Study, best: Study | None, costs: Mapping[str, Costs], scores: Scores | None, intervals: Mapping[str, tuple[float, float]]
) -> Table:
    """best: the study on the best tenth of the held-out pages. intervals: arm -> 95% interval of its bits per byte."""
    rows = (_arm_row(study, best, arm, costs[name], scores, intervals.get(name)) for name, arm in study.arms.items())
    return table("arms", rows)


def _arm_row(
    study: Study, best: Study | None, arm: Arm, cost: Costs, scores: Scores | None, between: tuple[float, float] | None
) -> dict[str, Value]:
    on_best = best.of_arm(arm.name) if best else []
    values = study.of_arm(arm.name)
    run = arm.first
    kept = run.selection.count("kept_pages") if run else None
    tokens = run.tokens.count("tokens") if run else None
    return {
        "arm": arm.name,
        "comparison": arm.comparison,
        "policy": arm.policy,
        "policy_knows": policy_knows(arm.policy),
        "size": arm.scale.size if arm.scale else "",
        "pool_multiple": arm.pool_multiple,
        "replicates": len(values),
        "kept_pages": kept,
        "pages_crawled": cost.pages_crawled,
        "fetched_pages": cost.fetched_pages,
        "dead_links": cost.dead_links,
        "fetches": cost.fetches,
        "discovered_by_the_whole_crawl": run.crawl.count("discovered") if run and run.crawl else None,
        "kept_hosts": run.selection.count("hosts") if run else None,
        "kept_bytes_per_page": run.selection.count("kept_text_bytes") / kept if run and kept else None,
        "kept_tokens_per_page": tokens / kept if tokens and kept else None,
        "mean_score_kept": mean_kept(run, scores) if run else None,
        "exact_duplicates": _count(run.selection, "exact_duplicates") if run else None,
        "near_duplicates": _count(run.selection, "near_duplicates") if run else None,
        "heldout_copies": _count(run.selection, "heldout_copies") if run else None,
        "tokens_unique": run.checkpoint.count("unique_tokens") if run else None,
        "tokens_trained": run.checkpoint.count("tokens") if run else None,
        "epochs": run.checkpoint.count("epochs") if run else None,
        "bits_per_byte_mean": statistics.fmean(values) if values else None,
        "bits_per_byte_sd": statistics.stdev(values) if len(values) > 1 else None,
        "bits_per_byte_low": between[0] if between else None,
        "bits_per_byte_high": between[1] if between else None,
        "bits_per_byte_top_tenth_mean": statistics.fmean(on_best) if on_best else None,
        "bits_per_byte_top_tenth_sd": statistics.stdev(on_best) if len(on_best) > 1 else None,
        "core_v1": mean_core(arm, "core_v1"),
        "core_v2": mean_core(arm, "core_v2"),
        "task_source": task_source(run.results) if run else "",
        "missing": "; ".join(f"replicate {r}: {why}" for r, why in sorted(arm.missing.items())),
        "selection": _prints([r.selection for r in arm.runs.values()]),
        "crawl": _prints([r.crawl for r in arm.runs.values() if r.crawl is not None]),
        "results": _prints([r.results for r in arm.runs.values()]),
    }


def _count(artifact: Artifact, name: str) -> Value:
    """A count that an artifact need not have; None where it has not."""
    return artifact.count(name) if name in artifact.manifest["counts"] else None


def on_best_heldout(study: Study, scores: Scores | None) -> Study | None:
    """The study on the tenth of the held-out pages with the highest score; None without scores, or with fewer than ten such pages."""
    if scores is None or not len(study.pages):
        return None
    of_heldout = scores.by_page[study.pages]
    best = top_tenth(of_heldout, np.isfinite(of_heldout))
    return study.on(best) if best.any() else None


def mean_kept(run: Run, scores: Scores | None) -> float | None:
    """Mean score of the kept pages that have one, from the scores of all pages where given, else as the selection recorded it."""
    if scores is None:
        recorded = run.selection.count("mean_score")
        return None if recorded is None else float(recorded)
    kept = scores.by_page[pq.read_table(run.selection.file("kept.parquet"), columns=["page"])["page"].to_numpy()]
    kept = kept[np.isfinite(kept)]
    return float(kept.mean()) if len(kept) else None


def summary_of(results: Artifact) -> dict[str, Any]:
    return dict(json.loads(results.file("summary.json").read_text()))


def task_source(results: Artifact) -> str:
    return str(summary_of(results).get("task_source") or "")


def mean_core(arm: Arm, name: str) -> float | None:
    """Mean over the models that count; None where one of them has none."""
    values = [run.results.count(name) for run in arm.counted.values()]
    return statistics.fmean(values) if values and all(v is not None and math.isfinite(v) for v in values) else None


def _prints(artifacts: Sequence[Artifact]) -> str:
    """Fingerprints, each once, in the order of the replicates."""
    return " ".join(dict.fromkeys(a.fingerprint for a in artifacts))


def models_table(study: Study) -> Table:
    records: list[dict[str, Value]] = []
    for name, arm in study.arms.items():
        for replicate in study.replicates:
            run = arm.runs.get(replicate)
            records.append(
                {
                    "arm": name,
                    "replicate": replicate,
                    "seed": run.checkpoint.config["seed"] if run else None,
                    "bits_per_byte": study.values.get((name, replicate)),
                    "heldout_loss": run.checkpoint.count("heldout_loss") if run else None,
                    "final_loss": run.checkpoint.count("final_loss") if run else None,
                    "core_v1": run.results.count("core_v1") if run else None,
                    "core_v2": run.results.count("core_v2") if run else None,
                    "missing": arm.missing.get(replicate, ""),
                    "checkpoint": run.checkpoint.fingerprint if run else "",
                    "results": run.results.fingerprint if run else "",
                }
            )
    return table("models", records)


def curves_table(curves: Sequence[Curve]) -> Table:
    return table(
        "curves",
        (
            {"policy": c.policy, "replicate": c.replicate, "measure": c.measure, "x": x, "y": y}
            for c in curves
            for x, y in zip(c.x.tolist(), c.y.tolist(), strict=True)
        ),
    )


def artifacts_table(study: Study) -> Table:
    return table(
        "artifacts",
        (
            {
                "stage": a.stage,
                "fingerprint": a.fingerprint,
                "digest": a.digest,
                "version": a.manifest["version"],
                "inputs": " ".join(f"{name}={ref['fingerprint']}" for name, ref in sorted(a.manifest["inputs"].items())),
                "config": json.dumps(a.config, sort_keys=True, ensure_ascii=False),
            }
            for a in sorted(study.lineage, key=lambda a: (a.stage, a.fingerprint))
        ),
    )
