from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

from craw4llm.__main__ import cli
from craw4llm.artifact import Artifact
from craw4llm.configs import CorpusConfig
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
    corpus.__dict__["heldout_mask"] = np.arange(corpus.n_targets) == 4
    assert reachable(corpus, np.array([0], dtype=np.uint32)) == (4, 3)


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
