"""From unpacked documentation packages to a finished corpus: seconds, pages, rejects.

    python benchmarks/corpus_packages.py [--web data/demo-web/web] [--workers 2] [--root FOLDER]
    python benchmarks/corpus_packages.py --docweb FOLDER      the packages of docweb, unpacked in FOLDER/x (below)

The packages are a folder with web.json (craw4llm.corpus.html_tree); `craw4llm fetch demo-web` makes one of packages of Debian. All of
the corpus stage is timed, as `craw4llm run` does it: the digest of the folder, sites cut to their max_pages by reading links, extraction
in children, the merge, the digests of what was written. Last line: JSON.

For --docweb, `python shared/tools/build_corpus.py --work FOLDER` has fetched and unpacked them. Its table of packages, folders, addresses
and largest numbers of pages becomes a web.json; what it does beyond that (dictionaries and Mallard pages converted, filters of pages,
addresses that fold onto others) has no counterpart, so the pages are not exactly docweb's.
"""

import argparse
import importlib.util
import json
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from processor import cpu

from craw4llm.artifact import Store
from craw4llm.configs import CorpusConfig
from craw4llm.corpus.html_tree import list_files
from craw4llm.execution import Execution
from craw4llm.fingerprint import External
from craw4llm.runner import build, single

HERE = Path(__file__).resolve().parent.parent


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


def docweb(work: Path) -> Path:
    """The folder with a web.json of the packages that lie unpacked in `work`/x."""
    script = Path(os.environ.get("CRAW4LLM_SHARED", HERE.parent / "shared")) / "tools" / "build_corpus.py"
    spec = importlib.util.spec_from_file_location("build_corpus", script)
    if spec is None or spec.loader is None or not script.exists():
        sys.exit(f"{script} is not there: set CRAW4LLM_SHARED")
    table = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(table)
    sites = []
    for package, folder, base_url, options in table.sites():
        place = work / "x" / package / folder.lstrip("/")
        if list_files(place):  # a dictionary has none, nor have Mallard pages
            site = {"folder": str(place.relative_to(work / "x")), "base_url": base_url.rstrip("/") + "/", "package": package, "version": ""}
            sites.append({**site, "max_pages": options["cap"]})
    web = {"kind": "html_tree", "origin": f"{len(sites)} sites of documentation packages", "sites": sites}
    (work / "x" / "web.json").write_text(json.dumps(web))
    return work / "x"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--web", type=Path, default=Path("data/demo-web/web"))
    parser.add_argument("--docweb", type=Path, metavar="FOLDER", help="packages fetched and unpacked by shared/tools/build_corpus.py")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--root", type=Path, help="artifacts (default: a temporary folder)")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        web = docweb(options.docweb) if options.docweb else options.web
        print(json.dumps(measure(web, options.root or Path(folder), options.workers)))


if __name__ == "__main__":
    main()
