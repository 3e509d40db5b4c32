"""Shards kept elsewhere: the same bytes here afterwards, or an error before the first step."""

# ruff: noqa: F811  (fixtures of another module are names of this one)

import dataclasses
import json
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from test_train import _size, config_for, fit, inputs  # noqa: F401

from craw4llm.artifact import Artifact
from craw4llm.errors import ArtifactError, ConfigError
from craw4llm.execution import Execution
from training.remote import fetch_missing


@pytest.fixture
def elsewhere(inputs: dict[str, Artifact], execution: Execution, tmp_path: Path) -> Path:
    """A copy of the artifact root; here, the inputs lose all files but the manifest."""
    copy = tmp_path / "elsewhere"
    shutil.copytree(execution.root, copy)
    for artifact in inputs.values():
        shutil.rmtree(artifact.path / "shards")
        (artifact.path / "documents.parquet").unlink()
    return copy


def test_training_on_fetched_shards_is_training_on_local_ones(inputs: dict[str, Artifact], execution: Execution, elsewhere: Path) -> None:
    there = {name: Artifact(elsewhere, a.stage, a.fingerprint, a.manifest) for name, a in inputs.items()}
    local = fit(config_for(18), there, dataclasses.replace(execution, root=elsewhere), "local")
    fetched = fit(config_for(18), inputs, dataclasses.replace(execution, shards_from=str(elsewhere), workers=3), "fetched")
    assert fetched.digest == local.digest
    assert all(not artifact.verify() for artifact in inputs.values())


def test_without_an_address_the_missing_file_is_named(inputs: dict[str, Artifact], execution: Execution, elsewhere: Path) -> None:
    with pytest.raises(ArtifactError, match="has no file 'shards'"):
        fit(config_for(3), inputs, execution)


@pytest.mark.parametrize("damage", ["flipped", "cut", "missing"])
def test_a_damaged_copy_is_found_before_the_first_step(
    inputs: dict[str, Artifact], execution: Execution, elsewhere: Path, damage: str
) -> None:
    shard = elsewhere / "tokenize" / "tokens" / "shards" / "shard.00000.mds"
    content = shard.read_bytes()
    if damage == "missing":
        shard.unlink()
    else:
        shard.write_bytes(content[:-1] + (b"\xff" if damage == "flipped" else b""))
    expected = "cannot be fetched .FileNotFoundError" if damage == "missing" else "the copy is damaged or of another run; copy it anew"
    with pytest.raises(ArtifactError, match=rf"{shard} .*{expected}"):
        fit(config_for(3), inputs, dataclasses.replace(execution, shards_from=str(elsewhere)))
    assert not list(inputs["tokens"].path.rglob(".fetching-*"))
    assert not (inputs["tokens"].path / "shards" / "shard.00000.mds").exists()
    assert not (execution.root / "train" / ".partial-model" / "metrics.jsonl").exists()


def test_two_that_fetch_the_same_do_not_meet(inputs: dict[str, Artifact], elsewhere: Path) -> None:
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda _: fetch_missing(inputs["tokens"], str(elsewhere), 2), range(8)))
    assert inputs["tokens"].verify() == []
    assert fetch_missing(inputs["tokens"], str(elsewhere)) == 0


def test_an_address_that_nothing_serves(inputs: dict[str, Artifact], elsewhere: Path) -> None:
    with pytest.raises(ConfigError, match="shards_from is 'gopher://x'; expected a folder, or an address that begins with s3://"):
        fetch_missing(inputs["tokens"], "gopher://x")
    assert json.loads((inputs["tokens"].path / "manifest.json").read_text())
