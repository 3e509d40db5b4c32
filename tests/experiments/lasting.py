"""One arm whose training lasts: for tests that kill what runs it."""

from craw4llm.configs import (
    CorpusConfig,
    CrawlConfig,
    ScoreConfig,
    ScorerConfig,
    SelectConfig,
    SyntheticText,
    SyntheticWeb,
    TokenizerConfig,
)
from craw4llm.experiment import Arms, experiment
from craw4llm.stage import Stage
from training.chain import Chain, tokens_of
from training.configs import ReportConfig


@experiment(schedule="0 4 * * 1", until_replicates=3, tags=("test",), help={"train_tokens": "tokens trained on"})
def lasting(replicate: int = 0, *, train_tokens: int = 40_960) -> Arms:
    """Does a long training survive?"""
    web = Stage(CorpusConfig(source=SyntheticWeb(pages=400, hosts=10), heldout_fraction=0.05))
    bpe = Stage(TokenizerConfig(vocab_size=512), corpus=web)
    trace = Stage(CrawlConfig(policy="random", budget_pages=40, batch_pages=10, seed_count=5), "random/crawl", corpus=web)
    rater = Stage(ScorerConfig(kind="train_fasttext", source=SyntheticText(lines=400)))
    chain = Chain(
        corpus=web, tokenizer=bpe, heldout=tokens_of(web, bpe, "toy"), size="toy", token_budget=train_tokens, tasks=None, vocab_size=512,
        batch_tokens=512, precision="fp32", suite="none",
    )  # fmt: skip
    arms = {"random": chain.results(Stage(SelectConfig(pool="crawled"), corpus=web, crawl=trace), replicate)}
    reported = {"corpus": web, "scorer": rater, "scores": Stage(ScoreConfig(), corpus=web, scorer=rater), "crawl/random": trace}
    return Arms(arms=arms, reported=reported, report=ReportConfig(title="lasting", question="Does it survive?", reference="random"))
