#!/usr/bin/env python
"""The experiment `tiny` on a cluster of this machine, with deaths on the way; the digests must be those of the command line.

    python scripts/cluster_trial.py celery [--quick]     two workers, queues `cpu` and `gpu`, each killed once; a corpus, scores and tokens
                                                         in many parts
    python scripts/cluster_trial.py slurm                stages as Slurm jobs; scancel, requeue, the worker killed while a job runs
    python scripts/cluster_trial.py edge                 a worker that reaches the api-server alone; killed while a job runs

--quick: the experiment `mini` of the tests (20 stages) in the place of `tiny` (76).

Prints a table (what was done, final state of the run, starts of the job, tries of the task, processes left over, digests equal) and one
JSON line. Exit code 0: as it should be; 1: a difference; 77: something is missing, which is named. Needs Debian's postgresql, redis-server
(celery), slurmctld, slurmd, slurm-client and munge (slurm), and the extra `clusters`. About 5 minutes each on two cores.
"""

import argparse
import contextlib
import dataclasses
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import airflow_cluster
import local_slurm
import psutil
from airflow_cluster import PROJECT, Cluster

TINY = {"corpus": "synthetic", "pages": 100, "seed_count": 10, "batch_pages": 25, "vocab_size": 512, "train_tokens": 60_000}
MINI = {"web_pages": 1500, "pages": 100, "train_tokens": 120_000}
PARTS = {"corpus": 24, "score": 12, "tokenize": 6}
MET_WITHIN_S = 900.0
RUN_WITHIN_S = 1800.0


@dataclasses.dataclass(frozen=True)
class Subject:
    """What is run, and the tasks that something happens to."""

    dag: str
    settings: dict[str, Any]
    crawl: str
    train: str
    other_train: str
    environment: dict[str, str]


def subject(quick: bool, folder: Path) -> Subject:
    if not quick:
        return Subject("tiny", TINY, "quality.crawl", "quality.equal_pages.train_r0", "random.equal_pages.train_r0", {})
    place = folder / "experiments"
    place.mkdir()
    text = (PROJECT / "tests" / "experiments" / "mini.py").read_text()
    (place / "mini.py").write_text(text)
    (place / "parts_heavy.py").write_text(
        text.replace("def mini(", "def parts_heavy(").replace("replicates=1,", f"replicates=1, parts={PARTS},")
    )
    return Subject(
        "mini", MINI, "quality.crawl", "quality.equal_pages.train", "random.equal_fetches.train", {"CRAW4LLM_EXPERIMENTS": str(place)}
    )


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
    job: tuple[str, Path] | None = None  # task, and the folder of its job's attempts

    @property
    def fine(self) -> bool:
        return self.state == self.wanted_state and self.starts == self.wanted_starts and not self.orphans


def celery(folder: Path, of: Subject) -> list[Row]:
    placement = folder / "placement.toml"
    placement.write_text('[stages.train]\nqueue = "gpu"\n[stages.evaluate]\nqueue = "gpu"\n')
    rows = []
    with Cluster(
        folder, executor="CeleryExecutor", environment={"CRAW4LLM_PLACEMENT": str(placement), **of.environment, **quick_heartbeats()}
    ) as cluster:
        said(f"healthy after {cluster.healthy_after_s:.0f} s")
        cluster.start_worker("cpu", queues="cpu", slots=3)
        cluster.start_worker("gpu", queues="gpu", slots=2)
        run = cluster.trigger(of.dag, of.settings, "celery")
        rows.append(kill_worker(cluster, "cpu", of.crawl, of.dag, run, queues="cpu", slots=3))
        rows.append(kill_worker(cluster, "gpu", of.train, of.dag, run, queues="gpu", slots=2))
        state = cluster.wait_for_run(of.dag, run, RUN_WITHIN_S)
        rows.append(Row(f"{of.dag} through two Celery workers", state, "success", orphans=len(left_over(folder))))
        settle(rows, cluster, of.dag, run)
        if of.dag == "mini":
            rows += in_parts(cluster, of)
        listening = beyond_loopback(cluster)
        rows.append(Row("ports beyond loopback", ", ".join(listening) or "none", "none"))
    return rows


def slurm(folder: Path, of: Subject) -> list[Row]:
    rows = []
    short = Path(tempfile.mkdtemp(prefix="slurm-"))  # sockets have short names
    placement = folder / "placement.toml"
    placement.write_text('[stages.default]\nlauncher = "slurm"\n[slurm.default]\ncpus-per-task = 1\nmem = "1000M"\n')
    try:
        with local_slurm.LocalSlurm(short, nodes=1) as cluster_of_jobs:
            environment = {"CRAW4LLM_PLACEMENT": str(placement), **cluster_of_jobs.environment, **of.environment, **quick_heartbeats()}
            with Cluster(folder, executor="LocalExecutor", environment=environment) as cluster:
                said(f"healthy after {cluster.healthy_after_s:.0f} s")
                run = cluster.trigger(of.dag, of.settings, "slurm")
                for task, what in ((of.crawl, "scontrol requeue"), (of.train, "worker"), (of.other_train, "scancel")):
                    rows.append(disturb_slurm(cluster, cluster_of_jobs, what, task, of.dag, run))
                state = cluster.wait_for_run(of.dag, run, RUN_WITHIN_S)
                rows.append(Row(f"{of.dag}, every stage a Slurm job", state, "success", orphans=len(left_over(folder))))
                settle(rows, cluster, of.dag, run)
                rows.append(Row("jobs left in the queue", str(len(cluster_of_jobs.ask("squeue", "-h").split())), "0"))
    finally:
        shutil.rmtree(short, ignore_errors=True)
    return rows


def edge(folder: Path, of: Subject) -> list[Row]:
    rows = []
    placement = folder / "placement.toml"
    placement.write_text('[stages.train]\nqueue = "gpu"\nexecutor = "EdgeExecutor"\n')
    environment = {
        "CRAW4LLM_PLACEMENT": str(placement),
        "AIRFLOW__EDGE__API_ENABLED": "True",
        "AIRFLOW__EDGE__JOB_POLL_INTERVAL": "1",
        "AIRFLOW__EDGE__HEARTBEAT_INTERVAL": "5",
        **of.environment,
        **quick_heartbeats(),
    }
    executor = "LocalExecutor,EdgeExecutor:airflow.providers.edge3.executors.EdgeExecutor"
    cluster = Cluster(folder, executor=executor, environment=environment)
    environment["AIRFLOW__EDGE__API_URL"] = cluster._more["AIRFLOW__EDGE__API_URL"] = f"{cluster.address}/edge_worker/v1/rpcapi"
    with cluster:
        said(f"healthy after {cluster.healthy_after_s:.0f} s")
        box = {"CRAW4LLM_ROOT": str(cluster.root)}
        cluster.start_edge_worker("gpubox", queues="gpu", slots=2, environment=box)
        run = cluster.trigger(of.dag, of.settings, "edge")
        found = running_job(cluster, of.dag, run, of.train)
        cluster.end("worker-gpubox", kill=True)
        said(f"killed the edge worker while {of.train} ran")
        cluster.start_edge_worker("gpubox2", queues="gpu", slots=2, environment=box)
        rows.append(
            Row(f"kill -9 of the edge worker in {of.train}", "", "success", starts=0, wanted_starts=1, job=(of.train, found.parent))
        )
        state = cluster.wait_for_run(of.dag, run, RUN_WITHIN_S)
        rows.append(Row(f"{of.dag}, its training on an edge worker", state, "success", orphans=len(left_over(folder))))
        settle(rows, cluster, of.dag, run)
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
    return Row(f"kill -9 of the worker `{name}` in {task}", "", "success", starts=0, wanted_starts=1, job=(task, found.parent))


def in_parts(cluster: Cluster, of: Subject) -> list[Row]:
    """The same chain with corpus, scores and tokens made in parts: mapped tasks on both workers, the same digests."""
    shutil.move(cluster.root, cluster.root.with_name("whole"))
    cluster.root.mkdir()
    run = cluster.trigger("parts_heavy", of.settings, "celery")
    state = cluster.wait_for_run("parts_heavy", run, RUN_WITHIN_S)
    mapped = [entry for entry in cluster.tasks("parts_heavy", run) if entry["map_index"] >= 0]
    rows = [Row(f"the chain in {len(mapped)} parts", state, "success")]
    whole, parts = digests(cluster.root.with_name("whole")), digests(cluster.root)
    report = {name for name in (*whole, *parts) if name.startswith("report/")}  # its title is the experiment's
    same = all(parts.get(name) == digest for name, digest in whole.items() if name not in report)
    rows.append(Row("digests of the chain in parts", "equal" if same and len(whole) == len(parts) else "differ", "equal"))
    shutil.rmtree(cluster.root)
    shutil.move(cluster.root.with_name("whole"), cluster.root)
    return rows


def disturb_slurm(cluster: Cluster, jobs: local_slurm.LocalSlurm, what: str, task: str, dag: str, run: str) -> Row:
    found = running_job(cluster, dag, run, task)
    number = str(json.loads((found / "id.json").read_text())["slurm_job"])
    if what == "worker":
        task_process(cluster, task).kill()
    else:
        jobs.ask(*what.split(), number)
    said(f"{what} while {task} ran as Slurm job {number}")
    # a cancelled job is a failure, and the next try starts another; a requeued one is the same job
    name = "kill -9 of its Airflow worker" if what == "worker" else what
    return Row(f"{name} in {task}", "", "success", starts=0, wanted_starts=2 if what == "scancel" else 1, job=(task, found.parent))


def running_job(cluster: Cluster, dag: str, run: str, task: str) -> Path:
    """The folder of the attempt, once its command runs and its id is known to the task."""
    until = time.monotonic() + MET_WITHIN_S
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


def settle(rows: list[Row], cluster: Cluster, dag: str, run: str) -> None:
    """Final state, tries and starts of the tasks that something happened to."""
    found = {entry["task_id"]: entry for entry in cluster.tasks(dag, run)}
    for row in rows:
        if row.job is not None:
            task, folder = row.job
            row.state, row.tries = str(found[task]["state"]), int(found[task]["try_number"])
            row.starts = len([p for p in folder.iterdir() if p.name.isdigit()])
    if any(entry["state"] not in ("success", "skipped") for entry in found.values()):
        said(f"tasks: {states(cluster, dag, run)}")


def states(cluster: Cluster, dag: str, run: str) -> dict[str, str]:
    return {
        entry["task_id"]: f"{entry['state']}, try {entry['try_number']}" for entry in cluster.tasks(dag, run) if entry["state"] != "success"
    }


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
    return {
        "AIRFLOW__SCHEDULER__TASK_INSTANCE_HEARTBEAT_TIMEOUT": "20",
        "AIRFLOW__SCHEDULER__TASK_INSTANCE_HEARTBEAT_TIMEOUT_DETECTION_INTERVAL": "5",
    }


# --- the command line, and the table


def by_hand(folder: Path, of: Subject) -> dict[str, str]:
    settings = [part for name, value in of.settings.items() for part in ("--set", f"{name}={value}")]
    command = [sys.executable, "-m", "craw4llm", "run", of.dag, *settings, "--root", str(folder / "by-hand")]
    done = subprocess.run(
        command, cwd=PROJECT, env={**os.environ, **of.environment, "PYTHONPATH": str(PROJECT)}, capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise RuntimeError(f"the command line failed: {done.stderr[-2000:]}")
    return digests(folder / "by-hand")


def digests(root: Path) -> dict[str, str]:
    """Folder of an artifact -> its digest."""
    found = sorted(root.glob("*/*/manifest.json"))
    return {
        str(path.parent.relative_to(root)): json.loads(path.read_text())["digest"] for path in found if not path.parent.name.startswith(".")
    }


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
    parser.add_argument("--quick", action="store_true", help="a smaller experiment")
    parser.add_argument("--folder", type=Path, default=None, help="empty or absent; kept where given (default: a temporary one)")
    given = parser.parse_args()
    lacking = airflow_cluster.missing(celery=given.trial == "celery") + (local_slurm.missing() if given.trial == "slurm" else [])
    if lacking:
        print(f"not tried: {', '.join(lacking)} missing")
        return 77
    folder = (given.folder or Path(tempfile.mkdtemp(prefix="craw4llm-trial-"))).resolve()
    folder.mkdir(parents=True, exist_ok=True)
    began = time.monotonic()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # what was started is ended
    try:
        of = subject(given.quick, folder)
        rows = TRIALS[given.trial](folder, of)
        said("the same by the command line")
        wanted, made = by_hand(folder, of), digests(folder / "artifacts")
        differing = [name for name in wanted if made.get(name) != wanted[name]]
        same = (
            f"equal ({len(wanted)})" if not differing and set(made) == set(wanted) else f"differ: {', '.join(differing) or 'more or fewer'}"
        )
        rows.append(Row("digests and those of the command line", same, f"equal ({len(wanted)})"))
    finally:
        if given.folder is None:
            shutil.rmtree(folder, ignore_errors=True)
    print(table(rows))
    print(json.dumps({"trial": given.trial, "seconds": round(time.monotonic() - began), "fine": all(row.fine for row in rows)}))
    return 0 if all(row.fine for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
