"""The work of benchmarks/gpu_check.sh."""

import argparse
import dataclasses
import gc
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch

from craw4llm.artifact import Artifact, Result, Store
from craw4llm.errors import ConfigError
from craw4llm.tokens.shards import write_shards
from training import float8
from training.configs import NEOX_VOCAB, TrainConfig
from training.device import numerics, resolve
from training.distributed import Ranks
from training.loop import LossOf, gradients, largest_that_fits
from training.model import Transformer
from training.optimizer import adamw
from training.watch import METRICS, SPEED, peak_flops

LEARNING_STEPS = 40
RUN = """
import json, pathlib, sys
from craw4llm.artifact import Store
from craw4llm.errors import Craw4LLMError
from craw4llm.execution import Execution
from training import train
from training.configs import TrainConfig
root, out = pathlib.Path(sys.argv[1]), pathlib.Path(sys.argv[2])
config, device, micro = json.loads(sys.argv[3]), sys.argv[4], int(sys.argv[5])
out.mkdir(parents=True, exist_ok=True)
store = Store(root)
execution = Execution(root=root, device=device, micro_batch=micro, save_every_s=0.0, compile=False, report=print)
import training.loop
training.loop.SAVE_SHARE = 1e9
try:
    train.run(TrainConfig(**config), {n: store.open("tokenize", n) for n in ("tokens", "heldout")}, out, execution)
except Craw4LLMError as error:
    print(error, file=sys.stderr)
    sys.exit(error.exit_code)
"""


@dataclasses.dataclass
class Table:
    rows: list[tuple[str, str]] = dataclasses.field(default_factory=list)
    failed: bool = False

    def add(self, what: str, value: str, *, failed: bool = False) -> None:
        self.rows.append((what, value))
        self.failed |= failed
        print(f"  {what}: {value}", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cpu", action="store_true", help="the toy model on a CPU")
    cpu = parser.parse_args().cpu
    if not cpu and not torch.cuda.is_available():
        print("gpu_check: torch sees no CUDA device; run it on one, or with --cpu to exercise its path", file=sys.stderr)
        return 2
    device = resolve("cpu" if cpu else "cuda")
    name = "CPU (toy model: the path only, no figure of a card)" if cpu else torch.cuda.get_device_name(device)
    size, vocab, batch = ("toy", 512, 16) if cpu else ("411M", NEOX_VOCAB, 64)
    context = TrainConfig(size=size, token_budget=1 << 40).shape.context
    config = TrainConfig(
        size=size, vocab_size=vocab, precision="fp32" if cpu else "bf16", batch_tokens=batch * context, token_budget=12 * batch * context,
        validation_tokens=4 * context,
    )  # fmt: skip
    table, result = Table(), {}
    with numerics(device, 1):
        micro = fitting(config, device, table, 4 if cpu else 64)
        result["micro_batch"] = micro
        if micro:
            for compiled in (False, True):
                label = "compiled" if compiled else "plain"
                try:
                    tokens_per_s = timed(config, device, micro, batch, compiled)
                except Exception as error:
                    table.add(f"step, {label}", f"failed: {type(error).__name__}: {str(error).splitlines()[0]}", failed=True)
                    continue
                result |= add_speed(table, label, tokens_per_s, config, device)
            result |= eight_bits(config, device, micro, batch, table, emulate=cpu)
            result["resume_equal"] = kill_and_resume(config, device, micro, table)
    print(f"\n{name}, torch {torch.__version__}, {size}, vocabulary {vocab}, context {context}, {config.precision}")
    width = max(len(what) for what, _ in table.rows)
    for what, value in table.rows:
        print(f"  {what:<{width}}  {value}")
    print(json.dumps({"device": name, "size": size, **result}))
    return int(table.failed)


def add_speed(table: Table, label: str, tokens_per_s: float, config: TrainConfig, device: torch.device) -> dict[str, float | None]:
    peak = peak_flops(device)
    mfu = tokens_per_s * config.shape.flops_per_token(config.vocab_size) / peak if peak else None
    table.add(f"step, {label}", f"{tokens_per_s:,.0f} tokens/s, MFU {f'{mfu:.1%}' if mfu else 'not known for this device'}")
    key = label.replace(", ", "_")
    return {f"{key}_tokens_per_s": round(tokens_per_s, 1), f"{key}_mfu": mfu and round(mfu, 4)}


def eight_bits(config: TrainConfig, device: torch.device, micro: int, batch: int, table: Table, emulate: bool) -> dict[str, float | None]:
    """Speed of a compiled step with 8-bit products (torchao), and the loss after a few steps against bfloat16. emulate: CPUs."""
    found: dict[str, float | None] = {"fp8_loss_delta": None}
    try:
        if not emulate:
            speed = timed(dataclasses.replace(config, precision="fp8"), device, micro, batch, compiled=True)
            found |= add_speed(table, "FP8, compiled", speed, config, device)
        losses = {p: learnt(dataclasses.replace(config, precision=p), device, min(micro, 16), emulate) for p in ("bf16", "fp8")}
    except ConfigError as error:  # torchao is an extra; older cards have no such products
        table.add("FP8", f"not measured: {error}")
        return found
    found["fp8_loss_delta"] = losses["fp8"] - losses["bf16"]
    what = "FP8, emulated" if emulate else "FP8"
    delta = found["fp8_loss_delta"]
    table.add(f"{what}, loss after {LEARNING_STEPS} steps", f"{losses['fp8']:.4f}, bf16 {losses['bf16']:.4f}: {delta:+.4f}")
    return found


def learnt(config: TrainConfig, device: torch.device, sequences: int, emulate: bool) -> float:
    """Mean loss of the last five of LEARNING_STEPS steps on samples with something to learn: each token is the one before it plus 3,
    but for one in ten."""
    model = Transformer(config.shape, config.vocab_size).to(device)
    if config.precision == "fp8":
        float8.convert(model, device, emulate=emulate)
    loss_of, optimizer, parameters = LossOf(model, config), adamw(model, config), list(model.parameters())
    generator, losses = torch.Generator().manual_seed(0), []
    for _ in range(LEARNING_STEPS):
        shape = (sequences, config.shape.context + 1)
        jumps = torch.where(torch.rand(shape, generator=generator) < 0.9, 3, torch.randint(256, shape, generator=generator))
        samples = (jumps.cumsum(1) % 256).to(device)
        losses.append(gradients(loss_of, samples[:, :-1], samples[:, 1:], sequences, Ranks()).item())
        torch.nn.utils.clip_grad_norm_(parameters, config.grad_clip)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    return statistics.fmean(losses[-5:])


def fitting(config: TrainConfig, device: torch.device, table: Table, largest: int) -> int:
    """The largest of `largest`, its half, its quarter ... sequences whose step fits; 0 if none does."""

    def attempt(micro: int) -> None:
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats(device)
        timed(config, device, micro, micro, False, rounds=1)

    micro = largest_that_fits(largest, attempt)
    if micro:
        memory = f", {torch.cuda.max_memory_allocated(device) / 2**30:.1f} GiB" if device.type == "cuda" else ""
        table.add("micro-batch that fits", f"{micro} sequences{memory}{' (the largest tried)' if micro == largest else ''}")
        return micro
    table.add("micro-batch that fits", "none", failed=True)
    return 0


def timed(config: TrainConfig, device: torch.device, micro: int, batch: int, compiled: bool, rounds: int = 5) -> float:
    """Tokens per second: median of the rounds after a warm-up of two."""
    model = Transformer(config.shape, config.vocab_size).to(device)
    if config.precision == "fp8":
        float8.convert(model, device)
    if compiled:
        for block in model.blocks:
            block.compile()
    loss_of, optimizer, parameters = LossOf(model, config), adamw(model, config), list(model.parameters())
    samples = torch.randint(config.vocab_size, (batch, config.shape.context + 1), generator=torch.Generator().manual_seed(0)).to(device)
    seconds = []
    for number in range(rounds + 2):
        began = time.perf_counter()
        gradients(loss_of, samples[:, :-1], samples[:, 1:], micro, Ranks())
        torch.nn.utils.clip_grad_norm_(parameters, config.grad_clip)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        if number >= 2:
            seconds.append(time.perf_counter() - began)
    return batch * config.shape.context / statistics.median(seconds)


def kill_and_resume(config: TrainConfig, device: torch.device, micro: int, table: Table) -> bool | None:
    """kill -9 in the middle of a run of 12 steps, another run, an unbroken one: the losses of both."""
    with tempfile.TemporaryDirectory(prefix="gpu-check-") as folder:
        root = Path(folder)
        rng = np.random.default_rng(0)
        for name, count in (("tokens", 12 * config.batch_sequences), ("heldout", 8)):
            samples = rng.integers(0, config.vocab_size, (count, config.shape.context + 1)).astype(np.uint16)
            write_tokens(root, name, samples, config.vocab_size)
        if not run(root, "cut", config, device, micro, kill_after=5):
            table.add("kill -9 and resume", "failed: the run ended before it was killed", failed=True)
            return None
        began = time.monotonic()
        if not run(root, "cut", config, device, micro) or not run(root, "whole", config, device, micro):
            table.add("kill -9 and resume", "failed: see above", failed=True)
            return None
        first = json.loads((root / "cut" / SPEED).read_text())["first_step"]
        equal = (root / "cut" / METRICS).read_bytes() == (root / "whole" / METRICS).read_bytes()
        cut, whole = ([json.loads(line)["loss"] for line in (root / n / METRICS).read_text().splitlines()] for n in ("cut", "whole"))
        apart = max(abs(a - b) for a, b in zip(cut, whole, strict=True))
        table.add(
            "kill -9 and resume",
            f"went on at step {first} of {config.steps}; losses {'equal, bit for bit' if equal else f'apart by at most {apart:.2e}'} "
            f"({time.monotonic() - began:.0f} s)",
            failed=first == 0 or apart > 1e-2,
        )
        return equal


def run(root: Path, name: str, config: TrainConfig, device: torch.device, micro: int, kill_after: int | None = None) -> bool:
    """Whether the run ended as it was meant to. kill_after: kill -9 once so many steps are saved."""
    out = root / name
    command = [sys.executable, "-c", RUN, str(root), str(out), json.dumps(dataclasses.asdict(config)), device.type, str(micro)]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, env=dict(os.environ))
    try:
        while kill_after is not None and process.poll() is None:
            if any(int(p.name[5:]) >= kill_after for p in (out / "states").glob("step-*")):
                process.send_signal(signal.SIGKILL)
                break
            time.sleep(0.02)
        code = process.wait()
    finally:
        process.kill()
    return code == (0 if kill_after is None else -signal.SIGKILL)


def write_tokens(root: Path, name: str, samples: np.ndarray, vocab_size: int) -> None:
    def write(out: Path) -> Result:
        write_shards(out / "shards", samples, np.arange(len(samples)))
        one = {"page": [0], "n_bytes": [4 * samples.size], "first_token": [0], "n_tokens": [samples.size]}
        pq.write_table(pa.table(one), out / "documents.parquet")
        counts = {"samples": len(samples), "sample_tokens": samples.shape[1], "vocab_size": vocab_size, "tokens": samples.size}
        return Result(counts={k: (v, "") for k, v in counts.items()})

    made_with = Artifact(root, "tokenizer", "none", {"digest": "none"})
    Store(root).build("tokenize", name, version=1, config={}, inputs={"tokenizer": made_with}, write=write)


if __name__ == "__main__":
    sys.exit(main())
