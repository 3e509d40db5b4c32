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
import pytest

from craw4llm.artifact import Artifact, Result, Store
from craw4llm.execution import Execution
from training.configs import ReportConfig
from training.report import stage as report_stage

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
    config = {"policy": policy, "batch_pages": 10, "seeds": None, "seed_count": 4, "seed_set": 0}
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
    config = {"source": {"external": "corpus", "sha256": "ab" * 32}, "heldout_fraction": 0.2}
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
) -> World:
    """gains: arm -> bits per byte that its models are worse by; top_gains: on the tenth of held-out pages with the
    highest score. absent, broken: (arm, replicate) without results, with NaN losses."""
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

    def select(pool: str, pages: list[int], crawl: Artifact | None, fetches: int | None) -> Artifact:
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
            "pool_pages": len(pages) if pool == "crawled" else 80,
            "pool_fetches": fetches,
            "kept_pages": len(pages),
            "kept_text_bytes": 100 * len(pages),
            "dropped_empty": 0,
            "dropped_unscored": 0,
            "dropped_heldout": 0,
            "mean_score": None,
            "hosts": HOSTS,
        }
        of = {"corpus": corpus} | ({"crawl": crawl} if crawl else {"scores": score})
        return fakes.build("select", {"pool": pool, "keep": "all"}, of, write, counts)

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
        for replicate in range(replicates):
            if (arm, replicate) in absent:
                continue
            noise = np.random.default_rng([place, replicate])
            nll = (
                (
                    hardness
                    + (gains or {}).get(arm, 0.0)
                    + (top_gains or {}).get(arm, 0.0) * is_top
                    + seed_noise * noise.standard_normal()
                    + 0.01 * noise.standard_normal(HELDOUT)
                )
                * n_bytes
                * math.log(2)
            )
            if (arm, replicate) in broken:
                nll[5] = math.nan
            inputs[f"results/{arm}#{replicate}"] = make_results(fakes, tokens, heldout, tokenizer, replicate, nll, n_bytes)
    return World(fakes.store, inputs, scores)


def make_results(
    fakes: Fakes, tokens: Artifact, heldout: Artifact, tokenizer: Artifact, replicate: int, nll: np.ndarray, n_bytes: np.ndarray
) -> Artifact:
    checkpoint = fakes.build(
        "train",
        {"size": "toy", "seed": 124 + replicate, "token_budget": 600_000, "precision": "fp32"},
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
            "train_flops": 1e12,
        },
        {"device": "cpu", "torch": "2"},
    )
    total = float(np.sum(nll) / math.log(2) / np.sum(n_bytes))
    bpb = total if math.isfinite(total) else None

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
        summary = {
            "bits_per_byte": bpb,
            "core_v1": None,
            "core_v2": None,
            "why": ["self-written items are no Core"],
            "task_source": "self-written sample items",
        }
        (out / "summary.json").write_text(json.dumps(summary))

    counts = {
        "bits_per_byte": bpb,
        "heldout_pages": HELDOUT,
        "heldout_bytes": int(n_bytes.sum()),
        "items": 46,
        "core_v1": None,
        "core_v2": None,
    }
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


@pytest.fixture
def world(tmp_path: Path) -> Callable[..., World]:
    return lambda **options: make_world(tmp_path / "artifacts", **options)


@pytest.fixture
def report(tmp_path: Path) -> Callable[..., Path]:
    """Runs the stage on inputs; returns the folder that it wrote."""

    def run(inputs: Mapping[str, Artifact], config: ReportConfig = CONFIG, name: str = "report") -> Path:
        out = tmp_path / name
        out.mkdir()
        execution = Execution(root=tmp_path / "artifacts", workers=1, report=lambda line: None)
        (out / "result.json").write_text(
            json.dumps({k: v for k, (v, _) in report_stage.run(config, inputs, out, execution).counts.items()})
        )
        return out

    return run
