"""Budgets of a crawl: pages crawled, fetches made, tokens of the pages crawled. A crawl ends at the first event that covers all given.

budget = Budget(pages=3014)
budget.end(pages, fetches, tokens)      -> how many of the next events the crawl still makes
"""

import numpy as np
from numpy.typing import NDArray

from craw4llm.dataclass import dataclass
from craw4llm.errors import ConfigError

Counts = NDArray[np.int64]


@dataclass(frozen=True, kw_only=True)
class Budget:
    """Pages crawled, fetches made and tokens crawled, each at least so many; None: not limited by it. At least one is given."""

    pages: int | None = None
    fetches: int | None = None
    tokens: int | None = None

    def __post_init__(self) -> None:
        if self.pages is None and self.fetches is None and self.tokens is None:
            raise ConfigError("crawl: no budget; give pages, fetches, tokens or several of them")

    def left(self, pages: int, fetches: int, tokens: int = 0) -> tuple[int, int, int]:
        """Pages, fetches and tokens that are still to come, each 0 or more."""
        return max(0, (self.pages or 0) - pages), max(0, (self.fetches or 0) - fetches), max(0, (self.tokens or 0) - tokens)

    def covered(self, pages: int, fetches: int, tokens: int = 0) -> bool:
        return self.left(pages, fetches, tokens) == (0, 0, 0)

    def end(self, pages: Counts, fetches: Counts, tokens: Counts) -> int:
        """Of events in order, the number up to the first that covers the budget, that one included; all of them where none does.

        pages, fetches, tokens: int64, not falling: the crawl's counts after each event.
        """
        wanted = ((pages, self.pages), (fetches, self.fetches), (tokens, self.tokens))
        first = max(int(np.searchsorted(counts, goal)) for counts, goal in wanted if goal is not None)
        return min(first + 1, len(pages))
