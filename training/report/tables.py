"""The report's tables: rows of plain values, written as CSV and shown in the page.

    arms       one row an arm: what it kept, what that cost in requests, how good its models are
    models     one row a model (arm and replicate), the ones that are missing with their reason
    pairs      one row a compared pair of arms
    policies   one row a crawl: quality per page crawled and per request
    curves     every point of every curve
    kept       the highest and lowest scored pages that each arm kept
    artifacts  every artifact behind the report: fingerprint, digest, config

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
import pyarrow.parquet as pq

from craw4llm.artifact import Artifact
from craw4llm.configs import KNOWLEDGE
from craw4llm.corpus.reader import Corpus
from craw4llm.crawl.trace import Trace as CrawlTrace
from training.report.curves import Curve, Scores, Trace, mean_of_best, mean_of_first, read_trace, top_tenth
from training.report.lineage import EQUAL_FETCHES, EQUAL_PAGES, KNOWS, ORACLE, Arm, Run, Study
from training.report.verdict import Pair, SeedSpread, compare, page_draws

Value = str | int | float | None
EXAMPLES = 3  # highest and lowest scored kept pages shown of each arm


@dataclasses.dataclass(frozen=True)
class Table:
    """name: of the CSV file. columns: names with units. rows: one value a column."""

    name: str
    columns: tuple[str, ...]
    rows: list[tuple[Value, ...]]

    def records(self) -> list[dict[str, Value]]:
        return [dict(zip(self.columns, row, strict=True)) for row in self.rows]

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


@dataclasses.dataclass(frozen=True)
class Comparison:
    """One pair with the heading that it stands under. unequal: what the two arms do not have in common although the heading says so."""

    group: str
    pair: Pair
    unequal: str = ""


@dataclasses.dataclass(frozen=True)
class Costs:
    """What an arm's selection was taken from. None: does not apply (oracle) or unknown (no results)."""

    pages_crawled: int | None = None
    fetched_pages: int | None = None
    dead_links: int | None = None
    fetches: int | None = None


@dataclasses.dataclass(frozen=True)
class Yardstick:
    """Where crawls are compared: at the pages crawled and the fetches of the reference arm, with as many pages kept as it keeps."""

    pages: int | None = None
    keep: int | None = None
    fetches: int | None = None


def yardstick(study: Study, costs: Mapping[str, Costs]) -> Yardstick:
    """From the reference arm, or where that has no crawl or no results, from the first arm that has."""
    for name in [study.reference, *study.arms]:
        run = study.arms[name].first if name in study.arms else None
        if run is not None and costs[name].fetches is not None:
            return Yardstick(costs[name].pages_crawled, int(run.selection.count("kept_pages")), costs[name].fetches)
    return Yardstick()


def costs_of(arm: Arm, traces: Mapping[str, Trace]) -> Costs:
    """traces: fingerprint of a crawl -> its trace."""
    run = arm.first
    if run is None or run.crawl is None:
        return Costs()
    fetches = run.selection.count("pool_fetches")
    if fetches is None:
        return Costs()
    trace = traces[run.crawl.fingerprint]
    in_order = arm.comparison == EQUAL_PAGES
    if in_order:
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


def compare_arms(study: Study, costs: Mapping[str, Costs], spread: SeedSpread | None) -> list[Comparison]:
    """The pairs that the report answers with, each once, under the first heading that asks for it.

    Equal pages crawled: every arm against the reference. Equal fetches: every arm against the reference, and against the reference's
    policy selecting the same way. In both: the rest against the best arm. The oracle against the reference.
    """
    wanted: list[tuple[str, str, str]] = []
    reference = study.reference
    for comparison in (EQUAL_PAGES, EQUAL_FETCHES):
        members = study.members(comparison)
        if reference:
            wanted += [(f"{comparison}, against {reference}", name, reference) for name in members if name != reference]
        if comparison == EQUAL_FETCHES and reference in study.arms:
            policy = study.arms[reference].policy or reference.split("/")[0]  # by its name where it has no results
            for same in (name for name in members if policy and study.arms[name].policy == policy):
                wanted += [(f"{comparison}, same selection, against {same}", name, same) for name in members if name != same]
        best = best_of(study, members)
        if best:
            wanted += [(f"{comparison}, against the best of them, {best}", name, best) for name in members if name != best]
    if reference:
        wanted += [(f"{ORACLE}, against {reference}", name, reference) for name in study.members(ORACLE)]
        wanted += [("Without results", name, reference) for name, arm in study.arms.items() if not arm.runs and name != reference]
    draws = page_draws(study.nll, study.n_bytes)
    found: list[Comparison] = []
    seen: set[frozenset[str]] = set()
    for group, a, b in wanted:
        if frozenset((a, b)) not in seen:
            seen.add(frozenset((a, b)))
            found.append(
                Comparison(group, _with_reason(compare(a, b, study.values, draws, spread), study), _unequal(group, costs[a], costs[b]))
            )
    return found


def best_of(study: Study, names: Sequence[str]) -> str | None:
    """The arm with the lowest mean bits per byte; ties by name. None where no arm has results.

    Only arms with the most replicates of all that are given: a mean over fewer models is no like for like.
    """
    most = max((len(study.of_arm(name)) for name in names), default=0)
    means = {name: statistics.fmean(study.of_arm(name)) for name in names if most and len(study.of_arm(name)) == most}
    return min(means, key=lambda name: (means[name], name)) if means else None


def _with_reason(pair: Pair, study: Study) -> Pair:
    """A pair without a difference says why its arms have no results."""
    if not pair.missing:
        return pair
    why = [
        f"{name}: {', '.join(dict.fromkeys(study.arms[name].missing.values()))}" for name in (pair.a, pair.b) if study.arms[name].missing
    ]
    return dataclasses.replace(pair, missing="; ".join(why) or pair.missing)


def _unequal(group: str, a: Costs, b: Costs) -> str:
    """What is not equal although the comparison's name says so; "" where all is."""
    pairs = {EQUAL_PAGES: ("pages crawled", a.pages_crawled, b.pages_crawled), EQUAL_FETCHES: ("fetches", a.fetches, b.fetches)}
    for name, (what, of_a, of_b) in pairs.items():
        if group.startswith(name) and of_a is not None and of_b is not None and of_a != of_b:
            return f"{of_a:,} {what} against {of_b:,}"
    return ""


def pairs_table(comparisons: Mapping[str, Sequence[Comparison]]) -> Table:
    """comparisons: name of a set of held-out pages -> the pairs measured on it."""
    return table(
        "pairs",
        (
            {
                "heldout": heldout,
                "comparison": c.group,
                "arm": c.pair.a,
                "against": c.pair.b,
                "verdict": c.pair.verdict,
                "difference_bits_per_byte": c.pair.difference,
                "interval_low": c.pair.low,
                "interval_high": c.pair.high,
                "replicates": len(c.pair.replicates),
                "seed_spread_known": "yes" if c.pair.seeds_known else "no",
                "remark": "; ".join(part for part in (c.pair.missing, c.unequal) if part),
            }
            for heldout, some in comparisons.items()
            for c in some
        ),
    )


def arms_table(study: Study, best: Study | None, costs: Mapping[str, Costs], scores: Scores | None) -> Table:
    """best: the study on the best tenth of the held-out pages."""
    return table("arms", (_arm_row(study, best, arm, costs[name], scores) for name, arm in study.arms.items()))


def _arm_row(study: Study, best: Study | None, arm: Arm, cost: Costs, scores: Scores | None) -> dict[str, Value]:
    on_best = best.of_arm(arm.name) if best else []
    values = study.of_arm(arm.name)
    run = arm.first
    kept = run.selection.count("kept_pages") if run else None
    return {
        "arm": arm.name,
        "comparison": arm.comparison,
        "policy": arm.policy,
        "policy_knows": policy_knows(arm.policy),
        "replicates": len(values),
        "kept_pages": kept,
        "pages_crawled": cost.pages_crawled,
        "fetched_pages": cost.fetched_pages,
        "dead_links": cost.dead_links,
        "fetches": cost.fetches,
        "kept_hosts": run.selection.count("hosts") if run else None,
        "kept_bytes_per_page": run.selection.count("kept_text_bytes") / kept if run and kept else None,
        "mean_score_kept": mean_kept(run, scores) if run else None,
        "tokens_unique": run.checkpoint.count("unique_tokens") if run else None,
        "tokens_trained": run.checkpoint.count("tokens") if run else None,
        "epochs": run.checkpoint.count("epochs") if run else None,
        "bits_per_byte_mean": statistics.fmean(values) if values else None,
        "bits_per_byte_sd": statistics.stdev(values) if len(values) > 1 else None,
        "bits_per_byte_top_tenth_mean": statistics.fmean(on_best) if on_best else None,
        "core_v1": _mean_core(arm, "core_v1"),
        "core_v2": _mean_core(arm, "core_v2"),
        "task_source": task_source(run.results) if run else "",
        "missing": "; ".join(f"replicate {r}: {why}" for r, why in sorted(arm.missing.items())),
        "selection": _prints([r.selection for r in arm.runs.values()]),
        "crawl": _prints([r.crawl for r in arm.runs.values() if r.crawl is not None]),
        "results": _prints([r.results for r in arm.runs.values()]),
    }


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


def policy_knows(policy: str) -> str:
    return KNOWS[KNOWLEDGE[policy]] if policy in KNOWLEDGE else ""


def summary_of(results: Artifact) -> dict[str, Any]:
    return dict(json.loads(results.file("summary.json").read_text()))


def task_source(results: Artifact) -> str:
    return str(summary_of(results).get("task_source") or "")


def _mean_core(arm: Arm, name: str) -> float | None:
    """Mean over replicates; None where one of them has none."""
    values = [run.results.count(name) for run in arm.runs.values()]
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


def policies_table(study: Study, traces: Sequence[Trace], scores: Scores | None, at: Yardstick) -> Table:
    """One row a crawl: its quality at the same pages crawled and at the same fetches."""
    return table("policies", (_policy_row(study.crawls[t.policy][t.replicate], t, scores, at) for t in traces))


def _policy_row(crawl: Artifact, t: Trace, scores: Scores | None, at: Yardstick) -> dict[str, Value]:
    """None where the crawl does not reach so far."""
    rows = t.in_crawl_order
    at_pages = at.pages if at.pages is not None and at.pages <= len(rows) else None
    at_fetches = at.fetches if at.fetches is not None and at.fetches <= t.fetches else None
    top = scores.top if scores is not None and scores.top.any() else None
    mean = best = None
    if t.scored and at_pages is not None:
        _, y = mean_of_first(t.score[rows], np.array([at_pages]))
        mean = float(y[0]) if len(y) else None
    if t.scored and at.keep is not None and at_fetches is not None:
        _, y = mean_of_best(t.fetch_rank, t.score, at.keep, np.array([at_fetches]))
        best = float(y[0]) if len(y) else None
    return {
        "policy": t.policy,
        "replicate": t.replicate,
        "policy_knows": policy_knows(str(crawl.config["policy"])),
        "discovered": crawl.count("discovered"),
        "pages_crawled": crawl.count("crawled_pages"),
        "fetched_pages": crawl.count("fetched_pages"),
        "dead_links": crawl.count("dead_links"),
        "fetches": crawl.count("fetches"),
        "at_pages": at_pages,
        "mean_score_at_pages": mean,
        "top_decile_share_at_pages": float(top[t.page[rows[:at_pages]]].sum() / top.sum()) if top is not None and at_pages else None,
        "at_fetches": at_fetches,
        "best_pages": at.keep if at_fetches is not None else None,
        "mean_score_best_at_fetches": best,
        "top_decile_share_at_fetches": float(top[t.page[t.fetch_rank < at_fetches]].sum() / top.sum())
        if top is not None and at_fetches
        else None,
        "stop": str(crawl.manifest["notes"].get("stop", "")),
        "crawl": crawl.fingerprint,
    }


def curves_table(curves: Sequence[Curve]) -> Table:
    return table(
        "curves",
        (
            {"policy": c.policy, "replicate": c.replicate, "measure": c.measure, "x": x, "y": y}
            for c in curves
            for x, y in zip(c.x.tolist(), c.y.tolist(), strict=True)
        ),
    )


def kept_table(study: Study, scores: Scores | None) -> Table:
    """The highest and the lowest scored pages that each arm kept. URLs are other people's text: shown as text, never as links."""
    if scores is None:
        return table("kept", ())
    corpus = Corpus(study.corpus)
    records: list[dict[str, Value]] = []
    for name, arm in study.arms.items():
        if arm.first is None:
            continue
        pages = pq.read_table(arm.first.selection.file("kept.parquet"), columns=["page"])["page"].to_numpy().astype(np.int64)
        pages = pages[np.isfinite(scores.by_page[pages])]
        ranked = pages[np.lexsort((pages, -scores.by_page[pages]))]
        highest, lowest = ranked[:EXAMPLES], ranked[max(EXAMPLES, len(ranked) - EXAMPLES) :]
        for place, some in (("highest", highest), ("lowest", lowest)):
            for page in some.tolist():
                score = float(scores.by_page[page])
                records.append({"arm": name, "place": place, "score": score, "page": page, "url": corpus.url(page)})
    return table("kept", records)


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
