"""`craw4llm report EXPERIMENT [EXPERIMENT...]`: one report over several experiments and all their recorded runs.

    index/<experiment>.json -> arms by lineage -> the stage `report` over what is finished, with the rest shown as missing

The same stage makes it that closes an experiment, so it is an artifact like any other. An arm's name has the experiment before it where
there are several, and the parameters behind it where an experiment was run with several settings. What two runs have in common (equal
fingerprints) is one arm; replicates of all runs are put together.

Importing this module is cheap: numpy and the rest are loaded by the command.
"""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import click

from craw4llm.artifact import Artifact, Store
from craw4llm.errors import ArtifactError, ConfigError
from craw4llm.execution import Execution
from craw4llm.experiment import expand, load
from craw4llm.fingerprint import External, canonical, fingerprint
from craw4llm.options import root_option
from craw4llm.runner import read_index
from training.configs import ReportConfig


@click.command()
@click.argument("experiments", nargs=-1, required=True, metavar="EXPERIMENT...")
@click.option("--reference", default="", help="The arm that others are compared with (default: the first experiment's own).")
@root_option
def report(experiments: tuple[str, ...], reference: str, root: Path) -> None:
    """Compare all recorded runs of one or several experiments; arms that are not finished are shown as missing."""
    made = build(experiments, Execution(root=root), reference)
    for answer in made.manifest["notes"]["answers"]:
        click.echo(answer)
    for name, entry in made.manifest["counts"].items():
        click.echo(f"{name}: {entry['value']} {entry['unit']}")
    click.echo(f"report: {made.file('report.html').resolve()}")


@dataclasses.dataclass(frozen=True)
class Recorded:
    """A recorded run under the name that its arms get. arms: arm -> replicate -> stages ({"stage", "fingerprint"} by node id)."""

    label: str
    suffix: str
    arms: Mapping[str, Mapping[int, Mapping[str, Mapping[str, str]]]]
    shared: Mapping[str, Mapping[str, str]]

    def name(self, arm: str) -> str:
        return f"{self.label}{arm}{self.suffix}"

    def stages(self) -> Iterator[Mapping[str, str]]:
        """Every stage, those of replicate 0 first."""
        yield from self.shared.values()
        for by_replicate in self.arms.values():
            for stages in by_replicate.values():
                yield from stages.values()


def build(experiments: Sequence[str], execution: Execution, reference: str = "") -> Artifact:
    """The report's artifact; built only if it is not there."""
    store = Store(execution.root)
    runs = [run for name in experiments for run in recorded(name, execution.root, several=len(set(experiments)) > 1)]
    inputs, expected = gather_inputs(runs, store)
    declared = _declared(experiments[0])
    if not reference and declared is not None:
        reference = next((name for run in runs for name in [run.name(declared.reference)] if f"results/{name}#0" in expected), "")
        reference = reference or (declared.reference if not expected else "")
    elif reference and expected and not any(name.startswith(f"results/{reference}#") for name in expected):
        known = ", ".join(sorted({name.removeprefix("results/").rpartition("#")[0] for name in expected}))
        raise ConfigError(f"report: there is no arm {reference!r}; the arms are: {known}")
    config = ReportConfig(
        title=f"{', '.join(dict.fromkeys(experiments))}: all recorded runs",
        question=declared.question if declared else "Which arm gives the better language model?",
        hypothesis=declared.hypothesis if declared else "",
        reference=reference,
        at_pages=declared.at_pages if declared else (),
        expected=tuple(sorted(expected)),
        mixed=True,
        published=declared.published if declared else "DCLM",
    )
    prints = {name: artifact.fingerprint for name, artifact in inputs.items()}
    from training.report import stage

    made, _ = store.build(
        config.stage,
        fingerprint(config.stage, config.version, config, prints, _no_external),
        version=config.version,
        config=canonical(config, _no_external),
        inputs=inputs,
        write=lambda out: stage.run(config, inputs, out, execution),
    )
    return made


def recorded(experiment: str, root: Path, *, several: bool) -> list[Recorded]:
    """The recorded runs of an experiment, the newest last. Parameters that differ between them stand behind the arms' names."""
    runs = read_index(root / "index" / f"{experiment}.json")
    if not runs:
        known = ", ".join(sorted(p.stem for p in (root / "index").glob("*.json"))) or "none"
        raise ConfigError(
            f"report: no run of {experiment!r} is recorded in {root}; recorded are: {known}. Run it: craw4llm run {experiment}"
        )
    names = sorted({name for run in runs for name in run["parameters"]})
    differing = [name for name in names if len({repr(run["parameters"].get(name)) for run in runs}) > 1]
    made = []
    for run in runs:
        suffix = ", ".join(f"{name}={run['parameters'].get(name)}" for name in differing)
        arms: dict[str, dict[int, Mapping[str, Mapping[str, str]]]] = {}
        for replicate, by_arm in run["arms"].items():
            for arm, stages in by_arm.items():
                arms.setdefault(arm, {})[int(replicate)] = stages
        made.append(Recorded(f"{experiment}/" if several else "", f" [{suffix}]" if suffix else "", arms, run["shared"]))
    return made


def gather_inputs(runs: Sequence[Recorded], store: Store) -> tuple[dict[str, Artifact], set[str]]:
    """(inputs of the report, names of all results that the runs declare). Raises ArtifactError where nothing is finished yet."""
    found: dict[str, Artifact] = {}
    expected: set[str] = set()
    named: dict[str, str] = {}  # fingerprint of results -> the name that they already have
    for run in runs:
        for arm, by_replicate in run.arms.items():
            for replicate, stages in sorted(by_replicate.items()):
                (print_,) = {s["fingerprint"] for s in stages.values() if s["stage"] == "evaluate"} or {""}
                name = named.setdefault(print_ or f"{run.name(arm)}#{replicate}", f"results/{run.name(arm)}#{replicate}")
                expected.add(name)
                artifact = store.find("evaluate", print_) if print_ else None
                if artifact is not None:
                    found[name] = artifact
    declared = dict.fromkeys((s["stage"], s["fingerprint"]) for run in runs for s in run.stages())
    at_hand = [a for stage, print_ in declared if stage in ("corpus", "scorer", "score", "crawl") and (a := store.find(stage, print_))]
    corpora = [a for a in at_hand if a.stage == "corpus"]
    if not corpora:
        raise ArtifactError(f"report: no corpus of these runs is finished in {store.root}; run the experiment first")
    corpus = corpora[0]
    found["corpus"] = corpus
    mine = [a for a in at_hand if a.manifest["inputs"].get("corpus", {}).get("fingerprint") == corpus.fingerprint]
    for scores in (a for a in mine if a.stage == "score"):
        found.setdefault("scores", scores)
        found.setdefault("scorer", scores.input("scorer"))
    crawls: dict[str, list[Artifact]] = {}
    for crawl in (a for a in mine if a.stage == "crawl"):
        crawls.setdefault(str(crawl.config["policy"]), []).append(crawl)
    for policy, some in crawls.items():
        ordered = sorted(some, key=lambda a: (a.config["seed_set"], a.config["rng_seed"], a.fingerprint))
        settings: dict[str, list[Artifact]] = {}
        for crawl in ordered:
            rest = {key: value for key, value in crawl.config.items() if key not in ("seed_set", "rng_seed")}
            scorer = crawl.manifest["inputs"].get("scorer", {}).get("fingerprint", "")
            settings.setdefault(f"{sorted(rest.items())} {scorer}", []).append(crawl)
        for place, alike in enumerate(settings.values()):
            for replicate, crawl in enumerate(alike):
                name = policy if place == 0 else f"{policy} ({place + 1})"
                found[f"crawl/{name}#{replicate}"] = crawl
    return found, expected


def _declared(experiment: str) -> ReportConfig | None:
    """The experiment's own report config; None where it is not declared here any more."""
    try:
        config: Any = expand(load(experiment)).report.config
    except ConfigError:
        return None
    return config if isinstance(config, ReportConfig) else None


def _no_external(external: External) -> str:
    raise AssertionError("a report's config names no external input")
