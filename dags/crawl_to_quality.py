"""One DAG per declared experiment: its tasks are the stages, its edges the stages' inputs, its groups the arms.

    dags/experiments/tiny.py  ->  DAG `tiny`: plan, corpus, scorer, quality.crawl, quality.equal_pages.select, ... report
                                  DAG `tiny_reruns`, where the experiment has a schedule: one more replicate of every arm a run

The first task prints what the run will cost, and waits for a person above the experiment's number of GPU hours. A task runs the command
that you would type, `craw4llm run tiny --only quality.crawl`, and makes the same artifact. The form that opens at "Trigger" has the
experiment's parameters. The number of replicates decides the shape of the graph, so it is the experiment's own.
"""

import contextlib
import dataclasses
import inspect
from collections.abc import Iterator
from typing import Any

from airflow.sdk import DAG, AssetAny, AssetOrTimeSchedule, CronTriggerTimetable, TaskGroup, get_parsing_context

from craw4llm.experiment import Experiment, Graph, Node, expand, load, names
from craw4llm.grouping import grouped
from notify import RunNotifier
from plan_operator import ClaimOperator, PlanOperator, ReleaseOperator
from stage_operator import RefreshOperator, StageOperator
from wiring import PROJECT, REPUBLISHED, default_args, form, give_form, limits_of, outlets, published

FORMS = {"crawl_arms"}  # experiments with a DAG file of their own
RERUNS = "_reruns"
TASKS_AT_A_TIME = 16  # per run of a DAG; the pools `cpu` and `gpu` say what a machine can bear


def dag_of(experiment: Experiment) -> DAG:
    """The DAG of an experiment at its default parameters and number of replicates."""
    graph = expand(experiment)
    dag = _dag(experiment, experiment.name, dag_note(experiment, graph), schedule=None)
    groups: dict[str, TaskGroup] = {}
    tasks: dict[str, Any] = {}
    with dag:
        plan = plan_of(experiment, graph.replicates)
        for node in graph.nodes:
            group = group_of(node.group, groups)
            tasks[node.id] = task = task_of(experiment, node, graph.replicates, group)
            before = [tasks[upstream] for upstream in node.upstream] or [plan]
            if parts := parts_of(experiment, node, graph.replicates, group):
                before >> parts >> task
            else:
                before >> task
    give_form(dag, form(experiment))
    return dag


def reruns_of(experiment: Experiment) -> DAG:
    """The DAG that adds a replicate: the graph of two replicates without what belongs to the first alone, the second's number left open."""
    graph = expand(experiment, replicates=2)
    stages = tuple(n.stage for n in graph.nodes if n.stage.config.stage in REPUBLISHED)
    news = AssetAny(*(published(stage) for stage in stages))
    timetable = CronTriggerTimetable(experiment.schedule, timezone="UTC")
    schedule = AssetOrTimeSchedule(timetable=timetable, assets=news)
    dag = _dag(experiment, experiment.name + RERUNS, reruns_note(experiment), schedule=schedule)
    shared: dict[str, Any] = {"experiment": experiment.name, "parameters": tuple(experiment.parameters), "cwd": str(PROJECT)}
    groups: dict[str, TaskGroup] = {}
    tasks: dict[str, Any] = {}
    with dag:
        claim = ClaimOperator(task_id="claim", **shared, **limits_of("plan"))
        plan = plan_of(experiment, "{{ ti.xcom_pull('claim')['named'] }}")
        claim >> plan
        for node in graph.nodes:
            if of_replicate(node, 0):
                continue
            tasks[node.id] = task = rerun_task(experiment, node, group_of(node.group, groups))
            for upstream in node.upstream:
                if upstream in tasks:
                    tasks[upstream] >> task
            if not node.upstream:
                plan >> task
        release = ReleaseOperator(task_id="release", **shared, **limits_of("plan")).as_teardown()
        [claim, plan, *tasks.values()] >> release
    give_form(dag, form(experiment))
    return dag


def _dag(experiment: Experiment, dag_id: str, note: str, schedule: Any) -> DAG:
    return DAG(
        dag_id=dag_id,
        description=" ".join(experiment.doc.partition("\n\n")[0].split()),
        doc_md=f"{experiment.doc}\n\n---\n{note}",
        schedule=schedule,
        start_date=None,
        catchup=False,
        is_paused_upon_creation=True if schedule else None,  # a schedule spends money: somebody switches it on
        max_active_runs=1,
        max_active_tasks=TASKS_AT_A_TIME,
        tags=["craw4llm", *(["reruns"] if schedule else []), *experiment.tags],
        default_args=default_args(experiment.owner),
    )


def plan_of(experiment: Experiment, replicates: Any) -> PlanOperator:
    return PlanOperator(
        task_id="plan",
        experiment=experiment.name,
        replicates=replicates,
        parameters=tuple(experiment.parameters),
        cwd=str(PROJECT),
        gpu_hours=experiment.approve_above_gpu_hours,
        doc_md=f"`craw4llm plan {experiment.name}`. Waits for approval above {experiment.approve_above_gpu_hours:g} GPU hours.",
        **{name: value for name, value in limits_of("plan").items() if name != "execution_timeout"},
    )


def task_of(experiment: Experiment, node: Node, replicates: int, group: TaskGroup | None) -> StageOperator:
    kind = node.stage.config.stage
    task = StageOperator(
        task_id=node.id.rpartition(".")[2],
        task_group=group,
        stage=kind,
        experiment=experiment.name,
        replicates=replicates,
        parameters=tuple(experiment.parameters),
        cwd=str(PROJECT),
        doc_md=task_note(experiment, node),
        outlets=outlets(experiment.name, node),
        **at_the_end(kind),
        **limits_of(kind),
    )
    assert task.task_id == node.id, f"the task of stage {node.id} is called {task.task_id}"
    return task


def parts_of(experiment: Experiment, node: Node, replicates: int, group: TaskGroup | None) -> Any:
    """Mapped tasks that make a stage's parts, on as many workers as there are; the stage's own task then puts them together. None where the
    experiment does not ask for parts. More than Airflow maps over are grouped (craw4llm.grouping)."""
    kind = node.stage.config.stage
    count = grouped(experiment.parts.get(kind, 1))
    if count < 2:
        return None
    return StageOperator.partial(
        task_id=f"{node.id.rpartition('.')[2]}_parts",
        task_group=group,
        stage=kind,
        experiment=experiment.name,
        replicates=replicates,
        parameters=tuple(experiment.parameters),
        cwd=str(PROJECT),
        node=node.id,
        map_index_template="part {{ task.part }}",
        **limits_of(kind),
    ).expand(part=[f"{number}/{count}" for number in range(1, count + 1)])


def at_the_end(kind: str) -> dict[str, Any]:
    """A run's last word is its report's."""
    return {"on_success_callback": [RunNotifier("success")]} if kind == "report" else {}


def of_replicate(node: Node, replicate: int) -> bool:
    """Whether the stage belongs to this replicate alone: then its id ends with the number."""
    return node.id.endswith(f"_r{replicate}") and not node.stage.name.endswith(f"_r{replicate}")


def rerun_task(experiment: Experiment, node: Node, group: TaskGroup | None) -> StageOperator:
    kind, own = node.stage.config.stage, of_replicate(node, 1)
    name = node.id.removesuffix("_r1") if own else node.id
    operator = RefreshOperator if kind == "report" else StageOperator
    return operator(
        task_id=name.rpartition(".")[2],
        task_group=group,
        stage=kind,
        experiment=experiment.name,
        node=f"{name}_r{{{{ ti.xcom_pull('claim')['replicate'] }}}}" if own else name,
        replicates="{{ ti.xcom_pull('claim')['named'] }}",
        parameters=tuple(experiment.parameters),
        cwd=str(PROJECT),
        doc_md=task_note(experiment, node),
        outlets=outlets(experiment.name, dataclasses.replace(node, id=name)),
        **at_the_end(kind),
        **limits_of(kind),
    )


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
        f'State, leaderboard and report: the page "Crawl → quality" in the navigation.'
    )


def reruns_note(experiment: Experiment) -> str:
    return (
        f"Runs by the schedule `{experiment.schedule}` (UTC), and when the corpus or the scorer is published anew. Each run takes the next "
        f"replicate of every arm and makes the report over all that are finished, so the intervals shrink, until all pairs are decided or "
        f"{experiment.until_replicates} replicates are done: then it skips, and says so. Paused until somebody switches it on."
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


wanted = get_parsing_context().dag_id  # a task's process needs its own DAG alone
for name in names():
    if name not in FORMS and wanted in (None, name, name + RERUNS):
        with named(name):
            declared = load(name)
            if wanted != name + RERUNS:
                globals()[name] = dag_of(declared)
            if declared.schedule and wanted != name:
                globals()[name + RERUNS] = reruns_of(declared)
