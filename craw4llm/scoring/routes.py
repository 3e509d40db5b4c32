"""The fast routes of the fastText scorer, for models of two labels: `projected` and `exact`.

    write_route(out, parts, label, "projected", ...)     at the build of the scorer, checked against the library
    RouteScorer(artifact).score(texts, urls)             what FastTextScorer.score gives, 6 or 2 times as fast

A supervised fastText model averages the input rows of a text's words and n-grams and multiplies by the output matrix. With two labels the
softmax needs only the difference of the two outputs, which is linear: so each input row shrinks to one float32, its dot product with the
difference of the output rows (`projected`; the sum runs in float64, and the result differs from the library's by less than 1e-6).
`exact` keeps the rows and adds in float32 in fastText's own order: bit for bit the library's result, where the library was built without
fused multiply-add. Either is compared with the library when the scorer is built, and with the library's stored answers whenever it is
opened (another machine has another compiler): a difference ends the run, it never changes a number.
"""

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from craw4llm.artifact import Artifact
from craw4llm.crawl.hashing import hash_ids
from craw4llm.errors import ArtifactError, InputError, StageError
from craw4llm.scoring import kernels
from craw4llm.scoring.fasttext_file import Parts, read_model
from craw4llm.scoring.released import BAD_LABEL
from craw4llm.scoring.scorer import (
    EMPTY,
    END_OF_TEXT,
    SCORED,
    UNREADABLE,
    FastTextScorer,
    Reads,
    Reasons,
    Scorer,
    Scores,
    without_surrogates,
)

Route = Literal["exact", "projected"]
TOLERANCE = 1e-6  # of the projected route; the exact route has none
_CHECK_TEXTS = 96
_ODD_TEXTS = (
    "a</s> </s> b __label__hq __label____label__ _",
    "one\x1ctwo\x85three\u00a0four\u2003five\u3000six\u200bseven",
    "zero\0width ﷽ 世界 naïve 😀 \ud800 e\u0301",
    "x",
    ". , ; ! ?",
    "  a\x1d b\x1fc d\u2028e </s> f __label__hq",
)


@dataclasses.dataclass(frozen=True)
class Tables:
    """The arrays that a route reads; all but `output` may be mapped files.

    blob uint8, word_at int64[words + 1]: the dictionary; slots uint64[size, 2]: its hash table; pruned int32[buckets] or empty;
    prefix, end uint8.
    projection float32[rows]; matrix float32[rows, dim]: the one that the route reads, the other empty. output float32[2, dim].
    """

    blob: NDArray[np.uint8]
    word_at: NDArray[np.int64]
    slots: NDArray[np.uint64]
    pruned: NDArray[np.int32]
    projection: NDArray[np.float32]
    matrix: NDArray[np.float32]
    output: NDArray[np.float32]
    prefix: NDArray[np.uint8]
    end: NDArray[np.uint8]
    word_ngrams: int
    buckets: int
    chosen: int
    route: str
    released: bool
    bad: int  # in reading "released", where `__label__cc` is: 1 the label that is asked for, -1 the other one, 0 neither

    def score(self, texts: Sequence[str]) -> tuple[Scores, Reasons]:
        encoded = [_utf8(text.strip() if self.released else text) for text in texts]
        offsets = np.zeros(len(encoded) + 1, dtype=np.int64)
        np.cumsum([len(text) for text in encoded], out=offsets[1:])
        data = np.frombuffer(b"".join(encoded), dtype=np.uint8)
        words = np.zeros(len(texts), dtype=np.int64)
        tables = (self.slots, self.blob, self.word_at, self.word_ngrams, self.buckets, self.pruned, self.prefix, self.end)
        common = (data, offsets, *tables, self.released)
        if self.route == "projected":
            odds = np.empty(len(texts), dtype=np.float64)
            kernels.project(*common, self.projection, odds, words)
            with np.errstate(over="ignore"):
                higher = np.abs(odds) if self.released else odds
                raw = (1 / (1 + np.exp(-higher)) + 1e-5).astype(np.float32)  # fastText adds 1e-5 before its logarithm
            if self.released:
                raw[odds < 0] *= -1
        else:
            raw = np.empty(len(texts), dtype=np.float32)
            kernels.exact(*common, self.matrix, self.output, self.chosen, raw, words)
        if self.released:
            return self._released(raw)
        scores = np.clip(raw, np.float32(0), np.float32(1))
        reasons = np.where(np.isfinite(raw), SCORED, UNREADABLE).astype(np.uint8)
        reasons[words == 0] = EMPTY
        scores[reasons != SCORED] = np.nan
        return scores, reasons

    def _released(self, raw: Scores) -> tuple[Scores, Reasons]:
        """craw4llm.scoring.released's score from the probability of the likelier label, negative where that is not `label`."""
        if np.isnan(raw).any():
            raise StageError("scorer: fastText gives no label for a text without known words; the released code would end here")
        likelier = np.abs(raw)
        bad = np.sign(raw) == self.bad
        scores = np.where(bad, 1 - likelier.astype(np.float64), likelier.astype(np.float64)).astype(np.float32)
        return scores, np.full(len(raw), SCORED, dtype=np.uint8)


class RouteScorer:
    """A scorer artifact with route "exact" or "projected"."""

    reads: Reads = "text"
    threads = True  # the kernels let go of the interpreter: threads of one process score side by side

    def __init__(self, artifact: Artifact) -> None:
        about = json.loads(artifact.file("scorer.json").read_text())
        self.route = about["route"]
        self._tables = _open(artifact.path, about)
        wrong = _difference(self._tables, about["check_texts"], np.array(about["check_scores"], dtype=np.float32))
        if wrong > _allowed(self.route):
            raise ArtifactError(
                f"scorer {artifact.fingerprint}: on this machine the route {self.route!r} gives scores that differ by {wrong:.3g} "
                "from those of the fastText library stored with it; use a scorer with route='library'"
            )

    def score(self, texts: Sequence[str], urls: Sequence[str], pages: Sequence[int] = ()) -> tuple[Scores, Reasons]:
        return self._tables.score(texts)


def write_route(out: Path, label: str, route: Route, library: FastTextScorer, released: Scorer | None = None) -> dict[str, Any]:
    """Writes the arrays of a route beside `out`/model.bin and returns what scorer.json must say of it.

    released: the scorer of the library's route, for reading "released".

    Raises InputError for a model that the route cannot read, or where it does not give the library's numbers.
    """
    path = out / "model.bin"
    parts = read_model(path)
    why = parts.unsupported()
    prefix = library.prefix
    if why is None and not prefix.isascii():
        why = f"its label prefix is {prefix!r}"
    if why is not None:
        raise InputError(
            f"scorer model: the route {route!r} is for softmax models of two labels without parts of words; {why}: use route='library'"
        )
    word_at = np.zeros(len(parts.words) + 1, dtype=np.int64)
    np.cumsum([len(word) for word in parts.words], out=word_at[1:])
    blob = np.frombuffer(b"".join(parts.words), dtype=np.uint8)
    slots = np.zeros((1 << max(4, int(2 * len(parts.words)).bit_length()), 2), dtype=np.uint64)
    kernels.build_slots(blob, word_at, slots)
    np.save(out / "words.npy", blob)
    np.save(out / "word_offsets.npy", word_at)
    np.save(out / "slots.npy", slots)
    if parts.pruned is not None:
        np.save(out / "pruned.npy", parts.pruned)
    if route == "projected":
        np.save(out / "projection.npy", parts.projection(label))
    about: dict[str, Any] = {
        "label": label,
        "route": route,
        "label_prefix": prefix,
        "word_ngrams": parts.word_ngrams,
        "buckets": parts.buckets,
        "check_texts": _check_texts(parts),
        "reading": "clean" if released is None else "released",
        "bad": 1 if label == BAD_LABEL else -1 if BAD_LABEL in parts.labels else 0,
    }
    expected, _ = (library if released is None else released).score(about["check_texts"], ())
    wrong = _difference(_open(out, about), about["check_texts"], expected)
    if wrong > _allowed(route):
        raise InputError(
            f"scorer model: the route {route!r} differs by {wrong:.3g} from the installed fastText library (allowed: {_allowed(route):g}); "
            + ("the library was built with other arithmetic: " if route == "exact" else "")
            + "use route='library'"
        )
    return {**about, "check_scores": [float(score) for score in expected]}


def _open(folder: Path, about: dict[str, Any]) -> Tables:
    def load(name: str) -> NDArray[Any]:
        return np.asarray(np.load(folder / name, mmap_mode="r"))

    # the words are many megabytes for a large model: only the exact route needs the model file beside them
    parts: Parts | None = read_model(folder / "model.bin") if about["route"] == "exact" else None
    none = np.empty(0, dtype=np.float32)
    pruned = folder / "pruned.npy"
    return Tables(
        blob=load("words.npy"),
        word_at=load("word_offsets.npy"),
        slots=load("slots.npy"),
        pruned=load("pruned.npy") if pruned.exists() else np.empty(0, dtype=np.int32),
        projection=load("projection.npy") if parts is None else none,
        matrix=none.reshape(0, 0) if parts is None else parts.matrix(),
        output=none.reshape(0, 0) if parts is None else parts.output,
        prefix=np.frombuffer(about["label_prefix"].encode(), dtype=np.uint8),
        end=np.frombuffer(END_OF_TEXT.encode(), dtype=np.uint8),
        word_ngrams=about["word_ngrams"],
        buckets=about["buckets"],
        chosen=0 if parts is None else parts.labels.index(about["label"]),
        route=about["route"],
        released=about.get("reading", "clean") != "clean",
        bad=about.get("bad", 0),
    )


def _check_texts(parts: Parts) -> list[str]:
    """Texts in the model's own words, known and unknown, of 1 to 400 words; the same for the same model."""
    words = [word.decode("utf-8", "replace") for word in (parts.words[:4000] or [b"word"])]
    texts = [without_surrogates(text) for text in _ODD_TEXTS]
    for number in range(_CHECK_TEXTS - len(texts)):
        length = 1 + number * number // 20
        draws = hash_ids(number, np.arange(length)).astype(np.int64) & 0x7FFFFFFF
        texts.append(" ".join(words[d % len(words)] if d % 7 else f"unknown{d % 97}" for d in draws.tolist()))
    return texts


def _difference(tables: Tables, texts: list[str], expected: Scores) -> float:
    """Largest difference from the library's scores; infinite where only one of the two has a score."""
    given, _ = tables.score(texts)
    if (np.isnan(given) != np.isnan(expected)).any():
        return float("inf")
    return float(np.nanmax(np.abs(given.astype(np.float64) - expected.astype(np.float64)), initial=0.0))


def _allowed(route: str) -> float:
    return TOLERANCE if route == "projected" else 0.0


def _utf8(text: str) -> bytes:
    try:
        return text.encode()
    except UnicodeEncodeError:
        return without_surrogates(text).encode()
