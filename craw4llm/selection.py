"""The stage `select`: which pages of a crawl (or, for the oracle, of the whole corpus) go into training.

    pool      crawled or fetched pages of a prefix of a crawl, or the whole corpus
    drop      held-out pages; empty pages; for "top" and "sample_top", pages without a score
    keep      all of the pool; the best `keep_pages`; a sample of `keep_pages` from the best `top_fraction`

Orders, counts and columns: docs/artifacts.md, "select".
"""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from craw4llm.artifact import Artifact, Result
from craw4llm.configs import SelectConfig
from craw4llm.corpus.reader import Corpus
from craw4llm.crawl.hashing import hash_ids
from craw4llm.crawl.loop import mean_score
from craw4llm.crawl.stage import require_same_corpus
from craw4llm.crawl.trace import Trace
from craw4llm.errors import ArtifactError, ConfigError
from craw4llm.execution import Execution
from craw4llm.scoring.memo import PageScores

ROW_GROUP_ROWS = 1 << 17

Pages = NDArray[np.uint32]
Scores = NDArray[np.float32]


def run(config: SelectConfig, inputs: Mapping[str, Artifact], out: Path, execution: Execution) -> Result:
    for name in ("crawl", "scores", "match"):
        if name in inputs:
            require_same_corpus(inputs[name], inputs["corpus"])
    corpus = Corpus(inputs["corpus"])
    pages, scores, fetches = _pool(config, inputs, corpus)
    pool_pages = len(pages)
    if "scorer" in inputs:
        with PageScores(inputs["corpus"], inputs["scorer"], execution) as page_scores:
            scores = page_scores.scores(pages)

    heldout = corpus.heldout_mask[pages]
    empty = ~heldout & (corpus.n_bytes[pages] == 0)
    unscored = np.zeros(len(pages), dtype=np.bool_)
    if config.keep != "all":
        assert scores is not None, "check_inputs lets no such config through"
        unscored = ~heldout & ~empty & np.isnan(scores)
    usable = ~(heldout | empty | unscored)
    pages, scores = pages[usable], None if scores is None else scores[usable]

    if config.keep != "all":
        assert scores is not None and config.keep_pages is not None
        order = np.lexsort((pages, -scores.astype(np.float64)))
        if config.keep == "top":
            order = _first(order, config.keep_pages, f"the pool {config.pool!r} has {len(order):,} pages with text and a score")
        else:
            order = _sample(pages, order, config)
        pages, scores = pages[order], scores[order]

    columns = {
        "page": pa.array(pages, pa.uint32()),
        "rank": pa.array(np.arange(len(pages), dtype=np.uint32)),
        "score": pa.nulls(len(pages), pa.float32()) if scores is None else pa.array(scores, pa.float32()),
    }
    pq.write_table(pa.table(columns), out / "kept.parquet", compression="zstd", row_group_size=ROW_GROUP_ROWS)
    return Result(
        counts={
            "pool_pages": (pool_pages, "pages"),
            "pool_fetches": (fetches, "requests"),
            "kept_pages": (len(pages), "pages"),
            "kept_text_bytes": (int(corpus.n_bytes[pages].sum(dtype=np.uint64)), "bytes"),
            "dropped_empty": (int(np.count_nonzero(empty)), "pages"),
            "dropped_unscored": (int(np.count_nonzero(unscored)), "pages"),
            "dropped_heldout": (int(np.count_nonzero(heldout)), "pages"),
            "mean_score": (None if scores is None else mean_score(scores), "score"),
            "hosts": (len(np.unique(corpus.host_ids[pages])), "hosts"),
        }
    )


def estimate(config: SelectConfig, inputs: Mapping[str, Mapping[str, Any]]) -> dict[str, tuple[int, str]]:
    """The pages kept, as far as the config says; empty pages are dropped from it."""
    crawled = inputs.get("crawl", {}).get("crawled_pages", (None, ""))[0]
    by_fetches = config.prefix_fetches is not None or config.match_fetches
    kept = config.keep_pages
    if kept is None and config.pool == "crawled" and not by_fetches:
        kept = config.prefix_pages or crawled
    return {} if kept is None else {"kept_pages": (kept, "pages")}


def _pool(config: SelectConfig, inputs: Mapping[str, Artifact], corpus: Corpus) -> tuple[Pages, Scores | None, int | None]:
    """(pages in the pool's order, their scores if known, fetches that the pool cost or None)."""
    if config.pool == "corpus":
        scores = np.load(inputs["scores"].file("scores.npy"))
        if len(scores) != corpus.n_pages:
            raise ArtifactError(
                f"score {inputs['scores'].fingerprint} holds {len(scores):,} scores, the corpus {corpus.n_pages:,} pages; "
                "run `craw4llm verify`"
            )
        return np.arange(corpus.n_pages, dtype=np.uint32), scores, None
    fetches = int(inputs["match"].count("fetches")) if config.match_fetches else config.prefix_fetches
    prefix = Trace(inputs["crawl"]).prefix(pages=config.prefix_pages, fetches=fetches)
    if config.pool == "crawled":
        return prefix.crawled, prefix.crawled_scores, prefix.fetches
    return prefix.fetched, prefix.fetched_scores, prefix.fetches


def _first(order: NDArray[np.int64], count: int, there: str) -> NDArray[np.int64]:
    if len(order) < count:
        raise ConfigError(f"select: keep_pages is {count:,} but {there}; lower keep_pages or widen the pool")
    return order[:count]


def _sample(pages: Pages, order: NDArray[np.int64], config: SelectConfig) -> NDArray[np.int64]:
    """Rows of `keep_pages` pages drawn from the best `top_fraction`, by page id. order: rows of `pages`, best first."""
    assert config.keep_pages is not None
    best = order[: math.floor(config.top_fraction * len(order))]
    if len(best) < config.keep_pages:
        share = min(1.0, math.ceil(1000 * config.keep_pages / max(1, len(order))) / 1000)
        raise ConfigError(
            f"select: keep_pages is {config.keep_pages:,} but the best {config.top_fraction:g} of {len(order):,} pages with text and a "
            f"score are {len(best):,}; lower keep_pages or raise top_fraction (to {share:g})"
        )
    drawn = best[np.argsort(hash_ids(config.sample_seed, pages[best]), kind="stable")[: config.keep_pages]]
    return drawn[np.argsort(pages[drawn])]
