import hashlib
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from craw4llm.artifact import Artifact
from craw4llm.configs import CorpusConfig, SyntheticText, SyntheticWeb
from craw4llm.corpus.reader import Corpus
from craw4llm.corpus.synthetic import planted_quality, training_lines
from craw4llm.errors import ConfigError
from craw4llm.stage import Stage

Build = Callable[[Stage], Artifact]
WEB = SyntheticWeb(pages=1500, hosts=30, seed=3)


@pytest.fixture(scope="module")
def web(shared_build: Build) -> Corpus:
    return Corpus(shared_build(Stage(CorpusConfig(source=WEB))))


def links_of(corpus: Corpus) -> tuple[np.ndarray, np.ndarray]:
    offsets, targets = corpus.outlinks(np.arange(corpus.n_pages))
    return np.repeat(np.arange(corpus.n_pages), np.diff(offsets)), targets.astype(np.int64)


def test_every_page_is_there(web: Corpus) -> None:
    assert web.n_pages == 1500
    assert len(web.hosts) == 30
    assert web.artifact.count("rejects") == 0
    assert "synthetic web" in web.artifact.manifest["notes"]["origin"]


def test_links_follow_quality_and_indegree_does_not(web: Corpus) -> None:
    quality = planted_quality(WEB)
    assert quality.shape == (1500,) and quality.min() >= 0 and quality.max() <= 1
    pages, targets = links_of(web)
    live = targets < web.n_pages
    assert np.corrcoef(quality[pages[live]], quality[targets[live]])[0, 1] > 0.5
    assert abs(np.corrcoef(quality, web.indegree[: web.n_pages])[0, 1]) < 0.1
    homes = [k for k, url in enumerate(web.urls.to_pylist()) if url.count("/") == 3]
    assert len(homes) == 30
    assert web.indegree[homes].mean() > 3 * web.indegree[: web.n_pages].mean()  # boilerplate hubs


def test_homophily_is_what_makes_links_follow_quality(build: Build) -> None:
    config = SyntheticWeb(pages=1500, hosts=30, seed=3, homophily=0.0, dead_share=0.0)
    corpus = Corpus(build(Stage(CorpusConfig(source=config))))
    quality = planted_quality(config)
    pages, targets = links_of(corpus)
    assert np.corrcoef(quality[pages], quality[targets])[0, 1] < 0.25  # what is left: pages link to their own host's home page
    assert corpus.artifact.count("dead_links") == 0


def test_shares(web: Corpus) -> None:
    count = web.artifact.count
    assert count("dead_link_uses") / (count("links") + count("dead_link_uses")) == pytest.approx(0.075, abs=0.015)
    assert count("empty_pages") / 1500 == pytest.approx(0.02, abs=0.012)
    words = np.array([len(text.split()) for text in web.texts(np.arange(1500))])
    assert 180 < np.median(words) < 350
    shingles: dict[str, int] = {}
    for text in web.texts(np.arange(1500)):
        shingles[text[:120]] = shingles.get(text[:120], 0) + (text != "")
    assert 10 < sum(n - 1 for n in shingles.values() if n > 1) < 60  # near-duplicates


def test_words_reveal_quality(web: Corpus) -> None:
    """A count of a few telling words, set by hand, ranks pages nearly as the planted quality does."""
    quality = planted_quality(WEB)
    texts = [text.lower() for text in web.texts(np.arange(1500))]
    good = np.array([sum(text.count(w) for w in ("theorem", "proof", "evidence", "therefore")) for text in texts])
    bad = np.array([sum(text.count(w) for w in ("coupon", "checkout", "subscribe", "click")) for text in texts])
    known = good + bad > 5
    assert known.mean() > 0.6
    share = good[known] / (good + bad)[known]
    assert np.corrcoef(share, quality[known])[0, 1] > 0.8


def test_seed_changes_the_web() -> None:
    other = SyntheticWeb(pages=1500, hosts=30, seed=4)
    assert not np.array_equal(planted_quality(WEB), planted_quality(other))
    assert np.array_equal(planted_quality(WEB), planted_quality(SyntheticWeb(pages=1500, hosts=30, seed=3)))


def test_training_lines() -> None:
    lines = training_lines(SyntheticText(lines=100, seed=1))
    comments = [line for line in lines if line.startswith("# ")]
    assert lines[: len(comments)] == comments and "origin" in comments[0]
    labelled = lines[len(comments) :]
    assert [line.split(" ", 1)[0] for line in labelled] == ["__label__hq", "__label__cc"] * 50
    assert all("\n" not in line and len(line.split()) > 50 for line in labelled)
    assert len(set(labelled)) == 100
    with pytest.raises(ConfigError, match="lines is 1"):
        training_lines(SyntheticText(lines=1))


@pytest.mark.parametrize("fields", [{"hosts": 0}, {"hosts": 5000}, {"homophily": 1.5}, {"dead_share": -0.1}, {"mean_links": -1.0}])
def test_values_that_cannot_be_meant(fields: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match=next(iter(fields))):
        planted_quality(SyntheticWeb(**fields))  # type: ignore[arg-type]


def test_same_bytes_for_any_hash_seed(tmp_path: Path, digest: Callable[[Path], str]) -> None:
    code = (
        "import sys; from pathlib import Path; from craw4llm.configs import *; from craw4llm.execution import Execution\n"
        "from craw4llm.corpus.stage import run; from craw4llm.corpus.synthetic import training_lines\n"
        "out = Path(sys.argv[1]); out.mkdir()\n"
        "run(CorpusConfig(source=SyntheticWeb(pages=1200, hosts=20)), {}, out, Execution(workers=1, report=print))\n"
        "(out / 'lines').write_text('\\n'.join(training_lines(SyntheticText(lines=50))))\n"
    )
    digests = []
    for seed in ("0", "1"):
        out = tmp_path / seed
        subprocess.run([sys.executable, "-c", code, str(out)], check=True, env={**os.environ, "PYTHONHASHSEED": seed})
        digests.append(digest(out))
    assert digests[0] == digests[1] != hashlib.sha256().hexdigest()
