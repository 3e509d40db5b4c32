"""WARC records and files for tests, well-formed unless told otherwise."""

import base64
import gzip
import hashlib
import uuid
from collections.abc import Iterable, Sequence
from pathlib import Path

DATE = "2024-05-18T01:58:10Z"


def sha1(data: bytes) -> str:
    return "sha1:" + base64.b32encode(hashlib.sha1(data).digest()).decode()


def record_id(url: str) -> str:
    return f"<urn:uuid:{uuid.uuid5(uuid.NAMESPACE_URL, url)}>"


def record(
    kind: str,
    url: str,
    block: bytes,
    *,
    headers: Sequence[tuple[str, str]] = (),
    content_type: str = "application/http; msgtype=response",
    version: str = "1.0",
    digest: bool = True,
    length: int | str | None = None,
    end: bytes = b"\r\n\r\n",
) -> bytes:
    """length: what Content-Length says, where it is to be wrong. digest: with WARC-Block-Digest."""
    own = {name for name, _ in headers}
    lines = [f"WARC/{version}", f"WARC-Type: {kind}", *(f"{name}: {value}" for name, value in headers)]
    lines += [f"WARC-Target-URI: {url}"] if url else []
    lines += [f"WARC-Date: {DATE}"] if "WARC-Date" not in own else []
    lines += [f"WARC-Record-ID: {record_id(kind + url)}"]
    lines += [f"Content-Type: {content_type}"]
    lines += [f"WARC-Block-Digest: {sha1(block)}"] if digest and "WARC-Block-Digest" not in own else []
    lines += [f"Content-Length: {len(block) if length is None else length}"] if length != "" else []
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + block + end


def http(
    body: bytes, *, status: str = "200 OK", headers: Sequence[tuple[str, str]] = (("Content-Type", "text/html; charset=utf-8"),)
) -> bytes:
    head = "".join(f"{name}: {value}\r\n" for name, value in headers)
    return f"HTTP/1.1 {status}\r\n{head}\r\n".encode("latin-1") + body


def response(
    url: str, body: bytes | str, *, status: str = "200 OK", http_headers: Sequence[tuple[str, str]] | None = None, **options: object
) -> bytes:
    body = body.encode() if isinstance(body, str) else body
    given = {} if http_headers is None else {"headers": http_headers}
    return record("response", url, http(body, status=status, **given), **options)  # type: ignore[arg-type]


def page(text: str, links: Iterable[str] = ()) -> str:
    anchors = " ".join(f'<a href="{link}">to {link}</a>' for link in links)
    return f"<!doctype html><html><head><title>t</title></head><body><main><p>{text}</p><p>{anchors}</p></main></body></html>"


def members(records: Iterable[bytes], level: int = 6) -> bytes:
    """One gzip member per record."""
    return b"".join(gzip.compress(one, level, mtime=0) for one in records)


def write(path: Path, data: bytes) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
    return path
