import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest

from craw4llm.artifact import Artifact
from craw4llm.configs import CorpusConfig
from craw4llm.corpus.parquet import CHUNK_ROWS, open_parquet
from craw4llm.corpus.reader import Corpus
from craw4llm.corpus.stage import run
from craw4llm.errors import InputError
from craw4llm.execution import Execution
from craw4llm.fingerprint import External
from craw4llm.stage import Stage

WriteParquet = Callable[..., Path]
Build = Callable[[Stage], Artifact]


def test_package_becomes_the_source_and_other_columns_are_ignored(parquet: WriteParquet, build: Build) -> None:
    path = parquet(
        [("https://a.example/", "one", []), ("https://b.example/", "two", None)],
        extra={"package": ["alpha", None], "title": ["a", "b"], "signals": ["not", "integers"]},
    )
    corpus = Corpus(build(Stage(CorpusConfig(source=External(name="corpus", path=str(path))))))
    assert corpus.column("source").to_pylist() == ["alpha", "web.parquet"]


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"url": ["https://a.example/"], "text": ["x"]}, "no column 'outlinks'; its columns are: url \\(string\\), text \\(string\\)"),
        ({"url": ["https://a.example/"], "text": [12345], "outlinks": [["https://b.example/"]]}, "the column 'text' of .* is int64"),
        ({"url": ["https://a.example/"], "text": ["x"], "outlinks": ["https://b.example/"]}, "the column 'outlinks' of .* is string"),
        ({"url": [b"https://a.example/"], "text": ["x"], "outlinks": [["y"]]}, "the column 'url' of .* is binary"),
    ],
)
def test_wrong_columns_are_named(tmp_path: Path, columns: dict[str, list[object]], message: str) -> None:
    path = tmp_path / "web.parquet"
    pq.write_table(pa.table(columns), path)
    with pytest.raises(InputError, match=message) as raised:
        open_parquet(path)
    assert "url (string), text (string) and outlinks (list of strings)" in str(raised.value)


@pytest.mark.parametrize("kind", [pa.large_string(), pa.dictionary(pa.int32(), pa.string())])
def test_other_string_types_are_read(tmp_path: Path, build: Build, kind: pa.DataType) -> None:
    path = tmp_path / "web.parquet"
    urls = pa.array(["https://b.example/", "https://a.example/"], pa.string()).cast(kind)
    texts = pa.array(["same", "same"], pa.string()).cast(kind)
    links = pa.array([["https://a.example/"], []], pa.large_list(pa.string()))
    pq.write_table(pa.table({"url": urls, "text": texts, "outlinks": links}), path)
    artifact = build(Stage(CorpusConfig(source=External(name="corpus", path=str(path)))))
    assert (artifact.count("pages"), artifact.count("links")) == (2, 1)


def test_a_file_that_is_no_parquet_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "web.parquet"
    path.write_bytes(b"not parquet at all")
    with pytest.raises(InputError, match="cannot be read as Parquet"):
        open_parquet(path)


def test_a_damaged_file_is_refused(parquet: WriteParquet, tmp_path: Path) -> None:
    path = parquet([(f"https://a.example/{k}", f"text {k} " * 50, []) for k in range(3000)], row_group_size=1000)
    data = bytearray(path.read_bytes())
    middle = len(data) // 2
    data[middle : middle + 4000] = b"\xff" * 4000
    path.write_bytes(data)
    out = tmp_path / "out"
    out.mkdir()
    with pytest.raises(InputError, match="damaged after row"):
        run(CorpusConfig(source=External(name="corpus", path=str(path))), {}, out, Execution(workers=1, report=lambda line: None))


def test_chunks_are_row_groups_or_ranges_of_their_rows(parquet: WriteParquet, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("craw4llm.corpus.parquet.CHUNK_ROWS", 400)
    assert CHUNK_ROWS > 400
    path = parquet([(f"https://a.example/{k}", "x", []) for k in range(1501)], row_group_size=1000)
    source = open_parquet(path)
    chunks = list(source.chunks)
    assert source.records == 1501
    assert [chunk.records for chunk in chunks] == [400, 400, 200, 400, 101]
    assert chunks[-1].label == "web.parquet, rows 1,400 to 1,500"
    read = [record for chunk in chunks for record in chunk.read()]
    assert [(page.position, page.url) for page in read] == [(k, f"https://a.example/{k}") for k in range(1501)]  # type: ignore[union-attr]


def test_a_giant_text_is_rejected_and_the_optional_columns_are_read(parquet: WriteParquet, build: Build) -> None:
    rows = [(f"https://a.example/{k}", "x" * (17 << 20) if k == 3 else "x", ["/1", "/2"]) for k in range(9)]
    extra = {
        "doc_id": list(range(9)),
        "lang": ["de"] * 9,
        "score": [float("nan") if k == 1 else k / 8 for k in range(9)],
        "anchors": [["one", None]] * 9,
        "link_flags": pa.array([[1, 2]] * 9, pa.list_(pa.uint8())),
        "signals": pa.array([k for k in range(9)], pa.uint16()),
    }
    corpus = Corpus(build(Stage(CorpusConfig(source=External(name="corpus", path=str(parquet(rows, extra)))))))
    rejects = pq.read_table(corpus.artifact.file("rejects.parquet")).to_pylist()
    assert rejects == [{"source": "web.parquet", "position": 3, "url": "https://a.example/3", "reason": "too_large"}]
    assert corpus.find_doc_ids(["0", "3", "8"]).tolist() == [0, -1, 7]
    assert corpus.column("language").to_pylist() == ["de"] * 8
    assert corpus.column("score").to_pylist() == [0.0, None, 0.25, 0.5, 0.625, 0.75, 0.875, 1.0]
    assert corpus.signals.tolist() == [0, 1, 2, 4, 5, 6, 7, 8]
    assert corpus.anchors([0]) == ["one", None]
    flags = corpus.link_flags([0])
    assert flags is not None
    assert flags.tolist() == [1, 2]


def test_a_folder_of_files_is_one_corpus(parquet: WriteParquet, tmp_path: Path, build: Build) -> None:
    folder = tmp_path / "many"
    for name in ("b", "a/c"):
        path = folder / f"{name}.parquet"
        path.parent.mkdir(parents=True, exist_ok=True)
        parquet([(f"https://{name[0]}.example/{k}", name, ["https://a.example/1"]) for k in range(3)]).rename(path)
    corpus = Corpus(build(Stage(CorpusConfig(source=External(name="corpus", path=str(folder))))))
    assert corpus.n_pages == 6
    assert corpus.column("source").to_pylist() == ["a/c.parquet"] * 3 + ["b.parquet"] * 3
    assert corpus.artifact.manifest["notes"]["origin"] == "2 Parquet files of many, 6 rows"


def test_docweb_counts(shared: Path, tmp_path: Path) -> None:
    """Figures of corpus/README.md of the reference data: pages, hosts, links, of which resolve inside."""
    path = shared / "corpus" / "docweb.parquet"
    out = tmp_path / "out"
    out.mkdir()
    started = time.monotonic()
    result = run(CorpusConfig(source=External(name="corpus", path=str(path))), {}, out, Execution(workers=2, report=lambda line: None))
    seconds = time.monotonic() - started
    counts = {name: value for name, (value, _) in result.counts.items()}
    assert counts["pages"] == counts["records"] == 30_145
    assert counts["rejects"] == 0
    assert counts["hosts"] == 184
    assert counts["links"] == 473_534
    assert counts["links"] + counts["dead_link_uses"] == 858_968
    assert 0.008 < counts["heldout_pages"] / 30_145 < 0.0115  # 1%, of the pages with enough text
    given = pq.read_table(path, columns=["url", "text"])
    pages = pq.read_table(out / "pages.parquet")
    assert pages["url"].to_pylist() == given["url"].to_pylist()  # given in the order of URLs
    assert pages["n_bytes"].to_pylist() == pc.binary_length(given["text"]).to_pylist()
    indegree = np.load(out / "indegree.npy")
    assert indegree[:30_145].max() == 6_089  # the Sphinx home page
    assert indegree.sum(dtype=np.int64) == 858_968
    assert seconds < 120, f"{seconds:.0f} s; about 4 s were measured on two free cores"
