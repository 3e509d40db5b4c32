"""A crawl, or two, as text for a terminal: `craw4llm show crawl FINGERPRINT` and `craw4llm diff CRAWL_A CRAWL_B`.

describe(trace)          counts, a table over the iterations, a plot of the scores
compare(one, other)      first divergence, overlap of the first N pages crawled and fetched, hosts, scores
plot_svg(trace, path)    the same plot as SVG
"""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from craw4llm.artifact import Artifact, Store
from craw4llm.corpus.reader import Corpus
from craw4llm.crawl.trace import Trace
from craw4llm.errors import ArtifactError

_TABLE_ROWS = 20
_PLOT_COLUMNS, _PLOT_ROWS = 72, 12
_STEPS = (10, 30, 100, 300, 1000, 3000, 10_000, 30_000, 100_000, 300_000, 1_000_000, 3_000_000, 10_000_000)


def open_crawl(root: Path, fingerprint: str) -> Trace:
    """The crawl whose fingerprint begins so. ArtifactError where there is none, or more than one."""
    store = Store(root)
    folder = root / "crawl"
    names = sorted(p.name for p in folder.iterdir() if p.name.startswith(fingerprint)) if folder.is_dir() else []
    found: list[Artifact] = [artifact for name in names if (artifact := store.find("crawl", name)) is not None]
    if len(found) != 1:
        what = "no finished crawl" if not found else f"{len(found)} crawls"
        raise ArtifactError(f"{what} in {folder} whose fingerprint begins with {fingerprint!r}; `craw4llm show EXPERIMENT` lists them")
    return Trace(found[0])


def describe(trace: Trace) -> str:
    """A crawl as text: at most 20 rows of its iterations, evenly spaced, the last among them."""
    artifact = trace.artifact
    rows = trace.iterations.to_pylist()
    crawled = np.cumsum([row["crawled"] for row in rows])
    fetches = np.cumsum([row["fetched"] + row["dead"] for row in rows])
    lines = [
        f"crawl {artifact.fingerprint}  policy {trace.config['policy']}  batches of {trace.config['batch_pages']}  stop: {trace.stop}",
        f"crawled {trace.n_crawled:,} pages, {trace.n_fetches:,} fetches, {artifact.count('dead_links'):,} of them dead links; "
        f"discovered {artifact.count('discovered'):,}; hosts {_count(rows[-1]['hosts'])}",
        *(f"warning: {text}" for text in artifact.manifest["notes"].get("warnings", [])),
        "",
    ]
    head = ("iteration", "crawled", "fetches", "discovered", "frontier", "links", "hosts", "score in", "score out")
    lines.append("  ".join(f"{name:>11}" for name in head))
    for k in _spread(len(rows), _TABLE_ROWS):
        row = rows[k]
        values = [row["iteration"], crawled[k], fetches[k], row["discovered"], row["frontier"], row["links"], row["hosts"]]
        scores = [row["mean_score_discovered"], row["mean_score_crawled"]]
        lines.append("  ".join([*(f"{_count(v):>11}" for v in values), *(f"{'-' if s is None else f'{s:.4f}':>11}" for s in scores)]))
    lines += ["", *_plot(crawled, {"o": [r["mean_score_crawled"] for r in rows], ".": [r["mean_score_discovered"] for r in rows]})]
    return "\n".join(lines)


def compare(one: Trace, other: Trace) -> str:
    """Two crawls of one corpus as text. ArtifactError for crawls of different corpora."""
    corpora = [trace.artifact.manifest["inputs"]["corpus"]["fingerprint"] for trace in (one, other)]
    if corpora[0] != corpora[1]:
        raise ArtifactError(f"the crawls are of different corpora, {corpora[0]} and {corpora[1]}: their page ids cannot be compared")
    corpus = Corpus(one.artifact.input("corpus"))
    lines = []
    for letter, trace in (("A", one), ("B", other)):
        mean = trace.artifact.count("mean_score_crawled")
        score = "no scores" if mean is None else f"mean score crawled {mean:.4f}"
        made = f"{trace.n_crawled:,} pages, {trace.n_fetches:,} fetches"
        lines.append(f"{letter} {trace.artifact.fingerprint}  {trace.config['policy']}: {made}, {score}")
    configs = [dict(trace.config) for trace in (one, other)]
    for name in sorted(set(configs[0]) | set(configs[1])):
        if configs[0].get(name) != configs[1].get(name):
            lines.append(f"  {name}: {configs[0].get(name)!r} and {configs[1].get(name)!r}")
    lines.append("")
    first, second = one.prefix(), other.prefix()
    shorter = min(len(first.crawled), len(second.crawled))
    unequal = np.flatnonzero(first.crawled[:shorter] != second.crawled[:shorter])
    if len(unequal):
        rank = int(unequal[0])
        lines.append(f"crawled alike up to rank {rank:,}; then A has {corpus.url(int(first.crawled[rank]))}")
        lines.append(f"{'':>{len('crawled alike up to rank ') - 5}}           B has {corpus.url(int(second.crawled[rank]))}")
    else:
        longer = "both end there" if len(first.crawled) == len(second.crawled) else "the other goes on"
        lines.append(f"crawled alike in all {shorter:,} pages that both crawled; {longer}")
    head = ("hosts A", "hosts B", "in both", "score A", "score B")
    lines += ["", "  ".join([f"{'first N pages':>13}  {'in both':>9}  {'share':>6}", *(f"{name:>8}" for name in head)])]
    sizes = [step for step in _STEPS if step < shorter] + [shorter]
    for size in sizes:
        a, b = first.crawled[:size], second.crawled[:size]
        hosts = [set(corpus.host_ids[ids].tolist()) if corpus.n_hosts else None for ids in (a, b)]
        known = [len(hosts[0]), len(hosts[1]), len(hosts[0] & hosts[1])] if hosts[0] is not None and hosts[1] is not None else [None] * 3
        common = len(np.intersect1d(a, b))
        means = [_mean(prefix.crawled_scores, size) for prefix in (first, second)]
        lines.append(
            f"{size:>13,}  {common:>9,}  {common / size:>6.1%}  {'  '.join(f'{_count(n):>8}' for n in known)}  {means[0]:>8}  {means[1]:>8}"
        )
    fetched = len(np.intersect1d(first.fetched, second.fetched))
    lines += ["", f"pages fetched: A {len(first.fetched):,}, B {len(second.fetched):,}, both {fetched:,}"]
    return "\n".join(lines)


def plot_svg(trace: Trace, path: Path) -> None:
    """Mean score of the pages crawled and discovered in each iteration, over the pages crawled so far."""
    from matplotlib.figure import Figure

    rows = trace.iterations.to_pylist()
    crawled = np.cumsum([row["crawled"] for row in rows])
    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.subplots()
    for name, key in (("crawled", "mean_score_crawled"), ("discovered", "mean_score_discovered")):
        known = [k for k, row in enumerate(rows) if row[key] is not None]
        if known:
            axes.plot(crawled[known], [rows[k][key] for k in known], label=f"mean score of the pages {name}")
    axes.set_xlabel("pages crawled")
    axes.set_ylabel("score")
    axes.set_title(f"crawl {trace.artifact.fingerprint}: {trace.config['policy']}")
    if axes.lines:
        axes.legend()
    figure.savefig(path, format="svg", metadata={"Date": None})


def _spread(count: int, most: int) -> list[int]:
    """At most `most` of the numbers 0 to count - 1, evenly spaced, first and last among them."""
    return sorted({round(k) for k in np.linspace(0, count - 1, min(count, most))})


def _plot(x: NDArray[Any], series: dict[str, Sequence[float | None]]) -> Iterator[str]:
    """Lines of a plot of several series over x; each column shows the mean of its values."""
    known = [value for values in series.values() for value in values if value is not None]
    if not known:
        yield "(no scores to plot)"
        return
    low, high = min(known), max(known)
    high = high if high > low else low + 1
    columns = np.minimum((np.asarray(x) / max(1, int(x[-1])) * _PLOT_COLUMNS).astype(int), _PLOT_COLUMNS - 1)
    grid = [[" "] * _PLOT_COLUMNS for _ in range(_PLOT_ROWS)]
    for mark, values in reversed(series.items()):
        for column in range(_PLOT_COLUMNS):
            here = [values[k] for k in np.flatnonzero(columns == column).tolist() if values[k] is not None]
            if here:
                level = (float(np.mean(np.array(here, dtype=float))) - low) / (high - low)
                grid[_PLOT_ROWS - 1 - round(level * (_PLOT_ROWS - 1))][column] = mark
    for k, row in enumerate(grid):
        label = f"{high:.4f}" if k == 0 else f"{low:.4f}" if k == _PLOT_ROWS - 1 else ""
        yield f"{label:>9} |{''.join(row)}"
    yield f"{'':>9} +{'-' * _PLOT_COLUMNS}"
    yield f"{'':>11}0{int(x[-1]):>{_PLOT_COLUMNS - 1},} pages crawled    o mean score of the pages crawled, . discovered"


def _count(number: int | None) -> str:
    return "-" if number is None else f"{int(number):,}"


def _mean(scores: NDArray[np.float32] | None, size: int) -> str:
    if scores is None or np.isnan(scores[:size]).all():
        return "-"
    return f"{np.nanmean(scores[:size], dtype=np.float64):.4f}"
