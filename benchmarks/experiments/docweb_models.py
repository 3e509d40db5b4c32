"""Small language models from 1,500 real pages of each crawl policy, with pools of one, two and four times as many pages."""

from craw4llm.configs import (
    NEEDS_SCORER,
    CorpusConfig,
    CrawlConfig,
    Dangling,
    Policy,
    ScoreConfig,
    ScorerConfig,
    SelectConfig,
    TokenizeConfig,
    TokenizerConfig,
)
from craw4llm.experiment import Arms, experiment
from craw4llm.fingerprint import External
from craw4llm.stage import Stage
from training.configs import SIZES, EvaluateConfig, ReportConfig, TrainConfig

BASELINES: tuple[Policy, ...] = ("random", "indegree")


@experiment(
    replicates=3,
    tags=("docweb", "cpu"),
    help={
        "corpus": "docweb.parquet (url, text, outlinks)",
        "scorer": "a fastText model",
        "pages": "pages kept per arm; the baselines crawl up to four times as many",
        "train_tokens": "tokens that each model of size 2M is trained on",
        "dangling_links": "outside: links that leave the collection are not followed; dead: each costs a fetch",
    },
)
def docweb_models(
    replicate: int = 0,
    *,
    corpus: str = "data/docweb.parquet",
    scorer: str = "data/docweb_hq.ftz",
    dangling_links: Dangling = "outside",
    pages: int = 1500,
    batch_pages: int = 75,
    seed_count: int = 50,
    seed_set: int = 10,
    train_tokens: int = 262_144,
) -> Arms:
    """Question: which crawl policy gives the better small language model from the same number of training tokens?

    Hypothesis: `quality` at 1x beats random and indegree at 1x and 2x and comes close to the oracle (Craw4LLM, arXiv 2502.13347, Table 1;
    there by Core at 411M parameters). Here by bits per byte of held-out pages, over all of them and over the tenth with the highest
    scores: a model trained on one kind of page may well lose on all kinds. The size `toy` is trained on the same tokens, to see whether
    it ranks the arms alike.
    """
    web = Stage(CorpusConfig(source=External(name="corpus", path=corpus), heldout_fraction=0.04, dangling_links=dangling_links))
    rater = Stage(ScorerConfig(kind="fasttext", source=External(name="scorer model", path=scorer), route="projected"))
    scores = Stage(ScoreConfig(), corpus=web, scorer=rater)
    bpe = Stage(TokenizerConfig(vocab_size=4096, train_bytes=8_000_000), corpus=web)
    sample_tokens = SIZES["2M"].context + 1
    heldout = Stage(
        TokenizeConfig(pages="heldout", sample_tokens=sample_tokens, last_sample="pad", max_page_chars=800),
        "heldout",
        corpus=web,
        tokenizer=bpe,
    )

    def crawl(policy: Policy, budget_pages: int, **match: Stage) -> Stage:
        config = CrawlConfig(
            policy=policy,
            budget_pages=budget_pages,
            match_fetches=bool(match),
            batch_pages=batch_pages,
            seed_count=seed_count,
            seed_set=seed_set,
        )
        return Stage(config, f"{policy}/crawl", corpus=web, **({"scorer": rater} if policy in NEEDS_SCORER else {}), **match)

    def results(arm: str, selection: Stage, size: str) -> Stage:
        samples = Stage(TokenizeConfig(sample_tokens=sample_tokens), f"{arm}/tokenize", corpus=web, tokenizer=bpe, selection=selection)
        config = TrainConfig(
            size=size,
            vocab_size=4096,
            token_budget=train_tokens,
            batch_tokens=4 * SIZES[size].context,
            learning_rate=4e-3,
            final_learning_rate=4e-5,
            precision="fp32",
            validation_tokens=32_768,
            seed=124 + replicate,
        )
        model = Stage(config, tokens=samples, heldout=heldout)
        return Stage(EvaluateConfig(suite="none"), checkpoint=model, tokenizer=bpe, heldout=heldout)

    quality = crawl("quality", pages)
    predicted = crawl("predicted", pages, match=quality)
    longest = {policy: crawl(policy, 4 * pages, match=quality) for policy in BASELINES}
    selections = {"quality/1x": Stage(SelectConfig(pool="crawled", prefix_pages=pages), "quality/1x/select", corpus=web, crawl=quality)}
    for policy, trace in longest.items():
        selections[f"{policy}/1x"] = Stage(SelectConfig(pool="crawled", prefix_pages=pages), f"{policy}/1x/select", corpus=web, crawl=trace)
        for multiple in (2, 4):
            best = SelectConfig(pool="crawled", prefix_pages=multiple * pages, keep="top", keep_pages=pages)
            selections[f"{policy}/{multiple}x"] = Stage(best, f"{policy}/{multiple}x/select", corpus=web, scorer=rater, crawl=trace)
    fetched = SelectConfig(pool="fetched", match_fetches=True, keep="top", keep_pages=pages)
    selections["predicted/equal_fetches"] = Stage(
        fetched, "predicted/equal_fetches/select", corpus=web, scorer=rater, crawl=predicted, match=quality
    )
    oracle = SelectConfig(pool="corpus", keep="sample_top", keep_pages=pages)
    selections["oracle"] = Stage(oracle, "oracle/select", corpus=web, scores=scores)
    arms = {arm: results(arm, selection, "2M") for arm, selection in selections.items()}
    arms |= {f"toy/{arm.replace('/', '-')}": results(arm, selection, "toy") for arm, selection in selections.items()}
    return Arms(
        arms=arms,
        reported={
            "corpus": web,
            "scorer": rater,
            "scores": scores,
            **{f"crawl/{policy}": trace for policy, trace in {"quality": quality, "predicted": predicted, **longest}.items()},
        },
        report=ReportConfig(
            title="docweb: models of two million parameters from four crawl policies",
            question="Which crawl policy gives the better small language model from the same number of training tokens?",
            hypothesis="quality at 1x beats random and indegree at 1x and 2x and comes close to the oracle (Craw4LLM, arXiv 2502.13347, "
            "Table 1, there by Core at 411M parameters).",
            reference="quality/1x",
        ),
    )
