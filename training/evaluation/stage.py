"""Stage `evaluate`: bits per byte of every held-out page, and every item of the 23 task entries.

    checkpoint, tokenizer, heldout -> pages.parquet, items.parquet, tasks.parquet, rejects.parquet, summary.json

Held-out pages come first: at small sizes they are the measure that tells models apart. What is equal to DCLM's evaluation, what
proves it and what it does not prove: docs/evaluation.md.

The work is cut into parts (`training.evaluation.parts`) that outlive a kill. Where torch sees several CUDA devices and the execution
names none of them, one process for each shares the parts.
"""

import dataclasses
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from craw4llm.artifact import Artifact, Result, Store
from craw4llm.errors import ArtifactError, ConfigError
from craw4llm.execution import Execution
from craw4llm.externals import locate
from craw4llm.processes import worker_pool
from craw4llm.tokens.tokenizer import Tokenizer
from training.configs import EvaluateConfig
from training.evaluation.parts import Parts
from training.evaluation.results import write, write_results
from training.evaluation.tasks import OWN_ITEMS, SUITE_TOKENS, TASKS, TaskFile, own_item_count, read_own_items, read_task_files

if TYPE_CHECKING:
    from training.evaluation.bits_per_byte import HeldoutPages
    from training.evaluation.models import TorchModel

RESUMES = True
PARTS = "parts"


def run(config: EvaluateConfig, inputs: Mapping[str, Artifact], out: Path, execution: Execution) -> Result:
    # Imported here, so that looking at stages (`plan`) does not load torch.
    import torch

    from training.device import resolve
    from training.evaluation.bits_per_byte import bits_per_byte
    from training.evaluation.suite import gather_items, gather_pages

    _check_chain(inputs)
    devices = _devices(execution)
    quiet = dataclasses.replace(execution, report=_silent)
    with worker_pool(max(1, len(devices) - 1)) as pool:
        others = [
            pool.submit(_rank, config, inputs, out, dataclasses.replace(quiet, device=device), rank, len(devices))
            for rank, device in enumerate(devices[1:], 1)
        ]
        files, pages, context, n_pages, n_items = _rank(
            config, inputs, out, dataclasses.replace(execution, device=devices[0]), 0, len(devices)
        )
        for other in others:
            other.result()
    parts = Parts(out / PARTS, _identity(config, inputs, files))
    nats, items = gather_pages(parts, n_pages), gather_items(parts, n_items, files)
    bpb = bits_per_byte(nats, pages.n_bytes)
    scored = np.array([len(ids) for ids in pages.tokens], dtype=np.uint32)
    write(out / "pages.parquet", pa.table({"page": pages.page, "n_bytes": pages.n_bytes, "n_tokens": scored, "nll": nats}))
    source = "none" if not files else OWN_ITEMS if config.tasks is None else config.tasks.name
    settings = {"context": context, "few_shot_seed": config.few_shot_seed, "precision": config.precision}
    counts, sums = write_results(out, items, files, bpb, source, settings)
    parts.clear()
    device = resolve(devices[0])
    return Result(
        counts={
            "bits_per_byte": (bpb, "bits/byte"),
            "heldout_pages": (len(pages.page), "pages"),
            "heldout_bytes": (int(pages.n_bytes.sum()), "bytes"),
            "heldout_tokens": (int(scored.sum()), "tokens"),
            **counts,
            "core_v1": (sums.core_v1, "centered accuracy"),
            "core_v2": (sums.core_v2, "centered accuracy"),
        },
        notes={
            "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
            "torch": torch.__version__,
            "task_source": source,
        },
    )


def estimate(config: EvaluateConfig, inputs: Mapping[str, Mapping[str, Any]]) -> dict[str, tuple[float | int | None, str]]:
    """Items of the suite and tokens that the model will read: of the full files where a folder is given, else of the shipped items."""
    heldout = inputs.get("heldout", {}).get("tokens", (None, ""))[0]
    full = config.suite != "none" and config.tasks is not None
    items = 0 if config.suite == "none" else sum(t.items for t in TASKS.values()) if full else own_item_count()
    tokens = SUITE_TOKENS if full else None if config.suite != "none" else 0
    total = None if tokens is None or heldout is None else tokens + heldout
    return {"eval_items": (items, "items"), "suite_tokens": (tokens, "tokens"), "eval_tokens": (total, "tokens")}


def _rank(
    config: EvaluateConfig, inputs: Mapping[str, Artifact], out: Path, execution: Execution, rank: int, ranks: int
) -> tuple[dict[str, TaskFile], "HeldoutPages", int, int, int]:
    """Does one process's share. Returns what rank 0 needs: files, pages, tokens of context, numbers of parts of pages and of items."""
    from training.checkpoint import load_model
    from training.device import numerics, resolve
    from training.evaluation.bits_per_byte import read_pages
    from training.evaluation.likelihood import Batching
    from training.evaluation.models import TorchModel
    from training.evaluation.suite import Scorer, run_items, run_pages

    files = _task_files(config)
    tokenizer = Tokenizer(inputs["tokenizer"])
    parts = Parts(out / PARTS, _identity(config, inputs, files), rank, ranks)
    device = resolve(execution.device)
    with numerics(device, execution.threads):
        model = TorchModel(load_model(inputs["checkpoint"], device)[0], device, config.precision)
        if tokenizer.vocab_size > model.vocab_size:
            raise ArtifactError(
                f"evaluate: the tokenizer has {tokenizer.vocab_size} ids, the model's vocabulary {model.vocab_size}; "
                "give the tokenizer that the model was trained with"
            )
        scorer = Scorer(
            model=model,
            # Control tokens spelt out in a prompt become control ids, as in the reference harness.
            encode_batch=partial(tokenizer.encode_batch, specials=True),
            context=_context(config, model),
            few_shot_seed=config.few_shot_seed,
            batching=Batching.on(device, execution.micro_batch),
        )
        pages = read_pages(inputs["heldout"])
        with execution.progress("evaluate held-out", total=len(pages.page), unit="page") as progress:
            n_pages = run_pages(pages, scorer, tokenizer.end_of_text_id, parts, progress.update)
        with execution.progress("evaluate tasks", total=sum(len(f.rows) for f in files.values()), unit="item") as progress:
            n_items = run_items(files, scorer, parts, progress.update)
    return files, pages, scorer.context, n_pages, n_items


def _devices(execution: Execution) -> list[str]:
    """The device of each process: all CUDA devices where the execution leaves it open, else the one that it names."""
    import torch

    if execution.device in ("auto", "cuda") and torch.cuda.device_count() > 1:
        return [f"cuda:{number}" for number in range(torch.cuda.device_count())]
    return [execution.device]


def _silent(line: str) -> None:
    """Takes the progress of the processes beside the first."""


def _identity(config: EvaluateConfig, inputs: Mapping[str, Artifact], files: Mapping[str, TaskFile]) -> dict[str, object]:
    """What the parts are of: the config by content and the inputs by digest."""
    settings = {f.name: getattr(config, f.name) for f in dataclasses.fields(config) if f.name != "tasks"}
    return {
        "config": {**settings, "version": config.version},
        "inputs": {name: artifact.digest for name, artifact in inputs.items()},
        "task_files": {label: file.sha256 for label, file in files.items()},
    }


def _task_files(config: EvaluateConfig) -> dict[str, TaskFile]:
    if config.suite == "none":
        if config.tasks is not None:
            raise ConfigError("evaluate: suite is 'none' and `tasks` is given; leave one of them out")
        return {}
    return read_own_items() if config.tasks is None else read_task_files(locate(config.tasks))


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
