"""Loss, schedule and optimiser against the recipe's numbers and plain formulas."""

import math

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import training.optimizer as module
from training.configs import TrainConfig
from training.optimizer import adamw, language_model_loss, learning_rate, set_learning_rate, target_losses

PAPER = TrainConfig(token_budget=32_929_300_480)


def test_steps_and_warm_up_of_the_papers_run() -> None:
    assert PAPER.steps == 31_403
    assert PAPER.warmup == 2000
    assert PAPER.steps * PAPER.batch_tokens == 32_928_432_128


@pytest.mark.parametrize(
    ("step", "rate"),
    [(0, 1.5e-6), (1999, 3e-3), (10_000, 2.4897e-3), (16_701, 1.5151e-3), (25_000, 3.6418e-4), (31_402, 3.0e-5)],
)
def test_learning_rate_of_the_papers_run(step: int, rate: float) -> None:
    """spec B, "spot lr (4x)"."""
    assert learning_rate(PAPER, step) == pytest.approx(rate, rel=5e-5)


def test_learning_rate_of_small_runs() -> None:
    config = TrainConfig(size="toy", token_budget=100 * 4096, batch_tokens=4096)
    assert (config.steps, config.warmup) == (100, 10)
    rates = [learning_rate(config, s) for s in range(100)]
    assert rates[0] == pytest.approx(3e-4)
    assert max(rates) == rates[9] == rates[10] == 3e-3
    assert rates[10:] == sorted(rates[10:], reverse=True)
    assert 3e-5 <= rates[-1] < 3.5e-5
    one = TrainConfig(size="toy", token_budget=4096, batch_tokens=4096)
    assert learning_rate(one, 0) == 3e-3


def plain_loss(hidden: Tensor, head: Tensor, targets: Tensor, z_loss: float) -> Tensor:
    logits = (hidden @ head.T).float()
    return F.cross_entropy(logits, targets) + z_loss * logits.logsumexp(-1).square().mean()


@pytest.mark.parametrize("chunk_floats", [1, 70, 1 << 20])
@pytest.mark.parametrize("z_loss", [0.0, 1e-4, 0.5])
def test_chunked_loss_and_its_gradients(monkeypatch: pytest.MonkeyPatch, chunk_floats: int, z_loss: float) -> None:
    monkeypatch.setitem(module.CHUNK_FLOATS, "cpu", chunk_floats)
    monkeypatch.setattr(module, "MIN_CHUNK", 1)
    generator = torch.Generator().manual_seed(0)
    hidden, head = torch.randn(23, 8, generator=generator), torch.randn(11, 8, generator=generator)
    targets = torch.randint(11, (23,), generator=generator)
    results = []
    for function in (plain_loss, language_model_loss):
        h, w = hidden.clone().requires_grad_(), head.clone().requires_grad_()
        loss = function(h, w, targets, z_loss)
        (3 * loss).backward()
        assert h.grad is not None and w.grad is not None
        results.append((loss.detach(), h.grad, w.grad))
    for expected, found in zip(*results, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    with torch.no_grad():
        torch.testing.assert_close(language_model_loss(hidden, head, targets, z_loss), results[0][0])
        torch.testing.assert_close(target_losses(hidden, head, targets).mean(), plain_loss(hidden, head, targets, 0.0))


@pytest.mark.parametrize("chunk_floats", [1, 70, 1 << 20])
def test_chunked_loss_in_float64(monkeypatch: pytest.MonkeyPatch, chunk_floats: int) -> None:
    """To 1e-12 the value and the gradients of the plain formula; and the gradients are those of finite differences."""
    monkeypatch.setitem(module.CHUNK_FLOATS, "cpu", chunk_floats)
    monkeypatch.setattr(module, "MIN_CHUNK", 1)
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(23, 8, generator=generator, dtype=torch.float64, requires_grad=True)
    head = torch.randn(11, 8, generator=generator, dtype=torch.float64, requires_grad=True)
    targets = torch.randint(11, (23,), generator=generator)
    logits = hidden @ head.T
    plain = F.cross_entropy(logits, targets) + 0.1 * logits.logsumexp(-1).square().mean()
    found = language_model_loss(hidden, head, targets, 0.1)
    assert found.dtype == torch.float64
    torch.testing.assert_close(found, plain, rtol=1e-12, atol=0)
    expected, gradients = (torch.autograd.grad(loss, (hidden, head)) for loss in (plain, found))
    torch.testing.assert_close(gradients, expected, rtol=1e-12, atol=1e-15)
    assert torch.autograd.gradcheck(lambda h, w: language_model_loss(h, w, targets, 0.1), (hidden, head))


def test_chunked_loss_under_autocast() -> None:
    generator = torch.Generator().manual_seed(0)
    hidden, head = torch.randn(23, 8, generator=generator), torch.randn(11, 8, generator=generator, requires_grad=True)
    targets = torch.randint(11, (23,), generator=generator)
    low = hidden.bfloat16().requires_grad_()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = language_model_loss(low, head, targets, 1e-4)
    loss.backward()
    assert loss.dtype == torch.float32
    assert low.grad is not None and low.grad.dtype == torch.bfloat16
    assert head.grad is not None and head.grad.dtype == torch.float32
    assert loss.item() == pytest.approx(plain_loss(hidden, head, targets, 1e-4).item(), rel=0.02)


def test_large_logits_stay_finite() -> None:
    hidden, head = torch.full((4, 2), 100.0, requires_grad=True), torch.tensor([[10.0, 10.0], [-10.0, -10.0]], requires_grad=True)
    loss = language_model_loss(hidden, head, torch.tensor([0, 0, 0, 1]), 0.0)
    loss.backward()
    assert loss.item() == pytest.approx(1000.0)
    assert hidden.grad is not None and hidden.grad.isfinite().all()


def test_decay_reaches_every_parameter() -> None:
    """One step with no gradient to follow: every weight, the norm gains included, shrinks by lr x decay."""
    model = nn.Sequential(nn.Embedding(5, 4), nn.LayerNorm(4, bias=False), nn.Linear(4, 5, bias=False))
    optimizer = adamw(model, PAPER)
    assert optimizer.param_groups[0]["betas"] == (0.9, 0.95)
    assert optimizer.param_groups[0]["eps"] == 1e-8
    set_learning_rate(optimizer, 0.5)
    before = [p.detach().clone() for p in model.parameters()]
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    optimizer.step()
    for old, new in zip(before, model.parameters(), strict=True):
        torch.testing.assert_close(new.detach(), old * (1 - 0.5 * 0.033))


def test_first_adam_step_is_the_rate() -> None:
    weight = nn.Linear(3, 1, bias=False)
    config = TrainConfig(token_budget=PAPER.token_budget, weight_decay=0.0)
    optimizer = adamw(weight, config)
    set_learning_rate(optimizer, 0.1)
    before = weight.weight.detach().clone()
    weight.weight.grad = torch.tensor([[4.0, -0.5, 1e-3]])
    optimizer.step()
    torch.testing.assert_close(weight.weight.detach(), before - 0.1 * torch.tensor([[1.0, -1.0, 1.0]]), rtol=1e-4, atol=1e-5)
    assert math.isclose(optimizer.param_groups[0]["lr"], 0.1)
