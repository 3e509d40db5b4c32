"""Policies that a live crawler could follow, against the paper's, for the same number of requests."""

from craw4llm.configs import NEEDS_SCORER, CrawlConfig, Policy, ScoreConfig
from craw4llm.experiment import Arms, experiment
from craw4llm.fingerprint import External
from craw4llm.stage import Stage
from training import chain as shared
from training.configs import ReportConfig

LIVE: tuple[Policy, ...] = ("predicted", "parent_mean", "parent_max", "parent_min", "parent_first", "breadth_first")


@experiment(
    replicates=1,
    until_replicates=3,
    approve_above_gpu_hours=24.0,
    parts={"corpus": 200, "score": 500, "tokenize": 32},
    tags=("gpu", "requests"),
    help={
        "corpus": "ClueWeb22-A English as delivered, or another collection",
        "dclm": "DCLM's fastText model",
        "tokenizer": "GPT-NeoX-20B's tokenizer.json",
        "tasks": "folder with the 23 task files (craw4llm tasks fetch)",
        "seeds": "file of seed ids or URLs, one a line; empty: 10,000 pages drawn by hash",
        "pages": "pages that quality crawls, and pages kept of what each policy fetches",
        "size": "size of the model",
        "multiple": "tokens trained on, in multiples of 20 a parameter",
    },
)
def live_feasible(
    replicate: int = 0,
    *,
    corpus: str = "data/clueweb22",
    dclm: str = shared.DCLM_MODEL,
    tokenizer: str = shared.NEOX_TOKENIZER,
    tasks: str = "data/tasks",
    seeds: str = "data/seeds.txt",
    pages: int = shared.PAGES,
    batch_pages: int = shared.BATCH_PAGES,
    size: str = "411M",
    multiple: float = 4.0,
) -> Arms:
    """Question: what does looking at every page before it is ordered buy, where each look costs a request?

    Hypothesis: nothing. `quality` reads each page to order it; a policy that decides before the fetch may spend the same requests on pages,
    and select the best of them afterwards. On 30,145 real pages `predicted` and `parent_mean` kept better pages than `quality` at equal
    fetches (docs/results.md). Expected here: `predicted` at least equals `quality`; `breadth_first` stays behind both. Source of the
    baseline: Craw4LLM, arXiv 2502.13347: 20M pages crawled, 46M visited, so its own 1x is 2.3 requests a page.
    """
    web = shared.published_corpus(corpus)
    scorer = shared.dclm_scorer(dclm)
    chain = shared.published_chain(web, tokenizer=tokenizer, tasks=tasks, size=size, multiple=multiple)
    seed_file = External(name="seeds", path=seeds) if seeds else None

    def crawl(policy: Policy, **match: Stage) -> Stage:
        budget = {"match_fetches": True} if match else {"budget_pages": pages}
        config = CrawlConfig(policy=policy, batch_pages=batch_pages, seeds=seed_file, seed_count=shared.SEEDS, **budget)  # type: ignore[arg-type]
        knows = {"scorer": scorer} if policy in NEEDS_SCORER else {}
        return Stage(config, f"{policy}/crawl", corpus=web, **knows, **match)

    quality = crawl("quality")
    best_of_fetched = shared.published_selection(pool="fetched", match_fetches=True, keep="top", keep_pages=pages)
    arms, reported = {}, {"corpus": web, "scorer": scorer, "scores": Stage(ScoreConfig(), corpus=web, scorer=scorer)}
    first = Stage(shared.published_selection(pool="crawled", prefix_pages=pages), corpus=web, crawl=quality)
    arms["quality/equal_pages"] = chain.results(first, replicate)
    for policy in ("quality", *LIVE):
        trace = quality if policy == "quality" else crawl(policy, match=quality)  # type: ignore[arg-type]
        reported[f"crawl/{policy}"] = trace
        kept = Stage(best_of_fetched, corpus=web, scorer=scorer, crawl=trace, match=quality)
        arms[f"{policy}/equal_fetches"] = chain.results(kept, replicate)
    return Arms(
        arms=arms,
        reported=reported,
        report=ReportConfig(
            title="Live policies against look-ahead at equal requests",
            question="Which policy gives the better language model for the same number of requests?",
            hypothesis="Policies that decide before the fetch and select afterwards equal or beat quality at equal fetches.",
            reference="quality/equal_fetches",
        ),
    )
