"""Experiments: parameters, the graph that follows from the arms, names of its nodes."""

import re
from pathlib import Path
from typing import Literal

import pytest

from craw4llm import experiment as experiments
from craw4llm.configs import CorpusConfig, CrawlConfig, ScoreConfig, ScorerConfig, SyntheticText, SyntheticWeb
from craw4llm.errors import ConfigError
from craw4llm.experiment import Arms, Experiment, expand, experiment, load
from craw4llm.stage import Stage
from training.configs import ReportConfig

REPORT = ReportConfig(title="t", question="q")


def two_policies(replicates: int = 2) -> Experiment:
    @experiment(replicates=replicates)
    def crawls(
        replicate: int = 0,
        *,
        pages: int = 10,
        share: float = 0.5,
        loud: bool = False,
        corpus: str = "synthetic",
        links: Literal["dead", "outside"] = "dead",
    ) -> Arms:
        """Which crawl?"""
        web = Stage(CorpusConfig(source=SyntheticWeb()))
        rater = Stage(ScorerConfig(kind="train_fasttext", source=SyntheticText()))
        shared = Stage(CrawlConfig(policy="quality", budget_pages=pages), "quality/crawl", corpus=web, scorer=rater)
        return Arms(
            report=REPORT,
            reported={"corpus": web, "crawl/quality": shared, "scores": Stage(ScoreConfig(), corpus=web, scorer=rater)},
            arms={
                "quality/match": Stage(
                    CrawlConfig(policy="indegree", budget_pages=pages, match_fetches=True), "follow", corpus=web, match=shared
                ),
                "random": Stage(CrawlConfig(policy="random", budget_pages=pages, rng_seed=replicate), corpus=web),
            },
        )

    return crawls


def test_nodes_are_named_by_arm_and_shared_stages_appear_once() -> None:
    graph = expand(two_policies())
    ids = [node.id for node in graph.nodes]
    assert sorted(ids) == sorted(
        ["corpus", "scorer", "score", "quality.crawl", "quality.match.follow", "random.crawl_r0", "random.crawl_r1", "report"]
    )
    assert len({node.stage.key for node in graph.nodes}) == len(ids)


def test_inputs_come_before_users_and_edges_are_the_stages_inputs() -> None:
    graph = expand(two_policies())
    seen: set[str] = set()
    for node in graph.nodes:
        assert set(node.upstream) <= seen
        assert {graph.id_of(stage) for stage in node.stage.inputs.values()} == set(node.upstream)
        seen.add(node.id)


def test_one_replicate_needs_no_suffix() -> None:
    assert "random.crawl" in [node.id for node in expand(two_policies(1)).nodes]


def test_the_report_reads_every_replicate() -> None:
    names = set(expand(two_policies(3)).report.inputs)
    assert {f"results/random#{r}" for r in range(3)} <= names
    assert {"corpus", "crawl/quality", "scores"} <= names


def test_select_by_id_kind_and_arm() -> None:
    graph = expand(two_policies())
    assert [n.id for n in graph.select(only="crawl", arm="random")] == ["random.crawl_r0", "random.crawl_r1"]
    assert [n.id for n in graph.select(only="quality.crawl")] == ["quality.crawl"]
    with pytest.raises(ConfigError, match="no arm 'best'"):
        graph.select(arm="best")
    with pytest.raises(ConfigError, match="no stage 'training'"):
        graph.select(only="training")


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [("pages", "12", 12), ("pages", "1_000", 1000), ("share", "2", 2.0), ("loud", "true", True), ("corpus", "a b;c", "a b;c")],
)
def test_settings_take_the_declared_type(name: str, text: str, value: object) -> None:
    got = two_policies().values({name: text})[name]
    assert got == value
    assert type(got) is type(value)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"pages": "many"}, "pages is 'many'; expected int"),
        ({"pages": 1.5}, "pages is 1.5; expected int"),
        ({"pages": True}, "pages is True; expected int"),
        ({"loud": "yes"}, "loud is 'yes'; expected bool"),
        ({"page": 3}, "no parameter 'page'; it has: corpus, links, loud, pages, share"),
        ({"links": "alive"}, "links is 'alive'; expected dead or outside"),
    ],
)
def test_wrong_settings_are_refused_by_name(given: dict, words: str) -> None:
    with pytest.raises(ConfigError, match=words.replace("(", r"\(")):
        two_policies().values(given)


def test_wrong_declarations_are_refused() -> None:
    def positional(replicate: int = 0, pages: int = 3) -> Arms: ...
    def untyped(replicate: int = 0, *, pages: list = []) -> Arms: ...  # noqa: B006

    for function in (positional, untyped):
        with pytest.raises(ConfigError, match="pages must be keyword-only"):
            experiment()(function)
    with pytest.raises(ConfigError, match="help for page"):
        experiment(help={"page": "x"})(two_policies().build)


def test_two_stages_of_one_name_must_be_told_apart() -> None:
    @experiment()
    def clash(replicate: int = 0) -> Arms:
        web = Stage(CorpusConfig(source=SyntheticWeb()))
        near, far = (Stage(CrawlConfig(policy="random", budget_pages=n), corpus=web) for n in (1, 2))
        return Arms(report=REPORT, arms={"near": near}, reported={"a": near, "b": far})

    with pytest.raises(ConfigError, match="two stages are called 'crawl'"):
        expand(clash)


def test_experiments_are_found_in_their_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "tiny" in experiments.names()
    (tmp_path / "other.py").write_text("x = 1\n")
    monkeypatch.setenv("CRAW4LLM_EXPERIMENTS", str(tmp_path))
    assert experiments.names() == ["other"]
    with pytest.raises(ConfigError, match="declares no experiment called 'other'"):
        load("other")
    with pytest.raises(ConfigError, match="there is no experiment 'tiny'"):
        load("tiny")


def test_tiny_has_one_crawl_per_policy_and_two_arms_on_each() -> None:
    graph = expand(load("tiny"))
    crawls = [node.id for node in graph.nodes if node.stage.config.stage == "crawl"]
    assert sorted(crawls) == [f"{p}.crawl" for p in ("breadth_first", "indegree", "parent_mean", "quality", "random")]
    assert len(graph.results) == 11
    assert all(len(by_replicate) == 2 for by_replicate in graph.results.values())
    assert load("tiny").doc.startswith("Question:")


def bounded(replicate: int = 0, *, policies: str = "random", pages: int = 3, share: float = 0.5) -> Arms:
    raise AssertionError("not built here")


def test_numbers_have_bounds_and_lists_have_words() -> None:
    declared = experiment(lists={"policies": ("random", "quality")}, bounds={"pages": (1, 10), "share": (0.0, None)})(bounded)
    assert declared.values({"policies": " quality, random", "pages": "10"}) == {"policies": "quality,random", "pages": 10, "share": 0.5}
    for given, expected in (
        ({"pages": 0}, "pages is 0; expected at least 1 and at most 10"),
        ({"pages": "11"}, "pages is 11"),
        ({"share": -1}, "share is -1.0; expected at least 0.0"),
        ({"share": "nan"}, "share is nan; expected a finite number"),
        ({"policies": "random,random"}, "policies is 'random,random'; expected some of random, quality, each once"),
        ({"policies": "qualty"}, "policies is 'qualty'"),
        ({"policies": ""}, "policies is ''"),
    ):
        with pytest.raises(ConfigError, match=re.escape(expected)):
            declared.values(given)
    for wrong in ({"bounds": {"page": (1, 2)}}, {"lists": {"page": ("a",)}}, {"until_replicates": -1}):
        with pytest.raises(ConfigError):
            experiment(**wrong)(bounded)  # type: ignore[arg-type]
