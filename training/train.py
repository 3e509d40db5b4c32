"""Stage `train`: one language model, trained on the samples of a tokenize artifact.

    shards, verified -> model -> steps of (batch, loss, gradients, AdamW) -> held-out loss -> model.pt

The loop (`training.loop`) saves its whole state every few seconds (`training.states`); after `kill -9` the next attempt goes on
from it and ends with the same bytes (same machine, device, threads, ranks and micro-batch; with others it ends near them, and the
manifest says so). What a step does depends on its number alone: the learning rate, the samples; there are no random numbers.

Asked to end (SIGTERM, Ctrl-C) it saves and ends with exit code 75. That takes the time of one micro-batch (with several ranks: of one
step) and of writing at most two states, 12 bytes a parameter each: docs/training.md has the seconds.
"""

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from craw4llm.artifact import Artifact, Result
from craw4llm.errors import ArtifactError, StageError
from craw4llm.execution import Execution
from training.configs import TrainConfig
from training.watch import METRICS, PEAK_FLOPS, SPEED, SPEED_LINES, VALIDATION, Spikes

RESUMES = True
RECORDS = (METRICS, SPEED, SPEED_LINES, VALIDATION, "model.pt", "config.json")
ASSUMED_PEAK = PEAK_FLOPS["H100"]
ASSUMED_UTILISATION = 0.4
DISK_BYTES_PER_PARAMETER = 4 + 3 * 12  # the model; two saved states and one being written, while the run lasts

Count = tuple[float | int | None, str]


def run(config: TrainConfig, inputs: Mapping[str, Artifact], out: Path, execution: Execution) -> Result:
    # `plan` imports this module for `estimate`: torch is imported where the work begins
    import torch

    from training import distributed, loop, node, states
    from training.device import resolve

    _check(config, inputs)
    for path in sorted(out.iterdir()):  # an earlier version's, which would become part of the artifact
        if path.name not in (states.STATES, *RECORDS):
            (execution.report or print)(f"train: deleted {path}, which is no file of this version's")
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    device = resolve(execution.device)
    size = node.size() or execution.ranks
    distributed.Ranks(0, size).part(config.batch_sequences)
    if node.size():
        done = node.run_on_all(loop.fit, (config, dict(inputs), out), execution)
    elif size > 1:
        done = distributed.launch(loop.fit, (config, dict(inputs), out), execution)
    else:
        done = loop.fit(config, inputs, out, execution=execution, ranks=distributed.Ranks())
    states.clear(out / states.STATES)
    losses = [json.loads(line)["loss"] for line in (out / METRICS).read_text().split("\n")[:-1]]
    samples = int(inputs["tokens"].count("samples"))
    seen = config.steps * config.batch_sequences
    epochs = seen / samples
    notes: dict[str, Any] = {
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        "torch": torch.__version__,
        "threads": execution.threads,
        "micro_batch": done["micro_batch"],
        "ranks": size,
        "parallel": execution.parallel,
        "compiled": loop.compiles(execution, device),
    }
    if done["changes"]:
        notes["resumed"] = done["changes"]
    if epochs > 1:
        notes["warning"] = (
            f"{samples * config.shape.context:,} unique tokens for {config.steps * config.batch_tokens:,} trained on: "
            f"every sample was seen {epochs:.2f} times"
        )
    return Result(
        counts={
            "parameters": (config.shape.parameters(config.vocab_size), "parameters"),
            "steps": (config.steps, "steps"),
            "tokens": (config.steps * config.batch_tokens, "tokens"),
            "unique_tokens": (min(seen, samples) * config.shape.context, "tokens"),
            "epochs": (round(epochs, 4), "epochs"),
            "final_loss": (losses[-1], "nats per token, z-loss included"),
            "loss_spikes": (Spikes(losses).count, "steps"),
            "heldout_loss": (done["heldout_loss"], "nats per token"),
            "heldout_tokens": (done["heldout_tokens"], "tokens"),
            "heldout_bits_per_byte": (done["heldout_bits_per_byte"], "bits per byte, of packed pages"),
            "train_flops": (_train_flops(config), "FLOPs"),
        },
        notes=notes,
        volatile=tuple(name for name in (SPEED, SPEED_LINES, VALIDATION) if (out / name).exists()),
    )


def estimate(config: TrainConfig, inputs: Mapping[str, Mapping[str, Count]]) -> dict[str, Count]:
    """Size and cost of the model before anything is spent; epochs, where the tokens are counted or estimated."""
    gpu_hours = _train_flops(config) / (ASSUMED_PEAK * ASSUMED_UTILISATION) / 3600
    unique, told = inputs.get("tokens", {}).get("tokens", (None, ""))
    epochs = round(config.steps * config.batch_tokens / unique, 2) if unique else None
    return {
        "unique_tokens": (unique, told.replace("tokens", "unique tokens", 1)),
        "epochs": (epochs, "epochs"),
        "parameters": (config.shape.parameters(config.vocab_size), "parameters"),
        "steps": (config.steps, "steps"),
        "train_tokens": (config.steps * config.batch_tokens, "tokens"),
        "train_flops": (_train_flops(config), "FLOPs"),
        "disk_bytes": (DISK_BYTES_PER_PARAMETER * config.shape.parameters(config.vocab_size), "bytes"),
        "gpu_hours": (
            round(gpu_hours, 6),
            f"GPU hours, assuming {ASSUMED_UTILISATION:.0%} of {ASSUMED_PEAK / 1e12:.1f} TFLOP/s (H100 or H200, bf16)",
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
