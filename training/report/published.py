"""What the paper published: its runs' task accuracies, the means that follow from them, and the size of its experiment.

    rows = published("DCLM")        the runs under that scorer, and those that need none
    rows[("quality", 1)].core_v1    0.2133

Source: Craw4LLM, arXiv 2502.13347 v3, tables 1 and 3 to 7. Means are computed here by the rule of `training.evaluation.aggregate`, which
gives the Core of the paper's Table 1 to the last digit printed; the 4x runs are in its figures and appendix only.
"""

import csv
import dataclasses
import importlib.resources
from typing import Literal

from training.evaluation.aggregate import Aggregates, aggregate

Scorer = Literal["DCLM", "FineWeb-Edu"]
# Section 4 and appendix A: corpus, seeds, batch, documents crawled, model, tokens.
SCALE = {
    "pages in the corpus": 900_000_000,
    "seed pages": 10_000,
    "pages crawled": 20_000_000,
    "batch, pages": 10_000,
    "parameters of the model": 411_616_256,
    "tokens trained on": 32_929_300_480,
}


@dataclasses.dataclass(frozen=True)
class Run:
    """One published model. in_table_1: its means stand there; else they are derived from its task accuracies."""

    name: str
    scorer: str
    policy: str
    pool_multiple: int
    in_table_1: bool
    means: Aggregates

    @property
    def core_v1(self) -> float:
        assert self.means.core_v1 is not None
        return self.means.core_v1

    @property
    def source(self) -> str:
        return "published, Table 1" if self.in_table_1 else "published accuracies, mean derived"


def published(scorer: str) -> dict[tuple[str, int], Run]:
    """(policy or "oracle", pool multiple) -> run, of the runs under one scorer ("DCLM" or "FineWeb-Edu") and those without one."""
    text = importlib.resources.files("training.report").joinpath("published.csv").read_text()
    found = {}
    for row in csv.DictReader(text.splitlines()[1:]):
        if row["scorer"] in (scorer, "none"):
            multiple = int(row["pool_multiple"])
            accuracies = {name: float(value) for name, value in list(row.items())[5:]}
            run = Run(row["run"], row["scorer"], row["policy"], multiple, row["in_table_1"] == "yes", aggregate(accuracies))
            found[run.policy, multiple if run.policy != "oracle" else 0] = run
    return found
