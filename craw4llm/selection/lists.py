"""Lists of pages from elsewhere: another crawl's output, so that it can be trained on and compared.

    listed = read_list(Path("crawl/iter_1.docids.txt"), corpus)     -> Listed(pages, unknown, repeated)

A file holds one page a line: a URL in any spelling, or a document id where the corpus knows them (a column `doc_id` of its page table).
A folder is the released code's output: `iter_0.docids.txt`, `iter_1.docids.txt`, ... are read in the order of their numbers (sorted as
text, as that code does, iter_10 would come before iter_2); a gap in the numbers is an error. Other files of the folder are left alone.
"""

import re
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from numpy.typing import NDArray

from craw4llm.corpus.reader import Corpus
from craw4llm.errors import InputError

DOC_ID = "doc_id"
_ITERATION = re.compile(r"iter_(\d+)\.docids\.txt")


@dataclass(frozen=True)
class Listed:
    """pages: uint32, in the order of the list, each once. unknown: lines that the corpus does not hold. repeated: lines met before."""

    pages: NDArray[np.uint32]
    unknown: int
    repeated: int


def read_list(path: Path, corpus: Corpus) -> Listed:
    """InputError if a file cannot be read, iterations are missing, or the corpus holds none of the pages."""
    lines = [line for file in _files(path) for line in _read(file)]
    if not lines:
        raise InputError(f"select: {path} lists no pages; expected one URL or document id a line")
    ids = corpus.find(lines)
    has_ids = corpus.has_document_ids
    if not has_ids and DOC_ID in pq.read_schema(corpus.artifact.file("pages.parquet")).names:
        given = corpus.column(DOC_ID).combine_chunks()
        has_ids = given.null_count < len(given)
        by_id = pc.index_in(pa.array(lines, pa.string()), value_set=given)
        ids = np.where(ids < 0, pc.fill_null(by_id, -1).to_numpy(zero_copy_only=False).astype(np.int64), ids)
    known = ids[ids >= 0]
    if not len(known):
        what = "URLs or document ids" if has_ids else "URLs (it has no document ids)"
        raise InputError(f"select: the corpus holds none of the {len(lines):,} pages of {path} (the first: {lines[0]!r}); expected {what}")
    _, first = np.unique(known, return_index=True)
    pages = known[np.sort(first)].astype(np.uint32)
    return Listed(pages, len(lines) - len(known), len(known) - len(pages))


def _files(path: Path) -> list[Path]:
    if not path.is_dir():
        return [path]
    numbered = {int(match[1]): file for file in path.iterdir() if (match := _ITERATION.fullmatch(file.name))}
    if not numbered:
        raise InputError(f"select: the folder {path} holds no iter_<number>.docids.txt; give such a folder or one file of ids")
    order = sorted(numbered)
    gaps = sorted(set(range(order[0], order[-1])) - set(order))
    if gaps:
        raise InputError(f"select: {path} has iterations up to {order[-1]} but no iter_{gaps[0]}.docids.txt; give the whole crawl")
    return [numbered[number] for number in order]


def _read(path: Path) -> list[str]:
    try:
        return [line.strip() for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"select: {path} cannot be read ({error}); expected UTF-8 text, one URL or document id a line") from error
