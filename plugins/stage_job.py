"""One job of the local launcher: runs a command apart from whoever started it, and leaves an exit record.

    python -I -S stage_job.py SETTINGS.json          started in a session of its own (plugins/launchers.py)

An Airflow task may die at any moment (its own process, its supervisor, the scheduler, the machine's out-of-memory killer) while a training
run of days goes on well. So the command is no child of the task but of this small process, which nothing of Airflow can reach, and which
knows the task by files in the job's folder alone:

    lock          held by this process and by the command: a second copy of the job cannot start while anything of the first lives
    job.json      who runs: host, process id, its start time; written once
    alive         touched every few seconds: other hosts see that the job lives
    output, log   what the command writes to stdout, to stderr
    owner         the task that follows the job, touched by it; a job that nobody has followed for `abandoned_after_s` is ended
    release       a task was told to stop: the job ends after `reprieve_s`, unless another task has taken it over by then
    cancel        the job ends now. SIGTERM to this process means the same
    exit.json     the end: exit code or signal, whether memory ran out, peak memory, seconds, why it was stopped

To end means SIGTERM to the process group of the command (a training run saves then), and SIGKILL to what is left of it after `grace_s`. If
this process itself is killed, the kernel sends SIGTERM to the command. Standard library only, and nothing that takes long to import.
"""

import contextlib
import ctypes
import fcntl
import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

LOOK_EVERY_S = 0.5
BEAT_EVERY_S = 5.0
PR_SET_PDEATHSIG = 1


def main() -> None:
    run(json.loads(Path(sys.argv[1]).read_text()), start_command)


def run(settings: dict[str, Any], start: Callable[[dict[str, Any], int, int, int], int]) -> None:
    """Runs the job to its end. start(settings, handles of output, log and lock) -> process id of the command, a child that leads a
    group."""
    folder = Path(settings["folder"])
    asked = Asked(folder, settings)
    asked.listen()
    began = time.monotonic()
    with (folder.parent / "lock").open("a") as lock:
        while not _take(lock.fileno()):
            if why := asked.why():
                finish(folder, {"code": None, "signal": None, "stopped": why, "out_of_memory": False, "seconds": 0.0})
                return
            time.sleep(0.1)
        if settings["once"] and (folder / "exit.json").exists():
            return  # started twice: plugins/warm_start.py gave no answer in time, and started it all the same
        write(folder / "job.json", {"host": socket.gethostname(), "pid": os.getpid(), "started": start_ticks(os.getpid())})
        (folder / "alive").touch()
        ooms = oom_kills()
        with (folder / "output").open("ab") as output, (folder / "log").open("ab") as log:
            try:
                pid = start(settings, output.fileno(), log.fileno(), lock.fileno())
            except OSError as error:
                log.write(f"{settings['command'][0]} cannot be started: {error}\n".encode())
                finish(folder, {"code": 127, "signal": None, "stopped": "", "out_of_memory": False, "seconds": 0.0})
                return
        stopped = follow(pid, asked, folder)
        if stopped:
            end(pid, settings["grace_s"])
        _, status, usage = os.wait4(pid, 0)
        _signal(pid, signal.SIGKILL)  # what it left behind in its group
        killed = os.WTERMSIG(status) if os.WIFSIGNALED(status) else None
        finish(
            folder,
            {
                "code": None if killed else os.WEXITSTATUS(status),
                "signal": killed,
                "stopped": stopped,
                "out_of_memory": oom_kills() > ooms,
                "peak_memory_bytes": usage.ru_maxrss * 1024,
                "seconds": round(time.monotonic() - began, 3),
            },
        )


def start_command(settings: dict[str, Any], output: int, log: int, lock: int) -> int:
    """Starts the command as a program of its own."""
    child = subprocess.Popen(
        settings["command"],
        cwd=settings["cwd"],
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=log,
        process_group=0,
        pass_fds=(lock,),
        preexec_fn=end_with_parent,
    )
    child.returncode = 0  # this process reaps it itself
    return child.pid


class Asked:
    """Whether, and why, the job is to end: by signal or by the files in its folder."""

    def __init__(self, folder: Path, settings: dict[str, Any]) -> None:
        self.folder = folder
        self.reprieve_s, self.abandoned_after_s = settings["reprieve_s"], settings["abandoned_after_s"]
        self.wake, self._poke = os.pipe()
        self._signalled = False
        self._released_at: float | None = None

    def listen(self) -> None:
        """Takes over the signals that mean an end, and is woken by the end of the command."""
        os.set_blocking(self._poke, False)
        signal.set_wakeup_fd(self._poke, warn_on_full_buffer=False)
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, self._note)
        signal.signal(signal.SIGCHLD, lambda number, frame: None)

    def _note(self, number: int, frame: object) -> None:
        self._signalled = True

    def why(self) -> str:
        """Reason to end now; "" to go on."""
        if self._signalled:
            return "signal"
        look_anew(self.folder)
        if (self.folder / "cancel").exists():
            return "cancelled"
        owner = _read(self.folder / "owner")
        released = _read(self.folder / "release")
        if released and released == owner:
            self._released_at = self._released_at or time.monotonic()
            if time.monotonic() - self._released_at >= self.reprieve_s:
                return "released"
        else:
            self._released_at = None
        try:
            unseen_s = time.time() - (self.folder / "owner").stat().st_mtime
        except OSError:
            return ""
        return "abandoned" if unseen_s > self.abandoned_after_s else ""


def follow(pid: int, asked: Asked, folder: Path) -> str:
    """Waits for the end of the command, which is not reaped, or for a reason to end it, which is returned."""
    beat = 0.0
    while os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
        if why := asked.why():
            return why
        if time.monotonic() - beat >= BEAT_EVERY_S:
            beat = time.monotonic()
            with contextlib.suppress(OSError):
                os.utime(folder / "alive")
        if select.select([asked.wake], [], [], LOOK_EVERY_S)[0]:
            os.read(asked.wake, 4096)
    return ""


def end(pid: int, grace_s: float) -> None:
    """SIGTERM to the group of the command; SIGKILL where it has not ended in time."""
    _signal(pid, signal.SIGTERM)
    until = time.monotonic() + grace_s
    while os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
        if time.monotonic() > until:
            _signal(pid, signal.SIGKILL)
            return
        time.sleep(0.05)


def finish(folder: Path, record: dict[str, Any]) -> None:
    """The exit record, written whole or not at all. A full disk must not hide the end of a job: it is tried for a while."""
    for _ in range(60):
        try:
            write(folder / "exit.json", record)
            return
        except OSError:
            time.sleep(1)


def write(path: Path, content: Any) -> None:
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    with temporary.open("w") as stream:
        json.dump(content, stream)
        stream.flush()
        os.fsync(stream.fileno())
    temporary.replace(path)


def start_ticks(pid: int) -> int | None:
    """Start time of a living process in clock ticks since boot, which tells it from a later one with its number. None: there is none."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in "ZX" else int(fields[19])


def oom_kills() -> int:
    """Processes that the kernel has killed for want of memory: in this process's control group, or on this machine."""
    for path in (*memory_counts(_read(Path("/proc/self/cgroup"))), Path("/proc/vmstat")):
        for line in _read(path).splitlines():
            name, _, value = line.partition(" ")
            if name == "oom_kill":
                return int(value)
    return 0


def memory_counts(groups: str) -> list[Path]:
    """Files that may hold the count of a control group; groups: its /proc/PID/cgroup. In a container the path there may be the host's,
    while the files of the container's group are at the top. The top of version 1 outside of a container counts nothing, so it is not asked
    for a process of the top."""
    found, mounts = [], Path("/sys/fs/cgroup")
    for line in groups.splitlines():
        _, controllers, path = line.split(":", 2)
        if not controllers:
            found += [mounts / path.lstrip("/") / "memory.events", mounts / "memory.events"]
        elif "memory" in controllers.split(",") and path != "/":
            found += [mounts / "memory" / path.lstrip("/") / "memory.oom_control", mounts / "memory" / "memory.oom_control"]
    return found


def _take(handle: int) -> bool:
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def look_anew(folder: Path) -> None:
    """After this, what other hosts did in the folder is seen. A client of NFS that once found no such name goes on saying so for up to a
    minute, unless the folder is opened (scripts/nfs_trial.py)."""
    with contextlib.suppress(OSError):
        os.close(os.open(folder, os.O_RDONLY))


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""


def _signal(group: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(group, number)


def end_with_parent() -> None:
    """SIGTERM to this process when its parent dies."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)


if __name__ == "__main__":
    main()
