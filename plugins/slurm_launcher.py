"""The launcher `slurm`: a stage's job is a Slurm job. See plugins/launchers.py for the interface.

    submit     sbatch, with stage_job.py in the job's folder, which all nodes see under the same path
    status     the exit record first; while there is none, or Slurm itself stopped the job, what `scontrol show job` says
    release, cancel    by the files in the folder; a job that still waits in the queue is taken out of it with scancel

The job's id is stored before `submit` returns, and the job's name is made from its folder: where the id was lost with the task, the next
`submit` finds the job by its name. Pre-emption, a lost node, `scontrol requeue` and the time limit put the same job into the queue again:
that is no failure, it runs on from what it saved, under the same id. `scancel` is one; Airflow tries again then, as after any failure:
mark the task failed to end it for good.

Options by kind of stage are those of sbatch (placement.py): `partition = "gpu"`, `gpus-per-node = 8`, `time = "2-00:00:00"`, `exclusive =
true`. With `nodes` above 1 the command is started by torchrun on every node, `ranks-per-node` processes each (default: gpus-per-node),
which meet on the first node. `save-before-limit` (120 s): how long before the time limit the job saves and queues again.
"""

import dataclasses
import hashlib
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import stage_job
from launchers import STAGE_JOB, JobId, Outcome, QueueLauncher, Status, _json, for_torchrun
from placement import PlacementError, options_of

BATCH = Path(__file__).resolve().parent / "slurm_batch.sh"
ACTIVE = {"PENDING", "CONFIGURING", "RUNNING", "SUSPENDED", "STOPPED", "COMPLETING", "REQUEUED", "REQUEUE_FED", "REQUEUE_HOLD", "RESIZING"}
ACTIVE |= {"SIGNALING", "STAGE_OUT", "SPECIAL_EXIT", "RESV_DEL_HOLD", "POWER_UP_NODE"}
ASK_EVERY_S = 2.0  # one task asks the controller no more often; the exit record is looked at each time
CLIENT_TIMEOUT_S = 60.0
SAVE_BEFORE_LIMIT_S = 120
OWN_OPTIONS = ("ranks-per-node", "save-before-limit")
RESERVED = (
    "job-name",
    "output",
    "error",
    "open-mode",
    "requeue",
    "no-requeue",
    "signal",
    "export",
    "chdir",
    "parsable",
    "array",
    "wrap",
    "comment",
)
# Its own arguments reach the command as they are; the addresses are Slurm's.
ON_EVERY_NODE = (
    'exec "$0" -m torch.distributed.run --nnodes="$SLURM_NNODES" --node-rank="$SLURM_NODEID" --nproc-per-node="$1" '
    '--master-addr="$MASTER_ADDR" --master-port="$MASTER_PORT" "${@:2}"'
)


class SlurmLauncher(QueueLauncher):
    """See the module's docstring."""

    name = "slurm"

    def __init__(self) -> None:
        super().__init__()
        self._asked: dict[int, tuple[float, dict[str, str] | None]] = {}

    def start(self, folder: Path, settings: Path, environment: Mapping[str, str]) -> JobId:
        record = _json(settings) or {}
        options = options_of(self.name, record.get("stage", ""))
        save_s = int(options.get("save-before-limit", SAVE_BEFORE_LIMIT_S))
        if (limit_s := time_limit_s(str(options.get("time", "")))) is not None and limit_s <= save_s:
            raise PlacementError(
                f"slurm: time is {options['time']} and save-before-limit {save_s} s, so a job would save and queue again for ever; "
                "expected a longer time, or less of it to save in"
            )
        if (nodes := int(options.get("nodes", 1))) > 1:
            record["command"] = self.on_nodes(record["command"], nodes, options)
            stage_job.write(settings, record)
        command = [
            *("sbatch", "--parsable", f"--job-name={job_name(folder)}", f"--comment={folder}", f"--chdir={record['cwd']}"),
            *(f"--output={folder}/slurm.out", "--open-mode=append", "--requeue", "--export=ALL"),
            f"--signal=B:USR1@{save_s}",
            *sbatch_options(options),
            *(str(BATCH), sys.executable, str(STAGE_JOB), str(settings), str(folder)),
        ]
        done = self._client(command, env={name: value for name, value in environment.items() if not _of_another_job(name)})
        if done.returncode:
            raise OSError(f"sbatch: {done.stderr.strip() or done.stdout.strip()}")
        return {"slurm_job": int(done.stdout.strip().partition(";")[0])}  # "12;cluster" on a federation

    @staticmethod
    def on_nodes(command: list[str], nodes: int, options: Mapping[str, Any]) -> list[str]:
        """`python -m craw4llm ...` -> the same by torchrun on every node of the job."""
        ranks = options.get("ranks-per-node", options.get("gpus-per-node"))
        if ranks is None:
            raise PlacementError(f"slurm: nodes is {nodes}; expected gpus-per-node or ranks-per-node beside it")
        ranks = str(ranks).rpartition(":")[2]  # "h100:8"
        python, rest = for_torchrun(command)
        start = [
            "srun",
            f"--nodes={nodes}",
            f"--ntasks={nodes}",
            "--ntasks-per-node=1",
            "--kill-on-bad-exit=1",
            "bash",
            "-c",
            ON_EVERY_NODE,
        ]
        return [*start, python, ranks, *rest]

    def find(self, folder: Path) -> JobId | None:
        """A job that was submitted for this folder while its id was not stored."""
        done = self._client(["squeue", "--noheader", f"--name={job_name(folder)}", "--format=%A"])
        if done.returncode:
            raise OSError(f"squeue: {done.stderr.strip()}")
        numbers = done.stdout.split()
        return {"slurm_job": int(numbers[0])} if numbers else None

    def lives(self, word: Any) -> bool:
        return word is None or word["JobState"] in ACTIVE

    def without_record(self, folder: Path, word: Any) -> Status:
        return "lost" if word["JobState"] in ("NODE_FAIL", "BOOT_FAIL", "UNKNOWN", "COMPLETED") else "failed"

    def line(self, job_id: JobId, word: Any) -> str | None:
        return None if word["JobState"] == "UNKNOWN" else f"slurm: job {job_id['slurm_job']} is {describe(word)}"

    def result(self, job_id: JobId) -> Outcome:
        outcome = super().result(job_id)
        word = self._word(job_id, now=True) or {}
        out_of_memory = outcome.out_of_memory or word.get("JobState") == "OUT_OF_MEMORY"
        return dataclasses.replace(
            outcome, out_of_memory=out_of_memory, scheduler=f"slurm job {job_id['slurm_job']}: {describe(word)}" if word else ""
        )

    def withdraw(self, job_id: JobId) -> None:
        """A job that waits has no process that could see the files; one that runs ends itself."""
        self._client(["scancel", "--state=PENDING", f"--name={job_name(Path(job_id['folder']))}", str(job_id["slurm_job"])])

    def _word(self, job_id: JobId, *, now: bool = False) -> dict[str, str] | None:
        """What Slurm says of the job: JobState, Reason, Restarts, ExitCode. None: no answer. State "UNKNOWN" where it has forgotten it, and
        where the number is another job's by now: a controller that dies within seconds of a submission gives it away again."""
        number = int(job_id["slurm_job"])
        asked_at, word = self._asked.get(number, (-ASK_EVERY_S, None))
        if now or time.monotonic() - asked_at >= ASK_EVERY_S:
            word = self._ask(number, Path(job_id["folder"]))
            self._asked[number] = time.monotonic(), word
        return word

    def _ask(self, number: int, folder: Path) -> dict[str, str] | None:
        done = self._client(["scontrol", "--oneliner", "show", "job", str(number)])
        if done.returncode == 0:
            fields = dict(re.findall(r"(?:^|\s)(JobName|JobState|Reason|Restarts|ExitCode|NodeList)=(\S+)", done.stdout))
            if "JobState" not in fields:
                return None
            if fields["JobName"] == job_name(folder):
                if fields["JobState"] not in ACTIVE:
                    stage_job.write(folder / "slurm.json", fields)  # Slurm forgets a job minutes after its end
                return fields
        elif "Invalid job id" not in done.stderr:
            return None
        return _json(folder / "slurm.json") or self._from_accounting(number, job_name(folder)) or {"JobState": "UNKNOWN"}

    def _from_accounting(self, number: int, name: str) -> dict[str, str] | None:
        if shutil.which("sacct") is None:
            return None
        done = self._client(["sacct", "-X", "-n", "-P", "-j", str(number), f"--name={name}", "-o", "State,ExitCode"])
        state, _, code = done.stdout.strip().partition("|")
        return {"JobState": state.split()[0], "ExitCode": code} if done.returncode == 0 and state else None

    def _client(self, command: list[str], env: Mapping[str, str] | None = None) -> subprocess.CompletedProcess[str]:
        try:
            return subprocess.run(command, env=env, capture_output=True, text=True, timeout=CLIENT_TIMEOUT_S, check=False)
        except subprocess.TimeoutExpired:
            return subprocess.CompletedProcess(command, 1, "", f"no answer in {CLIENT_TIMEOUT_S:.0f} s")


def job_name(folder: Path) -> str:
    """For people the task, for `find` the folder: `craw4llm-quality.crawl-1f6b2c9d3a70`."""
    task = re.sub(r"[^A-Za-z0-9._-]", "_", folder.parent.name)[:60]
    return f"craw4llm-{task}-{hashlib.sha256(str(folder).encode()).hexdigest()[:12]}"


def sbatch_options(options: Mapping[str, Any]) -> list[str]:
    """Raises PlacementError for those that the launcher sets itself."""
    found = []
    for name, value in options.items():
        if name in RESERVED:
            raise PlacementError(f"slurm.{name} is set by the launcher itself; remove it")
        if name in OWN_OPTIONS or value is False:
            continue
        found.append(f"--{name}" if value is True else f"--{name}={value}")
    return found


def time_limit_s(text: str) -> int | None:
    """Seconds of sbatch's `time`: minutes, M:S, H:M:S, D-H, D-H:M or D-H:M:S. None for what is none of them ("", "infinite"): Slurm judges
    that."""
    found = re.fullmatch(r"(?:(\d+)-)?(\d+)(?::(\d+))?(?::(\d+))?", text)
    if found is None:
        return None
    days, *given = found.groups()
    parts = [int(part) for part in given if part is not None]
    if days is None and len(parts) < 3:
        parts.insert(0, 0)  # they begin with minutes
    hours, minutes, seconds = [*parts, 0, 0][:3]
    return ((int(days or 0) * 24 + hours) * 60 + minutes) * 60 + seconds


def describe(word: Mapping[str, str]) -> str:
    more = [f"reason {word['Reason']}"] if word.get("Reason", "None") != "None" else []
    more += [f"restarts {word['Restarts']}"] if word.get("Restarts", "0") != "0" else []
    more += [f"exit code {word['ExitCode']}"] if word.get("ExitCode", "0:0") != "0:0" else []
    return word.get("JobState", "UNKNOWN") + (f" ({', '.join(more)})" if more else "")


def _of_another_job(name: str) -> bool:
    """Variables of a Slurm job that Airflow itself may run in: sbatch would take them for options or hand them down."""
    return name.startswith("SLURM_") and name != "SLURM_CONF"
