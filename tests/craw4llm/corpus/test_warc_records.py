import gzip
import io
import itertools
import os
import random
import zlib
from collections.abc import Generator
from pathlib import Path

import numpy as np
import pytest
from fastwarc.warc import ArchiveIterator
from warc_making import http, members, page, record, response, write

from craw4llm.corpus import warc
from craw4llm.corpus import warc_records as module
from craw4llm.corpus.warc_records import Damage, WarcRecord, boundaries, candidates, digest_fits, following, read_records
from craw4llm.errors import InputError

# Of the samples those that FastWARC reads to their end without its quirks mode.
INTACT = [
    "bad-redirections.warc.gz",
    "bl-govuk.warc.gz",
    "cc-single.warc.gz",
    "cc-whirlwind.warc.gz",
    "cc-whirlwind.warc.wat.gz",
    "cc-whirlwind.warc.wet.gz",
    "dolma-sample-0000.warc.gz",
    "dolma-sample-0001.warc.gz",
    "example-revisit.warc.gz",
    "fastwarc-warcfile.warc.gz",
    "qsl-encoding-alias.warc.gz",
    "warcio-bad-non-chunked.warc.gz",
    "warcio-iana-chunked.warc",
    "warcio-wget-bad-target-uri.warc.gz",
]


def url(k: int) -> str:
    return f"https://site{k}.example/page"


def twelve(**options: object) -> list[bytes]:
    return [response(url(k), page(f"marker{k} " * (20 + 30 * k)), **options) for k in range(12)]


def read(path: Path, **options: int) -> tuple[list[WarcRecord], list[Damage]]:
    found = list(read_records(path, **options))
    return [r for r in found if isinstance(r, WarcRecord)], [r for r in found if isinstance(r, Damage)]


def urls(records: list[WarcRecord]) -> list[str]:
    return [one.url for one in records]


@pytest.mark.parametrize("name", INTACT)
def test_records_of_intact_files_are_those_of_fastwarc(shared: Path, name: str) -> None:
    path = shared / "web_samples" / name
    records, damages = read(path)
    theirs = [
        (r.headers.get("WARC-Type"), r.headers.get("WARC-Record-ID"), r.reader.read()) for r in ArchiveIterator(str(path), parse_http=False)
    ]
    assert [(r.headers["warc-type"], r.headers["warc-record-id"], r.block) for r in records] == theirs
    assert not damages
    if name != "warcio-bad-non-chunked.warc.gz":
        offsets = [r.stream_pos for r in ArchiveIterator(str(path), parse_http=False)]
        assert [r.offset for r in records] == offsets


@pytest.mark.parametrize(
    ("case", "name", "pages", "damage"),
    [
        ("BL-18", "whole.warc.gz", "123456", None),
        ("BL-18", "truncated.warc.gz", "12345", (2438, "cut_off", "http://warc6.example/")),
        ("BL-19", "single_member.warc.gz", "123456", None),
        ("BL-20", "garbage_mid.warc.gz", "12456", (974, "damaged", "")),
        ("BL-20", "huge_content_length.warc", "12456", (1628, "cut_off", "http://warc3.example/")),
        ("BL-20", "short_content_length.warc", "12456", (1628, "misframed", "http://warc3.example/")),
    ],
)
def test_cases_of_damage(shared: Path, case: str, name: str, pages: str, damage: tuple[int, str, str] | None) -> None:
    records, damages = read(shared / "cases" / case / name)
    assert urls(records) == [f"http://warc{k}.example/" for k in pages]
    assert [(d.offset, d.reason, d.url) for d in damages] == ([damage] if damage else [])


LENGTHS = [0, 5, 700, 10**6, 10**15, 10**30, "", "many", "-4", "١٢"]


@pytest.mark.parametrize("packing", ["plain", "members", "one member"])
@pytest.mark.parametrize("length", LENGTHS)
def test_a_wrong_length_costs_its_own_record(tmp_path: Path, packing: str, length: int | str) -> None:
    records = twelve()
    records[5] = response(url(5), page("marker5 " * 200), length=length)
    packed = {"plain": b"".join, "members": members, "one member": lambda given: gzip.compress(b"".join(given))}[packing]
    found, damages = read(write(tmp_path / "a.warc.gz", packed(records)))
    assert urls(found) == [url(k) for k in range(12) if k != 5]
    assert [d.reason for d in damages] in (["misframed"], ["cut_off"])
    assert all(f"marker{k}".encode() in r.block for r, k in zip(found, [0, 1, 2, 3, 4, 6, 7, 8, 9, 10, 11], strict=True))


def test_a_length_that_reaches_exactly_over_the_next_record_is_no_record(tmp_path: Path) -> None:
    """The block would end where a record may end: in gzip members the next member's beginning forbids it."""
    records = twelve()
    both = len(http(page("marker5 " * (20 + 30 * 5)).encode())) + len(b"\r\n\r\n") + len(records[6]) - len(b"\r\n\r\n")
    records[5] = response(url(5), page("marker5 " * (20 + 30 * 5)), length=both)
    found, damages = read(write(tmp_path / "a.warc.gz", members(records)))
    assert urls(found) == [url(k) for k in range(12) if k != 5]
    assert [d.reason for d in damages] == ["cut_off"]


@pytest.mark.parametrize("seed", range(40))
def test_whole_members_are_what_the_careful_reader_makes_of_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    """Whatever is wrong with a file, and wherever it is read from and to."""
    drawn = random.Random(seed)
    packed = [members([one]) for one in twelve(digest=bool(seed % 2))]
    packed.insert(drawn.randrange(12), drawn.choice([b"", b"\0" * 30, b"junk", members([b"", b"\r\n"]), members([b"no record\r\n\r\n"])]))
    data = bytearray(b"".join(packed))
    for _ in range(seed % 4):
        data[drawn.randrange(len(data))] ^= 1 << drawn.randrange(8)
    path = write(tmp_path / "a.warc.gz", bytes(data[: drawn.choice([len(data), drawn.randrange(len(data))])]))
    options: list[dict[str, int]] = [{}, {"end": drawn.randrange(1, len(data))}, {"block_bytes": 700}]
    fast = [list(read_records(path, **some)) for some in options]  # type: ignore[arg-type]
    monkeypatch.setattr(module, "_single", lambda file, offset, end, block_bytes: iter_of_none(offset))
    assert fast == [list(read_records(path, **some)) for some in options]  # type: ignore[arg-type]


def iter_of_none(offset: int) -> Generator[WarcRecord, None, int | None]:
    """Leaves all to the careful reader."""
    yield from ()
    return offset


def test_intact_members_are_read_without_the_search_for_borders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path / "a.warc.gz", members(twelve()))
    monkeypatch.setattr(module, "_records", lambda source, end, block_bytes: iter(()))
    records, damages = read(path)
    assert urls(records) == [url(k) for k in range(12)] and not damages


@pytest.mark.parametrize("seed", range(60))
def test_any_damage_of_members_costs_only_the_records_it_touches(tmp_path: Path, seed: int) -> None:
    """Bytes changed, taken out, put in, or the end cut off: every record given out is unchanged, what is missing is named."""
    drawn = random.Random(seed)
    records = twelve(digest=bool(seed % 2))
    original = {url(k): one[one.index(b"HTTP/1.1") : -4] for k, one in enumerate(records)}
    data = bytearray(members(records))
    at = drawn.randrange(len(data))
    what = drawn.choice(["flip", "remove", "insert", "cut", "zeros"])
    reach = drawn.randrange(1, 400)
    if what == "flip":
        data[at] ^= 1 << drawn.randrange(8)
    elif what == "remove":
        del data[at : at + reach]
    elif what == "insert":
        data[at:at] = drawn.randbytes(reach)
    elif what == "zeros":
        data[at : at + reach] = bytes(len(data[at : at + reach]))
    else:
        del data[at:]
    found, damages = read(write(tmp_path / "a.warc.gz", bytes(data)))
    for one in found:
        assert one.block == original[one.url]
    missing = [u for u in original if u not in urls(found)]
    starts = [len(members(records[:k])) for k in range(13)]
    touched = [url(k) for k in range(12) if starts[k] < at + (reach if what in ("remove", "zeros") else 1) and at < starts[k + 1]]
    lost = [url(k) for k in range(12) if starts[k + 1] > at] if what == "cut" else touched
    assert set(missing) <= set(lost)
    assert damages or not missing or (what == "cut" and at in starts)


@pytest.mark.parametrize("seed", range(40))
def test_plain_files_with_a_piece_missing_give_no_wrong_record(tmp_path: Path, seed: int) -> None:
    """Where the end of one head meets the end of another the framing is right: then the digest tells (craw4llm.corpus.warc checks it)."""
    drawn = random.Random(seed)
    records = twelve()
    original = {url(k): one[one.index(b"HTTP/1.1") : -4] for k, one in enumerate(records)}
    data = b"".join(records)
    start = drawn.randrange(len(data))
    data = data[:start] + data[start + drawn.randrange(1, 4000) :]  # from the middle of one record into that of another
    found, damages = read(write(tmp_path / "a.warc", data))
    for one in found:
        assert one.block == original[one.url] or digest_fits(one.headers.get("warc-block-digest", ""), one.block) is False
    assert len(found) >= 12 - 4
    assert damages or len(found) == 12 or data.endswith(b"\r\n\r\n")


def test_a_member_with_many_records_and_a_wrong_checksum(tmp_path: Path) -> None:
    """What a digest vouches for is kept; the rest is damaged, though each record looks well."""
    stream = b"".join([*twelve()[:6], *twelve(digest=False)[6:]])
    data = bytearray(gzip.compress(stream, 0))
    at = data.index(b"marker3")
    data[at : at + 6] = b"mArKeR"
    found, damages = read(write(tmp_path / "a.warc.gz", bytes(data)))
    assert urls(found) == [url(k) for k in (0, 1, 2, 4, 5)]
    assert [(d.url, d.reason) for d in damages] == [(url(k), "damaged") for k in (3, 6, 7, 8, 9, 10, 11)]


def test_records_within_a_record_are_its_own(tmp_path: Path) -> None:
    """A page that quotes WARC files, and a captured .warc.gz that gzip stores as it is: neither makes records."""
    inner = b"".join(twelve())
    records = [
        response(url(20), b"<html><pre>\n" + inner + b"\n</pre>"),
        response(url(21), members(twelve()), http_headers=[("Content-Type", "application/gzip")]),
        response(url(22), page("after")),
    ]
    for name, data in (("a.warc.gz", members(records)), ("b.warc.gz", members(records, level=0)), ("c.warc", b"".join(records))):
        path = write(tmp_path / name, data)
        found, damages = read(path)
        assert urls(found) == [url(20), url(21), url(22)] and not damages
        starts = boundaries(path, 1000)
        parts = [read(path, start=start, end=end) for start, end in zip(starts, [*starts[1:], len(data)], strict=True)]
        assert [u for part, _ in parts for u in urls(part)] == [url(20), url(21), url(22)]


@pytest.mark.parametrize("name", ["a.warc", "a.warc.gz"])
@pytest.mark.parametrize("chunk", [1, 3000, 20_000, 10**9])
def test_chunks_hold_every_record_once(tmp_path: Path, name: str, chunk: int) -> None:
    records = twelve()
    records[4] = response(url(4), page("x"), length=99_999)
    records[9] = b"no record at all\r\n\r\n"
    data = members(records) if name.endswith("gz") else b"".join(records)
    path = write(tmp_path / name, data)
    whole = [(type(r), r.offset, r.url) for r in read_records(path)]
    starts = boundaries(path, chunk)
    assert starts == sorted(set(starts))
    parts = [read_records(path, start, end) for start, end in zip(starts, [*starts[1:], len(data)], strict=True)]
    assert [(type(r), r.offset, r.url) for part in parts for r in part] == whole
    # A plain file is divided up to its first wrong length; gzip members that hold no record are no place to divide at.
    assert chunk > 1 or len(starts) == (11 if name.endswith("gz") else 5)


@pytest.mark.parametrize("packing", ["plain", "members", "one member"])
def test_long_blocks_are_passed_over(tmp_path: Path, packing: str) -> None:
    records = twelve()
    records[5] = response(url(5), b"\0" * 5_000_000)
    records[7] = response(url(7), b"\0" * 3_000_000, length=4_000_000)  # reaches into others
    packed = {"plain": b"".join, "members": members, "one member": lambda given: gzip.compress(b"".join(given))}[packing]
    found, damages = read(write(tmp_path / "a.warc.gz", packed(records)), block_bytes=100_000)
    assert urls(found) == [url(k) for k in range(12) if k != 7]
    assert (len(found[5].block), found[5].whole) == (100_000, False)
    assert [d.url for d in damages] == [url(7)]


def test_between_and_after_records(tmp_path: Path) -> None:
    a, b, c = twelve()[:3]
    for data, offsets in (
        (members([a]) + bytes(512) + members([b, c]) + bytes(2000), []),  # padding of zeros
        (members([a]) + b"garbage" + members([b, c]), [len(members([a]))]),
        (members([a, b, c]) + b"garbage", [len(members([a, b, c]))]),
        (members([a[:-4], b[:-2], c[:-4]]), []),  # writers that leave the line ends out
        (b"\r\n\r\n" + a + b"\r\n" + b + c, []),
        (a + b + c[:-4], []),
    ):
        found, damages = read(write(tmp_path / "a.warc", data))
        assert urls(found) == [url(0), url(1), url(2)], data[:40]
        assert [d.offset for d in damages] == offsets


def test_old_files_with_wrong_lengths(tmp_path: Path) -> None:
    records = [response(url(k), page(f"marker{k}"), version="0.18", digest=False) for k in range(4)]
    records[1] = response(url(1), page("marker1"), version="0.18", digest=False, length=10)
    records[3] = response(url(3), page("marker3"), version="0.18", digest=False, length=9000)
    found, damages = read(write(tmp_path / "a.warc", b"".join(records)))
    assert urls(found) == [url(k) for k in range(4)] and not damages
    assert [r.block.endswith(b"</html>") and f"marker{k}".encode() in r.block for k, r in enumerate(found)] == [True] * 4


def test_a_head_without_end(tmp_path: Path) -> None:
    a, b = twelve()[:2]
    endless = b"WARC/1.0\r\n" + b"WARC-Type: response\r\n" * 10_000
    found, damages = read(write(tmp_path / "a.warc.gz", members([a, endless, b])))
    assert urls(found) == [url(0), url(1)]
    assert {(d.offset, d.reason) for d in damages} == {(len(members([a])), "misframed")}


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"filedesc://x.arc 0.0.0.0 20081111 text/plain 69\n1 0 InternetArchive\n", "is an ARC file"),
        (gzip.compress(b"filedesc://x.arc 0.0.0.0 20081111 text/plain 69\n"), "is an ARC file"),
        (b"<html>", "begins with"),
        (gzip.compress(b'{"url": 1}'), "begins with"),
        (b"\x28\xb5\x2f\xfd....", "zstd"),
    ],
)
def test_other_files_are_refused(tmp_path: Path, data: bytes, message: str) -> None:
    with pytest.raises(InputError, match=message):
        list(read_records(write(tmp_path / "a.warc", data)))


def test_an_empty_file_has_no_records(tmp_path: Path) -> None:
    assert list(read_records(write(tmp_path / "a.warc.gz", b""))) == []


def test_memory_does_not_grow_with_a_member(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A member that grows a thousandfold is passed over in pieces."""
    deflate = zlib.compressobj(9, zlib.DEFLATED, 31)
    packed = io.BytesIO()
    packed.write(deflate.compress(record("response", url(1), b"", length=200_000_000, digest=False, end=b"")))
    for _ in range(200):
        packed.write(deflate.compress(bytes(1_000_000)))
    packed.write(deflate.compress(b"\r\n\r\n") + deflate.flush())
    path = write(tmp_path / "a.warc.gz", packed.getvalue() + members(twelve()[:1]))
    held = []
    real = module._Gzip.more
    monkeypatch.setattr(module._Gzip, "more", lambda self: (real(self), held.append(len(self.data)))[0])
    found, damages = read(path)
    assert urls(found) == [url(1), url(0)] and not damages
    assert max(held) < module.BLOCK_BYTES + (4 << 20)


def test_digests() -> None:
    assert digest_fits("sha1:7cc60af0ba6014b1b4ba5c90ce67df87b0ee6a9d", b"x") is False
    assert digest_fits("sha1:11f6ad8ec52a2984abaafd7c3b516503785c2072", b"y", b"x") is True
    assert digest_fits("sha1:CH3K3DWFFIUYJK5K7V6DWULFAN4FYIDS", b"x") is True
    assert digest_fits("SHA-256:2d711642b726b04401627ca9fbac32f5c8530fb1903cc4db02258717921a4881", b"x") is True
    assert digest_fits("md5:9dd4e461268c8034f5c8564e155c67a6", b"x") is True
    assert digest_fits("blake9:abc", b"x") is None
    assert digest_fits("sha1:short", b"x") is None
    assert digest_fits("", b"x") is None


def test_candidates_are_taken_only_where_the_one_before_leads_there(tmp_path: Path) -> None:
    """An archive that holds archives: their members look like its own. Asked by many or by one, the boundaries are the same."""
    inner = b"".join(gzip.compress(response(f"https://inner.example/{k}", os.urandom(300))) for k in range(40))
    records = [response(f"https://a.example/{k}", os.urandom(400)) for k in range(60)]
    records[20] = record("resource", "https://a.example/inner.warc.gz", inner, content_type="application/gzip")
    packed = [gzip.compress(one, 0 if k == 20 else 6) for k, one in enumerate(records)]  # stored as it is, so that its members stand in it
    path = write(tmp_path / "crawl.warc.gz", b"".join(packed))
    starts = set(np.cumsum([0, *map(len, packed)]).tolist())
    for chunk_bytes in (700, 1500, 5000, 20_000):
        guessed = candidates(path, chunk_bytes)
        expected = boundaries(path, chunk_bytes)
        assert expected[0] == 0 and set(expected) <= starts
        assert all(b - a >= chunk_bytes for a, b in itertools.pairwise(expected))
        assert boundaries(path, chunk_bytes, {start: following(path, start, chunk_bytes) for start in guessed}) == expected
        if chunk_bytes < 5000:
            assert not set(guessed) <= starts


def test_large_files_are_listed_by_many_processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in "ab":
        write(tmp_path / "web" / f"{name}.warc.gz", members([response(f"https://{name}.example/{k}", os.urandom(500)) for k in range(60)]))
    monkeypatch.setattr(warc, "CHUNK_BYTES", 4000)
    alone = [chunk.label for chunk in warc.open_warc(tmp_path / "web").chunks]
    source = warc.open_warc(tmp_path / "web")
    assert source.list_ahead is not None
    source.list_ahead(2)
    monkeypatch.setattr(warc, "boundaries", lambda path, chunk_bytes: pytest.fail("listed alone"))
    assert [chunk.label for chunk in source.chunks] == alone and len(alone) > 10
