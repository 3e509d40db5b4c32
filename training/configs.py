"""The configs of training, evaluation and the report. Frozen dataclasses only: importing this is cheap (no torch).

tokens -> checkpoint -> results -> report
"""

import dataclasses
import math
from typing import ClassVar, Literal

from craw4llm.errors import ConfigError
from craw4llm.fingerprint import External
from craw4llm.stage import Config

Precision = Literal["fp32", "tf32", "bf16"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Shape:
    """Shape of the decoder: width, layers, heads, hidden width of the SwiGLU, context length in tokens."""

    d_model: int
    n_layers: int
    n_heads: int
    d_hidden: int
    context: int = 2048

    def __post_init__(self) -> None:
        if self.d_model % self.n_heads or (self.d_model // self.n_heads) % 2:
            raise ConfigError(f"d_model is {self.d_model} with {self.n_heads} heads; expected an even width per head (rotary pairs)")

    def parameters(self, vocab_size: int) -> int:
        """Trainable parameters: untied embedding and head, four attention projections, SwiGLU, gain-only norms, QK-norm gains."""
        layer = 4 * self.d_model**2 + 3 * self.d_model * self.d_hidden + 4 * self.d_model
        return 2 * vocab_size * self.d_model + self.n_layers * layer + self.d_model

    def flops_per_token(self, vocab_size: int) -> float:
        """Training FLOPs a token, forward and backward: 6 x matrix parameters (embedding left out) + 12 x layers x width x context."""
        layer = 4 * self.d_model**2 + 3 * self.d_model * self.d_hidden
        matmul = self.n_layers * layer + vocab_size * self.d_model
        return 6.0 * matmul + 12.0 * self.n_layers * self.d_model * self.context


def swiglu_hidden(d_model: int) -> int:
    """open_lm's rule: 8/3 of the width, rounded up to a multiple of 256 (2,816 at 1,024)."""
    return 256 * math.ceil(int(8 * d_model / 3) / 256)


def _open_lm(d_model: int, n_layers: int, n_heads: int) -> Shape:
    return Shape(d_model=d_model, n_layers=n_layers, n_heads=n_heads, d_hidden=swiglu_hidden(d_model))


# open_lm model configs 11m_v2, 79m_v2, 154m_v2 and d=1024_l=24_h=8 (DCLM's 411m_1x). `toy` is ours, for CPUs: of the shapes tried on
# 600,000 tokens (vocabulary 2,048, batches of 2 sequences) none reached a lower held-out loss in the same time of one core: four layers
# reach the same in 1.6 times the time, widths of 96 and 128 are behind.
SIZES: dict[str, Shape] = {
    "toy": Shape(d_model=64, n_layers=2, n_heads=2, d_hidden=192, context=256),
    "2M": Shape(d_model=128, n_layers=4, n_heads=4, d_hidden=384, context=256),  # 1.9M parameters with a vocabulary of 4,096
    "11M": _open_lm(96, 8, 4),
    "79M": _open_lm(512, 8, 4),
    "154M": _open_lm(576, 24, 8),
    "411M": _open_lm(1024, 24, 8),
}
NEOX_VOCAB = 50_432  # GPT-NeoX-20B's 50,277 ids padded to a multiple of 128


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainConfig(Config):
    """tokens, heldout -> checkpoint.

    token_budget: tokens that the model is trained on; fewer unique tokens are repeated in further epochs, which the manifest says.
    vocab_size: rows of embedding and head; at least the tokenizer's.
    seed: of initialisation and of the order of the samples.
    warmup_steps: linear, at most a tenth of all steps (a stated rule for small budgets; the paper's 2,000 steps are 6.4% of its run).
    validation_tokens: the held-out loss at the end is over the first so many held-out tokens (the evaluation reads them all).
    """

    stage: ClassVar[str] = "train"
    inputs: ClassVar[tuple[str, ...]] = ("tokens", "heldout")
    size: str = "411M"
    vocab_size: int = NEOX_VOCAB
    token_budget: int
    batch_tokens: int = 512 * 2048
    learning_rate: float = 3e-3
    final_learning_rate: float = 3e-5
    warmup_steps: int = 2000
    weight_decay: float = 0.033
    beta1: float = 0.9
    beta2: float = 0.95
    epsilon: float = 1e-8
    z_loss: float = 1e-4
    grad_clip: float = 1.0
    precision: Literal["bf16", "fp32", "fp8"] = "bf16"
    validation_tokens: int = 262_144
    seed: int = 124

    def check(self) -> None:
        if self.size not in SIZES:
            raise self.refuse("size", f"one of {', '.join(SIZES)}")
        if self.batch_tokens % self.shape.context or self.batch_tokens < self.shape.context:
            raise self.refuse("batch_tokens", f"a multiple of the context length, {self.shape.context}")
        if self.token_budget < self.batch_tokens:
            raise self.refuse("token_budget", f"at least one batch, {self.batch_tokens} tokens")
        if self.vocab_size < 2:
            raise self.refuse("vocab_size", "at least 2")
        if self.validation_tokens < 1:
            raise self.refuse("validation_tokens", "at least 1")

    @property
    def shape(self) -> Shape:
        return SIZES[self.size]

    @property
    def steps(self) -> int:
        """Optimiser steps: the budget in whole batches."""
        return self.token_budget // self.batch_tokens

    @property
    def batch_sequences(self) -> int:
        return self.batch_tokens // self.shape.context

    @property
    def warmup(self) -> int:
        """Warm-up steps after the rule for small budgets."""
        return min(self.warmup_steps, max(1, self.steps // 10))


@dataclasses.dataclass(frozen=True, kw_only=True)
class EvaluateConfig(Config):
    """checkpoint, tokenizer, heldout -> bits per byte of every held-out page; every item of the 23 task entries.

    tasks: a folder with the task files (JSON lines, as named in training.evaluation.tasks); without it the few self-written items
        that the project ships, which exercise every task and measure little.
    max_context: 0 takes the model's context length; prompts are cropped from the left.
    precision: of matrix products. DCLM evaluates in fp32; tf32 and bf16 are several times faster on a GPU and may turn close choices.
    """

    stage: ClassVar[str] = "evaluate"
    inputs: ClassVar[tuple[str, ...]] = ("checkpoint", "tokenizer", "heldout")
    suite: Literal["core-23", "none"] = "core-23"
    tasks: External | None = None
    few_shot_seed: int = 1234
    max_context: int = 0
    precision: Precision = "fp32"


@dataclasses.dataclass(frozen=True, kw_only=True)
class ReportConfig(Config):
    """Everything it reports on, by name -> report.html, tables, figures.

    inputs: "corpus", "scorer", "scores"; "crawl/<policy>" for the curves (with "#<replicate>" where a crawl differs between replicates);
        "results/<arm>#<replicate>" for every finished run; "overlap/<arm>" for what an arm's pages share with task items and with each
        other; "rank/pagerank" for the figure of PageRank.
    question: what the experiment asks. reference: the arm that the others are compared with (without results: the policy). hypothesis: what
        was expected.
    at_pages: numbers of pages crawled at which crawls are compared, each with the fetches that the reference's crawl made for them; empty:
        the pages of the reference arm.
    expected: names of results that were to be there; those that are not among the inputs are shown as missing. mixed: so are results that
        were measured on other held-out pages than the reference's, instead of being refused.
    published: the scorer of the paper whose rows are set beside reproduced arms; "none": no published rows.
    """

    stage: ClassVar[str] = "report"
    version: ClassVar[int] = 2
    variadic: ClassVar[bool] = True
    estimated: ClassVar[bool] = False
    title: str
    question: str
    hypothesis: str = ""
    reference: str = ""
    at_pages: tuple[int, ...] = ()
    expected: tuple[str, ...] = ()
    mixed: bool = False
    published: Literal["DCLM", "FineWeb-Edu", "none"] = "DCLM"

    def check(self) -> None:
        if any(pages < 1 for pages in self.at_pages):
            raise self.refuse("at_pages", "numbers of at least 1")
        if self.published not in ("DCLM", "FineWeb-Edu", "none"):
            raise self.refuse("published", "DCLM, FineWeb-Edu or none")
