import contextlib
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from craw4llm.corpus import html_object
from craw4llm.corpus.html_library import Library
from craw4llm.errors import StageError

SCAN = """
import sys
from pathlib import Path
from craw4llm.corpus import html_object
from craw4llm.corpus.html_library import library
html_object._folders = lambda: iter([Path(sys.argv[1])])
links, anchors, flags, others = library().scan(b"<nav><a href=x>one</a></nav>")
assert (links, anchors, flags, len(others)) == (["x"], ["one"], [2], 0)
print(html_object.object_file(), "numba" in sys.modules)
"""


def scan(folder: Path) -> "subprocess.Popen[str]":
    """A process that scans a page, with a folder of its own for what is compiled."""
    return subprocess.Popen([sys.executable, "-c", SCAN, str(folder)], stdout=subprocess.PIPE, text=True)


@pytest.fixture
def folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Path]]:
    """The only folders where machine code may be kept; it is not compiled anew for each test."""
    data = html_object.object_file().read_bytes()
    html_object.object_file.cache_clear()
    given = [tmp_path / "cache"]
    monkeypatch.setattr(html_object, "_folders", lambda: iter(given))
    monkeypatch.setattr(html_object, "_compile", lambda path: data)
    yield given
    html_object.object_file.cache_clear()


def test_processes_that_begin_together_compile_one_file(tmp_path: Path) -> None:
    together = [scan(tmp_path / "new") for _ in range(2)]
    said = [process.communicate()[0].split() for process in together]
    (path,) = (tmp_path / "new").iterdir()
    assert said == [[str(path), "False"]] * 2 and [process.returncode for process in together] == [0, 0]
    before = path.stat()
    assert scan(tmp_path / "new").communicate()[0].split() == [str(path), "False"]
    assert (path.stat().st_mtime_ns, path.stat().st_ino) == (before.st_mtime_ns, before.st_ino)  # kept


def test_a_damaged_file_is_made_anew(folders: list[Path]) -> None:
    path = html_object.object_file()
    whole = path.read_bytes()
    for damaged in (b"", whole[:-1], whole[:40], whole[:100] + bytes([whole[100] ^ 1]) + whole[101:]):
        path.write_bytes(damaged)
        html_object.object_file.cache_clear()
        assert html_object.object_file() == path and path.read_bytes() == whole
    assert list(folders[0].iterdir()) == [path]


def test_where_no_folder_can_be_written_to_the_file_is_for_this_process(folders: list[Path], tmp_path: Path) -> None:
    (tmp_path / "file").write_text("no folder")
    folders[:] = [tmp_path / "file", tmp_path / "file" / "below"]
    path = html_object.object_file()
    assert path.parent not in folders
    assert Library(str(path)).fold(b" a \n b ") == "a b"
    folders.append(tmp_path / "writable")
    html_object.object_file.cache_clear()
    assert html_object.object_file().parent == tmp_path / "writable"


def test_a_full_disk_leaves_nothing_half(folders: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    def full(source: str, target: Path) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(html_object.os, "replace", full)
    with contextlib.suppress(OSError):
        html_object.object_file()
    assert list(folders[0].iterdir()) == []


def test_what_cannot_be_compiled_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\necho 'ImportError: no numba' >&2\nexit 1\n")
    python.chmod(0o755)
    html_object.object_file.cache_clear()
    monkeypatch.setattr(html_object, "_folders", lambda: iter([tmp_path / "cache"]))
    monkeypatch.setattr(html_object.sys, "executable", str(python))
    with pytest.raises(StageError, match=r"html_scan.py could not be compiled with numba: ImportError: no numba"):
        html_object.object_file()


def test_another_source_is_another_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = html_object._identity()
    (tmp_path / "html_scan.py").write_text(html_object.SOURCE.read_text() + "\n")
    monkeypatch.setattr(html_object, "SOURCE", tmp_path / "html_scan.py")
    assert html_object._identity() != before
