"""The Airflow task that runs one stage: the command you would type, as a child process.

    with TaskGroup("quality"):
        StageOperator(
            task_id="crawl", stage="crawl", experiment="tiny", replicates=2, parameters=("corpus", "pages"), cwd="/project"
        )

runs `python -m craw4llm run --json --only quality.crawl --replicates 2 --set corpus=... --set pages=... tiny` and streams what it says into
the task's log. No stage runs inside Airflow's process: torch stays out of it, and a stage may have worker processes of its own. Values of
the run's form reach the command as separate arguments, never a shell or a template.

Two tasks never do the same work twice: the artifact's lock makes the second one wait, and it then finds the artifact finished. When the
task is stopped, times out or dies, the whole process group of the command is ended by `guard.py`.
"""

import collections
import contextlib
import json
import os
import shlex
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from airflow.sdk import BaseOperator
from airflow.sdk.exceptions import AirflowException, AirflowFailException

GUARD = Path(__file__).with_name("guard.py")
GRACE_S = 20.0  # from SIGTERM to SIGKILL: time for a training run to save
LAST_LINES = 12  # of the command, repeated in the error
HOPELESS = {2: "a parameter or config", 3: "an input from outside"}  # exit codes of craw4llm that a retry cannot change


class StageOperator(BaseOperator):
    """Runs one stage of `experiment` and returns what it made: node, stage, fingerprint, digest, path, counts, built.

    The full task id, task groups included, is the stage's id: what `craw4llm plan` lists. (`node_id` is Airflow's word for it.)
    stage: the kind of stage, shown below the task's name. parameters: names of the experiment's parameters; their values are the run's.
    cwd: folder of the project, where relative paths start. grace_s: seconds from SIGTERM to SIGKILL when the task is stopped.
    Raises AirflowFailException (no retry) where a retry cannot help: a wrong parameter, a missing input. AirflowException for the rest.
    """

    ui_color = "#eef3f8"

    def __init__(
        self,
        *,
        stage: str,
        experiment: str,
        replicates: int,
        parameters: Sequence[str],
        cwd: str,
        grace_s: float = GRACE_S,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.custom_operator_name = stage
        self.experiment = experiment
        self.replicates = replicates
        self.parameters = tuple(parameters)
        self.cwd = cwd
        self.grace_s = grace_s
        self._process: subprocess.Popen[str] | None = None
        self._stopped = False

    def execute(self, context: Mapping[str, Any]) -> dict[str, Any]:
        run = context["dag_run"]
        unknown = sorted(set(run.conf or {}) - set(self.parameters)) if run is not None else []
        if unknown:
            raise AirflowFailException(
                f"{self.experiment} has no parameter {', '.join(unknown)}; it has: {', '.join(sorted(self.parameters)) or 'none'}"
            )
        return self.run_command(self.command(context["params"]))

    def command(self, params: Mapping[str, Any]) -> list[str]:
        """The argument list for the values `params`; a value that is None is left to the experiment's default."""
        arguments = [
            sys.executable,
            "-m",
            "craw4llm",
            "run",
            "--json",
            "--jobs=1",
            f"--only={self.task_id}",
            f"--replicates={self.replicates}",
        ]
        for name in self.parameters:
            value = params[name]
            if value is not None:
                arguments += ["--set", f"{name}={_text(name, value)}"]
        return [*arguments, "--", self.experiment]

    def run_command(self, command: Sequence[str]) -> dict[str, Any]:
        """Runs `command` under the guard, its lines into the log. Returns the JSON object that it wrote as a line to stdout."""
        self.log.info("%s (in %s)", shlex.join(command), self.cwd)
        last: collections.deque[str] = collections.deque(maxlen=LAST_LINES)
        result: dict[str, Any] | None = None
        # Airflow's own settings and secrets are none of a stage's business.
        environment = {name: value for name, value in os.environ.items() if "AIRFLOW" not in name}
        guard = subprocess.Popen(
            [sys.executable, "-I", "-S", str(GUARD), str(self.grace_s), *command],
            cwd=self.cwd,
            env=environment | {"PYTHONUNBUFFERED": "1"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            encoding="utf-8",
            errors="replace",
            start_new_session=True,
        )
        self._process = guard
        if self._stopped:  # on_kill came before there was anything to stop
            self._stop()
        assert guard.stdout is not None and guard.stderr is not None
        errors = threading.Thread(target=self._show, args=(guard.stderr, last), daemon=True)
        errors.start()
        try:
            for line in guard.stdout:
                found = _artifact(line)
                if found is None:
                    self._say(line, last)
                else:
                    result = found
            code = _end_of(guard)
        finally:
            self._stop()
            _end_of(guard)
            errors.join(timeout=5)
            guard.stdout.close()
            guard.stderr.close()
            self._process = None
        if self._stopped:
            raise AirflowException(f"{self.task_id}: stopped on request; what it had finished is kept, the next attempt goes on from it")
        if code != 0:
            raise _failure(self.task_id, code, last)
        if result is None:
            raise AirflowException(f"{self.task_id}: the command ended well but did not say what it made\n" + "\n".join(last))
        self.log.info(
            "%s %s %s: %s", result["stage"], result["fingerprint"], "built" if result["built"] else "was finished", result["path"]
        )
        return result

    def on_kill(self) -> None:
        """Airflow's word that the task was stopped or has timed out. Returns at once: the guard does the rest, whatever becomes of us."""
        self._stopped = True
        self._stop()

    def _stop(self) -> None:
        process = self._process
        if process is not None and process.stdin is not None:
            with contextlib.suppress(OSError):
                process.stdin.close()

    def _show(self, stream: IO[str], last: collections.deque[str]) -> None:
        for line in stream:
            self._say(line, last)

    def _say(self, line: str, last: collections.deque[str]) -> None:
        text = line.rstrip()
        if text:
            last.append(text)
            self.log.info("%s", text)


def _text(name: str, value: Any) -> str:
    text = str(value).lower() if isinstance(value, bool) else str(value)
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


def _end_of(guard: subprocess.Popen[str]) -> int:
    """Waits for the guard, and ends what its command left behind in its process group."""
    if guard.returncode is None:
        os.waitid(os.P_PID, guard.pid, os.WEXITED | os.WNOWAIT)  # not reaped yet, so that nobody else can have the group's number
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(guard.pid, signal.SIGKILL)
    return guard.wait()


def _failure(node_id: str, code: int, last: collections.deque[str]) -> AirflowException:
    said = "\n".join(last)
    if code == -signal.SIGKILL:
        return AirflowException(f"{node_id}: killed by signal 9 (out of memory? `dmesg` tells); its last lines:\n{said}")
    if code < 0:
        return AirflowException(f"{node_id}: ended by {signal.Signals(-code).name}; its last lines:\n{said}")
    if code in HOPELESS:
        return AirflowFailException(f"{node_id}: exit code {code}, {HOPELESS[code]}; not tried again:\n{said}")
    return AirflowException(f"{node_id}: exit code {code}; its last lines:\n{said}")
