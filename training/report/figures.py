"""The report's figures as SVG and PNG: deterministic, readable in light and dark, with the lines labelled where they end.

    drawing = curve_figure("mean_score_best", curves, marker=1312)
    inline(drawing.svg, "per-fetch", "label")    -> to put into a page beside other figures

Text and axes take the colour of the surrounding text (`currentColor`), so a figure follows the page; on its own it follows the
reader's light or dark setting. Line colours have at least 3.4 : 1 contrast on white and on near-black (WCAG 2.2, 1.4.11), and no
line is told by colour alone: every policy has its own dash pattern, and its name at the line's end.
"""

import dataclasses
import io
import re
from collections.abc import Mapping, Sequence
from typing import Any

import matplotlib

matplotlib.use("Agg")
import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.ticker import FuncFormatter, MaxNLocator, NullLocator

from training.report.analysis import Line, Relation
from training.report.curves import Curve, Measure, bands
from training.report.verdict import Floats, Pair

_INK = "#010203"  # stands for currentColor until the SVG is written; no line uses it
# Checked with the WCAG formula against #ffffff and #15181d.
_COLOURS = ("#1f7fc4", "#d55e00", "#0a9a70", "#8c6bd1", "#c4629a", "#a6761d", "#7f7f7f", "#1391a5", "#d04a4a")
_DASHES: tuple[Any, ...] = ("-", (0, (5, 1.5)), (0, (1.5, 1.2)), (0, (6, 1.5, 1.5, 1.5)), (0, (3, 1, 1, 1, 1, 1)), (0, (8, 3)))
_POLICIES = (
    "quality", "parent_mean", "indegree", "random", "predicted", "breadth_first", "parent_max", "seen_indegree", "parent_first",
    "parent_min", "pagerank", "harmonic", "oracle",
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


@dataclasses.dataclass(frozen=True)
class Drawing:
    """A figure in both forms. svg: takes its ink from the text around it. png: on white, at _DPI."""

    svg: str
    png: bytes


LABELS: dict[Measure, tuple[str, str]] = {
    "mean_score_crawled": ("pages crawled", "mean score of the pages crawled"),
    "mean_score_best": ("fetches (requests)", "mean score of the best pages fetched"),
    "top_decile_by_pages": ("pages crawled", "share of the top tenth crawled"),
    "top_decile_by_fetches": ("fetches (requests)", "share of the top tenth fetched"),
    "precision_by_pages": ("pages crawled", "share of the pages crawled that are of the top tenth"),
}


def curve_figure(measure: Measure, curves: Sequence[Curve], marker: int | None = None, ceiling: int | None = None) -> Drawing:
    """A line for every policy that has the measure: the mean over the replicates of its crawl, with their 95% interval as a band.

    marker: a number of fetches to mark where x is fetches. ceiling: pages of the top tenth: adds the best that any order could do.
    """
    with matplotlib.rc_context(_RC):
        figure = Figure(figsize=(_WIDTH, _HEIGHT), layout="constrained")
        panel = figure.subplots()
        of_x, of_y = LABELS[measure]
        found = bands(curves, measure)
        styles = policy_styles(sorted({c.policy for c in curves}))
        ends: list[tuple[str, float, float]] = []
        for band in found:
            colour, dash = styles[band.policy]
            if band.low is not None and band.high is not None:
                panel.fill_between(band.x, band.low, band.high, color=colour, alpha=0.15 if len(found) <= 6 else 0.06, linewidth=0)
            panel.plot(band.x, band.y, color=colour, linestyle=dash, linewidth=1.8)
            ends.append((band.policy, float(band.x[-1]), float(band.y[-1])))
        panel.set_xlabel(of_x)
        panel.set_title(of_y, loc="left", fontsize=11)
        panel.set_xlim(left=0)
        panel.margins(y=0.06)
        if ceiling and found:
            x = np.unique(np.concatenate([band.x for band in found]))
            y = np.minimum(x / ceiling, 1.0) if measure == "top_decile_by_pages" else np.minimum(ceiling / np.maximum(x, 1), 1.0)
            panel.plot(x, y, color=_INK, alpha=0.6, linewidth=1, linestyle=(0, (1, 1)))
            panel.annotate("ceiling", xy=(x[len(x) // 3], y[len(x) // 3]), xytext=(4, 4), textcoords="offset points", fontsize=9, alpha=0.8)
        if measure.startswith(("top_decile", "precision")):
            panel.yaxis.set_major_formatter(FuncFormatter(lambda y, _: f"{y:.0%}"))
            panel.set_ylim(bottom=0)
        panel.xaxis.set_major_locator(MaxNLocator(4, integer=True))
        panel.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:,.0f}"))
        if marker is not None and of_x.startswith("fetches"):
            panel.axvline(marker, color=_INK, alpha=0.55, linewidth=1, linestyle=(0, (2, 2)))
        _label_ends(panel, ends, {name: style[0] for name, style in styles.items()})
        return _drawn(figure)


def pools_figure(
    points: Mapping[str, Sequence[tuple[str, float, float]]],
    lines: Mapping[str, Line],
    target: float | None,
    of_x: str,
    of_y: str,
    unit: float,
    reference: str,
) -> Drawing:
    """Quality of models against what was crawled (or fetched) for them, on a log axis.

    points: policy -> (arm, amount, value). lines: policy -> its least-squares line on log2(amount / unit). target: the reference's value,
    drawn across; where a line meets it a mark says at what multiple.
    """
    with matplotlib.rc_context(_RC):
        figure = Figure(figsize=(_WIDTH, _HEIGHT), layout="constrained")
        panel = figure.subplots()
        styles = policy_styles(sorted(points))
        ends = []
        for policy, own in points.items():
            colour, dash = styles[policy]
            panel.plot([x for _, x, _ in own], [y for _, _, y in own], linestyle="none", marker="o", markersize=6, color=colour)
            end = max(own, key=lambda point: point[1])
            ends.append((policy, end[1], end[2]))
            if policy in lines:
                line = lines[policy]
                far = max(x for x, _ in line.points)
                multiple = line.multiple(target) if target is not None else None
                shown = multiple is not None and multiple <= 16 * far
                if shown and multiple is not None:
                    far = max(far, multiple)
                near = min(x for x, _ in line.points)
                if shown and multiple is not None:
                    near = min(near, max(multiple, near / 16))
                xs = np.geomspace(near, far, 50)
                panel.plot(xs * unit, [line.at(x) for x in xs], color=colour, linestyle=dash, linewidth=1.4)
                if shown and multiple is not None and target is not None:
                    panel.plot([multiple * unit], [target], marker="x", markersize=7, color=colour, markeredgewidth=1.8)
                    panel.annotate(
                        f"{multiple:.1f}x", xy=(multiple * unit, target), xytext=(0, 7), textcoords="offset points",
                        ha="center", fontsize=10, color=colour,
                    )  # fmt: skip
        if target is not None:
            panel.axhline(target, color=_INK, alpha=0.55, linewidth=1, linestyle=(0, (2, 2)))
        panel.set_xscale("log", base=2)
        panel.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:,.0f}"))
        panel.xaxis.set_minor_locator(NullLocator())
        panel.set_xlabel(f"{of_x} (log scale)")
        panel.set_title(of_y, loc="left", fontsize=11)
        panel.margins(x=0.08, y=0.14)
        _label_ends(panel, ends, {name: style[0] for name, style in styles.items()})
        return _drawn(figure)


def relation_figure(relations: Mapping[str, Relation], of_x: str, of_y: str, *, log_x: bool = False, log_y: bool = False) -> Drawing:
    """Binned means of y against x, the bar from the 10th to the 90th percentile of y in each bin; one line a relation."""
    with matplotlib.rc_context(_RC):
        figure = Figure(figsize=(_WIDTH, _HEIGHT), layout="constrained")
        panel = figure.subplots()
        for place, (name, relation) in enumerate(relations.items()):
            colour, dash = _COLOURS[place % len(_COLOURS)], _DASHES[place % len(_DASHES)]
            x = np.array([b[1] for b in relation.bins])
            y, low, high = (np.array([b[k] for b in relation.bins]) for k in (2, 3, 4))
            rho = "no rank correlation" if relation.rho is None else f"Spearman {relation.rho:+.2f}"
            shift = x + 1 if log_x else x
            panel.vlines(shift, low, high, color=colour, alpha=0.35, linewidth=2)
            label = f"{name}: {rho}, {relation.pages:,} pages" if name else f"{rho}, {relation.pages:,} pages"
            panel.plot(shift, y, color=colour, linestyle=dash, marker="os^D"[place % 4], markersize=5, linewidth=1.5, label=label)
        if log_x:
            panel.set_xscale("log")
        if log_y:
            panel.set_yscale("log")
        panel.set_xlabel(of_x)
        panel.set_title(of_y, loc="left", fontsize=11)
        panel.legend(loc="upper center", bbox_to_anchor=(0.5, -0.2), frameon=False, fontsize=9.5)
        return _drawn(figure)


def distribution_figure(edges: Floats, shares: Mapping[str, Floats], of_x: str) -> Drawing:
    """Steps: the share of each set of pages that falls into each bin of scores, on a log axis, since most pages score low."""
    with matplotlib.rc_context(_RC):
        figure = Figure(figsize=(_WIDTH, _HEIGHT), layout="constrained")
        panel = figure.subplots()
        styles = policy_styles(sorted(shares))
        for name, share in shares.items():
            colour, dash = (_INK, "-") if name == "all pages" else styles[name]
            panel.stairs(share, edges, color=colour, linestyle=dash, linewidth=2.2 if name == "all pages" else 1.4, label=name)
        panel.set_yscale("log")
        panel.yaxis.set_major_formatter(FuncFormatter(lambda y, _: f"{y:.3%}".rstrip("0%").rstrip(".") + "%"))
        panel.set_xlabel(of_x)
        panel.set_title("share of the pages in each bin of scores", loc="left", fontsize=11)
        panel.legend(loc="upper center", bbox_to_anchor=(0.5, -0.2), ncols=3, frameon=False, fontsize=9)
        return _drawn(figure)


def needs_figure(rows: Sequence[Mapping[str, Any]]) -> Drawing:
    """What each policy needs to match the reference: three bars a policy (crawled, fetched, discovered), "not reached" where it does not.

    rows: `policy`, and `crawled`, `fetched`, `discovered` (float or None).
    """
    kinds = (("crawled", _COLOURS[0], ""), ("fetched", _COLOURS[1], "//"), ("discovered", _COLOURS[2], ".."))
    with matplotlib.rc_context(_RC):
        figure = Figure(figsize=(_WIDTH, 0.52 * len(rows) + 1.2), layout="constrained")
        panel = figure.subplots()
        for place, row in enumerate(rows):
            for k, (kind, colour, hatch) in enumerate(kinds):
                value = row[kind]
                at = place + (k - 1) * 0.26
                if value is None:
                    panel.text(0.01, at, "not reached", transform=panel.get_yaxis_transform(), va="center", fontsize=7.5, alpha=0.8)
                else:
                    panel.barh(at, value, height=0.24, facecolor="none", edgecolor=colour, hatch=hatch, linewidth=1.2)
                    panel.text(value, at, f" {value:,.0f}", va="center", fontsize=7.5)
        handles = [Patch(facecolor="none", edgecolor=colour, hatch=hatch, label=kind) for kind, colour, hatch in kinds]
        panel.legend(
            handles=handles, loc="upper center", bbox_to_anchor=(0.4, -0.16 if len(rows) > 5 else -0.25), ncols=3, frameon=False, fontsize=9
        )
        panel.set_yticks(range(len(rows)), [row["policy"] for row in rows])
        panel.set_ylim(len(rows) - 0.5, -0.5)
        panel.tick_params(axis="y", length=0)
        panel.grid(axis="y", visible=False)
        panel.margins(x=0.14)
        panel.xaxis.set_major_locator(MaxNLocator(4, integer=True))
        panel.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:,.0f}"))
        panel.set_title("pages needed to match the reference", loc="left", fontsize=11)
        return _drawn(figure)


def decisions_figure(rows: Sequence[Mapping[str, Any]]) -> Drawing:
    """Share of pairs ranked as the largest size ranks them, against the compute of one decision (log axis); one mark a size and metric."""
    with matplotlib.rc_context(_RC):
        figure = Figure(figsize=(_WIDTH, _HEIGHT), layout="constrained")
        panel = figure.subplots()
        for place, metric in enumerate(dict.fromkeys(row["metric"] for row in rows)):
            own = sorted((row["flops_a_decision"], row["right_share"]) for row in rows if row["metric"] == metric)
            panel.plot(
                [x for x, _ in own], [y for _, y in own], color=_COLOURS[place % len(_COLOURS)], linestyle=_DASHES[place % len(_DASHES)],
                marker="os^DvPX"[place % 7], markersize=6, linewidth=1.2, label=metric.replace("_", " "),
            )  # fmt: skip
        panel.axhline(0.5, color=_INK, alpha=0.55, linewidth=1, linestyle=(0, (2, 2)))
        panel.set_xscale("log")
        panel.set_ylim(0, 1.05)
        panel.yaxis.set_major_formatter(FuncFormatter(lambda y, _: f"{y:.0%}"))
        panel.set_xlabel("training FLOPs of one decision (log scale)")
        panel.set_title("pairs ranked as by the largest size (dotted: coin toss)", loc="left", fontsize=11)
        panel.legend(loc="upper center", bbox_to_anchor=(0.5, -0.2), ncols=2, frameon=False, fontsize=9)
        return _drawn(figure)


def verdict_figure(rows: Sequence[Mapping[str, Any]], reference: str) -> Drawing:
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
        return _drawn(figure)


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


def _drawn(figure: Figure) -> Drawing:
    """The figure's SVG without date, creator and XML prologue, coloured by its surroundings; and a PNG, dark on white."""
    stream = io.StringIO()
    FigureCanvasSVG(figure).print_svg(stream, metadata={"Date": None, "Creator": None})
    text = stream.getvalue()
    text = text[text.index("<svg") :].replace(_INK, "currentColor")
    text = re.sub(r"<metadata>.*?</metadata>\s*", "", text, flags=re.DOTALL)
    figure.set_layout_engine("none")  # the layout is made: it would cost as much again
    pixels = io.BytesIO()
    FigureCanvasAgg(figure).print_png(pixels, metadata={"Software": None}, pil_kwargs={})
    return Drawing(re.sub(r"[ \t]+\n", "\n", text), pixels.getvalue())


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
