"""The decoder of craw4llm for `transformers`: open_lm's architecture (pre-norm LayerNorm with gain only, QK-norm over the full width,
half-split rotary positions, SwiGLU, untied head). It needs torch and transformers only.

    model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)

There is no cache of keys and values: `generate` works, and computes the whole prefix for every token.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import GenerationMixin, PretrainedConfig, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutput


class Craw4LLMConfig(PretrainedConfig):
    model_type = "craw4llm"

    def __init__(
        self,
        vocab_size: int = 50432,
        hidden_size: int = 1024,
        num_hidden_layers: int = 24,
        num_attention_heads: int = 8,
        intermediate_size: int = 2816,
        max_position_embeddings: int = 2048,
        layer_norm_eps: float = 1e-5,
        rotary_base: float = 10000.0,
        **kwargs: Any,
    ) -> None:
        self.vocab_size = vocab_size
        self.hidden_size = hidden_size
        self.num_hidden_layers = num_hidden_layers
        self.num_attention_heads = num_attention_heads
        self.intermediate_size = intermediate_size
        self.max_position_embeddings = max_position_embeddings
        self.layer_norm_eps = layer_norm_eps
        self.rotary_base = rotary_base
        kwargs.setdefault("tie_word_embeddings", False)
        kwargs.setdefault("use_cache", False)
        super().__init__(**kwargs)


class Norm(nn.Module):
    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return F.layer_norm(x, self.weight.shape, self.weight, None, self.eps)


class Attention(nn.Module):
    def __init__(self, config: Craw4LLMConfig) -> None:
        super().__init__()
        self.heads = config.num_attention_heads
        self.in_proj = nn.Linear(config.hidden_size, 3 * config.hidden_size, bias=False)
        self.out_proj = nn.Linear(config.hidden_size, config.hidden_size, bias=False)
        self.q_norm = Norm(config.hidden_size, config.layer_norm_eps)
        self.k_norm = Norm(config.hidden_size, config.layer_norm_eps)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, mask: Tensor | None) -> Tensor:
        q, k, v = self.in_proj(x).chunk(3, dim=-1)
        q, k, v = (t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in (self.q_norm(q), self.k_norm(k), v))
        out = F.scaled_dot_product_attention(rotate(q, cos, sin), rotate(k, cos, sin), v, attn_mask=mask, is_causal=mask is None)
        return self.out_proj(out.transpose(1, 2).flatten(2))


class FeedForward(nn.Module):
    def __init__(self, config: Craw4LLMConfig) -> None:
        super().__init__()
        self.w12 = nn.Linear(config.hidden_size, 2 * config.intermediate_size, bias=False)
        self.w3 = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.w12(x).chunk(2, dim=-1)
        return self.w3(F.silu(gate) * up)


class Block(nn.Module):
    def __init__(self, config: Craw4LLMConfig) -> None:
        super().__init__()
        self.norm1 = Norm(config.hidden_size, config.layer_norm_eps)
        self.attention = Attention(config)
        self.norm2 = Norm(config.hidden_size, config.layer_norm_eps)
        self.feed_forward = FeedForward(config)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, mask: Tensor | None) -> Tensor:
        x = x + self.attention(self.norm1(x), cos, sin, mask)
        return x + self.feed_forward(self.norm2(x))


class Craw4LLMForCausalLM(PreTrainedModel, GenerationMixin):
    config_class = Craw4LLMConfig
    base_model_prefix = ""
    _no_split_modules = ["Block"]  # noqa: RUF012
    _supports_sdpa = True

    def __init__(self, config: Craw4LLMConfig) -> None:
        super().__init__(config)
        self.embedding = nn.Embedding(config.vocab_size, config.hidden_size)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.num_hidden_layers))
        self.norm = Norm(config.hidden_size, config.layer_norm_eps)
        self.head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def get_input_embeddings(self) -> nn.Module:
        return self.embedding

    def set_input_embeddings(self, value: nn.Module) -> None:
        self.embedding = value  # type: ignore[assignment]

    def get_output_embeddings(self) -> nn.Module:
        return self.head

    def prepare_inputs_for_generation(self, input_ids: Tensor, attention_mask: Tensor | None = None, **kwargs: Any) -> dict[str, Any]:
        return {"input_ids": input_ids, "attention_mask": attention_mask}

    def forward(
        self, input_ids: Tensor, attention_mask: Tensor | None = None, labels: Tensor | None = None, **kwargs: Any
    ) -> CausalLMOutput:
        """Token ids [B, T] -> logits [B, T, V], float32. labels: as input_ids, -100 is left out; the loss is on the next token."""
        length = input_ids.shape[1]
        if length > self.config.max_position_embeddings:
            raise ValueError(f"{length} positions, the model's context is {self.config.max_position_embeddings}")
        cos, sin = self._rotary(length, input_ids.device)
        mask = None
        if attention_mask is not None and not bool(attention_mask.all()):
            causal = torch.ones(length, length, dtype=torch.bool, device=input_ids.device).tril()
            own = torch.eye(length, dtype=torch.bool, device=input_ids.device)  # padding sees itself: a row must see something
            mask = (causal & attention_mask[:, None, None, :].bool()) | own
        x = self.embedding(input_ids)
        for block in self.blocks:
            x = block(x, cos, sin, mask)
        logits = self.head(self.norm(x)).float()
        loss = None
        if labels is not None:
            loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), ignore_index=-100)
        return CausalLMOutput(loss=loss, logits=logits)

    def _rotary(self, length: int, device: torch.device) -> tuple[Tensor, Tensor]:
        width = self.config.hidden_size // self.config.num_attention_heads
        frequency = self.config.rotary_base ** (-torch.arange(0, width, 2, dtype=torch.float32, device=device) / width)
        angle = torch.arange(length, dtype=torch.float32, device=device)[:, None] * frequency
        return angle.cos(), angle.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.float().chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, first * sin + second * cos), dim=-1).to(x.dtype)
