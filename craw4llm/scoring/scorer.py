"""Scorers: a page's score depends on its text, its URL (a table) or its place in the graph alone; here fastText and tables.

    scorer = open_scorer(artifact)
    scores, reasons = scorer.score(texts, urls)     float32[n], uint8[n]

NaN means "no score", and the reason says why: EMPTY (no text but white space), NOT_IN_TABLE, UNREADABLE (the model gave no
finite number), NOT_READ (the corpus could not read the page's text: craw4llm.scoring.memo). A table answers for a URL whether or not the
page has text: its maker has decided that.

**Text as the fastText scorer reads it.** Runs of white space become one space: `" ".join(text.split())`. NUL counts as white space (it
is for fastText, not for Python), a lone surrogate as U+FFFD. fastText gives two kinds of words a meaning of its own: `</s>` ends the
text, and a word that begins with the label prefix is dropped as a label. In a page they are text, so they are split by a space after
their first character (`< /s>`, `_ _label__x`). A text without such words is read exactly as the fastText library reads it.
"""

import json
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from craw4llm.artifact import Artifact
from craw4llm.errors import ArtifactError, InputError

SCORED, EMPTY, NOT_IN_TABLE, UNREADABLE, NOT_READ = 0, 1, 2, 3, 4
END_OF_TEXT = "</s>"  # fastText's Dictionary::EOS
_SURROGATE = re.compile("[\ud800-\udfff]")
_BLANKS = dict.fromkeys([0, *range(10, 14), *range(28, 32)], " ")  # what ASCII counts as white space beside the space and the tab
_CHECK_TEXTS = ("the self-check of a scorer reads this short text", "and another one, naïve: 世界", "x")
_SUM_TOLERANCE = 1e-3  # fastText adds 1e-5 to each probability before it takes the logarithm

Reads = Literal["text", "url", "page", "members"]
Scores = NDArray[np.float32]
Reasons = NDArray[np.uint8]


class Scorer(Protocol):
    """reads: what `score` is given: the pages' texts, their URLs, or ("page") neither, but their ids.

    score: float32 scores and uint8 reasons, in the order given. The sequences that the scorer does not read are empty.
    """

    @property
    def reads(self) -> Reads: ...

    def score(self, texts: Sequence[str], urls: Sequence[str], pages: Sequence[int] = ()) -> tuple[Scores, Reasons]: ...


def open_scorer(artifact: Artifact, device: str = "cpu") -> Scorer:
    """The scorer that a scorer artifact holds. ArtifactError for a kind that this version does not know.

    device: where an encoder runs ("auto", "cpu", "cuda", "cuda:1"); the other kinds run on the processor.
    """
    about = json.loads(artifact.file("scorer.json").read_text())
    kind = about["kind"]
    if kind == "fasttext":
        if about["route"] != "library":
            from craw4llm.scoring.routes import RouteScorer

            return RouteScorer(artifact)
        if about["reading"] != "clean":
            from craw4llm.scoring.released import ReleasedFastTextScorer

            text_normalize = about["reading"] == "released_normalized"
            return ReleasedFastTextScorer(artifact.file("model.bin"), about["label"], text_normalize=text_normalize)
        return FastTextScorer(artifact.file("model.bin"), about["label"])
    if kind == "table":
        return TableScorer(artifact.file("table.parquet"))
    if kind == "length":
        from craw4llm.scoring.lengths import LengthScorer

        return LengthScorer(about["unit"], artifact.input("tokenizer") if about["unit"] == "tokens" else None)
    if kind == "url":
        from craw4llm.scoring.lengths import UrlScorer

        return UrlScorer(about["feature"])
    if kind == "column":
        from craw4llm.scoring.graph import ColumnScorer

        return ColumnScorer(artifact)
    if kind == "ensemble":
        from craw4llm.scoring.ensemble import EnsembleScorer

        return EnsembleScorer(about["members"], [open_scorer(artifact.input(m["name"]), device) for m in about["members"]])
    if kind == "encoder":
        from craw4llm.scoring.encoder import EncoderScorer

        return EncoderScorer(artifact.path / "model", about, device)
    if kind == "python":
        from craw4llm.scoring.plugins import open_plugin

        return open_plugin(about["name"], about["version"], about["options"])
    raise ArtifactError(f"scorer {artifact.fingerprint} is of kind {kind!r}, which this version does not know")


class FastTextScorer:
    """P(label) over all labels of a supervised fastText model, clipped to [0, 1]."""

    reads: Reads = "text"

    def __init__(self, path: Path, label: str) -> None:
        self.label = label
        self._model = self.model = load_model(path, label)
        self.prefix = str(self._model.f.getArgs().label)

    def score(self, texts: Sequence[str], urls: Sequence[str], pages: Sequence[int] = ()) -> tuple[Scores, Reasons]:
        scores = np.full(len(texts), np.nan, dtype=np.float32)
        reasons = np.full(len(texts), SCORED, dtype=np.uint8)
        for row, raw in enumerate(texts):
            text = _for_the_library(raw, self.prefix)
            if not text:
                reasons[row] = EMPTY
                continue
            # the binding itself: fasttext's `predict` around it makes a tuple and an array of every answer
            answers = self._model.f.predict(text + "\n", -1, 0.0, "strict")
            probability = next((p for p, name in answers if name == self.label), None)
            if probability is None or not np.isfinite(probability):
                reasons[row] = UNREADABLE
            else:
                scores[row] = min(max(float(probability), 0.0), 1.0)
        return scores, reasons


class TableScorer:
    """Scores from a table of canonical URLs."""

    reads: Reads = "url"

    def __init__(self, path: Path) -> None:
        import pyarrow.parquet as pq

        table = pq.read_table(path)
        self._urls = table.column("url").combine_chunks()
        self._scores = table.column("score").to_numpy().astype(np.float32)

    def score(self, texts: Sequence[str], urls: Sequence[str], pages: Sequence[int] = ()) -> tuple[Scores, Reasons]:
        import pyarrow as pa
        import pyarrow.compute as pc

        rows = pc.index_in(pa.array(urls, type=pa.string()), value_set=self._urls)
        known = rows.is_valid().to_numpy(zero_copy_only=False)
        scores = np.full(len(urls), np.nan, dtype=np.float32)
        scores[known] = self._scores[rows.drop_null().to_numpy()]
        return scores, np.where(known, SCORED, NOT_IN_TABLE).astype(np.uint8)


def normalise(text: str, prefix: str = "__label__") -> str:
    """`text` as the fastText scorer reads it (see the module's docstring); "" for a text of white space."""
    text = " ".join(without_surrogates(text).replace("\0", " ").split())
    if END_OF_TEXT in text or prefix in text:
        text = " ".join(_as_text(word, prefix) for word in text.split(" "))
    return text


def _for_the_library(text: str, prefix: str) -> str:
    """A text that the library reads as it would `normalise(text)`, which takes 20 us a page longer; "" for white space alone.

    The library splits at white space of its own, in runs of any length; a line end would end the text.
    """
    if text.isascii() and END_OF_TEXT not in text and prefix not in text:
        text = text.translate(_BLANKS)
        return "" if not text or text.isspace() else text
    return normalise(text, prefix)


def without_surrogates(text: str) -> str:
    """`text` with U+FFFD for each lone surrogate, which UTF-8 cannot hold."""
    return text if text.isascii() else _SURROGATE.sub("\ufffd", text)


def _as_text(word: str, prefix: str) -> str:
    if word == END_OF_TEXT:
        return f"{word[0]} {word[1:]}"
    before = []
    while word.startswith(prefix):
        before.append(word[0])
        word = word[1:]
    return " ".join([*before, word]) if word else " ".join(before)


def fit(
    lines: Iterable[str],
    path: Path,
    *,
    dim: int,
    epochs: int,
    learning_rate: float,
    word_ngrams: int,
    buckets: int,
    seed: int,
    min_count: int = 1,
) -> None:
    """Trains a supervised fastText model on labelled lines (`__label__x text`) and writes it to `path`; equal lines give equal bytes.

    One thread: with more, fastText's updates race and two runs differ. The file holds neither the input's name nor a time.
    """
    import tempfile

    import fasttext

    with tempfile.TemporaryDirectory() as folder:
        text = Path(folder) / "train.txt"
        with text.open("w", encoding="utf-8") as stream:
            stream.writelines(f"{line}\n" for line in lines)
        model = fasttext.train_supervised(
            input=str(text),
            dim=dim,
            epoch=epochs,
            lr=learning_rate,
            wordNgrams=word_ngrams,
            bucket=buckets,
            minCount=min_count,
            seed=seed,
            thread=1,
            loss="softmax",
            label="__label__",
            verbose=0,
        )
        model.save_model(str(path))


def load_model(path: Path, label: str) -> Any:
    """A supervised fastText model that has passed its self-check.

    Raises InputError if it cannot be read, is not supervised, lacks `label`, or if its probabilities do not sum to 1 (a one-vs-all
    loss: P(label) would not be comparable).
    """
    import fasttext

    try:
        model = fasttext.load_model(str(path))
        supervised = str(model.f.getArgs().model).endswith("supervised")
        labels = sorted(model.get_labels()) if supervised else []
    except (ValueError, RuntimeError, MemoryError) as error:
        raise InputError(f"scorer model: {path} cannot be read as a fastText model: {error}") from error
    if not supervised:
        raise InputError(f"scorer model: {path} holds word vectors; give a supervised fastText model (a classifier)")
    if label not in labels:
        raise InputError(f"scorer model: {path} has no label {label!r}; its labels are {', '.join(labels) or 'none'}; set `label`")
    if len(str(model.f.getArgs().label)) < 2:
        raise InputError(f"scorer model: {path} has the label prefix {model.f.getArgs().label!r}; expected at least two characters")
    single = [model.predict(text, k=-1) for text in _CHECK_TEXTS]
    batch = model.predict(list(_CHECK_TEXTS), k=-1)
    for row, (one, several) in enumerate(zip(single, zip(*batch, strict=True), strict=True)):
        if dict(zip(*map(list, one), strict=True)) != dict(zip(*map(list, several), strict=True)):
            raise InputError(
                f"scorer model: {path} gives text {row} of the self-check {one} alone and {several} in a batch; the installed fastText "
                "library is not fit for it: install fasttext-community"
            )
    names, probabilities = single[0]
    total = float(np.sum(probabilities))
    if len(names) != len(labels) or abs(total - 1) > _SUM_TOLERANCE * len(labels):
        raise InputError(
            f"scorer model: {path} gives {len(names)} of {len(labels)} labels with probabilities that sum to {total:.4f}; "
            "expected all labels and 1: use a model with the loss softmax or hs"
        )
    return model
