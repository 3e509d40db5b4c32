"""What a selection is made of: hosts, lengths, scores, and how it compares with the corpus's best pages and with another selection.

Everything is plain JSON values (docs/artifacts.md, "select"); what cannot be known is None.
"""

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from craw4llm.corpus.reader import Corpus

TOP_HOSTS = 20
SCORE_BINS = 20
QUANTILES = (0, 1, 5, 25, 50, 75, 95, 99, 100)


def best_pages(corpus: Corpus, scores: NDArray[np.float32], fraction: float) -> NDArray[np.uint32]:
    """The `fraction` of the pages that can be selected (text, a score, not held-out) with the highest score; ties by page id.

    "Oracle document" in the paper's figure 4 means a page of the whole top decile, not of the sample drawn from it.
    """
    usable = np.flatnonzero(~corpus.heldout_mask[: corpus.n_pages] & corpus.has_text & ~np.isnan(scores))
    order = np.lexsort((usable, -scores[usable].astype(np.float64)))
    return usable[order[: math.floor(fraction * len(usable))]].astype(np.uint32)


def against(pages: NDArray[np.uint32], best: NDArray[np.uint32]) -> dict[str, Any]:
    """Precision and recall of `pages` against `best`; recall cannot exceed len(pages) / len(best), its ceiling."""
    shared = len(np.intersect1d(pages, best))
    return {
        "shared_pages": shared,
        "best_pages": len(best),
        "precision": shared / len(pages) if len(pages) else None,
        "recall": shared / len(best) if len(best) else None,
        "recall_ceiling": min(1.0, len(pages) / len(best)) if len(best) else None,
    }


def describe(corpus: Corpus, pages: NDArray[np.uint32], scores: NDArray[np.float32] | None) -> dict[str, Any]:
    """Hosts, lengths and scores of the kept pages."""
    hosts = corpus.host_pages(pages)
    top = sorted((-count, name) for name, count in hosts.items())[:TOP_HOSTS]
    n_bytes = corpus.text_bytes(pages)
    return {
        "pages": len(pages),
        "hosts": {"count": len(hosts), "top": [{"host": name, "pages": -count} for count, name in top]},
        "text_bytes": {f"p{q}": float(np.percentile(n_bytes, q)) for q in QUANTILES} if len(pages) else None,
        "scores": _histogram(scores),
    }


def _histogram(scores: NDArray[np.float32] | None) -> dict[str, Any] | None:
    """Equal bins from the lowest to the highest score; pages without a score are counted apart."""
    if scores is None:
        return None
    known = scores[~np.isnan(scores)].astype(np.float64)
    if not len(known):
        return {"edges": [], "pages": [], "without_score": len(scores)}
    counts, edges = np.histogram(known, bins=SCORE_BINS)
    return {"edges": edges.tolist(), "pages": counts.tolist(), "without_score": len(scores) - len(known)}
