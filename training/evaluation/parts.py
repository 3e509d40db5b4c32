"""Work in parts, each a file: what several processes share, and what is left of it after a kill.

    parts = Parts(folder, identity, rank=0, ranks=2)
    for number, items in enumerate(blocks):             every rank walks the same blocks
        if parts.mine("items", number):                 this rank's, and not yet done
            parts.write("items", number, table)
    table = parts.read("items", count, schema)          waits for the other ranks

A part's content does not depend on the number of ranks, so neither does the result. Parts are written to a temporary file and renamed:
a part that is there is whole. `identity` says what is computed; parts of something else are refused.
"""

import json
import logging
import os
import shutil
import time
from collections.abc import Mapping
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from craw4llm.errors import ArtifactError

IDENTITY = "identity.json"
POLL_S = 0.05
SAY_EVERY_S = 60.0

log = logging.getLogger(__name__)


class Parts:
    """The parts of one evaluation in `folder`, seen by process `rank` of `ranks`. Raises ArtifactError where they are of another one."""

    def __init__(self, folder: Path, identity: Mapping[str, object], rank: int = 0, ranks: int = 1) -> None:
        if not 0 <= rank < ranks:
            raise ArtifactError(f"evaluate: rank is {rank} of {ranks}; expected 0 to {ranks - 1}")
        self.folder, self.rank, self.ranks = folder, rank, ranks
        folder.mkdir(parents=True, exist_ok=True)
        text = json.dumps(identity, indent=2, sort_keys=True, allow_nan=False) + "\n"
        path = folder / IDENTITY
        if not path.is_file():
            new = folder / f".{IDENTITY}.{os.getpid()}"
            new.write_text(text)
            new.replace(path)
        if path.read_text() != text:
            raise ArtifactError(
                f"evaluate: {folder} holds parts of another evaluation (see {IDENTITY}); delete the folder or choose another one"
            )

    def mine(self, kind: str, number: int) -> bool:
        """Whether this rank is to compute the part: its turn, and no readable file of it is there."""
        return number % self.ranks == self.rank and not self.done(kind, number)

    def done(self, kind: str, number: int) -> bool:
        path = self._path(kind, number)
        if not path.is_file():
            return False
        try:
            pq.read_metadata(path)
        except (pa.ArrowInvalid, OSError):
            path.unlink()  # damaged by something else than us: computed again
            return False
        return True

    def write(self, kind: str, number: int, table: pa.Table) -> None:
        path = self._path(kind, number)
        new = path.with_name(f".{path.name}.{os.getpid()}")
        pq.write_table(table, new, compression="zstd")
        with new.open("rb") as stream:
            os.fsync(stream.fileno())
        new.replace(path)

    def read(self, kind: str, count: int, schema: pa.Schema) -> pa.Table:
        """All `count` parts, one after the other; waits until the other ranks have written theirs."""
        said = time.monotonic()
        for number in range(count):
            while not self._path(kind, number).is_file():
                if number % self.ranks == self.rank:
                    raise ArtifactError(f"evaluate: part {kind} {number} has gone from {self.folder}; run it again")
                time.sleep(POLL_S)
                if time.monotonic() - said > SAY_EVERY_S:
                    said = time.monotonic()
                    log.info("evaluate: waiting for part %s %d of %d, of rank %d", kind, number, count, number % self.ranks)
        tables = [pq.read_table(self._path(kind, number), schema=schema) for number in range(count)]
        return pa.concat_tables([schema.empty_table(), *tables])

    def clear(self) -> None:
        """Deletes the parts; only when the result is written and no other rank needs them."""
        shutil.rmtree(self.folder)

    def _path(self, kind: str, number: int) -> Path:
        return self.folder / f"{kind}-{number:06d}.parquet"
