"""Experiments: functions that return named arms, and the graph of stages that follows from them.

    @experiment(replicates=2, tags=("demo",))
    def tiny(replicate: int = 0, *, corpus: str = "data/demo-web", pages: int = 600) -> Arms: ...

    graph = expand(load("tiny"), {"pages": 300})
    for node in graph.nodes: node.id, node.stage, node.upstream

An arm's name is a path, `quality/equal_fetches`: the part before the slash is its group, in the Airflow UI and in node ids. A stage
belongs to the longest path that all its users have in common, and one that the report itself reads to none, unless its own name
says so: Stage(config, "quality/crawl", ...). So a policy's crawl is `quality.crawl` and the corpus is `corpus`.

Experiments are declared in `dags/experiments/`, one module each, and import configs only.
"""

import dataclasses
import hashlib
import importlib.util
import inspect
import json
import math
import os
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

from craw4llm.dataclass import dataclass
from craw4llm.errors import ConfigError
from craw4llm.execution import process_name
from craw4llm.stage import Config, Stage

EXPERIMENTS_FOLDER = "CRAW4LLM_EXPERIMENTS"


@dataclass(frozen=True)
class Parameter:
    """A value that `--set`, the Airflow form and the API may change."""

    name: str
    type: type
    default: Any
    help: str = ""
    choices: tuple[str, ...] = ()
    low: float | None = None
    high: float | None = None
    many: bool = False  # a text that lists some of the choices, each once, separated by commas


@dataclass(frozen=True, kw_only=True)
class Arms:
    """What an experiment function returns for one replicate.

    arms: name -> the stage that holds the arm's results. reported: further stages that the report reads, by name.
    report: the config of the report over all replicates.
    """

    arms: Mapping[str, Stage]
    report: Config
    reported: Mapping[str, Stage] = dataclasses.field(default_factory=dict)


@dataclass(frozen=True)
class Experiment:
    """A declared experiment.

    For orchestrators: owner; schedule, a cron expression of reruns ("" for none), each of which adds a replicate until the report has its
    verdict or there are `until_replicates`; approve_above_gpu_hours, what a run may cost without a person's word;
    parts, kind of a stage -> parts that it is made in, a task each, on as many workers as there are.
    """

    name: str
    build: Callable[..., Arms]
    parameters: Mapping[str, Parameter]
    replicates: int
    tags: tuple[str, ...]
    owner: str = "craw4llm"
    schedule: str = ""
    until_replicates: int = 0
    approve_above_gpu_hours: float = 24.0
    parts: Mapping[str, int] = dataclasses.field(default_factory=dict)

    @property
    def doc(self) -> str:
        """Hypothesis, expectation and source, as declared."""
        return inspect.cleandoc(self.build.__doc__ or sys.modules[self.build.__module__].__doc__ or "")

    def values(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """Defaults with `given` put over them, each of the declared type. Raises ConfigError naming the parameter."""
        for name in given:
            if name not in self.parameters:
                raise ConfigError(f"{self.name} has no parameter {name!r}; it has: {', '.join(sorted(self.parameters)) or 'none'}")
        return {name: _typed(self.name, p, given.get(name, p.default)) for name, p in self.parameters.items()}


def experiment(
    *,
    replicates: int = 1,
    tags: tuple[str, ...] = (),
    help: Mapping[str, str] | None = None,
    owner: str = "craw4llm",
    schedule: str = "",
    until_replicates: int = 0,
    approve_above_gpu_hours: float = 24.0,
    parts: Mapping[str, int] | None = None,
    bounds: Mapping[str, tuple[float | None, float | None]] | None = None,
    lists: Mapping[str, tuple[str, ...]] | None = None,
) -> Callable[[Callable[..., Arms]], Experiment]:
    """Declares the function below it. Its keyword-only arguments are the experiment's parameters: int, float, str, bool, or a
    Literal of strings, which becomes a choice.

    help: parameter name -> one line for the form and the command line. bounds: parameter name -> lowest and highest number, None for no
    bound.
    lists: name of a text parameter -> words of which it lists some, each once, separated by commas. The rest: see Experiment.
    until_replicates: 0 takes three times `replicates`.
    """
    if replicates < 1:
        raise ConfigError(f"replicates is {replicates}; expected at least 1")
    until = until_replicates or 3 * replicates
    if until < replicates:
        raise ConfigError(f"until_replicates is {until_replicates}; expected at least replicates, {replicates}")

    def declare(function: Callable[..., Arms]) -> Experiment:
        parameters = {}
        for p in inspect.signature(function, eval_str=True).parameters.values():
            if p.name == "replicate":
                continue
            choices = get_args(p.annotation) if get_origin(p.annotation) is Literal else ()
            wanted = str if choices and all(isinstance(c, str) for c in choices) else p.annotation
            if p.kind is not p.KEYWORD_ONLY or p.default is p.empty or wanted not in (int, float, str, bool):
                raise ConfigError(
                    f"{function.__name__}: {p.name} must be keyword-only, with a default, and int, float, str, bool or a Literal of strings"
                )
            low, high = (bounds or {}).get(p.name, (None, None))
            words = (lists or {}).get(p.name, ())
            parameters[p.name] = Parameter(
                p.name, wanted, p.default, (help or {}).get(p.name, ""), choices or words, low, high, bool(words)
            )
        for word, given in (("help", help), ("bounds", bounds), ("lists", lists)):
            if unknown := set(given or {}) - set(parameters):
                raise ConfigError(f"{function.__name__}: {word} for {', '.join(sorted(unknown))}, which are no parameters")
        return Experiment(
            function.__name__, function, parameters, replicates, tags, owner, schedule, until, approve_above_gpu_hours, dict(parts or {})
        )

    return declare


def default_of(config: type, field: str) -> Any:
    """The default of a config's field: an experiment that offers the field as a parameter need not repeat it."""
    found = next(f for f in dataclasses.fields(config) if f.name == field)
    if found.default is dataclasses.MISSING:
        raise ConfigError(f"{config.__name__}.{field} has no default")
    return found.default


def help_of(config: type, field: str) -> str:
    """What a config's docstring says of a field, in one line; "" where it says nothing."""
    text = " ".join(inspect.cleandoc(config.__doc__ or "").split())
    found = re.search(rf"(?:^|[.,;] ){field}(?:, \w+)*: (.+?)(?=\. \w+(?:, \w+)*: |\. [A-Z]|\.?$)", text) or re.search(
        rf"\b{field}(?:, \w+)*: (.+?)(?=\. \w+(?:, \w+)*: |\. [A-Z]|\.?$)", text
    )
    return found[1] if found else ""


@dataclass(frozen=True)
class Node:
    """A stage in the graph of an experiment. `group` is the arm path that it belongs to ("" for shared stages)."""

    id: str
    stage: Stage
    group: str
    arms: tuple[str, ...]
    upstream: tuple[str, ...]


@dataclass(frozen=True)
class Graph:
    """All stages of an experiment, inputs before users, each once."""

    experiment: str
    values: Mapping[str, Any]
    replicates: int
    nodes: tuple[Node, ...]
    results: Mapping[str, Mapping[int, Stage]]  # arm -> replicate -> results
    report: Stage

    def node(self, node_id: str) -> Node:
        for node in self.nodes:
            if node.id == node_id:
                return node
        raise ConfigError(f"{self.experiment} has no stage {node_id!r}; `craw4llm plan {self.experiment}` lists them")

    def id_of(self, stage: Stage) -> str:
        return next(node.id for node in self.nodes if node.stage.key == stage.key)

    def select(self, only: str = "", arm: str = "") -> tuple[Node, ...]:
        """The nodes of a node id or, where no node has that id, of a stage kind (`only`), and of an arm. ConfigError if there is none."""
        nodes = self.nodes
        if arm:
            nodes = tuple(n for n in nodes if any(a == arm or a.startswith(f"{arm}/") for a in n.arms))
            if not nodes:
                raise ConfigError(f"{self.experiment} has no arm {arm!r}; it has: {', '.join(self.results)}")
        if only:
            named = tuple(n for n in nodes if n.id == only)
            nodes = named or tuple(n for n in nodes if n.stage.config.stage == only)
            if not nodes:
                raise ConfigError(f"{self.experiment} has no stage {only!r}; `craw4llm plan {self.experiment}` lists them")
        return nodes


def expand(declared: Experiment, given: Mapping[str, Any] | None = None, replicates: int | None = None) -> Graph:
    """The graph of `declared` with the parameters `given`, for replicates 0 to `replicates` - 1."""
    values = declared.values(given or {})
    count = declared.replicates if replicates is None else replicates
    if count < 1:
        raise ConfigError(f"{declared.name}: replicates is {count}; expected at least 1")
    results: dict[str, dict[int, Stage]] = {}
    inputs: dict[str, Stage] = {}
    config: Config | None = None
    for replicate in range(count):
        built = declared.build(replicate=replicate, **values)
        config = built.report
        for arm, stage in built.arms.items():
            if not arm or any(not part.replace("_", "").replace("-", "").isalnum() for part in arm.split("/")):
                raise ConfigError(f"{declared.name}: the arm name {arm!r} must be of letters, digits, _, - and /")
            results.setdefault(arm, {})[replicate] = stage
            inputs[f"results/{arm}#{replicate}"] = stage
        for name, stage in built.reported.items():
            if replicate and (name not in inputs or inputs[name].key != stage.key):
                name = f"{name}#{replicate}"
            inputs[name] = stage
    assert config is not None
    report = Stage(config, **inputs)
    return Graph(declared.name, values, count, _nodes(report, results), results, report)


def _nodes(report: Stage, results: Mapping[str, Mapping[int, Stage]]) -> tuple[Node, ...]:
    stages = list(report.ancestors())
    users: dict[str, dict[str, set[int]]] = {}  # stage key -> arm -> replicates
    groups: dict[str, list[str]] = {stage.key: [] for stage in stages}  # stage key -> groups of what uses it
    for arm, by_replicate in results.items():
        for replicate, result in by_replicate.items():
            groups[result.key].append(arm)
            for stage in result.ancestors():
                users.setdefault(stage.key, {}).setdefault(arm, set()).add(replicate)
    for name, stage in report.inputs.items():
        if not name.startswith("results/"):
            groups[stage.key].append("")
    group: dict[str, str] = {report.key: ""}
    for stage in reversed(stages):
        if stage is not report:
            group[stage.key] = stage.name.rpartition("/")[0] or _common(groups[stage.key])
            for used in stage.inputs.values():
                groups[used.key].append(group[stage.key])
    several = max((len(r) for r in results.values()), default=0) > 1
    nodes: list[Node] = []
    ids: dict[str, str] = {}
    for stage in stages:
        arms = tuple(arm for arm in results if arm in users.get(stage.key, {}))
        rounds = set().union(*(users[stage.key][arm] for arm in arms)) if arms else set()
        label = stage.name.rpartition("/")[2]
        name = f"{label}_r{rounds.pop()}" if several and len(rounds) == 1 else label
        node_id = ".".join([*filter(None, group[stage.key].split("/")), name])
        if node_id in ids.values():
            raise ConfigError(f"two stages are called {node_id!r}; give one of them a name: Stage(config, 'name', ...)")
        ids[stage.key] = node_id
        upstream = tuple(sorted({ids[s.key] for s in stage.inputs.values()}))
        nodes.append(Node(node_id, stage, group[stage.key], arms, upstream))
    return tuple(nodes)


def _common(paths: Sequence[str]) -> str:
    """The longest path that all paths begin with; "" for none."""
    parts = [path.split("/") if path else [] for path in paths]
    common: list[str] = []
    for column in zip(*parts, strict=False):
        if len(set(column)) > 1:
            break
        common.append(column[0])
    return "/".join(common)


def folder() -> Path:
    """Where experiments are declared: $CRAW4LLM_EXPERIMENTS, else dags/experiments of the project."""
    given = os.environ.get(EXPERIMENTS_FOLDER)
    return Path(given) if given else Path(__file__).resolve().parent.parent / "dags" / "experiments"


def names() -> list[str]:
    """Names of the declared experiments, sorted."""
    return sorted(p.stem for p in folder().glob("*.py") if not p.stem.startswith("_"))


def load(name: str, root: Path | None = None) -> Experiment:
    """The experiment declared in `<folder>/<name>.py` under its own name, or kept below the artifact root `root` by `keep`."""
    path = folder() / f"{name}.py"
    if root is not None and not path.is_file() and (kept := _kept(name, root)) is not None:
        return kept
    if not path.is_file() or path.stem.startswith("_"):
        raise ConfigError(f"there is no experiment {name!r} in {folder()}; declared are: {', '.join(names()) or 'none'}")
    spec = importlib.util.spec_from_file_location(f"craw4llm_experiments.{name}", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    declared = getattr(module, name, None)
    if not isinstance(declared, Experiment):
        raise ConfigError(f"{path} declares no experiment called {name!r} (a function under @experiment)")
    return declared


def keep(declared: Experiment, given: Mapping[str, Any], replicates: int, root: Path) -> Experiment:
    """Keeps `declared` with these values as an experiment with a name of its own, which `load` knows: `<name>_<hash of the values>`.

    The same values have the same name. Raises ConfigError for values that are none, OSError where `root` cannot be written.
    """
    expand(declared, given, replicates)
    content = {"experiment": declared.name, "replicates": replicates, "values": declared.values(given)}
    text = json.dumps(content, indent=1, sort_keys=True)
    name = f"{declared.name}_{hashlib.sha256(text.encode()).hexdigest()[:8]}"
    path = _kept_folder(root) / f"{name}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_suffix(f".{process_name()}.tmp")
    temporary.write_text(text)
    temporary.replace(path)
    return load(name, root)


def kept_names(root: Path) -> list[str]:
    """Names of the experiments that `keep` has kept below `root`, sorted."""
    return sorted(p.stem for p in _kept_folder(root).glob("*.json"))


def _kept_folder(root: Path) -> Path:
    return root / "index" / "experiments"


def _kept(name: str, root: Path) -> Experiment | None:
    if not name.replace("_", "").isalnum():
        return None
    path = _kept_folder(root) / f"{name}.json"
    if not path.is_file():
        return None
    try:
        content = json.loads(path.read_text())
        base = load(content["experiment"])
        values, replicates = base.values(content["values"]), int(content["replicates"])
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{path} cannot be read ({error}); delete it and declare the experiment again") from error
    parameters = {p.name: dataclasses.replace(p, default=values[p.name]) for p in base.parameters.values()}
    until = max(replicates, base.until_replicates)
    return dataclasses.replace(base, name=name, parameters=parameters, replicates=replicates, until_replicates=until)


def _typed(owner: str, parameter: Parameter, value: Any) -> Any:
    wanted = parameter.type
    expected = f"some of {', '.join(parameter.choices)}, each once" if parameter.many else " or ".join(parameter.choices) or wanted.__name__
    error = ConfigError(f"{owner}: {parameter.name} is {value!r}; expected {expected}")
    if parameter.many:
        words = [word.strip() for word in value.split(",")] if isinstance(value, str) else []
        if not words or len(set(words)) < len(words) or not set(words) <= set(parameter.choices):
            raise error
        return ",".join(words)
    if parameter.choices and value not in parameter.choices:
        raise error
    if isinstance(value, str) and wanted is not str:
        text = value.strip()
        if wanted is bool:
            if text.lower() in ("true", "false"):
                return text.lower() == "true"
            raise error
        try:
            value = wanted(text.replace("_", "")) if wanted is int else wanted(text)
        except ValueError:
            raise error from None
    if wanted is float and type(value) is int:
        value = float(value)
    if type(value) is not wanted:
        raise error
    _check_bounds(owner, parameter, value)
    return value


def _check_bounds(owner: str, parameter: Parameter, value: Any) -> None:
    if parameter.type is float and not math.isfinite(value):
        raise ConfigError(f"{owner}: {parameter.name} is {value!r}; expected a finite number")
    if (parameter.low is not None and value < parameter.low) or (parameter.high is not None and value > parameter.high):
        low = "" if parameter.low is None else f" at least {parameter.low:,}"
        high = "" if parameter.high is None else f" at most {parameter.high:,}"
        raise ConfigError(f"{owner}: {parameter.name} is {value!r}; expected{low}{' and' if low and high else ''}{high}")
