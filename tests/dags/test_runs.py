"""An experiment as a DAG makes the same artifacts as the command line: by `dag.test()`, and with a real scheduler and executor."""

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import airflow_env
import psutil
import pytest
from airflow.dag_processing.dagbag import DagBag
from airflow.utils.db import initdb

from craw4llm.artifact import Store
from craw4llm.execution import Execution
from craw4llm.experiment import expand, load
from craw4llm.runner import make_plan

EXPERIMENTS = airflow_env.PROJECT / "tests" / "experiments"
SERVER = airflow_env.PROJECT / "scripts" / "airflow_server.py"
VALUES = {"pages": 40, "web_pages": 400, "train_tokens": 20480}  # of `mini`
LASTING = {"train_tokens": 5120}  # of `lasting`, the smaller graph


@pytest.fixture(scope="module")
def warm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Stages are forked from a process that has the libraries loaded, as under the server: twenty of them start in seconds."""
    place = tmp_path_factory.mktemp("warm") / "s"
    process = subprocess.Popen([sys.executable, str(airflow_env.PROJECT / "plugins" / "warm_start.py"), str(place)])
    wait_for(place.exists, 120)
    yield str(place)
    process.terminate()
    process.wait(10)


def planned(experiment: str, values: dict[str, int], root: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, tuple[str, str]]:
    """Task id -> (stage, fingerprint), as the command line would name them."""
    monkeypatch.setenv("CRAW4LLM_EXPERIMENTS", str(EXPERIMENTS))
    graph = expand(load(experiment), values)
    plan = make_plan(graph, Execution(root=root))
    return {node.id: (node.stage.config.stage, plan.fingerprints[node.id]) for node in graph.nodes}


def digests(root: Path, names: dict[str, tuple[str, str]]) -> dict[str, str]:
    return {task_id: Store(root).open(stage, fingerprint).digest for task_id, (stage, fingerprint) in names.items()}


def test_dag_test_makes_what_the_command_line_makes(warm: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CRAW4LLM_WARM_START", warm)
    root = tmp_path / "artifacts"
    names = planned("lasting", LASTING, root, monkeypatch)
    monkeypatch.setenv("CRAW4LLM_ROOT", str(root))
    initdb()
    run = DagBag(airflow_env.PROJECT / "dags" / "crawl_to_quality.py").dags["lasting"].test(run_conf=LASTING)
    assert run.state == "success"
    tasks = {ti.task_id: ti for ti in run.get_task_instances()}
    assert set(tasks) == {*names, "plan"}
    assert tasks["plan"].xcom_pull(task_ids="plan")["stages_to_do"] == len(names)
    made = {}
    for task_id, (stage, fingerprint) in names.items():
        record = tasks[task_id].xcom_pull(task_ids=task_id)
        assert (record["node"], record["stage"], record["fingerprint"], record["built"]) == (task_id, stage, fingerprint, True)
        assert Path(record["path"]) == (root / stage / fingerprint).resolve()
        assert json.loads(json.dumps(record, allow_nan=False)) == record
        made[task_id] = record["digest"]
    assert tasks["random.crawl"].xcom_pull(task_ids="random.crawl")["counts"]["crawled_pages"] == 40
    done = subprocess.run(
        [sys.executable, "-m", "craw4llm", "run", "lasting", *(f"--set={name}={value}" for name, value in LASTING.items())],
        cwd=airflow_env.PROJECT, capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert f"nothing to do, all {len(names)} stages are finished" in done.stdout
    assert digests(root, names) == made


@pytest.mark.slow
def test_reruns_add_a_replicate_each_until_there_are_enough(warm: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each run of the DAG of reruns claims the next replicate and reports on all; the one after the last skips, and says why."""
    monkeypatch.setenv("CRAW4LLM_WARM_START", warm)
    root = tmp_path / "artifacts"
    monkeypatch.setenv("CRAW4LLM_EXPERIMENTS", str(EXPERIMENTS))
    monkeypatch.setenv("CRAW4LLM_ROOT", str(root))
    initdb()
    dag = DagBag(airflow_env.PROJECT / "dags" / "crawl_to_quality.py").dags["lasting_reruns"]
    finished = []
    for _ in range(3):
        run = dag.test(run_conf=LASTING)
        assert run.state == "success"
        tasks = {ti.task_id: ti for ti in run.get_task_instances()}
        claimed = tasks["claim"].xcom_pull(task_ids="claim")
        report = Store(root).open("report", tasks["report"].xcom_pull(task_ids="report")["fingerprint"])
        finished.append((claimed["replicate"], report.count("replicates")))
    assert finished == [(0, 1), (1, 2), (2, 3)]
    assert len(list((root / "train").glob("[0-9a-f]*"))) == 3 and len(list((root / "corpus").glob("[0-9a-f]*"))) == 1
    run = dag.test(run_conf=LASTING)
    states = {ti.task_id: str(ti.state) for ti in run.get_task_instances()}
    assert states.pop("release") == "success" and set(states.values()) == {"skipped"}


# --- with a real server


class Airflow:
    """A server of our own on a free port, spoken to over REST."""

    def __init__(self, url: str, password: str) -> None:
        self.url = url
        self._token = ""
        self._token = self.call("POST", "/auth/token", {"username": "admin", "password": password})["access_token"]

    def call(self, method: str, path: str, body: object = None) -> Any:
        request = urllib.request.Request(self.url + path, method=method, data=None if body is None else json.dumps(body).encode())
        request.add_header("Content-Type", "application/json")
        if self._token:
            request.add_header("Authorization", f"Bearer {self._token}")
        with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(request, timeout=30) as answer:
            return json.load(answer)

    def trigger(self, dag: str, conf: dict[str, Any]) -> str:
        wait_for(lambda: any(d["dag_id"] == dag for d in self.call("GET", "/api/v2/dags")["dags"]), 60)
        run = self.call("POST", f"/api/v2/dags/{dag}/dagRuns", {"logical_date": None, "conf": conf})
        return f"/api/v2/dags/{dag}/dagRuns/{run['dag_run_id']}"


def wait_for(true: Callable[[], Any], seconds: float) -> Any:
    until = time.monotonic() + seconds
    while not (found := true()):
        assert time.monotonic() < until, f"not within {seconds:.0f} s"
        time.sleep(0.5)
    return found


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def processes_with(mark: str) -> list[psutil.Process]:
    """Processes of ours that know the temporary folder, other than this one."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.pid != os.getpid() and process.status() != psutil.STATUS_ZOMBIE and mark in json.dumps(process.environ()):
                found.append(process)
    return found


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("airflow")


@pytest.fixture(scope="module")
def server(place: Path) -> Iterator[tuple[Airflow, subprocess.Popen[str]]]:
    port = free_port()
    environment = {name: value for name, value in os.environ.items() if "AIRFLOW" not in name}
    environment |= {"CRAW4LLM_EXPERIMENTS": str(EXPERIMENTS), "CRAW4LLM_ROOT": str(place / "artifacts")}
    began = time.monotonic()
    with (place / "server.log").open("w") as log:
        process = subprocess.Popen(
            [sys.executable, str(SERVER), "start", "--home", str(place / "home"), "--port", str(port)],
            env=environment, stdout=log, stderr=subprocess.STDOUT, text=True, start_new_session=True,
        )  # fmt: skip
    try:
        said = (place / "server.log").read_text
        wait_for(lambda: "is ready" in said() or process.poll() is not None, 240)
        assert process.poll() is None, said()
        print(f"healthy {time.monotonic() - began:.0f} s after a fresh start")
        password = re.search(r"with the password (\S+)", said())
        assert password is not None
        yield Airflow(f"http://127.0.0.1:{port}", password[1]), process
    finally:
        process.terminate()
        try:
            process.wait(90)
        finally:
            for left in processes_with(str(place)):
                left.kill()


@pytest.mark.slow
def test_only_its_owner_can_read_what_is_secret_and_only_loopback_is_listened_on(
    server: tuple[Airflow, subprocess.Popen[str]], place: Path
) -> None:
    airflow, process = server
    for name in ("secrets.json", "passwords.json", "airflow.cfg", "server.json", "doorbell"):
        assert (place / "home" / name).stat().st_mode & 0o077 == 0, name
    family = [process.pid, *(child.pid for child in psutil.Process(process.pid).children(recursive=True))]
    listening = [c.laddr for pid in family for c in psutil.Process(pid).net_connections("inet") if c.status == psutil.CONN_LISTEN]
    assert {(address.ip, address.port) for address in listening} == {("127.0.0.1", int(airflow.url.rpartition(":")[2]))}
    with pytest.raises(urllib.error.HTTPError) as caught:
        Airflow(airflow.url, "wrong")
    assert caught.value.code == 401
    caught.value.close()


@pytest.mark.slow
def test_a_second_start_is_refused(server: tuple[Airflow, subprocess.Popen[str]], place: Path) -> None:
    airflow, _ = server
    port = airflow.url.rpartition(":")[2]
    for home, expected in ((place / "home", f"already runs with {place / 'home'}"), (place / "other", f"port {port} of 127.0.0.1")):
        second = [sys.executable, str(SERVER), "start", "--home", str(home), "--port", port]
        done = subprocess.run(second, capture_output=True, text=True, timeout=60)
        assert done.returncode == 1
        assert expected in done.stderr and "Traceback" not in done.stderr


@pytest.mark.slow
def test_a_run_by_the_scheduler_makes_what_the_command_line_makes(
    server: tuple[Airflow, subprocess.Popen[str]], place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    airflow, _ = server
    root = place / "artifacts"
    names = planned("mini", VALUES, root, monkeypatch)
    began = time.monotonic()
    run = airflow.trigger("mini", VALUES)
    state = wait_for(lambda: (s := airflow.call("GET", run)["state"]) in ("success", "failed") and s, 240)
    print(f"{len(names)} tasks in {time.monotonic() - began:.0f} s")
    tasks = airflow.call("GET", f"{run}/taskInstances")["task_instances"]
    assert state == "success", {task["task_id"]: task["state"] for task in tasks}
    assert {task["task_id"]: (task["state"], task["try_number"]) for task in tasks} == {name: ("success", 1) for name in (*names, "plan")}
    for task_id in ("corpus", "quality.crawl", "report"):
        record = airflow.call("GET", f"{run}/taskInstances/{task_id}/xcomEntries/return_value?deserialize=true")["value"]
        assert (record["stage"], record["fingerprint"]) == names[task_id]
    assert set(digests(root, names)) == set(names)
    log = json.dumps(airflow.call("GET", f"{run}/taskInstances/quality.crawl/logs/1"))
    assert names["quality.crawl"][1] in log


@pytest.mark.slow
def test_a_value_of_the_wrong_type_is_refused_at_the_trigger(server: tuple[Airflow, subprocess.Popen[str]]) -> None:
    airflow, _ = server
    for conf in ({"pages": "many"}, {"pages": 10.5}, {"pages": None}):
        with pytest.raises(urllib.error.HTTPError) as caught:
            airflow.trigger("mini", conf)
        assert caught.value.code == 400
        assert "pages" in caught.value.read().decode()
        caught.value.close()


@pytest.fixture(scope="module")
def endless(server: tuple[Airflow, subprocess.Popen[str]]) -> str:
    """A run whose models train for hours."""
    return server[0].trigger("mini", VALUES | {"train_tokens": 2_000_000_000})


def trainings(place: Path) -> dict[str, psutil.Process]:
    """Stages of training that run now: task -> the process that keeps its job."""
    found = {}
    for attempt in (place / "artifacts" / "logs" / "jobs").glob("mini/*/*.train*/[0-9]*"):
        with contextlib.suppress(OSError, psutil.NoSuchProcess):
            if not (attempt / "exit.json").exists():
                found[attempt.parent.name] = psutil.Process(json.loads((attempt / "job.json").read_text())["pid"])
    return found


@pytest.mark.slow
def test_marking_a_running_task_failed_ends_its_stage(server: tuple[Airflow, subprocess.Popen[str]], place: Path, endless: str) -> None:
    airflow, _ = server
    task_id, job = next(iter(wait_for(lambda: trainings(place), 120).items()))
    time.sleep(5)
    airflow.call("PATCH", f"{endless}/taskInstances/{task_id}", {"new_state": "failed"})
    began = time.monotonic()
    wait_for(lambda: not job.is_running(), 30)
    print(f"the stage was gone {time.monotonic() - began:.1f} s after its task was marked failed")
    assert airflow.call("GET", f"{endless}/taskInstances/{task_id}")["state"] == "failed"


@pytest.mark.slow
def test_stopping_with_a_running_stage_leaves_nothing_behind(
    server: tuple[Airflow, subprocess.Popen[str]], place: Path, endless: str
) -> None:
    """The last test of this server."""
    _, process = server
    wait_for(lambda: trainings(place), 120)
    began = time.monotonic()
    process.send_signal(signal.SIGINT)
    assert process.wait(90) == 0
    print(f"stopped in {time.monotonic() - began:.0f} s")
    assert processes_with(str(place)) == []
    assert (place / "server.log").read_text().endswith("stopping ...\nstopped\n")
