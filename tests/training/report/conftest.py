"""Fixtures of the report's tests, over the worlds of made_up_worlds.py."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
from made_up_worlds import CONFIG, World, make_world

from craw4llm.artifact import Artifact
from craw4llm.execution import Execution
from training.configs import ReportConfig
from training.report import stage as report_stage


@pytest.fixture
def world(tmp_path: Path) -> Callable[..., World]:
    return lambda **options: make_world(tmp_path / "artifacts", **options)


@pytest.fixture
def report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Path]:
    """Runs the stage on inputs; returns the folder that it wrote. Figures take most of the time: drawn where a test looks at them."""

    def run(inputs: Mapping[str, Artifact], config: ReportConfig = CONFIG, name: str = "report", *, figures: bool = False) -> Path:
        if not figures:
            for draw in ("draw_models", "draw_crawls", "draw_links", "draw_decisions"):
                monkeypatch.setattr(report_stage, draw, lambda *arguments: [])
        out = tmp_path / name
        out.mkdir()
        execution = Execution(root=tmp_path / "artifacts", workers=1, report=lambda line: None)
        (out / "result.json").write_text(
            json.dumps({k: v for k, (v, _) in report_stage.run(config, inputs, out, execution).counts.items()})
        )
        return out

    return run
