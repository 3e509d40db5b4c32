"""Where and how stages run: never part of what they are.

    execution = Execution(root=Path("artifacts"), workers=2)
    with execution.progress("crawl", total=3014, unit="page") as progress:
        progress.update(150, note="frontier 1,200")

A terminal gets a tqdm bar; everything else gets plain lines, at most one every few seconds. Inside a run of many stages the lines
go to the runner, which shows them beside the other stages' (`craw4llm.runner`).
"""

import dataclasses
import os
import re
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, TextIO

from craw4llm.dataclass import dataclass

LINE_EVERY_S = 5.0


def host_name() -> str:
    """What socket.gethostname gives, whose module takes 3 ms to import."""
    return os.uname().nodename


def process_name() -> str:
    """<host>-<pid>, for the names of unfinished files in a root that hosts share: in containers the number alone is often the same."""
    return f"{re.sub(r'[^A-Za-z0-9]', '_', host_name())}-{os.getpid()}"


def default_workers() -> int:
    """The processors that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@dataclass(frozen=True, kw_only=True)
class Execution:
    """root: the artifact root. workers: processes a stage may use. device: "auto", "cpu", "cuda" or "cuda:1".
    micro_batch: sequences a device takes at once (0: chosen by the stage). threads: per process of numeric libraries. ranks: processes of
    one training run, each with a device of its own. save_every_s: seconds between two saved training states (more where writing one takes
    long). keep_states: how many of them are kept. milestone_steps: states at multiples of so many steps are kept besides, until the run
    ends (0: none). validate_steps: steps between two held-out losses (0: at the end only). parallel: "ddp" or "fsdp", how ranks share a
    model. loader_workers: threads that read batches ahead. shards_from: address of a copy of the artifact root, from which training
    shards that are missing here are fetched. compile: torch.compile (None: on CUDA). tensorboard: a folder for TensorBoard's files.
    wandb: a Weights & Biases project to log to. memory_bytes: what the processes of a stage that sorts on disk (corpus) take for that,
    all together. report: receives progress lines instead of the terminal, where given.
    """

    root: Path = Path("artifacts")
    workers: int = dataclasses.field(default_factory=default_workers)
    device: str = "auto"
    micro_batch: int = 0
    threads: int = 1
    memory_bytes: int = 2 << 30
    ranks: int = 1
    save_every_s: float = 10.0
    keep_states: int = 2
    milestone_steps: int = 0
    validate_steps: int = 0
    parallel: Literal["ddp", "fsdp"] = "ddp"
    loader_workers: int = 1
    shards_from: str = ""
    compile: bool | None = None
    tensorboard: Path | None = None
    wandb: str = ""
    report: Callable[[str], None] | None = None

    @property
    def memo(self) -> Path:
        """Folder of computed scores, shared by all stages (see craw4llm.scoring.memo)."""
        return self.root / "memo"

    def progress(self, what: str, *, total: int, unit: str) -> "Progress":
        return Progress(what, total=total, unit=unit, report=self.report)


class Progress:
    """A context manager that shows how far a loop is."""

    def __init__(
        self,
        what: str,
        *,
        total: int,
        unit: str,
        report: Callable[[str], None] | None = None,
        stream: TextIO | None = None,
    ) -> None:
        self.what, self.total, self.unit = what, total, unit
        self.done = 0
        self._report = report
        self._stream = stream or sys.stderr
        self._bar: Any = None
        self._started = self._said = 0.0

    def __enter__(self) -> "Progress":
        self._started = self._said = time.monotonic()
        if self._report is None and self._stream.isatty():
            from tqdm import tqdm  # where nobody looks at a bar, its import is a good part of a short run

            self._bar = tqdm(total=self.total, desc=self.what, unit=self.unit, unit_scale=True, file=self._stream, leave=False)
        return self

    def update(self, count: int, note: str = "") -> None:
        """`count` more units are done."""
        self.done += count
        if self._bar is not None:
            if note:
                self._bar.set_postfix_str(note, refresh=False)
            self._bar.update(count)
        elif time.monotonic() - self._said >= LINE_EVERY_S:
            self._say(note)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._bar is not None:
            self._bar.close()

    def _say(self, note: str) -> None:
        self._said = time.monotonic()
        spent = self._said - self._started
        left = spent / self.done * (self.total - self.done) if self.done and self.total else None
        share = f" ({self.done / self.total:.0%})" if self.total else ""
        eta = f", {left:.0f} s left" if left is not None else ""
        rate = f", {self.done / spent:,.0f} {self.unit}s/s" if spent else ""
        line = f"{self.what}: {self.done:,} of {self.total:,} {self.unit}s{share}{rate}{eta}{', ' + note if note else ''}"
        if self._report is not None:
            self._report(line)
        else:
            print(line, file=self._stream, flush=True)
