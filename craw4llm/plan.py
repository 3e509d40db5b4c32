"""What `craw4llm plan` shows: every stage with its state, what is known of each arm's size and cost, and what will fall short.

A stage's module may offer `estimate(config, inputs) -> {name: (value, unit)}`; `inputs` holds the counts of inputs that are finished,
and the estimates of those that are not. An external input that is not at hand is named, and reckoned with by the counts that its
declaration states.

    summary(plan) -> {"gpu_hours": 104.2, "disk_bytes": ..., "arms": {...}, "absent": [...], "shortfalls": ["disk: ..."], ...}

Parts, hours, memory and network of each stage: craw4llm.plan_needs.
"""

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from craw4llm.configs import CorpusConfig, CrawlConfig, SelectConfig
from craw4llm.errors import InputError
from craw4llm.runner import Plan
from craw4llm.stage import Stage, implementation

Estimate = Mapping[str, tuple[float | int | None, str]]


def describe(plan: Plan) -> str:
    """The whole plan as text."""
    graph = plan.graph
    finished = {node.id for node in plan.nodes if plan.artifact(node) is not None}
    width = max(len(node.id) for node in plan.nodes)
    lines = [
        f"{graph.experiment}: {len(plan.nodes)} stages, {len(finished)} finished; {_many(len(graph.results), 'arm')}, "
        f"{_many(graph.replicates, 'replicate')}",
        "parameters: " + ", ".join(f"{k}={v!r}" for k, v in graph.values.items()),
        "",
    ]
    for node in plan.nodes:
        state = "finished" if node.id in finished else "to do"
        name = "?" if node.stage.key in plan.absent else plan.fingerprints[node.id]
        lines.append(f"  {node.id:<{width}}  {name:<12}  {state:<8}  <- {', '.join(node.upstream) or '-'}")
    lines += ["", "Estimated per model (finished stages: as counted):"]
    known: dict[str, Estimate] = {}
    shown: dict[str, list[str]] = {}
    for arm, by_replicate in graph.results.items():
        for replicate, result in by_replicate.items():
            facts = {name: f"{_number(value)} {unit}" for name, (value, unit) in facts_of(plan, result, known).items()}
            shown.setdefault(", ".join(f"{name} {text}" for name, text in facts.items()), []).append(f"{arm}#{replicate}")
    for text, arms in shown.items():
        lines.append(f"  {text or 'nothing known before the run'}")
        lines.append(f"    {', '.join(arms)}")
    cost = summary(plan)
    lines += ["", f"To do: {_number(cost['gpu_hours'])} GPU hours, {_number(cost['disk_bytes'])} bytes as far as known"]
    lines += [f"  absent: {text}" for text in cost["absent"]]
    lines += [f"  short: {text}" for text in cost["shortfalls"]]
    return "\n".join(lines)


def summary(plan: Plan) -> dict[str, Any]:
    """The plan as plain JSON values: stages and cost of what is not finished, facts per arm, absent inputs, shortfalls."""
    known = estimates(plan)
    todo = plan.missing(plan.nodes)
    costs = {
        name: sum(value for node in todo if (value := known[node.stage.key].get(name, (None, ""))[0]) is not None)
        for name in ("gpu_hours", "disk_bytes")
    }
    arms = {}
    for arm, by_replicate in plan.graph.results.items():
        arms[arm] = {name: value for name, (value, _) in facts_of(plan, next(iter(by_replicate.values())), known).items()}
    return {
        "experiment": plan.graph.experiment,
        "parameters": dict(plan.graph.values),
        "replicates": plan.graph.replicates,
        "stages": len(plan.nodes),
        "stages_to_do": len(todo),
        "nodes": [
            {
                "id": node.id,
                "stage": node.stage.config.stage,
                "arms": list(node.arms),
                "upstream": list(node.upstream),
                "finished": plan.artifact(node) is not None,
            }
            for node in plan.nodes
        ],
        "results": {arm: [plan.graph.id_of(s) for _, s in sorted(rs.items())] for arm, rs in plan.graph.results.items()},
        **costs,
        "arms": arms,
        "absent": list(dict.fromkeys(plan.absent.values())),
        "shortfalls": shortfalls(plan, known, costs["disk_bytes"]),
    }


def estimates(plan: Plan) -> dict[str, Estimate]:
    """What is known of every stage of the plan, by its key."""
    known: dict[str, Estimate] = {}
    for node in plan.nodes:
        _estimate(plan, node.stage, known)
    return known


def shortfalls(plan: Plan, known: Mapping[str, Estimate], disk_bytes: float) -> list[str]:
    """What will not be enough, as far as can be known before: disk, pages of a pool, tokens of a model. One line each."""
    found = []
    free = shutil.disk_usage(_existing(plan.store.root)).free
    if disk_bytes > free:
        found.append(f"disk: {_number(disk_bytes)} bytes are needed, {_number(free)} are free at {plan.store.root}")
    for node in plan.missing(plan.nodes):
        config = node.stage.config
        inputs = {name: known[s.key] for name, s in node.stage.inputs.items()}

        def count(name: str, of: str, inputs: Mapping[str, Estimate] = inputs) -> float | int | None:
            return inputs.get(of, {}).get(name, (None, ""))[0]

        pages = count("pages", "corpus")
        if isinstance(config, CrawlConfig) and pages is not None and (config.budget_pages or 0) > pages:
            found.append(f"pool: {node.id} is to crawl {config.budget_pages:,} pages, the corpus has {pages:,}")
        if isinstance(config, SelectConfig) and config.keep_pages is not None:
            pool: float | int | None = None
            if config.pool == "corpus" and pages is not None:
                pool = int(pages * (config.top_fraction if config.keep == "sample_top" else 1))
            elif config.pool == "crawled":
                pool = config.prefix_pages or count("crawled_pages", "crawl")
            if pool is not None and pool < config.keep_pages:
                found.append(f"pool: {node.id} is to keep {config.keep_pages:,} pages of a pool of {pool:,}")
        tokens, wanted = count("tokens", "tokens"), known[node.stage.key].get("train_tokens", (None, ""))[0]
        if tokens and wanted and tokens < wanted:
            found.append(f"tokens: {node.id} trains on {_number(wanted)}, about {_number(tokens)} are there: {wanted / tokens:.1f} epochs")
    return found


def facts_of(plan: Plan, result: Stage, known: dict[str, Estimate]) -> dict[str, tuple[float | int, str]]:
    """What is known of one model, from its crawl to its evaluation; disk is that of all its stages together."""
    _estimate(plan, result, known)
    facts: dict[str, tuple[float | int, str]] = {}
    for stage in result.ancestors():
        for name, (value, unit) in known[stage.key].items():
            if name in _SHOWN and value is not None:
                before = facts[name][0] if name == "disk_bytes" and name in facts else 0
                facts[name] = (before + value, unit)
    return facts


_SHOWN = (
    "crawled_pages",
    "fetches",
    "kept_pages",
    "unique_tokens",
    "epochs",
    "parameters",
    "steps",
    "train_tokens",
    "train_flops",
    "eval_items",
    "eval_tokens",
    "gpu_hours",
    "disk_bytes",
)


def _estimate(plan: Plan, stage: Stage, known: dict[str, Estimate]) -> Estimate:
    if stage.key not in known:
        inputs = {name: _estimate(plan, s, known) for name, s in stage.inputs.items()}
        module: Any = implementation(stage.config.stage) if stage.config.estimated else None
        facts: dict[str, tuple[float | int | None, str]] = {}
        for external in stage.externals():
            if stage.key in plan.absent:
                facts.update({name: (value, f"{unit} (stated)") for name, value, unit in external.stated})
        if stage.key in plan.absent and isinstance(stage.config, CorpusConfig):
            facts.update({name: (value, "(given)") for name, value in plan.counts.items()})
        if hasattr(module, "estimate"):
            try:
                facts.update(module.estimate(stage.config, inputs))
            except InputError:
                if stage.key not in plan.absent:
                    raise
        artifact = plan.store.find(stage.config.stage, plan.fingerprints[plan.graph.id_of(stage)])
        if artifact is not None:
            facts.update({name: (entry["value"], entry["unit"]) for name, entry in artifact.manifest["counts"].items()})
        known[stage.key] = facts
    return known[stage.key]


def _existing(path: Path) -> Path:
    path = path.resolve()
    while not path.exists():
        path = path.parent
    return path


def _many(count: int, what: str) -> str:
    return f"{count} {what}" if count == 1 else f"{count} {what}s"


def _number(value: float | int) -> str:
    return f"{value:,}" if isinstance(value, int) else f"{value:.3g}"
