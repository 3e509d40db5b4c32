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


@pytest.mark.parametrize(
    "fields",
    [{"hosts": 0}, {"hosts": 5000}, {"homophily": 1.5}, {"dead_share": -0.1}, {"mean_links": -1.0}, {"copy_share": 2.0}, {"traps": -1}],
)
def test_values_that_cannot_be_meant(fields: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match=next(iter(fields))):
        planted_quality(SyntheticWeb(**fields))  # type: ignore[arg-type]


def test_traps_navigation_and_link_texts(build: Build) -> None:
    config = SyntheticWeb(pages=1500, hosts=30, seed=3, traps=2, trap_pages=24, navigation_links=4, link_texts=True)
    corpus = Corpus(build(Stage(CorpusConfig(source=config))))
    quality = planted_quality(config)
    assert corpus.n_pages == len(quality) == 1548
    months = [k for k, url in enumerate(corpus.urls.to_pylist()) if url.startswith("https://trap-")]
    assert [corpus.url(months[0]), corpus.url(months[-1])] == [
        "https://trap-000.example/calendar/2000/01",
        "https://trap-001.example/calendar/2001/12",
    ]
    assert (quality[months] == 0).all()
    _, targets = corpus.outlinks([months[3], months[23]])
    assert [corpus.url(t)[-7:] for t in targets] == ["2000/03", "2000/05", "2001/11", "2002/01"]
    assert targets[-1] >= corpus.n_pages  # the calendar goes on where the corpus ends
    pages, targets = links_of(corpus)
    from_outside = ~np.isin(pages, months) & np.isin(targets, months)
    assert 10 < from_outside.sum() < 60
    flags = corpus.link_flags(np.arange(corpus.n_pages))
    anchors = corpus.anchors(np.arange(corpus.n_pages))
    assert flags is not None and anchors is not None
    assert (flags == 2).sum() > 3 * 1500 > 0  # navigation and hubs are boilerplate
    selling = np.array([any(word in (anchor or "") for word in ("cheap", "free", "best", "hot")) for anchor in anchors])
    to_page = targets < corpus.n_pages
    assert quality[targets[to_page & selling]].mean() < quality[targets[to_page & ~selling]].mean() - 0.05
    _, first = corpus.outlinks([0])
    assert sum(corpus.host_ids[t] == corpus.host_ids[0] for t in first if t < corpus.n_pages) >= 3


def test_shares_of_empty_and_copied_pages_and_of_hubs(build: Build) -> None:
    config = SyntheticWeb(pages=1000, hosts=20, empty_share=0.3, copy_share=0.0, host_skew=0.0, hub_share=0.0)
    corpus = Corpus(build(Stage(CorpusConfig(source=config))))
    assert 250 < corpus.artifact.count("empty_pages") < 350
    texts = [text for text in corpus.texts(range(1000)) if text]
    assert len({text[:120] for text in texts}) == len(texts)
    assert np.bincount(corpus.host_ids).max() < 90


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
