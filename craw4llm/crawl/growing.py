"""An array that grows at its end, without a copy of what it holds.

    fetched = Growing(np.uint32, n_targets)
    fetched.append(some)
    fetched.array()        a view of all that was appended so far

Parts in a list, joined at the end, take the memory twice, and memory that a process touches for the first time is what a short crawl of a
large corpus spends its time on. Here room is set aside at once; the system gives memory to the part that was filled.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray


class Growing:
    """dtype: of the array. room: about as many elements as will come; more are copied to where there is room for them."""

    def __init__(self, dtype: type[np.generic], room: int) -> None:
        self._held: NDArray[Any] = np.empty(room, dtype=dtype)
        self._length = 0

    def __len__(self) -> int:
        return self._length

    @property
    def nbytes(self) -> int:
        """Bytes of what was appended."""
        return self._length * self._held.itemsize

    def append(self, values: NDArray[Any]) -> None:
        """Adds values, which are converted."""
        end = self._length + len(values)
        if end > len(self._held):
            held = np.empty(2 * end, dtype=self._held.dtype)
            held[: self._length] = self.array()
            self._held = held
        self._held[self._length : end] = values
        self._length = end

    def array(self) -> NDArray[Any]:
        return self._held[: self._length]
