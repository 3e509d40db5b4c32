"""A page's life through the artifacts of a root: `craw4llm show page URL|ID`.

    corpus, with its links out and in -> score -> crawled at rank r, found through its parent -> selected or why not -> samples i, j, ...

Every finished artifact whose corpus holds the URL says what became of the page there.
"""

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.compute as pc
import pyarrow.parquet as pq

from craw4llm.artifact import Artifact
from craw4llm.corpus.reader import Corpus
from craw4llm.corpus.show import find_page, page_lines
from craw4llm.errors import ArtifactError

SHOWN_SPANS = 8


def page_life(url: str, artifacts: Iterable[Artifact]) -> str:
    """Text of several lines. url: or a page id, or the source's own id. artifacts: all of a root. ArtifactError if none has the page."""
    all_artifacts = list(artifacts)
    lines = []
    corpora = [a for a in all_artifacts if a.stage == "corpus"]
    for artifact in corpora:
        corpus = Corpus(artifact)
        page = find_page(corpus, url)
        if page < 0:
            continue
        held = ", held out: never crawled or selected" if bool(corpus.heldout_mask[page]) else ""
        named = [*(corpus.document_ids([page]) if corpus.has_document_ids else []), corpus.url(page)]
        lines += [" ".join(named), f"corpus {artifact.fingerprint}: page {page}, {int(corpus.text_bytes([page])[0]):,} bytes of text{held}"]
        lines += page_lines(corpus, page)
        for stage, tell in _TELL.items():
            for other in all_artifacts:
                if other.stage == stage and other.manifest["inputs"].get("corpus", {}).get("fingerprint") == artifact.fingerprint:
                    lines += [f"  {stage} {other.fingerprint}: {line}" for line in tell(other, page, corpus)]
    if not lines:
        raise ArtifactError(
            f"no corpus in this root holds the page {url} ({len(corpora)} corpora looked at); give a URL of one of them, a page id, or an "
            "id of the source's own"
        )
    return "\n".join(lines)


def _score(artifact: Artifact, page: int, corpus: Corpus) -> Iterator[str]:
    score = float(np.load(artifact.file("scores.npy"), mmap_mode="r")[page])
    yield "no score" if np.isnan(score) else f"score {score:.6g}"


def _crawl(artifact: Artifact, page: int, corpus: Corpus) -> Iterator[str]:
    row = _row(artifact.file("pages.parquet"), page)
    policy = artifact.config["policy"]
    if row is None:
        yield f"{policy}: not fetched"
        return
    crawled = (
        "fetched only" if row["crawl_rank"] is None else f"crawled at rank {row['crawl_rank']:,} in iteration {row['crawl_iteration']}"
    )
    parent = "a seed" if row["parent"] is None else f"first linked from {corpus.url(row['parent'])} (depth {row['depth']})"
    yield f"{policy}: {crawled}, fetch {row['fetch_rank']:,}, {parent}"


def _select(artifact: Artifact, page: int, corpus: Corpus) -> Iterator[str]:
    row = _row(artifact.file("kept.parquet"), page)
    if row is not None:
        score = row["score"]
        yield f"selected at rank {row['rank']:,}" + ("" if score is None or np.isnan(score) else f", score {score:.6g}")
        return
    dropped = _row(artifact.file("dropped.parquet"), page)
    if dropped is None:
        yield "not selected: not in the pool, or after its end"
    else:
        of = "" if dropped["of"] is None else f" of {corpus.url(dropped['of'])}"
        yield f"not selected: {dropped['reason']}{of}"


def _tokenize(artifact: Artifact, page: int, corpus: Corpus) -> Iterator[str]:
    from craw4llm.tokens.trace import TokenTrace

    spans = TokenTrace(artifact).samples_of(page)
    if not spans:
        yield "not among its documents"
        return
    tokens = sum(stop - start for _, start, stop in spans)
    shown = ", ".join(f"{sample}[{start}:{stop}]" for sample, start, stop in spans[:SHOWN_SPANS])
    more = f" and {len(spans) - SHOWN_SPANS} more" if len(spans) > SHOWN_SPANS else ""
    yield f"{tokens:,} tokens in {len(spans)} samples: {shown}{more}"


_TELL = {"score": _score, "crawl": _crawl, "select": _select, "tokenize": _tokenize}


def _row(path: Path, page: int) -> dict[str, Any] | None:
    table = pq.read_table(path, filters=pc.field("page") == page)
    return table.to_pylist()[0] if len(table) else None
