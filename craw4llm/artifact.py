"""Artifacts: what a stage wrote, and the store that commits it whole or not at all.

    <root>/<stage>/<fingerprint>/            a finished artifact: its files and manifest.json
    <root>/<stage>/.partial-<fingerprint>/   being written; renamed to the above as the last step
    <root>/locks/<stage>-<fingerprint>.lock  who is writing it
    <root>/locks/<stage>-<fingerprint>.part-<i>-of-<n>.lock    who is making a share of it in the partial directory

A directory with a manifest is complete; one without is nothing. `Store.build` takes the lock, lets the stage write into the
partial directory, writes the manifest last, flushes it all to disk and renames. Whoever waits for the lock finds the finished
artifact and builds nothing.

The **digest** of an artifact is the SHA-256 of one line per file (`<sha256>  <path>`), sorted by path. Files that a stage declares
volatile (logs, measured times) are listed and can be verified, but are left out of the digest: they differ between two machines
that did the same work.
"""

import contextlib
import datetime
import errno
import fcntl
import hashlib
import json
import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import field
from pathlib import Path
from typing import Any

import craw4llm
from craw4llm.dataclass import dataclass
from craw4llm.errors import ArtifactError, StorageError
from craw4llm.execution import host_name
from craw4llm.externals import sha256_file

log = logging.getLogger(__name__)

MANIFEST = "manifest.json"
MANIFEST_SCHEMA = 1
HEARTBEAT_S = 5.0
_FLUSHES = 16  # at a time
RECORD_BYTES = 256  # of an owner, padded; a host's name has at most 64
DEAD_AFTER_S = 60.0  # an owner on another host that has not shown itself for this long is dead


@dataclass(frozen=True, kw_only=True)
class Result:
    """What a stage's `run` returns.

    counts: name -> (value, unit), for people and reports: {"pages": (30145, "pages")}. A missing value is None, never 0.
    notes: free JSON-able facts that belong in the manifest (origin of a text, a warning). Part of no digest.
    volatile: paths, relative to the artifact, that are left out of the digest.
    """

    counts: Mapping[str, tuple[float | int | None, str]] = field(default_factory=dict)
    notes: Mapping[str, Any] = field(default_factory=dict)
    volatile: tuple[str, ...] = ()


@dataclass(frozen=True)
class Artifact:
    """A finished artifact, opened for reading."""

    root: Path
    stage: str
    fingerprint: str
    manifest: Mapping[str, Any]

    @property
    def path(self) -> Path:
        return self.root / self.stage / self.fingerprint

    @property
    def digest(self) -> str:
        return str(self.manifest["digest"])

    @property
    def config(self) -> Mapping[str, Any]:
        return self.manifest["config"]

    def count(self, name: str) -> Any:
        """The value of a count; ArtifactError if the stage did not record it."""
        try:
            return self.manifest["counts"][name]["value"]
        except KeyError:
            known = ", ".join(sorted(self.manifest["counts"]))
            raise ArtifactError(f"{self.stage} {self.fingerprint} has no count {name!r}; it has: {known}") from None

    def file(self, name: str) -> Path:
        """Path of one of the artifact's files; ArtifactError if it is not there."""
        path = self.path / name
        if not path.exists():
            raise ArtifactError(f"{self.stage} {self.fingerprint} has no file {name!r} in {self.path}; run `craw4llm verify`")
        return path

    def input(self, name: str) -> "Artifact":
        """The artifact that this one was made from."""
        try:
            ref = self.manifest["inputs"][name]
        except KeyError:
            known = ", ".join(sorted(self.manifest["inputs"])) or "none"
            raise ArtifactError(f"{self.stage} {self.fingerprint} has no input {name!r}; its inputs are: {known}") from None
        return Store(self.root).open(ref["stage"], ref["fingerprint"])

    def verify(self) -> list[str]:
        """Re-reads every file. Returns one line per difference from the manifest; an empty list means all is as written."""
        faults = []
        listed = {entry["path"]: entry for entry in self.manifest["files"]}
        for name, entry in listed.items():
            path = self.path / name
            if not path.is_file():
                faults.append(f"{name}: missing")
            elif path.stat().st_size != entry["size_bytes"]:
                faults.append(f"{name}: {path.stat().st_size} bytes, the manifest says {entry['size_bytes']}")
            elif sha256_file(path) != entry["sha256"]:
                faults.append(f"{name}: its SHA-256 is not the manifest's")
        for path in _files(self.path):
            name = path.relative_to(self.path).as_posix()
            if name not in listed:
                faults.append(f"{name}: not in the manifest")
        return faults


class Store:
    """The artifact root: finds, opens and builds artifacts. Safe for several processes and hosts that share the root."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def path(self, stage: str, fingerprint: str) -> Path:
        return self.root / stage / fingerprint

    def partial(self, stage: str, fingerprint: str) -> Path:
        """Where the artifact is written until it is finished."""
        return self.root / stage / f".partial-{fingerprint}"

    def find(self, stage: str, fingerprint: str) -> Artifact | None:
        """The finished artifact, or None."""
        manifest = self.path(stage, fingerprint) / MANIFEST
        try:
            content = json.loads(self._read_anew(manifest))
        except (FileNotFoundError, NotADirectoryError):
            return None
        except (OSError, ValueError) as error:
            raise ArtifactError(f"{manifest} cannot be read ({error}); delete its folder and run the stage again") from error
        if content.get("schema") != MANIFEST_SCHEMA:
            raise ArtifactError(
                f"{manifest} has manifest schema {content.get('schema')!r}, this version reads {MANIFEST_SCHEMA}; "
                "use another --root or delete the folder"
            )
        return Artifact(self.root, stage, fingerprint, content)

    def _read_anew(self, manifest: Path) -> str:
        """Its text, also where another host wrote it just now. A client of NFS that once found no such name goes on saying so for up to a
        minute, unless the folder that would hold it is opened (scripts/nfs_trial.py: 27 s and two builds of one artifact)."""
        try:
            return manifest.read_text()
        except (FileNotFoundError, NotADirectoryError):
            for folder in (self.root, manifest.parent.parent):
                with contextlib.suppress(OSError):
                    os.close(os.open(folder, os.O_RDONLY))
            return manifest.read_text()

    def open(self, stage: str, fingerprint: str) -> Artifact:
        """The finished artifact; ArtifactError if there is none."""
        artifact = self.find(stage, fingerprint)
        if artifact is None:
            raise ArtifactError(f"{stage} {fingerprint} is not in {self.root}; run the stage that writes it first")
        return artifact

    def build(
        self,
        stage: str,
        fingerprint: str,
        *,
        version: int,
        config: Mapping[str, Any],
        inputs: Mapping[str, Artifact],
        write: Callable[[Path], Result],
        keep_partial: bool = False,
    ) -> tuple[Artifact, bool]:
        """Builds the artifact unless it is there. Returns it, and whether this call built it.

        write: called with the partial directory. With `keep_partial` the directory may hold files of an interrupted attempt at
            the same fingerprint, from which `write` goes on; without it the directory is empty.
        """
        with storage_errors(self.root), self.lock(stage, fingerprint):
            found = self.find(stage, fingerprint)
            if found is not None:
                return found, False
            self._await_parts(stage, fingerprint)
            partial = self.partial(stage, fingerprint)
            if partial.exists() and not keep_partial:
                _remove(partial)
            partial.mkdir(parents=True, exist_ok=True)
            started = time.time()
            try:
                result = write(partial)
            except BaseException:
                if not keep_partial:  # of no use to the next attempt, and a full disk needs the room
                    _remove(partial, ignore_errors=True)
                raise
            manifest = {
                "schema": MANIFEST_SCHEMA,
                "stage": stage,
                "version": version,
                "fingerprint": fingerprint,
                "config": config,
                "inputs": {name: {"stage": a.stage, "fingerprint": a.fingerprint, "digest": a.digest} for name, a in inputs.items()},
                "counts": {name: {"value": v, "unit": unit} for name, (v, unit) in result.counts.items()},
                "notes": dict(result.notes),
                "wall_time_s": round(time.time() - started, 3),
                "finished": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
                "code": code_version(),
                "machine": machine(),
            }
            (partial / MANIFEST).unlink(missing_ok=True)
            files = [
                {
                    "path": path.relative_to(partial).as_posix(),
                    "size_bytes": path.stat().st_size,
                    "sha256": sha256_file(path),
                    "volatile": path.relative_to(partial).as_posix() in result.volatile,
                }
                for path in _files(partial)
            ]
            unknown = set(result.volatile) - {str(entry["path"]) for entry in files}
            assert not unknown, f"{stage} declares volatile files that it did not write: {sorted(unknown)}"
            manifest["files"] = files
            manifest["digest"] = digest_of_files(files)
            text = json.dumps(manifest, indent=2, sort_keys=True, allow_nan=False)
            (partial / MANIFEST).write_text(text)
            with ThreadPoolExecutor(_FLUSHES) as pool:  # at once they share the file system's own commits
                list(pool.map(_flush, [partial, *partial.rglob("*")]))
            final = self.path(stage, fingerprint)
            if final.exists():  # a folder without a manifest: a deletion that was interrupted
                _remove(final)
            os.rename(partial, final)
            _flush(final.parent)
            return self.open(stage, fingerprint), True

    @contextlib.contextmanager
    def part(self, stage: str, fingerprint: str, part: int, of: int) -> Iterator[bool]:
        """Held while a share of an artifact is made in its partial directory. Gives False where the artifact was finished meanwhile.

        Never at the same time as a build of the whole, which deletes what it has merged: each takes its own lock first and looks at the
        other's then, so that at least one of two that begin together sees the other; a share gives way and waits.
        """
        while True:
            with self.lock(stage, _part_name(fingerprint, f"{part}-of-{of}")):
                if self.find(stage, fingerprint) is not None:
                    yield False
                    return
                if not self.is_held(stage, fingerprint):
                    yield True
                    return
            with self.lock(stage, fingerprint):
                pass

    def _await_parts(self, stage: str, fingerprint: str) -> None:
        """Returns when no share of the artifact is being made; whoever calls it holds the artifact's lock, so none begins."""
        for name in self._part_names(stage, fingerprint):
            with self.lock(stage, name):
                pass

    def has_parts(self, stage: str, fingerprint: str) -> bool:
        """Whether a process makes a share of the artifact now."""
        return any(self.is_held(stage, name) for name in self._part_names(stage, fingerprint))

    def _part_names(self, stage: str, fingerprint: str) -> list[str]:
        """What the locks of shares are called, whether anybody holds them or not."""
        found = sorted((self.root / "locks").glob(f"{stage}-{_part_name(fingerprint, '*')}.lock"))
        return [path.name.removeprefix(f"{stage}-").removesuffix(".lock") for path in found]

    def is_held(self, stage: str, fingerprint: str) -> bool:
        """Whether a process holds this lock now."""
        try:
            stream = self._lock_path(stage, fingerprint).open("r+")
        except FileNotFoundError:
            return False
        with stream:
            return not _try(stream)

    @contextlib.contextmanager
    def lock(self, stage: str, fingerprint: str) -> Iterator[None]:
        """Held by the one process that may write this artifact.

        The kernel's lock on the file ends with its process, also after kill -9. Where the file system does not carry it between
        hosts, the owner's record and its heartbeat do: a record of another host that is fresher than DEAD_AFTER_S is respected.
        """
        path = self._lock_path(stage, fingerprint)
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a+") as stream:
            said = False
            while not _try(stream):
                if not said:
                    owner = _owner(stream)
                    who = f"process {owner['pid']} on {owner['host']}" if owner else "another process"
                    log.info("%s %s is being built by %s; waiting", stage, fingerprint, who)
                    said = True
                time.sleep(0.2)
            stop = threading.Event()
            _sign(stream)
            heart = threading.Thread(target=_beat, args=(stream, stop), daemon=True)
            heart.start()
            try:
                yield
            finally:
                stop.set()
                heart.join()
                stream.seek(0)
                stream.truncate()
                stream.flush()
                fcntl.flock(stream, fcntl.LOCK_UN)

    def _lock_path(self, stage: str, fingerprint: str) -> Path:
        return self.root / "locks" / f"{stage}-{fingerprint}.lock"


@contextlib.contextmanager
def storage_errors(root: Path) -> Iterator[None]:
    """Turns the operating system's word on a full disk or an unwritable root into one clear StorageError."""
    try:
        yield
    except OSError as error:
        where = error.filename or root
        if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise StorageError(
                f"no space left while writing {where}: free some space (`craw4llm gc`) or choose another --root; "
                "finished artifacts are kept, and the next run goes on from them"
            ) from error
        if error.errno in (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP):
            raise StorageError(
                f"{root} is on a file system without locks ({error.strerror}): mount it with them (Lustre: -o flock; NFS: version 4), "
                "or choose another --root"
            ) from error
        if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR):
            raise StorageError(f"{where} cannot be written ({error.strerror}): make {root} writable or choose another --root") from error
        raise


def digest_of_files(files: list[dict[str, Any]]) -> str:
    """SHA-256 over `<sha256>  <path>` lines of the files that are not volatile, sorted by path."""
    lines = sorted(f"{entry['path']}\0{entry['sha256']}" for entry in files if not entry["volatile"])
    text = "".join("{1}  {0}\n".format(*line.split("\0")) for line in lines)
    return hashlib.sha256(text.encode()).hexdigest()


def code_version() -> dict[str, str | None]:
    """Version of the package, and the commit where it runs from a checkout."""
    here = Path(craw4llm.__file__).resolve().parent
    with contextlib.suppress(OSError, ValueError, IndexError):
        return {"version": craw4llm.__version__, "commit": _commit(here.parent)}
    return {"version": craw4llm.__version__, "commit": None}


def _commit(checkout: Path) -> str | None:
    """What HEAD points to, read from the files that git keeps (gitrepository-layout(5)); None outside a checkout."""
    git = checkout / ".git"
    if git.is_file():  # a worktree
        git = checkout / git.read_text().partition("gitdir:")[2].strip()
    elif not git.is_dir():
        return None
    head = (git / "HEAD").read_text().strip()
    if not head.startswith("ref: "):
        return head
    name = head.removeprefix("ref: ")
    shared = git / (git / "commondir").read_text().strip() if (git / "commondir").exists() else git
    for folder in (git, shared):
        if (folder / name).is_file():
            return (folder / name).read_text().strip()
    packed = (line.split() for line in (shared / "packed-refs").read_text().splitlines())
    return next((words[0] for words in packed if words[1:] == [name]), None)


def machine() -> dict[str, Any]:
    """What a number measured here depends on."""
    system = os.uname()
    return {
        "host": host_name(),
        "platform": f"{system.sysname} {system.release} {system.machine}",
        "python": sys.version.split()[0],
        "cpus": os.cpu_count(),
    }


def _files(folder: Path) -> list[Path]:
    found = (p for p in folder.rglob("*") if p.is_file() and p != folder / MANIFEST)
    return sorted(found, key=lambda p: p.relative_to(folder).as_posix())


def _remove(folder: Path, *, ignore_errors: bool = False) -> None:
    import shutil  # with three modules for compression

    shutil.rmtree(folder, ignore_errors=ignore_errors)


def _flush(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _part_name(fingerprint: str, share: str) -> str:
    """What a share is called where locks are named by fingerprints."""
    return f"{fingerprint}.part-{share}"


def _try(stream: Any) -> bool:
    """Takes the lock of an open lock file, unless a living process has it."""
    try:
        fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    owner = _owner(stream)
    if owner is None or owner["host"] == host_name() or time.time() - owner["seen"] > DEAD_AFTER_S:
        return True
    fcntl.flock(stream, fcntl.LOCK_UN)
    return False


def _owner(stream: Any) -> dict[str, Any] | None:
    stream.seek(0)
    try:
        record = json.loads(stream.read())
        return {"host": str(record["host"]), "pid": int(record["pid"]), "seen": float(record["seen"])}
    except (ValueError, KeyError, TypeError):
        return None


def _sign(stream: Any) -> None:
    """Writes the owner's record over the last one, never truncated between: another host would read an empty file, and begin."""
    handle = stream.fileno()
    fcntl.fcntl(handle, fcntl.F_SETFL, fcntl.fcntl(handle, fcntl.F_GETFL) & ~os.O_APPEND)
    record = json.dumps({"host": host_name(), "pid": os.getpid(), "seen": time.time()})
    os.pwrite(handle, record.ljust(RECORD_BYTES).encode(), 0)


def _beat(stream: Any, stop: threading.Event) -> None:
    """What is signed must reach the server at once: NFS may keep it back for half a minute."""
    with contextlib.suppress(OSError):  # a full disk shows in the stage's own writes
        os.fsync(stream.fileno())
    while not stop.wait(HEARTBEAT_S):
        with contextlib.suppress(OSError):
            _sign(stream)
            os.fsync(stream.fileno())
