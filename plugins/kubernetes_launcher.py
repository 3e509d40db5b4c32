"""The launcher `kubernetes`: a stage's job is a Kubernetes Job. See plugins/launchers.py for the interface.

    submit     a Job of one pod, or an indexed Job of several with a headless Service, by which they find the first; stage_job.py runs in
               the first pod. The job's folder lies on a volume that Airflow's pods and these share, under the same path
    status     the exit record first; while there is none, or the pod was evicted, what the Job and its pods say
    release, cancel    by the files in the folder; a Job whose pod does not run yet is deleted

The Job's name is made from its folder: where its id was lost with the task, the next `submit` finds it there (409), and there is one. An
evicted or pre-empted pod of a one-pod Job is replaced by Kubernetes, and the stage goes on from what it saved: that is no failure
(podFailurePolicy). One of several pods that dies ends them all, and Airflow's next try starts them again. The log is read from the folder,
not through the API.

Options by kind of stage (placement.py): image, namespace, service-account, volumes (claim -> path), cpu, memory, gpus, gpu-resource
(nvidia.com/gpu), shared-memory (/dev/shm), nodes (pods), ranks-per-node (default: gpus), node-selector, tolerations, priority-class,
queue-name (Kueue), env (name -> value), env-from-secret, image-pull-secrets, user (uid, default 50000), keep-s (how long a finished Job
stays to be looked at, default 3600). Values of Airflow's own environment are not passed on: they may be secrets, and a Job's definition is
no place for them.
"""

import dataclasses
import hashlib
import logging
import re
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import stage_job
from launchers import STAGE_JOB, JobId, Outcome, QueueLauncher, Status, _json, for_torchrun
from placement import PlacementError, options_of

log = logging.getLogger(__name__)

PORT = 29500
ASK_EVERY_S = 2.0
REQUEST_TIMEOUT_S = 30.0
GRACE_S = 60  # from SIGTERM to SIGKILL of a pod; stage_job.py needs 20 of them
OPTIONS = {
    *(
        "image",
        "namespace",
        "service-account",
        "volumes",
        "cpu",
        "memory",
        "gpus",
        "gpu-resource",
        "shared-memory",
        "nodes",
        "ranks-per-node",
    ),
    *(
        "node-selector",
        "tolerations",
        "priority-class",
        "queue-name",
        "env",
        "env-from-secret",
        "image-pull-secrets",
        "user",
        "keep-s",
        "python",
    ),
}
PASSED = ("CRAW4LLM_", "NCCL_", "TORCH_", "OMP_", "PYTHONPATH", "PYTHONUNBUFFERED")  # of Airflow's environment, none of them secret
# The record of a time before, when Kubernetes stopped the pod; then the job, which is handed the SIGTERM of an eviction: as the container's
# first process bash would neither end by it nor pass it on. All paths are arguments.
START = (
    '[ ! -e "$1/exit.json" ] || mv "$1/exit.json" "$1/exit.before.json"; trap \'kill -TERM "$job" 2>/dev/null\' TERM; '
    '"$2" -I -S "$3" "$4" & job=$!; while kill -0 "$job" 2>/dev/null; do wait "$job"; done; grep -q \'"code": 0,\' "$1/exit.json"'
)
# Of several pods the first keeps the record, the others run the same command beside it.
START_ONE_OF_MANY = f'if [ "$JOB_COMPLETION_INDEX" = 0 ]; then {START}; else shift 4; exec "$@"; fi'
ON_EVERY_POD = (
    'exec "$0" -m torch.distributed.run --nnodes="$CRAW4LLM_PODS" --node-rank="$JOB_COMPLETION_INDEX" --nproc-per-node="$1" '
    '--master-addr="$MASTER_ADDR" --master-port="$MASTER_PORT" "${@:2}"'
)


class KubernetesLauncher(QueueLauncher):
    """See the module's docstring. Credentials: those of the pod that it runs in, else kubeconfig."""

    name = "kubernetes"

    def __init__(self) -> None:
        super().__init__()
        self._asked: dict[str, tuple[float, dict[str, Any] | None]] = {}
        self._client: Any = None

    # --- the interface

    def start(self, folder: Path, settings: Path, environment: Mapping[str, str]) -> JobId:
        from kubernetes.client.exceptions import ApiException

        record = _json(settings) or {}
        options = options_of(self.name, record.get("stage", ""))
        job, service = objects(folder, record, options, environment)
        namespace, made = job.metadata.namespace, None
        for create, body in ((self.core.create_namespaced_service, service), (self.batch.create_namespaced_job, job)):
            if body is None:
                continue
            try:
                made = create(namespace, body, _request_timeout=REQUEST_TIMEOUT_S)
            except ApiException as error:
                if error.status != 409:  # it is there: created by a try that died before it knew
                    raise OSError(f"kubernetes: {error.status} {error.reason}: {(error.body or '')[:300]}") from error
                made = None  # by its name it is this folder's
            except Exception as error:  # urllib3's, of a server that cannot be reached
                raise OSError(f"kubernetes: {error}") from error
        if service is not None and made is not None:
            self._delete_with(service.metadata.name, made)
        return {"namespace": namespace, "job": job.metadata.name}

    def _delete_with(self, service: str, job: Any) -> None:
        """Lets Kubernetes delete the Service with its Job, which nobody may look at any more when its time (keep-s) is over. The pods need
        the Service from their start, and only a Job that is there can own it; so that is said last."""
        from kubernetes import client

        owner = client.V1OwnerReference(api_version="batch/v1", kind="Job", name=job.metadata.name, uid=job.metadata.uid)
        try:
            body = client.V1Service(metadata=client.V1ObjectMeta(owner_references=[owner]))
            self.core.patch_namespaced_service(service, job.metadata.namespace, body, _request_timeout=REQUEST_TIMEOUT_S)
        except Exception as error:  # the API's, or urllib3's, of a server that cannot be reached: the job runs all the same
            log.warning("kubernetes service %s will stay when its job is deleted: %s", service, getattr(error, "reason", error))

    def find(self, folder: Path) -> JobId | None:
        settings = _json(folder / "settings.json") or {}
        known = {"namespace": options_of(self.name, settings.get("stage", "")).get("namespace", "default"), "job": job_name(folder)}
        word = self._ask({**known, "folder": str(folder)})
        if word is None:
            raise OSError("kubernetes: the API server does not answer")
        return known if word["state"] in ("waiting", "running") else None

    def lives(self, word: Any) -> bool:
        return word is None or word["state"] in ("waiting", "running")

    def without_record(self, folder: Path, word: Any) -> Status:
        return "failed" if (folder / "cancel").exists() or (folder / "release").exists() or word["out_of_memory"] else "lost"

    def line(self, job_id: JobId, word: Any) -> str | None:
        return f"kubernetes: job {job_id['job']} is {word['text']}"

    def result(self, job_id: JobId) -> Outcome:
        outcome = super().result(job_id)
        word = self._word(job_id, now=True)
        if word is None:
            return outcome
        text = f"kubernetes job {job_id['namespace']}/{job_id['job']}: {word['text']}"
        return dataclasses.replace(outcome, out_of_memory=outcome.out_of_memory or word["out_of_memory"], scheduler=text)

    # --- the API server

    @property
    def batch(self) -> Any:
        from kubernetes import client

        return client.BatchV1Api(self._api())

    @property
    def core(self) -> Any:
        from kubernetes import client

        return client.CoreV1Api(self._api())

    def _api(self) -> Any:
        if self._client is None:
            from kubernetes import client, config

            try:
                config.load_incluster_config()
            except config.ConfigException:
                config.load_kube_config()
            self._client = client.ApiClient()
        return self._client

    def _word(self, job_id: JobId, *, now: bool = False) -> dict[str, Any] | None:
        asked_at, word = self._asked.get(job_id["job"], (-ASK_EVERY_S, None))
        if now or time.monotonic() - asked_at >= ASK_EVERY_S:
            word = self._ask(job_id)
            self._asked[job_id["job"]] = time.monotonic(), word
        return word

    def _ask(self, job_id: JobId) -> dict[str, Any] | None:
        """{"state": waiting, running, done or gone; "text": for people; "out_of_memory"}; None: no answer."""
        from kubernetes.client.exceptions import ApiException

        kept = Path(job_id["folder"]) / "kubernetes.json"
        try:
            job = self.batch.read_namespaced_job(job_id["job"], job_id["namespace"], _request_timeout=REQUEST_TIMEOUT_S)
            selector = f"batch.kubernetes.io/job-name={job_id['job']}"
            pods = self.core.list_namespaced_pod(job_id["namespace"], label_selector=selector, _request_timeout=REQUEST_TIMEOUT_S).items
        except ApiException as error:
            if error.status == 404:
                return _json(kept) or {"state": "gone", "text": "gone", "out_of_memory": False}
            return None
        except Exception:  # urllib3's, of a server that cannot be reached
            return None
        word = describe(job, pods)
        if word["state"] == "done":
            stage_job.write(kept, word)  # the Job is deleted an hour later
        return word

    def withdraw(self, job_id: JobId) -> None:
        """Deletes a Job whose pod does not run yet: nothing of it reads the files of its folder. Where the API server does not answer the
        files are still there, and end the job when its pod starts."""
        from kubernetes.client.exceptions import ApiException

        word = self._ask(job_id)
        if word is None or word["state"] != "waiting":
            return
        for delete in (self.batch.delete_namespaced_job, self.core.delete_namespaced_service):
            try:
                delete(job_id["job"], job_id["namespace"], propagation_policy="Background", _request_timeout=REQUEST_TIMEOUT_S)
            except ApiException as error:
                if error.status != 404:
                    log.warning("kubernetes job %s is not deleted: %s", job_id["job"], error.reason)
            except Exception as error:  # urllib3's, of a server that cannot be reached
                log.warning("kubernetes job %s is not deleted: %s", job_id["job"], error)


# --- what is created


def objects(folder: Path, settings: Mapping[str, Any], options: Mapping[str, Any], environment: Mapping[str, str]) -> tuple[Any, Any]:
    """The Job, and for several pods its Service, else None. Raises PlacementError."""
    from kubernetes import client

    if unknown := sorted(set(options) - OPTIONS):
        raise PlacementError(f"kubernetes: {', '.join(unknown)} is not known; expected {', '.join(sorted(OPTIONS))}")
    if not options.get("image"):
        raise PlacementError("kubernetes: no image; expected kubernetes.default.image = the project's image in your registry")
    name, nodes = job_name(folder), int(options.get("nodes", 1))
    namespace = options.get("namespace", "default")
    labels = {"app.kubernetes.io/name": "craw4llm", "craw4llm/stage": _label(settings.get("stage") or "unknown"), "craw4llm/job": name}
    pod = client.V1PodSpec(
        containers=[container(folder, settings, options, environment, name, nodes)],
        restart_policy="Never",
        termination_grace_period_seconds=GRACE_S,
        subdomain=name if nodes > 1 else None,
        service_account_name=options.get("service-account"),
        automount_service_account_token=False,
        security_context=client.V1PodSecurityContext(
            run_as_user=int(options.get("user", 50000)), run_as_group=0, run_as_non_root=True, fs_group=0
        ),
        node_selector=options.get("node-selector"),
        tolerations=[client.V1Toleration(**toleration) for toleration in options.get("tolerations", [])] or None,
        priority_class_name=options.get("priority-class"),
        image_pull_secrets=[client.V1LocalObjectReference(name=secret) for secret in options.get("image-pull-secrets", [])] or None,
        volumes=[
            *(
                client.V1Volume(
                    name=f"volume-{number}", persistent_volume_claim=client.V1PersistentVolumeClaimVolumeSource(claim_name=claim)
                )
                for number, claim in enumerate(options.get("volumes", {}))
            ),
            client.V1Volume(
                name="shared-memory",
                empty_dir=client.V1EmptyDirVolumeSource(medium="Memory", size_limit=options.get("shared-memory", "1Gi")),
            ),
        ],
    )
    # A pod that was evicted or pre-empted is replaced, as often as need be; one whose stage failed ends the Job. Of several pods none is
    # replaced alone: the others would wait for it in vain.
    rules = [
        client.V1PodFailurePolicyRule(
            action="FailJob", on_exit_codes=client.V1PodFailurePolicyOnExitCodesRequirement(operator="NotIn", values=[0])
        )
    ]
    if nodes == 1:
        pattern = client.V1PodFailurePolicyOnPodConditionsPattern(type="DisruptionTarget", status="True")
        rules.insert(0, client.V1PodFailurePolicyRule(action="Ignore", on_pod_conditions=[pattern]))
    job = client.V1Job(
        api_version="batch/v1",
        kind="Job",
        metadata=client.V1ObjectMeta(
            name=name, namespace=namespace, labels=_queued(labels, options), annotations={"craw4llm/folder": str(folder)}
        ),
        spec=client.V1JobSpec(
            template=client.V1PodTemplateSpec(metadata=client.V1ObjectMeta(labels=labels), spec=pod),
            backoff_limit=0,
            completions=nodes,
            parallelism=nodes,
            completion_mode="Indexed" if nodes > 1 else "NonIndexed",
            pod_failure_policy=client.V1PodFailurePolicy(rules=rules),
            ttl_seconds_after_finished=int(options.get("keep-s", 3600)),
            suspend=True if options.get("queue-name") else None,  # Kueue admits it
        ),
    )
    service = None
    if nodes > 1:
        service = client.V1Service(
            api_version="v1",
            kind="Service",
            metadata=client.V1ObjectMeta(name=name, namespace=namespace, labels=labels),
            spec=client.V1ServiceSpec(
                cluster_ip="None",
                selector={"craw4llm/job": name},
                publish_not_ready_addresses=True,  # the ranks look for each other before any is ready
                ports=[client.V1ServicePort(name="rendezvous", port=PORT)],
            ),
        )
    return job, service


def container(
    folder: Path, settings: Mapping[str, Any], options: Mapping[str, Any], environment: Mapping[str, str], name: str, nodes: int
) -> Any:
    from kubernetes import client

    python = options.get("python", "python")
    gpus = {str(options.get("gpu-resource", "nvidia.com/gpu")): str(options["gpus"])} if options.get("gpus") else {}
    plain = {key: value for key, value in environment.items() if key.startswith(PASSED)} | options.get("env", {})
    start = ["bash", "-c", START, "start", str(folder), python, str(STAGE_JOB), str(folder / "settings.json")]
    if nodes > 1:
        ranks = options.get("ranks-per-node", options.get("gpus"))
        if ranks is None:
            raise PlacementError(f"kubernetes: nodes is {nodes}; expected gpus or ranks-per-node beside it")
        _, rest = for_torchrun(settings["command"])
        everywhere = ["bash", "-c", ON_EVERY_POD, python, str(ranks), *rest]
        stage_job.write(folder / "settings.json", {**settings, "command": everywhere})
        start = ["bash", "-c", START_ONE_OF_MANY, *start[3:], *everywhere]
        plain |= {"CRAW4LLM_PODS": str(nodes), "MASTER_ADDR": f"{name}-0.{name}", "MASTER_PORT": str(PORT)}
    else:
        stage_job.write(folder / "settings.json", {**settings, "command": [python, *settings["command"][1:]]})
    requests = {key: str(options[key]) for key in ("cpu", "memory") if options.get(key)}
    limits = {"memory": requests["memory"]} if "memory" in requests else {}
    return client.V1Container(
        name="stage",
        image=options["image"],
        command=start,
        working_dir=settings["cwd"],
        env=[client.V1EnvVar(name=key, value=str(value)) for key, value in sorted(plain.items())],
        env_from=[client.V1EnvFromSource(secret_ref=client.V1SecretEnvSource(name=options["env-from-secret"]))]
        if options.get("env-from-secret")
        else None,
        resources=client.V1ResourceRequirements(requests={**requests, **gpus} or None, limits={**limits, **gpus} or None),
        security_context=client.V1SecurityContext(allow_privilege_escalation=False, capabilities=client.V1Capabilities(drop=["ALL"])),
        volume_mounts=[
            *(
                client.V1VolumeMount(name=f"volume-{number}", mount_path=path)
                for number, path in enumerate(options.get("volumes", {}).values())
            ),
            client.V1VolumeMount(name="shared-memory", mount_path="/dev/shm"),
        ],
    )


def describe(job: Any, pods: list[Any]) -> dict[str, Any]:
    """What a Job and its pods say, in one word and a sentence."""
    conditions = {c.type: c for c in job.status.conditions or [] if c.status == "True"}
    ended = [state.terminated for pod in pods for c in (pod.status.container_statuses or []) if (state := c.state) and state.terminated]
    out_of_memory = any(end.reason == "OOMKilled" for end in ended)
    notes = [f"{end.reason} (exit code {end.exit_code})" for end in ended if end.exit_code]
    notes += [f"pod {pod.status.reason}" for pod in pods if pod.status.reason]
    phases = [pod.status.phase for pod in pods]
    if "Failed" in conditions or "Complete" in conditions:
        kind = "Failed" if "Failed" in conditions else "Complete"
        notes.insert(0, conditions[kind].reason or "")
        state, text = "done", kind
    elif "Running" in phases:
        state, text = "running", "Running"
    else:
        state, text = "waiting", "Suspended" if job.spec.suspend else "Pending"
        waiting = [c.state.waiting.reason for pod in pods for c in (pod.status.container_statuses or []) if c.state and c.state.waiting]
        notes += [reason for reason in waiting if reason]
        notes += [
            c.message
            for pod in pods
            for c in (pod.status.conditions or [])
            if c.type == "PodScheduled" and c.status == "False" and c.message
        ]
    more = "; ".join(dict.fromkeys(note for note in notes if note))
    return {"state": state, "text": f"{text} ({more})" if more else text, "out_of_memory": out_of_memory}


def job_name(folder: Path) -> str:
    """A DNS label, at most 52 characters (pods and their host names add to it); a hash of the folder tells jobs apart."""
    task = re.sub(r"[^a-z0-9]+", "-", folder.parent.name.lower()).strip("-")[:24].strip("-") or "stage"
    return f"c4-{task}-{hashlib.sha256(str(folder).encode()).hexdigest()[:12]}"


def _label(text: str) -> str:
    return re.sub(r"[^A-Za-z0-9._-]", "_", text)[:63]


def _queued(labels: dict[str, str], options: Mapping[str, Any]) -> dict[str, str]:
    return {**labels, "kueue.x-k8s.io/queue-name": options["queue-name"]} if options.get("queue-name") else labels
