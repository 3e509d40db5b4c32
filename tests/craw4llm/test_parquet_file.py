"""craw4llm.parquet_file against pyarrow.parquet: the same bytes, the same tables."""

import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from craw4llm.parquet_file import ParquetFile, write

TABLE = pa.table(
    {
        "page": pa.array(range(1000), pa.uint32()),
        "rank": pa.array([None if k % 3 else k for k in range(1000)], pa.uint32()),
        "score": pa.array([k / 7 for k in range(1000)], pa.float32()),
        "url": pa.array([f"http://a.example/{k % 50}" for k in range(1000)]),
    }
)


@pytest.mark.parametrize("dictionary", [True, False, ["rank", "url"]])
@pytest.mark.parametrize("table", [TABLE, TABLE.slice(0, 0)])
def test_bytes_are_those_of_pyarrow(tmp_path: Path, table: pa.Table, dictionary: bool | list[str]) -> None:
    write(table, tmp_path / "ours", row_group_rows=300, dictionary=dictionary)
    pq.write_table(table, tmp_path / "theirs", row_group_size=300, use_dictionary=dictionary, compression="zstd")
    assert (tmp_path / "ours").read_bytes() == (tmp_path / "theirs").read_bytes()


def test_columns_and_row_groups(tmp_path: Path) -> None:
    pq.write_table(TABLE, tmp_path / "t", row_group_size=300)
    file = ParquetFile(tmp_path / "t")
    assert file.schema.equals(TABLE.schema) and file.row_group_rows == [300, 300, 300, 100]
    for columns in (["page"], ["url", "rank"], TABLE.schema.names):
        assert file.read(columns).equals(TABLE.select(columns))
        assert file.read_row_group(2, columns).equals(TABLE.select(columns).slice(600, 300))
    with pytest.raises(KeyError, match="no column pages; there are page, rank"):
        file.read(["page", "pages"])
    with pytest.raises(FileNotFoundError):
        ParquetFile(tmp_path / "none")


def test_a_write_that_fails_says_so(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    with pytest.raises(OSError, match="folder"):
        write(TABLE, tmp_path / "folder", row_group_rows=10)
    if Path("/dev/full").exists():
        with pytest.raises(OSError, match="No space left"):
            write(TABLE, Path("/dev/full"), row_group_rows=10)


def test_what_it_does_not_import() -> None:
    script = "import sys, craw4llm.parquet_file; print(*(m for m in ('ssl', 'pyarrow.fs', 'pyarrow.dataset') if m in sys.modules))"
    assert subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout.split() == []
