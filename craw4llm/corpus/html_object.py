"""The functions of `craw4llm.corpus.html_scan` as machine code.

    path = object_file()        for craw4llm.corpus.html_library

The object file is compiled by a process of its own where this machine has none (3 s, once), and kept as numba keeps what it compiles: in
NUMBA_CACHE_DIR if that is set, else beside the source, else below the user's folder for such files. Where none can be written to, it is
for this process alone. Its name tells the source, the versions of numba and llvmlite and the kind of machine (any processor of that kind,
so that machines may share a folder); its first bytes are the digest of the rest.
"""

import atexit
import contextlib
import functools
import hashlib
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from craw4llm.corpus.html_library import DIGEST_BYTES
from craw4llm.errors import StageError

SOURCE = Path(__file__).with_name("html_scan.py")
_CONSTANTS = Path(__file__).with_name("html_library.py")  # that it imports
_COMPILE_S = 600


@functools.cache
def object_file() -> Path:
    """Where the machine code is. Raises StageError where it cannot be compiled."""
    name = f"{SOURCE.stem}-{_identity()}.o"
    folders = list(_folders())
    for folder in folders:
        if _is_whole(folder / name):
            return folder / name
    with tempfile.TemporaryDirectory() as compiled:
        data = _compile(Path(compiled) / name)
    for folder in folders:
        with contextlib.suppress(OSError):
            folder.mkdir(parents=True, exist_ok=True)
            return _written(folder / name, data)
    folder = Path(tempfile.mkdtemp())
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return _written(folder / name, data)


def compile_into(path: str) -> None:
    """Compiles the functions and writes them as an object file."""
    import llvmlite.binding as llvm
    import numba

    from craw4llm.corpus import html_scan

    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    options: Any = {"error_model": "numpy", "no_cpython_wrapper": True, "no_cfunc_wrapper": True}  # nothing but the function
    whole = llvm.parse_assembly("")
    for name, signature in html_scan.SIGNATURES.items():
        function = numba.njit(signature, **options)(getattr(html_scan, name))
        module = llvm.parse_assembly(function.inspect_llvm(function.signatures[0]))
        module.triple = whole.triple
        (entry,) = (one for one in module.functions if not one.is_declaration and one.linkage == llvm.Linkage.external)
        entry.name = name
        needed = [one.name for one in module.functions if one.is_declaration and not one.name.startswith("llvm.")]
        assert not needed, needed  # of numba's own library, which is not there when the code is loaded
        whole.link_in(module)
    machine = llvm.Target.from_default_triple().create_target_machine(opt=3, reloc="pic", codemodel="jitdefault")
    Path(path).write_bytes(machine.emit_object(whole))


def _compile(path: Path) -> bytes:
    """The object file, behind its digest."""
    program = (
        "import json, sys; sys.path[:] = json.loads(sys.argv[1]); from craw4llm.corpus import html_object as o; o.compile_into(sys.argv[2])"
    )
    arguments = [sys.executable, "-c", program, json.dumps(sys.path), str(path)]
    # Instructions of this very processor would bring little, and bind the file to it.
    environment = {**os.environ, "NUMBA_CPU_NAME": "generic", "NUMBA_CPU_FEATURES": "", "NUMBA_DISABLE_JIT": "0"}
    try:
        subprocess.run(arguments, env=environment, check=True, capture_output=True, text=True, timeout=_COMPILE_S)
        data = path.read_bytes()
    except (OSError, subprocess.SubprocessError) as error:
        said = str(getattr(error, "stderr", None) or error).strip()
        raise StageError(f"corpus: {SOURCE} could not be compiled with numba: {said}") from error
    return hashlib.sha256(data).digest() + data


def _identity() -> str:
    """What the machine code depends on. The versions are read, not asked for: importlib.metadata and numba take their time."""
    parts = [os.uname().machine.encode(), SOURCE.read_bytes(), _CONSTANTS.read_bytes()]
    for name in ("numba", "llvmlite"):
        found = importlib.util.find_spec(name)
        assert found is not None and found.origin is not None, name
        parts.append(Path(found.origin).with_name("_version.py").read_bytes())
    return hashlib.sha256(b"\0".join(parts)).hexdigest()[:16]


def _folders() -> Iterator[Path]:
    if given := os.environ.get("NUMBA_CACHE_DIR"):
        yield Path(given)
    yield SOURCE.parent / "__pycache__"
    with contextlib.suppress(RuntimeError):  # no home
        yield Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "craw4llm"


def _is_whole(path: Path) -> bool:
    try:
        data = path.read_bytes()
    except OSError:
        return False
    return hashlib.sha256(data[DIGEST_BYTES:]).digest() == data[:DIGEST_BYTES]


def _written(path: Path, data: bytes) -> Path:
    """The path of a file that is whole whenever it is there, whoever writes it at the same time."""
    descriptor, partial = tempfile.mkstemp(dir=path.parent)
    try:
        with open(descriptor, "wb") as file:
            file.write(data)
        os.chmod(partial, 0o644)
        os.replace(partial, path)
    except OSError:
        with contextlib.suppress(OSError):
            os.unlink(partial)
        raise
    return path
