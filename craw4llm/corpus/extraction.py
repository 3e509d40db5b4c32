"""HTML pages into text, links and signals, in a child process that a page may take down.

    with Extractor(HtmlLimits()) as extractor:
        extractor.read([(html bytes, None), (HTTP body, [("content-type", "text/html; charset=..."), ...])])
            -> [HtmlPage(text, base, links, anchors, flags, canonical, signals), "timeout", ...]     in the order given

A batch goes to the child at once; it answers page by page. A page has `page_seconds` of the child's processor time (a timer of the
kernel ends the process, in the middle of a C library too; a busy machine takes no time away), `memory_bytes` of address space beyond
what the child has at its start, and `page_bytes` of HTML after HTTP decoding. When a child ends, the page it was at is read once more,
alone, in a new child: so what becomes of a page does not depend on its neighbours, but for pages at the very edge of the limit of time.
If that child ends too the page is "timeout", "out_of_memory" or "crashed", and the next child goes on behind it.

Text: resiliparse, main content (the same for every kind of source).
"""

import atexit
import contextlib
import dataclasses
import json
import marshal
import os
import select
import signal
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from types import TracebackType

from resiliparse.extract.html2text import extract_plain_text

from craw4llm.configs import HtmlLimits
from craw4llm.corpus.extraction_http import BodyError, decode_body, looks_like_html
from craw4llm.corpus.html_links import decode, header_canonical, header_signals, place_links, read_markup
from craw4llm.errors import StageError

Headers = list[tuple[str, str]]
Given = tuple[bytes, Headers | None]  # a file's bytes and None, or an HTTP body and its headers (lower-case name, value)
NOT_HTML = "not_html"  # of a body whose type nothing states, and which does not begin as HTML does: no reject

DEFAULT_LIMITS = HtmlLimits()
READ_PAGE = "craw4llm.corpus.extraction:read_page"
BATCH_PAGES = 32
BATCH_BYTES = 4 << 20
WALL_FACTOR = 20  # a child that sleeps uses no processor time: so many times page_seconds by the clock, and a minute
_READ_BYTES = 1 << 16
_LENGTH = struct.Struct("<Q")
_FAILED_ALLOCATION = (b"memory allocation of", b"MemoryError", b"bad_alloc")


@dataclasses.dataclass(frozen=True, slots=True)
class HtmlPage:
    """One page, read. The fields are those of `craw4llm.corpus.records.Page`."""

    text: str
    base: str | None
    links: list[str]
    anchors: list[str]
    flags: list[int]
    canonical: str | None
    signals: int


Answer = HtmlPage | str  # a page, or the reason why it is none (records.REASONS, or NOT_HTML)


def read_page(data: bytes, headers: Headers | None, page_bytes: int) -> Answer:
    """Reads one page in this process. Depends on the arguments alone."""
    charset = None
    if headers is not None:
        try:
            data = decode_body(headers, data, page_bytes)
        except BodyError as error:
            return str(error.args[0])
        content_type = next((value for name, value in headers if name == "content-type"), "")
        if not content_type.strip() and not looks_like_html(data):
            return NOT_HTML
        charset = content_type.lower().partition("charset=")[2].partition(";")[0] or None
    if len(data) > page_bytes:
        return "too_large"
    try:
        page = decode(data, charset)
        text = extract_plain_text(page, main_content=True).strip()
        markup = read_markup(page)
        place_links(markup, text)
    except MemoryError:
        return "out_of_memory"
    except Exception:  # a library's word on one page, whatever its class; a bug of ours would fail every page and so the stage
        return "unparsable"
    signals = markup.signals | (header_signals(headers) if headers else 0)
    canonical = markup.canonical or (header_canonical(headers) if headers else None)
    return HtmlPage(text, markup.base, markup.links, markup.anchors, markup.flags, canonical, signals)


class Extractor:
    """A child process that reads pages. reader: "module:function" with the signature of `read_page`, for tests."""

    def __init__(self, limits: HtmlLimits, reader: str = READ_PAGE) -> None:
        self.limits = limits
        self.started = 0  # child processes so far
        self._reader = reader
        self._child: subprocess.Popen[bytes] | None = None
        self._received = bytearray()  # from the child, beyond the last message taken
        self._said = tempfile.TemporaryFile()  # noqa: SIM115  lives as long as this object

    def __enter__(self) -> "Extractor":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Ends the child."""
        self._end()
        self._said.close()

    def read(self, pages: Sequence[Given]) -> list[Answer]:
        answers: list[Answer] = []
        while len(answers) < len(pages):
            rest = pages[len(answers) :]
            answered, why = self._batch(rest)
            answers += answered
            if why:
                answers.append(self._alone(rest[len(answered)]))
        return answers

    def _alone(self, page: Given) -> Answer:
        self._end()
        answered, why = self._batch([page])
        if why:
            self._end()
        return answered[0] if answered else why

    def _batch(self, pages: Sequence[Given]) -> tuple[list[Answer], str]:
        """Answers to the first pages, and why there is none to the next ("": there are answers to all)."""
        child = self._running()
        assert child.stdin is not None and child.stdout is not None
        message = marshal.dumps([(data, headers) for data, headers in pages])
        try:
            child.stdin.write(_LENGTH.pack(len(message)) + message)
            child.stdin.flush()
        except BrokenPipeError:
            return [], self._why()
        answers: list[Answer] = []
        for _ in pages:
            raw = self._message(child.stdout.fileno())
            answer = None if raw is None else marshal.loads(raw)
            if answer is None or answer == "out_of_memory":
                return answers, "out_of_memory" if answer else self._why()
            answers.append(answer if isinstance(answer, str) else HtmlPage(*answer))
        return answers, ""

    def _message(self, descriptor: int) -> bytes | None:
        """The child's next message; None where it ended, or took far too long by the clock."""
        deadline = time.monotonic() + WALL_FACTOR * self.limits.page_seconds + 60
        received = self._received
        poll = select.poll()
        poll.register(descriptor, select.POLLIN)
        while True:
            if len(received) >= _LENGTH.size:
                end = _LENGTH.size + _LENGTH.unpack_from(received)[0]
                if len(received) >= end:
                    message = bytes(memoryview(received)[_LENGTH.size : end])
                    del received[:end]
                    return message
            if not poll.poll(max(0, 1000 * (deadline - time.monotonic()))):
                assert self._child is not None
                self._child.kill()
                self._child.wait()
                self._child.returncode = -signal.SIGPROF
                return None
            piece = os.read(descriptor, _READ_BYTES)
            if not piece:
                return None
            received += piece

    def _running(self) -> subprocess.Popen[bytes]:
        if self._child is None or self._child.poll() is not None:
            self._end()
            self._said.seek(0)
            self._said.truncate()
            # The import path is handed over as it is; a plain child, not multiprocessing's: it takes nothing of this process's memory.
            start = "import json, sys; sys.path[:] = json.loads(sys.argv[1]); from craw4llm.corpus.extraction_child import serve; serve()"
            arguments = json.dumps([self._reader, self.limits.page_bytes, self.limits.page_seconds, self.limits.memory_bytes])
            self._child = subprocess.Popen(
                [sys.executable, "-c", start, json.dumps(sys.path), arguments],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._said,
            )
            self.started += 1
        return self._child

    def _why(self) -> str:
        """Why the child ended."""
        assert self._child is not None
        code = self._child.wait()
        self._said.seek(0)
        said = self._said.read()[-4096:]
        if code > 0 and b"MemoryError" not in said:  # an exception of ours: it would fail every page
            raise StageError(f"corpus: the process that reads HTML pages failed: {said.decode(errors='replace').strip()}")
        if code in (-signal.SIGPROF, -signal.SIGXCPU):
            return "timeout"
        if any(word in said for word in _FAILED_ALLOCATION):
            return "out_of_memory"
        return "crashed"

    def _end(self) -> None:
        child, self._child = self._child, None
        self._received.clear()
        if child is None:
            return
        for stream in (child.stdin, child.stdout):
            if stream is not None:
                with contextlib.suppress(OSError):
                    stream.close()
        child.kill()
        child.wait()


_EXTRACTORS: dict[tuple[HtmlLimits, int], Extractor] = {}


def extractor(limits: HtmlLimits) -> Extractor:
    """This process's extractor for these limits: started once, ended with the process."""
    key = (limits, os.getpid())
    if key not in _EXTRACTORS:
        _EXTRACTORS[key] = Extractor(limits)
        atexit.register(_EXTRACTORS[key].close)
    return _EXTRACTORS[key]


def end_children() -> None:
    """Ends the children of this process's extractors (for whoever counts their time); the next page starts a new one."""
    for one in _EXTRACTORS.values():
        one._end()
