"""What is logged while a model trains: records, TensorBoard, Weights & Biases."""

# ruff: noqa: F811  (fixtures of another module are names of this one)

import dataclasses
import json
import math
import sys
import types
from typing import Any

import pytest
from test_train import _size, config_for, fit, inputs, metrics_of, stop_before  # noqa: F401

import training.watch
from craw4llm.artifact import Artifact
from craw4llm.errors import ConfigError
from craw4llm.execution import Execution


class Writer:
    """Stands in for tensorboard's SummaryWriter."""

    made: list["Writer"] = []  # noqa: RUF012

    def __init__(self, folder: str) -> None:
        self.folder, self.scalars, self.closed = folder, dict[str, list[tuple[int, float]]](), False
        Writer.made.append(self)

    def add_scalar(self, name: str, value: float, step: int) -> None:
        self.scalars.setdefault(name, []).append((step, value))

    def flush(self) -> None: ...

    def close(self) -> None:
        self.closed = True


class Run:
    """Stands in for a run of wandb."""

    made: list["Run"] = []  # noqa: RUF012

    def __init__(self, **options: Any) -> None:
        self.options, self.logged, self.finished = options, list[tuple[int, dict[str, float]]](), False
        Run.made.append(self)

    def log(self, values: dict[str, float], step: int) -> None:
        self.logged.append((step, values))

    def finish(self) -> None:
        self.finished = True


@pytest.fixture
def watched(execution: Execution, monkeypatch: pytest.MonkeyPatch) -> Execution:
    monkeypatch.setattr(Writer, "made", [])
    monkeypatch.setattr(Run, "made", [])
    monkeypatch.setattr(training.watch, "LOG_EVERY_S", 0.0)
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", types.SimpleNamespace(SummaryWriter=Writer))
    monkeypatch.setitem(sys.modules, "wandb", types.SimpleNamespace(init=Run))
    return dataclasses.replace(execution, tensorboard=execution.root / "board", wandb="crawls", validate_steps=4)


def test_tensorboard_and_wandb_see_every_line_once(inputs: dict[str, Artifact], watched: Execution) -> None:
    artifact = fit(config_for(9), inputs, watched)
    metrics = metrics_of(artifact)
    (writer,), (run,) = Writer.made, Run.made
    assert writer.folder == str(watched.root / "board" / "model")
    assert writer.scalars["train/loss"] == [(m["step"], m["loss"]) for m in metrics]
    assert writer.scalars["train/grad_norm"] == [(m["step"], m["grad_norm"]) for m in metrics]
    assert len(writer.scalars["train/tokens_per_s"]) == 9
    assert "train/mfu" not in writer.scalars  # the peak of a CPU is not known: no number
    validation = [json.loads(line) for line in artifact.file("validation.jsonl").read_text().splitlines()]
    assert writer.scalars["train/heldout_bits_per_byte"] == [(v["step"], v["heldout_bits_per_byte"]) for v in validation]
    assert writer.closed and run.finished
    assert run.options["project"] == "crawls"
    assert run.options["config"]["token_budget"] == 9 * 64
    assert [step for step, _ in run.logged] == sorted(step for step, _ in run.logged)
    assert [(s, v["loss"]) for s, v in run.logged if "loss" in v] == writer.scalars["train/loss"]


def test_a_run_that_goes_on_is_the_same_run_there(inputs: dict[str, Artifact], watched: Execution) -> None:
    stop_before(5, config_for(9), inputs, watched)
    fit(config_for(9), inputs, watched, "cut")
    first, second = Run.made
    assert first.options["id"] == second.options["id"] == "cut"
    assert second.options["resume"] == "allow"
    assert [s for run in (first, second) for s, v in run.logged if "loss" in v] == list(range(9))


@pytest.mark.parametrize(("option", "module"), [("tensorboard", "torch.utils.tensorboard"), ("wandb", "wandb")])
def test_a_package_that_is_not_there_is_named(
    inputs: dict[str, Artifact], execution: Execution, monkeypatch: pytest.MonkeyPatch, option: str, module: str
) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    asked = dataclasses.replace(execution, **{option: execution.root / "x" if option == "tensorboard" else "x"})
    with pytest.raises(ConfigError, match=rf"pip install 'craw4llm\[{option}\]'"):
        fit(config_for(3), inputs, asked)


def test_tensorboard_reads_what_is_written(inputs: dict[str, Artifact], execution: Execution) -> None:
    events = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    artifact = fit(config_for(9), inputs, dataclasses.replace(execution, tensorboard=execution.root / "board"))
    read = events.EventAccumulator(str(execution.root / "board" / "model"))
    read.Reload()
    (last,) = read.Scalars("train/loss")  # a run of less than LOG_EVERY_S seconds has one line
    assert last.step == 8
    assert last.value == pytest.approx(metrics_of(artifact)[8]["loss"])


def test_a_short_run_has_a_line_of_speed(inputs: dict[str, Artifact], execution: Execution) -> None:
    lines = [json.loads(line) for line in fit(config_for(9), inputs, execution).file("speed.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [8]
    assert lines[0]["tokens_per_s"] > 0 and 0 <= lines[0]["data_wait_share"] <= 1


def test_bits_per_byte_of_packed_pages(inputs: dict[str, Artifact], execution: Execution) -> None:
    """Every token of the held-out pages of these tests stands for three bytes."""
    artifact = fit(config_for(9), inputs, execution)
    assert artifact.count("heldout_bits_per_byte") == pytest.approx(artifact.count("heldout_loss") / math.log(2) / 3)
    few = fit(config_for(9, validation_tokens=20), inputs, execution, "few")
    assert few.count("heldout_tokens") == 32
    assert few.count("heldout_bits_per_byte") == pytest.approx(few.count("heldout_loss") / math.log(2) / 3)
