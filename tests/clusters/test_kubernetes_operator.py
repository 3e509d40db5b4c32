"""The stage's task with the launcher `kubernetes`, against the API server of fake_kubernetes: who dies, and what becomes of the job."""

import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("kubernetes", reason="the extra `clusters` is not installed")

from airflow.sdk.exceptions import AirflowFailException
from fake_kubernetes import FakeKubernetes
from test_kubernetes_launcher import ended, placed, starts, wait_for

from launchers import Job, launcher_named
from stage_operator import StageOperator

HERE = Path(__file__).resolve().parent
PATHS = [str(HERE), *(str(HERE.parents[1] / name) for name in ("plugins", "scripts", "tests"))]

# A stage: counts its starts, waits until the file `enough` is there, says what it made.
STAGE = """
import json, os, pathlib, sys, time
folder = pathlib.Path(sys.argv[1])
with (folder / "starts").open("a") as stream:
    stream.write(f"{os.getpid()}\\n")
while not (folder / "enough").exists():
    time.sleep(0.05)
(folder / "made").mkdir(exist_ok=True)
(folder / "made" / "manifest.json").write_text("{}")
print(json.dumps({"node": "train", "stage": "train", "fingerprint": "3f9c", "digest": "00", "path": str(folder / "made"), "counts": {},
                  "built": True}), flush=True)
sys.exit(int(sys.argv[2]))
"""
# One try of the task in a process of its own, as a worker has it: the id of its job goes into a file, Airflow's task state.
WORKER = """
import sys
sys.path[:0] = sys.argv[2:]
from pathlib import Path
from test_kubernetes_operator import State, context, task
task(Path(sys.argv[1])).execute(context(State(Path(sys.argv[1]) / "state.json"), attempt=1))
"""


class Command(StageOperator):
    """Runs STAGE in the place of `craw4llm run`."""

    code = 0

    def command(self, params: Any) -> list[str]:
        return [sys.executable, "-c", STAGE, str(Path(self.cwd) / "work"), str(self.code)]


class State:
    """Airflow's task state, in a file that outlives the worker."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def _all(self) -> dict[str, Any]:
        return dict(json.loads(self.path.read_text())) if self.path.exists() else {}

    def get(self, key: str, default: Any = None) -> Any:
        return self._all().get(key, default)

    def set(self, key: str, value: Any) -> None:
        self.path.write_text(json.dumps(self._all() | {key: value}))

    def delete(self, key: str) -> None:
        self.path.write_text(json.dumps({name: value for name, value in self._all().items() if name != key}))


def task(folder: Path) -> Command:
    return Command(
        task_id="train", stage="train", experiment="tiny", replicates=1, parameters=(), cwd=str(folder), launcher="kubernetes"
    )  # fmt: skip


def context(state: State, *, attempt: int) -> dict[str, Any]:
    ti = SimpleNamespace(dag_id="tiny", run_id="run", task_id="train", map_index=-1, try_number=attempt, stats_tags={})
    return {
        "ti": ti,
        "dag_run": SimpleNamespace(conf={}, clear_number=0),
        "params": {},
        "task_state_store": state,
        "outlet_events": {},
    }


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    with FakeKubernetes() as started:
        started.kubeconfig(tmp_path / "kubeconfig")
        monkeypatch.setenv("KUBECONFIG", str(tmp_path / "kubeconfig"))
        monkeypatch.setattr("kubernetes.config.kube_config.KUBE_CONFIG_DEFAULT_LOCATION", str(tmp_path / "kubeconfig"))
        monkeypatch.setenv("CRAW4LLM_ROOT", str(tmp_path / "artifacts"))
        placed(tmp_path, monkeypatch, "")
        (tmp_path / "work").mkdir()
        yield started


def killed_worker(tmp_path: Path) -> None:
    """A first try, whose process is killed while its job runs."""
    worker = subprocess.Popen([sys.executable, "-c", WORKER, str(tmp_path), *PATHS], start_new_session=True)
    try:
        wait_for(lambda: (starts(tmp_path) == 1 and any((tmp_path / "artifacts").rglob("owner"))) or worker.poll() is not None, 120)
        assert worker.poll() is None, "the worker's try ended by itself"
    finally:
        os.killpg(worker.pid, signal.SIGKILL)
        worker.wait()


def submitted(tmp_path: Path) -> State:
    """Airflow's state after a first try whose job runs."""
    state = State(tmp_path / "state.json")
    state.set("job", task(tmp_path).submit_job(context(state, attempt=1)))
    wait_for(lambda: starts(tmp_path) == 1)
    return state


@pytest.mark.parametrize("id_is_lost", [False, True])
def test_the_next_try_follows_the_job_of_a_worker_that_was_killed(server: FakeKubernetes, tmp_path: Path, id_is_lost: bool) -> None:
    killed_worker(tmp_path)
    state = State(tmp_path / "state.json")
    kept = state.get("job")
    if id_is_lost:  # the worker died before Airflow had stored it, and before the launcher had
        state.delete("job")
        (Path(kept["folder"]) / "id.json").unlink()

    def end_when_followed() -> None:  # a job that is over before is no running one: the second try would rightly start another
        wait_for(lambda: (Path(kept["folder"]) / "owner").read_text().startswith("2-"))
        (tmp_path / "work" / "enough").touch()

    end = threading.Thread(target=end_when_followed, daemon=True)
    end.start()
    made = task(tmp_path).execute(context(state, attempt=2))
    end.join(10)
    assert made["fingerprint"] == "3f9c" and made["built"]
    assert starts(tmp_path) == 1 == server.starts and list(server.jobs) == [kept["job"]]


def test_a_job_that_ended_while_nobody_looked_is_not_done_again(server: FakeKubernetes, tmp_path: Path) -> None:
    state = submitted(tmp_path)
    (tmp_path / "work" / "enough").touch()
    assert ended(launcher_named("kubernetes"), state.get("job")) == "succeeded"
    server.jobs.clear()  # and the finished Job was deleted meanwhile (keep-s)
    assert task(tmp_path).execute(context(state, attempt=2))["digest"] == "00"
    assert starts(tmp_path) == 1 == server.starts


def test_the_end_is_the_exit_records_and_the_schedulers_word_stands_beside_it(server: FakeKubernetes, tmp_path: Path) -> None:
    (tmp_path / "work" / "enough").touch()
    failing = task(tmp_path)
    failing.code = 3
    with pytest.raises(AirflowFailException, match="exit code 3, an input from outside") as error:
        failing.execute(context(State(tmp_path / "state.json"), attempt=1))
    assert f"kubernetes job default/{next(iter(server.jobs))}: " in str(error.value)
    # a Job that Kubernetes calls failed after the stage's own record says that all is done: its node was lost just then
    launcher = launcher_named("kubernetes")
    job_id = launcher.submit(job_of(tmp_path, [sys.executable, "-c", STAGE, str(tmp_path / "work"), "0"], "other"))
    assert ended(launcher, job_id) == "succeeded"
    wait_for(lambda: server.jobs[job_id["job"]]["status"] != {})
    server.jobs[job_id["job"]]["status"] = {"conditions": [{"type": "Failed", "status": "True", "reason": "NodeLost"}]}
    fresh = launcher_named("kubernetes")
    assert fresh.status(job_id) == "succeeded" and fresh.result(job_id).code == 0 and "Failed" in fresh.result(job_id).scheduler


def test_a_job_that_was_killed_fails_the_try_and_the_next_one_starts_it_again(server: FakeKubernetes, tmp_path: Path) -> None:
    state = submitted(tmp_path)
    first = state.get("job")
    server.kill_for_memory(first["job"])
    wait_for(lambda: server.jobs[first["job"]]["status"] != {})
    (tmp_path / "work" / "enough").touch()
    assert task(tmp_path).execute(context(state, attempt=2))["digest"] == "00"
    assert starts(tmp_path) == 2 == server.starts and len(server.jobs) == 2


def test_an_evicted_stage_is_told_and_saves_before_its_pod_ends(server: FakeKubernetes, tmp_path: Path) -> None:
    saves = "import os, pathlib, signal, time\n"
    saves += "def save(*_):\n    pathlib.Path('work/saved').touch()\n    os._exit(75)\n"
    saves += "signal.signal(signal.SIGTERM, save)\npathlib.Path('work/started').touch()\n"
    saves += "while not pathlib.Path('work/saved').exists():\n    time.sleep(0.05)\n"
    launcher = launcher_named("kubernetes")
    job_id = launcher.submit(job_of(tmp_path, [sys.executable, "-c", saves], "saves"))
    wait_for((tmp_path / "work" / "started").exists)
    server.evict(job_id["job"])
    assert ended(launcher, job_id, 40) == "succeeded" and server.starts == 2
    assert json.loads((Path(job_id["folder"]) / "exit.before.json").read_text())["stopped"] == "signal"


def test_one_of_two_pods_that_dies_ends_the_job_and_the_next_try_starts_both(
    server: FakeKubernetes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    placed(tmp_path, monkeypatch, "[kubernetes.train]\nnodes = 2\nranks-per-node = 1\n")
    (tmp_path / "pair.py").write_text(
        "import os, pathlib, signal, time\n"
        "rank, folder = os.environ['RANK'], pathlib.Path('work')\n"
        "(folder / f'{rank}.{time.time_ns()}').touch()\n"
        "if rank == '1' and not (folder / 'enough').exists():\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
        "while not (folder / 'enough').exists():\n"
        "    time.sleep(0.05)\n"
    )
    launcher = launcher_named("kubernetes")
    wanted = job_of(tmp_path, [sys.executable, "-m", "pair"], "train")
    first = launcher.submit(wanted)
    assert ended(launcher, first, 120) == "failed"
    assert "Failed" in launcher.result(first).scheduler
    (tmp_path / "work" / "enough").touch()
    second = launcher.submit(wanted)
    assert second["job"] != first["job"] and ended(launcher, second, 120) == "succeeded"
    assert server.starts == 4 and len(list((tmp_path / "work").glob("0.*"))) == 2 == len(list((tmp_path / "work").glob("1.*")))


def job_of(tmp_path: Path, command: list[str], name: str) -> Job:
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    return Job(folder=tmp_path / "jobs" / name, command=command, cwd=str(tmp_path), environment=environment, stage="train")
