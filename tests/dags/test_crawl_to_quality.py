"""Every declared experiment is a DAG whose tasks, edges, groups and form are those of its stage graph; parsing is cheap and repeatable."""

import itertools
import json
import os
import subprocess
import sys
from pathlib import Path

import airflow_env
import pytest
from airflow.dag_processing.dagbag import DagBag
from airflow.sdk import DAG, TaskGroup

from craw4llm.configs import CorpusConfig, CrawlConfig, ScorerConfig, SelectConfig, SyntheticWeb
from craw4llm.experiment import Arms, Experiment, Graph, expand, load, names
from craw4llm.stage import Stage
from plan_operator import ClaimOperator, PlanOperator, mapped
from stage_operator import RefreshOperator, StageOperator
from training.configs import ReportConfig, TrainConfig

DAGS = airflow_env.PROJECT / "dags"
HEAVY = ("torch", "numpy", "fasttext", "pyarrow", "streaming", "tokenizers", "matplotlib", "scipy", "pandas")
# Parses the DAGs folder and prints what it cost and the DAGs as they are stored.
PARSE = f"""
import hashlib, json, sys, time
import airflow.sdk
from airflow.dag_processing.dagbag import DagBag
from airflow.serialization.serialized_objects import DagSerialization
process_file, seconds = DagBag.process_file, {{}}
def timed(self, path, *given, **more):
    began = time.process_time()  # not the clock's: on a busy machine that is the others'
    try:
        return process_file(self, path, *given, **more)
    finally:
        seconds[str(path)] = time.process_time() - began
DagBag.process_file = timed
bag = DagBag({str(DAGS)!r})
stored = {{name: json.dumps(DagSerialization.to_dict(dag), sort_keys=True) for name, dag in bag.dags.items()}}
print(json.dumps({{
    "errors": bag.import_errors,
    "seconds": seconds,
    "heavy": [name for name in {HEAVY!r} if name in sys.modules],
    "sha256": {{name: hashlib.sha256(text.encode()).hexdigest() for name, text in stored.items()}},
    "bytes": {{name: len(text) for name, text in stored.items()}},
}}))
"""


@pytest.fixture(scope="module")
def bag() -> DagBag:
    return DagBag(DAGS)


# DAGs beside those that are experiments: the form, and reruns of experiments with a schedule.
FORM = "crawl_arms"
DECLARED = [name for name in names() if name != FORM]
RERUNS = [f"{name}_reruns" for name in DECLARED if load(name).schedule]


@pytest.fixture(scope="module", params=DECLARED)
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
    assert sorted(bag.dags) == sorted([*DECLARED, *RERUNS, FORM])
    assert {"tiny", "tiny_reruns", "crawl_policies", "live_feasible", "size_ladder", FORM} <= set(bag.dags)


POLICIES_OF_THE_PAPER = {f"{policy}/{pool}" for policy in ("random", "indegree") for pool in ("1x", "2x_dclm", "2x_fwe", "4x_dclm")}
LIVE = ("predicted", "parent_mean", "parent_max", "parent_min", "parent_first", "breadth_first")
SHIPPED = {
    "crawl_policies": POLICIES_OF_THE_PAPER | {f"{name}_{scorer}" for name in ("quality", "oracle") for scorer in ("dclm", "fwe")},
    "live_feasible": {"quality/equal_pages", *(f"{policy}/equal_fetches" for policy in ("quality", *LIVE))},
    "size_ladder": {f"{policy}/{size}" for policy in ("quality", "random", "indegree") for size in ("11M", "79M", "154M", "411M")},
}


@pytest.mark.parametrize("name", SHIPPED)
def test_what_the_shipped_experiments_compare(name: str) -> None:
    """The paper's main table at its size; live policies at equal fetches, with selection; the ranking by size."""
    graph = expand(load(name))
    assert set(graph.results) == SHIPPED[name]
    configs = {node.id: node.stage.config for node in graph.nodes}
    paper = {config.token_budget for config in configs.values() if isinstance(config, TrainConfig) and config.size == "411M"}
    assert paper == {32_929_300_480}
    pools = {node.id: c for node in graph.nodes if isinstance(c := node.stage.config, SelectConfig)}
    if name == "crawl_policies":
        most = {c.policy: c.budget_pages for c in configs.values() if isinstance(c, CrawlConfig)}
        assert most["random"] == most["indegree"] == 4 * most["quality"]
        assert {c.keep for c in pools.values() if c.prefix_pages in (2 * most["quality"], most["random"])} == {"top"}
        assert {c.kind for c in configs.values() if isinstance(c, ScorerConfig)} == {"fasttext", "encoder"}
    if name == "live_feasible":
        crawls = [c for c in configs.values() if isinstance(c, CrawlConfig)]
        assert all(c.match_fetches for c in crawls if c.policy != "quality")
        assert {c.keep for node_id, c in pools.items() if "equal_fetches" in node_id} == {"top"}


def test_every_file_below_dags_is_a_dag_file_or_a_declaration() -> None:
    files = {path.relative_to(DAGS).as_posix() for path in DAGS.rglob("*.py") if "__pycache__" not in path.parts}
    declarations = {f"experiments/{name}.py" for name in names()}
    assert {name for name in files if not name.startswith("experiments/_")} == declarations | {"crawl_to_quality.py", "crawl_arms.py"}


def test_tasks_and_edges_are_the_stage_graph(dag: DAG, graph: Graph) -> None:
    parts = {name for name in dag.task_ids if name.endswith("_parts")}
    assert set(dag.task_ids) == {node.id for node in graph.nodes} | {"plan"} | parts
    for node in graph.nodes:
        task = dag.get_task(node.id)
        assert isinstance(task, StageOperator)
        before = f"{node.id}_parts"
        edges = dag.get_task(before).upstream_task_ids if before in parts else task.upstream_task_ids
        assert edges == (set(node.upstream) or {"plan"}), node.id
        assert before not in parts or task.upstream_task_ids == {before}
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
    assert dag.description and "\n" not in dag.description and dag.description.endswith("?")
    for task in dag.tasks:
        assert task.owner == "craw4llm"
        if isinstance(task, StageOperator):
            assert f"craw4llm run {dag.dag_id} --only {task.task_id}" in (task.doc_md or "")


def test_a_run_can_be_triggered_only_by_hand_and_tasks_have_limits(dag: DAG) -> None:
    assert dag.schedule is None
    assert not dag.catchup
    for task in dag.tasks:
        assert task.retries >= 1 and task.retry_exponential_backoff
        wanted = {"train": "gpu", "evaluate": "gpu", "plan": "default_pool"}
        assert task.pool == wanted.get(task.operator_name, "cpu")
        assert task.execution_timeout is not None or task.task_id == "plan", "an approval may take days"
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
        assert (field.schema.get("minimum"), field.schema.get("maximum")) == (parameter.low, parameter.high)
        assert field.description == (parameter.help or None)
    assert all(task.parameters == tuple(declared.parameters) for task in dag.tasks if isinstance(task, StageOperator | PlanOperator))


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
        assert {Path(name).name for name in parsed["seconds"]} >= {"crawl_to_quality.py", "crawl_arms.py"}
        assert max(parsed["seconds"].values()) < 1.0, parsed["seconds"]
    assert found[0]["sha256"] == found[1]["sha256"]
    assert set(found[0]["sha256"]) == {*DECLARED, *RERUNS, FORM}
    assert max(found[0]["bytes"].values()) < 1_000_000


@pytest.mark.parametrize("name", ["tiny", "tiny_reruns"])
def test_a_task_makes_its_own_dag_alone(bag: DagBag, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("_AIRFLOW_PARSING_CONTEXT_DAG_ID", name)
    (own,) = DagBag(DAGS / "crawl_to_quality.py").dags.values()
    assert own.dag_id == name and set(own.task_dict) == set(bag.dags[name].task_dict)


def test_a_broken_declaration_is_named_in_the_import_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "broken.py").write_text('"""Nothing."""\n')
    monkeypatch.setenv("CRAW4LLM_EXPERIMENTS", str(tmp_path))
    (error,) = DagBag(DAGS / "crawl_to_quality.py").import_errors.values()
    assert "declares no experiment called 'broken'" in error
    assert "while making the DAG of the experiment 'broken'" in error


def test_a_rerun_is_one_replicate_with_its_number_left_open(bag: DagBag) -> None:
    dag, graph = bag.dags["tiny_reruns"], expand(load("tiny"), replicates=1)
    stages = {task.task_id: task for task in dag.tasks if isinstance(task, StageOperator)}
    assert set(stages) == {node.id for node in graph.nodes}
    for node in graph.nodes:
        assert stages[node.id].upstream_task_ids == (set(node.upstream) or {"plan"}), node.id
    train = stages["quality.equal_pages.train"]
    assert train.node == "quality.equal_pages.train_r{{ ti.xcom_pull('claim')['replicate'] }}"
    assert stages["corpus"].node == "corpus" and isinstance(stages["report"], RefreshOperator)
    assert isinstance(dag.get_task("claim"), ClaimOperator) and dag.get_task("plan").upstream_task_ids == {"claim"}
    release = dag.get_task("release")
    assert release.is_teardown, "it runs whatever happened, and does not make a failed run a success"
    assert dag.is_paused_upon_creation and dag.max_active_runs == 1 and not dag.catchup


def test_reruns_follow_the_clock_and_the_corpus_and_scorer(bag: DagBag) -> None:
    from airflow.serialization.serialized_objects import DagSerialization

    stored = json.dumps(DagSerialization.to_dict(bag.dags["tiny_reruns"])["dag"]["timetable"])
    assert "0 4 * * 1" in stored
    news = {alias.name for task in bag.dags["tiny"].tasks for alias in task.outlets if type(alias).__name__ == "AssetAlias"}
    assert len(news) == 2 and all(f'"{name}"' in stored for name in news)


def test_every_stage_publishes_an_asset_of_its_own(dag: DAG, graph: Graph) -> None:
    uris = [outlet.uri for node in graph.nodes for outlet in dag.get_task(node.id).outlets if hasattr(outlet, "uri")]
    assert uris == [f"x-craw4llm://{dag.dag_id}/{node.id}" for node in graph.nodes]


def test_the_forms_chain_is_mapped_over_arms_by_name(bag: DagBag) -> None:
    dag = bag.dags[FORM]
    chain = ["select", "tokenize", "train", "evaluate"]
    for before, after in itertools.pairwise(chain):
        assert f"arm.{before}" in dag.get_task(f"arm.{after}").upstream_task_ids
    assert dag.get_task("arm.train").get_closest_mapped_task_group() is not None
    for name in ("crawl", "first_crawl", "scorer", *(f"arm.{kind}" for kind in chain)):
        assert dag.get_task(name).map_index_template == "{{ task.shown_as }}"
    assert dag.get_task("plan").upstream_task_ids == set()
    assert set(dag.params) == {*load(FORM).parameters, "replicates", "launcher"}
    assert dag.params["launcher"] == "as configured"  # an empty text would disable the form's button
    assert all(field.description for name, field in ((n, dag.params.get_param(n)) for n in dag.params)), "every field says what it is"


def test_what_the_form_maps_over_is_the_plans_graph() -> None:
    from craw4llm.execution import Execution
    from craw4llm.plan import summary
    from craw4llm.runner import make_plan

    graph = expand(load(FORM), {"corpus": "synthetic", "policies": "quality,pagerank,random"}, 2)
    lists = mapped(summary(make_plan(graph, Execution(root=Path("/nonexistent/root")))))
    assert [e["node"] for e in lists["first_crawls"]] == ["quality.crawl"]
    assert sorted(e["node"] for e in lists["crawls"]) == ["pagerank.crawl", "random.crawl"]
    assert sorted(e["node"] for e in lists["scorers"]) == ["pagerank.rank", "scorer"]
    assert len(lists["models"]) == 2 * 7 and lists["models"][1]["shown_as"] == "quality/equal_pages #1"
    for model in lists["models"]:
        arm = model["shown_as"].partition(" ")[0].replace("/", ".")
        number = model["shown_as"][-1]
        assert model == {
            "shown_as": model["shown_as"], "select": f"{arm}.select", "tokenize": f"{arm}.tokenize",
            "train": f"{arm}.train_r{number}", "evaluate": f"{arm}.evaluate_r{number}",
        }  # fmt: skip
    done = {"corpus", "tokenizer", "heldout", "score", "report"} | {
        e["node"] for k in ("scorers", "first_crawls", "crawls") for e in lists[k]
    }
    done |= {node for model in lists["models"] for kind, node in model.items() if kind != "shown_as"}
    assert done == {node.id for node in graph.nodes}, "every stage has a task"


def test_parts_stay_under_airflows_limit(bag: DagBag) -> None:
    for name in ("crawl_policies", "live_feasible", "size_ladder"):
        parts = [task for task in bag.dags[name].tasks if task.task_id.endswith("_parts")]
        assert {task.task_id for task in parts} >= {"corpus_parts"}
        for task in parts:
            wanted = task.expand_input.value["part"]
            assert 1 < len(wanted) <= 1000 and wanted[-1] == f"{len(wanted)}/{len(wanted)}"


def test_the_largest_form_can_be_mapped_and_stored() -> None:
    """All policies, all comparisons, all replicates: Airflow maps over 1,024 entries at most, and XCom is for small values."""
    from craw4llm.execution import Execution
    from craw4llm.plan import summary
    from craw4llm.runner import make_plan

    declared = load(FORM)
    everything = {name: ",".join(p.choices) for name, p in declared.parameters.items() if p.many}
    plan = make_plan(expand(declared, {"corpus": "synthetic", **everything}, 20), Execution(root=Path("/nonexistent/root")))
    lists = mapped(summary(plan))
    assert max(map(len, lists.values())) == 20 * (12 * 3 + 1) <= 1024
    assert len(json.dumps(lists)) < 256 * 1024


def test_what_is_in_bounds_for_the_form_is_in_bounds_for_the_configs() -> None:
    """The lowest value of each number is accepted by the stage's own config, and one below is refused by the experiment, by name."""
    declared = load(FORM)
    for name, parameter in declared.parameters.items():
        if parameter.low is not None:
            with pytest.raises(Exception, match=f"{name} is"):
                declared.values({name: parameter.low - 1})
    lowest = {"corpus": "synthetic", "budget": 1, "batch_pages": 1, "seed_count": 1, "vocab_size": 257, "top_fraction": 1e-6}
    assert expand(declared, lowest).nodes
