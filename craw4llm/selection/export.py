"""The kept pages of a selection as JSON lines, for the tools of others.

    export(artifact, Path("pages.jsonl.zst"))     -> pages written

One object a line, in the order of the selection: `text`, `url`, `id` ("<corpus fingerprint>/<page id>"), `page`, `rank`, and where
known `doc_id`, `score` and `crawl_rank`. DCLM reads `text` and `url`; datatrove's JsonlReader reads `text` and `id` and puts the rest into
`metadata`. The same selection gives the same bytes.
"""

import gzip
import io
import json
import math
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

import pyarrow as pa
import pyarrow.parquet as pq

from craw4llm.artifact import Artifact, storage_errors
from craw4llm.corpus.reader import Corpus
from craw4llm.errors import ArtifactError, ConfigError

ENDINGS = (".jsonl.zst", ".jsonl.gz", ".jsonl")


def export(selection: Artifact, out: Path) -> int:
    """Writes the pages to `out`; its ending decides on the compression. The file appears when it is whole.

    Raises ConfigError for another ending or a file that is there; ArtifactError if `selection` is of another stage.
    """
    if not out.name.endswith(ENDINGS):
        raise ConfigError(f"export: --out is {str(out)!r}; expected a name that ends with {', '.join(ENDINGS)}")
    if out.exists():
        raise ConfigError(f"export: {out} is there already; delete it or name another file")
    if selection.stage != "select":
        raise ArtifactError(f"export: {selection.fingerprint} is of the stage {selection.stage}; give a selection (stage select)")
    corpus = Corpus(selection.input("corpus"))
    ranks = _crawl_ranks(selection)
    count = 0
    unfinished = out.with_name(f".{out.name}.{os.getpid()}.unfinished")
    with storage_errors(out.parent):
        out.parent.mkdir(parents=True, exist_ok=True)
        try:
            with _opened(unfinished, out.name) as stream:
                for batch in pq.ParquetFile(selection.file("kept.parquet")).iter_batches(batch_size=1024):
                    for row in batch.to_pylist():
                        page, score = row["page"], row["score"]
                        record = {
                            "text": corpus.text(page),
                            "url": corpus.url(page),
                            "id": f"{corpus.artifact.fingerprint}/{page}",
                            "page": page,
                            "rank": row["rank"],
                        }
                        if corpus.has_document_ids:
                            record["doc_id"] = corpus.document_ids([page])[0]
                        if score is not None and not math.isnan(score):
                            record["score"] = score
                        if page in ranks:
                            record["crawl_rank"] = ranks[page]
                        stream.write(json.dumps(record, ensure_ascii=False).encode() + b"\n")
                        count += 1
            unfinished.replace(out)
        finally:
            unfinished.unlink(missing_ok=True)
    return count


def _crawl_ranks(selection: Artifact) -> dict[int, int]:
    """Crawl rank of every page that the selection's crawl crawled."""
    if "crawl" not in selection.manifest["inputs"]:
        return {}
    table = pq.read_table(selection.input("crawl").file("pages.parquet"), columns=["page", "crawl_rank"])
    pairs = zip(table.column("page").to_pylist(), table.column("crawl_rank").to_pylist(), strict=True)
    return {page: rank for page, rank in pairs if rank is not None}


@contextmanager
def _opened(path: Path, name: str) -> Iterator[BinaryIO]:
    with path.open("wb") as raw:
        if name.endswith(".gz"):
            with gzip.GzipFile(fileobj=raw, mode="wb", filename="", mtime=0) as packed:  # no name, no time: the same bytes each time
                yield packed  # type: ignore[misc]
        elif name.endswith(".zst"):
            with pa.CompressedOutputStream(pa.PythonFile(raw, mode="w"), "zstd") as stream, io.BufferedWriter(_Writer(stream)) as buffered:
                yield buffered  # type: ignore[misc]
        else:
            yield raw


class _Writer(io.RawIOBase):
    """An Arrow stream as Python's raw file."""

    def __init__(self, stream: pa.NativeFile) -> None:
        self._stream = stream

    def writable(self) -> bool:
        return True

    def write(self, data: object) -> int:
        block = bytes(data)  # type: ignore[call-overload]
        self._stream.write(block)
        return len(block)
