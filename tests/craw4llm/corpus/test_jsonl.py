"""JSON lines, hostile ones included."""

import gzip
import json
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from craw4llm.artifact import Artifact
from craw4llm.configs import CorpusConfig
from craw4llm.corpus import jsonl
from craw4llm.corpus.jsonl import open_jsonl
from craw4llm.corpus.reader import Corpus
from craw4llm.corpus.records import Reject, Skipped
from craw4llm.errors import ConfigError, InputError
from craw4llm.fingerprint import External
from craw4llm.stage import Stage

Build = Callable[[Stage], Artifact]


def line(k: int, **more: Any) -> bytes:
    return json.dumps({"url": f"https://a.example/{k:04}", "text": f"text {k}", "outlinks": [f"/{k + 1:04}"], **more}).encode() + b"\n"


def packed(path: Path, data: bytes) -> Path:
    if path.suffix == ".gz":
        data = gzip.compress(data[: len(data) // 2]) + gzip.compress(data[len(data) // 2 :])  # two members
    elif path.suffix == ".zst":
        data = pa.Codec("zstd").compress(data[:100], asbytes=True) + pa.Codec("zstd").compress(data[100:], asbytes=True)
    path.write_bytes(data)
    return path


def corpus_of(build: Build, path: Path, **fields: Any) -> Corpus:
    return Corpus(build(Stage(CorpusConfig(source=External(name="corpus", path=str(path)), heldout_fraction=0.0, **fields))))


def rejects(corpus: Corpus) -> list[tuple[int, str]]:
    return [(r["position"], r["reason"]) for r in pq.read_table(corpus.artifact.file("rejects.parquet")).to_pylist()]


@pytest.mark.parametrize("name", ["pages.jsonl", "pages.jsonl.gz", "pages.JSONL.zst", "pages.ndjson"])
def test_all_packings_are_read(tmp_path: Path, build: Build, name: str) -> None:
    path = packed(tmp_path / name.lower(), b"".join(line(k, doc_id=k, lang="en") for k in range(500)) + b"\n  \n")
    corpus = corpus_of(build, path)
    assert corpus.n_pages == 500
    assert corpus.texts([0, 499]) == ["text 0", "text 499"]
    assert corpus.doc_ids.to_pylist()[:2] == ["0", "1"]
    assert corpus.column("language").to_pylist()[0] == "en"
    assert corpus.artifact.manifest["notes"]["skipped"] == {"empty line": 2}
    assert corpus.artifact.count("links") == 499


def test_ranges_of_a_plain_file_give_each_line_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = b"".join(line(k, text="ü" * (k % 90)) for k in range(300))
    path = packed(tmp_path / "pages.jsonl", data)
    whole = [record for chunk in open_jsonl(path).chunks for record in chunk.read()]
    assert len(whole) == 300
    for size in (1, 97, 1000, len(data) - 1):
        monkeypatch.setattr(jsonl, "CHUNK_BYTES", size)
        chunks = list(open_jsonl(path).chunks)
        assert len({chunk.label for chunk in chunks}) == len(chunks) == -(-len(data) // size)
        if size > 1:
            assert [record for chunk in chunks for record in chunk.read()] == whole
    positions = [record.position for record in whole if not isinstance(record, Skipped)]
    assert [data[p : p + 6] for p in positions] == [b'{"url"'] * 300


def test_other_names_and_a_folder_of_files(tmp_path: Path, build: Build) -> None:
    folder = tmp_path / "web"
    (folder / "sub").mkdir(parents=True)
    for name, k in (("b.jsonl", 1), ("sub/a.jsonl.gz", 2)):
        packed(folder / name, json.dumps({"link": f"https://a.example/{k}", "body": f"text {k}", "to": ["/1"]}).encode())
    with pytest.raises(InputError, match="have no field 'url'; they have link, body, to"):
        open_jsonl(folder, sorted(folder.rglob("*.jsonl*")))
    columns = (("url", "link"), ("text", "body"), ("outlinks", "to"))
    corpus = corpus_of(build, folder, columns=columns)
    assert corpus.column("source").to_pylist() == ["b.jsonl", "sub/a.jsonl.gz"]
    assert corpus.texts([0, 1]) == ["text 1", "text 2"]
    with pytest.raises(InputError, match="has no field 'nothing', which `columns` names for doc_id"):
        corpus_of(build, folder, columns=(*columns, ("doc_id", "nothing")))
    with pytest.raises(ConfigError, match="columns is"):
        CorpusConfig(source=External(name="corpus", path="x"), columns=(("titel", "x"),))


def test_every_hostile_line_is_one_reject(tmp_path: Path, build: Build) -> None:
    bad: Sequence[tuple[bytes, str]] = [
        (b'{"url": "https://a.example/x", "text": "broken \xff"}\n', "invalid_unicode"),
        (b'{"url": "https://a.example/x", "text": "lone \\ud800"}\n', "invalid_unicode"),
        (b"{not json}\n", "not_json"),
        (b"[1, 2]\n", "not_json"),
        (b'{"url": "https://a.example/x", "text": NaN}\n', "not_json"),
        (b"[" * 100_000 + b"\n", "not_json"),
        (b'{"text": "no url"}\n', "no_url"),
        (b'{"url": "https://a.example/' + b"x" * 2_000_000 + b'", "text": "2 MB of URL"}\n', "bad_url"),
        (b'{"url": 5, "text": "x"}\n', "bad_url"),
        (b'{"url": "https://a.example/x", "text": 5}\n', "text_not_string"),
        (b'{"url": "https://a.example/x", "text": "x", "outlinks": "/y"}\n', "bad_field"),
        (b'{"url": "https://a.example/x", "text": "x", "outlinks": ["/y"], "link_flags": ["body"]}\n', "bad_field"),
        (b'{"url": "https://a.example/w", "text": "x", "outlinks": ["/y"], "anchors": []}\n', "ok"),  # none given
        (b'{"url": "https://a.example/y", "text": "x", "outlinks": ["/y"], "anchors": ["a", "b"]}\n', "links_misaligned"),
        (b'{"url": "https://a.example/z", "text": "cut o', "cut_off"),
    ]
    data, wanted = b"", []
    for k, (content, reason) in enumerate(bad):
        data += line(k)
        if reason != "ok":
            wanted.append((len(data), reason))
        data += content
    corpus = corpus_of(build, packed(tmp_path / "hostile.jsonl", data))
    assert rejects(corpus) == wanted
    assert corpus.n_pages == len(bad) + 1
    nul = packed(
        tmp_path / "nul.jsonl", b'{"url": "https://a.example/n", "text": "a\\u0000b", "outlinks": ["/\\u0000", 7, null, {"a": 1}]}\n'
    )
    corpus = corpus_of(build, nul)
    assert corpus.text(0) == "a\0b"  # NUL is a character like others
    assert corpus.artifact.count("unusable_links") == 3


def test_a_cut_gzip_file_keeps_what_can_be_read(tmp_path: Path, build: Build) -> None:
    texts = [f"{k * 2654435761 % 2**32:032b}" * 20 for k in range(6_000)]
    content = gzip.compress(b"".join(line(k, text=text) for k, text in enumerate(texts)))
    path = tmp_path / "pages.jsonl.gz"
    path.write_bytes(content[: len(content) // 2])
    corpus = corpus_of(build, path)
    assert [r for _, r in rejects(corpus)] == ["cut_off"]
    assert 1_000 < corpus.n_pages < 6_000
    assert corpus.texts(range(corpus.n_pages)) == texts[: corpus.n_pages]


@pytest.mark.parametrize("seed", range(4))
def test_a_damaged_gzip_member_never_becomes_wrong_text(tmp_path: Path, build: Build, seed: int) -> None:
    """Deflate goes on after damage with text that looks right; only the checksum at the member's end tells."""
    texts = [f"{k * 2654435761 % 2**32:032b}" * 20 for k in range(3_000)]
    members = [
        bytearray(gzip.compress(b"".join(line(k, text=texts[k]) for k in range(first, first + 1000)), 6, mtime=0))
        for first in range(0, 3000, 1000)
    ]
    at = 2000 + 1500 * seed
    members[1][at] ^= 1 << seed
    path = tmp_path / "pages.jsonl.gz"
    path.write_bytes(b"".join(members))
    corpus = corpus_of(build, path)
    assert corpus.texts(range(corpus.n_pages)) == texts[:1000]
    assert [r for _, r in rejects(corpus)] == ["damaged"]


def test_cases_of_invalid_unicode_in_a_file(shared: Path, build: Build, tmp_path: Path) -> None:
    """BL-08: the two files as they are: what is no Unicode is rejected, everything else is kept byte for byte."""
    corpus = corpus_of(build, shared / "cases" / "BL-08" / "docs.jsonl")
    lines = [json.loads(text) for text in (shared / "cases" / "BL-08" / "docs.jsonl").read_text().splitlines()]
    assert [reason for _, reason in rejects(corpus)] == ["invalid_unicode"]
    kept = dict(zip(corpus.urls.to_pylist(), corpus.texts(range(corpus.n_pages)), strict=True))
    assert kept == {entry["url"]: entry["text"] for entry in lines[1:]}
    raw = (shared / "cases" / "BL-08" / "invalid_utf8.jsonl").read_bytes()
    bad = sum(1 for text in raw.splitlines() if not _is_utf8(text))
    both = packed(tmp_path / "both.jsonl", raw + b"".join(line(k) for k in range(10)))
    corpus = corpus_of(build, both)
    assert bad > 0
    assert [reason for _, reason in rejects(corpus)] == ["invalid_unicode"] * bad + ["not_json"]  # a line that lost its end


def _is_utf8(data: bytes) -> bool:
    try:
        data.decode()
    except UnicodeDecodeError:
        return False
    return True


def test_huge_lines_and_a_gzip_bomb_stay_within_bounds(tmp_path: Path) -> None:
    """A 15 MB page is cut like any long text; a 50 MB page and a bomb are rejects; all in under 300 MB."""
    page = json.dumps({"url": "https://a.example/big", "text": "012345678\U0001f600" * 1_200_000}, ensure_ascii=False).encode() + b"\n"
    with gzip.open(tmp_path / "huge.jsonl.gz", "wb", compresslevel=1) as stream:
        stream.write(line(0))
        stream.write(page)
        stream.write(b'{"url": "https://a.example/too-big", "text": "')
        for _ in range(50):
            stream.write(b"x" * (1 << 20))
        stream.write(b'"}\n')
        stream.write(line(1))
        for _ in range(1100):  # no end of line for more than MAX_SKIPPED_BYTES
            stream.write(b"\0" * (1 << 20))
        stream.write(b"\n" + line(2))
    del page
    code = (
        "import sys; from pathlib import Path\n"
        "from craw4llm.configs import CorpusConfig; from craw4llm.corpus.stage import run\n"
        "from craw4llm.execution import Execution; from craw4llm.fingerprint import External\n"
        "path, out = sys.argv[1:]\n"
        "config = CorpusConfig(source=External(name='corpus', path=path), max_reject_share=0.9)\n"
        "run(config, {}, Path(out), Execution(workers=1, report=lambda line: None))\n"
        "print(Path('/proc/self/status').read_text().partition('VmHWM:')[2].split()[0])\n"
    )
    out = tmp_path / "out"
    out.mkdir()
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "huge.jsonl.gz"), str(out)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) * 1024 < 300e6  # VmHWM: unlike ru_maxrss, of this process alone
    pages = pq.read_table(out / "pages.parquet").to_pydict()
    assert pages["url"] == ["https://a.example/0000", "https://a.example/0001", "https://a.example/big"]
    assert pages["cut"] == [False, False, True]
    assert pages["n_chars"][2] == 100_000
    assert pq.read_table(out / "rejects.parquet")["reason"].to_pylist() == ["too_large", "too_large", "damaged"]


def test_first_lines_may_be_bad(tmp_path: Path) -> None:
    path = packed(tmp_path / "pages.jsonl", b"\xff\n[1]\n" + line(0))
    records = [record for chunk in open_jsonl(path).chunks for record in chunk.read()]
    assert [record.reason for record in records if isinstance(record, Reject)] == ["invalid_unicode", "not_json"]
    assert len(records) == 3
