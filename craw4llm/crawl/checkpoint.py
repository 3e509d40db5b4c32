"""Checkpoints of a crawl: what a crawl that was killed goes on from, and what a longer crawl begins with.

    checkpoints = Checkpoints(folder)
    state = checkpoints.newest(fits)        None, or the arrays of the farthest crawl for which fits(crawled, fetches, tokens) is true
    checkpoints.save(state)

A crawl is a prefix of a longer one with the same corpus, scorer, seeds, policy and batch (craw4llm.crawl.loop), so its state between two
iterations belongs to both. Checkpoints are therefore kept beside the memo of scores, in execution's folder, under a key that leaves the
budgets out: `<memo>/crawl-<key>/`. They may be deleted at any time.

A checkpoint is one .npz file, `<crawled>-<fetches>-<random>.npz`: written under another name, flushed to disk, then renamed. So kill -9
leaves whole files only; each array carries a CRC (zip), and a damaged file is passed over. A new one replaces those that are not
farther along.
"""

import logging
import os
import re
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from craw4llm.execution import process_name

log = logging.getLogger(__name__)

State = dict[str, NDArray[Any]]
FORMAT = 2
_ABANDONED_S = 24 * 3600.0  # a partial file that nobody has written to for so long
_NAME = re.compile(r"(\d+)-(\d+)-[0-9a-f]+\.npz")


class Checkpoints:
    """The checkpoints of one key."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def newest(self, fits: Callable[[int, int, int], bool]) -> State | None:
        """The state of the farthest checkpoint for which fits(pages crawled, fetches made, tokens crawled) is true and that can be read."""
        for crawled, fetches, path in sorted(self._found(), reverse=True):
            if not fits(crawled, fetches, 0):
                continue
            import zipfile  # here, as most crawls find nothing to go on from

            try:
                with path.open("rb") as stream, np.load(stream, allow_pickle=False) as stored:
                    state = {name: stored[name] for name in stored.files}
            except (OSError, ValueError, EOFError, KeyError, zipfile.BadZipFile) as error:
                log.warning("crawl checkpoint %s cannot be read (%s); passed over", path, error)
                continue
            if int(state.pop("format", np.array(0))) == FORMAT and fits(crawled, fetches, int(state.get("n_tokens", np.array(0)))):
                return state
        return None

    def save(self, crawled: int, fetches: int, state: Mapping[str, NDArray[Any]]) -> None:
        """Writes a checkpoint, then deletes those that are not farther along, and what a killed writer left."""
        self.folder.mkdir(parents=True, exist_ok=True)
        final = self.folder / f"{crawled}-{fetches}-{os.urandom(4).hex()}.npz"
        partial = final.with_suffix(f".{process_name()}.partial")
        try:
            with partial.open("wb") as stream:
                np.savez(stream, format=np.array(FORMAT), **state)  # type: ignore[arg-type]
                stream.flush()
                os.fsync(stream.fileno())
            partial.rename(final)
        except BaseException:
            partial.unlink(missing_ok=True)
            raise
        for done, made, path in self._found():
            if path != final and (done, made) <= (crawled, fetches):
                path.unlink(missing_ok=True)
        for left in self.folder.glob("*.partial"):
            if not _lives(left):
                left.unlink(missing_ok=True)

    def _found(self) -> list[tuple[int, int, Path]]:
        found = []
        for path in self.folder.glob("*.npz") if self.folder.is_dir() else ():
            if match := _NAME.fullmatch(path.name):
                found.append((int(match[1]), int(match[2]), path))
        return found


def _lives(partial: Path) -> bool:
    """Whether the process that writes a partial file may still be there: of another host's nothing but the file's age tells."""
    here = process_name().rpartition("-")[0]
    host, _, number = partial.suffixes[-2][1:].rpartition("-")
    if host != here:
        try:
            return time.time() - partial.stat().st_mtime < _ABANDONED_S
        except FileNotFoundError:
            return False
    try:
        os.kill(int(number), 0)
    except (ValueError, ProcessLookupError):
        return False
    except PermissionError:  # another user's
        return True
    return True
