"""Building a corpus from a ClueWeb22 folder, against the floor of its libraries in one run, on one core.

    python benchmarks/corpus_clueweb22.py            20,000 pages, 600,000 links, the shares of shared/bench/make_clueweb.py
    python benchmarks/corpus_clueweb22.py --quick    6,000 pages

The folder is written here (median of 560 words a page, 45 links a page of which a third have no document id). The floor reads the same
records and does nothing with them: isal unpacks each member, orjson parses it, texts and link lists; in processor seconds, like the build
(with the merge, the writing and the digests). Rounds alternate; ratios are medians.

Last line: JSON with floor_ratio (floor / ours, the lower of a build without and with inlink), and pages_per_s and mb_per_s (unpacked
megabytes) of one core.
"""

import argparse
import gzip
import itertools
import json
import random
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import orjson
from isal import isal_zlib

from craw4llm.artifact import Store
from craw4llm.configs import ClueWeb22, CorpusConfig
from craw4llm.corpus import clueweb22_build
from craw4llm.corpus.clueweb22_files import delivered
from craw4llm.corpus.clueweb22_records import read_offsets
from craw4llm.execution import Execution
from craw4llm.fingerprint import External

_LETTERS = "etaoinshrdlucmfwypvbgkjqxz"


def write_folder(root: Path, pages: int, per_file: int = 2000) -> None:
    """A folder of txt, outlink and inlink records."""
    rng = random.Random(0)
    words = ["".join(rng.choices(_LETTERS, k=rng.randint(2, 9))) for _ in range(20_000)]
    weights = [1 / (k + 3) for k in range(len(words))]
    pool = rng.choices(words, weights, k=400_000)
    ids = [f"clueweb22-en{k // per_file // 100:04d}-{k // per_file % 100:02d}-{k % per_file:05d}" for k in range(pages)]

    def link(target: int) -> list[Any]:
        other = ids[target] if rng.random() < 0.7 else None
        at = rng.randrange(len(pool) - 3)
        return [f"https://www.site{target % 97}.example.com/pages/{target}", f"{target:032X}", " ".join(pool[at : at + 2]), "", "en", other]

    for first in range(0, pages, per_file):
        members: dict[str, list[bytes]] = {kind: [] for kind in ("txt", "outlink", "inlink")}
        for k in range(first, min(pages, first + per_file)):
            at, n = rng.randrange(len(pool) - 3000), min(3000, int(rng.lognormvariate(6.33, 0.55)))
            about = {
                "url": f"https://www.site{k % 97}.example.com/pages/{k}",
                "urlhash": f"{k:032X}",
                "language": "en",
                "ClueWeb22-ID": ids[k],
            }
            records = {
                "txt": {"URL": about["url"] + "\n", "URL-hash": about["urlhash"], "Language": "en", "ClueWeb22-ID": ids[k]}
                | {"Clean-Text": " ".join(pool[at : at + n])},
                "outlink": about | {"outlinks": [link(rng.randrange(pages)) for _ in range(rng.randint(5, 85))]},
                "inlink": about | {"anchors": [link(rng.randrange(pages)) for _ in range(rng.randint(0, 50))]},
            }
            for kind, record in records.items():
                members[kind].append(gzip.compress((json.dumps(record) + "\n").encode(), 6))
        name = ids[first].removeprefix("clueweb22-").rpartition("-")[0]
        for kind, packed in members.items():
            folder = root / kind / "en" / name[:4] / name[:6]
            folder.mkdir(parents=True, exist_ok=True)
            ends = [0]
            for one in packed:
                ends.append(ends[-1] + len(one))
            (folder / f"{name}.json.gz").write_bytes(b"".join(packed))
            (folder / f"{name}.offset").write_text("".join(f"{end:010d}\n" for end in ends))


def floor(root: Path, kinds: tuple[str, ...]) -> tuple[float, int]:
    """(processor seconds, unpacked bytes) of unpacking and parsing all records."""
    started, size = time.process_time(), 0
    for file in delivered(root, ()):
        for kind in kinds:
            path = file.path(root, kind)
            bounds = read_offsets(file.path(root, kind, ".offset").read_bytes(), path)[0].tolist()
            data = path.read_bytes()
            for begin, end in itertools.pairwise(bounds):
                unpacked = isal_zlib.decompress(data[begin:end], 31)
                size += len(unpacked)
                orjson.loads(unpacked)
    return time.process_time() - started, size


def ours(root: Path, artifacts: Path, indegree: str) -> float:
    """Processor seconds of a whole build, its files' digests and the commit included."""
    source = ClueWeb22(folder=External(name="corpus", path=str(root)), indegree=indegree)  # type: ignore[arg-type]
    config = CorpusConfig(source=source)
    execution = Execution(root=artifacts, workers=1, report=lambda line: None)
    started = time.process_time()
    write = lambda out: clueweb22_build.build(source, out, config, execution)  # noqa: E731
    Store(artifacts).build("corpus", f"{time.time_ns():x}", version=1, config={}, inputs={}, write=write)
    return time.process_time() - started


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """floor_ratio, pages_per_s, mb_per_s; the lower ratio of a build without and with inlink."""
    pages = 6_000 if options.quick else 20_000
    with tempfile.TemporaryDirectory() as folder:
        root, artifacts = Path(folder) / "clueweb22", Path(folder) / "artifacts"
        write_folder(root, pages)
        ours(root, artifacts, "links")  # compiles what numba has not kept
        kinds = {"links": ("txt", "outlink"), "inlink": ("txt", "outlink", "inlink")}
        rows: dict[str, list[tuple[float, float, int]]] = {name: [] for name in kinds}
        for _ in range(3):
            for name, read in kinds.items():
                least, size = floor(root, read)
                rows[name].append((least, ours(root, artifacts, name), size))
    found: dict[str, Any] = {}
    for name, row in rows.items():
        spent = statistics.median(o for _, o, _ in row)
        found[name] = {
            "floor_ratio": round(statistics.median(least / o for least, o, _ in row), 2),
            "pages_per_s": round(pages / spent),
            "mb_per_s": round(row[0][2] / spent / 1e6),
        }
    least = min(row["floor_ratio"] for row in found.values())
    return {"floor_ratio": least, "pages": pages, "txt, outlink": found["links"], "txt, outlink, inlink": found["inlink"]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true")
    result = measure(parser.parse_args())
    print(f"{'':22}{'floor ratio':>12}{'pages/s/core':>14}{'MB/s/core':>11}")
    for name in ("txt, outlink", "txt, outlink, inlink"):
        row = result[name]
        print(f"{name:22}{row['floor_ratio']:>12}{row['pages_per_s']:>14,}{row['mb_per_s']:>11}")
    print(json.dumps(result))


if __name__ == "__main__":
    main()
