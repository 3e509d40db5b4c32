"""Lengths, URL features, graph scores, ensembles, encoders and scorers of other packages."""

import dataclasses
import importlib.metadata
import types
from collections import deque

import numpy as np
import pytest

from craw4llm.configs import (
    CorpusConfig,
    Encoder,
    Ensemble,
    EntryPoint,
    GraphMeasure,
    Length,
    ScoreConfig,
    ScorerConfig,
    SyntheticWeb,
    TokenizerConfig,
    UrlFeature,
)
from craw4llm.corpus.reader import Corpus
from craw4llm.errors import ArtifactError, ConfigError, InputError, StageError
from craw4llm.fingerprint import External
from craw4llm.scoring.graph import harmonic, links_of, pagerank
from craw4llm.scoring.memo import PageScores
from craw4llm.scoring.scorer import EMPTY, NOT_IN_TABLE, SCORED, open_scorer
from craw4llm.stage import Stage


def scores_of(build, stage: Stage, texts=(), urls=()) -> list[float]:
    return open_scorer(build(stage)).score(texts, urls)[0].tolist()


@pytest.mark.parametrize(("unit", "lengths"), [("chars", [5, 11, 1]), ("bytes", [5, 13, 3]), ("words", [1, 3, 1])])
def test_lengths(build, unit, lengths):
    stage = Stage(ScorerConfig(kind="length", source=Length(unit=unit)))
    texts = ["three", "a naïve  gö", "世"]
    assert scores_of(build, stage, texts) == lengths
    scores, reasons = open_scorer(build(stage)).score([" \n", "", "x"], ())
    assert np.isnan(scores).tolist() == [True, True, False] and reasons.tolist() == [EMPTY, EMPTY, SCORED]


def test_length_in_tokens(build, make_web):
    web = make_web([(f"https://w.example/{k}", "some text to train on " * 30, []) for k in range(5)])
    tokenizer = Stage(TokenizerConfig(vocab_size=300), corpus=web)
    stage = Stage(ScorerConfig(kind="length", source=Length(unit="tokens")), tokenizer=tokenizer)
    one, two, unknown = scores_of(build, stage, ["some text", "some text some text", "zq"])
    assert one < two <= 2 * one + 1 and unknown == 2
    with pytest.raises(ConfigError, match=r"takes the inputs \['tokenizer'\]; given are \[\]"):
        Stage(ScorerConfig(kind="length", source=Length(unit="tokens")))


@pytest.mark.parametrize(("feature", "values"), [("length", [31, 20]), ("depth", [2, 0]), ("digits", [3, 2]), ("parameters", [2, 0])])
def test_url_features(build, feature, values):
    stage = Stage(ScorerConfig(kind="url", source=UrlFeature(feature=feature)))
    assert scores_of(build, stage, (), ["https://a.example/x/y1?p=12&q=&", "https://bb22.example"]) == values


@pytest.fixture(scope="module")
def graph(shared_build):
    web = Stage(CorpusConfig(source=SyntheticWeb(pages=300, hosts=9, mean_links=5, dead_share=0.2, seed=2), heldout_fraction=0.05))
    corpus = Corpus(shared_build(web))
    matrix = np.zeros((corpus.n_targets, corpus.n_targets))
    for page in range(corpus.n_pages):
        matrix[page, corpus.outlinks([page])[1]] = 1
    return web, corpus, matrix


def test_pagerank_solves_its_equation(graph, monkeypatch):
    """Against the linear system, dead links and pages without links spread evenly; the stated bound on the distance holds."""
    _, corpus, matrix = graph
    n, d = corpus.n_targets, 0.85
    degree = matrix.sum(axis=1)
    assert (degree == 0).sum() > 20
    step = np.where(degree[:, None] > 0, matrix / np.maximum(degree, 1)[:, None], 1 / n)
    exact = np.linalg.solve(np.eye(n) - d * step.T, np.full(n, (1 - d) / n))
    for tolerance in (1e-3, 1e-6, 1e-10):
        rank, about = pagerank(links_of(corpus), n, damping=d, tolerance=tolerance)
        assert about["change"] < tolerance
        assert np.abs(rank - exact).sum() < tolerance * d / (1 - d)
    assert rank.sum() == pytest.approx(1)
    blocks, _ = pagerank(links_of(corpus, block_links=7), n, damping=d, tolerance=1e-10)
    np.testing.assert_array_equal(blocks, rank)
    with monkeypatch.context() as patched:
        patched.setattr("craw4llm.scoring.mapped.MAPPED", 0)
        mapped, _ = pagerank(links_of(corpus), n, damping=d, tolerance=1e-10)
    assert isinstance(mapped, np.memmap)
    np.testing.assert_array_equal(mapped, rank)
    monkeypatch.setattr("craw4llm.scoring.graph._MOST_ITERATIONS", 5)
    with pytest.raises(StageError, match="did not come under the tolerance 1e-06 in 5 iterations"):
        pagerank(links_of(corpus), n, damping=d, tolerance=1e-6)


def test_harmonic_centrality(graph):
    """Against breadth-first searches: within the counters' error, and nearly exact with many registers."""
    _, corpus, matrix = graph
    n = corpus.n_targets
    into = [np.flatnonzero(matrix[:, k]).tolist() for k in range(n)]
    exact = np.zeros(n)
    for node in range(n):
        distance, queue = {node: 0}, deque([node])
        while queue:
            here = queue.popleft()
            for before in into[here]:
                if before not in distance:
                    distance[before] = distance[here] + 1
                    queue.append(before)
        exact[node] = sum(1 / step for step in distance.values() if step)
    assert exact.max() > 50
    fine, _ = harmonic(links_of(corpus), n, registers=1 << 14)
    np.testing.assert_allclose(fine, exact, rtol=0.02, atol=0.1)
    coarse, _ = harmonic(links_of(corpus), n, registers=64)
    error = np.abs(coarse - exact) / np.maximum(exact, 1)
    assert error.mean() < 1.04 / 8 and error.max() < 5 * 1.04 / 8
    np.testing.assert_array_equal(harmonic(links_of(corpus, block_links=5), n, registers=64)[0], coarse)


@pytest.mark.parametrize("measure", ["indegree", "pagerank", "harmonic"])
def test_graph_scores_belong_to_their_corpus(graph, shared_build, execution, make_web, build, measure):
    web, corpus, matrix = graph
    scorer = Stage(ScorerConfig(kind=measure, source=GraphMeasure()), corpus=web)
    scores = np.load(shared_build(Stage(ScoreConfig(), corpus=web, scorer=scorer)).file("scores.npy"))
    assert len(scores) == corpus.n_pages and (scores >= 0).all()
    if measure == "indegree":
        np.testing.assert_array_equal(scores, matrix.sum(axis=0)[: corpus.n_pages])
    other = make_web([("https://w.example/", "text", [])])
    with PageScores(build(other), shared_build(scorer), execution) as elsewhere, pytest.raises(ArtifactError, match="both the same corpus"):
        elsewhere.scores([0])
    with pytest.raises(ConfigError, match=r"takes the inputs \['corpus'\]"):
        Stage(ScorerConfig(kind=measure, source=GraphMeasure()))


def test_ensemble(build, make_web, make_table):
    """0.5 * depth (as it is) + 2 * table: by hand; a page that one member does not score has none, with that member's reason."""
    urls = [f"https://w.example{path}" for path in ("/", "/a", "/a/b", "/a/b/c")]
    web = make_web([(url, "text", []) for url in urls])
    members = {
        "depth": Stage(ScorerConfig(kind="url", source=UrlFeature())),
        "table": make_table(dict(zip(urls[:3], (0.5, 0.25, 1), strict=True))),
    }
    weights = (("depth", 0.5), ("table", 2.0))

    def run(**fields):
        inputs = dict(members)
        if fields.get("normalise", "none") != "none" and "constants" not in fields:
            inputs["corpus"] = web
        scorer = Stage(ScorerConfig(kind="ensemble", source=Ensemble(weights=weights, **fields)), **inputs)
        artifact = build(Stage(ScoreConfig(), corpus=web, scorer=scorer))
        return np.load(artifact.file("scores.npy")), np.load(artifact.file("reasons.npy")).tolist()

    depth, table = np.array([0, 1, 2, 3.0]), np.array([0.5, 0.25, 1, np.nan])
    scores, reasons = run()
    np.testing.assert_allclose(scores, 0.5 * depth + 2 * table, rtol=1e-6)
    assert reasons == [SCORED, SCORED, SCORED, NOT_IN_TABLE]
    scores, _ = run(normalise="zscore", constants=(("depth", 1.0, 2.0), ("table", 0.5, 0.1)))
    np.testing.assert_allclose(scores, 0.5 * (depth - 1) / 2 + 2 * (table - 0.5) / 0.1, rtol=1e-6)
    scores, _ = run(normalise="minmax", constants=(("depth", 1.0, 2.0), ("table", 0.5, 0.7)))
    np.testing.assert_allclose(scores, 0.5 * (depth - 1) + 2 * (table - 0.5) / 0.2, rtol=1e-6)
    scores, _ = run(normalise="zscore")
    known = table[:3]
    np.testing.assert_allclose(scores[:3], 0.5 * (depth[:3] - 1.5) / depth.std() + 2 * (known - known.mean()) / known.std(), rtol=1e-5)
    scores, _ = run(normalise="minmax", fit_pages=4)
    np.testing.assert_allclose(scores[:3], 0.5 * depth[:3] / 3 + 2 * (known - 0.25) / 0.75, rtol=1e-6)


def test_ensembles_that_are_refused(build, make_web):
    with pytest.raises(ConfigError, match="weights of one scorer or more"):
        ScorerConfig(kind="ensemble", source=Ensemble(weights=()))
    with pytest.raises(ConfigError, match="constants for every weight"):
        ScorerConfig(kind="ensemble", source=Ensemble(weights=(("a", 1.0),), normalise="zscore", constants=(("b", 0.0, 1.0),)))
    with pytest.raises(ConfigError, match="a deviation above 0"):
        ScorerConfig(kind="ensemble", source=Ensemble(weights=(("a", 1.0),), normalise="zscore", constants=(("a", 0.0, 0.0),)))
    web = make_web([(f"https://w.example/{k}", "text", []) for k in range(3)])
    depth = Stage(ScorerConfig(kind="url", source=UrlFeature()))
    config = ScorerConfig(kind="ensemble", source=Ensemble(weights=(("depth", 1.0),), normalise="minmax"))
    with pytest.raises(InputError, match="'depth' has one and the same score"):
        build(Stage(config, depth=depth, corpus=web))


def test_an_ensemble_in_worker_processes(build, make_web, execution):
    """Text and URL members together; two workers give the numbers of one."""
    web = build(make_web([(f"https://w.example/{'x/' * (k % 5)}{k}", "word " * (1 + k % 13), []) for k in range(300)]))
    members = {
        "words": Stage(ScorerConfig(kind="length", source=Length(unit="words"))),
        "url": Stage(ScorerConfig(kind="url", source=UrlFeature())),
    }
    scorer = build(Stage(ScorerConfig(kind="ensemble", source=Ensemble(weights=(("words", 0.3), ("url", 0.7)))), **members))
    with PageScores(web, scorer, execution) as alone:
        expected = alone.scores(np.arange(300))
    assert len(np.unique(expected)) > 30
    two = dataclasses.replace(execution, root=execution.root, workers=2)
    for segment in execution.memo.rglob("*.scores"):
        segment.unlink()
    with PageScores(web, scorer, two, pool_after=1) as together:
        np.testing.assert_array_equal(together.scores(np.arange(300)), expected)
        assert together._pool is not None


@pytest.fixture(scope="module")
def tiny_encoder(tmp_path_factory):
    """A random BERT of two layers with one output, and a word-piece vocabulary of letters."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    folder = tmp_path_factory.mktemp("encoder")
    letters = [*"abcdefghijklmnopqrstuvwxyz", *(f"##{c}" for c in "abcdefghijklmnopqrstuvwxyz")]
    (folder / "vocab.txt").write_text("\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *letters]) + "\n")
    transformers.BertTokenizerFast(vocab=str(folder / "vocab.txt")).save_pretrained(folder)
    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=57,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=64,
        max_position_embeddings=128,
        num_labels=1,
        initializer_range=0.5,
    )
    transformers.BertForSequenceClassification(config).save_pretrained(folder)
    return External(name="encoder", path=str(folder))


def test_encoder(build, tiny_encoder):
    """The model's own output for each page alone, whatever it is scored with; empty pages have no score; long pages are cut."""
    import torch
    import transformers

    stage = Stage(ScorerConfig(kind="encoder", source=Encoder(model=tiny_encoder, max_tokens=100, batch_rows=4, pad_to=16)))
    scorer = open_scorer(build(stage))
    rng = np.random.default_rng(0)
    texts = [" ".join("".join(rng.choice(list("abcdef"), 4)) for _ in range(n)) for n in rng.integers(1, 40, 30)] + ["", " \n"]
    scores, reasons = scorer.score(texts, ())
    assert reasons.tolist() == [SCORED] * 30 + [EMPTY] * 2 and np.isnan(scores[30:]).all()
    assert len(np.unique(scores[:30])) == 30
    order = rng.permutation(32)
    np.testing.assert_array_equal(scorer.score([texts[k] for k in order], ())[0], scores[order])
    np.testing.assert_array_equal([scorer.score([text], ())[0][0] for text in texts], scores)
    tokenizer = transformers.AutoTokenizer.from_pretrained(tiny_encoder.path)
    model = transformers.AutoModelForSequenceClassification.from_pretrained(tiny_encoder.path).eval()
    with torch.no_grad():
        expected = [model(**tokenizer(t, truncation=True, max_length=100, return_tensors="pt")).logits.item() for t in texts[:30]]
    np.testing.assert_allclose(scores[:30], expected, rtol=0, atol=1e-5)


def test_encoders_that_are_refused(build, tiny_encoder, tmp_path):
    def refused(match, error=InputError, **fields):
        with pytest.raises(error, match=match):
            build(Stage(ScorerConfig(kind="encoder", source=Encoder(**{"model": tiny_encoder, "max_tokens": 64, **fields}))))

    refused("output is 3; the model in .* has 1 outputs", output=3)
    refused("max_tokens is 512; the model in .* reads at most 128", max_tokens=512)
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty/readme.txt").write_text("nothing")
    refused("cannot be read as a sequence classifier", model=External(name="encoder", path=str(tmp_path / "empty")))


def test_a_scorer_of_another_package(build, monkeypatch):
    class Vowels:
        reads = "text"

        def score(self, texts, urls):
            counts = np.array([sum(c in "aeiou" for c in text) for text in texts], dtype=np.float32)
            if self.broken:
                counts[0] = np.nan
            return counts, np.zeros(len(texts), dtype=np.uint8)

    def open_it(options):
        found = Vowels()
        found.broken = options.get("broken") == "yes"
        return found

    module = types.SimpleNamespace(version="2", open=open_it)
    entry = types.SimpleNamespace(name="vowels", load=lambda: module)
    real = importlib.metadata.entry_points
    monkeypatch.setattr(importlib.metadata, "entry_points", lambda group: [entry] if group == "craw4llm.scorers" else real(group=group))
    stage = Stage(ScorerConfig(kind="python", source=EntryPoint(name="vowels", version="2")))
    assert scores_of(build, stage, ["audio", "rhythm"]) == [4, 0]
    with pytest.raises(ConfigError, match=r"version '2', the config says '1'"):
        build(Stage(ScorerConfig(kind="python", source=EntryPoint(name="vowels", version="1"))))
    with pytest.raises(ConfigError, match=r"no installed package registers the scorer 'consonants'.*known: vowels"):
        build(Stage(ScorerConfig(kind="python", source=EntryPoint(name="consonants", version="1"))))
    broken = Stage(ScorerConfig(kind="python", source=EntryPoint(name="vowels", version="2", options=(("broken", "yes"),))))
    with pytest.raises(StageError, match="not finite without a reason"):
        scores_of(build, broken, ["audio"])


def test_a_source_that_does_not_fit_the_kind():
    with pytest.raises(ConfigError, match="expected Length for kind 'length'"):
        ScorerConfig(kind="length", source=UrlFeature())
    with pytest.raises(ConfigError, match="power of two of registers"):
        ScorerConfig(kind="harmonic", source=GraphMeasure(registers=100))
