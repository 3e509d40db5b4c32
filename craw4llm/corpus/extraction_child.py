"""The process that reads HTML pages for `craw4llm.corpus.extraction.Extractor`: batches on standard input, answers on standard output.

    a batch: 8 bytes, its length, then marshal([(data, headers), ...]);  an answer per page: 8 bytes, its length, then marshal(answer)

It ends when standard input does, so it does not outlive the process that started it by more than one page.
"""

import dataclasses
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

_LENGTH = struct.Struct("<Q")


def serve() -> None:
    """Answers until standard input ends. Its argument, JSON: [reader, page_bytes, page_seconds, memory_bytes]."""
    reader, page_bytes, page_seconds, memory_bytes = json.loads(sys.argv[2])
    given = sys.stdin.buffer
    answers = os.fdopen(os.dup(1), "wb", buffering=1 << 16)
    os.dup2(2, 1)  # what a library prints is no answer
    module, _, name = reader.partition(":")
    read = getattr(importlib.import_module(module), name)
    _limit(memory_bytes)
    signal.signal(signal.SIGPROF, signal.SIG_DFL)  # ends the process, wherever it is
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to handle
    gc.freeze()
    gc.disable()  # pages leave no cycles behind; what there is goes once a batch
    while (batch := _message(given)) is not None:
        for data, headers in batch:
            signal.setitimer(signal.ITIMER_PROF, page_seconds)
            answer = read(data, headers, page_bytes)
            signal.setitimer(signal.ITIMER_PROF, 0)
            message = marshal.dumps(
                answer if isinstance(answer, str) else [getattr(answer, field.name) for field in dataclasses.fields(answer)]
            )
            answers.write(_LENGTH.pack(len(message)) + message)
            answers.flush()
        gc.collect()


def _message(stream: BinaryIO) -> list[tuple[bytes, list[tuple[str, str]] | None]] | None:
    length = stream.read(_LENGTH.size)
    if len(length) < _LENGTH.size:
        return None
    message = stream.read(_LENGTH.unpack(length)[0])
    return marshal.loads(message)  # type: ignore[no-any-return]


def _limit(memory_bytes: int) -> None:
    """Bounds the address space to what there is now and `memory_bytes` more, where the system knows such a bound; no core files."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    try:
        with open("/proc/self/statm") as file:
            now = int(file.read().split()[0]) * resource.getpagesize()
    except OSError:
        return
    hard = resource.getrlimit(resource.RLIMIT_AS)[1]
    bound = now + memory_bytes
    resource.setrlimit(resource.RLIMIT_AS, (bound if hard == resource.RLIM_INFINITY else min(bound, hard), hard))
