"""Airflow as on several machines, on this one: PostgreSQL, Redis, api-server, scheduler, dag-processor, triggerer, workers. For trials and
tests.

    with Cluster(folder, executor="CeleryExecutor") as cluster:
        cluster.start_worker("cpu", queues="cpu", slots=2)
        run = cluster.trigger("tiny", {"corpus": "synthetic"})
        cluster.wait_for_run("tiny", run, seconds=600)

PostgreSQL and Redis are Debian's, with data, ports and passwords of their own in `folder`. All listens on 127.0.0.1; the log servers are
off. The settings are deploy/airflow.env, those of docker-compose.yaml. Everything that was started is ended by its process id.
"""

import contextlib
import json
import os
import pwd
import shutil
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.parse
import urllib.request
from pathlib import Path
from typing import Any

import psutil

sys.path.insert(0, str(Path(__file__).resolve().parent))
from local_slurm import free_ports

PROJECT = Path(__file__).resolve().parent.parent
READY_WITHIN_S = 900.0  # 25 s on a quiet machine
ANSWER_WITHIN_S = 60.0
PARTS: dict[str, tuple[str, ...]] = {
    "scheduler": ("scheduler", "--skip-serve-logs"),
    "dag-processor": ("dag-processor",),
    "triggerer": ("triggerer", "--skip-serve-logs"),
}


def missing(*, celery: bool) -> list[str]:
    """What this machine lacks for it."""
    lacking = [] if postgres_bin() else ["postgresql"]
    if celery:
        lacking += [] if shutil.which("redis-server") else ["redis-server"]
        with contextlib.suppress(ImportError):
            import airflow.providers.celery  # noqa: F401

            return lacking
        lacking.append("the extra `clusters`")
    return lacking


def postgres_bin() -> Path | None:
    found = sorted(Path("/usr/lib/postgresql").glob("*/bin/initdb"), key=lambda p: int(p.parts[-3]) if p.parts[-3].isdigit() else 0)
    return found[-1].parent if found else None


def settings_file() -> dict[str, str]:
    """deploy/airflow.env."""
    lines = (PROJECT / "deploy" / "airflow.env").read_text().splitlines()
    return dict(line.split("=", 1) for line in lines if line and not line.startswith("#"))


class Cluster:
    """A context manager. folder: home of everything; must be readable by the user of PostgreSQL where this runs as root.

    executor: Airflow's. environment: further variables for all of Airflow's parts. root: the artifact root. pools: slots of the pools; no
    more than the workers have, else tasks wait in Celery's queue, where a worker's death delays them (docs/operations.md, 1).
    """

    def __init__(
        self,
        folder: Path,
        *,
        executor: str,
        environment: dict[str, str] | None = None,
        dags: Path | None = None,
        pools: dict[str, int] | None = None,
    ) -> None:
        self.folder, self.executor = folder, executor
        self._pools = {"cpu": 4, "gpu": 4} | (pools or {})
        self.celery = "CeleryExecutor" in executor
        self.root = folder / "artifacts"
        ports = free_ports(3)
        self.port, self._postgres_port, self._redis_port = ports
        self.address = f"http://127.0.0.1:{self.port}"
        self._secrets = folder / "secrets"
        self._more = dict(environment or {})
        self._dags = dags or PROJECT / "dags"
        self.parts: dict[str, subprocess.Popen[bytes]] = {}
        self._postgres: Path | None = None
        self._token = ""

    # --- start and end

    def __enter__(self) -> "Cluster":
        began = time.monotonic()
        try:
            for name in ("logs", "home", "artifacts"):
                (self.folder / name).mkdir(parents=True, exist_ok=True)
            make = [sys.executable, str(PROJECT / "deploy" / "make_secrets.py"), str(self._secrets)]
            addresses = {"POSTGRES_ADDRESS": f"127.0.0.1:{self._postgres_port}", "REDIS_ADDRESS": f"127.0.0.1:{self._redis_port}"}
            subprocess.run(make, env={**os.environ, **addresses}, check=True, stdout=subprocess.DEVNULL)
            self._start_postgres()
            if self.celery:
                options = ("--bind", "127.0.0.1", "--port", str(self._redis_port), "--dir", str(self.folder))
                self._start("redis", ["redis-server", str(self._secrets / "redis/redis.conf"), *options])
            self.environment = self._environment()
            self._airflow_once("db", "migrate")
            self._start("api-server", airflow("api-server", "--host", "127.0.0.1", "--port", str(self.port)))
            self._wait(lambda: bool(self.health()), "the api-server")
            for name in PARTS:
                self.start_part(name)
            names = ("scheduler", "dag_processor", "triggerer")
            self._wait(lambda: all(self.health().get(name, {}).get("status") == "healthy" for name in names), "healthy parts")
            self._token = self._log_in()
            for pool, slots in self._pools.items():
                self.api("/api/v2/pools", {"name": pool, "slots": slots, "description": "trial", "include_deferred": False})
        except BaseException:
            self.__exit__()
            raise
        self.healthy_after_s = time.monotonic() - began
        return self

    def __exit__(self, *exception: object) -> None:
        order = [name for name in self.parts if name.startswith("worker")] + [*PARTS, "api-server", "redis"]
        for name in order:
            self.end(name)
        if self._postgres is not None:
            subprocess.run(self._as_postgres("pg_ctl", "-D", str(self._postgres), "-m", "fast", "stop"), capture_output=True, check=False)

    def start_part(self, name: str) -> None:
        """scheduler, dag-processor or triggerer."""
        self._start(name, airflow(*PARTS[name]))

    def start_worker(self, name: str, *, queues: str, slots: int, environment: dict[str, str] | None = None) -> None:
        """A Celery worker, on a `machine` of its own as far as Airflow can tell."""
        command = airflow(
            "celery", "worker", "--queues", queues, "--concurrency", str(slots), "--celery-hostname", f"{name}@trial", "--skip-serve-logs"
        )
        pid_file = self.folder / "home" / f"{name}.pid"
        pid_file.unlink(missing_ok=True)
        self._start(f"worker-{name}", [*command, "--pid", str(pid_file)], environment)

    def start_edge_worker(self, name: str, *, queues: str, slots: int, environment: dict[str, str]) -> None:
        """A worker that reaches the api-server alone: it is given no database and no broker."""
        command = airflow("edge", "worker", "--queues", queues, "--concurrency", str(slots), "--edge-hostname", name)
        home = self.folder / f"edge-{name}"
        home.mkdir(exist_ok=True)
        keep = {k: v for k, v in self.environment.items() if "DATABASE" not in k and "CELERY" not in k and "FERNET" not in k}
        self._start(f"worker-{name}", [*command, "--pid", str(home / "pid")], {**environment, "AIRFLOW_HOME": str(home)}, base=keep)

    def end(self, name: str, *, kill: bool = False) -> list[psutil.Process]:
        """Ends a part: SIGTERM to it, later SIGKILL to what is left of its process group. kill: SIGKILL at once to it and all its
        descendants that belong to it (jobs have sessions of their own and go on). Returns what it had started."""
        part = self.parts.pop(name, None)
        if part is None:
            return []
        try:
            family = psutil.Process(part.pid).children(recursive=True)
        except psutil.NoSuchProcess:
            family = []
        own = [p for p in family if _session(p.pid) == part.pid or (kill and not _is_job(p))]
        if kill:
            for process in (*own, psutil.Process(part.pid)):
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()
        else:
            with contextlib.suppress(ProcessLookupError):
                part.send_signal(signal.SIGTERM)
        try:
            part.wait(40)
        except subprocess.TimeoutExpired:
            part.kill()
            part.wait()
        for process in own:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        return family

    # --- the REST API

    def api(self, path: str, body: Any = None, method: str | None = None) -> Any:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.address + path, data=data, method=method)
        request.add_header("Content-Type", "application/json")
        if self._token:
            request.add_header("Authorization", f"Bearer {self._token}")
        with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(request, timeout=ANSWER_WITHIN_S) as answer:
            text = answer.read()
            return json.loads(text) if text else None

    def ask(self, path: str) -> Any:
        """`api` for questions: asked again where no answer comes, for on a machine that others keep busy the server may take minutes."""
        until = time.monotonic() + READY_WITHIN_S
        while True:
            try:
                return self.api(path)
            except urllib.error.HTTPError:
                raise
            except OSError:
                if time.monotonic() > until or self.parts["api-server"].poll() is not None:
                    raise
            time.sleep(1)

    def health(self) -> dict[str, dict[str, Any]]:
        with contextlib.suppress(OSError, ValueError):
            return dict(self.api("/api/v2/monitor/health"))
        return {}

    def trigger(self, dag: str, conf: dict[str, Any], run_id: str | None = None) -> str:
        """The id of the new run. Waits for the DAG to be known."""
        body = {"logical_date": None, "conf": conf, **({"dag_run_id": run_id} if run_id else {})}
        until = time.monotonic() + 180
        while True:
            try:
                return str(self.api(f"/api/v2/dags/{dag}/dagRuns", body)["dag_run_id"])
            except urllib.error.HTTPError as error:
                if error.code != 404 or time.monotonic() > until:
                    raise RuntimeError(f"{dag} could not be triggered: {error} {error.read()[:500]!r}; {self.import_errors()}") from error
            time.sleep(1)

    def import_errors(self) -> list[str]:
        return [entry["stack_trace"][-400:] for entry in self.ask("/api/v2/importErrors")["import_errors"]]

    def run_state(self, dag: str, run: str) -> str:
        return str(self.ask(f"/api/v2/dags/{dag}/dagRuns/{urllib.parse.quote(run)}")["state"])

    def tasks(self, dag: str, run: str) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = []
        while True:
            page = self.ask(f"/api/v2/dags/{dag}/dagRuns/{urllib.parse.quote(run)}/taskInstances?limit=500&offset={len(found)}")
            found += page["task_instances"]
            if not page["task_instances"] or len(found) >= page["total_entries"]:
                return found

    def wait_for_run(self, dag: str, run: str, seconds: float) -> str:
        until = time.monotonic() + seconds
        while (state := self.run_state(dag, run)) not in ("success", "failed"):
            if time.monotonic() > until:
                return f"{state} after {seconds:.0f} s"
            time.sleep(1)
        return state

    # --- parts

    def _environment(self) -> dict[str, str]:
        def secret(name: str) -> str:
            return (self._secrets / "airflow" / name).read_text()

        celery = {"AIRFLOW__CELERY__BROKER_URL": secret("broker_url"), "AIRFLOW__CELERY__RESULT_BACKEND": secret("result_backend")}
        return {
            **{name: value for name, value in os.environ.items() if not name.startswith("AIRFLOW")},
            **settings_file(),
            "PYTHONPATH": str(PROJECT),
            "AIRFLOW_HOME": str(self.folder / "home"),
            "AIRFLOW__CORE__EXECUTOR": self.executor,
            "AIRFLOW__CORE__DAGS_FOLDER": str(self._dags),
            "AIRFLOW__CORE__PLUGINS_FOLDER": str(PROJECT / "plugins"),
            "AIRFLOW__CORE__SIMPLE_AUTH_MANAGER_USERS": "admin:admin",
            "AIRFLOW__CORE__SIMPLE_AUTH_MANAGER_PASSWORDS_FILE": str(self._secrets / "airflow/passwords.json"),
            "AIRFLOW__CORE__EXECUTION_API_SERVER_URL": f"{self.address}/execution/",
            "AIRFLOW__CORE__FERNET_KEY": secret("fernet_key"),
            "AIRFLOW__CORE__HOSTNAME_CALLABLE": "socket.gethostname",
            "AIRFLOW__CORE__PARALLELISM": "8",
            "AIRFLOW__DATABASE__SQL_ALCHEMY_CONN": secret("database_url"),
            "AIRFLOW__LOGGING__BASE_LOG_FOLDER": str(self.folder / "logs"),
            "AIRFLOW__API__SECRET_KEY": secret("api_secret_key"),
            "AIRFLOW__API__BASE_URL": self.address,
            "AIRFLOW__API__WORKERS": "1",
            "AIRFLOW__API_AUTH__JWT_SECRET": secret("jwt_secret"),
            "AIRFLOW__SCHEDULER__ENABLE_HEALTH_CHECK": "False",
            "CRAW4LLM_ROOT": str(self.root),
            **(celery if self.celery else {}),
            **self._more,
        }

    def _start(self, name: str, command: list[str], environment: dict[str, str] | None = None, base: dict[str, str] | None = None) -> None:
        whole = {**(base or getattr(self, "environment", dict(os.environ))), **(environment or {})}
        with (self.folder / "logs" / f"{name}.log").open("ab") as log:
            self.parts[name] = subprocess.Popen(
                command, cwd=PROJECT, env=whole, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
            )

    def _airflow_once(self, *arguments: str) -> None:
        done = subprocess.run(airflow(*arguments), env=self.environment, cwd=PROJECT, capture_output=True, text=True, check=False)
        if done.returncode:
            raise RuntimeError(f"airflow {' '.join(arguments)} ended with {done.returncode}: {done.stderr[-1500:]}")

    def _start_postgres(self) -> None:
        self._postgres = data = self.folder / "postgres"
        data.mkdir()
        if os.geteuid() == 0:
            user = pwd.getpwnam("postgres")
            os.chown(data, user.pw_uid, user.pw_gid)
            for parent in (self.folder, *self.folder.parents):  # it must get there
                if not parent.stat().st_mode & 0o001:
                    parent.chmod(parent.stat().st_mode | 0o011)
        password = self._secrets / "postgres/password"
        readable = data.parent / "postgres-password"
        readable.write_text(password.read_text())
        if os.geteuid() == 0:
            os.chown(readable, user.pw_uid, user.pw_gid)
        readable.chmod(0o400)
        self._run_postgres("initdb", "-D", str(data), "-U", "airflow", f"--pwfile={readable}", "--auth=scram-sha-256", "-E", "UTF8")
        options = f"-c listen_addresses=127.0.0.1 -c port={self._postgres_port} -c unix_socket_directories={data} -c fsync=off"
        self._run_postgres("pg_ctl", "-D", str(data), "-w", "-l", str(data / "log"), "-o", options, "start")
        with_password = {**os.environ, "PGPASSWORD": password.read_text()}
        create = ["createdb", "-h", "127.0.0.1", "-p", str(self._postgres_port), "-U", "airflow", "airflow"]
        subprocess.run(create, env=with_password, check=True)

    def _run_postgres(self, *command: str) -> None:
        done = subprocess.run(
            self._as_postgres(*command), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, cwd="/", check=False
        )
        if done.returncode:
            raise RuntimeError(f"{command[0]} ended with {done.returncode}: {done.stderr[-1000:]}")

    def _as_postgres(self, program: str, *arguments: str) -> list[str]:
        folder = postgres_bin()
        assert folder is not None, "see `missing`"
        as_user = ["setpriv", "--reuid=postgres", "--regid=postgres", "--init-groups"] if os.geteuid() == 0 else []
        return [*as_user, str(folder / program), *arguments]

    def _log_in(self) -> str:
        passwords = json.loads((self._secrets / "airflow/passwords.json").read_text())
        name = next(iter(passwords))
        return str(self.api("/auth/token", {"username": name, "password": passwords[name]})["access_token"])

    def _wait(self, true: Any, what: str) -> None:
        until = time.monotonic() + READY_WITHIN_S
        while not true():
            for name, part in self.parts.items():
                if part.poll() is not None:
                    raise RuntimeError(f"{name} ended with {part.returncode}: {tail(self.folder / 'logs' / f'{name}.log')}")
            if time.monotonic() > until:
                raise RuntimeError(f"waited {READY_WITHIN_S:.0f} s for {what}; see {self.folder / 'logs'}")
            time.sleep(0.5)


def airflow(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "airflow", *arguments]


def tail(path: Path) -> str:
    return "\n".join(path.read_text(errors="replace").splitlines()[-15:])


def _session(pid: int) -> int:
    try:
        return os.getsid(pid)
    except OSError:
        return 0


def _is_job(process: psutil.Process) -> bool:
    """stage_job.py, or what descends from it."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return any("stage_job" in " ".join(p.cmdline()) for p in (process, *process.parents()))
    return False
