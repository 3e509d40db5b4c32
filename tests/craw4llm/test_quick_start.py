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
    quick_start.begin()
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
if sys.argv[2] == "quick":
    quick_start.end()
numbers = np.arange(300_000).astype(np.int64)[::-1].copy()  # 2.4 MB: of the heap, where that keeps so much
pq.write_table(pa.table({"x": numbers}), sys.argv[1])
for _ in range(5):  # Python's arenas are made and given back
    assert sum(map(len, [str(number) for number in range(400_000)])) == 2_288_890
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


def test_memory_of_small_objects_is_given_back() -> None:
    """Also what came from the heap, and again and again."""
    script = """
import gc, re, sys
from craw4llm import quick_start
if sys.argv[1] == "quick":
    quick_start.begin()
early = [(number, [number]) for number in range(200_000)]
if sys.argv[1] == "quick":
    quick_start.end()
assert gc.isenabled()
def resident_mb():
    return int(re.search(r"VmRSS:\\s+(\\d+) kB", open("/proc/self/status").read())[1]) >> 10
before = resident_mb()
del early
freed = before - resident_mb()
for turn in range(6):
    held = [(number, [number]) for number in range(500_000)]
    most = resident_mb()
    assert sum(row[1][0] for row in held) == 500_000 * 499_999 // 2
    del held
print(freed, most - before, resident_mb() - before)
"""
    for how in ("plain", "quick"):
        done = subprocess.run([sys.executable, "-c", script, how], capture_output=True, text=True, check=True)
        freed, most, after = map(int, done.stdout.split())
        assert freed > 5 and 40 < most < 120 and after < 20, (how, freed, most, after)
