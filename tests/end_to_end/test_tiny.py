"""The shipped experiment `tiny` on real pages: a cut of docweb with the reference scorer, and the GPT-NeoX tokenizer up to the shards."""

import os
import subprocess
import sys
from pathlib import Path

import pyarrow.compute as pc
import pyarrow.csv
import pyarrow.parquet as pq
import pytest

PROJECT = Path(__file__).resolve().parents[2]
PACKAGES = ("debian-handbook", "git-doc", "postgresql-doc-15", "sqlite3-doc", "python3.11-doc", "docutils-doc", "dict-jargon")


@pytest.fixture(scope="module")
def cut(shared: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The pages of seven packages of docweb (about 3,000), as a Parquet file."""
    table = pq.read_table(shared / "corpus" / "docweb.parquet")
    table = table.filter(pc.is_in(table["package"], value_set=pyarrow.array(PACKAGES)))
    path = tmp_path_factory.mktemp("docweb") / "cut.parquet"
    pq.write_table(table, path)
    return path


def tiny(root: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "craw4llm", "run", "tiny", "--root", str(root), *arguments],
        cwd=PROJECT,
        env={k: v for k, v in os.environ.items() if k != "CRAW4LLM_EXPERIMENTS"},
        capture_output=True,
        text=True,
    )


@pytest.fixture(scope="module")
def settings(cut: Path, shared: Path) -> list[str]:
    values = {"corpus": cut, "scorer": shared / "scorer" / "docweb_hq.ftz", "pages": 100, "seed_count": 10, "train_tokens": 40_960}
    return [part for name, value in values.items() for part in ("--set", f"{name}={value}")]


def test_tiny_runs_on_real_pages(settings: list[str], tmp_path_factory: pytest.TempPathFactory) -> None:
    root = tmp_path_factory.mktemp("tiny") / "root"
    done = tiny(root, *settings)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "77 of 77 stages built" in done.stdout
    (folder,) = (root / "report").glob("[0-9a-f]*")
    arms = pyarrow.csv.read_csv(folder / "tables" / "arms.csv").to_pylist()
    assert len(arms) == 11
    for arm in arms:
        assert arm["replicates"] == 2
        assert 0.5 < arm["bits_per_byte_mean"] < 8
        assert 90 <= arm["kept_pages"] <= 100  # pages without text are dropped from the crawled ones
    text = (folder / "report.html").read_text()
    for word in ("equal_pages", "equal_fetches", "oracle", "bits per byte", "docweb_hq"):
        assert word in text, word


def test_the_neox_tokenizer_up_to_the_shards(settings: list[str], shared: Path, tmp_path: Path) -> None:
    more = ["--set", f"tokenizer={shared / 'tokenizer' / '20B_tokenizer.json'}", "--jobs", "1"]
    for stage in ("corpus", "scorer", "tokenizer", "quality.crawl", "quality.equal_pages.select", "quality.equal_pages.tokenize"):
        done = tiny(tmp_path / "root", *settings, *more, "--only", stage)
        assert done.returncode == 0, done.stderr[-3000:]
    (index,) = (tmp_path / "root" / "tokenize").glob("[0-9a-f]*/shards/index.json")
    assert '"ndarray:uint16:257"' in index.read_text()
