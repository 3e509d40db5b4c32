"""One artifact root on several hosts: processes with host names and mounts of their own (namespaces of the kernel) build the same
artifacts."""

import errno
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import nfs_trial
import pytest

import craw4llm.artifact as artifact
from craw4llm.errors import StorageError

PROJECT = Path(__file__).resolve().parents[2]

# A heart that beats faster, for the builders of scripts/nfs_trial.py.
BUILDER = nfs_trial.BUILDER.replace("def write(out)", "artifact.DEAD_AFTER_S, artifact.HEARTBEAT_S = 3.0, 0.5\ndef write(out)", 1)
NAMESPACES = ["unshare", "--mount", "--uts", "--propagation", "private"]


def can_unshare() -> bool:
    if shutil.which("unshare") is None or os.geteuid() != 0:
        return False
    return subprocess.run([*NAMESPACES, "true"], capture_output=True, check=False).returncode == 0


pytestmark = pytest.mark.skipif(not can_unshare(), reason="no namespaces here: they need root and `unshare`")


def start(root: Path, host: str, locks: str = "kernel", slow: float = 0.6) -> subprocess.Popen[str]:
    mount = root.parent / host
    mount.mkdir(exist_ok=True)
    script = 'hostname "$1" && mount --bind "$2" "$3" && exec "${@:4}"'
    command = [
        *NAMESPACES,
        "bash",
        "-c",
        script,
        "start",
        host,
        str(root),
        str(mount),
        sys.executable,
        "-c",
        BUILDER,
        str(mount),
        locks,
        str(slow),
    ]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def test_each_artifact_is_built_by_one_host(tmp_path: Path) -> None:
    root = tmp_path / "root"
    root.mkdir()
    builders = [start(root, f"host{n}") for n in range(4)]
    said = [json.loads(builder.communicate(timeout=60)[0]) for builder in builders]
    assert {line["host"] for line in said} == {f"host{n}" for n in range(4)}
    for name in "abc":
        by = [line["host"] for line in said if line["built"][name]]
        assert [(root / "corpus" / (name * 12) / "by").read_text()] == by
        assert (root / "corpus" / (name * 12) / "lines").read_text() == "x" * 20
    assert sorted(p.name for p in (root / "corpus").iterdir()) == [name * 12 for name in "abc"]


@pytest.mark.parametrize("locks", ["kernel", "none"])
def test_a_host_that_dies_is_succeeded_when_its_heartbeat_is_old(tmp_path: Path, locks: str) -> None:
    root = tmp_path / "root"
    root.mkdir()
    first = start(root, "first", locks, slow=60)
    until = time.monotonic() + 30
    while not (root / "corpus" / f".partial-{'a' * 12}" / "lines").exists():
        assert time.monotonic() < until
        time.sleep(0.05)
    second = start(root, "second", locks)
    time.sleep(1.0)
    assert (root / "corpus" / f".partial-{'a' * 12}" / "by").read_text() == "first"  # it waits while the first lives
    first.send_signal(signal.SIGKILL)
    first.communicate()
    said = json.loads(second.communicate(timeout=60)[0])
    assert said["built"] == {"a": True, "b": True, "c": True}
    assert (root / "corpus" / ("a" * 12) / "lines").read_text() == "x" * 20  # nothing of the dead one's half is in it


def test_the_trial_of_a_users_own_mounts_finds_them_good_or_not_one_folder(tmp_path: Path) -> None:
    good, other = tmp_path / "good" / "root", tmp_path / "other" / "root"
    good.mkdir(parents=True)
    other.mkdir(parents=True)

    def run(*mounts: Path) -> subprocess.CompletedProcess[str]:
        arguments = [part for mount in mounts for part in ("--mount", str(mount))]
        command = [
            sys.executable,
            str(PROJECT / "scripts" / "nfs_trial.py"),
            "--pace",
            "0.1",
            "--patience",
            "4" if mounts[0] == mounts[1] else "0.05",
        ]
        return subprocess.run([*command, *arguments], capture_output=True, text=True, check=False)

    done = run(good, good)
    said = json.loads(done.stdout.splitlines()[-1])
    assert done.returncode == 0 and said["ok"], done.stdout + done.stderr
    assert len(said) == 10 and list(good.iterdir()) == []
    assert run(good, other).returncode == 1  # what one of them makes, the other never sees


def test_an_owners_record_is_never_seen_empty_and_reaches_the_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between hosts whose locks do not reach each other it is all there is."""
    written: list[tuple[int, bytes]] = []
    path = tmp_path / "lock"
    monkeypatch.setattr(os, "fsync", lambda handle: written.append((handle, path.read_bytes())))
    ended = threading.Event()
    ended.set()
    with path.open("a+") as stream:
        artifact._sign(stream)
        artifact._beat(stream, ended)
        monkeypatch.setattr(artifact, "host_name", lambda: "h")  # a shorter record than the one before
        artifact._sign(stream)
        artifact._beat(stream, ended)
        assert [len(text) for _, text in written] == [artifact.RECORD_BYTES] * 2 and {h for h, _ in written} == {stream.fileno()}
        assert artifact._owner(stream) == {"host": "h", "pid": os.getpid(), "seen": json.loads(written[1][1])["seen"]}


def test_a_file_system_without_locks_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_locks(*_: Any) -> None:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

    monkeypatch.setattr("fcntl.flock", no_locks)
    with pytest.raises(StorageError, match=r"without locks.*-o flock"):
        artifact.Store(tmp_path).build("corpus", "a" * 12, version=1, config={}, inputs={}, write=write_nothing)


class ClientOfNfs:
    """What an NFS client does with a name that it once found missing: it says so again until the name's folder is opened (seen with Linux'
    client by scripts/nfs_trial.py)."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.missing: set[Path] = set()
        self.read, self.opened = Path.read_text, os.open
        monkeypatch.setattr(Path, "read_text", lambda path, *arguments, **more: self.read_text(path, *arguments, **more))
        monkeypatch.setattr(os, "open", self.open)

    def read_text(self, path: Path, *arguments: Any, **more: Any) -> str:
        if any(name in self.missing for name in (path, *path.parents)):
            raise FileNotFoundError(path)
        try:
            return self.read(path, *arguments, **more)
        except FileNotFoundError:
            self.missing.add(next(p for p in (*reversed(path.parents), path) if not p.exists()))
            raise

    def open(self, path: Any, *arguments: Any, **more: Any) -> int:
        self.missing = {name for name in self.missing if name.parent != Path(path)}
        return self.opened(path, *arguments, **more)


def test_what_another_host_made_since_the_last_look_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    here, there = artifact.Store(tmp_path), artifact.Store(tmp_path)
    client = ClientOfNfs(monkeypatch)
    assert here.find("corpus", "a" * 12) is None
    with monkeypatch.context() as elsewhere:
        elsewhere.setattr(Path, "read_text", client.read)
        elsewhere.setattr(os, "open", client.opened)
        there.build("corpus", "a" * 12, version=1, config={}, inputs={}, write=write_nothing)
    found = here.find("corpus", "a" * 12)
    assert found is not None and not client.missing
    assert here.build("corpus", "a" * 12, version=1, config={}, inputs={}, write=write_nothing)[1] is False


def test_the_exit_record_of_a_job_on_another_host_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else a job that succeeded is taken for lost, and is started again."""
    import launchers

    client = ClientOfNfs(monkeypatch)
    launcher = launchers.LocalLauncher()
    job_id = {"launcher": "local", "folder": str(tmp_path), "host": "elsewhere", "pid": 1, "started": 1, "generation": 0, "tag": ""}
    (tmp_path / "alive").touch()
    assert launcher.status(job_id) == "running"
    record = {"code": 0, "signal": None, "stopped": "", "out_of_memory": False}
    with monkeypatch.context() as elsewhere:
        elsewhere.setattr(os, "open", client.opened)
        (tmp_path / "exit.json").write_text(json.dumps(record))
        os.utime(tmp_path / "alive", (0, 0))
    assert launcher.status(job_id) == "succeeded"


def write_nothing(out: Path) -> artifact.Result:
    (out / "file").write_text("x")
    return artifact.Result()
