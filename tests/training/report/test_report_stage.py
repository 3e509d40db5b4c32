"""The report of made-up artifacts: what it says, what it leaves out, and that it gives the same bytes again."""

import base64
import csv
import hashlib
import json
import re
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from craw4llm.errors import ArtifactError, ConfigError
from training.configs import ReportConfig
from training.report import stage as report_stage

Report = Callable[..., Path]
Worlds = Callable[..., Any]  # World in made_up_worlds.py
PAGES = 300  # of the made-up corpus
GAINS = {"random/equal_pages": 0.1, "parent_mean/equal_fetches": -0.05}


class Page(HTMLParser):
    """Tags and text of a page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        self.text += data


def read(out: Path, name: str) -> list[dict[str, str]]:
    with (out / "tables" / f"{name}.csv").open(newline="") as stream:
        return list(csv.DictReader(stream))


def digests(out: Path) -> dict[str, str]:
    files = [out / "summary.json", *(p for folder in ("tables", "figures") for p in sorted((out / folder).iterdir()))]
    files = [p for p in files if p.relative_to(out).as_posix() not in report_stage.VOLATILE]
    return {p.relative_to(out).as_posix(): hashlib.sha256(p.read_bytes()).hexdigest() for p in files}


def pairs(out: Path) -> dict[tuple[str, str], dict[str, str]]:
    return {(row["arm"], row["against"]): row for row in read(out, "pairs") if row["heldout"] == "all" and row["metric"] == "bits_per_byte"}


def test_the_report_answers_with_the_planted_winner_and_loser(world: Worlds, report: Report) -> None:
    out = report(world(gains=GAINS).inputs)
    found = pairs(out)
    assert found["random/equal_pages", "quality/equal_pages"]["verdict"] == "worse"
    assert float(found["random/equal_pages", "quality/equal_pages"]["difference"]) == pytest.approx(0.1, abs=0.01)
    assert found["parent_mean/equal_fetches", "quality/equal_pages"]["verdict"] == "better"
    assert found["parent_mean/equal_fetches", "quality/equal_fetches"]["verdict"] == "better"
    assert found["quality/equal_fetches", "quality/equal_pages"]["verdict"] == "can't tell"
    page = Page((out / "report.html").read_text())
    text = " ".join(page.text.split())
    assert text.index("Which policy gives the better model?") < text.index(
        "Equal fetches (100 each): parent_mean has the lowest bits per byte"
    )
    counts = json.loads((out / "result.json").read_text())
    assert counts["arms"] == 7 and counts["replicates"] == 2 and counts["pairs_missing"] == 0
    assert counts["pairs_decided"] + counts["pairs_undecided"] == len(found)
    assert counts["pairs_decided"] == sum(row["verdict"] in ("better", "worse") for row in found.values()) > 0
    assert "parent\\_mean has the lowest bits per byte" in (out / "summary.md").read_text()


def test_the_highest_scored_held_out_pages_are_reported_apart(world: Worlds, report: Report, monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = world(top_gains={"random/equal_pages": 0.3, "parent_mean/equal_pages": -0.3}).inputs
    few = report(inputs, name="few")
    assert {row["heldout"] for row in read(few, "pairs")} == {"all"}
    assert "fewer than 30 pages get no verdict" in " ".join(Page((few / "report.html").read_text()).text.split())
    arms = {row["arm"]: float(row["bits_per_byte_top_tenth_mean"]) for row in read(few, "arms")}
    assert arms["random/equal_pages"] - arms["quality/equal_pages"] == pytest.approx(0.3, abs=0.03)
    monkeypatch.setattr(report_stage, "FEWEST_PAGES", 6)
    out = report(inputs, name="enough")
    top = {(row["arm"], row["against"]): row["verdict"] for row in read(out, "pairs") if row["heldout"] == "top tenth by score"}
    assert top["random/equal_pages", "quality/equal_pages"] == "worse"
    assert top["parent_mean/equal_pages", "quality/equal_pages"] == "better"
    text = " ".join(Page((out / "report.html").read_text()).text.split())
    assert "On the 6 held-out pages with the highest scores alone. Equal pages crawled (30 each): parent_mean has the lowest" in text


def test_the_table_of_arms_counts_pages_and_requests(world: Worlds, report: Report) -> None:
    arms = {row["arm"]: row for row in read(report(world().inputs), "arms")}
    quality, random = arms["quality/equal_pages"], arms["random/equal_pages"]
    assert (quality["pages_crawled"], quality["fetches"], quality["fetched_pages"], quality["dead_links"]) == ("30", "100", "90", "10")
    assert (random["pages_crawled"], random["fetches"], random["fetched_pages"], random["dead_links"]) == ("30", "33", "30", "3")
    assert (arms["random/equal_fetches"]["pages_crawled"], arms["random/equal_fetches"]["fetches"]) == ("90", "100")
    assert arms["oracle"]["fetches"] == "" and arms["oracle"]["comparison"] == "Oracle"
    assert float(arms["oracle"]["mean_score_kept"]) > float(quality["mean_score_kept"]) > float(random["mean_score_kept"])


def test_equal_inputs_give_equal_tables_and_figures(world: Worlds, report: Report) -> None:
    inputs = world(gains=GAINS).inputs
    first = report(inputs, name="first", figures=True)
    second = report(dict(reversed(inputs.items())), name="second", figures=True)
    assert digests(first) == digests(second)
    names = set(digests(first))
    for path in ("summary.json", "tables/table1.csv", "tables/table1.parquet", "figures/bits_per_byte.svg", "figures/bits_per_byte.png"):
        assert path in names
    assert len([name for name in names if name.endswith(".svg")]) == len([name for name in names if name.endswith(".png")]) == 12


def test_every_policy_is_in_every_curve(world: Worlds, report: Report) -> None:
    rows = read(report(world().inputs), "curves")
    for measure in ("mean_score_crawled", "mean_score_best", "top_decile_by_pages", "top_decile_by_fetches"):
        assert {row["policy"] for row in rows if row["measure"] == measure} == {"quality", "parent_mean", "random"}


def test_a_missing_model_is_shown_as_missing_and_is_in_no_mean(world: Worlds, report: Report) -> None:
    absent, broken = ("random/equal_pages", 1), ("parent_mean/equal_fetches", 0)
    out = report(world(gains=GAINS, absent=(absent,), broken=(broken, ("parent_mean/equal_fetches", 1))).inputs)
    arms = {row["arm"]: row for row in read(out, "arms")}
    assert arms["parent_mean/equal_fetches"]["bits_per_byte_mean"] == ""
    assert "the loss is no number on 1 of 60" in arms["parent_mean/equal_fetches"]["missing"]
    models = {(row["arm"], row["replicate"]): row for row in read(out, "models")}
    assert models["random/equal_pages", "1"]["bits_per_byte"] == "" and models["random/equal_pages", "1"]["missing"] == "no results"
    assert arms["random/equal_pages"]["bits_per_byte_mean"] == models["random/equal_pages", "0"]["bits_per_byte"]
    found = pairs(out)
    assert found["random/equal_pages", "quality/equal_pages"]["verdict"] == "one replicate"
    row = found["parent_mean/equal_fetches", "quality/equal_pages"]
    assert (row["verdict"], row["difference"]) == ("missing", "") and "no number" in row["remark"]
    text = " ".join(Page((out / "report.html").read_text()).text.split())
    assert "random/equal_pages, replicate 1: no results" in text
    assert "nan" not in re.sub(r"[^a-z ]", " ", text.lower()).split()


def test_an_arm_with_fewer_models_is_never_the_best(world: Worlds, report: Report) -> None:
    out = report(world(gains={"random/equal_pages": -0.5}, absent=(("random/equal_pages", 1),)).inputs)
    text = Page((out / "report.html").read_text()).text
    assert re.search(r"Equal pages crawled \(30 each\): (quality|parent_mean) has the lowest", " ".join(text.split()))


def test_a_policy_that_was_crawled_and_has_no_results_is_shown(world: Worlds, report: Report) -> None:
    made = world()
    inputs = {name: a for name, a in made.inputs.items() if not name.startswith("results/random/")}
    out = report(inputs)
    arms = {row["arm"]: row for row in read(out, "arms")}
    assert arms["random"]["replicates"] == "0" and "no results" in arms["random"]["missing"]
    assert "random, replicate 0: no results" in " ".join(Page((out / "report.html").read_text()).text.split())


def test_a_missing_reference_is_no_reason_to_have_no_report(world: Worlds, report: Report) -> None:
    made = world()
    inputs = {name: a for name, a in made.inputs.items() if not name.startswith("results/quality/equal_pages")}
    rows = pairs(report(inputs))
    assert rows["random/equal_pages", "quality/equal_pages"]["verdict"] == "missing"
    assert rows["parent_mean/equal_fetches", "quality/equal_fetches"]["verdict"] in ("better", "worse", "can't tell")


def test_no_results_at_all_is_said(world: Worlds, report: Report) -> None:
    inputs = {name: a for name, a in world().inputs.items() if not name.startswith("results/")}
    out = report(inputs, ReportConfig(title="t", question="q?"))
    assert "No arm has results yet" in (out / "report.html").read_text()


def test_one_replicate_says_that_the_spread_is_unknown(world: Worlds, report: Report) -> None:
    out = report(world(gains=GAINS, replicates=1).inputs)
    assert {row["verdict"] for row in read(out, "pairs")} == {"one replicate"}
    assert "the spread over training seeds is unknown, so nothing is decided" in " ".join(
        Page((out / "report.html").read_text()).text.split()
    )
    assert json.loads((out / "result.json").read_text())["pairs_decided"] == 0


def test_a_seed_that_does_not_change_is_not_counted_twice(world: Worlds, report: Report) -> None:
    made = world(replicates=1)
    twins = {name.replace("#0", "#1"): a for name, a in made.inputs.items() if name.startswith("results/")}
    out = report({**made.inputs, **twins})
    assert {row["verdict"] for row in read(out, "pairs")} == {"one replicate"}
    assert "the same model as replicate 0" in (out / "report.html").read_text()


def test_without_scores_the_report_says_what_it_cannot_show(world: Worlds, report: Report) -> None:
    out = report(world(with_scores=False).inputs)
    rows = read(out, "curves")
    assert {row["measure"] for row in rows} == {"mean_score_crawled", "mean_score_best"}
    assert {row["policy"] for row in rows} == {"quality", "parent_mean"}
    assert "No scores of all pages were given" in (out / "report.html").read_text()


def test_hostile_text_is_inert(world: Worlds, report: Report) -> None:
    bad = "https://h.example/<script>alert(1)</script>\"'><img src=x onerror=alert(1)>"
    urls = [f"{bad}{i:04d}" for i in range(PAGES)]
    config = ReportConfig(
        title="<b>t</b>", question="{{ 7 * 7 }} <script>q()</script>", hypothesis="<i>h</i>", reference="quality/equal_pages"
    )
    out = report(world(urls=urls, origin="<script>origin()</script> [x](javascript:y)").inputs, config, figures=True)
    page = Page((out / "report.html").read_text())
    tags = {tag for tag, _ in page.tags}
    assert not tags & {"img", "b", "i", "iframe", "object", "link"}
    assert [tag for tag, _ in page.tags].count("script") == 1  # the project's own, which sorts tables
    assert all(not name.startswith("on") for _, attributes in page.tags for name in attributes)
    assert all(str(attributes["href"]).startswith("#") for tag, attributes in page.tags if tag == "a")
    loads_nothing(page)
    assert "<script>alert(1)</script>" in page.text and "{{ 7 * 7 }}" in page.text
    assert "<script" not in (out / "summary.md").read_text()
    for path in (out / "figures").glob("*.svg"):
        assert "<script" not in path.read_text()


def test_only_the_projects_own_script_may_run(world: Worlds, report: Report) -> None:
    text = (report(world().inputs) / "report.html").read_text()
    allowed = re.search(r"script-src '(sha256-[^']+)'", text)
    script = re.search(r"<script>(.*?)</script>", text, re.DOTALL)
    assert allowed and script
    assert "sha256-" + base64.b64encode(hashlib.sha256(script[1].encode()).digest()).decode() == allowed[1]


def loads_nothing(page: Page) -> None:
    for tag, attributes in page.tags:
        assert "src" not in attributes, tag
        assert all(not key.endswith("href") or str(value).startswith("#") for key, value in attributes.items()), tag


def test_the_machine_is_described_without_its_name(world: Worlds, report: Report) -> None:
    made = world()
    text = Page((report(made.inputs) / "report.html").read_text()).text
    machine = made.inputs["corpus"].manifest["machine"]
    assert f"{machine['cpus']} CPUs" in text
    assert len(machine["host"]) < 4 or machine["host"] not in text


def test_the_recorded_run_is_named_as_the_way_to_repeat_it(world: Worlds, report: Report) -> None:
    made = world()
    arms: dict[str, dict[str, object]] = {}
    for name, artifact in made.inputs.items():
        if name.startswith("results/"):
            arm, _, replicate = name.removeprefix("results/").rpartition("#")
            arms.setdefault(replicate, {})[arm] = {"x": {"stage": "evaluate", "fingerprint": artifact.fingerprint}}
    run = {"parameters": {"pages": 30, "corpus": "a b"}, "replicates": 2, "report": "0", "arms": arms, "shared": {}}
    index = made.store.root / "index"
    index.mkdir()
    (index / "other.json").write_text("{")
    (index / "tiny.json").write_text(json.dumps({"experiment": "tiny", "runs": [run]}))
    text = Page((report(made.inputs) / "report.html").read_text()).text
    assert "craw4llm run tiny --replicates 2 --set 'corpus=a b' --set pages=30" in text


def test_results_on_other_pages_are_refused(world: Worlds, report: Report) -> None:
    made = world()
    path = made.inputs["results/random/equal_pages#0"].file("pages.parquet")
    table = pq.read_table(path)
    pq.write_table(table.set_column(0, "page", pa.array(np.arange(table.num_rows, dtype=np.uint32))), path)
    with pytest.raises(ArtifactError, match="other held-out pages"):
        report(made.inputs)


def test_losses_that_do_not_add_up_to_the_recorded_result_are_refused(world: Worlds, report: Report) -> None:
    made = world()
    path = made.inputs["results/random/equal_pages#0"].file("pages.parquet")
    table = pq.read_table(path)
    pq.write_table(table.set_column(3, "nll", pa.array(table["nll"].to_numpy() * 1.1)), path)
    with pytest.raises(ArtifactError, match="adds up to"):
        report(made.inputs)


def test_a_report_needs_a_corpus(report: Report) -> None:
    with pytest.raises(ConfigError, match="corpus"):
        report({})
