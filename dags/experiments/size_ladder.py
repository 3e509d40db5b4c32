"""Does a small model rank crawl policies as a large one does? Four sizes on the same crawls."""

from craw4llm.configs import CrawlConfig, Policy, ScoreConfig
from craw4llm.experiment import Arms, experiment
from craw4llm.fingerprint import External
from craw4llm.stage import Stage
from training import chain as shared
from training.configs import ReportConfig

LADDER = ("11M", "79M", "154M", "411M")
POLICIES: tuple[Policy, ...] = ("quality", "random", "indegree")


@experiment(
    replicates=1,
    until_replicates=5,
    approve_above_gpu_hours=24.0,
    parts={"corpus": 200, "score": 500, "tokenize": 32},
    tags=("gpu", "scaling"),
    help={
        "corpus": "ClueWeb22-A English as delivered, or another collection",
        "dclm": "DCLM's fastText model",
        "tokenizer": "GPT-NeoX-20B's tokenizer.json",
        "tasks": "folder with the 23 task files (craw4llm tasks fetch)",
        "seeds": "file of seed ids or URLs, one a line; empty: 10,000 pages drawn by hash",
        "pages": "pages crawled and kept per policy",
        "multiple": "tokens trained on, in multiples of 20 a parameter, at every size",
    },
)
def size_ladder(
    replicate: int = 0,
    *,
    corpus: str = "data/clueweb22",
    dclm: str = shared.DCLM_MODEL,
    tokenizer: str = shared.NEOX_TOKENIZER,
    tasks: str = "data/tasks",
    seeds: str = "data/seeds.txt",
    pages: int = shared.PAGES,
    batch_pages: int = shared.BATCH_PAGES,
    multiple: float = 4.0,
) -> Arms:
    """Question: does the ranking of policies by models of 11M to 154M parameters agree with that by 411M?

    Hypothesis: by held-out bits per byte the ranking is the same from 79M on; by task accuracy it is noise below 411M (most tasks are at
    chance). If so, a policy can be judged at a fiftieth of the cost. Source: DCLM (arXiv 2406.11794) finds that rankings of data sets at
    411M and 7B correlate; nothing is published for crawl policies, or below 411M. All sizes train on the same crawls, selections and
    tokens.
    """
    web = shared.published_corpus(corpus)
    scorer = shared.dclm_scorer(dclm)
    seed_file = External(name="seeds", path=seeds) if seeds else None
    arms, reported = {}, {"corpus": web, "scorer": scorer, "scores": Stage(ScoreConfig(), corpus=web, scorer=scorer)}
    first = shared.published_selection(pool="crawled", prefix_pages=pages)
    for policy in POLICIES:
        config = CrawlConfig(policy=policy, budget_pages=pages, batch_pages=batch_pages, seeds=seed_file, seed_count=shared.SEEDS)
        trace = Stage(config, f"{policy}/crawl", corpus=web, **({"scorer": scorer} if policy == "quality" else {}))
        reported[f"crawl/{policy}"] = trace
        kept = Stage(first, corpus=web, crawl=trace)
        for size in LADDER:
            chain = shared.published_chain(web, tokenizer=tokenizer, tasks=tasks, size=size, multiple=multiple)
            arms[f"{policy}/{size}"] = chain.results(kept, replicate)
    return Arms(
        arms=arms,
        reported=reported,
        report=ReportConfig(
            title="Does size change the ranking of crawl policies?",
            question="Does the ranking of policies at 11M to 154M parameters agree with that at 411M?",
            hypothesis="By bits per byte from 79M on; by task accuracy not below 411M.",
            reference="quality/411M",
        ),
    )
