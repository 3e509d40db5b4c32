"""Few bytes that stand for many: each is a counted reject, and the process that reads them stays under 300 MB (Parquet: 500 MB)."""

import compileall
import functools
import gzip
import json
import subprocess
import sys
import zlib
from pathlib import Path

import numpy as np
import orjson
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import craw4llm
from craw4llm.corpus import bvgraph
from craw4llm.corpus.clueweb22_records import DAMAGED, TOO_LARGE, load_offsets, parse_text, unpack
from craw4llm.corpus.json_bounds import MAX_VALUES, count_values, too_rich
from craw4llm.corpus.warc import wat_links
from craw4llm.corpus.warc_records import WarcRecord, read_records
from craw4llm.errors import InputError
from tests.craw4llm.corpus.clueweb22_writer import Doc, pack, write_clueweb22, write_records
from tests.craw4llm.corpus.warc_making import record as warc_record

MOST_BYTES = 300e6

BUILD = """
import sys
from pathlib import Path
from craw4llm.artifact import Store
from craw4llm.configs import ClueWeb22, CorpusConfig
from craw4llm.corpus.stage import run
from craw4llm.execution import Execution
from craw4llm.fingerprint import External
import json
path, out, options = sys.argv[1:]
given = External(name="corpus", path=path)
options = json.loads(options)
source = ClueWeb22(folder=given, **options) if options else given
result = run(CorpusConfig(source=source, max_reject_share=0.9), {}, Path(out), Execution(workers=1, report=lambda line: None))
peak = int(Path("/proc/self/status").read_text().partition("VmHWM:")[2].split()[0]) * 1024  # of this process alone
print(json.dumps({"peak": peak, "counts": {k: v for k, (v, _) in result.counts.items()}, "notes": dict(result.notes)}))
"""


@pytest.fixture(scope="module", autouse=True)
def compiled() -> None:
    """Bytecode, as an installation has it (the first import of a module without takes 26 MB), and what numba compiles once on a machine
    and keeps (33 MB, for the process that does it)."""
    compileall.compile_dir(Path(craw4llm.__file__).parent, quiet=1)
    scan = "from craw4llm.corpus.clueweb22_scan import scan_links; scan_links([b'{}'])"
    subprocess.run([sys.executable, "-c", scan], check=True)


def build(path: Path, tmp_path: Path, most_bytes: float = MOST_BYTES, **options: object) -> tuple[dict, Path]:
    """What a build in a process of its own says, and where it wrote."""
    out = tmp_path / f"out{len(list(tmp_path.iterdir()))}"
    out.mkdir()
    done = subprocess.run(
        [sys.executable, "-c", BUILD, str(path), str(out), json.dumps(options)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout.splitlines()[-1])
    assert said["peak"] < most_bytes, said["peak"]
    return said, out


@functools.cache
def bomb(megabytes: int) -> bytes:
    """A gzip member of so many megabytes of zeros (about a thousandth of that), made in pieces."""
    packer = zlib.compressobj(6, zlib.DEFLATED, 31)
    pieces = []
    for _ in range(megabytes):
        pieces.append(packer.compress(bytes(1 << 20)))
    return b"".join([*pieces, packer.flush()])


def test_unpack_stops_at_its_limit() -> None:
    packed = bomb(600)
    assert unpack(packed, 1 << 20) == TOO_LARGE
    exact = gzip.compress(b"x" * 1000)
    assert unpack(exact, 1000) == b"x" * 1000
    assert unpack(exact, 999) == TOO_LARGE
    assert unpack(exact[:-1], 1000) == DAMAGED
    assert unpack(exact + b"\0", 1000) == DAMAGED


def test_large_members_are_measured_first() -> None:
    large = bytes(range(256)) * (5 << 12)
    packed = gzip.compress(large, 1)
    assert unpack(packed, len(large)) == large
    assert unpack(packed, len(large) - 1) == TOO_LARGE
    for wrong in (packed[:-1], packed[:-8] + b"\0" + packed[-7:], packed + b"\0", packed[: len(packed) // 2]):
        assert unpack(wrong, len(large)) == DAMAGED


def clueweb(root: Path, layout: str = "id_first") -> tuple[Path, list[str]]:
    ids = [f"clueweb22-en0000-00-{k:05d}" for k in range(8)]
    links = [[other for other in ids if other != one][:3] for one in ids]
    return write_clueweb22(root, [Doc(one, f"http://a.example/{k}", f"text {k}", links[k]) for k, one in enumerate(ids)], layout), ids


def replaced(root: Path, kind: str, members: dict[int, bytes]) -> None:
    """Puts other gzip members in the place of some records of the one file of a kind."""
    data = next((root / kind).rglob("*.json.gz")).read_bytes()
    offsets, _ = load_offsets(next((root / kind).rglob("*.offset")))
    records = [members.get(k, data[offsets[k] : offsets[k + 1]]) for k in range(len(offsets) - 1)]
    write_records(root, kind, "en0000-00", records)


@pytest.mark.parametrize("targets", ["ids", "urls"])
def test_members_of_clueweb22_that_unpack_to_gigabytes(tmp_path: Path, targets: str) -> None:
    """Texts, links and anchors: 600 MB of zeros, 15 MB that would become half a gigabyte of lists, 20 MB of links (to be scanned)."""
    root, ids = clueweb(tmp_path / "cw", "id_first" if targets == "ids" else "five_fields")
    lists = pack(b'{"ClueWeb22-ID": "' + ids[2].encode() + b'", "Clean-Text": [' + b"[]," * (5 << 20) + b"0]}\n")
    replaced(root, "txt", {1: bomb(600), 2: lists})
    many = b",".join(b'["http://a.example/0","","","","en","%s"]' % ids[0].encode() for _ in range(450_000))
    replaced(root, "outlink", {3: bomb(600), 4: pack(b'{"ClueWeb22-ID": "' + ids[4].encode() + b'", "outlinks": [' + many + b"]}\n")})
    replaced(root, "inlink", {5: bomb(600)})
    del many, lists
    said, out = build(root, tmp_path, targets=targets, indegree="inlink" if targets == "ids" else "links")
    assert said["notes"]["rejects_by_reason"] == {"too_large": 2}
    assert said["counts"]["pages"] == 6 and said["counts"]["records"] == 8
    rejects = pq.read_table(out / "rejects.parquet").to_pydict()
    assert rejects["url"] == ids[1:3] and rejects["reason"] == ["too_large"] * 2
    # by ids: one link record and one of anchors; by URLs also the one whose 20 MB would have to become objects
    assert said["notes"]["faults"]["too_large_link_records"] == 2
    links = np.diff(np.load(out / "links_offsets.npy"))
    assert links.tolist() == ([3, 0, 1, 3, 3, 3] if targets == "ids" else [1, 0, 0, 1, 1, 1])


def test_offsets_that_lie(tmp_path: Path) -> None:
    """A record said to be longer than its file, or to be all of a large file, is a reject; a file of far too many rows is refused."""
    root, ids = clueweb(tmp_path / "cw")
    offset_file = next((root / "txt").rglob("*.offset"))
    data_file = next((root / "txt").rglob("*.json.gz"))
    offsets = load_offsets(offset_file)[0].tolist()
    with data_file.open("r+b") as stream:  # 600 MB of nothing between records 3 and 4
        tail = data_file.read_bytes()[offsets[4] :]
        stream.truncate(offsets[4] + (600 << 20))
        stream.seek(0, 2)
        stream.write(tail)
    shifted = offsets[:4] + [offset + (600 << 20) for offset in offsets[4:8]] + [9_999_999_999]
    offset_file.write_text("".join(f"{offset:010d}\n" for offset in shifted))
    said, out = build(root, tmp_path, targets="ids")
    assert said["notes"]["rejects_by_reason"] == {"cut_off": 1, "too_large": 1}
    assert pq.read_table(out / "rejects.parquet")["url"].to_pylist() == [ids[3], ids[7]]
    with offset_file.open("r+b") as stream:
        stream.truncate(2 << 30)  # a hole: it takes no room on the disk
    with pytest.raises(InputError, match=r"2,147,483,648 bytes, more than the rows of 100,000 records"):
        load_offsets(offset_file)


def test_lines_and_records_of_millions_of_values(tmp_path: Path) -> None:
    rich = b'{"url": "https://a.example/1", "text": "", "outlinks": [' + b"[]," * (5 << 20) + b"0]}\n"
    good = [json.dumps({"url": f"https://a.example/{k}", "text": "x,[{" * 300_000, "outlinks": []}).encode() + b"\n" for k in (2, 3)]
    with gzip.open(tmp_path / "pages.jsonl.gz", "wb", compresslevel=1) as stream:
        stream.writelines([good[0], rich, good[1]])
    said, out = build(tmp_path / "pages.jsonl.gz", tmp_path)
    assert said["notes"]["rejects_by_reason"] == {"too_large": 1}
    assert pq.read_table(out / "pages.parquet")["url"].to_pylist() == ["https://a.example/2", "https://a.example/3"]
    assert wat_links(rich) is None
    assert parse_text(rich, "clueweb22-en0000-00-00000", 100) == TOO_LARGE


def test_values_are_counted_outside_of_strings() -> None:
    assert count_values(rb'{"a,[{\"": [1, 2, {"b": ",,,"}], "\\": 0}') == 6
    assert count_values(orjson.dumps({"text": 'x,"[' * 1000})) == 1
    assert count_values(b'"' + b"\\\\" * (1 << 18) + b'",["\\\\\\",",{') == 4  # escapes at the border of what is looked at together
    assert count_values(b' "' + b"\\\\" * (1 << 18) + b'",["\\\\\\",",{') == 4
    assert not too_rich(b"," * 1000)
    assert too_rich(b"," * (MAX_VALUES + 1)) and not too_rich(b'"' + b"," * (2 * MAX_VALUES) + b'"')


def test_a_dictionary_of_parquet_that_every_row_means(tmp_path: Path) -> None:
    """8 kB of Parquet for 45 GB of text, with and without Arrow's own note of the type; a cell of links over 16 MB; a URL of 20 MB."""
    for k, stored in enumerate((True, False)):
        text = pa.DictionaryArray.from_arrays(pa.array(np.zeros(300, dtype=np.int32)), pa.array(["x" * (15 << 20)]))
        links = [["/a"]] * 298 + [["/b"] * 300_000, [f"/{'c' * 1000}{j}" for j in range(17_000)]]
        urls = (
            [f"https://a.example/{j:03}" for j in range(297)]
            + ["https://a.example/" + "u" * (20 << 20)]
            + ["https://a.example/y", "https://a.example/z"]
        )
        table = pa.table({"url": urls, "text": text.cast(pa.dictionary(pa.int32(), pa.string())), "outlinks": links})
        path = tmp_path / f"web{k}.parquet"
        with pq.ParquetWriter(path, table.schema, compression="zstd", store_schema=stored) as writer:
            writer.write_table(table)
        del text, links, urls, table
        said, out = build(path, tmp_path, 500e6)  # the library holds the large values of each column three times
        assert said["notes"]["rejects_by_reason"] == {"too_large": 3}
        pages = pq.read_table(out / "pages.parquet", columns=["n_chars", "cut"])
        assert len(pages) == 297 and set(pages["n_chars"].to_pylist()) == {100_000}


def test_millions_of_empty_gzip_members_within_a_record(tmp_path: Path) -> None:
    path = tmp_path / "crawl.warc.gz"
    block = b"HTTP/1.1 200 OK\r\nContent-Type: text/html\r\n\r\n<p>a page</p>"
    whole = warc_record("response", "https://a.example/", block)
    path.write_bytes(gzip.compress(whole[:-8]) + gzip.compress(b"") * 20_000 + gzip.compress(whole[-8:]) + gzip.compress(whole))
    found = list(read_records(path))
    assert [type(one) for one in found] == [WarcRecord, WarcRecord]


def test_a_bvgraph_that_announces_what_it_cannot_hold(tmp_path: Path) -> None:
    (tmp_path / "g.graph").write_bytes(b"\xff" * 10)
    lines = "nodes={}\narcs={}\nwindowsize=7\nminintervallength=4\nzetak=3\ncompressionflags=\n"
    (tmp_path / "g.properties").write_text(lines.format(4_000_000_000, 10))
    with pytest.raises(InputError, match=r"nodes=4,000,000,000, but .*g.graph has 10 bytes"):
        bvgraph.read_bvgraph(tmp_path / "g")
    (tmp_path / "g.properties").write_text(lines.format(80, 10**17))
    with pytest.raises(InputError, match=r"so many do not fit"):
        bvgraph.read_bvgraph(tmp_path / "g")
