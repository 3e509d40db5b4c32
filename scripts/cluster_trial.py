#!/usr/bin/env python
"""The experiment `tiny` on a cluster of this machine, with deaths on the way; the digests must be those of the command line.

    python scripts/cluster_trial.py celery [--folder build/trial]     two workers, queues `cpu` and `gpu`; a parts-heavy corpus; each worker killed once
    python scripts/cluster_trial.py slurm                             stages as Slurm jobs; scancel, requeue, the worker killed while a job runs
    python scripts/cluster_trial.py edge                              a worker that reaches the api-server alone; killed while a job runs

Prints a table (what was done, final state of the run, starts of the job, tries of the task, processes left over, digests equal) and one JSON line.
Exit code 0: as it should be; 1: a difference; 77: something is missing, which is named. Needs Debian's postgresql, redis-server (celery),
slurmctld, slurmd, slurm-client and munge (slurm), and requirements/clusters.txt. About 5 minutes each on two cores.
"""

import argparse
import contextlib
import dataclasses
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil

import airflow_cluster
import local_slurm
from airflow_cluster import PROJECT, Cluster

TINY = {"corpus": "synthetic", "pages": 100, "seed_count": 10, "batch_pages": 25, "vocab_size": 512, "train_tokens": 60_000}
KILLED_TASK = "quality.equal_pages.train"  # long enough to be met while it runs
RUN_WITHIN_S = 900.0


@dataclasses.dataclass
class Row:
    """One line of the table."""

    what: str
    state: str
    wanted_state: str
    starts: int | None = None
    wanted_starts: int | None = None
    tries: int | None = None
    orphans: int | None = None

    @property
    def fine(self) -> bool:
        return self.state == self.wanted_state and self.starts == self.wanted_starts and not self.orphans


def celery(folder: Path) -> list[Row]:
    placement = folder / "placement.toml"
    placement.write_text('[stages.train]\nqueue = "gpu"\n[stages.evaluate]\nqueue = "gpu"\n')
    rows = []
    with Cluster(folder, executor="CeleryExecutor", environment={"CRAW4LLM_PLACEMENT": str(placement), **quick_heartbeats()}) as cluster:
        said(f"healthy after {cluster.healthy_after_s:.0f} s")
        cluster.start_worker("cpu", queues="cpu", slots=3)
        cluster.start_worker("gpu", queues="gpu", slots=2)
        run = cluster.trigger("tiny", TINY, "celery")
        rows.append(kill_worker(cluster, "cpu", "quality.crawl", "tiny", run, queues="cpu", slots=3))
        rows.append(kill_worker(cluster, "gpu", KILLED_TASK, "tiny", run, queues="gpu", slots=2))
        state = cluster.wait_for_run("tiny", run, RUN_WITHIN_S)
        rows.append(Row("tiny through two Celery workers", state, "success", orphans=len(left_over(folder))))
        settle(rows, cluster, run)
        listening = beyond_loopback(cluster)
        rows.append(Row("ports beyond loopback", ", ".join(listening) or "none", "none"))
    return rows


def slurm(folder: Path) -> list[Row]:
    rows = []
    short = Path(tempfile.mkdtemp(prefix="slurm-"))  # sockets have short names
    placement = folder / "placement.toml"
    placement.write_text('[stages.default]\nlauncher = "slurm"\n[slurm.default]\ncpus-per-task = 1\nmem = "1000M"\n')
    try:
        with local_slurm.LocalSlurm(short, nodes=1) as cluster_of_jobs:
            environment = {"CRAW4LLM_PLACEMENT": str(placement), **cluster_of_jobs.environment, **quick_heartbeats()}
            with Cluster(folder, executor="LocalExecutor", environment=environment) as cluster:
                said(f"healthy after {cluster.healthy_after_s:.0f} s")
                run = cluster.trigger("tiny", TINY, "slurm")
                for task, what in (("quality.crawl", "scontrol requeue"), ("random.equal_pages.train", "scancel"), (KILLED_TASK, "worker")):
                    rows.append(disturb_slurm(cluster, cluster_of_jobs, what, task, run))
                state = cluster.wait_for_run("tiny", run, RUN_WITHIN_S)
                rows.append(Row("tiny, every stage a Slurm job", state, "success", orphans=len(left_over(folder))))
                settle(rows, cluster, run)
                rows.append(Row("jobs left in the queue", str(len(cluster_of_jobs.ask("squeue", "-h").split())), "0"))
    finally:
        shutil.rmtree(short, ignore_errors=True)
    return rows


def edge(folder: Path) -> list[Row]:
    rows = []
    placement = folder / "placement.toml"
    placement.write_text('[stages.train]\nqueue = "gpu"\nexecutor = "EdgeExecutor"\n')
    environment = {
        "CRAW4LLM_PLACEMENT": str(placement),
        "AIRFLOW__EDGE__API_ENABLED": "True",
        "AIRFLOW__EDGE__JOB_POLL_INTERVAL": "1",
        "AIRFLOW__EDGE__HEARTBEAT_INTERVAL": "5",
        **quick_heartbeats(),
    }
    executor = "LocalExecutor,EdgeExecutor:airflow.providers.edge3.executors.EdgeExecutor"
    cluster = Cluster(folder, executor=executor, environment=environment)
    environment["AIRFLOW__EDGE__API_URL"] = cluster._more["AIRFLOW__EDGE__API_URL"] = f"{cluster.address}/edge_worker/v1/rpcapi"
    with cluster:
        said(f"healthy after {cluster.healthy_after_s:.0f} s")
        box = {"CRAW4LLM_ROOT": str(cluster.root)}
        cluster.start_edge_worker("gpubox", queues="gpu", slots=2, environment=box)
        run = cluster.trigger("tiny", TINY, "edge")
        found = running_job(cluster, "tiny", run, KILLED_TASK)
        cluster.end("worker-gpubox", kill=True)
        said(f"killed the edge worker while {KILLED_TASK} ran")
        cluster.start_edge_worker("gpubox2", queues="gpu", slots=2, environment=box)
        rows.append(Row(f"kill -9 of the edge worker in {KILLED_TASK}", "", "success", starts=0, wanted_starts=1))
        rows[-1].__dict__["task"], rows[-1].__dict__["folder"] = KILLED_TASK, found.parent
        state = cluster.wait_for_run("tiny", run, RUN_WITHIN_S)
        rows.append(Row("tiny, its training on an edge worker", state, "success", orphans=len(left_over(folder))))
        settle(rows, cluster, run)
    return rows


TRIALS = {"celery": celery, "slurm": slurm, "edge": edge}


# --- deaths


def kill_worker(cluster: Cluster, name: str, task: str, dag: str, run: str, **worker: Any) -> Row:
    """kill -9 of a Celery worker, with all its task processes, while the job of `task` runs. The job must go on and be followed again."""
    found = running_job(cluster, dag, run, task)
    cluster.end(f"worker-{name}", kill=True)
    said(f"killed the worker {name} while {task} ran")
    time.sleep(2)
    cluster.start_worker(name, **worker)
    row = Row(f"kill -9 of the worker `{name}` in {task}", "", "success", starts=0, wanted_starts=1)
    row.__dict__["task"], row.__dict__["folder"] = task, found.parent
    return row


def disturb_slurm(cluster: Cluster, jobs: local_slurm.LocalSlurm, what: str, task: str, run: str) -> Row:
    found = running_job(cluster, "tiny", run, task)
    number = str(json.loads((found / "id.json").read_text())["slurm_job"])
    if what == "worker":
        task_process(cluster, task).kill()
    else:
        jobs.ask(*what.split(), number)
    said(f"{what} while {task} ran as Slurm job {number}")
    # a cancelled job is a failure, and the next try starts another; a requeued one is the same job
    row = Row(f"{what.replace('worker', 'kill -9 of its Airflow worker')} in {task}", "", "success", starts=0, wanted_starts=2 if what == "scancel" else 1)
    row.__dict__["task"], row.__dict__["folder"] = task, found.parent
    return row


def running_job(cluster: Cluster, dag: str, run: str, task: str) -> Path:
    """The folder of the attempt, once its command runs and its id is known to the task."""
    until = time.monotonic() + 400
    while time.monotonic() < until:
        for path in (cluster.root / "logs" / "jobs").glob(f"{dag}/*/{task}/0001/job.json"):
            if not (path.parent / "exit.json").exists() and (path.parent / "owner").exists():
                time.sleep(0.5)
                if not (path.parent / "exit.json").exists():
                    return path.parent
        if cluster.run_state(dag, run) in ("failed", "success"):
            break
        time.sleep(0.05)
    raise RuntimeError(f"{task} was not met while it ran; the run is {cluster.run_state(dag, run)}: {states(cluster, dag, run)}")


def task_process(cluster: Cluster, task: str) -> psutil.Process:
    """The supervisor of a running task: the LocalExecutor's process whose log is the task's."""
    scheduler = psutil.Process(cluster.parts["scheduler"].pid)
    for process in scheduler.children(recursive=True):
        with contextlib.suppress(psutil.Error):
            if any(task in file.path for file in process.open_files()):
                return process
    raise RuntimeError(f"no process of Airflow holds the log of {task}")


def settle(rows: list[Row], cluster: Cluster, run: str) -> None:
    """Final state, tries and starts of the tasks that were met by something."""
    found = {entry["task_id"]: entry for entry in cluster.tasks("tiny", run)}
    for row in rows:
        if task := row.__dict__.get("task"):
            row.state = str(found[task]["state"])
            row.tries = int(found[task]["try_number"])
            row.starts = len([p for p in row.__dict__["folder"].iterdir() if p.name.isdigit()])
    if any(entry["state"] not in ("success", "skipped") for entry in found.values()):
        said(f"tasks: {states(cluster, 'tiny', run)}")


def states(cluster: Cluster, dag: str, run: str) -> dict[str, str]:
    return {entry["task_id"]: f"{entry['state']}, try {entry['try_number']}" for entry in cluster.tasks(dag, run) if entry["state"] != "success"}


def left_over(folder: Path) -> list[int]:
    """Processes of jobs below the folder that live on though their attempt has its exit record."""
    found = []
    for process in psutil.process_iter(["cmdline"]):
        words = " ".join(process.info["cmdline"] or [])
        if "stage_job" in words and str(folder) in words:
            found.append(process.pid)
    return found


def beyond_loopback(cluster: Cluster) -> list[str]:
    pids = {part.pid for part in cluster.parts.values()}
    for pid in list(pids):
        with contextlib.suppress(psutil.NoSuchProcess):
            pids |= {child.pid for child in psutil.Process(pid).children(recursive=True)}
    listening = [c for c in psutil.net_connections("inet") if c.status == psutil.CONN_LISTEN and c.pid in pids]
    return sorted({f"{c.laddr.ip}:{c.laddr.port}" for c in listening if c.laddr.ip not in ("127.0.0.1", "::1")})


def quick_heartbeats() -> dict[str, str]:
    """A trial does not wait 15 minutes until a dead task is given up."""
    return {"AIRFLOW__SCHEDULER__TASK_INSTANCE_HEARTBEAT_TIMEOUT": "20", "AIRFLOW__SCHEDULER__TASK_INSTANCE_HEARTBEAT_DETECTION_INTERVAL": "5"}


# --- the command line, and the table


def by_hand(folder: Path) -> dict[str, str]:
    settings = [part for name, value in TINY.items() for part in ("--set", f"{name}={value}")]
    command = [sys.executable, "-m", "craw4llm", "run", "tiny", *settings, "--root", str(folder / "by-hand")]
    done = subprocess.run(command, cwd=PROJECT, env={**os.environ, "PYTHONPATH": str(PROJECT)}, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"the command line failed: {done.stderr[-2000:]}")
    return digests(folder / "by-hand")


def digests(root: Path) -> dict[str, str]:
    """Folder of an artifact -> its digest."""
    found = sorted(root.glob("*/*/manifest.json"))
    return {str(path.parent.relative_to(root)): json.loads(path.read_text())["digest"] for path in found if not path.parent.name.startswith(".")}


def table(rows: list[Row]) -> str:
    cells = [("what", "final state", "starts", "tries", "left over", "as wanted")]
    for row in rows:
        numbers = ["" if n is None else str(n) for n in (row.starts, row.tries, row.orphans)]
        cells.append((row.what, row.state, *numbers, "yes" if row.fine else "NO"))  # type: ignore[arg-type]
    widths = [max(len(line[k]) for line in cells) for k in range(len(cells[0]))]
    return "\n".join("  ".join(text.ljust(width) for text, width in zip(line, widths, strict=True)).rstrip() for line in cells)


def said(text: str) -> None:
    print(f"[{time.strftime('%H:%M:%S')}] {text}", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("trial", choices=sorted(TRIALS))
    parser.add_argument("--folder", type=Path, default=None, help="empty or absent; kept where given (default: a temporary one)")
    given = parser.parse_args()
    lacking = airflow_cluster.missing(celery=given.trial == "celery") + (local_slurm.missing() if given.trial == "slurm" else [])
    if lacking:
        print(f"not tried: {', '.join(lacking)} missing")
        return 77
    folder = (given.folder or Path(tempfile.mkdtemp(prefix="craw4llm-trial-"))).resolve()
    folder.mkdir(parents=True, exist_ok=True)
    began = time.monotonic()
    try:
        rows = TRIALS[given.trial](folder)
        said("the same by the command line")
        wanted, made = by_hand(folder), digests(folder / "artifacts")
        differing = [name for name in wanted if made.get(name) != wanted[name]]
        same = f"equal ({len(wanted)})" if not differing and set(made) == set(wanted) else f"differ: {', '.join(differing) or 'more or fewer'}"
        rows.append(Row("digests and those of the command line", same, f"equal ({len(wanted)})"))
    finally:
        if given.folder is None:
            shutil.rmtree(folder, ignore_errors=True)
    print(table(rows))
    print(json.dumps({"trial": given.trial, "seconds": round(time.monotonic() - began), "fine": all(row.fine for row in rows)}))
    return 0 if all(row.fine for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
