#!/usr/bin/env python
"""Kills a run with SIGKILL at random moments and starts it again, until it ends; the digests must be those of an undisturbed run.

    python scripts/kill_and_resume.py --kills 30       # rounds of up to three kills; some twenty minutes on two cores

Each round has its own artifact root. Every other kill takes the whole process group (as a machine's end would), the rest only the main
process, whose workers must notice and end by themselves. Prints a table; exits with 1 on any difference or leftover process.
"""

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

PROJECT = Path(__file__).resolve().parent.parent
EXPERIMENT = "mini"
ONE_MINUTE = ("--set", "web_pages=3000", "--set", "pages=200", "--set", "train_tokens=500000")


def start(root: Path, settings: Sequence[str] = ()) -> subprocess.Popen[bytes]:
    """Starts the experiment in a session of its own."""
    command = [sys.executable, "-m", "craw4llm", "run", EXPERIMENT, *settings, "--root", str(root), "--jobs", "2"]
    environment = os.environ | {"CRAW4LLM_EXPERIMENTS": str(PROJECT / "tests" / "experiments")}
    with (root.parent / f"{root.name}.log").open("ab") as log:
        return subprocess.Popen(command, cwd=PROJECT, env=environment, stdout=log, stderr=log, start_new_session=True)


def digests(root: Path) -> dict[str, str]:
    """`<stage>/<fingerprint>` -> digest of every finished artifact."""
    return {
        f"{path.parent.parent.name}/{path.parent.name}": json.loads(path.read_text())["digest"]
        for path in sorted(root.glob("*/*/manifest.json"))
        if not path.parent.name.startswith(".")
    }


def members(group: int) -> list[int]:
    """Living processes of a process group."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(fields[2]) == group and fields[0] != "Z":
            found.append(int(stat.parent.name))
    return found


def undisturbed(root: Path, settings: Sequence[str] = ()) -> tuple[float, dict[str, str]]:
    """Seconds of a run that nothing disturbs, and its digests."""
    began = time.monotonic()
    process = start(root, settings)
    if process.wait(900) != 0:
        raise SystemExit(f"the undisturbed run failed: see {root.parent / (root.name + '.log')}")
    return time.monotonic() - began, digests(root)


def disturbed(
    root: Path, kills: int, seconds: float, draw: random.Random, settings: Sequence[str] = ()
) -> tuple[list[str], int, dict[str, str]]:
    """Runs with up to `kills` kills. Returns (what was done, processes left behind, digests at the end)."""
    done, left = [], 0
    for number in range(kills):
        process = start(root, settings)
        moment = draw.uniform(0.3, seconds * 0.7)
        try:
            process.wait(moment)
            done.append("ended before the kill")
            break
        except subprocess.TimeoutExpired:
            pass
        group = number % 2 == 0
        if group:
            os.killpg(process.pid, signal.SIGKILL)
        else:
            process.kill()
        process.wait()
        done.append(f"{'group' if group else 'main'} at {moment:.1f} s")
        deadline = time.monotonic() + 5
        while members(process.pid) and time.monotonic() < deadline:
            time.sleep(0.1)
        stragglers = members(process.pid)
        left += len(stragglers)
        for pid in stragglers:
            os.kill(pid, signal.SIGKILL)
    process = start(root, settings)
    if process.wait(900) != 0:
        done.append("THE LAST RUN FAILED")
    return done, left, digests(root)


def main() -> None:
    """Parses the command line and runs the rounds."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=30, help="in all")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    draw = random.Random(options.seed)
    faults = 0
    with tempfile.TemporaryDirectory() as folder:
        seconds, wanted = undisturbed(Path(folder) / "undisturbed", ONE_MINUTE)
        print(f"undisturbed: {len(wanted)} artifacts in {seconds:.1f} s")
        kills = rounds = 0
        while kills < options.kills:
            rounds += 1
            done, left, got = disturbed(Path(folder) / f"round{rounds}", min(3, options.kills - kills), seconds, draw, ONE_MINUTE)
            kills += sum(" at " in what for what in done)
            equal = got == wanted
            faults += (not equal) + left
            print(f"round {rounds}: {', '.join(done)}; processes left {left}; digests {'equal' if equal else 'DIFFER'}", flush=True)
        print(f"{kills} kills in {rounds} rounds, {faults} faults")
    raise SystemExit(1 if faults else 0)


if __name__ == "__main__":
    main()
