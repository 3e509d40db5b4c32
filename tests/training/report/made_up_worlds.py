"""Artifacts made up after docs/artifacts.md, from corpus to results, for tests of the report: no stage but `report` runs.

world = make_world(root, policies=("quality", "random"), gains={"quality/equal_pages": 0.1}, replicates=2)
world.inputs -> name -> Artifact, as the report stage gets them
"""

import dataclasses
import hashlib
import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from craw4llm.artifact import Artifact, Result, Store
from training.configs import ReportConfig
from training.evaluation.aggregate import aggregate
from training.evaluation.results import ITEMS, write_results
from training.evaluation.tasks import TASKS, TaskFile

PAGES, HELDOUT, HOSTS, DEAD = 300, 60, 10, 12
Counts = Mapping[str, tuple[Any, str]]


class Fakes:
    """Builds artifacts in a store. The fingerprint is a hash of stage, config and inputs, as for real ones."""

    def __init__(self, root: Path) -> None:
        self.store = Store(root)

    def build(
        self,
        stage: str,
        config: Mapping[str, Any],
        inputs: Mapping[str, Artifact],
        write: Callable[[Path], None],
        counts: Mapping[str, Any],
        notes: Mapping[str, Any] | None = None,
    ) -> Artifact:
        identity = json.dumps([stage, config, {k: v.fingerprint for k, v in inputs.items()}, counts], sort_keys=True)
        print_ = hashlib.sha256(identity.encode()).hexdigest()[:12]

        def run(out: Path) -> Result:
            write(out)
            return Result(counts={name: (value, "x") for name, value in counts.items()}, notes=notes or {})

        return self.store.build(stage, print_, version=1, config=config, inputs=inputs, write=run)[0]


@dataclasses.dataclass(frozen=True)
class World:
    store: Store
    inputs: dict[str, Artifact]
    scores: np.ndarray


def write_parquet(path: Path, columns: Mapping[str, pa.Array]) -> None:
    pq.write_table(pa.table(dict(columns)), path, compression="zstd")


def make_crawl(
    fakes: Fakes,
    corpus: Artifact,
    policy: str,
    fetched: list[tuple[int | None, int | None, int, int | None]],
    score_of: Mapping[int, float] | None,
) -> Artifact:
    """fetched: in fetch order (page or None for a dead link, crawl rank or None, iteration, crawl iteration or None)."""
    rows = [(page, rank, crawl, it, crawl_it) for rank, (page, crawl, it, crawl_it) in enumerate(fetched) if page is not None]
    dead = [(rank, it) for rank, (page, _, it, _) in enumerate(fetched) if page is None]

    def write(out: Path) -> None:
        pages = [row[0] for row in rows]
        score = None if score_of is None else pa.array([score_of[p] for p in pages], pa.float32())
        write_parquet(
            out / "pages.parquet",
            {
                "page": pa.array(pages, pa.uint32()),
                "iteration": pa.array([row[3] for row in rows], pa.uint32()),
                "fetch_rank": pa.array([row[1] for row in rows], pa.uint64()),
                "crawl_rank": pa.array([row[2] for row in rows], pa.uint32()),
                "crawl_iteration": pa.array([row[4] for row in rows], pa.uint32()),
                "parent": pa.array([None, *(row[0] for row in rows[:-1])][: len(rows)], pa.uint32()),
                "depth": pa.array(range(len(rows)), pa.uint32()),
                "priority": pa.array([math.nan] * len(rows), pa.float32()),
                "score": pa.nulls(len(rows), pa.float32()) if score is None else score,
            },
        )
        write_parquet(
            out / "dead_links.parquet",
            {
                "target": pa.array([PAGES + i for i in range(len(dead))], pa.uint32()),
                "url": pa.array([f"https://gone.example/{i}" for i in range(len(dead))]),
                "iteration": pa.array([it for _, it in dead], pa.uint32()),
                "fetch_rank": pa.array([rank for rank, _ in dead], pa.uint64()),
            },
        )

        iterations = sorted({it for _, _, it, _ in fetched})
        write_parquet(
            out / "iterations.parquet",
            {
                "iteration": pa.array(iterations, pa.uint32()),
                "fetched": pa.array([sum(row[3] == it for row in rows) for it in iterations], pa.uint64()),
                "dead": pa.array([sum(d == it for _, d in dead) for it in iterations], pa.uint64()),
                "discovered": pa.array([sum(row[3] == it for row in rows) + 1 for it in iterations], pa.uint64()),
            },
        )

    crawled = sum(row[2] is not None for row in rows)
    counts = {
        "seeds": 4,
        "discovered": len(fetched) + 3,
        "fetched_pages": len(rows),
        "dead_links": len(dead),
        "fetches": len(fetched),
        "crawled_pages": crawled,
        "iterations": 3,
        "mean_score_crawled": None,
    }
    config = {"policy": policy, "batch_pages": 10, "seeds": None, "seed_count": 4, "seed_set": 0, "rng_seed": 0, "mode": "paper"}
    return fakes.build("crawl", config, {"corpus": corpus}, write, counts, {"stop": "budget"})


def make_corpus(fakes: Fakes, urls: list[str], origin: str) -> Artifact:
    n = len(urls)

    def write(out: Path) -> None:
        write_parquet(
            out / "pages.parquet",
            {
                "url": pa.array(urls),
                "host": pa.array([f"h{i % HOSTS}.example" for i in range(n)]),
                "n_chars": pa.array([100] * n, pa.uint32()),
                "n_bytes": pa.array([100] * n, pa.uint32()),
                "heldout": pa.array([i >= n - HELDOUT for i in range(n)]),
                "cut": pa.array([False] * n),
                "source": pa.array(["fake"] * n),
            },
        )
        np.save(out / "heldout.npy", np.arange(n - HELDOUT, n, dtype=np.uint32))
        targets = [sorted({(7 * i + 3) % n, (i + 1) % n, n + i % DEAD} - {i}) for i in range(n)]
        np.save(out / "links_offsets.npy", np.concatenate([[0], np.cumsum([len(t) for t in targets])]).astype(np.uint64))
        np.save(out / "links_targets.npy", np.concatenate(targets).astype(np.uint32))
        np.save(out / "indegree.npy", np.bincount(np.concatenate(targets), minlength=n + DEAD).astype(np.uint32))

    counts = {
        "pages": n,
        "heldout_pages": HELDOUT,
        "hosts": HOSTS,
        "links": 900,
        "dead_links": DEAD,
        "dead_link_uses": 20,
        "outside_links": 0,
        "text_bytes": 100 * n,
        "empty_pages": 1,
        "cut_pages": 0,
        "records": n,
        "rejects": 0,
    }
    sha256 = hashlib.sha256("\n".join([origin, *urls]).encode()).hexdigest()
    config = {"source": {"external": "corpus", "sha256": sha256}, "heldout_fraction": 0.2}
    return fakes.build("corpus", config, {}, write, counts, {"origin": origin, "rejects_by_reason": {}})


def make_world(
    root: Path,
    *,
    policies: tuple[str, ...] = ("quality", "parent_mean", "random"),
    gains: Mapping[str, float] | None = None,
    top_gains: Mapping[str, float] | None = None,
    seed_noise: float = 0.002,
    replicates: int = 2,
    with_scores: bool = True,
    absent: tuple[tuple[str, int], ...] = (),
    broken: tuple[tuple[str, int], ...] = (),
    origin: str = "made-up pages",
    urls: list[str] | None = None,
    pools: tuple[int, ...] = (),
    small: bool = False,
    accuracies: Mapping[str, Mapping[str, float]] | None = None,
    overlaps: bool = False,
) -> World:
    """gains: arm -> bits per byte that its models are worse by; top_gains: on the tenth of held-out pages with the highest score.
    absent, broken: (arm, replicate) without results, with NaN losses.

    pools: every policy but quality also gets arms `<policy>/2x` ... from so many times 30 crawled pages.
    small: every arm's selection also trains a smaller size, arm `small/<arm>`.
    accuracies: arm -> task -> accuracy: the evaluation ran the full suite, of 40 items a task.
    overlaps: every arm has an overlap stage.
    """
    rng = np.random.default_rng(7)
    fakes = Fakes(root)
    corpus = make_corpus(fakes, urls or sorted(f"https://h{i % HOSTS}.example/{i:04d}" for i in range(PAGES)), origin)
    scores = rng.beta(1, 4, PAGES).astype(np.float32)
    scores[3] = np.nan
    scorer = fakes.build(
        "scorer", {"kind": "fasttext", "label": "__label__hq"}, {}, lambda out: None, {"training_lines": 10}, {"origin": "made-up lines"}
    )

    def write_scores(out: Path) -> None:
        np.save(out / "scores.npy", scores)
        np.save(out / "reasons.npy", np.isnan(scores).astype(np.uint8))

    score = fakes.build(
        "score", {}, {"corpus": corpus, "scorer": scorer}, write_scores, {"pages": PAGES, "scored": PAGES - 1, "mean_score": 0.2}
    )
    tokenizer = fakes.build(
        "tokenizer", {"vocab_size": 2048, "source": None}, {"corpus": corpus}, lambda out: None, {"vocab_size": 2048, "training_bytes": 9}
    )
    heldout = fakes.build("tokenize", {"pages": "heldout"}, {"corpus": corpus, "tokenizer": tokenizer}, lambda out: None, {"tokens": 999})
    inputs: dict[str, Artifact] = {"corpus": corpus, "scorer": scorer}
    if with_scores:
        inputs["scores"] = score
    n_bytes = rng.integers(300, 4000, HELDOUT).astype(np.uint64)
    hardness = 1.6 + 0.3 * rng.standard_normal(HELDOUT)
    is_top = np.zeros(HELDOUT, dtype=np.bool_)
    is_top[np.argsort(-scores[-HELDOUT:])[: HELDOUT // 10]] = True

    def select(pool: str, pages: list[int], crawl: Artifact | None, fetches: int | None, pool_pages: int | None = None) -> Artifact:
        def write(out: Path) -> None:
            write_parquet(
                out / "kept.parquet",
                {
                    "page": pa.array(pages, pa.uint32()),
                    "rank": pa.array(range(len(pages)), pa.uint32()),
                    "score": pa.array(scores[pages].tolist(), pa.float32()),
                },
            )

        counts = {
            "pool_pages": (pool_pages or len(pages)) if pool == "crawled" else 80,
            "pool_fetches": fetches,
            "kept_pages": len(pages),
            "kept_text_bytes": 100 * len(pages),
            "dropped_empty": 0,
            "dropped_unscored": 0,
            "dropped_heldout": 0,
            "mean_score": None,
            "hosts": HOSTS,
            "exact_duplicates": 1,
            "near_duplicates": 2,
            "heldout_copies": None,
        }
        of = {"corpus": corpus} | ({"crawl": crawl} if crawl else {"scores": score})
        config = {"pool": pool, "keep": "top" if pool_pages else "all", "keep_pages": len(pages) if pool_pages else None}
        return fakes.build("select", config, of, write, counts)

    selections: dict[str, Artifact] = {}
    for k, policy in enumerate(policies):
        order = np.random.default_rng(k).permutation(PAGES - HELDOUT)[:90]
        if policy != "random":
            order = order[np.argsort(-np.nan_to_num(scores[order]), kind="stable")]
        look_ahead = policy == "quality"
        fetched: list[tuple[int | None, int | None, int, int | None]] = []
        for place, page in enumerate(order.tolist()):
            if place % 9 == 4:
                fetched.append((None, None, place // 30, None))
            crawled = place < 30 or not look_ahead
            fetched.append((page, place if crawled else None, place // 30, place // 30 if crawled else None))
        crawl = make_crawl(fakes, corpus, policy, fetched, dict(enumerate(scores.tolist())) if policy != "random" else None)
        inputs[f"crawl/{policy}"] = crawl
        first = [p for p, c, _, _ in fetched if c is not None and c < 30]
        best = sorted((p for p, *_ in fetched if p is not None and np.isfinite(scores[p])), key=lambda p: (-scores[p], p))[:30]
        selections[f"{policy}/equal_pages"] = select("crawled", first, crawl, len(fetched) if look_ahead else 33)
        selections[f"{policy}/equal_fetches"] = select("fetched", best, crawl, len(fetched))
        for multiple in pools if policy != "quality" else ():
            crawled_pages = [p for p, c, _, _ in fetched if p is not None and c is not None and c < 30 * multiple]
            some = sorted((p for p in crawled_pages if np.isfinite(scores[p])), key=lambda p: (-scores[p], p))[:30]
            selections[f"{policy}/{multiple}x"] = select("crawled", some, crawl, 33 * multiple, 30 * multiple)
    everything = [int(p) for p in np.argsort(-np.nan_to_num(scores[: PAGES - HELDOUT]), kind="stable")[:30]]
    selections["oracle"] = select("corpus", everything, None, None)

    for place, (arm, selection) in enumerate(selections.items()):
        tokens = fakes.build(
            "tokenize",
            {"pages": "selection"},
            {"corpus": corpus, "tokenizer": tokenizer, "selection": selection},
            lambda out: None,
            {"tokens": 5000 + place},
        )
        if overlaps:
            inputs[f"overlap/{arm}"] = make_overlap(fakes, corpus, selection)
        for size in ("toy", "small") if small else ("toy",):
            name = arm if size == "toy" else f"small/{arm}"
            for replicate in range(replicates):
                if (name, replicate) in absent:
                    continue
                noise = np.random.default_rng([place, replicate, *([1] if size == "small" else [])])
                nll = (
                    (
                        hardness
                        + (0.3 if size == "small" else 0.0)
                        + (gains or {}).get(arm, 0.0)
                        + (top_gains or {}).get(arm, 0.0) * is_top
                        + seed_noise * noise.standard_normal()
                        + 0.01 * noise.standard_normal(HELDOUT)
                    )
                    * n_bytes
                    * math.log(2)
                )
                if (name, replicate) in broken:
                    nll[5] = math.nan
                suite = None if accuracies is None else full_suite(accuracies.get(arm, {}), place, replicate)
                inputs[f"results/{name}#{replicate}"] = make_results(
                    fakes, tokens, heldout, tokenizer, replicate, nll, n_bytes, size, suite
                )
    return World(fakes.store, inputs, scores)


def make_overlap(fakes: Fakes, corpus: Artifact, selection: Artifact) -> Artifact:
    counts = {
        "pages": 30,
        "tasks": 2,
        "items": 100,
        "short_items": 20,
        "overlapping_items": 4,
        "overlapping_pages": 3,
        "exact_duplicates": 1,
        "near_duplicates": 2,
    }
    return fakes.build("overlap", {"ngram_words": 13}, {"corpus": corpus, "selection": selection}, lambda out: None, counts)


def full_suite(accuracies: Mapping[str, float], place: int, replicate: int) -> pa.Table:
    """ITEMS rows of 40 items in every task; a task's accuracy is about the given one, 0.3 where none is given."""
    rows = []
    for number, (label, task) in enumerate(TASKS.items()):
        shared = np.random.default_rng([99, number]).random(40)  # what makes an item hard for all models
        own = np.random.default_rng([place, replicate, number]).random(40)
        for item in range(40):
            right = bool(0.8 * shared[item] + 0.2 * own[item] < accuracies.get(label, 0.3))
            lm = task.kind == "lm"
            losses = [2.0 - right] if lm else [1.0 if right else 2.0, 1.5]
            rows.append(
                {
                    "task": label,
                    "item": item,
                    "category": "one" if task.categories else None,
                    "choice": None if lm else int(not right),
                    "gold": None if lm else 0,
                    "correct": right,
                    "losses": losses,
                    "n_context_tokens": [5] * len(losses),
                    "n_continuation_tokens": [2] * len(losses),
                    "cropped": False,
                    "fault": None,
                }
            )
    return pa.Table.from_pylist(rows, schema=ITEMS)


def make_results(
    fakes: Fakes,
    tokens: Artifact,
    heldout: Artifact,
    tokenizer: Artifact,
    replicate: int,
    nll: np.ndarray,
    n_bytes: np.ndarray,
    size: str = "toy",
    suite: pa.Table | None = None,
) -> Artifact:
    checkpoint = fakes.build(
        "train",
        {"size": size, "seed": 124 + replicate, "token_budget": 600_000, "precision": "fp32"},
        {"tokens": tokens, "heldout": heldout},
        lambda out: None,
        {
            "parameters": 493_000,
            "steps": 146,
            "tokens": 598_016,
            "unique_tokens": 400_000,
            "epochs": 1.495,
            "final_loss": 4.1,
            "heldout_loss": 4.3,
            "train_flops": 1e12 if size == "toy" else 2e11,
        },
        {"device": "cpu", "torch": "2"},
    )
    total = float(np.sum(nll) / math.log(2) / np.sum(n_bytes))
    bpb = total if math.isfinite(total) else None
    means: dict[str, Any] = {"core_v1": None, "core_v2": None}

    def write(out: Path) -> None:
        write_parquet(
            out / "pages.parquet",
            {
                "page": pa.array(range(PAGES - HELDOUT, PAGES), pa.uint32()),
                "n_bytes": pa.array(n_bytes, pa.uint64()),
                "n_tokens": pa.array([50] * HELDOUT, pa.uint32()),
                "nll": pa.array(nll, pa.float64()),
            },
        )
        if suite is not None:
            files = {
                t: TaskFile(task=task, rows=(), lines=(), rejects=(), state="complete", why="", sha256="0" * 64)
                for t, task in TASKS.items()
            }
            _, found = write_results(out, suite, files, bpb, "tasks of a test", {"few_shot_seed": 1, "context": 256})
            means.update(core_v1=found.core_v1, core_v2=found.core_v2)
            return
        summary = {
            "bits_per_byte": bpb,
            "core_v1": None,
            "core_v2": None,
            "why": ["self-written items are no Core"],
            "task_source": "self-written sample items",
        }
        (out / "summary.json").write_text(json.dumps(summary))

    if suite is not None:  # the means are counts, which are part of the identity of a fake
        correct: dict[str, list[float]] = {}
        for task, right in zip(suite["task"].to_pylist(), suite["correct"].to_pylist(), strict=True):
            correct.setdefault(task, []).append(float(right))
        found = aggregate({task: sum(right) / len(right) for task, right in correct.items()})
        means.update(core_v1=found.core_v1, core_v2=found.core_v2)
    counts = {"bits_per_byte": bpb, "heldout_pages": HELDOUT, "heldout_bytes": int(n_bytes.sum()), "items": 46, **means}
    return fakes.build(
        "evaluate",
        {"suite": "core-23", "tasks": None},
        {"checkpoint": checkpoint, "tokenizer": tokenizer, "heldout": heldout},
        write,
        counts,
    )


CONFIG = ReportConfig(
    title="tiny: a test", question="Which policy gives the better model?", hypothesis="quality wins", reference="quality/equal_pages"
)
