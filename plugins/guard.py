"""Runs one command for as long as somebody wants it: ends the command's whole process group when the other end of stdin is closed.

    python guard.py GRACE_S COMMAND [ARGUMENT ...]        started as the leader of a process group of its own

An Airflow task that is marked failed has five seconds before it is killed itself, too short for a training run that saves first; a task
that was killed with -9 can end nothing. So this small process stands between the two. It notices that the task is gone, or wants the
command to stop, by its stdin; sends SIGTERM to the group, and SIGKILL to what is left of it after GRACE_S seconds. Else it exits as the
command did: with the same code, or by the same signal. Standard library only, and nothing that takes long to import.
"""

import contextlib
import os
import select
import signal
import subprocess
import sys

LOOK_EVERY_S = 0.1


def main() -> None:
    grace_s, command = float(sys.argv[1]), sys.argv[2:]
    assert os.getpgid(0) == os.getpid(), "guard.py must lead a process group of its own (start_new_session=True)"
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, _stay)  # a handler, not SIG_IGN, which the command would inherit
    child = subprocess.Popen(command, stdin=subprocess.DEVNULL)
    wanted = True
    while child.poll() is None:
        if not select.select([0], [], [], LOOK_EVERY_S)[0] or os.read(0, 4096):
            continue
        wanted = False
        break
    if not wanted:
        os.killpg(0, signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(grace_s)
        os.killpg(0, signal.SIGKILL)  # this process too
    code = child.returncode
    if code < 0:
        if -code not in (signal.SIGKILL, signal.SIGSTOP):
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    sys.exit(code)


def _stay(number: int, frame: object) -> None:
    """Who signals the group means the command; this process stays to see it end."""


if __name__ == "__main__":
    main()
