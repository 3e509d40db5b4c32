"""Exports: every kept page, in order, as JSON lines that other tools read; and the command."""

import gzip
import json

import pyarrow as pa
import pytest
from click.testing import CliRunner

from craw4llm.__main__ import cli
from craw4llm.configs import CrawlConfig, SelectConfig
from craw4llm.errors import ArtifactError, ConfigError
from craw4llm.fingerprint import External
from craw4llm.selection.export import export
from craw4llm.stage import Stage

URL = "https://x.example/"
TEXTS = {"a": "two\nlines, żółć 日本", "b": 'quotes " and \\', "c": "", "d": "\u2028 separators \x00"}


@pytest.fixture
def selection(build, make_web, make_table, tmp_path):
    names = list(TEXTS)
    web = make_web([(URL + n, TEXTS[n], [URL + m for m in names]) for n in names])
    seeds = tmp_path / "seeds.txt"
    seeds.write_text(f"{URL}d\n")
    table = make_table({URL + "a": 0.25, URL + "d": 0.5})
    crawl = Stage(CrawlConfig(policy="breadth_first", budget_pages=4, seeds=External(name="seeds", path=str(seeds))), corpus=web)
    return build(Stage(SelectConfig(pool="crawled"), corpus=web, crawl=crawl, scorer=table))


def read(path):
    data = path.read_bytes()
    if path.name.endswith(".zst"):
        data = pa.CompressedInputStream(pa.BufferReader(data), "zstd").read()
    elif path.name.endswith(".gz"):
        data = gzip.decompress(data)
    return [json.loads(line) for line in data.decode().removesuffix("\n").split("\n")]


@pytest.mark.parametrize("name", ["out.jsonl", "out.jsonl.gz", "deep/er/out.jsonl.zst"])
def test_all_kept_pages_in_order(selection, tmp_path, name):
    assert export(selection, tmp_path / name) == 3
    corpus = selection.input("corpus").fingerprint
    assert read(tmp_path / name) == [
        {"text": TEXTS["d"], "url": URL + "d", "id": f"{corpus}/3", "page": 3, "rank": 0, "score": 0.5, "crawl_rank": 0},
        {"text": TEXTS["a"], "url": URL + "a", "id": f"{corpus}/0", "page": 0, "rank": 1, "score": 0.25, "crawl_rank": 1},
        {"text": TEXTS["b"], "url": URL + "b", "id": f"{corpus}/1", "page": 1, "rank": 2, "crawl_rank": 2},
    ]
    again = tmp_path / f"again-{name.replace('/', '-')}"
    export(selection, again)
    assert again.read_bytes() == (tmp_path / name).read_bytes()
    assert [p.name for p in (tmp_path / name).parent.iterdir() if "unfinished" in p.name] == []


def test_what_cannot_be_exported(selection, tmp_path):
    with pytest.raises(ConfigError, match=r"expected a name that ends with \.jsonl\.zst"):
        export(selection, tmp_path / "out.zst")
    (tmp_path / "out.jsonl").write_text("mine")
    with pytest.raises(ConfigError, match="is there already"):
        export(selection, tmp_path / "out.jsonl")
    with pytest.raises(ArtifactError, match="is of the stage crawl"):
        export(selection.input("crawl"), tmp_path / "new.jsonl")


def test_commands(selection, tmp_path):
    """`export` by the beginning of a fingerprint; `show page` tells what became of a page."""
    root = ["--root", str(selection.root)]
    done = CliRunner().invoke(cli, ["export", selection.fingerprint[:6], "--out", str(tmp_path / "o.jsonl.zst"), *root])
    assert done.exit_code == 0 and done.output.startswith("3 pages: "), done.output
    missing = CliRunner().invoke(cli, ["export", "ffffffffffff", "--out", str(tmp_path / "p.jsonl"), *root])
    assert isinstance(missing.exception, ArtifactError) and selection.fingerprint in str(missing.exception)
    shown = CliRunner().invoke(cli, ["show", "page", "HTTPS://x.example/a", *root]).output
    assert f"{URL}a\ncorpus {selection.input('corpus').fingerprint}: page 0, {len(TEXTS['a'].encode())} bytes of text\n" in shown
    assert f"breadth_first: crawled at rank 1 in iteration 1, fetch 1, first linked from {URL}d (depth 1)" in shown
    assert f"select {selection.fingerprint}: selected at rank 1, score 0.25" in shown
    assert "not selected: empty" in CliRunner().invoke(cli, ["show", "page", URL + "c", *root]).output
    unknown = CliRunner().invoke(cli, ["show", "page", URL + "zzz", *root])
    assert isinstance(unknown.exception, ArtifactError) and "1 corpora looked at" in str(unknown.exception)
    assert isinstance(CliRunner().invoke(cli, ["show", "page", *root]).exception, ConfigError)
