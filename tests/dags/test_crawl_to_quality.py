"""Every declared experiment is a DAG whose tasks, edges, groups and form are those of its stage graph; parsing is cheap and repeatable."""

import json
import os
import subprocess
import sys
from pathlib import Path

import airflow_env
import pytest
from airflow.dag_processing.dagbag import DagBag
from airflow.sdk import DAG, TaskGroup

from craw4llm.configs import CorpusConfig, CrawlConfig, SyntheticWeb
from craw4llm.experiment import Arms, Experiment, Graph, expand, load, names
from craw4llm.stage import Stage
from stage_operator import StageOperator
from training.configs import ReportConfig

DAGS = airflow_env.PROJECT / "dags"
HEAVY = ("torch", "numpy", "fasttext", "pyarrow", "streaming", "tokenizers", "matplotlib", "scipy", "pandas")
# Parses the DAGs folder and prints what it cost and the DAGs as they are stored.
PARSE = f"""
import hashlib, json, sys
import airflow.sdk
from airflow.dag_processing.dagbag import DagBag
from airflow.serialization.serialized_objects import DagSerialization
bag = DagBag({str(DAGS)!r})
stored = {{name: json.dumps(DagSerialization.to_dict(dag), sort_keys=True) for name, dag in bag.dags.items()}}
print(json.dumps({{
    "errors": bag.import_errors,
    "seconds": {{stat.file: stat.duration.total_seconds() for stat in bag.dagbag_stats}},
    "heavy": [name for name in {HEAVY!r} if name in sys.modules],
    "sha256": {{name: hashlib.sha256(text.encode()).hexdigest() for name, text in stored.items()}},
    "bytes": {{name: len(text) for name, text in stored.items()}},
}}))
"""


@pytest.fixture(scope="module")
def bag() -> DagBag:
    return DagBag(DAGS)


@pytest.fixture(scope="module", params=names())
def declared(request: pytest.FixtureRequest) -> Experiment:
    return load(request.param)


@pytest.fixture(scope="module")
def graph(declared: Experiment) -> Graph:
    return expand(declared)


@pytest.fixture(scope="module")
def dag(bag: DagBag, declared: Experiment) -> DAG:
    return bag.dags[declared.name]


def test_every_experiment_is_a_dag_and_nothing_else_is(bag: DagBag) -> None:
    assert bag.import_errors == {}
    assert sorted(bag.dags) == names()
    assert "tiny" in bag.dags


def test_every_file_below_dags_is_a_dag_file_or_a_declaration() -> None:
    files = {path.relative_to(DAGS).as_posix() for path in DAGS.rglob("*.py") if "__pycache__" not in path.parts}
    declarations = {f"experiments/{name}.py" for name in names()}
    assert {name for name in files if not name.startswith("experiments/_")} == declarations | {"crawl_to_quality.py"}


def test_tasks_and_edges_are_the_stage_graph(dag: DAG, graph: Graph) -> None:
    assert set(dag.task_ids) == {node.id for node in graph.nodes}
    for node in graph.nodes:
        task = dag.get_task(node.id)
        assert isinstance(task, StageOperator)
        assert task.upstream_task_ids == set(node.upstream), node.id
        assert task.operator_name == node.stage.config.stage
        assert (task.experiment, task.replicates) == (graph.experiment, graph.replicates)
        assert task.cwd == str(airflow_env.PROJECT)


def test_the_name_of_a_task_selects_its_stage_alone(graph: Graph) -> None:
    """Also where a stage is called like its kind: there is one `corpus`, but `tokenize` may be one of many."""
    assert all(graph.select(node.id) == (node,) for node in graph.nodes)
    web = Stage(CorpusConfig(source=SyntheticWeb()))
    one = Stage(CrawlConfig(policy="random", budget_pages=2), corpus=web)
    other = Stage(CrawlConfig(policy="breadth_first", budget_pages=2), "breadth_first/crawl", corpus=web)
    arms = Arms(arms={"random": one, "breadth_first": other}, reported={"a": one}, report=ReportConfig(title="", question=""))
    two = expand(Experiment("two", lambda replicate: arms, {}, 1, ()))
    assert {node.id for node in two.nodes if node.stage.config.stage == "crawl"} == {"crawl", "breadth_first.crawl"}
    assert [node.id for node in two.select("crawl")] == ["crawl"]


def test_groups_are_the_arms_and_shared_stages_stand_outside(dag: DAG, graph: Graph) -> None:
    for node in graph.nodes:
        path: list[str] = []
        group: TaskGroup | None = dag.get_task(node.id).task_group
        while group is not None and group.group_id is not None:
            path.insert(0, group.label)
            group = group.parent_group
        assert "/".join(path) == node.group, node.id
    assert set(graph.results) <= {path.replace(".", "/") for path in dag.task_group_dict if path}
    assert not dag.get_task("corpus").task_group.group_id
    assert not dag.get_task("report").task_group.group_id


def test_the_documentation_is_the_declarations(dag: DAG, declared: Experiment) -> None:
    assert dag.doc_md is not None and dag.doc_md.startswith(declared.doc) and len(declared.doc) > 100
    assert set(declared.tags) <= dag.tags
    assert dag.description and "\n" not in dag.description
    for task in dag.tasks:
        assert f"craw4llm run {dag.dag_id} --only {task.task_id}" in (task.doc_md or "")
        assert task.owner == "craw4llm"


def test_a_run_can_be_triggered_only_by_hand_and_tasks_have_limits(dag: DAG) -> None:
    assert dag.schedule is None
    assert not dag.catchup
    for task in dag.tasks:
        assert task.retries >= 1 and task.retry_exponential_backoff
        assert task.execution_timeout is not None
    trains = [task for task in dag.tasks if task.operator_name == "train"]
    assert trains and all(task.execution_timeout.days >= 14 for task in trains)


def test_the_form_has_the_parameters_with_type_default_and_help(dag: DAG, declared: Experiment) -> None:
    types = {int: "integer", float: "number", bool: "boolean", str: "string"}
    assert list(dag.params) == list(declared.parameters)
    for name, parameter in declared.parameters.items():
        field = dag.params.get_param(name)
        assert field.value == parameter.default
        assert type(field.value) is parameter.type
        wanted = types[parameter.type]
        assert field.schema["type"] == ([wanted, "null"] if parameter.default == "" else wanted)
        assert field.description == (parameter.help or None)
    assert all(task.parameters == tuple(declared.parameters) for task in dag.tasks)


@pytest.mark.parametrize("values", [{"pages": "many"}, {"pages": 10.5}, {"pages": None}, {"corpus": None}, {"heldout_fraction": "NaN"}])
def test_the_form_refuses_values_of_the_wrong_type(bag: DagBag, values: dict[str, object]) -> None:
    params = bag.dags["tiny"].params
    with pytest.raises(Exception, match=f"Invalid input for param {next(iter(values))}"):
        params.update(values)


def test_parsing_is_quick_light_and_the_same_for_any_hash_seed() -> None:
    found = []
    for seed in ("0", "1"):
        environment = os.environ | {"PYTHONHASHSEED": seed}
        done = subprocess.run([sys.executable, "-c", PARSE], env=environment, capture_output=True, text=True, check=True)
        found.append(json.loads(done.stdout.splitlines()[-1]))
    for parsed in found:
        assert parsed["errors"] == {}
        assert parsed["heavy"] == []
        assert max(parsed["seconds"].values()) < 1.0
    assert found[0]["sha256"] == found[1]["sha256"]
    assert set(found[0]["sha256"]) == set(names())
    assert max(found[0]["bytes"].values()) < 1_000_000


def test_a_broken_declaration_is_named_in_the_import_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "broken.py").write_text('"""Nothing."""\n')
    monkeypatch.setenv("CRAW4LLM_EXPERIMENTS", str(tmp_path))
    (error,) = DagBag(DAGS).import_errors.values()
    assert "declares no experiment called 'broken'" in error
    assert "while making the DAG of the experiment 'broken'" in error
