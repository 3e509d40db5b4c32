"""Small webs and scorers for tests, given as plain Python values."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from craw4llm.configs import CorpusConfig, ScorerConfig
from craw4llm.fingerprint import External
from craw4llm.stage import Stage

Links = Sequence[str]
Page = tuple[str, str | None, Links]  # url, text, outlinks
MakeWeb = Callable[..., Stage]
MakeTable = Callable[[Mapping[str, float]], Stage]


def write_web(path: Path, pages: Sequence[Page]) -> None:
    """A Parquet corpus of these pages."""
    urls, texts, links = zip(*pages, strict=True)
    table = pa.table(
        {
            "url": pa.array(urls, pa.string()),
            "text": pa.array(texts, pa.string()),
            "outlinks": pa.array([list(one) for one in links], pa.list_(pa.string())),
        }
    )
    pq.write_table(table, path)


@pytest.fixture
def make_web(tmp_path: Path) -> MakeWeb:
    """make_web(pages, name="web", **fields of CorpusConfig) -> the corpus stage; held-out pages are off unless asked for."""

    def make(pages: Sequence[Page], name: str = "web", **fields: object) -> Stage:
        path = tmp_path / f"{name}.parquet"
        write_web(path, pages)
        config = {"heldout_fraction": 0.0, **fields}
        return Stage(CorpusConfig(source=External(name="corpus", path=str(path)), **config))  # type: ignore[arg-type]

    return make


@pytest.fixture
def make_table(tmp_path: Path) -> MakeTable:
    """make_table({url: score}) -> a scorer stage that reads them."""
    made = 0

    def make(scores: Mapping[str, float]) -> Stage:
        nonlocal made
        made += 1
        path = tmp_path / f"scores{made}.parquet"
        pq.write_table(pa.table({"url": list(scores), "score": pa.array(scores.values(), pa.float32())}), path)
        return Stage(ScorerConfig(kind="table", source=External(name="scores", path=str(path))))

    return make


@dataclass(frozen=True)
class CaseWeb:
    """Pages of shared/cases with their ids turned into URLs. quality: planted quality by URL."""

    pages: list[Page]
    url_of: dict[str, str]
    quality: dict[str, float]


def read_case(folder: Path) -> CaseWeb:
    """A case's docs.jsonl; a link to an id that it does not hold becomes a URL that does not exist."""
    docs = [json.loads(line) for line in (folder / "docs.jsonl").read_text().splitlines() if line.strip()]
    url_of = {doc["id"]: doc["url"] for doc in docs}
    pages = [(doc["url"], doc.get("text"), [url_of.get(i, f"http://nowhere.example/{i}") for i in doc.get("outlinks", [])]) for doc in docs]
    planted = folder / "planted_quality.json"
    quality = json.loads(planted.read_text()) if planted.exists() else {}
    return CaseWeb(pages, url_of, {url_of[i]: value for i, value in quality.items()})
