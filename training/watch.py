"""What a person watches while a model trains: speed, utilisation, memory, time spent waiting for data; spikes of the loss.

    watch = Watch(config, execution, out, device, ranks)
    note = watch.step(step, loss, grad_norm, rate, data_wait_s)        # after every step; a line for the progress bar
    watch.summary()                                                     # for speed.json

`metrics.jsonl` (in the digest) has no times; `speed.jsonl` has them: one line every LOG_EVERY_S seconds and one at the end. MFU is
model FLOPs per second over the device's peak (PaLM, arXiv 2204.02311, appendix B; attention counted in full): known for the cards in
PEAK_FLOPS, else null.
"""

import collections
import json
import os
import statistics
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from craw4llm.errors import ConfigError
from craw4llm.execution import Execution
from training.configs import TrainConfig

if TYPE_CHECKING:  # `plan` reads PEAK_FLOPS: torch is imported where the work begins
    import torch

LOG_EVERY_S = 10.0
METRICS = "metrics.jsonl"
SPEED = "speed.json"
SPEED_LINES = "speed.jsonl"
VALIDATION = "validation.jsonl"
# bfloat16, dense, from NVIDIA's data sheets, by a part of the name that torch gives
PEAK_FLOPS = {"H100 PCIe": 756e12, "H100 NVL": 835e12, "H100": 989.4e12, "H200": 989.4e12, "A100": 312e12, "L40S": 362e12}
SPIKE_WINDOW, SPIKE_SIGMAS, SPIKE_AFTER = 128, 6.0, 32


class Spikes:
    """Counts the steps whose loss is more than SPIKE_SIGMAS standard deviations above the mean of the SPIKE_WINDOW losses before it.

    A loss that is a spike does not enter the window. The first SPIKE_AFTER losses are never one.
    """

    def __init__(self, losses: Iterable[float] = ()) -> None:
        self.count = 0
        self._window: collections.deque[float] = collections.deque(maxlen=SPIKE_WINDOW)
        for loss in losses:
            self.add(loss)

    def add(self, loss: float) -> bool:
        """Whether this loss, the next one, is a spike."""
        if len(self._window) >= SPIKE_AFTER:
            mean = statistics.fmean(self._window)
            if loss > mean + SPIKE_SIGMAS * statistics.pstdev(self._window, mean):
                self.count += 1
                return True
        self._window.append(loss)
        return False


class Watch:
    """Measures a run as one of its processes sees it, from its first step on. out: None writes nothing (all ranks but the first)."""

    def __init__(
        self,
        config: TrainConfig,
        execution: Execution,
        out: Path | None,
        device: "torch.device",
        ranks: int,
        losses: Iterable[float] = (),
    ) -> None:
        self._config, self._device, self._ranks = config, device, ranks
        self._flops = config.shape.flops_per_token(config.vocab_size)
        self._peak = peak_flops(device)
        self._sinks = [] if out is None else _sinks(execution, config, out)
        self._stream = (out / SPEED_LINES if out else Path(os.devnull)).open("a")
        self.spikes = Spikes(losses)
        self._began = self._logged = time.monotonic()
        self._steps = self._logged_steps = 0
        self._wait_s = self._logged_wait_s = 0.0
        self._last: tuple[int, dict[str, float]] = 0, {}

    def step(self, step: int, loss: float, grad_norm: float, rate: float, data_wait_s: float) -> str:
        now = time.monotonic()
        self._steps += 1
        self._wait_s += data_wait_s
        spike = self.spikes.add(loss)
        speed = self._speed(self._steps, now - self._began)
        self._last = step, {"loss": loss, "grad_norm": grad_norm, "learning_rate": rate}
        if now - self._logged >= LOG_EVERY_S:
            self._log(now)
        mfu = f", MFU {speed['mfu']:.1%}" if speed["mfu"] is not None else ""
        return f"loss {loss:.3f}{' (spike)' if spike else ''}, {speed['tokens_per_s']:,.0f} tokens/s{mfu}"

    def validated(self, step: int, found: dict[str, float | int]) -> None:
        """A held-out loss before step `step`."""
        for sink, _ in self._sinks:
            sink(step, found)

    def summary(self) -> dict[str, Any]:
        seconds = time.monotonic() - self._began
        return self._speed(self._steps, seconds) | {
            "seconds": round(seconds, 3),
            "data_wait_s": round(self._wait_s, 4),
            "memory_bytes": self._memory(),
        }

    def close(self) -> None:
        """Logs what was not yet, so that a short run has a line too."""
        if self._steps > self._logged_steps:
            self._log(time.monotonic())
        self._stream.close()
        for _, close in self._sinks:
            close()

    def _log(self, now: float) -> None:
        step, values = self._last
        span, steps = now - self._logged, self._steps - self._logged_steps
        line = self._speed(steps, span) | {
            "memory_bytes": self._memory(),
            "data_wait_share": round((self._wait_s - self._logged_wait_s) / span, 5) if span else None,
            "loss_spikes": self.spikes.count,
        }
        self._stream.write(json.dumps(line | {"step": step}, sort_keys=True) + "\n")
        self._stream.flush()
        for sink, _ in self._sinks:
            sink(step, values | line)
        self._logged, self._logged_steps, self._logged_wait_s = now, self._steps, self._wait_s

    def _speed(self, steps: int, seconds: float) -> dict[str, float | None]:
        """Over all ranks. None where there was no step, or the device's peak is not known."""
        if not steps or seconds <= 0:
            return {"tokens_per_s": None, "mfu": None}
        tokens_per_s = steps * self._config.batch_tokens / seconds
        mfu = tokens_per_s * self._flops / (self._peak * self._ranks) if self._peak else None
        return {"tokens_per_s": round(tokens_per_s, 1), "mfu": None if mfu is None else round(mfu, 4)}

    def _memory(self) -> int:
        """Highest use so far: of the device, or of this process on a CPU."""
        if self._device.type == "cuda":
            import torch

            return int(torch.cuda.max_memory_allocated(self._device))
        import resource

        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def peak_flops(device: "torch.device") -> float | None:
    if device.type != "cuda":
        return None
    import torch

    name = torch.cuda.get_device_name(device)
    return next((peak for part, peak in PEAK_FLOPS.items() if all(word in name for word in part.split())), None)


def _sinks(execution: Execution, config: TrainConfig, out: Path) -> list[tuple[Callable[[int, dict[str, Any]], None], Callable[[], None]]]:
    """TensorBoard and Weights & Biases, where asked for: what takes a step and its values, and what ends it.

    out: gives the run its name, so that a run that goes on is one run there too. ConfigError if the package is not installed.
    """
    sinks: list[tuple[Callable[[int, dict[str, Any]], None], Callable[[], None]]] = []
    name = out.name.removeprefix(".partial-")
    if execution.tensorboard is not None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise ConfigError(f"tensorboard is {execution.tensorboard}; it needs a package: pip install 'craw4llm[tensorboard]'") from error
        writer = SummaryWriter(str(execution.tensorboard / name))

        def to_tensorboard(step: int, values: dict[str, Any]) -> None:
            for what, value in values.items():
                if value is not None:
                    writer.add_scalar(f"train/{what}", value, step)
            writer.flush()

        sinks.append((to_tensorboard, writer.close))
    if execution.wandb:
        try:
            import wandb
        except ImportError as error:
            raise ConfigError(f"wandb is {execution.wandb!r}; it needs a package: pip install 'craw4llm[wandb]'") from error
        import dataclasses

        run = wandb.init(project=execution.wandb, id=name, name=name, resume="allow", config=dataclasses.asdict(config))
        sinks.append((lambda step, values: run.log({k: v for k, v in values.items() if v is not None}, step=step), run.finish))
    return sinks
