"""The work of the stage `select`: which pages of a crawl, of a list or of the whole corpus go into training.

    pool      crawled or fetched pages of a prefix of a crawl; the pages of a list; or the whole corpus
    drop      held-out pages; empty pages; for all but "all", pages without a score; for "threshold", pages under it
    order     the pool's; or the highest score first; or a seeded draw from the best `top_fraction`
    walk      down that order until enough pages or tokens are kept, past copies and pages that evaluation items are in

Since copies are dropped on the way down, others take their places: a farm of near-copies gives one page. Orders, counts and columns:
docs/artifacts.md, "select".
"""

import json
import math
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
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
from craw4llm.crawl.stage import require_same_corpus
from craw4llm.crawl.trace import Trace
from craw4llm.errors import ArtifactError, ConfigError
from craw4llm.execution import Execution
from craw4llm.externals import locate
from craw4llm.scoring.means import mean_score
from craw4llm.scoring.memo import PageScores
from craw4llm.selection.facts import PageFacts, Wanted, facts
from craw4llm.selection.items import read_items
from craw4llm.selection.lists import read_list
from craw4llm.selection.near_copies import NearCopies, Similarity
from craw4llm.selection.statistics import against, best_pages, describe

ROW_GROUP_ROWS = 1 << 17

Pages = NDArray[np.uint32]
Scores = NDArray[np.float32]


def run(config: SelectConfig, inputs: Mapping[str, Artifact], out: Path, execution: Execution) -> Result:
    for name in ("crawl", "scores", "match", "other"):
        if name in inputs:
            require_same_corpus(inputs[name], inputs["corpus"])
    corpus = Corpus(inputs["corpus"])
    all_scores = _column(inputs["scores"], corpus) if "scores" in inputs else None
    pool = _pool(config, inputs, corpus)
    pages, scores = pool.pages, pool.scores
    if "scorer" in inputs:
        with PageScores(inputs["corpus"], inputs["scorer"], execution) as page_scores:
            scores = page_scores.scores(pages)
    elif all_scores is not None:
        scores = all_scores[pages]

    dropped = Dropped()
    heldout = corpus.heldout_mask[pages]
    empty = ~heldout & (corpus.text_bytes(pages) == 0)
    dropped.add_all("heldout", pages[heldout])
    dropped.add_all("empty", pages[empty])
    usable = ~(heldout | empty)
    if config.keep != "all":
        assert scores is not None, "check_inputs lets no such config through"
        unscored = usable & np.isnan(scores)
        dropped.add_all("unscored", pages[unscored])
        usable &= ~unscored
    pages, scores = pages[usable], None if scores is None else scores[usable]

    order = _order(pages, scores, config)
    if config.keep == "threshold":
        assert scores is not None and config.min_score is not None
        low = scores[order] < np.float32(config.min_score)
        dropped.add_all("under_threshold", pages[order[low]])
        order = order[~low]
    kept, found = _walk(config, inputs, corpus, pages, order, dropped, execution)
    if config.keep == "sample_top":
        kept = kept[np.argsort(pages[kept])]
    pages, scores = pages[kept], None if scores is None else scores[kept]

    columns = {
        "page": pa.array(pages, pa.uint32()),
        "rank": pa.array(np.arange(len(pages), dtype=np.uint32)),
        "score": pa.nulls(len(pages), pa.float32()) if scores is None else pa.array(scores, pa.float32()),
    }
    _write(pa.table(columns), out / "kept.parquet")
    _write(dropped.table(), out / "dropped.parquet")
    best: dict[str, Any] = dict.fromkeys(("shared_pages", "best_pages", "precision", "recall", "recall_ceiling"))
    if all_scores is not None:
        best = against(pages, best_pages(corpus, all_scores, config.top_fraction))
    other = None
    if "other" in inputs:
        others = pq.read_table(inputs["other"].file("kept.parquet"), columns=["page"]).column("page").to_numpy()
        other = {"fingerprint": inputs["other"].fingerprint, "pages": len(others), "shared_pages": len(np.intersect1d(pages, others))}
    statistics = describe(corpus, pages, scores) | {"best": best, "other": other, "dropped": dict(sorted(dropped.counts.items()))}
    (out / "statistics.json").write_text(json.dumps(statistics, indent=1, sort_keys=True, allow_nan=False) + "\n")
    reasons = ("empty", "unscored", "heldout", "under_threshold", "duplicate", "near_duplicate", "heldout_copy", "contaminated")
    notes: dict[str, Any] = {}
    if pool.listed_unknown is not None:
        notes["listed"] = {"unknown": pool.listed_unknown, "repeated": pool.listed_repeated}
    return Result(
        counts={
            "pool_pages": (len(pool.pages), "pages"),
            "pool_fetches": (pool.fetches, "requests"),
            "kept_pages": (len(pages), "pages"),
            "kept_text_bytes": (int(corpus.text_bytes(pages).sum(dtype=np.uint64)), "bytes"),
            "kept_tokens": (found.tokens, "tokens"),
            **{f"dropped_{reason}": (dropped.counts[reason], "pages") for reason in reasons},
            "exact_duplicates": (found.exact, "pages"),
            "near_duplicates": (found.near, "pages"),
            "heldout_copies": (found.heldout, "pages"),
            "mean_score": (None if scores is None else mean_score(scores), "score"),
            "hosts": (statistics["hosts"]["count"], "hosts"),
            "shared_with_best": (best["shared_pages"], "pages"),
            "precision": (best["precision"], "share of the kept pages"),
            "recall": (best["recall"], "share of the best pages"),
            "recall_ceiling": (best["recall_ceiling"], "share of the best pages"),
        },
        notes=notes,
    )


def estimate(config: SelectConfig, inputs: Mapping[str, Mapping[str, Any]]) -> dict[str, tuple[int, str]]:
    """The pages or tokens kept, as far as the config says; empty pages are dropped from it."""
    if config.keep_tokens is not None:
        return {"kept_tokens": (config.keep_tokens, "tokens")}
    crawled = inputs.get("crawl", {}).get("crawled_pages", (None, ""))[0]
    by_fetches = config.prefix_fetches is not None or config.match_fetches
    kept = config.keep_pages
    if kept is None and config.keep == "all" and config.pool == "crawled" and not by_fetches:
        kept = config.prefix_pages or crawled
    return {} if kept is None else {"kept_pages": (kept, "pages")}


@dataclass(frozen=True)
class _Pool:
    """pages: in the pool's order. scores: where the crawl stored them. fetches: what they cost, where known."""

    pages: Pages
    scores: Scores | None = None
    fetches: int | None = None
    listed_unknown: int | None = None
    listed_repeated: int | None = None


def _pool(config: SelectConfig, inputs: Mapping[str, Artifact], corpus: Corpus) -> _Pool:
    if config.pool == "corpus":
        return _Pool(np.arange(corpus.n_pages, dtype=np.uint32))
    if config.pool == "listed":
        assert config.ids is not None
        listed = read_list(locate(config.ids), corpus)
        count = len(listed.pages) if config.prefix_pages is None else config.prefix_pages
        if not 1 <= count <= len(listed.pages):
            raise ConfigError(
                f"select: prefix_pages is {count:,} but {config.ids.path} lists {len(listed.pages):,} pages of the corpus; "
                "use a prefix between 1 and that number"
            )
        return _Pool(listed.pages[:count], listed_unknown=listed.unknown, listed_repeated=listed.repeated)
    fetches = int(inputs["match"].count("fetches")) if config.match_fetches else config.prefix_fetches
    prefix = Trace(inputs["crawl"]).prefix(pages=config.prefix_pages, fetches=fetches)
    if config.pool == "crawled":
        return _Pool(prefix.crawled, prefix.crawled_scores, prefix.fetches)
    return _Pool(prefix.fetched, prefix.fetched_scores, prefix.fetches)


def _column(scores: Artifact, corpus: Corpus) -> Scores:
    column: Scores = np.load(scores.file("scores.npy"))
    if len(column) != corpus.n_pages:
        raise ArtifactError(
            f"score {scores.fingerprint} holds {len(column):,} scores, the corpus {corpus.n_pages:,} pages; run `craw4llm verify`"
        )
    return column


def _order(pages: Pages, scores: Scores | None, config: SelectConfig) -> NDArray[np.int64]:
    """Rows of `pages` in the order in which they are taken. ConfigError if there are fewer than keep_pages."""
    if config.keep == "all":
        return np.arange(len(pages))
    assert scores is not None
    order = np.lexsort((pages, -scores.astype(np.float64)))
    wanted = config.keep_pages or 0
    if config.keep == "sample_top":
        best = order[: math.floor(config.top_fraction * len(order))]
        if len(best) < wanted:
            share = min(1.0, math.ceil(1000 * wanted / max(1, len(order))) / 1000)
            raise ConfigError(
                f"select: keep_pages is {wanted:,} but the best {config.top_fraction:g} of {len(order):,} pages with text and a "
                f"score are {len(best):,}; lower keep_pages or raise top_fraction (to {share:g})"
            )
        return best[np.argsort(hash_ids(config.sample_seed, pages[best]), kind="stable")]
    if len(order) < wanted:
        raise ConfigError(
            f"select: keep_pages is {wanted:,} but the pool {config.pool!r} has {len(order):,} pages with text and a score; "
            "lower keep_pages or widen the pool"
        )
    return order


@dataclass
class Dropped:
    """Pages that were met and not kept: why, and of which page they are a copy."""

    pages: list[Pages] = field(default_factory=list)
    reasons: list[str] = field(default_factory=list)
    of: list[int | None] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)

    def add_all(self, reason: str, pages: Pages, of: int | None = None) -> None:
        self.pages.append(pages)
        self.reasons += [reason] * len(pages)
        self.of += [of] * len(pages)
        self.counts[reason] += len(pages)

    def table(self) -> pa.Table:
        pages = np.concatenate(self.pages)
        return pa.table({"page": pages, "reason": pa.array(self.reasons, pa.string()), "of": pa.array(self.of, pa.uint32())})


@dataclass
class _Found:
    """tokens: of the kept pages. exact, near: pages that are copies of a page kept before; heldout: copies of a held-out page. None: not
    looked for. A page that is both counts as the first that holds, in this order: heldout, exact, near."""

    tokens: int | None
    exact: int | None
    near: int | None
    heldout: int | None


def _walk(
    config: SelectConfig,
    inputs: Mapping[str, Artifact],
    corpus: Corpus,
    pages: Pages,
    order: NDArray[np.int64],
    dropped: Dropped,
    execution: Execution,
) -> tuple[NDArray[np.int64], _Found]:
    """Rows of `pages` that are kept, in the order taken. ConfigError if the pool ends before there are enough."""
    looks = [config.exact_duplicates, config.near_duplicates, config.heldout_copies]
    found = _Found(0 if config.keep_tokens else None, *(None if look == "off" else 0 for look in looks))
    if config.keep_tokens is None and config.decontaminate is None and all(look == "off" for look in looks):
        return order[: config.keep_pages], found
    similarity = None
    if config.near_duplicates != "off" or config.heldout_copies != "off":
        similarity = Similarity(config.near_threshold, config.near_permutations, config.near_shingle_words)
    items = read_items(locate(config.decontaminate), config.ngram_words) if config.decontaminate else None
    heldout = _Copies(similarity)
    if config.heldout_copies != "off":
        with_text = corpus.heldout[corpus.text_bytes(corpus.heldout) > 0]
        for fact in facts(Wanted(inputs["corpus"], similarity), with_text, execution):
            heldout.add(fact)
    kept_before = _Copies(similarity if config.near_duplicates != "off" else None)
    wanted = Wanted(inputs["corpus"], similarity, items, inputs.get("tokenizer"))
    taken: list[int] = []
    total = config.keep_pages or len(order)
    with execution.progress("select", total=total, unit="page") as progress:
        read = facts(wanted, pages[order], execution)
        for row, fact in zip(order.tolist(), read, strict=False):
            reason, of = _judge(config, fact, heldout, kept_before, found)
            if reason:
                dropped.add_all(reason, pages[row : row + 1], of)
                continue
            kept_before.add(fact)
            taken.append(row)
            progress.update(1)
            if found.tokens is not None:
                found.tokens += fact.n_tokens
            if len(taken) == config.keep_pages or (config.keep_tokens is not None and (found.tokens or 0) >= config.keep_tokens):
                break
        _close(read)
    if config.keep_pages is not None and len(taken) < config.keep_pages:
        raise ConfigError(
            f"select: keep_pages is {config.keep_pages:,} but only {len(taken):,} of {len(order):,} pages are left when {_copies(dropped)} "
            "are dropped; lower keep_pages, widen the pool or set these to 'report'"
        )
    if config.keep_tokens is not None and (found.tokens or 0) < config.keep_tokens:
        raise ConfigError(
            f"select: keep_tokens is {config.keep_tokens:,} but the {len(taken):,} pages of the pool {config.pool!r} that can be kept have "
            f"{found.tokens:,} tokens; lower keep_tokens or widen the pool"
        )
    return np.array(taken, dtype=np.int64), found


def _judge(config: SelectConfig, fact: PageFacts, heldout: "_Copies", kept: "_Copies", found: _Found) -> tuple[str, int | None]:
    """(reason to drop the page or "", the page that it is a copy of)."""
    if len(fact.hits):
        return "contaminated", None
    if config.heldout_copies != "off":
        of, _ = heldout.find(fact)
        if of is not None:
            found.heldout = (found.heldout or 0) + 1
            if config.heldout_copies == "drop":
                return "heldout_copy", of
    of, exact = kept.find(fact)
    if of is not None and exact and config.exact_duplicates != "off":
        found.exact = (found.exact or 0) + 1
        return ("duplicate", of) if config.exact_duplicates == "drop" else ("", None)
    if of is not None and config.near_duplicates != "off":
        found.near = (found.near or 0) + 1
        return ("near_duplicate", of) if config.near_duplicates == "drop" else ("", None)
    return "", None


class _Copies:
    """Pages by their text, to find the one that another page is a copy of. similarity: None for exact copies only."""

    def __init__(self, similarity: Similarity | None) -> None:
        self._exact: dict[bytes, int] = {}
        self._near = NearCopies(similarity) if similarity else None

    def find(self, fact: PageFacts) -> tuple[int | None, bool]:
        """(the page added before that this one is a copy of, whether an exact one)."""
        of = self._exact.get(fact.text_hash)
        if of is not None:
            return of, True
        return (self._near.of(fact.signature) if self._near else None), False

    def add(self, fact: PageFacts) -> None:
        if fact.text_hash in self._exact:
            return
        self._exact[fact.text_hash] = fact.page
        if self._near:
            self._near.add(fact.page, fact.signature)


def _close(read: Iterator[PageFacts]) -> None:
    """Ends the processes that read ahead."""
    close = getattr(read, "close", None)
    if close is not None:
        close()


def _copies(dropped: Dropped) -> str:
    reasons = ("duplicate", "near_duplicate", "heldout_copy", "contaminated")
    return ", ".join(f"{dropped.counts[r]:,} ({r})" for r in reasons if dropped.counts[r]) or "no copies"


def _write(table: pa.Table, path: Path) -> None:
    pq.write_table(table, path, compression="zstd", row_group_size=ROW_GROUP_ROWS)
