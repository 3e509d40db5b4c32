"""The stage: its files, what it refuses, and that it writes the same bytes again."""

import dataclasses
import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import torch
from tokenizers import Tokenizer as Engine
from tokenizers import decoders, models, pre_tokenizers, trainers

from craw4llm.artifact import Artifact, Result, Store
from craw4llm.errors import ArtifactError, ConfigError, InputError
from craw4llm.execution import Execution
from craw4llm.fingerprint import External
from craw4llm.tokens.tokenizer import Tokenizer
from training.checkpoint import save_model
from training.configs import SIZES, EvaluateConfig
from training.evaluation import stage
from training.evaluation.aggregate import aggregate
from training.evaluation.parts import Parts
from training.evaluation.tasks import CORE, TASKS, read_own_items
from training.model import Transformer

VOCAB = 400
TEXTS = {
    3: "The river runs past the mill, and the miller sells flour to the village. " * 6,
    8: "A repository holds every version of every file; commit early and write down why. " * 40,
    21: "Größe und Maß: ein kurzer Text.",
}
Run = Callable[..., tuple[Path, Result]]


@pytest.fixture
def make_tokenizer(execution: Execution) -> Callable[[str], Artifact]:
    def make(name: str) -> Artifact:
        def write(out: Path) -> Result:
            engine = Engine(models.BPE())
            engine.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
            engine.decoder = decoders.ByteLevel()
            alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
            trainer = trainers.BpeTrainer(
                vocab_size=VOCAB, special_tokens=["<|endoftext|>"], initial_alphabet=alphabet, show_progress=False
            )
            engine.train_from_iterator(TEXTS.values(), trainer)
            engine.save(str(out / "tokenizer.json"))
            size = engine.get_vocab_size()
            meta = {"vocab_size": size, "end_of_text_id": 0, "end_of_text": "<|endoftext|>", "trained": True}
            (out / "tokenizer_meta.json").write_text(json.dumps(meta))
            return Result(counts={"vocab_size": (size, "ids")})

        return Store(execution.root).build("tokenizer", name, version=1, config={}, inputs={}, write=write)[0]

    return make


@pytest.fixture
def make_checkpoint(execution: Execution) -> Callable[..., Artifact]:
    """An untrained toy model with so many rows in embedding and head."""

    def make(vocab_size: int, **inputs: Artifact) -> Artifact:
        def write(out: Path) -> Result:
            save_model(Transformer(SIZES["toy"], vocab_size, seed=1), out)
            return Result()

        name = f"model{vocab_size}{''.join(inputs)}"
        return Store(execution.root).build("train", name, version=1, config={}, inputs=inputs, write=write)[0]

    return make


@pytest.fixture
def inputs(make_checkpoint: Any, make_tokenizer: Any, heldout_artifact: Any) -> dict[str, Artifact]:
    tokenizer = make_tokenizer("bpe")
    encode = Tokenizer(tokenizer).encode
    heldout = heldout_artifact(
        {page: encode(text) for page, text in TEXTS.items()},
        sample_tokens=257,
        n_bytes={page: len(text.encode()) for page, text in TEXTS.items()},
        tokenizer=tokenizer,
    )
    return {"checkpoint": make_checkpoint(VOCAB), "tokenizer": tokenizer, "heldout": heldout}


@pytest.fixture
def run(inputs: dict[str, Artifact], execution: Execution, tmp_path: Path) -> Run:
    """Runs the stage on an untrained toy model into a folder of its own."""

    def make(config: EvaluateConfig, where: Execution = execution, **other: Artifact) -> tuple[Path, Result]:
        out = tmp_path / f"out{len(list(tmp_path.glob('out*')))}"
        out.mkdir()
        return out, stage.run(config, {**inputs, **other}, out, where)

    return make


def read(out: Path, name: str) -> list[dict[str, Any]]:
    return pq.read_table(out / f"{name}.parquet").to_pylist()


def test_own_items_end_to_end(run: Run):
    out, result = run(EvaluateConfig())
    assert sorted(p.name for p in out.iterdir()) == [
        "items.parquet",
        "pages.parquet",
        "rejects.parquet",
        "summary.json",
        "tasks.parquet",
    ]
    own = read_own_items()
    items, tasks, summary = read(out, "items"), read(out, "tasks"), json.loads((out / "summary.json").read_text())
    assert [row["task"] for row in tasks] == list(TASKS)
    for row in tasks:
        mine = [item for item in items if item["task"] == row["task"]]
        assert [item["item"] for item in mine] == list(range(len(own[row["task"]].rows))) and row["items"] == len(mine)
        groups: dict[str | None, list[bool]] = {}
        for item in mine:
            groups.setdefault(item["category"], []).append(item["correct"])
            if TASKS[row["task"]].kind == "lm":
                assert item["choice"] is None and item["gold"] is None and len(item["losses"]) == 1
            else:
                losses = item["losses"]
                assert item["choice"] == losses.index(min(losses)) and item["correct"] == (item["choice"] == item["gold"])
                assert len(item["n_context_tokens"]) == len(losses) and max(item["n_context_tokens"]) < SIZES["toy"].context
        assert row["accuracy"] == pytest.approx(sum(sum(g) / len(g) for g in groups.values()) / len(groups))
        assert row["state"] == "complete"
    sums = aggregate({row["task"]: row["accuracy"] for row in tasks})
    assert summary["core_v1"] == pytest.approx(sum(row["centered_v1"] for row in tasks if row["task"] in CORE) / 22)
    assert (summary["core_v2"], summary["raw_mean_23"], summary["why"]) == (sums.core_v2, sums.raw_mean_23, [])
    assert summary["task_source"] == "self-written sample items"
    assert result.counts["core_v1"][0] == summary["core_v1"] and result.counts["items"][0] == len(items)
    assert read(out, "rejects") == []


def test_an_untrained_model_needs_the_bits_of_its_vocabulary(run: Run, inputs: dict[str, Artifact]):
    """log2(vocabulary) bits a token, roughly; and the totals are those of the pages."""
    out, result = run(EvaluateConfig(suite="none"))
    pages = read(out, "pages")
    assert [row["page"] for row in pages] == sorted(TEXTS)
    assert [row["n_bytes"] for row in pages] == [len(TEXTS[page].encode()) for page in sorted(TEXTS)]
    encode = Tokenizer(inputs["tokenizer"]).encode
    assert [row["n_tokens"] for row in pages] == [len(encode(TEXTS[page])) + 1 for page in sorted(TEXTS)]
    nats, tokens, size = (sum(row[name] for row in pages) for name in ("nll", "n_tokens", "n_bytes"))
    log = torch.tensor(float(VOCAB)).log().item()
    assert nats / tokens == pytest.approx(log, rel=0.1)
    value, unit = result.counts["bits_per_byte"]
    assert value == pytest.approx(nats / torch.tensor(2.0).log().item() / size) and unit == "bits/byte"
    summary = json.loads((out / "summary.json").read_text())
    assert summary["core_v1"] is None and summary["why"] == ["suite is none: no task was run"] and read(out, "tasks") == []


def test_the_same_run_gives_the_same_bytes(run: Run):
    first, _ = run(EvaluateConfig())
    second, _ = run(EvaluateConfig())
    for path in first.iterdir():
        assert path.read_bytes() == (second / path.name).read_bytes(), path.name


def test_micro_batches_change_no_choice(run: Run, execution: Execution):
    first, _ = run(EvaluateConfig())
    second, _ = run(EvaluateConfig(), dataclasses.replace(execution, micro_batch=1))
    choices = [[(row["task"], row["item"], row["choice"], row["correct"]) for row in read(out, "items")] for out in (first, second)]
    assert choices[0] == choices[1]


def test_a_shorter_context_crops_and_is_part_of_the_result(run: Run):
    out, result = run(EvaluateConfig(max_context=48))
    assert max(max(row["n_context_tokens"]) for row in read(out, "items")) < 48
    assert result.counts["cropped_items"][0] > run(EvaluateConfig())[1].counts["cropped_items"][0]


def test_items_that_cannot_fit_are_listed_and_wrong(run: Run):
    out, result = run(EvaluateConfig(max_context=12))
    rejects = read(out, "rejects")
    assert rejects and result.counts["rejected_items"][0] == len(rejects)
    items = {(row["task"], row["item"]): row for row in read(out, "items")}
    for row in rejects:
        item = items[row["task"], row["item"]]
        assert row["counted_as_wrong"] and "no room" in row["reason"]
        assert (item["losses"], item["choice"], item["correct"]) == ([], None, False)
    assert len(items) == sum(len(file.rows) for file in read_own_items().values())


def test_a_limited_folder_gives_results_and_no_core(run: Run, shared: Path, tmp_path: Path):
    folder = tmp_path / "tasks"
    folder.mkdir()
    for task in TASKS.values():
        lines = (shared / "eval_samples" / task.file_name).read_text().splitlines(keepends=True)
        (folder / task.file_name).write_text("".join(lines if task.items == len(lines) else lines[:2]))
    out, result = run(EvaluateConfig(tasks=External(name="first lines", path=str(folder))))
    summary = json.loads((out / "summary.json").read_text())
    assert [summary[name] for name in ("core_v1", "core_v2", "raw_mean_22", "raw_mean_23")] == [None] * 4
    assert len(summary["why"]) == 22 and "arc_easy is limited: 2 usable items of 2376" in summary["why"]
    assert summary["task_source"] == "first lines" and result.counts["core_v1"][0] is None
    states = {row["task"]: row["state"] for row in read(out, "tasks")}
    assert states.pop("bigbench_repeat_copy_logic") == "complete" and set(states.values()) == {"limited"}
    assert summary["bits_per_byte"] > 0


def test_a_missing_file_stops_before_any_work(run: Run, shared: Path, tmp_path: Path):
    folder = tmp_path / "tasks"
    shutil.copytree(shared / "eval_samples", folder)
    folder.chmod(0o755)
    (folder / "squad.jsonl").unlink()
    with pytest.raises(InputError, match=r"lacks squad\.jsonl"):
        run(EvaluateConfig(tasks=External(name="tasks", path=str(folder))))


def test_tokens_of_another_tokenizer_are_refused(run: Run, make_tokenizer: Any, make_checkpoint: Any, heldout_artifact: Any):
    other = make_tokenizer("other")
    with pytest.raises(ArtifactError, match="held-out tokens were made with the tokenizer bpe, the input is other"):
        run(EvaluateConfig(), tokenizer=other)
    trained_on = heldout_artifact({1: [5] * 300}, pages="selection", tokenizer=other)
    with pytest.raises(ArtifactError, match="the model was trained with the tokenizer other, the input is bpe"):
        run(EvaluateConfig(), checkpoint=make_checkpoint(VOCAB, tokens=trained_on))


def test_a_tokenizer_larger_than_the_model_is_refused(run: Run, make_checkpoint: Callable[..., Artifact]):
    with pytest.raises(ArtifactError, match=r"the tokenizer has \d+ ids, the model's vocabulary 300"):
        run(EvaluateConfig(), checkpoint=make_checkpoint(300))


@pytest.mark.parametrize("value", [-1, 1, 257])
def test_a_context_that_the_model_has_not_is_refused(run: Run, value: int):
    with pytest.raises(ConfigError, match=r"max_context is .*2 to 256"):
        run(EvaluateConfig(max_context=value))


def test_looking_at_the_stage_loads_no_torch():
    code = "import sys, training.evaluation.stage; assert 'torch' not in sys.modules"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


# Parts: kills, several processes, plans

KILLED = """
import os, signal, sys
from pathlib import Path
from craw4llm.artifact import Store
from craw4llm.execution import Execution
from training.configs import EvaluateConfig
from training.evaluation import parts, stage, suite
suite.BLOCK_ITEMS = 20
root, out, after, *names = sys.argv[1:]
write = parts.Parts.write
left = int(after)
def dying(self, *given):
    global left
    write(self, *given)
    left -= 1
    if left == 0:
        os.kill(os.getpid(), signal.SIGKILL)
parts.Parts.write = dying
inputs = {name: Store(Path(root)).open(*place.split(":")) for name, place in (n.split("=") for n in names)}
stage.run(EvaluateConfig(), inputs, Path(out), Execution(root=Path(root), device="cpu", report=lambda line: None))
"""


def test_after_kill_9_the_stage_ends_with_the_same_bytes(
    run: Run, inputs: dict[str, Artifact], execution: Execution, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("training.evaluation.suite.BLOCK_ITEMS", 20)
    whole, _ = run(EvaluateConfig())
    assert stage.RESUMES and not (whole / stage.PARTS).exists()
    out = tmp_path / "killed"
    out.mkdir()
    places = [f"{name}={artifact.stage}:{artifact.fingerprint}" for name, artifact in inputs.items()]
    for after in (1, 4):  # two attempts: one dies after its first part, the next four parts later
        done = subprocess.run([sys.executable, "-c", KILLED, str(execution.root), str(out), str(after), *places], check=False)
        assert done.returncode == -9
    left = {path.name: path.stat().st_mtime_ns for path in (out / stage.PARTS).glob("*.parquet")}
    assert len(left) == 5
    seen: dict[str, int] = {}
    gone = Parts.clear

    def look(self: Parts) -> None:
        seen.update({path.name: path.stat().st_mtime_ns for path in self.folder.glob("*.parquet")})
        gone(self)

    monkeypatch.setattr(Parts, "clear", look)
    stage.run(EvaluateConfig(), inputs, out, execution)
    assert {name: seen[name] for name in left} == left and len(seen) > 8  # nothing done twice
    assert sorted(p.name for p in out.iterdir()) == sorted(p.name for p in whole.iterdir())
    for path in whole.iterdir():
        assert path.read_bytes() == (out / path.name).read_bytes(), path.name


def test_parts_of_another_config_are_refused(run: Run, inputs: dict[str, Artifact], execution: Execution, tmp_path: Path):
    out = tmp_path / "mixed"
    Parts(out / stage.PARTS, {"of": "something else"})
    with pytest.raises(ArtifactError, match="parts of another evaluation"):
        stage.run(EvaluateConfig(), inputs, out, execution)


def test_several_devices_give_the_same_bytes(run: Run, monkeypatch: pytest.MonkeyPatch):
    """One process for each device; here both are the CPU."""
    monkeypatch.setattr("training.evaluation.suite.BLOCK_ITEMS", 20)
    whole, _ = run(EvaluateConfig())
    monkeypatch.undo()  # the second process has the usual blocks; so has this one then
    usual, _ = run(EvaluateConfig())
    monkeypatch.setattr(stage, "_devices", lambda execution: ["cpu", "cpu"])
    two, _ = run(EvaluateConfig())
    for path in usual.iterdir():
        assert path.read_bytes() == (two / path.name).read_bytes(), path.name
    choices = [[(row["task"], row["item"], row["choice"], row["correct"]) for row in read(out, "items")] for out in (whole, two)]
    assert choices[0] == choices[1]


def test_a_failure_in_another_process_is_an_error_not_a_wait(run: Run, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(stage, "_devices", lambda execution: ["cpu", "no such device"])
    with pytest.raises(ConfigError, match="device is 'no such device'"):
        run(EvaluateConfig())


def test_the_summary_has_intervals_and_the_tasks_likelihoods(run: Run):
    out, result = run(EvaluateConfig())
    summary = json.loads((out / "summary.json").read_text())
    assert set(summary["intervals"]) == {"accuracy", "centered", "right_loss", "margin"} and summary["precision"] == "fp32"
    low, high = summary["intervals"]["centered"]["core_v1"]
    assert low < summary["core_v1"] < high
    for row in read(out, "tasks"):
        low, high = summary["intervals"]["right_loss"][row["task"]]
        assert low <= row["right_loss"] <= high and row["scored"] == row["items"]
        assert (row["margin"] is None) == (TASKS[row["task"]].kind == "lm")
    assert result.counts["rejected_items"][0] == 0


def test_bfloat16_is_another_result(run: Run):
    exact, _ = run(EvaluateConfig())
    low, _ = run(EvaluateConfig(precision="bf16"))
    a, b = ([row["nll"] for row in read(out, "pages")] for out in (exact, low))
    assert a != b and a == pytest.approx(b, rel=0.01)


def test_a_plan_knows_the_items_and_the_tokens():
    known = {"heldout": {"tokens": (1000, "tokens")}}
    full = EvaluateConfig(tasks=External(name="tasks", path="anywhere"))
    assert stage.estimate(full, known)["eval_items"] == (105_079, "items") and stage.estimate(full, known)["eval_tokens"][0] > 70_000_000
    assert stage.estimate(EvaluateConfig(suite="none"), known) == {
        "eval_items": (0, "items"),
        "suite_tokens": (0, "tokens"),
        "eval_tokens": (1000, "tokens"),
    }
    own = stage.estimate(EvaluateConfig(), {})
    assert own["eval_items"][0] == sum(len(file.rows) for file in read_own_items().values()) and own["eval_tokens"][0] is None
