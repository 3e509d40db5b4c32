"""What shortens the start of a command that is over in a fifth of a second; without it the command does the same, later.

    begin()     as the first thing of the process, before the imports that take as long as what it starts beside them
    end()       after the imports

- Python's search for cycles among objects waits: imports make hundreds of thousands of objects, which stay.
- malloc's heap grows by 32 MB and not by 128 kB at a time, in pages of 2 MB, and what is imported comes from it too.
- A thread fetches those pages, and maps and relocates the libraries of NumPy and Arrow, while Python's own modules are imported.

The last two are for Linux' C library (glibc) and do nothing elsewhere. Not for a process that must give memory back while it runs.
"""

import _thread
import ctypes
import gc
import importlib
import importlib.util
import os
from importlib.machinery import EXTENSION_SUFFIXES

_RTLD_LAZY = 1
_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_THRESHOLD = -1, -2, -3  # mallopt(3)
_MADV_HUGEPAGE, _MADV_POPULATE_WRITE = 14, 23  # madvise(2); the second since Linux 5.14
_HEAP_BYTES, _PAGE_BYTES = 32 << 20, 2 << 20
_IMPORTED_BYTES = 20 << 20  # about what the imports take of the heap
_SMALL_PAGE_BYTES = 4096

# Extension modules that are imported while the thread works: it keeps all others waiting that load a library, so these come before it.
# Where Python has one built in, or has it no longer, there is nothing to wait for.
_SMALL_MODULES = ("_opcode", "_json", "_typing", "_uuid", "math", "_datetime", "fcntl")
_LIBRARIES = {"_hashlib": (), "numpy": ("_core/_multiarray_umath", "linalg/_umath_linalg"), "pyarrow": ("lib", "_parquet")}


_mapped_arenas: "_ArenaAllocator | None" = None  # what Python had before `begin`


def begin() -> None:
    """Before the imports."""
    gc.disable()
    # Read by the libraries when they are loaded. For the threads of NumPy's BLAS see `main`; Arrow's own allocator takes a fifth of the
    # memory of a short crawl for itself.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    os.environ.setdefault("ARROW_DEFAULT_MEMORY_POOL", "system")
    libc = ctypes.CDLL(None)
    if not hasattr(libc, "gnu_get_libc_version"):
        return
    heap = _large_pages(libc)
    for module in _SMALL_MODULES:
        if importlib.util.find_spec(module) is not None:
            importlib.import_module(module)
    _load_libraries(libc, heap)


def end() -> None:
    """After the imports: what they made stays, and is not looked at again; what is made from here on is no affair of this module."""
    if not gc.isenabled():
        gc.freeze()
        gc.enable()
    if _mapped_arenas is not None:
        ctypes.pythonapi.PyObject_SetArenaAllocator(ctypes.byref(_mapped_arenas))


def _large_pages(libc: ctypes.CDLL) -> int | None:
    """Asks for large pages for the heap's next 32 MB, and for a heap that keeps what is freed. Returns where they begin."""
    for option, value in ((_M_MMAP_THRESHOLD, _HEAP_BYTES), (_M_TRIM_THRESHOLD, 2 * _HEAP_BYTES), (_M_TOP_PAD, _HEAP_BYTES)):
        libc.mallopt(option, value)
    libc.malloc.restype = libc.sbrk.restype = ctypes.c_void_p
    libc.malloc.argtypes = (ctypes.c_size_t,)
    libc.free.argtypes = (ctypes.c_void_p,)
    libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    begin = libc.malloc(_PAGE_BYTES)  # grows the heap
    if begin is None:
        return None
    libc.free(begin)
    heap: int = begin + -begin % _PAGE_BYTES
    libc.madvise(heap, libc.sbrk(0) - heap, _MADV_HUGEPAGE)
    _python_from_heap(libc)
    return heap


class _ArenaAllocator(ctypes.Structure):
    """PyObjectArenaAllocator: alloc(ctx, size), free(ctx, address, size)."""

    _fields_ = (("ctx", ctypes.c_void_p), ("alloc", ctypes.c_void_p), ("free", ctypes.c_void_p))


def _python_from_heap(libc: ctypes.CDLL) -> None:
    """Python's arenas of small objects, of 1 MB each, come from the heap: aligned_alloc(ctx, size) makes them, not mmap.

    They are unmapped as ever, which leaves a hole in the heap that malloc takes for something in use; so only until `end`, as what is
    imported stays.
    """
    global _mapped_arenas
    allocator = _ArenaAllocator()
    ctypes.pythonapi.PyObject_GetArenaAllocator(ctypes.byref(allocator))
    _mapped_arenas = _ArenaAllocator(allocator.ctx, allocator.alloc, allocator.free)
    allocator.ctx = _SMALL_PAGE_BYTES
    allocator.alloc = ctypes.cast(libc.aligned_alloc, ctypes.c_void_p)
    ctypes.pythonapi.PyObject_SetArenaAllocator(ctypes.byref(allocator))


def _load_libraries(libc: ctypes.CDLL, heap: int | None) -> None:
    """Starts to fetch the heap's pages and to load extension modules. A `dlopen` called through ctypes lets Python go on, that of an import
    does not."""
    libc.dlopen.argtypes = (ctypes.c_char_p, ctypes.c_int)
    paths: list[str] = []
    for name, modules in _LIBRARIES.items():
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.origin is not None:
            folder = os.path.dirname(spec.origin)
            paths += [f"{folder}/{module}{EXTENSION_SUFFIXES[0]}" for module in modules] or [spec.origin]

    def load() -> None:
        if heap is not None:
            libc.madvise(heap, _IMPORTED_BYTES, _MADV_POPULATE_WRITE)
        for path in paths:
            libc.dlopen(os.fsencode(path), _RTLD_LAZY)  # what cannot be loaded says so when it is imported

    _thread.start_new_thread(load, ())
