"""The states from which an interrupted run goes on, written by all its ranks with `torch.distributed.checkpoint`.

    states = States(out / "states", identity, keep=2, ranks=ranks)
    facts = states.newest(tensors)                  # the newest whole one, read into `tensors`; a damaged one is skipped with a message
    states.save(step, tensors, facts)               # copies, then writes in the background

A state is a folder `step-<n>` with what the ranks wrote (`*.distcp`, `.metadata`) and `manifest.json` (step, identity, facts, size and
SHA-256 of every file). It is written beside its final name, flushed to disk, renamed, and read back; only then are the states before
it deleted. So at any moment, also after `kill -9` or a power cut, there is a whole one. The identity is what the run was started with
(config, digests of its data): a state of another run is refused, with the difference named. Whole tensors are written once, by one
of the ranks that hold them; sharded ones in parts. Any number of ranks, whole or sharded, reads what any other wrote.

The SHA-256 is of the bytes on their way to the file, so what is read back is compared with what was meant.
"""

import contextlib
import datetime
import hashlib
import json
import math
import os
import shutil
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystem, FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from craw4llm.errors import StageError
from craw4llm.externals import sha256_file
from training.distributed import COLLECTIVE_TIMEOUT_S, Ranks

STATES = "states"
MANIFEST = "manifest.json"
HASH_SUFFIX = ".sha256"  # beside each file while a state is written; rank 0 gathers them into the manifest

Tensors = Mapping[str, Mapping[str, Tensor]]


class States:
    """The saved states of one run, in a folder of their own. One run uses it at a time (the stage's lock sees to that).

    Every method is called by all ranks at the same point. identity: JSON-able; what a state must have been saved with. keep: whole
    states kept. milestone: states at multiples of so many steps are kept besides, for going back by hand (0: none). say: receives
    messages.
    stall_s, write_s: seconds for which `save` kept its caller from working, in all; and that the last one took to be on disk.
    """

    def __init__(
        self,
        folder: Path,
        identity: Mapping[str, Any],
        *,
        keep: int = 2,
        milestone: int = 0,
        say: Callable[[str], None] = print,
        ranks: Ranks = Ranks(),  # noqa: B008  frozen
    ) -> None:
        self.folder, self.identity, self.keep, self.milestone, self.say = folder, json.loads(json.dumps(identity)), keep, milestone, say
        self.ranks = ranks
        self.stall_s = self.write_s = 0.0
        self._writer: threading.Thread | None = None
        self._error: BaseException | None = None
        # of its own: collectives of the writing thread must not meet those of the training
        self._group: Any = None
        if ranks.size > 1:
            self._group = dist.new_group(backend="gloo", timeout=datetime.timedelta(seconds=COLLECTIVE_TIMEOUT_S))

    def newest(self, tensors: Tensors) -> dict[str, Any] | None:
        """Reads the newest whole state into `tensors`; returns its facts and "step", or None if nothing was saved.

        A damaged one is skipped with a message, and the one before it is taken. StageError if it was saved with another identity, or
        if there are states and all are damaged: days of work are not begun anew in silence.
        """
        chosen = self.ranks.from_first(self._choose() if self.ranks.rank == 0 else None, self._group)
        if chosen is None:
            return None
        path, manifest = chosen
        with _quiet():
            load(
                {kind: dict(named) for kind, named in tensors.items()},
                storage_reader=FileSystemReader(path),
                process_group=self._group,
                no_dist=self._group is None,
            )
        return dict(manifest["facts"]) | {"step": int(manifest["step"])}

    def save(self, step: int, tensors: Tensors, facts: Mapping[str, Any], *, wait: bool = False) -> None:
        """Saves the state before optimiser step `step`. facts: JSON-able.

        The tensors are copied to the CPU at once and written in the background (after the write before this one). wait: return when
        all is on disk. Raises StageError, and saves nothing, if a tensor is not finite; the error of a background write is raised by
        the next call.
        """
        began = time.monotonic()
        self.finish()
        copied = {kind: {name: _copy(value) for name, value in named.items()} for kind, named in tensors.items()}
        bad = sorted(f"{kind}.{name}" for kind, named in copied.items() for name, value in named.items() if not _finite(value))
        if bad:
            raise StageError(f"train: {bad[0]} is not finite before step {step}; the last saved state is the one before, in {self.folder}")
        self._writer = threading.Thread(
            target=self._write_or_keep_error,
            args=(step, copied, json.loads(json.dumps(facts))),
            name="save-state",
            daemon=self.ranks.size > 1,  # a lost rank must not keep this one from ending; alone, the write is finished first
        )
        self._writer.start()
        if wait:
            self.finish()
        self.stall_s += time.monotonic() - began

    @property
    def writing(self) -> bool:
        return self._writer is not None and self._writer.is_alive()

    def finish(self) -> None:
        """Waits for the write in the background; raises its error."""
        if self._writer is not None:
            self._writer.join()
            self._writer = None
        if self._error is not None:
            error, self._error = self._error, None
            raise error

    def _choose(self) -> tuple[Path, dict[str, Any]] | None:
        for partial in self.folder.glob(".step-*"):
            shutil.rmtree(partial)
        faults, damaged = list[str](), list[Path]()
        for path in reversed(self._finished()):
            try:
                manifest = json.loads((path / MANIFEST).read_text())
                step, identity, facts, files = int(manifest["step"]), manifest["identity"], manifest["facts"], dict(manifest["files"])
            except (OSError, ValueError, KeyError, TypeError) as error:
                fault = f"{MANIFEST}: {type(error).__name__}: {error}"
            else:
                self._refuse_other(path, identity)
                fault = _fault(path, files)
                if not fault:
                    for worse in damaged:  # they would count among the states to keep
                        shutil.rmtree(worse)
                    return path, {"step": step, "facts": facts}
            faults.append(f"{path} ({fault})")
            damaged.append(path)
            self.say(f"train: skipped a damaged state: {faults[-1]}")
        if faults:
            raise StageError(
                f"train: no saved state can be read: {'; '.join(faults)}; delete {self.folder}, and the run begins anew, "
                "or put a copy of a state back"
            )
        return None

    def _write_or_keep_error(self, step: int, tensors: Tensors, facts: Mapping[str, Any]) -> None:
        try:
            began = time.monotonic()
            self._write(step, tensors, facts)
            self.write_s = time.monotonic() - began
        except BaseException as error:  # raised in the caller's thread by `finish`; DCP's own is no Exception
            self._error = error.failures[0][0] if isinstance(error, CheckpointException) and 0 in error.failures else error

    def _write(self, step: int, tensors: Tensors, facts: Mapping[str, Any]) -> None:
        final, partial = self.folder / f"step-{step:08d}", self.folder / f".step-{step:08d}"
        if self.ranks.rank == 0:
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir(parents=True)
        if self._group is not None:
            dist.barrier(self._group)
        with _quiet():
            save(dict(tensors), storage_writer=_Writer(partial), process_group=self._group, no_dist=self._group is None)
        if self.ranks.rank:
            return
        files = {}
        for hashed in sorted(partial.glob(f"*{HASH_SUFFIX}")):
            name = hashed.name.removesuffix(HASH_SUFFIX).removesuffix(".tmp")  # DCP renames its metadata
            files[name] = {"size_bytes": (partial / name).stat().st_size, "sha256": hashed.read_text()}
            hashed.unlink()
        manifest = {"step": step, "identity": self.identity, "facts": facts, "files": files}
        with (partial / MANIFEST).open("w") as text:
            json.dump(manifest, text, indent=2, sort_keys=True)
            text.flush()
            os.fsync(text.fileno())
        _flush_folder(partial)
        if final.exists():  # of an attempt whose later states were damaged
            shutil.rmtree(final)
        partial.rename(final)
        _flush_folder(self.folder)
        fault = _fault(final, files)
        if fault:
            raise StageError(f"train: the state that was just written to {final} does not read back ({fault}); look at the disk")
        kept = [path for path in self._finished() if path != final]
        for path in kept[: max(0, len(kept) - (self.keep - 1))]:
            if not (self.milestone and _step_of(path) % self.milestone == 0):
                shutil.rmtree(path)

    def _finished(self) -> list[Path]:
        """Folders of states, oldest first."""
        found = [path for path in self.folder.glob("step-*") if path.name[5:].isdigit()]
        return sorted(found, key=_step_of)

    def _refuse_other(self, path: Path, saved: Mapping[str, Any]) -> None:
        other = differences(saved, self.identity)
        if other:
            raise StageError(
                f"train: {path} was saved by another run: {'; '.join(other)}; delete {self.folder} to train anew, or run with what it was "
                "saved with"
            )


def clear(folder: Path) -> None:
    """Deletes the states of a run that is finished."""
    shutil.rmtree(folder, ignore_errors=True)


def differences(saved: Mapping[str, Any], now: Mapping[str, Any], prefix: str = "") -> list[str]:
    """One line per field in which two identities differ: "config.seed was 124, now 125"."""
    lines = []
    for name in sorted({*saved, *now}):
        before, after = saved.get(name), now.get(name)
        if isinstance(before, Mapping) and isinstance(after, Mapping):
            lines += differences(before, after, f"{prefix}{name}.")
        elif before != after:
            lines.append(f"{prefix}{name} was {before!r}, now {after!r}")
    return lines


class _Writer(FileSystemWriter):
    """DCP's writer of files, with the SHA-256 of each file written beside it."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.fs = _HashingFiles()


class _HashingFiles(FileSystem):
    @contextlib.contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Iterator[Any]:
        with super().create_stream(path, mode) as stream:
            if mode != "wb":
                yield stream
                return
            hashed = _Hashed(stream)
            yield hashed
        Path(f"{os.fspath(path)}{HASH_SUFFIX}").write_text(hashed.hexdigest())


class _Hashed:
    """A stream that hashes what it is given on its way to the file."""

    def __init__(self, stream: Any) -> None:
        self._stream, self._sha256 = stream, hashlib.sha256()

    def write(self, block: Any) -> int:
        self._sha256.update(block)
        return int(self._stream.write(block))

    def hexdigest(self) -> str:
        return self._sha256.hexdigest()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Without DCP's remark that one process alone is saving."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*torch.distributed is disabled, unavailable or uninitialized.*")
        yield


def _fault(path: Path, files: Mapping[str, Any]) -> str:
    """What is wrong with the files of a state; empty where nothing is."""
    if ".metadata" not in files:
        return f"{MANIFEST} lists no .metadata"
    for name, expected in files.items():
        try:
            size = (path / name).stat().st_size
            if size != expected["size_bytes"]:
                return f"{name} has {size} bytes, its manifest says {expected['size_bytes']}"
            if sha256_file(path / name) != expected["sha256"]:
                return f"the SHA-256 of {name} is not its manifest's"
        except OSError as error:
            return f"{name}: {error.strerror}"
    return ""


def _copy(value: Tensor) -> Tensor:
    """A copy on the CPU; of a sharded tensor the part that is here, which knows its place in the whole."""
    if isinstance(value, DTensor):
        mesh = value.device_mesh
        if mesh.device_type != "cpu":
            mesh = init_device_mesh("cpu", tuple(mesh.shape))
        local = value.to_local().detach().to("cpu", copy=True)
        return DTensor.from_local(local, mesh, value.placements, run_check=False, shape=value.shape, stride=value.stride())
    return value.detach().to("cpu", copy=True)


def _finite(value: Tensor) -> bool:
    local = value.to_local() if isinstance(value, DTensor) else value
    # a finite sum is proof; an infinite one may be an overflow
    return not local.is_floating_point() or math.isfinite(local.sum().item()) or bool(local.isfinite().all())


def _step_of(path: Path) -> int:
    return int(path.name[5:])


def _flush_folder(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
