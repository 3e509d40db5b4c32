"""Jobs of the local launcher: they end when told, leave nothing, and never run twice; started as programs, and warm."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

import launchers
import stage_job
import warm_start
from launchers import Job, LocalLauncher, end_jobs, launcher_named

PROJECT = Path(warm_start.__file__).parent.parent
# A stage with a child of its own; both ignore SIGTERM. Writes their process ids.
STUBBORN = """
import os, signal, subprocess, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])  # SIG_IGN is inherited
open("pids.tmp", "w").write(f"{os.getpid()} {child.pid}")
os.rename("pids.tmp", "pids")
time.sleep(600)
"""


def job(tmp_path: Path, code: str, **more: Any) -> Job:
    values: dict[str, Any] = {"grace_s": 0.5, "reprieve_s": 0.3}
    return Job(
        folder=tmp_path / "job", command=[sys.executable, "-c", code], cwd=str(tmp_path), environment=dict(os.environ), **(values | more)
    )


def wait_for(true: Callable[[], Any], seconds: float = 20.0) -> Any:
    until = time.monotonic() + seconds
    while not (found := true()):
        assert time.monotonic() < until, "it did not happen in time"
        time.sleep(0.02)
    return found


def ended(launcher: LocalLauncher, job_id: Any) -> None:
    wait_for(lambda: launcher.status(job_id) not in ("running", "ending"))


def gone(tmp_path: Path) -> bool:
    pids = [int(text) for text in (tmp_path / "pids").read_text().split()]
    return not any(psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE for pid in pids)


@pytest.fixture(autouse=True)
def cold(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(warm_start.SOCKET, raising=False)


def test_a_job_ends_with_its_code_and_what_it_printed(tmp_path: Path) -> None:
    launcher = LocalLauncher()
    job_id = launcher.submit(job(tmp_path, "import sys; print('out'); print('err', file=sys.stderr); sys.exit(3)"))
    assert json.loads(json.dumps(job_id)) == job_id
    ended(launcher, job_id)
    outcome = launcher.result(job_id)
    assert (launcher.status(job_id), outcome.code, outcome.signal, outcome.stopped, outcome.output) == ("failed", 3, None, "", ("out",))
    assert launcher.tail(job_id, None)[0] == ["out", "err"]


def test_a_job_that_is_started_twice_runs_once(tmp_path: Path) -> None:
    launcher = LocalLauncher()
    job_id = launcher.submit(job(tmp_path, "import time; open('runs', 'a').write('x'); time.sleep(0.5)"))
    settings = Path(job_id["folder"]) / "settings.json"
    again = subprocess.run([sys.executable, "-I", "-S", stage_job.__file__, str(settings)], timeout=60, check=False)
    ended(launcher, job_id)
    assert (again.returncode, (tmp_path / "runs").read_text()) == (0, "x")


def test_a_wait_ends_with_the_job(tmp_path: Path) -> None:
    launcher = LocalLauncher()
    job_id = launcher.submit(job(tmp_path, "import time; time.sleep(0.3)"))
    began = time.monotonic()
    launcher.wait(job_id, 0.05)
    assert time.monotonic() - began >= 0.04 and launcher.status(job_id) == "running"
    launcher.wait(job_id, 60)
    assert launcher.status(job_id) == "succeeded"
    launcher.wait(job_id, 60)
    assert time.monotonic() - began < 30
    launcher.wait({**job_id, "host": "another"}, 0.1)  # what runs there is not known here


def test_lines_come_whole_and_once(tmp_path: Path) -> None:
    launcher = LocalLauncher()
    code = (
        "import time, pathlib\nfor i in range(3):\n    print('line', i, end='', flush=True); time.sleep(.1); print(flush=True)\n"
        "print('end', end='')"
    )
    job_id, lines, place = launcher.submit(job(tmp_path, code)), [], None
    while True:
        running = launcher.status(job_id) == "running"
        new, place = launcher.tail(job_id, place)
        lines += new
        if not running:
            break
        time.sleep(0.03)
    assert lines == ["line 0", "line 1", "line 2", "end"]


@pytest.mark.parametrize("how", ["cancel", "release", "signal", "abandoned"])
def test_what_ignores_sigterm_is_killed_with_its_children(tmp_path: Path, how: str) -> None:
    launcher = LocalLauncher()
    job_id = launcher.submit(job(tmp_path, STUBBORN, abandoned_after_s=1.0 if how == "abandoned" else 600.0))
    launcher.attach(job_id, "me")
    wait_for((tmp_path / "pids").exists)
    if how == "cancel":
        launcher.cancel(job_id)
    elif how == "release":
        launcher.release(job_id, "me")
    elif how == "signal":
        os.kill(job_id["pid"], signal.SIGTERM)
    ended(launcher, job_id)
    wanted = {"cancel": "cancelled", "release": "released"}.get(how, how)
    assert (launcher.status(job_id), launcher.result(job_id).stopped, launcher.result(job_id).signal) == ("failed", wanted, 9)
    assert gone(tmp_path)


def test_a_job_that_is_followed_is_not_abandoned_and_another_owner_saves_it(tmp_path: Path) -> None:
    launcher = LocalLauncher()
    job_id = launcher.submit(job(tmp_path, "import time; time.sleep(600)", abandoned_after_s=1.0))
    launcher.attach(job_id, "old")
    launcher.release(job_id, "old")
    launcher.attach(job_id, "new")
    for _ in range(10):
        time.sleep(0.2)
        launcher.attach(job_id, "new")
    assert launcher.status(job_id) == "running"
    launcher.cancel(job_id)
    ended(launcher, job_id)


def test_the_command_ends_when_the_job_is_killed_outright_and_no_second_one_starts_before(tmp_path: Path) -> None:
    launcher = LocalLauncher()
    code = (
        "import signal, sys, time, pathlib\n"
        "def save(*a):\n    time.sleep(1); pathlib.Path('saved').touch(); sys.exit(75)\n"
        "signal.signal(signal.SIGTERM, save); pathlib.Path('started').touch(); time.sleep(600)"
    )
    first = launcher.submit(job(tmp_path, code))
    wait_for((tmp_path / "started").exists)
    os.kill(first["pid"], signal.SIGKILL)
    wait_for(lambda: launcher.status(first) == "lost")
    second = launcher.submit(job(tmp_path, "import pathlib; assert pathlib.Path('saved').exists()"))
    ended(launcher, second)
    assert launcher.status(second) == "succeeded" and Path(second["folder"]).name == "0002"


def test_submitting_again_gives_the_running_attempt_and_another_generation_ends_it(tmp_path: Path) -> None:
    launcher = LocalLauncher()
    first = launcher.submit(job(tmp_path, "import time; time.sleep(600)"))
    assert LocalLauncher().submit(job(tmp_path, "raise SystemExit(1)")) == first
    second = launcher.submit(job(tmp_path, "pass", generation=1))
    assert second != first and launcher.status(first) == "failed"
    ended(launcher, second)
    assert launcher.status(second) == "succeeded"


def test_a_job_whose_id_was_never_stored_is_found_by_what_it_wrote_itself(tmp_path: Path) -> None:
    launcher = LocalLauncher()
    first = launcher.submit(job(tmp_path, "import time; time.sleep(600)", tag="mine"))
    folder = Path(first["folder"])
    wait_for((folder / "job.json").exists)
    (folder / "id.json").unlink()  # its starter died before that
    assert LocalLauncher().submit(job(tmp_path, "raise SystemExit(1)")) == first
    assert json.loads((folder / "id.json").read_text()) == first
    launcher.cancel(first)
    ended(launcher, first)
    (folder / "id.json").unlink()
    second = LocalLauncher().submit(job(tmp_path, "pass"))
    assert Path(second["folder"]).name == "0002", "one that has ended is not found"
    ended(launcher, second)


def test_a_job_whose_id_was_never_stored_is_asked_of_the_launcher_that_started_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The placement has changed since: a stage was to run elsewhere, and its job does."""

    class Elsewhere(LocalLauncher):
        name = "elsewhere"

        def find(self, folder: Path) -> Any:
            return {"ticket": 12}

        def status(self, job_id: Any) -> Any:
            assert job_id["ticket"] == 12
            return "running"

    monkeypatch.setitem(launchers.LAUNCHERS, "elsewhere", Elsewhere)
    first = Elsewhere().submit(job(tmp_path, "pass"))
    wait_for((Path(first["folder"]) / "exit.json").exists)
    (Path(first["folder"]) / "id.json").unlink()
    found = LocalLauncher().submit(job(tmp_path, "raise SystemExit(1)"))
    assert (found["launcher"], found["folder"], found["ticket"]) == ("elsewhere", first["folder"], 12)


def test_many_tasks_for_one_job_start_it_once(tmp_path: Path) -> None:
    code = (
        "import json, os, sys, pathlib; sys.path.insert(0, sys.argv[2]); from launchers import *\n"
        "p = pathlib.Path(sys.argv[1]); j = Job(folder=p / 'job', command=[sys.executable, '-c', 'import time; time.sleep(600)'],"
        " cwd=str(p), environment=dict(os.environ)); print(json.dumps(LocalLauncher().submit(j)))"
    )
    started = [
        subprocess.Popen([sys.executable, "-c", code, str(tmp_path), str(Path(launchers.__file__).parent)], stdout=subprocess.PIPE)
        for _ in range(5)
    ]
    found = {process.communicate()[0] for process in started}
    assert len(found) == 1
    launcher, job_id = LocalLauncher(), json.loads(found.pop())
    launcher.cancel(job_id)
    ended(launcher, job_id)


def test_a_command_that_cannot_be_started_and_a_folder_that_is_not_there(tmp_path: Path) -> None:
    launcher = LocalLauncher()
    for name, given in (("a", {"command": ["/no/such/program"]}), ("b", {"cwd": str(tmp_path / "nowhere")})):
        values = {"command": [sys.executable, "-c", "pass"], "cwd": str(tmp_path)} | given
        job_id = launcher.submit(Job(folder=tmp_path / name, environment=dict(os.environ), **values))  # type: ignore[arg-type]
        ended(launcher, job_id)
        assert launcher.result(job_id).code == 127
        assert "cannot be started" in launcher.tail(job_id, None)[0][0]


def test_a_server_that_stops_ends_its_own_jobs(tmp_path: Path) -> None:
    launcher, ids = LocalLauncher(), {}
    for tag in ("mine", "other"):
        folder = tmp_path / "jobs" / "dag" / "run" / tag
        ids[tag] = launcher.submit(
            Job(folder=folder, command=[sys.executable, "-c", "import time; time.sleep(600)"], cwd="/", environment={}, tag=tag)
        )
    assert end_jobs(tmp_path / "jobs", "mine") == 1
    assert {tag: launcher.status(job_id) for tag, job_id in ids.items()} == {"mine": "failed", "other": "running"}
    assert end_jobs(tmp_path / "jobs", "other") == 1


def test_an_unknown_launcher_is_refused() -> None:
    with pytest.raises(ValueError, match="launcher is 'lokal'; expected kubernetes or local or slurm"):
        launcher_named("lokal")


# --- warm


@pytest.fixture(scope="module")
def warm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    place = tmp_path_factory.mktemp("warm") / "s"
    code = "import sys, warm_start; warm_start.LIBRARIES = ('orjson',); warm_start.load_streaming = lambda: None; warm_start.main()"
    environment = os.environ | {"PYTHONPATH": str(Path(warm_start.__file__).parent)}
    process = subprocess.Popen([sys.executable, "-c", code, str(place)], env=environment)
    wait_for(place.exists)
    yield place
    process.terminate()
    assert process.wait(10) == 0


MODULE = """
import os, sys, orjson
assert __name__ == "__main__"
print(os.getcwd(), os.environ["MARK"], sys.argv[1:], os.getpgid(0) == os.getpid(), os.environ.get("PATH"))
print("to the log", file=sys.stderr)
if sys.argv[1] == "wait":
    import time
    time.sleep(600)
sys.exit(int(sys.argv[1]))
"""


def test_a_warm_job_is_like_a_cold_one(tmp_path: Path, warm: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "shown.py").write_text(MODULE)
    seen = {}
    for name, address in (("cold", ""), ("warm", str(warm))):
        monkeypatch.setenv(warm_start.SOCKET, address)
        launcher, before = LocalLauncher(), len(LocalLauncher._started)
        job_id = launcher.submit(
            Job(folder=tmp_path / name, command=[sys.executable, "-m", "shown", "7"], cwd=str(tmp_path), environment={"MARK": "é x"})
        )
        ended(launcher, job_id)
        outcome = launcher.result(job_id)
        seen[name] = (outcome.code, outcome.signal, outcome.stopped, outcome.output, launcher.tail(job_id, None)[0])
        assert len(launcher._started) - before == (name == "cold")
    assert seen["warm"] == seen["cold"] and seen["warm"][0] == 7


def test_a_warm_job_ends_when_told(tmp_path: Path, warm: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "shown.py").write_text(MODULE)
    monkeypatch.setenv(warm_start.SOCKET, str(warm))
    launcher = LocalLauncher()
    job_id = launcher.submit(
        Job(folder=tmp_path / "job", command=[sys.executable, "-m", "shown", "wait"], cwd=str(tmp_path), environment={"MARK": ""})
    )
    wait_for(lambda: launcher.tail(job_id, None)[0])
    launcher.cancel(job_id)
    ended(launcher, job_id)
    assert (launcher.result(job_id).signal, launcher.result(job_id).stopped) == (signal.SIGTERM, "cancelled")


def test_without_a_warm_process_a_job_starts_cold(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(warm_start.SOCKET, str(tmp_path / "nobody"))
    launcher = LocalLauncher()
    job_id = launcher.submit(job(tmp_path, "print(1)"))
    ended(launcher, job_id)
    assert launcher.result(job_id).code == 0


LATE = """
import json, os, sys, warm_start
warm_start.load_libraries()
before = set(sys.modules)
import torch, training.train, training.evaluation.stage
weight = torch.nn.Parameter(torch.zeros(2))
weight.grad = torch.ones(2)
torch.optim.AdamW([weight]).step()
late = sorted(name for name in set(sys.modules) - before if name.split(".")[0] not in ("craw4llm", "training"))
own = sorted(name for name in before if name.split(".")[0] in ("craw4llm", "training"))
print(json.dumps({"late": late, "own": own, "cuda": torch.cuda.is_initialized()}))
"""


def test_what_training_and_evaluation_need_is_loaded_beforehand_and_nothing_of_the_project() -> None:
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, (Path(warm_start.__file__).parent, PROJECT)))}
    done = subprocess.run([sys.executable, "-c", LATE], env=environment, capture_output=True, text=True, check=True)
    found = json.loads(done.stdout.splitlines()[-1])
    assert len(found["late"]) < 10, found["late"]  # 885 without torch._dynamo and torch.distributed
    assert found["own"] == [], "a stage runs the code that is on the disk"
    assert not found["cuda"], "it does not survive a fork"
