import gzip
import io
import zlib

import pytest
from fastwarc.stream_io import BrotliWriter, ZstdWriter

from craw4llm.corpus.extraction_http import BodyError, decode_body, looks_like_html

PAGE = b"<!doctype html><html><p>" + b"text of the page, " * 500 + b"</html>"


def packed(kind: type, data: bytes) -> bytes:
    out = io.BytesIO()
    writer = kind(out)
    writer.write(data)
    writer.close()
    return out.getvalue()


def chunked(data: bytes, size: int = 1000, end: bytes = b"0\r\n\r\n", line: bytes = b"\r\n") -> bytes:
    pieces = [data[k : k + size] for k in range(0, len(data), size)]
    return b"".join(f"{len(piece):x}".encode() + b";name=value" + line + piece + line for piece in pieces) + end


def bare(data: bytes) -> bytes:
    deflate = zlib.compressobj(wbits=-15)
    return deflate.compress(data) + deflate.flush()


def body(data: bytes, limit: int = 100_000, **headers: str) -> bytes:
    return decode_body([(name.replace("_", "-"), value) for name, value in headers.items()], data, limit)


@pytest.mark.parametrize(
    ("coding", "data"),
    [
        ("gzip", gzip.compress(PAGE)),
        ("x-gzip", gzip.compress(PAGE[:50]) + gzip.compress(PAGE[50:])),
        ("GZIP", gzip.compress(PAGE) + b"\0\0\0"),
        ("deflate", zlib.compress(PAGE)),
        ("deflate", bare(PAGE)),
        ("br", packed(BrotliWriter, PAGE)),
        ("zstd", packed(ZstdWriter, PAGE)),
        ("gzip, br", packed(BrotliWriter, gzip.compress(PAGE))),
        ("identity", PAGE),
        ("unheard-of", PAGE),
        # What the archive decoded, and left the header standing.
        ("gzip", PAGE),
        ("deflate", PAGE),
        ("br", PAGE),
        ("zstd", PAGE),
        ("br, gzip", gzip.compress(PAGE)),
    ],
)
def test_content_codings(coding: str, data: bytes) -> None:
    assert body(data, content_encoding=coding) == PAGE
    assert body(chunked(data), content_encoding=coding, transfer_encoding="chunked") == PAGE


@pytest.mark.parametrize(
    "data",
    [chunked(PAGE), chunked(PAGE, 7), chunked(PAGE, 10**6), chunked(PAGE, line=b"\n", end=b"0\n\n"), PAGE,
     chunked(PAGE, end=b"000\r\nTrailer: x\r\n\r\n")],
)  # fmt: skip
def test_chunks(data: bytes) -> None:
    assert body(data, transfer_encoding="Chunked") == PAGE


def test_a_page_that_begins_with_a_number_is_no_chunk() -> None:
    text = b"1984\r\nis the name of a book"
    assert body(text, transfer_encoding="chunked") == text


@pytest.mark.parametrize(
    ("headers", "data"),
    [
        ({"content_encoding": "gzip"}, gzip.compress(PAGE)[:60]),
        ({"content_encoding": "gzip"}, gzip.compress(PAGE)[:-3]),
        ({"content_encoding": "gzip"}, gzip.compress(PAGE)[:40] + b"garbage" + gzip.compress(PAGE)[47:]),
        ({"content_encoding": "br"}, packed(BrotliWriter, PAGE)[:30]),
        ({"content_encoding": "br"}, b"\x00\x01 no such stream"),
        ({"content_encoding": "zstd"}, packed(ZstdWriter, PAGE)[:30]),
        ({"content_encoding": "deflate"}, zlib.compress(PAGE)[:30]),
        ({"transfer_encoding": "chunked"}, chunked(PAGE)[:3000]),
        ({"transfer_encoding": "chunked"}, chunked(PAGE, end=b"")),
        ({"transfer_encoding": "chunked"}, chunked(PAGE, end=b"zzz\r\n")),
    ],
)
def test_a_body_that_is_cut_or_damaged_is_no_page(headers: dict[str, str], data: bytes) -> None:
    with pytest.raises(BodyError, match="bad_encoding"):
        body(data, **headers)


@pytest.mark.parametrize("kind", ["identity", "gzip", "deflate", "br", "zstd"])
def test_the_limit_is_exact(kind: str) -> None:
    pack = {
        "identity": lambda data: data,
        "gzip": gzip.compress,
        "deflate": zlib.compress,
        "br": lambda data: packed(BrotliWriter, data),
        "zstd": lambda data: packed(ZstdWriter, data),
    }[kind]
    assert len(body(pack(b" " * 5000), 5000, content_encoding=kind)) == 5000
    with pytest.raises(BodyError, match="too_large"):
        body(pack(b" " * 5001), 5000, content_encoding=kind)


def test_what_looks_like_html() -> None:
    assert all(looks_like_html(data) for data in (b"\xef\xbb\xbf\r\n <!DOCTYPE HTML>", b"<HTML>", b"<!-- x -->", b"<body>"))
    assert not any(looks_like_html(data) for data in (b"", b"<?xml version='1.0'?><rss>", b"{}", b"\x89PNG", b"plain text", b"%PDF-1.4"))
