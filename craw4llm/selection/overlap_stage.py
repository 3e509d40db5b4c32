"""The stage `overlap`: what the kept pages share with evaluation items, and which of them are copies of each other.

    items x pages -> shared runs of 13 words, per task        pages -> groups of exact and near copies

It drops nothing (SelectConfig does, with the same rules); it says what a result may owe to pages that hold the answers.
"""

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from craw4llm.artifact import Artifact, Result
from craw4llm.configs import OverlapConfig
from craw4llm.crawl.stage import require_same_corpus
from craw4llm.execution import Execution
from craw4llm.externals import locate
from craw4llm.selection.facts import Wanted, facts
from craw4llm.selection.items import read_items
from craw4llm.selection.near_copies import NearCopies, Similarity


def run(config: OverlapConfig, inputs: Mapping[str, Artifact], out: Path, execution: Execution) -> Result:
    require_same_corpus(inputs["selection"], inputs["corpus"])
    pages = pq.read_table(inputs["selection"].file("kept.parquet"), columns=["page"]).column("page").to_numpy()
    items = read_items(locate(config.tasks), config.ngram_words)
    similarity = Similarity(config.near_threshold, config.near_permutations, config.near_shingle_words)
    copies = NearCopies(similarity)
    first: dict[bytes, int] = {}
    group: dict[int, int] = {}
    duplicates: list[tuple[int, int, str]] = []
    hits: list[tuple[int, int]] = []
    with execution.progress("overlap", total=len(pages), unit="page") as progress:
        for fact in facts(Wanted(inputs["corpus"], similarity, items), pages, execution):
            hits += [(item, fact.page) for item in fact.hits.tolist()]
            same = first.setdefault(fact.text_hash, fact.page)
            of = same if same != fact.page else copies.of(fact.signature)
            if of is not None:
                group[fact.page] = group.get(of, of)
                duplicates.append((fact.page, group[fact.page], "exact" if same != fact.page else "near"))
            if same == fact.page:
                copies.add(fact.page, fact.signature)
            progress.update(1)
    _write(
        out / "duplicates.parquet",
        page=pa.array([page for page, _, _ in duplicates], pa.uint32()),
        group=pa.array([of for _, of, _ in duplicates], pa.uint32()),
        kind=pa.array([kind for _, _, kind in duplicates], pa.string()),
    )
    hits.sort()
    _write(
        out / "hits.parquet",
        task=pa.array([items.items[item][0] for item, _ in hits], pa.string()),
        item=pa.array([items.items[item][1] for item, _ in hits], pa.uint32()),
        page=pa.array([page for _, page in hits], pa.uint32()),
    )
    of_task = np.array([items.names.index(task) for task, _ in items.items])
    hit_items = np.unique(np.array([item for item, _ in hits], dtype=np.int64))
    per_task = {
        "task": pa.array(items.names, pa.string()),
        "items": pa.array(np.bincount(of_task, minlength=len(items.names)), pa.uint32()),
        "short_items": pa.array(np.bincount(of_task[items.short], minlength=len(items.names)), pa.uint32()),
        "overlapping_items": pa.array(np.bincount(of_task[hit_items], minlength=len(items.names)), pa.uint32()),
        "pages": pa.array([len({page for item, page in hits if of_task[item] == t}) for t in range(len(items.names))], pa.uint32()),
    }
    _write(out / "tasks.parquet", **per_task)
    return Result(
        counts={
            "pages": (len(pages), "pages"),
            "tasks": (len(items.names), "tasks"),
            "items": (len(items.items), "items"),
            "short_items": (int(items.short.sum()), "items"),
            "overlapping_items": (len(hit_items), "items"),
            "overlapping_pages": (len({page for _, page in hits}), "pages"),
            "exact_duplicates": (sum(kind == "exact" for _, _, kind in duplicates), "pages"),
            "near_duplicates": (sum(kind == "near" for _, _, kind in duplicates), "pages"),
        },
        notes={"tasks": config.tasks.name},
    )


def _write(path: Path, **columns: pa.Array) -> None:
    pq.write_table(pa.table(columns), path, compression="zstd")
