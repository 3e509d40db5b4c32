"""The training loop: what every process of a run does, alone or as one of several ranks.

    done = fit(config, inputs, out, execution=execution, ranks=Ranks())

    newest state -> [batch -> gradients, micro-batch by micro-batch -> clip -> AdamW -> line of metrics -> perhaps a state] -> model.pt

Rank 0 writes the files, but for the states, which all write (`training.states`). The rules of resuming and stopping stand in
`training.train`.
"""

import contextlib
import dataclasses
import functools
import json
import math
import os
import socket
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import IO, Any, NoReturn

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from craw4llm.artifact import Artifact
from craw4llm.errors import ArtifactError, ConfigError, StageError, Stopped
from craw4llm.execution import Execution
from craw4llm.externals import sha256_file
from craw4llm.tokens.shards import INDEX, Shards
from training import checkpoint, float8, optimizer, states
from training.configs import TrainConfig
from training.data import Batches, Prefetch, heldout_batches, heldout_bytes
from training.device import numerics, resolve
from training.distributed import Ranks, no_sync
from training.model import Transformer
from training.remote import fetch_missing
from training.stopping import StopRequest
from training.watch import METRICS, SPEED, VALIDATION, Watch

SAVE_SHARE = 0.05  # of the time may go into writing states, so large models write seldom
# Where Execution.micro_batch is 0: on a CPU, and with sharded models, so many tokens at once; else what fits, up to MOST_TOKENS.
MICRO_BATCH_TOKENS = {"cpu": 4096, "cuda": 16 * 2048}
MOST_TOKENS = 64 * 2048
TOO_LARGE = "use a smaller size or a device with more memory"


def fit(config: TrainConfig, inputs: Mapping[str, Artifact], out: Path, *, execution: Execution, ranks: Ranks) -> dict[str, Any]:
    """Trains and validates; rank 0 writes model.pt, config.json and the records.

    Returns "heldout_loss" (nats per token), "heldout_tokens" and "heldout_bits_per_byte" (rank 0 only), "micro_batch", and "changes":
    how the attempts at this run differed in what may change the last bits. Raises Stopped when asked to end.
    """
    opened = _open_data(inputs, execution, ranks)
    shards, heldout = opened["tokens"], opened["heldout"]
    device = resolve(execution.device)
    with numerics(device, execution.threads):
        trainer = Trainer(config, inputs, out, execution, ranks, device)
        validate_now = functools.partial(validate, config, trainer.loss_of, heldout, inputs["heldout"], trainer.micro, device)
        trainer.train(shards, validate_now)
        done: dict[str, Any] = {"changes": trainer.changes, "micro_batch": trainer.micro}
        if ranks.rank == 0 or trainer.sharded:
            found, weights = validate_now(), checkpoint.weights_of(trainer.model)
        if ranks.rank == 0:
            done |= found
            checkpoint.save_model(trainer.model, out, weights)
        ranks.barrier()
    return done


def _open_data(inputs: Mapping[str, Artifact], execution: Execution, ranks: Ranks) -> dict[str, Shards]:
    """The shards of the inputs, on every machine fetched where they are missing, verified, and those that rank 0 has.

    ArtifactError, on all ranks, names the ranks that see other data.
    """
    opened = {}
    for first in (True, False):  # rank 0 before the others: their machines may share its folder
        if (ranks.rank == 0) == first and (first or ranks.local == 0):
            for artifact in inputs.values():
                fetch_missing(artifact, execution.shards_from, execution.workers)
            opened = {name: Shards.of(artifact) for name, artifact in inputs.items()}  # verified
        ranks.barrier()
    digests = {name: sha256_file(artifact.file(f"shards/{INDEX}")) for name, artifact in inputs.items()}
    seen = ranks.from_all((socket.gethostname(), digests))
    others = [f"rank {rank} on {host}" for rank, (host, found) in enumerate(seen) if found != seen[0][1]]
    if others:
        raise ArtifactError(
            f"train: {', '.join(others)} has other samples under {execution.root} than rank 0 on {seen[0][0]}; expected the same artifacts "
            "on every machine: share the folder, or copy it anew"
        )
    return opened or {name: Shards(artifact.file("shards")) for name, artifact in inputs.items()}


def compiles(execution: Execution, device: torch.device) -> bool:
    return device.type == "cuda" if execution.compile is None else execution.compile


def largest_that_fits(most: int, attempt: Callable[[int], None]) -> int:
    """The largest power of two up to `most` for which `attempt` doesn't raise OutOfMemoryError; 0 if there is none."""
    micro = 1 << max(0, most.bit_length() - 1)
    while micro:
        try:
            attempt(micro)
            return micro
        except torch.OutOfMemoryError:
            micro //= 2
    return 0


class LossOf(nn.Module):
    """(inputs, targets), int64[B, T] each -> the mean loss over them, under the config's precision.

    each: cross-entropy of every target instead, float32[B x T], without gradients.
    """

    def __init__(self, model: Transformer, config: TrainConfig) -> None:
        super().__init__()
        self.model, self._z_loss, self._low = model, config.z_loss, config.precision != "fp32"

    def forward(self, inputs: Tensor, targets: Tensor, each: bool = False) -> Tensor:
        with torch.autocast(inputs.device.type, dtype=torch.bfloat16, enabled=self._low):
            hidden, head = self.model.hidden(inputs).flatten(0, 1), self.model.head.weight
            if each:
                return optimizer.target_losses(hidden, head, targets.reshape(-1))
            return optimizer.language_model_loss(hidden, head, targets.reshape(-1), self._z_loss)


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

    model; loss_of: its LossOf; sharded: whether other ranks hold parts of it; micro: sequences at once; first: the step it begins with;
    changes: see `fit`.
    """

    def __init__(
        self, config: TrainConfig, inputs: Mapping[str, Artifact], out: Path, execution: Execution, ranks: Ranks, device: torch.device
    ) -> None:
        self.config, self.out, self.execution, self.ranks, self.device = config, out, execution, ranks, device
        self.sharded = execution.parallel == "fsdp"
        if self.sharded and ranks.size == 1:
            raise ConfigError("parallel is fsdp with one rank; expected --ranks above 1, or --parallel ddp")
        self.model = Transformer(config.shape, config.vocab_size, seed=config.seed).to(device)
        if config.precision == "fp8":
            float8.convert(self.model, device)
        self.loss_of = LossOf(self.model, config)
        self.states = states.States(
            out / states.STATES,
            {
                "config": dataclasses.asdict(config),
                "shape": dataclasses.asdict(config.shape),
                "inputs": {name: {"fingerprint": a.fingerprint, "digest": a.digest} for name, a in inputs.items()},
            },
            keep=execution.keep_states,
            milestone=execution.milestone_steps,
            say=execution.report or print,
            ranks=ranks,
        )
        self.micro = 0 if self.sharded else self._fitting_micro_batch()
        if self.micro == 0:
            self.micro = self._stated_micro_batch()
        if compiles(execution, device):
            for block in self.model.blocks:  # one graph serves all of them
                block.compile()
        if self.sharded:
            ranks.shard(self.loss_of, self.model.blocks, device)
        self.optimizer = optimizer.adamw(self.model, config)
        self._made_with = {
            "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
            "torch": str(torch.__version__),
            "threads": execution.threads,
            "micro_batch": self.micro,
            "ranks": ranks.size,
            "parallel": execution.parallel,
            "compiled": compiles(execution, device),
        }
        self.first, self.changes = 0, list[str]()
        self._losses = list[float]()
        self._resume()

    def _stated_micro_batch(self) -> int:
        """Execution.micro_batch, or MICRO_BATCH_TOKENS; at most this rank's part of the batch."""
        chosen = self.execution.micro_batch or MICRO_BATCH_TOKENS[self.device.type] // self.config.shape.context
        return max(1, min(chosen, self.config.batch_sequences // self.ranks.size))

    def _fitting_micro_batch(self) -> int:
        """On CUDA, where none is asked for: the largest power of two whose gradients fit beside AdamW's moments. 0: not looked for."""
        if self.device.type != "cuda" or self.execution.micro_batch:
            return 0
        context = self.config.shape.context
        moments = torch.empty(2 * sum(p.numel() for p in self.model.parameters()), device=self.device)

        def attempt(micro: int) -> None:
            self._forget()
            tokens = torch.zeros((micro, context), dtype=torch.int64, device=self.device)
            self.loss_of(tokens, tokens).backward()

        found = largest_that_fits(min(MOST_TOKENS // context, self.config.batch_sequences // self.ranks.size), attempt)
        del moments
        self._forget()
        if not found:
            raise StageError(f"train: not even one sequence of {context} tokens fits into the memory of {self.device}; " + TOO_LARGE)
        return self.ranks.smallest(found)

    def _forget(self) -> None:
        """Frees gradients and what the allocator keeps."""
        self.model.zero_grad(set_to_none=True)
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def _resume(self) -> None:
        tensors = optimizer.empty_state(self.model) | {"model": self.model.state_dict()}
        state = self.states.newest(tensors)
        if state is not None:
            optimizer.restore(self.optimizer, self.model, tensors)
            self.first, self.changes = int(state["step"]), list(state["changes"])
            for line in states.differences(state["made_with"], self._made_with):
                self.changes.append(f"from step {self.first}: {line}")
                self.states.say(f"train: {line} since the state was saved; the last bits may differ from those of an undisturbed run")
        if self.ranks.rank == 0:
            self._losses = _keep_lines(self.out / METRICS, self.first)
            _keep_until(self.out / VALIDATION, self.first)

    def train(self, shards: Shards, validate_now: Callable[[], dict[str, float | int]]) -> None:
        """Takes the steps that are left and writes speed.json.

        validate_now: what is written to validation.jsonl every Execution.validate_steps.
        """
        config, ranks = self.config, self.ranks
        loss_of = ranks.wrap(self.loss_of)
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
            contextlib.closing(Prefetch(batches, mine, self.device, self.first, config.steps, self.execution.loader_workers)) as data,
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
                due = ranks.rank == 0 and time.monotonic() - saved >= wait_s
                asked, loss, save, writing = ranks.sum(
                    [float(stop.requested), part.item(), float(due), float(self.states.writing)], self.device
                )
                if asked:
                    self._stop(step, metrics)
                norm = optimizer.clip(parameters, config.grad_clip)
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
                if step + 1 == config.steps:
                    continue
                every = self.execution.validate_steps
                if every and (step + 1) % every == 0 and (ranks.rank == 0 or self.sharded):
                    found = validate_now()
                    watch.validated(step + 1, found)
                    if ranks.rank == 0:
                        with (self.out / VALIDATION).open("a") as stream:
                            stream.write(json.dumps({"step": step + 1} | found) + "\n")
                    self.model.train()
                if save and not writing:
                    self._save(step + 1, metrics)
                    saved = time.monotonic()
                    wait_s = max(self.execution.save_every_s, self.states.write_s / SAVE_SHARE)
            self.states.finish()
            if ranks.rank == 0:
                speed = watch.summary() | {"first_step": self.first, "checkpoint_stall_s": round(self.states.stall_s, 4)}
                (self.out / SPEED).write_text(json.dumps(speed, indent=2, sort_keys=True) + "\n")

    def _save(self, step: int, metrics: IO[str], *, wait: bool = False) -> None:
        """On all ranks."""
        if self.ranks.rank == 0:
            metrics.flush()
            os.fsync(metrics.fileno())
        tensors = optimizer.state_of(self.optimizer, self.model) | {"model": self.model.state_dict()}
        self.states.save(step, tensors, {"made_with": self._made_with, "changes": self.changes}, wait=wait)

    def _stop(self, step: int, metrics: IO[str]) -> NoReturn:
        """Saves and raises Stopped, on all ranks. The gradients of the step that was begun are lost: it is taken again."""
        if step > self.first:
            self._save(step, metrics, wait=True)
        self.ranks.barrier()
        raise Stopped(
            f"train: asked to end before step {step} of {self.config.steps}; its state is saved in {self.states.folder}, the same command "
            "goes on from it"
        )

    def _out_of_memory(self, inputs: Tensor, targets: Tensor) -> NoReturn:
        """Finds the largest power of two below the micro-batch whose gradients fit, and says so."""

        def attempt(micro: int) -> None:
            self._forget()
            LossOf(self.model, self.config)(inputs[:micro], targets[:micro]).backward()

        if self.sharded:  # the other ranks may be anywhere: nothing can be tried
            advice = f"try --micro-batch {self.micro // 2}" if self.micro > 1 else TOO_LARGE
        else:
            found = largest_that_fits(self.micro - 1, attempt) if self.micro > 1 else 0
            advice = f"{found} fit: use --micro-batch {found}" if found else f"not even one fits: {TOO_LARGE}"
        raise StageError(
            f"train: {self.micro} sequences of {self.config.shape.context} tokens at once do not fit into the memory of {self.device}; "
            + advice
        ) from None


def validate(
    config: TrainConfig, loss_of: nn.Module, shards: Shards, heldout: Artifact, batch_sequences: int, device: torch.device
) -> dict[str, float | int]:
    """The loss on the first `validation_tokens` of the held-out pages.

    Returns "heldout_loss" (mean nats per token), "heldout_tokens" (how many those are) and "heldout_bits_per_byte": the same loss over
    the UTF-8 bytes of the text that the samples hold. On packed samples, so a page is read behind the one before it: the evaluation's
    bits per byte, page by page, differ.
    """
    tokens = int(heldout.count("tokens"))
    loss_of.eval()
    total, count, last = 0.0, 0, 0
    with torch.no_grad():
        for inputs, targets, mask in heldout_batches(shards, tokens, batch_sequences, config.validation_tokens):
            losses = loss_of(inputs.to(device), targets.to(device), each=True)
            kept = losses.cpu()[mask.reshape(-1)].double()
            total += kept.sum().item()
            count += len(kept)
            last += len(inputs) * shards.sample_tokens
    if isinstance(loss_of, FSDPModule):
        loss_of.reshard()  # the outermost layer stays gathered after a forward pass
    if not count:
        raise StageError("train: the held-out samples hold no token to predict; hold out more pages (CorpusConfig.heldout_fraction)")
    last = min(last, tokens)
    bits = total / count / math.log(2) * last / heldout_bytes(heldout, last)
    return {"heldout_loss": total / count, "heldout_tokens": count, "heldout_bits_per_byte": bits}


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
