"""The ClueWeb22 folder as it is delivered: which files it has, document ids as numbers, offsets, and what identifies it.

    files = delivered(Path("ClueWeb22_A"), ("en",))    DataFile(name="en0000-00", folder="en/en00/en0000", number=1000000), ... in id order
    parse_id("clueweb22-en0041-36-03476")             -> 104136_03476, the document's key; None for anything else
    digest(Path("ClueWeb22_A"))                        -> 64 hexadecimal digits

    <root>/<kind>/<language>/<language><SS>/<language><SS><DD>/<language><SS><DD>-<FF>.json.gz       kind: txt, outlink, inlink
    ... .offset     fixed 11-byte rows, one more than there are records: record i is bytes [row i, row i + 1) of the .json.gz

(SS stream, DD sub-directory, FF file; spec: ClueWeb22 documentation, lemurproject.org/clueweb22.) A **key** is the id's digits after the
number of its language: ascending keys are ascending ids. Only the standard library is used: a plan reads this.

**What identifies a terabyte.** The names and sizes of all files below txt, outlink and inlink, the content of the `.offset` files (the
compressed length of every record), and the content of the `.checksum` files where they lie beside the data. The records themselves
are not read: other bytes of the same lengths would go unnoticed here, but not when they are read (each record's CRC and document id
are checked). The walk is repeated at every plan; the offsets are read again only where a size or a modification time has changed.
"""

import functools
import hashlib
import os
import re
from collections.abc import Iterator
from pathlib import Path

from craw4llm.dataclass import dataclass
from craw4llm.errors import InputError

KINDS = ("txt", "outlink", "inlink")
# "po" and "pl" are both met for Polish. In ascending order, so that ascending keys are ascending ids.
LANGUAGES = ("de", "en", "es", "fr", "it", "ja", "nl", "other", "pl", "po", "pt", "zh_chs")
RECORDS_PER_FILE = 100_000  # a record's number has five digits
FILES_PER_LANGUAGE = 1_000_000  # SS, DD and FF have two digits each
ROW_BYTES = 11

_DATA_NAME = re.compile(r"([a-z_]+)(\d{4})-(\d{2})\.json\.gz")
_ID = re.compile(r"clueweb22-([a-z_]+)(\d{4})-(\d{2})-(\d{5})")
_STREAM = re.compile(r"([a-z_]+)(\d{0,2})")


@dataclass(frozen=True)
class DataFile:
    """One file name, of which every kind may have a file. folder: relative to the kind's folder. number: key // RECORDS_PER_FILE."""

    name: str
    folder: str
    number: int

    def path(self, root: Path, kind: str, ending: str = ".json.gz") -> Path:
        return root / kind / self.folder / f"{self.name}{ending}"


def is_clueweb22(folder: Path) -> bool:
    """Whether a folder has the form of ClueWeb22 (txt and outlink; a folder with texts alone has no links to crawl)."""
    return (folder / "txt").is_dir() and (folder / "outlink").is_dir()


def parse_id(text: str) -> int | None:
    """The key of a document id; None for what is none."""
    match = _ID.fullmatch(text)
    if match is None or match[1] not in LANGUAGES:
        return None
    number = LANGUAGES.index(match[1]) * FILES_PER_LANGUAGE + int(match[2]) * 100 + int(match[3])
    return number * RECORDS_PER_FILE + int(match[4])


def format_id(key: int) -> str:
    """The document id of a key."""
    number, record = divmod(key, RECORDS_PER_FILE)
    language, number = divmod(number, FILES_PER_LANGUAGE)
    return f"clueweb22-{LANGUAGES[language]}{number // 100:04d}-{number % 100:02d}-{record:05d}"


def check_streams(streams: tuple[str, ...]) -> str | None:
    """What is wrong with a choice of languages and streams ("en", "en0", "en00"); None for nothing."""
    for stream in streams:
        match = _STREAM.fullmatch(stream)
        if match is None or match[1] not in LANGUAGES:
            return f"{stream!r} is no language or stream; give some of {', '.join(LANGUAGES)}, or beginnings of streams (en0, en00)"
    return None


@functools.cache
def allowed_streams(streams: tuple[str, ...]) -> tuple[bool, ...]:
    """Of each language and stream, at language * 100 + SS: whether it is chosen. No choice is all of them."""
    names = (f"{language}{stream:02d}" for language in LANGUAGES for stream in range(100))
    return tuple(not streams or any(_begins(name, stream) for stream in streams) for name in names)


def delivered(root: Path, streams: tuple[str, ...]) -> list[DataFile]:
    """The files of the kind txt that are chosen, by name. Raises InputError where there is none."""
    chosen = allowed_streams(streams)
    found: dict[int, DataFile] = {}
    for path in _walk(root / "txt"):
        match = _DATA_NAME.fullmatch(os.path.basename(path))
        if match is None:
            continue
        if match[1] not in LANGUAGES:
            raise InputError(f"corpus: {path} is of the language {match[1]!r}; ClueWeb22 has {', '.join(LANGUAGES)}")
        place = LANGUAGES.index(match[1])
        number = place * FILES_PER_LANGUAGE + int(match[2]) * 100 + int(match[3])
        if chosen[place * 100 + int(match[2][:2])]:
            name = os.path.basename(path).removesuffix(".json.gz")
            if number in found:
                raise InputError(f"corpus: {path} and {found[number].folder} both hold the file {name}; expected each once below txt")
            found[number] = DataFile(name, os.path.relpath(os.path.dirname(path), root / "txt"), number)
    if not found:
        which = f"of {', '.join(streams)} " if streams else ""
        raise InputError(f"corpus: {root}/txt has no .json.gz files {which}in the form of ClueWeb22 (txt/en/en00/en0000/en0000-00.json.gz)")
    return [found[number] for number in sorted(found)]


def count_records(root: Path, streams: tuple[str, ...]) -> int:
    """Records of the chosen files, by the sizes of their .offset files (one row more than there are records)."""
    return sum(max(0, file.path(root, "txt", ".offset").stat().st_size // ROW_BYTES - 1) for file in delivered(root, streams))


def stamp(root: Path) -> str:
    """SHA-256 over name, size and modification time of all files that identify the folder: what a remembered digest is kept under."""
    told = hashlib.sha256()
    for name, path in _identifying(root):
        status = os.stat(path)
        told.update(f"{name}|{status.st_size}|{status.st_mtime_ns}\n".encode())
    return told.hexdigest()


def digest(root: Path) -> str:
    """What identifies the folder (see the module's docstring)."""
    told = hashlib.sha256()
    for name, path in _identifying(root):
        told.update(f"{name}|{os.stat(path).st_size}|".encode())
        if not path.endswith(".json.gz"):
            with open(path, "rb") as stream:
                told.update(hashlib.file_digest(stream, "sha256").hexdigest().encode())
        told.update(b"\n")
    return told.hexdigest()


def _identifying(root: Path) -> Iterator[tuple[str, str]]:
    """(path from the root, path)"""
    for kind in KINDS:
        folder = root / kind
        for path in _walk(folder):
            if path.endswith((".json.gz", ".offset", ".checksum")):
                yield kind + path[len(str(folder)) :], path


def _walk(folder: Path) -> Iterator[str]:
    """All files below a folder, each folder's by name."""
    for here, folders, names in os.walk(folder):
        folders.sort()
        for name in sorted(names):
            yield os.path.join(here, name)


def _begins(name: str, stream: str) -> bool:
    """Whether a stream ("en00") is of a choice ("en", "en0"); "p" would be no language, so "po" is not "p"."""
    return name.startswith(stream) and (stream[-1].isdigit() or name[:-2] == stream)
