"""From unpacked documentation packages to a finished corpus: seconds, pages, rejects.

    python benchmarks/corpus_packages.py [--web data/demo-web/web] [--workers 2] [--root FOLDER]

The packages are a folder with web.json (craw4llm.corpus.html_tree); `craw4llm fetch demo-web` makes one of packages of Debian. All of
the corpus stage is timed, as `craw4llm run` does it: the digest of the folder, sites cut to their max_pages by reading links, extraction
in children, the merge, the digests of what was written. Last line: JSON.
"""

import argparse
import json
import tempfile
import time
from pathlib import Path
from typing import Any

from processor import cpu

from craw4llm.artifact import Store
from craw4llm.configs import CorpusConfig
from craw4llm.execution import Execution
from craw4llm.fingerprint import External
from craw4llm.runner import build, single


def measure(web: Path, root: Path, workers: int) -> dict[str, Any]:
    execution = Execution(root=root, workers=workers, report=lambda line: None)
    began, used = time.perf_counter(), cpu()
    work = single(CorpusConfig(source=External(name="corpus", path=str(web))), execution)
    if not build(work, execution):
        raise SystemExit(f"{root} holds this corpus already; give another --root")
    seconds = time.perf_counter() - began
    artifact = Store(root).open("corpus", work.fingerprint)
    return {
        "pages": artifact.count("pages"),
        "links": artifact.count("links"),
        "text_mb": round(artifact.count("text_bytes") / 1e6, 1),
        "files_mb": round(sum(path.stat().st_size for path in web.rglob("*.htm*") if path.is_file()) / 1e6),
        "rejects": artifact.manifest["notes"]["rejects_by_reason"],
        "seconds": round(seconds, 1),
        "cpu_s": round(cpu() - used, 1),
        "workers": workers,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--web", type=Path, default=Path("data/demo-web/web"))
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--root", type=Path, help="artifacts (default: a temporary folder)")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        print(json.dumps(measure(options.web, options.root or Path(folder), options.workers)))


if __name__ == "__main__":
    main()
