"""The command line, `craw4llm COMMAND` or `python -m craw4llm COMMAND`; `craw4llm --help` lists the commands.

    craw4llm plan tiny --set corpus=web.parquet      the stages, what is finished, what the rest would cost
    craw4llm run tiny                                builds what is missing and prints the report's path
    craw4llm run tiny --only quality.crawl           one stage, its inputs must be there (what an Airflow task runs)
    craw4llm run tiny --only corpus --part 2/8       a share of one stage, for several hosts (craw4llm.stage: run_part)

Exit codes: 0 done; 2 a parameter or config; 3 an input from outside; 4 an artifact; 5 a stage; 6 the disk; 75 a stage was asked to
end and has saved where it is (run it again); 130 interrupted.
"""

import sys

if sys.argv[1:2] == ["crawl"]:  # over finished stages it is done in a sixth of a second, most of it start-up; hence this, and `_leave`
    from craw4llm import quick_start

    quick_start.begin()

import dataclasses
import json
import logging
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import click

from craw4llm import __version__
from craw4llm.artifact import Store, storage_errors
from craw4llm.corpus.command import corpus as corpus_command
from craw4llm.errors import ConfigError, Craw4LLMError
from craw4llm.execution import Execution, default_workers
from craw4llm.experiment import Graph, expand, keep, kept_names, load, names
from craw4llm.options import Bytes, Part, root_option

COMMANDS = "craw4llm.commands"  # entry-point group of further commands, so that `craw4llm` need not import `training`


class _Commands(click.Group):
    """The commands of this file, and those that installed packages register (name -> click command), loaded when asked for."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        import importlib.metadata  # a tenth of a second, which commands of this file do not need

        return sorted({*super().list_commands(ctx), *(entry.name for entry in importlib.metadata.entry_points(group=COMMANDS))})

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        found = super().get_command(ctx, cmd_name)
        if found is None:
            import importlib.metadata

            for entry in importlib.metadata.entry_points(group=COMMANDS, name=cmd_name):
                found = entry.load()
        return found


@click.group(cls=_Commands, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 120})
@click.version_option(__version__)
def cli() -> None:
    """Which crawl policy gives the better language model for the same number of page fetches?"""


def _options(function: Callable[..., Any]) -> Callable[..., Any]:
    """Options of every command that names an experiment."""
    for option in (
        root_option,
        click.option("--replicates", type=int, help="Number of replicates (default: the experiment's own)."),
        click.option("--set", "settings", multiple=True, metavar="KEY=VALUE", help="A parameter of the experiment."),
        click.argument("experiment"),
    ):  # fmt: skip
        function = option(function)
    return function


def _graph(experiment: str, settings: tuple[str, ...], replicates: int | None, root: Path) -> Graph:
    return expand(load(experiment, root), _given(settings), replicates)


def _given(settings: tuple[str, ...], option: str = "--set") -> dict[str, str]:
    given = {}
    for setting in settings:
        name, equals, value = setting.partition("=")
        if not equals or not name:
            raise ConfigError(f"{option} {setting!r}: expected KEY=VALUE")
        given[name] = value
    return given


@cli.command()
@_options
@click.option("--cores", type=click.IntRange(1), default=16, show_default=True, help="Processors for all stages together, to reckon hours.")
@click.option("--gpus", type=click.IntRange(1), default=8, show_default=True, help="GPUs for all models together, likewise.")
@click.option(
    "--rate", "rates", multiple=True, metavar="NAME=VALUE", help="What a stage takes per page, byte or link (craw4llm/plan_rates.py)."
)
@click.option("--count", "counts", multiple=True, metavar="NAME=VALUE", help="Of a corpus that is not at hand: pages, text_bytes, links.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object: stages to do, cost, facts per arm, what is absent or short.")
def plan(
    experiment: str,
    settings: tuple[str, ...],
    replicates: int | None,
    root: Path,
    cores: int,
    gpus: int,
    rates: tuple[str, ...],
    counts: tuple[str, ...],
    as_json: bool,
) -> None:
    """Show the stages of EXPERIMENT, what is finished, what the arms will cost, what each stage needs, and what will fall short. Nothing is
    run."""
    from craw4llm.plan import describe, summary
    from craw4llm.plan_needs import Machines, needs_record, needs_text, stage_needs, with_counts
    from craw4llm.plan_rates import rates_with
    from craw4llm.runner import make_plan

    reckoned, counted = rates_with(_given(rates, "--rate")), _given(counts, "--count")
    graph = _graph(experiment, settings, replicates, root)
    planned = with_counts(make_plan(graph, Execution(root=root), absent_inputs=True), counted)
    needs = stage_needs(planned, parts=load(experiment, root).parts, rates=reckoned)
    machines = Machines(cores=cores, gpus=gpus)
    text = describe(planned) + (f"\n\n{needs_text(planned, needs, machines)}" if needs else "")
    click.echo(json.dumps(summary(planned) | {"needs": needs_record(planned, needs, machines), "text": text}) if as_json else text)


@cli.command()
@_options
@click.option("--only", default="", help="One stage: an id that `plan` lists, or a stage kind. Its inputs must be finished.")
@click.option("--part", type=Part(), help="With --only: prepare this share of the stage and stop; the run without it puts all together.")
@click.option("--arm", default="", help="Only stages of this arm or policy.")
@click.option("--jobs", type=click.IntRange(1), default=default_workers, show_default="processors", help="Stages at a time.")
@click.option("--workers", type=click.IntRange(1), default=default_workers, show_default="processors", help="Processes a stage may use.")
@click.option("--memory", type=Bytes(), default="2G", show_default=True, help="For stages that sort on disk (corpus).")
@click.option("--device", default="auto", show_default=True, help="auto, cpu, cuda, cuda:1 ...")
@click.option("--micro-batch", type=click.IntRange(0), default=0, help="Sequences a device takes at once (0: chosen).")
@click.option("--ranks", type=click.IntRange(1), default=1, show_default=True, help="Training processes, one device each.")
@click.option("--save-every", type=click.FloatRange(0), default=10.0, show_default=True, help="Seconds between saved training states.")
@click.option("--keep-states", type=click.IntRange(1), default=2, show_default=True, help="Training states kept while a run lasts.")
@click.option("--milestone-every", type=click.IntRange(0), default=0, help="Keep training states at multiples of so many steps.")
@click.option("--validate-every", type=click.IntRange(0), default=0, help="Steps between two held-out losses (0: at the end).")
@click.option("--parallel", type=click.Choice(["ddp", "fsdp"]), default="ddp", show_default=True, help="Ranks hold all, or parts.")
@click.option("--loader-workers", type=click.IntRange(0), default=1, show_default=True, help="Threads that read batches ahead.")
@click.option("--shards-from", default="", help="Address of a copy of the artifact root, for training shards that are not here.")
@click.option("--tensorboard", type=click.Path(file_okay=False, path_type=Path), help="A folder for TensorBoard's files.")
@click.option("--wandb", default="", help="A Weights & Biases project to log training to.")
@click.option("--compile/--no-compile", default=None, help="torch.compile the model (default: on CUDA).")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON line per stage: what it made and where; all else goes to stderr.")
def run(
    experiment: str,
    settings: tuple[str, ...],
    replicates: int | None,
    root: Path,
    only: str,
    part: tuple[int, int] | None,
    arm: str,
    jobs: int,
    workers: int,
    memory: int,
    device: str,
    micro_batch: int,
    ranks: int,
    save_every: float,
    keep_states: int,
    milestone_every: int,
    validate_every: int,
    parallel: Literal["ddp", "fsdp"],
    loader_workers: int,
    shards_from: str,
    tensorboard: Path | None,
    wandb: str,
    compile: bool | None,
    as_json: bool,
) -> None:
    """Build what is missing of EXPERIMENT and print where its report is."""
    from craw4llm import browse, runner

    started = time.monotonic()
    graph = _graph(experiment, settings, replicates, root)
    execution = Execution(
        root=root,
        workers=workers,
        memory_bytes=memory,
        device=device,
        micro_batch=micro_batch,
        ranks=ranks,
        save_every_s=save_every,
        keep_states=keep_states,
        milestone_steps=milestone_every,
        validate_steps=validate_every,
        parallel=parallel,
        loader_workers=loader_workers,
        shards_from=shards_from,
        tensorboard=tensorboard,
        wandb=wandb,
        compile=compile,
    )
    planned = runner.make_plan(graph, execution)
    nodes = graph.select(only, arm)
    if part is not None:
        if len(nodes) != 1 or not only:
            raise ConfigError(f"--part {part[0]}/{part[1]} needs --only with one stage; these are {', '.join(n.id for n in nodes)}")
        runner.record(planned)
        done = runner.build_part(planned, nodes[0], execution, *part)
        work = planned.work[nodes[0].id]
        facts = {"node": nodes[0].id, "stage": work.config.stage, "fingerprint": work.fingerprint, "part": list(part), "done": done}
        click.echo(json.dumps(facts) if as_json else f"{nodes[0].id}, part {part[0]} of {part[1]}: {done}")
        return
    if arm and not only:  # an arm is of use only with all that it is made from
        wanted = {s.key for node in nodes for s in node.stage.ancestors()}
        nodes = tuple(n for n in graph.nodes if n.stage.key in wanted)
    built = runner.run(planned, nodes, execution, jobs=jobs)
    spent = time.monotonic() - started
    if built:
        click.echo(f"{experiment}: {len(built)} of {len(nodes)} stages built in {spent:.1f} s, the others were finished", err=as_json)
    else:
        click.echo(f"{experiment}: nothing to do, all {len(nodes)} stages are finished ({spent:.1f} s)", err=as_json)
    if as_json:
        for node in nodes:
            click.echo(json.dumps(browse.record(node.id, planned.artifact(node), built=node.id in built)))
        return
    report = planned.artifact(graph.node(graph.id_of(graph.report)))
    if report is not None and graph.report.key in {n.stage.key for n in nodes}:
        click.echo(f"report: {report.file('report.html').resolve()}")
    elif len(nodes) == 1:
        artifact = planned.artifact(nodes[0])
        assert artifact is not None
        click.echo(f"{nodes[0].id}: {artifact.path.resolve()}")


@cli.command()
@click.option("--corpus", required=True, help="A ClueWeb22 folder, or any source of a corpus.")
@click.option("--policy", default="quality", show_default=True, help="What is crawled next (docs/artifacts.md, Policies).")
@click.option("--pages", type=int, required=True, help="Pages to crawl.")
@click.option("--batch", "batch_pages", type=int, default=10_000, show_default=True, help="Pages of an iteration.")
@click.option(
    "--mode", type=click.Choice(["paper", "released"]), default="paper", show_default=True, help="released: as the released code."
)
@click.option("--seeds", default="", help="A file of document ids or URLs, one a line.")
@click.option("--seed-count", type=int, default=10_000, show_default=True, help="Without --seeds: pages drawn by hash.")
@click.option("--rng-seed", type=int, default=42, show_default=True)
@click.option("--scorer", default="", help="A fastText model.")
@click.option("--label", default="__label__hq", show_default=True, help="Its label that is the score.")
@click.option("--route", type=click.Choice(["library", "exact", "projected"]), default="projected", show_default=True)
@click.option("--streams", multiple=True, help="ClueWeb22: languages or streams that the collection is (en, en0, en00); several times.")
@click.option("--links", type=click.Choice(["compiled", "in_place"]), default="compiled", show_default=True, help="ClueWeb22.")
@click.option("--indegree", type=click.Choice(["links", "inlink"]), default="links", show_default=True, help="ClueWeb22.")
@click.option("--dangling-links", type=click.Choice(["dead", "outside"]), default="dead", show_default=True)
@click.option("--heldout-fraction", type=float, default=0.0, show_default=True)
@click.option("--lists", type=click.Path(file_okay=False, path_type=Path), help="Folder for iter_K.docids.txt, as the released code's.")
@click.option("--workers", type=click.IntRange(1), default=default_workers, show_default="processors")
@root_option
def crawl(root: Path, workers: int, **wanted: Any) -> None:
    """Crawl a corpus once, without an experiment file, and print where the crawl is."""
    from craw4llm.crawl.direct import Wanted
    from craw4llm.crawl.direct import crawl as run_crawl

    artifact = run_crawl(Wanted(**wanted), Execution(root=root, workers=workers))
    click.echo(f"{artifact.count('crawled_pages'):,} pages crawled, {artifact.count('fetches'):,} fetches: {artifact.path.resolve()}")


@cli.command()
@_options
def declare(experiment: str, settings: tuple[str, ...], replicates: int | None, root: Path) -> None:
    """Keep EXPERIMENT with these values under a name of its own, which all commands know, and print the name."""
    declared = load(experiment, root)
    with storage_errors(root):
        click.echo(keep(declared, _given(settings), declared.replicates if replicates is None else replicates, root).name)


@cli.command()
@_options
@click.option("--run-id", required=True, help="Who claims it: a run that asks again has what it had.")
@click.option("--release", "give_back", is_flag=True, help="Give the run's replicate back instead.")
def claim(experiment: str, settings: tuple[str, ...], replicates: int | None, root: Path, run_id: str, give_back: bool) -> None:
    """Claim the next replicate of EXPERIMENT for a run, and print it as JSON; or say why no further one is wanted."""
    from craw4llm import reruns

    declared, given = load(experiment, root), _given(settings)
    if replicates is not None:
        declared = dataclasses.replace(declared, until_replicates=replicates)
    if give_back:
        click.echo(json.dumps({"released": reruns.release(declared, given, root, run_id)}))
    else:
        click.echo(json.dumps(reruns.claim(declared, given, root, run_id)))


@cli.command()
@click.argument("name", required=False)
@click.argument("what", required=False)
@click.option("--svg", type=click.Path(dir_okay=False, path_type=Path), help="For a crawl: also write its plot to this file.")
@click.option("--seeds", type=click.Path(exists=True, dir_okay=False, path_type=Path), help="For a corpus: what is reachable from these.")
@root_option
def show(name: str | None, what: str | None, svg: Path | None, seeds: Path | None, root: Path) -> None:
    """List experiments and their runs; or show the runs of an experiment, or an artifact named by its fingerprint.

    `show crawl FINGERPRINT`: the iterations of a crawl, with a plot of its scores.
    `show corpus EXPERIMENT|FINGERPRINT|FOLDER`: pages, hosts, languages, links, degrees, text sizes, what can be reached.
    `show page URL|ID`: a page with its links, and its life: found and crawled when and through which page, score, selected or why not,
    in which samples.
    """
    from craw4llm import browse

    if what is None and name not in ("corpus", "crawl", "page"):
        click.echo(browse.show(name, root, [*names(), *kept_names(root)]))
    elif what is not None and name == "page":
        click.echo(browse.show_page(what, root))
    elif what is not None and name == "corpus":
        from craw4llm.corpus.reader import Corpus
        from craw4llm.corpus.show import describe as describe_corpus
        from craw4llm.corpus.show import find_corpora

        click.echo("\n\n".join(describe_corpus(Corpus(artifact), seeds) for artifact in find_corpora(what, root)))
    elif what is not None and name == "crawl":
        from craw4llm.crawl.show import describe, open_crawl, plot_svg

        trace = open_crawl(root, what)
        click.echo(describe(trace))
        if svg is not None:
            plot_svg(trace, svg)
    else:
        raise ConfigError(f"show {name} {what or ''}: expected `show`, `show NAME`, or `show corpus|crawl|page WHAT`")


@cli.command()
@click.argument("crawl_a")
@click.argument("crawl_b")
@root_option
def diff(crawl_a: str, crawl_b: str, root: Path) -> None:
    """Compare two crawls of one corpus, named by their fingerprints: first divergence, overlap by rank, hosts, scores."""
    from craw4llm.crawl.show import compare, open_crawl

    click.echo(compare(open_crawl(root, crawl_a), open_crawl(root, crawl_b)))


@cli.command()
@click.argument("selection")
@click.option("--out", required=True, type=Path, help="File to write: .jsonl.zst, .jsonl.gz or .jsonl.")
@root_option
def export(selection: str, out: Path, root: Path) -> None:
    """Write the pages of SELECTION (the fingerprint of a select artifact, or its beginning) as JSON lines."""
    from craw4llm import browse
    from craw4llm.selection.export import export as write

    count = write(browse.find(selection, root, "select"), out)
    click.echo(f"{count:,} pages: {out.resolve()}")


cli.add_command(corpus_command)


@cli.command("export-edges")
@click.argument("corpus")
@click.option("--out", required=True, type=Path, help="Folder to write: nodes.parquet and edges.parquet.")
@root_option
def export_edges(corpus: str, out: Path, root: Path) -> None:
    """Write the link graph of CORPUS (the fingerprint of a corpus artifact, or its beginning) as plain Parquet."""
    from craw4llm import browse
    from craw4llm.corpus.edges import export_edges as write

    nodes, edges = write(browse.find(corpus, root, "corpus"), out)
    click.echo(f"{nodes:,} nodes, {edges:,} edges: {out.resolve()}")


@cli.command()
@click.argument("name", required=False)
@root_option
def verify(name: str | None, root: Path) -> None:
    """Re-read the files of all artifacts (or of one experiment, or one fingerprint) and compare them with their manifests."""
    from craw4llm import browse

    faults, checked = browse.verify(name, root)
    for line in faults:
        click.echo(line)
    click.echo(f"{checked} artifacts verified, {len(faults)} faults")
    if faults:
        sys.exit(4)


@cli.command()
@click.option("--delete", is_flag=True, help="Delete them; without it they are only listed.")
@click.option("--forget", metavar="EXPERIMENT", multiple=True, help="Treat what only this experiment's runs reach as unneeded.")
@root_option
def gc(delete: bool, forget: tuple[str, ...], root: Path) -> None:
    """List artifacts that no recorded run reaches, and interrupted attempts; delete them when told."""
    from craw4llm import browse

    click.echo(browse.collect_garbage(Store(root), delete=delete, forget=forget))


@cli.group()
def score() -> None:
    """Scorers: train a quality classifier."""


@score.command("train")
@click.option("--positive", multiple=True, required=True, type=click.Path(exists=True, dir_okay=False, path_type=Path), help="Good text.")
@click.option("--negative", multiple=True, required=True, type=click.Path(exists=True, dir_okay=False, path_type=Path), help="Other text.")
@click.option("--to", required=True, type=Path, help="Folder to write: model.bin, card.md, card.json.")
@click.option("--heldout-share", default=0.1, show_default=True, help="Share of the texts that the card's figures come from.")
@click.option("--dim", default=100, show_default=True)
@click.option("--epochs", default=5, show_default=True)
@click.option("--learning-rate", default=0.1, show_default=True)
@click.option("--word-ngrams", default=2, show_default=True)
@click.option("--buckets", default=2_000_000, show_default=True)
@click.option("--min-count", default=1, show_default=True)
@click.option("--seed", default=0, show_default=True)
def score_train(positive: tuple[Path, ...], negative: tuple[Path, ...], to: Path, **settings: Any) -> None:
    """Train a DCLM-like fastText classifier from JSON lines, Parquet or plain text, and report how good it is on held-out text."""
    from craw4llm.scoring.train import Settings, card_text, train_classifier

    click.echo(card_text(train_classifier(positive, negative, to, Settings(**settings))))


@cli.group()
def fetch() -> None:
    """Get data from outside: the demo's web."""


@fetch.command("demo-web")
@click.option("--to", default="data/demo-web", show_default=True, type=Path, help="Folder to write.")
def fetch_demo_web(to: Path) -> None:
    """Download about 20 Debian documentation packages and unpack their pages (a synthetic web where none can be had)."""
    from craw4llm import demo_web

    click.echo(demo_web.fetch(to, lambda line: click.echo(line, err=True)))


def main() -> None:
    """Entry point: errors of the project end in one clear line, an interruption in exit code 130."""
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr)
    signal.signal(signal.SIGTERM, _interrupted)
    # NumPy's BLAS starts a thread a core when it is imported (a third of the start), and its sums would depend on their number. The
    # work here goes over processes, or through torch, which has threads of its own.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    try:
        cli(standalone_mode=False)
    except click.exceptions.Abort:
        sys.exit(130)
    except click.ClickException as error:
        error.show()
        sys.exit(2)
    except Craw4LLMError as error:
        click.echo(f"error: {error}", err=True)
        sys.exit(error.exit_code)
    except KeyboardInterrupt:
        click.echo("interrupted; finished artifacts are kept, the same command goes on from them", err=True)
        sys.exit(130)
    except BrokenPipeError:
        sys.exit(141)
    if sys.argv[1:2] == ["crawl"]:
        _leave()


def _leave() -> None:
    """Ends the process without taking the interpreter apart, which takes 40 ms; everything is written and all pools are closed."""
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def _interrupted(number: int, frame: object) -> None:
    raise KeyboardInterrupt


if __name__ == "__main__":
    main()
