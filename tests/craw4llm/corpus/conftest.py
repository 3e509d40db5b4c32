"""Helpers for corpus tests: small Parquet files and HTML trees, the digest of what a build writes."""

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

WriteParquet = Callable[..., Path]
WriteTree = Callable[..., Path]


@pytest.fixture
def parquet(tmp_path: Path) -> WriteParquet:
    """parquet([(url, text, outlinks), ...], extra={column: values}) -> the file."""

    def write(rows: Sequence[tuple[Any, Any, Any]], extra: Mapping[str, Sequence[Any]] | None = None, **options: Any) -> Path:
        table = {
            "url": pa.array([row[0] for row in rows], pa.string()),
            "text": pa.array([row[1] for row in rows], pa.string()),
            "outlinks": pa.array([row[2] for row in rows], pa.list_(pa.string())),
            **(extra or {}),
        }
        path = tmp_path / "web.parquet"
        pq.write_table(pa.table(table), path, **options)
        return path

    return write


@pytest.fixture
def html_tree(tmp_path: Path) -> WriteTree:
    """html_tree({"site": {"a.html": "<p>..."}}, site={"base_url": ..., "max_pages": ...}) -> the folder with web.json."""

    def write(files: Mapping[str, Mapping[str, str | bytes]], **sites: Mapping[str, Any]) -> Path:
        root = tmp_path / "web"
        for site, pages in files.items():
            (root / site).mkdir(parents=True, exist_ok=True)
            for name, content in pages.items():
                path = root / site / name
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(content if isinstance(content, bytes) else content.encode())
        entries = [
            {
                "folder": site,
                "base_url": f"https://{site}.example/",
                "package": f"{site}-doc",
                "version": "1",
                "max_pages": None,
                **sites.get(site, {}),
            }
            for site in files
        ]
        (root / "web.json").write_text(json.dumps({"kind": "html_tree", "origin": "pages made for a test", "sites": entries}))
        return root

    return write


@pytest.fixture
def digest() -> Callable[[Path], str]:
    """digest(folder) -> SHA-256 over the names and bytes of all its files."""

    def compute(folder: Path) -> str:
        found = hashlib.sha256()
        for path in sorted(p for p in folder.rglob("*") if p.is_file()):
            found.update(path.relative_to(folder).as_posix().encode() + b"\0" + path.read_bytes())
        return found.hexdigest()

    return compute
