"""`craw4llm score train`: a DCLM-like quality classifier from positive and negative text, with a card that says how good it is.

    card = train_classifier([Path("good.jsonl")], [Path("web.jsonl.gz")], Path("out"), Settings())
    out/model.bin   out/card.json   out/card.md

Files: JSON lines (`text`, and `source` where a file mixes several), `.gz` or not; Parquet with the same columns; or plain text, one
document a line. A document's source is its `source`, else the file's name without its endings.

Texts are read as the fastText scorer reads them (craw4llm.scoring.scorer). Empty texts are dropped, repeated ones kept once, and texts that
stand on both sides are dropped from both: all counted. A tenth is held out by a hash of the text. The settings are fastText's own with word
bigrams, like those of DCLM's classifier (Li et al., DataComp-LM, 2024), on one thread with a fixed seed: equal text, equal model.

The card gives precision, recall and AUC on the held-out texts, by source too, and the **leak**: how many held-out texts have half or more
of their runs of 13 words in the training text as well (near-copies, shared templates). A high AUC beside a large leak says little.
"""

import dataclasses
import gzip
import hashlib
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
from numpy.typing import NDArray

from craw4llm.errors import ConfigError, InputError
from craw4llm.scoring.scorer import FastTextScorer, fit, normalise

_LEAK_WORDS = 13
_LEAK_SHARE = 0.5
_FEWEST = 10  # held-out texts a side, below which no figure is worth printing


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
    """dim to buckets: fastText's. threshold: a score from which a text is called positive. heldout_share: of the texts, by hash."""

    positive_label: str = "__label__hq"
    negative_label: str = "__label__cc"
    dim: int = 100
    epochs: int = 5
    learning_rate: float = 0.1
    word_ngrams: int = 2
    buckets: int = 2_000_000
    min_count: int = 1
    seed: int = 0
    heldout_share: float = 0.1
    threshold: float = 0.5

    def __post_init__(self) -> None:
        if not 0 < self.heldout_share < 1:
            raise ConfigError(f"score train: heldout_share is {self.heldout_share}; expected more than 0 and less than 1")
        if self.positive_label == self.negative_label:
            raise ConfigError(f"score train: both labels are {self.positive_label}; give two")


@dataclasses.dataclass(frozen=True)
class Text:
    """One document; text: as the scorer reads it."""

    text: str
    source: str
    positive: bool

    @property
    def key(self) -> bytes:
        return hashlib.blake2b(self.text.encode(), digest_size=16).digest()

    def held_out(self, share: float) -> bool:
        return int.from_bytes(hashlib.blake2b(self.key, digest_size=7).digest(), "little") < share * 2**56


def train_classifier(positive: Sequence[Path], negative: Sequence[Path], out: Path, settings: Settings) -> dict[str, Any]:
    """Writes model.bin, card.json and card.md into the folder `out`, which must not exist, and returns the card."""
    if out.exists():
        raise InputError(f"score train: {out} exists; give a folder that does not")
    texts, dropped = _read_all(positive, negative)
    training = [one for one in texts if not one.held_out(settings.heldout_share)]
    heldout = [one for one in texts if one.held_out(settings.heldout_share)]
    for side, name in ((True, "positive"), (False, "negative")):
        count = sum(one.positive == side for one in heldout)
        if count < _FEWEST:
            raise InputError(
                f"score train: only {count} {name} texts are held out of {sum(one.positive == side for one in texts)}; expected {_FEWEST} "
                "or more: give more text, or raise the held-out share"
            )
    out.mkdir(parents=True)
    _train(training, out / "model.bin", settings)
    scorer = FastTextScorer(out / "model.bin", settings.positive_label)
    scores = scorer.score([one.text for one in heldout], ())[0].astype(np.float64)
    leaks = _leaks(training, heldout)
    is_positive = np.array([one.positive for one in heldout])
    card: dict[str, Any] = {
        "settings": dataclasses.asdict(settings),
        "files": {"positive": [_about(path) for path in positive], "negative": [_about(path) for path in negative]},
        "dropped": dropped,
        "training": {"positive": sum(one.positive for one in training), "negative": sum(not one.positive for one in training)},
        "heldout": _figures(scores, is_positive, settings.threshold) | {"leaking": int(leaks.sum())},
        "sources": [],
    }
    for source, side in sorted({(one.source, one.positive) for one in heldout}):
        mine = np.array([one.source == source and one.positive == side for one in heldout])
        against = is_positive != side
        card["sources"].append(
            {
                "source": source,
                "side": "positive" if side else "negative",
                "heldout": int(mine.sum()),
                "called_positive": float(np.mean(scores[mine] >= settings.threshold)),
                "auc": auc(*(scores[mine], scores[against]) if side else (scores[against], scores[mine])),
                "leaking": int(leaks[mine].sum()),
            }
        )
    (out / "card.json").write_text(json.dumps(card, indent=2) + "\n")
    (out / "card.md").write_text(card_text(card))
    return card


def auc(positive: NDArray[np.float64], negative: NDArray[np.float64]) -> float:
    """Chance that a positive score is higher than a negative one, ties counted half (Mann and Whitney)."""
    ordered = np.sort(negative)
    below = np.searchsorted(ordered, positive, side="left") + np.searchsorted(ordered, positive, side="right")
    return float(below.sum() / (2 * len(positive) * len(negative)))


def card_text(card: dict[str, Any]) -> str:
    """The card as Markdown."""
    heldout, settings = card["heldout"], card["settings"]
    label, precision, recall = settings["positive_label"], _number(heldout["precision"]), _number(heldout["recall"])
    lines = [
        "# A fastText quality classifier",
        "",
        f"The score is P(`{label}`). Use: `ScorerConfig(kind='fasttext', label='{label}', source=External(...))`.",
        "",
        f"Trained on {card['training']['positive']:,} positive and {card['training']['negative']:,} negative texts. Dropped: "
        + ", ".join(f"{count:,} {name.replace('_', ' ')}" for name, count in card["dropped"].items())
        + ".",
        "",
        f"Held out: {heldout['positive']:,} positive, {heldout['negative']:,} negative; "
        f"precision {precision}, recall {recall} at {settings['threshold']}, AUC {_number(heldout['auc'])}.",
        f"Leak: {heldout['leaking']:,} held-out texts have at least half of their runs of {_LEAK_WORDS} words in the training text too.",
        "",
        "| source | side | held out | called positive | AUC against the other side | leaking |",
        "|---|---|---|---|---|---|",
    ]
    for one in card["sources"]:
        cells = [
            one["source"],
            one["side"],
            f"{one['heldout']:,}",
            f"{one['called_positive']:.1%}",
            f"{one['auc']:.4f}",
            f"{one['leaking']:,}",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    lines += ["", "Settings: " + ", ".join(f"{name} {value}" for name, value in settings.items()) + "."]
    lines += ["", "| file | side | SHA-256 |", "|---|---|---|"]
    for side in ("positive", "negative"):
        lines += [f"| {file['name']} | {side} | {file['sha256']} |" for file in card["files"][side]]
    return "\n".join(lines) + "\n"


def _figures(scores: NDArray[np.float64], positive: NDArray[np.bool_], threshold: float) -> dict[str, Any]:
    called = scores >= threshold
    hits = int(np.sum(called & positive))
    return {
        "positive": int(positive.sum()),
        "negative": int((~positive).sum()),
        "precision": hits / int(called.sum()) if called.any() else None,
        "recall": hits / int(positive.sum()),
        "auc": auc(scores[positive], scores[~positive]),
    }


def _number(value: float | None) -> str:
    return "not defined (nothing is called positive)" if value is None else f"{value:.4f}"


def _train(training: Sequence[Text], path: Path, settings: Settings) -> None:
    ordered = sorted(training, key=lambda one: one.key)  # an order that mixes the sides and does not depend on the files'
    fit(
        (f"{settings.positive_label if one.positive else settings.negative_label} {one.text}" for one in ordered),
        path,
        dim=settings.dim,
        epochs=settings.epochs,
        learning_rate=settings.learning_rate,
        word_ngrams=settings.word_ngrams,
        buckets=settings.buckets,
        min_count=settings.min_count,
        seed=settings.seed,
    )


def _leaks(training: Sequence[Text], heldout: Sequence[Text]) -> NDArray[np.bool_]:
    """For each held-out text, whether half or more of its runs of 13 words are in the training text. A shorter text is one run."""
    known: set[int] = set()
    wanted = [_runs(one.text) for one in heldout]
    every = set().union(*map(set, wanted)) if wanted else set()
    for one in training:
        known |= every.intersection(_runs(one.text))
    return np.array([sum(run in known for run in runs) >= _LEAK_SHARE * len(runs) for runs in wanted], dtype=np.bool_)


def _runs(text: str) -> list[int]:
    words = text.lower().split()
    spans = [words[k : k + _LEAK_WORDS] for k in range(max(1, len(words) - _LEAK_WORDS + 1))]
    return [int.from_bytes(hashlib.blake2b(" ".join(span).encode(), digest_size=8).digest(), "little") for span in spans]


def _read_all(positive: Sequence[Path], negative: Sequence[Path]) -> tuple[list[Text], dict[str, int]]:
    found: dict[bytes, Text] = {}
    both: set[bytes] = set()
    dropped = {"empty": 0, "repeated": 0, "on_both_sides": 0}
    for side, paths in ((True, positive), (False, negative)):
        for path in paths:
            for raw, source in _documents(path):
                text = normalise(raw)
                if not text:
                    dropped["empty"] += 1
                    continue
                one = Text(text, source, side)
                before = found.setdefault(one.key, one)
                if before.positive != side:
                    both.add(one.key)
                elif before is not one:
                    dropped["repeated"] += 1
    dropped["on_both_sides"] = len(both)
    return [one for key, one in found.items() if key not in both], dropped


def _documents(path: Path) -> Iterator[tuple[str, str]]:
    """(text, source) of a file's documents."""
    name = path.name.split(".")[0]
    try:
        if path.suffix == ".parquet":
            table = pq.read_table(path)
            if "text" not in table.column_names:
                raise InputError(f"score train: {path} has no column `text`; its columns are {', '.join(table.column_names)}")
            sources = table["source"].to_pylist() if "source" in table.column_names else [None] * len(table)
            yield from ((text or "", source or name) for text, source in zip(table["text"].to_pylist(), sources, strict=True))
            return
        is_json = any(part in (".jsonl", ".json", ".ndjson") for part in path.suffixes)
        with gzip.open(path, "rt", encoding="utf-8") if path.suffix == ".gz" else path.open(encoding="utf-8") as stream:
            for number, line in enumerate(stream, 1):
                if not is_json:
                    yield line, name
                elif line.strip():
                    record = json.loads(line)
                    if not isinstance(record, dict) or not isinstance(record.get("text"), str):
                        raise InputError(f"score train: {path}, line {number} has no text; expected a JSON object with `text`")
                    yield record["text"], str(record.get("source") or name)
    except (OSError, ValueError, EOFError) as error:
        raise InputError(f"score train: {path} cannot be read: {error}") from error


def _about(path: Path) -> dict[str, str]:
    from craw4llm.externals import sha256_file

    return {"name": path.name, "sha256": sha256_file(path)}
