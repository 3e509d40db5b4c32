"""From task accuracies to Core.

    aggregate({"arc_easy": 0.595, ...}).core_v1     -> 0.2133

centered = (accuracy - b) / (1 - b), b the task's random baseline. **Core** is the plain mean of the 22 centered accuracies of DCLM's
low-variance set: MMLU is not in it. Version 1 of the baselines gives the Craw4LLM paper's numbers, version 2 (DCLM since September
2025) corrects three of them; both are always given. Source: mlfoundations/dclm `eval/aggregated_metrics.py`.

A mean exists only when each of its tasks was run in full. Otherwise it is None and `why` names the tasks.
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Literal

from craw4llm.errors import ArtifactError
from training.evaluation.tasks import CORE, TASKS

Version = Literal["v1", "v2"]
GROUPS: tuple[str, ...] = ("commonsense", "language", "reading", "symbolic", "world")


@dataclasses.dataclass(frozen=True, kw_only=True)
class GroupMean:
    """Means over the tasks of one group, MMLU in "world": the columns of the paper's Table 1 (centered v1). None: not all tasks ran."""

    centered_v1: float | None
    centered_v2: float | None
    raw: float | None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Aggregates:
    """core_v1, core_v2: mean centered accuracy of the 22. raw_mean_22, raw_mean_23: of accuracies, without and with MMLU."""

    core_v1: float | None
    core_v2: float | None
    raw_mean_22: float | None
    raw_mean_23: float | None
    groups: Mapping[str, GroupMean]
    why: tuple[str, ...]


def centered(label: str, accuracy: float, version: Version) -> float:
    """Accuracy of a task, 0 at its random baseline and 1 at full marks."""
    baseline = (TASKS[label].v1 if version == "v1" else TASKS[label].v2) / 100
    return (accuracy - baseline) / (1 - baseline)


def aggregate(accuracies: Mapping[str, float], unusable: Mapping[str, str] | None = None) -> Aggregates:
    """Means over the tasks.

    accuracies: label -> accuracy in [0, 1]. unusable: label -> why a task's accuracy may not enter a mean (limited, altered).
    Raises ArtifactError for a label that is no task and for an accuracy that is no share.
    """
    for label, accuracy in accuracies.items():
        if label not in TASKS:
            raise ArtifactError(f"no task is called {label!r}; the tasks are: {', '.join(TASKS)}")
        if not (math.isfinite(accuracy) and 0 <= accuracy <= 1):
            raise ArtifactError(f"the accuracy of {label} is {accuracy}; expected a share from 0 to 1")
    reasons = {label: f"{label} is missing" for label in TASKS if label not in accuracies}
    reasons.update(unusable or {})

    def mean(labels: Sequence[str], version: Version | None) -> float | None:
        if any(label in reasons for label in labels):
            return None
        values = [accuracies[label] if version is None else centered(label, accuracies[label], version) for label in labels]
        return math.fsum(values) / len(values)

    groups = {}
    for group in GROUPS:
        members = [label for label, task in TASKS.items() if task.group == group]
        groups[group] = GroupMean(centered_v1=mean(members, "v1"), centered_v2=mean(members, "v2"), raw=mean(members, None))
    return Aggregates(
        core_v1=mean(CORE, "v1"),
        core_v2=mean(CORE, "v2"),
        raw_mean_22=mean(CORE, None),
        raw_mean_23=mean(tuple(TASKS), None),
        groups=groups,
        why=tuple(reasons[label] for label in TASKS if label in reasons),
    )
