"""The stage `scorer`: a given fastText model, one trained from labelled lines, a table of scores, or one of the other kinds.

Writes scorer.json and model.bin, table.parquet, column.npy or model/ (docs/artifacts.md, "scorer"). What is wrong with a model, a table or
training text is said here, before any page is scored.
"""

import dataclasses
import json
import shutil
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from craw4llm.artifact import Artifact, Result
from craw4llm.configs import Encoder, Ensemble, EntryPoint, GraphMeasure, Length, ScorerConfig, SyntheticText, UrlFeature
from craw4llm.corpus.reader import Corpus
from craw4llm.corpus.urls import canonical_url
from craw4llm.errors import InputError
from craw4llm.execution import Execution
from craw4llm.externals import locate
from craw4llm.fingerprint import External
from craw4llm.scoring.encoder import EncoderScorer
from craw4llm.scoring.ensemble import members_of
from craw4llm.scoring.plugins import open_plugin
from craw4llm.scoring.scorer import FastTextScorer, fit, load_model, open_scorer

ROW_GROUP_ROWS = 1 << 17
_PREFIX = "__label__"


def run(config: ScorerConfig, inputs: Mapping[str, Artifact], out: Path, execution: Execution) -> Result:
    result = Result(counts={"training_lines": (None, "lines")})
    source = config.source
    about: dict[str, Any] = {"kind": config.kind}
    if config.kind == "table":
        about["column"] = config.column
        result = _table(config, out)
    elif config.kind == "fasttext":
        assert isinstance(source, External)
        load_model(locate(source), config.label)  # before an unfit file of many megabytes is copied
        shutil.copyfile(locate(source), out / "model.bin")
        about |= _fasttext(config, out)
        result = Result(counts={"training_lines": (None, "lines")}, notes={"origin": f"a given model: {source.name}"})
    elif config.kind == "train_fasttext":
        result = _train(config, out)
        about |= _fasttext(config, out)
    elif isinstance(source, GraphMeasure):
        about |= {"kind": "column", "measure": config.kind}
        result = _graph(config.kind, source, inputs["corpus"], out, execution)
    elif isinstance(source, Ensemble):
        about["members"] = members_of(source, inputs, execution)
        for member in about["members"]:
            open_scorer(inputs[member["name"]])
    elif isinstance(source, Encoder):
        about |= {name: value for name, value in dataclasses.asdict(source).items() if name != "model"}
        shutil.copytree(locate(source.model), out / "model")
        EncoderScorer(out / "model", about, "cpu").score(["A text that shows that the model works."], ())
    elif isinstance(source, EntryPoint):
        about |= {"name": source.name, "version": source.version, "options": dict(source.options)}
        open_plugin(source.name, source.version, about["options"])
    else:
        assert isinstance(source, Length | UrlFeature)
        about |= dataclasses.asdict(source)
    (out / "scorer.json").write_text(json.dumps(about, indent=2, sort_keys=True) + "\n")
    return result


def _graph(measure: str, given: GraphMeasure, artifact: Artifact, out: Path, execution: Execution) -> Result:
    """column.npy float32[n_targets]: the measure of every target of the corpus."""
    from craw4llm.scoring.graph import harmonic, links_of, pagerank  # brings numba, which takes half a second

    corpus = Corpus(artifact)
    notes: dict[str, Any] = {}
    with execution.progress(f"scorer {measure}", total=0, unit="iteration") as progress:
        tick = lambda text: progress.update(1, text)  # noqa: E731
        if measure == "indegree":
            column = np.asarray(corpus.indegree).astype(np.float64)
        elif measure == "pagerank":
            column, notes = pagerank(links_of(corpus), corpus.n_targets, damping=given.damping, tolerance=given.tolerance, tick=tick)
        else:
            column, notes = harmonic(links_of(corpus), corpus.n_targets, registers=given.registers, tick=tick)
    np.save(out / "column.npy", column.astype(np.float32))
    return Result(counts={"training_lines": (None, "lines"), "targets": (len(column), "targets")}, notes=notes)


def _fasttext(config: ScorerConfig, out: Path) -> dict[str, Any]:
    """scorer.json of the model in `out`, with the arrays of its route. Reads it with the library, so its self-check has passed."""
    library = FastTextScorer(out / "model.bin", config.label)
    if config.route == "library":
        return {"kind": "fasttext", "label": config.label, "route": "library", "reading": config.reading}
    from craw4llm.scoring.routes import write_route

    released = None
    if config.reading == "released":
        from craw4llm.scoring.released import ReleasedFastTextScorer

        released = ReleasedFastTextScorer(out / "model.bin", config.label, text_normalize=False, model=library.model)
    return {"kind": "fasttext", **write_route(out, config.label, config.route, library, released)}


def _train(config: ScorerConfig, out: Path) -> Result:
    origin, lines = read_training_lines(_source_lines(config), config.label)
    fit(
        lines,
        out / "model.bin",
        dim=config.dim,
        epochs=config.epochs,
        learning_rate=config.learning_rate,
        word_ngrams=config.word_ngrams,
        buckets=config.buckets,
        seed=config.seed,
    )
    return Result(counts={"training_lines": (len(lines), "lines")}, notes={"origin": origin})


def _source_lines(config: ScorerConfig) -> Iterable[str]:
    if isinstance(config.source, SyntheticText):
        from craw4llm.corpus.synthetic import training_lines

        return training_lines(config.source)
    assert isinstance(config.source, External)
    return _file_lines(locate(config.source))


def _file_lines(path: Path) -> Iterator[str]:
    with path.open("rb") as stream:
        for number, line in enumerate(stream, 1):
            try:
                yield line.decode("utf-8-sig" if number == 1 else "utf-8")
            except UnicodeDecodeError as error:
                raise InputError(f"scorer text: {path}, line {number} is not UTF-8 ({error.reason}); convert the file") from error


def read_training_lines(source: Iterable[str], label: str) -> tuple[str, list[str]]:
    """(origin, lines `__label__x text` with white space folded) of labelled text.

    Lines that begin with `#` say where the text comes from. Raises InputError for a line without a label, and for text that
    lacks `label` or has no other label.
    """
    origin: list[str] = []
    lines: list[str] = []
    labels: set[str] = set()
    for number, raw in enumerate(source, 1):
        line = " ".join(raw.replace("\0", " ").split())
        if line.startswith("#"):
            origin.append(line.lstrip("# ").removeprefix("origin:").strip())
        elif line:
            first, _, text = line.partition(" ")
            if not first.startswith(_PREFIX) or len(first) == len(_PREFIX) or not text:
                raise InputError(
                    f"scorer text: line {number} is {line[:60]!r}; expected `{_PREFIX}x` and text, or a line of origin, `# ...`"
                )
            labels.add(first)
            lines.append(line)
    if label not in labels or len(labels) < 2:
        found = ", ".join(sorted(labels)) or "none"
        raise InputError(f"scorer text: its labels are {found}; expected {label} and at least one more")
    return " ".join(origin) or "not stated in the training text", lines


def _table(config: ScorerConfig, out: Path) -> Result:
    assert isinstance(config.source, External)
    path = locate(config.source)
    try:
        schema = pq.read_schema(path)
        lacking = [name for name in ("url", config.column) if name not in schema.names]
        if lacking:
            raise InputError(f"scorer table: {path} has no column {', '.join(lacking)}; its columns are {', '.join(schema.names)}")
        table = pq.read_table(path, columns=["url", config.column])
        given = table.column(config.column).cast(pa.float32())
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError, OSError) as error:
        raise InputError(f"scorer table: {path} cannot be read as a Parquet table of urls and numbers: {error}") from error
    urls = pa.array([canonical_url(url) if url is not None else None for url in table.column("url").to_pylist()], type=pa.string())
    usable = pa.table({"url": urls, "score": given})
    usable = usable.filter(pc.and_(pc.is_valid(usable["url"]), pc.is_finite(pc.fill_null(usable["score"], float("nan")))))
    usable = usable.sort_by([("url", "ascending"), ("score", "ascending")]).combine_chunks()
    if not usable.num_rows:
        raise InputError(f"scorer table: {path} has no row with a web page's URL and a finite number in {config.column!r}")
    names = usable.column("url").combine_chunks()
    scores = usable.column("score").to_numpy()
    repeat = np.asarray(pc.equal(names[1:], names[:-1])).astype(bool)
    unequal = np.flatnonzero(repeat & (scores[1:] != scores[:-1]))
    if len(unequal):
        row = int(unequal[0])
        raise InputError(
            f"scorer table: {path} gives {names[row].as_py()} the scores {scores[row]} and {scores[row + 1]} "
            f"({len(unequal)} such URLs); expected one score for each URL"
        )
    usable = usable.filter(pa.array(np.concatenate([[True], ~repeat])))
    pq.write_table(usable, out / "table.parquet", compression="zstd", row_group_size=ROW_GROUP_ROWS)
    return Result(
        counts={"training_lines": (None, "lines"), "urls": (usable.num_rows, "urls"), "unusable_rows": (len(table) - len(names), "rows")},
        notes={"origin": f"a given table of scores: {config.source.name}, column {config.column}"},
    )
