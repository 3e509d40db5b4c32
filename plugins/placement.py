"""Where each kind of stage runs, from one file: $CRAW4LLM_PLACEMENT, a TOML file. Without it every stage runs on the worker that has its
task.

    [stages.default]                  # what a kind of stage does not say itself
    launcher = "local"                # local, slurm or kubernetes (plugins/launchers.py)
    [stages.train]
    launcher = "slurm"
    queue = "gpu"                     # Celery's or Edge's queue
    executor = "EdgeExecutor"         # where Airflow is configured with several
    arguments = ["--micro-batch=32"]  # of `craw4llm run`: how it runs, never what it is

    [slurm.default]                   # options of the launchers, by kind of stage; theirs say which there are
    partition = "main"
    [slurm.train]
    nodes = 2
    gpus-per-node = 8

It is read when DAG files are parsed and when a task starts. Raises PlacementError, naming the key, for what it does not know.
"""

import dataclasses
import functools
import os
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from craw4llm.stage import OWN_STAGES, registered

VARIABLE = "CRAW4LLM_PLACEMENT"
LAUNCHERS = ("kubernetes", "local", "slurm")
NO_STAGES = ("default", "plan")  # what all kinds of stages share; the tasks of a DAG that run none
EXECUTION_OPTIONS = (
    *("--workers", "--device", "--micro-batch", "--ranks", "--save-every", "--keep-states", "--compile", "--no-compile", "--memory"),
    *("--shards-from", "--parallel", "--loader-workers", "--milestone-every", "--validate-every", "--tensorboard", "--wandb"),
)


class PlacementError(ValueError):
    """The file cannot be used: what stands there, and what was expected."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Place:
    """Of one kind of stage."""

    launcher: str = "local"
    queue: str = ""
    executor: str = ""
    arguments: tuple[str, ...] = ()


def place_of(kind: str) -> Place:
    table = _table(_file())
    return Place(**{**table["stages"].get("default", {}), **table["stages"].get(kind, {})})


def operator_arguments(kind: str) -> dict[str, Any]:
    """What the operator of such a stage is given: queue and executor, where they are set."""
    place = place_of(kind)
    return {name: value for name in ("queue", "executor") if (value := getattr(place, name))}


def options_of(launcher: str, kind: str) -> dict[str, Any]:
    """The options of `launcher` for a kind of stage: those of `default` with its own over them."""
    options = _table(_file()).get(launcher, {})
    return {**options.get("default", {}), **options.get(kind, {})}


def _file() -> str:
    name = os.environ.get(VARIABLE, "")
    return str(Path(__file__).resolve().parent.parent / name) if name else ""  # a relative path starts in the project


@functools.lru_cache
def _table(path: str) -> Mapping[str, Any]:
    if not path:
        return {"stages": {}}
    try:
        table = tomllib.loads(Path(path).read_text())
    except (OSError, tomllib.TOMLDecodeError) as error:
        raise PlacementError(f"${VARIABLE} is {path}, which cannot be read: {error}") from error
    _expect(path, "", table, ("stages", *LAUNCHERS))
    fields = {field.name for field in dataclasses.fields(Place)}
    for name, kinds in table.items():
        _expect(path, f"{name}.", kinds, {*NO_STAGES, *OWN_STAGES, *registered()})
        for kind, options in kinds.items():
            _expect(path, f"{name}.{kind}.", options, fields if name == "stages" else options)
    stages = table.setdefault("stages", {})
    for kind, place in stages.items():
        if place.get("launcher", "local") not in LAUNCHERS:
            raise PlacementError(f"{path}: stages.{kind}.launcher is {place['launcher']!r}; expected {' or '.join(LAUNCHERS)}")
        for argument in place.get("arguments", ()):
            if str(argument).partition("=")[0] not in EXECUTION_OPTIONS:
                raise PlacementError(
                    f"{path}: stages.{kind}.arguments holds {argument!r}; expected options of execution: {', '.join(EXECUTION_OPTIONS)}"
                )
        place["arguments"] = tuple(place.get("arguments", ()))
    return table


def _expect(path: str, where: str, table: Any, known: Any) -> None:
    if not isinstance(table, dict):
        raise PlacementError(f"{path}: {where.rstrip('.')} is {table!r}; expected a table")
    for name in table:
        if name not in known:
            raise PlacementError(f"{path}: {where}{name} is not known; expected {', '.join(sorted(known))}")
