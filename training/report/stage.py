"""Stage `report`: the answer, and all that a reader needs to check it.

    corpus, scores, crawl/<policy>, results/<arm>#<replicate> -> report.html, summary.md, tables/*.csv, figures/*.svg

1. `lineage` reads the arms' results and walks back to their crawls; `verdict` compares the arms; `curves` follows the crawls.
2. Tables and figures are written first (equal bytes for equal inputs), the page and the summary are made from the same values.
3. The page is one self-contained file. Text from crawled pages is escaped by the template and never made into a link.

What the page measured in seconds, and the recorded runs that it finds for "how to repeat", make report.html and summary.md volatile.
"""

import math
import shlex
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jinja2
from markupsafe import Markup

from craw4llm.artifact import Artifact, Result, code_version, machine
from craw4llm.errors import ArtifactError
from craw4llm.execution import Execution
from craw4llm.runner import read_index
from training.configs import ReportConfig
from training.report import curves as curve_data
from training.report import figures, tables
from training.report.lineage import COMPARISONS, EQUAL_FETCHES, EQUAL_PAGES, Study, experiments_like, gather
from training.report.tables import Comparison, Costs, Table
from training.report.verdict import DRAWS, Pair, SeedSpread, seed_spread

MISSING = "—"
FEWEST_PAGES = 30  # held-out pages for a verdict on the best tenth: a bootstrap of fewer is too sure of itself
# Craw4LLM, arXiv 2502.13347: section 4 and appendix A (corpus, seeds, batch, documents crawled, model, tokens).
PUBLISHED = {
    "pages in the corpus": 900_000_000,
    "seed pages": 10_000,
    "pages crawled": 20_000_000,
    "batch, pages": 10_000,
    "parameters of the model": 411_000_000,
    "tokens trained on": 32_929_300_480,
}


def run(config: ReportConfig, inputs: Mapping[str, Artifact], out: Path, execution: Execution) -> Result:
    study = gather(inputs, config.reference)
    scores = curve_data.Scores.read(study.corpus, study.scores) if study.scores else None
    traces = curve_data.read_traces(study, scores)
    by_print = tables.traces_of(study, traces, scores)
    costs = {name: tables.costs_of(arm, by_print) for name, arm in study.arms.items()}
    spread = seed_spread(study.values)
    comparisons = tables.compare_arms(study, costs, spread)
    best = tables.on_best_heldout(study, scores)
    on_best = tables.compare_arms(best, costs, seed_spread(best.values)) if best and len(best.pages) >= FEWEST_PAGES else []
    at = tables.yardstick(study, costs)
    curves = curve_data.curves_of(traces, scores, at.keep)
    made = {
        t.name: t
        for t in (
            tables.arms_table(study, best, costs, scores),
            tables.models_table(study),
            tables.pairs_table({"all": comparisons, "top tenth by score": on_best}),
            tables.policies_table(study, traces, scores, at),
            tables.curves_table(curves),
            tables.kept_table(study, scores),
            tables.artifacts_table(study),
        )
    }
    tables.write_tables(list(made.values()), out / "tables")
    drawn = draw(study, comparisons, curves, at.fetches)
    (out / "figures").mkdir(parents=True, exist_ok=True)
    for name, svg in drawn.items():
        (out / "figures" / f"{name}.svg").write_text(figures.standalone(svg), encoding="utf-8")
    page = view(config, study, scores, costs, comparisons, spread, best, on_best, made, at, drawn, execution.root)
    (out / "report.html").write_text(render("report.html.j2", page), encoding="utf-8")
    (out / "summary.md").write_text(render("summary.md.j2", page), encoding="utf-8")
    decided = sum(c.pair.decided for c in comparisons)
    missing = sum(bool(c.pair.missing) for c in comparisons)
    return Result(
        counts={
            "arms": (len(study.arms), "arms"),
            "replicates": (len(study.replicates), "replicates"),
            "pairs_decided": (decided, "pairs"),
            "pairs_undecided": (len(comparisons) - decided - missing, "pairs"),
            "pairs_missing": (missing, "pairs"),
        },
        notes={"answers": [f"{a['heading']}: {a['text']}" for a in page["answers"]]},
        volatile=("report.html", "summary.md"),
    )


def draw(study: Study, comparisons: Sequence[Comparison], curves: Sequence[curve_data.Curve], fetches: int | None) -> dict[str, str]:
    """name -> SVG, of those figures that there is anything to draw for."""
    found: dict[str, str] = {}
    pairs = {c.pair.a: c.pair for c in comparisons if c.pair.b == study.reference}
    rows: list[dict[str, Any]] = []
    for comparison in (*COMPARISONS, ""):
        names = [name for name, arm in study.arms.items() if arm.comparison == comparison]
        if names:
            rows.append({"heading": comparison or "Without results"})
        names.sort(key=lambda name: (statistics.fmean(study.of_arm(name)) if study.of_arm(name) else math.inf, name))
        for name in names:
            why = "; ".join(dict.fromkeys(study.arms[name].missing.values()))
            rows.append({"arm": name, "label": study.short(name), "values": study.of_arm(name), "pair": pairs.get(name), "missing": why})
    if rows:
        found["bits_per_byte"] = figures.verdict_figure(rows, study.reference)
    for name, measure in CURVES.items():
        if any(c.measure == measure and len(c.x) for c in curves):
            found[name] = figures.curve_figure(measure, curves, fetches)
    return found


def view(
    config: ReportConfig,
    study: Study,
    scores: curve_data.Scores | None,
    costs: Mapping[str, Costs],
    comparisons: Sequence[Comparison],
    spread: SeedSpread | None,
    best: Study | None,
    on_best: Sequence[Comparison],
    made: Mapping[str, Table],
    at: tables.Yardstick,
    drawn: Mapping[str, str],
    root: Path,
) -> dict[str, Any]:
    """Everything that the templates show, as plain values."""
    groups, groups_on_best = _grouped(comparisons), _grouped(on_best)
    arms = made["arms"].records()
    sources = sorted({tables.task_source(r.results) for arm in study.arms.values() for r in arm.runs.values()} - {""})
    return {
        "config": config,
        "answers": answers(study, costs, comparisons),
        "groups": groups,
        "answers_on_best": answers(best, costs, on_best) if best and on_best else [],
        "groups_on_best": groups_on_best,
        "fewest_pages": FEWEST_PAGES,
        "short": study.short,
        "any_core": any(a["core_v1"] is not None or a["core_v2"] is not None for a in arms),
        "n_pairs": len(comparisons),
        "spread": spread,
        "draws": DRAWS,
        "replicates": study.replicates,
        "arms": {
            c: [a for a in arms if a["comparison"] == (c if c != "Without results" else "")] for c in (*COMPARISONS, "Without results")
        },
        "missing": [(name, r, why) for name, arm in study.arms.items() for r, why in sorted(arm.missing.items())],
        "models": made["models"].records(),
        "policies": made["policies"].records(),
        "best_of_corpus": scores.mean_of_best(at.keep) if scores and at.keep else None,
        "at": at,
        "scores": scores,
        "best_heldout_pages": len(best.pages) if best else 0,
        "top_pages": int(scores.top.sum()) if scores else None,
        "figures": {name: Markup(figures.inline(svg, name, ALT[name])) for name, svg in drawn.items()},
        "kept": made["kept"].records(),
        "corpus": study.corpus,
        "scorer": study.scorer,
        "facts": facts(study),
        "scaled": scaled_down(study),
        "task_sources": sources,
        "own_items": any(r.results.config.get("tasks") is None for arm in study.arms.values() for r in arm.runs.values()),
        "core_missing": core_missing(study),
        "one_crawl": len({run.selection.fingerprint for arm in study.arms.values() for run in arm.runs.values()})
        == sum(bool(arm.runs) for arm in study.arms.values()),
        "times": times(study),
        "machines": machines(study),
        "commands": commands(study, root),
        "externals": externals(study),
        "artifacts": made["artifacts"].records(),
        "others": study.others,
        "heldout_pages": len(study.pages),
        "heldout_bytes": int(study.n_bytes.sum()),
        "code": code_version(),
        "machine": machine(),
        "files": [f"tables/{name}.csv" for name in made] + [f"figures/{name}.svg" for name in drawn],
    }


def _grouped(comparisons: Sequence[Comparison]) -> dict[str, list[Comparison]]:
    groups: dict[str, list[Comparison]] = {}
    for c in comparisons:
        groups.setdefault(c.group, []).append(c)
    return groups


CURVES: dict[str, curve_data.Measure] = {
    "score_by_fetches": "mean_score_best",
    "score_by_pages_crawled": "mean_score_crawled",
    "top_tenth_by_fetches": "top_decile_by_fetches",
    "top_tenth_by_pages_crawled": "top_decile_by_pages",
}
ALT = {
    "bits_per_byte": "Held-out bits per byte of every arm with the interval of its difference from the reference, as in the tables",
    "score_by_pages_crawled": "Mean score of the pages crawled against pages crawled, one line a policy; numbers in tables/curves.csv",
    "score_by_fetches": "Mean score of the best pages fetched against fetches, one line a policy; numbers in tables/curves.csv",
    "top_tenth_by_fetches": "Share of the corpus's top tenth fetched against fetches, one line a policy; numbers in tables/curves.csv",
    "top_tenth_by_pages_crawled": "Share of the corpus's top tenth crawled against pages crawled, by policy; numbers in tables/curves.csv",
}


def answers(study: Study, costs: Mapping[str, Costs], comparisons: Sequence[Comparison]) -> list[dict[str, str]]:
    """The answer to the question, a {heading, text} for each comparison: which arm is best, and what it can't be told apart from."""
    pairs = {frozenset((c.pair.a, c.pair.b)): c.pair for c in comparisons}
    found = []
    for comparison in (EQUAL_PAGES, EQUAL_FETCHES):
        members = study.members(comparison)
        if not members:
            continue
        amounts = {costs[name].pages_crawled if comparison == EQUAL_PAGES else costs[name].fetches for name in members}
        amount = amounts.pop() if len(amounts) == 1 else None
        heading = comparison if amount is None else f"{comparison} ({amount:,} each)"
        best = tables.best_of(study, members)
        if best is None:
            found.append({"heading": heading, "text": "no arm has results."})
            continue
        text = f"{study.short(best)} has the lowest bits per byte, {statistics.fmean(study.of_arm(best)):.4f}. "
        rest = [pairs[frozenset((best, name))] for name in members if name != best]
        text += _outcomes(study, best, rest, "It beats", "It loses to") if rest else "It is the only arm of this comparison."
        found.append({"heading": heading, "text": text})
        reference = study.reference
        if comparison == EQUAL_FETCHES and study.of_arm(reference) and reference not in members:
            against = [pairs[frozenset((name, reference))] for name in members]
            text = _outcomes(study, reference, against, "It beats", "It loses to")
            found.append({"heading": f"{reference}, against the arms of equal fetches", "text": text})
    return found


def _outcomes(study: Study, one: str, pairs: Sequence[Pair], beats: str, loses: str) -> str:
    """How one arm fares in its pairs, in sentences."""
    beaten: list[str] = []
    lost: list[str] = []
    level: list[str] = []
    absent: list[str] = []
    for pair in pairs:
        name = study.short(pair.b if pair.a == one else pair.a)
        if pair.missing or pair.difference is None or pair.low is None or pair.high is None:
            absent.append(name)
        elif pair.winner is None:
            level.append(name)
        else:
            low, high = sorted((abs(pair.low), abs(pair.high)))
            (beaten if pair.winner == one else lost).append(f"{name} by {abs(pair.difference):.4f} ({low:.4f} to {high:.4f})")
    said = []
    if beaten:
        said.append(f"{beats} {_names(beaten)}.")
    if lost:
        said.append(f"{loses} {_names(lost)}.")
    if level:
        said.append(f"Can't tell at 95% whether it differs from {_names(level, 'or')}.")
    if absent:
        said.append(f"No verdict without results: {_names(absent)}.")
    return " ".join(said)


def _names(names: Sequence[str], last: str = "and") -> str:
    """`a, b and c`."""
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} {last} {names[-1]}" if names else ""


def facts(study: Study) -> list[tuple[str, str]]:
    """What was compared, as (name, text)."""
    corpus = study.corpus
    found = [
        ("Pages", str(corpus.manifest["notes"].get("origin") or MISSING)),
        (
            "Corpus",
            f"{corpus.count('pages'):,} pages on {corpus.count('hosts'):,} hosts, {corpus.count('links'):,} links between them, "
            f"{corpus.count('dead_links'):,} dead links; pages without text: {corpus.count('empty_pages'):,}; "
            f"{corpus.count('heldout_pages'):,} pages held out, never crawled",
        ),
    ]
    if study.scorer is not None:
        config = study.scorer.config
        found.append(
            ("Scorer", f"{config.get('kind')}, {study.scorer.manifest['notes'].get('origin') or MISSING} ({study.scorer.fingerprint})")
        )
    runs = [run for arm in study.arms.values() for run in arm.runs.values()]
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
    found.append(("Training seeds", ", ".join(map(str, seeds)) or MISSING))
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
    runs = [run for arm in study.arms.values() for run in arm.runs.values()]
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
    for name, published in PUBLISHED.items():
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


def times(study: Study) -> list[tuple[str, int, float]]:
    """(stage, artifacts, wall time in seconds), in the order of the chain."""
    found: dict[str, list[float]] = {}
    for artifact in study.lineage:
        found.setdefault(artifact.stage, []).append(float(artifact.manifest["wall_time_s"]))
    return [(stage, len(seconds), sum(seconds)) for stage, seconds in found.items()]


def machines(study: Study) -> list[str]:
    """The machines that built the artifacts, without their names."""
    seen: dict[str, None] = {}
    for artifact in study.lineage:
        m = artifact.manifest["machine"]
        seen[f"{m['cpus']} CPUs, Python {m['python']}, {m['platform']}"] = None
    devices = sorted(
        {
            str(run.checkpoint.manifest["notes"]["device"])
            for arm in study.arms.values()
            for run in arm.runs.values()
            if "device" in run.checkpoint.manifest["notes"]
        }
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
    environment.filters.update(num=num, cell=markdown_cell, duration=duration)
    return environment.get_template(template).render(**page)


def num(value: Any, digits: int = 0, sign: bool = False) -> str:
    """A number for people; a dash for a missing one."""
    if value is None or (isinstance(value, float) and not math.isfinite(value)):
        return MISSING
    return f"{value:{'+' if sign else ''},.{digits}f}".replace("-", "\N{MINUS SIGN}")


def duration(seconds: float) -> str:
    return f"{seconds:.1f} s" if seconds < 90 else f"{seconds / 60:.1f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


def markdown_cell(value: Any) -> Markup:
    """Text in Markdown, taken literally: no markup, no links, no raw HTML."""
    text = " ".join(str(value).split()).replace("&", "&amp;").replace("<", "&lt;")
    for character in "\\`*_[]|#~":
        text = text.replace(character, f"\\{character}")
    return Markup(text)  # escaped above, for Markdown
