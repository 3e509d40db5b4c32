"""Fingerprints of the shipped experiments are pinned: identity changes only when someone means it to.

A change of a config, a default or a stage version shows here. Where it is meant, write the new values into tests/golden/fingerprints.json:
the test prints them. External inputs are not at hand here: a digest made of the declared name stands for their content.
"""

import json
from pathlib import Path

import pytest

from craw4llm.experiment import expand, load, names
from craw4llm.fingerprint import External
from craw4llm.stage import Planner

GOLDEN = Path(__file__).resolve().parents[1] / "golden" / "fingerprints.json"
PINNED: dict[str, dict[str, str]] = {
    "tiny": {"corpus": "synthetic"},
    "crawl_arms": {"corpus": "synthetic"},
    "crawl_policies": {},
    "live_feasible": {},
    "size_ladder": {},
}


def no_file(external: External) -> str:
    return f"content of {external.name}"


def fingerprints(name: str) -> dict[str, str]:
    planner = Planner(no_file)
    return {node.id: planner.fingerprint(node.stage) for node in expand(load(name), PINNED[name]).nodes}


def test_every_shipped_experiment_is_pinned() -> None:
    assert set(PINNED) == set(names())
    assert set(json.loads(GOLDEN.read_text())) == set(PINNED)


@pytest.mark.parametrize("name", sorted(PINNED))
def test_fingerprints_are_as_pinned(name: str) -> None:
    got = fingerprints(name)
    assert got == json.loads(GOLDEN.read_text())[name], f"if this is meant, pin:\n{json.dumps({name: got}, indent=1)}"
