"""Crawl policies of your choice, from a form: DAG `crawl_arms`.

    plan -> corpus -> scorers, tokenizer, heldout, scores -> first crawl -> crawls, a task each
         -> arms, a task group each: select -> tokenize -> train -> evaluate -> report

The fields are the parameters of the experiment `crawl_arms` (dags/experiments/crawl_arms.py), whose types, ranges, words and defaults come
from the configs, and how the run is done: replicates, launcher. `plan` keeps the values as an experiment with a name of its own, which
`craw4llm show`, `plan` and `run` know, and works out what the mapped tasks map over: an arm and replicate each, shown by name.
"""

from typing import Any

from airflow.sdk import DAG, Asset, Param, task, task_group

from craw4llm.experiment import Experiment, load, names
from launchers import AS_CONFIGURED, LAUNCHERS
from notify import RunNotifier
from plan_operator import PlanOperator
from stage_operator import StageOperator
from wiring import PROJECT, default_args, form, give_form, limits_of

FORM = "crawl_arms"
BY_NAME = "{{ task.shown_as }}"
LISTS = ("scorers", "first_crawls", "crawls", "models")
# Fields that say how the run is done; trigger_check.py knows them too.
HOW = {
    "replicates": Param(
        1,
        type="integer",
        minimum=1,
        maximum=20,
        title="replicates",
        description="training seeds an arm; with two or more the report can say how sure a difference is",
    ),
    "launcher": Param(
        AS_CONFIGURED,  # not "": the form takes that for a field that is not filled in
        type="string",
        enum=[AS_CONFIGURED, *sorted(LAUNCHERS)],
        title="launcher",
        description="where the stages run; no part of what they are",
    ),
}


@task(pool="cpu")
def listed(plan: dict[str, Any], name: str) -> list[dict[str, str]]:
    """One of the lists of the plan: Airflow maps over the return value of a task, not over a part of it."""
    return list(plan[name])


def form_dag(experiment: Experiment) -> DAG:
    """The DAG of the form."""

    def common(kind: str) -> dict[str, Any]:
        return {
            "stage": kind,
            "experiment": "{{ ti.xcom_pull('plan')['name'] }}",
            "replicates": "{{ ti.xcom_pull('plan')['replicates'] }}",
            "parameters": (),
            "fields": (*experiment.parameters, *HOW),
            "cwd": str(PROJECT),
            "launcher": "{{ params.launcher }}",
            "outlets": [Asset(name=f"craw4llm {FORM} {kind}", uri=f"x-craw4llm://{FORM}/{kind}", group="craw4llm")],
            **limits_of(kind),
        }

    def stage(task_id: str, kind: str, node: Any, **more: Any) -> StageOperator:
        return StageOperator(task_id=task_id, node=node, **common(kind), **more)

    def mapped(task_id: str, kind: str, over: Any, **more: Any) -> Any:
        """One task for each entry {"shown_as", "node"}, shown by the former."""
        return StageOperator.partial(task_id=task_id, map_index_template=BY_NAME, **common(kind), **more).expand_kwargs(over)

    with DAG(
        dag_id=FORM,
        description="Compare crawl policies of your choice: fill in the form.",
        doc_md=f"{experiment.doc}\n\n---\nFill in the form behind Trigger. Wrong values are refused there, with the field's name.",
        schedule=None,
        catchup=False,
        max_active_runs=4,
        max_active_tasks=16,
        tags=["craw4llm", *experiment.tags],
        default_args=default_args(experiment.owner),
    ) as dag:
        plan = PlanOperator(
            task_id="plan",
            experiment=experiment.name,
            replicates=1,
            parameters=tuple(experiment.parameters),
            fields=tuple(HOW),
            declare=True,
            cwd=str(PROJECT),
            gpu_hours=experiment.approve_above_gpu_hours,
            **{name: value for name, value in limits_of("plan").items() if name != "execution_timeout"},
        )
        plan_output: Any = plan.output
        lists = {name: listed.override(task_id=f"list_{name}")(plan_output, name) for name in LISTS}
        corpus = stage("corpus", "corpus", "corpus")
        scorers = mapped("scorer", "scorer", lists["scorers"])
        tokenizer = stage("tokenizer", "tokenizer", "tokenizer")
        heldout = stage("heldout", "tokenize", "heldout")
        scores = stage("score", "score", "score")
        first_crawls = mapped("first_crawl", "crawl", lists["first_crawls"])
        crawls = mapped("crawl", "crawl", lists["crawls"], trigger_rule="none_failed")

        @task_group(group_id="arm")
        def arm(shown_as: str, select: str, tokenize: str, train: str, evaluate: str) -> None:
            by_name = {"shown_as": shown_as, "map_index_template": BY_NAME}
            chosen = stage("select", "select", select, trigger_rule="none_failed", **by_name)
            tokens = stage("tokenize", "tokenize", tokenize, **by_name)
            model = stage("train", "train", train, **by_name)
            results = stage("evaluate", "evaluate", evaluate, **by_name)
            chosen >> tokens >> model >> results

        arms = arm.expand_kwargs(lists["models"])
        report = stage("report", "report", "report", on_success_callback=[RunNotifier("success")])

        plan >> corpus >> [scorers, tokenizer]
        scorers >> scores
        tokenizer >> heldout
        scores >> first_crawls >> crawls >> arms
        [scores, heldout] >> arms
        arms >> report
    give_form(dag, form(experiment) | HOW)
    return dag


if FORM in names():  # an own folder of experiments need not have it
    dag = form_dag(load(FORM))
