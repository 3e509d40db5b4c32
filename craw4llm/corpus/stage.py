"""The corpus stage: opens the source that the config names and builds the artifact from it.

    run(CorpusConfig(source=External(name="corpus", path="web.parquet")), {}, out, execution)

| source | module |
|---|---|
| a Parquet file | craw4llm.corpus.parquet |
| a folder with txt and outlink: ClueWeb22 | craw4llm.corpus.clueweb22_build |
| a folder with web.json, kind "html_tree" | craw4llm.corpus.html_tree |
| a folder with web.json, kind "synthetic"; SyntheticWeb | craw4llm.corpus.synthetic |
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from craw4llm.artifact import Artifact, Result
from craw4llm.configs import ClueWeb22, CorpusConfig, SyntheticWeb
from craw4llm.corpus.build import build
from craw4llm.corpus.clueweb22_files import count_records, is_clueweb22
from craw4llm.corpus.html_tree import WEB_JSON, open_web
from craw4llm.corpus.parquet import open_parquet
from craw4llm.corpus.records import Source
from craw4llm.corpus.synthetic import open_synthetic
from craw4llm.errors import InputError
from craw4llm.execution import Execution
from craw4llm.fingerprint import External

SUPPORTED = (
    "a Parquet file (url, text, outlinks), a folder with web.json (an HTML tree), a ClueWeb22 folder (txt, outlink), or the synthetic web"
)

# How a file's name ends -> the format that it is not read as yet.
_NOT_YET = {
    ".warc": "WARC",
    ".warc.gz": "WARC",
    ".wet": "WET",
    ".wet.gz": "WET",
    ".wat": "WAT",
    ".wat.gz": "WAT",
    ".arc": "ARC",
    ".arc.gz": "ARC",
    ".jsonl": "JSON lines",
    ".jsonl.gz": "JSON lines",
    ".jsonl.zst": "JSON lines",
    ".ndjson": "JSON lines",
    ".json": "JSON",
    ".json.gz": "JSON lines",
    ".csv": "CSV",
    ".html": "a single HTML page",
    ".zip": "ZIP",
    ".tar": "tar",
    ".tar.gz": "tar",
}


RESUMES = True  # the parts of an interrupted ClueWeb22 build are gone on from; other sources write all files anew


def run(config: CorpusConfig, inputs: Mapping[str, Artifact], out: Path, execution: Execution) -> Result:
    clueweb22 = clueweb22_of(config.source)
    if clueweb22 is not None:
        from craw4llm.corpus import clueweb22_build

        return clueweb22_build.build(clueweb22, out, config, execution)
    assert not isinstance(config.source, ClueWeb22)
    source = open_source(config.source)
    built = build(source, out, config, execution)
    return Result(
        counts=built.counts,
        notes={"origin": source.origin, "rejects_by_reason": built.rejects_by_reason, **source.notes},
    )


def clueweb22_of(source: External | SyntheticWeb | ClueWeb22) -> ClueWeb22 | None:
    """The ClueWeb22 folder that a source is, with the choices that it gives; None for another source."""
    if isinstance(source, ClueWeb22):
        if not is_clueweb22(Path(source.folder.path)):
            raise InputError(f"corpus: {source.folder.path} has no folders txt and outlink; expected ClueWeb22 as delivered")
        return source
    if isinstance(source, External) and is_clueweb22(Path(source.path)):
        return ClueWeb22(folder=source)
    return None


def open_source(source: External | SyntheticWeb) -> Source:
    """The source that a config names. Raises InputError for one that is missing, of the wrong form, or not supported."""
    if isinstance(source, SyntheticWeb):
        return open_synthetic(source)
    path = Path(source.path)
    if path.is_dir():
        if (path / WEB_JSON).is_file():
            return open_web(path)
        raise InputError(f"corpus: the folder {path} has no {WEB_JSON}; supported are {SUPPORTED}")
    if not path.is_file():
        raise InputError(f"corpus: {path} does not exist (looked in {Path.cwd()}); give {SUPPORTED}")
    name = path.name.lower()
    for ending in sorted(_NOT_YET, key=len, reverse=True):
        if name.endswith(ending):
            raise _not_supported(path, _NOT_YET[ending])
    return open_parquet(path)


def estimate(config: CorpusConfig, inputs: Mapping[str, Any]) -> dict[str, tuple[float | int | None, str]]:
    """What is known before the build: the records of the source."""
    clueweb22 = clueweb22_of(config.source)
    if clueweb22 is not None:
        return {"records": (count_records(Path(clueweb22.folder.path), clueweb22.streams), "records")}
    assert not isinstance(config.source, ClueWeb22)
    return {"records": (open_source(config.source).records, "records")}


def _not_supported(path: Path, kind: str) -> InputError:
    return InputError(f"corpus: {path} looks like {kind}, a source that is not supported yet; supported are {SUPPORTED}")
