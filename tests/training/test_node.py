"""One run over two machines, as torchrun starts it: two torchruns on the loopback interface."""

import dataclasses
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from test_distributed import CONFIG, curve, make_inputs

import training.optimizer
from craw4llm.errors import Stopped
from craw4llm.execution import Execution
from training import loop
from training.configs import TrainConfig
from training.distributed import Ranks

# An experiment is planned from a corpus on; this command stands in for `craw4llm run`, with a train stage alone.
COMMAND = """
import dataclasses, pathlib, sys, time
import craw4llm.__main__ as command
from craw4llm.artifact import Store
from craw4llm.errors import Craw4LLMError
from craw4llm.execution import Execution
from test_distributed import CONFIG
from training import node, train

def main():
    assert sys.argv[1] == "run" and sys.argv[-2:] == ["--jobs", "1"]
    root, out, steps = pathlib.Path(sys.argv[2]), pathlib.Path(sys.argv[3]), int(sys.argv[4])
    store = Store(root)
    config = dataclasses.replace(CONFIG, token_budget=steps * CONFIG.batch_tokens)
    out.mkdir(exist_ok=True)
    execution = Execution(root=root, device="cpu", save_every_s=0.5, report=lambda line: print(line, flush=True))
    try:
        result = train.run(config, {n: store.open("tokenize", n) for n in ("tokens", "heldout")}, out, execution)
    except Craw4LLMError as error:
        print(f"error: {error}", flush=True)
        sys.exit(error.exit_code)
    print("ranks", result.notes["ranks"], flush=True)

command.main = main
sys.exit(node.main())
"""


def torchruns(script: Path, *arguments: object) -> list[subprocess.Popen[str]]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    environment: dict[str, Any] = os.environ | {
        "PYTHONPATH": os.pathsep.join(sys.path),
        "GLOO_SOCKET_IFNAME": "lo",
        "OMP_NUM_THREADS": "1",
    }
    common = [sys.executable, "-m", "torch.distributed.run", "--nnodes=2", "--nproc-per-node=1", "--master-addr=127.0.0.1"]
    return [
        subprocess.Popen(
            [*common, f"--master-port={port}", f"--node-rank={machine}", str(script), *map(str, arguments)],
            env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )
        for machine in range(2)
    ]  # fmt: skip


def ended(started: list[subprocess.Popen[str]]) -> list[str]:
    try:
        return [process.communicate(timeout=120)[0] for process in started]
    finally:
        for process in started:
            process.kill()


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "run.py"
    path.write_text(COMMAND)
    return path


def test_two_torchruns_are_one_run(script: Path, tmp_path: Path, execution: Execution, monkeypatch: pytest.MonkeyPatch) -> None:
    """SIGTERM to the second machine ends both, with the state saved. Until then the losses were those of one rank."""
    inputs = make_inputs(execution)
    out = tmp_path / "out"
    started = torchruns(script, execution.root, out, 100_000)
    for _ in range(900):
        if list((out / "states").glob("step-*")) or any(process.poll() is not None for process in started):
            break
        time.sleep(0.1)
    started[1].send_signal(signal.SIGTERM)
    said = ended(started)
    assert "error: train: asked to end before step" in said[0], said
    assert all(process.returncode for process in started)
    newest = max((out / "states").glob("step-*"))
    assert {p.name for p in newest.iterdir()} == {".metadata", "__0_0.distcp", "__1_0.distcp", "manifest.json"}
    losses = curve(out)
    assert len(losses) == int(newest.name[5:]) > 0

    rate = training.optimizer.learning_rate

    def asks(config: TrainConfig, now: int) -> float:
        if now == min(len(losses), 20):
            os.kill(os.getpid(), signal.SIGTERM)
        return rate(config, now)

    monkeypatch.setattr(training.optimizer, "learning_rate", asks)
    config = dataclasses.replace(CONFIG, token_budget=100_000 * CONFIG.batch_tokens)
    (tmp_path / "one").mkdir()
    with pytest.raises(Stopped):
        loop.fit(config, inputs, tmp_path / "one", execution=execution, ranks=Ranks())
    assert losses[:20] == pytest.approx(curve(tmp_path / "one"), rel=1e-5)


def test_without_torchrun_it_says_what_is_missing() -> None:
    environment: dict[str, Any] = {name: value for name, value in os.environ.items() if name != "RANK"}
    environment["PYTHONPATH"] = os.pathsep.join(sys.path)
    done = subprocess.run([sys.executable, "-m", "training.node", "demo"], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr == "error: RANK is not set; expected to be started by torchrun: torchrun ... -m training.node\n"
