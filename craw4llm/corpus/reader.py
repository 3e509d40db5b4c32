"""Reads a corpus artifact: page table, texts, link graph, held-out ids.

    corpus = Corpus(artifact)
    corpus.texts([3, 8])                     -> ["...", ""]
    offsets, targets = corpus.outlinks(ids)  -> targets of ids[k] are targets[offsets[k]:offsets[k + 1]]

Arrays are memory-mapped: opening a corpus reads only the page table's columns that are asked for. File formats: docs/artifacts.md.
"""

from collections.abc import Sequence
from functools import cached_property
from itertools import pairwise
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import ArrayLike, NDArray

from craw4llm.artifact import Artifact
from craw4llm.configs import UrlRules
from craw4llm.corpus.anchors import OFFSETS as ANCHOR_OFFSETS
from craw4llm.corpus.anchors import TEXTS as ANCHOR_TEXTS
from craw4llm.corpus.anchors import AnchorReader
from craw4llm.corpus.gather import RowReader
from craw4llm.corpus.names import Names
from craw4llm.corpus.page_columns import Column, find_ascending, find_first, named, numbers, places_among, row, strings
from craw4llm.parquet_file import ParquetFile

CLUEWEB22 = "clueweb22.json"  # the file that an artifact has whose texts are in a ClueWeb22 folder

_ZSTD = pa.Codec("zstd")


class Corpus:
    """A corpus artifact, opened for reading. Ids below `n_pages` are pages, from there to `n_targets` dead links."""

    has_indegree = True  # whether `indegree`, and so links into a page, are known
    has_document_ids = False  # whether every page and dead link has a document id, which `find` knows and `document_ids` gives

    def __new__(cls, artifact: Artifact) -> "Corpus":
        if cls is Corpus and (artifact.path / CLUEWEB22).exists():
            from craw4llm.corpus.clueweb22_corpus import ClueWeb22Corpus

            return super().__new__(ClueWeb22Corpus)
        return super().__new__(cls)

    def __init__(self, artifact: Artifact) -> None:
        self.artifact = artifact
        self.n_pages = int(artifact.count("pages"))
        self.n_targets = self.n_pages + int(artifact.count("dead_links"))

    def column(self, name: str) -> pa.ChunkedArray:
        """A column of the page table, in page-id order."""
        return ParquetFile(self.artifact.file("pages.parquet")).read([name]).column(0)

    @cached_property
    def urls(self) -> Column:
        """string[n_pages]: canonical URLs, ascending by their UTF-8 bytes."""
        return self._strings("url")

    @cached_property
    def dead_urls(self) -> Column:
        """string[n_targets - n_pages]: canonical URLs of the dead links, ascending."""
        return strings(self.artifact, "dead_links.parquet", "url", self.n_targets - self.n_pages)

    @cached_property
    def hosts(self) -> Names:
        """Names of the hosts, in the order of `host_ids`."""
        return self._named("host")[0]

    @cached_property
    def n_hosts(self) -> int:
        """Number of hosts; 0 where a corpus does not know its pages' hosts."""
        return int(self.artifact.count("hosts") or 0)

    @cached_property
    def host_ids(self) -> NDArray[np.int32]:
        """int32[n_pages]: index into `hosts`."""
        return self._named("host")[1]

    def host_pages(self, pages: ArrayLike) -> dict[str, int]:
        """Host -> how many of some pages are on it, by name; "" for pages whose host is not known."""
        hosts, counts = np.unique(self.host_ids[np.asarray(pages)], return_counts=True)
        return dict(sorted(zip(self.hosts.take(hosts), counts.tolist(), strict=True)))

    @cached_property
    def domains(self) -> Names:
        """Registered domains, in the order of `domain_ids`."""
        return self._named("domain")[0]

    @cached_property
    def domain_ids(self) -> NDArray[np.int32]:
        """int32[n_pages]: index into `domains`."""
        return self._named("domain")[1]

    def _named(self, column: str) -> tuple[Names, NDArray[np.int32]]:
        """(distinct names of a column, their numbers page by page)."""
        return named(self.artifact, column, self.n_pages)

    def _numbers(self, column: str) -> NDArray[Any]:
        return numbers(self.artifact, column, self.n_pages)

    @cached_property
    def doc_ids(self) -> Column:
        """string[n_pages]: the source's own ids; null where it has none."""
        return self._strings("doc_id")

    def languages_of(self, pages: ArrayLike) -> pa.Array:
        """string[len(pages)]: their languages as the source has them; null where it has none."""
        return self._languages.take(pa.array(np.asarray(pages)))

    @cached_property
    def _languages(self) -> Column:
        return self._strings("language")

    def _strings(self, column: str) -> Column:
        return strings(self.artifact, "pages.parquet", column, self.n_pages)

    @cached_property
    def signals(self) -> NDArray[np.uint16]:
        """uint16[n_pages]: what the page's owner asks for, bits of craw4llm.corpus.records.Signal."""
        return self._numbers("signals")

    @cached_property
    def n_bytes(self) -> NDArray[np.uint32]:
        """uint32[n_pages]: UTF-8 bytes of each page's text."""
        return self._numbers("n_bytes")

    @cached_property
    def n_chars(self) -> NDArray[np.uint32]:
        """uint32[n_pages]: characters of each page's text."""
        return self._numbers("n_chars")

    @cached_property
    def heldout(self) -> NDArray[np.uint32]:
        """uint32, ascending: ids of the held-out pages."""
        return np.load(self.artifact.file("heldout.npy"))

    @cached_property
    def heldout_mask(self) -> NDArray[np.bool_]:
        """bool[n_targets]: true for held-out pages."""
        mask = np.zeros(self.n_targets, dtype=np.bool_)
        mask[self.heldout] = True
        return mask

    @cached_property
    def indegree(self) -> NDArray[np.uint32]:
        """uint32[n_targets]: number of pages that link to each target, over the whole corpus."""
        return np.load(self.artifact.file("indegree.npy"), mmap_mode="r")

    @cached_property
    def _links(self) -> RowReader:
        return RowReader(self._link_offsets, np.load(self.artifact.file("links_targets.npy"), mmap_mode="r"))

    @cached_property
    def _link_offsets(self) -> NDArray[np.uint64]:
        return np.load(self.artifact.file("links_offsets.npy"), mmap_mode="r")

    @cached_property
    def _texts(self) -> tuple[NDArray[np.uint64], NDArray[np.uint8]]:
        path = self.artifact.file("text.zst")
        data = np.memmap(path, dtype=np.uint8, mode="r") if path.stat().st_size else np.empty(0, dtype=np.uint8)
        return np.load(self.artifact.file("text_offsets.npy"), mmap_mode="r"), data

    def without_record(self, targets: NDArray[np.uint32]) -> NDArray[np.bool_]:
        """bool[len(targets)]: pages that links and numbers tell of, but whose record is empty (ClueWeb22)."""
        return np.zeros(len(targets), dtype=np.bool_)

    @property
    def dead_places(self) -> NDArray[np.uint32]:
        """uint32[n_targets - n_pages], ascending: each dead link's place in the order of canonical URLs (UTF-8 bytes) of all targets."""
        return places_among(self.dead_urls, self.urls)

    def names(self, pages: ArrayLike) -> list[str]:
        """What pages are called in draws by hash: their canonical URLs."""
        return list(self.urls.take(pa.array(np.asarray(pages))).to_pylist())

    def source_row(self, page: int) -> dict[str, Any]:
        """What the source says of a page: source, doc_id, language, canonical, signals, and whether its text was cut."""
        return row(self.artifact, int(page), ("source", "doc_id", "language", "canonical", "signals", "cut"))

    def document_ids(self, targets: ArrayLike) -> list[str]:
        """Document ids of pages and dead links, where `has_document_ids`."""
        raise NotImplementedError(f"the corpus {self.artifact.fingerprint} has no document ids")

    def name_lines(self, targets: ArrayLike, ends: Sequence[int]) -> list[bytes]:
        """The names of pages and dead links, a line each, in UTF-8: document ids, or URLs where the corpus has none. The first item is that
        of the targets up to ends[0], the next of those from there to ends[1] ..."""
        lines = [f"{self.url(target)}\n" for target in np.asarray(targets).tolist()]
        return ["".join(lines[start:stop]).encode() for start, stop in pairwise([0, *ends])]

    def url(self, target: int) -> str:
        """Canonical URL of a page or dead link."""
        source, k = (self.urls, target) if target < self.n_pages else (self.dead_urls, target - self.n_pages)
        return str(source[int(k)].as_py())

    @property
    def has_text(self) -> NDArray[np.bool_]:
        """bool[n_pages]: pages with text; where texts are not read beforehand, pages that have a record."""
        found: NDArray[np.bool_] = np.asarray(self.n_bytes) > 0
        return found

    def text_bytes(self, pages: ArrayLike) -> NDArray[np.uint32]:
        """uint32[len(pages)]: UTF-8 bytes of the texts of some pages."""
        return np.asarray(self.n_bytes[np.asarray(pages)])

    def text(self, page: int) -> str:
        """The page's text; "" for a page without text."""
        offsets, data = self._texts
        start, stop = int(offsets[page]), int(offsets[page + 1])
        if start == stop:
            return ""
        return _ZSTD.decompress(data[start:stop].tobytes(), int(self.n_bytes[page]), asbytes=True).decode()

    def texts(self, pages: ArrayLike) -> list[str]:
        """The texts of several pages, in the order given."""
        return [self.text(page) for page in np.asarray(pages).tolist()]

    def outlinks(self, pages: ArrayLike) -> tuple[NDArray[np.int64], NDArray[np.uint32]]:
        """Out-links of several pages, concatenated in the order given.

        Returns (offsets int64[len(pages) + 1], targets uint32): the targets of pages[k], ascending, are
        targets[offsets[k]:offsets[k + 1]].
        """
        return self._links.read(pages)

    def release_links(self) -> None:
        """Gives back the memory that reading links has taken."""
        if "_links" in self.__dict__:
            self._links.release()

    def link_flags(self, pages: ArrayLike) -> NDArray[np.uint8] | None:
        """uint8, bits of craw4llm.corpus.records.LinkFlag, one per target of `outlinks(pages)`; None where the source has none."""
        return None if self._flags is None else self._flags.read(pages)[1]

    def anchors(self, pages: ArrayLike) -> list[str | None] | None:
        """Anchor texts, one per target of `outlinks(pages)` (None: a link without one); None where the source has none."""
        if self._anchors is None:
            return None
        return [anchor for page in np.asarray(pages).tolist() for anchor in self._anchors.of(page)]

    def inlinks(self, targets: ArrayLike) -> tuple[NDArray[np.int64], NDArray[np.uint32]]:
        """Pages that link to several targets, ascending, concatenated in the order given; (offsets, pages) as `outlinks`.

        The transposed graph is made when it is first asked for, and kept beside the memo (craw4llm.corpus.transpose).
        """
        return self._in_links.read(targets)

    @cached_property
    def _in_links(self) -> RowReader:
        from craw4llm.corpus.transpose import in_links

        return RowReader(*in_links(self.artifact, self.n_targets))

    @cached_property
    def _flags(self) -> RowReader | None:
        path = self.artifact.path / "links_flags.npy"
        return RowReader(self._link_offsets, np.load(path, mmap_mode="r")) if path.exists() else None

    @cached_property
    def _anchors(self) -> AnchorReader | None:
        path = self.artifact.path / ANCHOR_TEXTS
        return AnchorReader(path, self.artifact.file(ANCHOR_OFFSETS), self._link_offsets) if path.exists() else None

    def canonical(self, url: str) -> str | None:
        """The spelling of a URL in this corpus, by its own `url_rules`; None for what is no web page's URL."""
        from craw4llm.corpus.urls import canonical_url  # brings the list of public suffixes

        return canonical_url(url, rules=self._rules)

    @cached_property
    def _rules(self) -> UrlRules:
        return UrlRules(**self.artifact.config.get("url_rules", {}))

    def find_doc_ids(self, doc_ids: Sequence[str]) -> NDArray[np.int64]:
        """int64[len(doc_ids)]: pages that the source calls so, the first of several, -1 for ids that the corpus does not have."""
        return find_first(self.doc_ids, doc_ids)

    def find(self, urls: Sequence[str]) -> NDArray[np.int64]:
        """int64[len(urls)]: page ids of URLs (any spelling of the canonical one), -1 for those not in the corpus."""
        return find_ascending(self.urls, [self.canonical(url) or "" for url in urls])

    def find_targets(self, urls: Sequence[str]) -> NDArray[np.int64]:
        """As `find`, with the targets of dead links."""
        found = self.find(urls)
        rows = find_ascending(self.dead_urls, [self.canonical(url) or "" for url in urls])
        return np.where((found < 0) & (rows >= 0), self.n_pages + rows, found)
