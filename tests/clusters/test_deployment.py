"""The files of a deployment: docker-compose.yaml as Compose reads it, secrets that are drawn, settings that agree, the values for
Kubernetes."""

import importlib
import json
import os
import re
import shutil
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import compose_trial
import pytest
import yaml
from airflow_cluster import settings_file

PROJECT = Path(__file__).resolve().parents[2]
SERVICES = {"secrets", "postgres", "redis", "migrate", "api-server", "scheduler", "dag-processor", "triggerer", "worker-cpu", "worker-gpu"}
LONG_LIVED = SERVICES - {"secrets", "migrate"}


def compose() -> dict[str, Any]:
    return dict(yaml.safe_load((PROJECT / "docker-compose.yaml").read_text()))


def commands() -> list[list[str]]:
    found = [["docker-compose"]] if shutil.which("docker-compose") else []
    if shutil.which("docker") and subprocess.run(["docker", "compose", "version"], capture_output=True, check=False).returncode == 0:
        found.append(["docker", "compose"])
    return found


@pytest.mark.parametrize("profile", [[], ["--profile", "gpu"]])
def test_compose_accepts_the_file(profile: list[str], tmp_path: Path) -> None:
    if not commands():
        pytest.skip("neither docker-compose nor the compose plugin is installed (Debian: apt install docker-compose)")
    for command in commands():
        environment = {"PATH": os.environ["PATH"], "HOME": str(tmp_path)}
        done = subprocess.run([*command, *profile, "config"], cwd=PROJECT, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        read = yaml.safe_load(done.stdout)
        if profile:
            assert set(read["services"]) == SERVICES
        reserved = read["services"].get("worker-gpu", {}).get("deploy", {}).get("resources", {}).get("reservations", {})
        # docker-compose 1.29 accepts a number from a variable in `config` and fails on it in `up`
        assert not profile or (reserved["devices"][0]["driver"], reserved["devices"][0]["count"]) in (("nvidia", "all"), ("nvidia", -1))


def test_every_service_is_kept_within_bounds() -> None:
    services = compose()["services"]
    assert set(services) == SERVICES
    for name, service in services.items():
        assert service["logging"]["options"]["max-size"], name
        assert "mem_limit" in service, name
        assert service["image"].startswith("${"), f"{name}: its image cannot be overridden"
        assert not service.get("privileged") and "cap_add" not in service and "network_mode" not in service
        if name in LONG_LIVED:
            assert "healthcheck" in service and "cpus" in service and service["restart"] == "unless-stopped", name
        if name not in ("postgres", "redis"):
            assert service["user"] == "${CRAW4LLM_UID:-50000}:0", name
    published = {name: service["ports"] for name, service in services.items() if "ports" in service}
    assert published == {"api-server": ["${BIND:-127.0.0.1}:${PORT:-8080}:8080"]}
    assert services["worker-gpu"]["profiles"] == ["gpu"]
    serving = [
        name
        for name, s in services.items()
        if "airflow" in s.get("command", [])[:1] and s["command"][1] in ("scheduler", "triggerer", "celery")
    ]
    assert len(serving) == 4 and all("--skip-serve-logs" in services[name]["command"] for name in serving)


def test_no_secret_has_a_default() -> None:
    text = (PROJECT / "docker-compose.yaml").read_text() + (PROJECT / "deploy" / "airflow.env").read_text()
    for line in text.splitlines():
        if re.search(r"FERNET_KEY|JWT_SECRET|SECRET_KEY|SQL_ALCHEMY_CONN|BROKER_URL|RESULT_BACKEND", line) and not line.lstrip().startswith(
            "#"
        ):
            assert re.search(r"_CMD: cat /secrets/\w+$", line) or line.endswith(": postgresql+psycopg2://workers-have-no-database/none"), (
                line
            )
    assert "POSTGRES_PASSWORD:" not in text and "_PASSWORD=" not in text


def test_env_example_names_exactly_the_settings_of_the_file() -> None:
    used = dict(re.findall(r"\$\{(\w+):-([^}]*)\}", (PROJECT / "docker-compose.yaml").read_text()))
    listed = dict(re.findall(r"^#(\w+)=([^\s#]*)", (PROJECT / "deploy" / "env.example").read_text(), re.MULTILINE))
    assert set(used) == set(listed) - {"COMPOSE_PROFILES"}
    assert {name: value for name, value in used.items() if value} == {n: listed[n] for n in used if used[n]}


def make_secrets(folder: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(PROJECT / "deploy/make_secrets.py"), str(folder)], capture_output=True, text=True, check=False
    )


def test_secrets_are_drawn_once_and_belong_together(tmp_path: Path) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    assert make_secrets(one).returncode == make_secrets(two).returncode == 0
    files = sorted(p.relative_to(one) for p in one.rglob("*") if p.is_file() and p.name != "complete")
    assert len(files) == 11 and all((one / p).read_text() != (two / p).read_text() for p in files)
    assert all(stat.S_IMODE((one / p).stat().st_mode) == 0o600 for p in files if p.parts[0] in ("airflow", "worker"))
    # PostgreSQL and Redis read theirs as users of their own: 0700 kept them out of their volumes
    modes = [stat.S_IMODE((one / name).stat().st_mode) for name in ("airflow", "worker", "postgres", "redis")]
    assert modes == [0o700, 0o700, 0o755, 0o755]
    assert (one / "postgres/password").read_text() in (one / "airflow/database_url").read_text()
    before = {p: (one / p).read_text() for p in files}
    assert make_secrets(one).stdout == "secrets: kept\n" and {p: (one / p).read_text() for p in files} == before
    shutil.rmtree(one / "redis")  # a volume was deleted: new secrets would lock the others out
    refused = make_secrets(one)
    assert refused.returncode == 1 and "redis is missing" in refused.stderr and not (one / "redis").exists()


def test_a_stage_can_read_no_secret_but_the_queues_address(tmp_path: Path) -> None:
    """Stages run in a worker's container as the worker's user."""
    services = compose()["services"]
    for name in ("worker-cpu", "worker-gpu"):
        assert [v for v in services[name]["volumes"] if "secret" in v] == ["secrets-worker:/secrets:ro"]
        read = {v.removeprefix("cat /secrets/") for v in services[name]["environment"].values() if v.startswith("cat /secrets/")}
        assert read == {"broker_url", "result_backend"}
    assert not any(
        "secrets-" in str(services[name]["volumes"]) for name in ("postgres", "redis") if f"secrets-{name}" not in str(services[name])
    )
    assert make_secrets(tmp_path).returncode == 0
    readable = "".join(p.read_text() for p in (tmp_path / "worker").iterdir())
    for name in ("fernet_key", "jwt_secret", "api_secret_key", "passwords.json"):
        assert (tmp_path / "airflow" / name).read_text() not in readable
    assert (tmp_path / "postgres" / "password").read_text() not in readable and "postgresql" not in readable
    assert sorted(p.name for p in (tmp_path / "worker").iterdir()) == ["broker_url", "complete", "result_backend"]


def test_a_deployment_from_before_workers_had_secrets_of_their_own(tmp_path: Path) -> None:
    assert make_secrets(tmp_path).returncode == 0
    database = (tmp_path / "airflow/database_url").read_text()
    (tmp_path / "airflow/result_backend").write_text(f"db+{database}")  # with the password of the database
    shutil.rmtree(tmp_path / "worker")
    before = {p: p.read_text() for p in tmp_path.rglob("*") if p.is_file() and p.name != "result_backend"}
    assert make_secrets(tmp_path).stdout == "secrets: made\n"
    assert {p: p.read_text() for p in before} == before
    results = {(tmp_path / name / "result_backend").read_text() for name in ("airflow", "worker")}
    broker = (tmp_path / "worker/broker_url").read_text()
    assert broker == (tmp_path / "airflow/broker_url").read_text() and results == {broker.removesuffix("/0") + "/1"}


# What deploy/helm-values.yaml relies on, of the schema of the chart that it names (`chart/values.schema.json` at its release). A key that
# the chart does not know is no error to Helm.
CHART = "1.21.0"
KEYS = {
    "executor", "airflowVersion", "defaultAirflowRepository", "defaultAirflowTag", "uid", "gid", "fernetKeySecretName", "jwtSecretName",
    "apiSecretKeySecretName", "postgresql.enabled", "data.metadataSecretName", "redis.enabled", "statsd.enabled", "config.core", "env",
    "createUserJob.enabled", "volumes", "volumeMounts", "dags.persistence.enabled", "dags.gitSync.enabled", "logs.persistence.enabled",
    "logs.persistence.size", "workers.kubernetes.serviceAccount.create", "workers.kubernetes.serviceAccount.name",
    "workers.kubernetes.resources", "scheduler.resources", "scheduler.logGroomerSidecar.retentionDays",
    "scheduler.logGroomerSidecar.command", "scheduler.logGroomerSidecar.args", "scheduler.logGroomerSidecar.resources",
    "apiServer.resources", "apiServer.extraInitContainers", "apiServer.extraVolumes", "apiServer.extraVolumeMounts",
    "dagProcessor.enabled", "dagProcessor.resources", "dagProcessor.logGroomerSidecar.enabled", "triggerer.resources",
    "triggerer.logGroomerSidecar.enabled",
}  # fmt: skip


def test_the_values_have_keys_that_the_chart_knows() -> None:
    text = (PROJECT / "deploy" / "helm-values.yaml").read_text()
    values = yaml.safe_load(text)

    def keys(value: object, path: str = "") -> set[str]:
        if path in KEYS or not isinstance(value, dict):
            return {path}
        return {found for name, item in value.items() for found in keys(item, f"{path}.{name}".lstrip("."))}

    assert keys(values) == KEYS
    assert f"--version {CHART} " in text


def test_the_values_leave_none_of_the_charts_defaults_that_this_image_cannot_do() -> None:
    """Rendered with the chart's defaults they gave an api-server without its manager of logins, a user admin/admin, probes that killed the
    scheduler (no /entrypoint) and groomers that ended at once (no /clean-logs)."""
    from airflow.api_fastapi.auth.managers.base_auth_manager import BaseAuthManager
    from airflow.configuration import conf

    values = yaml.safe_load((PROJECT / "deploy" / "helm-values.yaml").read_text())
    module, _, name = values["config"]["core"]["auth_manager"].rpartition(".")
    assert issubclass(getattr(importlib.import_module(module), name), BaseAuthManager)
    assert set(values["config"]["core"]) <= set(conf.configuration_description["core"]["options"])
    assert values["createUserJob"] == {"enabled": False}
    mounted = {m["mountPath"] for m in values["apiServer"]["extraVolumeMounts"]}
    assert Path(values["config"]["core"]["simple_auth_manager_passwords_file"]).parent.as_posix() in mounted
    assert "ln -s /usr/bin/env /entrypoint" in (PROJECT / "Dockerfile").read_text()
    assert not values["dagProcessor"]["logGroomerSidecar"]["enabled"] and not values["triggerer"]["logGroomerSidecar"]["enabled"]
    assert "/clean-logs" not in json.dumps(values)
    accounts = [
        d["metadata"]["name"]
        for d in yaml.safe_load_all((PROJECT / "deploy/kubernetes-jobs.yaml").read_text())
        if d["kind"] == "ServiceAccount"
    ]
    made = values["workers"]["kubernetes"]["serviceAccount"]
    assert made["create"] and made["name"] not in accounts  # Helm refuses an object that somebody else made


def test_the_same_settings_on_kubernetes() -> None:
    values = yaml.safe_load((PROJECT / "deploy" / "helm-values.yaml").read_text())
    shared = settings_file()
    given = {entry["name"]: entry["value"] for entry in values["env"]}
    assert values["executor"] == "KubernetesExecutor" and values["uid"] == 50000
    assert {n: v for n, v in given.items() if n in shared} == {n: shared[n] for n in given if n in shared}
    assert sum(n in shared for n in given) >= 4
    assert "password" not in json.dumps(values).lower().replace("passwords_file", "").replace("passwords.json", "")


def test_the_longest_time_out_of_a_task_is_shorter_than_redis_patience() -> None:
    limits = (PROJECT / "plugins" / "wiring.py").read_text()
    hours = max(eval(text, {}) for text in re.findall(r"Limits\(\d+, ([\d *]+)", limits))
    assert int(settings_file()["AIRFLOW__CELERY_BROKER_TRANSPORT_OPTIONS__VISIBILITY_TIMEOUT"]) > hours * 3600


def test_the_image_takes_the_locks_and_no_root() -> None:
    text = (PROJECT / "Dockerfile").read_text()
    assert "-r requirements/lock.txt" in text
    assert [line for line in text.splitlines() if line.startswith("USER")] == ["USER 50000:0"]
    ignored = (PROJECT / ".dockerignore").read_text().splitlines()
    for source in re.findall(r"^COPY (\S+)", text, re.MULTILINE):
        assert any(line.strip("!/") == source.split("/")[0] for line in ignored if line.startswith("!")), (
            f"{source} is not in the build context"
        )


@pytest.mark.parametrize("text", [compose_trial.POSTGRES, compose_trial.REDIS])
def test_the_images_of_the_trial_have_an_instruction_a_line(text: str) -> None:
    assert {line.partition(" ")[0] for line in text.splitlines()} <= {"FROM", "RUN", "COPY", "WORKDIR", "USER", "CMD"}
    assert not [line for line in text.splitlines() if line.startswith("RUN") and (" COPY " in line or " WORKDIR " in line)]


def test_settings_of_airflow_in_trials_and_deployments_exist() -> None:
    """A misspelt name is no error to Airflow: the default stays."""
    import cluster_trial
    from airflow.configuration import conf

    names = {**settings_file(), **cluster_trial.quick_heartbeats()}
    for name in names:
        section, _, key = name.removeprefix("AIRFLOW__").partition("__")
        assert conf.get_default_value(section.lower(), key.lower()) is not None or section == "CELERY_BROKER_TRANSPORT_OPTIONS", name


@pytest.mark.parametrize("name", ["gpu", "slurm", "kubernetes"])
def test_shipped_placements_are_valid(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from placement import options_of, place_of

    monkeypatch.setenv("CRAW4LLM_PLACEMENT", f"deploy/placement-{name}.toml")
    place = place_of("train")
    assert (place.queue, place.launcher) == (("gpu", "local") if name == "gpu" else ("", name))
    assert place_of("select").launcher == "local"
    if name == "slurm":
        from slurm_launcher import sbatch_options

        assert "--nodes=2" in sbatch_options(options_of("slurm", "train")) and "--mem=64G" in sbatch_options(options_of("slurm", "train"))


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("[stages.train]\nlauncher = 'slrum'", "slrum"),
        ("[stages.train]\nqueu = 'gpu'", "queu"),
        ("[stages.train]\narguments = ['--set=pages=1']", "--set=pages=1"),
        ("[stage.train]", "stage"),
        ("[stages.trian]\nlauncher = 'slurm'", r"stages\.trian is not known; expected corpus, crawl, .*train"),
        ("[stages.train]\n[kubernetes.trian]\ngpus = 8", r"kubernetes\.trian is not known"),
        ("[slurm]\npartition = 'gpu'", r"slurm\.partition is not known"),
        ("slurm.train = 'gpu'", r"slurm\.train is 'gpu'; expected a table"),
        ("[stages", "cannot be read"),
    ],
)
def test_placements_that_cannot_be_meant(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, word: str) -> None:
    from placement import PlacementError, place_of

    path = tmp_path / "placement.toml"
    path.write_text(text)
    monkeypatch.setenv("CRAW4LLM_PLACEMENT", str(path))
    with pytest.raises(PlacementError, match=word):
        place_of("train")


def test_a_placement_may_set_every_option_that_is_of_execution() -> None:
    """All options of `craw4llm run` but those that say what is run, and those that the task sets itself."""
    from craw4llm.__main__ import cli
    from placement import EXECUTION_OPTIONS

    options = {name for option in cli.commands["run"].params for name in (*option.opts, *option.secondary_opts) if name.startswith("--")}
    assert options - set(EXECUTION_OPTIONS) == {"--set", "--replicates", "--root", "--only", "--part", "--arm", "--jobs", "--json"}
    assert set(EXECUTION_OPTIONS) <= options
