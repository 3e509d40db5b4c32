"""What a report is about, read from its inputs: every arm's models, and the artifacts that they were made from.

    study = gather(inputs, reference)
    study.arms["quality/equal_pages"].runs[0].crawl    -> the crawl artifact behind replicate 0
    study.nll[("quality/equal_pages", 0)]              -> float64[pages], nats of every held-out page

A model that did not come out (no results, bits per byte that are no number) is kept as missing with its reason; it is in no mean.
"""

import dataclasses
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any

import numpy as np
import pyarrow.parquet as pq
from numpy.typing import NDArray

from craw4llm.artifact import Artifact
from craw4llm.configs import KNOWLEDGE
from craw4llm.errors import ArtifactError, ConfigError
from training.report.verdict import Cell, Floats, bits_per_byte

EQUAL_PAGES, OTHER_POOLS, EQUAL_FETCHES, ORACLE = "Equal pages crawled", "Other pools", "Equal fetches", "Oracle"
COMPARISONS = (EQUAL_PAGES, OTHER_POOLS, EQUAL_FETCHES, ORACLE)
SAME_POOL = 1.1  # pools whose pages differ by less are meant to be equal; what is not exactly equal is said beside the verdict
KNOWS = {
    "target_text": "text of every page it discovers (look-ahead)",
    "full_graph": "the whole link graph",
    "live": "what it has crawled so far",
}
_OVERLAP = re.compile(r"overlap/(?P<arm>.+)")
_RESULTS = re.compile(r"results/(?P<arm>.+)#(?P<replicate>\d+)")
_CRAWL = re.compile(r"crawl/(?P<policy>[^#]+)(#(?P<replicate>\d+))?")


def policy_knows(policy: str) -> str:
    """What a policy sees before it fetches a page, in words; "" for what is no policy."""
    return KNOWS[KNOWLEDGE[policy]] if policy in KNOWLEDGE else ""


@dataclasses.dataclass(frozen=True)
class Run:
    """One model of one arm: the artifacts from its results back to its crawl. `crawl` is None for the oracle."""

    results: Artifact
    checkpoint: Artifact
    tokens: Artifact
    tokenizer: Artifact
    selection: Artifact
    crawl: Artifact | None

    @classmethod
    def of(cls, results: Artifact) -> "Run":
        checkpoint = results.input("checkpoint")
        tokens = checkpoint.input("tokens")
        selection = tokens.input("selection")
        crawl = selection.input("crawl") if "crawl" in selection.manifest["inputs"] else None
        return cls(results, checkpoint, tokens, tokens.input("tokenizer"), selection, crawl)


@dataclasses.dataclass(frozen=True, order=True)
class Scale:
    """Size of the models of an arm: FLOPs of one training, name of the size, tokens trained on. The largest is the last by order."""

    flops: float
    size: str
    tokens: int


@dataclasses.dataclass(frozen=True)
class Arm:
    """An arm with its models. runs: replicate -> model; missing: replicate -> why its result does not count, whether there is one or not.

    comparison: which comparison it belongs to, after the pool that it was selected from; "" for an arm without any results.
    """

    name: str
    runs: Mapping[int, Run]
    missing: Mapping[int, str]
    comparison: str = ""

    @property
    def first(self) -> Run | None:
        """The model of the smallest replicate, for facts that replicates share."""
        return self.runs[min(self.runs)] if self.runs else None

    @property
    def counted(self) -> dict[int, Run]:
        """The models that means are taken over: those of `runs` that are not missing."""
        return {replicate: run for replicate, run in self.runs.items() if replicate not in self.missing}

    @property
    def policy(self) -> str:
        """The crawl policy; "" for the oracle and for an arm without results."""
        crawl = self.first.crawl if self.first else None
        return str(crawl.config["policy"]) if crawl else ""

    @property
    def scale(self) -> Scale | None:
        """None for an arm without results."""
        if self.first is None:
            return None
        checkpoint = self.first.checkpoint
        return Scale(float(checkpoint.count("train_flops")), str(checkpoint.config["size"]), int(checkpoint.count("tokens")))

    @property
    def recipe(self) -> str:
        """What the models were trained on, whatever their size: the fingerprint of the selection."""
        return self.first.selection.fingerprint if self.first else ""

    @property
    def pool_pages(self) -> int | None:
        """Pages that the selection was taken from; None for an arm without results."""
        if self.first is None:
            return None
        pool = self.first.selection.count("pool_pages")
        return None if pool is None else int(pool)

    @property
    def pool_multiple(self) -> float | None:
        """Pages in the pool for each page that was to be kept, as the paper's 1x, 2x, 4x and 45x."""
        if self.first is None or not self.pool_pages:
            return None
        config = self.first.selection.config
        wanted = config.get("keep_pages") or (self.pool_pages if config.get("keep") == "all" else self.first.selection.count("kept_pages"))
        return self.pool_pages / wanted if wanted else None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Study:
    """Everything that the report reports on.

    nll: (arm, replicate) -> float64[pages] for the models that came out; `pages` and `n_bytes` are those of the held-out pages.
    crawls: policy -> replicate -> crawl. overlaps: arm -> overlap. pagerank: a scorer over the corpus. others: names of inputs that this
    report does not show. excluded: arms of other scales (`of_scale`), which enter no verdict of this study.
    """

    corpus: Artifact
    scorer: Artifact | None
    scores: Artifact | None
    crawls: Mapping[str, Mapping[int, Artifact]]
    arms: Mapping[str, Arm]
    reference: str
    replicates: tuple[int, ...]
    pages: NDArray[np.uint32]
    n_bytes: NDArray[np.uint64]
    nll: Mapping[Cell, Floats]
    overlaps: Mapping[str, Artifact]
    pagerank: Artifact | None
    others: tuple[str, ...]
    excluded: Mapping[str, Arm] = dataclasses.field(default_factory=dict)

    @property
    def crawls_only(self) -> bool:
        """Crawls were given and no arm: the report is about what policies find, not about models."""
        return bool(self.crawls) and not self.replicates

    @cached_property
    def scales(self) -> list[Scale]:
        """All scales of the arms, smallest first."""
        return sorted({arm.scale for arm in (*self.arms.values(), *self.excluded.values()) if arm.scale is not None})

    def of_scale(self, scale: Scale) -> "Study":
        """The study with the arms of one scale, and those without results, alone."""
        kept = {name: arm for name, arm in self.arms.items() if arm.scale in (None, scale)}
        rest = {name: arm for name, arm in self.arms.items() if name not in kept}
        nll = {cell: x for cell, x in self.nll.items() if cell[0] in kept}
        return dataclasses.replace(self, arms=kept, nll=nll, excluded={**self.excluded, **rest})

    @cached_property
    def values(self) -> dict[Cell, float]:
        """(arm, replicate) -> held-out bits per byte."""
        return {cell: bits_per_byte(nll, self.n_bytes) for cell, nll in self.nll.items()}

    def of_arm(self, arm: str) -> list[float]:
        """Bits per byte of the arm's models that came out, by replicate."""
        return [self.values[arm, r] for r in self.replicates if (arm, r) in self.values]

    def on(self, pages: NDArray[np.bool_]) -> "Study":
        """The same study measured on some of the held-out pages (bool, one a page) alone."""
        nll = {cell: x[pages] for cell, x in self.nll.items()}
        return dataclasses.replace(self, pages=self.pages[pages], n_bytes=self.n_bytes[pages], nll=nll)

    def members(self, comparison: str) -> list[str]:
        return [name for name, arm in self.arms.items() if arm.comparison == comparison]

    def short(self, arm: str) -> str:
        """The arm's policy, where that tells it from the other arms of its comparison; else its name."""
        here = self.arms.get(arm)
        if here is None:  # a policy of a study of crawls
            return arm
        same = [name for name in self.members(here.comparison) if self.arms[name].policy == here.policy]
        return here.policy if here.policy and here.runs and len(same) == 1 else arm

    @cached_property
    def lineage(self) -> list[Artifact]:
        """Every artifact behind the report, inputs before users, each once."""
        seen: dict[tuple[str, str], Artifact] = {}

        def walk(artifact: Artifact) -> None:
            if (artifact.stage, artifact.fingerprint) in seen:
                return
            for name in sorted(artifact.manifest["inputs"]):
                walk(artifact.input(name))
            seen[artifact.stage, artifact.fingerprint] = artifact

        for artifact in self._roots():
            walk(artifact)
        return list(seen.values())

    def _roots(self) -> Iterator[Artifact]:
        yield self.corpus
        yield from (a for a in (self.scorer, self.scores) if a is not None)
        yield from (crawl for by_replicate in self.crawls.values() for crawl in by_replicate.values())
        for arms in (self.arms, self.excluded):
            yield from (run.results for arm in arms.values() for run in arm.runs.values())
        yield from (self.overlaps[arm] for arm in sorted(self.overlaps))
        yield from (a for a in (self.pagerank,) if a is not None)


def gather(inputs: Mapping[str, Artifact], reference: str, expected: Sequence[str] = (), *, mixed: bool = False) -> Study:
    """Reads the inputs of a report. Raises ArtifactError for results that cannot be compared, ConfigError for a lacking corpus.

    expected: names of results that were to be there: what is not among the inputs is shown as missing. mixed: results measured on other
    held-out pages than the reference's are missing with that reason, instead of an error.
    """
    if "corpus" not in inputs:
        raise ConfigError(f"report: given the inputs {', '.join(sorted(inputs)) or 'none'}; it needs one called corpus")
    corpus = inputs["corpus"]
    crawls: dict[str, dict[int, Artifact]] = {}
    results: dict[str, dict[int, Artifact]] = {}
    overlaps: dict[str, Artifact] = {}
    others = []
    for name in sorted(inputs):
        if found := _RESULTS.fullmatch(name):
            results.setdefault(found["arm"], {})[int(found["replicate"])] = inputs[name]
        elif found := _CRAWL.fullmatch(name):
            crawls.setdefault(found["policy"], {})[int(found["replicate"] or 0)] = inputs[name]
        elif found := _OVERLAP.fullmatch(name):
            overlaps[found["arm"]] = inputs[name]
        elif name not in ("corpus", "scores", "scorer", "rank/pagerank"):
            others.append(name)
    wanted = [found for name in expected if (found := _RESULTS.fullmatch(name))]
    for found in wanted:
        results.setdefault(found["arm"], {})
    scores = inputs.get("scores")
    scorer = inputs.get("scorer") or (scores.input("scorer") if scores else None)
    replicates = tuple(sorted({r for of in results.values() for r in of} | {int(found["replicate"]) for found in wanted}))
    arms: dict[str, Arm] = {}
    pages: NDArray[np.uint32] | None = None
    n_bytes = np.empty(0, dtype=np.uint64)
    nll: dict[Cell, Floats] = {}
    for name in _ordered(results, reference):
        runs: dict[int, Run] = {}
        missing: dict[int, str] = {}
        for replicate in replicates:
            artifact = results[name].get(replicate)
            if artifact is None:
                missing[replicate] = "no results"
                continue
            twin = next((r for r, run in runs.items() if run.results.fingerprint == artifact.fingerprint), None)
            if twin is not None:
                missing[replicate] = f"the same model as replicate {twin}: the experiment does not change its seed"
                continue
            run = Run.of(artifact)
            if mixed and run.selection.input("corpus").fingerprint != corpus.fingerprint:
                missing[replicate] = f"made from another corpus, {run.selection.input('corpus').fingerprint}"
                continue
            runs[replicate] = run
            table = pq.read_table(artifact.file("pages.parquet"), columns=["page", "n_bytes", "nll"])
            found_nll = table["nll"].to_numpy().astype(np.float64)
            why = _fault(artifact, found_nll)
            if why:
                missing[replicate] = why
                continue
            here = table["page"].to_numpy(), table["n_bytes"].to_numpy().astype(np.uint64)
            if pages is None:
                pages, n_bytes = here
            elif not (np.array_equal(pages, here[0]) and np.array_equal(n_bytes, here[1])):
                if mixed:
                    missing[replicate] = "measured on other held-out pages"
                    continue
                raise ArtifactError(
                    f"report: {name}#{replicate} (evaluate {artifact.fingerprint}) was measured on other held-out pages than the "
                    "arms before it; arms can be compared on the same pages only: give all arms one corpus and one heldout stage"
                )
            _check_total(artifact, found_nll, n_bytes)
            nll[name, replicate] = found_nll
        arms[name] = Arm(name, runs, missing)
    arms = _with_comparisons(arms, reference)
    with_results = {arm.policy for arm in arms.values()}
    for policy in sorted(set(crawls) - with_results) if replicates else ():
        arms[policy] = Arm(policy, {}, {r: "no results" for r in replicates})
    if reference and reference not in arms and replicates:
        arms[reference] = Arm(reference, {}, {r: "no results" for r in replicates})
    return Study(
        corpus=corpus,
        scorer=scorer,
        scores=scores,
        crawls=crawls,
        arms=arms,
        reference=reference,
        replicates=replicates,
        pages=np.empty(0, dtype=np.uint32) if pages is None else pages,
        n_bytes=n_bytes,
        nll=nll,
        overlaps=overlaps,
        pagerank=inputs.get("rank/pagerank"),
        others=tuple(others),
    )


def _with_comparisons(arms: Mapping[str, Arm], reference: str) -> dict[str, Arm]:
    """Every arm with its comparison. Equal pages crawled: those whose pool of crawled pages is as large as the reference's, or where that
    is no such arm, as the smallest of such pools."""
    crawled = {n: a.pool_pages for n, a in arms.items() if a.first and a.first.selection.config["pool"] == "crawled" and a.pool_pages}
    base = crawled.get(reference) or min((pool for pool in crawled.values() if pool), default=0)

    def comparison(name: str, arm: Arm) -> str:
        if arm.first is None:
            return ""
        pool = str(arm.first.selection.config["pool"])
        if pool == "crawled" or pool == "listed":
            size = crawled.get(name) or base
            return EQUAL_PAGES if base / SAME_POOL < size < base * SAME_POOL or size == base else OTHER_POOLS
        return {"fetched": EQUAL_FETCHES, "corpus": ORACLE}[pool]

    return {name: dataclasses.replace(arm, comparison=comparison(name, arm)) for name, arm in arms.items()}


def experiments_like(study: Study, runs: Mapping[str, list[dict[str, Any]]]) -> list[tuple[str, dict[str, Any]]]:
    """(experiment, recorded run) of every run in `runs` (experiment -> its index) whose arms have exactly this study's results."""
    arms = (*study.arms.values(), *study.excluded.values())
    wanted = {(arm.name, r): run.results.fingerprint for arm in arms for r, run in arm.runs.items()}
    found = []
    for experiment in sorted(runs):
        for entry in runs[experiment]:
            here = {
                (arm, int(replicate)): stage["fingerprint"]
                for replicate, arms in entry["arms"].items()
                for arm, stages in arms.items()
                for stage in stages.values()
                if stage["stage"] == "evaluate"
            }
            if wanted and wanted == here:
                found.append((experiment, entry))
    return found


def _ordered(results: Mapping[str, Any], reference: str) -> list[str]:
    """Arm names: the reference first, then by name."""
    return sorted(results, key=lambda name: (name != reference, name))


def _fault(results: Artifact, nll: Floats) -> str:
    """Why a model's result does not count; "" where it does."""
    if not len(nll):
        return "no held-out pages"
    broken = int(np.sum(~np.isfinite(nll)))
    if broken:
        return f"the loss is no number on {broken} of {len(nll)} held-out pages"
    recorded = results.count("bits_per_byte")
    if recorded is None or not math.isfinite(recorded):
        return "bits per byte is no number"
    return ""


def _check_total(results: Artifact, nll: Floats, n_bytes: NDArray[np.uint64]) -> None:
    recorded, summed = float(results.count("bits_per_byte")), bits_per_byte(nll, n_bytes)
    if not math.isclose(recorded, summed, rel_tol=1e-6):
        raise ArtifactError(
            f"report: evaluate {results.fingerprint} records {recorded} bits per byte, its pages.parquet adds up to {summed}; "
            "delete that artifact and run the stage again"
        )
