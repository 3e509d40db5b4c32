"""Seeds: read from a file of URLs, or drawn from the corpus by hash.

A seed file has one URL a line, in UTF-8 (a byte order mark, CRLF, blank lines and blanks around a URL do no harm). Lines that begin with
`#` are comments. What cannot be crawled from is reported by line number, never dropped in silence.
"""

from dataclasses import field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from craw4llm.corpus.reader import Corpus
from craw4llm.crawl.hashing import hash_text
from craw4llm.dataclass import dataclass
from craw4llm.errors import ConfigError, InputError

_HASH_STEP = 1 << 20

Line = tuple[int, str]  # line number, counted from 1, and its text


@dataclass(frozen=True, kw_only=True)
class Seeds:
    """pages: uint32, distinct ids in the order of the file or of the draw. The lists hold the lines that gave no seed of their own."""

    pages: NDArray[np.uint32]
    unknown: list[Line] = field(default_factory=list)
    heldout: list[Line] = field(default_factory=list)
    repeated: list[Line] = field(default_factory=list)


def read_seeds(path: Path, corpus: Corpus) -> Seeds:
    """Seeds from a file. InputError if it cannot be read, or if none of its lines is a page that may be crawled."""
    try:
        text = path.read_bytes().decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = error.object[: error.start].count(b"\n") + 1
        raise InputError(f"seeds: {path}, line {line} is not UTF-8 ({error.reason}); expected one URL a line, in UTF-8") from error
    except OSError as error:
        raise InputError(f"seeds: {path} cannot be read: {error.strerror or error}") from error
    numbered = [(number, line.strip()) for number, line in enumerate(text.split("\n"), 1)]
    lines = [(number, line) for number, line in numbered if line and not line.startswith("#")]
    found = corpus.find([line for _, line in lines])
    pages: list[int] = []
    known: set[int] = set()
    unknown: list[Line] = []
    heldout: list[Line] = []
    repeated: list[Line] = []
    for entry, page in zip(lines, found.tolist(), strict=True):
        if page < 0:
            unknown.append(entry)
        elif corpus.heldout_mask[page]:
            heldout.append(entry)
        elif page in known:
            repeated.append(entry)
        else:
            known.add(page)
            pages.append(page)
    if not pages:
        raise InputError(
            f"seeds: {path} has {len(lines)} URLs, of which {len(unknown)} are not in the corpus and {len(heldout)} are held-out pages"
            f"{_examples(unknown)}; expected at least one page of the corpus that may be crawled"
        )
    return Seeds(pages=np.array(pages, dtype=np.uint32), unknown=unknown, heldout=heldout, repeated=repeated)


def draw_seeds(corpus: Corpus, count: int, seed_set: int) -> Seeds:
    """The `count` pages with the smallest hash of (seed_set, URL), among pages with text that are not held out.

    In the order of the hash, so a smaller draw is the beginning of a larger one. ConfigError where the corpus has fewer.
    """
    usable = _usable(corpus)
    if len(usable) < count:
        raise ConfigError(
            f"crawl: seed_count is {count} but the corpus has {len(usable)} pages with text that are not held out; lower seed_count"
        )
    return Seeds(pages=_first_by_hash(corpus, usable, seed_set, count))


def seed_order(corpus: Corpus, seed_set: int) -> NDArray[np.uint32]:
    """All pages that may be drawn as seeds, in the order in which `draw_seeds` draws them. 20 bytes of memory a page."""
    usable = _usable(corpus)
    return _first_by_hash(corpus, usable, seed_set, len(usable))


def _usable(corpus: Corpus) -> NDArray[np.int64]:
    has_text = corpus.has_text
    return np.flatnonzero((has_text | ~has_text.any()) & ~corpus.heldout_mask[: corpus.n_pages])  # a graph alone has no texts at all


def _first_by_hash(corpus: Corpus, pages: NDArray[np.int64], seed_set: int, count: int) -> NDArray[np.uint32]:
    """The `count` of `pages` with the smallest hash of (seed_set, URL), by the hash; read in steps, of which only the smallest are kept."""
    kept, hashes = np.empty(0, dtype=np.int64), np.empty((0, 2), dtype=np.uint64)
    for start in range(0, len(pages), _HASH_STEP):
        part = pages[start : start + _HASH_STEP]
        data = b"".join(hash_text(seed_set, name) for name in corpus.names(part))
        kept = np.concatenate([kept, part])
        hashes = np.concatenate([hashes, np.frombuffer(data, dtype=">u8").astype(np.uint64).reshape(-1, 2)])
        if len(kept) > 2 * count + _HASH_STEP or start + _HASH_STEP >= len(pages):
            order = np.lexsort((kept, hashes[:, 1], hashes[:, 0]))[:count]
            kept, hashes = kept[order], hashes[order]
    return kept.astype(np.uint32)


def _examples(lines: list[Line]) -> str:
    return f" (line {lines[0][0]}: {lines[0][1][:80]!r})" if lines else ""
