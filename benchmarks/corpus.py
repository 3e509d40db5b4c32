"""Building a corpus from each kind of source: pages a second, against the floor of the libraries that read it, in one run on one core.

    python benchmarks/corpus.py [--quick] [--source parquet --source jsonl ...] [--rounds 3] [--web data/demo-web/web]
    python benchmarks/corpus.py --graph-pages 100000000 --folder /disk/with/20/GB

Each source is a function in SOURCES; those of a module of their own (`corpus_<name>.py`) run from there. Ours and the floor take turns;
times are processor seconds (user and system), medians of the rounds. `floor_ratio` is floor / ours, ours being the whole build. The floor
is a plain loop over the same libraries that checks nothing, sorts nothing and keeps no graph. It is another loop for each source, so that
the ratio of one source says nothing against another's:

    parquet    pyarrow reads the columns; ada parses every URL and every distinct link; zstd compresses each text; texts are written
    jsonl      gzip unpacks, orjson parses, then as above
    html       resiliparse extracts the main text of each file; texts compressed and written. No links: that the build finds them, with
               anchors and places, in a child that a page may take down, counts against it. Pages: those of --web (made by `craw4llm
               fetch demo-web`); without it this source is left out
    html_small the same on docweb's texts and links in the markup of a small site: little to extract, so that all else weighs most
    synthetic  the pages are made; then as above
    graph      an edge list of integers: pyarrow reads it, numpy sorts the pairs, targets and a table of URLs are written
    clueweb22  isal unpacks the records and orjson parses them; nothing is done with them and nothing is written
    warc       FastWARC reads, resiliparse decodes and extracts the main text, links are found by our own scan (no library at hand finds
               them in linear time), ada parses each address, texts compressed and written. As our scan is on both sides, `text_ratio`
               is the stricter figure: FastWARC and main text alone / reading by ours, links, digests and limits included

`read_ratio` is the time of reading alone (no URL, no compression) over ours. Pages are docweb's ($CRAW4LLM_SHARED, default ../shared).
Last line: JSON with floor_ratio, the smallest of the sources', that of each source, and the text_ratio of WARC. With --graph-pages: bytes a
page and a link, seconds and peak memory of each step (`peak_rss`: with mapped files), and the table for 900 million pages.
"""

import argparse
import contextlib
import gzip
import importlib
import json
import multiprocessing
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import ada_url
import numpy as np
import orjson
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from processor import cpu

from craw4llm.configs import CorpusConfig, SyntheticWeb
from craw4llm.corpus.graph_only import GraphSource, build_graph, without_own
from craw4llm.corpus.html_object import object_file
from craw4llm.corpus.stage import open_source, run
from craw4llm.execution import Execution
from craw4llm.fingerprint import External

QUICK_EVERY = 8
HTML_PAGES = 3000
ZSTD = pa.Codec("zstd")
Options = argparse.Namespace


def measure_parquet(options: Options) -> dict[str, Any]:
    path = options.folder / "web.parquet"
    pq.write_table(pages_table(options), path, row_group_size=4096)
    columns = ["url", "text", "outlinks"]

    def rows() -> Iterator[tuple[Any, Any, Any]]:
        for batch in pq.ParquetFile(path).iter_batches(512, columns=columns):
            yield from zip(*(batch.column(name).to_pylist() for name in columns), strict=True)

    return against(options, External(name="corpus", path=str(path)), lambda: store(options, rows()), lambda: sum(1 for _ in rows()))


def measure_jsonl(options: Options) -> dict[str, Any]:
    path = options.folder / "pages.jsonl.gz"
    with gzip.open(path, "wb", compresslevel=6) as stream:
        for row in pages_table(options).to_pylist():
            stream.write(orjson.dumps(row) + b"\n")

    def rows() -> Iterator[tuple[Any, Any, Any]]:
        with gzip.open(path, "rb") as lines:
            for line in lines:
                record = orjson.loads(line)
                yield record["url"], record["text"], record["outlinks"]

    return against(options, External(name="corpus", path=str(path)), lambda: store(options, rows()), lambda: sum(1 for _ in rows()))


def measure_html(options: Options) -> dict[str, Any]:
    """Real pages of documentation packages."""
    return html_against(options, options.web)


def measure_html_small(options: Options) -> dict[str, Any]:
    """docweb's texts and links in the markup of a small site."""
    folder = options.folder / "html"
    (folder / "site").mkdir(parents=True)
    for k, row in enumerate(pages_table(options).slice(0, HTML_PAGES).to_pylist()):
        (folder / "site" / f"{k:05}.html").write_text(html_page(row), encoding="utf-8")
    site = {"folder": "site", "base_url": "https://a.example/", "package": "site", "version": "1", "max_pages": None}
    (folder / "web.json").write_text(json.dumps({"kind": "html_tree", "origin": "docweb in markup", "sites": [site]}))
    return html_against(options, folder)


def html_against(options: Options, folder: Path) -> dict[str, Any]:
    from resiliparse.extract.html2text import extract_plain_text

    object_file()  # compiled once a machine: not a build's time
    source = External(name="corpus", path=str(folder))
    files = [Path(chunk.site.folder) / name for chunk in open_source(source).chunks for name in chunk.files]  # type: ignore[union-attr]

    def floor() -> int:
        with (options.folder / "floor").open("wb") as stream:
            for path in files:
                text = extract_plain_text(path.read_bytes().decode(errors="replace"), main_content=True)
                stream.write(ZSTD.compress(text.encode(), asbytes=True))
        return len(files)

    return against(options, source, floor)


def measure_synthetic(options: Options) -> dict[str, Any]:
    web = SyntheticWeb(pages=2000 if options.quick else 10_000, hosts=100)

    def rows() -> Iterator[tuple[Any, Any, Any]]:
        for chunk in open_source(web).chunks:  # type: ignore[union-attr]
            for page in chunk.read():
                yield page.url, page.text, page.links  # type: ignore[union-attr]

    return against(options, web, lambda: store(options, rows()), lambda: sum(1 for _ in rows()))


def measure_graph(options: Options) -> dict[str, Any]:
    nodes, edges = (200_000, 2_000_000) if options.quick else (1_000_000, 20_000_000)
    rng = np.random.default_rng(0)
    path = options.folder / "edges.parquet"
    pq.write_table(pa.table({name: rng.integers(0, nodes, edges, dtype=np.uint32) for name in ("source", "target")}), path)

    def floor() -> int:
        table = pq.read_table(path)
        keys = table["source"].to_numpy().astype(np.uint64) << np.uint64(32) | table["target"].to_numpy()
        keys.sort()
        np.save(options.folder / "floor.npy", (keys & np.uint64(2**32 - 1)).astype(np.uint32))
        numbers = pc.utf8_lpad(pa.array(np.arange(nodes)).cast(pa.string()), 7, "0")
        urls = pc.binary_join_element_wise("https://node.example/", numbers, "")
        pq.write_table(pa.table({"url": urls}), options.folder / "floor.parquet", compression="zstd", row_group_size=65_536)
        return nodes

    return {**against(options, External(name="corpus", path=str(path)), floor), "edges": edges}


SOURCES: dict[str, Callable[[Options], dict[str, Any]] | str] = {
    "parquet": measure_parquet,
    "jsonl": measure_jsonl,
    "html": measure_html,
    "html_small": measure_html_small,
    "synthetic": measure_synthetic,
    "graph": measure_graph,
    "clueweb22": "corpus_clueweb22",  # a module beside this file with measure(options)
    "warc": "corpus_warc",
}


def against(
    options: Options, source: External | SyntheticWeb, floor: Callable[[], int], read: Callable[[], int] | None = None
) -> dict[str, Any]:
    """Times of the whole build and of the floor, in turns."""
    execution = Execution(root=options.folder, workers=1, report=lambda line: None)
    spent: dict[str, list[float]] = {"ours": [], "floor": [], "read": []}
    counts: dict[str, Any] = {}
    for _ in range(options.rounds):
        out = options.folder / "out"
        shutil.rmtree(out, ignore_errors=True)
        out.mkdir()
        began = cpu()
        counts = {name: value for name, (value, _) in run(CorpusConfig(source=source), {}, out, execution).counts.items()}
        spent["ours"].append(cpu() - began)
        for name, work in (("floor", floor), ("read", read)):
            if work is not None:
                began = cpu()
                work()
                spent[name].append(cpu() - began)
    ours = statistics.median(spent["ours"])
    megabytes = counts["text_bytes"] / 1e6
    found = {
        "floor_ratio": round(statistics.median(f / o for f, o in zip(spent["floor"], spent["ours"], strict=True)), 2),
        "pages_per_s": round(counts["pages"] / ours),
        "text_mb_per_s": round(megabytes / ours, 1),
        "pages": counts["pages"],
        "cpu_s": round(ours, 2),
    }
    if spent["read"]:
        found["read_ratio"] = round(statistics.median(r / o for r, o in zip(spent["read"], spent["ours"], strict=True)), 2)
    return found


def store(options: Options, rows: Iterator[tuple[Any, Any, Any]]) -> int:
    """What a corpus needs of any source at the least: its URLs parsed, its texts compressed and written."""
    known: dict[str, str] = {}
    count = 0
    with (options.folder / "floor").open("wb") as stream:
        for url, text, links in rows:
            str(ada_url.URL(url).href)
            for link in links:
                if link not in known:
                    known[link] = str(ada_url.URL(link, base=url).href)
            stream.write(ZSTD.compress((text or "").encode(), asbytes=True))
            count += 1
    return count


def pages_table(options: Options) -> pa.Table:
    shared = Path(os.environ.get("CRAW4LLM_SHARED", "../shared"))
    table = pq.read_table(shared / "corpus" / "docweb.parquet", columns=["url", "text", "outlinks"])
    return table.take(pa.array(np.arange(0, len(table), QUICK_EVERY))) if options.quick else table


def html_page(row: dict[str, Any]) -> str:
    escaped = (row["text"] or "").replace("&", "&amp;").replace("<", "&lt;")
    paragraphs = "".join(f"<p>{part}</p>\n" for part in escaped.split("\n") if part.strip())
    links = "".join(f'<li><a href="{link}">link</a></li>' for link in row["outlinks"][:100])
    head = "<head><meta charset=utf-8><title>t</title><style>p{color:red}</style></head>"
    return f"<!DOCTYPE html><html>{head}<body><nav><ul>{links}</ul></nav><main><article>{paragraphs}</article></main></body></html>"


# The link graph at scale ------------------------------------------------------------------------------------------------------------------


def measure_scale(options: Options) -> dict[str, Any]:
    """A graph of --graph-pages pages: written, made a corpus, read at random, transposed; each step in a process of its own."""
    folder, n = options.folder, options.graph_pages
    steps: dict[str, dict[str, Any]] = {}
    for name, step in (("write", _write), ("corpus", _corpus), ("read", _read), ("transpose", _transpose)):
        if name == "transpose" and options.no_transpose:
            continue
        with multiprocessing.get_context("spawn").Pool(1) as pool:
            steps[name] = pool.apply(_watched, (step, folder, n, options.links_per_page))
        print(f"{name:10}{json.dumps(steps[name])}", flush=True)
    out = folder / "corpus"
    size = {path.name: path.stat().st_size for path in out.iterdir()}
    links = steps["corpus"]["links"]
    link_bytes = size["links_offsets.npy"] + size["links_targets.npy"]
    page_bytes = size["pages.parquet"] + size["text_offsets.npy"] + size["indegree.npy"] + size["heldout.npy"]
    result = {
        "pages": n,
        "links": links,
        "bytes_per_link": round(link_bytes / links, 3),
        "table_bytes_per_page": round(page_bytes / n, 2),
        "seconds": {name: step["seconds"] for name, step in steps.items()},
        "peak_rss_gb": {name: round(step["peak_rss"] / 1e9, 2) for name, step in steps.items()},
    }
    columns = ("pages", "links", "link arrays, GB", "page table, GB", *(f"{step}, h" for step in steps))
    print("\n" + "".join(f"{name:>18}" for name in columns))
    for pages, count in [(n, links)] + [(900_000_000, per * 900_000_000) for per in (10, 20)]:
        arrays, table = (8 * (pages + 1) + 4 * count) / 1e9, page_bytes / n * pages / 1e9
        hours = [step["seconds"] * count / links / 3600 for step in steps.values()]
        print(f"{pages:>18,}{count:>18,}{arrays:>18.1f}{table:>18.1f}" + "".join(f"{value:>18.2f}" for value in hours))
    return result


def _watched(step: Callable[[Path, int, float], dict[str, Any]], folder: Path, pages: int, per_page: float) -> dict[str, Any]:
    began = time.perf_counter()
    found = step(folder, pages, per_page)
    status = Path("/proc/self/status").read_text()
    sizes = {name: int(status.partition(f"{name}:")[2].split()[0]) * 1024 for name in ("VmHWM", "RssAnon", "RssFile")}
    return {**found, "seconds": round(time.perf_counter() - began, 1), "peak_rss": sizes["VmHWM"], "anonymous": sizes["RssAnon"]}


def _write(folder: Path, pages: int, per_page: float) -> dict[str, Any]:
    from graph import write_graph

    return write_graph(folder / "graph", pages, per_page)


def _corpus(folder: Path, pages: int, per_page: float) -> dict[str, Any]:
    offsets = np.load(folder / "graph" / "links_offsets.npy", mmap_mode="r")
    targets = np.load(folder / "graph" / "links_targets.npy", mmap_mode="r")

    def blocks(temporary: Path, memory_bytes: int) -> Iterator[Any]:
        for first in range(0, pages, 1 << 20):
            some = np.asarray(offsets[first : first + (1 << 20) + 1]).astype(np.int64)
            yield without_own(first, some - some[0], np.asarray(targets[some[0] : some[-1]]))

    out = folder / "corpus"
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir()
    execution = Execution(root=folder, workers=1, memory_bytes=1 << 30, report=print)
    built = build_graph(GraphSource(pages, blocks, "a synthetic graph"), out, CorpusConfig(source=SyntheticWeb()), execution)
    return {"links": built.counts["links"][0]}


def _read(folder: Path, pages: int, per_page: float) -> dict[str, Any]:
    """Links of a million random pages, in batches of 10,000, as a crawl reads them."""
    from craw4llm.corpus.gather import RowReader

    offsets = np.load(folder / "corpus" / "links_offsets.npy", mmap_mode="r")
    targets = np.load(folder / "corpus" / "links_targets.npy", mmap_mode="r")
    rows, rng = RowReader(offsets, targets), np.random.default_rng(0)
    began, count = time.perf_counter(), 0
    for _ in range(100):
        _, found = rows.read(rng.integers(0, pages, 10_000))
        count += len(found)
    return {"pages_read": 1_000_000, "links_read": count, "pages_per_s": round(1e6 / (time.perf_counter() - began))}


def _transpose(folder: Path, pages: int, per_page: float) -> dict[str, Any]:
    from craw4llm.corpus.transpose import transpose

    out = folder / "transposed"
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir()
    transpose(folder / "corpus", out, pages)
    return {"bytes": sum(path.stat().st_size for path in out.iterdir())}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help=f"one page of docweb in {QUICK_EVERY}; all sources within 5 minutes")
    parser.add_argument("--source", action="append", choices=sorted(SOURCES), help="only these (default: all)")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--folder", type=Path, help="where to write (default: a temporary folder)")
    parser.add_argument("--web", type=Path, default=Path("data/demo-web/web"), help="a folder with web.json, of real pages (source html)")
    parser.add_argument("--graph-pages", type=int, help="instead: the link graph at this size")
    parser.add_argument("--links-per-page", type=float, default=10.1)
    parser.add_argument("--no-transpose", action="store_true")
    options = parser.parse_args()
    base = options.folder
    with contextlib.ExitStack() as stack:
        options.folder = Path(stack.enter_context(tempfile.TemporaryDirectory(dir=base)))
        if options.graph_pages:
            print(json.dumps(measure_scale(options)))
            return
        found: dict[str, dict[str, Any]] = {}
        top = options.folder
        for name in options.source or SOURCES:
            if name == "html" and not (options.web / "web.json").is_file():
                print(f"{name:10} {options.web} is not there: `craw4llm fetch demo-web` makes it")
                continue
            measured = SOURCES[name]
            if isinstance(measured, str):
                if not (Path(__file__).parent / f"{measured}.py").is_file():
                    print(f"{name:10} benchmarks/{measured}.py is not there")
                    continue
                measured = importlib.import_module(measured).measure
            options.folder = top / name
            options.folder.mkdir()
            found[name] = measured(options)
            print(f"{name:10}{json.dumps(found[name])}", flush=True)
    ratios = {name: facts["floor_ratio"] for name, facts in found.items()}
    texts = {name: facts["text_ratio"] for name, facts in found.items() if "text_ratio" in facts}
    print(json.dumps({"floor_ratio": min(ratios.values()), "sources": ratios, "text_ratio": texts}))


if __name__ == "__main__":
    main()
