"""The first tasks of a run: what it will cost, whether a person agrees, and which replicate it is for.

    PlanOperator(task_id="plan", experiment="tiny", replicates=2, parameters=("pages",), cwd="/project", gpu_hours=24.0)
    ClaimOperator(task_id="claim", experiment="tiny", parameters=("pages",), cwd="/project")
    ReleaseOperator(task_id="release", ..., trigger_rule="one_failed")

Each runs the command that you would type (`craw4llm plan --json`, `craw4llm claim`), which is over in seconds, and shows what it said.
"""

import json
import os
import shlex
import signal
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from airflow.providers.standard.operators.hitl import ApprovalOperator
from airflow.sdk import BaseOperator
from airflow.sdk.exceptions import AirflowException, AirflowFailException, AirflowSkipException

import pools
from plan_text import inert_lines, request
from stage_operator import HOPELESS, craw4llm, inert, refuse_unknown, settings, stage_environment

# Kind of a stage -> the kind that it follows in an arm's chain.
FOLLOWS = {"evaluate": "train", "train": "tokenize", "tokenize": "select"}


class CommandMixin:
    """Runs a short command of craw4llm in a process group of its own; on_kill ends it."""

    _process: subprocess.Popen[str] | None = None
    cwd: str
    log: Any
    task_id: str

    def ask(self, command: Sequence[str]) -> str:
        """Standard output of the command. AirflowFailException where a retry cannot help, AirflowException for the rest."""
        self.log.info("%s (in %s)", shlex.join(command), self.cwd)
        self._process = subprocess.Popen(
            command, cwd=self.cwd, env=stage_environment(), text=True, encoding="utf-8", errors="replace", start_new_session=True,
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )  # fmt: skip
        try:
            out, said = self._process.communicate()
        finally:
            self.end()
        for line in said.splitlines():
            self.log.info("%s", inert(line))
        code = self._process.returncode
        if code:
            kind = AirflowFailException if code in HOPELESS else AirflowException
            raise kind(f"{self.task_id}: exit code {code}, {HOPELESS.get(code, 'see the log')}\n{inert(said.strip()[-2000:])}")
        return out

    def end(self) -> None:
        if self._process is not None and self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGKILL)

    def on_kill(self) -> None:
        self.end()


class PlanOperator(CommandMixin, ApprovalOperator):
    """Prints the plan of the run, refuses values that cannot be meant, inputs that are not there and pools that a task would wait for in
    vain, and waits for a person's approval where the run would cost more than `gpu_hours`.

    Returns stages_to_do, gpu_hours, disk_bytes, shortfalls; with `declare` (the form) also name, replicates and what the mapped tasks map
    over (`mapped`). Short disk, pages or tokens, and pools without an open slot, are shown as warnings and stand above the plan in the
    request for approval: an estimate stops nobody. A missing input, or a pool that is absent or has too few slots for a task of this DAG,
    fails the task.
    declare: keep the run's values as an experiment of its own. fields: further fields of the form, no parameters of the experiment.
    """

    ui_color = "#f6efe0"
    template_fields: Sequence[str] = ("subject", "body", "replicates")

    def __init__(
        self,
        *,
        experiment: str,
        replicates: int | str,
        parameters: Sequence[str],
        cwd: str,
        gpu_hours: float,
        declare: bool = False,
        fields: Sequence[str] = (),
        **kwargs: Any,
    ) -> None:
        super().__init__(subject=f"{experiment}: start a run of more than {gpu_hours:g} GPU hours?", multiple_outputs=True, **kwargs)
        self.custom_operator_name = "plan"
        self.experiment, self.replicates, self.parameters = experiment, replicates, tuple(parameters)
        self.cwd, self.gpu_hours, self.declare, self.fields = cwd, gpu_hours, declare, tuple(fields)

    def execute(self, context: Mapping[str, Any]) -> dict[str, Any]:
        found = self.plan(context)
        if found["gpu_hours"] <= self.gpu_hours:
            self.log.info("%.3g GPU hours: no approval needed (from %g on)", found["gpu_hours"], self.gpu_hours)
            return found
        self.subject, self.body = request(self.facts, self.text)
        super().execute(context)  # type: ignore[arg-type]  # raises: the task waits without holding a slot
        raise AssertionError("an approval that did not wait")

    def execute_complete(self, context: Any, event: dict[str, Any]) -> Any:
        answer = super().execute_complete(context, event)
        return self.plan(context) | {"approved": answer["chosen_options"] == [self.APPROVE]}

    def plan(self, context: Mapping[str, Any]) -> dict[str, Any]:
        refuse_unknown(self.experiment, (*self.parameters, *self.fields), context)
        params = context["params"]
        name, given = self.experiment, settings(self.parameters, params)
        replicates = int(params.get("replicates", self.replicates)) if "replicates" in self.fields else self.replicates
        if self.declare:
            name, given = self.ask(craw4llm("declare", f"--replicates={replicates}", *given, "--", name)).strip(), []
        facts = json.loads(self.ask(craw4llm("plan", "--json", f"--replicates={replicates}", *given, "--", name)))
        self.text = facts.pop("text")
        for line in inert_lines(self.text):
            self.log.info("%s", line)
        never, later = self.pools_lacking(context)
        facts["shortfalls"] += [f"slots: {line}" for line in later]
        for line in facts["shortfalls"]:
            self.log.warning("short of %s", inert(line))
        faults = {"inputs are missing": facts["absent"], "tasks would wait for ever": never}
        if any(faults.values()):
            said = [f"{what}:\n" + "\n".join(map(inert, lines)) for what, lines in faults.items() if lines]
            raise AirflowFailException(f"{name}: nothing was started, " + "\nand ".join(said))
        self.facts = facts
        kept = ("experiment", "stages", "stages_to_do", "gpu_hours", "disk_bytes", "shortfalls")
        found = {key: facts[key] for key in kept}
        return found | {"name": name, "replicates": replicates, **mapped(facts)} if self.declare else found

    def pools_lacking(self, context: Mapping[str, Any]) -> tuple[list[str], list[str]]:
        """(tasks of this DAG that would wait for ever, tasks that have to wait for others): a sentence a pool."""
        there = pools.ask()
        if there is None:
            self.log.warning("whether the pools are there cannot be asked: the API server does not have this project's plugin")
            return [], []
        return pools.lacking(pools.needs_of(context["dag"].tasks), there)


class ClaimOperator(CommandMixin, BaseOperator):
    """Gives a rerun its replicate. Skips what follows, and says why, where no further one is wanted, or where the run was caused by nothing
    but this DAG's own artifacts."""

    ui_color = "#f6efe0"

    def __init__(self, *, experiment: str, parameters: Sequence[str], cwd: str, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.custom_operator_name = "claim"
        self.experiment, self.parameters, self.cwd = experiment, tuple(parameters), cwd

    def execute(self, context: Mapping[str, Any]) -> dict[str, Any]:
        refuse_unknown(self.experiment, self.parameters, context)
        causes = {event.source_dag_id for events in (context.get("triggering_asset_events") or {}).values() for event in events}
        if causes == {context["dag"].dag_id}:
            raise AirflowSkipException("this run was caused by an artifact that this very DAG made: it has it already")
        given = settings(self.parameters, context["params"])
        claimed = json.loads(self.ask(craw4llm("claim", f"--run-id={context['run_id']}", *given, "--", self.experiment)))
        if claimed["skip"]:
            raise AirflowSkipException(f"{self.experiment}: {claimed['skip']}")
        self.log.info("replicate %s (finished before: %s)", claimed["replicate"], claimed["finished"])
        return claimed | {"named": max(2, claimed["replicates"])}  # with two replicates or more, stages are called train_r0, train_r1 ...


class ReleaseOperator(ClaimOperator):
    """Gives the replicate of a run that failed back, so that the next run takes it and goes on from what is finished."""

    def execute(self, context: Mapping[str, Any]) -> dict[str, Any]:
        given = settings(self.parameters, context["params"])
        return dict(json.loads(self.ask(craw4llm("claim", "--release", f"--run-id={context['run_id']}", *given, "--", self.experiment))))


def mapped(facts: Mapping[str, Any]) -> dict[str, list[dict[str, str]]]:
    """What the mapped tasks of the form's DAG map over, from the plan: node ids of the stages, in an order in which they can be built.

    scorers: the scorers and ranks. first_crawls: those that others match. crawls: the others. models: one an arm and replicate, with the
    ids of its chain.
    """
    nodes = {node["id"]: node for node in facts["nodes"]}
    crawls = [n for n in facts["nodes"] if n["stage"] == "crawl"]
    matched = {up for n in crawls for up in n["upstream"] if nodes[up]["stage"] == "crawl"}
    models = []
    for arm, results in facts["results"].items():
        for number, result in enumerate(results):
            node, chain = nodes[result], {"shown_as": f"{arm} #{number}" if len(results) > 1 else arm}
            while True:
                chain[node["stage"]] = node["id"]
                if node["stage"] not in FOLLOWS:
                    break
                wanted = FOLLOWS[node["stage"]]
                node = next(nodes[up] for up in node["upstream"] if nodes[up]["stage"] == wanted and up != "heldout")
            models.append(chain)

    def entries(chosen: Iterable[Mapping[str, Any]]) -> list[dict[str, str]]:
        return [{"shown_as": node["id"], "node": node["id"]} for node in chosen]

    return {
        "scorers": entries(n for n in facts["nodes"] if n["stage"] == "scorer"),
        "first_crawls": entries(n for n in crawls if n["id"] in matched),
        "crawls": entries(n for n in crawls if n["id"] not in matched),
        "models": models,
    }
