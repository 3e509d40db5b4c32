"""Fixtures shared by all tests: a temporary artifact root, stages built in-process, and the folder of reference data."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from craw4llm.artifact import Artifact, Store
from craw4llm.execution import Execution
from craw4llm.externals import ExternalDigests
from craw4llm.stage import Planner, Stage, implementation

ROOT = Path(__file__).resolve().parent.parent
Build = Callable[[Stage], Artifact]


@pytest.fixture(scope="session")
def shared() -> Path:
    """The folder of reference data ($CRAW4LLM_SHARED, default ../shared). Tests that need it skip where it is absent."""
    path = Path(os.environ.get("CRAW4LLM_SHARED", "../shared"))
    path = path if path.is_absolute() else (ROOT / path).resolve()
    if not (path / "spec").is_dir():
        pytest.skip(f"no reference data in {path} (set CRAW4LLM_SHARED)")
    return path


@pytest.fixture
def execution(tmp_path: Path) -> Execution:
    return Execution(root=tmp_path / "artifacts", workers=1, device="cpu", report=lambda line: None)


def builder(execution: Execution) -> Build:
    """A function that builds a stage and all its inputs under `execution.root`, in this process."""
    store = Store(execution.root)
    planner = Planner(ExternalDigests(None))

    def build(stage: Stage) -> Artifact:
        inputs = {name: build(s) for name, s in stage.inputs.items()}
        module = implementation(stage.config.stage)
        artifact, _ = store.build(
            stage.config.stage,
            planner.fingerprint(stage),
            version=stage.config.version,
            config=planner.config_record(stage),
            inputs=inputs,
            write=lambda out: module.run(stage.config, inputs, out, execution),
            keep_partial=getattr(module, "RESUMES", False),
        )
        return artifact

    return build


@pytest.fixture
def build(execution: Execution) -> Build:
    return builder(execution)


@pytest.fixture(scope="session")
def shared_build(tmp_path_factory: pytest.TempPathFactory) -> Build:
    """Like `build`, with one artifact root for the whole test session: for expensive inputs that several tests read."""
    root = tmp_path_factory.mktemp("shared_root")
    return builder(Execution(root=root / "artifacts", workers=1, device="cpu", report=lambda line: None))
