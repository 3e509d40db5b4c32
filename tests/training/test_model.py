"""The decoder against its specification: parameter counts, initial weights, and a second, plain computation of its output."""

import math
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from craw4llm.errors import ConfigError
from training.configs import NEOX_VOCAB, SIZES, Shape
from training.model import Transformer, rotary_table, rotate

SHAPE = Shape(d_model=16, n_layers=3, n_heads=2, d_hidden=24, context=12)
VOCAB = 19


@pytest.fixture(autouse=True)
def _threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize(("size", "count"), [("11M", 10_570_848), ("79M", 78_922_240), ("154M", 153_705_024), ("411M", 411_665_408)])
def test_parameter_counts_of_open_lm(size: str, count: int) -> None:
    with torch.device("meta"):
        model = Transformer(SIZES[size], NEOX_VOCAB)
    assert sum(p.numel() for p in model.parameters()) == count
    assert SIZES[size].parameters(NEOX_VOCAB) == count


@pytest.mark.parametrize("vocab_size", [64, 2048])
def test_parameter_count_of_other_vocabularies(vocab_size: int) -> None:
    model = Transformer(SIZES["toy"], vocab_size)
    assert sum(p.numel() for p in model.parameters()) == SIZES["toy"].parameters(vocab_size)


def test_flops_of_the_411m_model() -> None:
    """spec G: 2.7635e9 a token; 9.10e19 for the 4x run."""
    per_token = SIZES["411M"].flops_per_token(NEOX_VOCAB)
    assert per_token == pytest.approx(2.7635e9, rel=1e-4)
    assert per_token * 32_928_432_128 == pytest.approx(9.10e19, rel=1e-3)


def test_head_width_must_be_even() -> None:
    with pytest.raises(ConfigError, match="even width per head"):
        Shape(d_model=18, n_layers=1, n_heads=6, d_hidden=8)
    with pytest.raises(ConfigError, match="even width per head"):
        Shape(d_model=16, n_layers=1, n_heads=3, d_hidden=8)


def test_a_position_sees_none_that_follow() -> None:
    model = Transformer(SHAPE, VOCAB)
    tokens = torch.arange(12).remainder(VOCAB)[None]
    changed = tokens.clone()
    changed[0, 7:] = (changed[0, 7:] + 5) % VOCAB
    before, after = model(tokens), model(changed)
    assert torch.equal(before[0, :7], after[0, :7])
    assert (before[0, 7:] != after[0, 7:]).any(dim=1).all()
    earlier = tokens.clone()
    earlier[0, 0] = 9
    assert (model(earlier)[0] != before[0]).any(dim=1).all()


def test_shorter_input_gives_the_same_logits_and_longer_is_refused() -> None:
    model = Transformer(SHAPE, VOCAB)
    tokens = torch.randint(VOCAB, (2, 12), generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(model(tokens[:, :5]), model(tokens)[:, :5])
    with pytest.raises(ValueError, match="13 positions, the model's context is 12"):
        model(torch.zeros(1, 13, dtype=torch.int64))


def test_output_equals_a_plain_computation() -> None:
    """The whole decoder again, in float64, written from the specification with explicit attention."""
    model = Transformer(SHAPE, VOCAB).double()
    with torch.no_grad():
        for name, p in model.named_parameters():
            if "norm" in name:  # gains other than one, so that a gain in the wrong place shows
                p.copy_(torch.linspace(0.5, 1.5, p.numel()))
    w = dict(model.named_parameters())
    tokens = torch.randint(VOCAB, (2, 12), generator=torch.Generator().manual_seed(0))

    def norm(x: Tensor, gain: Tensor) -> Tensor:
        centered = x - x.mean(-1, keepdim=True)
        return centered / (centered.square().mean(-1, keepdim=True) + 1e-5).sqrt() * gain

    def rotary(x: Tensor) -> Tensor:  # [B, T, 8]: pairs (i, i + 4)
        out = x.clone()
        for t in range(12):
            for i in range(4):
                angle = t * 10_000 ** (-2 * i / 8)
                a, b = x[:, t, i], x[:, t, i + 4]
                out[:, t, i] = a * math.cos(angle) - b * math.sin(angle)
                out[:, t, i + 4] = a * math.sin(angle) + b * math.cos(angle)
        return out

    x = w["embedding.weight"][tokens]
    mask = torch.full((12, 12), -math.inf, dtype=torch.float64).triu(1)
    for layer in range(3):
        b = f"blocks.{layer}."
        qkv = norm(x, w[b + "norm1.weight"]) @ w[b + "attention.in_proj.weight"].T
        q, k, v = qkv[..., :16], qkv[..., 16:32], qkv[..., 32:]
        q, k = norm(q, w[b + "attention.q_norm.weight"]), norm(k, w[b + "attention.k_norm.weight"])
        heads = []
        for h in (slice(0, 8), slice(8, 16)):
            scores = rotary(q[..., h]) @ rotary(k[..., h]).transpose(1, 2) / math.sqrt(8)
            heads.append((scores + mask).softmax(-1) @ v[..., h])
        x = x + torch.cat(heads, dim=-1) @ w[b + "attention.out_proj.weight"].T
        gate_up = norm(x, w[b + "norm2.weight"]) @ w[b + "feed_forward.w12.weight"].T
        gate, up = gate_up[..., :24], gate_up[..., 24:]
        x = x + (gate * gate.sigmoid() * up) @ w[b + "feed_forward.w3.weight"].T
    expected = norm(x, w["norm.weight"]) @ w["head.weight"].T
    torch.testing.assert_close(model(tokens).double(), expected, rtol=1e-5, atol=1e-5)
    assert model(tokens).dtype == torch.float32


def test_initial_weights() -> None:
    """spec A: truncated normal at three sigma; its standard deviation is 0.9866 sigma."""
    shape = Shape(d_model=256, n_layers=3, n_heads=4, d_hidden=512, context=8)
    model = Transformer(shape, 1000)
    expected = {"embedding.weight": 1 / 16, "head.weight": 1 / 16}
    for i in range(3):
        depth = math.sqrt(2 * (i + 1))
        expected[f"blocks.{i}.attention.in_proj.weight"] = 1 / 16
        expected[f"blocks.{i}.attention.out_proj.weight"] = 1 / 16 / depth
        expected[f"blocks.{i}.feed_forward.w12.weight"] = 1 / 16
        expected[f"blocks.{i}.feed_forward.w3.weight"] = 1 / math.sqrt(512) / depth
    for name, p in model.named_parameters():
        if "norm" in name:
            assert torch.equal(p, torch.ones_like(p)), name
            continue
        sigma = expected.pop(name)
        assert p.std().item() == pytest.approx(0.9866 * sigma, rel=0.02), name
        assert abs(p.mean().item()) < 0.02 * sigma, name
        assert 2.9 * sigma < p.abs().max().item() <= 3 * sigma * (1 + 1e-6), name
    assert not expected


def test_the_seed_decides_the_weights() -> None:
    a, b, c = (Transformer(SHAPE, VOCAB, seed=s).state_dict() for s in (1, 1, 2))
    torch.manual_seed(0)
    assert all(torch.equal(a[name], b[name]) for name in a)
    assert not torch.equal(a["head.weight"], c["head.weight"])


def test_rotation_depends_on_the_distance_alone() -> None:
    cos, sin = rotary_table(64, 8)
    assert cos.dtype == torch.float32
    q, k = torch.randn(2, 8, generator=torch.Generator().manual_seed(0))
    at = rotate(torch.stack((q, k))[:, None].expand(2, 64, 8), cos, sin)
    products = [at[0, i + 5] @ at[1, i] for i in (0, 10, 50)]
    assert products[0].item() == pytest.approx(products[1].item(), abs=1e-4)
    assert products[0].item() == pytest.approx(products[2].item(), abs=1e-4)
    assert products[0].item() != pytest.approx((at[0, 9] @ at[1, 0]).item(), abs=1e-2)


def test_bf16_autocast_is_near_float32() -> None:
    model = Transformer(SHAPE, VOCAB)
    tokens = torch.randint(VOCAB, (2, 12), generator=torch.Generator().manual_seed(0))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        hidden = model.hidden(tokens)
        low = model(tokens)
    assert hidden.dtype == torch.bfloat16
    assert low.dtype == torch.float32
    full = model(tokens)
    assert 0 < (low - full).abs().max().item() < 0.1 * full.std().item()
    assert F.cosine_similarity(low.flatten(), full.flatten(), dim=0).item() > 0.999
