"""Anchor texts of a corpus' links: compact on disk, read for any pages without reading the others.

    link_anchors.zst            anchors in the order of links_targets.npy, one line each (no anchor: a line of one NUL), in zstd frames of
                                GROUP_PAGES consecutive pages each
    link_anchors_offsets.npy    uint64[groups + 1, 2]: where group g begins in the file, and in the text before compression

Pages of one site follow each other, and so do their anchors ("Next", "Home"): frames of many pages are several times as small as a
frame a page.
"""

import itertools
from pathlib import Path

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from craw4llm.corpus.npy import NpyWriter

GROUP_PAGES = 64
NO_ANCHOR = "\0"
TEXTS, OFFSETS = "link_anchors.zst", "link_anchors_offsets.npy"

_ZSTD = pa.Codec("zstd")


class AnchorWriter:
    """Writes the two files; pages come in page-id order."""

    def __init__(self, out: Path) -> None:
        self._stream = (out / TEXTS).open("wb")
        self._offsets = NpyWriter(out / OFFSETS, np.uint64, columns=2)
        self._offsets.append(np.zeros((1, 2), dtype=np.uint64))
        self._lines = pa.array([], pa.string())  # of pages that are not written yet
        self._degrees = np.empty(0, dtype=np.int64)  # theirs
        self._at = self._raw_at = 0

    def append(self, degrees: NDArray[np.int64], anchors: pa.Array) -> None:
        """degrees: links of each page. anchors: string, null for none, of all these links."""
        import pyarrow.compute as pc  # not with the module: whoever reads anchors needs none of it

        self._degrees = np.concatenate([self._degrees, degrees])
        self._lines = pa.concat_arrays([self._lines, pc.binary_join_element_wise(anchors.fill_null(NO_ANCHOR), "", "\n")])
        self._write(len(self._degrees) // GROUP_PAGES * GROUP_PAGES)

    def _write(self, pages: int) -> None:
        """Writes the first of the pages that wait, in groups."""
        lines = np.append(0, np.cumsum(self._degrees[:pages]))[[*range(0, pages, GROUP_PAGES), pages]]
        _, ends, text = self._lines.buffers()
        places = np.frombuffer(ends, dtype=np.int32)[self._lines.offset :][lines].tolist() if len(self._lines) else [0] * len(lines)
        for begin, end in itertools.pairwise(places):
            frame = _ZSTD.compress(text[begin:end], asbytes=True) if end > begin else b""
            self._stream.write(frame)
            self._at += len(frame)
            self._raw_at += end - begin
            self._offsets.append(np.array([[self._at, self._raw_at]], dtype=np.uint64))
        self._degrees, self._lines = self._degrees[pages:], self._lines[int(lines[-1]) :]

    def __enter__(self) -> "AnchorWriter":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if kind is None:
            self._write(len(self._degrees))
            self._offsets.close()
        self._stream.close()


class AnchorReader:
    """Reads the two files. links_offsets: of the corpus."""

    def __init__(self, texts: Path, offsets: Path, links_offsets: NDArray[np.uint64]) -> None:
        self._data = np.memmap(texts, dtype=np.uint8, mode="r") if texts.stat().st_size else np.empty(0, dtype=np.uint8)
        self._offsets = np.load(offsets, mmap_mode="r")
        self._links = links_offsets
        self._last: tuple[int, list[str]] = (-1, [])

    def of(self, page: int) -> list[str | None]:
        """One anchor per link of the page, in the order of its targets; None for a link without one."""
        group = page // GROUP_PAGES
        if self._last[0] != group:
            (start, raw_start), (stop, raw_stop) = self._offsets[group].tolist(), self._offsets[group + 1].tolist()
            text = _ZSTD.decompress(self._data[start:stop].tobytes(), raw_stop - raw_start, asbytes=True).decode() if stop > start else ""
            self._last = (group, text.split("\n")[:-1])
        first = int(self._links[group * GROUP_PAGES])
        begin, end = int(self._links[page]) - first, int(self._links[page + 1]) - first
        return [None if line == NO_ANCHOR else line for line in self._last[1][begin:end]]
