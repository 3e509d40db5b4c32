"""craw4llm.quick_start: a process that begins with it reads and writes what another one does, and its heap is of large pages."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = """
import json, re, sys
from craw4llm import quick_start
if sys.argv[2] == "quick":
    quick_start.load_arrow()
    quick_start.large_pages()
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
numbers = np.arange(300_000).astype(np.int64)[::-1].copy()  # 2.4 MB: of the heap, where that keeps so much
pq.write_table(pa.table({"x": numbers}), sys.argv[1])
heap = re.findall(r"\\[heap\\].*?AnonHugePages:\\s+(\\d+) kB", open("/proc/self/smaps").read(), re.S)
print(json.dumps({"sum": int(pq.read_table(sys.argv[1]).column(0).to_numpy().sum()), "huge_kb": sum(map(int, heap))}))
"""


def run(path: Path, how: str) -> dict[str, int]:
    done = subprocess.run([sys.executable, "-c", SCRIPT, str(path), how], capture_output=True, text=True, check=True)
    return dict(json.loads(done.stdout))


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="for Linux alone")
def test_it_changes_the_start_alone(tmp_path: Path) -> None:
    plain, quick = run(tmp_path / "plain.parquet", "plain"), run(tmp_path / "quick.parquet", "quick")
    assert quick["sum"] == plain["sum"] == 299_999 * 300_000 // 2
    assert (tmp_path / "plain.parquet").read_bytes() == (tmp_path / "quick.parquet").read_bytes()
    allowed = Path("/sys/kernel/mm/transparent_hugepage/enabled")
    if not allowed.exists() or "[never]" in allowed.read_text():
        pytest.skip("this kernel gives no large pages")
    assert quick["huge_kb"] >= 2048 > plain["huge_kb"]
