"""Crawl policies of your choice on a corpus of your choice: what the form of the DAG `crawl_arms` declares."""

from typing import Literal, get_args

from craw4llm.configs import (
    KNOWLEDGE,
    NEEDS_RANK,
    NEEDS_SCORER,
    CorpusConfig,
    CrawlConfig,
    Dangling,
    GraphMeasure,
    Policy,
    ScoreConfig,
    ScorerConfig,
    SelectConfig,
    SyntheticText,
    SyntheticWeb,
    TokenizerConfig,
)
from craw4llm.errors import ConfigError
from craw4llm.experiment import Arms, default_of, experiment, help_of
from craw4llm.fingerprint import External
from craw4llm.stage import Stage
from training.chain import Chain, token_budget, tokens_of
from training.configs import NEOX_VOCAB, SIZES, EvaluateConfig, ReportConfig, TrainConfig

COMPARISONS = ("equal_pages", "equal_fetches", "pool_multiple")
MOST = 10**12


@experiment(
    replicates=1,
    until_replicates=20,
    tags=("form",),
    lists={"policies": get_args(Policy), "comparisons": COMPARISONS},
    bounds={
        "synthetic_pages": (100, 10_000_000),
        "heldout_fraction": (0.0, 0.5),
        "budget": (1, MOST),
        "batch_pages": (1, MOST),
        "seed_count": (1, MOST),
        "seed_set": (0, 2**31),
        "keep_pages": (0, MOST),
        "pool_multiple": (2, 100),
        "top_fraction": (1e-6, 1.0),
        "vocab_size": (257, 65_536),
        "token_multiple": (1e-3, 1000.0),
        "batch_tokens": (256, 2**30),
        "learning_rate": (1e-7, 1.0),
        "train_seed": (0, 2**31),
    },
    help={
        "policies": "crawl policies to compare; the first is the reference that the others are compared with. May know the page's text "
        f"before it is ordered (each look costs a fetch): {', '.join(p for p, k in KNOWLEDGE.items() if k == 'target_text')}; the "
        f"whole link graph: {', '.join(p for p, k in KNOWLEDGE.items() if k == 'full_graph')}; the others only what a live crawler has",
        "comparisons": "equal_pages: the first `budget` pages crawled; equal_fetches: the best of as many pages fetched as the first "
        "policy fetched; pool_multiple: the best of `pool_multiple` times the pages crawled",
        "oracle": "also a sample of the best-scored pages of the whole corpus, no crawl",
        "corpus": "a Parquet file (url, text, outlinks), a folder with web.json, another source that `craw4llm` reads, or synthetic",
        "synthetic_pages": "pages of the synthetic web, where the corpus is that",
        "heldout_fraction": help_of(CorpusConfig, "heldout_fraction"),
        "dangling_links": help_of(CorpusConfig, "dangling_links"),
        "scorer": "a fastText model with the label __label__hq; empty: one is trained from scorer_text",
        "scorer_text": "labelled lines to train the scorer from, where none is given; empty with a synthetic corpus: words of that web",
        "budget": "budget of a crawl, in the unit below",
        "budget_unit": "pages: pages crawled; fetches: requests, that is pages whose text was read, and dead links",
        "batch_pages": "pages crawled between two looks at the frontier",
        "seeds": help_of(CrawlConfig, "seeds"),
        "seed_count": "pages to start from, drawn by hash, where no file of seeds is given",
        "seed_set": "another number draws other pages to start from",
        "keep_pages": "pages kept by a selection of the best; 0: as many as `budget`, which must then be in pages",
        "pool_multiple": "for the comparison of that name: pages crawled per page kept",
        "top_fraction": "share of the corpus that the oracle draws from",
        "tokenizer": "a tokenizer.json of at most 50,432 ids; empty: a byte-level BPE is trained on the corpus",
        "vocab_size": "ids of the BPE, where it is trained",
        "size": help_of(TrainConfig, "size") or "size of the model",
        "token_multiple": "tokens trained on, in multiples of 20 a parameter",
        "batch_tokens": "tokens of a training step; a multiple of the context length, 256 for toy and 2,048 for the others",
        "learning_rate": "highest learning rate; it falls to a hundredth of it",
        "train_seed": help_of(TrainConfig, "seed"),
        "tasks": "a folder with the 23 task files; empty: the few self-written items that the project ships",
        "suite": "core-23: bits per byte and the 23 tasks; none: bits per byte alone",
    },
)
def crawl_arms(
    replicate: int = 0,
    *,
    policies: str = "quality,predicted,random,breadth_first",
    comparisons: str = "equal_pages,equal_fetches",
    oracle: bool = True,
    corpus: str = "data/demo-web/web",
    synthetic_pages: int = default_of(SyntheticWeb, "pages"),
    heldout_fraction: float = 0.07,
    dangling_links: Dangling = "outside",
    scorer: str = "",
    scorer_text: str = "data/demo-web/scorer_text.txt",
    budget: int = 400,
    budget_unit: Literal["pages", "fetches"] = "pages",
    batch_pages: int = default_of(CrawlConfig, "batch_pages"),
    seeds: str = "",
    seed_count: int = 20,
    seed_set: int = default_of(CrawlConfig, "seed_set"),
    keep_pages: int = 0,
    pool_multiple: int = 2,
    top_fraction: float = default_of(SelectConfig, "top_fraction"),
    tokenizer: str = "",
    vocab_size: int = 2048,
    size: Literal["toy", "11M", "79M", "154M", "411M"] = "toy",
    token_multiple: float = 0.05,
    batch_tokens: int = 512,
    learning_rate: float = default_of(TrainConfig, "learning_rate"),
    train_seed: int = default_of(TrainConfig, "seed"),
    tasks: str = "",
    suite: Literal["core-23", "none"] = default_of(EvaluateConfig, "suite"),
) -> Arms:
    """Question: which of the chosen crawl policies gives the better language model on this corpus, for the same pages and the same
    requests?

    Hypothesis: none is declared; the values of the form are the experiment. Each set of values is kept as an experiment with a name of its
    own (`craw4llm show`). Source of algorithm and recipe: Craw4LLM, arXiv 2502.13347.
    """
    chosen, wanted = policies.split(","), comparisons.split(",")
    kept_pages = keep_pages or budget
    if budget_unit == "fetches" and not keep_pages:
        raise ConfigError("crawl_arms: keep_pages is 0; expected the number of pages to keep, since the budget is in fetches")
    if budget_unit == "fetches" and "equal_pages" in wanted:
        raise ConfigError("crawl_arms: comparisons has equal_pages; expected equal_fetches alone, or a budget_unit of pages")
    if budget_unit == "fetches" and "pool_multiple" in wanted:
        raise ConfigError("crawl_arms: comparisons has pool_multiple; expected equal_fetches alone, or a budget_unit of pages")
    if SIZES[size].context > batch_tokens or batch_tokens % SIZES[size].context:
        raise ConfigError(f"crawl_arms: batch_tokens is {batch_tokens}; expected a multiple of the context length, {SIZES[size].context}")
    vocabulary = NEOX_VOCAB if tokenizer else vocab_size
    tokens = token_budget(size, token_multiple, vocabulary)
    if tokens < batch_tokens:
        raise ConfigError(
            f"crawl_arms: token_multiple is {token_multiple}: {tokens:,} tokens; expected at least one batch, {batch_tokens:,}"
        )

    synthetic = corpus == "synthetic"
    source = SyntheticWeb(pages=synthetic_pages) if synthetic else External(name="corpus", path=corpus)
    web = Stage(CorpusConfig(source=source, heldout_fraction=heldout_fraction, dangling_links=dangling_links))
    if scorer:
        rater = Stage(ScorerConfig(kind="fasttext", source=External(name="scorer model", path=scorer)))
    else:
        text = SyntheticText() if synthetic else External(name="scorer text", path=scorer_text)
        rater = Stage(ScorerConfig(kind="train_fasttext", source=text, epochs=25))
    scores = Stage(ScoreConfig(), corpus=web, scorer=rater)
    if tokenizer:
        bpe = Stage(TokenizerConfig(source=External(name="tokenizer", path=tokenizer)))
    else:
        bpe = Stage(TokenizerConfig(vocab_size=vocab_size), corpus=web)
    chain = Chain(
        corpus=web,
        tokenizer=bpe,
        heldout=tokens_of(web, bpe, size),
        size=size,
        token_budget=tokens,
        tasks=External(name="tasks", path=tasks) if tasks else None,
        vocab_size=vocabulary,
        batch_tokens=batch_tokens,
        learning_rate=learning_rate,
        precision="fp32" if size == "toy" else "bf16",
        first_seed=train_seed,
        suite=suite,
    )
    longest = budget * (pool_multiple if "pool_multiple" in wanted else 1)

    def crawl(policy: str, **match: Stage) -> Stage:
        knows = {"scorer": rater} if policy in NEEDS_SCORER else {}
        if policy in NEEDS_RANK:
            knows["rank"] = Stage(ScorerConfig(kind=policy, source=GraphMeasure()), f"{policy}/rank", corpus=web)  # type: ignore[arg-type]
        config = CrawlConfig(
            policy=policy,  # type: ignore[arg-type]
            budget_pages=longest if budget_unit == "pages" else None,
            budget_fetches=budget if budget_unit == "fetches" else None,
            match_fetches=bool(match),
            batch_pages=batch_pages,
            seeds=External(name="seeds", path=seeds) if seeds else None,
            seed_count=seed_count,
            seed_set=seed_set,
        )
        return Stage(config, f"{policy}/crawl", corpus=web, **knows, **match)

    first = crawl(chosen[0])
    by_fetches = "equal_fetches" in wanted
    crawls = {policy: first if policy == chosen[0] else crawl(policy, **({"match": first} if by_fetches else {})) for policy in chosen}
    selections = {
        "equal_pages": SelectConfig(pool="crawled", prefix_pages=budget),
        "equal_fetches": SelectConfig(pool="fetched", match_fetches=True, keep="top", keep_pages=kept_pages),
        "pool_multiple": SelectConfig(pool="crawled", prefix_pages=longest, keep="top", keep_pages=kept_pages),
    }
    arms = {}
    for policy, trace in crawls.items():
        for name in wanted:
            inputs = {"corpus": web, "crawl": trace}
            if name != "equal_pages":
                inputs["scorer"] = rater
            if name == "equal_fetches":
                inputs["match"] = first
            arms[f"{policy}/{name}"] = chain.results(Stage(selections[name], **inputs), replicate)
    if oracle:
        best = SelectConfig(pool="corpus", keep="sample_top", keep_pages=kept_pages, top_fraction=top_fraction)
        arms["oracle"] = chain.results(Stage(best, corpus=web, scores=scores), replicate)
    return Arms(
        arms=arms,
        reported={"corpus": web, "scorer": rater, "scores": scores, **{f"crawl/{policy}": trace for policy, trace in crawls.items()}},
        report=ReportConfig(
            title=f"Crawl policies {', '.join(chosen)}",
            question="Which of these crawl policies gives the better language model, for the same pages and the same requests?",
            reference=f"{chosen[0]}/{wanted[0]}",
        ),
    )
