"""The launcher `kubernetes`: its objects against the API's schema, and its behaviour against an API server that runs the pods as
processes."""

import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

pytest.importorskip("kubernetes", reason="the extra `clusters` is not installed")

from fake_kubernetes import FakeKubernetes, validate
from kubernetes import client
from test_slurm_launcher import STAGE

from kubernetes_launcher import KubernetesLauncher, job_name, objects
from launchers import Job, JobId, launcher_named
from placement import PlacementError

PROJECT = Path(__file__).resolve().parents[2]
SETTINGS = {"command": ["/worker/python", "-m", "craw4llm", "run", "--only=a.train", "tiny"], "cwd": "/opt/craw4llm", "stage": "train"}
OPTIONS: dict[str, Any] = {
    "image": "registry.example.org/craw4llm:cuda",
    "namespace": "research",
    "service-account": "jobs",
    "volumes": {"artifacts": "/artifacts", "data": "/opt/craw4llm/data"},
    "cpu": "8",
    "memory": "64Gi",
    "gpus": 8,
    "shared-memory": "16Gi",
    "node-selector": {"nvidia.com/gpu.product": "H100"},
    "tolerations": [{"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}],
    "priority-class": "batch",
    "queue-name": "research",
    "env": {"HTTPS_PROXY": "http://proxy:3128"},
    "env-from-secret": "hub",
    "image-pull-secrets": ["registry"],
}


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeKubernetes]:
    with FakeKubernetes() as started:
        started.kubeconfig(tmp_path / "kubeconfig")
        monkeypatch.setattr("kubernetes.config.kube_config.KUBE_CONFIG_DEFAULT_LOCATION", str(tmp_path / "kubeconfig"))
        placed(tmp_path, monkeypatch, "")
        yield started


def placed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    path = tmp_path / f"placement{time.monotonic_ns()}.toml"
    path.write_text(f'[kubernetes.default]\nimage = "none"\npython = "{sys.executable}"\n{text}')
    monkeypatch.setenv("CRAW4LLM_PLACEMENT", str(path))


def job(tmp_path: Path, seconds: float, **more: Any) -> Job:
    work = tmp_path / "work"
    work.mkdir(parents=True, exist_ok=True)
    environment = {**os.environ, "SECRET": "a secret", "CRAW4LLM_ROOT": "/artifacts"}
    command = [sys.executable, "-c", STAGE, str(work), str(seconds)]
    return Job(
        folder=tmp_path / "jobs" / "quality.crawl",
        command=command,
        cwd=str(tmp_path),
        environment=environment,
        **{"stage": "crawl", **more},
    )


def starts(tmp_path: Path) -> int:
    path = tmp_path / "work" / "starts"
    return len(path.read_text().splitlines()) if path.exists() else 0


def wait_for(true: Callable[[], bool], seconds: float = 30.0) -> None:
    until = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < until, "it did not happen in time"
        time.sleep(0.05)


def ended(launcher: KubernetesLauncher, job_id: JobId, seconds: float = 30.0) -> str:
    wait_for(lambda: launcher.status(job_id) not in ("running", "ending"), seconds)
    return launcher.status(job_id)


def rendered(tmp_path: Path, **options: Any) -> tuple[Any, Any]:
    folder = tmp_path / "quality.train" / "0001"
    folder.mkdir(parents=True, exist_ok=True)
    made = objects(folder, {**SETTINGS, "folder": str(folder)}, {**OPTIONS, **options}, {"CRAW4LLM_ROOT": "/artifacts", "AWS_SECRET": "no"})
    job, service = (client.ApiClient(client.Configuration()).sanitize_for_serialization(each) for each in made)
    return job, service


@pytest.mark.parametrize("nodes", [1, 2])
def test_rendered_objects_fit_the_schema_of_the_api(tmp_path: Path, nodes: int) -> None:
    made, service = rendered(tmp_path, nodes=nodes)
    assert validate(made, "V1Job") == []
    assert (service is None) == (nodes == 1) and (service is None or validate(service, "V1Service") == [])
    pod = made["spec"]["template"]["spec"]
    stage = pod["containers"][0]
    assert stage["resources"] == {
        "requests": {"cpu": "8", "memory": "64Gi", "nvidia.com/gpu": "8"},
        "limits": {"memory": "64Gi", "nvidia.com/gpu": "8"},
    }
    assert [(m["name"], m["mountPath"]) for m in stage["volumeMounts"]][:2] == [
        ("volume-0", "/artifacts"),
        ("volume-1", "/opt/craw4llm/data"),
    ]
    assert {entry["name"] for entry in stage["env"]} >= {"CRAW4LLM_ROOT", "HTTPS_PROXY"} and "no" not in json.dumps(stage["env"])
    assert made["spec"]["completionMode"] == ("NonIndexed" if nodes == 1 else "Indexed")
    assert made["spec"]["completions"] == made["spec"]["parallelism"] == nodes
    assert made["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] == "research" and made["spec"]["suspend"] is True
    command = json.loads((tmp_path / "quality.train" / "0001" / "settings.json").read_text())["command"]
    assert (command[0] == "python") == (nodes == 1) and ("torch.distributed.run" in " ".join(command)) == (nodes == 2)
    if nodes == 2:  # pods find the first by the name that the headless Service gives it
        environment = {entry["name"]: entry.get("value") for entry in stage["env"]}
        name = made["metadata"]["name"]
        assert environment["MASTER_ADDR"] == f"{name}-0.{name}" and pod["subdomain"] == service["metadata"]["name"] == name
        assert service["spec"]["clusterIP"] == "None"


def test_the_validation_finds_faults(tmp_path: Path) -> None:
    made, _ = rendered(tmp_path)
    made["spec"]["backofLimit"] = 1
    made["spec"]["completions"] = "2"
    del made["spec"]["template"]["spec"]["containers"]
    faults = "\n".join(validate(made, "V1Job"))
    assert "backofLimit" in faults and "completions" in faults and "containers" in faults


def test_a_job_runs_once_and_is_found_again(server: FakeKubernetes, tmp_path: Path) -> None:
    launcher = launcher_named("kubernetes")
    first = launcher.submit(job(tmp_path, 1.5))
    assert launcher_named("kubernetes").submit(job(tmp_path, 1.5)) == first
    (Path(first["folder"]) / "id.json").unlink()  # its starter died after the API server had created it
    assert launcher_named("kubernetes").submit(job(tmp_path, 1.5))["job"] == first["job"]
    assert ended(launcher, first) == "succeeded" and starts(tmp_path) == 1 == server.starts
    outcome = launcher.result(first)
    assert outcome.code == 0 and outcome.output == ("made by None",)  # Airflow's secrets stay where they are
    wait_for(lambda: "Complete" in launcher.result(first).scheduler)
    lines, _ = launcher.tail(first, None)
    assert any(line.startswith("kubernetes: job c4-jobs-") or line.startswith("kubernetes: job c4-quality") for line in lines)


def test_an_evicted_pod_is_replaced_and_goes_on(server: FakeKubernetes, tmp_path: Path) -> None:
    launcher = launcher_named("kubernetes")
    job_id = launcher.submit(job(tmp_path, 600))
    wait_for(lambda: starts(tmp_path) == 1)
    server.evict(job_id["job"])
    wait_for(lambda: starts(tmp_path) == 2)
    assert launcher.status(job_id) == "running"
    (tmp_path / "work" / "enough").touch()
    assert ended(launcher, job_id) == "succeeded" and server.starts == 2


def test_a_pod_out_of_memory_is_named(server: FakeKubernetes, tmp_path: Path) -> None:
    launcher = launcher_named("kubernetes")
    job_id = launcher.submit(job(tmp_path, 600))
    wait_for(lambda: starts(tmp_path) == 1)
    server.kill_for_memory(job_id["job"])
    assert ended(launcher, job_id) == "failed"
    outcome = launcher.result(job_id)
    assert outcome.out_of_memory and "OOMKilled" in outcome.scheduler


def test_a_waiting_job_is_deleted_when_the_task_is_stopped(server: FakeKubernetes, tmp_path: Path) -> None:
    server.hold()
    launcher = launcher_named("kubernetes")
    job_id = launcher.submit(job(tmp_path, 600))
    launcher.attach(job_id, "me")
    assert launcher.status(job_id) == "running"
    launcher.release(job_id, "me")
    assert job_id["job"] not in server.jobs
    assert ended(launcher, job_id) == "failed" and starts(tmp_path) == 0


def test_a_server_that_fails_while_a_task_is_stopped_stops_nothing_else(
    server: FakeKubernetes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """`release` runs in a task's `on_kill`: the files in the job's folder are written first, and end the job when its pod starts."""
    server.hold()
    launcher = launcher_named("kubernetes")
    job_id = launcher.submit(job(tmp_path, 600))
    launcher.attach(job_id, "me")

    def refuse(*arguments: Any, **options: Any) -> None:
        raise ConnectionResetError("no one there")

    monkeypatch.setattr("kubernetes.client.BatchV1Api.delete_namespaced_job", refuse)
    launcher.release(job_id, "me")
    assert "is not deleted: no one there" in caplog.text
    assert (Path(job_id["folder"]) / "release").exists()


def test_cancel_ends_a_running_job(server: FakeKubernetes, tmp_path: Path) -> None:
    launcher = launcher_named("kubernetes")
    job_id = launcher.submit(job(tmp_path, 600))
    wait_for(lambda: starts(tmp_path) == 1)
    launcher.cancel(job_id)
    assert ended(launcher, job_id) == "failed" and launcher.result(job_id).stopped == "cancelled"


def test_without_the_api_server_a_job_is_neither_lost_nor_doubled(server: FakeKubernetes, tmp_path: Path) -> None:
    launcher = launcher_named("kubernetes")
    job_id = launcher.submit(job(tmp_path, 600))
    wait_for(lambda: starts(tmp_path) == 1)
    server.down = True
    fresh = launcher_named("kubernetes")
    assert fresh.status(job_id) == "running" and fresh.submit(job(tmp_path, 600)) == job_id
    with pytest.raises(OSError, match="503"):
        fresh.submit(job(tmp_path / "other", 1))
    server.down = False
    (tmp_path / "work" / "enough").touch()
    assert ended(launcher, job_id) == "succeeded" and server.starts == 1


def test_a_deleted_job_is_lost(server: FakeKubernetes, tmp_path: Path) -> None:
    launcher = launcher_named("kubernetes")
    job_id = launcher.submit(job(tmp_path, 600))
    wait_for(lambda: starts(tmp_path) == 1)
    server.kill_for_memory(job_id["job"])
    server.jobs.pop(job_id["job"])
    launcher = launcher_named("kubernetes")
    assert ended(launcher, job_id) == "lost"  # Airflow's next try starts it again


def test_several_pods_meet_through_torchrun(server: FakeKubernetes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    placed(tmp_path, monkeypatch, "[kubernetes.train]\nnodes = 2\nranks-per-node = 1\n")
    (tmp_path / "whoami.py").write_text(
        "import torch.distributed as dist, torch\n"
        "dist.init_process_group('gloo')\n"
        "x = torch.ones(1) * (dist.get_rank() + 1)\n"
        "dist.all_reduce(x)\n"
        "dist.barrier()\n"
        "print('sum', int(x), flush=True)\n"
        "dist.destroy_process_group()\n"
    )
    launcher = launcher_named("kubernetes")
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    command = [sys.executable, "-m", "whoami"]
    job_id = launcher.submit(
        Job(folder=tmp_path / "jobs" / "train", command=command, cwd=str(tmp_path), environment=environment, stage="train")
    )
    assert ended(launcher, job_id, 240) == "succeeded"
    assert launcher.result(job_id).output == ("sum 3",)  # the first pod's; the other's goes to its own log
    assert list(server.services) == [job_id["job"]]
    assert server.rights() <= {("jobs", "create"), ("jobs", "get"), ("pods", "list"), ("services", "create"), ("services", "patch")}
    launcher.batch.delete_namespaced_job(job_id["job"], job_id["namespace"])  # as Kubernetes does it after keep-s
    assert not server.services


def test_the_shipped_role_allows_what_is_asked_for(server: FakeKubernetes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A Job of several pods that waits is created, asked for, and deleted."""
    placed(tmp_path, monkeypatch, "[kubernetes.crawl]\nnodes = 2\nranks-per-node = 1\n")
    server.hold()
    launcher = launcher_named("kubernetes")
    job_id = launcher.submit(job(tmp_path, 1))
    launcher.cancel(job_id)
    assert not server.jobs and not server.services
    documents = yaml.safe_load_all((PROJECT / "deploy" / "kubernetes-jobs.yaml").read_text())
    rules = next(document["rules"] for document in documents if document["kind"] == "Role")
    allowed = {(resource, verb) for rule in rules for resource in rule["resources"] for verb in rule["verbs"]}
    wanted = {(kind, verb) for kind in ("jobs", "services") for verb in ("create", "delete")} | {("services", "patch"), ("jobs", "get")}
    assert wanted <= server.rights() <= allowed


def test_a_job_whose_service_cannot_be_given_to_it_runs_all_the_same(
    server: FakeKubernetes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    placed(tmp_path, monkeypatch, "[kubernetes.crawl]\nnodes = 2\nranks-per-node = 1\n")
    server.hold()

    def refuse(*arguments: Any, **options: Any) -> None:
        raise client.exceptions.ApiException(status=403, reason="Forbidden")

    monkeypatch.setattr("kubernetes.client.CoreV1Api.patch_namespaced_service", refuse)
    job_id = launcher_named("kubernetes").submit(job(tmp_path, 1))
    assert list(server.jobs) == [job_id["job"]] and "will stay when its job is deleted: Forbidden" in caplog.text


def test_what_is_not_known_is_refused(tmp_path: Path) -> None:
    for options, word in (({"imagee": "x"}, "imagee"), ({"image": ""}, "image"), ({"nodes": 2, "gpus": None}, "ranks-per-node")):
        with pytest.raises(PlacementError, match=word):
            rendered(tmp_path, **options)


def test_names_are_dns_labels_that_tell_folders_apart() -> None:
    names = {job_name(Path(f"/{top}/Quality.Equal_Pages.träin/0001")) for top in "ab"}
    assert len(names) == 2 and all(
        len(name) <= 52 and name.replace("-", "").isalnum() and name.islower() and name.isascii() for name in names
    )
