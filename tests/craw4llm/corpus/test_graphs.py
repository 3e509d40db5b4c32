"""Link graphs without texts: BVGraph, edge lists of integers and of URLs."""

import hashlib
import itertools
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner

from craw4llm.artifact import Artifact
from craw4llm.configs import CorpusConfig, CrawlConfig
from craw4llm.corpus import edges
from craw4llm.corpus.bvgraph import read_bvgraph
from craw4llm.corpus.edges import open_linked
from craw4llm.corpus.graph_only import node_urls, open_edges
from craw4llm.corpus.merge import write_indegree
from craw4llm.corpus.reader import Corpus
from craw4llm.corpus.stage import run as run_stage
from craw4llm.errors import InputError
from craw4llm.execution import Execution
from craw4llm.fingerprint import External
from craw4llm.stage import Stage

Build = Callable[[Stage], Artifact]
WriteParquet = Callable[..., Path]


def corpus_of(build: Build, path: Path, **fields: Any) -> Corpus:
    return Corpus(build(Stage(CorpusConfig(source=External(name="corpus", path=str(path)), **fields))))


def all_links(corpus: Corpus) -> list[list[str]]:
    offsets, targets = corpus.outlinks(range(corpus.n_pages))
    return [[corpus.url(t) for t in targets[a:b]] for a, b in itertools.pairwise(offsets)]


def test_cnr_2000(shared: Path, build: Build) -> None:
    """Figures of webgraph/README.md, and the graph that its reader decodes, link by link."""
    base = shared / "webgraph" / "cnr-2000"
    offsets, targets = read_bvgraph(base)
    assert (len(offsets) - 1, len(targets)) == (325_557, 3_216_152)
    degrees = np.diff(offsets)
    assert (np.median(degrees), degrees.max(), round(float((degrees == 0).mean()), 2)) == (3, 2_716, 0.24)
    indegree = np.bincount(targets, minlength=len(degrees))
    assert (np.median(indegree), indegree.max(), np.percentile(indegree, 99)) == (2, 18_235, 67)
    # of `tools/read_bvgraph.py`: SHA-256 of its indptr (int64) and indices (int32)
    assert hashlib.sha256(offsets.tobytes() + targets.astype(np.int32).tobytes()).hexdigest() == CNR_2000
    corpus = corpus_of(build, base.with_suffix(".graph"), heldout_min_chars=0)
    assert corpus.n_pages == corpus.n_targets == 325_557
    assert corpus.url(7) == "https://node.example/000007"
    assert corpus.find(["https://node.example/325556", "https://node.example/325557"]).tolist() == [325_556, -1]
    sources = np.repeat(np.arange(len(degrees)), degrees)
    other = targets != sources
    assert corpus.artifact.count("links") == int(other.sum())
    assert corpus.artifact.count("self_links") == len(targets) - int(other.sum())
    _, links = corpus.outlinks(range(corpus.n_pages))
    assert np.array_equal(links, targets[other])
    assert np.array_equal(corpus.indegree, np.bincount(links, minlength=corpus.n_pages))
    assert 0.008 < len(corpus.heldout) / corpus.n_pages < 0.012
    config = CrawlConfig(policy="breadth_first", budget_pages=5_000, batch_pages=500, seed_count=50)  # a crawl runs on it
    assert build(Stage(config, corpus=Stage(corpus_config(base)))).count("crawled_pages") == 5_000


CNR_2000 = "878d7b95e4c3cc8e502857b3675fb272c073f6e8acf29d6293c895263d8a6e44"


def corpus_config(base: Path) -> CorpusConfig:
    return CorpusConfig(source=External(name="corpus", path=str(base.with_suffix(".graph"))))


def test_a_damaged_bvgraph_is_refused(shared: Path, tmp_path: Path) -> None:
    for name in ("cnr-2000.graph", "cnr-2000.properties"):
        shutil.copy(shared / "webgraph" / name, tmp_path / name)
        (tmp_path / name).chmod(0o644)
    base = tmp_path / "cnr-2000"
    data = bytearray((tmp_path / "cnr-2000.graph").read_bytes())
    (tmp_path / "cnr-2000.graph").write_bytes(data[: len(data) // 2])
    with pytest.raises(InputError, match="is damaged at node"):
        read_bvgraph(base)
    rng = np.random.default_rng(0)
    for _ in range(8):  # any bytes: an error or a graph within its bounds, never a crash
        broken = bytearray(data)
        at = int(rng.integers(0, len(data) - 50))
        broken[at : at + 50] = rng.bytes(50)
        (tmp_path / "cnr-2000.graph").write_bytes(broken)
        try:
            _, targets = read_bvgraph(base)
        except InputError:
            continue
        assert targets.max() < 325_557
    properties = (tmp_path / "cnr-2000.properties").read_text()
    (tmp_path / "cnr-2000.properties").write_text(properties.replace("compressionflags=", "compressionflags=RESIDUALS_DELTA"))
    with pytest.raises(InputError, match="only BVGraph's default codes"):
        read_bvgraph(base)
    (tmp_path / "cnr-2000.properties").unlink()
    with pytest.raises(InputError, match=r"cnr-2000.properties cannot be read"):
        read_bvgraph(base)


def test_node_urls_sort_like_their_numbers() -> None:
    assert node_urls(98, 102, 1000).to_pylist() == [f"https://node.example/{k:03}" for k in range(98, 102)]
    assert node_urls(2**32 - 3, 2**32 - 1, 2**32 - 1).to_pylist() == [f"https://node.example/{2**32 - 3 + k}" for k in range(2)]
    urls = node_urls(0, 1234, 1234).to_pylist()
    assert urls == sorted(urls)


def test_an_edge_list_of_integers_in_any_order(tmp_path: Path, build: Build) -> None:
    rng = np.random.default_rng(3)
    source, target = rng.integers(0, 1000, 20_000), rng.integers(0, 1200, 20_000)
    path = tmp_path / "edges.parquet"
    pq.write_table(pa.table({"source": source, "target": target.astype(np.uint32)}), path)
    corpus = corpus_of(build, path)
    wanted = sorted({(s, t) for s, t in zip(source.tolist(), target.tolist(), strict=True) if s != t})
    offsets, targets = corpus.outlinks(range(corpus.n_pages))
    sources = np.repeat(np.arange(corpus.n_pages), np.diff(offsets))
    assert list(zip(sources.tolist(), targets.tolist(), strict=True)) == wanted
    assert corpus.n_pages == int(target.max()) + 1
    for memory_bytes in (1000, 100_000):  # sorted in files
        out = tmp_path / str(memory_bytes)
        out.mkdir()
        config = CorpusConfig(source=External(name="corpus", path=str(path)))
        run_stage(config, {}, out, Execution(workers=1, memory_bytes=memory_bytes, report=lambda line: None))
        for file in out.iterdir():
            assert file.read_bytes() == corpus.artifact.file(file.name).read_bytes(), file.name
    pq.write_table(pa.table({"source": [0, 1], "target": [-1, 5]}), path)
    with pytest.raises(InputError, match="holds nulls or numbers outside"):
        open_edges(path)


@pytest.mark.parametrize("bucket_bytes", [1, 20_000, 1 << 20])
def test_linked_edges_are_read_twice_whatever_their_order(
    tmp_path: Path, build: Build, monkeypatch: pytest.MonkeyPatch, bucket_bytes: int
) -> None:
    """40 chunks of nodes: once to be checked, once to be shared out; not once a chunk."""
    monkeypatch.setattr(edges, "CHUNK_NODES", 50)
    monkeypatch.setattr(edges, "BUCKET_BYTES", bucket_bytes)
    monkeypatch.setattr(edges, "_BATCH_EDGES", 1000)
    rng = np.random.default_rng(5)
    source, target = rng.integers(0, 1500, 9000), rng.integers(0, 2000, 9000)
    flags, anchors = rng.integers(0, 3, 9000, dtype=np.uint8), [f"to {t}" for t in target.tolist()]
    folder = tmp_path / "graph"
    folder.mkdir()
    pq.write_table(pa.table({"url": [f"https://a.example/{k:04}" for k in range(2000)]}), folder / "nodes.parquet")
    table = pa.table({"target": target, "source": source.astype(np.uint16), "anchor": anchors, "flags": flags, "other": source})
    pq.write_table(table, folder / "edges.parquet")
    rows = {"read": 0}
    batches = edges._batches

    def counted(path: Path, columns: list[str]) -> Iterator[pa.RecordBatch]:
        for batch in batches(path, columns):
            rows["read"] += batch.num_rows
            yield batch

    monkeypatch.setattr(edges, "_batches", counted)
    opened = open_linked(folder)
    assert rows["read"] == 9000
    pages = [page for chunk in opened.chunks for page in chunk.read()]
    again = [page for chunk in opened.chunks for page in chunk.read()]
    assert rows["read"] == 18_000 and pages == again
    kept = {chunk.edges for chunk in opened.chunks}
    assert len(list(opened.chunks)) == 40 and (len(kept) == 1) == (bucket_bytes == 1 << 20)
    wanted: list[list[tuple[str, str, int]]] = [[] for _ in range(2000)]
    for s, t, f in sorted(zip(source.tolist(), target.tolist(), range(9000), strict=True)):
        wanted[s].append((f"https://a.example/{t:04}", anchors[f], int(flags[f])))
    assert [list(zip(page.links, page.anchors, page.link_flags, strict=True)) for page in pages] == wanted
    assert all(Path(name).is_file() for name in kept)
    del opened
    assert not any(Path(name).exists() for name in kept)


def test_links_out_and_in_again(parquet: WriteParquet, build: Build, tmp_path: Path) -> None:
    rows = [(f"https://h{k % 3}.example/{k}", "text", [f"https://h{(k + 1) % 3}.example/{k + 1}", "/gone", f"/{k - 3}"]) for k in range(60)]
    extra = {
        "doc_id": [f"d{k}" for k in range(60)],
        "language": ["en"] * 60,
        "anchors": [[f"to {k}", None, ""] for k in range(60)],
        "link_flags": [[1, 2, 4]] * 60,
    }
    first = corpus_of(build, parquet(rows, extra=extra), heldout_fraction=0.0)
    folder = tmp_path / "graph"
    from craw4llm.__main__ import cli

    arguments = ["export-edges", first.artifact.fingerprint, "--out", str(folder), "--root", str(first.artifact.root)]
    done = CliRunner().invoke(cli, arguments, catch_exceptions=False)
    links = first.artifact.count("links") + first.artifact.count("dead_link_uses")
    assert f"{first.n_targets:,} nodes, {links:,} edges" in done.output
    again = corpus_of(build, folder, heldout_fraction=0.0)
    assert again.urls == first.urls
    assert again.dead_urls == first.dead_urls
    assert again.doc_ids == first.doc_ids
    assert all_links(again) == all_links(first)
    everything = range(first.n_pages)
    assert again.anchors(everything) == first.anchors(everything)
    assert np.array_equal(again.link_flags(everything), first.link_flags(everything))  # type: ignore[arg-type]
    assert again.texts([0, 59]) == ["", ""]
    edges = pq.read_table(folder / "edges.parquet")
    shuffled = np.random.default_rng(0).permutation(len(edges))
    pq.write_table(edges.take(shuffled), folder / "edges.parquet")
    assert all_links(corpus_of(build, folder, heldout_fraction=0.0, heldout_min_chars=1)) == all_links(first)
    pq.write_table(pa.table({"source": [0], "target": [10_000]}), folder / "edges.parquet")
    with pytest.raises(InputError, match=r"no rows of nodes.parquet"):
        open_linked(folder)


def test_indegrees_that_do_not_fit_the_memory_are_counted_range_by_range(tmp_path: Path) -> None:
    targets = np.random.default_rng(0).integers(0, 150_000, 300_000, dtype=np.uint32)
    for memory_bytes in (16, 1 << 30):  # three ranges, one
        write_indegree(tmp_path / "indegree.npy", targets, 150_000, memory_bytes)
        assert (np.load(tmp_path / "indegree.npy") == np.bincount(targets, minlength=150_000)).all()
