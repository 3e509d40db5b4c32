#!/usr/bin/env python
"""Slurm on this machine alone, for trials and tests: munged, slurmctld and slurmd on loopback, with ports, keys and state of their own.

    with LocalSlurm(folder, nodes=2) as slurm:
        subprocess.run(["sbatch", ...], env={**os.environ, **slurm.environment})

    python scripts/local_slurm.py FOLDER [--nodes 2]      stays in the foreground; prints the line that other terminals need

Needs Debian's slurmctld, slurmd, slurm-client and munge, and root. Two partitions: `main`, whose jobs are queued again when `urgent` needs
the processors. No accounting, as on many small clusters. Several nodes are several slurmd with ports and names of their own. A job that is
queued again waits for 11 s (cred_expire), elsewhere for two minutes.
"""

import argparse
import contextlib
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "scontrol", "squeue", "scancel", "srun")
READY_WITHIN_S = 30.0


def missing() -> list[str]:
    """What this machine lacks for it."""
    path = f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"
    found = [name for name in PROGRAMS if shutil.which(name, path=path) is None]
    return found + ([] if os.geteuid() == 0 else ["root"])


class LocalSlurm:
    """A context manager. environment: what a client needs. folder: short (it holds sockets), on any disk."""

    def __init__(self, folder: Path, nodes: int = 1, processors: int = 2, gpus: int = 2) -> None:
        self.folder, self.nodes, self.processors, self.gpus = folder, nodes, processors, gpus
        self.environment = {"SLURM_CONF": str(folder / "slurm.conf")}
        self._processes: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> "LocalSlurm":
        try:
            self._configure()
            self._start_munge()
            self.start_controller()
            for number in range(self.nodes):
                self._run("slurmd", "-D", "-N", f"node{number}", "-f", str(self.folder / "slurm.conf"))
            self._wait(lambda: self.ask("sinfo", "-h", "-t", "idle", "-o", "%D", "-p", "main").strip() == str(self.nodes), "idle nodes")
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *exception: object) -> None:
        for number in self.ask("squeue", "-h", "-o", "%A").split():
            self.ask("scancel", "--signal=KILL", "--full", number)
            self.ask("scancel", number)
        for process in reversed(self._processes):
            with contextlib.suppress(ProcessLookupError):
                process.send_signal(signal.SIGTERM)
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

    def ask(self, *command: str) -> str:
        """Output of a client command; empty where it fails."""
        with contextlib.suppress(OSError, subprocess.SubprocessError):
            done = subprocess.run(command, env={**os.environ, **self.environment}, capture_output=True, text=True, timeout=20, check=False)
            return done.stdout
        return ""

    def start_controller(self) -> None:
        self.controller = self._run("slurmctld", "-D", "-f", str(self.folder / "slurm.conf"))

    def kill_controller(self) -> None:
        """kill -9, once it has written down what it knows, as it does a few seconds after each change. Killed before, it would forget the
        newest job and give its number to the next, and a node that runs both is taken out of service."""
        asked = time.time()
        for number in self.ask("squeue", "-h", "-o", "%A").split():
            self.ask("scontrol", "update", f"JobId={number}", "Comment=a change")
        if self.ask("squeue", "-h"):
            saved = self.folder / "state"
            self._wait(lambda: any(path.stat().st_mtime > asked for path in saved.glob("job_state")), "the controller's saved state")
        self.controller.kill()
        self.controller.wait()
        self._processes.remove(self.controller)

    def _configure(self) -> None:
        for name in ("state", "log", *(f"spool{n}" for n in range(self.nodes))):
            (self.folder / name).mkdir(parents=True, exist_ok=True)
        ports = free_ports(self.nodes + 1)
        each = max(1, self.processors // self.nodes)
        nodes = "\n".join(
            f"NodeName=node{n} NodeHostname={socket.gethostname()} NodeAddr=127.0.0.1 Port={ports[n + 1]} CPUs={each} Gres=gpu:{self.gpus} "
            "RealMemory=4000 State=UNKNOWN"
            for n in range(self.nodes)
        )
        names = "node0" if self.nodes == 1 else f"node[0-{self.nodes - 1}]"
        (self.folder / "slurm.conf").write_text(f"""ClusterName=trial
SlurmctldHost={socket.gethostname()}(127.0.0.1)
SlurmctldPort={ports[0]}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={self.folder}/munge.socket,cred_expire=10
CommunicationParameters=NoCtldInAddrAny,NoInAddrAny
StateSaveLocation={self.folder}/state
SlurmdSpoolDir={self.folder}/spool%n
SlurmdPidFile={self.folder}/slurmd-%n.pid
SlurmctldPidFile={self.folder}/slurmctld.pid
SlurmctldLogFile={self.folder}/log/slurmctld.log
SlurmdLogFile={self.folder}/log/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
SchedulerType=sched/backfill
SchedulerParameters=bf_interval=1,sched_interval=1,sched_min_interval=0,requeue_setup_env_fail
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
JobRequeue=1
GresTypes=gpu
ReturnToService=2
KillWait=25
SlurmctldTimeout=60
SlurmdTimeout=60
InactiveLimit=0
MessageTimeout=4
MinJobAge=300
{nodes}
PartitionName=main Nodes={names} Default=YES MaxTime=INFINITE State=UP PriorityTier=1 PreemptMode=REQUEUE GraceTime=20
PartitionName=urgent Nodes={names} MaxTime=INFINITE State=UP PriorityTier=10 PreemptMode=OFF
""")
        (self.folder / "gres.conf").write_text(f"NodeName={names} Name=gpu File=/dev/tty[0-{self.gpus - 1}]\n")

    def _start_munge(self) -> None:
        key = self.folder / "munge.key"
        key.write_bytes(secrets.token_bytes(128))
        key.chmod(0o600)
        paths = {
            "socket": "munge.socket",
            "key-file": "munge.key",
            "pid-file": "munge.pid",
            "log-file": "log/munge.log",
            "seed-file": "munge.seed",
        }
        self._run("munged", "--foreground", "--force", *(f"--{name}={self.folder / path}" for name, path in paths.items()))
        self._wait(lambda: (self.folder / "munge.socket").exists(), "munged")

    def _run(self, *command: str) -> subprocess.Popen[bytes]:
        environment = {**os.environ, **self.environment, "PATH": f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"}
        with (self.folder / "log" / f"{Path(command[0]).name}.out").open("ab") as log:
            process = subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        self._processes.append(process)
        return process

    def _wait(self, true: object, what: str) -> None:
        until = time.monotonic() + READY_WITHIN_S
        while not true():  # type: ignore[operator]
            for process in self._processes:
                if process.poll() is not None:
                    raise RuntimeError(f"{process.args[0]} ended with {process.returncode}; see {self.folder}/log")  # type: ignore[index]
            if time.monotonic() > until:
                raise RuntimeError(f"waited {READY_WITHIN_S:.0f} s for {what}; see {self.folder}/log")
            time.sleep(0.1)


def free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--nodes", type=int, default=1)
    given = parser.parse_args()
    if lacking := missing():
        sys.exit(f"needs {', '.join(lacking)} (Debian: apt install slurmctld slurmd slurm-client munge)")
    given.folder.mkdir(parents=True, exist_ok=True)
    with LocalSlurm(given.folder.resolve(), given.nodes) as slurm:
        print(f"export SLURM_CONF={slurm.environment['SLURM_CONF']}", flush=True)
        with contextlib.suppress(KeyboardInterrupt):
            signal.pause()


if __name__ == "__main__":
    main()
