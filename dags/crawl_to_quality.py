"""One DAG per declared experiment: its tasks are the stages, its edges the stages' inputs, its groups the arms.

    dags/experiments/tiny.py  ->  DAG `tiny`: corpus, scorer, quality.crawl, quality.equal_pages.select, ... report

A task runs the command that you would type, `craw4llm run tiny --only quality.crawl`, and makes the same artifact. The form that opens at
"Trigger" has the experiment's parameters. The number of replicates decides the shape of the graph, so it is the experiment's own.
"""

import contextlib
import dataclasses
import datetime
import inspect
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from airflow.sdk import DAG, Param, TaskGroup

from craw4llm.experiment import Experiment, Graph, Node, Parameter, expand, load, names
from stage_operator import StageOperator

PROJECT = Path(__file__).resolve().parent.parent
TASKS_AT_A_TIME = 2  # per run of a DAG; a stage uses several processors itself


@dataclasses.dataclass(frozen=True)
class Limits:
    """How often a stage is tried again, and after what time it is thought to hang. Stages go on from where they were."""

    retries: int
    hours: float


LIMITS = {
    "corpus": Limits(2, 48),
    "scorer": Limits(1, 12),
    "score": Limits(3, 72),
    "crawl": Limits(3, 72),
    "select": Limits(1, 12),
    "tokenizer": Limits(1, 12),
    "tokenize": Limits(3, 72),
    "train": Limits(5, 14 * 24),
    "evaluate": Limits(2, 48),
    "report": Limits(1, 2),
}
OTHER_STAGES = Limits(1, 24)
JSON_TYPES = {int: "integer", float: "number", bool: "boolean", str: "string"}


def param(parameter: Parameter) -> Param:
    """A field of the form."""
    kind: Any = JSON_TYPES[parameter.type]
    if parameter.default == "":
        kind = [kind, "null"]  # a text that may stay empty
    choices: dict[str, Any] = {"enum": list(parameter.choices)} if parameter.choices else {}
    return Param(parameter.default, type=kind, title=parameter.name, description=parameter.help or None, **choices)


def dag_of(experiment: Experiment) -> DAG:
    """The DAG of an experiment at its default parameters and number of replicates."""
    graph = expand(experiment)
    dag = DAG(
        dag_id=experiment.name,
        description=experiment.doc.partition("\n")[0],
        doc_md=f"{experiment.doc}\n\n---\n{dag_note(experiment, graph)}",
        schedule=None,
        start_date=None,
        catchup=False,
        max_active_runs=1,
        max_active_tasks=TASKS_AT_A_TIME,
        tags=["craw4llm", *experiment.tags],
        params={parameter.name: param(parameter) for parameter in experiment.parameters.values()},
        default_args={
            "owner": "craw4llm",
            "retry_delay": datetime.timedelta(seconds=30),
            "retry_exponential_backoff": True,
            "max_retry_delay": datetime.timedelta(minutes=15),
        },
    )
    groups: dict[str, TaskGroup] = {}
    tasks: dict[str, StageOperator] = {}
    with dag:
        for node in graph.nodes:
            tasks[node.id] = task_of(experiment, node, graph.replicates, group_of(node.group, groups))
            for upstream in node.upstream:
                tasks[upstream] >> tasks[node.id]
    return dag


def task_of(experiment: Experiment, node: Node, replicates: int, group: TaskGroup | None) -> StageOperator:
    kind = node.stage.config.stage
    limits = LIMITS.get(kind, OTHER_STAGES)
    label = node.id.rpartition(".")[2]
    task = StageOperator(
        task_id=label,
        task_group=group,
        stage=kind,
        experiment=experiment.name,
        replicates=replicates,
        parameters=tuple(experiment.parameters),
        cwd=str(PROJECT),
        retries=limits.retries,
        execution_timeout=datetime.timedelta(hours=limits.hours),
        doc_md=task_note(experiment, node),
    )
    assert task.task_id == node.id, f"the task of stage {node.id} is called {task.task_id}"
    return task


def group_of(path: str, groups: dict[str, TaskGroup]) -> TaskGroup | None:
    """The task group of an arm path, `quality/equal_pages`: a group in a group. None for stages that all arms share."""
    if not path:
        return None
    if path not in groups:
        parent, _, name = path.rpartition("/")
        tooltip = f"arm {path}" if parent else f"everything that only {name} needs"
        groups[path] = TaskGroup(name, parent_group=group_of(parent, groups), tooltip=tooltip)
    return groups[path]


def dag_note(experiment: Experiment, graph: Graph) -> str:
    count = f"{graph.replicates} replicate{'s' if graph.replicates > 1 else ''}"
    return (
        f"{len(graph.results)} arms, {count}, {len(graph.nodes)} stages. What is finished is kept: a second run with the same values "
        f"does no work. The same from a terminal: `craw4llm run {experiment.name}`, before it `craw4llm plan {experiment.name}`. "
        f"The report's path is the return value of the task `{graph.id_of(graph.report)}` (tab XCom)."
    )


def task_note(experiment: Experiment, node: Node) -> str:
    config = node.stage.config
    summary = inspect.cleandoc(type(config).__doc__ or "").partition("\n\n")[0]
    fields = "\n".join(f"{f.name} = {getattr(config, f.name)!r}" for f in dataclasses.fields(config))
    inputs = ", ".join(sorted(node.stage.inputs)) or "none"
    return (
        f"**{config.stage}** (version {config.version}): {summary}\n\n"
        f"Inputs: {inputs}. Config, before the values of the form:\n\n```\n{fields}\n```\n\n"
        f"From a terminal: `craw4llm run {experiment.name} --only {node.id}`\n"
    )


@contextlib.contextmanager
def named(experiment: str) -> Iterator[None]:
    """Airflow shows an error of this file: let it say which declaration is at fault."""
    try:
        yield
    except Exception as error:
        error.add_note(f"while making the DAG of the experiment {experiment!r}")
        raise


for name in names():
    with named(name):
        globals()[name] = dag_of(load(name))
