"""Reruns: which replicate comes next, who has it, and when there are enough.

    claim(experiment, values, root, run_id)   -> {"replicate": 2, "replicates": 3, "skip": ""}
    release(experiment, values, root, run_id)    # of a run that failed: the next run takes its replicate, and goes on from what is finished

The claims of one experiment with one set of parameters and inputs are a file, `<root>/index/claims/<experiment>-<hash of them>.json`, run
id -> replicate, changed under a lock. A run that asks again has what it had; two runs never have the same; a replicate that is finished, by
whomever, is not given out. So an experiment's replicates are those with the numbers 0 to N - 1, and the report counts each once. When the
corpus or another input from outside changes, its replicates begin anew.
"""

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from craw4llm.artifact import Store, storage_errors
from craw4llm.errors import ArtifactError, ConfigError
from craw4llm.execution import Execution, process_name
from craw4llm.experiment import Experiment, expand
from craw4llm.runner import make_plan


def claim(experiment: Experiment, given: Mapping[str, Any], root: Path, run_id: str) -> dict[str, Any]:
    """Gives the run its replicate: the smallest that is neither finished nor another run's.

    Returns replicate (null where there is nothing to do), replicates (how many numbers there are up to it), skip (why there is nothing to
    do, else ""), finished (leading replicates that are finished).
    """
    if not run_id:
        raise ConfigError("claim: run_id is empty; expected the id of the run that claims a replicate")
    store = Store(root)
    path = _path(experiment, given, root)
    with storage_errors(root), store.lock("claims", path.stem):
        claims = _read(path)
        if run_id in claims:
            number = claims[run_id]
            return {"replicate": number, "replicates": number + 1, "skip": "", "finished": finished(experiment, given, root)}
        done = finished(experiment, given, root)
        if why := enough(experiment, given, root, done):
            return {"replicate": None, "replicates": done, "skip": why, "finished": done}
        taken = set(claims.values())
        number = next(n for n in range(done, done + len(taken) + 1) if n not in taken)
        if number >= experiment.until_replicates:
            running = ", ".join(sorted(run for run, n in claims.items() if n >= done))
            why = f"all {experiment.until_replicates} replicates are finished or claimed ({running})"
            return {"replicate": None, "replicates": done, "skip": why, "finished": done}
        _write(path, claims | {run_id: number})
        return {"replicate": number, "replicates": number + 1, "skip": "", "finished": done}


def release(experiment: Experiment, given: Mapping[str, Any], root: Path, run_id: str) -> bool:
    """Gives the run's replicate back, unless it is finished. Returns whether it did."""
    path = _path(experiment, given, root)
    with storage_errors(root), Store(root).lock("claims", path.stem):
        claims = _read(path)
        number = claims.get(run_id)
        if number is None or number < finished(experiment, given, root):
            return False
        _write(path, {run: n for run, n in claims.items() if run != run_id})
        return True


def finished(experiment: Experiment, given: Mapping[str, Any], root: Path) -> int:
    """Number of leading replicates whose arms all have their results."""
    graph = expand(experiment, given, max(2, experiment.until_replicates))
    plan = make_plan(graph, Execution(root=root))
    for replicate in range(graph.replicates):
        for by_replicate in graph.results.values():
            if plan.artifact(graph.node(graph.id_of(by_replicate[replicate]))) is None:
                return replicate
    return graph.replicates


def enough(experiment: Experiment, given: Mapping[str, Any], root: Path, done: int) -> str:
    """Why no further replicate is wanted; "" where one is."""
    if done >= experiment.until_replicates:
        return f"{done} replicates are finished, {experiment.until_replicates} were asked for"
    if done < 2:  # the spread over training seeds is not known before
        return ""
    graph = expand(experiment, given, done)
    report = make_plan(graph, Execution(root=root)).artifact(graph.node(graph.id_of(graph.report)))
    if report is None or not report.count("pairs_decided"):
        return ""
    if report.count("pairs_undecided") == 0 and report.count("pairs_missing") == 0:
        return f"the report over {done} replicates has its verdict: all {report.count('pairs_decided')} pairs are decided"
    return ""


def _path(experiment: Experiment, given: Mapping[str, Any], root: Path) -> Path:
    graph = expand(experiment, given, 2)
    fingerprints = make_plan(graph, Execution(root=root)).fingerprints
    first = {arm: fingerprints[graph.id_of(by_replicate[0])] for arm, by_replicate in graph.results.items()}
    identity = json.dumps([experiment.values(given), first], sort_keys=True)
    return root / "index" / "claims" / f"{experiment.name}-{hashlib.sha256(identity.encode()).hexdigest()[:12]}.json"


def _read(path: Path) -> dict[str, int]:
    if not path.is_file():
        return {}
    try:
        return {str(run): int(number) for run, number in json.loads(path.read_text()).items()}
    except (ValueError, AttributeError, TypeError) as error:
        raise ArtifactError(f"{path} cannot be read ({error}); delete it: finished replicates are known without it") from error


def _write(path: Path, claims: Mapping[str, int]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_suffix(f".{process_name()}.tmp")
    temporary.write_text(json.dumps(claims, indent=1, sort_keys=True))
    temporary.replace(path)
