"""One crawl without an experiment file: `craw4llm crawl`. Corpus, scorer and crawl are the stages of any experiment, in the same root.

    artifact = crawl(Wanted(corpus="ClueWeb22_A", scorer="model.bin", policy="quality", pages=20000), execution)
    write_lists(artifact, Path("lists"))         lists/iter_0.docids.txt, ... as the released code leaves them

What is finished in the root is used: a second policy or budget over the same corpus costs its crawl alone.
"""

import itertools
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from craw4llm import quick_start
from craw4llm.artifact import Artifact, Store
from craw4llm.configs import KNOWLEDGE, NEEDS_SCORER, ClueWeb22, CorpusConfig, CrawlConfig, GraphMeasure, ScorerConfig
from craw4llm.corpus.clueweb22_files import is_clueweb22
from craw4llm.dataclass import dataclass
from craw4llm.errors import ConfigError
from craw4llm.execution import Execution
from craw4llm.externals import ExternalDigests
from craw4llm.fingerprint import External
from craw4llm.runner import Work, build
from craw4llm.stage import Planner, Stage, implementation

_NAMED_AT_ONCE = 1 << 16
Crawled = tuple[int, NDArray[np.uint32]]  # an iteration and its targets


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """The choices of the command line; names and meanings are those of CorpusConfig, ClueWeb22, ScorerConfig and CrawlConfig.

    lists: a folder for iter_K.docids.txt; it must not be there, or be empty.
    """

    corpus: str
    policy: str
    pages: int
    batch_pages: int
    mode: str
    seeds: str
    seed_count: int
    rng_seed: int
    scorer: str
    label: str
    route: str
    streams: tuple[str, ...]
    links: str
    indegree: str
    dangling_links: str
    heldout_fraction: float
    lists: Path | None


def crawl(wanted: Wanted, execution: Execution) -> Artifact:
    """Builds what is missing of the corpus, the scorer and the crawl; returns the crawl."""
    if wanted.lists is not None and wanted.lists.is_dir() and any(wanted.lists.iterdir()):
        raise ConfigError(f"crawl: the folder {wanted.lists} is not empty; lists of an earlier crawl would mix with those of this one")
    stage = _crawl_stage(wanted)
    digests = ExternalDigests(execution.root / "externals.json")
    planner = Planner(digests)
    planner.fingerprint(stage)
    digests.save()
    store = Store(execution.root)
    missing = [one for one in stage.ancestors() if store.find(one.config.stage, planner.fingerprint(one)) is None]
    for one in missing:
        implementation(one.config.stage)
    quick_start.end()
    for one in missing:
        inputs = {name: (s.config.stage, planner.fingerprint(s)) for name, s in one.inputs.items()}
        build(Work(one.config.stage, one.config, planner.config_record(one), planner.fingerprint(one), inputs), execution)
    artifact = store.open("crawl", planner.fingerprint(stage))
    if wanted.lists is not None:
        write_lists(artifact, wanted.lists)
    return artifact


def write_lists(artifact: Artifact, folder: Path) -> None:
    """iter_K.docids.txt for every iteration K of a crawl: what it crawled, in order; document ids, or URLs where the corpus has none."""
    from craw4llm.corpus.reader import Corpus
    from craw4llm.crawl.trace import crawled_by_iteration

    corpus = Corpus(artifact.input("corpus"))
    folder.mkdir(parents=True, exist_ok=True)
    for some in _grouped(crawled_by_iteration(artifact)):
        ends = list(itertools.accumulate(len(targets) for _, targets in some))
        lines = corpus.name_lines(np.concatenate([targets for _, targets in some]), ends)
        for (iteration, _), text in zip(some, lines, strict=True):
            (folder / f"iter_{iteration}.docids.txt").write_bytes(text)


def _grouped(crawled: Iterable[Crawled]) -> Iterator[list[Crawled]]:
    """Consecutive iterations, together about _NAMED_AT_ONCE targets."""
    group: list[Crawled] = []
    count = 0
    for iteration, targets in crawled:
        group.append((iteration, targets))
        count += len(targets)
        if count >= _NAMED_AT_ONCE:
            yield group
            group, count = [], 0
    if group:
        yield group


def _crawl_stage(wanted: Wanted) -> Stage:
    corpus = Stage(
        CorpusConfig(
            source=_source(wanted),
            heldout_fraction=wanted.heldout_fraction,
            dangling_links=wanted.dangling_links,  # type: ignore[arg-type]
        )
    )
    inputs = {"corpus": corpus}
    if wanted.scorer:
        inputs["scorer"] = Stage(
            ScorerConfig(
                kind="fasttext",
                source=External(name="scorer model", path=wanted.scorer),
                label=wanted.label,
                route=wanted.route,  # type: ignore[arg-type]
                reading="released" if wanted.mode == "released" else "clean",
            )
        )
    elif wanted.policy in NEEDS_SCORER:
        raise ConfigError(f"crawl: the policy {wanted.policy} orders pages by scores; give --scorer, a fastText model")
    if wanted.policy in ("pagerank", "harmonic"):
        inputs["rank"] = Stage(ScorerConfig(kind=wanted.policy, source=GraphMeasure()), corpus=corpus)  # type: ignore[arg-type]
    return Stage(
        CrawlConfig(
            policy=wanted.policy,  # type: ignore[arg-type]
            mode=wanted.mode,  # type: ignore[arg-type]
            budget_pages=wanted.pages,
            batch_pages=wanted.batch_pages,
            seeds=External(name="seeds", path=wanted.seeds) if wanted.seeds else None,
            seed_count=wanted.seed_count,
            rng_seed=wanted.rng_seed,
        ),
        **inputs,
    )


def _source(wanted: Wanted) -> External | ClueWeb22:
    external = External(name="corpus", path=wanted.corpus)
    if not is_clueweb22(Path(wanted.corpus)):
        if wanted.streams or wanted.links != "compiled" or wanted.indegree != "links":
            raise ConfigError(
                f"crawl: {wanted.corpus} is no ClueWeb22 folder (txt, outlink): --streams, --links and --indegree are for those"
            )
        return external
    assert wanted.policy in KNOWLEDGE
    return ClueWeb22(
        folder=external,
        streams=tuple(sorted(set(wanted.streams))),
        links=wanted.links,  # type: ignore[arg-type]
        indegree=wanted.indegree,  # type: ignore[arg-type]
    )
