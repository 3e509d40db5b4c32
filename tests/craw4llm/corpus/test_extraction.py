import gzip
import io
import json
import os
import signal
import subprocess
import sys
import time
import zlib
from pathlib import Path

import pytest
from fastwarc.stream_io import BrotliWriter, ZstdWriter

from craw4llm.configs import HtmlLimits
from craw4llm.corpus.extraction import Extractor
from craw4llm.corpus.extraction_page import Answer, HtmlPage, packed, read_page, unpacked
from craw4llm.errors import StageError

TIGHT = HtmlLimits(page_seconds=0.3, memory_bytes=100_000_000)


def answers(words: list[str], limits: HtmlLimits = TIGHT) -> tuple[list[str], int]:
    """(texts and reasons, child processes used)."""
    with Extractor(limits, "misbehaving_reader:read") as extractor:
        found = extractor.read([(word.encode(), None) for word in words])
        return [one if isinstance(one, str) else one.text for one in found], extractor.started


def text(answer: Answer) -> str:
    assert isinstance(answer, HtmlPage), answer
    return answer.text


@pytest.mark.parametrize(
    ("word", "reason"),
    [
        ("hang", "timeout"),
        ("segfault", "crashed"),
        ("abort", "crashed"),
        ("exit", "crashed"),
        ("killed", "crashed"),
        ("eat", "out_of_memory"),
        ("rust", "out_of_memory"),
    ],
)
def test_a_page_that_takes_the_child_down_is_named_and_the_others_are_read(word: str, reason: str) -> None:
    found, children = answers(["a", word, "b", word, "c"])
    assert found == ["a", reason, "b", reason, "c"]
    assert children <= 5  # the first; one for each page alone; one behind each


def test_a_page_alone_in_a_new_child_decides() -> None:
    """Where only what pages before it left is to blame, the page is read."""
    assert answers(["keep", "need", "b"]) == (["keep", "needed 60000000", "b"], 2)


def test_what_a_library_prints_is_no_answer() -> None:
    assert answers(["print", "a", "print"])[0] == ["print", "a", "print"]


def test_a_bug_of_the_reader_is_no_reject() -> None:
    with pytest.raises(StageError, match="ZeroDivisionError: a bug in the reader"):
        answers(["a", "bug"])


def test_a_child_that_is_ended_from_outside_is_replaced() -> None:
    with Extractor(TIGHT, "misbehaving_reader:read") as extractor:
        assert [text(one) for one in extractor.read([(b"a", None)])] == ["a"]
        assert extractor._child is not None
        os.kill(extractor._child.pid, signal.SIGKILL)
        time.sleep(0.1)
        assert [text(one) for one in extractor.read([(b"b", None), (b"c", None)])] == ["b", "c"]


def test_a_child_does_not_outlive_its_parent() -> None:
    """kill -9 of the parent: a waiting child ends at once, one within a page at the end of its time."""
    for word, limit_s in (("a", 10.0), ("hang", 60.0)):  # by the clock; its time is the processor's, of which a busy machine gives less
        program = (
            "import sys; sys.path[:0] = sys.argv[1:]\n"
            "from craw4llm.corpus.extraction import Extractor, HtmlLimits\n"
            "e = Extractor(HtmlLimits(page_seconds=0.5), 'misbehaving_reader:read')\n"
            "print(e._running().pid, flush=True)\n"
            f"e.read([({word.encode()!r}, None)])\n"
            "print('read', flush=True)\n"
            "import time; time.sleep(60)\n"
        )
        parent = subprocess.Popen(
            [sys.executable, "-c", program, str(Path(__file__).parent), str(Path(__file__).parents[3])], stdout=subprocess.PIPE, text=True
        )
        assert parent.stdout is not None
        child = int(parent.stdout.readline())
        if word == "a":
            parent.stdout.readline()
        else:
            time.sleep(0.2)
        parent.kill()
        parent.wait()
        parent.stdout.close()
        waited = time.monotonic()
        while _alive(child):
            assert time.monotonic() - waited < limit_s, word
            time.sleep(0.05)


def _alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.parametrize("links", [[], [""], ["a"], ["a", "", "b"], ["a\nb", "c"], ["\n"], ["\n", "\r"]])
def test_an_answer_is_the_same_on_the_other_side(links: list[str]) -> None:
    page = HtmlPage("text\n\0", None, links, ["" for _ in links], [2 for _ in links], "c", 64)
    assert unpacked(packed(page)) == page
    assert unpacked(packed("too_large")) == "too_large"


def test_hostile_pages_are_read(shared: Path) -> None:
    """BL-21, with the limits that a run has."""
    names = sorted((shared / "cases" / "BL-21").glob("*.html"))
    with Extractor(HtmlLimits()) as extractor:
        found = dict(zip([path.name for path in names], extractor.read([(path.read_bytes(), None) for path in names]), strict=True))
        assert extractor.started == 1
    for name in ("colspan_bomb.html", "deep_nesting.html", "unclosed_comment.html"):
        assert text(found[name]).startswith("Answer history by treaty"), name
    assert text(found["empty.html"]) == text(found["forbidden.html"]) == ""
    assert text(found["one_long_line.html"]).startswith("wordword")
    assert len(text(found["many_rows.html"])) > 10_000


def test_encodings(shared: Path) -> None:
    """BL-22: byte order mark, HTTP header, meta element, detection, in that order."""
    folder = shared / "cases" / "BL-22"
    for name, case in json.loads((folder / "expected.json").read_text()).items():
        found = read_page((folder / name).read_bytes(), [("content-type", case["http_content_type"])], 10**6)
        assert case["must_contain"] in text(found), name


def test_a_page_with_bad_bytes_keeps_its_encoding(shared: Path) -> None:
    data = (shared / "web_samples" / "encoding-file03.html").read_bytes()
    with pytest.raises(UnicodeDecodeError):
        data.decode()
    for content_type in ("text/html; charset=utf-8", "text/html"):
        found = text(read_page(data, [("content-type", content_type)], 10**6))
        assert found.startswith("Nous utilisons des cookies anonymisés afin de vous offrir la meilleure expérience sur notre site.")
    cut = "<p>Voilà une page coupée".encode()[:-2]
    assert text(read_page(cut, [("content-type", "text/html; charset=UTF-8")], 100)) == "Voilà une page coup\ufffd"


def test_signals_and_canonical_of_the_http_header() -> None:
    headers = [
        ("content-type", "text/html"),
        ("x-robots-tag", "noindex"),
        ("x-robots-tag", "otherbot: noarchive, nosnippet"),
        ("content-usage", "train-ai=n"),
        ("link", '<https://example.org/style.css>; rel=preload, <https://example.org/main>; rel="canonical"'),
    ]
    found = read_page(b'<meta name="robots" content="NoFollow"><p>text', headers, 1000)
    assert isinstance(found, HtmlPage)
    assert found.signals == 1 | 2 | 64
    assert found.canonical == "https://example.org/main"


def peak(data: bytes, headers: list[tuple[str, str]], limits: HtmlLimits) -> tuple[str, int]:
    with Extractor(limits, "misbehaving_reader:peak") as extractor:
        said, _, peak_bytes = text(extractor.read([(data, headers)])[0]).partition("|")
        return said, int(peak_bytes)


@pytest.mark.parametrize("coding", ["gzip", "gzip, gzip", "deflate", "br", "zstd"])
def test_a_bomb_is_too_large_and_takes_little_memory(coding: str) -> None:
    zeros = b" " * 200_000_000
    if coding.startswith("gzip"):
        data = gzip.compress(zeros, 9)
        data = gzip.compress(data, 9) if "," in coding else data
    elif coding == "deflate":
        data = zlib.compress(zeros, 9)
    else:
        packed = io.BytesIO()
        writer = (BrotliWriter if coding == "br" else ZstdWriter)(packed)
        writer.write(zeros)
        writer.close()
        data = packed.getvalue()
    assert len(data) < 300_000
    said, peak_bytes = peak(data, [("content-type", "text/html"), ("content-encoding", coding)], HtmlLimits())
    assert said == "too_large"
    assert peak_bytes < 300_000_000


def test_a_page_of_fifty_megabytes() -> None:
    """Too large by default; where the limits allow it, read, or rejected by its own name, and the pages beside it are read."""
    paragraph = f"<p>{'Some text of a very long page, ' * 60}<a href='/next'>a link</a>.</p>\n"
    data = paragraph.encode() * (50_000_000 // len(paragraph))
    with Extractor(HtmlLimits()) as extractor:
        assert extractor.read([(data, None), (b"<p>small", None)])[0] == "too_large"
    limits = HtmlLimits(page_bytes=60_000_000, memory_bytes=4 << 30, page_seconds=60)
    with Extractor(limits) as extractor:
        large, small = extractor.read([(data, None), (b"<p>small", None)])
    assert len(text(large)) > 49_000_000
    assert isinstance(large, HtmlPage) and len(large.links) == data.count(b"<a ")
    assert text(small) == "small"
    with Extractor(HtmlLimits(page_bytes=60_000_000, memory_bytes=128 << 20)) as extractor:
        assert [one if isinstance(one, str) else one.text for one in extractor.read([(data, None), (b"<p>small", None)])] == [
            "out_of_memory",
            "small",
        ]
