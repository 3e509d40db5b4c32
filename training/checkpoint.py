"""Model files: the finished checkpoint of a train artifact, and the state from which an interrupted run goes on.

    model, config = load_model(artifact, device)

`model.pt` is a state dict of float32 tensors, `config.json` says which model it belongs to. Equal tensors give equal bytes.
"""

import dataclasses
import json
import os
from pathlib import Path
from typing import Any

import torch

from craw4llm.artifact import Artifact
from craw4llm.errors import ArtifactError, StageError
from training.configs import Shape
from training.model import Transformer

MODEL = "model.pt"
CONFIG = "config.json"
STATE = "state.pt"


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


def save_state(path: Path, state: dict[str, Any]) -> None:
    """Writes the state whole or not at all: to a temporary file, to disk, then renamed."""
    temporary = path.with_name(path.name + ".new")
    torch.save(state, temporary)
    with temporary.open("rb") as stream:
        os.fsync(stream.fileno())
    temporary.replace(path)


def load_state(path: Path, device: torch.device) -> dict[str, Any] | None:
    """The state of an interrupted run; None if there is none."""
    path.with_name(path.name + ".new").unlink(missing_ok=True)
    if not path.exists():
        return None
    try:
        state: dict[str, Any] = torch.load(path, map_location=device, weights_only=True)
    except Exception as error:  # torch raises many types for a damaged file, with long advice that does not apply
        raise StageError(
            f"train: {path} cannot be read as a training state ({type(error).__name__}); delete it, and the run begins anew"
        ) from error
    return state
