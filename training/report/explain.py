"""Why an arm is as it is: its best and worst pages, the pages that the reference kept and it did not, and how each was reached.

    kept_table(study, scores)     -> rows: arm, place, score, page, url, path from a seed, the command that shows the page's life

URLs are other people's text. They are shown as text, never as links, and quoted for the shell.
"""

import shlex
from collections.abc import Mapping

import numpy as np
import pyarrow.parquet as pq
from numpy.typing import NDArray

from craw4llm.artifact import Artifact
from craw4llm.corpus.reader import Corpus
from training.report.curves import Scores
from training.report.lineage import Study
from training.report.tables import Table, Value, table

EXAMPLES = 3  # of each kind and arm
SHOWN_STEPS = 8  # of a path; the middle of a longer one is left out
ARROW = " \N{RIGHTWARDS ARROW} "


def kept_table(study: Study, scores: Scores | None) -> Table:
    """Highest and lowest scored pages of each arm, and the highest scored that only the reference kept, or only this arm.

    Held-out pages are in no arm. Without scores of all pages there is no highest and no lowest: an empty table.
    """
    if scores is None:
        return table("kept", ())
    corpus = Corpus(study.corpus)
    parents: dict[str, Mapping[int, int | None]] = {}
    pages_of = {name: _kept(arm.first.selection) for name, arm in study.arms.items() if arm.first is not None}
    other = pages_of.get(study.reference)
    records: list[dict[str, Value]] = []
    for name, pages in pages_of.items():
        run = study.arms[name].first
        assert run is not None
        ranked = _ranked(pages, scores)
        places = [("highest", ranked[:EXAMPLES]), ("lowest", ranked[max(EXAMPLES, len(ranked) - EXAMPLES) :])]
        if other is not None and name != study.reference:
            places.append((f"only {name}", _ranked(np.setdiff1d(pages, other), scores)[:EXAMPLES]))
            places.append((f"only {study.reference}", _ranked(np.setdiff1d(other, pages), scores)[:EXAMPLES]))
        for place, some in places:
            owner = study.arms[study.reference].first if place == f"only {study.reference}" else run
            crawl = owner.crawl if owner else None
            if crawl is not None and crawl.fingerprint not in parents:
                parents[crawl.fingerprint] = _parents(crawl)
            for page in some.tolist():
                steps = _path(parents[crawl.fingerprint], page) if crawl is not None else []
                url = corpus.url(page)
                records.append(
                    {
                        "arm": name,
                        "place": place,
                        "score": float(scores.by_page[page]),
                        "page": page,
                        "url": url,
                        "links_from_seed": len(steps) - 1 if steps else None,
                        "path": ARROW.join(_shown([corpus.url(step) for step in steps])),
                        "command": f"craw4llm show page {shlex.quote(url)}",
                    }
                )
    return table("kept", records)


def _kept(selection: Artifact) -> NDArray[np.int64]:
    return pq.read_table(selection.file("kept.parquet"), columns=["page"])["page"].to_numpy().astype(np.int64)


def _ranked(pages: NDArray[np.int64], scores: Scores) -> NDArray[np.int64]:
    """Those with a score, best first, ties by page id."""
    pages = pages[np.isfinite(scores.by_page[pages])]
    return pages[np.lexsort((pages, -scores.by_page[pages]))]


def _parents(crawl: Artifact) -> Mapping[int, int | None]:
    rows = pq.read_table(crawl.file("pages.parquet"), columns=["page", "parent"])
    return dict(zip(rows["page"].to_pylist(), rows["parent"].to_pylist(), strict=True))


def _path(parents: Mapping[int, int | None], page: int) -> list[int]:
    """Pages from a seed to this one, along the links by which each was first found; [] for a page that was not fetched."""
    if page not in parents:
        return []
    path = [page]
    while (parent := parents.get(path[-1])) is not None and parent not in path:
        path.append(parent)
    return path[::-1]


def _shown(steps: list[str]) -> list[str]:
    if len(steps) <= SHOWN_STEPS:
        return steps
    head, tail = SHOWN_STEPS // 2, SHOWN_STEPS - SHOWN_STEPS // 2
    return [*steps[:head], f"({len(steps) - SHOWN_STEPS} more)", *steps[-tail:]]
