"""Crawl policies at equal fetches: mean score of the best N of what each fetched, at the number of fetches that `quality` needs to crawl N.

    python benchmarks/policies.py                docweb (../shared/corpus), five seed sets, both scorers, links that lead out not followed
    python benchmarks/policies.py --links dead   the same, links that lead out being dead links that cost a fetch
    python benchmarks/policies.py --synthetic    a synthetic web of 40,000 pages with planted quality, scored by its own fastText model
    python benchmarks/policies.py --quick        two seed sets, one scorer (--synthetic: of 10,000 pages)

N is 5, 10 and 20% of the pages; 50 seeds a set, drawn by hash; batches of 150. The seed sets (10 to 14) are not those that the policy
`predicted` was made with (0 to 2). The intervals are 95% t intervals over the seed sets, of paired differences `predicted` - other, the
scorers averaged within each set. On the synthetic web `predicted` runs a second time, as `predicted+links`, where the links have anchor
texts and say where they stand. Last line: JSON with the mean differences to `quality` and to the best parent-only policy, by N.
"""

import argparse
import json
import math
import os
import statistics
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from craw4llm.artifact import Artifact, Store
from craw4llm.configs import (
    NEEDS_RANK,
    CorpusConfig,
    CrawlConfig,
    GraphMeasure,
    Policy,
    ScorerConfig,
    SyntheticText,
    SyntheticWeb,
)
from craw4llm.crawl.trace import Trace
from craw4llm.execution import Execution
from craw4llm.externals import ExternalDigests
from craw4llm.fingerprint import External
from craw4llm.stage import Planner, Stage, implementation

SHARED = Path(os.environ.get("CRAW4LLM_SHARED", Path(__file__).resolve().parents[2] / "shared"))
SHARES = (0.05, 0.1, 0.2)
PARENTS: tuple[Policy, ...] = ("parent_mean", "parent_max", "parent_first", "parent_min")
POLICIES: tuple[Policy, ...] = ("predicted", *PARENTS, "seen_indegree", "breadth_first", "random", "indegree", "pagerank")
T_95 = {1: 12.706, 2: 4.303, 3: 3.182, 4: 2.776}  # Student's t, two-sided, by degrees of freedom


def builder(root: Path) -> Callable[[Stage], Artifact]:
    execution = Execution(root=root, report=lambda line: None)
    store, planner = Store(root), Planner(ExternalDigests(root / "externals.json"))

    def build(stage: Stage) -> Artifact:
        inputs = {name: build(one) for name, one in stage.inputs.items()}
        module = implementation(stage.config.stage)
        return store.build(
            stage.config.stage,
            planner.fingerprint(stage),
            version=stage.config.version,
            config=planner.config_record(stage),
            inputs=inputs,
            write=lambda out: module.run(stage.config, inputs, out, execution),
        )[0]

    return build


def best(trace: Trace, fetches: int, keep: int) -> float:
    """Mean score of the best `keep` pages among the first `fetches` fetches; all of them where the crawl ran dry before."""
    scores = trace.prefix(fetches=min(fetches, trace.n_fetches)).fetched_scores
    assert scores is not None
    found = np.sort(scores[~np.isnan(scores)])[::-1][:keep]
    assert len(found) == keep, "fewer pages fetched than are to be kept"
    return float(np.mean(found, dtype=np.float64))


def worlds(options: argparse.Namespace) -> tuple[Stage, dict[str, Stage]]:
    if options.synthetic:
        return synthetic_web(options, link_texts=False), {
            "synthetic": Stage(ScorerConfig(kind="train_fasttext", source=SyntheticText(), route="projected"))
        }
    source = External(name="corpus", path=str(SHARED / "corpus/docweb.parquet"))
    web = Stage(CorpusConfig(source=source, heldout_fraction=0, dangling_links=options.links))
    table = External(name="scores", path=str(SHARED / "corpus/docweb_scores.parquet"))
    scorers = {"docweb_hq": "score", "docweb_hq_nc": "score_nc"}
    chosen = dict(list(scorers.items())[: 1 if options.quick else 2])
    return web, {name: Stage(ScorerConfig(kind="table", source=table, column=column)) for name, column in chosen.items()}


def synthetic_web(options: argparse.Namespace, *, link_texts: bool) -> Stage:
    pages = 10_000 if options.quick else 40_000
    source = SyntheticWeb(pages=pages, hosts=pages // 100, homophily=options.homophily, seed=7, link_texts=link_texts)
    return Stage(CorpusConfig(source=source, heldout_fraction=0, dangling_links=options.links))


def measure(
    build: Callable[[Stage], Artifact], web: Stage, scorer: Stage, seed_set: int, with_links: Stage | None
) -> dict[tuple[str, float], tuple[float, int]]:
    """(policy, share of the pages) -> (mean score of the best N, fetches)."""
    n_pages = int(build(web).count("pages"))
    common: dict[str, Any] = {"batch_pages": 150, "seed_set": seed_set}
    largest = CrawlConfig(policy="quality", budget_pages=round(n_pages * SHARES[-1]), **common)
    quality = Stage(largest, corpus=web, scorer=scorer)
    reference = Trace(build(quality))
    results: dict[tuple[str, float], tuple[float, int]] = {}
    for policy in ("quality", *POLICIES, *(["predicted+links"] if with_links else [])):
        if policy == "quality":
            trace = reference
        elif policy == "predicted+links":  # the same web, so the same page ids
            config = CrawlConfig(policy="predicted", budget_fetches=reference.n_fetches, **common)
            trace = Trace(build(Stage(config, corpus=with_links, scorer=scorer)))
        else:
            rank = {"rank": Stage(ScorerConfig(kind="pagerank", source=GraphMeasure()), corpus=web)} if policy in NEEDS_RANK else {}
            config = CrawlConfig(policy=policy, match_fetches=True, **common)
            trace = Trace(build(Stage(config, corpus=web, scorer=scorer, match=quality, **rank)))
        for share in SHARES:
            keep = round(n_pages * share)
            fetches = reference.prefix(pages=keep).fetches
            results[policy, share] = best(trace, fetches, keep), min(fetches, trace.n_fetches)
    return results


def interval(values: list[float]) -> tuple[float, float]:
    """Mean and half-width of its 95% t interval."""
    return statistics.mean(values), T_95[len(values) - 1] * statistics.stdev(values) / math.sqrt(len(values))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--synthetic", action="store_true")
    parser.add_argument("--links", choices=("outside", "dead"), default="outside", help="links that lead out of the collection")
    parser.add_argument("--homophily", type=float, default=0.7, help="of the synthetic web: share of links that prefer like quality")
    parser.add_argument("--root", type=Path, help="artifact root to keep (default: a temporary one)")
    options = parser.parse_args()
    seed_sets = range(10, 12 if options.quick else 15)
    web, scorers = worlds(options)
    with tempfile.TemporaryDirectory() as temporary:
        build = builder(options.root or Path(temporary))
        with_links = synthetic_web(options, link_texts=True) if options.synthetic else None
        found = {name: [measure(build, web, scorer, seeds, with_links) for seeds in seed_sets] for name, scorer in scorers.items()}
    others: tuple[str, ...] = (*POLICIES[1:], *(["predicted+links"] if options.synthetic else []))
    print(f"links that lead out: {options.links}; {len(seed_sets)} seed sets; mean score of the best N of the pages fetched")
    print("policy         " + "".join(f"{name:>17} {share:4.0%}" for name in found for share in SHARES))
    for policy in ("quality", "predicted", *others):
        cells = [f"{statistics.mean(one[policy, share][0] for one in found[name]):22.4f}" for name in found for share in SHARES]
        print(f"{policy:15}" + "".join(cells))
    cells = [f"{statistics.mean(one['quality', share][1] for one in found[name]):22,.0f}" for name in found for share in SHARES]
    print(f"{'fetches':15}" + "".join(cells))
    print("\npredicted - other, 95% intervals over the seed sets, scorers averaged" + "".join(f"{share:>18.0%}" for share in SHARES))
    differences: dict[tuple[str, float], tuple[float, float]] = {}
    for policy in ("quality", *others):
        for share in SHARES:
            by_set = [
                statistics.mean(found[name][k]["predicted", share][0] - found[name][k][policy, share][0] for name in found)
                for k in range(len(seed_sets))
            ]
            differences[policy, share] = interval(by_set)
        cells = ["{:+10.4f} ± {:.4f}".format(*differences[policy, share]) for share in SHARES]
        print(f"{policy:69}" + "".join(f"{cell:>18}" for cell in cells))
    summary = {}
    for share in SHARES:
        summary[f"minus_quality_{share * 100:.0f}"] = round(differences["quality", share][0], 4)
        summary[f"minus_best_parent_{share * 100:.0f}"] = round(min(differences[p, share][0] for p in PARENTS), 4)
    print(json.dumps(summary))


if __name__ == "__main__":
    main()
