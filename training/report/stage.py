"""Stage `report`: the answer, and all that a reader needs to check it.

    corpus, scores, crawl/<policy>, results/<arm>#<replicate> -> report.html, summary.md, summary.json, tables/*, figures/*

1. `lineage` reads the arms' results and walks back to their crawls; `comparisons` and `verdict` compare the arms; `curves` and `crawls`
   follow the crawls, `analysis` the links; `table1`, `sizes`, `costs`, `explain` make the other tables.
2. Tables and figures are written first (equal bytes for equal inputs); the page and the summaries (`page`) are made from the same values.

What was measured in seconds, and the recorded runs that the page finds for "how to repeat", make report.html, summary.md and tables/stages
volatile.
"""

import json
import math
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from craw4llm.artifact import Artifact, Result
from craw4llm.corpus.reader import Corpus
from craw4llm.execution import Execution
from training.configs import ReportConfig
from training.report import analysis, crawls, figures, tables
from training.report import curves as curve_data
from training.report.comparisons import Comparison, Measured, by_bytes, by_core, compare_arms, pairs_table
from training.report.costs import overlap_table, stages_table
from training.report.explain import kept_table
from training.report.lineage import COMPARISONS, EQUAL_PAGES, OTHER_POOLS, Study, gather
from training.report.page import FEWEST_PAGES, WITHOUT, Figure, Words, num, render, summary, view
from training.report.sizes import decisions_table
from training.report.table1 import multiples_table, table1_table, tasks_table
from training.report.tables import Table
from training.report.verdict import Floats, arm_interval, seed_spread

VOLATILE = ("report.html", "summary.md", "tables/stages.csv", "tables/stages.parquet")
PAGERANK_LINKS = 100_000_000  # beyond, PageRank is shown only where it was given as the input "rank/pagerank"


def run(config: ReportConfig, inputs: Mapping[str, Artifact], out: Path, execution: Execution) -> Result:
    everything = gather(inputs, config.reference, config.expected, mixed=config.mixed)
    study = _main(everything)
    scores = curve_data.Scores.read(study.corpus, study.scores) if study.scores else None
    traces = curve_data.read_traces(study, scores)
    by_print = tables.traces_of(study, traces, scores)
    costs = {name: tables.costs_of(arm, by_print) for name, arm in study.arms.items()}
    best = tables.on_best_heldout(study, scores)
    measures = {m.name: m for m in (by_bytes(study), *by_core(study))} if study.replicates else {}
    found = {(name, "all"): compare_arms(study, costs, m) for name, m in measures.items()}
    if best and measures and len(best.pages) >= FEWEST_PAGES:
        measures["bits_per_byte_top_tenth"] = by_bytes(best)
        found["bits_per_byte", "top tenth by score"] = compare_arms(best, costs, measures["bits_per_byte_top_tenth"])
    at = crawls.yardsticks(study, costs, config.at_pages)
    curves = curve_data.curves_of(traces, scores, at[-1].keep if at else None)
    policies = crawls.policies_table(study, traces, scores, at)
    reference_policy = study.arms[study.reference].policy if study.reference in study.arms else study.reference
    crawl_pairs = crawls.crawl_pairs(policies, reference_policy) if any(t.policy == reference_policy for t in traces) else []
    ranked = [m for m in (measures.get("core_v1"), measures.get("bits_per_byte")) if m is not None]
    multiples, lines = multiples_table(study, costs, ranked)
    relations = relations_of(study, scores)
    intervals = {
        name: between for name in study.arms if measures and (between := arm_interval(name, study.values, measures["bits_per_byte"].draws))
    }
    whole_best = tables.on_best_heldout(everything, scores)
    titled: list[tuple[str, Table]] = [
        ("Arms: what each kept, what it cost, how good its models are", tables.arms_table(study, best, costs, scores, intervals)),
        ("The paper's Table 1, measured and published", table1_table(study, best, measures, config.published)),
        ("Verdicts, pair by pair", pairs_table(found)),
        ("Verdicts on crawls, over sets of seeds", crawl_pairs_table(crawl_pairs)),
        ("Pool that a baseline needs to match the reference", multiples),
        ("Crawls at the same pages crawled and at the same requests", crawls.policy_means(policies)),
        ("Every crawl", policies),
        ("What each policy needs to match the reference", crawls.needs_table(study, traces, at)),
        ("Requests, bytes and hosts", crawls.burden_table(study, costs, by_print, at)),
        ("Scores and links: rank correlations", relations_table(relations)),
        ("Curves, point by point", tables.curves_table(curves)),
        ("Can a small model decide?", decisions_table(everything, whole_best)),
        ("Tasks", tasks_table(study)),
        ("Duplicates and contamination", overlap_table(study)),
        ("Pages kept, best and worst", kept_table(study, scores)),
        ("Every model", tables.models_table(everything)),
        ("Time and energy by kind of stage", stages_table(everything)),
        ("Every artifact behind the report", tables.artifacts_table(study)),
    ]
    made = {t.name: (title, t) for title, t in titled}
    drawn = [*draw_models(study, found, measures, costs, lines), *draw_crawls(study, curves, scores, at, made), *draw_links(relations)]
    drawn += draw_decisions(made["decisions"][1])
    words = Words(
        config=config,
        study=study,
        scores=scores,
        costs=costs,
        measures=measures,
        by=found,
        crawl_pairs=crawl_pairs,
        spread=seed_spread(study.values),
        best=best,
        made=made,
        at=at,
        figures=drawn,
        root=execution.root,
    )
    write(words, out)
    return _result(words)


def _main(study: Study) -> Study:
    """The arms of one scale, that of the reference, or where that has no results, the largest: verdicts are among equals."""
    if len(study.scales) < 2:
        return study
    arm = study.arms.get(study.reference)
    return study.of_scale((arm.scale if arm else None) or study.scales[-1])


def write(words: Words, out: Path) -> None:
    """All files of the report."""
    tables.write_tables([t for _, t in words.made.values()], out / "tables")
    (out / "figures").mkdir(parents=True, exist_ok=True)
    for figure in words.figures:
        (out / "figures" / f"{figure.name}.svg").write_text(figures.standalone(figure.drawing.svg), encoding="utf-8")
        (out / "figures" / f"{figure.name}.png").write_bytes(figure.drawing.png)
    page = view(words)
    (out / "report.html").write_text(render("report.html.j2", page), encoding="utf-8")
    (out / "summary.md").write_text(render("summary.md.j2", page), encoding="utf-8")
    text = json.dumps(summary(words), indent=1, ensure_ascii=False, allow_nan=False)
    (out / "summary.json").write_text(text + "\n", encoding="utf-8")


def _result(words: Words) -> Result:
    comparisons = words.on_bytes
    decided = sum(c.pair.decided for c in comparisons)
    missing = sum(bool(c.pair.missing) for c in comparisons)
    return Result(
        counts={
            "arms": (len(words.study.arms), "arms"),
            "replicates": (len(words.study.replicates), "replicates"),
            "pairs_decided": (decided, "pairs"),
            "pairs_undecided": (len(comparisons) - decided - missing, "pairs"),
            "pairs_missing": (missing, "pairs"),
        },
        notes={"answers": [f"{a['heading']}: {a['text']}" for a in words.answers]},
        volatile=VOLATILE,
    )


def relations_of(study: Study, scores: curve_data.Scores | None) -> dict[str, analysis.Relation]:
    """Name -> relation: score and links, over all pages or a fixed sample of them. {} without scores of all pages."""
    if scores is None:
        return {}
    corpus = Corpus(study.corpus)
    pages = analysis.sample_of(np.flatnonzero(np.isfinite(scores.by_page)))
    one, two = analysis.hop_means(corpus, scores.by_page, pages)
    if not corpus.has_indegree:
        why = "not available because the corpus was built with links='in_place', which counts no links into a page"
        by_indegree, indegree = analysis.unknown(why), None
    else:
        indegree = np.asarray(corpus.indegree[: corpus.n_pages], dtype=np.float64)
        by_indegree = analysis.related(indegree, scores.by_page)
    found = {
        "score against in-degree": by_indegree,
        "score against 1-hop outlinks": analysis.related(one, scores.by_page[pages]),
        "score against 2-hop outlinks": analysis.related(two, scores.by_page[pages]),
    }
    ranks = pagerank_of(study, corpus)
    if ranks is not None:
        if indegree is not None:
            found["PageRank against in-degree"] = analysis.related(indegree, ranks)
        found["score against PageRank"] = analysis.related(ranks, scores.by_page)
    return found


def pagerank_of(study: Study, corpus: Corpus) -> Floats | None:
    """float64[n_pages] from the input "rank/pagerank", else computed where the corpus is not too large; else None."""
    if study.pagerank is not None:
        return np.load(study.pagerank.file("column.npy"))[: corpus.n_pages].astype(np.float64)
    links = corpus.artifact.count("links")
    if links is None or links > PAGERANK_LINKS:
        return None
    from craw4llm.scoring.graph import links_of, pagerank

    return pagerank(links_of(corpus), corpus.n_targets, damping=0.85, tolerance=1e-6)[0][: corpus.n_pages]


def relations_table(relations: Mapping[str, analysis.Relation]) -> Table:
    """With a column `remark` where one of them cannot be had."""
    remarks = any(r.why for r in relations.values())
    return tables.table(
        "relations",
        (
            {
                "relation": name,
                "pages": r.pages,
                "spearman": r.rho,
                "interval_low": r.low,
                "interval_high": r.high,
                **({"remark": r.why} if remarks else {}),
            }
            for name, r in relations.items()
        ),
    )


def crawl_pairs_table(found: Sequence[tuple[int, str, Any]]) -> Table:
    return tables.table(
        "crawl_pairs",
        (
            {
                "compared_at": at,
                "measure": measure,
                "policy": pair.a,
                "against": pair.b,
                "verdict": pair.verdict,
                "difference": pair.difference,
                "interval_low": pair.low,
                "interval_high": pair.high,
                "replicates": len(pair.replicates),
                "more_replicates": pair.more,
                "remark": pair.missing,
            }
            for at, measure, pair in found
        ),
    )


def draw_models(
    study: Study,
    found: Mapping[tuple[str, str], Sequence[Comparison]],
    measures: Mapping[str, Measured],
    costs: Mapping[str, tables.Costs],
    lines: Mapping[tuple[str, str, str], analysis.Line],
) -> list[Figure]:
    """Bits per byte of every arm; quality against pages crawled and against fetches, with the lines."""
    made: list[Figure] = []
    pairs = {c.pair.a: c.pair for c in found.get(("bits_per_byte", "all"), ()) if c.pair.b == study.reference}
    rows: list[dict[str, Any]] = []
    for comparison in (*COMPARISONS, ""):
        names = [name for name, arm in study.arms.items() if arm.comparison == comparison]
        if names:
            rows.append({"heading": comparison or WITHOUT})
        names.sort(key=lambda name: (statistics.fmean(study.of_arm(name)) if study.of_arm(name) else math.inf, name))
        for name in names:
            why = "; ".join(dict.fromkeys(study.arms[name].missing.values()))
            rows.append({"arm": name, "label": study.short(name), "values": study.of_arm(name), "pair": pairs.get(name), "missing": why})
    if rows:
        caption = (
            f"Bar: 95% interval of the arm's difference from {study.reference} (diamond, dashed line), drawn around the arm's mean. Green, "
            "filled: better than it at 95%; orange, filled: worse; grey, open: can't tell. "
            if study.reference
            else ""
        )
        drawing = figures.verdict_figure(rows, study.reference)
        made.append(
            Figure("bits_per_byte", "answer", "Held-out bits per byte of every arm", f"{caption}Small ticks: single models.", drawing)
        )
    for metric in ("core_v1", "bits_per_byte"):
        measured = measures.get(metric)
        if measured is None:
            continue
        for by, of_x in (("fetches", "fetches (requests)"), ("pages_crawled", "pages crawled")):
            points: dict[str, list[tuple[str, float, float]]] = {}
            for name, arm in study.arms.items():
                amount, values = getattr(costs[name], by), measured.of_arm(name)
                if arm.policy and amount and values and arm.comparison in (EQUAL_PAGES, OTHER_POOLS):
                    points.setdefault(arm.policy, []).append((name, float(amount), statistics.fmean(values)))
            own = getattr(costs[study.reference], by) if study.reference in costs else None
            if len({x for some in points.values() for _, x, _ in some}) < 2 or not own:
                continue
            target = measured.of_arm(study.reference)
            drawing = figures.pools_figure(
                points,
                {policy: line for (m, b, policy), line in lines.items() if m == metric and b == by},
                statistics.fmean(target) if target else None,
                of_x,
                f"{measured.unit} ({'higher' if measured.higher_is_better else 'lower'} is better)",
                float(own),
                study.reference,
            )
            kind = "request" if by == "fetches" else "page crawled"
            made.append(
                Figure(
                    f"{metric}_by_{by}",
                    "table1",
                    f"Quality per {kind}: {measured.unit} against {of_x}",
                    "One dot an arm; the lines are least squares on the logarithm, where a policy has pools of several sizes. "
                    f"Dotted: {study.reference}. A cross says at what multiple of its amount a policy's line meets it; beyond the dots it "
                    "extrapolates.",
                    drawing,
                )
            )
    return made


def draw_crawls(
    study: Study,
    curves: Sequence[curve_data.Curve],
    scores: curve_data.Scores | None,
    at: Sequence[crawls.Yardstick],
    made: Mapping[str, tuple[str, Table]],
) -> list[Figure]:
    """Curves along the crawl, what each policy needs, the distribution of scores."""
    keep = at[-1].keep if at else None
    fetches = round(statistics.fmean(at[-1].fetches.values())) if at else None
    top = int(scores.top.sum()) if scores is not None else None
    band = " Band: 95% interval of the mean over the sets of seeds." if any(len(by) > 1 for by in study.crawls.values()) else ""
    captions: dict[str, tuple[curve_data.Measure, str, str]] = {
        "score_by_fetches": (
            "mean_score_best",
            "Quality per request",
            f"Mean score of the best {num(keep)} pages of all fetched so far. A line starts where so many scored pages have been fetched. "
            f"Dotted: {num(fetches)} fetches, at which policies are compared.",
        ),
        "score_by_pages_crawled": (
            "mean_score_crawled",
            "Quality per page crawled, as the paper compares",
            "A look-ahead policy has fetched many more pages by then than it has crawled.",
        ),
        "top_tenth_by_fetches": (
            "top_decile_by_fetches",
            "Share of the best tenth fetched",
            f"The {num(top)} pages of the top tenth by score (of the pages that a crawl may fetch): how many of them have been fetched.",
        ),
        "top_tenth_by_pages_crawled": (
            "top_decile_by_pages",
            "Recall: share of the best tenth crawled",
            f"The same {num(top)} pages. Dotted: the ceiling, every page crawled being one of them.",
        ),
        "precision_by_pages_crawled": (
            "precision_by_pages",
            "Precision: share of the pages crawled that are of the best tenth",
            "Dotted: the ceiling once all of the tenth are found.",
        ),
    }
    found: list[Figure] = []
    for name, (measure, title, caption) in captions.items():
        if any(c.measure == measure and len(c.x) for c in curves):
            ceiling = top if measure in ("top_decile_by_pages", "precision_by_pages") else None
            found.append(Figure(name, "crawls", title, caption + band, figures.curve_figure(measure, curves, fetches, ceiling)))
    rows = needs_rows(made["needs"][1])
    if rows:
        caption = (
            f"Until the best {num(keep)} pages of a policy are as good as those that the reference crawls first. Crawled, fetched and "
            "discovered stay apart: a look-ahead policy fetches all that it discovers."
        )
        found.append(
            Figure(
                "needs",
                "crawls",
                "Crawled, fetched and discovered until the reference is matched",
                caption + (" Bars: means over the sets of seeds." if band else ""),
                figures.needs_figure(rows),
            )
        )
    if scores is not None:
        shown: dict[str, Floats] = {"all pages": scores.by_page[scores.open_to_crawls]}
        pages = at[-1].pages if at else None
        for policy, by_replicate in sorted(study.crawls.items()):
            trace = curve_data.read_trace(policy, 0, by_replicate[min(by_replicate)], scores)
            rows_ = trace.in_crawl_order[:pages]
            shown[policy] = trace.score[rows_]
        edges, shares = analysis.histogram(shown)
        caption = "Of all pages that a crawl may fetch, and of those that each policy crawled" + (
            f" among its first {num(pages)}." if pages else "."
        )
        found.append(
            Figure("score_distribution", "links", "Distribution of scores", caption, figures.distribution_figure(edges, shares, "score"))
        )
    return found


def needs_rows(needs: Table) -> list[dict[str, Any]]:
    """Means over replicates at the largest yardstick; None where one of them does not get there."""
    records = needs.records()
    if not records:
        return []
    last = max(int(r["compared_at"]) for r in records if isinstance(r["compared_at"], int))
    found = []
    for policy in dict.fromkeys(str(r["policy"]) for r in records):
        own = [r for r in records if r["policy"] == policy and r["compared_at"] == last]
        row: dict[str, Any] = {"policy": policy}
        for kind, column in (("crawled", "pages_crawled_needed"), ("fetched", "fetches_needed"), ("discovered", "discovered_by_then")):
            values = [float(value) for value in (r[column] for r in own) if isinstance(value, int | float)]
            row[kind] = statistics.fmean(values) if len(values) == len(own) else None
        found.append(row)
    return sorted(found, key=lambda r: (r["fetched"] is None, r["fetched"] or 0, r["policy"]))


def draw_links(relations: Mapping[str, analysis.Relation]) -> list[Figure]:
    """Score and PageRank against in-degree; a page's score against its outlinks'."""
    bars = "Dots: means of bins with about as many pages each; bars: the middle 80% of the pages of a bin."
    found: list[Figure] = []
    if (r := relations.get("score against in-degree")) and r.bins:
        drawing = figures.relation_figure({"": r}, "in-degree + 1 (log scale)", "mean score", log_x=True)
        found.append(
            Figure("score_by_indegree", "links", "Score against in-degree", f"Do links tell quality? {bars} (The paper: -0.11.)", drawing)
        )
    hops = {f"{k}-hop": relations[f"score against {k}-hop outlinks"] for k in (1, 2) if f"score against {k}-hop outlinks" in relations}
    if any(r.bins for r in hops.values()):
        drawing = figures.relation_figure(hops, "mean score of the pages one or two links away", "score of the page")
        found.append(
            Figure(
                "score_by_outlinks",
                "links",
                "A page's score against its outlinks'",
                f"Do good pages link to good pages? {bars} (The paper: 0.61 and 0.60.)",
                drawing,
            )
        )
    if (r := relations.get("PageRank against in-degree")) and r.bins:
        drawing = figures.relation_figure({"": r}, "in-degree + 1 (log scale)", "PageRank (log scale)", log_x=True, log_y=True)
        found.append(Figure("pagerank_by_indegree", "links", "PageRank against in-degree", f"{bars} (The paper: 0.88.)", drawing))
    return found


def draw_decisions(decisions: Table) -> list[Figure]:
    rows = decisions.records()
    if not rows:
        return []
    target = next((t for t in ("core_v1", "bits_per_byte") if any(r["target"] == t for r in rows)), None)
    some = [r for r in rows if r["target"] == target]
    if not some:
        return []
    name = str(target).replace("_", " ")
    return [
        Figure(
            "decisions",
            "sizes",
            "Can a small model decide?",
            f"Share of the pairs of arms that a smaller size ranks as the largest does by {name}.",
            figures.decisions_figure(some),
        )
    ]
