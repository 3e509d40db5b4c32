#!/usr/bin/env python
"""Kills what runs a training under Airflow, one thing at a time, and says what became of it.

    python scripts/airflow_kills.py [ROW ...]        about a quarter of an hour on two quiet cores

Starts a server of its own (LocalExecutor, a free port, a temporary home) and for each row a run of the experiment `lasting`; while its
model trains, something is killed. Prints a table: what was done, the task's final state and tries, how often the job was started, how many
of its processes, and of those of a part of Airflow that was killed, are left 30 s after its end. Exits with 1 where a row is not as
wanted. The row `oom` needs root and control groups with a limit of memory; elsewhere it is skipped, and says so.
$CRAW4LLM_PATIENCE=5 makes all time-outs five times as long, for a busy machine.
"""

import argparse
import atexit
import contextlib
import dataclasses
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.parse
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil

PROJECT = Path(__file__).resolve().parent.parent
TASK = "random.train"
API_GONE_S = 60
HEARTBEAT_TIMEOUT_S = 20  # in the product 900: a supervisor that was killed is noticed after this time
STARTS_WITHIN_S = 600
ENDS_WITHIN_S = 600
PATIENCE = float(os.environ.get("CRAW4LLM_PATIENCE", "1"))  # of every time-out of these scripts; raise it on a busy machine
GONE_WITHIN_S = 30


@dataclasses.dataclass(frozen=True)
class Row:
    """A thing to do during training, and what must come of it."""

    name: str
    what: str
    state: str
    starts: int
    says: str = ""  # in the log of the first try


ROWS = (
    Row("task", "task process: SIGKILL", "success", 1),
    Row("supervisor", "its supervisor: SIGKILL", "success", 1),
    Row("scheduler", "scheduler: SIGKILL", "success", 1),
    Row("api", f"api-server: SIGKILL, gone for {API_GONE_S} s", "success", 1),
    Row("term", "task process: SIGTERM", "success", 2),
    Row("failed", "marked failed", "failed", 1),
    Row("clear", "cleared", "success", 2),
    Row("memory", "the command: SIGKILL by somebody", "success", 2, says="killed by signal 9"),
    Row("oom", "the command: killed by the kernel, out of memory", "success", 2, says="out of memory: the kernel's out-of-memory killer"),
)
OOM_BYTES = 48 << 20  # less than any training takes


class Unavailable(Exception):
    """No control group can be made here; the text says why."""


class MemoryGroup:
    """A control group of the kernel with a limit of memory: it kills what exceeds it. For root, with version 1 or 2 of control groups."""

    def __init__(self, limit_bytes: int) -> None:
        top = Path("/sys/fs/cgroup")
        v1 = (top / "memory" / "memory.limit_in_bytes").exists()
        self.path = (top / "memory" if v1 else top) / f"craw4llm-{os.getpid()}-{time.monotonic_ns()}"
        if not v1 and "memory" not in _text(top / "cgroup.subtree_control").split():
            raise Unavailable(f"no control group with a limit of memory can be made below {top}")
        try:
            self.path.mkdir()
            (self.path / ("memory.limit_in_bytes" if v1 else "memory.max")).write_text(str(limit_bytes))
        except OSError as error:
            with contextlib.suppress(OSError):
                self.path.rmdir()
            raise Unavailable(f"no control group with a limit of memory: {error}") from error
        atexit.register(self.close)
        self._counts = self.path / ("memory.oom_control" if v1 else "memory.events")
        with contextlib.suppress(OSError):  # absent where the kernel does not count swap
            (self.path / ("memory.memsw.limit_in_bytes" if v1 else "memory.swap.max")).write_text(str(limit_bytes) if v1 else "0")

    def add(self, pid: int) -> None:
        """The process, with what it starts from now on, and with what it takes from now on."""
        (self.path / "cgroup.procs").write_text(str(pid))

    def kills(self) -> int:
        """Processes that the kernel has killed here."""
        return next((int(line.split()[1]) for line in _text(self._counts).splitlines() if line.startswith("oom_kill ")), 0)

    def close(self) -> None:
        """Once all of it have ended."""
        until = time.monotonic() + 10 * PATIENCE
        while self.path.exists() and time.monotonic() < until:
            with contextlib.suppress(OSError):
                self.path.rmdir()
            time.sleep(0.1)


class Server:
    """A server with a home, an artifact root and a port of its own."""

    def __init__(self, place: Path, restart_after_s: float, experiments: Path = PROJECT / "tests" / "experiments") -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = int(probe.getsockname()[1])
        self.home, self.root = place / "home", place / "artifacts"
        environment = {name: value for name, value in os.environ.items() if "AIRFLOW" not in name}
        environment |= {
            "CRAW4LLM_EXPERIMENTS": str(experiments),
            "CRAW4LLM_ROOT": str(self.root),
            "AIRFLOW__SCHEDULER__TASK_INSTANCE_HEARTBEAT_TIMEOUT": str(HEARTBEAT_TIMEOUT_S),
            "AIRFLOW__SCHEDULER__TASK_INSTANCE_HEARTBEAT_TIMEOUT_DETECTION_INTERVAL": "5",
        }
        command = [
            sys.executable,
            str(PROJECT / "scripts" / "airflow_server.py"),
            "start",
            "--home",
            str(self.home),
            "--port",
            str(self.port),
        ]
        self.log = place / "server.log"
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                [*command, "--restart-after", str(restart_after_s)], env=environment, stdout=log, stderr=log, start_new_session=True
            )
        try:
            wait_for(lambda: "is ready" in self.log.read_text() or self.process.poll() is not None, STARTS_WITHIN_S)
        except SystemExit:
            self.stop()
            raise
        if self.process.poll() is not None:
            raise SystemExit(f"the server did not start:\n{self.log.read_text()}")
        password = json.loads((self.home / "passwords.json").read_text())["admin"]
        self.token = ""
        self.token = self.call("POST", "/auth/token", {"username": "admin", "password": password})["access_token"]

    def call(self, method: str, path: str, content: Any = None) -> Any:
        data = None if content is None else json.dumps(content).encode()
        request = urllib.request.Request(f"http://127.0.0.1:{self.port}{path}", data, {"Content-Type": "application/json"}, method=method)
        if self.token:
            request.add_header("Authorization", f"Bearer {self.token}")
        with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(request, timeout=30 * PATIENCE) as answer:
            return json.load(answer)

    def part(self, name: str) -> psutil.Process:
        return psutil.Process(int(json.loads((self.home / "server.json").read_text())["parts"][name]["pid"]))

    def stop(self) -> None:
        self.process.terminate()
        self.process.wait(120 * PATIENCE)


def run_row(row: Row, server: Server, tokens: int) -> tuple[bool, str]:
    """Returns (as wanted, line of the table)."""
    wait_for(lambda: any(d["dag_id"] == "lasting" for d in server.call("GET", "/api/v2/dags")["dags"]), 60)
    before = set(server.root.glob("logs/jobs/lasting/*"))
    group = MemoryGroup(OOM_BYTES) if row.name == "oom" else None
    run = server.call("POST", "/api/v2/dags/lasting/dagRuns", {"logical_date": None, "conf": {"train_tokens": tokens}})
    path = f"/api/v2/dags/lasting/dagRuns/{urllib.parse.quote(run['dag_run_id'])}/taskInstances/{TASK}"

    def task() -> dict[str, Any]:
        with contextlib.suppress(OSError):
            return dict(server.call("GET", path))
        return {"state": "no answer"}

    def folder() -> Path | None:
        found = [f / TASK for f in server.root.glob("logs/jobs/lasting/*") if f not in before and (f / TASK / "0001" / "id.json").exists()]
        return found[0] if found else None

    job = wait_for(folder, 180, every_s=0.02)
    if group is not None:  # from the start: what a process has taken before counts where it was then
        confine(job, group)
        ti, bereft = {}, set[int]()
        waits = wait_for(lambda: (t := task())["state"] in ("up_for_retry", "failed", "success") and t, ENDS_WITHIN_S)
        if (waits["state"], group.kills()) != ("up_for_retry", 1):
            return False, f"{row.what:<46} the first try is {waits['state']}, the kernel killed {group.kills()}   WANTED up_for_retry, 1"
        group.close()
    else:
        wait_for(lambda: list(server.root.glob("train/.partial-*/states/*")), 120)  # a state is saved: training is under way
        time.sleep(3)
        ti = task()
        bereft = did(row.name, server, path, ti, job)
    done = wait_for(lambda: (t := task())["state"] in ("success", "failed") and t, ENDS_WITHIN_S)
    time.sleep(0 if done["state"] == "success" else 1)
    until = time.monotonic() + GONE_WITHIN_S
    while (left := processes_of(job, bereft)) and time.monotonic() < until:
        time.sleep(0.5)
    starts = len(list(job.glob("[0-9]*")))
    log = json.dumps(server.call("GET", f"{path}/logs/1?full_content=true")) if row.says else ""
    wanted = done["state"] == row.state and starts == row.starts and not left and row.says in log
    for process in left:
        process.kill()
    result = f"{row.what:<46} {done['state']:<8} tries {done['try_number']}  starts {starts}  left {len(left)}"
    return wanted, result + ("" if wanted else f"   WANTED {row.state}, starts {row.starts}, left 0 {row.says}")


def confine(job: Path, group: MemoryGroup) -> None:
    """Puts the first attempt of a job that has just begun into the group."""
    keeper = psutil.Process(int(json.loads((job / "0001" / "id.json").read_text())["pid"]))
    group.add(keeper.pid)
    for process in keeper.children(recursive=True):
        with contextlib.suppress(OSError):
            group.add(process.pid)


def did(name: str, server: Server, path: str, ti: dict[str, Any], job: Path) -> set[int]:
    """What the row says. Returns the sessions of Airflow's own that must have ended by the end, because their leader was killed."""
    known = json.loads((job / "0001" / "id.json").read_text())
    if name in ("task", "supervisor", "term"):
        supervisor = next(p for p in psutil.process_iter() if ti["id"] in " ".join(cmdline(p)) and "LocalExecutor" in " ".join(cmdline(p)))
        target = supervisor if name == "supervisor" else supervisor.children()[0]
        target.send_signal(signal.SIGTERM if name == "term" else signal.SIGKILL)
    elif name in ("scheduler", "api"):
        part = server.part("api-server" if name == "api" else "scheduler")
        part.kill()
        return {part.pid}
    elif name == "failed":
        server.call("PATCH", path, {"new_state": "failed"})
    elif name == "clear":
        dag, _, rest = path.partition("/dagRuns/")
        content = {"dry_run": False, "task_ids": [TASK], "dag_run_id": urllib.parse.unquote(rest.partition("/")[0]), "only_failed": False}
        server.call("POST", f"{dag}/clearTaskInstances", content)
    else:
        psutil.Process(known["pid"]).children()[0].kill()
    return set()


def processes_of(job: Path, bereft: set[int]) -> list[psutil.Process]:
    """Living processes that belong to any attempt of the job (its own, and all of its session), or to a part of Airflow that was killed."""
    sessions = bereft | {json.loads(path.read_text())["pid"] for path in job.glob("*/id.json")}
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, ProcessLookupError):
            if os.getsid(process.pid) in sessions and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found


def cmdline(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.Error:
        return []


def wait_for(true: Callable[[], Any], seconds: float, every_s: float = 0.5) -> Any:
    until = time.monotonic() + seconds * PATIENCE
    while not (found := true()):
        if time.monotonic() > until:
            raise SystemExit(f"not within {seconds:.0f} s: {true}")
        time.sleep(every_s)
    return found


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rows", nargs="*", metavar="ROW", help=f"some of {', '.join(row.name for row in ROWS)} (default: all)")
    parser.add_argument("--tokens", type=int, default=600_000, help="tokens of the training: it must last for the kill, some 40 s")
    given = parser.parse_args()
    rows = [row for row in ROWS if not given.rows or row.name in given.rows]
    faults = 0
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(143))
    for alike, restart_after_s in (([r for r in rows if r.name != "api"], 1.0), ([r for r in rows if r.name == "api"], float(API_GONE_S))):
        if not alike:
            continue
        with tempfile.TemporaryDirectory(prefix="craw4llm-kills-") as folder:
            server = Server(Path(folder), restart_after_s)
            try:
                for number, row in enumerate(alike):
                    try:
                        wanted, line = run_row(row, server, given.tokens + 512 * number)
                    except Unavailable as error:
                        wanted, line = True, f"{row.what:<46} skipped: {error}"
                    faults += not wanted
                    print(line, flush=True)
            finally:
                server.stop()
    print(f"{len(rows)} rows, {faults} not as wanted")
    sys.exit(1 if faults else 0)


if __name__ == "__main__":
    main()
