"""The whole chain by the command line, on the smallest experiment: what a run leaves, a second run, kills, two runs at once."""

import importlib.util
import json
import os
import random
import re
import subprocess
import sys
import time
from pathlib import Path
from types import ModuleType

import pytest

PROJECT = Path(__file__).resolve().parents[2]


def _script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("kill_and_resume", PROJECT / "scripts" / "kill_and_resume.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


kills = _script()


def command(*arguments: str, environment: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    """Runs `craw4llm ARGUMENTS` with the test experiments."""
    return subprocess.run(
        [sys.executable, "-m", "craw4llm", *arguments],
        cwd=PROJECT,
        env=os.environ | {"CRAW4LLM_EXPERIMENTS": str(PROJECT / "tests" / "experiments")} | (environment or {}),
        capture_output=True,
        text=True,
    )


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, float, dict[str, str]]:
    """(root, seconds, digests) of an undisturbed run."""
    root = tmp_path_factory.mktemp("chain") / "undisturbed"
    try:
        seconds, digests = kills.undisturbed(root)
    except SystemExit:
        pytest.fail((root.parent / "undisturbed.log").read_text()[-3000:])
    return root, seconds, digests


def test_a_run_ends_in_a_report(finished: tuple[Path, float, dict[str, str]]) -> None:
    root, _, digests = finished
    stages = {name.split("/")[0] for name in digests}
    assert stages == {"corpus", "scorer", "score", "crawl", "select", "tokenizer", "tokenize", "train", "evaluate", "report"}
    (report,) = root.glob("report/*/report.html")
    text = report.read_text()
    for arm in ("quality/equal_pages", "random/equal_fetches", "oracle"):
        assert arm in text
    assert not re.search(r"""(src|href)=["']?https?://""", text), "the report must need no network"


def test_a_second_run_does_nothing_and_says_so(finished: tuple[Path, float, dict[str, str]]) -> None:
    root, _, digests = finished
    began = time.monotonic()
    done = command("run", "mini", "--root", str(root))
    assert done.returncode == 0, done.stderr
    assert "nothing to do, all 20 stages are finished" in done.stdout
    assert "report.html" in done.stdout
    assert time.monotonic() - began < 10
    assert kills.digests(root) == digests


def test_everything_verifies_and_nothing_is_garbage(finished: tuple[Path, float, dict[str, str]]) -> None:
    root, _, digests = finished
    done = command("verify", "--root", str(root))
    assert f"{len(digests)} artifacts verified, 0 faults" in done.stdout
    done = command("gc", "--root", str(root))
    assert done.stdout.startswith("0 folders")
    done = command("gc", "--forget", "mini", "--root", str(root))
    assert done.stdout.count("unreached") == len(digests)


def test_the_index_and_show_name_every_stage_of_every_arm(finished: tuple[Path, float, dict[str, str]]) -> None:
    root, _, _ = finished
    (run,) = json.loads((root / "index" / "mini.json").read_text())["runs"]
    assert set(run["arms"]["0"]) == {"quality/equal_pages", "random/equal_fetches", "oracle"}
    fingerprint = run["arms"]["0"]["oracle"]["oracle.train"]["fingerprint"]
    shown = command("show", "mini", "--root", str(root)).stdout
    assert fingerprint in shown
    artifact = command("show", fingerprint, "--root", str(root)).stdout
    assert "parameters" in artifact and "model.pt" in artifact
    plan = command("plan", "mini", "--root", str(root)).stdout
    assert "20 stages, 20 finished" in plan


def test_equal_bytes_for_another_hash_seed_and_number_of_workers(finished: tuple[Path, float, dict[str, str]], tmp_path: Path) -> None:
    _, _, digests = finished
    done = command("run", "mini", "--root", str(tmp_path / "a"), "--jobs", "1", "--workers", "1", environment={"PYTHONHASHSEED": "77"})
    assert done.returncode == 0, done.stderr
    assert kills.digests(tmp_path / "a") == digests


def test_three_kills_change_nothing(finished: tuple[Path, float, dict[str, str]], tmp_path: Path) -> None:
    _, seconds, digests = finished
    done, left, got = kills.disturbed(tmp_path / "killed", 3, seconds, random.Random(time.time_ns()))
    assert left == 0, f"{left} processes outlived the killed run ({done})"
    assert got == digests, f"after {done} the digests differ"


def test_two_runs_at_once_share_the_work(finished: tuple[Path, float, dict[str, str]], tmp_path: Path) -> None:
    _, _, digests = finished
    root = tmp_path / "both"
    both = [kills.start(root) for _ in range(2)]
    assert [process.wait(900) for process in both] == [0, 0], (tmp_path / "both.log").read_text()[-3000:]
    assert kills.digests(root) == digests
    built = [int(n) for n in re.findall(r"mini: (\d+) of 20 stages built", (tmp_path / "both.log").read_text())]
    nothing = (tmp_path / "both.log").read_text().count("nothing to do")
    assert sum(built) == 20, f"built {built}, nothing to do: {nothing}"


def test_one_stage_without_its_inputs_is_refused(tmp_path: Path) -> None:
    done = command("run", "mini", "--only", "quality.crawl", "--root", str(tmp_path / "empty"))
    assert done.returncode == 4
    assert "run that stage first" in done.stderr
    assert "Traceback" not in done.stderr
