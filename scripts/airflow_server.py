"""Airflow for one person on one machine: `start`, `stop` and `status`. What `make airflow` calls.

    python scripts/airflow_server.py start [--port 8080] [--home .airflow]      stays in the foreground; Ctrl-C ends it
    python scripts/airflow_server.py stop                                       from another terminal; also clears up after a kill -9
    python scripts/airflow_server.py status                                     exit code 0: healthy, 3: not running

Starts Airflow's four parts (api-server, scheduler, dag-processor, triggerer) on SQLite with the LocalExecutor, DAGs and plugins of this
project and an own AIRFLOW_HOME, `.airflow`. A part that dies is started again; the stages that run meanwhile go on. The pools `cpu` and
`gpu` are made where they are missing: as many slots as processors, as many as GPUs (without any: as processors); change them in the UI.

    airflow.cfg      written at every start; override single settings with AIRFLOW__SECTION__KEY variables
    secrets.json, passwords.json    made once, readable by their owner only
    logs/            of the four parts, and of every task
    server.json      process ids while it runs, also of parts that have died and may have left workers behind

Only 127.0.0.1 is listened on, by the api-server alone: tasks' logs are read from the disk, so the log servers, which would listen on all
addresses, are not started. Airflow 3.3 has no usage statistics to switch off; nothing is sent anywhere.
"""

import argparse
import configparser
import contextlib
import fcntl
import json
import os
import secrets
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from base64 import urlsafe_b64encode
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import IO, Any, NoReturn

import psutil

PROJECT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(PROJECT / "plugins"))
import warm_start  # noqa: E402
from doorbell import DOORBELL  # noqa: E402
from launchers import end_jobs  # noqa: E402

USER = "admin"
PARTS = {
    "scheduler": ("scheduler", "--skip-serve-logs"),
    "dag-processor": ("dag-processor",),
    "triggerer": ("triggerer", "--skip-serve-logs"),
    "api-server": ("api-server",),
}
HEALTHY_WITHIN_S = 540.0  # 30 s where nothing else runs
STOP_WITHIN_S = 40.0  # a stage that is stopped has 20 s to save, see plugins/launchers.py
WRITE_WITHIN_S = 60  # to Airflow's database
RESTARTS, RESTARTS_WITHIN_S = 5, 600.0  # a part that dies more often than that is broken


def settings(home: Path, port: int, keys: dict[str, str]) -> dict[str, dict[str, str]]:
    """The sections of airflow.cfg."""
    address = f"http://127.0.0.1:{port}"
    return {
        "core": {
            "executor": "LocalExecutor:local_executor.LocalExecutor",  # plugins/local_executor.py says why
            "parallelism": str(
                2 * processors() + 2
            ),  # tasks at a time, over all DAGs; also worker processes, which share most of their memory
            "dags_folder": str(PROJECT / "dags"),
            "plugins_folder": str(PROJECT / "plugins"),
            "load_examples": "False",
            "dags_are_paused_at_creation": "False",  # no DAG has a schedule: a click on Trigger is meant
            "simple_auth_manager_users": f"{USER}:admin",
            "simple_auth_manager_passwords_file": str(home / "passwords.json"),
            "execution_api_server_url": f"{address}/execution/",
            "fernet_key": keys["fernet_key"],
            "hostname_callable": "socket.gethostname",  # the default asks the name server
        },
        # SQLite has one writer at a time. Where the machine is starved, a write holds the others up for longer than the 5 s after which
        # they failed: a click was answered with "Internal Server Error".
        "database": {"sql_alchemy_conn": f"sqlite:///{home / 'airflow.db'}?timeout={WRITE_WITHIN_S}"},
        "logging": {"base_log_folder": str(home / "logs")},
        "api": {
            "host": "127.0.0.1",
            "port": str(port),
            "base_url": address,
            "workers": "1",
            "secret_key": keys["secret_key"],
            "instance_name": "craw4llm",
        },
        "api_auth": {"jwt_secret": keys["jwt_secret"]},
        # A stage may run for days. The defaults kill it after 15 s without an api-server, and give its supervisor up after 300 s.
        # A supervisor notices the end of its task at its next heartbeat, and holds a worker until then.
        # It gives a call to the api-server up after 5 s, and asks again while the first is still at work: longer than a write may wait.
        "workers": {"min_heartbeat_interval": "1", "max_failed_heartbeats": "300", "execution_api_timeout": str(WRITE_WITHIN_S + 10)},
        "scheduler": {
            "task_instance_heartbeat_timeout": "900",
            "enable_health_check": "False",
            # After the wait for plugins/doorbell.py, which the executor has done by then; not 0, which would let the scheduler look
            # without a pause where another executor is set.
            "scheduler_idle_sleep_time": "0.05",
        },
        "execution_api": {"jwt_expiration_time": "3600"},
    }


def start(home: Path, port: int, restart_after_s: float) -> None:
    began = time.monotonic()
    home.mkdir(mode=0o700, parents=True, exist_ok=True)
    with only_one(home):
        end_leftovers(home)
        check_port(port)
        signal.signal(signal.SIGTERM, interrupt)
        signal.signal(signal.SIGHUP, interrupt)
        keys = kept(home / "secrets.json", make_keys)
        password = kept(home / "passwords.json", lambda: {USER: secrets.token_urlsafe(9)})[USER]
        write_config(home, settings(home, port, keys))
        environment = os.environ | {"AIRFLOW_HOME": str(home), "AIRFLOW_CONFIG": str(home / "airflow.cfg"), "PYTHONUNBUFFERED": "1"}
        parts: dict[str, subprocess.Popen[bytes]] = {}
        bereft: list[dict[str, Any]] = []
        warm = None
        try:
            say("starting Airflow ...")
            environment[DOORBELL] = str(make_doorbell(home))
            warm = start_warm(home, environment)
            prepare_database(home, environment)
            for name, arguments in PARTS.items():
                parts[name] = start_part(name, arguments, home, environment)
                record(home, port, parts, bereft)
            wait_until_healthy(parts, home, port)
            make_pools(port, password)
            say(f"Airflow is ready after {time.monotonic() - began:.0f} s: http://127.0.0.1:{port}")
            say(f"log in as {USER} with the password {password} (kept in {home / 'passwords.json'})")
            say("Ctrl-C stops it, with the stages that run; the next start goes on from what is finished")
            died: dict[str, list[float]] = {name: [] for name in PARTS}
            while True:
                for name in [name for name, part in parts.items() if part.poll() is not None]:
                    bereft.append(left_by(name, home))
                    revive(name, parts, died[name], home, environment, restart_after_s)
                    record(home, port, parts, bereft)
                bereft = end_idle(bereft)
                time.sleep(1)
        except KeyboardInterrupt:
            say("stopping ...")
        finally:
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
                signal.signal(number, signal.SIG_IGN)
            end({name: psutil.Process(part.pid) for name, part in parts.items() if part.poll() is None}, bereft)
            if warm is not None:
                warm.terminate()
                warm.wait()
            end_jobs(jobs_folder(), str(home))
            (home / "server.json").unlink(missing_ok=True)
    say("stopped")


def stop(home: Path) -> None:
    """Ends the server that runs with this home, wherever it was started."""
    state = read_state(home)
    owner = process_of(state.get("server"))
    if owner is None:
        say("stopped what was left over" if end_leftovers(home) else "not running")
        return
    owner.terminate()
    try:
        owner.wait(STOP_WITHIN_S + 20)
    except psutil.TimeoutExpired:
        fail(f"process {owner.pid} did not stop; kill it and run `stop` again")
    say("stopped")


def status(home: Path) -> None:
    state = read_state(home)
    if process_of(state.get("server")) is None:
        say("not running")
        sys.exit(3)
    port = state["port"]
    health = read_health(port)
    for name, part in health.items():
        say(f"{name}: {part.get('status')}")
    say(f"http://127.0.0.1:{port}" if health else f"no answer from http://127.0.0.1:{port}")
    sys.exit(0 if healthy(health) else 4)


# --- before the start


@contextlib.contextmanager
def only_one(home: Path) -> Iterator[None]:
    """Holds the kernel's lock on `<home>/lock`: there is one server for a home."""
    with (home / "lock").open("a") as stream:
        try:
            fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            where = read_state(home).get("port")
            fail(f"Airflow already runs with {home}{f', on http://127.0.0.1:{where}' if where else ''}; stop it first (Ctrl-C, or `stop`)")
        yield


def check_port(port: int) -> None:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError as error:
            fail(f"port {port} of 127.0.0.1 cannot be used ({error.strerror}); choose another: make airflow PORT={port + 1}")


def make_keys() -> dict[str, str]:
    return {
        "fernet_key": urlsafe_b64encode(secrets.token_bytes(32)).decode(),
        "secret_key": secrets.token_urlsafe(32),
        "jwt_secret": secrets.token_urlsafe(64),
    }


def kept(path: Path, make: Any) -> dict[str, str]:
    """The content of a JSON file that only its owner may read; made once."""
    if not path.exists():
        write_private(path, json.dumps(make()))
    return dict(json.loads(path.read_text()))


def write_config(home: Path, sections: dict[str, dict[str, str]]) -> None:
    parser = configparser.ConfigParser(interpolation=None)
    parser.read_dict({name: {key: value.replace("%", "%%") for key, value in section.items()} for name, section in sections.items()})
    with open(home / "airflow.cfg.tmp", "w", opener=private) as stream:
        stream.write("# Written by scripts/airflow_server.py at every start. Override settings with AIRFLOW__SECTION__KEY variables.\n\n")
        parser.write(stream)
    (home / "airflow.cfg.tmp").replace(home / "airflow.cfg")


def prepare_database(home: Path, environment: dict[str, str]) -> None:
    """Makes or migrates the database, once per version of Airflow."""
    stamp, wanted = home / "database_version", version("apache-airflow-core")
    if (home / "airflow.db").exists() and stamp.exists() and stamp.read_text() == wanted:
        return
    say("preparing Airflow's database (once) ...")
    with log_of(home, "database") as log:
        done = subprocess.run(airflow("db", "migrate"), env=environment, cwd=PROJECT, stdout=log, stderr=log, check=False)
    if done.returncode:
        fail(f"the database could not be prepared:\n{tail(home, 'database')}")
    stamp.write_text(wanted)


# --- the four parts


def start_part(name: str, arguments: tuple[str, ...], home: Path, environment: dict[str, str]) -> subprocess.Popen[bytes]:
    """Leader of a session of its own, so that a terminal's Ctrl-C does not reach the parts in no order."""
    with log_of(home, name) as log:
        return subprocess.Popen(
            airflow(*arguments), env=environment, cwd=PROJECT, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
        )


def airflow(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "airflow", *arguments]


def make_doorbell(home: Path) -> Path:
    path = home / "doorbell"
    path.unlink(missing_ok=True)
    os.mkfifo(path, 0o600)
    return path


def start_warm(home: Path, environment: dict[str, str]) -> subprocess.Popen[bytes]:
    """Starts the process that stages are forked from. It is no part of Airflow: without it, stages start as programs of their own."""
    environment[warm_start.SOCKET] = str(home / "warm.sock")
    own = {name: value for name, value in environment.items() if "AIRFLOW" not in name}
    with log_of(home, "warm-start") as log:
        return subprocess.Popen(
            [sys.executable, str(PROJECT / "plugins" / "warm_start.py"), str(home / "warm.sock")],
            env=own, cwd=PROJECT, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True,
        )  # fmt: skip


def revive(
    name: str, parts: dict[str, subprocess.Popen[bytes]], died: list[float], home: Path, environment: dict[str, str], restart_after_s: float
) -> None:
    """Starts a part that has died again. Of what it left, `end_idle` ends what is not at work."""
    died[:] = [moment for moment in died if time.monotonic() - moment < RESTARTS_WITHIN_S] + [time.monotonic()]
    if len(died) > RESTARTS:
        fail(f"Airflow's {name} died {len(died)} times within {RESTARTS_WITHIN_S:.0f} s; its last lines:\n{tail(home, name)}")
    say(f"Airflow's {name} ended with code {parts[name].returncode}; starting it again (see {home / 'logs' / (name + '.log')})")
    time.sleep(restart_after_s)
    parts[name] = start_part(name, PARTS[name], home, environment)


def left_by(name: str, home: Path) -> dict[str, Any]:
    """What to look for when a part has died: its session, which its processes keep. From server.json: of the dead, nothing can be asked."""
    return {**read_state(home)["parts"][name], "part": name}


def end_idle(bereft: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Ends what parts that died have left, except a dead scheduler's workers that run a task: they go on, and are ended when they are
    idle. Without this they would wait for ever: each worker holds the pipe open that all wait on. Returns the sessions that have members.
    """
    left = []
    for session in bereft:
        members = members_of(session)
        for process in members:
            with contextlib.suppress(psutil.NoSuchProcess):
                if session["part"] != "scheduler" or ("<idle>" in " ".join(process.cmdline()) and not process.children()):
                    process.kill()
        if members:
            left.append(session)
    return left


def members_of(session: dict[str, Any]) -> list[psutil.Process]:
    """Living processes of a session whose leader, a part, has died. While there are any, the kernel gives its number to nobody else."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.NoSuchProcess, ProcessLookupError):
            if os.getsid(process.pid) != session["pid"] or process.status() == psutil.STATUS_ZOMBIE:
                continue
            if process.pid == session["pid"] or process.create_time() < session["started"] - 1:
                return []  # the number is another's by now
            found.append(process)
    return found


def make_pools(port: int, password: str) -> None:
    """The pools that the DAGs name, where they are missing."""
    token = call(port, "POST", "/auth/token", {"username": USER, "password": password})["access_token"]
    there = {pool["name"] for pool in call(port, "GET", "/api/v2/pools?limit=1000", token=token)["pools"]}
    for name, slots in {"cpu": processors(), "gpu": gpus() or processors()}.items():
        if name not in there:
            content = {"name": name, "slots": slots, "description": "stages that need processors" if name == "cpu" else "models"}
            call(port, "POST", "/api/v2/pools", content, token)


def processors() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def gpus() -> int:
    """NVIDIA devices of this machine."""
    return len(list(Path("/proc/driver/nvidia/gpus").glob("*")))


def jobs_folder() -> Path:
    """Where plugins/stage_operator.py keeps its jobs."""
    return PROJECT / (os.environ.get("CRAW4LLM_ROOT") or "artifacts") / "logs" / "jobs"


def call(port: int, method: str, path: str, content: Any = None, token: str = "") -> Any:
    data = None if content is None else json.dumps(content).encode()
    request = urllib.request.Request(f"http://127.0.0.1:{port}{path}", data, {"Content-Type": "application/json"}, method=method)
    if token:
        request.add_header("Authorization", f"Bearer {token}")
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(request, timeout=30) as answer:
        return json.load(answer)


def wait_until_healthy(parts: dict[str, subprocess.Popen[bytes]], home: Path, port: int) -> None:
    until = time.monotonic() + HEALTHY_WITHIN_S
    while not healthy(health := read_health(port)):
        check_alive(parts, home)
        if time.monotonic() > until:
            fail(f"Airflow is not healthy after {HEALTHY_WITHIN_S:.0f} s: {json.dumps(health)}; see {home / 'logs'}")
        time.sleep(0.5)


def check_alive(parts: dict[str, subprocess.Popen[bytes]], home: Path) -> None:
    for name, part in parts.items():
        if part.poll() is not None:
            fail(f"Airflow's {name} ended with code {part.returncode}; its last lines:\n{tail(home, name)}")


def read_health(port: int) -> dict[str, dict[str, Any]]:
    """Part -> its state; empty while the api-server does not answer."""
    with contextlib.suppress(OSError, urllib.error.URLError, ValueError):
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        with opener.open(f"http://127.0.0.1:{port}/api/v2/monitor/health", timeout=5) as answer:
            return dict(json.load(answer))
    return {}


def healthy(health: dict[str, dict[str, Any]]) -> bool:
    return bool(health) and all(health.get(name, {}).get("status") == "healthy" for name in ("scheduler", "dag_processor", "triggerer"))


def end(parts: dict[str, psutil.Process], bereft: list[dict[str, Any]]) -> None:
    """Ends the parts, all that descends from them, and what earlier ones that died have left: SIGTERM, later SIGKILL. The api-server last:
    tasks report to it while they end."""
    orphans = [process for session in bereft for process in members_of(session)]
    for process in orphans:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.terminate()
    family = [*orphans, *(child for part in parts.values() for child in descendants(part))]
    for names in (tuple(name for name in PARTS if name != "api-server"), ("api-server",)):
        group = [parts[name] for name in names if name in parts]
        for part in group:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(part.pid, signal.SIGTERM)
        psutil.wait_procs(group, timeout=STOP_WITHIN_S)
    _, left = psutil.wait_procs(family, timeout=5)
    for process in left:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    psutil.wait_procs(left, timeout=5)


def descendants(process: psutil.Process) -> list[psutil.Process]:
    try:
        return [process, *process.children(recursive=True)]
    except psutil.NoSuchProcess:
        return []


def end_leftovers(home: Path) -> bool:
    """Ends parts whose server was killed with -9. Returns whether there were any."""
    state = read_state(home)
    left = {name: process for name in PARTS if (process := process_of(state.get("parts", {}).get(name)))}
    bereft = []
    if state.get("boot") == boot():
        gone = {name: known for name, known in state.get("parts", {}).items() if name not in left}
        bereft = [*state.get("bereft", []), *({**known, "part": name} for name, known in gone.items())]
    orphans = any(members_of(session) for session in bereft)
    end(left, bereft)
    jobs = end_jobs(jobs_folder(), str(home))
    (home / "server.json").unlink(missing_ok=True)
    return bool(left) or orphans or bool(jobs)


# --- small things


def record(home: Path, port: int, parts: dict[str, subprocess.Popen[bytes]], bereft: list[dict[str, Any]]) -> None:
    """Keeps which processes belong to this server; of a part that has just died, what was known of it."""
    known = dict(read_state(home).get("parts", {}))
    for name, part in parts.items():
        with contextlib.suppress(psutil.NoSuchProcess):
            known[name] = identity(part.pid)
    state = {"server": identity(os.getpid()), "boot": boot(), "port": port, "parts": known, "bereft": bereft}
    write_private(home / "server.json", json.dumps(state))


def boot() -> str:
    """Which boot of the machine this is: after another one, process ids mean other processes."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return str(round(psutil.boot_time()))


def identity(pid: int) -> dict[str, float]:
    """A process id with its start time, because ids are used again."""
    return {"pid": pid, "started": psutil.Process(pid).create_time()}


def process_of(known: dict[str, float] | None) -> psutil.Process | None:
    """The running process that `identity` described, or None."""
    with contextlib.suppress(psutil.NoSuchProcess):
        if known:
            process = psutil.Process(int(known["pid"]))
            if abs(process.create_time() - known["started"]) < 1 and process.status() != psutil.STATUS_ZOMBIE:
                return process
    return None


def read_state(home: Path) -> dict[str, Any]:
    try:
        return dict(json.loads((home / "server.json").read_text()))
    except (FileNotFoundError, ValueError):
        return {}


def private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)


def write_private(path: Path, text: str) -> None:
    temporary = path.with_name(f"{path.name}.tmp")
    with open(temporary, "w", opener=private) as stream:
        stream.write(text)
    temporary.replace(path)


def log_of(home: Path, name: str) -> IO[bytes]:
    (home / "logs").mkdir(exist_ok=True)
    return (home / "logs" / f"{name}.log").open("ab")


def tail(home: Path, name: str) -> str:
    return "\n".join((home / "logs" / f"{name}.log").read_text(errors="replace").splitlines()[-15:])


def interrupt(number: int, frame: object) -> None:
    raise KeyboardInterrupt


def say(text: str) -> None:
    print(text, flush=True)


def fail(text: str) -> NoReturn:
    print(f"error: {text}", file=sys.stderr, flush=True)
    sys.exit(1)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("command", choices=("start", "stop", "status"))
    parser.add_argument("--port", type=int, default=int(os.environ.get("PORT") or 8080), help="of UI and API (default: $PORT, else 8080)")
    parser.add_argument("--home", type=Path, default=PROJECT / ".airflow", help="AIRFLOW_HOME (default: .airflow in the project)")
    parser.add_argument(
        "--restart-after", type=float, default=1.0, metavar="SECONDS", help="pause before a part that died is started again"
    )
    given = parser.parse_args()
    home = given.home.resolve()
    if given.command == "start":
        start(home, given.port, given.restart_after)
    elif given.command == "stop":
        stop(home)
    else:
        status(home)


if __name__ == "__main__":
    main()
