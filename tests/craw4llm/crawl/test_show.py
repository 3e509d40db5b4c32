"""What `show crawl` and `diff` print."""

import pytest
from click.testing import CliRunner

from craw4llm.__main__ import cli
from craw4llm.configs import CorpusConfig, CrawlConfig, Length, ScorerConfig, SyntheticWeb
from craw4llm.crawl.show import compare, describe, open_crawl
from craw4llm.crawl.trace import Trace
from craw4llm.errors import ArtifactError
from craw4llm.stage import Stage

WEB = Stage(CorpusConfig(source=SyntheticWeb(pages=300, hosts=10, dead_share=0.1)))
SCORER = Stage(ScorerConfig(kind="length", source=Length()))


@pytest.fixture
def crawl(build):
    def make(policy: str, pages: int = 100, web: Stage = WEB, **fields) -> Trace:
        inputs = {"scorer": SCORER} if policy == "quality" else {}
        return Trace(
            build(Stage(CrawlConfig(policy=policy, budget_pages=pages, batch_pages=2, seed_count=4, **fields), corpus=web, **inputs))
        )

    return make


def test_describe(crawl):
    trace = crawl("quality")
    text = describe(trace)
    lines = text.splitlines()
    assert "policy quality" in lines[0] and "stop: budget" in lines[0]
    assert f"crawled 100 pages, {trace.n_fetches:,} fetches" in lines[1]
    table = [line.split() for line in lines if line.strip()[:1].isdigit() and len(line.split()) == 9]
    assert len(table) == 20  # of 49 iterations
    assert (table[0][0], table[-1][0]) == ("0", "48")
    assert (table[0][1], table[-1][1], table[-1][2]) == ("4", "100", f"{trace.n_fetches:,}")
    row = trace.iterations.to_pylist()[-1]
    found, taken = row["mean_score_discovered"], row["mean_score_crawled"]
    assert table[-1][-2:] == ["-" if found is None else f"{found:.4f}", f"{taken:.4f}"]
    assert text.count("o") > 30 and "mean score of the pages crawled" in text
    assert "(no scores to plot)" in describe(crawl("random"))


def test_compare(crawl):
    """The same crawl, longer: alike; another policy: overlap and hosts by rank, counted here by sets."""
    long, short, other = crawl("quality"), crawl("quality", 60), crawl("random")
    assert "crawled alike in all 60 pages that both crawled; the other goes on" in compare(long, short)
    assert "budget_pages: 100 and 60" in compare(long, short)
    text = compare(long, other)
    first = next(k for k in range(100) if long.crawled[k] != other.crawled[k])
    assert first >= 4 and f"crawled alike up to rank {first};" in text
    row = next(line.split() for line in text.splitlines() if line.strip().startswith("30 "))
    common = len(set(long.crawled[:30].tolist()) & set(other.crawled[:30].tolist()))
    assert row[1] == str(common) and row[2] == f"{common / 30:.1%}"
    assert row[-1] == "-" and float(row[-2]) > 0
    both = len(set(long.fetched.tolist()) & set(other.fetched.tolist()))
    assert text.splitlines()[-1].endswith(f"both {both}")
    elsewhere = Stage(CorpusConfig(source=SyntheticWeb(pages=200, hosts=10)))
    with pytest.raises(ArtifactError, match="of different corpora"):
        compare(long, crawl("random", 20, elsewhere))


def test_the_command_line(crawl, execution, tmp_path):
    one, other = crawl("quality"), crawl("random")
    root = ["--root", str(execution.root)]
    shown = CliRunner().invoke(cli, ["show", "crawl", one.artifact.fingerprint[:8], "--svg", str(tmp_path / "plot.svg"), *root])
    assert shown.exit_code == 0 and shown.output.strip() == describe(one).strip()
    assert "<svg" in (tmp_path / "plot.svg").read_text()
    compared = CliRunner().invoke(cli, ["diff", one.artifact.fingerprint, other.artifact.fingerprint, *root])
    assert compared.exit_code == 0 and compared.output.strip() == compare(one, other).strip()
    with pytest.raises(ArtifactError, match=r"no finished crawl in .* begins with 'zzz'"):
        open_crawl(execution.root, "zzz")
    with pytest.raises(ArtifactError, match="2 crawls in"):
        open_crawl(execution.root, "")
