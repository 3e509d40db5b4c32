"""The body of an HTTP response as it was before it was sent: chunks joined, compression undone, up to a limit.

    decode_body([("content-encoding", "gzip"), ...], body, 5_000_000)   -> bytes; raises BodyError("too_large" or "bad_encoding")

Archives keep a response as it was sent, or undo the coding and leave the header standing. So a coding counts only where the body
shows it: chunks begin with a length, gzip and zstd with their magic number; a body that is no brotli stream and looks like HTML is taken
as it is. Nothing beyond the limit is held, whatever a body would grow to.
"""

import io
import re
import zlib

import fastwarc.stream_io as streams

_CHUNK_LENGTH = re.compile(rb"[ \t]*([0-9A-Fa-f]{1,8})[ \t]*(?:;[^\r\n]*)?\r?\n")
_ZSTD = b"\x28\xb5\x2f\xfd"
_PIECE_BYTES = 1 << 20


class BodyError(Exception):
    """args[0]: a key of `craw4llm.corpus.records.REASONS`."""


def decode_body(headers: list[tuple[str, str]], body: bytes, limit: int) -> bytes:
    """The body, at most `limit` bytes. headers: (lower-case name, value)."""
    values = {name: value.lower() for name, value in reversed(headers)}
    if "chunked" in values.get("transfer-encoding", ""):
        body = _joined(body)
    codings = [name.strip() for name in values.get("content-encoding", "").split(",")]
    for coding in reversed(codings):
        if coding in ("gzip", "x-gzip"):
            body = _inflated(body, 31, limit) if body.startswith(b"\x1f\x8b") else body
        elif coding == "deflate":
            body = _deflated(body, limit)
        elif coding == "br":
            body = _brotli(body, limit)
        elif coding == "zstd":
            body = _read(streams.ZstdReader(io.BytesIO(body)), limit) if body.startswith(_ZSTD) else body
    if len(body) > limit:
        raise BodyError("too_large")
    return body


def looks_like_html(body: bytes) -> bool:
    """Whether a body of unknown type begins as HTML does (the WHATWG MIME Sniffing Standard's first tags)."""
    start = body[:512].lstrip(b"\xef\xbb\xbf \t\r\n\x0c").lower()
    return start.startswith((b"<!doctype html", b"<html", b"<head", b"<title", b"<body", b"<!--", b"<script", b"<style", b"<meta", b"<div"))


def _joined(body: bytes) -> bytes:
    """Chunks joined; a body that does not begin with a chunk's length was joined before."""
    if not _CHUNK_LENGTH.match(body):
        return body
    parts: list[bytes] = []
    at = 0
    while length := _CHUNK_LENGTH.match(body, at):
        size = int(length[1], 16)
        if size == 0:
            return b"".join(parts)
        at = length.end() + size
        if at > len(body):
            break
        parts.append(body[length.end() : at])
        if body.startswith(b"\r\n", at):
            at += 2
        elif body.startswith(b"\n", at):
            at += 1
        elif at == len(body):
            break
    if not parts:
        return body  # a page that happens to begin with a number
    raise BodyError("bad_encoding")


def _inflated(body: bytes, window: int, limit: int) -> bytes:
    """gzip (window 31, any number of members), zlib (15) or a bare deflate stream (-15)."""
    parts: list[bytes] = []
    held = 0
    while body:
        inflate = zlib.decompressobj(window)
        try:
            while not inflate.eof:
                out = inflate.decompress(body, min(_PIECE_BYTES, limit + 1 - held))
                if not out and not inflate.eof and not inflate.unconsumed_tail:
                    raise BodyError("bad_encoding")  # cut
                parts.append(out)
                held += len(out)
                if held > limit:
                    raise BodyError("too_large")
                body = inflate.unconsumed_tail
        except zlib.error as error:
            raise BodyError("bad_encoding") from error
        body = inflate.unused_data
        if window != 31 or not body.startswith(b"\x1f\x8b"):
            break
    return b"".join(parts)


def _deflated(body: bytes, limit: int) -> bytes:
    if body[:1] in (b"<", b"\xef") or not body:
        return body
    try:  # RFC 9110, 8.4.1.2: zlib's format; some servers send a bare deflate stream
        return _inflated(body, 15, limit)
    except BodyError as error:
        if error.args[0] == "too_large":
            raise
        return _inflated(body, -15, limit)


def _brotli(body: bytes, limit: int) -> bytes:
    try:
        return _read(streams.BrotliReader(io.BytesIO(body)), limit)
    except BodyError as error:
        if error.args[0] == "bad_encoding" and looks_like_html(body):
            return body
        raise


def _read(stream: streams.BrotliReader | streams.ZstdReader, limit: int) -> bytes:
    parts: list[bytes] = []
    held = 0
    try:
        while held <= limit and (piece := stream.read(min(_PIECE_BYTES, limit + 1 - held))):
            parts.append(piece)
            held += len(piece)
    except (OSError, ValueError) as error:
        raise BodyError("bad_encoding") from error
    if held > limit:
        raise BodyError("too_large")
    return b"".join(parts)
