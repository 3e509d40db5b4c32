"""Places: each target's position in the order of canonical URLs, pages and dead links alike. Ties between priorities break by place.

    places = Places(corpus)
    places.of(targets), places.targets(places)

Ids would do without dead links (they are then the places); with them, ties broken by id would pop every page before any dead link. Pages
and dead links are each in the order of URLs already, so a place is an id plus the number of the others before it: 4 bytes a dead link
instead of 8 bytes a target.
"""

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from craw4llm.corpus.reader import Corpus

Numbers = NDArray[np.uint32]


class Places:
    """`trivial`: the corpus has no dead links, so that places are ids."""

    def __init__(self, corpus: Corpus) -> None:
        self._n_pages = corpus.n_pages
        self.trivial = corpus.n_targets == corpus.n_pages
        if not self.trivial:
            order = pc.sort_indices(pa.chunked_array([corpus.urls, corpus.dead_urls])).to_numpy()
            # uint32, ascending: the place of each dead link, and how many pages are before each
            self._dead = np.flatnonzero(order >= corpus.n_pages).astype(np.uint32)
            self._before = self._dead - np.arange(len(self._dead), dtype=np.uint32)

    def of(self, targets: Numbers) -> Numbers:
        if self.trivial:
            return targets
        live = targets < self._n_pages
        places = np.empty(len(targets), dtype=np.uint32)
        pages = targets[live]
        places[live] = pages + np.searchsorted(self._before, pages, side="right").astype(np.uint32)
        places[~live] = self._dead[targets[~live] - np.uint32(self._n_pages)]
        return places

    def targets(self, places: Numbers) -> Numbers:
        if self.trivial:
            return places
        row = np.searchsorted(self._dead, places).astype(np.uint32)  # dead links before each place
        is_dead = self._dead[np.minimum(row, len(self._dead) - 1)] == places
        return np.where(is_dead, row + np.uint32(self._n_pages), places - row).astype(np.uint32)
