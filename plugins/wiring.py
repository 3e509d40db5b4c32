"""What the DAG files share: limits by kind of stage, pools, fields of a form, Assets.

Parsing a DAG file imports this; nothing here is heavy.
"""

import dataclasses
import datetime
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from airflow.sdk import DAG, Asset, AssetAlias, Param
from airflow.sdk.definitions.param import ParamsDict

from craw4llm.experiment import Experiment, Node, Parameter
from craw4llm.stage import Stage
from notify import RunNotifier
from placement import operator_arguments

PROJECT = Path(__file__).resolve().parent.parent
JSON_TYPES = {int: "integer", float: "number", bool: "boolean", str: "string"}
REPUBLISHED = ("corpus", "scorer")  # kinds of stages whose new artifacts are news to other experiments


@dataclasses.dataclass(frozen=True)
class Limits:
    """How often a stage is tried again, after what time it is thought to hang, and which pool it waits for. Stages go on from where they
    were."""

    retries: int
    hours: float
    pool: str = "cpu"


LIMITS = {
    "plan": Limits(2, 2, "default_pool"),  # which is always there: it has to say where another is not
    "corpus": Limits(2, 48),
    "scorer": Limits(1, 12),
    "score": Limits(3, 72),
    "crawl": Limits(3, 72),
    "select": Limits(1, 12),
    "tokenizer": Limits(1, 12),
    "tokenize": Limits(3, 72),
    "overlap": Limits(1, 24),
    "train": Limits(5, 14 * 24, "gpu"),
    "evaluate": Limits(3, 48, "gpu"),
    "report": Limits(1, 2),
}
OTHER_STAGES = Limits(1, 24)


def limits_of(kind: str) -> dict[str, Any]:
    """The operator's arguments for a kind of stage."""
    limits = LIMITS.get(kind, OTHER_STAGES)
    where = operator_arguments(kind)
    return {"retries": limits.retries, "execution_timeout": datetime.timedelta(hours=limits.hours), "pool": limits.pool, **where}


def default_args(owner: str) -> dict[str, Any]:
    return {
        "owner": owner,
        "retry_delay": datetime.timedelta(seconds=10),
        "retry_exponential_backoff": True,
        "max_retry_delay": datetime.timedelta(minutes=15),
        "on_failure_callback": [RunNotifier("failed")],
    }


def param(parameter: Parameter) -> Param:
    """A field of the form."""
    title, about = parameter.name, parameter.help or None
    if parameter.many:
        items = {"type": "string", "enum": list(parameter.choices)}
        return Param(
            parameter.default.split(","), type="array", items=items, minItems=1, uniqueItems=True, examples=list(parameter.choices),
            title=title, description=about,
        )  # fmt: skip
    kind: Any = JSON_TYPES[parameter.type]
    if parameter.default == "":
        kind = [kind, "null"]  # a text that may stay empty
    more: dict[str, Any] = {"enum": list(parameter.choices)} if parameter.choices else {}
    if parameter.low is not None:
        more["minimum"] = parameter.low
    if parameter.high is not None:
        more["maximum"] = parameter.high
    return Param(parameter.default, type=kind, title=title, description=about, **more)


def form(experiment: Experiment) -> dict[str, Param]:
    return {parameter.name: param(parameter) for parameter in experiment.parameters.values()}


def give_form(dag: DAG, fields: Mapping[str, Param]) -> None:
    """Sets the DAG's form when its tasks are there: Airflow copies the form of a DAG into every task that is made in it, which took more
    than half of the time of parsing and of the DAG's stored form."""
    dag.params = ParamsDict(dict(fields))
    dag.params._fill_missing_param_source("dag")
    dag.validate()


def asset(experiment: str, node: Node) -> Asset:
    """What a finished stage publishes: an event with the manifest's place, the fingerprint and the main counts."""
    return Asset(name=f"craw4llm {experiment} {node.id}", uri=f"x-craw4llm://{experiment}/{node.id}", group="craw4llm")


def published(stage: Stage) -> Asset:
    """The Asset of a declared corpus or scorer, the same in all experiments that declare it alike: its event means that the artifact
    changed."""
    kind = stage.config.stage
    return Asset(name=f"craw4llm {kind} {stage.key}", uri=f"x-craw4llm://published/{kind}/{stage.key}", group="craw4llm")


def outlets(experiment: str, node: Node) -> list[Any]:
    """An Asset of the stage in this experiment; for a corpus or scorer also an alias, which becomes `published` when its content has
    changed."""
    found: list[Any] = [asset(experiment, node)]
    if node.stage.config.stage in REPUBLISHED:
        found.append(AssetAlias(name=published(node.stage).name, group="craw4llm"))
    return found
