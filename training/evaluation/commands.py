"""Commands that evaluation adds to the command line, registered in the entry-point group `craw4llm.commands`.

    craw4llm tasks fetch | check | list                     the task files: get them, verify them, their sources and licences
    craw4llm evaluate MODEL --out FOLDER                    any model through the tasks; under torchrun by several processes
    craw4llm compare quality=RUN,RUN random=RUN,RUN         which arm is better, per task, group, Core, and how sure that is

Importing this module is cheap: torch and numpy are loaded by the command that needs them.
"""

import csv
from collections.abc import Iterable
from pathlib import Path

import click

from craw4llm.errors import ConfigError, InputError
from craw4llm.options import root_option

NO_VALUE = "-"


@click.group()
def tasks() -> None:
    """The files of the 23 evaluation tasks."""


@tasks.command("fetch")
@click.option("--to", default="data/tasks", show_default=True, type=Path, help="Folder to write.")
@click.option("--source", default="", help="Base URL instead of llm-foundry's repository; the files must be the same.")
def fetch(to: Path, source: str) -> None:
    """Download the task files from llm-foundry's repository, each verified by its git object id; about 30 MB. Right ones are kept."""
    from training.evaluation import data

    data.fetch_tasks(to, source or data.SOURCE, click.echo)
    click.echo(f"all files are in {to.resolve()}; sources and licences: {to / data.SOURCES}")


@tasks.command("check")
@click.argument("folder", type=Path)
def check(folder: Path) -> None:
    """Verify that FOLDER holds all task files, with the right items and bytes."""
    from training.evaluation import data

    data.check_tasks(folder, click.echo)
    click.echo(f"all {len(data.distinct())} files are complete")


@tasks.command("list")
def list_tasks() -> None:
    """The 23 entries: kind, shots, items, baselines (percent, Core v1 / v2), group, data set and its licence."""
    from training.evaluation.tasks import TASKS

    rows = [("task", "kind", "shots", "items", "baseline", "group", "data set", "licence of the data")]
    for t in TASKS.values():
        baseline = f"{t.v1:g}" if t.v1 == t.v2 else f"{t.v1:g} / {t.v2:g}"
        rows.append((t.label, t.kind, str(t.shots), f"{t.items:,}", baseline, t.group, t.source, t.licence))
    click.echo(table(rows))


@click.command("evaluate")
@click.argument("model")
@click.option("--out", required=True, type=Path, help="Folder for the results; the same command goes on from what it holds.")
@click.option("--tasks", "folder", type=Path, help="Folder of task files (`craw4llm tasks fetch`); without it the self-written items.")
@click.option("--only", default="", metavar="LABEL,...", help="Only these entries; then there is no Core.")
@click.option("--tokenizer", type=Path, help="tokenizer.json to use; default: the model's own.")
@click.option("--context", default=0, show_default="the model's, 2048 at most", help="Tokens of context.")
@click.option("--corpus", default="", metavar="FINGERPRINT", help="Also bits per byte on this corpus artifact's held-out pages.")
@click.option("--device", default="auto", show_default=True, help="auto, cpu, cuda, cuda:1 ...")
@click.option("--precision", default="fp32", show_default=True, type=click.Choice(["fp32", "tf32", "bf16"]), help="DCLM's is fp32.")
@click.option("--micro-batch", type=click.IntRange(0), default=0, help="Sequences a device takes at once (0: chosen).")
@click.option("--threads", type=click.IntRange(1), default=1, show_default=True, help="CPU threads of the model's arithmetic.")
@click.option("--few-shot-seed", default=1234, show_default=True, help="DCLM's is 1234.")
@click.option("--trust-remote-code", is_flag=True, help="Run Python code that comes with the model.")
@root_option
def evaluate(
    model: str,
    out: Path,
    folder: Path | None,
    only: str,
    tokenizer: Path | None,
    context: int,
    corpus: str,
    device: str,
    precision: str,
    micro_batch: int,
    threads: int,
    few_shot_seed: int,
    trust_remote_code: bool,
    root: Path,
) -> None:
    """Evaluate MODEL: the folder of a checkpoint, or what transformers opens as a causal language model.

    Several processes: torchrun --nproc-per-node 2 --no-python craw4llm evaluate MODEL --out FOLDER
    """
    from craw4llm.artifact import Store
    from craw4llm.execution import Execution
    from training.evaluation.standalone import Rank, evaluate_model

    summary = evaluate_model(
        model,
        out,
        tasks=folder,
        labels=[label for label in only.split(",") if label],
        corpus=Store(root).open("corpus", corpus) if corpus else None,
        tokenizer=tokenizer,
        context=context,
        few_shot_seed=few_shot_seed,
        precision=precision,  # type: ignore[arg-type]
        trust_remote_code=trust_remote_code,
        execution=Execution(root=root, device=device, micro_batch=micro_batch, threads=threads),
        rank=Rank.from_environment(),
    )
    if summary is None:  # another process says it
        return
    for note in summary["notes"]:
        click.echo(f"{model}: {note}", err=True)
    click.echo(describe(out))


@click.command("compare")
@click.argument("arms", nargs=-1, required=True, metavar="ARM=RESULTS[,RESULTS...]...")
@click.option("--kind", default="accuracy", show_default=True, type=click.Choice(["accuracy", "right_loss", "margin", "all"]),
              help="Of the tasks: accuracy, mean loss of the right answer, margin to the best wrong one.")  # fmt: skip
@click.option("--csv", "csv_path", type=Path, help="Write the table there too.")
@root_option
def compare(arms: tuple[str, ...], kind: str, csv_path: Path | None, root: Path) -> None:
    """Compare the first ARM with each of the others: bits per byte, Core, groups and tasks, with 95% intervals.

    RESULTS are folders or fingerprints of evaluations, one for each training seed, in the same order for every arm.
    """
    from training.evaluation.intervals import measures_of, verdict_of
    from training.evaluation.results import read_results

    if len(arms) < 2:
        raise ConfigError("compare: one arm given; expected at least two, as ARM=RESULTS")
    places: dict[str, list[str]] = {}
    for text in arms:
        name, _, given = text.partition("=")
        if not name or not given or name in places:
            raise ConfigError(f"compare: {text!r}; expected ARM=RESULTS[,RESULTS...], each arm once")
        places[name] = [place for place in given.split(",") if place]
    names = list(places)
    results = {(name, k): read_results(_folder(place, root)) for name, of in places.items() for k, place in enumerate(of)}
    labels = _labels()
    measures = [m for m in measures_of(results) if kind in ("all", m.kind) or m.name not in labels]
    if not measures:
        raise InputError("compare: the results have no task and no held-out pages in common")
    head = ("measure", "kind", "items", "a", "b", "a mean", "b mean", "difference", "low", "high", "verdict")
    rows: list[tuple[str, ...]] = [head]
    for other in names[1:]:
        for measure in measures:
            pair = verdict_of(measure, names[0], other)
            means = []
            for arm in (names[0], other):
                values = [value for (a, _), value in measure.values.items() if a == arm]
                means.append(f"{sum(values) / len(values):.4f}" if values else NO_VALUE)
            numbers = [NO_VALUE if v is None else f"{v:+.4f}" for v in (pair.difference, pair.low, pair.high)]
            verdict = f"{pair.verdict}: {pair.missing}" if pair.missing else pair.verdict
            rows.append((measure.name, measure.kind, f"{measure.items}", names[0], other, *means, *numbers, verdict))
    click.echo(table(rows))
    click.echo(
        f"\na against b, 95% over items (pages for bits per byte) and training seeds; {len(rows) - 1} comparisons: of those that are truly "
        f"equal about one in twenty comes out as better or worse"
    )
    if csv_path is not None:
        with csv_path.open("w", newline="") as stream:
            csv.writer(stream).writerows(rows)


def describe(folder: Path) -> str:
    """The results in a folder as text, with 95% intervals over items."""
    import pyarrow.parquet as pq

    from training.evaluation.results import read_results

    summary = read_results(folder).summary
    between = summary["intervals"]

    def interval(kind: str, name: str) -> str:
        low, high = between.get(kind, {}).get(name, (None, None))
        return NO_VALUE if low is None else f"{low:.4f} to {high:.4f}"

    rows = [("task", "items", "accuracy", "95% over items", "loss of the right answer", "state")]
    for row in pq.read_table(folder / "tasks.parquet").to_pylist():
        loss = NO_VALUE if row["right_loss"] is None else f"{row['right_loss']:.4f}"
        rows.append((row["task"], f"{row['items']:,}", f"{row['accuracy']:.4f}", interval("accuracy", row["task"]), loss, row["state"]))
    lines = [table(rows), ""]
    for name, label in (("core_v1", "Core v1"), ("core_v2", "Core v2")):
        if summary[name] is not None:
            lines.append(f"{label}: {summary[name]:.4f}, 95% over items {interval('centered', name)} ({summary['task_source']})")
    if summary["core_v1"] is None:
        why = [*summary["why"][:3], *([f"and {len(summary['why']) - 3} more (summary.json)"] if len(summary["why"]) > 3 else [])]
        lines.append(f"no Core: {'; '.join(why)}")
    if summary["bits_per_byte"] is not None:
        lines.append(f"bits per byte of held-out pages: {summary['bits_per_byte']:.4f}")
    return "\n".join([*lines, f"results: {folder.resolve()}"])


def table(rows: Iterable[tuple[str, ...]]) -> str:
    """Rows as aligned text, the first as heading."""
    kept = list(rows)
    widths = [max(len(row[column]) for row in kept) for column in range(len(kept[0]))]
    return "\n".join("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in kept)


def _labels() -> set[str]:
    from training.evaluation.tasks import TASKS

    return set(TASKS)


def _folder(place: str, root: Path) -> Path:
    """The folder of results: as given, or that of the evaluate artifact with this fingerprint."""
    for path in (Path(place), root / "evaluate" / place):
        if (path / "summary.json").is_file():
            return path
    raise InputError(f"compare: {place} is neither a folder with summary.json nor the fingerprint of an evaluation in {root}")
