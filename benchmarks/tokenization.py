"""Tokens a second: the whole tokenize stage against the `tokenizers` library's encode_batch alone, on the real corpus pages.

    python benchmarks/tokenize.py [--quick] [--repeats 3]

In one run, on the same pages, alternating:

    ours      the stage: read and decompress pages, encode, pack, shuffle, write MDS shards, re-read them; one worker
    library   `tokenizers` encode_batch on texts that are in memory already, one thread: nothing read, packed or written
    plain     what a data set script does: read Parquet, encode_batch, join, cut into blocks, write Parquet; one thread

Rates are per second of processor time (user and system, children included), so that other users of the machine weigh little; wall time is
printed beside it. `ratio` is ours / library, end to end. `scaling` is the rate of wall time at two workers over twice that at one, on the
same pages many times over, so that the start of two processes (about 2 s) weighs as little as in real work; it needs a machine with two
idle cores. `against_separate` does not: the wall time of two processes that have nothing to do with each other, each with half of the
work, over that of two workers, by turns. The ids are compared on every page. Needs the reference data ($CRAW4LLM_SHARED, default
../shared).
"""

import argparse
import gzip
import json
import multiprocessing
import os
import resource
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ["TOKENIZERS_PARALLELISM"] = "false"

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from craw4llm.artifact import Artifact, Result, Store
from craw4llm.configs import CorpusConfig, TokenizeConfig, TokenizerConfig
from craw4llm.corpus.reader import Corpus
from craw4llm.execution import Execution
from craw4llm.externals import ExternalDigests
from craw4llm.fingerprint import External
from craw4llm.stage import Planner, Stage, implementation
from craw4llm.tokens import parts, tokenize_stage
from craw4llm.tokens.streaming_shim import streaming
from craw4llm.tokens.tokenizer import Tokenizer, plain_engine

SAMPLE_TOKENS = 2049
QUICK_EVERY = 8
LONG_CHARS = 50_000_000
SCALING_TOKENS = 200_000_000  # most of a minute of one worker


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help=f"one page in {QUICK_EVERY}; ends within 5 minutes on two cores")
    parser.add_argument("--repeats", type=int, default=3)
    arguments = parser.parse_args()
    shared = Path(os.environ.get("CRAW4LLM_SHARED", "../shared"))
    every = QUICK_EVERY if arguments.quick else 1
    streaming()  # its import takes seconds, once per process
    with tempfile.TemporaryDirectory() as folder:
        results = measure(shared, Path(folder), every, arguments.repeats)
    print(json.dumps(results))


def measure(shared: Path, folder: Path, every: int, repeats: int) -> dict[str, Any]:
    web = folder / "web.parquet"
    table = pq.read_table(shared / "corpus" / "docweb.parquet", columns=["url", "text"]).take(pa.array(range(0, 30_145, every)))
    links = pa.nulls(len(table), pa.list_(pa.string())).fill_null([])
    pq.write_table(table.append_column("outlinks", links), web)
    execution = Execution(root=folder / "root", workers=2, report=lambda line: None)
    corpus = build(
        Stage(CorpusConfig(source=External(name="corpus", path=str(web)), heldout_fraction=0.0, max_text_chars=10**9)), execution
    )
    path = shared / "tokenizer" / "20B_tokenizer.json"
    tokenizer = build(Stage(TokenizerConfig(source=External(name="tokenizer", path=str(path)))), execution)
    opened = Corpus(corpus)
    pages = np.flatnonzero(opened.n_bytes > 0)
    selection = select(execution, corpus, pages)
    inputs = {"corpus": corpus, "tokenizer": tokenizer, "selection": selection}
    texts = opened.texts(pages)
    engine = plain_engine(path)
    encoder = Tokenizer(tokenizer)
    assert encoder.fast is not None
    reference = engine.encode_batch_fast(texts, add_special_tokens=False)
    tokens = sum(len(e.ids) for e in reference) + len(texts)
    differing = sum(encoder.fast.encode(text).tolist() != e.ids for text, e in zip(texts, reference, strict=True))
    del reference
    print(
        f"{len(texts):,} pages, {sum(map(len, texts)):,} characters, {tokens:,} tokens with end-of-text; pages with other ids: {differing}"
    )

    runs: dict[str, Callable[[int], None]] = {
        "ours": lambda i: stage(inputs, folder / f"ours{i}", 1, execution.root),
        "library": lambda i: library(engine, texts),
        "plain": lambda i: plain(engine, web, folder / f"plain{i}.parquet"),
    }
    cpu: dict[str, list[float]] = {name: [] for name in runs}
    wall: dict[str, list[float]] = {name: [] for name in runs}
    for i in range(repeats):
        for name, run in runs.items():
            spent = timed(lambda run=run, i=i: run(i))  # type: ignore[misc]
            wall[name].append(spent[0])
            cpu[name].append(spent[1])
    copies = -(-SCALING_TOKENS // (every * tokens))
    many = inputs | {"selection": select(execution, corpus, np.tile(pages, copies), f"times{copies}")}
    one_worker = timed(lambda: stage(many, folder / "one", 1, execution.root))[0]
    half = inputs | {"selection": select(execution, corpus, np.tile(pages, -(-copies // 2)), f"times{-(-copies // 2)}")}
    two, apart = [], []
    for i in range(repeats):
        two.append(timed(lambda i=i: stage(many, folder / f"two{i}", 2, execution.root))[0])  # type: ignore[misc]
        apart.append(timed(lambda i=i: separate(half, folder / f"apart{i}", execution.root))[0])  # type: ignore[misc]
    two_workers = statistics.median(two)
    rate = {name: tokens / statistics.median(times) for name, times in cpu.items()}
    print(f"{'':<10}{'tokens per CPU s':>18}{'median wall s':>16}{'spread of CPU s':>24}")
    for name, times in cpu.items():
        spread = f"{min(times):.2f} to {max(times):.2f}"
        print(f"{name:<10}{rate[name]:>18,.0f}{statistics.median(wall[name]):>16.2f}{spread:>24}")
    print(
        f"ours, {copies} times the pages: {one_worker:.1f} s of wall time with one worker, {two_workers:.1f} s with two; "
        f"half of them in each of two separate processes: {statistics.median(apart):.1f} s"
    )
    hard = hard_texts(encoder, shared)
    return {
        "ratio": round(rate["ours"] / rate["library"], 2),
        "ratio_plain": round(rate["ours"] / rate["plain"], 2),
        "scaling": round(one_worker / two_workers / 2, 2),
        "against_separate": round(statistics.median(apart) / two_workers * copies / (2 * -(-copies // 2)), 2),
        "tokens_per_cpu_s": round(rate["ours"]),
        "pages_with_other_ids": differing,
        "slowest_hard_text_s": round(max(hard.values()), 2),
        "fifty_megabytes_s": round(hard["50 MB of pages"], 2),
        "peak_rss_mb": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024),
    }


def hard_texts(tokenizer: Tokenizer, shared: Path) -> dict[str, float]:
    """Seconds of wall time for each text of case BL-29, and for 50 MB of real pages as one document (two threads)."""
    assert tokenizer.fast is not None
    with gzip.open(shared / "cases" / "BL-29" / "docs.jsonl.gz", "rt", encoding="utf-8") as stream:
        texts = {doc["id"]: doc["text"] for doc in map(json.loads, stream)}
    pages = pq.read_table(shared / "corpus" / "docweb.parquet", columns=["text"]).column(0).to_pylist()
    joined, size = [], 0
    for text in pages:
        joined.append(text or "")
        size += len(joined[-1].encode()) + 1
        if size >= LONG_CHARS:
            break
    texts["50 MB of pages"] = "\n".join(joined)
    found = {}
    for name, text in texts.items():
        fast = tokenizer.fast
        found[name], cpu = timed(lambda fast=fast, text=text: sum(len(ids) for ids in fast.pieces(text, threads=2)))  # type: ignore[misc]
        print(f"{name:<24}{len(text):>12,} characters{found[name]:>8.2f} s wall{cpu:>8.2f} s CPU")
    return found


def stage(inputs: dict[str, Artifact], out: Path, workers: int, root: Path) -> None:
    out.mkdir()
    tokenize_stage.run(
        TokenizeConfig(sample_tokens=SAMPLE_TOKENS), inputs, out, Execution(root=root, workers=workers, report=lambda line: None)
    )
    assert not (out / parts.FOLDER).exists()


def separate(inputs: dict[str, Artifact], out: Path, root: Path) -> None:
    """Two processes, each with one worker and these inputs."""
    context = multiprocessing.get_context("spawn")
    processes = []
    for i in range(2):
        folder = Path(f"{out}.{i}")
        folder.mkdir()
        arguments = (TokenizeConfig(sample_tokens=SAMPLE_TOKENS), inputs, folder, Execution(root=root, workers=1, report=str))
        processes.append(context.Process(target=tokenize_stage.run, args=arguments))
    for process in processes:
        process.start()
    for process in processes:
        process.join()
        assert process.exitcode == 0


def library(engine: Any, texts: list[str]) -> None:
    for start in range(0, len(texts), 1000):
        engine.encode_batch(texts[start : start + 1000], add_special_tokens=False)


def plain(engine: Any, web: Path, out: Path) -> None:
    schema = pa.schema([("input_ids", pa.list_(pa.int32()))])
    left: list[int] = []
    with pq.ParquetWriter(out, schema) as writer:
        for batch in pq.ParquetFile(web).iter_batches(batch_size=1000, columns=["text"]):
            for encoding in engine.encode_batch([t for t in batch.column(0).to_pylist() if t], add_special_tokens=False):
                left += encoding.ids
                left.append(0)
            whole = len(left) // SAMPLE_TOKENS * SAMPLE_TOKENS
            blocks = [left[i : i + SAMPLE_TOKENS] for i in range(0, whole, SAMPLE_TOKENS)]
            left = left[whole:]
            writer.write_table(pa.table({"input_ids": blocks}, schema=schema))


def timed(work: Callable[[], Any]) -> tuple[float, float]:
    """(seconds of wall time, seconds of processor time with children)."""
    before, began = os.times(), time.perf_counter()
    work()
    wall, after = time.perf_counter() - began, os.times()
    return wall, sum(after[:4]) - sum(before[:4])


def build(one: Stage, execution: Execution) -> Artifact:
    planner, store = Planner(ExternalDigests(None)), Store(execution.root)
    module = implementation(one.config.stage)
    return store.build(
        one.config.stage,
        planner.fingerprint(one),
        version=one.config.version,
        config=planner.config_record(one),
        inputs={},
        write=lambda out: module.run(one.config, {}, out, execution),
    )[0]


def select(execution: Execution, corpus: Artifact, pages: np.ndarray, name: str = "all") -> Artifact:
    """These pages as a selection."""

    def write(out: Path) -> Result:
        pq.write_table(pa.table({"page": pages.astype(np.uint32)}), out / "kept.parquet")
        return Result()

    return Store(execution.root).build("select", name, version=1, config={}, inputs={"corpus": corpus}, write=write)[0]


if __name__ == "__main__":
    main()
