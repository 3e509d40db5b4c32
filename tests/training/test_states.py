"""Saved states: whole or not at all, at every point at which a process can be killed."""

import contextlib
import json
import os
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from craw4llm.errors import StageError
from training import states as module
from training.states import States, differences


def states_in(folder: Path, said: list[str] | None = None, **options: Any) -> States:
    lines = said if said is not None else []
    return States(folder / "states", {"config": {"seed": 124}}, say=lines.append, **options)


def state_of(step: int) -> dict[str, dict[str, torch.Tensor]]:
    return {"model": {"w": torch.full((5,), float(step))}, "taken": {"w": torch.tensor(float(step))}}


def save(states: States, step: int, state: Any = None, *, wait: bool = True) -> None:
    states.save(step, state or state_of(step), {"changes": [f"at {step}"]}, wait=wait)


def newest(states: States, state: Any = None) -> Any:
    """Facts and tensors of the newest state, or None."""
    tensors = state or state_of(-1)
    facts = states.newest(tensors)
    return None if facts is None else facts | tensors


def steps_in(folder: Path) -> list[int]:
    return sorted(int(p.name[5:]) for p in (folder / "states").iterdir())


def test_newest_is_what_was_saved(tmp_path: Path) -> None:
    states = states_in(tmp_path)
    assert newest(states) is None
    state = state_of(7)
    save(states, 7, state, wait=False)
    state["model"]["w"].zero_()  # training goes on while the copy is written
    states.finish()
    tensors = state_of(-1)
    assert states_in(tmp_path).newest(tensors) == {"step": 7, "changes": ["at 7"]}
    assert tensors["model"]["w"].tolist() == [7.0] * 5
    assert tensors["taken"]["w"].item() == 7


@pytest.mark.parametrize(
    ("keep", "milestone", "left"), [(1, 0, [6]), (2, 0, [5, 6]), (3, 0, [4, 5, 6]), (2, 3, [3, 5, 6]), (9, 0, [1, 2, 3, 4, 5, 6])]
)
def test_the_last_few_and_the_milestones_are_kept(tmp_path: Path, keep: int, milestone: int, left: list[int]) -> None:
    states = states_in(tmp_path, keep=keep, milestone=milestone)
    for step in range(1, 7):
        save(states, step)
    assert steps_in(tmp_path) == left


@pytest.mark.parametrize("damage", ["cut", "flipped", "no manifest", "no state", "no metadata", "manifest cut", "other form"])
def test_a_damaged_newest_state_is_skipped_with_a_message(tmp_path: Path, damage: str) -> None:
    states = states_in(tmp_path)
    for step in (3, 4):
        save(states, step)
    folder = tmp_path / "states" / "step-00000004"
    state, manifest = folder / "__0_0.distcp", folder / "manifest.json"
    content = state.read_bytes()
    if damage == "cut":
        state.write_bytes(content[:-1])
    elif damage == "flipped":
        state.write_bytes(content[:200] + bytes([content[200] ^ 1]) + content[201:])
    elif damage == "no manifest":
        manifest.unlink()
    elif damage == "no state":
        state.unlink()
    elif damage == "no metadata":
        (folder / ".metadata").unlink()
    elif damage == "other form":  # of the version that wrote one file with torch.save
        manifest.write_text(json.dumps({"step": 4, "identity": {"config": {"seed": 124}}, "size_bytes": 3, "sha256": "0"}))
    else:
        manifest.write_text(manifest.read_text()[:10])
    said: list[str] = []
    states = states_in(tmp_path, said)
    found = newest(states)
    assert found["step"] == 3 and found["model"]["w"].tolist() == [3.0] * 5
    assert len(said) == 1
    assert said[0].startswith(f"train: skipped a damaged state: {folder} (")
    save(states, 4)
    assert steps_in(tmp_path) == [3, 4]
    assert newest(states_in(tmp_path))["step"] == 4


def test_where_all_are_damaged_nothing_begins_anew_in_silence(tmp_path: Path) -> None:
    states = states_in(tmp_path)
    for step in (3, 4):
        save(states, step)
        (tmp_path / "states" / f"step-0000000{step}" / "__0_0.distcp").write_bytes(b"not a state")
    with pytest.raises(StageError, match=r"no saved state can be read: .*step-00000004 .*step-00000003 .*delete .*the run begins anew"):
        newest(states_in(tmp_path))
    assert steps_in(tmp_path) == [3, 4]


def test_what_is_not_finite_is_not_saved(tmp_path: Path) -> None:
    states = states_in(tmp_path)
    save(states, 3)
    for bad in (float("nan"), float("inf")):
        state = state_of(4)
        state["model"]["w"][2] = bad
        with pytest.raises(StageError, match=r"model\.w is not finite before step 4; the last saved state is the one before"):
            save(states, 4, state)
    huge = state_of(5)
    huge["model"]["w"].fill_(3e38)  # the sum overflows, no element does
    save(states, 5, huge)
    assert steps_in(tmp_path) == [3, 5]


def test_another_run_is_named(tmp_path: Path) -> None:
    save(states_in(tmp_path), 3)
    other = States(tmp_path / "states", {"config": {"seed": 125}})
    with pytest.raises(StageError, match=r"step-00000003 was saved by another run: config\.seed was 124, now 125; delete"):
        newest(other)


def test_differences() -> None:
    assert differences({"a": 1, "b": {"c": 2}}, {"a": 1, "b": {"c": 2}}) == []
    assert differences({"a": 1, "b": {"c": 2, "d": 0}}, {"b": {"c": 3, "d": 0}, "e": 1}) == [
        "a was 1, now None",
        "b.c was 2, now 3",
        "e was None, now 1",
    ]


def test_the_error_of_a_background_write_is_raised(tmp_path: Path) -> None:
    (tmp_path / "states").write_text("a file where a folder should be")
    states = states_in(tmp_path)
    save(states, 3, wait=False)
    with pytest.raises(OSError):
        states.finish()
    states.finish()  # said once


@pytest.fixture
def _one_thread() -> Iterator[None]:
    """A forked child has no pool of threads to hand work to."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def in_child(work: Callable[[], None]) -> int:
    """Starts `work` in a forked process; returns its id. What it raises makes exit code 1."""
    pid = os.fork()
    if pid == 0:
        with contextlib.suppress(BaseException):
            work()
            os._exit(0)
        os._exit(1)
    return pid


def large(step: int) -> dict[str, dict[str, torch.Tensor]]:
    return {"model": {"w": torch.full((200_000,), float(step))}}


@pytest.mark.usefixtures("_one_thread")
def test_kill_9_during_a_save_at_ten_points(tmp_path: Path) -> None:
    """At ten moments within a save the process is killed; the next one finds the last save that was reported, or a later one."""
    last, began = 0, time.monotonic()
    save(states_in(tmp_path), 0, large(0))
    save(states_in(tmp_path), 1, large(1))
    save_s = time.monotonic() - began
    for point in range(10):
        receive, send = os.pipe()

        def saves(send: int = send) -> None:
            said: list[str] = []
            states = states_in(tmp_path, said)
            state = newest(states, large(-1))
            assert state["model"]["w"].eq(state["step"]).all() and not said
            step = int(state["step"])
            while True:
                os.write(send, f"{step}\n".encode())
                step += 1
                save(states, step, large(step))

        pid = in_child(saves)
        os.close(send)
        with open(receive) as stream:
            found = int(stream.readline())
            assert found >= last, f"point {point}: saved {last}, found {found}"
            for _ in range(2):
                last = int(stream.readline())
            time.sleep(save_s / 2 * point / 10)
            os.kill(pid, signal.SIGKILL)
            rest = stream.read().split()
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGKILL
        last = int(rest[-1]) if rest else last
    assert last >= 20


@pytest.mark.usefixtures("_one_thread")
@pytest.mark.parametrize("call", range(12))
def test_ended_before_every_call_of_a_save(tmp_path: Path, call: int) -> None:
    """The same, exactly: the process ends before the n-th of the calls that change the folder."""
    places = [(os, "fsync"), (Path, "mkdir"), (Path, "rename"), (Path, "open"), (Path, "unlink"), (shutil, "rmtree"), (torch, "save")]
    places += [(module, "_fault"), (module, "_flush_folder"), (module._Hashed, "write")]

    def saves() -> None:
        states = states_in(tmp_path)
        save(states, 1)
        save(states, 2)
        calls = 0

        def counted(function: Any) -> Any:
            def counting(*args: Any, **kwargs: Any) -> Any:
                nonlocal calls
                if calls == call:
                    os._exit(9)
                calls += 1
                return function(*args, **kwargs)

            return counting

        for owner, name in places:
            setattr(owner, name, counted(getattr(owner, name)))
        save(states, 3)

    assert os.waitstatus_to_exitcode(os.waitpid(in_child(saves), 0)[1]) == 9
    said: list[str] = []
    found = newest(states_in(tmp_path, said))
    assert not said
    assert found["step"] in (2, 3)
    assert found["model"]["w"].eq(found["step"]).all()
    whole = [json.loads(p.read_text())["step"] for p in (tmp_path / "states").glob("step-*/manifest.json")]
    assert sorted(whole)[-2:] in ([1, 2], [2, 3])
