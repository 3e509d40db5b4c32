"""The decoder of the paper's recipe: open_lm's architecture at DCLM's 411M scale, and smaller shapes of it.

    h = x + attention(norm1(x));  out = h + feed_forward(norm2(h));  logits = head(norm(out))

Pre-norm blocks, no biases, no dropout, untied embedding and head, no scaling of embeddings, no cap on logits. Source of every
choice: mlfoundations/open_lm, `open_lm/model.py`, with DCLM's settings `--qk-norm`, `gain_only_lp_layer_norm`, `swiglu_torch`.
The one departure: open_lm rounds the rotary frequencies to bfloat16 during training; here the table is float32.

Shape suffixes: B sequences, T positions, D width, H heads, K head width, V vocabulary.
"""

import dataclasses
import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from training.configs import Shape

NORM_EPS = 1e-5
ROTARY_BASE = 10_000.0
TRUNCATION = 3.0  # initial weights are cut at so many standard deviations


@dataclasses.dataclass(frozen=True, eq=False)
class Branches:
    """Rows that are a beginning and several continuations of it, side by side: [beginning, padding, branch, branch, ..., padding].

    width: columns of the beginnings; they are causal among themselves. position_BT: int64, place of each column in its sequence (a
    branch goes on where its beginning ends). sees_B1QT: bool, which columns (T) each column behind `width` (Q) attends to: the
    beginning without its padding, and its own branch so far.
    """

    width: int
    position_BT: Tensor
    sees_B1QT: Tensor


class LayerNorm(nn.Module):
    """Layer normalisation with a gain and no bias. Under autocast input and gain are cast to the lower precision first."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        kind = x.device.type
        if not torch.is_autocast_enabled(kind):
            return F.layer_norm(x, self.weight.shape, self.weight, None, NORM_EPS)
        low = torch.get_autocast_dtype(kind)
        with torch.autocast(kind, enabled=False):
            return F.layer_norm(x.to(low), self.weight.shape, self.weight.to(low), None, NORM_EPS)


class Attention(nn.Module):
    """Causal self-attention over the whole context. q and k are normalised over their full width, before the split into heads."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.in_proj = nn.Linear(width, 3 * width, bias=False)
        self.out_proj = nn.Linear(width, width, bias=False)
        self.q_norm = LayerNorm(width)
        self.k_norm = LayerNorm(width)

    def forward(self, x_BTD: Tensor, cos_TK: Tensor, sin_TK: Tensor, branches: Branches | None = None) -> Tensor:
        q, k, v = self.in_proj(x_BTD).chunk(3, dim=-1)
        q, k = rotate(self._split(self.q_norm(q)), cos_TK, sin_TK), rotate(self._split(self.k_norm(k)), cos_TK, sin_TK)
        v = self._split(v)
        if branches is None:
            out_BHTK = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        else:
            w = branches.width
            first = F.scaled_dot_product_attention(q[:, :, :w], k[:, :, :w], v[:, :, :w], is_causal=True)
            rest = F.scaled_dot_product_attention(q[:, :, w:], k, v, attn_mask=branches.sees_B1QT)
            out_BHTK = torch.cat((first, rest), dim=2)
        return self.out_proj(out_BHTK.transpose(1, 2).flatten(2))

    def _split(self, x_BTD: Tensor) -> Tensor:
        """[B, T, D] -> [B, H, T, K]"""
        return x_BTD.unflatten(-1, (self.heads, -1)).transpose(1, 2)


class FeedForward(nn.Module):
    """SwiGLU: w3(silu(gate) * up), gate and up from one matrix, the gate first."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.w12 = nn.Linear(width, 2 * hidden, bias=False)
        self.w3 = nn.Linear(hidden, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.w12(x).chunk(2, dim=-1)
        return self.w3(F.silu(gate) * up)


class Block(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.norm1 = LayerNorm(shape.d_model)
        self.attention = Attention(shape.d_model, shape.n_heads)
        self.norm2 = LayerNorm(shape.d_model)
        self.feed_forward = FeedForward(shape.d_model, shape.d_hidden)

    def forward(self, x: Tensor, cos_TK: Tensor, sin_TK: Tensor, branches: Branches | None = None) -> Tensor:
        x = x + self.attention(self.norm1(x), cos_TK, sin_TK, branches)
        return x + self.feed_forward(self.norm2(x))


class Transformer(nn.Module):
    """The language model. seed: of the initial weights; equal on every device, as they are drawn on the CPU.

    Built on the meta device (`with torch.device("meta")`) it has shapes and no weights.
    """

    cos_TK: Tensor
    sin_TK: Tensor

    def __init__(self, shape: Shape, vocab_size: int, seed: int = 124) -> None:
        super().__init__()
        self.shape, self.vocab_size = shape, vocab_size
        self.embedding = nn.Embedding(vocab_size, shape.d_model)
        self.blocks = nn.ModuleList(Block(shape) for _ in range(shape.n_layers))
        self.norm = LayerNorm(shape.d_model)
        self.head = nn.Linear(shape.d_model, vocab_size, bias=False)
        self.with_rotary_table()
        if not self.head.weight.is_meta:
            self._initialise(torch.Generator().manual_seed(seed))

    def with_rotary_table(self) -> "Transformer":
        """Makes the table anew; needed after loading weights into a model that was built on the meta device."""
        cos, sin = rotary_table(self.shape.context, self.shape.d_model // self.shape.n_heads)
        self.register_buffer("cos_TK", cos, persistent=False)
        self.register_buffer("sin_TK", sin, persistent=False)
        return self

    def forward(self, tokens_BT: Tensor) -> Tensor:
        """Token ids int64[B, T] -> logits [B, T, V], float32. T is at most the context length."""
        return self.head(self.hidden(tokens_BT)).float()

    def hidden(self, tokens_BT: Tensor, branches: Branches | None = None) -> Tensor:
        """Token ids int64[B, T] -> what the head sees, [B, T, D]. With `branches` T may exceed the context, positions may not."""
        length = tokens_BT.shape[1]
        if branches is None and length > self.shape.context:
            raise ValueError(f"{length} positions, the model's context is {self.shape.context}")
        x = self.embedding(tokens_BT)
        if branches is None:
            cos, sin = self.cos_TK[:length], self.sin_TK[:length]
        else:
            cos, sin = self.cos_TK[branches.position_BT][:, None], self.sin_TK[branches.position_BT][:, None]
        for block in self.blocks:
            x = block(x, cos, sin, branches)
        out: Tensor = self.norm(x)
        return out

    @torch.no_grad()
    def _initialise(self, generator: torch.Generator) -> None:
        """Truncated normal weights; the two matrices that write into the residual stream shrink with depth (layer from 0)."""
        width, hidden = self.shape.d_model, self.shape.d_hidden

        def draw(weight: Tensor, sigma: float) -> None:
            nn.init.trunc_normal_(weight, std=sigma, a=-TRUNCATION * sigma, b=TRUNCATION * sigma, generator=generator)

        draw(self.embedding.weight, width**-0.5)
        for layer, block in enumerate(self.blocks):
            assert isinstance(block, Block)
            depth = math.sqrt(2 * (layer + 1))
            draw(block.attention.in_proj.weight, width**-0.5)
            draw(block.attention.out_proj.weight, width**-0.5 / depth)
            draw(block.feed_forward.w12.weight, width**-0.5)
            draw(block.feed_forward.w3.weight, hidden**-0.5 / depth)
        draw(self.head.weight, width**-0.5)


def rotary_table(length: int, head_width: int) -> tuple[Tensor, Tensor]:
    """cos and sin, float32 [length, head_width / 2], of position x base^(-2i / head_width) (RoPE, arXiv 2104.09864)."""
    frequency = ROTARY_BASE ** (-torch.arange(0, head_width, 2, dtype=torch.float32) / head_width)
    angle = torch.arange(length, dtype=torch.float32)[:, None] * frequency
    return angle.cos(), angle.sin()


def rotate(x_BHTK: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotates each pair (i, i + K/2) of the head width ("half-split", as GPT-NeoX), in float32, and returns x's dtype."""
    first, second = x_BHTK.float().chunk(2, dim=-1)
    out = torch.cat((first * cos - second * sin, first * sin + second * cos), dim=-1)
    return out.to(x_BHTK.dtype)
