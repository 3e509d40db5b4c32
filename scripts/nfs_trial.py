#!/usr/bin/env python
"""One artifact root on NFS, tried with two clients: locks, renames, a host that dies, and what one sees of the other's work.

    python scripts/nfs_trial.py [--folder build/nfs-trial] [--keep] [--options hard]     three virtual machines: a server and two clients
    python scripts/nfs_trial.py --mount /mnt/a/trial --mount /mnt/b/trial                 an export of yours, mounted twice (`nosharecache`)
    python scripts/nfs_trial.py --mount one:/mnt/x/trial --mount two:/mnt/x/trial         two machines of yours, by ssh

The machines are user-mode Linux (a kernel as a process, on the files of this machine, read only), so server and clients are the
kernel's own: NFS 4.2 over a network namespace that nothing outside can reach; the export is an ext4 image. Their packages are fetched
with `apt-get download` and unpacked into the folder (70 MB); nothing is installed. Needs root, apt-get, dpkg, nsenter, ip and mkfs.ext4;
about 1 GB of memory and 5 minutes. Says what is missing and exits with 77. By ssh, this checkout and its Python must be at the same path.

Prints a table (what was tried, what came of it) and one JSON object; exits with 1 where an artifact was built twice or by nobody, is not
whole, or a job that succeeded was taken for lost. scripts/nfs_machine.py is the machines' first process.
"""

import argparse
import contextlib
import itertools
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

PROJECT = Path(__file__).resolve().parent.parent
PACKAGES = ("user-mode-linux", "nfs-kernel-server", "nfs-common", "libnfsidmap1", "libtirpc3", "libevent-core-2.1-7", "libwrap0")
NEEDED = ("apt-get", "dpkg", "nsenter", "ip", "mkfs.ext4", "truncate")
NETWORK = "10.77.0."
LEASE_S = 20
ARTIFACTS = ("a" * 12, "b" * 12, "c" * 12)

# python -c BUILDER ROOT LOCKS SECONDS [LOOKED]: builds three artifacts and says whether it built each. LOCKS "none": a file system whose
# locks do not reach other hosts. LOOKED: a file that it makes once it has looked for them in vain; it then waits three seconds.
BUILDER = """
import fcntl, json, os, socket, sys, time
from pathlib import Path
import craw4llm.artifact as artifact
root, locks, slow = Path(sys.argv[1]), sys.argv[2], float(sys.argv[3])
if locks == "none":
    fcntl.flock = lambda *_: None
def write(out):
    (out / "by").write_text(socket.gethostname())
    for _ in range(20):
        time.sleep(slow / 20)
        with (out / "lines").open("a") as stream:
            stream.write("x")
    return artifact.Result()
if len(sys.argv) > 4:
    assert not any(artifact.Store(root).find("corpus", name * 12) for name in "abc")
    Path(sys.argv[4]).touch()
    time.sleep(3)
built = {}
for name in ("a", "b", "c"):
    made, here = artifact.Store(root).build("corpus", name * 12, version=1, config={}, inputs={}, write=write)
    built[name] = here
    assert made.verify() == [], made.verify()
print(json.dumps({"host": socket.gethostname(), "built": built}))
"""
# python -c CONTENTS FOLDER: what is in the file `lines` of each folder below.
CONTENTS = """
import json, sys
from pathlib import Path
print(json.dumps({p.name: (p / "lines").read_text() for p in Path(sys.argv[1]).iterdir()}))
"""
# python -c RENAMER FOLDER: makes a folder elsewhere and renames it; prints when.
RENAMER = """
import os, sys, time
os.makedirs(sys.argv[1] + ".partial")
os.rename(sys.argv[1] + ".partial", sys.argv[1])
print(time.time())
"""
# python -c WAITER PATH: waits for it, in a folder that may not be there yet.
WAITER = """
import os, sys, time
from pathlib import Path
path = Path(sys.argv[1])
while not path.exists():
    for folder in (path.parent.parent, path.parent):
        if folder.exists():
            os.listdir(folder)
    time.sleep(0.1)
"""
# python -c WATCHER FOLDER HOW LOOKED: waits for the folder; HOW "anew": opens the folder above each time. Prints when it saw it.
WATCHER = """
import os, sys, time
assert not os.path.exists(sys.argv[1])
open(sys.argv[3], "w").close()
while not os.path.exists(sys.argv[1]):
    if sys.argv[2] == "anew":
        os.close(os.open(os.path.dirname(sys.argv[1]), os.O_RDONLY))
    time.sleep(0.05)
print(time.time())
"""
# python -c JOB FOLDER LOOKED: a job that lives until LOOKED is there, and then leaves its exit record. Prints when.
JOB = """
import os, sys, time
sys.path.insert(0, sys.argv[3])
import stage_job
from pathlib import Path
folder = Path(sys.argv[1])
while not Path(sys.argv[2]).exists():
    stage_job.look_anew(Path(sys.argv[2]).parent)
    (folder / "alive").touch()
    time.sleep(0.2)
stage_job.write(folder / "exit.json", {"code": 0, "signal": None, "stopped": "", "out_of_memory": False})
os.utime(folder / "alive", (1, 1))
print(time.time())
"""
# python -c FOLLOWER FOLDER LOOKED: what the launcher says of that job until it has ended. Prints the last word, and when.
FOLLOWER = """
import sys, time
sys.path.insert(0, sys.argv[3])
import launchers
from pathlib import Path
launcher, said = launchers.LocalLauncher(), "running"
while said == "running":
    said = launcher.status({"folder": sys.argv[1], "host": "elsewhere", "pid": 1, "started": 1})
    Path(sys.argv[2]).touch()
    time.sleep(0.2)
print(said, time.time())
"""


class Running(Protocol):
    def result(self, seconds: float) -> str:
        """What the program wrote; RuntimeError where it failed, TimeoutError where it did not end."""
        ...

    def kill(self) -> None: ...


@dataclass(frozen=True)
class Host:
    name: str
    root: str  # where it has the export mounted
    start: Callable[[list[str]], Running]

    def python(self, program: str, *arguments: str) -> Running:
        return self.start([sys.executable, "-c", program, *arguments])


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--mount", action="append", default=[], metavar="[HOST:]PATH", help="a client of your own; give two")
    parser.add_argument("--folder", type=Path, default=PROJECT / "build" / "nfs-trial")
    parser.add_argument("--keep", action="store_true", help="keep the packages for another trial")
    parser.add_argument("--options", default="hard", help="mount options of the virtual machines")
    parser.add_argument("--patience", type=float, default=1.0, help="multiplies the time that everything may take")
    given = parser.parse_args()
    if given.mount:
        if len(given.mount) != 2:
            parser.error(f"{len(given.mount)} mounts are given; give two")
        return report(trial([own(*pair) for pair in zip(("one", "two"), given.mount, strict=True)], None, given.patience))
    missing = [name for name in NEEDED if shutil.which(name) is None] + ([] if os.geteuid() == 0 else ["root"])
    if missing:
        print(f"not tried: {', '.join(missing)} missing")
        return 77
    folder = given.folder.resolve()
    try:
        unpack(folder)
        with machines(folder, given.options, given.patience) as (hosts, die):
            return report(trial(hosts, die, given.patience))
    finally:
        if not given.keep:
            shutil.rmtree(folder, ignore_errors=True)


def report(rows: list[tuple[str, str, bool]]) -> int:
    for name, value, good in rows:
        print(f"{name:<66} {value:<34} {'' if good else 'WRONG'}".rstrip())
    good = all(good for _, _, good in rows)
    print(json.dumps({"ok": good, **{name: value for name, value, _ in rows}}))
    return 0 if good else 1


# --- what is tried


def trial(hosts: list[Host], die: Callable[[], None] | None, patience: float) -> list[tuple[str, str, bool]]:
    """One row each: what was tried, what came of it, whether that is right. die: ends the first host as a power cut would."""
    rows: list[tuple[str, str, bool]] = []
    one, two = hosts
    base = f"trial-{os.getpid()}"
    numbers = itertools.count()

    def place(host: Host, name: str) -> str:
        return f"{host.root}/{base}/{name}"

    def make(name: str) -> None:
        for part in (one, two):  # both have the folder, so that neither has a fresh view of it later
            part.start(["mkdir", "-p", place(part, name)]).result(60 * patience)

    def signal_file(host: Host) -> str:
        return place(host, f"signal-{next(numbers)}")

    def wait_for(host: Host, path: str) -> None:
        host.python(WAITER, path).result(120 * patience)

    def builds(name: str, running: list[Running]) -> None:
        said = [json.loads(one_of.result(180 * patience)) for one_of in running]
        judge(name, said)

    def judge(name: str, said: list[dict[str, object]]) -> None:
        root = place(two, name)
        there = json.loads(two.python(CONTENTS, f"{root}/corpus").result(60 * patience))
        times = [sum(bool(line["built"][letter]) for line in said) for letter in "abc"]  # type: ignore[index]
        whole = there == dict.fromkeys(ARTIFACTS, "x" * 20)
        rows.append((f"{name}: built (times each), whole", f"{times}, {'yes' if whole else 'no'}", times == [1, 1, 1] and whole))

    name = "two builders on each host"
    make(f"{name}/corpus")
    builds(name, [host.python(BUILDER, place(host, name), "kernel", "1") for host in (one, one, two, two)])

    for first, second in ((one, two), (two, one)):
        name = f"{first.name} had looked in vain, {second.name} builds"
        make(f"{name}/corpus")
        looked = signal_file(first)
        waits = first.python(BUILDER, place(first, name), "kernel", "1", looked)
        wait_for(second, looked.replace(first.root, second.root, 1))
        builds(name, [waits, second.python(BUILDER, place(second, name), "kernel", "4")])

    name = "locks that reach no other host: the living owner is respected"
    if len({host.start(["hostname"]).result(60 * patience) for host in (one, two)}) == 1:
        rows.append((name, "not tried: one machine", True))  # which relies on the kernel's locks
    else:
        make(f"{name}/corpus")
        first_builder = one.python(BUILDER, place(one, name), "none", "20")
        wait_for(two, place(two, f"{name}/corpus/.partial-{ARTIFACTS[0]}/lines"))
        builds(name, [first_builder, two.python(BUILDER, place(two, name), "none", "1")])

    for how, wanted in (("anew", 5.0), ("plainly", None)):
        make(f"rename-{how}")
        looked = signal_file(two)
        watcher = two.python(WATCHER, place(two, f"rename-{how}/x"), how, looked)
        wait_for(one, looked.replace(two.root, one.root, 1))
        at = float(one.python(RENAMER, place(one, f"rename-{how}/x")).result(60 * patience))
        late = float(watcher.result(180 * patience)) - at
        note = "with its folder opened" if how == "anew" else "looked for by name alone (not relied on)"
        rows.append((f"a rename is seen by the other host, {note}, after s", f"{late:.1f}", wanted is None or late < wanted * patience))

    make("job")
    one.start(["touch", place(one, "job/alive")]).result(60 * patience)
    looked = signal_file(one)
    plugins = str(PROJECT / "plugins")
    follower = two.python(FOLLOWER, place(two, "job"), looked.replace(one.root, two.root, 1), plugins)
    ended = float(one.python(JOB, place(one, "job"), looked, plugins).result(120 * patience))
    word, _, at_text = follower.result(120 * patience).partition(" ")
    rows.append(
        ("a job on the other host ended well; its launcher says", f"{word} after {float(at_text) - ended:.1f} s", word == "succeeded")
    )

    name = "a host dies while it builds"
    make(f"{name}/corpus")
    dying = one.python(BUILDER, place(one, name), "kernel", "600")
    wait_for(two, place(two, f"{name}/corpus/.partial-{ARTIFACTS[0]}/lines"))
    began = time.monotonic()
    dying.kill() if die is None else die()
    said = json.loads(two.python(BUILDER, place(two, name), "kernel", "1").result(300 * patience))
    judge(name, [said])
    rows.append(("the other host goes on, after s (three builds of 1 s among them)", f"{time.monotonic() - began:.0f}", True))
    two.start(["rm", "-rf", f"{two.root}/{base}"]).result(60 * patience)
    return rows


# --- clients of the user's own


class Local:
    """A process of this machine, or of ssh."""

    def __init__(self, command: list[str], prefix: list[str]) -> None:
        self.remote = prefix
        full = ["env", f"PYTHONPATH={PROJECT}", *command]
        shell = [*(prefix or ["sh", "-c"]), f"echo $$; exec {shlex.join(full)}"]
        # unbuffered: what is read ahead with the first line would be lost to `communicate`
        self.process = subprocess.Popen(shell, stdout=subprocess.PIPE, stderr=subprocess.PIPE, bufsize=0)
        assert self.process.stdout is not None
        self.pid = self.process.stdout.readline().decode().strip()

    def result(self, seconds: float) -> str:
        try:
            output, error = self.process.communicate(timeout=seconds)
        except subprocess.TimeoutExpired:
            self.kill()
            raise TimeoutError(f"not ended after {seconds:.0f} s") from None
        if self.process.returncode:
            raise RuntimeError(f"ended with {self.process.returncode}: {error.decode(errors='replace')[-2000:]}")
        return output.decode()

    def kill(self) -> None:
        subprocess.run([*self.remote, "kill", "-9", self.pid], check=False, capture_output=True)


def own(name: str, text: str) -> Host:
    machine, _, path = text.rpartition(":")
    prefix = ["ssh", "-o", "BatchMode=yes", machine] if machine else []
    return Host(name, path.rstrip("/"), lambda command: Local(command, prefix))


# --- virtual machines


def unpack(folder: Path) -> None:
    if (folder / "tools" / "usr/bin/linux.uml").exists():
        return
    (folder / "packages").mkdir(parents=True, exist_ok=True)
    done = subprocess.run(["apt-get", "download", *PACKAGES], cwd=folder / "packages", capture_output=True, text=True, check=False)
    if done.returncode:
        print(f"not tried: packages cannot be had: {done.stderr[-500:]}")
        sys.exit(77)
    for package in sorted((folder / "packages").glob("*.deb")):
        subprocess.run(["dpkg", "-x", str(package), str(folder / "tools")], check=True)


@dataclass
class Post:
    """A program in a machine: its files in the folder that the machine shares with this one (scripts/nfs_machine.py)."""

    path: Path

    def result(self, seconds: float) -> str:
        until = time.monotonic() + seconds
        while not self.path.with_suffix(".code").exists():
            if time.monotonic() > until:
                raise TimeoutError(
                    f"{self.path.parent.name}: not ended after {seconds:.0f} s: {self.path.with_suffix('.error').read_text()}"
                )
            time.sleep(0.05)
        if code := int(self.path.with_suffix(".code").read_text()):
            raise RuntimeError(f"{self.path.parent.name}: ended with {code}: {self.path.with_suffix('.error').read_text()[-2000:]}")
        return self.path.with_suffix(".output").read_text()

    def kill(self) -> None:
        raise NotImplementedError("the machine is killed, not its program")


@contextlib.contextmanager
def machines(folder: Path, options: str, patience: float) -> Iterator[tuple[list[Host], Callable[[], None]]]:
    namespace = f"craw4llm-nfs-{os.getpid()}"
    disk, share, first = folder / "disk", folder / "share", folder / "init"
    shutil.rmtree(share, ignore_errors=True)
    share.mkdir()
    subprocess.run(["truncate", "-s", "300M", str(disk)], check=True)
    subprocess.run(["mkfs.ext4", "-q", "-F", str(disk)], check=True)
    first.write_text(f"#!/bin/sh\nexec {sys.executable} -I -S {PROJECT / 'scripts' / 'nfs_machine.py'}\n")
    first.chmod(0o755)
    modules = next((folder / "tools/usr/lib/uml/modules").iterdir())
    ip = ["ip", "-n", namespace]
    subprocess.run(["ip", "netns", "add", namespace], check=True)
    processes: list[subprocess.Popen[bytes]] = []
    try:
        subprocess.run([*ip, "link", "add", "br0", "type", "bridge"], check=True)
        subprocess.run([*ip, "link", "set", "br0", "up"], check=True)
        for number, name in enumerate(("server", "one", "two"), start=1):
            tap = f"tap{number}"
            subprocess.run([*ip, "tuntap", "add", tap, "mode", "tap"], check=True)
            subprocess.run([*ip, "link", "set", tap, "master", "br0"], check=True)
            subprocess.run([*ip, "link", "set", tap, "up"], check=True)
            told = {
                "name": name,
                "address": f"{NETWORK}{number}",
                "server": f"{NETWORK}1",
                "lease": LEASE_S,
                "options": options.replace(",", ";"),
                "share": share,
                "modules": modules,
                "tools": folder / "tools",
            }
            command = [
                *("nsenter", f"--net=/run/netns/{namespace}", str(folder / "tools/usr/bin/linux.uml"), "mem=512M", "panic=1"),
                *("root=/dev/root", "rootfstype=hostfs", "rootflags=/", "ro", f"init={first}", "con=null", "con0=null,fd:1"),
                *(f"eth0=tuntap,{tap}", f"ubda={disk}" if name == "server" else "quiet"),
                *(f"{key}={value}" for key, value in told.items()),
            ]
            with (folder / f"{name}.log").open("wb") as log:
                nothing = subprocess.DEVNULL
                processes.append(subprocess.Popen(command, stdin=nothing, stdout=log, stderr=log, start_new_session=True))
        for name in ("server", "one", "two"):
            until = time.monotonic() + 120 * patience
            while not (share / name / "ready").exists():
                if time.monotonic() > until:
                    said = (share / f"{name}.log").read_text() if (share / f"{name}.log").exists() else (folder / f"{name}.log").read_text()
                    sys.exit(f"the machine {name} is not ready: {said[-2000:]}")
                time.sleep(0.1)
        yield [client(share / name) for name in ("one", "two")], lambda: end(processes[1])
    finally:
        for process in processes:
            end(process)
        subprocess.run(["ip", "netns", "delete", namespace], check=False)


def end(process: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def client(post: Path) -> Host:
    numbers = itertools.count()

    def start(command: list[str]) -> Running:
        path = post / f"{next(numbers):04d}.command"
        temporary = path.with_suffix(".new")
        temporary.write_text(json.dumps({"command": command, "environment": {"PYTHONPATH": str(PROJECT), "PYTHONDONTWRITEBYTECODE": "1"}}))
        temporary.rename(path)
        return Post(path)

    return Host(post.name, "/mnt/root", start)


if __name__ == "__main__":
    sys.exit(main())
