"""Two processes train what one trains."""

import dataclasses
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from test_train import fit, texts, write_tokens
from torch.distributed.tensor import DTensor

import training.optimizer
from craw4llm.artifact import Artifact, Store
from craw4llm.errors import ArtifactError, ConfigError, StageError, Stopped
from craw4llm.execution import Execution
from training import loop
from training.configs import Shape, TrainConfig
from training.distributed import Ranks, launch
from training.loop import LossOf, gradients
from training.model import Transformer

SHAPE = Shape(d_model=32, n_layers=2, n_heads=2, d_hidden=64, context=16)
CONTEXT = 256  # of the size "toy"
CONFIG = TrainConfig(size="toy", vocab_size=64, precision="fp32", batch_tokens=4 * CONTEXT, token_budget=12 * 4 * CONTEXT)


def gradients_of_batch(micro: int, *, execution: Execution, ranks: Ranks) -> tuple[float, list[torch.Tensor]]:
    model = Transformer(SHAPE, 64)
    samples = torch.randint(64, (8, 17), generator=torch.Generator().manual_seed(1))
    mine = samples[ranks.part(8)]
    loss_of = LossOf(model, CONFIG)
    if execution.parallel == "fsdp":
        ranks.shard(loss_of, model.blocks, torch.device("cpu"))
    part = gradients(ranks.wrap(loss_of), mine[:, :-1], mine[:, 1:], micro, ranks)
    (loss,) = ranks.sum([part.item()], torch.device("cpu"))
    found = [p.grad for p in model.parameters() if p.grad is not None]
    return loss, [g.full_tensor() if isinstance(g, DTensor) else g for g in found]


def gradients_with_and_without_accumulation(*, execution: Execution, ranks: Ranks) -> dict[str, Any]:
    found = {}
    for parallel in ("ddp", "fsdp"):
        with_it = dataclasses.replace(execution, parallel=parallel)
        for micro in (4, 1):
            found[f"2 ranks, {parallel}, {micro}"] = gradients_of_batch(micro, execution=with_it, ranks=ranks)
    return found


def test_gradients_are_those_of_the_whole_batch(execution: Execution) -> None:
    """1 x 8, 2 x 4, 8 x 1 micro-batches and two ranks, with and without accumulation, agree to 1e-5 with autograd on the plain loss."""
    model = Transformer(SHAPE, 64)
    samples = torch.randint(64, (8, 17), generator=torch.Generator().manual_seed(1))
    logits = model(samples[:, :-1]).flatten(0, 1)
    plain = torch.nn.functional.cross_entropy(logits, samples[:, 1:].flatten()) + 1e-4 * logits.logsumexp(-1).square().mean()
    plain.backward()
    expected = [p.grad for p in model.parameters() if p.grad is not None]
    assert len(expected) == len(list(model.parameters()))
    two = dataclasses.replace(execution, ranks=2)
    found = {
        **{f"1 rank, {micro}": gradients_of_batch(micro, execution=execution, ranks=Ranks()) for micro in (8, 4, 3, 1)},
        **launch(gradients_with_and_without_accumulation, (), two),
    }
    for name, (loss, grads) in found.items():
        assert loss == pytest.approx(plain.item(), rel=1e-5), name
        for a, b in zip(grads, expected, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5 * b.abs().max().item(), msg=name)


def test_parts_of_a_batch() -> None:
    assert [Ranks(r, 4).part(8) for r in range(4)] == [slice(0, 2), slice(2, 4), slice(4, 6), slice(6, 8)]
    with pytest.raises(ConfigError, match="3 ranks and a batch of 8 sequences; expected a number of ranks that divides the batch"):
        Ranks(0, 3).part(8)


@pytest.fixture
def inputs(execution: Execution) -> dict[str, Artifact]:
    return {
        name: write_tokens(execution.root, name, texts(count, seed, CONTEXT + 1), vocab_size=64)
        for name, count, seed in (("tokens", 30, 1), ("heldout", 4, 2))
    }


def curve(artifact: Artifact) -> list[float]:
    return [json.loads(line)["loss"] for line in artifact.file("metrics.jsonl").read_text().splitlines()]


def test_two_ranks_train_the_model_that_one_trains(inputs: dict[str, Artifact], execution: Execution) -> None:
    """Whole (DDP) and sharded (FSDP2): the same losses, and the same bytes each time."""
    one = fit(CONFIG, inputs, execution, "one")
    for parallel in ("ddp", "fsdp"):
        with_two = dataclasses.replace(execution, ranks=2, parallel=parallel, validate_steps=5)
        two = fit(CONFIG, inputs, with_two, parallel)
        assert (two.manifest["notes"]["ranks"], two.manifest["notes"]["parallel"]) == (2, parallel)
        assert {p.name for p in two.path.iterdir()} - {p.name for p in one.path.iterdir()} == {"validation.jsonl"}
        assert curve(one) == pytest.approx(curve(two), rel=1e-5)
        for count in ("heldout_loss", "heldout_bits_per_byte"):
            assert one.count(count) == pytest.approx(two.count(count), rel=1e-4)
        weights = [torch.load(a.file("model.pt"), weights_only=True) for a in (one, two)]
        assert list(weights[0]) == list(weights[1])
        for name, value in weights[0].items():
            torch.testing.assert_close(weights[1][name], value, rtol=1e-3, atol=1e-4, msg=name)
    again = fit(CONFIG, inputs, dataclasses.replace(execution, ranks=2), "again")
    ddp = Store(execution.root).open("train", "ddp")
    assert again.digest == ddp.digest
    with pytest.raises(ConfigError, match="parallel is fsdp with one rank"):
        fit(CONFIG, inputs, dataclasses.replace(execution, parallel="fsdp"), "alone")


def stops_before_step_7(*args: Any, execution: Execution, ranks: Ranks) -> Any:
    rate = training.optimizer.learning_rate

    def asks(config: TrainConfig, now: int) -> float:
        if now == 7 and ranks.rank == ranks.size - 1:  # one rank alone is told; all end together
            os.kill(os.getpid(), signal.SIGTERM)
        return rate(config, now)

    training.optimizer.learning_rate = asks
    try:
        return loop.fit(*args, execution=execution, ranks=ranks)
    finally:
        training.optimizer.learning_rate = rate


@pytest.mark.parametrize(("parallel", "then"), [("ddp", (1, "ddp")), ("fsdp", (1, "ddp")), ("fsdp", (2, "ddp"))])
def test_a_state_of_two_ranks_is_read_by_another_number_and_form(
    inputs: dict[str, Artifact], execution: Execution, parallel: Any, then: tuple[int, Any]
) -> None:
    out = execution.root / "train" / ".partial-on"
    out.mkdir(parents=True)
    with pytest.raises(Stopped, match="asked to end before step 7 of 12"):
        launch(stops_before_step_7, (CONFIG, inputs, out), dataclasses.replace(execution, ranks=2, parallel=parallel, save_every_s=1e6))
    (state,) = (out / "states").iterdir()
    assert sorted(p.name for p in state.iterdir()) == [".metadata", "__0_0.distcp", "__1_0.distcp", "manifest.json"]
    on = fit(CONFIG, inputs, dataclasses.replace(execution, ranks=then[0], parallel=then[1]), "on")
    assert json.loads(on.file("speed.json").read_text())["first_step"] == 7
    said = on.manifest["notes"].get("resumed", [])
    assert ("from step 7: ranks was 2, now 1" in said) == (then[0] == 1)
    assert ("from step 7: parallel was 'fsdp', now 'ddp'" in said) == (parallel != then[1])
    assert curve(on) == pytest.approx(curve(fit(CONFIG, inputs, execution, "whole")), rel=1e-5)


def sees_other_data_on_rank_1(config: TrainConfig, inputs: Any, others: Any, out: Path, *, execution: Execution, ranks: Ranks) -> None:
    try:
        loop.fit(config, others if ranks.rank else inputs, out, execution=execution, ranks=ranks)
    except ArtifactError as error:  # on both
        (out / f"rank-{ranks.rank}").write_text(str(error))
        ranks.barrier()
        raise


def test_ranks_with_unequal_data_end_together(inputs: dict[str, Artifact], execution: Execution, tmp_path: Path) -> None:
    longer = write_tokens(execution.root, "longer", texts(31, 1, CONTEXT + 1), vocab_size=64)
    work = (CONFIG, inputs, inputs | {"tokens": longer}, tmp_path)
    with pytest.raises(ArtifactError, match="rank 1 on .* has other samples under .* than rank 0 on .*: share the folder, or copy it anew"):
        launch(sees_other_data_on_rank_1, work, dataclasses.replace(execution, ranks=2))
    assert (tmp_path / "rank-0").read_text() == (tmp_path / "rank-1").read_text()


def fails_on_rank_1(*, execution: Execution, ranks: Ranks) -> None:
    if ranks.rank == 1:
        raise StageError("train: rank 1 has met a bad shard")
    ranks.barrier()


def dies_on_rank_1(folder: str, *, execution: Execution, ranks: Ranks) -> None:
    Path(folder, f"{ranks.rank}").write_text(str(os.getpid()))
    ranks.barrier()
    if ranks.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    ranks.barrier()


def test_one_rank_that_fails_ends_all(execution: Execution, tmp_path: Path) -> None:
    two = dataclasses.replace(execution, ranks=2)
    began = time.monotonic()
    with pytest.raises(StageError, match="rank 1 has met a bad shard"):
        launch(fails_on_rank_1, (), two)
    with pytest.raises(StageError, match="one of the 2 training processes was killed from outside"):
        launch(dies_on_rank_1, (str(tmp_path),), two)
    assert time.monotonic() - began < 60
    for rank in "01":
        wait_for_end(int((tmp_path / rank).read_text()))


def wait_for_end(pid: int) -> None:
    for _ in range(100):
        if not running(pid):
            return
        time.sleep(0.1)
    raise AssertionError(f"process {pid} is still there")


def running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


STAGE = """
import sys, pathlib
from craw4llm.artifact import Store
from craw4llm.errors import Craw4LLMError
from craw4llm.execution import Execution
from training.configs import TrainConfig
import training.train as train

if __name__ == "__main__":
    root, out = pathlib.Path(sys.argv[1]), pathlib.Path(sys.argv[2])
    out.mkdir(exist_ok=True)
    config = TrainConfig(size="toy", vocab_size=64, precision="fp32", batch_tokens=1024, token_budget=100_000 * 1024)
    store = Store(root)
    execution = Execution(root=root, device="cpu", ranks=2, save_every_s=0.2)
    try:
        train.run(config, {n: store.open("tokenize", n) for n in ("tokens", "heldout")}, out, execution)
    except Craw4LLMError as error:
        print(error, file=sys.stderr)
        sys.exit(error.exit_code)
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_stage_that_is_stopped_takes_its_ranks_along(
    inputs: dict[str, Artifact], execution: Execution, tmp_path: Path, number: signal.Signals
) -> None:
    """SIGTERM to the stage's process alone: all ranks save and end. After kill -9 of it none is left either."""
    script, out = tmp_path / "stage.py", tmp_path / "out"
    script.write_text(STAGE)
    command = [sys.executable, str(script), str(execution.root), str(out)]
    environment: dict[str, Any] = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    process = subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True)
    for _ in range(600):
        if list((out / "states").glob("step-*")):
            break
        time.sleep(0.1)
    ranks = [int(pid) for pid in Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()]
    assert len(ranks) >= 2
    began = time.monotonic()
    process.send_signal(number)
    _, errors = process.communicate(timeout=60)
    if number == signal.SIGTERM:
        assert process.returncode == 75, errors
        assert "asked to end before step" in errors
        assert time.monotonic() - began < 20
    for pid in ranks:
        wait_for_end(pid)
