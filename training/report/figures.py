"""The report's figures as SVG: deterministic, readable in light and dark, with the lines labelled where they end.

    svg = curve_figure("mean_score_best", curves, marker=1312)
    inline(svg, "per-fetch")    -> to put into a page beside other figures

Text and axes take the colour of the surrounding text (`currentColor`), so a figure follows the page; on its own it follows the
reader's light or dark setting. Line colours have at least 3.4 : 1 contrast on white and on near-black (WCAG 2.2, 1.4.11), and no
line is told by colour alone: every policy has its own dash pattern, and its name at the line's end.
"""

import io
import re
from collections.abc import Mapping, Sequence
from typing import Any

import matplotlib

matplotlib.use("Agg")
import numpy as np
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator

from training.report.curves import Curve, Measure
from training.report.verdict import Pair

_INK = "#010203"  # stands for currentColor until the SVG is written; no line uses it
# Checked with the WCAG formula against #ffffff and #15181d.
_COLOURS = ("#1f7fc4", "#d55e00", "#0a9a70", "#8c6bd1", "#c4629a", "#a6761d", "#7f7f7f", "#1391a5", "#d04a4a")
_DASHES: tuple[Any, ...] = ("-", (0, (5, 1.5)), (0, (1.5, 1.2)), (0, (6, 1.5, 1.5, 1.5)), (0, (3, 1, 1, 1, 1, 1)), (0, (8, 3)))
_POLICIES = (
    "quality", "parent_mean", "indegree", "random", "breadth_first", "parent_max", "seen_indegree", "parent_first", "parent_min",
)  # fmt: skip
_RC: Any = {
    "svg.hashsalt": "craw4llm",
    "svg.fonttype": "none",
    "font.family": "sans-serif",
    "font.size": 11,
    "text.color": _INK,
    "axes.edgecolor": _INK,
    "axes.labelcolor": _INK,
    "xtick.color": _INK,
    "ytick.color": _INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": _INK,
    "grid.alpha": 0.12,
    "grid.linewidth": 0.8,
    "figure.facecolor": "none",
    "axes.facecolor": "none",
    "savefig.facecolor": "none",
}
_WIDTH, _HEIGHT = 5.0, 3.5  # inches: narrow, so that text stays readable on a phone

LABELS: dict[Measure, tuple[str, str]] = {
    "mean_score_crawled": ("pages crawled", "mean score of the pages crawled"),
    "mean_score_best": ("fetches (requests)", "mean score of the best pages fetched"),
    "top_decile_by_pages": ("pages crawled", "share of the top tenth crawled"),
    "top_decile_by_fetches": ("fetches (requests)", "share of the top tenth fetched"),
}


def curve_figure(measure: Measure, curves: Sequence[Curve], marker: int | None = None) -> str:
    """SVG with a line for every policy that has the measure; several replicates of a crawl are thin lines of one style.

    marker: a number of fetches to mark where x is fetches.
    """
    with matplotlib.rc_context(_RC):
        figure = Figure(figsize=(_WIDTH, _HEIGHT), layout="constrained")
        panel = figure.subplots()
        of_x, of_y = LABELS[measure]
        names = sorted({c.policy for c in curves})
        styles = policy_styles(names)
        ends: list[tuple[str, float, float]] = []
        for name in names:
            own = [c for c in curves if c.policy == name and c.measure == measure and len(c.x)]
            for curve in own:
                width = 1.9 if len(own) == 1 else 1.1
                panel.plot(curve.x, curve.y, color=styles[name][0], linestyle=styles[name][1], linewidth=width)
            if own:
                ends.append((name, float(own[0].x[-1]), float(own[0].y[-1])))
        panel.set_xlabel(of_x)
        panel.set_title(of_y, loc="left", fontsize=11)
        panel.set_xlim(left=0)
        panel.margins(y=0.06)
        if measure.startswith("top_decile"):
            panel.yaxis.set_major_formatter(FuncFormatter(lambda y, _: f"{y:.0%}"))
            panel.set_ylim(bottom=0)
        panel.xaxis.set_major_locator(MaxNLocator(4, integer=True))
        panel.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:,.0f}"))
        if marker is not None and of_x.startswith("fetches"):
            panel.axvline(marker, color=_INK, alpha=0.55, linewidth=1, linestyle=(0, (2, 2)))
        _label_ends(panel, ends, {name: style[0] for name, style in styles.items()})
        return _svg(figure)


def verdict_figure(rows: Sequence[Mapping[str, Any]], reference: str) -> str:
    """SVG: bits per byte of every arm, lower is better, with the interval of its difference from the reference.

    rows: from the top down: `heading` (a line of its own, no arm), or `arm`, `label`, `values` (one a replicate), `pair` (Pair against the
    reference, or None) and `missing`.
    """
    with matplotlib.rc_context(_RC):
        figure = Figure(figsize=(_WIDTH, 0.34 * len(rows) + 1.1), layout="constrained")
        panel = figure.subplots()
        base = next((float(np.mean(r["values"])) for r in rows if r.get("arm") == reference and r["values"]), None)
        ticks: list[tuple[int, str]] = []
        for place, row in enumerate(rows):
            if "heading" in row:
                panel.text(0.015, place, row["heading"], transform=panel.get_yaxis_transform(), va="center", fontsize=10, fontweight="bold")
                continue
            ticks.append((place, row["label"]))
            values: list[float] = row["values"]
            if not values:
                panel.text(0.02, place, f"— {row['missing']}", transform=panel.get_yaxis_transform(), va="center", fontsize=9, alpha=0.8)
                continue
            mean = float(np.mean(values))
            pair: Pair | None = row["pair"]
            colour, face = _INK, _INK
            if pair is not None and pair.low is not None and pair.high is not None and base is not None:
                colour = {pair.a: "#0a9a70", pair.b: "#d55e00"}.get(pair.winner or "", "#7f7f7f")
                face = colour if pair.decided else "none"
                common = base_of(pair, mean)
                panel.plot([common + pair.low, common + pair.high], [place, place], color=colour, linewidth=2.2, solid_capstyle="butt")
            panel.plot(values, [place + 0.22] * len(values), linestyle="none", marker="|", markersize=6, color=_INK, alpha=0.6)
            marker = "D" if row["arm"] == reference else "o"
            panel.plot(
                [mean], [place], linestyle="none", marker=marker, markersize=7, color=colour, markerfacecolor=face, markeredgewidth=1.6
            )
        if base is not None:
            panel.axvline(base, color=_INK, alpha=0.55, linewidth=1, linestyle=(0, (2, 2)))
        panel.set_yticks([place for place, _ in ticks], [name for _, name in ticks])
        panel.set_ylim(len(rows) - 0.4, -0.6)
        panel.tick_params(axis="y", length=0)
        panel.grid(axis="y", visible=False)
        panel.xaxis.set_major_locator(MaxNLocator(5))
        panel.set_xlabel("held-out bits per byte (lower is better)")
        return _svg(figure)


def base_of(pair: Pair, mean: float) -> float:
    """Where a difference of 0 lies for an arm with this mean: its interval is drawn around its own dot."""
    return mean - (pair.difference or 0.0)


def policy_styles(names: Sequence[str]) -> dict[str, tuple[str, Any]]:
    """Colour and dash pattern of each policy: fixed for the known ones, so that they look alike in every report."""
    known = [*_POLICIES, *(name for name in names if name not in _POLICIES)]
    return {name: (_COLOURS[i % len(_COLOURS)], _DASHES[i % len(_DASHES)]) for i, name in enumerate(known) if name in names}


def _label_ends(panel: Any, ends: Sequence[tuple[str, float, float]], colours: Mapping[str, str]) -> None:
    """The policies' names right of the panel, at the heights of their lines' ends, moved apart where they would overlap."""
    low, high = panel.get_ylim()
    gap = (high - low) * 0.075
    ordered = sorted(ends, key=lambda end: (end[2], end[0]))
    heights = [y for _, _, y in ordered]
    for i in range(1, len(heights)):
        heights[i] = max(heights[i], heights[i - 1] + gap)
    over = heights[-1] - high if heights else 0
    if over > 0:
        heights[-1] -= over
        for i in range(len(heights) - 2, -1, -1):
            heights[i] = min(heights[i], heights[i + 1] - gap)
    right = panel.get_xlim()[1]
    for (name, x, y), height in zip(ordered, heights, strict=True):
        panel.annotate(
            name,
            xy=(x, y),
            xytext=(right * 1.02, height),
            color=colours[name],
            va="center",
            fontsize=10,
            annotation_clip=False,
            arrowprops={"arrowstyle": "-", "color": colours[name], "linewidth": 0.7, "alpha": 0.6, "shrinkA": 1, "shrinkB": 1},
        )
    panel.set_xlim(right=right)
    panel.set_ylim(low, high)


def _svg(figure: Figure) -> str:
    """The figure's SVG without date, creator and XML prologue, coloured by its surroundings."""
    stream = io.StringIO()
    FigureCanvasSVG(figure).print_svg(stream, metadata={"Date": None, "Creator": None})
    text = stream.getvalue()
    text = text[text.index("<svg") :].replace(_INK, "currentColor")
    text = re.sub(r"<metadata>.*?</metadata>\s*", "", text, flags=re.DOTALL)
    return re.sub(r"[ \t]+\n", "\n", text)


def inline(svg: str, prefix: str, label: str) -> str:
    """The SVG for a page that holds several: ids made unique by `prefix`, scalable, with a text for screen readers.

    label must hold no markup; it is escaped here.
    """
    text = re.sub(r'\bid="([^"]+)"', rf'id="{prefix}-\1"', svg)
    text = re.sub(r'href="#([^"]+)"', rf'href="#{prefix}-\1"', text)
    text = re.sub(r"url\(#([^)]+)\)", rf"url(#{prefix}-\1)", text)
    escaped = label.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;").replace('"', "&quot;")
    opening = re.match(r"<svg[^>]*>", text)
    assert opening is not None
    box = re.search(r'viewBox="[^"]+"', opening[0])
    assert box is not None
    head = f'<svg xmlns="http://www.w3.org/2000/svg" xmlns:xlink="http://www.w3.org/1999/xlink" {box[0]} role="img" aria-label="{escaped}">'
    return head + text[opening.end() :]


def standalone(svg: str) -> str:
    """The SVG as a file of its own: it follows the reader's light or dark setting."""
    opening = re.match(r"<svg[^>]*>", svg)
    assert opening is not None
    style = "<style>svg{color:#1b1f24;font-family:sans-serif}@media (prefers-color-scheme:dark){svg{color:#e6e8eb}}</style>"
    return f'<?xml version="1.0" encoding="utf-8"?>\n{opening[0]}{style}{svg[opening.end() :]}'
