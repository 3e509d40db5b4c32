#!/usr/bin/env python
"""The experiment `tiny` on a cluster of this machine, with deaths on the way; the digests must be those of the command line.

    python scripts/cluster_trial.py celery [--quick]     two workers, queues `cpu` and `gpu`, each killed once, scheduler and triggerer too;
                                                         then corpus, scores and tokens in many parts, a worker killed on the way
    python scripts/cluster_trial.py slurm                stages as Slurm jobs; scancel, requeue, the worker killed while a job runs
    python scripts/cluster_trial.py edge                 a worker that reaches the api-server alone; killed while a job runs

--quick: the experiment `mini` of the tests (20 stages) in the place of `tiny` (76). --patience 30: seconds without a heartbeat after which
Airflow takes a task for dead; more on a machine that others keep busy.

A stage of these sizes is over within a second, so the command of a task that something is to happen to is stopped (SIGSTOP) as soon as it
runs, and goes on when it has happened; where a worker was killed, when the next try of the task follows the job.

Prints a table (what was done, final state of the task or run, starts of the job, tries of the task, whether another try took the running
job over, processes left over, as wanted) and one JSON line. Exit code 0: as it should be; 1: a difference; 77: something is missing, which
is named. Needs Debian's postgresql, redis-server (celery), slurmctld, slurmd, slurm-client and munge (slurm), and the extra `clusters`.
Some 10 minutes each on two cores, celery 20.
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
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import airflow_cluster
import local_slurm
import psutil
from airflow_cluster import PROJECT, Cluster

TINY = {"corpus": "synthetic", "pages": 100, "seed_count": 10, "batch_pages": 25, "vocab_size": 512, "train_tokens": 60_000}
MINI = {"web_pages": 1500, "pages": 100, "train_tokens": 120_000}
PARTS = {"corpus": 24, "score": 12, "tokenize": 6}
SLOTS = {"cpu": 3, "gpu": 2}
MET_WITHIN_S = 1800.0
TAKEN_OVER_WITHIN_S = 600.0
RUN_WITHIN_S = 3600.0


@dataclasses.dataclass(frozen=True)
class Subject:
    """What is run, and the tasks that something happens to: the chain of one arm, so that one comes after the other."""

    dag: str
    settings: dict[str, Any]
    environment: dict[str, str]
    patience_s: int
    crawl: str
    select: str
    tokenize: str
    train: str
    evaluate: str


def subject(quick: bool, folder: Path, patience_s: int) -> Subject:
    place = folder / "experiments"
    place.mkdir()
    shutil.copy(PROJECT / "dags" / "experiments" / "tiny.py", place)
    text = (PROJECT / "tests" / "experiments" / "mini.py").read_text()
    (place / "mini.py").write_text(text)
    (place / "parts_heavy.py").write_text(
        text.replace("def mini(", "def parts_heavy(").replace("replicates=1,", f"replicates=1, parts={PARTS},")
    )
    dag, settings, replicate = ("mini", MINI, "") if quick else ("tiny", TINY, "_r0")
    tasks = [f"quality.equal_pages.{name}" for name in ("select", "tokenize", f"train{replicate}", f"evaluate{replicate}")]
    return Subject(dag, settings, {"CRAW4LLM_EXPERIMENTS": str(place)}, patience_s, "quality.crawl", *tasks)


@dataclasses.dataclass
class Row:
    """One line of the table."""

    what: str
    state: str
    wanted_state: str
    starts: int | None = None
    wanted_starts: int | None = None
    tries: int | None = None
    taken_over: bool | None = None
    orphans: int | None = None
    job: tuple[str, int, Path] | None = None  # task, index of a mapped one or -1, and the folder of its attempt

    @property
    def fine(self) -> bool:
        return self.state == self.wanted_state and self.starts == self.wanted_starts and not self.orphans and self.taken_over is not False


def celery(folder: Path, of: Subject) -> list[Row]:
    placement = folder / "placement.toml"
    placement.write_text('[stages.train]\nqueue = "gpu"\n[stages.evaluate]\nqueue = "gpu"\n')
    environment = {"CRAW4LLM_PLACEMENT": str(placement), **of.environment, **quick_heartbeats(of.patience_s)}
    rows = []
    with Cluster(folder, executor="CeleryExecutor", environment=environment, pools=SLOTS) as cluster:
        said(f"healthy after {cluster.healthy_after_s:.0f} s")
        for queue in SLOTS:
            cluster.start_worker(queue, queues=queue, slots=SLOTS[queue])
        with caught(cluster, of.dag, of.crawl, of.select, of.train, of.evaluate) as catch:
            run = cluster.trigger(of.dag, of.settings, "celery")
            rows.append(kill_worker(cluster, catch, "cpu", of.crawl))
            rows.append(kill_part(cluster, catch, "scheduler", of.select))
            rows.append(kill_worker(cluster, catch, "gpu", of.train))
            rows.append(kill_part(cluster, catch, "triggerer", of.evaluate))
            rows.append(end_of(cluster, of.dag, run, f"{of.dag} through two Celery workers"))
            settle(rows, cluster, of.dag, run)
        rows += in_parts(cluster, of)
        listening = beyond_loopback(cluster)
        rows.append(Row("ports beyond loopback", ", ".join(listening) or "none", "none"))
    return rows


def slurm(folder: Path, of: Subject) -> list[Row]:
    rows = []
    short = Path(tempfile.mkdtemp(prefix="slurm-", dir="/tmp"))  # sockets have short names
    placement = folder / "placement.toml"
    placement.write_text('[stages.default]\nlauncher = "slurm"\n[slurm.default]\ncpus-per-task = 1\nmem = "1000M"\n')
    try:
        with local_slurm.LocalSlurm(short, nodes=1) as queue:
            environment = {"CRAW4LLM_PLACEMENT": str(placement), **queue.environment, **of.environment, **quick_heartbeats(of.patience_s)}
            with Cluster(folder, executor="LocalExecutor", environment=environment) as cluster:
                said(f"healthy after {cluster.healthy_after_s:.0f} s")
                with caught(cluster, of.dag, of.crawl, of.tokenize, of.train) as catch:
                    run = cluster.trigger(of.dag, of.settings, "slurm")
                    rows.append(disturb_slurm(catch, queue, "scontrol requeue", of.crawl))
                    rows.append(disturb_slurm(catch, queue, "scancel", of.tokenize))
                    rows.append(kill_task(cluster, catch, of.train))
                    rows.append(end_of(cluster, of.dag, run, f"{of.dag}, every stage a Slurm job"))
                    settle(rows, cluster, of.dag, run)
                rows.append(Row("jobs left in the queue", str(len(queue.ask("squeue", "-h").split())), "0"))
                jobs = [json.loads(path.read_text()) for path in (cluster.root / "logs" / "jobs").rglob("id.json")]
                elsewhere = [job["folder"] for job in jobs if job["launcher"] != "slurm"]
                said(f"{len(jobs)} jobs, {len(elsewhere)} of them not Slurm's")
                rows.append(Row("jobs that Slurm did not run", str(len(elsewhere)), "0"))
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
        **quick_heartbeats(of.patience_s),
    }
    executor = "LocalExecutor,EdgeExecutor:airflow.providers.edge3.executors.EdgeExecutor"
    cluster = Cluster(folder, executor=executor, environment=environment, pools=SLOTS)
    environment["AIRFLOW__EDGE__API_URL"] = cluster._more["AIRFLOW__EDGE__API_URL"] = f"{cluster.address}/edge_worker/v1/rpcapi"
    with cluster:
        said(f"healthy after {cluster.healthy_after_s:.0f} s")
        box = {"CRAW4LLM_ROOT": str(cluster.root)}
        cluster.start_edge_worker("gpubox", queues="gpu", slots=SLOTS["gpu"], environment=box)
        with caught(cluster, of.dag, of.train) as catch:
            run = cluster.trigger(of.dag, of.settings, "edge")
            job = catch.job(of.train)
            cluster.end("worker-gpubox", kill=True)
            said(f"killed the edge worker while {of.train} ran")
            cluster.start_edge_worker("gpubox2", queues="gpu", slots=SLOTS["gpu"], environment=box)
            rows.append(row_of(f"kill -9 of the edge worker in {of.train}", job, starts=1, taken_over=catch.taken_over(of.train)))
            catch.go_on(of.train)
            rows.append(end_of(cluster, of.dag, run, f"{of.dag}, its training on an edge worker"))
            settle(rows, cluster, of.dag, run)
    return rows


TRIALS = {"celery": celery, "slurm": slurm, "edge": edge}


# --- stages that wait for what happens to them


class Catch(threading.Thread):
    """Stops (SIGSTOP) the command of the first job of each of `tasks` that runs, as soon as it does. A mapped task is caught in whichever
    of its parts comes first."""

    def __init__(self, cluster: Cluster, dag: str, tasks: tuple[str, ...]) -> None:
        super().__init__(daemon=True)
        self.cluster, self.dag = cluster, dag
        self._awaited = set(tasks)
        self._groups: dict[str, int] = {}  # task -> process group of its command
        self._folders: dict[str, Path] = {}
        self._owners: dict[str, str] = {}
        self._over = threading.Event()

    def run(self) -> None:
        while self._awaited and not self._over.is_set():
            for task in sorted(self._awaited):
                folders = (self.cluster.root / "logs" / "jobs" / self.dag).glob(f"*/{task}*/*/job.json")
                for path in sorted(folders):
                    if path.parts[-3].removeprefix(task).partition(".")[0] == "" and self._hold(task, path.parent):
                        self._awaited.discard(task)
                        break
            time.sleep(0.02)

    def _hold(self, task: str, folder: Path) -> bool:
        if (folder / "exit.json").exists():
            return False
        with contextlib.suppress(OSError, ValueError, psutil.Error):
            for command in psutil.Process(json.loads((folder / "job.json").read_text())["pid"]).children():
                os.killpg(command.pid, signal.SIGSTOP)
                self._folders[task], self._groups[task] = folder, command.pid
                return True
        return False

    def job(self, task: str) -> Path:
        """The folder of the attempt, once its command is stopped and its id is known to the task, which follows it."""
        until = time.monotonic() + MET_WITHIN_S
        while task not in self._groups or not (self._folders[task] / "owner").exists():
            if time.monotonic() > until:
                raise RuntimeError(f"{task} was not met while it ran")
            time.sleep(0.1)
        folder = self._folders[task]
        time.sleep(0.5)
        if (folder / "exit.json").exists():
            raise RuntimeError(f"{task} ended though its command was stopped: {(folder / 'exit.json').read_text()}")
        self._owners[task] = (folder / "owner").read_text()
        return folder

    def taken_over(self, task: str) -> bool:
        """Whether another try of the task follows the same job within TAKEN_OVER_WITHIN_S."""
        until = time.monotonic() + TAKEN_OVER_WITHIN_S
        while time.monotonic() < until:
            if (self._folders[task] / "owner").read_text() != self._owners[task]:
                return True
            time.sleep(0.5)
        return False

    def go_on(self, task: str) -> None:
        if group := self._groups.get(task):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(group, signal.SIGCONT)

    def end(self) -> None:
        self._over.set()
        self.join()
        for task in self._groups:
            self.go_on(task)


@contextlib.contextmanager
def caught(cluster: Cluster, dag: str, *tasks: str) -> Iterator[Catch]:
    catch = Catch(cluster, dag, tasks)
    catch.start()
    try:
        yield catch
    finally:
        catch.end()


# --- deaths


def kill_worker(cluster: Cluster, catch: Catch, queue: str, task: str) -> Row:
    """kill -9 of a Celery worker, with all its task processes, while the job of `task` runs. The job must go on and be followed again."""
    job = catch.job(task)
    cluster.end(f"worker-{queue}", kill=True)
    said(f"killed the worker {queue} while {task} ran")
    time.sleep(2)
    cluster.start_worker(queue, queues=queue, slots=SLOTS[queue])
    row = row_of(f"kill -9 of the worker `{queue}` in {task}", job, starts=1, taken_over=catch.taken_over(task))
    catch.go_on(task)
    return row


def kill_part(cluster: Cluster, catch: Catch, name: str, task: str) -> Row:
    """kill -9 of the scheduler or the triggerer while the job of `task` runs; its task goes on."""
    job = catch.job(task)
    cluster.end(name, kill=True)
    said(f"killed the {name} while {task} ran")
    time.sleep(2)
    cluster.start_part(name)
    catch.go_on(task)
    return row_of(f"kill -9 of the {name} in {task}", job, starts=1)


def kill_task(cluster: Cluster, catch: Catch, task: str) -> Row:
    """kill -9 of the LocalExecutor's process of a task while its Slurm job runs."""
    job = catch.job(task)
    task_process(cluster, task).kill()
    said(f"killed the worker process of {task} while it ran as Slurm job {slurm_number(job)}")
    row = row_of(f"kill -9 of its Airflow worker in {task}", job, starts=1, taken_over=catch.taken_over(task))
    catch.go_on(task)
    return row


def disturb_slurm(catch: Catch, queue: local_slurm.LocalSlurm, what: str, task: str) -> Row:
    """A cancelled job is a failure, and the next try starts another; a requeued one is the same job."""
    job = catch.job(task)
    number = slurm_number(job)
    queue.ask(*what.split(), number)
    said(f"{what} while {task} ran as Slurm job {number}")
    catch.go_on(task)
    return row_of(f"{what} in {task}", job, starts=2 if what == "scancel" else 1)


def in_parts(cluster: Cluster, of: Subject) -> list[Row]:
    """A chain with corpus, scores and tokens made in parts, one worker killed among them: the digests of the same by the command line."""
    dag, root = "parts_heavy", cluster.root
    whole = by_hand(cluster.folder, "mini", MINI, of, "by-hand-whole")
    shutil.move(root, root.with_name("before"))
    root.mkdir()
    rows = []
    with caught(cluster, dag, "corpus_parts") as catch:
        run = cluster.trigger(dag, MINI, "celery")
        rows.append(kill_worker(cluster, catch, "cpu", "corpus_parts"))
        row = end_of(cluster, dag, run, "")
        mapped = [entry for entry in cluster.tasks(dag, run) if entry["map_index"] >= 0]
        row.what = f"the chain in {len(mapped)} parts"
        rows.append(row)
        settle(rows, cluster, dag, run)
    made = digests(root)
    named = {name for name in (*whole, *made) if name.startswith("report/")}  # a report names its experiment
    same = sum(made.get(name) == digest for name, digest in whole.items() if name not in named)
    wanted = len(set(whole) - named)
    rows.append(
        Row(
            "its digests and those of the command line, without parts",
            f"equal ({same})" if same == wanted and len(whole) == len(made) else f"{same} of {wanted} equal, {len(made)} made",
            f"equal ({wanted})",
        )
    )
    shutil.rmtree(root)
    shutil.move(root.with_name("before"), root)
    return rows


def row_of(what: str, job: Path, *, starts: int, taken_over: bool | None = None) -> Row:
    """starts: that are wanted, from the one on that was caught (a busy machine may have lost a try before)."""
    task, _, index = job.parent.name.partition("_parts.")
    named = (f"{task}_parts", int(index)) if index else (task, -1)
    return Row(what, "", "success", starts=0, wanted_starts=starts, taken_over=taken_over, job=(*named, job))


def end_of(cluster: Cluster, dag: str, run: str, what: str) -> Row:
    state = cluster.wait_for_run(dag, run, RUN_WITHIN_S)
    if state != "success":
        said(f"tasks: {states(cluster, dag, run)}")
    until = time.monotonic() + 10  # a job's process ends just after its record is written
    while (left := left_over(cluster.folder)) and time.monotonic() < until:
        time.sleep(0.5)
    return Row(what, state, "success", orphans=len(left))


def slurm_number(job: Path) -> str:
    return str(json.loads((job / "id.json").read_text())["slurm_job"])


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
    found = {(entry["task_id"], entry["map_index"]): entry for entry in cluster.tasks(dag, run)}
    for row in rows:
        if row.job is not None and not row.state:
            task, index, folder = row.job
            row.state, row.tries = str(found[task, index]["state"]), int(found[task, index]["try_number"])
            row.starts = len([p for p in folder.parent.iterdir() if p.name.isdigit() and p.name >= folder.name])


def states(cluster: Cluster, dag: str, run: str) -> dict[str, str]:
    return {
        f"{entry['task_id']}[{entry['map_index']}]": f"{entry['state']}, try {entry['try_number']}"
        for entry in cluster.tasks(dag, run)
        if entry["state"] != "success"
    }


def left_over(folder: Path) -> list[int]:
    """Processes of jobs below the folder."""
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


def quick_heartbeats(patience_s: int = 30) -> dict[str, str]:
    """A trial does not wait 15 minutes until a dead task is given up, nor 10 until one that a dead worker had reserved is sent again."""
    return {
        "AIRFLOW__SCHEDULER__TASK_INSTANCE_HEARTBEAT_TIMEOUT": str(patience_s),
        "AIRFLOW__SCHEDULER__TASK_INSTANCE_HEARTBEAT_TIMEOUT_DETECTION_INTERVAL": "5",
        "AIRFLOW__SCHEDULER__TASK_QUEUED_TIMEOUT": str(4 * patience_s),
        "AIRFLOW__SCHEDULER__TASK_QUEUED_TIMEOUT_CHECK_INTERVAL": "10",
    }


# --- the command line, and the table


def by_hand(folder: Path, dag: str, settings: dict[str, Any], of: Subject, name: str) -> dict[str, str]:
    """Digests of what the command line makes in `folder / name`."""
    given = [part for key, value in settings.items() for part in ("--set", f"{key}={value}")]
    command = [sys.executable, "-m", "craw4llm", "run", dag, *given, "--root", str(folder / name)]
    done = subprocess.run(
        command, cwd=PROJECT, env={**os.environ, **of.environment, "PYTHONPATH": str(PROJECT)}, capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise RuntimeError(f"the command line failed: {done.stderr[-2000:]}")
    return digests(folder / name)


def digests(root: Path) -> dict[str, str]:
    """Folder of an artifact -> its digest."""
    found = sorted(root.glob("*/*/manifest.json"))
    return {
        str(path.parent.relative_to(root)): json.loads(path.read_text())["digest"] for path in found if not path.parent.name.startswith(".")
    }


def table(rows: list[Row]) -> str:
    cells = [("what", "final state", "starts", "tries", "taken over", "left over", "as wanted")]
    for row in rows:
        starts, tries, orphans = ("" if n is None else str(n) for n in (row.starts, row.tries, row.orphans))
        taken_over = "" if row.taken_over is None else "yes" if row.taken_over else "no"
        cells.append((row.what, row.state, starts, tries, taken_over, orphans, "yes" if row.fine else "NO"))
    widths = [max(len(line[k]) for line in cells) for k in range(len(cells[0]))]
    return "\n".join("  ".join(text.ljust(width) for text, width in zip(line, widths, strict=True)).rstrip() for line in cells)


def said(text: str) -> None:
    print(f"[{time.strftime('%H:%M:%S')}] {text}", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("trial", choices=sorted(TRIALS))
    parser.add_argument("--quick", action="store_true", help="a smaller experiment")
    parser.add_argument("--patience", type=int, default=30, metavar="SECONDS", help="without a heartbeat, until a task is taken for dead")
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
        of = subject(given.quick, folder, given.patience)
        rows = TRIALS[given.trial](folder, of)
        said("the same by the command line")
        wanted, made = by_hand(folder, of.dag, of.settings, of, "by-hand"), digests(folder / "artifacts")
        differing = [name for name in wanted if made.get(name) != wanted[name]]
        same = (
            f"equal ({len(wanted)})" if not differing and set(made) == set(wanted) else f"differ: {', '.join(differing) or 'more or fewer'}"
        )
        rows.append(Row("digests and those of the command line", same, f"equal ({len(wanted)})"))
    finally:
        for number in left_over(folder):  # after a failure; a job lives on without Airflow
            with contextlib.suppress(ProcessLookupError):
                os.kill(number, signal.SIGTERM)
        if given.folder is None:
            shutil.rmtree(folder, ignore_errors=True)
    print(table(rows))
    print(json.dumps({"trial": given.trial, "seconds": round(time.monotonic() - began), "fine": all(row.fine for row in rows)}))
    return 0 if all(row.fine for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
