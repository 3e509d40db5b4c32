"""Writes small ClueWeb22 folders for tests: one gzip member a record, .offset files beside the data.

write_clueweb22(root, [Doc("clueweb22-en0000-00-00000", "http://a.example/", "text", ["clueweb22-en0000-00-00001", None])])
"""

import gzip
import json
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

LAYOUTS = ("id_first", "six_fields", "five_fields")


@dataclass
class Doc:
    """text None: no txt record. links: document ids (None: a null id; a URL: a link without an id); None: no outlink record."""

    id: str
    url: str
    text: str | None
    links: Sequence[str | None] | None = ()


def pack(record: object) -> bytes:
    """One record as a gzip member; bytes are taken as they are."""
    line = record if isinstance(record, bytes) else (json.dumps(record, ensure_ascii=False) + "\n").encode()
    return gzip.compress(line, mtime=0)


def write_records(root: Path, kind: str, name: str, members: Sequence[bytes]) -> Path:
    """The files of one kind and name from packed records; returns the data file."""
    language = name.partition("-")[0][:-4]
    folder = root / kind / language / name[: len(language) + 2] / name.partition("-")[0]
    folder.mkdir(parents=True, exist_ok=True)
    offsets = [0]
    for member in members:
        offsets.append(offsets[-1] + len(member))
    (folder / f"{name}.offset").write_text("".join(f"{offset:010d}\n" for offset in offsets))
    (folder / f"{name}.json.gz").write_bytes(b"".join(members))
    return folder / f"{name}.json.gz"


def entry(layout: str, doc_id: str | None, url: str) -> list[str | None]:
    rest: list[str | None] = [url, "F" * 32, 'an anchor, "quoted" \\ [x]', "", "en"]
    return {"id_first": [doc_id, *rest], "six_fields": [*rest, doc_id], "five_fields": rest}[layout]


def write_clueweb22(root: Path, docs: Sequence[Doc], layout: str = "id_first", kinds: Sequence[str] = ("txt", "outlink", "inlink")) -> Path:
    """Files named by the ids of `docs`; records that no document fills take no bytes."""
    urls = {doc.id: doc.url for doc in docs}
    linked_by: dict[str, list[str]] = defaultdict(list)
    for doc in docs:
        for link in doc.links or ():
            linked_by[link or ""].append(doc.id)
    files: dict[str, dict[int, Doc]] = defaultdict(dict)
    for doc in docs:
        name, _, record = doc.id.removeprefix("clueweb22-").rpartition("-")
        files[name][int(record)] = doc
    for name, by_record in files.items():
        packed: dict[str, list[bytes]] = {kind: [] for kind in ("txt", "outlink", "inlink")}
        for number in range(max(by_record) + 1):
            doc = by_record.get(number)
            text = links = anchors = b""
            if doc is not None:
                about = {"URL": doc.url + "\n", "URL-hash": "F" * 32, "Language": "en", "ClueWeb22-ID": doc.id}
                low = {"url": doc.url, "urlhash": "F" * 32, "language": "en", "ClueWeb22-ID": doc.id}
                text = b"" if doc.text is None else pack({**about, "Clean-Text": doc.text})
                if doc.links is not None:
                    entries = [
                        entry(layout, None, link)
                        if link and "://" in link
                        else entry(layout, link, urls.get(link or "", "http://gone.example/"))
                        for link in doc.links
                    ]
                    links = pack({**low, "outlinks": entries})
                if linked_by[doc.id]:
                    anchors = pack({**low, "anchors": [entry(layout, source, urls[source]) for source in linked_by[doc.id]]})
                else:
                    anchors = pack(b"\n")
            for kind, record in (("txt", text), ("outlink", links), ("inlink", anchors)):
                packed[kind].append(record)
        for kind in kinds:
            write_records(root, kind, name, packed[kind])
    return root
