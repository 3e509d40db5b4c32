"""The same 200 pages in every form that a corpus is read from; another source adds its writer here.

WRITERS: name -> Writer(write, carries). `write(pages, folder)` writes them as that source has them and returns the path for
External. `carries`: what the form keeps, of CARRIED; what it does not keep is not compared.
"""

import dataclasses
import gzip
import html
import json
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from craw4llm.corpus.records import LinkFlag

CARRIED = frozenset({"url", "text", "links", "doc_id", "language", "anchors", "flags", "signals", "canonical", "score"})


@dataclasses.dataclass(frozen=True)
class Sample:
    """A page as a reader of the corpus should find it: canonical URLs, links and what is said of them in the order of the target URLs."""

    url: str
    text: str
    links: tuple[str, ...]
    anchors: tuple[str, ...]
    flags: tuple[int, ...]
    doc_id: str
    language: str
    signals: int
    canonical: str
    score: float


@dataclasses.dataclass(frozen=True)
class Writer:
    write: Callable[[Sequence[Sample], Path], Path]
    carries: frozenset[str]


def sample_pages(n: int = 200) -> list[Sample]:
    """Plain paragraphs (an extractor keeps them), links among the pages and to nowhere."""
    rng = np.random.default_rng(7)
    text = "the river runs along an old stone wall where children of our village gather in summer and sing"
    words = text.split()
    urls = [f"https://h{k % 5}.example/page-{k:03}.html" for k in range(n)]
    pages = []
    for k, url in enumerate(urls):
        paragraphs = [" ".join(rng.choice(words, 40)).capitalize() + "." for _ in range(3)]
        targets = {urls[t] for t in rng.integers(0, n, 6) if t != k} | {f"https://gone.example/{k % 17}"}
        links = tuple(sorted(targets))
        pages.append(
            Sample(
                url=url,
                text="\n\n".join(paragraphs),
                links=links,
                anchors=tuple(f"to {link[-8:]}" for link in links),
                flags=tuple(int(LinkFlag.BODY if j % 2 else LinkFlag.BOILERPLATE) for j in range(len(links))),
                doc_id=f"doc-{k:04}",
                language="en" if k % 3 else "de",
                signals=k % 8,
                canonical=urls[k - k % 2],
                score=k / 256,
            )
        )
    return pages


def _record(page: Sample) -> dict[str, object]:
    record = {name: getattr(page, name) for name in ("url", "text", "anchors", "doc_id", "language", "signals", "canonical", "score")}
    return {**record, "outlinks": list(page.links), "anchors": list(page.anchors), "link_flags": list(page.flags)}


def write_parquet(pages: Sequence[Sample], folder: Path) -> Path:
    path = folder / "pages.parquet"
    pq.write_table(pa.Table.from_pylist([_record(page) for page in pages]), path, row_group_size=64)
    return path


def write_jsonl(pages: Sequence[Sample], folder: Path) -> Path:
    path = folder / "pages.jsonl"
    path.write_text("".join(json.dumps(_record(page)) + "\n" for page in pages))
    return path


def write_jsonl_gz(pages: Sequence[Sample], folder: Path) -> Path:
    path = folder / "many"
    path.mkdir()
    for k in range(4):  # a folder of files
        data = "".join(json.dumps(_record(page)) + "\n" for page in pages[k::4]).encode()
        (path / f"{k}.jsonl.gz").write_bytes(gzip.compress(data))
    return path


def write_html_tree(pages: Sequence[Sample], folder: Path) -> Path:
    sites = []
    for host in sorted({page.url.split("/")[2] for page in pages}):
        (folder / host).mkdir()
        sites.append({"folder": host, "base_url": f"https://{host}/", "package": host, "version": "1", "max_pages": None})
    for page in pages:
        _, _, host, name = page.url.split("/")
        (folder / host / name).write_bytes(page_html(page))
    (folder / "web.json").write_text(json.dumps({"kind": "html_tree", "origin": "made for a test", "sites": sites}))
    return folder


def page_html(page: Sample) -> bytes:
    paragraphs = "".join(f"<p>{html.escape(part)}</p>\n" for part in page.text.split("\n\n"))
    links = "".join(f'<li><a href="{link}">{html.escape(a)}</a></li>\n' for link, a in zip(page.links, page.anchors, strict=True))
    body = f"<body><main><article>{paragraphs}</article></main><nav><ul>{links}</ul></nav></body>"
    return f'<!DOCTYPE html><html><head><meta charset="utf-8"><title>page</title></head>{body}</html>'.encode()


def write_warc(pages: Sequence[Sample], folder: Path) -> Path:
    """Two plain files and two of gzip members, fifty pages a file."""
    path = folder / "archive"
    path.mkdir()
    for k in range(4):
        records = []
        for page in pages[k::4]:
            block = b"HTTP/1.1 200 OK\r\nContent-Type: text/html; charset=utf-8\r\n\r\n" + page_html(page)
            head = f"WARC/1.1\r\nWARC-Type: response\r\nWARC-Target-URI: {page.url}\r\nWARC-Date: 2026-01-01T00:00:00Z\r\n"
            head += f"WARC-Record-ID: <urn:uuid:{page.doc_id}>\r\nContent-Type: application/http;msgtype=response\r\n"
            records.append(f"{head}Content-Length: {len(block)}\r\n\r\n".encode() + block + b"\r\n\r\n")
        if k % 2:
            (path / f"crawl-{k}.warc").write_bytes(b"".join(records))
        else:
            (path / f"crawl-{k}.warc.gz").write_bytes(b"".join(gzip.compress(record, 6, mtime=0) for record in records))
    return path


def write_graph(pages: Sequence[Sample], folder: Path) -> Path:
    path = folder / "graph"
    path.mkdir()
    urls = [page.url for page in pages]
    nodes = urls + sorted({link for page in pages for link in page.links} - set(urls))
    row = {url: k for k, url in enumerate(nodes)}
    doc_ids = [page.doc_id for page in pages] + [None] * (len(nodes) - len(pages))
    languages = [page.language for page in pages] + [None] * (len(nodes) - len(pages))
    table = {"url": nodes, "page": [k < len(pages) for k in range(len(nodes))], "doc_id": doc_ids, "language": languages}
    pq.write_table(pa.table(table), path / "nodes.parquet")
    edges = [(k, row[link], f, a) for k, p in enumerate(pages) for link, f, a in zip(p.links, p.flags, p.anchors, strict=True)]
    columns = dict(zip(("source", "target", "flags", "anchor"), zip(*edges, strict=True), strict=True))
    pq.write_table(pa.table({name: list(values) for name, values in columns.items()}), path / "edges.parquet")
    return path


WRITERS: dict[str, Writer] = {
    "parquet": Writer(write_parquet, CARRIED),
    "jsonl": Writer(write_jsonl, CARRIED),
    "folder of jsonl.gz": Writer(write_jsonl_gz, CARRIED),
    "html_tree": Writer(write_html_tree, frozenset({"url", "text", "links"})),
    "warc": Writer(write_warc, frozenset({"url", "text", "links"})),
    "graph": Writer(write_graph, CARRIED - {"text", "signals", "canonical", "score"}),
}
