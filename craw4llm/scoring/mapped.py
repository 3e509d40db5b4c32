"""Large arrays in files without a name: the system may write them out and drop them, so they are no one's resident memory."""

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

MAPPED = 1 << 27  # elements; smaller arrays stay in memory


def zeros(n: int, dtype: type, folder: Path | None = None) -> NDArray[Any]:
    """n zeros, which take no room until written. folder: where the file is, if it exists (default: the system's temporary folder)."""
    if n < MAPPED:
        return np.zeros(n, dtype=dtype)
    import tempfile  # with what it brings along

    with tempfile.TemporaryFile(dir=folder if folder is not None and folder.is_dir() else None) as stream:
        stream.truncate(n * np.dtype(dtype).itemsize)
        return np.memmap(stream, dtype=dtype, shape=(n,))
