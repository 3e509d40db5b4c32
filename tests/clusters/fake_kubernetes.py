"""A Kubernetes API server on loopback that knows what the launcher asks for, and runs the containers as processes of this machine.

    with FakeKubernetes() as server:
        server.kubeconfig(path)          # what a client needs
        server.hold()                    # pods stay Pending, as on a full cluster
        server.evict(job)                # as a drained node does it: SIGTERM, then a new pod where the Job allows it
        server.starts                    # pods that were started

What is created is validated against the OpenAPI models of the `kubernetes` package, which are generated from the API's own schema: unknown
fields, wrong types, missing required fields and the few rules that the server enforces are refused with 422. It is no Kubernetes: no
scheduling, volumes, images, quotas or name service.
"""

import http.server
import json
import os
import re
import signal
import subprocess
import threading
import time
import urllib.parse
import uuid
from pathlib import Path
from typing import Any

from kubernetes import client

NAME = re.compile(r"[a-z]([-a-z0-9]{0,61}[a-z0-9])?")


class FakeKubernetes:
    """A context manager."""

    def __init__(self) -> None:
        self.jobs: dict[str, Any] = {}
        self.services: dict[str, Any] = {}
        self.pods: dict[str, list[dict[str, Any]]] = {}
        self.processes: dict[str, list[subprocess.Popen[bytes]]] = {}
        self.starts = 0
        self.requests: list[str] = []
        self.down = False
        self._held = False
        self._lock = threading.RLock()
        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        self.address = f"http://127.0.0.1:{self._server.server_address[1]}"

    def __enter__(self) -> "FakeKubernetes":
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *exception: object) -> None:
        for name in list(self.jobs):
            self._kill(name)
        self._server.shutdown()
        self._server.server_close()

    def kubeconfig(self, path: Path) -> None:
        cluster = {"name": "fake", "cluster": {"server": self.address}}
        context = {"name": "fake", "context": {"cluster": "fake", "user": "fake"}}
        users = [{"name": "fake", "user": {}}]
        path.write_text(json.dumps({"clusters": [cluster], "contexts": [context], "users": users, "current-context": "fake"}))

    def hold(self, held: bool = True) -> None:
        self._held = held
        if not held:
            for name in self.jobs:
                if not self.processes.get(name):
                    self._run(name)

    def evict(self, name: str) -> None:
        """The node is drained: the pod is told to end, its end counts as a disruption."""
        with self._lock:
            for pod in self.pods[name]:
                pod["status"]["conditions"] = [{"type": "DisruptionTarget", "status": "True"}]
            for process in self.processes[name]:
                os.kill(process.pid, signal.SIGTERM)  # the container's first process alone, as the kubelet does it

    def kill_for_memory(self, name: str) -> None:
        for process in self.processes[name]:
            os.killpg(process.pid, signal.SIGKILL)

    def rights(self) -> set[tuple[str, str]]:
        """(resource, verb) of all requests, as a Role names them."""
        verbs = {"POST": "create", "PATCH": "patch", "DELETE": "delete"}
        found = set()
        for request in self.requests:
            method, _, path = request.partition(" ")
            kind, name = _parts(path)
            found.add((kind, verbs.get(method, "get" if name else "list")))
        return found

    # --- what the controller and the kubelet do

    def _run(self, name: str) -> None:
        spec = self.jobs[name]["spec"]
        template = spec["template"]["spec"]["containers"][0]
        count = spec["completions"]
        self.pods[name], self.processes[name] = [], []
        for index in range(count):
            values = {entry["name"]: entry.get("value", "") for entry in template["env"]} | {"JOB_COMPLETION_INDEX": str(index)}
            values |= {"MASTER_ADDR": "127.0.0.1", "GLOO_SOCKET_IFNAME": "lo"} if count > 1 else {}  # no name service
            started = subprocess.Popen(
                template["command"], cwd=template["workingDir"], env={"PATH": os.environ["PATH"], **values}, start_new_session=True
            )
            self.starts += 1
            state = {"name": "stage", "ready": True, "restartCount": 0, "image": "", "imageID": "", "state": {"running": {}}}
            pod = {
                "metadata": {"name": f"{name}-{index}"},
                "status": {"phase": "Running", "containerStatuses": [state]},
                "spec": {"containers": []},
            }
            self.pods[name].append(pod)
            self.processes[name].append(started)
        threading.Thread(target=self._follow, args=(name, list(self.processes[name])), daemon=True).start()

    def _follow(self, name: str, processes: list[subprocess.Popen[bytes]]) -> None:
        while any(p.poll() is None for p in processes) and not any(p.poll() for p in processes):
            time.sleep(0.05)
        if self.processes.get(name) != processes:
            return
        with self._lock:
            failed = [p for p in processes if p.poll()]
            if failed:
                for process in processes:  # FailJob ends the other pods
                    if process.poll() is None:
                        os.kill(process.pid, signal.SIGTERM)
                for process in processes:
                    process.wait()
            disrupted = False
            for pod, process in zip(self.pods[name], processes, strict=True):
                code = process.returncode if process.returncode >= 0 else 128 - process.returncode
                reason = "Completed" if code == 0 else "OOMKilled" if code == 137 else "Error"
                pod["status"]["phase"] = "Succeeded" if code == 0 else "Failed"
                pod["status"]["containerStatuses"][0]["state"] = {"terminated": {"exitCode": code, "reason": reason}}
                disrupted |= any(c["type"] == "DisruptionTarget" for c in pod["status"].get("conditions", []))
            if name not in self.jobs:  # deleted meanwhile
                return
            rules = self.jobs[name]["spec"]["podFailurePolicy"]["rules"]
            if failed and disrupted and any(rule["action"] == "Ignore" and "onPodConditions" in rule for rule in rules):
                self._run(name)
                return
            kind, reason = ("Failed", "PodFailurePolicy") if failed else ("Complete", "CompletionsReached")
            self.jobs[name]["status"] = {"conditions": [{"type": kind, "status": "True", "reason": reason}]}

    def _kill(self, name: str) -> None:
        for process in self.processes.pop(name, []):
            if process.poll() is None:
                os.kill(process.pid, signal.SIGTERM)
                try:
                    process.wait(30)
                except subprocess.TimeoutExpired:
                    os.killpg(process.pid, signal.SIGKILL)

    # --- HTTP

    def answer(self, method: str, path: str, query: dict[str, list[str]], body: Any) -> tuple[int, Any]:
        kind, name = _parts(path)
        if kind == "pods":
            labels = dict(part.split("=") for part in query["labelSelector"][0].split(","))
            return 200, {"items": self.pods.get(labels["batch.kubernetes.io/job-name"], [])}
        store = self.jobs if kind == "jobs" else self.services
        if method == "POST":
            faults = validate(body, "V1Job" if kind == "jobs" else "V1Service")
            if faults:
                return 422, {"message": "; ".join(faults)}
            name = body["metadata"]["name"]
            if name in store:
                return 409, {"reason": "AlreadyExists"}
            store[name] = body | {"status": {}}
            body["metadata"]["uid"] = uuid.uuid4().hex
            if kind == "jobs" and not self._held:
                self._run(name)
            return 201, store[name]
        if name not in store:
            return 404, {"reason": "NotFound"}
        if method == "PATCH":
            patched = store[name] | {"metadata": store[name]["metadata"] | body["metadata"]}
            if faults := validate(patched, "V1Job" if kind == "jobs" else "V1Service"):
                return 422, {"message": "; ".join(faults)}
            store[name] = patched
        if method == "DELETE":
            gone = store.pop(name)
            if kind == "jobs":
                self._kill(name)
                self.pods.pop(name, None)
                for service, its in list(self.services.items()):
                    if any(owner["uid"] == gone["metadata"]["uid"] for owner in its["metadata"].get("ownerReferences", [])):
                        del self.services[service]
            return 200, {}
        return 200, store[name]

    def _handler(self) -> type[http.server.BaseHTTPRequestHandler]:
        fake = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do(self) -> None:
                length = int(self.headers.get("Content-Length") or 0)
                body = json.loads(self.rfile.read(length)) if length else None
                url = urllib.parse.urlparse(self.path)
                fake.requests.append(f"{self.command} {url.path}")
                if fake.down:
                    status, found = 503, {"reason": "ServiceUnavailable"}
                else:
                    with fake._lock:
                        status, found = fake.answer(self.command, url.path, urllib.parse.parse_qs(url.query), body)
                text = json.dumps(found).encode()
                self.send_response(status)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(text)))
                self.end_headers()
                self.wfile.write(text)

            do_GET = do_POST = do_PATCH = do_DELETE = do

            def log_message(self, format: str, *args: object) -> None:
                pass

        return Handler


def _parts(path: str) -> tuple[str, str]:
    """Kind and name of what a request is about; name "": all of them."""
    found = re.fullmatch(r"/(?:apis/batch/v1|api/v1)/namespaces/[^/]+/(jobs|services|pods)(?:/([^/]+))?", path)
    assert found is not None, f"{path} is not known"
    return found[1], found[2] or ""


def validate(value: Any, kind: str, where: str = "") -> list[str]:
    """One line for each place where `value`, plain JSON, is not what the API's schema says of `kind`."""
    if found := re.fullmatch(r"list\[(.+)\]", kind):
        if not isinstance(value, list):
            return [f"{where}: {value!r} is no list"]
        return [fault for number, item in enumerate(value) for fault in validate(item, found[1], f"{where}[{number}]")]
    if found := re.fullmatch(r"dict\[str, (.+)\]", kind):
        if not isinstance(value, dict):
            return [f"{where}: {value!r} is no object"]
        return [fault for name, item in value.items() for fault in validate(item, found[1], f"{where}.{name}")]
    plain = {"str": str, "int": int, "bool": bool, "float": (int, float), "object": object, "datetime": str}
    if kind in plain:
        fits = isinstance(value, plain[kind]) and not (kind == "int" and isinstance(value, bool))  # type: ignore[arg-type]
        return [] if fits else [f"{where}: {value!r} is no {kind}"]
    model = getattr(client, kind)
    names = {json_name: (name, model.openapi_types[name]) for name, json_name in model.attribute_map.items()}
    faults = [f"{where}.{name}: no such field in {kind}" for name in value if name not in names]
    for name, item in value.items():
        if name in names:
            faults += validate(item, names[name][1], f"{where}.{name}")
    try:
        model(**{names[name][0]: item for name, item in value.items() if name in names})  # refuses where a required field is missing
    except ValueError as error:
        faults.append(f"{where}: {error}")
    if kind == "V1ObjectMeta" and "name" in value and not NAME.fullmatch(value["name"]):
        faults.append(f"{where}.name: {value['name']!r} is no DNS label")
    if kind == "V1ObjectMeta":
        faults += [
            f"{where}.labels.{k}: {v!r}"
            for k, v in value.get("labels", {}).items()
            if not re.fullmatch(r"[A-Za-z0-9]([\w.-]{0,61}[A-Za-z0-9])?", v)
        ]
    return faults
