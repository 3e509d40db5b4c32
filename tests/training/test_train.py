"""Training: it learns, it resumes to the same bytes, and it refuses what does not fit."""

import dataclasses
import functools
import json
import math
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

import training.configs
import training.optimizer
import training.train as train
from craw4llm.artifact import Artifact, Result, Store
from craw4llm.errors import ArtifactError, ConfigError, StageError, Stopped
from craw4llm.execution import Execution
from craw4llm.tokens.shards import write_shards
from training import float8
from training.checkpoint import load_model
from training.configs import Shape, TrainConfig
from training.loop import largest_that_fits
from training.model import Transformer
from training.watch import Spikes

VOCAB, CONTEXT = 32, 16
SHAPE = Shape(d_model=16, n_layers=2, n_heads=2, d_hidden=32, context=CONTEXT)
CONFIG: dict[str, Any] = {"size": "test", "vocab_size": VOCAB, "precision": "fp32", "batch_tokens": 4 * CONTEXT}


@pytest.fixture(autouse=True)
def _size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(training.configs.SIZES, "test", SHAPE)


def config_for(steps: int, **changes: Any) -> TrainConfig:
    return TrainConfig(token_budget=steps * 4 * CONTEXT, **(CONFIG | changes))


def write_tokens(
    root: Path, name: str, samples: np.ndarray[Any, Any], vocab_size: int = VOCAB, tokenizer: str = "bpe", padding: int = 0
) -> Artifact:
    """A tokenize artifact with these samples, as stored."""

    def write(out: Path) -> Result:
        write_shards(out / "shards", samples, np.arange(len(samples)), shard_bytes=4096)
        write_documents(out, samples.size - padding)
        counts = {"samples": len(samples), "sample_tokens": samples.shape[1], "vocab_size": vocab_size, "tokens": samples.size - padding}
        return Result(counts={k: (v, "") for k, v in counts.items()})

    made_with = Artifact(root, "tokenizer", tokenizer, {"digest": "none"})
    return Store(root).build("tokenize", name, version=1, config={}, inputs={"tokenizer": made_with}, write=write)[0]


def write_documents(out: Path, tokens: int) -> None:
    """Pages of ten tokens of three bytes each, but for the last."""
    first = np.arange(0, tokens, 10, dtype=np.uint64)
    count = np.minimum(10, tokens - first).astype(np.uint32)
    table = {
        "page": np.arange(len(first), dtype=np.uint32),
        "n_bytes": count.astype(np.uint64) * 3,
        "first_token": first,
        "n_tokens": count,
    }
    pq.write_table(pa.table(table), out / "documents.parquet")


def texts(count: int, seed: int, width: int = CONTEXT + 1) -> np.ndarray[Any, Any]:
    """Samples with something to learn: every token but one in ten is the last one plus 3."""
    rng = np.random.default_rng(seed)
    jumps = np.where(rng.random((count, width)) < 0.9, 3, rng.integers(0, VOCAB, (count, width)))
    return (np.cumsum(jumps, axis=1) % VOCAB).astype(np.uint16)


@pytest.fixture
def inputs(execution: Execution) -> dict[str, Artifact]:
    root = execution.root
    return {"tokens": write_tokens(root, "tokens", texts(60, 1)), "heldout": write_tokens(root, "heldout", texts(20, 2))}


def fit(config: TrainConfig, inputs: dict[str, Artifact], execution: Execution, name: str = "model") -> Artifact:
    def write(out: Path) -> Result:
        return train.run(config, inputs, out, execution)

    return Store(execution.root).build("train", name, version=1, config={}, inputs=inputs, write=write, keep_partial=True)[0]


def metrics_of(artifact: Artifact) -> list[dict[str, Any]]:
    return [json.loads(line) for line in artifact.file("metrics.jsonl").read_text().split("\n") if line]


def test_learns_what_is_there_to_learn(inputs: dict[str, Artifact], execution: Execution) -> None:
    """The entropy of the source is 0.9 x log(1 / 0.903) + ... = 0.65 nats a token; guessing costs log 32 = 3.47."""
    artifact = fit(config_for(300, learning_rate=1e-2), inputs, execution)
    losses = [m["loss"] for m in metrics_of(artifact)]
    assert losses[0] == pytest.approx(math.log(VOCAB), abs=0.8)
    assert artifact.count("heldout_loss") < 1.2
    assert np.mean(losses[-10:]) < 1.2
    assert artifact.count("final_loss") == losses[-1]


def test_what_is_written(inputs: dict[str, Artifact], execution: Execution) -> None:
    config = config_for(40)
    artifact = fit(config, inputs, execution)
    assert sorted(p.name for p in artifact.path.iterdir()) == [
        "config.json",
        "manifest.json",
        "metrics.jsonl",
        "model.pt",
        "speed.json",
        "speed.jsonl",
    ]
    metrics = metrics_of(artifact)
    assert [m["step"] for m in metrics] == list(range(40))
    assert all(set(m) == {"step", "loss", "learning_rate", "grad_norm"} for m in metrics)
    counts = {name: artifact.count(name) for name in artifact.manifest["counts"]}
    assert counts["parameters"] == SHAPE.parameters(VOCAB)
    assert (counts["steps"], counts["tokens"]) == (40, 40 * 64)
    assert counts["unique_tokens"] == 60 * CONTEXT
    assert counts["epochs"] == round(160 / 60, 4)
    assert counts["train_flops"] == SHAPE.flops_per_token(VOCAB) * 40 * 64
    assert counts["heldout_tokens"] == 20 * CONTEXT
    assert "2.67 times" in artifact.manifest["notes"]["warning"]
    assert [f["path"] for f in artifact.manifest["files"] if f["volatile"]] == ["speed.json", "speed.jsonl"]
    model, described = load_model(artifact)
    assert described == {"shape": dataclasses.asdict(SHAPE), "vocab_size": VOCAB, "context": CONTEXT}
    assert not model.training
    tokens = torch.from_numpy(texts(20, 2).astype(np.int64))
    with torch.no_grad():
        logits = model(tokens[:, :-1])
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
    assert loss.item() == pytest.approx(counts["heldout_loss"], rel=1e-5)


def test_one_epoch_has_no_warning(inputs: dict[str, Artifact], execution: Execution) -> None:
    artifact = fit(config_for(15), inputs, execution)
    assert artifact.count("epochs") == 1
    assert artifact.count("unique_tokens") == artifact.count("tokens")
    assert "warning" not in artifact.manifest["notes"]


def test_padding_of_the_heldout_pages_is_not_scored(inputs: dict[str, Artifact], execution: Execution) -> None:
    samples = texts(20, 2)
    samples[-1, 5:] = 0
    padded = write_tokens(execution.root, "padded", samples, padding=12)
    artifact = fit(config_for(5), inputs | {"heldout": padded}, execution)
    assert artifact.count("heldout_tokens") == 20 * CONTEXT - 12


def test_overfits_one_batch(execution: Execution) -> None:
    random = np.random.default_rng(0).integers(0, VOCAB, (4, CONTEXT + 1)).astype(np.uint16)
    tokens = {"tokens": write_tokens(execution.root, "tokens", random), "heldout": write_tokens(execution.root, "heldout", random)}
    artifact = fit(config_for(300, learning_rate=1e-2, weight_decay=0.0), tokens, execution)
    assert artifact.count("heldout_loss") < 0.1


DIES = """
import os, pathlib, signal, sys
import training.configs, training.loop as loop, training.optimizer, training.train as train
from craw4llm.artifact import Store
from craw4llm.execution import Execution
from training.configs import Shape, TrainConfig

root, out, at, steps = pathlib.Path(sys.argv[1]), pathlib.Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])
training.configs.SIZES["test"] = Shape(d_model=16, n_layers=2, n_heads=2, d_hidden=32, context=16)
rate = training.optimizer.learning_rate
def dies(config, step):
    if step == at:
        trainer.states.finish()
        os.kill(os.getpid(), signal.SIGKILL)
    return rate(config, step)
training.optimizer.learning_rate = dies
class Known(loop.Trainer):
    def __init__(self, *args):
        global trainer
        trainer = self
        super().__init__(*args)
loop.Trainer = Known
save = loop.Trainer._save
loop.Trainer._save = lambda self, step, metrics, **how: save(self, step, metrics, wait=True)
loop.SAVE_SHARE = 1e9
out.mkdir(parents=True, exist_ok=True)
config = TrainConfig(size="test", vocab_size=32, precision="fp32", batch_tokens=64, token_budget=64 * steps)
store = Store(root)
execution = Execution(root=root, device="cpu", report=print, save_every_s=0.0, loader_workers=int(sys.argv[5]))
train.run(config, {n: store.open("tokenize", n) for n in ("tokens", "heldout")}, out, execution)
"""


def start(execution: Execution, out: Path, at: int, steps: int, hash_seed: str = "0", workers: int = 1) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-c", DIES, str(execution.root), str(out), str(at), str(steps), str(workers)]
    return subprocess.Popen(command, env=os.environ | {"PYTHONHASHSEED": hash_seed}, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def run_and_die(execution: Execution, out: Path, at: int, steps: int, hash_seed: str = "0", workers: int = 1) -> int:
    return start(execution, out, at, steps, hash_seed, workers).wait()


def saved_steps(out: Path) -> list[int]:
    return sorted(json.loads(p.read_text())["step"] for p in (out / "states").glob("step-*/manifest.json"))


def test_killed_and_resumed_equals_undisturbed(inputs: dict[str, Artifact], execution: Execution) -> None:
    """Killed with -9 before the end of the first epoch (of 15 steps) and after it, once with a line too many and a state half-written;
    with 0, 2 and 1 loader workers, and the last time beside another run on the same shards."""
    cut = execution.root / "cut"
    assert run_and_die(execution, cut, 5, 18, workers=0) == -signal.SIGKILL
    assert saved_steps(cut) == [4, 5]
    with (cut / "metrics.jsonl").open("a") as stream:
        stream.write('{"step": 5, "loss": 0.1, "lea')
    (cut / "states" / ".step-00000006").mkdir()
    (cut / "states" / ".step-00000006" / "__0_0.distcp").write_bytes(b"half")
    (cut / "state.pt").write_bytes(b"of an earlier version")  # must not get into the artifact
    assert run_and_die(execution, cut, 16, 18, hash_seed="1", workers=2) == -signal.SIGKILL
    beside = execution.root / "beside"
    both = [start(execution, cut, -1, 18, hash_seed="2"), start(execution, beside, -1, 18, workers=2)]
    assert [process.wait() for process in both] == [0, 0]
    assert json.loads((cut / "speed.json").read_text())["first_step"] == 16
    whole = fit(config_for(18), inputs, execution)  # in this process, another folder, without a pause
    assert whole.count("epochs") == 1.2
    assert sorted([*(p.name for p in cut.iterdir()), "manifest.json"]) == sorted(p.name for p in whole.path.iterdir())
    for name in ("model.pt", "metrics.jsonl", "config.json"):
        assert (cut / name).read_bytes() == (beside / name).read_bytes() == whole.file(name).read_bytes(), name


def test_sigterm_saves_and_the_next_run_ends_with_the_same_bytes(inputs: dict[str, Artifact], execution: Execution) -> None:
    config = config_for(12)
    before = signal.getsignal(signal.SIGTERM)
    assert saved_steps(stop_before(7, config, inputs, execution)) == [7]
    assert signal.getsignal(signal.SIGTERM) == before
    cut, whole = fit(config, inputs, execution, "cut"), fit(config, inputs, execution, "whole")
    assert json.loads(cut.file("speed.json").read_text())["first_step"] == 7
    assert cut.digest == whole.digest
    assert "resumed" not in cut.manifest["notes"]


def test_another_micro_batch_after_a_stop_is_noted(inputs: dict[str, Artifact], execution: Execution) -> None:
    config = config_for(6)
    stop_before(3, config, inputs, execution)
    artifact = fit(config, inputs, dataclasses.replace(execution, micro_batch=2), "cut")
    assert artifact.manifest["notes"]["resumed"] == ["from step 3: micro_batch was 4, now 2"]


def stop_before(step: int, config: TrainConfig, inputs: dict[str, Artifact], execution: Execution, name: str = "cut") -> Path:
    """A run that was asked to end before `step`; returns its partial folder."""
    rate = training.optimizer.learning_rate

    def asks(config: TrainConfig, now: int) -> float:
        if now == step:
            os.kill(os.getpid(), signal.SIGTERM)
        return rate(config, now)

    with pytest.MonkeyPatch.context() as patch, pytest.raises(Stopped, match=f"asked to end before step {step} of"):
        patch.setattr(training.optimizer, "learning_rate", asks)
        fit(config, inputs, execution, name)
    return execution.root / "train" / f".partial-{name}"


def test_states_of_other_data_or_another_config_are_refused(inputs: dict[str, Artifact], execution: Execution) -> None:
    out = stop_before(3, config_for(6), inputs, execution)
    with pytest.raises(StageError, match=r"saved by another run: config\.learning_rate was 0\.003, now 0\.001; .*delete .*states"):
        train.run(config_for(6, learning_rate=1e-3), inputs, out, execution)
    other = write_tokens(execution.root, "other", texts(60, 3))
    with pytest.raises(
        StageError, match=r"inputs\.tokens\.digest was '[0-9a-f]+', now '[0-9a-f]+'; inputs\.tokens\.fingerprint was 'tokens'"
    ):
        train.run(config_for(6), inputs | {"tokens": other}, out, execution)
    assert saved_steps(out) == [3]


def test_validation_at_intervals_changes_nothing(inputs: dict[str, Artifact], execution: Execution) -> None:
    plain = fit(config_for(9), inputs, execution, "plain")
    watched = fit(config_for(9), inputs, dataclasses.replace(execution, validate_steps=4), "watched")
    assert watched.digest == plain.digest
    lines = [json.loads(line) for line in watched.file("validation.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [4, 8]
    assert lines[0]["heldout_loss"] > lines[1]["heldout_loss"] > watched.count("heldout_loss")


def test_out_of_memory_names_the_micro_batch_that_fits(
    inputs: dict[str, Artifact], execution: Execution, monkeypatch: pytest.MonkeyPatch
) -> None:
    loss = training.optimizer.language_model_loss

    def limited(hidden: torch.Tensor, *rest: Any) -> torch.Tensor:
        if len(hidden) > limit * CONTEXT:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return loss(hidden, *rest)

    monkeypatch.setattr(training.optimizer, "language_model_loss", limited)
    limit = 1
    with pytest.raises(StageError, match=r"4 sequences of 16 tokens at once do not fit .*; 1 fit: use --micro-batch 1"):
        fit(config_for(3), inputs, execution)
    limit = 0
    with pytest.raises(StageError, match="not even one fits"):
        fit(config_for(3), inputs, execution)


def test_largest_micro_batch_that_fits() -> None:
    tried = []

    def attempt(micro: int, limit: int) -> None:
        tried.append(micro)
        if micro > limit:
            raise torch.OutOfMemoryError

    for most, limit, found in ((64, 64, 64), (64, 20, 16), (24, 99, 16), (7, 1, 1), (1, 1, 1), (8, 0, 0)):
        assert largest_that_fits(most, functools.partial(attempt, limit=limit)) == found
    assert tried[:4] == [64, 64, 32, 16]


def test_micro_batch_of_a_cpu_by_the_stated_rule(inputs: dict[str, Artifact], execution: Execution) -> None:
    """4,096 tokens at once, at most the batch."""
    for sequences, expected in ((4, 4), (400, 256)):
        config = TrainConfig(**(CONFIG | {"batch_tokens": sequences * CONTEXT, "token_budget": sequences * CONTEXT}))
        artifact = fit(config, inputs, execution, f"m{sequences}")
        assert artifact.manifest["notes"]["micro_batch"] == expected


def test_fp8_is_refused_where_it_cannot_run(inputs: dict[str, Artifact], execution: Execution, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"precision is fp8, but cpu has no 8-bit matrix products; .* use precision bf16"):
        fit(config_for(3, precision="fp8"), inputs, execution)
    monkeypatch.setitem(sys.modules, "torchao.float8", None)
    with pytest.raises(ConfigError, match=r"needs the package torchao: pip install 'craw4llm\[fp8\]'"):
        float8.convert(Transformer(SHAPE, VOCAB), torch.device("cpu"), emulate=True)


def test_fp8_learns_as_bf16_does(inputs: dict[str, Artifact], execution: Execution, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rounded to 8 bits, multiplied in bfloat16: what the recipe costs, on any device."""
    pytest.importorskip("torchao.float8")
    monkeypatch.setattr(float8, "convert", functools.partial(float8.convert, emulate=True))
    low = fit(config_for(60, precision="fp8", learning_rate=1e-2), inputs, execution, "fp8")
    plain = fit(config_for(60, precision="bf16", learning_rate=1e-2), inputs, execution, "bf16")
    assert metrics_of(low)[-1] != metrics_of(plain)[-1]
    assert low.count("heldout_loss") == pytest.approx(plain.count("heldout_loss"), abs=0.05)
    assert list(torch.load(low.file("model.pt"), weights_only=True)) == list(torch.load(plain.file("model.pt"), weights_only=True))


def test_loss_spikes() -> None:
    rng = np.random.default_rng(0)
    losses = (3 + 0.1 * rng.standard_normal(200)).tolist()
    assert Spikes(losses).count == 0
    losses[150], losses[151], losses[160], losses[5] = 9.0, 8.0, 4.0, 20.0
    spikes = Spikes(losses[:151])
    assert spikes.count == 1
    assert [spikes.add(x) for x in losses[151:]].index(True) == 0
    assert spikes.count == 3


def test_seeds_give_other_models(inputs: dict[str, Artifact], execution: Execution) -> None:
    losses = {fit(config_for(5, seed=s), inputs, execution, f"m{s}").count("heldout_loss") for s in (124, 125)}
    assert len(losses) == 2


def test_accumulation_gives_the_same_steps(inputs: dict[str, Artifact], execution: Execution) -> None:
    curves = []
    for micro in (1, 3, 4):
        artifact = fit(config_for(20), inputs, dataclasses.replace(execution, micro_batch=micro), f"m{micro}")
        assert artifact.manifest["notes"]["micro_batch"] == micro
        curves.append([m["loss"] for m in metrics_of(artifact)])
    assert curves[0] == pytest.approx(curves[2], rel=1e-4)
    assert curves[1] == pytest.approx(curves[2], rel=1e-4)


def test_bf16_trains(inputs: dict[str, Artifact], execution: Execution) -> None:
    high = fit(config_for(30), inputs, execution, "high")
    low = fit(config_for(30, precision="bf16"), inputs, execution, "low")
    assert low.count("heldout_loss") == pytest.approx(high.count("heldout_loss"), rel=0.02)
    assert {v.dtype for v in torch.load(low.file("model.pt"), weights_only=True).values()} == {torch.float32}


def test_a_loss_that_is_no_number_stops_with_the_step(inputs: dict[str, Artifact], execution: Execution) -> None:
    with pytest.raises(StageError, match=r"the loss is .* at step [12] of 10 .* lower learning_rate"):
        fit(config_for(10, learning_rate=1e38, warmup_steps=1), inputs, execution)


def test_after_a_loss_that_is_no_number_a_finite_state_is_left(
    inputs: dict[str, Artifact], execution: Execution, monkeypatch: pytest.MonkeyPatch
) -> None:
    loss, calls = training.optimizer.language_model_loss, 0

    def sixth_is_nan(*args: Any) -> torch.Tensor:
        nonlocal calls
        calls += 1
        return loss(*args) * (float("nan") if calls == 6 else 1.0)

    config = config_for(10)
    with monkeypatch.context() as patch, pytest.raises(StageError, match=r"the loss is nan .* at step 5 of 10"):
        patch.setattr(training.optimizer, "language_model_loss", sixth_is_nan)
        fit(config, inputs, dataclasses.replace(execution, save_every_s=0.0))
    (*_, newest) = saved_steps(execution.root / "train" / ".partial-model")
    assert 1 <= newest <= 5
    on, whole = fit(config, inputs, execution), fit(config, inputs, execution, "whole")
    assert json.loads(on.file("speed.json").read_text())["first_step"] == newest
    assert on.digest == whole.digest


def test_what_does_not_fit_is_refused(inputs: dict[str, Artifact], execution: Execution) -> None:
    root = execution.root
    with pytest.raises(StageError, match="vocab_size is 31, but the tokenizer of `tokens` has 32 ids"):
        fit(config_for(3, vocab_size=31), inputs, execution)
    longer = write_tokens(root, "longer", texts(5, 1, CONTEXT + 2))
    with pytest.raises(StageError, match="`tokens` has samples of 18 tokens, but size test has a context of 16 and needs 17"):
        fit(config_for(3), inputs | {"tokens": longer}, execution)
    other = write_tokens(root, "other", texts(5, 1), tokenizer="neox")
    with pytest.raises(ArtifactError, match="made with the tokenizer bpe, `heldout` with neox"):
        fit(config_for(3), inputs | {"heldout": other}, execution)
    with pytest.raises(ConfigError, match="device is 'gpu'"):
        fit(config_for(3), inputs, dataclasses.replace(execution, device="gpu"))


def test_damaged_shards_are_found_before_training(inputs: dict[str, Artifact], execution: Execution) -> None:
    shard = sorted((inputs["tokens"].path / "shards").glob("*.mds"))[0]
    shard.write_bytes(shard.read_bytes()[:-1] + b"\xff")
    with pytest.raises(ArtifactError, match=r"shard\.00000\.mds: its xxh64"):
        fit(config_for(3), inputs, execution)


def test_a_damaged_model_is_named(inputs: dict[str, Artifact], execution: Execution) -> None:
    artifact = fit(config_for(3), inputs, execution)
    description = json.loads(artifact.file("config.json").read_text())
    description["vocab_size"] = 33
    artifact.file("config.json").write_text(json.dumps(description))
    with pytest.raises(ArtifactError, match=r"model\.pt does not hold the model that config\.json describes"):
        load_model(artifact)


def test_threads_and_precision_are_put_back(inputs: dict[str, Artifact], execution: Execution) -> None:
    before = torch.get_num_threads(), torch.get_float32_matmul_precision()
    torch.set_num_threads(2)
    try:
        fit(config_for(3), inputs, execution)
        assert (torch.get_num_threads(), torch.get_float32_matmul_precision()) == (2, before[1])
    finally:
        torch.set_num_threads(before[0])


def test_float32_products_keep_all_bits() -> None:
    from training.device import numerics

    a = torch.randn(64, 128, generator=torch.Generator().manual_seed(0))
    with numerics(torch.device("cpu"), 1):
        found = a @ a.T
    assert (found.double() - a.double() @ a.double().T).abs().max().item() < 1e-4  # bfloat16 would be off by 0.1


@pytest.fixture
def published() -> Iterator[TrainConfig]:
    yield TrainConfig(token_budget=32_929_300_480)


def test_estimate_of_the_papers_run(published: TrainConfig) -> None:
    """spec G: 9.10e19 FLOPs; 63.9 hours of one GPU at 40%."""
    facts = train.estimate(published, {})
    assert facts["parameters"][0] == 411_665_408
    assert facts["steps"][0] == 31_403
    assert facts["train_tokens"][0] == 32_928_432_128
    assert facts["train_flops"][0] == pytest.approx(9.10e19, rel=1e-3)
    assert facts["gpu_hours"][0] == pytest.approx(63.9, rel=2e-3)
    assert "assuming 40%" in facts["gpu_hours"][1]
    assert facts["epochs"][0] is None  # nothing is known of the tokens
    facts = train.estimate(published, {"tokens": {"tokens": (8_232_108_032, "tokens, at 4.3 bytes a token (assumed)")}})
    assert facts["unique_tokens"] == (8_232_108_032, "unique tokens, at 4.3 bytes a token (assumed)")
    assert facts["epochs"][0] == 4.0


def test_planning_imports_no_torch() -> None:
    code = (
        "import sys, training.train, craw4llm.tokens.tokenize_stage, craw4llm.tokens.tokenizer_stage\n"
        "sys.exit(', '.join({'torch', 'streaming', 'transformers'} & set(sys.modules)) or 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
