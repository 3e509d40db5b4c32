"""The stage `crawl`: seeds, policy and budget in, the trace of one crawl out (docs/artifacts.md, "crawl").

The work is in craw4llm.crawl.loop. This module opens the inputs, checks that they belong together, and counts.
"""

import dataclasses
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from craw4llm.artifact import Artifact, Result
from craw4llm.configs import KNOWLEDGE, OTHER_SCORE, CrawlConfig
from craw4llm.corpus.reader import Corpus
from craw4llm.crawl.budget import Budget
from craw4llm.crawl.caps import Caps
from craw4llm.crawl.checkpoint import Checkpoints
from craw4llm.crawl.loop import Crawl, Crawler
from craw4llm.crawl.released import ReleasedCrawler, sample_seeds
from craw4llm.crawl.seeds import draw_seeds, read_seeds, seed_order
from craw4llm.crawl.trace import write_trace
from craw4llm.errors import ArtifactError, ConfigError
from craw4llm.execution import Execution, Progress
from craw4llm.externals import ExternalDigests, locate
from craw4llm.fingerprint import fingerprint
from craw4llm.scoring.means import mean_score
from craw4llm.scoring.memo import PageScores
from craw4llm.scoring.scorer import NOT_READ

_MASS_TIE = 0.5  # share of the popped pages with one and the same priority, above which the manifest warns


def run(config: CrawlConfig, inputs: Mapping[str, Artifact], out: Path, execution: Execution) -> Result:
    corpus = Corpus(inputs["corpus"])
    fetches = config.budget_fetches
    if config.match_fetches:
        require_same_corpus(inputs["match"], inputs["corpus"])
        fetches = max(fetches or 0, int(inputs["match"].count("fetches")))
    budget = Budget(pages=config.budget_pages, fetches=fetches, tokens=config.budget_tokens)
    released = config.mode == "released"
    if released:
        assert config.seeds is not None, "CrawlConfig.check lets no such config through"
        _require_released_scores(config, inputs)
        ghosts = KNOWLEDGE[config.policy] != "target_text"
        seeds = sample_seeds(locate(config.seeds), corpus, config.batch_pages, config.rng_seed, ghosts=ghosts)
    else:
        seeds = read_seeds(locate(config.seeds), corpus) if config.seeds else draw_seeds(corpus, config.seed_count, config.seed_set)
    others = {name.removeprefix("score_"): inputs[name] for name in sorted(inputs) if OTHER_SCORE.fullmatch(name)}
    capped = config.pages_per_host is not None or config.pages_per_domain is not None
    with ExitStack() as stack:
        page_scores = stack.enter_context(PageScores(inputs["corpus"], inputs["scorer"], execution)) if "scorer" in inputs else None
        lengths = stack.enter_context(_lengths(inputs, execution)) if config.budget_tokens is not None else None
        progress = stack.enter_context(_progress(f"crawl {config.policy}", budget, execution))
        crawler = (ReleasedCrawler if released else Crawler)(
            corpus,
            config.policy,
            page_scores,
            seeds=seeds.pages,
            budget=budget,
            batch_pages=config.batch_pages,
            rng_seed=config.rng_seed,
            explore_share=config.explore_share,
            rank=_released_indegree(config, inputs, corpus, execution) if released else _rank(config.policy, inputs, corpus),
            tokens=_tokens_of(lengths) if lengths is not None else None,
            caps=Caps(corpus, per_host=config.pages_per_host, per_domain=config.pages_per_domain) if capped else None,
            restart_seeds=config.restart_seeds,
            seed_order=lambda: seed_order(corpus, config.seed_set),
        )
        crawl = crawler.run(progress, Checkpoints(execution.memo / f"crawl-{state_key(config, inputs)}"))
        corpus.release_links()
        pages = crawl.fetched[crawl.fetched < corpus.n_pages]
        scores, unreadable = None, 0
        if page_scores is not None:
            scores, reasons = page_scores.with_reasons(pages)
            unreadable = int(np.count_nonzero(reasons == NOT_READ))
        columns = {name: _scores(inputs["corpus"], scorer, pages, execution) for name, scorer in others.items()}
        write_trace(crawl, corpus, scores, out, others=columns, ghosts=released)
        mean = mean_score(page_scores.scores(crawl.crawled[crawl.crawled < corpus.n_pages])) if page_scores else None
    notes: dict[str, Any] = {
        "stop": crawl.stop,
        "seeds_unknown": seeds.unknown,
        "seeds_heldout": seeds.heldout,
        "seeds_repeated": seeds.repeated,
    }
    warnings = list(_warnings(crawl, config.policy, budget))
    if released and crawl.stop == "exhausted":
        warnings.append("the last iteration found nothing new to queue: there the released code ends with an error, whatever waits")
    if warnings:
        notes["warnings"] = warnings
    return Result(
        counts={
            "seeds": (len(seeds.pages), "pages"),
            "discovered": (sum(row.discovered for row in crawl.iterations), "targets"),
            "fetched_pages": (len(pages), "pages"),
            "dead_links": (len(crawl.fetched) - len(pages), "requests"),
            "fetches": (len(crawl.fetched), "requests"),
            "crawled_pages": (len(crawl.crawled), "pages"),
            "iterations": (len(crawl.iterations), "iterations"),
            "mean_score_crawled": (mean, "score"),
            "unreadable_pages": (unreadable, "pages"),
            "priorities_refused": (crawl.refused, "priorities"),
            **({"capped": (crawl.capped, "targets")} if capped else {}),
            **({"crawled_tokens": (int(crawl.crawled_tokens.sum()), "tokens")} if crawl.crawled_tokens is not None else {}),
        },
        notes=notes,
    )


def state_key(config: CrawlConfig, inputs: Mapping[str, Artifact]) -> str:
    """Names the checkpoints that crawls share which differ in their budgets alone."""
    same = dataclasses.replace(config, budget_pages=1, budget_fetches=None, budget_tokens=None, match_fetches=False)
    prints = {name: artifact.fingerprint for name, artifact in inputs.items() if name != "match" and not OTHER_SCORE.fullmatch(name)}
    return fingerprint("crawl checkpoint", config.version, same, prints, ExternalDigests(None))


def estimate(config: CrawlConfig, inputs: Mapping[str, Mapping[str, Any]]) -> dict[str, tuple[int, str]]:
    """The budgets; a look-ahead policy's fetches, and how far a crawl must go to match another's, are known only afterwards."""
    known: dict[str, tuple[int, str]] = {}
    if config.budget_pages is not None:
        known["crawled_pages"] = (config.budget_pages, "pages")
    if config.budget_fetches is not None:
        known["fetches"] = (config.budget_fetches, "requests")
    if config.budget_tokens is not None:
        known["crawled_tokens"] = (config.budget_tokens, "tokens")
    return known


def require_same_corpus(made_from: Artifact, corpus: Artifact) -> None:
    """Raises ArtifactError if `made_from` was made from another corpus than `corpus`: its page ids would mean other pages."""
    given = made_from.manifest["inputs"]["corpus"]["fingerprint"]
    if given != corpus.fingerprint:
        raise ArtifactError(
            f"the {made_from.stage} {made_from.fingerprint} was made from the corpus {given}, but is used with the corpus "
            f"{corpus.fingerprint}; give both the same corpus"
        )


def _progress(what: str, budget: Budget, execution: Execution) -> Progress:
    """Counts what `Crawler.run` counts."""
    total, unit = next((total, unit) for total, unit in _budgets(budget) if total is not None)
    return execution.progress(what, total=total, unit=unit)


def _budgets(budget: Budget) -> tuple[tuple[int | None, str], ...]:
    return (budget.fetches, "fetch"), (budget.pages, "page"), (budget.tokens, "token")


def _lengths(inputs: Mapping[str, Artifact], execution: Execution) -> PageScores:
    """The input `lengths`. ConfigError unless it counts tokens."""
    given = inputs["lengths"]
    if given.config["kind"] != "length" or given.config["source"]["unit"] != "tokens":
        raise ConfigError(
            f"crawl: the input `lengths` is a scorer of kind {given.config['kind']!r}; give it kind 'length' with Length(unit='tokens')"
        )
    return PageScores(inputs["corpus"], given, execution)


def _tokens_of(lengths: PageScores) -> Callable[[NDArray[np.uint32]], NDArray[np.int64]]:
    """Tokens of pages, one end-of-text a page included; none for a page without text, which is never tokenized."""

    def tokens(pages: NDArray[np.uint32]) -> NDArray[np.int64]:
        counts = lengths.scores(pages)
        return np.where(np.isnan(counts), 0, np.nan_to_num(counts) + 1).astype(np.int64)

    return tokens


def _scores(corpus: Artifact, scorer: Artifact, pages: NDArray[np.uint32], execution: Execution) -> NDArray[np.float32]:
    if scorer.stage != "scorer":
        raise ConfigError(f"crawl: an input named score_* is a {scorer.stage}; give it a scorer")
    with PageScores(corpus, scorer, execution) as scores:
        return scores.scores(pages)


def _require_released_scores(config: CrawlConfig, inputs: Mapping[str, Artifact]) -> None:
    scorer = inputs.get("scorer")
    if scorer is not None and "fasttext" in scorer.config["kind"] and scorer.config["reading"] != "released":
        raise ConfigError("crawl: mode released orders by the released code's fastText scores; give its scorer reading='released'")


def _released_indegree(
    config: CrawlConfig, inputs: Mapping[str, Artifact], corpus: Corpus, execution: Execution
) -> NDArray[np.float32] | None:
    """float32[n_targets]: counts of the input `rank` (a page that it does not know has 0), else the corpus' in-degrees; a ghost has 0.

    None where the policy asks for none. ClueWeb22 with indegree="inlink" counts anchors, as the released code does.
    """
    if config.policy != "indegree":
        return None
    counts = np.zeros(corpus.n_targets, dtype=np.float32)
    if "rank" in inputs:
        with PageScores(corpus.artifact, inputs["rank"], execution) as given:
            counts[: corpus.n_pages] = np.nan_to_num(given.scores(np.arange(corpus.n_pages)))
    else:
        counts[: corpus.n_pages] = corpus.indegree[: corpus.n_pages]
    return counts


def _rank(policy: str, inputs: Mapping[str, Artifact], corpus: Corpus) -> NDArray[np.float32] | None:
    """float32[n_targets]: the column of the input `rank`. Raises unless it is of the policy's kind and of the same corpus."""
    if "rank" not in inputs:
        return None
    artifact = inputs["rank"]
    if artifact.config["kind"] != policy:
        raise ConfigError(f"crawl: the policy {policy} is given the scorer {artifact.config['kind']} as its input `rank`; give it {policy}")
    require_same_corpus(artifact, inputs["corpus"])
    column: NDArray[np.float32] = np.load(artifact.file("column.npy"), mmap_mode="r")
    assert len(column) == corpus.n_targets
    return column


def _warnings(crawl: Crawl, policy: str, budget: Budget) -> list[str]:
    found = []
    if crawl.stop == "exhausted":
        wanted = " and ".join(f"{n:,} {unit}{'es' if unit == 'fetch' else 's'}" for n, unit in _budgets(budget) if n is not None)
        found.append(
            f"nothing was left to crawl after {len(crawl.crawled):,} pages and {len(crawl.fetched):,} fetches; the budget was {wanted}"
        )
    popped = crawl.priority[int(np.count_nonzero(crawl.crawled_in == 0)) :]
    if len(popped) > 1 and policy != "breadth_first":
        ordered = np.sort(popped)  # NaN last, and one value like any other
        begins = np.flatnonzero(np.concatenate([[True], (ordered[1:] != ordered[:-1]) & ~np.isnan(ordered[:-1])]))
        values, counts = ordered[begins], np.diff(begins, append=len(ordered))
        if counts.max() > _MASS_TIE * len(popped):
            value = values[int(np.argmax(counts))]
            found.append(
                f"{counts.max():,} of {len(popped):,} pages were popped with one and the same priority, {value:.6g}: among them the "
                "order of URLs decided, not the policy"
            )
    return found
