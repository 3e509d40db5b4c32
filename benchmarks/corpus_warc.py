"""Building a corpus from WARC: processor time against the libraries alone, in one run on one core.

    python benchmarks/corpus_warc.py [--quick] [--rounds 3]

The archive: the 85 HTML pages of four samples of $CRAW4LLM_SHARED/web_samples (default ../shared) with their requests and metadata, in
copies with addresses of their own. Each turn starts a child (0.08 s, in the figures). Everything is read, in turns, by

    build    the corpus stage: framing, digests, extraction in a child within limits, links with anchors and places, the artifact
    read     the same up to the records: what WARC adds to a build
    floor    what cannot be left out, in one process, unprotected and unchecked: FastWARC reads, resiliparse decodes and extracts the main
             text, links are found by the same scan as ours (no library at hand finds them in linear time), ada parses each address, zstd
             packs the text
    links    the floor without ada and zstd
    text     FastWARC and resiliparse alone: decoding and main text, no links

Last line: JSON; floor_ratio = floor / build and read_ratio = links / read have our link scan on both sides; text_ratio = text / read and
text_build_ratio = text / build have links on our side alone.
"""

import argparse
import contextlib
import gzip
import json
import os
import shutil
import statistics
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ada_url
import pyarrow as pa
from fastwarc.warc import ArchiveIterator, WarcRecordType
from processor import cpu
from resiliparse.extract.html2text import extract_plain_text
from resiliparse.parse.encoding import bytes_to_str, detect_encoding

from craw4llm.configs import CorpusConfig
from craw4llm.corpus.html_links import read_markup
from craw4llm.corpus.html_object import object_file
from craw4llm.corpus.records import Page
from craw4llm.corpus.stage import run
from craw4llm.corpus.warc import open_warc
from craw4llm.execution import Execution
from craw4llm.fingerprint import External

SAMPLES = ("fastwarc-warcfile.warc.gz", "dolma-sample-0000.warc.gz", "dolma-sample-0001.warc.gz", "bl-govuk.warc.gz")
ZSTD = pa.Codec("zstd")
RATIOS = {
    "floor_ratio": "floor / build: libraries with our link scan, against the whole build",
    "read_ratio": "links / read: the same without addresses and packing, against reading alone",
    "text_ratio": "text / read: libraries that find no links, against reading alone",
    "text_build_ratio": "text / build: the same against the whole build",
}


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """options: folder (a Path, for the archive and what is built), quick, rounds."""
    object_file()  # compiled once a machine: not a build's time
    path = options.folder / "web.warc.gz"
    write_archive(path, copies=12 if options.quick else 24)
    work: dict[str, Callable[[], int]] = {
        "build": lambda: build(path, options.folder),
        "read": lambda: sum(isinstance(one, Page) for chunk in open_warc(path).chunks for one in chunk.read()),
        "floor": lambda: libraries(path, links=True, stored=options.folder / "floor"),
        "links": lambda: libraries(path, links=True),
        "text": lambda: libraries(path),
    }
    spent: dict[str, list[float]] = {name: [] for name in work}
    pages = {}
    for _ in range(options.rounds):
        for name, do in work.items():
            began = cpu()
            pages[name] = do()
            spent[name].append(cpu() - began)
    assert pages["read"] == pages["floor"] == pages["text"], pages  # the build leaves out two addresses that are there twice

    def ratio(floor: str, ours: str) -> float:
        return round(statistics.median(f / o for f, o in zip(spent[floor], spent[ours], strict=True)), 2)

    built = statistics.median(spent["build"])
    return {
        "floor_ratio": ratio("floor", "build"),
        "read_ratio": ratio("links", "read"),
        "text_ratio": ratio("text", "read"),
        "text_build_ratio": ratio("text", "build"),
        "pages": pages["build"],
        "pages_per_s": round(pages["build"] / built),
        "warc_mb_per_s": round(path.stat().st_size / 1e6 / built, 2),
        "us_per_page": {name: round(1e6 * statistics.median(times) / pages["read"]) for name, times in spent.items()},
    }


def build(path: Path, folder: Path) -> int:
    out = folder / "out"
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir()
    config = CorpusConfig(source=External(name="corpus", path=str(path)))
    return int(run(config, {}, out, Execution(root=folder, workers=1, report=lambda line: None)).counts["pages"][0] or 0)


def libraries(path: Path, links: bool = False, stored: Path | None = None) -> int:
    count = 0
    with (stored or Path(os.devnull)).open("wb") as stream:
        for record in ArchiveIterator(str(path), record_types=WarcRecordType.response):
            if record.http_headers is None or record.http_headers.status_code != 200 or record.http_content_type != "text/html":
                continue
            data = record.reader.read()
            page = bytes_to_str(data, record.http_charset or detect_encoding(data))
            text = extract_plain_text(page, main_content=True)
            found = read_markup(page).links if links else []
            if stored is not None:
                url = record.headers["WARC-Target-URI"]
                for link in set(found):
                    with contextlib.suppress(ValueError):
                        str(ada_url.URL(link, base=url).href)
                stream.write(ZSTD.compress(text.encode(), asbytes=True))
            count += 1
    return count


def write_archive(path: Path, copies: int) -> None:
    folder = Path(os.environ.get("CRAW4LLM_SHARED", "../shared")) / "web_samples"
    with path.open("wb") as stream:
        for copy in range(copies):
            for name in SAMPLES:
                for record in ArchiveIterator(str(folder / name), parse_http=False):
                    headers = [
                        (key, f"{value}?copy={copy}" if key == "WARC-Target-URI" else value) for key, value in record.headers.items()
                    ]
                    head = "".join(f"{key}: {value}\r\n" for key, value in headers)
                    raw = b"WARC/1.0\r\n" + head.encode() + b"\r\n" + record.reader.read() + b"\r\n\r\n"
                    stream.write(gzip.compress(raw, 6, mtime=0))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        options.folder = Path(folder)
        found = measure(options)
    for name, microseconds in found["us_per_page"].items():
        print(f"{name:8}{microseconds:>8,} us a page")
    for name, what in RATIOS.items():
        print(f"{found[name]:.2f}  {what}")
    print(json.dumps(found))


if __name__ == "__main__":
    main()
