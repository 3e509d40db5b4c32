"""The store: whole or nothing, one builder at a time, clear words about the disk."""

import json
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from craw4llm import artifact as artifact_module
from craw4llm.artifact import Result, Store
from craw4llm.errors import ArtifactError, StorageError


def put(store: Store, fingerprint: str = "aaaaaaaaaaaa", text: str = "hello", **extra: object) -> tuple[object, bool]:
    def write(out: Path) -> Result:
        (out / "sub").mkdir()
        (out / "sub" / "a.txt").write_text(text)
        (out / "speed.json").write_text(str(time.time_ns()))
        return Result(counts={"lines": (1, "lines")}, volatile=("speed.json",))

    return store.build("demo", fingerprint, version=1, config={"n": 1}, inputs={}, write=write, **extra)  # type: ignore[arg-type]


def test_an_artifact_is_built_once_and_verifies(tmp_path: Path) -> None:
    store = Store(tmp_path)
    first, built = put(store)
    again, built_again = put(store)
    assert (built, built_again) == (True, False)
    assert first.manifest == again.manifest
    assert first.count("lines") == 1
    assert first.verify() == []
    assert not list((tmp_path / "demo").glob(".partial-*"))


def test_the_digest_leaves_volatile_files_out(tmp_path: Path) -> None:
    one, _ = put(Store(tmp_path / "one"))
    two, _ = put(Store(tmp_path / "two"))
    other, _ = put(Store(tmp_path / "three"), text="other")
    assert one.digest == two.digest != other.digest


@pytest.mark.parametrize(
    ("damage", "fault"),
    [
        (lambda path: (path / "sub" / "a.txt").write_text("HELLO"), "SHA-256"),
        (lambda path: (path / "sub" / "a.txt").write_text("hello!"), "6 bytes"),
        (lambda path: (path / "sub" / "a.txt").unlink(), "missing"),
        (lambda path: (path / "b.txt").write_text("x"), "not in the manifest"),
    ],
)
def test_verify_finds_every_kind_of_damage(tmp_path: Path, damage, fault: str) -> None:
    built, _ = put(Store(tmp_path))
    damage(built.path)
    faults = built.verify()
    assert len(faults) == 1
    assert fault in faults[0]


def test_a_failed_stage_leaves_no_artifact_and_the_next_attempt_starts_clean(tmp_path: Path) -> None:
    store = Store(tmp_path)

    def fail(out: Path) -> Result:
        (out / "half.txt").write_text("half")
        raise RuntimeError("stop")

    with pytest.raises(RuntimeError):
        store.build("demo", "aaaaaaaaaaaa", version=1, config={}, inputs={}, write=fail)
    assert store.find("demo", "aaaaaaaaaaaa") is None
    built, _ = put(store)
    assert not (built.path / "half.txt").exists()


def test_a_stage_that_resumes_finds_what_it_wrote(tmp_path: Path) -> None:
    store = Store(tmp_path)

    def step(out: Path) -> Result:
        if not (out / "state").exists():
            (out / "state").write_text("1")
            raise RuntimeError("killed")
        return Result()

    with pytest.raises(RuntimeError):
        store.build("demo", "aaaaaaaaaaaa", version=1, config={}, inputs={}, write=step, keep_partial=True)
    built, _ = store.build("demo", "aaaaaaaaaaaa", version=1, config={}, inputs={}, write=step, keep_partial=True)
    assert (built.path / "state").read_text() == "1"


def test_a_missing_artifact_is_named(tmp_path: Path) -> None:
    with pytest.raises(ArtifactError, match="crawl bbbbbbbbbbbb is not in"):
        Store(tmp_path).open("crawl", "bbbbbbbbbbbb")


def test_a_manifest_of_another_schema_is_refused(tmp_path: Path) -> None:
    built, _ = put(Store(tmp_path))
    (built.path / "manifest.json").write_text(json.dumps({**built.manifest, "schema": 99}))
    with pytest.raises(ArtifactError, match="schema 99"):
        Store(tmp_path).find("demo", "aaaaaaaaaaaa")


def _build_slowly(root: Path, started: "multiprocessing.synchronize.Event", counter: Path) -> None:
    def write(out: Path) -> Result:
        with counter.open("a") as stream:
            stream.write("built\n")
        started.set()
        time.sleep(1.0)
        (out / "a.txt").write_text("x")
        return Result()

    Store(root).build("demo", "cccccccccccc", version=1, config={}, inputs={}, write=write)


def test_two_runners_build_an_artifact_once(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    started, counter = context.Event(), tmp_path / "count"
    both = [context.Process(target=_build_slowly, args=(tmp_path, started, counter)) for _ in range(2)]
    for process in both:
        process.start()
    for process in both:
        process.join(20)
        assert process.exitcode == 0
    assert counter.read_text() == "built\n"


def test_the_lock_of_a_killed_owner_is_taken_over(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    started, counter = context.Event(), tmp_path / "count"
    process = context.Process(target=_build_slowly, args=(tmp_path, started, counter))
    process.start()
    assert started.wait(10)
    assert process.pid is not None
    os.kill(process.pid, signal.SIGKILL)
    process.join(10)
    began = time.monotonic()
    _build_slowly(tmp_path, started, counter)
    assert time.monotonic() - began < 5
    assert counter.read_text() == "built\n" * 2


def test_a_living_owner_on_another_host_is_respected_and_a_dead_one_is_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = Store(tmp_path)
    lock = tmp_path / "locks" / "demo-aaaaaaaaaaaa.lock"
    lock.parent.mkdir(parents=True)
    monkeypatch.setattr(artifact_module, "DEAD_AFTER_S", 1.5)
    lock.write_text(json.dumps({"host": "elsewhere.example", "pid": 1, "seen": time.time()}))
    began = time.monotonic()
    put(store)
    assert 1.0 < time.monotonic() - began < 10


def test_an_unwritable_root_is_one_clear_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "file"
    file.write_text("")
    with pytest.raises(StorageError, match="choose another --root"):
        put(Store(file / "root"))

    def refuse(*args: object, **kwargs: object) -> None:
        raise PermissionError(13, "Permission denied", str(tmp_path / "demo"))

    monkeypatch.setattr(Path, "mkdir", refuse)
    with pytest.raises(StorageError, match=r"Permission denied.*choose another --root"):
        put(Store(tmp_path))


def test_a_full_disk_is_one_clear_error_and_leaves_no_artifact(tmp_path: Path) -> None:
    """A real full disk: a 1 MiB file system in memory, where this machine lets us mount one."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(disk)], capture_output=True)
    if mounted.returncode:
        pytest.skip("no permission to mount a small file system here")
    try:
        store = Store(disk)

        def write(out: Path) -> Result:
            (out / "big.bin").write_bytes(b"x" * 4_000_000)
            return Result()

        with pytest.raises(StorageError, match=r"no space left.*--root"):
            store.build("demo", "dddddddddddd", version=1, config={}, inputs={}, write=write)
        assert store.find("demo", "dddddddddddd") is None
        put(store)  # a small artifact still goes in once the next attempt clears the large one away
    finally:
        subprocess.run(["umount", str(disk)], check=True)


def test_the_command_line_says_it_in_one_line(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("")
    done = subprocess.run(
        [sys.executable, "-m", "craw4llm", "run", "tiny", "--set", "corpus=synthetic", "--root", str(file / "root")],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 6
    assert "Traceback" not in done.stderr
    assert "choose another --root" in done.stderr
