"""Launchers: where a stage's command runs. The operator knows this interface alone; the stages know nothing of it.

    launcher = launcher_named("local")
    job_id = launcher.submit(Job(folder=..., command=[...], cwd=..., environment={...}))      # plain JSON, kept across retries
    launcher.attach(job_id, owner)                 # "I follow this job", renewed while that is so
    launcher.status(job_id)                        # running, ending, succeeded, failed, lost
    lines, place = launcher.tail(job_id, place)    # what it wrote since
    launcher.release(job_id, owner)                # "I was told to stop": it ends unless another owner takes it over within seconds
    launcher.cancel(job_id)                        # it ends now: SIGTERM, after the grace SIGKILL
    launcher.result(job_id)                        # exit record and what it printed

`submit` never starts a second copy: where the newest attempt of the same folder still runs (its id was lost with the task that started it),
that attempt's id is returned. Every attempt has a folder of its own, `<folder>/0001`, so their number is the number of starts. The
contents are described in stage_job.py.

`local` starts the job on the machine of the task. Another launcher (Slurm, Kubernetes) starts the same stage_job.py on another machine with
the same folder, and asks its own scheduler where this one asks /proc; LAUNCHERS names them.
"""

import contextlib
import dataclasses
import fcntl
import json
import os
import select
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Literal, Protocol

import stage_job
import warm_start

STAGE_JOB = Path(stage_job.__file__)
Status = Literal["running", "ending", "succeeded", "failed", "lost"]
JobId = dict[str, Any]  # plain JSON: it is kept in Airflow's task state

GRACE_S = 20.0  # from SIGTERM to SIGKILL: time for a training run to save
REPRIEVE_S = 6.0  # a scheduler that restarts hands a running task to a new try, whose process needs a few seconds to take the job over
ABANDONED_AFTER_S = 2 * 3600.0  # longer than the heartbeat time-out and the longest wait before a retry together
DEAD_AFTER_S = 60.0  # a job on another host that has not touched its file `alive` for so long
STOPPED = 75  # exit code of craw4llm: a stage was asked to end and has saved
STARTS_WITHIN_S = 60.0
FILES = ("output", "log")
FIRST_LOOK_BYTES = 65_536  # of each file, for a task that takes over a running job


@dataclasses.dataclass(frozen=True, kw_only=True)
class Job:
    """What is to run. folder: of this job alone, the same for every attempt at it. stage: its kind, by which resources are chosen.
    generation: a job of an older one is ended, not taken over (Airflow's count of how often the run was cleared). tag: whose job it is; an
    Airflow that is stopped ends its own."""

    folder: Path
    command: Sequence[str]
    cwd: str
    environment: Mapping[str, str]
    stage: str = ""
    generation: int = 0
    tag: str = ""
    grace_s: float = GRACE_S
    reprieve_s: float = REPRIEVE_S
    abandoned_after_s: float = ABANDONED_AFTER_S


@dataclasses.dataclass(frozen=True, kw_only=True)
class Outcome:
    """How a job ended. code: None where a signal ended it, or where nothing is known. stopped: why it was told to end ("": it was not).
    output: its lines on stdout. scheduler: what a cluster's own says of it, for people."""

    code: int | None
    signal: int | None
    stopped: str
    out_of_memory: bool
    peak_memory_bytes: int | None
    output: tuple[str, ...]
    scheduler: str = ""


class Launcher(Protocol):
    """See the module's docstring."""

    name: str

    def submit(self, job: Job) -> JobId: ...
    def status(self, job_id: JobId) -> Status: ...
    def attach(self, job_id: JobId, owner: str) -> None: ...
    def tail(self, job_id: JobId, place: dict[str, int] | None) -> tuple[list[str], dict[str, int]]: ...
    def release(self, job_id: JobId, owner: str) -> None: ...
    def cancel(self, job_id: JobId) -> None: ...
    def wait(self, job_id: JobId, seconds: float) -> None: ...
    def wait_for_end(self, job_id: JobId, seconds: float) -> None: ...
    def result(self, job_id: JobId) -> Outcome: ...
    def find(self, folder: Path) -> JobId | None: ...


class FolderLauncher:
    """What all launchers share: everything but starting a job and asking whether it lives is done by files in the job's folder."""

    name = ""
    once = False  # an attempt's folder is for one start; a cluster may start a job again in its folder, after a pre-emption

    def start(self, folder: Path, settings: Path, environment: Mapping[str, str]) -> JobId:
        """Starts stage_job.py with `settings`, which gives its environment to the command (it may hold secrets: it is not written down).
        Returns what `alive` needs to find the job again. Raises OSError."""
        raise NotImplementedError

    def alive(self, job_id: JobId) -> bool:
        raise NotImplementedError

    def find(self, folder: Path) -> JobId | None:
        """What `start` would have returned for an attempt that was started but whose id was not stored; None: there is none that lives."""
        return None

    def submit(self, job: Job) -> JobId:
        """Starts the job, or returns the id of the attempt that runs. Raises OSError or TimeoutError where it does not start."""
        job.folder.mkdir(parents=True, exist_ok=True)
        with _gate(job.folder):
            newest = max((p for p in job.folder.iterdir() if p.name.isdigit()), default=None)
            if newest is not None and (known := _json(newest / "id.json") or self._recovered(newest)):
                older: JobId = known
                other = self._named(older["launcher"])
                status = other.status(older)
                if status == "running" and older["generation"] == job.generation:
                    return older
                if status in ("running", "ending"):
                    other.cancel(older)
                    other.wait_for_end(older, job.grace_s + STARTS_WITHIN_S)
            folder = job.folder / f"{int(newest.name) + 1 if newest else 1:04d}"
            folder.mkdir()
            fields = ("cwd", "grace_s", "reprieve_s", "abandoned_after_s")
            settings = {
                **{name: getattr(job, name) for name in fields},
                "launcher": self.name,
                "folder": str(folder),
                "once": self.once,
                "command": list(job.command),
                "stage": job.stage,
                "generation": job.generation,
                "tag": job.tag,
            }
            stage_job.write(folder / "settings.json", settings)
            started = self.start(folder, folder / "settings.json", job.environment)
            job_id = {"launcher": self.name, "folder": str(folder), "generation": job.generation, "tag": job.tag, **started}
            stage_job.write(folder / "id.json", job_id)
            return job_id

    def status(self, job_id: JobId) -> Status:
        folder = Path(job_id["folder"])
        for _ in range(2):  # the record may be written between the two looks
            if record := _json(folder / "exit.json"):
                return "succeeded" if record["code"] == 0 and not record["stopped"] else "failed"
            if self.alive(job_id):
                return "ending" if (folder / "cancel").exists() else "running"
        return "lost"

    def attach(self, job_id: JobId, owner: str) -> None:
        path = Path(job_id["folder"]) / "owner"
        with contextlib.suppress(OSError):
            if path.exists() and path.read_text() == owner:
                os.utime(path)
            else:
                temporary = path.with_name(f".owner.{os.getpid()}")
                temporary.write_text(owner)
                temporary.replace(path)

    def tail(self, job_id: JobId, place: dict[str, int] | None) -> tuple[list[str], dict[str, int]]:
        """Whole lines written since `place` (None: from the beginning, or near the end where that is long), and the new place."""
        lines: list[str] = []
        now: dict[str, int] = {}
        ended = _json(Path(job_id["folder"]) / "exit.json") is not None
        for name in FILES:
            path = Path(job_id["folder"]) / name
            now[name] = at = (place or {}).get(name, 0)
            with contextlib.suppress(OSError), path.open("rb") as stream:
                if place is None and (size := path.stat().st_size) > FIRST_LOOK_BYTES:
                    stream.seek(size - FIRST_LOOK_BYTES)
                    stream.readline()
                    at = stream.tell()
                stream.seek(at)
                text = stream.read(1 << 20)
                whole = len(text) if ended or len(text) == 1 << 20 else text.rfind(b"\n") + 1
                lines += text[:whole].decode("utf-8", "replace").splitlines()
                now[name] = at + whole
        return lines, now

    def release(self, job_id: JobId, owner: str) -> None:
        with contextlib.suppress(OSError):
            (Path(job_id["folder"]) / "release").write_text(owner)

    def cancel(self, job_id: JobId) -> None:
        with contextlib.suppress(OSError):
            (Path(job_id["folder"]) / "cancel").touch()

    def result(self, job_id: JobId) -> Outcome:
        folder = Path(job_id["folder"])
        record = _json(folder / "exit.json") or {}
        lines: tuple[str, ...] = ()
        with contextlib.suppress(OSError):
            lines = tuple((folder / "output").read_text(errors="replace").splitlines())
        return Outcome(
            code=record.get("code"),
            signal=record.get("signal"),
            stopped=record.get("stopped", ""),
            out_of_memory=record.get("out_of_memory", False),
            peak_memory_bytes=record.get("peak_memory_bytes"),
            output=lines,
        )

    def _recovered(self, folder: Path) -> JobId | None:
        """The id of an attempt whose starter died before it stored it; asked of the launcher that started it."""
        settings = _json(folder / "settings.json")
        if settings is None:
            return None
        name = settings.get("launcher", self.name)
        if (known := self._named(name).find(folder)) is None:
            return None
        more = {"generation": settings.get("generation", 0), "tag": settings.get("tag", "")}
        job_id = {"launcher": name, "folder": str(folder), **more, **known}
        stage_job.write(folder / "id.json", job_id)
        return job_id

    def _named(self, name: str) -> Launcher:
        """This launcher, or the other one of that name: the placement may have changed since a job was started."""
        return self if name == self.name else launcher_named(name)

    def wait(self, job_id: JobId, seconds: float) -> None:
        """Waits so long, or until the job has ended where that is known at once."""
        time.sleep(seconds)

    def wait_for_end(self, job_id: JobId, seconds: float) -> None:
        """Raises TimeoutError where the job has not ended by then."""
        until = time.monotonic() + seconds
        while self.status(job_id) in ("running", "ending"):
            if time.monotonic() > until:
                raise TimeoutError(f"waited {seconds:.0f} s for the end of the job in {job_id['folder']}")
            time.sleep(0.05)


class QueueLauncher(FolderLauncher):
    """What the launchers share whose scheduler keeps jobs in a queue, and may start one again in its folder."""

    def __init__(self) -> None:
        self._said = ""

    def _word(self, job_id: JobId) -> Any:
        """What the scheduler says of the job; None: no answer."""
        raise NotImplementedError

    def lives(self, word: Any) -> bool:
        """Whether the job waits or runs by that word; also where there is no answer, since nobody knows better."""
        raise NotImplementedError

    def without_record(self, folder: Path, word: Any) -> Status:
        """The status of a job that the scheduler has given up, and that left no exit record."""
        raise NotImplementedError

    def line(self, job_id: JobId, word: Any) -> str | None:
        """That word, for the task's log."""
        raise NotImplementedError

    def withdraw(self, job_id: JobId) -> None:
        """Takes a job that does not run yet out of the queue."""
        raise NotImplementedError

    def status(self, job_id: JobId) -> Status:
        folder = Path(job_id["folder"])
        record = _json(folder / "exit.json")
        if record and not may_go_on(record):
            return "succeeded" if record["code"] == 0 and not record["stopped"] else "failed"
        word = self._word(job_id)
        if self.lives(word):
            return "ending" if (folder / "cancel").exists() else "running"
        if record := _json(folder / "exit.json"):  # it may have been written between the two looks
            return "succeeded" if record["code"] == 0 and record["stopped"] in ("", "signal") else "failed"
        return self.without_record(folder, word)

    def tail(self, job_id: JobId, place: dict[str, int] | None) -> tuple[list[str], dict[str, int]]:
        lines, now = super().tail(job_id, place)
        word = self._word(job_id)
        said = None if word is None else self.line(job_id, word)
        if said is not None and said != self._said:
            lines.append(said)
            self._said = said
        return lines, now

    def release(self, job_id: JobId, owner: str) -> None:
        super().release(job_id, owner)
        self.withdraw(job_id)

    def cancel(self, job_id: JobId) -> None:
        super().cancel(job_id)
        self.withdraw(job_id)


def may_go_on(record: Mapping[str, Any]) -> bool:
    """Whether an exit record tells of an end that may be the scheduler's doing: Slurm signals the command and stage_job.py at once, and
    either may be first."""
    return record["stopped"] == "signal" or (not record["stopped"] and (record["code"] == STOPPED or record["signal"] is not None))


class LocalLauncher(FolderLauncher):
    """On this machine, in a session of its own."""

    name = "local"
    once = True

    _started: ClassVar[dict[int, subprocess.Popen[bytes]]] = {}  # of this process: they are its children, and zombies until it looks

    def start(self, folder: Path, settings: Path, environment: Mapping[str, str]) -> JobId:
        pid = warm_start.ask(settings, environment)
        if pid is not None:
            return {"host": socket.gethostname(), "pid": pid, "started": stage_job.start_ticks(pid)}
        with (folder / "stage_job.log").open("ab") as log:
            process = subprocess.Popen(
                [sys.executable, "-I", "-S", str(STAGE_JOB), str(settings)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                env=dict(environment),
            )
        self._started[process.pid] = process
        return {"host": socket.gethostname(), "pid": process.pid, "started": stage_job.start_ticks(process.pid)}

    def find(self, folder: Path) -> JobId | None:
        """By what the job wrote when it began. One that has not got so far holds the lock that the next one waits for."""
        known = _json(folder / "job.json")
        return known if known and self.alive({**known, "folder": str(folder)}) else None

    def alive(self, job_id: JobId) -> bool:
        if process := self._started.get(job_id["pid"]):
            process.poll()  # else it stays a zombie
        if job_id["host"] == socket.gethostname():
            started = stage_job.start_ticks(job_id["pid"])
            return started is not None and started == job_id["started"]
        try:
            return time.time() - (Path(job_id["folder"]) / "alive").stat().st_mtime < DEAD_AFTER_S
        except OSError:
            return False

    def wait(self, job_id: JobId, seconds: float) -> None:
        if not hasattr(os, "pidfd_open") or job_id["host"] != socket.gethostname():
            super().wait(job_id, seconds)
            return
        try:
            process = os.pidfd_open(job_id["pid"])
        except OSError:
            return  # it has ended
        try:
            end = select.poll()
            end.register(process, select.POLLIN)
            end.poll(1000 * seconds)
        finally:
            os.close(process)


def end_jobs(jobs: Path, tag: str) -> int:
    """Ends all running local jobs below `jobs` with this tag, and waits until they have saved. Returns how many there were."""
    launcher, ids = LocalLauncher(), []
    for path in jobs.glob("*/*/*/[0-9]*/id.json"):
        known = None if (path.parent / "exit.json").exists() else _json(path)
        if known and known["launcher"] == "local" and known["tag"] == tag and launcher.status(known) in ("running", "ending"):
            launcher.cancel(known)
            ids.append(known)
    for job_id in ids:
        with contextlib.suppress(TimeoutError):
            launcher.wait_for_end(job_id, GRACE_S + 5)
    return len(ids)


def _slurm() -> Launcher:
    from slurm_launcher import SlurmLauncher

    return SlurmLauncher()


def _kubernetes() -> Launcher:
    from kubernetes_launcher import KubernetesLauncher

    return KubernetesLauncher()


AS_CONFIGURED = "as configured"  # a form's word for no launcher in particular
LAUNCHERS: dict[str, Callable[[], Launcher]] = {"local": LocalLauncher, "slurm": _slurm, "kubernetes": _kubernetes}


def launcher_named(name: str) -> Launcher:
    """Raises ValueError, naming what there is."""
    if name not in LAUNCHERS:
        raise ValueError(f"launcher is {name!r}; expected {' or '.join(sorted(LAUNCHERS))}")
    return LAUNCHERS[name]()


def for_torchrun(command: Sequence[str]) -> tuple[str, list[str]]:
    """Python, and what torchrun is to start with it: `python -m craw4llm run ARGS` becomes `-m training.node ARGS`."""
    python, *rest = command
    if rest[:3] == ["-m", "craw4llm", "run"]:
        rest = ["-m", "training.node", *(argument for argument in rest[3:] if not argument.startswith(("--ranks", "--jobs")))]
    return python, rest


@contextlib.contextmanager
def _gate(folder: Path) -> Iterator[None]:
    """Held while an attempt is started: two tasks for one job come here one after the other."""
    with (folder / "gate").open("a") as stream:
        fcntl.flock(stream, fcntl.LOCK_EX)
        yield


def _json(path: Path) -> dict[str, Any] | None:
    for _ in range(2):
        try:
            return dict(json.loads(path.read_text()))
        except FileNotFoundError:
            stage_job.look_anew(path.parent)
        except (OSError, ValueError):
            return None
    return None
