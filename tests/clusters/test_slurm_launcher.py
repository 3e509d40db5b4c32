"""The launcher `slurm` on a real Slurm of this machine: what ends, moves or loses a job, and what becomes of it."""

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from local_slurm import LocalSlurm

from launchers import Job, JobId, launcher_named
from placement import PlacementError
from slurm_launcher import SlurmLauncher, job_name, sbatch_options, time_limit_s

PROJECT = Path(__file__).resolve().parents[2]

# Counts its starts, says its line, goes on from what it saved; stopped, it saves and ends with 75 as a stage does.
STAGE = """
import os, pathlib, signal, sys, time
folder, seconds = pathlib.Path(sys.argv[1]), float(sys.argv[2])
with (folder / "starts").open("a") as stream:
    stream.write(f"{os.getpid()}\\n")
signal.signal(signal.SIGTERM, lambda *_: os._exit(75))
done = folder / "done"
while (at := float(done.read_text()) if done.exists() else 0.0) < seconds and not (folder / "enough").exists():
    time.sleep(0.1)
    done.with_name("new").write_text(str(at + 0.1))
    done.with_name("new").replace(done)
print("made by", os.environ.get("SECRET"), flush=True)
"""


@pytest.fixture
def placement(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    def write(text: str) -> None:
        path = tmp_path / f"placement{time.monotonic_ns()}.toml"
        path.write_text(text)
        monkeypatch.setenv("CRAW4LLM_PLACEMENT", str(path))

    return write


@pytest.fixture(autouse=True)
def nothing_left(request: pytest.FixtureRequest) -> Iterator[None]:
    yield
    if "slurm" in request.fixturenames:
        slurm = request.getfixturevalue("slurm")
        slurm.ask("scancel", *slurm.ask("squeue", "-h", "-o", "%A").split())
        wait_for(lambda: not slurm.ask("squeue", "-h"), 60)


def job(tmp_path: Path, seconds: float, **more: object) -> Job:
    work = tmp_path / "work"
    work.mkdir(parents=True, exist_ok=True)
    environment = {**os.environ, "SECRET": "a secret"}
    command = [sys.executable, "-c", STAGE, str(work), str(seconds)]
    return Job(
        folder=tmp_path / "jobs" / "crawl", command=command, cwd=str(tmp_path), environment=environment, **{"stage": "crawl", **more}
    )  # type: ignore[arg-type]


def starts(tmp_path: Path) -> int:
    path = tmp_path / "work" / "starts"
    return len(path.read_text().splitlines()) if path.exists() else 0


def ended(launcher: SlurmLauncher, job_id: JobId, seconds: float = 40.0) -> str:
    wait_for(lambda: launcher.status(job_id) not in ("running", "ending"), seconds)
    return launcher.status(job_id)


def wait_for(true: Callable[[], bool], seconds: float = 20.0) -> None:
    until = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < until, "it did not happen in time"
        time.sleep(0.1)


def slurm_state(slurm: LocalSlurm, job_id: JobId) -> str:
    return slurm.ask("squeue", "-h", "-j", str(job_id["slurm_job"]), "-o", "%T").strip()


def restarts(slurm: LocalSlurm, job_id: JobId) -> int:
    found = re.search(r"Restarts=(\d+)", slurm.ask("scontrol", "show", "job", str(job_id["slurm_job"])))
    return int(found[1]) if found else -1  # no answer: fewer than any


def test_a_job_runs_and_a_second_submit_finds_it(slurm: LocalSlurm, tmp_path: Path) -> None:
    launcher = launcher_named("slurm")
    first = launcher.submit(job(tmp_path, 1.5))
    assert launcher_named("slurm").submit(job(tmp_path, 1.5)) == first  # another process, while it runs or waits
    (Path(first["folder"]) / "id.json").unlink()  # its starter died between sbatch and the id
    assert launcher_named("slurm").submit(job(tmp_path, 1.5))["slurm_job"] == first["slurm_job"]
    assert ended(launcher, first) == "succeeded"
    outcome = launcher.result(first)
    assert (outcome.code, outcome.stopped, outcome.output) == (0, "", ("made by a secret",))
    wait_for(lambda: "COMPLETED" in launcher.result(first).scheduler)
    assert starts(tmp_path) == 1
    lines, _ = launcher.tail(first, None)
    assert "made by a secret" in lines and any(line.startswith(f"slurm: job {first['slurm_job']} is ") for line in lines)
    kept = "".join(path.read_text() for path in Path(first["folder"]).rglob("*.json"))
    assert "a secret" not in kept and json.loads((Path(first["folder"]) / "slurm.json").read_text())["JobState"] == "COMPLETED"


def test_scancel_is_a_failure_that_says_so(slurm: LocalSlurm, tmp_path: Path) -> None:
    launcher = launcher_named("slurm")
    job_id = launcher.submit(job(tmp_path, 60))
    wait_for(lambda: starts(tmp_path) == 1)
    subprocess.run(["scancel", str(job_id["slurm_job"])], check=True)
    assert ended(launcher, job_id) == "failed"
    assert "CANCELLED" in launcher.result(job_id).scheduler
    again = launcher.submit(job(tmp_path, 1))  # the next try of the task goes on from what was saved
    assert again["slurm_job"] != job_id["slurm_job"] and ended(launcher, again) == "succeeded" and starts(tmp_path) == 2


@pytest.mark.slow
def test_requeued_and_preempted_jobs_are_the_same_job(slurm: LocalSlurm, tmp_path: Path) -> None:
    launcher = launcher_named("slurm")
    job_id = launcher.submit(job(tmp_path, 600))
    wait_for(lambda: starts(tmp_path) == 1)
    subprocess.run(["scontrol", "requeue", str(job_id["slurm_job"])], check=True)
    wait_for(lambda: (Path(job_id["folder"]) / "exit.json").exists() or starts(tmp_path) == 2)
    assert launcher.status(job_id) == "running"
    wait_for(lambda: starts(tmp_path) == 2, 60)
    # more urgent work takes both nodes
    subprocess.run(
        ["sbatch", "--partition=urgent", "--nodes=2", "--output=/dev/null", "--wrap=sleep 2"], check=True, capture_output=True, cwd=tmp_path
    )
    wait_for(lambda: slurm_state(slurm, job_id) == "PENDING", 40)
    assert launcher.status(job_id) == "running"
    (tmp_path / "work" / "enough").touch()
    assert ended(launcher, job_id, 60) == "succeeded"
    assert starts(tmp_path) == 3 and launcher.result(job_id).output == ("made by a secret",)


def test_a_job_that_waits_leaves_the_queue_when_the_task_is_stopped(slurm: LocalSlurm, tmp_path: Path) -> None:
    launcher = launcher_named("slurm")
    subprocess.run(
        ["sbatch", "--nodes=2", "--exclusive", "--output=/dev/null", "--job-name=filler", "--wrap=sleep 60"],
        check=True,
        capture_output=True,
    )
    job_id = launcher.submit(job(tmp_path, 60))
    launcher.attach(job_id, "me")
    assert slurm_state(slurm, job_id) == "PENDING" and launcher.status(job_id) == "running"
    launcher.release(job_id, "me")
    assert ended(launcher, job_id) == "failed" and starts(tmp_path) == 0
    slurm.ask("scancel", "--name=filler")


def test_cancel_and_release_end_a_running_job(slurm: LocalSlurm, tmp_path: Path) -> None:
    launcher = launcher_named("slurm")
    job_id = launcher.submit(job(tmp_path, 60, reprieve_s=0.5))
    wait_for(lambda: starts(tmp_path) == 1)
    launcher.attach(job_id, "me")
    launcher.release(job_id, "me")
    assert ended(launcher, job_id) == "failed"
    assert (launcher.result(job_id).code, launcher.result(job_id).stopped) == (75, "released")


def test_without_the_controller_a_job_is_neither_lost_nor_doubled(slurm: LocalSlurm, tmp_path: Path) -> None:
    launcher = launcher_named("slurm")
    job_id = launcher.submit(job(tmp_path, 600))
    wait_for(lambda: starts(tmp_path) == 1)
    slurm.kill_controller()
    fresh = launcher_named("slurm")
    assert fresh.status(job_id) == "running"
    with pytest.raises(OSError, match="sbatch"):
        fresh.submit(job(tmp_path / "other", 1))
    assert fresh.submit(job(tmp_path, 600)) == job_id
    slurm.start_controller()
    (tmp_path / "work" / "enough").touch()
    assert ended(launcher, job_id, 60) == "succeeded" and starts(tmp_path) == 1


def test_a_number_that_is_another_jobs_by_now_is_not_taken_for_the_job(slurm: LocalSlurm, tmp_path: Path) -> None:
    launcher = launcher_named("slurm")
    filler = ["sbatch", "--parsable", "--nodes=2", "--exclusive", "--output=/dev/null", "--wrap=sleep 60"]
    numbers = [subprocess.run(filler, check=True, capture_output=True, text=True, cwd=tmp_path).stdout.strip() for _ in range(2)]
    folder = tmp_path / "jobs" / "crawl" / "0001"
    folder.mkdir(parents=True)
    (folder / "settings.json").write_text(json.dumps({"launcher": "slurm", "stage": "crawl"}))
    forgotten = {"launcher": "slurm", "folder": str(folder), "generation": 0, "tag": "", "slurm_job": int(numbers[1])}
    assert launcher.status(forgotten) == "lost"
    launcher.cancel(forgotten)
    assert slurm_state(slurm, forgotten) == "PENDING", "a stranger's job was cancelled"
    assert "UNKNOWN" in launcher.result(forgotten).scheduler


@pytest.mark.slow
def test_before_its_time_limit_a_job_saves_and_queues_again(slurm: LocalSlurm, tmp_path: Path, placement: Callable[[str], None]) -> None:
    # Slurm looks twice a minute, and signals where the time would be up at the next look: from 10 s after the start on
    placement('[slurm.crawl]\ntime = "0-00:01:00"\nsave-before-limit = 20\n')
    launcher = launcher_named("slurm")
    job_id = launcher.submit(job(tmp_path, 600))
    wait_for(lambda: starts(tmp_path) == 1)
    before = restarts(slurm, job_id)  # a controller that has just come back may have queued it once more
    wait_for(lambda: restarts(slurm, job_id) > before, 60)
    assert launcher.status(job_id) == "running" and starts(tmp_path) == 1
    (tmp_path / "work" / "enough").touch()
    assert ended(launcher, job_id, 60) == "succeeded" and starts(tmp_path) == 2


def test_several_nodes_meet_through_torchrun(slurm: LocalSlurm, tmp_path: Path, placement: Callable[[str], None]) -> None:
    placement("[slurm.train]\nnodes = 2\ngpus-per-node = 1\n")
    module = tmp_path / "whoami.py"
    module.write_text(
        "import os, sys, torch.distributed as dist, torch\n"
        "dist.init_process_group('gloo')\n"
        "x = torch.ones(1) * (dist.get_rank() + 1)\n"
        "dist.all_reduce(x)\n"
        "dist.barrier()\n"
        "print('sum', int(x), 'of', dist.get_world_size(), sys.argv[1:], flush=True)\n"
        "dist.destroy_process_group()\n"
    )
    launcher = launcher_named("slurm")
    environment = {**os.environ, "PYTHONPATH": str(tmp_path), "GLOO_SOCKET_IFNAME": "lo"}
    awkward = ["$(touch never)", "a b", "'"]
    job_id = launcher.submit(
        Job(
            folder=tmp_path / "jobs" / "train",
            command=[sys.executable, "-m", "whoami", *awkward],
            cwd=str(tmp_path),
            environment=environment,
            stage="train",
        )
    )
    assert ended(launcher, job_id, 240) == "succeeded"
    assert launcher.result(job_id).output == (f"sum 3 of 2 {awkward!r}",) * 2
    assert not (tmp_path / "never").exists()


def test_options_are_sbatchs_own() -> None:
    assert sbatch_options({"partition": "gpu", "exclusive": True, "hold": False, "ranks-per-node": 4}) == ["--partition=gpu", "--exclusive"]
    with pytest.raises(PlacementError, match="output"):
        sbatch_options({"output": "/tmp/x"})
    with pytest.raises(PlacementError, match="ranks-per-node"):
        SlurmLauncher.on_nodes(["python"], 2, {})


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("90", 5400), ("90:30", 5430), ("1:30:05", 5405), ("2-1", 176_400), ("2-1:30", 178_200), ("0-00:01:00", 60),
        ("", None), ("infinite", None), ("1:2:3:4", None),
    ],
)  # fmt: skip
def test_time_limits_are_read_as_sbatch_reads_them(text: str, seconds: int | None) -> None:
    assert time_limit_s(text) == seconds


@pytest.mark.parametrize("options", ['time = "0-00:02:00"', "time = 2", "time = 10\nsave-before-limit = 600"])
def test_a_job_that_would_save_and_queue_again_for_ever_is_refused(tmp_path: Path, placement: Callable[[str], None], options: str) -> None:
    placement(f"[slurm.crawl]\n{options}\n")
    with pytest.raises(PlacementError, match="save and queue again for ever"):
        launcher_named("slurm").submit(job(tmp_path, 1))
    assert not list(tmp_path.rglob("id.json"))


def test_names_in_the_queue_are_plain_and_tell_folders_apart() -> None:
    one, two = job_name(Path("/a/tïny; rm/0001")), job_name(Path("/b/tïny; rm/0001"))
    assert one != two and one.isascii() and " " not in one and ";" not in one


@pytest.mark.slow
def test_a_model_is_trained_on_two_nodes(slurm: LocalSlurm, tmp_path: Path, placement: Callable[[str], None]) -> None:
    placement("[slurm.train]\nnodes = 2\nranks-per-node = 1\n")
    environment = {
        **os.environ,
        "PYTHONPATH": str(PROJECT),
        "CRAW4LLM_EXPERIMENTS": str(PROJECT / "tests" / "experiments"),
        "CRAW4LLM_ROOT": str(tmp_path / "root"),
        "GLOO_SOCKET_IFNAME": "lo",
    }
    run = [sys.executable, "-m", "craw4llm", "run", "--json", "--jobs=1"]
    for stage in (
        "corpus",
        "scorer",
        "quality.crawl",
        "quality.equal_pages.select",
        "tokenizer",
        "heldout",
        "quality.equal_pages.tokenize",
    ):
        subprocess.run([*run, f"--only={stage}", "mini"], cwd=PROJECT, env=environment, check=True, capture_output=True)
    launcher = launcher_named("slurm")
    command = [*run, "--only=quality.equal_pages.train", "--replicates=1", "--", "mini"]
    job_id = launcher.submit(Job(folder=tmp_path / "train", command=command, cwd=str(PROJECT), environment=environment, stage="train"))
    state = ended(launcher, job_id, 300)
    assert state == "succeeded", (Path(job_id["folder"]) / "log").read_text()
    record = json.loads(launcher.result(job_id).output[-1])
    assert record["built"] and json.loads((Path(record["path"]) / "manifest.json").read_text())["notes"]["ranks"] == 2
