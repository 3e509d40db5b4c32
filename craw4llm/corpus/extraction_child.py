"""The process that reads HTML pages for `craw4llm.corpus.extraction.Extractor`.

    a batch, on standard input: 8 bytes, its length, then marshal([(bytes of the page, headers), ...]); the pages stand in a file, one after
        the other from its beginning, but for those with a path in place of their bytes
    an answer per page, in a second file, likewise: 8 bytes, its length, then the answer, packed; behind the last one 8 bytes of zero
    a batch done, on standard output: 8 bytes, how many of the second file its answers take

It ends when standard input does, so it does not outlive the process that started it by more than one page.
"""

import gc
import importlib
import json
import marshal
import os
import resource
import signal
import struct
import sys
from typing import BinaryIO

LENGTH = struct.Struct("<Q")
NOTHING = LENGTH.pack(0)


def serve() -> None:
    """Answers until standard input ends. Its argument, JSON: [reader, object file, page_bytes, page_seconds, memory_bytes, both files]."""
    # here: the other side of the pipe imports this module for its form alone
    from craw4llm.corpus.extraction_page import packed
    from craw4llm.corpus.html_library import library

    reader, object_file, page_bytes, page_seconds, memory_bytes, pages, found = json.loads(sys.argv[2])
    given = sys.stdin.buffer
    done = os.dup(1)
    os.dup2(2, 1)  # what a library prints is no answer
    module, _, name = reader.partition(":")
    read = getattr(importlib.import_module(module), name)
    library(object_file)  # before the bound on memory: it takes 150 MB of address space
    _limit(memory_bytes)
    signal.signal(signal.SIGPROF, signal.SIG_DFL)  # ends the process, wherever it is
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to handle
    gc.freeze()
    gc.disable()  # pages leave no cycles behind; what there is goes once a batch
    while (batch := _message(given)) is not None:
        place = at = 0
        for given_as, headers in batch:
            signal.setitimer(signal.ITIMER_PROF, page_seconds)
            if isinstance(given_as, int):
                data = os.pread(pages, given_as, place)
                place += given_as
                answer = read(data, headers, page_bytes)
            else:
                data, answer = read_file(given_as, page_bytes)
                answer = answer or read(data, headers, page_bytes)
            signal.setitimer(signal.ITIMER_PROF, 0)
            message = packed(answer)
            # Its length comes last: an answer that is there is whole.
            write(found, message + NOTHING, at + LENGTH.size)
            write(found, LENGTH.pack(len(message)), at)
            at += LENGTH.size + len(message)
        os.write(done, LENGTH.pack(at))
        gc.collect()


def _message(stream: BinaryIO) -> list[tuple[int | str, list[tuple[str, str]] | None]] | None:
    length = stream.read(LENGTH.size)
    if len(length) < LENGTH.size:
        return None
    message = stream.read(LENGTH.unpack(length)[0])
    return marshal.loads(message)  # type: ignore[no-any-return]


def read_file(path: str, most_bytes: int) -> tuple[bytes, str]:
    """(the content of a file, ""), or (b"", the reason why there is none)."""
    try:
        with open(path, "rb", buffering=0) as stream:
            if os.fstat(stream.fileno()).st_size > most_bytes:
                return b"", "too_large"
            data = stream.readall()
    except OSError:
        return b"", "unreadable"
    return (data, "") if len(data) <= most_bytes else (b"", "too_large")


def write(descriptor: int, data: bytes, at: int) -> None:
    """All of `data`, from the byte `at` of a file on."""
    rest = memoryview(data)
    while rest:
        written = os.pwrite(descriptor, rest, at)
        at, rest = at + written, rest[written:]


def _limit(memory_bytes: int) -> None:
    """Bounds the address space to what there is now and `memory_bytes` more, where the system knows such a bound; no core files. The
    file of answers is memory, which a bound on the size of files does not mean."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.getrlimit(resource.RLIMIT_FSIZE)[1],) * 2)
    try:
        with open("/proc/self/statm") as file:
            now = int(file.read().split()[0]) * resource.getpagesize()
    except OSError:
        return
    hard = resource.getrlimit(resource.RLIMIT_AS)[1]
    bound = now + memory_bytes
    resource.setrlimit(resource.RLIMIT_AS, (bound if hard == resource.RLIM_INFINITY else min(bound, hard), hard))
