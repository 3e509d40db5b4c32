"""The training loop: what every process of a run does, alone or as one of several ranks.

    done = fit(config, inputs, out, execution=execution, ranks=Ranks())

    newest state -> [batch -> gradients, micro-batch by micro-batch -> clip -> AdamW -> line of metrics -> perhaps a state] -> model.pt

Rank 0 writes the files. The rules of resuming and stopping stand in `training.train`.
"""

import contextlib
import dataclasses
import functools
import json
import math
import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import IO, Any, NoReturn

import torch
from torch import Tensor, nn

from craw4llm.artifact import Artifact
from craw4llm.errors import StageError, Stopped
from craw4llm.execution import Execution
from craw4llm.tokens.shards import Shards
from training import checkpoint, optimizer
from training.configs import TrainConfig
from training.data import Batches, Prefetch, heldout_batches
from training.device import numerics, resolve
from training.distributed import Ranks, no_sync
from training.model import Transformer
from training.stopping import StopRequest
from training.watch import METRICS, SPEED, VALIDATION, Watch

SAVE_SHARE = 0.05  # of the time may go into writing states, so large models write seldom
MICRO_BATCH_TOKENS = {"cpu": 4096, "cuda": 16 * 2048}  # where Execution.micro_batch is 0


def fit(config: TrainConfig, inputs: Mapping[str, Artifact], out: Path, *, execution: Execution, ranks: Ranks) -> dict[str, Any]:
    """Trains and validates; rank 0 writes model.pt, config.json and the records.

    Returns "heldout_loss" (nats per token) and "heldout_tokens" (rank 0 only), "micro_batch", and "changes": how the attempts at this
    run differed in what may change the last bits. Raises Stopped when asked to end.
    """
    if ranks.rank == 0:
        shards, heldout = Shards.of(inputs["tokens"]), Shards.of(inputs["heldout"])  # verified
    ranks.barrier()
    if ranks.rank:
        shards, heldout = Shards(inputs["tokens"].file("shards")), Shards(inputs["heldout"].file("shards"))
    device = resolve(execution.device)
    with numerics(device, execution.threads):
        trainer = Trainer(config, inputs, out, execution, ranks, device)
        tokens = int(inputs["heldout"].count("tokens"))
        validate_now = functools.partial(validate, config, trainer.model, heldout, tokens, trainer.micro, device)
        trainer.train(shards, validate_now)
        done: dict[str, Any] = {"changes": trainer.changes, "micro_batch": trainer.micro}
        if ranks.rank == 0:
            done["heldout_loss"], done["heldout_tokens"] = validate_now()
            checkpoint.save_model(trainer.model, out)
        ranks.barrier()
    return done


def compiles(execution: Execution, device: torch.device) -> bool:
    return device.type == "cuda" if execution.compile is None else execution.compile


def micro_batch(config: TrainConfig, execution: Execution, device: torch.device, ranks: int = 1) -> int:
    """Sequences that the device takes at once."""
    chosen = execution.micro_batch or MICRO_BATCH_TOKENS[device.type] // config.shape.context
    return max(1, min(chosen, config.batch_sequences // ranks))


class LossOf(nn.Module):
    """(inputs, targets), int64[B, T] each -> the mean loss over them, under the config's precision."""

    def __init__(self, model: Transformer, config: TrainConfig) -> None:
        super().__init__()
        self.model, self._z_loss, self._low = model, config.z_loss, config.precision == "bf16"

    def forward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        with torch.autocast(inputs.device.type, dtype=torch.bfloat16, enabled=self._low):
            hidden = self.model.hidden(inputs).flatten(0, 1)
            return optimizer.language_model_loss(hidden, self.model.head.weight, targets.reshape(-1), self._z_loss)


def gradients(loss_of: nn.Module, inputs: Tensor, targets: Tensor, micro: int, ranks: Ranks, stop: StopRequest | None = None) -> Tensor:
    """Adds the gradients of the mean loss over the global batch to the parameters, summed over the ranks.

    loss_of: a LossOf, wrapped by `ranks.wrap`. inputs, targets: this rank's part of the batch, taken `micro` sequences at a time.
    stop: ends early, with part of the gradients, where there is one rank. Returns this rank's part of the mean loss, float32.
    """
    batch_sequences = len(inputs) * ranks.size
    total = torch.zeros((), device=inputs.device)
    for start in range(0, len(inputs), micro):
        if stop is not None and stop.requested and ranks.size == 1:
            break
        x, y = inputs[start : start + micro], targets[start : start + micro]
        last = start + micro >= len(inputs)
        with contextlib.nullcontext() if last else no_sync(loss_of):
            part = loss_of(x, y) * (len(x) / batch_sequences)
            (part * ranks.size).backward()  # the wrapped module divides by the number of ranks
        total += part.detach()
    return total


class Trainer:
    """A model in training. Built from the initial weights, or from the newest saved state in `out`.

    model; micro: sequences at once; first: the step it begins with; changes: see `fit`.
    """

    def __init__(
        self, config: TrainConfig, inputs: Mapping[str, Artifact], out: Path, execution: Execution, ranks: Ranks, device: torch.device
    ) -> None:
        self.config, self.out, self.execution, self.ranks, self.device = config, out, execution, ranks, device
        self.micro = micro_batch(config, execution, device, ranks.size)
        self.model = Transformer(config.shape, config.vocab_size, seed=config.seed).to(device)
        self.optimizer = optimizer.adamw(self.model, config)
        self.states = checkpoint.States(
            out / checkpoint.STATES,
            {
                "config": dataclasses.asdict(config),
                "shape": dataclasses.asdict(config.shape),
                "inputs": {name: {"fingerprint": a.fingerprint, "digest": a.digest} for name, a in inputs.items()},
            },
            keep=execution.keep_states,
            milestone=execution.milestone_steps,
            say=execution.report or print,
        )
        self._made_with = {
            "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
            "torch": str(torch.__version__),
            "threads": execution.threads,
            "micro_batch": self.micro,
            "ranks": ranks.size,
            "compiled": compiles(execution, device),
        }
        self.first, self.changes = 0, list[str]()
        self._losses = list[float]()
        self._resume()
        if compiles(execution, device):
            for block in self.model.blocks:  # one graph serves all of them
                block.compile()

    def _resume(self) -> None:
        state = self.states.newest(self.device) if self.ranks.rank == 0 else None
        self.ranks.barrier()  # rank 0 has cleared what was damaged or half-written
        if self.ranks.rank:
            state = self.states.newest(self.device)
        if state is not None:
            self.model.load_state_dict(state["model"])
            self.optimizer.load_state_dict(state["optimizer"])
            self.first, self.changes = int(state["step"]), list(state["changes"])
            for line in checkpoint.differences(state["made_with"], self._made_with):
                self.changes.append(f"from step {self.first}: {line}")
                self.states.say(f"train: {line} since the state was saved; the last bits may differ from those of an undisturbed run")
        if self.ranks.rank == 0:
            self._losses = _keep_lines(self.out / METRICS, self.first)
            _keep_until(self.out / VALIDATION, self.first)

    def train(self, shards: Shards, validate_now: Callable[[], tuple[float, int]]) -> None:
        """Takes the steps that are left and writes speed.json.

        validate_now: () -> (nats per token, tokens), called every Execution.validate_steps.
        """
        config, ranks = self.config, self.ranks
        loss_of = ranks.wrap(LossOf(self.model, config))
        parameters = list(self.model.parameters())
        batches = Batches(shards, batch_sequences=config.batch_sequences, seed=config.seed)
        mine = ranks.part(config.batch_sequences)
        self.model.train()
        saved, wait_s = time.monotonic(), self.execution.save_every_s
        with (
            StopRequest() as stop,
            (self.out / METRICS if ranks.rank == 0 else Path(os.devnull)).open("a") as metrics,
            contextlib.closing(
                Watch(config, self.execution, self.out if ranks.rank == 0 else None, self.device, ranks.size, self._losses)
            ) as watch,
            contextlib.closing(Prefetch(batches, mine, self.device, self.first, config.steps)) as data,
            self.execution.progress("train", total=config.steps, unit="step") as progress,
        ):
            if self.first:
                progress.update(self.first, note="resumed")
            for step in range(self.first, config.steps):
                rate = optimizer.learning_rate(config, step)
                optimizer.set_learning_rate(self.optimizer, rate)
                inputs, targets, data_wait_s = data[step]
                try:
                    part = gradients(loss_of, inputs, targets, self.micro, ranks, stop)
                except torch.OutOfMemoryError:
                    self._out_of_memory(inputs, targets)
                asked, loss = ranks.sum([float(stop.requested), part.item()], self.device)
                if asked:
                    self._stop(step, metrics)
                norm = torch.nn.utils.clip_grad_norm_(parameters, config.grad_clip).item()
                if not (math.isfinite(loss) and math.isfinite(norm)):
                    self.states.finish()
                    raise StageError(
                        f"train: the loss is {loss} and the gradient's norm {norm} at step {step} of {config.steps} "
                        f"(learning rate {rate:.3g}); lower learning_rate, lengthen warmup_steps or look at the samples of this step"
                    )
                self.optimizer.step()
                self.optimizer.zero_grad(set_to_none=True)
                metrics.write(json.dumps({"step": step, "loss": loss, "learning_rate": rate, "grad_norm": norm}) + "\n")
                progress.update(1, note=watch.step(step, loss, norm, rate, data_wait_s))
                if ranks.rank or step + 1 == config.steps:
                    continue
                every = self.execution.validate_steps
                if every and (step + 1) % every == 0:
                    nats, tokens = validate_now()
                    with (self.out / VALIDATION).open("a") as stream:
                        stream.write(json.dumps({"step": step + 1, "heldout_loss": nats, "heldout_tokens": tokens}) + "\n")
                    self.model.train()
                if time.monotonic() - saved >= wait_s and not self.states.writing:
                    self._save(step + 1, metrics)
                    saved = time.monotonic()
                    wait_s = max(self.execution.save_every_s, self.states.write_s / SAVE_SHARE)
            self.states.finish()
            if ranks.rank == 0:
                speed = watch.summary() | {"first_step": self.first, "checkpoint_stall_s": round(self.states.stall_s, 4)}
                (self.out / SPEED).write_text(json.dumps(speed, indent=2, sort_keys=True) + "\n")

    def _save(self, step: int, metrics: IO[str], *, wait: bool = False) -> None:
        metrics.flush()
        os.fsync(metrics.fileno())
        state = {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}
        self.states.save(step, state | {"made_with": self._made_with, "changes": self.changes}, wait=wait)

    def _stop(self, step: int, metrics: IO[str]) -> NoReturn:
        """Saves and raises Stopped, on all ranks. The gradients of the step that was begun are lost: it is taken again."""
        if self.ranks.rank == 0 and step > self.first:
            self._save(step, metrics, wait=True)
        self.ranks.barrier()
        raise Stopped(
            f"train: asked to end before step {step} of {self.config.steps}; its state is saved in {self.states.folder}, the same command "
            "goes on from it"
        )

    def _out_of_memory(self, inputs: Tensor, targets: Tensor) -> NoReturn:
        """Finds the largest half, quarter ... of the micro-batch whose gradients fit, and says so."""
        micro, loss_of = self.micro, LossOf(self.model, self.config)
        while micro > 1:
            micro //= 2
            self.optimizer.zero_grad(set_to_none=True)
            if self.device.type == "cuda":
                torch.cuda.empty_cache()
            try:
                loss_of(inputs[:micro], targets[:micro]).backward()
            except torch.OutOfMemoryError:
                continue
            advice = f"{micro} fit: use --micro-batch {micro}"
            break
        else:
            advice = "not even one fits: use a smaller size or a device with more memory"
        raise StageError(
            f"train: {self.micro} sequences of {self.config.shape.context} tokens at once do not fit into the memory of {self.device}; "
            + advice
        ) from None


def validate(
    config: TrainConfig, model: Transformer, shards: Shards, tokens: int, batch_sequences: int, device: torch.device
) -> tuple[float, int]:
    """Mean nats per token over the first `validation_tokens` of the held-out pages, and how many tokens that are.

    tokens: length of the held-out stream without padding.
    """
    model.eval()
    total, count = 0.0, 0
    with torch.no_grad():
        for inputs, targets, mask in heldout_batches(shards, tokens, batch_sequences, config.validation_tokens):
            with torch.autocast(device.type, dtype=torch.bfloat16, enabled=config.precision == "bf16"):
                hidden = model.hidden(inputs.to(device)).flatten(0, 1)
                losses = optimizer.target_losses(hidden, model.head.weight, targets.reshape(-1).to(device))
            kept = losses.cpu()[mask.reshape(-1)].double()
            total += kept.sum().item()
            count += len(kept)
    if not count:
        raise StageError("train: the held-out samples hold no token to predict; hold out more pages (CorpusConfig.heldout_fraction)")
    return total / count, count


def _keep_lines(path: Path, count: int) -> list[float]:
    """Cuts metrics.jsonl after its first `count` lines and returns their losses; StageError if it has fewer."""
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    if len(lines) < count:
        raise StageError(f"train: {path} has {len(lines)} steps, the saved state is at step {count}; delete the folder {path.parent}")
    with path.open("w") as stream:
        stream.writelines(lines[:count])
        stream.flush()
        os.fsync(stream.fileno())
    return [json.loads(line)["loss"] for line in lines[:count]]


def _keep_until(path: Path, step: int) -> None:
    """Cuts validation.jsonl, where there is one, after the line of `step`."""
    if path.exists():
        lines = [line for line in path.read_text().splitlines(keepends=True) if line.endswith("\n")]
        path.write_text("".join(line for line in lines if json.loads(line)["step"] <= step))
