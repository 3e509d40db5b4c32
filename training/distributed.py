"""Several processes that train one model, one device each (data parallel).

    result = launch(work, (config, ...), execution)      # work(*args, ranks=Ranks(rank, size)) in every process; rank 0's result

On one machine the stage starts them itself, as children that end with their parent (`craw4llm.processes`), and forwards SIGTERM to
them. They meet through a file in a temporary folder, so two runs on one machine cannot collide on a port. Across machines torchrun
starts them (`training.node`). NCCL between CUDA devices, gloo on CPUs and for all that is not a gradient.

A step is the same for any number of ranks: rank r of n takes the r-th of n equal parts of the global batch, gradients are summed, and
every rank then makes the same update. All of them take the same number of steps by construction. "ddp": every rank holds the whole
model and optimiser; "fsdp": each holds its part of every tensor and gathers a layer when it is computed (FSDP2, `fully_shard`).
"""

import contextlib
import dataclasses
import datetime
import multiprocessing
import os
import queue
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from concurrent.futures.process import BrokenProcessPool
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard

from craw4llm.errors import ConfigError, Craw4LLMError, StageError
from craw4llm.execution import Execution
from craw4llm.processes import worker_pool
from training.device import resolve
from training.stopping import StopRequest

COLLECTIVE_TIMEOUT_S = 1800.0  # validation and a save at the end of a run happen on rank 0 while the others wait
OTHER_RANKS_S = 5.0  # after the first error, for the error that caused it


@dataclasses.dataclass(frozen=True)
class Ranks:
    """This process's place among those that train. Every method is called by all of them at the same point.

    local: its number among those of its machine, which is the number of its CUDA device.
    """

    rank: int = 0
    size: int = 1
    local: int = 0

    def sum(self, values: list[float], device: torch.device) -> list[float]:
        """Sums over the ranks, float64 (float32 where the device has no better)."""
        if self.size == 1:
            return values
        tensor = torch.tensor(values, dtype=torch.float64, device=device)
        dist.all_reduce(tensor)
        return tensor.tolist()

    def barrier(self) -> None:
        if self.size > 1:
            dist.all_reduce(torch.zeros(()))

    def from_first(self, value: Any, group: Any = None) -> Any:
        """Rank 0's value, which can be pickled."""
        if self.size == 1:
            return value
        box = [value]
        dist.broadcast_object_list(box, src=0, group=group, device=torch.device("cpu"))
        return box[0]

    def from_all(self, value: Any) -> list[Any]:
        """Every rank's value, which can be pickled, by rank."""
        if self.size == 1:
            return [value]
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value)
        return values

    def smallest(self, value: int) -> int:
        """The smallest of the ranks' values."""
        return min(self.from_all(value))

    def part(self, batch_sequences: int) -> slice:
        """This rank's rows of a global batch. ConfigError if it cannot be cut into equal parts."""
        if batch_sequences % self.size:
            raise ConfigError(
                f"train: {self.size} ranks and a batch of {batch_sequences} sequences; expected a number of ranks that divides the batch"
            )
        each = batch_sequences // self.size
        return slice(self.rank * each, (self.rank + 1) * each)

    def wrap(self, module: torch.nn.Module) -> torch.nn.Module:
        """The module with its gradients averaged over the ranks during backward; itself where there is one rank, or it is sharded."""
        if self.size == 1 or isinstance(module, FSDPModule):
            return module
        return torch.nn.parallel.DistributedDataParallel(module, gradient_as_bucket_view=True)

    def shard(self, module: torch.nn.Module, layers: Iterable[torch.nn.Module], device: torch.device) -> None:
        """Cuts the parameters of the module into equal parts, one for each rank; `layers` are gathered one at a time.

        Before the optimiser is made: the parameters are other objects afterwards. Parameters, gathering and the averaging of gradients
        stay in float32, as under DDP.
        """
        mesh = init_device_mesh(device.type, (self.size,))
        for layer in layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(module, mesh=mesh)


@contextlib.contextmanager
def no_sync(module: torch.nn.Module) -> Iterator[None]:
    """Within it, gradients of a wrapped or sharded module are only accumulated."""
    if isinstance(module, FSDPModule):
        module.set_requires_gradient_sync(False)
        try:
            yield
        finally:
            module.set_requires_gradient_sync(True)
    elif isinstance(module, torch.nn.parallel.DistributedDataParallel):
        with module.no_sync():
            yield
    else:
        yield


def connect(rank: int, size: int, local: int, device: torch.device, init_method: str) -> Ranks:
    """Makes this process one of `size` ranks. init_method: where they meet, for torch."""
    if device.type == "cuda":
        torch.cuda.set_device(local)
    # both, as states are gathered on CPUs; a connection is made when it is first used
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    timeout = datetime.timedelta(seconds=COLLECTIVE_TIMEOUT_S)
    dist.init_process_group(backend, init_method=init_method, rank=rank, world_size=size, timeout=timeout)
    return Ranks(rank, size, local)


def launch(work: Callable[..., Any], args: tuple[Any, ...], execution: Execution) -> Any:
    """Runs `work(*args, execution=..., ranks=...)` in `execution.ranks` processes; returns what rank 0 returned.

    work: a function of a module. Its error is raised here (of the errors of several ranks the project's own goes first); the other
    processes are ended. StageError if one of them was killed.
    """
    _check_devices(execution)
    lines: Any = multiprocessing.get_context("spawn").Queue()
    sent = dataclasses.replace(execution, report=None)
    with (
        tempfile.TemporaryDirectory(prefix="craw4llm-ranks-") as folder,
        _drained(lines, execution.report),
        worker_pool(execution.ranks, initializer=_start, initargs=(lines if execution.report else None,)) as pool,
    ):
        futures = [pool.submit(_in_rank, work, args, sent, rank, f"{folder}/meet") for rank in range(execution.ranks)]
        processes = list((pool._processes or {}).values())

        def forward() -> None:
            for process in processes:
                if process.is_alive():
                    process.terminate()

        try:
            with StopRequest(forward):
                wait(futures, return_when=FIRST_EXCEPTION)
                if any(f.done() and f.exception() for f in futures):
                    wait(futures, timeout=OTHER_RANKS_S)
                    raise _cause(futures)
                return futures[0].result()
        except BaseException:
            for process in processes:  # the others may wait for a lost one in a collective operation
                process.kill()
            raise


def _cause(futures: list[Future[Any]]) -> BaseException:
    errors = [error for f in futures if f.done() and (error := f.exception()) is not None]
    for error in errors:
        if isinstance(error, Craw4LLMError):
            return error
    if any(isinstance(error, BrokenProcessPool) for error in errors):
        return StageError(
            f"train: one of the {len(futures)} training processes was killed from outside (out of memory?); run it again, it goes on "
            "from its last saved state"
        )
    return errors[0]


def _check_devices(execution: Execution) -> None:
    device = resolve(execution.device)
    if device.type != "cuda":
        return
    if device.index is not None:
        raise ConfigError(f"device is {execution.device!r} with {execution.ranks} ranks; expected `cuda`: each rank takes its own")
    if torch.cuda.device_count() < execution.ranks:
        raise ConfigError(f"ranks is {execution.ranks}, but torch sees {torch.cuda.device_count()} CUDA devices; expected one for each")


_lines: Any = None


def _start(lines: Any) -> None:
    global _lines
    _lines = lines


def _in_rank(work: Callable[..., Any], args: tuple[Any, ...], execution: Execution, rank: int, meet: str) -> Any:
    """The whole life of one rank."""
    if _lines is not None:
        execution = dataclasses.replace(execution, report=_lines.put if rank == 0 else _nothing)
    elif rank:
        execution = dataclasses.replace(execution, report=_nothing)
    device = resolve(execution.device)
    if device.type == "cuda":
        execution = dataclasses.replace(execution, device=f"cuda:{rank}")
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # all on this machine; the host's name need not resolve
    ranks = connect(rank, execution.ranks, rank, device, f"file://{meet}")
    try:
        return work(*args, execution=execution, ranks=ranks)
    finally:
        dist.destroy_process_group()


def _nothing(line: str) -> None:
    """Only rank 0 is heard."""


@contextlib.contextmanager
def _drained(lines: Any, report: Callable[[str], None] | None) -> Iterator[None]:
    """Passes on the lines of rank 0 for the block."""
    if report is None:
        yield
        return
    stop = threading.Event()

    def drain() -> None:
        while not stop.is_set():
            with contextlib.suppress(queue.Empty):
                report(lines.get(timeout=0.2))

    thread = threading.Thread(target=drain, daemon=True)
    thread.start()
    try:
        yield
    finally:
        until = time.monotonic() + 1.0
        while not lines.empty() and time.monotonic() < until:
            time.sleep(0.05)
        stop.set()
        thread.join()
