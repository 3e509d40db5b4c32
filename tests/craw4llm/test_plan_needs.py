"""What `craw4llm plan` reckons for each stage, against values worked out by hand from round rates."""

import dataclasses
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from craw4llm import grouping
from craw4llm.__main__ import cli
from craw4llm.configs import (
    CorpusConfig,
    CrawlConfig,
    Encoder,
    ScoreConfig,
    ScorerConfig,
    ScorerSource,
    SelectConfig,
    SyntheticText,
    SyntheticWeb,
    TokenizeConfig,
    TokenizerConfig,
    UrlFeature,
)
from craw4llm.errors import ConfigError
from craw4llm.execution import Execution
from craw4llm.experiment import Arms, Experiment, expand, experiment
from craw4llm.fingerprint import External
from craw4llm.plan_needs import Machines, Need, advice, needs_record, needs_text, stage_needs, totals, with_counts
from craw4llm.plan_rates import RATES, rates_with
from craw4llm.runner import Plan, make_plan
from craw4llm.stage import Stage
from training.configs import SIZES, EvaluateConfig, ReportConfig, TrainConfig

STATED = (("pages", 1_000_000, "pages"), ("text_bytes", 4_000_000_000, "bytes"), ("links", 20_000_000, "links"))
ROUND = {
    "corpus_pages_per_s": "1000",
    "corpus_bytes_per_page": "20",
    "packed_share": "0.5",
    "delivered_link_bytes_per_page": "1000",
    "read_bytes_per_s": "400e6",
    "score_projected_bytes_per_s": "100e6",
    "crawl_pages_per_s": "1000",
    "discovered_per_crawled": "8",
    "select_pool_pages_per_s": "1e6",
    "process_bytes": "100e6",
    "tokens_per_s": "1e6",
    "bytes_per_token": "4",
    "tokenize_serial_share": "0.1",
    "gpu_flops_per_s": "1e12",
}
FASTTEXT = {"kind": "train_fasttext", "source": SyntheticText(lines=400), "route": "projected"}


def declared(scorer: dict[str, Any] | None = None, heldout_copies: str = "drop", seeds: int = 5) -> Experiment:
    @experiment(parts={"corpus": 4, "score": 5000, "tokenize": 2})
    def sized(replicate: int = 0) -> Arms:
        """A corpus that is not at hand, described by counts."""
        web = Stage(CorpusConfig(source=External(name="corpus", path="/nonexistent/web", stated=STATED), heldout_fraction=0.01))
        rater = Stage(ScorerConfig(**(scorer or FASTTEXT)))
        bpe = Stage(TokenizerConfig(source=External(name="tokenizer", path="/nonexistent/tokenizer.json")))
        heldout = Stage(TokenizeConfig(pages="heldout", sample_tokens=257), "heldout", corpus=web, tokenizer=bpe)
        crawl = CrawlConfig(policy="quality", budget_pages=10_000, seed_count=seeds)
        trace = Stage(crawl, "quality/crawl", corpus=web, scorer=rater)
        first = SelectConfig(
            pool="crawled",
            prefix_pages=10_000,
            exact_duplicates="off",
            near_duplicates="off",
            heldout_copies=heldout_copies,  # type: ignore[arg-type]
        )
        kept = Stage(first, corpus=web, crawl=trace)
        tokens = Stage(TokenizeConfig(sample_tokens=257), corpus=web, tokenizer=bpe, selection=kept)
        model = Stage(
            TrainConfig(size="toy", vocab_size=512, token_budget=40_960_000, batch_tokens=8 * SIZES["toy"].context, precision="fp32"),
            tokens=tokens,
            heldout=heldout,
        )
        result = Stage(EvaluateConfig(suite="none"), checkpoint=model, tokenizer=bpe, heldout=heldout)
        scores = Stage(ScoreConfig(), corpus=web, scorer=rater)
        return Arms(
            arms={"quality": result},
            reported={"corpus": web, "scores": scores, "crawl/quality": trace},
            report=ReportConfig(title="sized", question="How much?", reference="quality"),
        )

    return sized


LINES = [
    "tokenize: 2 parts of 4.5",  # the held-out pages: 10 million tokens, a tenth of the work by one process alone
    "tokenize: 2 parts of 4.19",
    "score: 1,000 parts of 0.05",
]


def planned(tmp_path: Path, **more: Any) -> Plan:
    return make_plan(expand(declared(**more)), Execution(root=tmp_path), absent_inputs=True)


def needs_of(tmp_path: Path, **more: Any) -> dict[str, Need]:
    found = stage_needs(planned(tmp_path, **more), parts={"corpus": 4, "score": 5000, "tokenize": 2}, rates=rates_with(ROUND))
    return {"heldout" if need.id.endswith("heldout") else need.kind: need for need in found}


def test_a_corpus_by_counts(tmp_path: Path) -> None:
    need = needs_of(tmp_path)["corpus"]
    assert (need.parts, need.tasks, need.core_s, need.serial_s, need.gpu_s) == (4, 5, 1000, 0, 0)
    assert need.disk_bytes == need.written_bytes == 1_000_000 * 20 + 20_000_000 * 4
    assert need.memory_bytes == 100e6 + 2 * 2**30
    assert need.read_bytes == (4_000_000_000 + 1_000_000 * 1000) * 0.5


def test_scores_of_all_pages(tmp_path: Path) -> None:
    need = needs_of(tmp_path)["score"]
    assert (need.parts, need.tasks) == (1000, 1001), "5,000 were asked for, more than Airflow maps over"
    assert need.core_s == pytest.approx(4e9 / 100e6 + 4e9 / 400e6) and need.serial_s == 0
    assert need.disk_bytes == 1_000_000 * (5 + 9) and need.read_bytes == 2e9
    assert need.memory_bytes == 100e6 + 8e6 + 5_000_000


def test_a_crawl_that_reads_what_it_discovers(tmp_path: Path) -> None:
    need = needs_of(tmp_path)["crawl"]  # 10,000 crawled, 80,000 discovered: 320 MB of text
    assert need.core_s == pytest.approx(10 + 320e6 / 100e6 + 320e6 / 400e6) and need.serial_s == 10
    crawler = 100e6 + 1_000_000 / 8 + 80_000 * 8 + 10_000 * 24
    assert need.memory_bytes == pytest.approx(crawler + 100e6 + 8e6 + 5_000_000)
    assert need.read_bytes == pytest.approx(160e6 + 10_000 * 16 + 200_000 * 4)
    assert need.disk_bytes == 80_000 * 12 + 80_000 * 9


def test_a_selection_that_looks_for_copies_of_heldout_pages(tmp_path: Path) -> None:
    need = needs_of(tmp_path)["select"]
    assert need.core_s == pytest.approx(0.01 + 10 + 2) and need.serial_s == pytest.approx(0.01 + 2)
    assert need.memory_bytes == pytest.approx(100e6 + 10_000 * (36 + 200) + 10_000 * 6000)
    assert need.read_bytes == pytest.approx(10_000 * 4000 * 0.5)
    plain = needs_of(tmp_path, heldout_copies="off")["select"]
    assert plain.core_s == pytest.approx(0.01) and plain.read_bytes == 0


def test_tokens_of_kept_and_of_heldout_pages(tmp_path: Path) -> None:
    found = needs_of(tmp_path)
    tokens = int(40e6 / 4.3)  # the stage's own estimate
    need = found["tokenize"]
    assert need.parts == 2 and need.core_s == pytest.approx(tokens / 1e6) and need.serial_s == pytest.approx(tokens / 1e7)
    assert need.disk_bytes == 2 * tokens and need.written_bytes == 4 * tokens and need.read_bytes == 20e6 + 4 * tokens
    assert found["heldout"].core_s == pytest.approx(40e6 / 4 / 1e6)


def test_training_and_evaluation(tmp_path: Path) -> None:
    found = needs_of(tmp_path)
    parameters = SIZES["toy"].parameters(512)
    assert (found["train"].gpu_s or 0) > 0 and found["train"].core_s == 0 and found["train"].read_bytes == 40_960_000 * 2
    # the held-out pages' 10 million tokens, twice the parameters each
    assert found["evaluate"].gpu_s == pytest.approx(2 * parameters * 10e6 / 1e12)


def test_a_page_is_scored_once_a_scorer(tmp_path: Path) -> None:
    needs = list(needs_of(tmp_path).values())
    alone = sum(need.core_s or 0 for need in needs)
    scored = 50 + 4  # of all pages, and of the 8% that the crawl discovers
    assert totals(needs)["core_s"] == pytest.approx(alone - scored + 50)
    assert totals(needs)["unknown"] == {}
    assert totals(needs)["tasks"] == 5 + 1001 + 1 + 1 + 3 + 3 + 1 + 1 + 3  # and scorer, tokenizer, report


def test_an_encoder_runs_on_gpus(tmp_path: Path) -> None:
    encoder: ScorerSource = Encoder(model=External(name="encoder", path="/nonexistent/encoder"))
    found = needs_of(tmp_path, scorer={"kind": "encoder", "source": encoder})
    # 4,000 bytes are 1,000 tokens, of which the model reads 512
    assert found["score"].gpu_s == pytest.approx(1_000_000 * 512 * 1.89e8 / 26.8e12)
    assert found["crawl"].gpu_s == pytest.approx(80_000 * 512 * 1.89e8 / 26.8e12)
    assert Machines(cores=2, gpus=4).hours(found["score"]) == pytest.approx((10 / 2 + (found["score"].gpu_s or 0) / 4) / 3600)


def test_what_was_never_measured_is_no_number(tmp_path: Path) -> None:
    plan = planned(tmp_path, scorer={"kind": "url", "source": UrlFeature()})
    needs = stage_needs(plan, parts={}, rates=rates_with({}))
    by_kind = {need.kind: need for need in needs}
    assert by_kind["score"].core_s is None and by_kind["crawl"].core_s is None and by_kind["crawl"].memory_bytes is None
    assert totals(needs)["unknown"]["core_s"] == ["quality.crawl", "score"]
    text = needs_text(plan, needs, Machines())
    assert "not known before, and in no sum: core_s of quality.crawl, score" in text and " ? " in text


def test_parts_too_short_for_airflow_are_named(tmp_path: Path) -> None:
    lines = advice(needs_of(tmp_path).values())
    assert [line.partition(" s of")[0] for line in lines] == LINES
    assert all(line.endswith("so at most 1 parts pay") for line in lines)
    long = Need(id="x", kind="score", parts=500, core_s=50_001.0, serial_s=0.0)
    assert advice([dataclasses.replace(need, gpu_s=gpu) for need, gpu in ((long, 0.0), (long, None))]) == []
    assert advice([dataclasses.replace(long, core_s=1.0, gpu_s=49_999.0)]) == []
    assert len(advice([dataclasses.replace(long, core_s=1.0, gpu_s=0.0)])) == 1


def test_the_grouping_rule() -> None:
    assert [grouping.grouped(n) for n in (0, 1, 7, 1000, 1001, 100_000)] == [1, 1, 7, 1000, 1000, 1000]
    assert [grouping.worth(s) for s in (0, 99, 250, 47_000, 1e9)] == [1, 1, 2, 470, 1000]
    assert grouping.SLOT_S_PER_TASK / grouping.LEAST_PART_S <= 0.05


def test_counts_of_a_corpus_that_is_not_at_hand(tmp_path: Path) -> None:
    plan = with_counts(planned(tmp_path), {"pages": "2e6", "text_bytes": "8000000000"})
    found = {need.kind: need for need in stage_needs(plan, parts={}, rates=rates_with(ROUND))}
    assert found["corpus"].core_s == 2000 and found["corpus"].disk_bytes == 2_000_000 * 20 + 80_000_000  # links as stated
    for given, words in (({"page": "1"}, "expected pages"), ({"pages": "-1"}, "above 0"), ({"pages": "many"}, "above 0")):
        with pytest.raises(ConfigError, match=words):
            with_counts(planned(tmp_path), given)


@pytest.fixture
def command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Result]:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)  # read from the environment at its import, maybe long ago

    def run(*arguments: str) -> Result:
        return CliRunner().invoke(cli, ["plan", "crawl_policies", "--root", str(tmp_path), *arguments], catch_exceptions=False)

    return run


def test_the_published_experiment_on_900_million_pages(command: Callable[..., Result]) -> None:
    facts = json.loads(command("--json", "--cores", "32", "--rate", "score_projected_bytes_per_s=64e6").output)
    stages = {row["id"]: row for row in facts["needs"]["stages"]}
    assert stages["corpus"]["tasks"] == 201 and stages["scores_dclm"]["tasks"] == 501 and len(stages) == facts["stages_to_do"]
    assert stages["corpus"]["core_s"] == pytest.approx(900_000_000 / 27_000)
    assert stages["scores_dclm"]["core_s"] == pytest.approx(6.4e12 / 64e6 + 6.4e12 / 279e6)
    assert stages["scores_dclm"]["hours"] == pytest.approx(stages["scores_dclm"]["core_s"] / 32 / 3600)
    models = [row for row in facts["needs"]["stages"] if row["kind"] == "train"]
    assert len(models) == 12 and sum(row["gpu_s"] for row in models) == pytest.approx(facts["gpu_hours"] * 3600)
    assert "Needs of each stage that is to do, with 32 cores and 8 GPUs" in facts["text"]


def test_options_that_cannot_be_meant_are_refused(command: Callable[..., Result]) -> None:
    for option, word in (
        ("--rate=warp=9", "there is no such rate"),
        ("--rate=packed_share=0", "above 0"),
        ("--count=dogs=3", "pages, text_bytes"),
    ):
        with pytest.raises(ConfigError, match=word):  # `main` makes exit code 2 of it
            command(*option.split("=", 1))


def test_every_rate_names_its_source() -> None:
    for name, rate in RATES.items():
        assert rate.value > 0 and rate.source.startswith(
            ("measured: benchmarks/", "measured: gzip", "measured once: ", "counted: ", "assumed: ")
        ), name


def test_measured_rates_are_those_of_the_performance_page() -> None:
    """A row of its tables, by its beginning -> the cells that the rates repeat; millions where the unit is MB."""
    rows = {
        line.partition("|")[2].strip(): line.split("|")[1:-1]
        for line in (Path(__file__).resolve().parents[2] / "docs" / "performance.md").read_text().splitlines()
        if line.startswith("| ")
    }

    def cell(row: str, column: int) -> float:
        (found,) = (cells for text, cells in rows.items() if text.startswith(row))
        return float(found[column].strip().replace(",", ""))

    for route in ("library", "exact", "projected"):
        assert RATES[f"score_{route}_bytes_per_s"].value == cell(f"`{route}`", 3) * 1e6
    assert RATES["corpus_copied_pages_per_s"].value == cell("Parquet (3,769 pages of docweb)", 1)
    assert RATES["tokens_per_s"].value == cell("the tokenize stage", 1)


def test_a_plan_loads_nothing_heavy() -> None:
    code = "import sys, craw4llm.plan_needs; print(sorted({'torch', 'numpy', 'pyarrow'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout == "[]\n"


def test_the_record_is_plain_json(tmp_path: Path) -> None:
    plan = planned(tmp_path)
    needs = stage_needs(plan, parts={}, rates=rates_with({}))
    record = json.loads(json.dumps(needs_record(plan, needs, Machines()), allow_nan=False))
    assert record["longest_chain_hours"] > 0 and {row["id"] for row in record["stages"]} == {n.id for n in plan.nodes}


def test_a_source_at_hand_is_reckoned_by_its_records(tmp_path: Path) -> None:
    @experiment()
    def small(replicate: int = 0) -> Arms:
        """A generated web."""
        web = Stage(CorpusConfig(source=SyntheticWeb(pages=8400)))
        rater = Stage(ScorerConfig(**FASTTEXT))
        trace = Stage(CrawlConfig(policy="random", budget_pages=1000), "random/crawl", corpus=web)
        scores = Stage(ScoreConfig(), corpus=web, scorer=rater)
        bpe = Stage(TokenizerConfig(), corpus=web)
        kept = Stage(SelectConfig(pool="crawled"), corpus=web, crawl=trace)
        heldout = Stage(TokenizeConfig(pages="heldout", sample_tokens=257), "heldout", corpus=web, tokenizer=bpe)
        tokens = Stage(TokenizeConfig(sample_tokens=257), corpus=web, tokenizer=bpe, selection=kept)
        config = TrainConfig(size="toy", vocab_size=4096, token_budget=40_960, batch_tokens=8 * SIZES["toy"].context, precision="fp32")
        model = Stage(config, tokens=tokens, heldout=heldout)
        arms = {"random": Stage(EvaluateConfig(suite="none"), checkpoint=model, tokenizer=bpe, heldout=heldout)}
        reported = {"corpus": web, "scores": scores}
        return Arms(arms=arms, reported=reported, report=ReportConfig(title="small", question="How much?", reference="random"))

    plan = make_plan(expand(small), Execution(root=tmp_path), absent_inputs=True)
    found = {need.kind: need for need in stage_needs(plan, parts={}, rates=rates_with({}))}
    assert found["corpus"].core_s == 8400 / RATES["corpus_copied_pages_per_s"].value
    assert found["corpus"].disk_bytes is None  # its texts are copied, their bytes not known before
    assert found["score"].core_s is None and found["score"].disk_bytes == 8400 * 14
    assert found["crawl"].core_s == pytest.approx(1000 / 105_000)
    with pytest.raises(ConfigError, match="at hand"):
        with_counts(plan, {"pages": "5"})
