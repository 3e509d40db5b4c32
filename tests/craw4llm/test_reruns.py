"""Replicates are claimed one a run, whoever asks at the same moment, and no further one is wanted when there are enough."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from craw4llm import reruns
from craw4llm.errors import ArtifactError, ConfigError
from craw4llm.execution import Execution
from craw4llm.experiment import Experiment, expand, keep, kept_names, load
from craw4llm.runner import make_plan

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def lasting(monkeypatch: pytest.MonkeyPatch) -> Iterator[Experiment]:
    monkeypatch.setenv("CRAW4LLM_EXPERIMENTS", str(ROOT / "tests" / "experiments"))
    yield load("lasting")


def finish(experiment: Experiment, replicate: int, root: Path) -> None:
    """Makes the results of a replicate look finished."""
    graph = expand(experiment, {}, max(2, experiment.until_replicates))
    plan = make_plan(graph, Execution(root=root))
    for by_replicate in graph.results.values():
        path = plan.store.path("evaluate", plan.fingerprints[graph.id_of(by_replicate[replicate])])
        path.mkdir(parents=True)
        (path / "manifest.json").write_text(json.dumps({"schema": 1}))


def report_over(experiment: Experiment, replicates: int, root: Path, undecided: int) -> None:
    graph = expand(experiment, {}, replicates)
    plan = make_plan(graph, Execution(root=root))
    path = plan.store.path("report", plan.fingerprints["report"])
    path.mkdir(parents=True)
    counts = {"pairs_undecided": undecided, "pairs_missing": 0, "pairs_decided": 3}
    (path / "manifest.json").write_text(json.dumps({"schema": 1, "counts": {k: {"value": v, "unit": ""} for k, v in counts.items()}}))


def test_runs_have_replicates_of_their_own_and_a_run_that_asks_again_has_what_it_had(lasting: Experiment, tmp_path: Path) -> None:
    def ask(run: str) -> Any:
        return reruns.claim(lasting, {}, tmp_path, run)["replicate"]

    assert [ask("a"), ask("b"), ask("a"), ask("c"), ask("b")] == [0, 1, 0, 2, 1]
    assert "all 3 replicates are finished or claimed" in reruns.claim(lasting, {}, tmp_path, "d")["skip"]
    other = reruns.claim(lasting, {"train_tokens": 2048}, tmp_path, "d")
    assert other["replicate"] == 0, "other values are another experiment"


def test_what_is_finished_is_not_given_out_and_what_failed_is_given_out_again(lasting: Experiment, tmp_path: Path) -> None:
    finish(lasting, 0, tmp_path)
    assert reruns.claim(lasting, {}, tmp_path, "a") == {"replicate": 1, "replicates": 2, "skip": "", "finished": 1}
    assert reruns.release(lasting, {}, tmp_path, "a") and not reruns.release(lasting, {}, tmp_path, "a")
    assert reruns.claim(lasting, {}, tmp_path, "b")["replicate"] == 1
    finish(lasting, 1, tmp_path)
    assert not reruns.release(lasting, {}, tmp_path, "b"), "it is finished: nobody needs it"
    assert reruns.claim(lasting, {}, tmp_path, "b")["replicate"] == 1
    assert reruns.claim(lasting, {}, tmp_path, "c")["replicate"] == 2


def test_reruns_end_with_the_number_or_with_the_verdict(lasting: Experiment, tmp_path: Path) -> None:
    finish(lasting, 0, tmp_path)
    finish(lasting, 1, tmp_path)
    assert reruns.claim(lasting, {}, tmp_path, "a")["replicate"] == 2
    reruns.release(lasting, {}, tmp_path, "a")
    report_over(lasting, 2, tmp_path, undecided=0)
    skipped = reruns.claim(lasting, {}, tmp_path, "b")
    assert skipped["replicate"] is None and "the report over 2 replicates has its verdict: all 3 pairs" in skipped["skip"]
    finish(lasting, 2, tmp_path)
    assert "3 replicates are finished, 3 were asked for" in reruns.claim(lasting, {}, tmp_path, "c")["skip"]


def test_a_report_that_is_undecided_asks_for_more(lasting: Experiment, tmp_path: Path) -> None:
    finish(lasting, 0, tmp_path)
    finish(lasting, 1, tmp_path)
    report_over(lasting, 2, tmp_path, undecided=1)
    assert reruns.claim(lasting, {}, tmp_path, "a")["replicate"] == 2


def test_claims_in_the_same_moment_are_never_the_same(tmp_path: Path) -> None:
    environment = os.environ | {"CRAW4LLM_EXPERIMENTS": str(ROOT / "tests" / "experiments"), "CRAW4LLM_ROOT": str(tmp_path)}
    started = [
        subprocess.Popen(
            [sys.executable, "-m", "craw4llm", "claim", "lasting", f"--run-id=scheduled__{i % 3}"], cwd=ROOT, env=environment,
            stdout=subprocess.PIPE, text=True,
        )
        for i in range(6)
    ]  # fmt: skip
    said = [json.loads(process.communicate()[0])["replicate"] for process in started]
    assert sorted(said) == [0, 0, 1, 1, 2, 2] and said[:3] == said[3:]


def test_a_changed_corpus_begins_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Claims of runs on the corpus as it was are none on the corpus as it is."""
    declared = (ROOT / "tests" / "experiments" / "lasting.py").read_text()
    corpus, folder = tmp_path / "corpus.jsonl", tmp_path / "experiments"
    folder.mkdir()
    changed = declared.replace("source=SyntheticWeb(pages=400, hosts=10)", f"source=External(name='corpus', path={str(corpus)!r})")
    assert changed != declared
    (folder / "lasting.py").write_text(
        changed.replace("from craw4llm.stage", "from craw4llm.fingerprint import External\nfrom craw4llm.stage")
    )
    monkeypatch.setenv("CRAW4LLM_EXPERIMENTS", str(folder))
    experiment, root = load("lasting"), tmp_path / "artifacts"
    corpus.write_text("the first\n")
    for number in range(3):
        assert reruns.claim(experiment, {}, root, f"run {number}")["replicate"] == number
        finish(experiment, number, root)
    assert "3 replicates are finished" in reruns.claim(experiment, {}, root, "run 3")["skip"]
    corpus.write_text("another one\n")
    assert reruns.claim(experiment, {}, root, "run 4") == {"replicate": 0, "replicates": 1, "skip": "", "finished": 0}
    assert reruns.release(experiment, {}, root, "run 4")


def test_a_damaged_file_and_an_empty_id_are_named(lasting: Experiment, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="run_id is empty"):
        reruns.claim(lasting, {}, tmp_path, "")
    reruns.claim(lasting, {}, tmp_path, "a")
    (path,) = (tmp_path / "index" / "claims").glob("*.json")
    path.write_text("[")
    with pytest.raises(ArtifactError, match="cannot be read"):
        reruns.claim(lasting, {}, tmp_path, "b")


def test_values_are_kept_under_a_name_that_all_commands_know(lasting: Experiment, tmp_path: Path) -> None:
    kept = keep(lasting, {"train_tokens": 2048}, 2, tmp_path)
    assert keep(lasting, {"train_tokens": "2048"}, 2, tmp_path).name == kept.name and kept_names(tmp_path) == [kept.name]
    assert keep(lasting, {"train_tokens": 4096}, 2, tmp_path).name != kept.name
    again = load(kept.name, tmp_path)
    assert (again.parameters["train_tokens"].default, again.replicates) == (2048, 2)
    assert expand(again).results["random"][1].key == expand(lasting, {"train_tokens": 2048}, 2).results["random"][1].key
    with pytest.raises(ConfigError):
        load(kept.name)
    with pytest.raises(ConfigError):
        load("../../etc/passwd", tmp_path)
    with pytest.raises(ConfigError, match="train_tokens"):
        keep(lasting, {"train_tokens": "many"}, 2, tmp_path)
