"""Writes a .npy file piece by piece, for arrays that are larger than memory or whose length is not known beforehand.

with NpyWriter(path, np.uint32) as out:
    out.append(first)
    out.append(second)           # the bytes are those of np.save(path, np.concatenate([first, second]))
"""

import errno
import os
from io import BytesIO
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import ArrayLike, DTypeLike, NDArray


class NpyWriter:
    """columns: for an array of shape (length, columns); 0 for a plain one."""

    def __init__(self, path: Path, dtype: DTypeLike, columns: int = 0) -> None:
        self.length = 0
        self.dtype = np.dtype(dtype)
        self._columns = columns
        self._header = len(self._head())
        self._stream = path.open("wb")
        self._stream.write(self._head())

    def append(self, values: ArrayLike) -> None:
        """Values of the array's dtype (or that fit it)."""
        array = np.ascontiguousarray(values, dtype=self.dtype)
        self.length += len(array)
        self._stream.write(array.data if array.size else b"")

    def close(self) -> None:
        head = self._head()
        assert len(head) == self._header, "numpy leaves room for the length in its header"
        self._stream.seek(0)
        self._stream.write(head)
        self._stream.close()

    def __enter__(self) -> "NpyWriter":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if kind is None:
            self.close()
        else:
            self._stream.close()

    def _head(self) -> bytes:
        shape = (self.length, self._columns) if self._columns else (self.length,)
        head = BytesIO()
        description = {"descr": np.lib.format.dtype_to_descr(self.dtype), "fortran_order": False, "shape": shape}
        np.lib.format.write_array_header_1_0(head, description)
        return head.getvalue()


def reserve(stream: BinaryIO, n_bytes: int) -> None:
    """Makes a file at least so long, with room for all of it on the disk, or raises OSError (ENOSPC, EFBIG).

    A mapped file that only pretends to be long ends its process (SIGBUS) when the disk is full, with no word on why.
    """
    if not n_bytes:
        return
    try:
        os.posix_fallocate(stream.fileno(), 0, n_bytes)
    except OSError as error:
        if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL):  # a file system that promises nothing
            raise
        stream.truncate(max(n_bytes, os.fstat(stream.fileno()).st_size))


def distinct(values: NDArray[Any]) -> NDArray[Any]:
    """The different values of an array, ascending. np.unique does this with a hash table since numpy 2.3: ten times slower on integers."""
    ordered = np.sort(values)
    different = np.ones(len(ordered), dtype=np.bool_)
    different[1:] = ordered[1:] != ordered[:-1]
    return ordered[different]
