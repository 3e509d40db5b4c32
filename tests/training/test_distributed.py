"""Two processes train what one trains."""

import dataclasses
import json
import os
import re
import shutil
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
from craw4llm.artifact import Artifact
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


def test_gradients_are_those_of_the_whole_batch(runs: Any, execution: Execution) -> None:
    """1 x 8, 2 x 4, 8 x 1 micro-batches and two ranks, with and without accumulation, agree to 1e-5 with autograd on the plain loss."""
    model = Transformer(SHAPE, 64)
    samples = torch.randint(64, (8, 17), generator=torch.Generator().manual_seed(1))
    logits = model(samples[:, :-1]).flatten(0, 1)
    plain = torch.nn.functional.cross_entropy(logits, samples[:, 1:].flatten()) + 1e-4 * logits.logsumexp(-1).square().mean()
    plain.backward()
    expected = [p.grad for p in model.parameters() if p.grad is not None]
    assert len(expected) == len(list(model.parameters()))
    one = {f"1 rank, {micro}": gradients_of_batch(micro, execution=execution, ranks=Ranks()) for micro in (8, 4, 3, 1)}
    found = one | runs[1]["gradients"]
    assert len(found) == 8
    for name, (loss, grads) in found.items():
        assert loss == pytest.approx(plain.item(), rel=1e-5), name
        for a, b in zip(grads, expected, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5 * b.abs().max().item(), msg=name)


def test_parts_of_a_batch() -> None:
    assert [Ranks(r, 4).part(8) for r in range(4)] == [slice(0, 2), slice(2, 4), slice(4, 6), slice(6, 8)]
    with pytest.raises(ConfigError, match="3 ranks and a batch of 8 sequences; expected a number of ranks that divides the batch"):
        Ranks(0, 3).part(8)


def make_inputs(execution: Execution) -> dict[str, Artifact]:
    return {
        name: write_tokens(execution.root, name, texts(count, seed, CONTEXT + 1), vocab_size=64)
        for name, count, seed in (("tokens", 30, 1), ("heldout", 4, 2))
    }


@pytest.fixture
def inputs(execution: Execution) -> dict[str, Artifact]:
    return make_inputs(execution)


def curve(folder: Path) -> list[float]:
    return [json.loads(line)["loss"] for line in (folder / "metrics.jsonl").read_text().splitlines()]


def work_of_two_ranks(root: Path, inputs: Any, longer: Artifact, *, execution: Execution, ranks: Ranks) -> dict[str, Any]:
    """Folder -> what `fit` returned, for whole runs and for runs asked to end before step 7; gradients; what both say to other data."""
    rate, done = training.optimizer.learning_rate, {}

    def run(name: str, parallel: Any, *, stop: bool = False) -> None:
        def asks(config: TrainConfig, now: int) -> float:
            if stop and now == 7 and ranks.rank == 1:  # one rank alone is told; all end together
                os.kill(os.getpid(), signal.SIGTERM)
            return rate(config, now)

        training.optimizer.learning_rate = asks
        (root / name).mkdir(exist_ok=True)
        how = dataclasses.replace(execution, parallel=parallel, validate_steps=5)
        try:
            done[name] = loop.fit(CONFIG, inputs, root / name, execution=how, ranks=ranks)
        except Stopped as error:
            done[name] = str(error)

    run("ddp", "ddp")
    run("ddp again", "ddp")
    run("fsdp", "fsdp")
    run("ddp cut", "ddp", stop=True)
    run("fsdp cut", "fsdp", stop=True)
    if ranks.rank == 0:
        shutil.copytree(root / "fsdp cut", root / "fsdp on")
    ranks.barrier()
    run("fsdp on", "ddp")
    done["gradients"] = gradients_with_and_without_accumulation(execution=execution, ranks=ranks)
    (root / "other").mkdir(exist_ok=True)
    try:
        loop.fit(CONFIG, inputs | {"tokens": longer} if ranks.rank else inputs, root / "other", execution=execution, ranks=ranks)
    except ArtifactError as error:
        done["other data"] = ranks.from_all(str(error))
    return done


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any], dict[str, Artifact], Execution]:
    root = tmp_path_factory.mktemp("runs")
    execution = Execution(root=root / "artifacts", workers=1, device="cpu", report=lambda line: None, save_every_s=1e6)
    inputs = make_inputs(execution)
    longer = write_tokens(execution.root, "longer", texts(31, 1, CONTEXT + 1), vocab_size=64)
    done = launch(work_of_two_ranks, (root, inputs, longer), dataclasses.replace(execution, ranks=2))
    (root / "one").mkdir()
    done["one"] = loop.fit(CONFIG, inputs, root / "one", execution=execution, ranks=Ranks())
    return root, done, inputs, execution


@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_two_ranks_train_the_model_that_one_trains(runs: Any, parallel: str) -> None:
    root, done, _, _ = runs
    assert curve(root / parallel) == pytest.approx(curve(root / "one"), rel=1e-5)
    for name in ("heldout_loss", "heldout_bits_per_byte"):
        assert done[parallel][name] == pytest.approx(done["one"][name], rel=1e-4)
    two, one = (torch.load(root / name / "model.pt", weights_only=True) for name in (parallel, "one"))
    assert list(two) == list(one)
    for name, value in one.items():
        torch.testing.assert_close(two[name], value, rtol=1e-3, atol=1e-4, msg=name)
    lines = [json.loads(line) for line in (root / parallel / "validation.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [5, 10]
    assert lines[0]["heldout_loss"] > lines[1]["heldout_loss"] > done[parallel]["heldout_loss"]


def test_two_ranks_give_the_same_bytes_each_time(runs: Any) -> None:
    root, _, _, _ = runs
    assert (root / "ddp" / "model.pt").read_bytes() == (root / "ddp again" / "model.pt").read_bytes()


@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_a_state_of_two_ranks_is_read_by_one(runs: Any, parallel: str) -> None:
    root, done, inputs, execution = runs
    assert "asked to end before step 7 of 12" in done[f"{parallel} cut"]
    out = root / f"{parallel} cut"
    (state,) = (out / "states").iterdir()
    assert sorted(p.name for p in state.iterdir()) == [".metadata", "__0_0.distcp", "__1_0.distcp", "manifest.json"]
    done = loop.fit(CONFIG, inputs, out, execution=execution, ranks=Ranks())
    assert json.loads((out / "speed.json").read_text())["first_step"] == 7
    assert "from step 7: ranks was 2, now 1" in done["changes"]
    assert curve(out) == pytest.approx(curve(root / "one"), rel=1e-5)


def test_a_sharded_state_is_read_by_ranks_that_hold_all(runs: Any) -> None:
    root, done, _, _ = runs
    assert done["fsdp on"]["changes"] == ["from step 7: parallel was 'fsdp', now 'ddp'"]
    assert curve(root / "fsdp on") == pytest.approx(curve(root / "one"), rel=1e-5)


def test_fsdp_needs_several_ranks(inputs: dict[str, Artifact], execution: Execution) -> None:
    with pytest.raises(ConfigError, match="parallel is fsdp with one rank"):
        fit(CONFIG, inputs, dataclasses.replace(execution, parallel="fsdp"))


def test_ranks_with_unequal_data_end_together(runs: Any) -> None:
    found = runs[1]["other data"]
    assert len(found) == 2 and found[0] == found[1]
    assert re.search("rank 1 on .* has other samples under .* than rank 0 on .*: share the folder, or copy it anew", found[0])


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
