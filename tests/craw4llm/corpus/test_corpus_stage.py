from pathlib import Path

import pytest

from craw4llm.configs import CorpusConfig, SyntheticWeb
from craw4llm.corpus.stage import estimate, open_source
from craw4llm.errors import InputError
from craw4llm.fingerprint import External


def external(path: Path) -> External:
    return External(name="corpus", path=str(path))


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("docs.json.gz", "JSON"),
        ("pages.csv", "CSV"),
    ],
)
def test_sources_of_later_are_refused_by_name(tmp_path: Path, name: str, kind: str) -> None:
    (tmp_path / name).write_bytes(b"")
    with pytest.raises(InputError, match=f"looks like {kind}.*, a source that is not read; supported are a Parquet or JSON lines file"):
        open_source(external(tmp_path / name))


def test_a_clueweb22_folder_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "txt").mkdir()
    (tmp_path / "outlink").mkdir()
    with pytest.raises(InputError, match="looks like ClueWeb22"):
        open_source(external(tmp_path))


def test_what_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="does not exist"):
        open_source(external(tmp_path / "web.parquet"))
    with pytest.raises(InputError, match=r"has no web.json"):
        open_source(external(tmp_path))


def test_estimate_knows_the_records() -> None:
    assert estimate(CorpusConfig(source=SyntheticWeb(pages=500, hosts=5)), {}) == {"records": (500, "records")}
