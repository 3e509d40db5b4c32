"""First process of a virtual machine of scripts/nfs_trial.py, on a read-only view of the files of the machine that runs it.

The kernel's command line says who it is: name, address, server (the machine with that address exports an ext4 image, the others mount it
at /mnt/root), options (of the mount), lease (seconds), share (a folder of the machine outside, at /mnt/share here), modules and tools
(what was unpacked).
Each SHARE/NAME/NNNN.command is started once; its output, error and exit code lie beside it. Standard library only.
"""

import ctypes
import json
import os
import subprocess
import sys
import time
from pathlib import Path

FINIT_MODULE = 313  # system call of x86-64
MOUNTS_WITHIN_S = 100


def main() -> None:
    os.environ["PATH"] = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
    do("mount", "-t", "proc", "proc", "/proc")
    told = dict(part.partition("=")[::2] for part in Path("/proc/cmdline").read_text().split())
    for kind, place in (("sysfs", "/sys"), ("tmpfs", "/tmp"), ("tmpfs", "/run"), ("tmpfs", "/mnt"), ("tmpfs", "/var/lib")):
        do("mount", "-t", kind, kind, place)
    for folder in ("/mnt/share", "/mnt/root", "/mnt/export", "/var/lib/nfs"):
        os.mkdir(folder)
    do("mount", "-t", "hostfs", "none", "/mnt/share", "-o", told["share"])
    log = os.open(f"/mnt/share/{told['name']}.log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(log, 1)
    os.dup2(log, 2)
    do("hostname", told["name"])
    do("ip", "link", "set", "lo", "up")
    do("ip", "address", "add", f"{told['address']}/24", "dev", "eth0")
    do("ip", "link", "set", "eth0", "up")
    if told["server"] == told["address"]:
        serve(told)
    else:
        mount(told)
    follow(Path("/mnt/share") / told["name"])


def serve(told: dict[str, str]) -> None:
    tools = told["tools"]
    libraries = {**os.environ, "LD_LIBRARY_PATH": f"{tools}/usr/lib/x86_64-linux-gnu:{tools}/lib/x86_64-linux-gnu"}
    load(Path(told["modules"]), "kernel/fs/nfsd/nfsd.ko", set())
    for name in ("etab", "rmtab", "xtab"):
        Path("/var/lib/nfs", name).touch()
    do("mount", "-t", "ext4", "/dev/ubda", "/mnt/export")
    do("mount", "-t", "nfsd", "nfsd", "/proc/fs/nfsd")
    options = "rw,no_root_squash,insecure,sync,no_subtree_check,fsid=0"
    subprocess.run([f"{tools}/usr/sbin/exportfs", "-i", "-o", options, "*:/mnt/export"], env=libraries, check=True)
    subprocess.run([f"{tools}/usr/sbin/rpc.mountd", "-N", "3"], env=libraries, check=True)
    nfsd = [f"{tools}/usr/sbin/rpc.nfsd", "-N", "3", "-V", "4.2", "-G", "10", "-L", told["lease"], "4"]
    subprocess.run(nfsd, env=libraries, check=True)


def mount(told: dict[str, str]) -> None:
    load(Path(told["modules"]), "kernel/fs/nfs/nfsv4.ko", set())
    options = f"addr={told['server']},clientaddr={told['address']},vers=4.2,{told['options'].replace(';', ',')}"
    until = time.monotonic() + MOUNTS_WITHIN_S
    while subprocess.run(["mount", "-i", "-t", "nfs4", f"{told['server']}:/", "/mnt/root", "-o", options], check=False).returncode:
        if time.monotonic() > until:
            sys.exit("no mount")
        time.sleep(1)


def load(modules: Path, name: str, loaded: set[str]) -> None:
    """Loads a module of the kernel after those that it needs."""
    needs = {line.partition(":")[0]: line.partition(":")[2].split() for line in (modules / "modules.dep").read_text().splitlines()}
    if name in loaded:
        return
    loaded.add(name)
    for other in reversed(needs[name]):
        load(modules, other, loaded)
    handle = os.open(modules / name, os.O_RDONLY)
    if ctypes.CDLL(None, use_errno=True).syscall(FINIT_MODULE, handle, b"", 0):
        print(f"{name}: {os.strerror(ctypes.get_errno())}", file=sys.stderr)
    os.close(handle)


def follow(post: Path) -> None:
    post.mkdir()
    (post / "ready").touch()
    seen: set[Path] = set()
    running: dict[Path, subprocess.Popen[bytes]] = {}
    while True:
        for path in sorted(set(post.glob("*.command")) - seen):
            seen.add(path)
            asked = json.loads(path.read_text())
            with path.with_suffix(".output").open("wb") as output, path.with_suffix(".error").open("wb") as error:
                environment = {**os.environ, **asked["environment"]}
                running[path] = subprocess.Popen(asked["command"], stdout=output, stderr=error, stdin=subprocess.DEVNULL, env=environment)
        for path, process in list(running.items()):
            if (code := process.poll()) is not None:
                del running[path]
                path.with_suffix(".part").write_text(str(code))
                path.with_suffix(".part").rename(path.with_suffix(".code"))
        time.sleep(0.05)


def do(*command: str) -> None:
    subprocess.run(command, check=True)


if __name__ == "__main__":
    main()
