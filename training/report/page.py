"""What the page and the summaries say: everything that the templates show, as plain values.

    words = Words(...)          what was computed (training.report.stage)
    page  = view(words)         -> render("report.html.j2", page), render("summary.md.j2", page), json of summary(words)

Every value is escaped by the template. Text from crawled pages is shown as text and never made into a link.
"""

import base64
import dataclasses
import hashlib
import math
import shlex
import statistics
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import jinja2
from markupsafe import Markup

from craw4llm.artifact import code_version, machine
from craw4llm.errors import ArtifactError
from craw4llm.runner import read_index
from training.configs import ReportConfig
from training.evaluation.aggregate import GROUPS
from training.report import curves as curve_data
from training.report import tables
from training.report.comparisons import Comparison, Measured, grouped
from training.report.costs import WATTS_PER_CPU
from training.report.crawls import MEASURES, Yardstick
from training.report.figures import Drawing, inline
from training.report.lineage import COMPARISONS, EQUAL_FETCHES, EQUAL_PAGES, ORACLE, OTHER_POOLS, Run, Study, experiments_like
from training.report.published import SCALE
from training.report.tables import Costs, Table, Value
from training.report.verdict import DRAWS, Pair, SeedSpread

MISSING = "—"
FEWEST_PAGES = 30  # held-out pages for a verdict on the best tenth: a bootstrap of fewer is too sure of itself
SCHEMA = 1
MOST_NAMED = 4  # arms named in a sentence of the answer
MOST_ADVISED = 30  # further replicates that a sentence of the answer asks for
WITHOUT = "Without results"
SORT_SCRIPT = (Path(__file__).parent / "sort.js").read_text(encoding="utf-8")
SORT_HASH = "sha256-" + base64.b64encode(hashlib.sha256(SORT_SCRIPT.encode()).digest()).decode()


@dataclasses.dataclass(frozen=True)
class Figure:
    """name: of its files. section: where the page shows it. alt: for screen readers."""

    name: str
    section: str
    title: str
    caption: str
    drawing: Drawing

    @property
    def alt(self) -> str:
        return f"{self.title}. The numbers are in the tables beside this page."


@dataclasses.dataclass(frozen=True, kw_only=True)
class Words:
    """All that a report has computed. by: measure -> the comparisons by it. best: the study on the best tenth of the held-out pages."""

    config: ReportConfig
    study: Study
    scores: curve_data.Scores | None
    costs: Mapping[str, Costs]
    measures: Mapping[str, Measured]
    by: Mapping[tuple[str, str], Sequence[Comparison]]
    crawl_pairs: Sequence[tuple[int, str, Pair]]
    spread: SeedSpread | None
    best: Study | None
    made: Mapping[str, tuple[str, Table]]  # name -> (title, table)
    at: Sequence[Yardstick]
    figures: Sequence[Figure]
    root: Path

    def records(self, name: str) -> list[dict[str, Value]]:
        return self.made[name][1].records() if name in self.made else []

    @cached_property
    def answers(self) -> list[dict[str, str]]:
        """The answer by the strongest measure that there is, then by the others."""
        if self.study.crawls_only:
            return crawl_answers(self)
        found: list[dict[str, str]] = []
        several = "core_v1" in self.measures
        for metric in ("core_v1", "bits_per_byte"):
            if metric in self.measures:
                own = answers(self.study, self.costs, self.by.get((metric, "all"), ()), self.measures[metric])
                prefix = f"{self.measures[metric].unit[0].upper()}{self.measures[metric].unit[1:]}. " if several else ""
                found += [{"heading": f"{prefix}{a['heading']}", "text": a["text"]} for a in own]
        if self.best is not None and self.on_best:
            for a in answers(self.best, self.costs, self.on_best, self.measures["bits_per_byte_top_tenth"]):
                heading = f"On the {len(self.best.pages):,} held-out pages with the highest scores alone. {a['heading']}"
                found.append({"heading": heading, "text": a["text"]})
        return found

    @property
    def on_bytes(self) -> Sequence[Comparison]:
        return self.by.get(("bits_per_byte", "all"), ())

    @property
    def on_best(self) -> Sequence[Comparison]:
        return self.by.get(("bits_per_byte", "top tenth by score"), ())


def view(w: Words) -> dict[str, Any]:
    """Everything that the templates show."""
    study = w.study
    arms = w.records("arms")
    sources = sorted({tables.task_source(run.results) for run in all_runs(study)} - {""})
    said = w.answers
    return {
        "config": w.config,
        "crawls_only": study.crawls_only,
        "answers": said,
        "sections": verdict_sections(w),
        "crawl_verdicts": crawl_verdicts(w),
        "sentences": sentences(w),
        "fewest_pages": FEWEST_PAGES,
        "short": study.short,
        "any_core": any(a["core_v1"] is not None or a["core_v2"] is not None for a in arms),
        "has_core": "core_v1" in w.measures,
        "n_pairs": len(w.on_bytes),
        "spread": w.spread,
        "draws": DRAWS,
        "replicates": study.replicates,
        "groups": GROUPS,
        "table1": w.records("table1"),
        "published": w.config.published,
        "multiples": w.records("multiples"),
        "tasks": w.records("tasks"),
        "arms": {c: [a for a in arms if a["comparison"] == (c if c != WITHOUT else "")] for c in (*COMPARISONS, WITHOUT)},
        "missing": missing(study),
        "models": w.records("models"),
        "policy_means": w.records("policy_means"),
        "crawl_replicates": max((len(by) for by in study.crawls.values()), default=0),
        "needs": w.records("needs"),
        "relations": w.records("relations"),
        "burden": w.records("burden"),
        "decisions": w.records("decisions"),
        "stages": w.records("stages"),
        "watts": WATTS_PER_CPU,
        "kept": w.records("kept"),
        "overlap": w.records("overlap"),
        "against": surprises(w),
        "best_of_corpus": {at.keep: w.scores.mean_of_best(at.keep) for at in w.at} if w.scores else {},
        "at": w.at,
        "scores": w.scores,
        "best_heldout_pages": len(w.best.pages) if w.best else 0,
        "top_pages": int(w.scores.top.sum()) if w.scores else None,
        "figures": {
            section: [(f, Markup(inline(f.drawing.svg, f.name, f.alt))) for f in w.figures if f.section == section]
            for section in ("answer", "table1", "crawls", "links", "sizes")
        },
        "corpus": study.corpus,
        "scorer": study.scorer,
        "facts": facts(study),
        "scaled": scaled_down(study),
        "task_sources": sources,
        "own_items": any(run.results.config.get("tasks") is None and run.results.config.get("suite") != "none" for run in all_runs(study)),
        "core_missing": core_missing(study),
        "one_crawl": all(len(by) == 1 for by in study.crawls.values()),
        "machines": machines(study),
        "commands": commands(study, w.root),
        "externals": externals(study),
        "artifacts": w.records("artifacts"),
        "others": study.others,
        "heldout_pages": len(study.pages),
        "heldout_bytes": int(study.n_bytes.sum()),
        "code": code_version(),
        "machine": machine(),
        "tables": [(name, title, len(t.rows)) for name, (title, t) in w.made.items()],
        "drawn": [f.name for f in w.figures],
        "script": Markup(SORT_SCRIPT),  # the project's own, no value in it
        "script_hash": SORT_HASH,
    }


def summary(w: Words) -> dict[str, Any]:
    """summary.json: docs/artifacts.md, "report"."""
    study = w.study
    bits = w.measures.get("bits_per_byte")
    order = []
    for row in w.records("arms"):
        values = study.of_arm(str(row["arm"]))
        order.append((not values, statistics.fmean(values) if values else 0.0, str(row["arm"]), row))
    arms = []
    for place, (_, _, name, row) in enumerate(sorted(order, key=lambda item: item[:3]), 1):
        values = study.of_arm(name)
        metrics: dict[str, Any] = {}
        if bits is not None:
            metrics["bits_per_byte"] = _metric(values, (row["bits_per_byte_low"], row["bits_per_byte_high"]))
        if w.best is not None:
            metrics["bits_per_byte_top_tenth"] = _metric(w.best.of_arm(name), (None, None))
        runs = study.arms[name].counted
        for core in ("core_v1", "core_v2", "raw_mean_23"):
            found = [tables.summary_of(run.results).get(core) for _, run in sorted(runs.items())]
            known = [float(v) for v in found if v is not None]
            if known and len(known) == len(found):
                metrics[core] = _metric(known, (None, None))
        if row["mean_score_kept"] is not None:
            metrics["mean_score_kept"] = _metric([float(row["mean_score_kept"])], (None, None))  # type: ignore[arg-type]
        arms.append(
            {
                "rank": place if values else None,
                "arm": name,
                "label": study.short(name),
                **{key: row[key] for key in ("comparison", "policy", "policy_knows", "size", "pool_multiple", "replicates", "missing")},
                "costs": {
                    **{key: row[key] for key in ("pages_crawled", "fetched_pages", "dead_links", "fetches", "kept_pages")},
                    "discovered": row["discovered_by_the_whole_crawl"],
                },
                "metrics": metrics,
            }
        )
    verdicts = [
        _verdict(metric, heldout, c.group, c.pair, "; ".join(part for part in (c.pair.missing, c.unequal) if part))
        for (metric, heldout), some in w.by.items()
        for c in some
    ]
    verdicts += [
        _verdict(measure, "", f"{MEASURES[measure][0]}, at {at:,} pages", pair, pair.missing) for at, measure, pair in w.crawl_pairs
    ]
    return _clean(
        {
            "schema": SCHEMA,
            "title": w.config.title,
            "question": w.config.question,
            "hypothesis": w.config.hypothesis,
            "reference": w.config.reference,
            "measure": {
                "name": "bits_per_byte",
                "label": "held-out bits per byte",
                "unit": "bits per byte",
                "higher_is_better": False,
                "decimals": 4,
            },
            "answers": w.answers,
            "replicates": list(study.replicates),
            "arms": arms,
            "policies": w.records("policy_means"),
            "verdicts": verdicts,
            "missing": [{"arm": name, "replicate": r, "why": why} for name, r, why in missing(study)],
            "figures": [
                {"name": f.name, "title": f.title, "caption": f.caption, "svg": f"figures/{f.name}.svg", "png": f"figures/{f.name}.png"}
                for f in w.figures
            ],
            "tables": [
                {"name": name, "title": title, "rows": len(t.rows), "csv": f"tables/{name}.csv", "parquet": f"tables/{name}.parquet"}
                for name, (title, t) in w.made.items()
            ],
        }
    )


def _metric(values: Sequence[float], between: tuple[Value, Value]) -> dict[str, Any]:
    return {
        "mean": statistics.fmean(values) if values else None,
        "sd": statistics.stdev(values) if len(values) > 1 else None,
        "low": between[0],
        "high": between[1],
        "values": list(values),
    }


def _verdict(metric: str, heldout: str, group: str, pair: Pair, remark: str) -> dict[str, Any]:
    return {
        "metric": metric,
        "heldout": heldout,
        "comparison": group,
        "arm": pair.a,
        "against": pair.b,
        "verdict": pair.verdict,
        "difference": pair.difference,
        "low": pair.low,
        "high": pair.high,
        "unit": pair.unit,
        "replicates": len(pair.replicates),
        "more_replicates": pair.more,
        "sentence": pair.sentence(),
        "remark": remark,
    }


def _clean(value: Any) -> Any:
    """Without numbers that JSON has not: they become null."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: _clean(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_clean(item) for item in value]
    return value


def all_runs(study: Study) -> list[Run]:
    """Every model, of all scales."""
    return [run for arms in (study.arms, study.excluded) for arm in arms.values() for run in arm.runs.values()]


def missing(study: Study) -> list[tuple[str, int, str]]:
    """(arm, replicate, why) of every model that does not count, of all scales."""
    arms = {**study.arms, **study.excluded}
    return [(name, r, why) for name, arm in arms.items() for r, why in sorted(arm.missing.items())]


def verdict_sections(w: Words) -> list[dict[str, Any]]:
    """The verdicts by measure: {title, note, groups, open}; the first is shown, the others behind a fold."""
    titles = {"bits_per_byte": "held-out bits per byte", "core_v1": "Core v1", "core_v2": "Core v2"}
    found: list[dict[str, Any]] = []
    for (metric, heldout), some in w.by.items():
        if not some:
            continue
        title = titles.get(metric, f"{metric.removesuffix('_v1')} tasks (centered, v1)")
        if heldout == "top tenth by score":
            title += f" on the {num(len(w.best.pages) if w.best else 0)} held-out pages with the highest scores"
        better = "below 0" if metric == "bits_per_byte" else "above 0"
        found.append({"title": title, "groups": grouped(some), "better": better, "open": not found})
    return found


def crawl_verdicts(w: Words) -> dict[str, list[Pair]]:
    """heading -> pairs of policies over sets of seeds; only where a crawl was made more than once."""
    found: dict[str, list[Pair]] = {}
    for at, measure, pair in w.crawl_pairs:
        if len(pair.replicates) > 1 or pair.missing:
            found.setdefault(f"{MEASURES[measure][0]}, at {at:,} pages, against {pair.b}", []).append(pair)
    return {heading: pairs for heading, pairs in found.items() if any(not p.missing for p in pairs)}


def sentences(w: Words) -> list[tuple[str, list[str]]]:
    """(heading, one sentence a pair) of the pairs against the reference, by Core where there is one, and by bits per byte."""
    found = []
    for metric in ("core_v1", "bits_per_byte"):
        some = [c for c in w.by.get((metric, "all"), ()) if c.pair.b == w.study.reference]
        if some:
            found.append((w.measures[metric].unit, [_short_sentence(w.study, c.pair) for c in some]))
    return found


def _short_sentence(study: Study, pair: Pair) -> str:
    """The verdict, with the arms' short names where they are not ambiguous."""
    return dataclasses.replace(pair, a=pair.a.replace("/", " "), b=pair.b.replace("/", " ")).sentence()


def crawl_answers(w: Words) -> list[dict[str, str]]:
    """The answer of a study of crawls: at each yardstick the best policy per page crawled and per request, and the pairs."""
    found = []
    for point in w.at:
        for measure in ("mean_score_at_pages", "mean_score_best_at_fetches"):
            rows = [r for r in w.records("policy_means") if r["compared_at"] == point.pages and r[measure] is not None]
            if not rows:
                continue
            best = max(rows, key=lambda r: (float(r[measure]), str(r["policy"])))  # type: ignore[arg-type]
            pairs = [pair for at, m, pair in w.crawl_pairs if at == point.pages and m == measure]
            kind = MEASURES[measure][0].partition(",")[0]
            fetches = statistics.fmean(point.fetches.values())
            amount = f"{point.pages:,} pages" if measure == "mean_score_at_pages" else f"{fetches:,.0f} requests, best {point.keep:,} kept"
            text = f"{best['policy']} has the highest mean score, {best[measure]:.3f}. "
            if len(pairs) and any(len(p.replicates) > 1 for p in pairs):
                text += _outcomes(w.study, w.study.reference, pairs, f"{w.study.reference} beats", f"{w.study.reference} loses to")
            elif pairs:
                text += "Each policy crawled from one set of seeds: nothing is decided."
            found.append({"heading": f"{kind} ({amount})", "text": text})
    return found


def answers(study: Study, costs: Mapping[str, Costs], comparisons: Sequence[Comparison], by: Measured) -> list[dict[str, str]]:
    """The answer to the question, a {heading, text} for each comparison: which arm is best, and what it can't be told apart from."""
    pairs = {frozenset((c.pair.a, c.pair.b)): c.pair for c in comparisons}
    word = "highest" if by.higher_is_better else "lowest"
    found = []
    reference = study.reference
    for comparison in (EQUAL_PAGES, OTHER_POOLS, EQUAL_FETCHES, ORACLE):
        members = study.members(comparison)
        if not members:
            continue
        against = [pairs[key] for name in members if (key := frozenset((name, reference))) in pairs]
        if comparison in (OTHER_POOLS, ORACLE):
            if against and by.of_arm(reference):
                name = f"{reference}, against other pools" if comparison == OTHER_POOLS else f"{reference}, against the oracle"
                found.append({"heading": name, "text": _outcomes(study, reference, against, "It beats", "It loses to")})
            continue
        amounts = {costs[name].pages_crawled if comparison == EQUAL_PAGES else costs[name].fetches for name in members}
        amount = amounts.pop() if len(amounts) == 1 else None
        heading = comparison if amount is None else f"{comparison} ({amount:,} each)"
        best = by.best(members)
        if best is None:
            found.append({"heading": heading, "text": "no arm has results."})
            continue
        text = f"{study.short(best)} has the {word} {by.unit}, {statistics.fmean(by.of_arm(best)):.4f}. "
        rest = [pairs[frozenset((best, name))] for name in members if name != best]
        text += _outcomes(study, best, rest, "It beats", "It loses to") if rest else "It is the only arm of this comparison."
        found.append({"heading": heading, "text": text})
        if comparison == EQUAL_FETCHES and by.of_arm(reference) and reference not in members:
            text = _outcomes(study, reference, against, "It beats", "It loses to")
            found.append({"heading": f"{reference}, against the arms of equal fetches", "text": text})
    return found


def _outcomes(study: Study, one: str, pairs: Sequence[Pair], beats: str, loses: str) -> str:
    """How one arm fares in its pairs, in sentences."""
    beaten: list[tuple[float, str, str]] = []  # difference, name, interval
    lost: list[tuple[float, str, str]] = []
    level: list[str] = []
    absent: list[str] = []
    for pair in pairs:
        name = study.short(pair.b if pair.a == one else pair.a)
        if pair.missing or pair.difference is None:
            absent.append(name)
        elif pair.winner is None or pair.low is None or pair.high is None:
            what = "set" if pair.sampled == "sets of seeds" else "replicate"
            need = (
                ""
                if pair.more is None or pair.more > MOST_ADVISED
                else f" (about {pair.more} more {what}{'s' if pair.more != 1 else ''} needed)"
            )
            level.append(f"{name}{need}")
        else:
            low, high = sorted((abs(pair.low), abs(pair.high)))
            (beaten if pair.winner == one else lost).append((abs(pair.difference), name, f"({low:.4f} to {high:.4f})"))
    said = []
    if beaten:
        said.append(f"{beats} {_listed(beaten)}.")
    if lost:
        said.append(f"{loses} {_listed(lost)}.")
    if level:
        said.append(f"Can't tell at 95% whether it differs from {_names(level, 'or')}.")
    if absent:
        said.append(f"No verdict without results: {_names(absent)}.")
    return " ".join(said)


def _listed(outcomes: Sequence[tuple[float, str, str]]) -> str:
    """Each with its difference and interval; of more than MOST_NAMED only the smallest and the largest, since a table has them all."""
    if len(outcomes) <= MOST_NAMED:
        return _names([f"{name} by {difference:.4f} {between}" for difference, name, between in outcomes])
    (least, nearest, _), (most, farthest, _) = min(outcomes), max(outcomes)
    return f"{len(outcomes)} others, by {least:.4f} ({nearest}) to {most:.4f} ({farthest})"


def _names(names: Sequence[str], last: str = "and") -> str:
    """`a, b and c`."""
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} {last} {names[-1]}" if names else ""


def surprises(w: Words) -> list[str]:
    """What went against the reference, and what contradicts itself: for a reader who wants to believe the opposite.

    The hypothesis is a sentence that no program reads; what is looked for is: arms that beat the reference; another answer on the
    best held-out pages, per request, or by another measure; baselines that do not gain from a larger pool.
    """
    study, reference = w.study, w.study.reference
    found = []
    for (metric, heldout), some in w.by.items():
        unit = w.measures[metric].unit if metric in w.measures else metric
        where = f"{unit}{', ' + heldout if heldout not in ('', 'all') else ''}"
        lost = [c.pair for c in some if c.pair.b == reference and c.pair.winner == c.pair.a]
        if lost:
            names = _names([f"{p.a} (by {abs(p.difference or 0):.4f})" for p in lost])
            found.append(f"By {where}, {reference} loses to {names}.")
    everywhere = {c.pair.a: c.pair for c in w.on_bytes if c.pair.b == reference}
    for c in w.on_best:
        other = everywhere.get(c.pair.a)
        if other is not None and c.pair.b == reference and other.winner and c.pair.winner and other.winner != c.pair.winner:
            found.append(
                f"{c.pair.a} against {reference}: {other.verdict} over all held-out pages, {c.pair.verdict} on those with the "
                "highest scores."
            )
    multiples = {(r["metric"], r["by"], r["policy"]): r for r in w.records("multiples")}
    for (name, by, policy), row in multiples.items():
        slope = row["per_doubling"]
        up = w.measures[str(name)].higher_is_better
        if by == "pages_crawled" and isinstance(slope, float) and (slope > 0) != up:
            found.append(
                f"{policy}: a larger pool to select from makes {w.measures[str(name)].unit} worse, by {abs(slope):.4f} a doubling."
            )
    for at, measure, pair in w.crawl_pairs:
        if pair.winner == pair.a and pair.b == reference:
            found.append(f"{pair.a} beats {reference} at {at:,} pages: {MEASURES[measure][0][0].lower()}{MEASURES[measure][0][1:]}.")
    undecided = sum(c.pair.verdict in ("can't tell", "one replicate") for c in w.on_bytes)
    if undecided:
        found.append(f"{undecided} of {len(w.on_bytes)} pairs are not decided by bits per byte.")
    if study.arms and not any(arm.runs for arm in study.arms.values()):
        found.append("No arm has a model.")
    return found


def facts(study: Study) -> list[tuple[str, str]]:
    """What was compared, as (name, text)."""
    corpus = study.corpus
    found = [
        ("Pages", str(corpus.manifest["notes"].get("origin") or MISSING)),
        (
            "Corpus",
            f"{num(corpus.count('pages'))} pages on {num(corpus.count('hosts'))} hosts, {num(corpus.count('links'))} links between them, "
            f"{num(corpus.count('dead_links'))} dead links; pages without text: {num(corpus.count('empty_pages'))}; "
            f"{num(corpus.count('heldout_pages'))} pages held out, never crawled",
        ),
    ]
    if study.scorer is not None:
        config = study.scorer.config
        found.append(
            ("Scorer", f"{config.get('kind')}, {study.scorer.manifest['notes'].get('origin') or MISSING} ({study.scorer.fingerprint})")
        )
    runs = all_runs(study)
    for tokenizer in {run.tokenizer.fingerprint: run.tokenizer for run in runs}.values():
        origin = tokenizer.manifest["notes"].get("origin") or (
            "trained on the corpus" if "corpus" in tokenizer.manifest["inputs"] else "given"
        )
        found.append(("Tokenizer", f"{tokenizer.count('vocab_size'):,} ids, {origin} ({tokenizer.fingerprint})"))
    for text in dict.fromkeys(
        f"{run.checkpoint.config['size']}: {run.checkpoint.count('parameters'):,} parameters, {run.checkpoint.count('tokens'):,} tokens in "
        f"{run.checkpoint.count('steps'):,} steps, {run.checkpoint.config['precision']}"
        for run in runs
    ):
        found.append(("Model", text))
    seeds = sorted({run.checkpoint.config["seed"] for run in runs})
    if seeds:
        found.append(("Training seeds", ", ".join(map(str, seeds))))
    crawls = [crawl for by_replicate in study.crawls.values() for crawl in by_replicate.values()]
    for text in dict.fromkeys(
        f"{crawl.count('seeds'):,} seed pages ({'a given list' if crawl.config.get('seeds') else 'drawn by hash'}), "
        f"batches of {crawl.config['batch_pages']:,} pages"
        for crawl in crawls
    ):
        found.append(("Crawls", text))
    return found


def scaled_down(study: Study) -> list[tuple[str, str, str]]:
    """(quantity, here, as published) of what is smaller than in the paper."""
    runs = all_runs(study)
    crawls = [crawl for by_replicate in study.crawls.values() for crawl in by_replicate.values()]
    here: dict[str, list[int]] = {
        "pages in the corpus": [study.corpus.count("pages")],
        "seed pages": [c.count("seeds") for c in crawls],
        "pages crawled": [c.count("crawled_pages") for c in crawls if c.config["policy"] == "quality"],
        "batch, pages": [c.config["batch_pages"] for c in crawls],
        "parameters of the model": [run.checkpoint.count("parameters") for run in runs],
        "tokens trained on": [run.checkpoint.count("tokens") for run in runs],
    }
    rows = []
    for name, published in SCALE.items():
        values = sorted(set(here[name]))
        text = MISSING if not values else f"{values[0]:,}" if len(values) == 1 else f"{values[0]:,} to {values[-1]:,}"
        rows.append((name, text, f"{published:,}"))
    return rows


def core_missing(study: Study) -> list[str]:
    """Why models have no Core, each reason once."""
    found: dict[str, None] = {}
    for arm in study.arms.values():
        for run in arm.runs.values():
            why = tables.summary_of(run.results).get("why")
            if run.results.count("core_v1") is None and why:
                found[why if isinstance(why, str) else "; ".join(map(str, why))] = None
    return list(found)


def machines(study: Study) -> list[str]:
    """The machines that built the artifacts, without their names."""
    seen: dict[str, None] = {}
    for artifact in study.lineage:
        m = artifact.manifest["machine"]
        seen[f"{m['cpus']} CPUs, Python {m['python']}, {m['platform']}"] = None
    devices = sorted(
        {str(run.checkpoint.manifest["notes"]["device"]) for run in all_runs(study) if "device" in run.checkpoint.manifest["notes"]}
    )
    return [*seen, *(f"trained on: {device}" for device in devices)]


def commands(study: Study, root: Path) -> list[str]:
    """Commands that make the report again: exact where the artifact root has recorded the run, general elsewhere."""
    recorded = {}
    for path in sorted((root / "index").glob("*.json")):
        try:
            recorded[path.stem] = read_index(path)
        except ArtifactError:
            continue  # another experiment's damaged index is no reason to have no report; its own command names it
    found = []
    for experiment, entry in experiments_like(study, recorded):
        settings = "".join(f" --set {shlex.quote(f'{k}={v}')}" for k, v in sorted(entry["parameters"].items()))
        found.append(f"craw4llm run {shlex.quote(experiment)} --replicates {entry['replicates']}{settings}")
    return found


def externals(study: Study) -> list[tuple[str, str, str]]:
    """(stage, name, SHA-256) of every external input in the configs."""
    found: dict[tuple[str, str, str], None] = {}

    def walk(stage: str, value: Any) -> None:
        if isinstance(value, Mapping):
            if set(value) == {"external", "sha256"}:
                found[stage, str(value["external"]), str(value["sha256"])] = None
            else:
                for item in value.values():
                    walk(stage, item)
        elif isinstance(value, list):
            for item in value:
                walk(stage, item)

    for artifact in study.lineage:
        walk(artifact.stage, artifact.config)
    return list(found)


def render(template: str, page: Mapping[str, Any]) -> str:
    """The template with its values, all of them escaped."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters.update(num=num, percent=percent, cell=markdown_cell, duration=duration)
    return environment.get_template(template).render(**page)


def num(value: Any, digits: int = 0, sign: bool = False) -> str:
    """A number for people; a dash for a missing one."""
    if value is None or (isinstance(value, float) and not math.isfinite(value)):
        return MISSING
    return f"{value:{'+' if sign else ''},.{digits}f}".replace("-", "\N{MINUS SIGN}")


def percent(value: Any, digits: int = 1) -> str:
    """A share for people; a dash for a missing one."""
    return MISSING if value is None or not math.isfinite(value) else f"{100 * value:.{digits}f}%"


def duration(seconds: float) -> str:
    return f"{seconds:.1f} s" if seconds < 90 else f"{seconds / 60:.1f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


def markdown_cell(value: Any) -> Markup:
    """Text in Markdown, taken literally: no markup, no links, no raw HTML."""
    text = " ".join(str(value).split()).replace("&", "&amp;").replace("<", "&lt;")
    for character in "\\`*_[]|#~":
        text = text.replace(character, f"\\{character}")
    return Markup(text)  # escaped above, for Markdown
