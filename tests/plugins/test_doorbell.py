"""The scheduler's wait ends at once when the API server has answered a change, and after its time when nobody rings."""

import asyncio
import os
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from doorbell import DOORBELL, Doorbell, RingsAfterChanges, ring


@pytest.fixture
def bell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Doorbell:
    os.mkfifo(tmp_path / "doorbell")
    monkeypatch.setenv(DOORBELL, str(tmp_path / "doorbell"))
    return Doorbell()


def rung(bell: Doorbell) -> bool:
    """Whether the bell has been rung since the last time."""
    began = time.monotonic()
    bell.wait(0.2)
    return time.monotonic() - began < 0.15


def test_a_wait_ends_when_the_bell_rings(bell: Doorbell) -> None:
    threading.Timer(0.1, ring).start()
    began = time.monotonic()
    bell.wait(60)
    assert 0.05 < time.monotonic() - began < 30


def test_several_rings_end_one_wait(bell: Doorbell) -> None:
    for _ in range(3):
        ring()
    assert rung(bell) and not rung(bell)


def test_a_bell_that_nobody_hears_is_never_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    os.mkfifo(tmp_path / "doorbell")
    monkeypatch.setenv(DOORBELL, str(tmp_path / "doorbell"))
    ring()  # nobody listens
    bell = Doorbell()
    for _ in range(100_000):  # more than the pipe holds
        ring()
    assert rung(bell)


@pytest.mark.parametrize("path", ["", "missing"])
def test_without_a_bell_a_wait_takes_its_time(path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(DOORBELL, str(tmp_path / path) if path else "")
    ring()
    began = time.monotonic()
    Doorbell().wait(0.2)
    assert time.monotonic() - began >= 0.19


@pytest.mark.parametrize(
    ("method", "path", "rings"),
    [
        ("PATCH", "/execution/task-instances/0192/state", True),  # a task has ended
        ("POST", "/api/v2/dags/tiny/dagRuns", True),
        ("PATCH", "/api/v2/dags/tiny/dagRuns/r/taskInstances/plan/-1/hitlDetails", True),
        ("POST", "/api/v2/dags/tiny/clearTaskInstances", True),
        ("GET", "/api/v2/dags/tiny/dagRuns", False),
        ("PUT", "/execution/task-instances/0192/heartbeat", False),
        ("PATCH", "/execution/task-instances/0192/run", False),
        ("POST", "/execution/xcoms/tiny/run/plan/key", False),
        ("GET", "/craw4llm/", False),
    ],
)
def test_what_rings_and_that_it_does_so_behind_the_answer(method: str, path: str, rings: bool, bell: Doorbell) -> None:
    async def answered(scope: Any, receive: Any, send: Any) -> None:
        assert not rung(bell), "the change is not in the database yet"

    asyncio.run(RingsAfterChanges(answered)({"type": "http", "method": method, "path": path}, None, None))  # type: ignore[arg-type]
    assert rung(bell) == rings


def test_other_than_requests_pass(bell: Doorbell) -> None:
    async def answered(scope: Any, receive: Any, send: Any) -> None: ...

    asyncio.run(RingsAfterChanges(answered)({"type": "lifespan"}, None, None))  # type: ignore[arg-type]
    assert not rung(bell)
