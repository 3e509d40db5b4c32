"""The parts of the report that need more than plain arms: Table 1, pools, sizes, overlap, many crawls of a policy, many experiments."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from made_up_worlds import CONFIG, make_world

from craw4llm.errors import ConfigError
from craw4llm.execution import Execution
from training.configs import ReportConfig
from training.report import commands, stage

Report = Callable[..., Path]
Worlds = Callable[..., Any]  # World in made_up_worlds.py
GOOD = {"arc_easy": 0.6, "copa": 0.8, "boolq": 0.7, "jeopardy": 0.4, "piqa": 0.7}


def read(out: Path, name: str) -> list[dict[str, Any]]:
    return pq.read_table(out / "tables" / f"{name}.parquet").to_pylist()


def of(rows: list[dict[str, Any]], **wanted: Any) -> dict[str, Any]:
    (row,) = [row for row in rows if all(row[key] == value for key, value in wanted.items())]
    return row


@pytest.fixture(scope="module")
def rich(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    """Pools of two and three times, two sizes, the full suite, overlap stages; with all figures."""
    root = tmp_path_factory.mktemp("rich")
    made = make_world(
        root / "artifacts",
        policies=("quality", "random"),
        gains={"random/equal_pages": 0.12, "random/2x": 0.08, "random/3x": 0.057},
        pools=(2, 3),
        small=True,
        overlaps=True,
        accuracies={"quality/equal_pages": GOOD, "oracle": {**GOOD, "hellaswag": 0.9}},
    )
    out = root / "report"
    out.mkdir()
    stage.run(CONFIG, made.inputs, out, Execution(root=root / "artifacts", report=lambda line: None))
    return made, out


def test_table_1_with_the_published_rows_below_the_arms_that_reproduce_them(rich: tuple[Any, Path]) -> None:
    rows = read(rich[1], "table1")
    quality, oracle = of(rows, arm="quality/equal_pages"), of(rows, arm="oracle")
    assert quality["source"] == "measured" and quality["percent_of_oracle"] == pytest.approx(100 * quality["core_v1"] / oracle["core_v1"])
    names = [(row["arm"], row["source"]) for row in rows]
    assert names[names.index(("quality/equal_pages", "measured")) + 1] == ("quality 1x", "published, Table 1")
    assert names[names.index(("random/2x", "measured")) + 1] == ("random 2x", "published, Table 1")
    assert ("random 3x", "published, Table 1") not in names and ("random/3x", "measured") in names
    published = of(rows, arm="quality 1x")
    assert published["core_v1"] == pytest.approx(0.2133, abs=5e-5) and published["percent_of_oracle"] == pytest.approx(95.3, abs=0.05)
    assert published["bits_per_byte"] is None
    text = (rich[1] / "report.html").read_text()
    assert 'class="published"' in text and "they were not measured here" in text


def test_core_is_compared_first_where_the_full_suite_was_run(rich: tuple[Any, Path]) -> None:
    summary = json.loads((rich[1] / "summary.json").read_text())
    assert summary["answers"][0]["heading"].startswith("Core v1. Equal pages crawled")
    verdicts = [v for v in summary["verdicts"] if v["metric"] == "core_v1" and v["arm"] == "random/equal_pages"]
    assert verdicts[0]["against"] == "quality/equal_pages" and verdicts[0]["verdict"] == "worse" and verdicts[0]["difference"] < 0
    assert verdicts[0]["sentence"].startswith("random/equal_pages loses to quality/equal_pages by 0.")
    chance = {row["task"] for row in read(rich[1], "tasks") if row["at_chance"] == "yes"}
    assert "arc_easy" not in chance and "winograd" in chance


def test_the_pool_that_a_baseline_needs(rich: tuple[Any, Path]) -> None:
    row = of(read(rich[1], "multiples"), metric="bits_per_byte", by="pages_crawled", policy="random")
    assert row["points"] == 3 and row["per_doubling"] == pytest.approx(-0.04, abs=0.006)
    assert row["multiple_to_match"] == pytest.approx(8, rel=0.25) and row["extrapolated"] == "yes"


def test_a_smaller_size_enters_no_verdict_and_is_judged_by_its_decisions(rich: tuple[Any, Path]) -> None:
    assert not any(row["arm"].startswith("small/") for name in ("arms", "table1", "pairs") for row in read(rich[1], name))
    assert any(row["arm"].startswith("small/") for row in read(rich[1], "models"))
    row = of(read(rich[1], "decisions"), metric="bits_per_byte", target="bits_per_byte")
    recipes = row["recipes"]
    assert (row["size"], row["target_size"], row["pairs"]) == ("small", "toy", recipes * (recipes - 1) // 2)
    assert 0.7 < row["right_share"] <= 1 and row["share_of_target_flops"] == pytest.approx(0.2)
    assert row["flops_a_decision"] == pytest.approx(2 * 2e11 * 2)


def test_duplicates_and_contamination_come_from_the_overlap_stage(rich: tuple[Any, Path]) -> None:
    row = of(read(rich[1], "overlap"), arm="quality/equal_pages")
    assert (row["copies_share"], row["contaminated_pages_share"], row["overlapping_items_share"]) == (0.1, 0.1, 0.05)


def test_the_burden_counts_requests_of_dead_links_and_hosts(rich: tuple[Any, Path]) -> None:
    row = of(read(rich[1], "burden"), arm="quality/equal_pages")
    assert (row["requests"], row["kept_pages"], row["text_bytes"]) == (100, 30, 9000)
    assert row["hosts"] == 11 and row["requests_per_kept_page"] == pytest.approx(100 / 30)  # ten hosts of pages, one of dead links
    assert 0 < row["gini_over_hosts"] < 1


def test_pages_are_explained_with_a_path_and_a_command(rich: tuple[Any, Path]) -> None:
    rows = read(rich[1], "kept")
    places = {row["place"] for row in rows if row["arm"] == "random/equal_pages"}
    assert places == {"highest", "lowest", "only random/equal_pages", "only quality/equal_pages"}
    reached = next(row for row in rows if row["links_from_seed"])
    assert reached["path"].endswith(reached["url"]) and reached["command"] == f"craw4llm show page {reached['url']}"
    oracle = [row for row in rows if row["arm"] == "oracle" and row["place"] == "highest"]
    assert oracle and all(row["path"] == "" and row["links_from_seed"] is None for row in oracle)


def test_what_went_against_the_reference_is_said(world: Worlds, report: Report) -> None:
    text = (report(world(gains={"random/equal_pages": -0.2}).inputs) / "report.html").read_text()
    assert "By bits per byte, quality/equal_pages loses to random/equal_pages" in text


def test_crawls_of_several_seed_sets_get_intervals_and_verdicts(world: Worlds, report: Report) -> None:
    made = world(policies=("quality", "random"))
    base = {name: a for name, a in made.inputs.items() if not name.startswith(("results/", "crawl/"))}
    quality, random = made.inputs["crawl/quality"], made.inputs["crawl/random"]
    crawls = {f"crawl/{p}#{r}": a for p, a in (("quality", quality), ("random", random)) for r in range(3)}
    out = report({**base, **crawls}, ReportConfig(title="t", question="q?", reference="quality", at_pages=(10, 30)), figures=True)
    rows = read(out, "policy_means")
    assert {row["compared_at"] for row in rows} == {10, 30} and {row["replicates"] for row in rows} == {3}
    at_30 = of(rows, compared_at=30, policy="quality")
    assert at_30["at_fetches"] == 33 and at_30["mean_score_at_pages_low"] == pytest.approx(at_30["mean_score_at_pages"])
    verdict = of(read(out, "crawl_pairs"), compared_at=30, measure="mean_score_at_pages", policy="random")
    assert verdict["verdict"] == "worse" and verdict["difference"] < 0
    needs = of(read(out, "needs"), compared_at=30, policy="quality", replicate=0)
    assert (needs["pages_crawled_needed"], needs["fetches_needed"]) == (30, 33)
    assert of(read(out, "needs"), compared_at=30, policy="random", replicate=0)["pages_crawled_needed"] is None
    summary = json.loads((out / "summary.json").read_text())
    assert summary["arms"] == [] and summary["answers"][0]["heading"] == "Equal pages crawled (10 pages)"
    assert "no model was trained" in (out / "report.html").read_text()


def test_one_set_of_seeds_has_a_difference_and_no_interval(world: Worlds, report: Report) -> None:
    made = world(policies=("quality", "random"))
    crawls = {name: a for name, a in made.inputs.items() if not name.startswith("results/")}
    out = report(crawls, ReportConfig(title="t", question="q?", reference="quality", at_pages=(30,)))
    found = [v for v in json.loads((out / "summary.json").read_text())["verdicts"] if v["metric"] == "mean_score_at_pages"]
    assert [(v["verdict"], v["low"], v["high"]) for v in found] == [("one replicate", None, None)] and found[0]["difference"] < 0
    assert "can't tell from 1 replicate" in found[0]["sentence"] and "interval" not in found[0]["sentence"]


def test_a_model_that_does_not_count_is_in_no_mean_of_tasks(world: Worlds, report: Report) -> None:
    accuracies = {"random/equal_pages": {"lambada_openai": 0.9}}
    whole = report(world(accuracies=accuracies).inputs, name="whole")
    broken = report(world(accuracies=accuracies, broken=(("random/equal_pages", 1),)).inputs, name="broken")
    one, two = (of(read(out, "models"), arm="random/equal_pages", replicate=r)["core_v1"] for out, r in ((whole, 0), (whole, 1)))
    assert one != two
    for name in ("arms", "table1"):
        assert of(read(broken, name), arm="random/equal_pages")["core_v1"] == one
    tasks = [row for row in read(broken, "tasks") if row["arm"] == "random/equal_pages"]
    assert tasks and {row["models"] for row in tasks} == {1}
    summary = json.loads((broken / "summary.json").read_text())
    assert of(summary["arms"], arm="random/equal_pages")["metrics"]["core_v1"]["values"] == [one]


def record(root: Path, name: str, inputs: dict[str, Any], runs: list[tuple[dict[str, Any], list[str]]]) -> None:
    """Writes an index: every run with its parameters and the names of its results; names that are not in `inputs` are not finished."""
    entries = []
    for parameters, results in runs:
        arms: dict[str, dict[str, Any]] = {}
        for result in results:
            arm, _, replicate = result.rpartition("#")
            found = inputs.get(f"results/{result}")
            stages = {"e": {"stage": "evaluate", "fingerprint": found.fingerprint if found else f"gone-{result}"}}
            arms.setdefault(replicate, {})[arm] = stages
        shared = {k: {"stage": inputs[k].stage, "fingerprint": inputs[k].fingerprint} for k in ("corpus", "scores", "crawl/quality")}
        entries.append({"parameters": parameters, "replicates": len(arms), "report": f"r{len(entries)}", "arms": arms, "shared": shared})
    (root / "index").mkdir(exist_ok=True)
    (root / "index" / f"{name}.json").write_text(json.dumps({"experiment": name, "runs": entries}))


def test_experiments_and_past_runs_are_put_together_by_lineage(world: Worlds, report: Report) -> None:
    made = world(policies=("quality", "random"))
    report(made.inputs)  # figures off from here on
    root = made.store.root
    arms = ["quality/equal_pages", "random/equal_pages"]
    record(
        root, "one", made.inputs, [({"n": 1}, [f"{arm}#0" for arm in arms]), ({"n": 1}, [f"{arm}#{r}" for arm in arms for r in (0, 1, 2)])]
    )
    record(root, "two", made.inputs, [({}, ["quality/equal_pages#0", "oracle#0", "oracle#1"])])
    artifact = commands.build(["one"], Execution(root=root, report=lambda line: None), "quality/equal_pages")
    rows = pq.read_table(artifact.file("tables/models.parquet")).to_pylist()
    assert len(rows) == 6 and [row["missing"] for row in rows if row["replicate"] == 2] == ["no results"] * 2
    assert of(pq.read_table(artifact.file("tables/arms.parquet")).to_pylist(), arm="random/equal_pages")["replicates"] == 2
    both = commands.build(["one", "two"], Execution(root=root, report=lambda line: None), "one/quality/equal_pages")
    names = {row["arm"] for row in pq.read_table(both.file("tables/arms.parquet")).to_pylist()}
    assert names == {"one/quality/equal_pages", "one/random/equal_pages", "two/oracle"}  # what is equal is one arm
    again = commands.build(["one", "two"], Execution(root=root, report=lambda line: None), "one/quality/equal_pages")
    assert again.fingerprint == both.fingerprint and again.manifest["finished"] == both.manifest["finished"]
    with pytest.raises(ConfigError, match="there is no arm 'nobody'"):
        commands.build(["one"], Execution(root=root), "nobody")


def test_runs_with_other_settings_keep_their_settings_in_the_name(world: Worlds, report: Report) -> None:
    made = world(policies=("quality", "random"))
    report(made.inputs)
    record(made.store.root, "one", made.inputs, [({"n": 1}, ["quality/equal_pages#0"]), ({"n": 2}, ["random/equal_pages#0"])])
    artifact = commands.build(["one"], Execution(root=made.store.root, report=lambda line: None), "quality/equal_pages [n=1]")
    names = {row["arm"] for row in pq.read_table(artifact.file("tables/arms.parquet")).to_pylist()}
    assert names == {"quality/equal_pages [n=1]", "random/equal_pages [n=2]"}


def test_models_of_another_corpus_are_missing_not_compared(world: Worlds, report: Report, tmp_path: Path) -> None:
    made = world(policies=("quality",))
    other = world(policies=("random",), origin="other pages", urls=[f"https://o.example/{i:04d}" for i in range(300)])
    expected = tuple(name for name in (*made.inputs, *other.inputs) if name.startswith("results/"))
    foreign = {name: a for name, a in other.inputs.items() if name.startswith("results/random")}
    config = ReportConfig(title="t", question="q?", reference="quality/equal_pages", expected=expected, mixed=True)
    rows = read(report({**made.inputs, **foreign}, config), "models")
    assert {row["missing"].partition(",")[0] for row in rows if row["arm"].startswith("random")} == {"made from another corpus"}


def test_an_unknown_experiment_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no run of 'nothing' is recorded"):
        commands.build(["nothing"], Execution(root=tmp_path))
