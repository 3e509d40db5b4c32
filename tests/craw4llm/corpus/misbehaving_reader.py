"""A page reader for tests of `Extractor`: pages say how they misbehave. Runs in the extraction child."""

import ctypes
import os
import signal
import sys

from craw4llm.corpus.extraction_page import Answer, Headers, HtmlPage, read_page

HELD: list[bytes] = []


def page(text: str) -> HtmlPage:
    return HtmlPage(text, None, [], [], [], None, 0)


def read(data: bytes, headers: Headers | None, page_bytes: int) -> Answer:
    word = data.decode()
    if word == "hang":
        while True:
            pass
    elif word == "segfault":
        ctypes.string_at(0)
    elif word == "abort":
        os.abort()
    elif word == "exit":
        os._exit(0)
    elif word == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    elif word == "eat":
        while True:
            HELD.append(bytes(10_000_000))
    elif word == "rust":  # how the allocation of a Rust library fails
        sys.stderr.write("memory allocation of 1234567 bytes failed\n")
        sys.stderr.flush()
        os.abort()
    elif word == "keep":  # leaks: the child will have no room for a later page, which a new one has
        HELD.append(bytes(50_000_000))
    elif word == "need":
        return page(f"needed {len(bytes(60_000_000))}")
    elif word == "print":
        print("a library prints on standard output")
        os.write(1, b"\x00" * 64)
    elif word == "bug":
        raise ZeroDivisionError("a bug in the reader")
    return page(word)


def peak(data: bytes, headers: Headers | None, page_bytes: int) -> Answer:
    """What becomes of the page, and the most memory that this process has had, in bytes (resident)."""
    answer = read_page(data, headers, page_bytes)
    with open("/proc/self/status") as status:
        kib = next(int(line.split()[1]) for line in status if line.startswith("VmHWM"))
    what = answer if isinstance(answer, str) else f"{len(answer.text)} characters, {len(answer.links)} links"
    return page(f"{what}|{kib * 1024}")
