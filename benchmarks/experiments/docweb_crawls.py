"""Every crawl policy on 30,145 real pages, from five sets of seeds: no model, only what each policy finds."""

from craw4llm.configs import (
    NEEDS_RANK,
    NEEDS_SCORER,
    CorpusConfig,
    CrawlConfig,
    Dangling,
    GraphMeasure,
    Policy,
    ScoreConfig,
    ScorerConfig,
)
from craw4llm.experiment import Arms, experiment
from craw4llm.fingerprint import External
from craw4llm.stage import Stage
from training.configs import ReportConfig

POLICIES: tuple[Policy, ...] = (
    "quality", "predicted", "parent_mean", "parent_max", "parent_first", "parent_min", "seen_indegree", "breadth_first", "random",
    "indegree", "pagerank", "harmonic",
)  # fmt: skip


@experiment(
    replicates=5,
    tags=("docweb", "cpu"),
    help={
        "corpus": "docweb.parquet (url, text, outlinks)",
        "scorer": "a fastText model",
        "pages": "pages that `quality` crawls, a quarter and a half of it are compared too; the other policies make as many fetches",
        "seed_sets": "number of the first set of seeds; replicate k takes set seed_sets + k",
        "dangling_links": "outside: links that leave the collection are not followed; dead: each costs a fetch",
    },
)
def docweb_crawls(
    replicate: int = 0,
    *,
    corpus: str = "data/docweb.parquet",
    scorer: str = "data/docweb_hq.ftz",
    dangling_links: Dangling = "outside",
    pages: int = 6000,
    batch_pages: int = 150,
    seed_count: int = 50,
    seed_sets: int = 10,
) -> Arms:
    """Question: which policy finds the better pages for the same pages crawled, and which for the same number of requests?

    Hypothesis: at equal pages crawled `quality` is far ahead (Craw4LLM, arXiv 2502.13347, Figure 4); at equal fetches a policy that
    estimates a page before fetching it and selects afterwards (`predicted`) is at least as good. A replicate is another set of seeds.
    """
    web = Stage(CorpusConfig(source=External(name="corpus", path=corpus), heldout_fraction=0, dangling_links=dangling_links))
    rater = Stage(ScorerConfig(kind="fasttext", source=External(name="scorer model", path=scorer), route="projected"))
    scores = Stage(ScoreConfig(), corpus=web, scorer=rater)
    ranks = {policy: Stage(ScorerConfig(kind=policy, source=GraphMeasure()), policy, corpus=web) for policy in ("pagerank", "harmonic")}

    def crawl(policy: Policy, **match: Stage) -> Stage:
        config = CrawlConfig(
            policy=policy,
            budget_pages=pages,
            match_fetches=bool(match),
            batch_pages=batch_pages,
            seed_count=seed_count,
            seed_set=seed_sets + replicate,
            rng_seed=replicate,
        )
        knows = {"scorer": rater} if policy in NEEDS_SCORER else {}
        if policy in NEEDS_RANK:
            knows["rank"] = ranks[policy]
        return Stage(config, f"{policy}/crawl_s{seed_sets + replicate}", corpus=web, **knows, **match)

    quality = crawl("quality")
    crawls = {policy: quality if policy == "quality" else crawl(policy, match=quality) for policy in POLICIES}
    return Arms(
        arms={},
        reported={
            "corpus": web,
            "scorer": rater,
            "scores": scores,
            "rank/pagerank": ranks["pagerank"],
            **{f"crawl/{policy}": trace for policy, trace in crawls.items()},
        },
        report=ReportConfig(
            title="docweb: every crawl policy, five sets of seeds",
            question="Which crawl policy finds the better pages, for the same pages crawled and for the same number of requests?",
            hypothesis="At equal pages crawled quality (the paper's policy) is far ahead; at equal fetches predicted, which estimates a "
            "page before fetching it and selects afterwards, is at least as good (Craw4LLM, arXiv 2502.13347, compares equal pages only).",
            reference="quality",
            at_pages=(pages // 4, pages // 2, pages),
        ),
    )
