"""Evaluates any model outside the chain, to the same files: `craw4llm evaluate MODEL --out FOLDER`.

    evaluate_model("EleutherAI/pythia-160m", Path("out"), tasks=Path("data/tasks"))

Processes started by torchrun share the work: each scores its parts (`training.evaluation.parts`), the first gathers all and writes the
results. The parts stay in `<out>/parts`, so the same command goes on after a kill and does nothing twice.
"""

import dataclasses
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from craw4llm.artifact import Artifact, storage_errors
from craw4llm.corpus.reader import Corpus
from craw4llm.errors import ConfigError, InputError
from craw4llm.execution import Execution
from craw4llm.externals import sha256_file
from training.configs import Precision
from training.device import numerics, resolve
from training.evaluation.bits_per_byte import HeldoutPages, bits_per_byte
from training.evaluation.likelihood import Batching
from training.evaluation.models import OpenedModel, open_model
from training.evaluation.parts import Parts
from training.evaluation.prompts import FEW_SHOT_SEED, EncodeBatch
from training.evaluation.results import write, write_results
from training.evaluation.suite import Scorer, gather_items, gather_pages, run_items, run_pages
from training.evaluation.tasks import OWN_ITEMS, TASKS, TaskFile, read_own_items, read_task_files

PARTS = "parts"


@dataclasses.dataclass(frozen=True)
class Rank:
    """This process among those that torchrun started: number, how many, number on this host."""

    rank: int = 0
    ranks: int = 1
    local: int = 0

    @staticmethod
    def from_environment() -> "Rank":
        try:
            return Rank(*(int(os.environ.get(name, default)) for name, default in (("RANK", 0), ("WORLD_SIZE", 1), ("LOCAL_RANK", 0))))
        except ValueError as error:
            raise ConfigError(f"evaluate: RANK, WORLD_SIZE and LOCAL_RANK must be numbers, as torchrun sets them ({error})") from error


def evaluate_model(
    where: str,
    out: Path,
    *,
    tasks: Path | None = None,
    labels: Sequence[str] = (),
    corpus: Artifact | None = None,
    tokenizer: Path | None = None,
    context: int = 0,
    few_shot_seed: int = FEW_SHOT_SEED,
    precision: Precision = "fp32",
    trust_remote_code: bool = False,
    execution: Execution = Execution(),  # noqa: B008  frozen
    rank: Rank = Rank(),
) -> Mapping[str, Any] | None:
    """Scores the task entries (and a corpus's held-out pages) and writes items, tasks, rejects and the summary into `out`.

    where, tokenizer, context, trust_remote_code: see `training.evaluation.models.open_model`. tasks: a folder of task files; None: the
    self-written items. labels: only these entries (then no mean over all exists). Returns what `results` the first process wrote: the
    aggregates by name; None in the others.
    """
    files = _files(tasks, labels)
    device_name = f"cuda:{rank.local}" if execution.device == "cuda" or (execution.device == "auto" and _cuda()) else execution.device
    device = resolve(device_name)
    with numerics(device, execution.threads):
        opened = open_model(where, device, precision, tokenizer=tokenizer, context=context, trust_remote_code=trust_remote_code)
        encode_batch = _checked(opened, where)
        pages = _pages(corpus, encode_batch, opened.end_of_text_id) if corpus is not None else None
        scorer = Scorer(
            model=opened.model,
            encode_batch=encode_batch,
            context=opened.model.context,
            few_shot_seed=few_shot_seed,
            batching=Batching.on(device, execution.micro_batch),
        )
        settings = {
            "model": where,
            "model_sha256": opened.digest,
            "tokenizer_sha256": sha256_file(tokenizer) if tokenizer is not None else None,
            "context": scorer.context,
            "few_shot_seed": few_shot_seed,
            "precision": precision,
            "notes": list(opened.notes),
        }
        identity = {
            **settings,
            "task_files": {label: file.sha256 for label, file in files.items()},
            "corpus": corpus.digest if corpus is not None else None,
            "model": None,  # the same files elsewhere are the same model
        }
        with storage_errors(out):
            parts = Parts(out / PARTS, identity, rank.rank, rank.ranks)
            shown = execution if rank.rank == 0 else dataclasses.replace(execution, report=_silent)
            n_pages = 0
            if pages is not None:
                assert opened.end_of_text_id is not None
                with shown.progress("evaluate held-out", total=len(pages.page), unit="page") as progress:
                    n_pages = run_pages(pages, scorer, opened.end_of_text_id, parts, progress.update)
            with shown.progress("evaluate tasks", total=sum(len(f.rows) for f in files.values()), unit="item") as progress:
                n_items = run_items(files, scorer, parts, progress.update)
    if rank.rank:
        return None
    with storage_errors(out):
        bpb = None
        if pages is not None:
            nats = gather_pages(parts, n_pages)
            bpb = bits_per_byte(nats, pages.n_bytes)
            scored = np.array([len(ids) for ids in pages.tokens], dtype=np.uint32)
            write(out / "pages.parquet", pa.table({"page": pages.page, "n_bytes": pages.n_bytes, "n_tokens": scored, "nll": nats}))
        items = gather_items(parts, n_items, files)
        source = OWN_ITEMS if tasks is None else tasks.name
        _, sums = write_results(out, items, files, bpb, source, settings)
    return {"bits_per_byte": bpb, "core_v1": sums.core_v1, "core_v2": sums.core_v2, "notes": opened.notes, "why": sums.why}


def _files(tasks: Path | None, labels: Sequence[str]) -> dict[str, TaskFile]:
    unknown = [label for label in labels if label not in TASKS]
    if unknown:
        raise ConfigError(f"evaluate: no task is called {', '.join(unknown)}; the tasks are: {', '.join(TASKS)}")
    if tasks is None:
        files = read_own_items()
        return {label: file for label, file in files.items() if not labels or label in labels}
    return read_task_files(tasks, labels)


def _checked(opened: OpenedModel, where: str) -> EncodeBatch:
    """The model's tokenizer, refusing ids that the model has not."""
    encode_batch, vocab_size = opened.encode_batch, opened.model.vocab_size
    if encode_batch is None:
        raise InputError(f"evaluate: {where} came without a tokenizer; give one with --tokenizer tokenizer.json")

    def encode(texts: Sequence[str]) -> list[list[int]]:
        found = encode_batch(texts)
        highest = max((max(ids) for ids in found if ids), default=0)
        if highest >= vocab_size:
            raise InputError(
                f"evaluate: the tokenizer gives the id {highest}, the model's vocabulary has {vocab_size}; give the model's own tokenizer"
            )
        return found

    return encode


def _pages(corpus: Artifact, encode_batch: EncodeBatch, end_of_text_id: int | None) -> HeldoutPages:
    """The held-out pages of a corpus artifact as this model's tokens; pages without text are left out, as by the chain."""
    if end_of_text_id is None:
        raise InputError("evaluate: the model's tokenizer names no end of text, which stands between pages; leave --corpus out")
    opened = Corpus(corpus)
    chosen = opened.heldout[opened.text_bytes(opened.heldout) > 0].tolist()
    ids = encode_batch(opened.texts(chosen))
    return HeldoutPages(
        page=np.array(chosen, dtype=np.uint32),
        n_bytes=opened.text_bytes(chosen).astype(np.uint64),
        tokens=[np.array([*tokens, end_of_text_id], dtype=np.int64) for tokens in ids],
    )


def _cuda() -> bool:
    import torch

    return torch.cuda.is_available()


def _silent(line: str) -> None:
    """Takes the progress of the processes beside the first."""
