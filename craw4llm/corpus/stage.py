"""The corpus stage: opens the source that the config names and builds the artifact from it.

    run(CorpusConfig(source=External(name="corpus", path="web.parquet")), {}, out, execution)

| source | module |
|---|---|
| a Parquet file, a folder of them | craw4llm.corpus.parquet |
| a JSON lines file, a folder of them | craw4llm.corpus.jsonl |
| a folder with nodes.parquet and edges.parquet | craw4llm.corpus.edges |
| a BVGraph (.graph, .properties), a Parquet file with the integers source and target | craw4llm.corpus.graph_only |
| a folder with web.json, kind "html_tree" | craw4llm.corpus.html_tree |
| a folder with web.json, kind "synthetic"; SyntheticWeb | craw4llm.corpus.synthetic |
| a .warc or .wet file (also .gz), a folder with such files; WarcArchive | craw4llm.corpus.warc |
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from craw4llm.artifact import Artifact, Result
from craw4llm.configs import CorpusConfig, HtmlLimits, SyntheticWeb, WarcArchive
from craw4llm.corpus import jsonl
from craw4llm.corpus.build import build, build_part
from craw4llm.corpus.edges import is_linked, open_linked
from craw4llm.corpus.extraction import DEFAULT_LIMITS
from craw4llm.corpus.graph_only import GraphSource, build_graph, has_edges, open_bvgraph, open_edges
from craw4llm.corpus.html_tree import WEB_JSON, open_web
from craw4llm.corpus.parquet import open_parquet
from craw4llm.corpus.records import Source
from craw4llm.corpus.synthetic import open_synthetic
from craw4llm.corpus.warc import is_archive, list_archive, open_warc
from craw4llm.errors import InputError
from craw4llm.execution import Execution
from craw4llm.fingerprint import External

SUPPORTED = (
    "a Parquet or JSON lines file (url, text, outlinks) or a folder of such files, a folder with web.json (an HTML tree), "
    "WARC files, "
    "a link graph (BVGraph, nodes.parquet with edges.parquet), or the synthetic web"
)

# How a file's name ends -> the format that it is not read as.
_NOT_READ = {
    ".json": "JSON (one object a line is read from .jsonl)",
    ".json.gz": "JSON (one object a line is read from .jsonl.gz)",
    ".csv": "CSV",
    ".html": "a single HTML page",
    ".zip": "ZIP",
    ".tar": "tar",
    ".tar.gz": "tar",
}


RESUMES = True


def run(config: CorpusConfig, inputs: Mapping[str, Artifact], out: Path, execution: Execution) -> Result:
    source = open_source(config.source, config.columns, config.html)
    if isinstance(source, GraphSource):
        built, more = build_graph(source, out, config, execution), {}
    else:
        built, more = build(source, out, config, execution), dict(source.notes)
    notes = {"origin": source.origin, "rejects_by_reason": built.rejects_by_reason, "skipped": built.skipped}
    return Result(counts=built.counts, notes={**notes, **more})


def run_part(config: CorpusConfig, inputs: Mapping[str, Artifact], out: Path, execution: Execution, *, part: int, of: int) -> str:
    """Prepares a share of the source, for the run that builds the artifact. Returns a sentence on what was done."""
    source = open_source(config.source, config.columns, config.html)
    if isinstance(source, GraphSource):
        return "a graph without texts has no parts; the run that builds it does all of the work"
    records = build_part(source, out, config, execution, part=part, of=of)
    return f"{records:,} records prepared"


def open_source(
    source: External | SyntheticWeb | WarcArchive, columns: Sequence[tuple[str, str]] = (), html: HtmlLimits = DEFAULT_LIMITS
) -> Source | GraphSource:
    """The source that a config names. Raises InputError for one that is missing, of the wrong form, or not supported."""
    if isinstance(source, SyntheticWeb):
        return open_synthetic(source)
    if isinstance(source, WarcArchive):
        return open_warc(Path(source.files.path), source.text, source.links, html)
    path = Path(source.path)
    if path.is_dir():
        return _open_folder(path, columns, html)
    if not path.is_file():
        raise InputError(f"corpus: {path} does not exist (looked in {Path.cwd()}); give {SUPPORTED}")
    if is_archive(path.name):
        return open_warc(path, limits=html)
    name = path.name.lower()
    if name.endswith(jsonl.ENDINGS):
        return jsonl.open_jsonl(path, columns=columns)
    if name.endswith((".graph", ".properties")):
        return open_bvgraph(path)
    for ending in sorted(_NOT_READ, key=len, reverse=True):
        if name.endswith(ending):
            raise _not_supported(path, _NOT_READ[ending])
    if name.endswith(".parquet") and has_edges(path):
        return open_edges(path)
    return open_parquet(path, columns=columns)


def _open_folder(path: Path, columns: Sequence[tuple[str, str]], html: HtmlLimits) -> Source | GraphSource:
    if (path / WEB_JSON).is_file():
        return open_web(path, html)
    if (path / "txt").is_dir() and (path / "outlink").is_dir():
        raise _not_supported(path, "ClueWeb22")
    if is_linked(path):
        return open_linked(path)
    graphs = sorted(path.glob("*.graph"))
    if len(graphs) == 1:
        return open_bvgraph(graphs[0])
    files = sorted(p for p in path.rglob("*") if p.is_file() and not p.is_symlink())
    for endings, opened in (((".parquet",), open_parquet), (jsonl.ENDINGS, jsonl.open_jsonl)):
        listed = [p for p in files if p.name.lower().endswith(endings)]
        if listed:
            return opened(path, listed, columns)
    if list_archive(path):
        return open_warc(path, limits=html)
    raise InputError(f"corpus: the folder {path} has no {WEB_JSON} and no .parquet, .jsonl or .warc files; supported are {SUPPORTED}")


def estimate(config: CorpusConfig, inputs: Mapping[str, Any]) -> dict[str, tuple[float | int | None, str]]:
    """What is known before the build: the records of the source."""
    return {"records": (open_source(config.source, config.columns, config.html).records, "records")}


def _not_supported(path: Path, kind: str) -> InputError:
    return InputError(f"corpus: {path} looks like {kind}, a source that is not read; supported are {SUPPORTED}")
