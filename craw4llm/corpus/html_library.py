"""The functions of `craw4llm.corpus.html_scan`, called as machine code, without numba.

    hrefs, anchors, flags, others = library().scan(page.encode())
    folded = library().fold(text.encode())

numba takes 0.3 s and 76 MB to import, and each child that reads pages would pay for it; llvmlite alone, which links the code, 35 ms.
"""

import ctypes
from array import array

DIGEST_BYTES = 32  # at the beginning of the file: of the rest
MAX_ANCHOR_CHARS = 256
OTHER_HEAD, OTHER_FIELDS = 3, 4  # numbers before the others that `scan` finds, and in a row of them; their kinds:
OTHER_META, OTHER_META_IN_ANCHOR, OTHER_BASE, OTHER_LINK, OTHER_HREF, OTHER_REL, OTHER_ALT, OTHER_ANCHOR = range(8)


class Library:
    """The functions in memory. path: an object file that craw4llm.corpus.html_object made."""

    def __init__(self, path: str) -> None:
        import llvmlite.binding as llvm

        with open(path, "rb") as file:
            machine_code = file.read()[DIGEST_BYTES:]
        llvm.initialize_native_target()
        llvm.initialize_native_asmprinter()
        target = llvm.Target.from_default_triple().create_target_machine(codemodel="jitdefault")
        self._engine = llvm.create_mcjit_compiler(llvm.parse_assembly(""), target)  # the code lives as long as this does
        self._engine.add_object_file(llvm.ObjectFileRef.from_data(machine_code))
        self._engine.finalize_object()
        # As numba compiles functions: the outcome goes where the first argument points; the second is for exceptions (there are none).
        text, number, address = ctypes.c_char_p, ctypes.c_int64, ctypes.c_void_p
        outcome = ctypes.POINTER(number)
        scan = ctypes.CFUNCTYPE(ctypes.c_int, outcome, address, text, number, address, address, address, address, number)
        fold = ctypes.CFUNCTYPE(ctypes.c_int, outcome, address, text, number, address)
        self._scan = scan(self._engine.get_function_address("scan"))
        self._fold = fold(self._engine.get_function_address("fold"))

    def scan(self, page: bytes) -> tuple[list[str], list[str], list[int], "array[int]"]:
        """(hrefs, anchors, flags, others) of a page in UTF-8: see `html_scan.scan`."""
        count = ctypes.c_int64()
        hrefs, anchors, flags = (bytearray(len(page) + 1) for _ in range(3))
        room = 64 + len(page) // 256
        while True:
            others = array("q", bytes(8 * (OTHER_HEAD + OTHER_FIELDS * room)))
            self._scan(count, None, page, len(page), *map(_address, (hrefs, anchors, flags)), others.buffer_info()[0], room)
            if count.value >= 0:
                rows, href_bytes, anchor_bytes = others[:OTHER_HEAD]
                return (
                    _lines(hrefs, href_bytes),
                    _lines(anchors, anchor_bytes),
                    list(flags[: count.value]),
                    others[OTHER_HEAD : OTHER_HEAD + OTHER_FIELDS * rows],
                )
            room *= 4

    def fold(self, text: bytes) -> str:
        """A text in UTF-8 with a blank for any run of white space, and none at its ends."""
        size = ctypes.c_int64()
        folded = bytearray(len(text) + 1)
        self._fold(size, None, text, len(text), _address(folded))
        return _text(folded, size.value)


def _address(data: bytearray) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(data))


def _text(data: bytearray, size: int) -> str:
    return str(memoryview(data)[:size], "utf-8", "surrogatepass")


def _lines(data: bytearray, size: int) -> list[str]:
    lines = _text(data, size).split("\n")
    lines.pop()  # behind the last line end
    return lines


_LOADED: list[Library] = []


def library(path: str = "") -> Library:
    """The functions, loaded once in a process. path: of the object file, where the caller knows it."""
    if not _LOADED:
        if not path:
            from craw4llm.corpus.html_object import object_file  # here: a child that reads pages is told the path

            path = str(object_file())
        _LOADED.append(Library(path))
    return _LOADED[0]
