"""Stage `evaluate`: bits per byte of every held-out page, and every item of the 23 task entries.

    checkpoint, tokenizer, heldout -> pages.parquet, items.parquet, tasks.parquet, rejects.parquet, summary.json

Held-out pages come first: at small sizes they are the measure that tells models apart. What is equal to DCLM's evaluation, what
proves it and what it does not prove: docs/evaluation.md.
"""

import dataclasses
import json
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from craw4llm.artifact import Artifact, Result, Store
from craw4llm.errors import ArtifactError, ConfigError
from craw4llm.execution import Execution
from craw4llm.tokens.tokenizer import Tokenizer
from training.configs import EvaluateConfig
from training.evaluation.aggregate import Aggregates, aggregate, centered
from training.evaluation.prompts import encode_prompt, prompts
from training.evaluation.tasks import OWN_ITEMS, TASKS, TaskFile, read_own_items, read_task_files

if TYPE_CHECKING:
    from training.evaluation.likelihood import TaskResult, TorchModel

ROW_GROUP_ROWS = 1 << 16
TOO_LONG = "the continuation leaves no room for context in the model; counted as wrong"

ITEMS = pa.schema(
    [
        ("task", pa.string()),
        ("item", pa.uint32()),
        ("category", pa.string()),
        ("choice", pa.int32()),
        ("gold", pa.int32()),
        ("correct", pa.bool_()),
        ("losses", pa.list_(pa.float32())),
        ("n_context_tokens", pa.list_(pa.uint32())),
        ("cropped", pa.bool_()),
    ]
)
TASK_ROWS = pa.schema(
    [
        ("task", pa.string()),
        ("items", pa.uint32()),
        ("accuracy", pa.float64()),
        ("centered_v1", pa.float64()),
        ("centered_v2", pa.float64()),
        ("group", pa.string()),
        ("state", pa.string()),
    ]
)
REJECTS = pa.schema([("task", pa.string()), ("item", pa.uint32()), ("reason", pa.string()), ("counted_as_wrong", pa.bool_())])


def run(config: EvaluateConfig, inputs: Mapping[str, Artifact], out: Path, execution: Execution) -> Result:
    # Imported here, so that looking at stages (`plan`) does not load torch.
    import torch

    from training.checkpoint import load_model
    from training.device import numerics, resolve
    from training.evaluation.bits_per_byte import bits_per_byte, page_losses, read_pages
    from training.evaluation.likelihood import Batching, TorchModel, score_task

    files = _task_files(config)
    tokenizer = Tokenizer(inputs["tokenizer"])
    _check_chain(inputs)
    device = resolve(execution.device)
    with numerics(device, execution.threads):
        model = TorchModel(load_model(inputs["checkpoint"], device)[0], device)
        context = _context(config, model)
        if tokenizer.vocab_size > model.vocab_size:
            raise ArtifactError(
                f"evaluate: the tokenizer has {tokenizer.vocab_size} ids, the model's vocabulary {model.vocab_size}; "
                "give the tokenizer that the model was trained with"
            )
        batching = Batching(sequences=execution.micro_batch)
        pages = read_pages(inputs["heldout"])
        with execution.progress("evaluate held-out", total=len(pages.page), unit="page") as progress:
            nats = page_losses(pages, model, tokenizer.end_of_text_id, context, batching, progress.update)
        results = []
        with execution.progress("evaluate tasks", total=sum(len(f.rows) for f in files.values()), unit="item") as progress:
            for file in files.values():
                # Control tokens spelt out in a prompt become control ids, as in the reference harness.
                encoded = (
                    encode_prompt(prompt, partial(tokenizer.encode, specials=True), context)
                    for prompt in prompts(file, config.few_shot_seed)
                )
                results.append(score_task(file, encoded, model, batching, partial(progress.update, note=file.task.label)))

    bpb = bits_per_byte(nats, pages.n_bytes)
    sums = aggregate(
        {r.file.task.label: r.accuracy for r in results}, {label: f.why for label, f in files.items() if f.state != "complete"}
    )
    scored_tokens = np.array([len(ids) for ids in pages.tokens], dtype=np.uint32)
    _write(out / "pages.parquet", pa.table({"page": pages.page, "n_bytes": pages.n_bytes, "n_tokens": scored_tokens, "nll": nats}))
    _write(out / "items.parquet", _items(results))
    _write(out / "tasks.parquet", _tasks(results))
    _write(out / "rejects.parquet", _rejects(results))
    summary = _summary(config, bpb, sums, files, context)
    (out / "summary.json").write_text(json.dumps(summary, indent=2, sort_keys=True, allow_nan=False) + "\n")
    n_items = sum(len(r.items) for r in results)
    return Result(
        counts={
            "bits_per_byte": (bpb, "bits/byte"),
            "heldout_pages": (len(pages.page), "pages"),
            "heldout_bytes": (int(pages.n_bytes.sum()), "bytes"),
            "heldout_tokens": (int(scored_tokens.sum()), "tokens"),
            "items": (n_items, "items"),
            "cropped_items": (sum(encoded.cropped for r in results for encoded, _ in r.items), "items"),
            "rejected_items": (_rejects(results).num_rows, "items"),
            "core_v1": (sums.core_v1, "centered accuracy"),
            "core_v2": (sums.core_v2, "centered accuracy"),
        },
        notes={
            "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
            "torch": torch.__version__,
            "task_source": summary["task_source"],
        },
    )


def _task_files(config: EvaluateConfig) -> dict[str, TaskFile]:
    if config.suite == "none":
        if config.tasks is not None:
            raise ConfigError("evaluate: suite is 'none' and `tasks` is given; leave one of them out")
        return {}
    return read_own_items() if config.tasks is None else read_task_files(Path(config.tasks.path))


def _check_chain(inputs: Mapping[str, Artifact]) -> None:
    """Tokens of another tokenizer would be scored as nonsense and give a number all the same."""
    tokenizer = inputs["tokenizer"].fingerprint
    made_with = {"the held-out tokens were made": inputs["heldout"].manifest["inputs"]["tokenizer"]["fingerprint"]}
    trained_on = inputs["checkpoint"].manifest["inputs"].get("tokens")
    if trained_on is not None:
        tokens = Store(inputs["checkpoint"].root).find(trained_on["stage"], trained_on["fingerprint"])
        if tokens is not None:  # a checkpoint may outlive the tokens that it was trained on
            made_with["the model was trained"] = tokens.manifest["inputs"]["tokenizer"]["fingerprint"]
    for what, other in made_with.items():
        if other != tokenizer:
            raise ArtifactError(f"evaluate: {what} with the tokenizer {other}, the input is {tokenizer}; give all three of one chain")


def _context(config: EvaluateConfig, model: "TorchModel") -> int:
    if not 0 <= config.max_context <= model.context or config.max_context == 1:
        raise config.refuse("max_context", f"0 (the model's context length) or 2 to {model.context}")
    return config.max_context or model.context


def _items(results: Sequence["TaskResult"]) -> pa.Table:
    rows = [
        {
            "task": result.file.task.label,
            "item": encoded.prompt.line,
            "category": encoded.prompt.category,
            "choice": score.choice,
            "gold": encoded.prompt.gold,
            "correct": score.correct,
            "losses": score.losses,
            "n_context_tokens": [len(ids) for ids in encoded.contexts],
            "cropped": encoded.cropped,
        }
        for result in results
        for encoded, score in result.items
    ]
    return pa.Table.from_pylist(rows, schema=ITEMS)


def _tasks(results: Sequence["TaskResult"]) -> pa.Table:
    rows = [
        {
            "task": result.file.task.label,
            "items": len(result.items),
            "accuracy": result.accuracy,
            "centered_v1": centered(result.file.task.label, result.accuracy, "v1"),
            "centered_v2": centered(result.file.task.label, result.accuracy, "v2"),
            "group": result.file.task.group,
            "state": result.file.state,
        }
        for result in results
    ]
    return pa.Table.from_pylist(rows, schema=TASK_ROWS)


def _rejects(results: Sequence["TaskResult"]) -> pa.Table:
    rows = []
    for result in results:
        label = result.file.task.label
        bad = [(reject.line, reject.reason, False) for reject in result.file.rejects]
        long = [(encoded.prompt.line, TOO_LONG, True) for encoded, _ in result.items if encoded.too_long]
        for line, reason, counted in sorted(bad + long):
            rows.append({"task": label, "item": line, "reason": reason, "counted_as_wrong": counted})
    return pa.Table.from_pylist(rows, schema=REJECTS)


def _summary(config: EvaluateConfig, bpb: float | None, sums: Aggregates, files: Mapping[str, TaskFile], context: int) -> dict[str, Any]:
    source = "none" if not files else OWN_ITEMS if config.tasks is None else config.tasks.name
    return {
        "bits_per_byte": bpb,
        "core_v1": sums.core_v1,
        "core_v2": sums.core_v2,
        "raw_mean_22": sums.raw_mean_22,
        "raw_mean_23": sums.raw_mean_23,
        "groups": {name: dataclasses.asdict(group) for name, group in sums.groups.items()},
        "why": list(sums.why) if files else ["suite is none: no task was run"],
        "task_source": source,
        "task_files": {TASKS[label].file_name: file.sha256 for label, file in files.items()},
        "context": context,
        "few_shot_seed": config.few_shot_seed,
    }


def _write(path: Path, table: pa.Table) -> None:
    pq.write_table(table, path, compression="zstd", row_group_size=ROW_GROUP_ROWS)
