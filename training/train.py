"""Stage `train`: one language model, trained on the samples of a tokenize artifact.

    shards, verified -> model -> steps of (batch, loss, gradients, AdamW) -> held-out loss -> model.pt

The loop keeps its whole state in `state.pt`, renamed into place every few seconds; after `kill -9` the next attempt goes on from it
and ends with the same bytes (same machine, device, threads and micro-batch). What a step does depends on its number alone: the
learning rate, the samples; there are no random numbers.
"""

import json
import math
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from craw4llm.artifact import Artifact, Result
from craw4llm.errors import ArtifactError, StageError
from craw4llm.execution import Execution
from training.configs import TrainConfig

if TYPE_CHECKING:  # `plan` imports this module for `estimate`: torch is imported where the work begins
    import torch

    from craw4llm.tokens.shards import Shards
    from training.model import Transformer

RESUMES = True
CHECKPOINT_EVERY_S = 10.0
CHECKPOINT_SHARE = 0.05  # of the time may go into writing states, so large models write seldom
METRICS = "metrics.jsonl"
SPEED = "speed.json"
MICRO_BATCH_TOKENS = {"cpu": 4096, "cuda": 16 * 2048}  # where Execution.micro_batch is 0
PEAK_FLOPS = 989.4e12  # NVIDIA H100 SXM and H200, bfloat16, dense (data sheet)
ASSUMED_UTILISATION = 0.4

Count = tuple[float | int | None, str]


def run(config: TrainConfig, inputs: Mapping[str, Artifact], out: Path, execution: Execution) -> Result:
    import torch

    from craw4llm.tokens.shards import Shards
    from training import checkpoint
    from training.device import numerics, resolve
    from training.model import Transformer

    _check(config, inputs)
    shards, heldout = Shards.of(inputs["tokens"]), Shards.of(inputs["heldout"])
    device = resolve(execution.device)
    with numerics(device, execution.threads):
        model = Transformer(config.shape, config.vocab_size, seed=config.seed).to(device)
        speed = _train(config, model, shards, out, execution, device)
        heldout_loss, heldout_tokens = _validate(config, model, heldout, int(inputs["heldout"].count("tokens")), execution, device)
        checkpoint.save_model(model, out)
    (out / SPEED).write_text(json.dumps(speed, indent=2, sort_keys=True) + "\n")
    (out / checkpoint.STATE).unlink(missing_ok=True)
    lines = (out / METRICS).read_text().split("\n")[:-1]
    seen = config.steps * config.batch_sequences
    epochs = seen / len(shards)
    notes: dict[str, Any] = {
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        "torch": torch.__version__,
        "threads": execution.threads,
        "micro_batch": _micro_batch(config, execution, device),
    }
    if epochs > 1:
        notes["warning"] = (
            f"{len(shards) * config.shape.context:,} unique tokens for {config.steps * config.batch_tokens:,} trained on: "
            f"every sample was seen {epochs:.2f} times"
        )
    return Result(
        counts={
            "parameters": (sum(p.numel() for p in model.parameters()), "parameters"),
            "steps": (config.steps, "steps"),
            "tokens": (config.steps * config.batch_tokens, "tokens"),
            "unique_tokens": (min(seen, len(shards)) * config.shape.context, "tokens"),
            "epochs": (round(epochs, 4), "epochs"),
            "final_loss": (json.loads(lines[-1])["loss"], "nats per token, z-loss included"),
            "heldout_loss": (heldout_loss, "nats per token"),
            "heldout_tokens": (heldout_tokens, "tokens"),
            "train_flops": (_train_flops(config), "FLOPs"),
        },
        notes=notes,
        volatile=(SPEED,),
    )


def estimate(config: TrainConfig, inputs: Mapping[str, Mapping[str, Count]]) -> dict[str, Count]:
    """Size and cost of the model before anything is spent."""
    gpu_hours = _train_flops(config) / (PEAK_FLOPS * ASSUMED_UTILISATION) / 3600
    return {
        "parameters": (config.shape.parameters(config.vocab_size), "parameters"),
        "steps": (config.steps, "steps"),
        "train_tokens": (config.steps * config.batch_tokens, "tokens"),
        "train_flops": (_train_flops(config), "FLOPs"),
        "gpu_hours": (
            round(gpu_hours, 6),
            f"GPU hours, assuming {ASSUMED_UTILISATION:.0%} of {PEAK_FLOPS / 1e12:.1f} TFLOP/s (H100 or H200, bf16)",
        ),
    }


def _train_flops(config: TrainConfig) -> float:
    return config.shape.flops_per_token(config.vocab_size) * config.steps * config.batch_tokens


def _check(config: TrainConfig, inputs: Mapping[str, Artifact]) -> None:
    """What must fit together before any work."""
    tokens, heldout = inputs["tokens"], inputs["heldout"]
    for name, artifact in (("tokens", tokens), ("heldout", heldout)):
        if artifact.count("vocab_size") > config.vocab_size:
            raise StageError(
                f"train: vocab_size is {config.vocab_size}, but the tokenizer of `{name}` has {artifact.count('vocab_size')} ids; "
                "raise vocab_size to at least that"
            )
        if artifact.count("sample_tokens") != config.shape.context + 1:
            raise StageError(
                f"train: `{name}` has samples of {artifact.count('sample_tokens')} tokens, but size {config.size} has a context of "
                f"{config.shape.context} and needs {config.shape.context + 1}; set TokenizeConfig.sample_tokens"
            )
    made_with = [a.manifest["inputs"].get("tokenizer", {}).get("fingerprint") for a in (tokens, heldout)]
    if made_with[0] != made_with[1]:
        raise ArtifactError(
            f"train: `tokens` was made with the tokenizer {made_with[0]}, `heldout` with {made_with[1]}; both need the same one"
        )


def _micro_batch(config: TrainConfig, execution: Execution, device: "torch.device") -> int:
    """Sequences that the device takes at once."""
    chosen = execution.micro_batch or MICRO_BATCH_TOKENS[device.type] // config.shape.context
    return max(1, min(chosen, config.batch_sequences))


def _train(
    config: TrainConfig, model: "Transformer", shards: "Shards", out: Path, execution: Execution, device: "torch.device"
) -> dict[str, Any]:
    """Trains `model` in place, from the last state in `out` if there is one. Returns what goes into speed.json."""
    import torch

    from training import checkpoint
    from training.data import Batches
    from training.optimizer import adamw, language_model_loss, learning_rate, set_learning_rate

    optimizer = adamw(model, config)
    batches = Batches(shards, batch_sequences=config.batch_sequences, seed=config.seed)
    micro = _micro_batch(config, execution, device)
    first = 0
    state = checkpoint.load_state(out / checkpoint.STATE, device)
    if state is not None:
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        first = int(state["step"])
        state = None
    _keep_lines(out / METRICS, first)
    model.train()
    started = saved = time.monotonic()
    wait_s = CHECKPOINT_EVERY_S
    with (
        (out / METRICS).open("a") as metrics,
        execution.progress("train", total=config.steps, unit="step") as progress,
    ):
        if first:
            progress.update(first, note="resumed")
        for step in range(first, config.steps):
            rate = learning_rate(config, step)
            set_learning_rate(optimizer, rate)
            inputs, targets = batches[step]
            loss = torch.zeros((), device=device)
            for start in range(0, config.batch_sequences, micro):
                x = inputs[start : start + micro].to(device, non_blocking=True)
                y = targets[start : start + micro].to(device, non_blocking=True)
                with _autocast(config, device):
                    hidden = model.hidden(x).flatten(0, 1)
                    part = language_model_loss(hidden, model.head.weight, y.reshape(-1), config.z_loss)
                part = part * (len(x) / config.batch_sequences)
                part.backward()
                loss += part.detach()
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), config.grad_clip)
            value, grad_norm = loss.item(), norm.item()
            if not (math.isfinite(value) and math.isfinite(grad_norm)):
                raise StageError(
                    f"train: the loss is {value} and the gradient's norm {grad_norm} at step {step} of {config.steps} "
                    f"(learning rate {rate:.3g}); lower learning_rate, lengthen warmup_steps or look at the samples of this step"
                )
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            line = {"step": step, "loss": value, "learning_rate": rate, "grad_norm": grad_norm}
            metrics.write(json.dumps(line) + "\n")
            now = time.monotonic()
            tokens_per_s = (step + 1 - first) * config.batch_tokens / (now - started)
            progress.update(1, note=f"loss {value:.3f}, {tokens_per_s:,.0f} tokens/s")
            if now - saved >= wait_s and step + 1 < config.steps:
                metrics.flush()
                os.fsync(metrics.fileno())
                checkpoint.save_state(
                    out / checkpoint.STATE,
                    {"step": step + 1, "model": model.state_dict(), "optimizer": optimizer.state_dict()},
                )
                saved = time.monotonic()
                wait_s = max(CHECKPOINT_EVERY_S, (saved - now) / CHECKPOINT_SHARE)
    seconds = time.monotonic() - started
    trained = (config.steps - first) * config.batch_tokens
    return {
        "first_step": first,
        "seconds": round(seconds, 3),
        "tokens_per_s": round(trained / seconds, 1) if trained else None,
    }


def _validate(
    config: TrainConfig, model: "Transformer", shards: "Shards", tokens: int, execution: Execution, device: "torch.device"
) -> tuple[float, int]:
    """Mean nats per token over the first `validation_tokens` of the held-out pages, and how many tokens that are."""
    import torch

    from training.data import heldout_batches
    from training.optimizer import target_losses

    model.eval()
    total, count = 0.0, 0
    batch = _micro_batch(config, execution, device)
    with torch.no_grad():
        for inputs, targets, mask in heldout_batches(shards, tokens, batch, config.validation_tokens):
            with _autocast(config, device):
                hidden = model.hidden(inputs.to(device)).flatten(0, 1)
                losses = target_losses(hidden, model.head.weight, targets.reshape(-1).to(device))
            kept = losses.cpu()[mask.reshape(-1)].double()
            total += kept.sum().item()
            count += len(kept)
    if not count:
        raise StageError("train: the held-out samples hold no token to predict; hold out more pages (CorpusConfig.heldout_fraction)")
    return total / count, count


def _autocast(config: TrainConfig, device: "torch.device") -> "torch.autocast":
    import torch

    return torch.autocast(device.type, dtype=torch.bfloat16, enabled=config.precision == "bf16")


def _keep_lines(path: Path, count: int) -> None:
    """Cuts the file after its first `count` lines; StageError if it has fewer."""
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    if len(lines) < count:
        raise StageError(f"train: {path} has {len(lines)} steps, the saved state is at step {count}; delete the folder {path.parent}")
    with path.open("w") as stream:
        stream.writelines(lines[:count])
        stream.flush()
        os.fsync(stream.fileno())
