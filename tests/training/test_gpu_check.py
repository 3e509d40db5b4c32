"""benchmarks/gpu_check.sh has never seen its card where these tests run: its whole path, with the toy model on a CPU."""

import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent


def test_the_whole_path_on_a_cpu() -> None:
    done = subprocess.run(
        ["bash", "benchmarks/gpu_check.sh", "--cpu"], cwd=ROOT, env=os.environ | {"PYTHON": sys.executable}, capture_output=True, text=True,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["micro_batch"] == 4
    assert found["plain_tokens_per_s"] > 0 and found["compiled_tokens_per_s"] > 0
    assert found["resume_equal"] is True
    table = done.stdout[done.stdout.index("\nCPU (toy model") :]
    for row in ("micro-batch that fits", "step, plain", "step, compiled", "FP8", "kill -9 and resume"):
        assert row in table
    assert ("not measured: precision is fp8, which needs the package torchao" in table) == (found["fp8_loss_delta"] is None)
