"""Model files: the finished checkpoint of a train artifact, and the states from which an interrupted run goes on.

    model, config = load_model(artifact, device)

    states = States(out / "states", identity, keep=2)
    state = states.newest(device)                  # the newest whole one; a damaged one is skipped with a message
    states.save(step, {"model": ..., ...})         # copies, then writes in the background

`model.pt` is a state dict of float32 tensors, `config.json` says which model it belongs to. Equal tensors give equal bytes.

A state is a folder `step-<n>` with `state.pt` and `manifest.json` (step, identity, size and SHA-256). It is written beside its final
name, flushed to disk, renamed, and read back; only then are the states before it deleted. So at any moment, also after `kill -9` or a
power cut, there is a whole one. The identity is what the run was started with (config, digests of its data): a state of another
run is refused, with the difference named.
"""

import dataclasses
import hashlib
import json
import math
import os
import shutil
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import IO, Any

import torch
from torch import Tensor

from craw4llm.artifact import Artifact
from craw4llm.errors import ArtifactError, StageError
from craw4llm.externals import sha256_file
from training.configs import Shape
from training.model import Transformer

MODEL = "model.pt"
CONFIG = "config.json"
STATES = "states"
STATE = "state.pt"
STATE_MANIFEST = "manifest.json"


def save_model(model: Transformer, folder: Path) -> None:
    """Writes model.pt and config.json."""
    tensors = {name: value.detach().to("cpu", torch.float32).contiguous() for name, value in model.state_dict().items()}
    torch.save(tensors, folder / MODEL)
    config = {"shape": dataclasses.asdict(model.shape), "vocab_size": model.vocab_size, "context": model.shape.context}
    (folder / CONFIG).write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")


def load_model(artifact: Artifact, device: torch.device | str = "cpu") -> tuple[Transformer, dict[str, Any]]:
    """The model of a train artifact, in evaluation mode on `device`, and its config.json."""
    config = json.loads(artifact.file(CONFIG).read_text())
    return load_weights(artifact.file(MODEL), config, device), config


def load_folder(folder: Path, device: torch.device | str = "cpu") -> tuple[Transformer, dict[str, Any]]:
    """The same of any folder with model.pt and config.json (`training.export` writes some)."""
    try:
        config = json.loads((folder / CONFIG).read_text())
    except (OSError, ValueError) as error:
        raise ArtifactError(f"{folder} has no readable {CONFIG} ({error}); expected the folder of a train artifact") from error
    return load_weights(folder / MODEL, config, device), config


def load_weights(path: Path, config: dict[str, Any], device: torch.device | str = "cpu") -> Transformer:
    """The model that config.json describes, with the weights of a model.pt. Raises ArtifactError where they do not fit."""
    with torch.device("meta"):
        empty = Transformer(Shape(**config["shape"]), int(config["vocab_size"]))
    try:
        tensors = torch.load(path, map_location="cpu", weights_only=True)
        empty.load_state_dict(tensors, assign=True)
    except Exception as error:  # torch raises many types for a damaged file, with long advice that does not apply
        reason = str(error).strip().split("\n", 1)[0][:200]
        raise ArtifactError(f"{path} does not hold the model that {CONFIG} describes ({reason}); run the stage again") from error
    return empty.with_rotary_table().to(device).eval()


class States:
    """The saved states of one run, in a folder of their own. One process uses it at a time (the stage's lock sees to that).

    identity: JSON-able; what a state must have been saved with. keep: whole states kept. milestone: states at multiples of so many
        steps are kept besides, for going back by hand (0: none). say: receives messages.
    stall_s, write_s: seconds for which `save` kept its caller from working, in all; and that the last one took to be on disk.
    """

    def __init__(
        self, folder: Path, identity: Mapping[str, Any], *, keep: int = 2, milestone: int = 0, say: Callable[[str], None] = print
    ) -> None:
        self.folder, self.identity, self.keep, self.milestone, self.say = folder, json.loads(json.dumps(identity)), keep, milestone, say
        self.stall_s = self.write_s = 0.0
        self._writer: threading.Thread | None = None
        self._error: Exception | None = None

    def newest(self, device: torch.device | str = "cpu") -> dict[str, Any] | None:
        """The newest whole state (as given to `save`, and "step"), or None if nothing was saved.

        A damaged one is skipped with a message, and the one before it is taken. StageError if it was saved with another identity, or
        if there are states and all are damaged: days of work are not begun anew in silence.
        """
        for partial in self.folder.glob(".step-*"):
            shutil.rmtree(partial)
        faults, damaged = [], []
        for path in reversed(self._finished()):
            try:
                manifest = json.loads((path / STATE_MANIFEST).read_text())
                self._refuse_other(path, manifest["identity"])
                _verify(path, manifest)
                state: dict[str, Any] = torch.load(path / STATE, map_location=device, weights_only=True)
            except StageError:
                raise
            except Exception as error:  # torch raises many types for a damaged file, with long advice that does not apply
                faults.append(f"{path} ({type(error).__name__}: {str(error).splitlines()[0] if str(error) else 'no text'})")
                damaged.append(path)
                self.say(f"train: skipped a damaged state: {faults[-1]}")
                continue
            for worse in damaged:  # they would count among the states to keep
                shutil.rmtree(worse)
            return state | {"step": int(manifest["step"])}
        if faults:
            raise StageError(
                f"train: no saved state can be read: {'; '.join(faults)}; delete {self.folder}, and the run begins anew, "
                "or put a copy of a state back"
            )
        return None

    def save(self, step: int, state: Mapping[str, Any], *, wait: bool = False) -> None:
        """Saves the state before optimiser step `step`.

        Its tensors are copied to the CPU at once and written in the background (after the write before this one). wait: return when it
        is on disk. Raises StageError, and saves nothing, if a tensor is not finite; the error of a background write is raised by the
        next call.
        """
        began = time.monotonic()
        self.finish()
        copied = _copy(state)
        bad = sorted(_not_finite("", copied))
        if bad:
            raise StageError(f"train: {bad[0]} is not finite before step {step}; the last saved state is the one before, in {self.folder}")
        self._writer = threading.Thread(target=self._write_or_keep_error, args=(step, copied), name="save-state")
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

    def _write_or_keep_error(self, step: int, state: Mapping[str, Any]) -> None:
        try:
            began = time.monotonic()
            self._write(step, state)
            self.write_s = time.monotonic() - began
        except Exception as error:  # raised in the caller's thread by `finish`
            self._error = error

    def _write(self, step: int, state: Mapping[str, Any]) -> None:
        final, partial = self.folder / f"step-{step:08d}", self.folder / f".step-{step:08d}"
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        with (partial / STATE).open("wb") as stream:
            hashed = _Hashed(stream)
            torch.save(dict(state), hashed)  # type: ignore[arg-type]
            stream.flush()
            os.fsync(stream.fileno())
        manifest = {"step": step, "identity": self.identity, "size_bytes": hashed.size, "sha256": hashed.hexdigest()}
        with (partial / STATE_MANIFEST).open("w") as text:
            json.dump(manifest, text, indent=2, sort_keys=True)
            text.flush()
            os.fsync(text.fileno())
        if final.exists():  # of an attempt whose later states were damaged
            shutil.rmtree(final)
        partial.rename(final)
        _flush_folder(self.folder)
        _verify(final, manifest)
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


class _Hashed:
    """A stream that hashes what it is given on its way to the file."""

    def __init__(self, stream: IO[bytes]) -> None:
        self._stream, self._sha256, self.size = stream, hashlib.sha256(), 0

    def write(self, block: Any) -> int:
        self._sha256.update(block)
        self.size += len(block)
        return self._stream.write(block)

    def flush(self) -> None:
        self._stream.flush()

    def hexdigest(self) -> str:
        return self._sha256.hexdigest()


def _verify(path: Path, manifest: Mapping[str, Any]) -> None:
    size = (path / STATE).stat().st_size
    if size != manifest["size_bytes"]:
        raise OSError(f"{STATE} has {size} bytes, its manifest says {manifest['size_bytes']}")
    if sha256_file(path / STATE) != manifest["sha256"]:
        raise OSError(f"the SHA-256 of {STATE} is not its manifest's")


def _copy(value: Any) -> Any:
    """The same nested dicts and lists with every tensor copied to the CPU."""
    if isinstance(value, Tensor):
        return value.detach().to("cpu", copy=True)
    if isinstance(value, Mapping):
        return {name: _copy(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_copy(item) for item in value)
    return value


def _not_finite(name: str, value: Any) -> list[str]:
    """Paths of tensors and floats that hold NaN or infinity."""
    if isinstance(value, Tensor):
        return [] if not value.is_floating_point() or math.isfinite(value.sum().item()) or value.isfinite().all() else [name]
    if isinstance(value, Mapping):
        return [path for key, item in value.items() for path in _not_finite(f"{name}.{key}" if name else str(key), item)]
    if isinstance(value, list | tuple):
        return [path for key, item in enumerate(value) for path in _not_finite(f"{name}.{key}", item)]
    return [] if not isinstance(value, float) or math.isfinite(value) else [name]


def _step_of(path: Path) -> int:
    return int(path.name[5:])


def _flush_folder(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
