"""What `craw4llm plan` shows: every stage with its state, and per arm what is known of its size and cost before anything is spent.

A stage's module may offer `estimate(config, inputs) -> {name: (value, unit)}`; `inputs` holds the counts of inputs that are finished,
and the estimates of those that are not.
"""

from collections.abc import Mapping
from typing import Any

from craw4llm.runner import Plan
from craw4llm.stage import Stage, implementation

Estimate = Mapping[str, tuple[float | int | None, str]]


def describe(plan: Plan) -> str:
    """The whole plan as text."""
    graph = plan.graph
    finished = {node.id for node in plan.nodes if plan.artifact(node) is not None}
    width = max(len(node.id) for node in plan.nodes)
    lines = [
        f"{graph.experiment}: {len(plan.nodes)} stages, {len(finished)} finished; {len(graph.results)} arms, {graph.replicates} replicates",
        "parameters: " + ", ".join(f"{k}={v!r}" for k, v in graph.values.items()),
        "",
    ]
    for node in plan.nodes:
        state = "finished" if node.id in finished else "to do"
        lines.append(f"  {node.id:<{width}}  {plan.fingerprints[node.id]}  {state:<8}  <- {', '.join(node.upstream) or '-'}")
    lines += ["", "Estimated per model (finished stages: as counted):"]
    known: dict[str, Estimate] = {}
    shown: dict[str, list[str]] = {}
    for arm, by_replicate in graph.results.items():
        for replicate, result in by_replicate.items():
            _estimate(plan, result, known)
            facts = {}
            for stage in result.ancestors():
                for name, (value, unit) in known[stage.key].items():
                    if name in _SHOWN and value is not None:
                        facts[name] = f"{_number(value)} {unit}"
            shown.setdefault(", ".join(f"{name} {text}" for name, text in facts.items()), []).append(f"{arm}#{replicate}")
    for text, arms in shown.items():
        lines.append(f"  {text or 'nothing known before the run'}")
        lines.append(f"    {', '.join(arms)}")
    return "\n".join(lines)


_SHOWN = (
    "crawled_pages",
    "fetches",
    "kept_pages",
    "tokens",
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
        module: Any = implementation(stage.config.stage)
        facts: dict[str, tuple[float | int | None, str]] = {}
        if hasattr(module, "estimate"):
            facts.update(module.estimate(stage.config, inputs))
        artifact = plan.store.find(stage.config.stage, plan.fingerprints[plan.graph.id_of(stage)])
        if artifact is not None:
            facts.update({name: (entry["value"], entry["unit"]) for name, entry in artifact.manifest["counts"].items()})
        known[stage.key] = facts
    return known[stage.key]


def _number(value: float | int) -> str:
    return f"{value:,}" if isinstance(value, int) else f"{value:.3g}"
