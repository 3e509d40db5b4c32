"""The finished model of a train artifact: its files, written and read.

    save_model(model, folder)
    model, config = load_model(artifact, device)

`model.pt` is a state dict of float32 tensors, `config.json` says which model it belongs to. Equal tensors give equal bytes. The states
from which an interrupted run goes on are something else: `training.states`.
"""

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from craw4llm.artifact import Artifact
from craw4llm.errors import ArtifactError
from training.configs import Shape
from training.model import Transformer

MODEL = "model.pt"
CONFIG = "config.json"


def save_model(model: Transformer, folder: Path, weights: Mapping[str, Tensor] | None = None) -> None:
    """Writes model.pt and config.json. weights: of the model, where they were gathered already."""
    torch.save(dict(weights_of(model) if weights is None else weights), folder / MODEL)
    config = {"shape": dataclasses.asdict(model.shape), "vocab_size": model.vocab_size, "context": model.shape.context}
    (folder / CONFIG).write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")


def weights_of(model: Transformer) -> dict[str, Tensor]:
    """The state dict, float32 on the CPU. Of a model that is sharded over ranks all of them call this, and each gets the whole."""
    whole = {name: value.full_tensor() if isinstance(value, DTensor) else value for name, value in model.state_dict().items()}
    return {name: value.detach().to("cpu", torch.float32).contiguous() for name, value in whole.items()}


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
