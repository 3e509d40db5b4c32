"""`craw4llm corpus PATH`: builds a corpus from any source, outside of experiments, and says what is in it.

An experiment that declares the same corpus (same content, same options) finds it finished.
"""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args

import click

from craw4llm.configs import ClueWeb22, Column, CorpusConfig, Obeyed, UrlRules, WarcArchive
from craw4llm.errors import ConfigError
from craw4llm.execution import Execution, default_workers
from craw4llm.fingerprint import External
from craw4llm.options import Bytes, Part, root_option

_DEFAULT = {field.name: field.default for field in dataclasses.fields(CorpusConfig)}


def _option(name: str, **more: Any) -> Callable[[Any], Any]:
    return click.option(f"--{name.replace('_', '-')}", name, default=_DEFAULT[name], show_default=True, **more)


@click.command("corpus")
@click.argument("path", type=click.Path(exists=True, path_type=Path))
@click.option("--column", "columns", multiple=True, metavar="NAME=FIELD", help="Parquet, JSON lines: our NAME is called FIELD there.")
@_option("heldout_fraction", type=float, help="Share of the pages held out.")
@_option("heldout_by", type=click.Choice(["page", "host"]), help="Single pages or whole hosts.")
@_option("heldout_min_chars", type=int, help="Shorter pages are never held out.")
@_option("dangling_links", type=click.Choice(["dead", "outside"]), help="Links to URLs that the source has not.")
@_option("max_text_chars", type=int, help="The rest of a longer text is cut off.")
@_option("duplicates", type=click.Choice(["first", "last"]), help="Which record of a URL is the page.")
@_option("nofollow", type=click.Choice(["follow", "drop"]), help="Links marked nofollow.")
@_option("max_reject_share", type=float, help="More unusable records than this fail the build.")
@click.option("--obey", multiple=True, type=click.Choice(get_args(Obeyed)), help="Leave out pages whose owner asks for this.")
@click.option("--sort-query", is_flag=True, help="URLs that differ in the order of parameters are one.")
@click.option("--drop-tracking", is_flag=True, help="Parameters such as utm_source and gclid are taken out of URLs.")
@click.option("--streams", multiple=True, help="ClueWeb22: languages or streams that the collection is (en, en0, en00); several times.")
@click.option(
    "--links",
    type=click.Choice(["compiled", "in_place", "html", "wat"]),
    help="ClueWeb22: compiled (default) or in_place. WARC: html or wat.",
)
@click.option("--indegree", type=click.Choice(["links", "inlink"]), help="ClueWeb22: what in-degrees count.")
@click.option("--targets", type=click.Choice(["auto", "ids", "urls"]), help="ClueWeb22: what links are resolved by.")
@click.option("--text", type=click.Choice(["html", "wet"]), help="WARC: which text is a page's.")
@click.option("--workers", type=click.IntRange(1), default=default_workers, show_default="processors")
@click.option("--memory", type=Bytes(), default="2G", show_default=True, help="For sorting, all processes together.")
@click.option("--part", type=Part(), help="Prepare this share and stop; the command without it puts all together.")
@root_option
def corpus(
    path: Path,
    columns: tuple[str, ...],
    obey: tuple[Obeyed, ...],
    sort_query: bool,
    drop_tracking: bool,
    workers: int,
    memory: int,
    part: tuple[int, int] | None,
    root: Path,
    streams: tuple[str, ...],
    links: str | None,
    indegree: str | None,
    targets: str | None,
    text: str | None,
    **fields: Any,
) -> None:
    """Build a corpus from PATH (Parquet, JSON lines, ClueWeb22, WARC, HTML tree, link graph; docs/corpus.md) and describe it."""
    from craw4llm import runner
    from craw4llm.corpus.reader import Corpus
    from craw4llm.corpus.show import describe

    source = _source(path, tuple(sorted(set(streams))), {"links": links, "indegree": indegree, "targets": targets, "text": text})
    if links == "in_place":  # which knows neither held-out pages nor dead links
        for name, value in (("heldout_fraction", 0.0), ("dangling_links", "outside")):
            if click.get_current_context().get_parameter_source(name) is click.core.ParameterSource.DEFAULT:
                fields[name] = value
    config = CorpusConfig(
        source=source,
        columns=tuple(_column(column) for column in columns),
        obey=tuple(sorted(set(obey))),
        url_rules=UrlRules(query="sorted" if sort_query else "kept", drop_tracking=drop_tracking),
        **fields,
    )
    execution = Execution(root=root, workers=workers, memory_bytes=memory)
    work = runner.single(config, execution)
    if part is not None:
        click.echo(f"part {part[0]} of {part[1]}: {runner.build_share(work, execution, *part)}")
        return
    runner.build(work, execution)
    click.echo(describe(Corpus(runner.built(work, execution))))


def _source(path: Path, streams: tuple[str, ...], choices: dict[str, str | None]) -> External | ClueWeb22 | WarcArchive:
    """The source with the choices that were given; without any it is the path alone, as in an experiment that names no more."""
    given: dict[str, Any] = {name: value for name, value in choices.items() if value is not None}
    external = External(name="corpus", path=str(path))
    if streams or given.keys() & {"indegree", "targets"} or given.get("links") in ("compiled", "in_place"):
        if given.keys() & {"text"}:
            raise ConfigError(f"--text {given['text']} is for WARC files, the other options are for ClueWeb22; give those of one of them")
        return ClueWeb22(folder=external, streams=streams, **given)
    return WarcArchive(files=external, **given) if given else external


def _column(text: str) -> tuple[Any, str]:
    name, equals, field = text.partition("=")
    if not equals or name not in get_args(Column) or not field:
        raise ConfigError(f"--column {text!r}: expected NAME=FIELD, NAME one of {', '.join(get_args(Column))}")
    return name, field
