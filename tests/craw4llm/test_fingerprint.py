"""Identity: what changes a fingerprint, what does not, and what is refused."""

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from craw4llm.configs import CorpusConfig, CrawlConfig, ScorerConfig, SyntheticWeb
from craw4llm.errors import ConfigError, InputError
from craw4llm.externals import ExternalDigests
from craw4llm.fingerprint import External, canonical, fingerprint
from craw4llm.stage import Planner, Stage


def no_digest(external: External) -> str:
    raise AssertionError(f"{external} needs no digest here")


@dataclasses.dataclass(frozen=True)
class Sample:
    a: int = 1
    b: tuple[float, ...] = (0.5,)


def test_equal_meaning_gives_equal_fingerprints() -> None:
    assert fingerprint("crawl", 1, Sample(), {"x": "aa", "y": "bb"}, no_digest) == fingerprint(
        "crawl", 1, Sample(a=1), {"y": "bb", "x": "aa"}, no_digest
    )


@pytest.mark.parametrize(
    "other",
    [
        ("select", 1, Sample(), {"x": "aa"}),
        ("crawl", 2, Sample(), {"x": "aa"}),
        ("crawl", 1, Sample(a=2), {"x": "aa"}),
        ("crawl", 1, Sample(b=(0.5, 0.5)), {"x": "aa"}),
        ("crawl", 1, Sample(), {"x": "ab"}),
        ("crawl", 1, Sample(), {"y": "aa"}),
    ],
)
def test_every_part_of_the_identity_counts(other: tuple) -> None:
    assert fingerprint("crawl", 1, Sample(), {"x": "aa"}, no_digest) != fingerprint(*other, no_digest)


@pytest.mark.parametrize("value", [{1, 2}, float("nan"), float("inf"), Path("x"), len, object(), {1: 2}, b"bytes"])
def test_values_without_a_stable_form_are_refused(value: object) -> None:
    with pytest.raises(ConfigError, match="config"):
        canonical(value, no_digest)


def test_a_dataclass_that_can_change_is_refused() -> None:
    @dataclasses.dataclass
    class Loose:
        a: int = 1

    with pytest.raises(ConfigError, match="frozen"):
        canonical(Loose(), no_digest)


def test_a_bool_is_no_int() -> None:
    assert json.dumps(canonical((True, 1), no_digest)) == "[true, 1]"


def test_a_moved_external_changes_nothing_and_a_changed_one_does(tmp_path: Path) -> None:
    first, second = tmp_path / "a.bin", tmp_path / "b.bin"
    first.write_bytes(b"model")
    second.write_bytes(b"model")

    def of(path: Path) -> str:
        stage = Stage(ScorerConfig(kind="fasttext", source=External(name="scorer model", path=str(path))))
        return Planner(ExternalDigests(tmp_path / "memory.json")).fingerprint(stage)

    before = of(first)
    assert of(second) == before
    second.write_bytes(b"another")
    assert of(second) != before


def test_digests_of_externals_are_remembered_by_path_size_and_time(tmp_path: Path) -> None:
    path = tmp_path / "web.parquet"
    path.write_bytes(b"1" * 100)
    digests = ExternalDigests(tmp_path / "memory.json")
    first = digests(External(name="corpus", path=str(path)))
    digests.save()
    known = json.loads((tmp_path / "memory.json").read_text())
    assert list(known.values()) == [first]
    (tmp_path / "memory.json").write_text("{damaged")
    assert ExternalDigests(tmp_path / "memory.json")(External(name="corpus", path=str(path))) == first


def test_a_folder_is_known_by_its_files(tmp_path: Path) -> None:
    folder = tmp_path / "web"
    (folder / "sub").mkdir(parents=True)
    (folder / "sub" / "a.html").write_text("x")
    (folder / "b.html").write_text("y")
    external = External(name="corpus", path=str(folder))
    first = ExternalDigests(None)(external)
    (folder / "sub" / "a.html").rename(folder / "sub" / "c.html")
    assert ExternalDigests(None)(external) != first
    (folder / "sub" / "c.html").rename(folder / "sub" / "a.html")
    assert ExternalDigests(None)(external) == first


def test_a_missing_external_names_itself(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"seeds: .*nowhere\.txt does not exist"):
        ExternalDigests(None)(External(name="seeds", path=str(tmp_path / "nowhere.txt")))


def test_stages_refuse_inputs_that_they_do_not_take() -> None:
    web = Stage(CorpusConfig(source=SyntheticWeb()))
    with pytest.raises(ConfigError, match="it takes corpus"):
        Stage(CrawlConfig(policy="random", budget_pages=3))
    with pytest.raises(ConfigError, match="scorer"):
        Stage(CrawlConfig(policy="quality", budget_pages=3), corpus=web)
    with pytest.raises(ConfigError, match="policy is 'best'"):
        CrawlConfig(policy="best", budget_pages=3)  # type: ignore[arg-type]


def test_fingerprints_do_not_depend_on_the_hash_seed() -> None:
    program = (
        "from craw4llm.experiment import expand, load\nfrom craw4llm.stage import Planner\nfrom craw4llm.externals import ExternalDigests\n"
        "graph = expand(load('tiny'), {'corpus': 'synthetic'})\nplanner = Planner(ExternalDigests(None))\n"
        "print([(n.id, planner.fingerprint(n.stage)) for n in graph.nodes])"
    )
    outputs = {
        subprocess.run(
            [sys.executable, "-c", program], env=os.environ | {"PYTHONHASHSEED": seed}, capture_output=True, text=True, check=True
        ).stdout
        for seed in ("0", "1")
    }
    assert len(outputs) == 1
