"""The Airflow task that runs one stage: the command you would type, as a job that outlives the task.

    with TaskGroup("quality"):
        StageOperator(task_id="crawl", stage="crawl", experiment="tiny", replicates=2, parameters=("corpus", "pages"), cwd="/project")

submits `python -m craw4llm run --json --only quality.crawl --replicates 2 --set corpus=... --set pages=... tiny` to a launcher
(plugins/launchers.py), follows it, and streams what it says into the task's log. No stage runs inside Airflow's process: torch stays out of
it, and a stage may have worker processes of its own. Values of the run's form reach the command as separate arguments, never a shell, a
template or a path.

Who dies, and what follows (scripts/airflow_kills.py shows it):

    task process, supervisor, worker, scheduler    the job runs on; the next try finds it by its id in Airflow's task state and follows it
    api-server                                     the job runs on; the task waits for the server
    marked failed, SIGTERM to the task, time-out   the job saves and ends within 26 s, unless a next try takes it over in the first 6
    cleared                                        the job saves and ends, then the new try starts it again
    the command, by the out-of-memory killer       the task fails and says so; the next try goes on from what was saved

Two tasks never do the same work twice: the launcher starts no second copy of a job, and the artifact's lock makes the command of another
run wait, which then finds the artifact finished.
"""

import collections
import contextlib
import functools
import hashlib
import json
import math
import os
import re
import shlex
import signal
import subprocess
import sys
import time
import urllib.parse
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from airflow.sdk import Asset, AssetAlias, BaseOperator, BaseOperatorLink, ResumableJobMixin
from airflow.sdk.exceptions import AirflowException, AirflowFailException

from launchers import AS_CONFIGURED, STOPPED, Job, JobId, Launcher, Outcome, launcher_named
from placement import PlacementError, place_of

LAST_LINES = 12  # of the command, repeated in the error
LINE_CHARS = 4000  # a longer line of the log is cut
RENEW_EVERY_S = 5.0
QUICK_LOOKS_S, QUICK_S, SLOW_S = 10.0, 0.2, 0.5  # between two looks at a job's lines; its end is seen at once by the local launcher
HOPELESS = {2: "a parameter or config", 3: "an input from outside"}  # exit codes of craw4llm that a retry cannot change
MAIN_COUNTS = 40


class ArtifactLink(BaseOperatorLink):
    """From a task to its artifact: manifest, files and, of training and evaluation, curves."""

    name = "Manifest and curves"

    def get_link(self, operator: BaseOperator, *, ti_key: Any) -> str:
        index = -1 if ti_key.map_index is None else ti_key.map_index
        query = {"dag_id": ti_key.dag_id, "run_id": ti_key.run_id, "task_id": ti_key.task_id, "map_index": index}
        return f"/craw4llm/task?{urllib.parse.urlencode(query)}"


class StageOperator(ResumableJobMixin, BaseOperator):
    """Runs one stage of `experiment` and returns what it made: node, stage, fingerprint, digest, path, counts, missing, built.

    The full task id, task groups included, is the stage's id: what `craw4llm plan` lists. `node`: another id of a stage, where tasks have
    other names (mapped tasks). stage: the kind of stage, shown below the task's name. parameters: names of the experiment's parameters;
    their values are the run's. fields: further fields of the run's form. replicates: of the graph that the id is looked up in. cwd: folder
    of the project, where relative paths start. part: "I/N", one part of the stage. shown_as: name of a mapped task. launcher: "" takes
    $CRAW4LLM_LAUNCHER, else what placement.py says of this kind of stage, else local.
    Raises AirflowFailException (no retry) where a retry cannot help: a wrong parameter, a missing input. AirflowException for the rest.
    """

    ui_color = "#eef3f8"
    external_id_key = "job"
    # Resolved from mapped arguments and XCom; a resolved value is not rendered, and the run's values are none of them.
    template_fields: Sequence[str] = ("node", "experiment", "replicates", "part", "shown_as", "launcher")
    operator_extra_links = (ArtifactLink(),)

    def __init__(
        self,
        *,
        stage: str,
        experiment: str,
        replicates: int | str,
        parameters: Sequence[str],
        cwd: str,
        fields: Sequence[str] = (),
        node: str = "",
        part: str = "",
        shown_as: str = "",
        launcher: str = "",
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.custom_operator_name = stage
        self.stage = stage
        self.experiment = experiment
        self.replicates = replicates
        self.parameters = tuple(parameters)
        self.fields = tuple(fields)
        self.cwd = cwd
        self.node = node
        self.part = part
        self.shown_as = shown_as
        self.launcher = launcher
        self._job: JobId | None = None
        self._owner = ""
        self._stopped = False

    @functools.cached_property
    def jobs(self) -> Launcher:
        """The launcher that runs the job."""
        chosen = "" if self.launcher == AS_CONFIGURED else self.launcher
        return launcher_named(chosen or os.environ.get("CRAW4LLM_LAUNCHER") or place_of(self.stage).launcher)

    @property
    def node_name(self) -> str:
        """The stage's id in the experiment."""
        return self.node or self.task_id

    def execute(self, context: Any) -> dict[str, Any]:
        refuse_unknown(self.experiment, (*self.parameters, *self.fields), context)
        self._owner = f"{context['ti'].try_number}-{uuid.uuid4().hex}"
        record = self.execute_resumable(context)
        if store := context.get("task_state_store"):
            store.delete(self.external_id_key)  # a task that is cleared after its success does its work again
        if not self.part:
            self.publish(record, context)
        return record

    def command(self, params: Mapping[str, Any]) -> list[str]:
        """The argument list for the values `params`; a value that is None is left to the experiment's default."""
        arguments = ["--json", "--jobs=1", f"--only={self.node_name}", f"--replicates={self.replicates}"]
        if self.part:
            arguments.append(f"--part={self.part}")
        arguments += place_of(self.stage).arguments
        return craw4llm("run", *arguments, *settings(self.parameters, params), "--", self.experiment)

    # --- ResumableJobMixin

    def submit_job(self, context: Mapping[str, Any]) -> JobId:
        command = self.command(context["params"])
        self.log.info("%s (in %s)", shlex.join(command), self.cwd)
        job = Job(
            folder=job_folder(Path(self.cwd), context["ti"]),
            command=command,
            cwd=self.cwd,
            environment=stage_environment(),
            stage=self.stage,
            generation=generation(context),
            tag=os.environ.get("AIRFLOW_HOME", ""),
        )
        try:
            self._job = self.jobs.submit(job)
        except PlacementError as error:
            raise AirflowFailException(f"{self.node_name}: {error}") from error
        except (OSError, TimeoutError) as error:
            raise AirflowException(f"{self.node_name}: the launcher could not start it: {error}") from error
        return self._job

    def get_job_status(self, external_id: Any, context: Any) -> str:
        if external_id["launcher"] != self.jobs.name:  # the placement was changed since: a job is followed where it runs
            self.jobs = launcher_named(external_id["launcher"])
        status = self.jobs.status(external_id)
        if status == "running" and external_id["generation"] != generation(context):
            self.jobs.cancel(external_id)  # the run was cleared since: `submit` waits for the end
            return "cleared"
        if status == "succeeded":
            record = _record(self.jobs.result(external_id))
            if record is None or (not self.part and not (Path(record["path"]) / "manifest.json").is_file()):
                return "gone"
        return status

    def is_job_active(self, status: str) -> bool:
        return status == "running"

    def is_job_succeeded(self, status: str) -> bool:
        return status == "succeeded"

    def poll_until_complete(self, external_id: Any, context: Any) -> dict[str, Any]:  # type: ignore[override]  # the mixin returns it
        """Follows the job to its end, its lines into the log."""
        self._job = external_id
        self.jobs.attach(external_id, self._owner)
        if self._stopped:  # on_kill came before there was anything to stop
            self.on_kill()
        self.log.info("job %s", external_id["folder"])
        last: collections.deque[str] = collections.deque(maxlen=LAST_LINES)
        place: dict[str, int] | None = None
        began = renewed = time.monotonic()
        while True:
            status = self.jobs.status(external_id)
            lines, place = self.jobs.tail(external_id, place)
            for line in lines:
                self._say(line, last)
            if status not in ("running", "ending"):
                break
            if self._stopped:
                raise AirflowException(
                    f"{self.node_name}: told to stop. Its job saves and ends within half a minute, unless the next try takes it over; "
                    "what it has finished is kept"
                )
            now = time.monotonic()
            if now - renewed >= RENEW_EVERY_S:
                renewed = now
                self.jobs.attach(external_id, self._owner)
            self.jobs.wait(external_id, QUICK_S if now - began < QUICK_LOOKS_S else SLOW_S)
        while lines:
            lines, place = self.jobs.tail(external_id, place)
            for line in lines:
                self._say(line, last)
        outcome = self.jobs.result(external_id)
        if status != "succeeded":
            raise failure(self.node_name, outcome, last)
        return self.get_job_result(external_id, context)

    def get_job_result(self, external_id: Any, context: Any) -> dict[str, Any]:
        """What the job made, in plain JSON."""
        outcome = self.jobs.result(external_id)
        record = _record(outcome)
        if record is None:
            said = "\n".join(outcome.output[-LAST_LINES:])
            raise AirflowException(f"{self.node_name}: the command ended well but did not say what it made\n{said}")
        if self.part:
            self.log.info("part %s: %s", self.part, record["done"])
            return record
        made = "built" if record["built"] else "was finished"
        self.log.info("%s %s %s: %s", record["stage"], record["fingerprint"], made, record["path"])
        counts = record.pop("counts")
        reasons = {name: why_missing(value) for name, value in counts.items()}
        record["counts"] = dict([(name, value) for name, value in counts.items() if not reasons[name]][:MAIN_COUNTS])
        record["missing"] = {name: reason for name, reason in reasons.items() if reason}
        return record

    def on_kill(self) -> None:
        """Airflow's word that the task was stopped or has timed out. Returns at once: the job's own process does the rest."""
        self._stopped = True
        if self._job is not None:
            self.jobs.release(self._job, self._owner)

    # --- what others see of it

    def publish(self, record: Mapping[str, Any], context: Mapping[str, Any]) -> None:
        """Metadata of the Asset events of this task: where the manifest is, what it is, the main counts."""
        extra = {
            "manifest": f"{record['path']}/manifest.json",
            **{name: record[name] for name in ("node", "stage", "fingerprint", "digest", "built", "counts")},
        }
        for outlet in self.outlets:
            if isinstance(outlet, Asset):
                context["outlet_events"][outlet].extra = extra
            elif isinstance(outlet, AssetAlias) and republished(artifact_root(Path(self.cwd)), outlet.name, record["fingerprint"]):
                news = Asset(name=outlet.name, uri=f"x-craw4llm://published/{'/'.join(outlet.name.split()[1:])}", group="craw4llm")
                context["outlet_events"][outlet].add(news, extra=extra)

    def _say(self, line: str, last: collections.deque[str]) -> None:
        if _artifact(line) is not None:
            return
        text = inert(line).rstrip()
        if text:
            last.append(text)
            self.log.info("%s", text)


class RefreshOperator(StageOperator):
    """The report over all replicates that are finished, whoever made them."""

    def submit_job(self, context: Mapping[str, Any]) -> JobId:
        given = settings(self.parameters, context["params"])
        ask = craw4llm("claim", f"--run-id={context['run_id']}", *given, "--", self.experiment)
        said = subprocess.run(ask, cwd=self.cwd, env=stage_environment(), capture_output=True, text=True, timeout=600, check=False)
        if said.returncode:
            raise AirflowException(f"{self.node_name}: {inert(said.stderr[-2000:])}")
        finished = int(json.loads(said.stdout)["finished"])
        if not finished:
            raise AirflowException(f"{self.node_name}: no replicate of {self.experiment} is finished, so there is nothing to report on")
        self.log.info("the report is over the replicates 0 to %s", finished - 1)
        self.replicates = finished
        return super().submit_job(context)


def republished(root: Path, name: str, fingerprint: str) -> bool:
    """Whether the artifact that is declared under this name was another one when it was last seen. Remembers the new one."""
    path = root / "index" / "published" / f"{hashlib.sha256(name.encode()).hexdigest()[:16]}.json"
    before = None
    with contextlib.suppress(OSError, ValueError):
        before = json.loads(path.read_text())["fingerprint"]
    if before != fingerprint:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_name(f"{path.name}.{os.getpid()}")
        temporary.write_text(json.dumps({"name": name, "fingerprint": fingerprint}))
        temporary.replace(path)
    return before not in (None, fingerprint)


def craw4llm(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "craw4llm", *arguments]


def settings(names: Sequence[str], params: Mapping[str, Any]) -> list[str]:
    """`--set NAME=VALUE` for every value that is given; None is left to the experiment's default."""
    found = []
    for name in names:
        if params[name] is not None:
            found += ["--set", f"{name}={_text(name, params[name])}"]
    return found


def refuse_unknown(experiment: str, parameters: Sequence[str], context: Mapping[str, Any]) -> None:
    """Airflow takes any key in the conf of a run that is triggered by API: a misspelt one must not pass as the default."""
    run = context["dag_run"]
    unknown = sorted(set(run.conf or {}) - set(parameters)) if run is not None else []
    if unknown:
        raise AirflowFailException(
            f"{experiment} has no parameter {inert(', '.join(unknown))}; it has: {', '.join(sorted(parameters)) or 'none'}"
        )


def stage_environment() -> dict[str, str]:
    """Airflow's own settings and secrets are none of a stage's business."""
    return {name: value for name, value in os.environ.items() if "AIRFLOW" not in name} | {"PYTHONUNBUFFERED": "1"}


def artifact_root(cwd: Path) -> Path:
    """The artifact root of the command line's default: $CRAW4LLM_ROOT, else `artifacts` in the project."""
    return cwd / (os.environ.get("CRAW4LLM_ROOT") or "artifacts")


def job_folder(cwd: Path, ti: Any) -> Path:
    """Folder of a task instance's job. Ids of runs are free text: they enter as a hash."""
    run = hashlib.sha256(ti.run_id.encode()).hexdigest()[:16]
    index = "" if ti.map_index is None or ti.map_index < 0 else f".{ti.map_index}"
    return artifact_root(cwd) / "logs" / "jobs" / ti.dag_id / run / f"{ti.task_id}{index}"


def generation(context: Mapping[str, Any]) -> int:
    """How often the run was cleared."""
    return int(getattr(context["dag_run"], "clear_number", None) or 0)


def inert(text: str) -> str:
    """A line of a log that no viewer acts on: no control characters, no marks that Airflow's log view takes for groups."""
    text = re.sub(r"::(?=(end)?group::)", ": :", text[:LINE_CHARS])
    return "".join(c if c.isprintable() or c == "\t" else f"\\x{ord(c):02x}" for c in text)


def _text(name: str, value: Any) -> str:
    text = str(value).lower() if isinstance(value, bool) else ",".join(map(str, value)) if isinstance(value, list) else str(value)
    try:
        if "\0" in text:
            raise ValueError
        os.fsencode(text)
    except ValueError:
        raise AirflowFailException(f"{name} is {text!r}: it holds a character that no argument may hold") from None
    return text


def _artifact(line: str) -> dict[str, Any] | None:
    """The record of an artifact, if the line is one (see `craw4llm run --json`)."""
    if not line.startswith('{"node": '):
        return None
    try:
        return dict(json.loads(line))
    except ValueError:
        return None


def _record(outcome: Outcome) -> dict[str, Any] | None:
    return next((found for line in reversed(outcome.output) if (found := _artifact(line)) is not None), None)


def why_missing(value: Any) -> str:
    """Why a count is no number; "" where it is one. JSON has no NaN, and nothing missing becomes a number."""
    if value is None:
        return "the stage has no value for it"
    return f"it is {value}, no number" if isinstance(value, float) and not math.isfinite(value) else ""


def failure(node_id: str, outcome: Outcome, last: Sequence[str]) -> AirflowException:
    """The error for a job that did not succeed, with its cause and its last lines."""
    said = f"; {outcome.scheduler}" if outcome.scheduler else ""
    said += "; its last lines:\n" + "\n".join(last) if last else ""
    peak = f" (peak memory of one process: {outcome.peak_memory_bytes / 2**30:.2f} GiB)" if outcome.peak_memory_bytes else ""
    if outcome.out_of_memory and outcome.code not in (0, STOPPED, *HOPELESS):
        return AirflowException(f"{node_id}: out of memory: the kernel's out-of-memory killer ended it or one of its processes{peak}{said}")
    if outcome.stopped:
        how = "has saved where it was" if outcome.code == STOPPED else "ended"
        return AirflowException(f"{node_id}: {outcome.stopped}: it was told to stop and {how}; the next attempt goes on from there{said}")
    if outcome.signal == signal.SIGKILL:
        return AirflowException(f"{node_id}: killed by signal 9, by a person or for want of memory on another level{peak}{said}")
    if outcome.signal is not None:
        with contextlib.suppress(ValueError):
            return AirflowException(f"{node_id}: ended by {signal.Signals(outcome.signal).name}{peak}{said}")
        return AirflowException(f"{node_id}: ended by signal {outcome.signal}{peak}{said}")
    if outcome.code is None:
        return AirflowException(f"{node_id}: its job is gone without an exit record (the machine went down?); it is started again{said}")
    if outcome.code in HOPELESS:
        return AirflowFailException(f"{node_id}: exit code {outcome.code}, {HOPELESS[outcome.code]}; not tried again{said}")
    return AirflowException(f"{node_id}: exit code {outcome.code}{said}")
