"""From a page to the samples that hold its tokens, and back.

    tokens = TokenTrace(artifact)
    tokens.samples_of(page)      -> [(sample, start, stop), ...]: its tokens are sample[start:stop], in this order
    tokens.pages_in(sample)      -> [(page, start, stop), ...]; what is left of the last sample is padding

Samples are counted as stored in the shards (after the shuffle). The last token of a page is its end-of-text; the tokens of a page whose end
was dropped with a partial last sample are found as far as they are there.
"""

from functools import cached_property

import numpy as np
import pyarrow.parquet as pq
from numpy.typing import NDArray

from craw4llm.artifact import Artifact

Span = tuple[int, int, int]


class TokenTrace:
    """A tokenize artifact, opened for tracing; reads its two tables, not the shards."""

    def __init__(self, artifact: Artifact) -> None:
        self.width = int(artifact.count("sample_tokens"))
        documents = pq.read_table(artifact.file("documents.parquet"), columns=["page", "first_token", "n_tokens"])
        self.pages: NDArray[np.int64] = documents.column("page").to_numpy().astype(np.int64)
        self.first: NDArray[np.int64] = documents.column("first_token").to_numpy().astype(np.int64)
        self.n_tokens: NDArray[np.int64] = documents.column("n_tokens").to_numpy().astype(np.int64)
        self.packed: NDArray[np.int64] = pq.read_table(artifact.file("samples.parquet")).column("packed").to_numpy().astype(np.int64)

    def samples_of(self, page: int) -> list[Span]:
        """(sample, start, stop) for every stretch of the page's tokens, in the order of its text; empty for a page that is not there."""
        rows = np.flatnonzero(self.pages == page)
        if not len(rows):
            return []
        start = int(self.first[rows[0]])
        stop = start + int(self.n_tokens[rows[0]])
        found = []
        for packed in range(start // self.width, min((stop - 1) // self.width + 1, len(self._stored))):
            at = packed * self.width
            found.append((int(self._stored[packed]), max(start - at, 0), min(stop - at, self.width)))
        return found

    def pages_in(self, sample: int) -> list[Span]:
        """(page, start, stop) for every stretch of the sample, in order. IndexError for a sample that is not there."""
        if not 0 <= sample < len(self.packed):
            raise IndexError(f"sample {sample} of {len(self.packed)}")
        begin = int(self.packed[sample]) * self.width
        end = begin + self.width
        row = int(np.searchsorted(self.first, begin, side="right")) - 1
        found = []
        while row < len(self.pages) and self.first[row] < end:
            start, stop = int(self.first[row]), int(self.first[row] + self.n_tokens[row])
            found.append((int(self.pages[row]), max(start, begin) - begin, min(stop, end) - begin))
            row += 1
        return found

    @cached_property
    def _stored(self) -> NDArray[np.int64]:
        """int64[n_samples]: where the sample with this place in the packed stream is stored."""
        stored = np.empty(len(self.packed), dtype=np.int64)
        stored[self.packed] = np.arange(len(self.packed))
        return stored
