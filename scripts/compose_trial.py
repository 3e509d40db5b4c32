#!/usr/bin/env python
"""docker-compose.yaml tried as it stands, with no registry: builds the images from Debian packages, starts the stack, runs `tiny` in it.

    python scripts/compose_trial.py [--folder build/compose-trial] [--keep] [--compose COMMAND ...] [--patience 1]

1. a base image with debootstrap, on it the project's image (Dockerfile), PostgreSQL's and Redis's
2. dockerd with its own data, unless DOCKER_HOST names one; for the stack in a network namespace that nothing outside can reach
3. with each COMMAND (default: the compose plugin and docker-compose, what is installed): `up`, all services healthy; a worker sees no
   secret but the queue's address; logged in with the drawn password, `tiny` triggered by REST on a small web
4. the same by the command line in a container: the digests must be equal; `down -v`
5. dockerd ended; without --keep the images, too

Prints a table and one JSON object; exits with 1 on a difference. Needs root, dockerd, docker-compose or the compose plugin, debootstrap,
iptables, nsenter and ip (Debian: docker.io docker-compose debootstrap iptables iproute2 util-linux), about 8 GB of disk and 15 minutes;
`--patience 3` on a busy machine. Says what is missing and exits with 77 where it cannot be tried.
"""

import argparse
import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

PROJECT = Path(__file__).resolve().parent.parent
NAMESPACE = "craw4llm-trial"
NAME = "craw4llmtrial"
SMALL = {"corpus": "synthetic", "pages": 100, "train_tokens": 40_000}
SUITE = "bookworm"
IMAGES = ("craw4llm:cpu", "craw4llm-trial-postgres", "craw4llm-trial-redis", "craw4llm-trial-base")
CERTIFICATES = ("PIP_CERT", "SSL_CERT_FILE", "REQUESTS_CA_BUNDLE")
POSTGRES = """FROM craw4llm-trial-base
RUN apt-get update && apt-get install -y --no-install-recommends postgresql && rm -rf /var/lib/apt/lists/*
RUN mkdir -p /var/lib/postgresql/data /run/postgresql && chown -R postgres /var/lib/postgresql /run/postgresql
RUN ln -s /usr/lib/postgresql/*/bin/* /usr/local/bin/
COPY start.sh /start.sh
USER postgres
CMD ["bash", "/start.sh"]
"""
POSTGRES_START = """set -eu
cd /var/lib/postgresql/data
if [ ! -s pgdata/PG_VERSION ]; then
    initdb -D pgdata -E UTF8 -U "$POSTGRES_USER" --pwfile="$POSTGRES_PASSWORD_FILE" --auth=scram-sha-256 --auth-local=trust
    echo "host all all all scram-sha-256" >> pgdata/pg_hba.conf
    pg_ctl -D pgdata -w -o "-c listen_addresses=" start
    createdb -U "$POSTGRES_USER" "$POSTGRES_DB" || true
    pg_ctl -D pgdata -w stop
fi
exec postgres -D pgdata -c listen_addresses='*'
"""
REDIS = """FROM craw4llm-trial-base
RUN apt-get update && apt-get install -y --no-install-recommends redis-server && rm -rf /var/lib/apt/lists/*
RUN mkdir -p /data && chown redis /data
WORKDIR /data
USER redis
CMD ["redis-server"]
"""


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--folder", type=Path, default=PROJECT / "build" / "compose-trial")
    parser.add_argument("--keep", action="store_true", help="keep the images and the folder for another trial")
    parser.add_argument("--compose", action="append", type=str.split, metavar="COMMAND", help="a Compose to try with; may be given again")
    parser.add_argument("--patience", type=float, default=1.0, help="multiplies the time that everything may take")
    given = parser.parse_args()
    composes = given.compose or compose_commands()
    missing = [name for name in ("dockerd", "docker", "debootstrap", "iptables-nft", "nsenter", "ip") if shutil.which(name) is None]
    if not composes:
        missing.append("docker-compose")
    if os.geteuid() != 0:
        missing.append("root")
    if missing:
        print(f"not tried: {', '.join(missing)} missing")
        return 77
    folder = given.folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    rows: list[tuple[str, str]] = []
    began, ended = time.monotonic(), False
    try:
        with docker(folder, private=False):
            build(folder, rows)
        with docker(folder, private=True):
            for compose in composes:
                stack(folder, compose, given.patience, rows)
            if not given.keep and os.environ.get("DOCKER_HOST"):
                subprocess.run(["docker", "image", "rm", *IMAGES], capture_output=True, check=False)
        ended = True
    finally:
        for name, value in rows:
            print(f"{name:<34} {value}")
        good = ended and not any(value.startswith(("differ", "failed")) for _, value in rows)
        print(json.dumps({"ok": good, "seconds": round(time.monotonic() - began), **dict(rows)}))
        if not given.keep:
            shutil.rmtree(folder, ignore_errors=True)
    return 0 if good else 1


# --- a daemon


@contextlib.contextmanager
def docker(folder: Path, *, private: bool) -> Any:
    """A daemon. private: in a network namespace of its own, for the stack; else in the host's, without a bridge, for building."""
    if os.environ.get("DOCKER_HOST"):
        yield
        return
    if private:
        run("ip", "netns", "add", NAMESPACE)
        run("ip", "-n", NAMESPACE, "link", "set", "lo", "up")
    socket = folder / "docker.sock"
    tools = folder / "bin"
    tools.mkdir(exist_ok=True)
    for name in ("iptables", "ip6tables"):  # a namespace without the legacy tables
        link = tools / name
        link.unlink(missing_ok=True)
        link.symlink_to(shutil.which(f"{name}-nft") or name)
    os.environ["DOCKER_HOST"] = f"unix://{socket}"
    try:
        yield from daemon(folder, socket, tools, private)
    finally:
        del os.environ["DOCKER_HOST"]
        if private:
            subprocess.run(["ip", "netns", "delete", NAMESPACE], check=False)


def daemon(folder: Path, socket: Path, tools: Path, private: bool) -> Any:
    with (folder / "dockerd.log").open("wb") as log:
        process = subprocess.Popen(
            [
                *(("nsenter", f"--net=/run/netns/{NAMESPACE}", "dockerd") if private else ("dockerd", "--iptables=false", "--bridge=none")),
                *("--host", f"unix://{socket}", "--pidfile", str(folder / "docker.pid")),
                *("--data-root", str(folder / "data"), "--exec-root", str(folder / "exec"), "--storage-driver", storage_driver(folder)),
            ],
            stdout=log,
            stderr=log,
            start_new_session=True,
            env={**os.environ, "PATH": f"{tools}:{os.environ['PATH']}"},
        )  # fmt: skip
    try:
        wait(lambda: subprocess.run(["docker", "info"], capture_output=True, check=False).returncode == 0, 180, "dockerd", process, folder)
        yield
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)


def storage_driver(folder: Path) -> str:
    """overlay2 does not work upon an overlay: vfs then, which copies every layer."""
    kind = subprocess.run(["stat", "-f", "-c", "%T", str(folder)], capture_output=True, text=True, check=True).stdout.strip()
    return "vfs" if kind == "overlayfs" else "overlay2"


# --- images


def build(folder: Path, rows: list[tuple[str, str]]) -> None:
    began = time.monotonic()
    if not has_image("craw4llm-trial-base"):
        base = folder / "base"
        if not (base / "usr/bin/python3").exists():
            shutil.rmtree(base, ignore_errors=True)
            include = "python3,python3-venv,ca-certificates"
            run("debootstrap", "--variant=minbase", f"--include={include}", SUITE, str(base), log=folder / "debootstrap.log")
        for name in CERTIFICATES:  # a machine behind a proxy with a certificate of its own
            if os.path.isfile(os.environ.get(name, "")):
                shutil.copy(os.environ[name], base / "etc/ssl/certs/ca-certificates.crt")
        tar = subprocess.Popen(["tar", "-C", str(base), "-c", "."], stdout=subprocess.PIPE)
        subprocess.run(["docker", "import", "-", "craw4llm-trial-base"], stdin=tar.stdout, check=True, stdout=subprocess.DEVNULL)
        tar.wait()
    rows.append(("base image, s", f"{time.monotonic() - began:.0f}"))
    began = time.monotonic()
    context = folder / "context"
    shutil.rmtree(context, ignore_errors=True)
    shutil.copytree(
        PROJECT, context, ignore=shutil.ignore_patterns(".venv", ".git", "artifacts", "build", ".airflow", "__pycache__", ".*_cache")
    )
    (context / "deploy" / "build").mkdir(parents=True, exist_ok=True)
    if wheels := os.environ.get("PIP_FIND_LINKS"):
        for wheel in Path(wheels).glob("torch-*.whl"):
            shutil.copy(wheel, context / "deploy" / "build")
    for name in CERTIFICATES[:1]:
        if os.path.isfile(os.environ.get(name, "")):
            shutil.copy(os.environ[name], context / "deploy" / "build" / "proxy.crt")
    image("craw4llm:cpu", context, folder, "--build-arg", "BASE_IMAGE=craw4llm-trial-base")
    rows.append(("image craw4llm:cpu, s", f"{time.monotonic() - began:.0f}"))
    for name, text, start in (("postgres", POSTGRES, POSTGRES_START), ("redis", REDIS, "")):
        small = folder / name
        small.mkdir(exist_ok=True)
        (small / "Dockerfile").write_text(text)
        (small / "start.sh").write_text(start)
        image(f"craw4llm-trial-{name}", small, folder)
    for name in IMAGES[:3]:
        size = subprocess.run(["docker", "image", "inspect", "-f", "{{.Size}}", name], capture_output=True, text=True, check=True).stdout
        rows.append((f"image {name}, GB", f"{int(size) / 1e9:.2f}"))


def image(name: str, context: Path, folder: Path, *arguments: str) -> None:
    run(
        *("docker", "build", "--network", "host", "-t", name, *arguments, str(context)),
        log=folder / f"build-{name.replace(':', '-')}.log",
        env={**os.environ, "DOCKER_BUILDKIT": "0"},
    )  # fmt: skip


def has_image(name: str) -> bool:
    return subprocess.run(["docker", "image", "inspect", name], capture_output=True, check=False).returncode == 0


# --- the stack


def stack(folder: Path, command: list[str], patience: float, rows: list[tuple[str, str]]) -> None:
    env = {**os.environ, "POSTGRES_IMAGE": "craw4llm-trial-postgres", "REDIS_IMAGE": "craw4llm-trial-redis", "COMPOSE_PROJECT_NAME": NAME}
    compose = [*command, "-f", str(folder / "context" / "docker-compose.yaml"), "--project-directory", str(folder / "context")]
    version = output(env, *command, "version").splitlines()[0].split("version ")[-1].strip().split(",")[0]
    began = time.monotonic()

    def row(name: str, value: str) -> None:
        rows.append((f"Compose {version.removeprefix('v')}: {name}", value))

    def inside(service: str, *what: str) -> str:
        return output(env, *compose, "exec", "-T", service, *what)

    try:
        run(*compose, "up", "-d", "--no-build", env=env, log=folder / "up.log")
        services = ("api-server", "scheduler", "dag-processor", "triggerer", "worker-cpu", "postgres", "redis")
        wait(lambda: all(health(env, compose, name) == "healthy" for name in services), 420 * patience, "all services to be healthy")
        row("healthy after, s", f"{time.monotonic() - began:.0f}")
        row("user in the containers", inside("worker-cpu", "id", "-u").strip())
        seen = json.loads(inside("worker-cpu", "python", "-c", SECRETS))
        row("secrets in a worker", ", ".join(seen) if set(seen) == {"broker_url", "result_backend"} else f"differ: {seen}")
        began = time.monotonic()
        state = inside("api-server", "python", "-c", TRIGGER, json.dumps(SMALL), str(1200 * patience)).strip().splitlines()[-1]
        row("tiny in the stack", "success" if state == "success" else f"failed: {state}")
        row("tiny, s", f"{time.monotonic() - began:.0f}")
        settings = [part for name, value in SMALL.items() for part in ("--set", f"{name}={value}")]
        began = time.monotonic()
        by_hand = ("craw4llm", "run", "tiny", *settings, "--root", "/tmp/by-hand")
        run(*compose, "exec", "-T", "worker-cpu", *by_hand, env=env, log=folder / "by-hand.log")
        row("tiny by the command line, s", f"{time.monotonic() - began:.0f}")
        here, there = (json.loads(inside("worker-cpu", "python", "-c", DIGESTS, root)) for root in ("/artifacts", "/tmp/by-hand"))
        other = sorted(name for name in {*here, *there} if here.get(name) != there.get(name))
        row("digests of the command line", f"differ: {other}" if other or len(here) < 10 else f"equal ({len(here)})")
        again = sorted(name for name in services if restarts(env, compose, name))
        row("services that were restarted", f"failed: {again}" if again else "none")
    finally:
        with (folder / "services.log").open("wb") as log:
            subprocess.run([*compose, "logs", "--no-color"], env=env, stdout=log, stderr=subprocess.STDOUT, check=False)
        subprocess.run([*compose, "down", "-v", "-t", "20"], env=env, capture_output=True, check=False)


# Run inside a worker's container.
DIGESTS = """
import json, pathlib, sys
root = pathlib.Path(sys.argv[1])
print(json.dumps({str(p.parent.relative_to(root)): json.loads(p.read_text())["digest"] for p in root.glob("*/*/manifest.json")}))
"""
# Run inside a worker's container, as the user that a stage has: names of the secrets that it can read.
SECRETS = """
import json, os, pathlib
print(json.dumps(sorted(p.name for p in pathlib.Path("/secrets").rglob("*") if p.is_file() and os.access(p, os.R_OK) and p.stat().st_size)))
"""
# Runs inside the api-server's container: logs in, triggers, waits. On a busy machine an answer may fail to come: it is asked again.
TRIGGER = """
import json, sys, time, urllib.error, urllib.parse, urllib.request
def ask(path, body=None, token=None):
    request = urllib.request.Request("http://127.0.0.1:8080" + path, data=json.dumps(body).encode() if body is not None else None)
    request.add_header("Content-Type", "application/json")
    if token: request.add_header("Authorization", "Bearer " + token)
    return json.load(urllib.request.urlopen(request, timeout=30))
password = json.load(open("/secrets/passwords.json"))
name = next(iter(password))
state, run, token, until = "no answer", None, None, time.time() + float(sys.argv[2])
conf = {"logical_date": None, "dag_run_id": "trial", "conf": json.loads(sys.argv[1])}
while time.time() < until and state not in ("success", "failed"):
    try:
        token = token or ask("/auth/token", {"username": name, "password": password[name]})["access_token"]
        run = run or ask("/api/v2/dags/tiny/dagRuns", conf, token)
        state = ask("/api/v2/dags/tiny/dagRuns/trial", None, token)["state"]
    except urllib.error.HTTPError as error:
        if error.code == 409: run = "made, though its answer did not come"
        else: print(error, error.read()[:300], file=sys.stderr)
    except OSError as error:
        print(error, file=sys.stderr)
    time.sleep(3)
if state == "failed":
    for task in ask("/api/v2/dags/tiny/dagRuns/trial/taskInstances?limit=200", None, token)["task_instances"]:
        if task["state"] == "failed": print(task["task_id"], "failed", file=sys.stderr)
print(state)
"""


def health(env: dict[str, str], compose: list[str], service: str) -> str:
    return inspect(env, compose, service, "{{.State.Health.Status}}")


def restarts(env: dict[str, str], compose: list[str], service: str) -> int:
    return int(inspect(env, compose, service, "{{.RestartCount}}"))


def inspect(env: dict[str, str], compose: list[str], service: str, what: str) -> str:
    found = subprocess.run([*compose, "ps", "-q", service], env=env, capture_output=True, text=True, check=False).stdout.split()
    if not found:
        return "absent"
    done = subprocess.run(["docker", "inspect", "-f", what, found[0]], env=env, capture_output=True, text=True, check=False)
    return done.stdout.strip()


def compose_commands() -> list[list[str]]:
    """The compose plugin and docker-compose, those that are installed."""
    found = []
    if shutil.which("docker") and subprocess.run(["docker", "compose", "version"], capture_output=True, check=False).returncode == 0:
        found.append(["docker", "compose"])
    return [*found, ["docker-compose"]] if shutil.which("docker-compose") else found


def run(*command: str, log: Path | None = None, env: dict[str, str] | None = None) -> None:
    with contextlib.ExitStack() as stack:
        stream = stack.enter_context(log.open("wb")) if log else None
        done = subprocess.run(command, stdout=stream, stderr=subprocess.STDOUT if stream else None, env=env, check=False)
    if done.returncode:
        said = "\n" + log.read_text(errors="replace")[-3000:] if log else ""
        sys.exit(f"{' '.join(command[:6])} ... ended with {done.returncode}{said}")


def output(env: dict[str, str], *command: str) -> str:
    return subprocess.run(command, env=env, stdout=subprocess.PIPE, text=True, check=True).stdout


def wait(true: Any, seconds: float, what: str, process: subprocess.Popen[bytes] | None = None, folder: Path | None = None) -> None:
    until = time.monotonic() + seconds
    while not true():
        if process is not None and folder is not None and process.poll() is not None:
            sys.exit(f"{what} ended with {process.returncode}:\n{(folder / 'dockerd.log').read_text()[-2000:]}")
        if time.monotonic() > until:
            sys.exit(f"waited {seconds:.0f} s for {what}")
        time.sleep(1)


if __name__ == "__main__":
    sys.exit(main())
