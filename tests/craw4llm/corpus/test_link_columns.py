"""Flags, anchors, signals, ids: what a source says beside URL, text and links, through the build to the reader."""

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from craw4llm.artifact import Artifact, Store
from craw4llm.configs import CorpusConfig, SyntheticWeb, UrlRules
from craw4llm.corpus.anchors import GROUP_PAGES, AnchorReader, AnchorWriter
from craw4llm.corpus.build import build
from craw4llm.corpus.heldout import is_heldout
from craw4llm.corpus.prepare import MAX_ANCHOR_CHARS, Gathered, are_folded, folded
from craw4llm.corpus.reader import Corpus
from craw4llm.corpus.records import LinkFlag, Page, Reject, Signal, Skipped, Source
from craw4llm.errors import ConfigError, StageError
from craw4llm.execution import Execution
from craw4llm.externals import ExternalDigests
from craw4llm.stage import Planner, Stage

Record = Page | Reject | Skipped
BODY, BOILERPLATE, NOFOLLOW, REFRESH = (int(flag) for flag in LinkFlag)


@dataclass(frozen=True)
class Given:
    items: Sequence[Record]
    label: str
    records: int | None = None

    def read(self) -> Iterator[Record]:
        yield from self.items


Open = Callable[..., Corpus]


@pytest.fixture
def corpus_of(tmp_path: Path) -> Open:
    """corpus_of([record, ...], memory_bytes=..., per_part=..., **config) -> Corpus"""

    def make(items: Sequence[Record], *, memory_bytes: int = 1 << 30, per_part: int = 10**6, **fields: Any) -> Corpus:
        config = CorpusConfig(source=SyntheticWeb(), **fields)
        execution = Execution(root=tmp_path / "root", workers=1, memory_bytes=memory_bytes, report=lambda line: None)
        chunks = [Given(items[k : k + per_part], f"from {k}") for k in range(0, len(items), per_part)]
        source = Source(chunks=chunks, records=None, origin="a list", part_records=per_part)
        found: dict[str, Any] = {}

        def write(out: Path) -> Any:
            from craw4llm.artifact import Result

            built = build(source, out, config, execution)
            found["built"] = built
            return Result(counts=built.counts, notes={"skipped": built.skipped, "rejects_by_reason": built.rejects_by_reason})

        store = Store(execution.root)
        name = f"{len(list((tmp_path / 'root').glob('corpus/*')))}"
        record = Planner(ExternalDigests(None)).config_record(Stage(config))
        artifact: Artifact = store.build("corpus", name, version=2, config=record, inputs={}, write=write)[0]
        assert artifact.count("records") == artifact.count("pages") + artifact.count("rejects") + artifact.count("skipped")
        return Corpus(artifact)

    return make


def page(url: str, links: Sequence[object] = (), **more: Any) -> Page:
    position = more.pop("position", 0)
    return Page("list", position, url, more.pop("text", "some text"), links, **more)


def test_flags_of_no_link_make_no_column(corpus_of: Open) -> None:
    """Whether the second page is in the first one's run or not: its only link is unusable."""
    items = [page("https://a.example/", ["/b"]), page("https://a.example/b", ["mailto:x"], anchors=["write"], link_flags=[NOFOLLOW])]
    for memory_bytes, per_part in ((1 << 30, 10), (1, 1)):
        corpus = corpus_of(items, memory_bytes=memory_bytes, per_part=per_part)
        assert corpus.link_flags([0, 1]) is None and corpus.anchors([0, 1]) is None


def test_flags_and_anchors_follow_their_targets(corpus_of: Open) -> None:
    items = [
        page(
            "https://a.example/",
            ["/z", "/b", "mailto:x", "/z", "#top", "/gone", "/b"],
            anchors=["first z", None, "mail", "second z", "self", "  to\n\tnowhere ", "later b"],
            link_flags=[BOILERPLATE, NOFOLLOW | BODY, 0, BODY | NOFOLLOW, 0, REFRESH, BODY],
        ),
        page("https://a.example/b", ["/"]),  # this page says nothing of its links
        page("https://a.example/z", ["/b"], anchors=[""], link_flags=[0]),
    ]
    for memory_bytes, per_part in ((1 << 30, 10), (1, 1)):
        corpus = corpus_of(items, memory_bytes=memory_bytes, per_part=per_part)
        offsets, targets = corpus.outlinks([0, 1, 2])
        assert [corpus.url(t).removeprefix("https://a.example/") for t in targets] == ["b", "z", "gone", "", "b"]
        assert offsets.tolist() == [0, 3, 4, 5]
        flags, anchors = corpus.link_flags([0, 1, 2]), corpus.anchors([0, 1, 2])
        assert flags is not None
        # /z: once in the boilerplate, once in the body with nofollow; /b: once with nofollow, once without
        assert flags.tolist() == [BODY, BODY, REFRESH, 0, 0]
        assert anchors == ["later b", "first z", "to nowhere", None, ""]
        assert corpus.anchors([2, 0]) == ["", "later b", "first z", "to nowhere"]


def test_a_source_without_anchors_has_no_files_for_them(corpus_of: Open) -> None:
    corpus = corpus_of([page("https://a.example/", ["/b"]), page("https://a.example/b")])
    assert corpus.link_flags([0]) is None
    assert corpus.anchors([0]) is None
    assert {p.name for p in corpus.artifact.path.iterdir()}.isdisjoint({"links_flags.npy", "link_anchors.zst"})
    assert "score" not in pq.read_schema(corpus.artifact.file("pages.parquet")).names


def test_anchors_are_one_line_and_valid() -> None:
    assert folded(" a\x00b\r\n c \u2003 d\u2028e ") == "a b c d e"
    assert folded("x" * 10_000) == "x" * MAX_ANCHOR_CHARS
    assert folded("half \ud800 pair") == "half ? pair"


@pytest.mark.parametrize("odd", [" a", "a ", "a  b", "a\tb", "a\u00a0b", "\x00", " ", "\ud800", "x" * (MAX_ANCHOR_CHARS + 1)])
def test_anchors_looked_at_together_are_folded_like_each_alone(odd: str) -> None:
    """First, in the middle and last, beside anchors without text: alone among them the odd one is seen."""
    others = [None, "", "plain", "Über uns", "x" * MAX_ANCHOR_CHARS]
    assert are_folded(others) and [folded(anchor) for anchor in others if anchor] == [anchor for anchor in others if anchor]
    for place in range(len(others) + 1):
        assert folded(odd) != odd and not are_folded([*others[:place], odd, *others[place:]])


def test_an_anchor_that_folds_to_nothing_gives_way_to_the_next() -> None:
    gathered = Gathered(CorpusConfig(source=SyntheticWeb()))
    links = ["https://a.example/b", "https://a.example/b", "https://a.example/c"]
    gathered.take(Page("x", 0, "https://a.example/", "text", links, anchors=["\x00", "Next", "C"]), 0)
    run = gathered.sorted()
    assert run.links["anchor"].to_pylist() == ["Next", "C"]


def test_the_anchor_files_do_not_depend_on_how_they_arrive(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    degrees = rng.integers(0, 5, 3 * GROUP_PAGES + 7)
    anchors = [None if k % 7 == 0 else "" if k % 7 == 1 else f"ä {k}" for k in range(int(degrees.sum()))]
    links = np.concatenate(([0], np.cumsum(degrees))).astype(np.uint64)
    written = []
    for step in (1, 50, len(degrees)):
        out = tmp_path / str(step)
        out.mkdir()
        with AnchorWriter(out) as writer:
            for first in range(0, len(degrees), step):
                last = min(first + step, len(degrees))
                writer.append(degrees[first:last], pa.array(anchors[int(links[first]) : int(links[last])], pa.string()))
        written.append([(out / name).read_bytes() for name in ("link_anchors.zst", "link_anchors_offsets.npy")])
        reader = AnchorReader(out / "link_anchors.zst", out / "link_anchors_offsets.npy", links)
        assert [line for page in range(len(degrees)) for line in reader.of(page)] == anchors
    assert written[0] == written[1] == written[2]


def test_misaligned_anchors_or_flags_are_rejected(corpus_of: Open) -> None:
    items: list[Record] = [page("https://a.example/ok", ["/b"], anchors=["x"])] * 1 + [
        page("https://a.example/1", ["/b", "/c"], anchors=["one"]),
        page("https://a.example/2", ["/b"], link_flags=[1, 1]),
        page("https://a.example/3"),
        page("https://a.example/4"),
    ]
    corpus = corpus_of(items)
    assert corpus.artifact.manifest["notes"]["rejects_by_reason"] == {"links_misaligned": 2}


def test_signals_ids_language_canonical_score_and_domain_are_columns(corpus_of: Open) -> None:
    items = [
        page(
            "https://docs.a.co.uk:8080/x",
            signals=Signal.NOINDEX | Signal.NO_TRAIN,
            doc_id="clueweb22-1",
            language="de",
            canonical="../y#top",
            base="https://b.a.co.uk/d/e",
            score=0.25,
        ),
        page("http://192.0.2.7/", doc_id="", canonical="mailto:x"),
        page("http://a.co.uk/"),
    ]
    corpus = corpus_of(items)
    assert corpus.urls.to_pylist() == ["http://192.0.2.7/", "http://a.co.uk/", "https://docs.a.co.uk:8080/x"]
    assert corpus.signals.tolist() == [0, 0, 65]
    assert corpus.doc_ids.to_pylist() == [None, None, "clueweb22-1"]
    assert corpus.find_doc_ids(["clueweb22-1", "nothing"]).tolist() == [2, -1]
    assert corpus.column("language").to_pylist() == [None, None, "de"]
    assert corpus.column("canonical").to_pylist() == [None, None, "https://b.a.co.uk/y"]
    assert corpus.column("score").to_pylist() == [None, None, 0.25]
    assert [corpus.domains[d] for d in corpus.domain_ids] == ["192.0.2.7", "a.co.uk", "a.co.uk"]
    assert corpus.artifact.count("domains") == 2


def test_owners_who_ask_to_be_left_out_can_be_obeyed(corpus_of: Open) -> None:
    items: list[Record] = [
        page("https://a.example/1", ["/2", "/3"]),
        page("https://a.example/2", signals=Signal.NOINDEX),
        page("https://a.example/3", signals=Signal.NO_TRAIN | Signal.NOFOLLOW),
        Skipped("a request", 5),
        Skipped("an image"),
    ]
    kept = corpus_of(items)
    assert (kept.n_pages, kept.artifact.count("skipped"), kept.artifact.count("records")) == (3, 6, 9)
    corpus = corpus_of(items, obey=("no_train", "noindex"))
    assert corpus.urls.to_pylist() == ["https://a.example/1"]
    assert corpus.dead_urls.to_pylist() == ["https://a.example/2", "https://a.example/3"]
    assert corpus.artifact.manifest["notes"]["skipped"] == {
        "a request": 5,
        "an image": 1,
        "owner asks no_train": 1,
        "owner asks noindex": 1,
    }
    with pytest.raises(ConfigError, match=r"obey is .*; expected names in alphabetical order"):
        CorpusConfig(source=SyntheticWeb(), obey=("noindex", "no_train"))


def test_nofollow_links_can_be_dropped(corpus_of: Open) -> None:
    items = [
        page("https://a.example/1", ["/2", "/3", "/3"], link_flags=[NOFOLLOW, NOFOLLOW, BODY]),
        page("https://a.example/2", ["/1", "/3"], signals=Signal.NOFOLLOW),
        page("https://a.example/3"),
    ]
    assert corpus_of(items).artifact.count("links") == 4
    corpus = corpus_of(items, nofollow="drop")
    assert corpus.outlinks([0, 1, 2])[1].tolist() == [2]
    assert corpus.artifact.count("nofollow_links") == 4


@pytest.mark.parametrize("per_part", [1, 100])
def test_of_one_url_the_first_or_the_last_record_is_the_page(corpus_of: Open, per_part: int) -> None:
    items = [
        page("https://a.example/1", ["/only-first"], text="first", position=0),
        page("https://a.example/2", text="other", position=1),
        page("HTTPS://a.example:443/1", ["/only-second"], text="second", position=2),
        Reject("list", 3, "https://a.example/9", "unreadable"),
        page("https://a.example/1#x", ["/only-third"], text="third", position=4),
    ]
    first = corpus_of(items, per_part=per_part)
    last = corpus_of(items, per_part=per_part, duplicates="last")
    assert (first.text(0), last.text(0)) == ("first", "third")
    assert first.dead_urls.to_pylist() == ["https://a.example/only-first"]
    assert last.dead_urls.to_pylist() == ["https://a.example/only-third"]
    rejects = [pq.read_table(c.artifact.file("rejects.parquet")).to_pydict() for c in (first, last)]
    assert [r["position"] for r in rejects] == [[2, 3, 4], [0, 2, 3]]  # in the order of the records
    assert rejects[0]["reason"] == ["duplicate_url", "unreadable", "duplicate_url"]


def test_url_rules_fold_pages_and_links(corpus_of: Open) -> None:
    items = [
        page("https://a.example/?b=2&a=1&utm_source=x", ["/p?z=1&y=2&gclid=7"]),
        page("https://a.example/p?y=2&z=1", position=1),
        page("https://a.example/p?z=1&y=2", position=2),
    ]
    assert corpus_of(items).n_pages == 3
    rules = UrlRules(query="sorted", drop_tracking=True)
    corpus = corpus_of(items, url_rules=rules)
    assert corpus.urls.to_pylist() == ["https://a.example/?a=1&b=2", "https://a.example/p?y=2&z=1"]
    assert corpus.outlinks([0])[1].tolist() == [1]
    assert corpus.find(["https://a.example/p?z=1&y=2&UTM_Medium=mail"]).tolist() == [1]  # by the corpus' own rules


def test_whole_hosts_can_be_held_out(corpus_of: Open) -> None:
    items = [page(f"https://h{k % 40}.example/{k}", text="word " * 50) for k in range(400)]
    corpus = corpus_of(items, heldout_by="host", heldout_fraction=0.2)
    held = {corpus.hosts[h] for h in corpus.host_ids[corpus.heldout]}
    assert held == {host for host in corpus.hosts if is_heldout(host, 0.2)}
    assert 0 < len(held) < 20
    assert len(corpus.heldout) == 10 * len(held)


def test_an_announced_number_of_records_is_checked(tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    source = Source(chunks=[Given([page("https://a.example/")], "one", records=2)], records=2, origin="a list")
    with pytest.raises(StageError, match="one: 1 records were read, 2 were announced"):
        build(source, out, CorpusConfig(source=SyntheticWeb()), Execution(workers=1, report=lambda line: None))


def test_in_links_are_the_transposed_graph(corpus_of: Open) -> None:
    rng = np.random.default_rng(1)
    items = [page(f"https://a.example/{k:03}", [f"/{t:03}" for t in rng.integers(0, 130, 9)]) for k in range(100)]
    corpus = corpus_of(items)
    assert corpus.n_targets > 100
    offsets, targets = corpus.outlinks(range(100))
    sources = np.repeat(np.arange(100), np.diff(offsets))
    wanted = [sources[targets == t].tolist() for t in range(corpus.n_targets)]
    for _ in range(2):  # made, then read
        found, pages = corpus.inlinks(range(corpus.n_targets))
        assert [pages[a:b].tolist() for a, b in itertools.pairwise(found)] == wanted
        corpus = Corpus(corpus.artifact)
    from craw4llm.corpus.transpose import transpose

    out = corpus.artifact.root / "small"
    out.mkdir()
    transpose(corpus.artifact.path, out, corpus.n_targets, memory_bytes=640)  # in many ranges
    assert np.load(out / "pages.npy").tolist() == [page for pages in wanted for page in pages]
