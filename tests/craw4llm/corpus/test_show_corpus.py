from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

from craw4llm.__main__ import cli
from craw4llm.artifact import Artifact
from craw4llm.configs import CorpusConfig
from craw4llm.corpus import page_columns, show
from craw4llm.corpus.reader import Corpus
from craw4llm.corpus.show import describe, reachable
from craw4llm.fingerprint import External
from craw4llm.stage import Stage

WriteParquet = Callable[..., Path]
Build = Callable[[Stage], Artifact]


@pytest.fixture
def corpus(parquet: WriteParquet, build: Build) -> Corpus:
    """A chain 0 -> 1 -> ... -> 9, an island 10 <-> 11, a dead link, rejects; one page is asked not to be indexed."""
    base = "https://docs.example.co.uk"
    rows = [
        (f"{base}/{k:02}", f"text of page {k}", [f"/{k + 1:02}"] if k < 9 else ["/gone"] if k == 9 else [f"/{21 - k}"]) for k in range(12)
    ]
    rows += [("nonsense", "x", []), ("https://other.example/", None, [])]
    extra = {
        "language": ["en"] * 8 + [None] * 4 + ["xx", "fr"],
        "signals": [0] * 7 + [1] + [0] * 6,
        "doc_id": [f"d{k}" for k in range(14)],
        "canonical": [None] * 5 + [f"{base}/00"] + [None] * 8,
        "anchors": [[f"anchor {k}"] if k < 12 else [] for k in range(14)],
        "link_flags": [[1] if k < 12 else [] for k in range(14)],
    }
    path = parquet(rows, extra=extra)
    return Corpus(build(Stage(CorpusConfig(source=External(name="corpus", path=str(path)), heldout_fraction=0.0))))


def test_what_a_person_wants_to_know_first(corpus: Corpus, tmp_path: Path) -> None:
    seeds = tmp_path / "seeds.txt"
    seeds.write_text("https://docs.example.co.uk/03\n")
    text = describe(corpus, seeds)
    for wanted in (
        "14 read = 13 pages + 1 rejects + 0 skipped",
        "bad_url: the URL cannot be parsed",
        "2, 2 registered domains; largest: docs.example.co.uk 92.3%, other.example 7.7%",
        "languages  en 61.5%, not known 30.8%, fr 7.7%",
        "1 pages without text",
        "11 to pages, 1 dangling to 1 URLs that the corpus has not",
        "out-links a page  min 0, 10% 1, median 1, 90% 1, 99% 1, max 1; none: 7.7%",
        "in-links a page   min 0, 10% 0, median 1, 90% 1, 99% 1, max 1; none: 15.4%",
        "flags             body 12 (100.0%)",
        "7 pages (53.8% of those not held out) from the seeds of",
        "at most 6 links away",
        "owners ask noindex 1 (7.7%)",
        "1 pages name a canonical URL, 1 of them another than their own",
    ):
        assert wanted in text
    assert "from 12 drawn seeds" in describe(corpus)


def test_reachable_does_not_pass_held_out_pages(corpus: Corpus) -> None:
    assert reachable(corpus, np.array([0], dtype=np.uint32)) == (10, 9)
    corpus.__dict__["heldout"] = np.array([4], dtype=np.uint32)
    assert reachable(corpus, np.array([0], dtype=np.uint32)) == (4, 3)


@pytest.mark.parametrize("block", [7, 1 << 22])
def test_percentiles_are_those_of_numpy(block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(show, "_BLOCK", block)
    rng = np.random.default_rng(0)
    for values in (np.array([5]), np.arange(10), rng.integers(0, 70_000, 101), rng.integers(0, 2**32, 50), np.zeros(3, dtype=np.int64)):
        wanted = (0, 10, 50, 90, 99, 100)
        assert show.percentiles(values.astype(np.uint32), wanted) == pytest.approx(np.percentile(values, wanted).tolist())


def test_a_large_corpus_is_described_alike(corpus: Corpus, monkeypatch: pytest.MonkeyPatch) -> None:
    """With every column as a mapped file, and blocks of three rows."""
    small = describe(corpus).splitlines()
    for module, name, value in ((page_columns, "MAPPED_FROM", 0), (show, "_BLOCK", 3), (show, "_BLOCK_PAGES", 3), (show, "MAPPED_FROM", 0)):
        monkeypatch.setattr(module, name, value)
    large = describe(Corpus(corpus.artifact)).splitlines()
    assert [line for line in large if not line.startswith("reachable")] == [line for line in small if not line.startswith("reachable")]
    assert "12 pages" in next(line for line in large if line.startswith("reachable"))
    kept = {path.name for path in (corpus.artifact.root / "memo" / f"columns-{corpus.artifact.fingerprint}").iterdir()}
    assert {"n_bytes.npy", "host.npy", "host.arrow", "pages.url.arrow"} <= kept
    assert not any(name.startswith(".") for name in kept)


def test_commands(corpus: Corpus) -> None:
    root = corpus.artifact.root
    for name in (corpus.artifact.fingerprint, str(corpus.artifact.path)):
        shown = CliRunner().invoke(cli, ["show", "corpus", name, "--root", str(root)], catch_exceptions=False).output
        assert "12 drawn seeds" in shown
    assert "is no corpus" in str(CliRunner().invoke(cli, ["show", "corpus", "tiny", "--root", str(root)]).exception)
    page = int(corpus.find(["https://docs.example.co.uk/05"])[0])
    for name in ("https://docs.example.co.uk/05", str(page), "d5"):
        shown = CliRunner().invoke(cli, ["show", "page", name, "--root", str(root)], catch_exceptions=False).output
        for wanted in (
            "source web.parquet, id d5, language en, canonical https://docs.example.co.uk/00",
            "text: text of page 5",
            '6  https://docs.example.co.uk/06  "anchor 5"  [body]',
            '4  https://docs.example.co.uk/04  "anchor 4"  [body]',
            "1 links in",
        ):
            assert wanted in shown
    shown = CliRunner().invoke(cli, ["show", "page", "9", "--root", str(root)], catch_exceptions=False).output
    assert "dead  https://docs.example.co.uk/gone" in shown


def test_a_corpus_from_the_command_line(parquet: WriteParquet, tmp_path: Path) -> None:
    rows = [(f"https://a.example/?b={k}&utm_source=x&a=1", "text " * 60, ["/gone"]) for k in range(5)]
    path = parquet(rows, extra={"signals": [0, 1, 0, 64, 0]})
    base = ["corpus", str(path), "--root", str(tmp_path / "root"), "--workers", "1", "--memory", "100M"]
    options = ["--sort-query", "--drop-tracking", "--obey", "no_train", "--obey", "noindex", "--dangling-links", "outside"]
    part = CliRunner().invoke(cli, [*base, *options, "--part", "1/1"], catch_exceptions=False)
    assert "part 1 of 1: 5 records prepared" in part.output
    shown = CliRunner().invoke(cli, [*base, *options], catch_exceptions=False).output
    assert "5 read = 3 pages + 0 rejects + 2 skipped" in shown
    assert "owner asks noindex" in shown
    assert "https://a.example/?a=1&b=0" in shown
    assert "3 dropped as outside" in shown
    for arguments, message in (
        (["--column", "url"], "expected NAME=FIELD"),
        (["--max-reject-share", "2"], "expected at least 0 and under 1"),
    ):
        assert message in str(CliRunner().invoke(cli, [*base, *arguments]).exception)
