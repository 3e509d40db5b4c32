"""The fast routes give the fastText library's numbers: bit by bit ("exact"), or within 1e-6 ("projected")."""

import json
from pathlib import Path

import fasttext
import numpy as np
import pytest

from craw4llm.configs import ScorerConfig
from craw4llm.errors import ArtifactError, ConfigError, InputError
from craw4llm.fingerprint import External
from craw4llm.scoring.fasttext_file import read_model
from craw4llm.scoring.scorer import EMPTY, SCORED, open_scorer
from craw4llm.stage import Stage

WORDS = ["proof", "theory", "lemma", "cheap", "sale", "coupon", "naïve", "世界", "x", "y", "</s>", "co.", ",", "é", "don't", "12,5"]


@pytest.fixture(scope="module")
def texts() -> list[str]:
    """Random words with odd white space between them, many of them unknown, fastText's own markers among them."""
    rng = np.random.default_rng(3)
    blanks = [" ", "\n", "\t", "  ", "\u2003", "\x1f", "\u00a0", "\r\n", "\0", "\u3000", "\x85", "\u1680", "\u202f", "\u205f", "\u2028"]
    odd = ["__label__hq", "__label__", "__label____label__z", "\u200b", "\ud800", "\U0001f600", "é" * 40, "_", "<", "/s>", "\ufeff", "﷽"]
    found = ["", " \n", "\0", "\u3000\u00a0"]
    for length in [1, 2, 3, 5, 20, 400, 3000] * 6:
        words = [str(rng.choice(WORDS + odd)) if rng.random() < 0.8 else f"u{rng.integers(50)}" for _ in range(length)]
        found.append("".join(w + str(rng.choice(blanks)) for w in words))
    return found


def training_file(tmp_path) -> str:
    rng = np.random.default_rng(1)
    path = tmp_path / "train.txt"
    lines = [f"__label__{'hq' if k % 2 else 'cc'} " + " ".join(rng.choice(WORDS[k % 2 :: 2], 12)) for k in range(300)]
    path.write_text("\n".join(lines) + "\n")
    return str(path)


def scorer(build, path, route: str, label: str = "__label__hq"):
    source = External(name="model", path=str(path))
    return open_scorer(build(Stage(ScorerConfig(kind="fasttext", source=source, route=route, label=label))))


def compare(build, path, texts, label: str = "__label__hq") -> None:
    expected, reasons = scorer(build, path, "library", label).score(texts, ())
    assert (reasons[:4] == EMPTY).all() and (reasons[4:] == SCORED).all()
    assert len(np.unique(expected[4:])) > 15
    exact, why = scorer(build, path, "exact", label).score(texts, ())
    np.testing.assert_array_equal(exact, expected)
    assert why.tolist() == reasons.tolist()
    projected, why = scorer(build, path, "projected", label).score(texts, ())
    np.testing.assert_allclose(projected, expected, rtol=0, atol=1e-6)
    assert why.tolist() == reasons.tolist()


@pytest.mark.parametrize(
    "options",
    [
        {"wordNgrams": 2, "bucket": 2000, "dim": 100},
        {"wordNgrams": 1, "dim": 3},
        {"wordNgrams": 4, "bucket": 1000, "dim": 16},
        {"wordNgrams": 2, "bucket": 999, "dim": 10, "minCount": 5},
    ],
)
def test_routes_equal_the_library(build, tmp_path, texts, options):
    path = tmp_path / "model.bin"
    fasttext.train_supervised(input=training_file(tmp_path), verbose=0, thread=1, seed=1, lr=0.5, **options).save_model(str(path))
    compare(build, path, texts)
    compare(build, path, texts, "__label__cc")


@pytest.mark.parametrize("label", ["__label__hq", "__label__cc"])
@pytest.mark.parametrize("bad", ["cc", "other"])
def test_routes_read_as_the_released_code(build, tmp_path, texts, bad, label):
    """reading="released": other white space, acting markers, the likelier label, 1 - p for __label__cc, empty texts scored, no clipping."""
    train = tmp_path / "train2.txt"
    train.write_text(Path(training_file(tmp_path)).read_text().replace("__label__cc", f"__label__{bad}"))
    path = tmp_path / "model.bin"
    fasttext.train_supervised(input=str(train), verbose=0, thread=1, seed=1, lr=0.5, wordNgrams=2, bucket=2000, dim=20).save_model(
        str(path)
    )
    source = External(name="model", path=str(path))
    label = label.replace("cc", bad)

    def scores(route: str) -> np.ndarray:
        config = ScorerConfig(kind="fasttext", source=source, route=route, reading="released", label=label)  # type: ignore[arg-type]
        found, reasons = open_scorer(build(Stage(config))).score(texts, ())
        assert (reasons == SCORED).all()
        return found

    expected = scores("library")
    assert len(np.unique(expected)) > 20 and (expected < 0.5).any() == (bad == "cc")
    np.testing.assert_array_equal(scores("exact"), expected)
    np.testing.assert_allclose(scores("projected"), expected, rtol=0, atol=1e-6)
    with pytest.raises(ConfigError, match="clean or released, but for the route library"):
        ScorerConfig(kind="fasttext", source=source, route="exact", reading="released_normalized")


def test_the_exact_route_on_many_texts(build, tmp_path):
    """fastText's softmax takes C's exp, of doubles: with the exp of floats one page in 4,000 has another last bit."""
    path = tmp_path / "model.bin"
    fasttext.train_supervised(
        input=training_file(tmp_path), verbose=0, thread=1, seed=1, lr=0.02, wordNgrams=2, bucket=2000, dim=16
    ).save_model(str(path))
    rng = np.random.default_rng(5)
    many = [" ".join(rng.choice(WORDS, rng.integers(2, 30))) for _ in range(12_000)]
    expected, _ = scorer(build, path, "library").score(many, ())
    exact, _ = scorer(build, path, "exact").score(many, ())
    np.testing.assert_array_equal(exact, expected)


@pytest.mark.parametrize("options", [{"cutoff": 400}, {"qnorm": True}, {"cutoff": 500, "qnorm": True, "dsub": 3}])
def test_quantised_models(build, tmp_path, texts, options):
    """Pruned dictionaries, coded rows, coded norms."""
    model = fasttext.train_supervised(input=training_file(tmp_path), verbose=0, thread=1, seed=1, lr=0.5, wordNgrams=2, bucket=2000, dim=16)
    model.quantize(**options)
    model.save_model(str(tmp_path / "model.ftz"))
    compare(build, tmp_path / "model.ftz", texts)


def test_the_reference_models(build, shared, texts):
    for name in ("docweb_hq", "docweb_hq_nc"):
        compare(build, shared / f"scorer/{name}.ftz", texts)


def test_a_route_refuses_other_models(build, tmp_path):
    text = training_file(tmp_path)
    path = tmp_path / "model.bin"
    for options, why in (
        ({"loss": "hs"}, "its loss is not softmax"),
        ({"minn": 2, "maxn": 4, "bucket": 100}, "parts of words"),
    ):
        fasttext.train_supervised(input=text, verbose=0, thread=1, dim=4, **options).save_model(str(path))
        with pytest.raises(InputError, match=rf"{why}.*use route='library'"):
            scorer(build, path, "projected")
    lines = "__label__hq a b\n__label__cc c d\n__label__zz e f\n"
    (tmp_path / "three.txt").write_text(lines)
    fasttext.train_supervised(input=str(tmp_path / "three.txt"), verbose=0, thread=1, dim=4).save_model(str(path))
    with pytest.raises(InputError, match="it has 3 labels"):
        scorer(build, path, "exact")
    with pytest.raises(ConfigError, match="route is 'projected'; expected"):
        ScorerConfig(kind="table", source=External(name="t", path="t"), route="projected")


def test_the_check_at_opening_notices_other_numbers(build, tmp_path):
    """A stored answer of the library that this machine's code does not give ends the run."""
    path = tmp_path / "model.bin"
    fasttext.train_supervised(input=training_file(tmp_path), verbose=0, thread=1, dim=4).save_model(str(path))
    source = External(name="model", path=str(path))
    for route, change in (("projected", 2e-6), ("exact", 1e-7)):
        artifact = build(Stage(ScorerConfig(kind="fasttext", source=source, route=route)))
        file = artifact.file("scorer.json")
        about = json.loads(file.read_text())
        about["check_scores"][40] += change
        file.write_text(json.dumps(about))
        with pytest.raises(ArtifactError, match=r"differ by .* use a scorer with route='library'"):
            open_scorer(artifact)


def test_a_file_that_ends_too_early(tmp_path):
    path = tmp_path / "model.bin"
    fasttext.train_supervised(input=training_file(tmp_path), verbose=0, thread=1, dim=4).save_model(str(path))
    data = path.read_bytes()
    for cut in (3, 50, 70, 200, len(data) - 20):
        path.write_bytes(data[:cut])
        with pytest.raises(InputError, match="cannot be read as a fastText model file of version 12"):
            read_model(path)
