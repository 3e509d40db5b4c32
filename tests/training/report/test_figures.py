"""Figures: the same bytes each time, colours of the page, nothing of a name is markup."""

import xml.etree.ElementTree as ElementTree

import numpy as np

from training.report.curves import Curve
from training.report.figures import curve_figure, inline, policy_styles, standalone, verdict_figure
from training.report.verdict import Pair

CURVES = [
    Curve(name, 0, "mean_score_crawled", np.arange(1, 60), np.linspace(0.5, 0.1 * k, 59))
    for k, name in enumerate(("quality", "random", "a<b>&c"))
]


def test_equal_input_gives_equal_bytes_without_a_date() -> None:
    first, second = curve_figure("mean_score_crawled", CURVES), curve_figure("mean_score_crawled", CURVES)
    assert first == second
    assert "<dc:date>" not in first.svg and "metadata" not in first.svg
    assert first.png.startswith(b"\x89PNG") and b"Software" not in first.png


def test_figures_are_well_formed_and_follow_the_page() -> None:
    for text in (
        standalone(curve_figure("mean_score_crawled", CURVES).svg),
        inline(curve_figure("mean_score_crawled", CURVES).svg, "x", 'say "<hi>"'),
    ):
        root = ElementTree.fromstring(text)
        said = " ".join(node.text or "" for node in root.iter("{http://www.w3.org/2000/svg}text"))
        assert "quality" in said and "a<b>&c" in said
        assert "currentColor" in text and "#010203" not in text
        assert "#000000" not in text


def test_ids_of_two_figures_on_one_page_differ() -> None:
    svg = curve_figure("mean_score_crawled", CURVES).svg
    ids = []
    for prefix in ("a", "b"):
        root = ElementTree.fromstring(inline(svg, prefix, "label"))
        own = {node.attrib["id"] for node in root.iter() if "id" in node.attrib}
        used = {value[1:] for node in root.iter() for key, value in node.attrib.items() if key.endswith("href")}
        assert used <= own
        ids.append(own)
    assert not ids[0] & ids[1]


def test_an_arm_without_results_is_shown_with_its_reason() -> None:
    pair = Pair(a="b", b="a", difference=0.1, low=0.05, high=0.15, replicates=(0, 1), seeds_known=True)
    rows = [
        {"heading": "Equal pages crawled"},
        {"arm": "a", "label": "a", "values": [1.5, 1.52], "pair": None, "missing": ""},
        {"arm": "b", "label": "b", "values": [1.6, 1.62], "pair": pair, "missing": ""},
        {"arm": "c", "label": "c", "values": [], "pair": None, "missing": "no results"},
    ]
    drawing = verdict_figure(rows, "a")
    assert "no results" in drawing.svg
    assert drawing == verdict_figure(rows, "a")


def test_known_policies_look_alike_in_every_report() -> None:
    few, many = policy_styles(["quality", "random"]), policy_styles(["quality", "random", "indegree", "a_new_one"])
    assert few["random"] == many["random"] and few["quality"] == many["quality"]
    assert len({style for style in many.values()}) == 4
