"""The chain at its smallest: two policies and the oracle on a synthetic web, one replicate. For tests of the machinery."""

from craw4llm.configs import (
    CorpusConfig,
    CrawlConfig,
    ScoreConfig,
    ScorerConfig,
    SelectConfig,
    SyntheticText,
    SyntheticWeb,
    TokenizeConfig,
    TokenizerConfig,
)
from craw4llm.experiment import Arms, experiment
from craw4llm.stage import Stage
from training.configs import SIZES, EvaluateConfig, ReportConfig, TrainConfig


@experiment(replicates=1, tags=("test",), help={"pages": "pages crawled per policy"})
def mini(replicate: int = 0, *, pages: int = 60, web_pages: int = 600, train_tokens: int = 40_000) -> Arms:
    """Does every stage run?"""
    web = Stage(CorpusConfig(source=SyntheticWeb(pages=web_pages, hosts=20), heldout_fraction=0.05))
    rater = Stage(ScorerConfig(kind="train_fasttext", source=SyntheticText(lines=400)))
    scores = Stage(ScoreConfig(), corpus=web, scorer=rater)
    bpe = Stage(TokenizerConfig(vocab_size=512), corpus=web)
    sample_tokens = SIZES["toy"].context + 1
    heldout = Stage(TokenizeConfig(pages="heldout", sample_tokens=sample_tokens, last_sample="pad"), "heldout", corpus=web, tokenizer=bpe)

    def results(selection: Stage) -> Stage:
        tokens = Stage(TokenizeConfig(sample_tokens=sample_tokens), corpus=web, tokenizer=bpe, selection=selection)
        config = TrainConfig(
            size="toy",
            vocab_size=512,
            token_budget=train_tokens,
            batch_tokens=8 * SIZES["toy"].context,
            precision="fp32",
            seed=124 + replicate,
        )
        model = Stage(config, tokens=tokens, heldout=heldout)
        return Stage(EvaluateConfig(), checkpoint=model, tokenizer=bpe, heldout=heldout)

    quality = Stage(
        CrawlConfig(policy="quality", budget_pages=pages, batch_pages=10, seed_count=5), "quality/crawl", corpus=web, scorer=rater
    )
    random = Stage(
        CrawlConfig(policy="random", budget_pages=pages, match_fetches=True, batch_pages=10, seed_count=5),
        "random/crawl",
        corpus=web,
        match=quality,
    )
    best = SelectConfig(pool="fetched", match_fetches=True, keep="top", keep_pages=pages)
    return Arms(
        report=ReportConfig(title="mini", question="Does every stage run?", reference="quality/equal_pages"),
        reported={"corpus": web, "scorer": rater, "scores": scores, "crawl/quality": quality, "crawl/random": random},
        arms={
            "quality/equal_pages": results(Stage(SelectConfig(pool="crawled", prefix_pages=pages), corpus=web, crawl=quality)),
            "random/equal_fetches": results(Stage(best, corpus=web, scorer=rater, crawl=random, match=quality)),
            "oracle": results(Stage(SelectConfig(pool="corpus", keep="sample_top", keep_pages=30), corpus=web, scores=scores)),
        },
    )
