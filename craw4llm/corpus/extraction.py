"""HTML pages into text, links and signals, in a child process that a page may take down.

    with Extractor(HtmlLimits()) as extractor:
        extractor.read([(html bytes, None), (HTTP body, [("content-type", "text/html; charset=..."), ...])])
            -> [HtmlPage(text, base, links, anchors, flags, canonical, signals), "timeout", ...]     in the order given

Pages and answers pass through two files without names: the child writes each answer down when it has it, and says so when it has read
the batch. Both processes are woken once a batch, and no answer is lost when the child ends within a page. A page has `page_seconds` of
the child's processor time (a timer of the kernel ends the process, in the middle of a C library too; a busy machine takes no time away),
`memory_bytes` of address space beyond what the child has at its start, and `page_bytes` of HTML after HTTP decoding. When a child ends,
the page it was at is read once more, alone, in a new child: so what becomes of a page does not depend on its neighbours, but for pages at
the very edge of the limit of time. If that child ends too the page is "timeout", "out_of_memory" or "crashed", and the next child goes on
behind it.
"""

import atexit
import contextlib
import json
import marshal
import os
import select
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from types import TracebackType

from craw4llm.configs import HtmlLimits
from craw4llm.corpus.extraction_child import LENGTH, NOTHING, write
from craw4llm.corpus.extraction_page import Answer, Headers, unpacked
from craw4llm.corpus.html_object import object_file
from craw4llm.errors import StageError, StorageError

# A file's bytes or its path, and None; or an HTTP body and its headers (lower-case name, value).
Given = tuple[bytes | str, Headers | None]

DEFAULT_LIMITS = HtmlLimits()
READ_PAGE = "craw4llm.corpus.extraction_page:read_page"
BATCH_PAGES = 32
BATCH_BYTES = 4 << 20
WALL_FACTOR = 20  # a child that sleeps uses no processor time: so many times page_seconds by the clock, and a minute
_KEPT_BYTES = 16 << 20  # of a file without a name, which takes memory
_KEPT_HEAP_BYTES = 32 << 20  # glibc gives memory back to the system, by default after each page, and takes it anew: 60 us a page
_FAILED_ALLOCATION = (b"memory allocation of", b"MemoryError", b"bad_alloc")


class Extractor:
    """A child process that reads pages. reader: "module:function" with the signature of `read_page`, for tests."""

    def __init__(self, limits: HtmlLimits, reader: str = READ_PAGE) -> None:
        self.limits = limits
        self.started = 0  # child processes so far
        self._reader = reader
        self._child: subprocess.Popen[bytes] | None = None
        self._pages, self._found = nameless_file(), nameless_file()
        self._said = tempfile.TemporaryFile()  # noqa: SIM115  lives as long as this object

    def __enter__(self) -> "Extractor":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Ends the child."""
        self._end()
        self._said.close()
        for descriptor in (self._pages, self._found):
            os.close(descriptor)

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
        assert child.stdin is not None
        place = 0
        try:
            for data, _ in pages:
                if isinstance(data, bytes):
                    write(self._pages, data, place)
                    place += len(data)
            write(self._found, NOTHING, 0)
        except OSError as error:  # nothing is wrong with the file that the pages are from
            raise StorageError(
                f"no space left while writing pages for the process that reads them ({error.strerror}): free memory, or raise the limit "
                "on the size of files (`ulimit -f`); finished artifacts are kept, and the next run goes on from them"
            ) from error
        message = marshal.dumps([(len(data) if isinstance(data, bytes) else data, headers) for data, headers in pages])
        try:
            child.stdin.write(LENGTH.pack(len(message)) + message)
            child.stdin.flush()
            size = self._waited()
        except BrokenPipeError:
            size = None
        answers: list[Answer] = []
        for found in self._answers(size):
            answer = unpacked(found)
            if answer == "out_of_memory":
                return answers, "out_of_memory"
            answers.append(answer)
        for descriptor in (self._pages, self._found):
            if os.fstat(descriptor).st_size > _KEPT_BYTES:
                os.ftruncate(descriptor, 0)
        return answers, "" if len(answers) == len(pages) else self._why()

    def _waited(self) -> int | None:
        """Waits until the child has read a batch, and returns the bytes of its answers. None: it ended, or slept over a page."""
        assert self._child is not None and self._child.stdout is not None
        done = 0
        descriptor = self._child.stdout.fileno()
        poll = select.poll()
        poll.register(descriptor, select.POLLIN)
        while not poll.poll(1000 * (WALL_FACTOR * self.limits.page_seconds + 60)):
            before, done = done, len(self._answers(None))
            if done == before:
                self._child.kill()
                self._child.wait()
                self._child.returncode = -signal.SIGPROF
                return None
        said = os.read(descriptor, LENGTH.size)
        return LENGTH.unpack(said)[0] if said else None

    def _answers(self, size: int | None) -> list[bytes]:
        """What the child has written down of a batch, page by page; size: of it all, None where that is not known."""
        data = os.pread(self._found, os.fstat(self._found).st_size if size is None else size, 0)
        answers: list[bytes] = []
        at = 0
        while at + LENGTH.size <= len(data) and (length := LENGTH.unpack_from(data, at)[0]):
            at += LENGTH.size + length
            answers.append(data[at - length : at])
        return answers

    def _running(self) -> subprocess.Popen[bytes]:
        if self._child is None or self._child.poll() is not None:
            self._end()
            self._said.seek(0)
            self._said.truncate()
            # The import path is handed over as it is; a plain child, not multiprocessing's: it takes nothing of this process's memory.
            start = "import json, sys; sys.path[:] = json.loads(sys.argv[1]); from craw4llm.corpus.extraction_child import serve; serve()"
            limits = self.limits
            numbers = [limits.page_bytes, limits.page_seconds, limits.memory_bytes, self._pages, self._found]
            arguments = [self._reader, str(object_file()), *numbers]
            self._child = subprocess.Popen(
                [sys.executable, "-c", start, json.dumps(sys.path), json.dumps(arguments)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._said,
                pass_fds=(self._pages, self._found),
                env={**os.environ, "MALLOC_TRIM_THRESHOLD_": str(_KEPT_HEAP_BYTES)},
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
        if child is None:
            return
        for stream in (child.stdin, child.stdout):
            if stream is not None:
                with contextlib.suppress(OSError):
                    stream.close()
        child.kill()
        child.wait()


def nameless_file() -> int:
    """The descriptor of a file that nobody else can open: in memory, where the system knows such."""
    if hasattr(os, "memfd_create"):
        return os.memfd_create("pages")
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())


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
