"""The corpus stage: opens the source that the config names and builds the artifact from it.

    run(CorpusConfig(source=External(name="corpus", path="web.parquet")), {}, out, execution)

| source | module |
|---|---|
| a Parquet file | craw4llm.corpus.parquet |
| a folder with web.json, kind "html_tree" | craw4llm.corpus.html_tree |
| a folder with web.json, kind "synthetic"; SyntheticWeb | craw4llm.corpus.synthetic |
| a .warc, .wet file (also .gz), a folder with such files; WarcArchive | craw4llm.corpus.warc |
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from craw4llm.artifact import Artifact, Result
from craw4llm.configs import CorpusConfig, HtmlLimits, SyntheticWeb, WarcArchive
from craw4llm.corpus.build import build
from craw4llm.corpus.extraction import DEFAULT_LIMITS
from craw4llm.corpus.html_tree import WEB_JSON, open_web
from craw4llm.corpus.parquet import open_parquet
from craw4llm.corpus.records import Source
from craw4llm.corpus.synthetic import open_synthetic
from craw4llm.corpus.warc import is_archive, list_archive, open_warc
from craw4llm.errors import InputError
from craw4llm.execution import Execution
from craw4llm.fingerprint import External

SUPPORTED = "a Parquet file (url, text, outlinks), a folder with web.json (an HTML tree), WARC files, or the synthetic web"

# How a file's name ends -> the format that it is not read as yet.
_NOT_YET = {
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


def run(config: CorpusConfig, inputs: Mapping[str, Artifact], out: Path, execution: Execution) -> Result:
    source = open_source(config.source, config.html)
    built = build(source, out, config, execution)
    return Result(
        counts=built.counts,
        notes={"origin": source.origin, "rejects_by_reason": built.rejects_by_reason, **source.notes},
    )


def open_source(source: External | SyntheticWeb | WarcArchive, html: HtmlLimits = DEFAULT_LIMITS) -> Source:
    """The source that a config names. Raises InputError for one that is missing, of the wrong form, or not supported."""
    if isinstance(source, SyntheticWeb):
        return open_synthetic(source)
    if isinstance(source, WarcArchive):
        return open_warc(Path(source.files.path), source.text, source.links, html)
    path = Path(source.path)
    if path.is_dir():
        if (path / WEB_JSON).is_file():
            return open_web(path, html)
        if (path / "txt").is_dir() and (path / "outlink").is_dir():
            raise _not_supported(path, "ClueWeb22")
        if list_archive(path):
            return open_warc(path, limits=html)
        raise InputError(f"corpus: the folder {path} has no {WEB_JSON}; supported are {SUPPORTED}")
    if not path.is_file():
        raise InputError(f"corpus: {path} does not exist (looked in {Path.cwd()}); give {SUPPORTED}")
    if is_archive(path.name):
        return open_warc(path, limits=html)
    name = path.name.lower()
    for ending in sorted(_NOT_YET, key=len, reverse=True):
        if name.endswith(ending):
            raise _not_supported(path, _NOT_YET[ending])
    return open_parquet(path)


def estimate(config: CorpusConfig, inputs: Mapping[str, Any]) -> dict[str, tuple[float | int | None, str]]:
    """What is known before the build: the records of the source."""
    return {"records": (open_source(config.source, config.html).records, "records")}


def _not_supported(path: Path, kind: str) -> InputError:
    return InputError(f"corpus: {path} looks like {kind}, a source that is not supported yet; supported are {SUPPORTED}")
