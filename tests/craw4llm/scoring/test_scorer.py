"""Scorers: what the fastText scorer reads, what a table answers, and which models are refused."""

import json
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import fasttext
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from craw4llm.configs import ScoreConfig, ScorerConfig, SyntheticText
from craw4llm.errors import InputError
from craw4llm.execution import Execution
from craw4llm.fingerprint import External
from craw4llm.scoring import scorer_stage
from craw4llm.scoring.scorer import EMPTY, NOT_IN_TABLE, SCORED, FastTextScorer, normalise, open_scorer
from craw4llm.stage import Stage

LINES = [f"__label__{'hq' if k % 2 else 'cc'} {'proof theory lemma' if k % 2 else 'cheap sale coupon'} word{k % 7}" for k in range(200)]


@pytest.fixture
def model_stage(tmp_path: Path) -> Stage:
    text = tmp_path / "train.txt"
    text.write_text("# origin: made up for this test\n\n" + "\n".join(LINES) + "\n")
    return Stage(ScorerConfig(kind="train_fasttext", source=External(name="text", path=str(text)), buckets=1000, dim=8))


@pytest.fixture
def scorer(build, model_stage) -> FastTextScorer:
    return open_scorer(build(model_stage))


def one(scorer, text: str) -> float:
    return float(scorer.score([text], [""])[0][0])


def test_white_space_of_every_kind_scores_alike(shared, scorer):
    """BL-01: one text with 13 kinds of white space."""
    docs = [json.loads(line) for line in (shared / "cases/BL-01/docs.jsonl").read_text().splitlines()]
    assert len(docs) >= 13
    plain = docs[0]["text"].split(" ")
    same = [doc["text"] for doc in docs if doc["text"].split() == plain]
    assert len(same) >= 12
    assert len({one(scorer, text) for text in same}) == 1
    assert {normalise(text) for text in same} == {" ".join(plain)}


def test_odd_texts(shared, scorer):
    """BL-05: empty and blank texts have no score and say why; every other text has one in [0, 1]."""
    docs = [json.loads(line) for line in (shared / "cases/BL-05/docs.jsonl").read_text().splitlines()]
    texts = [doc.get("text") for doc in docs]
    texts = [text for text in texts if isinstance(text, str)]
    scores, reasons = scorer.score(texts, [""] * len(texts))
    blank = np.array([not text.split() for text in texts])
    assert blank.sum() >= 3
    assert (reasons[blank] == EMPTY).all() and np.isnan(scores[blank]).all()
    assert (reasons[~blank] == SCORED).all()
    assert ((scores[~blank] >= 0) & (scores[~blank] <= 1)).all()
    assert scores.dtype == np.float32 and reasons.dtype == np.uint8


def test_words_that_fasttext_would_act_on_are_text(shared, scorer):
    """BL-24 and fastText's own markers: `</s>` does not end a page, and `__label__hq` in a page is no label."""
    docs = [json.loads(line) for line in (shared / "cases/BL-24/docs.jsonl").read_text().splitlines()]
    scores, reasons = scorer.score([doc["text"] for doc in docs], [""] * len(docs))
    assert (reasons == SCORED).all() and not np.isnan(scores).any()
    good, bad = "proof theory lemma " * 5, "cheap sale coupon " * 5
    assert one(scorer, good) > 0.9 > 0.1 > one(scorer, bad)
    assert one(scorer, f"</s> {good}") > 0.9  # the library alone would read an empty text
    assert one(scorer, f"</s> {bad}") < 0.1
    library = scorer._model.predict(" ".join(f"</s> {good}".split()), k=-1)
    assert dict(zip(*library, strict=True))["__label__hq"] < 0.9
    assert normalise("a </s> b") == "a < /s> b"
    assert normalise("x</s> </s>x") == "x</s> </s>x"  # only the word itself is a marker
    assert normalise("__label__hq __label__ a__label__") == "_ _label__hq _ _label__ a__label__"
    assert one(scorer, "__label__zz") == one(scorer, "_ _label__zz")


def test_nul_and_surrogates(scorer):
    assert normalise("a\0b\0\0</s>") == "a b < /s>"
    assert normalise("a\ud800b \udfff") == "a\ufffdb \ufffd"
    assert one(scorer, "proof\0theory") == one(scorer, "proof theory")
    assert 0 <= one(scorer, "proof \ud83d theory") <= 1
    assert scorer.score(["\0 \0\n"], [""])[1][0] == EMPTY


def test_score_is_the_librarys_probability_of_the_label_by_name(scorer, build, model_stage):
    """P(label) over all labels, whatever its rank among them; clipped, where fastText gives 1.00001."""
    for text in ("proof theory lemma", "cheap sale coupon", "proof sale", "unknown words only"):
        expected = dict(zip(*scorer._model.predict(text, k=-1), strict=True))["__label__hq"]
        assert one(scorer, text) == np.float32(min(max(expected, 0), 1))
    many = " ".join(["proof theory lemma"] * 500)
    raw = dict(zip(*scorer._model.predict(many, k=-1), strict=True))["__label__hq"]
    assert one(scorer, many) == min(np.float32(raw), 1)


def test_training_is_deterministic_and_states_its_origin(tmp_path, build, model_stage):
    artifact = build(model_stage)
    assert artifact.manifest["notes"]["origin"] == "made up for this test"
    assert artifact.count("training_lines") == len(LINES)
    again = tmp_path / "again"
    again.mkdir()
    scorer_stage.run(model_stage.config, {}, again, Execution(root=tmp_path))
    assert (again / "model.bin").read_bytes() == artifact.file("model.bin").read_bytes()


def test_synthetic_text_trains_a_scorer(build):
    artifact = build(Stage(ScorerConfig(kind="train_fasttext", source=SyntheticText(lines=300), buckets=2000, dim=8)))
    assert artifact.count("training_lines") == 300
    assert "synthetic" in artifact.manifest["notes"]["origin"]


def test_given_model(build, tmp_path, model_stage):
    given = tmp_path / "given.bin"
    shutil.copy(build(model_stage).file("model.bin"), given)
    source = External(name="model", path=str(given))
    artifact = build(Stage(ScorerConfig(kind="fasttext", source=source)))
    assert one(open_scorer(artifact), "proof theory") == one(open_scorer(build(model_stage)), "proof theory")
    other = open_scorer(build(Stage(ScorerConfig(kind="fasttext", source=source, label="__label__cc"))))
    assert one(other, "proof theory") == pytest.approx(1 - one(open_scorer(artifact), "proof theory"), abs=1e-4)
    with pytest.raises(InputError, match=r"no label '__label__good'.*__label__cc, __label__hq"):
        build(Stage(ScorerConfig(kind="fasttext", source=source, label="__label__good")))


def test_models_that_are_refused(build, tmp_path):
    text = tmp_path / "train.txt"
    text.write_text("\n".join(LINES))
    one_vs_all = fasttext.train_supervised(input=str(text), loss="ova", dim=4, bucket=100, verbose=0, thread=1)
    one_vs_all.save_model(str(tmp_path / "ova.bin"))
    with pytest.raises(InputError, match="sum to"):
        build(Stage(ScorerConfig(kind="fasttext", source=External(name="model", path=str(tmp_path / "ova.bin")))))
    vectors = fasttext.train_unsupervised(input=str(text), dim=4, bucket=100, verbose=0, thread=1)
    vectors.save_model(str(tmp_path / "vectors.bin"))
    with pytest.raises(InputError, match="word vectors"):
        build(Stage(ScorerConfig(kind="fasttext", source=External(name="model", path=str(tmp_path / "vectors.bin")))))
    (tmp_path / "noise.bin").write_bytes(b"this is no model")
    with pytest.raises(InputError, match="cannot be read as a fastText model"):
        build(Stage(ScorerConfig(kind="fasttext", source=External(name="model", path=str(tmp_path / "noise.bin")))))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("__label__hq a\nno label here\n", "line 2 is 'no label here'"),
        ("__label__hq a\n__label__hq b\n", "labels are __label__hq; expected __label__hq and at least one more"),
        ("__label__a a\n__label__b b\n", "expected __label__hq"),
        ("", "labels are none"),
    ],
)
def test_training_text_that_is_refused(build, tmp_path, text, message):
    path = tmp_path / "bad.txt"
    path.write_text(text)
    with pytest.raises(InputError, match=message):
        build(Stage(ScorerConfig(kind="train_fasttext", source=External(name="text", path=str(path)))))


def test_training_text_that_is_not_utf8(build, tmp_path):
    path = tmp_path / "bad.txt"
    path.write_bytes(b"__label__hq a\n__label__cc \xff\n")
    with pytest.raises(InputError, match="line 2 is not UTF-8"):
        build(Stage(ScorerConfig(kind="train_fasttext", source=External(name="text", path=str(path)))))


def test_table(build, tmp_path):
    """Any spelling of a URL finds its page; a null or NaN is no score; the table's word counts for pages without text."""
    path = tmp_path / "table.parquet"
    urls = ["HTTPS://w.example:443/b", "https://w.example/a#top", "https://w.example/c", "https://w.example/d", "https://w.example/a", None]
    values = pa.array([0.25, 0.5, None, float("nan"), 0.5, 1.0])
    pq.write_table(pa.table({"url": urls, "quality": values}), path)
    artifact = build(Stage(ScorerConfig(kind="table", source=External(name="t", path=str(path)), column="quality")))
    assert artifact.count("urls") == 2
    scores, reasons = open_scorer(artifact).score((), [f"https://w.example/{x}" for x in "cbad"])
    np.testing.assert_array_equal(scores, np.array([np.nan, 0.25, 0.5, np.nan], dtype=np.float32))
    assert reasons.tolist() == [NOT_IN_TABLE, SCORED, SCORED, NOT_IN_TABLE]


def test_tables_that_are_refused(build, tmp_path):
    path = tmp_path / "table.parquet"

    def refused(message: str, **columns: list) -> None:
        pq.write_table(pa.table(columns), path)
        with pytest.raises(InputError, match=message):
            build(Stage(ScorerConfig(kind="table", source=External(name="t", path=str(path)))))

    refused("has no column score; its columns are url, other", url=["https://w.example/"], other=[1.0])
    refused(r"gives https://w.example/ the scores 0.5 and 1.0", url=["https://w.example/", "https://w.example"], score=[0.5, 1.0])
    refused("no row with", url=["mailto:a@w.example"], score=[0.5])
    path.write_bytes(b"no parquet")
    with pytest.raises(InputError, match="cannot be read"):
        build(Stage(ScorerConfig(kind="table", source=External(name="t", path=str(path)))))


def test_score_stage(build, make_web, model_stage, make_table):
    urls = [f"https://w.example/{x}" for x in "abcd"]
    web = make_web([(urls[0], "proof theory", []), (urls[1], "", []), (urls[2], "cheap sale", []), (urls[3], "  \n", [])])
    artifact = build(Stage(ScoreConfig(), corpus=web, scorer=model_stage))
    scores, reasons = np.load(artifact.file("scores.npy")), np.load(artifact.file("reasons.npy"))
    assert reasons.tolist() == [SCORED, EMPTY, SCORED, EMPTY]
    assert np.isnan(scores).tolist() == [False, True, False, True]
    assert artifact.count("mean_score") == pytest.approx((float(scores[0]) + float(scores[2])) / 2)
    assert (artifact.count("scored"), artifact.count("empty"), artifact.count("pages")) == (2, 2, 4)
    nothing = build(Stage(ScoreConfig(), corpus=web, scorer=make_table({"https://w.example/other": 1.0})))
    assert nothing.count("mean_score") is None and nothing.count("not_in_table") == 4


@pytest.mark.parametrize("route", ["library", "exact", "projected"])
def test_threads_give_the_numbers_of_one(build, tmp_path, route):
    text = tmp_path / "train.txt"
    text.write_text("# origin: made up for this test\n\n" + "\n".join(LINES) + "\n")
    source = External(name="text", path=str(text))
    scorer = open_scorer(build(Stage(ScorerConfig(kind="train_fasttext", source=source, buckets=1000, dim=8, route=route))))
    rng = np.random.default_rng(0)
    words = np.array(["proof", "theory", "cheap", "sale", "word1", "never\u00a0seen", "</s>", "__label__hq"])
    texts = [" ".join(rng.choice(words, rng.integers(1, 60))) for _ in range(400)]
    expected = scorer.score(texts, ())[0]
    with ThreadPoolExecutor(6) as pool:
        for _ in range(3):
            parts = list(pool.map(lambda start: scorer.score(texts[start : start + 20], ())[0], range(0, 400, 20)))
            np.testing.assert_array_equal(np.concatenate(parts), expected)


def test_a_library_that_answers_otherwise_in_batches_is_refused(build, model_stage, monkeypatch):
    """The self-check at opening: single calls and batches must agree."""
    artifact = build(model_stage)
    real = fasttext.FastText._FastText.predict

    def predict(self, text, *args, **options):
        names, probabilities = real(self, text, *args, **options)
        return (names, [1 - p for p in probabilities]) if isinstance(text, list) else (names, probabilities)

    monkeypatch.setattr(fasttext.FastText._FastText, "predict", predict)
    with pytest.raises(InputError, match=r"alone and .* in a batch"):
        open_scorer(artifact)
