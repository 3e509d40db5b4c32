"""MDS shards of token samples: written by mosaicml-streaming, read without it, verified before use.

    write_shards(folder, samples, order)
    verify_shards(folder, samples=1200)         # raises ArtifactError that names the file
    shards = Shards(folder);  shards[[3, 8]]    -> uint16[2, sample_tokens]

Every sample has the one column `tokens`, an array of fixed length, so a shard is a header and one contiguous array, which is
memory-mapped. `streaming.StreamingDataset` reads the same files (a test compares the two); plain reading has no shared memory, no
lock files and no background threads, so that runs side by side cannot meet and a killed one leaves nothing behind.

MDS, version 2: uint32 n; uint32[n + 1] offsets of the samples from the start of the file; the config as JSON; the samples.
Verification is not optional: mosaicml-streaming 0.13.0 reads past a missing or damaged shard in silence, or hangs.
"""

import json
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import ArrayLike, NDArray

from craw4llm.artifact import Artifact
from craw4llm.errors import ArtifactError
from craw4llm.tokens.packing import Joined, Tokens
from craw4llm.tokens.streaming_shim import streaming

FOLDER = "shards"
INDEX = "index.json"
COLUMN = "tokens"
HASH = "xxh64"
SHARD_BYTES = 1 << 26
REMEDY = "delete the artifact's folder and run its stage again"


def write_shards(
    folder: Path, samples: Tokens | Joined, order: NDArray[np.int64], shard_bytes: int = SHARD_BYTES, compression: str | None = None
) -> None:
    """Writes samples[order] as MDS into `folder`, which must not hold anything; index.json comes last.

    compression: None, or "zstd" (the library's level 3; the uncompressed file is not kept).
    """
    encoding = f"ndarray:{samples.dtype.name}:{samples.shape[1]}"
    writer = streaming().MDSWriter(
        columns={COLUMN: encoding}, out=str(folder), hashes=[HASH], size_limit=shard_bytes, compression=compression
    )
    for row in order.tolist():
        writer.write({COLUMN: np.asarray(samples[row])})
    writer.finish()


class Shards:
    """The samples of a folder of shards, by position. ArtifactError if the index or a shard does not have the expected form."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._entries = read_index(folder)
        encodings = {(tuple(e["column_names"]), tuple(e["column_encodings"])) for e in self._entries}
        self.dtype, self.sample_tokens = _array_form(folder, encodings)
        self._starts = np.cumsum([0, *(int(e["samples"]) for e in self._entries)], dtype=np.int64)

    @classmethod
    def of(cls, artifact: Artifact) -> "Shards":
        """The shards of a tokenize artifact, verified: hashes, sample total, length of a sample."""
        folder = artifact.file(FOLDER)
        verify_shards(folder, int(artifact.count("samples")))
        shards = cls(folder)
        if shards.sample_tokens != artifact.count("sample_tokens"):
            raise ArtifactError(
                f"{folder / INDEX}: samples of {shards.sample_tokens} tokens, the manifest says {artifact.count('sample_tokens')}; "
                + REMEDY
            )
        return shards

    def __len__(self) -> int:
        return int(self._starts[-1])

    def __getitem__(self, positions: ArrayLike) -> Tokens:
        """Tokens [len(positions), sample_tokens] of the samples at `positions`, in that order; IndexError outside 0 .. len - 1."""
        wanted = np.atleast_1d(np.asarray(positions, dtype=np.int64))
        if len(wanted) and (wanted.min() < 0 or wanted.max() >= len(self)):
            raise IndexError(f"{self.folder}: sample {wanted.min()} to {wanted.max()} of {len(self)}")
        out: Tokens = np.empty((len(wanted), self.sample_tokens), dtype=self.dtype)
        shard_of = np.searchsorted(self._starts, wanted, side="right") - 1
        for shard in np.unique(shard_of).tolist():
            rows = shard_of == shard
            out[rows] = self._arrays[shard][wanted[rows] - self._starts[shard]]
        return out

    @cached_property
    def _arrays(self) -> Sequence[Tokens]:
        return [self._open(entry) for entry in self._entries]

    def _open(self, entry: dict[str, Any]) -> Tokens:
        if entry.get("zip_data"):
            return self._unpack(entry)
        path = self.folder / entry["raw_data"]["basename"]
        count, width = int(entry["samples"]), self.sample_tokens * self.dtype.itemsize
        with path.open("rb") as stream:
            header = np.fromfile(stream, dtype=np.uint32, count=count + 2)
        offsets = self._offsets(path, header, count, width)
        array: Tokens = np.memmap(path, dtype=self.dtype, mode="r", offset=int(offsets[0]), shape=(count, self.sample_tokens))
        return array

    def _unpack(self, entry: dict[str, Any]) -> Tokens:
        """A compressed shard, decompressed into memory."""
        path = self.folder / entry["zip_data"]["basename"]
        count, width = int(entry["samples"]), self.sample_tokens * self.dtype.itemsize
        data = pa.Codec("zstd").decompress(path.read_bytes(), int(entry["raw_data"]["bytes"]), asbytes=True)
        offsets = self._offsets(path, np.frombuffer(data, dtype=np.uint32, count=min(count + 2, len(data) // 4)), count, width)
        array: Tokens = np.frombuffer(data, dtype=self.dtype, offset=int(offsets[0])).reshape(count, self.sample_tokens)
        return array

    def _offsets(self, path: Path, header: NDArray[np.uint32], count: int, width: int) -> NDArray[np.int64]:
        offsets = header[1:].astype(np.int64)
        if len(header) != count + 2 or int(header[0]) != count or (np.diff(offsets) != width).any():
            raise ArtifactError(f"{path}: its header does not describe {count} samples of {width} bytes; {REMEDY}")
        return offsets


def read_index(folder: Path) -> list[dict[str, Any]]:
    """The entries of index.json, one per shard. ArtifactError if it cannot be read or lists no shards."""
    path = folder / INDEX
    try:
        content = json.loads(path.read_text())
        entries = [dict(entry) for entry in content["shards"]]
        for entry in entries:
            int(entry["samples"]), str(entry["raw_data"]["basename"]), int(entry["raw_data"]["bytes"])
            stored = stored_file(entry)
            str(stored["basename"]), int(stored["bytes"]), str(stored["hashes"][HASH]), entry["column_names"], entry["column_encodings"]
            if entry["compression"] not in (None, "zstd"):
                raise ValueError(f"compression {entry['compression']!r}, expected none or zstd")
    except FileNotFoundError:
        raise ArtifactError(f"{path} is missing; {REMEDY}") from None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ArtifactError(f"{path} is no index of MDS shards with {HASH} hashes ({error!r}); {REMEDY}") from error
    if not entries:
        raise ArtifactError(f"{path} lists no shards; {REMEDY}")
    return entries


def stored_file(entry: dict[str, Any]) -> dict[str, Any]:
    """The part of an index entry that names the file that is there: the compressed one, if there is one."""
    return dict(entry.get("zip_data") or entry["raw_data"])


def verify_shards(folder: Path, samples: int | None = None) -> int:
    """Re-reads every shard against index.json. Returns the number of samples.

    samples: how many there must be in all. Raises ArtifactError naming the file: missing, of another size, with another hash, in
    the folder but not in the index, or a total that is not `samples`.
    """
    entries = read_index(folder)
    listed = {str(stored_file(entry)["basename"]) for entry in entries}
    extra = sorted(p.name for p in folder.glob("*.mds*") if p.name not in listed)
    if extra:
        raise ArtifactError(f"{folder / extra[0]} is not listed in {INDEX}, which is out of date; {REMEDY}")
    for entry in entries:
        stored = stored_file(entry)
        _verify_file(folder / stored["basename"], stored)
    total = sum(int(entry["samples"]) for entry in entries)
    if samples is not None and total != samples:
        raise ArtifactError(f"{folder / INDEX} lists {total} samples, the manifest says {samples}; {REMEDY}")
    return total


def _verify_file(path: Path, expected: dict[str, Any]) -> None:
    import xxhash

    if not path.is_file():
        raise ArtifactError(f"{path} is missing; {REMEDY}")
    if path.stat().st_size != expected["bytes"]:
        raise ArtifactError(f"{path} has {path.stat().st_size} bytes, {INDEX} says {expected['bytes']}; {REMEDY}")
    found = xxhash.xxh64()
    with path.open("rb") as stream:
        while block := stream.read(1 << 22):
            found.update(block)
    if found.hexdigest() != expected["hashes"][HASH]:
        raise ArtifactError(f"{path}: its {HASH} is {found.hexdigest()}, {INDEX} says {expected['hashes'][HASH]}; {REMEDY}")


def _array_form(folder: Path, encodings: set[tuple[tuple[str, ...], tuple[str, ...]]]) -> tuple[np.dtype[Any], int]:
    """dtype and length of the one column, from `ndarray:uint16:2049`."""
    if len(encodings) == 1:
        names, forms = next(iter(encodings))
        parts = forms[0].split(":")
        if names == (COLUMN,) and len(parts) == 3 and parts[0] == "ndarray" and parts[1] in ("uint16", "int32") and parts[2].isdigit():
            return np.dtype(parts[1]), int(parts[2])
    raise ArtifactError(
        f"{folder / INDEX} has the columns {sorted(encodings)}; expected one, {COLUMN!r}, of ndarray:uint16 or int32 with a fixed length"
    )
