"""Launchers and trial scripts by plain name, and a Slurm of its own for the tests that need one."""

import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import airflow_env  # noqa: F401  its settings, before a test of this folder, the first ones, brings Airflow in
import pytest

PROJECT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(PROJECT / "plugins"), str(PROJECT / "scripts")]

from local_slurm import LocalSlurm, missing  # noqa: E402


@pytest.fixture(scope="session")
def slurm() -> Iterator[LocalSlurm]:
    """Two nodes, whose clients this process and its children find."""
    if lacking := missing():
        pytest.skip(f"no Slurm here: {', '.join(lacking)} missing (Debian: apt install slurmctld slurmd slurm-client munge)")
    folder = Path(tempfile.mkdtemp(prefix="slurm-"))
    try:
        with LocalSlurm(folder, nodes=2) as started:
            os.environ.update(started.environment)
            yield started
    finally:
        for name in started.environment if "started" in locals() else ():
            os.environ.pop(name, None)
        shutil.rmtree(folder, ignore_errors=True)
