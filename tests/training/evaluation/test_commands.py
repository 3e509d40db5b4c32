"""The commands of evaluation: registered, lazy, and from a model's folder to results and verdicts."""

import csv
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from tokenizers import Tokenizer as Engine
from tokenizers import models, pre_tokenizers, trainers

from craw4llm.__main__ import cli
from craw4llm.errors import ConfigError, InputError
from training.checkpoint import save_model
from training.configs import SIZES
from training.model import Transformer

Call = Callable[..., Result]


@pytest.fixture
def call(execution: Any) -> Call:
    def run(*arguments: object) -> Result:
        return CliRunner().invoke(cli, [str(a) for a in arguments], catch_exceptions=False)

    return run


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], Path]:
    """Folders of untrained toy models, each with a byte-level tokenizer."""

    def make(seed: int) -> Path:
        folder = tmp_path_factory.mktemp(f"model{seed}")
        save_model(Transformer(SIZES["toy"], 300, seed=seed), folder)
        engine = Engine(models.BPE())
        engine.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
        trainer = trainers.BpeTrainer(vocab_size=300, special_tokens=["<|endoftext|>"], initial_alphabet=alphabet, show_progress=False)
        engine.train_from_iterator(["the water and the stone " * 20], trainer)
        engine.save(str(folder / "tokenizer.json"))
        return folder

    return make


def test_commands_are_found_and_cost_nothing_before_they_are_used(call: Call):
    assert all(name in call("--help").output for name in ("plan", "run", "evaluate", "compare", "tasks"))
    code = (
        "import sys; from craw4llm.__main__ import cli; cli(['tasks', 'list'], standalone_mode=False); "
        "assert not {'torch', 'transformers'} & set(sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert done.stdout.count("\n") == 24 and "CC BY-SA 4.0" in done.stdout
    assert CliRunner().invoke(cli, ["no-such-command"]).exit_code == 2


def test_any_number_of_processes_gives_the_same_files(call: Call, model: Callable[[int], Path], tmp_path: Path):
    where = model(1)
    shown = call("evaluate", where, "--out", tmp_path / "one", "--device", "cpu").output
    assert "arc_easy" in shown and "Core v1" in shown and "self-written sample items" in shown
    run = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone", "-m", "craw4llm"]
    subprocess.run([*run, "evaluate", str(where), "--out", str(tmp_path / "two"), "--device", "cpu"], check=True, capture_output=True)
    for name in ("items.parquet", "tasks.parquet", "rejects.parquet", "summary.json"):
        assert (tmp_path / "one" / name).read_bytes() == (tmp_path / "two" / name).read_bytes(), name
    parts = {path.name: path.stat().st_mtime_ns for path in (tmp_path / "two" / "parts").iterdir()}
    call("evaluate", where, "--out", tmp_path / "two", "--device", "cpu")
    assert parts == {path.name: path.stat().st_mtime_ns for path in (tmp_path / "two" / "parts").iterdir()}


def test_only_some_tasks_and_no_core(call: Call, model: Callable[[int], Path], tmp_path: Path, shared: Path):
    options = ("--out", tmp_path / "out", "--device", "cpu", "--only", "copa,winograd", "--tasks", shared / "eval_samples")
    assert "no Core: mmlu_fewshot is missing" in call("evaluate", model(2), *options).output
    summary = json.loads((tmp_path / "out" / "summary.json").read_text())
    assert summary["core_v1"] is None and sorted(summary["task_files"]) == ["copa.jsonl", "winograd_wsc.jsonl"]
    assert summary["context"] == 256 and len(summary["model_sha256"]) == 64
    with pytest.raises(ConfigError, match="no task is called cope"):
        call("evaluate", model(2), "--out", tmp_path / "other", "--only", "cope")


def test_held_out_pages_of_a_corpus(call: Call, model: Callable[[int], Path], tmp_path: Path, build: Any, execution: Any):
    from craw4llm.configs import CorpusConfig, SyntheticWeb
    from craw4llm.corpus.reader import Corpus
    from craw4llm.stage import Stage

    corpus = build(Stage(CorpusConfig(source=SyntheticWeb(pages=200), heldout_fraction=0.2)))
    options = ("--only", "copa", "--device", "cpu", "--root", execution.root, "--corpus", corpus.fingerprint)
    assert "bits per byte of held-out pages: " in call("evaluate", model(1), "--out", tmp_path / "out", *options).output
    opened = Corpus(corpus)
    pages = {row["page"]: row for row in _rows(tmp_path / "out" / "pages.parquet")}
    assert sorted(pages) == [int(page) for page in opened.heldout if opened.n_bytes[page]]
    assert all(row["n_bytes"] == len(opened.text(page).encode()) for page, row in pages.items())


def test_a_comparison_from_folders(call: Call, model: Callable[[int], Path], tmp_path: Path):
    for arm, seeds in (("a", (1, 2)), ("b", (3, 4))):
        for replicate, seed in enumerate(seeds):
            call("evaluate", model(seed), "--out", tmp_path / f"{arm}{replicate}", "--device", "cpu")
    arms = [f"{arm}={tmp_path / arm}0,{tmp_path / arm}1" for arm in "ab"]
    shown = call("compare", *arms, "--kind", "all", "--csv", tmp_path / "out.csv").output
    assert "core_v1" in shown and "about one in twenty" in shown
    with (tmp_path / "out.csv").open() as stream:
        rows = {(row["measure"], row["kind"]): row for row in csv.DictReader(stream)}
    assert rows["core_v1", "centered"]["verdict"] in ("better", "worse", "can't tell")
    assert rows["arc_easy", "accuracy"]["verdict"] == "missing: 8 items, fewer than 30"
    assert {kind for _, kind in rows} == {"centered", "accuracy", "right_loss", "margin"}
    same = call("compare", f"a={tmp_path / 'a0'},{tmp_path / 'a1'}", f"again={tmp_path / 'a0'},{tmp_path / 'a1'}").output
    assert all("can't tell" in line for line in same.splitlines() if line.startswith("core_"))


def test_what_cannot_be_compared_is_refused(call: Call, tmp_path: Path):
    with pytest.raises(ConfigError, match="one arm given"):
        call("compare", "a=x")
    with pytest.raises(ConfigError, match="expected ARM=RESULTS"):
        call("compare", "a=x", "b")
    with pytest.raises(InputError, match=r"neither a folder with summary\.json nor the fingerprint"):
        call("compare", f"a={tmp_path}", "b=x")


def test_a_model_without_a_tokenizer_or_with_another_is_refused(call: Call, model: Callable[[int], Path], tmp_path: Path, shared: Path):
    where = model(5)
    (where / "tokenizer.json").unlink()
    with pytest.raises(InputError, match="came without a tokenizer"):
        call("evaluate", where, "--out", tmp_path / "out", "--device", "cpu")
    neox = shared / "tokenizer" / "20B_tokenizer.json"
    with pytest.raises(InputError, match=r"gives the id \d+, the model's vocabulary has 300"):
        call("evaluate", where, "--out", tmp_path / "out", "--device", "cpu", "--tokenizer", neox)


def _rows(path: Path) -> list[dict[str, Any]]:
    import pyarrow.parquet as pq

    return pq.read_table(path).to_pylist()
