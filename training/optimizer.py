"""Loss, optimiser and learning-rate schedule of the paper's recipe (DCLM's 411M settings for open_lm).

loss = mean cross-entropy + z_loss x mean(logsumexp^2)          AdamW, decoupled weight decay on every parameter
lr   = warm-up lr x (step + 1) / warmup, then a cosine down to final_learning_rate
"""

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn import functional as F

from training.configs import TrainConfig

MOMENTS = ("step", "exp_avg", "exp_avg_sq")  # what torch.optim.AdamW keeps of a parameter
# Logits are made for so many floats at a time: 512 positions of a 2,048-word vocabulary stay in a CPU's cache, and 8,192 of the
# paper's fit easily on a GPU, where all logits of one batch in float32 would take 413 MB a sequence.
CHUNK_FLOATS = {"cpu": 1 << 19, "cuda": 1 << 28}
MIN_CHUNK = 256  # positions, for large vocabularies: every chunk adds to the whole gradient of the head


def learning_rate(config: TrainConfig, step: int) -> float:
    """The rate of optimiser step `step`, counted from 0. A function of the config alone."""
    if step < config.warmup:
        return config.learning_rate * (step + 1) / config.warmup
    share = (step - config.warmup) / (config.steps - config.warmup)
    span = config.learning_rate - config.final_learning_rate
    return config.final_learning_rate + 0.5 * (1 + math.cos(math.pi * share)) * span


def adamw(model: nn.Module, config: TrainConfig) -> torch.optim.AdamW:
    """AdamW over all parameters, norm gains and embeddings included: open_lm's list of exceptions is empty.

    The fused form works element by element, on CPU as on CUDA, so its result does not depend on the order of anything.
    """
    return torch.optim.AdamW(
        model.parameters(),
        lr=learning_rate(config, 0),
        betas=(config.beta1, config.beta2),
        eps=config.epsilon,
        weight_decay=config.weight_decay,
        fused=True,
    )


def set_learning_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = rate


def state_of(optimizer: torch.optim.Optimizer, model: nn.Module) -> dict[str, dict[str, Tensor]]:
    """AdamW's state by the names of the parameters: "exp_avg", "exp_avg_sq", "step" -> name -> tensor. Empty before the first step."""
    held = {name: optimizer.state[p] for name, p in model.named_parameters()}
    return {kind: {name: state[kind] for name, state in held.items()} for kind in MOMENTS}


def empty_state(model: nn.Module) -> dict[str, dict[str, Tensor]]:
    """Tensors of the same form, to read a saved state into."""
    named = dict(model.named_parameters())
    whole = {kind: {name: torch.zeros_like(p) for name, p in named.items()} for kind in MOMENTS if kind != "step"}
    return whole | {"step": {name: torch.zeros((), device=p.device) for name, p in named.items()}}


def restore(optimizer: torch.optim.Optimizer, model: nn.Module, state: Mapping[str, Mapping[str, Tensor]]) -> None:
    """Makes a state that was read into `empty_state` the optimiser's own."""
    for name, p in model.named_parameters():
        optimizer.state[p] = {kind: state[kind][name].detach() for kind in MOMENTS}


def clip(parameters: list[nn.Parameter], norm: float) -> float:
    """Scales the gradients to an L2 norm of at most `norm`, over all of them together; returns the norm that they had."""
    found = torch.nn.utils.clip_grad_norm_(parameters, norm)
    return (found.full_tensor() if isinstance(found, DTensor) else found).item()


def language_model_loss(hidden: Tensor, head: Tensor, targets: Tensor, z_loss: float) -> Tensor:
    """Mean over positions of cross-entropy + z_loss x logsumexp^2, without ever holding all logits.

    hidden: [N, D]. head: [V, D]. targets: int64[N]. Returns a float32 scalar. The GEMM runs in the autocast precision, the loss in
    float32 (all of it in float64 for float64 inputs), as `model(tokens)` followed by the plain formula would.
    """
    loss: Tensor = _ChunkedLoss.apply(hidden, head, targets, z_loss)
    return loss


@torch.no_grad()
def target_losses(hidden: Tensor, head: Tensor, targets: Tensor) -> Tensor:
    """Cross-entropy of each target in nats, float32[N], without ever holding all logits."""
    rows = _rows(hidden, head)
    parts = [
        F.cross_entropy(F.linear(h, head).float(), t, reduction="none")
        for h, t in zip(hidden.split(rows), targets.split(rows), strict=True)
    ]
    return torch.cat(parts)


class _ChunkedLoss(torch.autograd.Function):
    """Computes the gradients in the forward pass, chunk by chunk: logits are made once and their gradient takes their place."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, head: Tensor, targets: Tensor, z_loss: float) -> Tensor:
        count, rows = hidden.shape[0], _rows(hidden, head)
        wide = _wide(_low(hidden))
        total = torch.zeros((), dtype=wide, device=hidden.device)
        need_grad = any(ctx.needs_input_grad[:2])
        grad_hidden = torch.empty_like(hidden) if need_grad else None
        grad_head = torch.zeros(head.shape, dtype=wide, device=head.device) if need_grad else None
        for start in range(0, count, rows):
            h, t = hidden[start : start + rows], targets[start : start + rows, None]
            logits = F.linear(h, head).to(wide)
            highest, of_target = logits.amax(dim=1, keepdim=True), logits.gather(1, t)
            grad = logits.sub_(highest).exp_()  # one exponential serves the sum and the gradient
            norm = grad.sum(dim=1, keepdim=True)
            lse = highest + norm.log()
            total += (lse - of_target).sum() + z_loss * lse.square().sum()
            if grad_hidden is None or grad_head is None:
                continue
            grad *= (1 + 2 * z_loss * lse) / (count * norm)
            grad.scatter_add_(1, t, torch.full_like(lse, -1 / count))
            low = _low(hidden)
            grad_hidden[start : start + rows] = grad.to(low) @ head.to(low)
            grad_head += grad.to(low).T @ h.to(low)
        ctx.save_for_backward(grad_hidden, grad_head)
        return total / count

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> Any:
        grad_hidden, grad_head = ctx.saved_tensors
        return grad_hidden * upstream[0], grad_head * upstream[0], None, None


def _low(x: Tensor) -> torch.dtype:
    """The dtype of matrix products: autocast's where it is on."""
    kind = x.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype


def _wide(dtype: torch.dtype) -> torch.dtype:
    """The dtype of the loss: float32; float64 for float64."""
    return torch.promote_types(dtype, torch.float32)


def _rows(hidden: Tensor, head: Tensor) -> int:
    return max(MIN_CHUNK, CHUNK_FLOATS.get(hidden.device.type, CHUNK_FLOATS["cuda"]) // head.shape[0])
