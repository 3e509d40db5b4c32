"""The part of the chain that is alike in every arm of the shipped experiments, as declarations: from a selection to its results.

    chain = published_chain(web="data/clueweb22", pages=900_000_000, size="411M", multiple=4.0)
    chain.results(selection, replicate=0)      # selection -> tokens -> checkpoint -> results

Declarations only: importing this is cheap, and nothing is read.
"""

import dataclasses

from craw4llm.configs import CorpusConfig, Encoder, ScorerConfig, SelectConfig, TokenizeConfig, TokenizerConfig
from craw4llm.errors import ConfigError
from craw4llm.fingerprint import External
from craw4llm.stage import Stage
from training.configs import NEOX_VOCAB, SIZES, EvaluateConfig, TrainConfig

TOKENS_PER_PARAMETER = 20  # Chinchilla's rule, DCLM's `chinchilla-multiplier` 1
FIRST_SEED = 124  # DCLM's

# Sources: Craw4LLM, arXiv 2502.13347, section 4 and appendix A: pages of ClueWeb22-A English; pages crawled, batch and seeds of a crawl.
CLUEWEB22_A_PAGES = 900_000_000
CLUEWEB22_A_TEXT_BYTES = 6_400_000_000_000  # about 1,646 tokens a page at 4.3 bytes a token
CLUEWEB22_A_LINKS = 18_000_000_000  # assumed, 20 a page to pages of the collection: its number was not found
PAGES, BATCH_PAGES, SEEDS = 20_000_000, 10_000, 10_000
DCLM_MODEL = "hf:mlfoundations/fasttext-oh-eli5/openhermes_reddit_eli5_vs_rw_v2_bigram_200k_train.bin"
FINEWEB_EDU_MODEL = "hf:HuggingFaceFW/fineweb-edu-classifier"
NEOX_TOKENIZER = "hf:EleutherAI/gpt-neox-20b/tokenizer.json"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Chain:
    """What all arms share. tasks: the folder of the 23 tasks; None takes the few items that the project ships."""

    corpus: Stage
    tokenizer: Stage
    heldout: Stage
    size: str
    token_budget: int
    tasks: External | None
    vocab_size: int = NEOX_VOCAB
    batch_tokens: int = 512 * 2048
    learning_rate: float = 3e-3
    precision: str = "bf16"
    first_seed: int = FIRST_SEED
    suite: str = "core-23"

    def results(self, selection: Stage, replicate: int) -> Stage:
        """selection -> tokens -> checkpoint -> results, of one training seed."""
        samples = SIZES[self.size].context + 1
        tokens = Stage(TokenizeConfig(sample_tokens=samples), corpus=self.corpus, tokenizer=self.tokenizer, selection=selection)
        model = Stage(
            TrainConfig(
                size=self.size,
                vocab_size=self.vocab_size,
                token_budget=self.token_budget,
                batch_tokens=self.batch_tokens,
                learning_rate=self.learning_rate,
                final_learning_rate=self.learning_rate / 100,
                precision=self.precision,  # type: ignore[arg-type]
                seed=self.first_seed + replicate,
            ),
            tokens=tokens,
            heldout=self.heldout,
        )
        config = EvaluateConfig(tasks=self.tasks, suite=self.suite)  # type: ignore[arg-type]
        return Stage(config, checkpoint=model, tokenizer=self.tokenizer, heldout=self.heldout)


def token_budget(size: str, multiple: float, vocab_size: int = NEOX_VOCAB) -> int:
    """`multiple` times 20 tokens a parameter: 32,929,300,480 for 411M and 4."""
    if size not in SIZES:
        raise ConfigError(f"size is {size!r}; expected {', '.join(SIZES)}")
    if multiple <= 0:
        raise ConfigError(f"multiple is {multiple}; expected a number above 0")
    shape = SIZES[size]
    counted = shape.parameters(vocab_size) - 2 * shape.d_model * shape.n_layers  # DCLM leaves the gains of the QK-norm out
    return int(multiple * TOKENS_PER_PARAMETER * counted)


def tokens_of(corpus: Stage, tokenizer: Stage, size: str) -> Stage:
    """The held-out pages as tokens of a model's context length."""
    config = TokenizeConfig(pages="heldout", sample_tokens=SIZES[size].context + 1, last_sample="pad")
    return Stage(config, "heldout", corpus=corpus, tokenizer=tokenizer)


def published_corpus(path: str) -> Stage:
    """ClueWeb22-A English, or another large collection; held out: one page in 10,000."""
    source = External(
        name="corpus",
        path=path,
        stated=(
            ("pages", CLUEWEB22_A_PAGES, "pages"),
            ("text_bytes", CLUEWEB22_A_TEXT_BYTES, "bytes"),
            ("links", CLUEWEB22_A_LINKS, "links"),
        ),
    )
    return Stage(CorpusConfig(source=source, heldout_fraction=1e-4, dangling_links="outside"))


def published_chain(corpus: Stage, *, tokenizer: str, tasks: str, size: str, multiple: float) -> Chain:
    """The recipe of the paper (411M, four times Chinchilla's tokens) at any size and multiple."""
    neox = Stage(TokenizerConfig(source=External(name="tokenizer", path=tokenizer)))
    return Chain(
        corpus=corpus,
        tokenizer=neox,
        heldout=tokens_of(corpus, neox, size),
        size=size,
        token_budget=token_budget(size, multiple),
        tasks=External(name="tasks", path=tasks) if tasks else None,
    )


def dclm_scorer(model: str) -> Stage:
    """DCLM's fastText classifier, on the fast route that is within 1e-6 of the library."""
    return Stage(ScorerConfig(kind="fasttext", source=External(name="DCLM scorer", path=model), route="projected"), "scorer_dclm")


def fineweb_edu_scorer(model: str) -> Stage:
    """FineWeb-Edu's classifier: a sentence encoder with a regression head."""
    return Stage(ScorerConfig(kind="encoder", source=Encoder(model=External(name="FineWeb-Edu scorer", path=model))), "scorer_fineweb_edu")


def published_selection(**fields: object) -> SelectConfig:
    """The paper keeps copies; looking for them among 20 million pages would take 120 GB of memory."""
    return SelectConfig(**{"exact_duplicates": "off", "near_duplicates": "off", **fields})  # type: ignore[arg-type]
