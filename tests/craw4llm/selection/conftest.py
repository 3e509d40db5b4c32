"""A web of texts with scores by URL, for tests of what is kept."""

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from craw4llm.artifact import Artifact
from craw4llm.configs import ScoreConfig, SelectConfig
from craw4llm.corpus.reader import Corpus
from craw4llm.stage import Stage

URL = "https://s.example/"


class Pages:
    """select(**fields of SelectConfig) over a corpus of texts: page names -> (text, score)."""

    def __init__(self, build, make_web, make_table, pages: Mapping[str, tuple[str, float]], **corpus: object) -> None:
        self.build = build
        self.web = make_web([(URL + name, text, []) for name, (text, _) in pages.items()], f"web{len(pages)}", **corpus)
        self.table = make_table({URL + name: score for name, (_, score) in pages.items()})
        self.scores = Stage(ScoreConfig(), corpus=self.web, scorer=self.table)

    def stage(self, **fields: object) -> Stage:
        config = SelectConfig(**{"pool": "corpus", "keep": "top", **fields})  # type: ignore[arg-type]
        return Stage(config, corpus=self.web, scores=self.scores)

    def select(self, **fields: object) -> Artifact:
        return self.build(self.stage(**fields))


@pytest.fixture
def make_pages(build, make_web, make_table) -> Callable[..., Pages]:
    def make(pages: Mapping[str, tuple[str, float]], **corpus: object) -> Pages:
        return Pages(build, make_web, make_table, pages, **corpus)

    return make


@pytest.fixture
def write_tasks(tmp_path: Path) -> Callable[..., Path]:
    """write_tasks(task=[item, ...], ...) -> a folder of JSON lines files."""

    def write(**tasks: Sequence[object]) -> Path:
        folder = tmp_path / "tasks"
        folder.mkdir(exist_ok=True)
        for name, items in tasks.items():
            (folder / f"{name}.jsonl").write_text("".join(json.dumps(item) + "\n" for item in items))
        return folder

    return write


def kept_names(artifact: Artifact) -> list[str]:
    corpus = Corpus(artifact.input("corpus"))
    return [corpus.url(page).removeprefix(URL) for page in pq.read_table(artifact.file("kept.parquet")).column("page").to_pylist()]


def dropped_names(artifact: Artifact) -> dict[str, tuple[str, str | None]]:
    """name -> (reason, name of the page it is a copy of)."""
    corpus = Corpus(artifact.input("corpus"))

    def name(page: int | None) -> str | None:
        return None if page is None else corpus.url(page).removeprefix(URL)

    rows = pq.read_table(artifact.file("dropped.parquet")).to_pylist()
    return {str(name(row["page"])): (row["reason"], name(row["of"])) for row in rows}
