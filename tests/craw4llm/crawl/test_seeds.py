"""Seeds: what a file may hold, what is reported, and draws by hash."""

import json

import pytest

from craw4llm.configs import CrawlConfig
from craw4llm.corpus.reader import Corpus
from craw4llm.crawl.seeds import draw_seeds, read_seeds
from craw4llm.errors import ConfigError, InputError
from craw4llm.fingerprint import External
from craw4llm.stage import Stage

URLS = [f"https://w.example/{k:02}" for k in range(40)]


@pytest.fixture
def corpus(build, make_web) -> Corpus:
    return Corpus(build(make_web([(u, "some text" if k % 4 else "", [URLS[(k + 1) % 40]]) for k, u in enumerate(URLS)])))


@pytest.fixture
def held_corpus(build, make_web) -> Corpus:
    return Corpus(build(make_web([(u, "some text", []) for u in URLS], "held", heldout_fraction=0.3, heldout_min_chars=1)))


def write(path, content: bytes):
    path.write_bytes(content)
    return path


def test_bl_12(shared, build, make_web, tmp_path):
    """BOM, CRLF, blanks, a comment, repeats, an unknown id, a line that is no URL, no last newline; ids turned into URLs."""
    docs = [json.loads(line) for line in (shared / "cases/_mini_web/docs.jsonl").read_text().splitlines()]
    url_of = {doc["id"]: doc["url"] for doc in docs}
    corpus = Corpus(build(make_web([(doc["url"], doc["text"], []) for doc in docs])))
    text = (shared / "cases/BL-12/seeds.txt").read_bytes().decode("utf-8")
    assert text.startswith("\ufeff") and "\r\n" in text and not text.endswith("\n")
    for page_id in ("00003", "00008", "00017"):
        doc = f"clueweb22-en0000-00-{page_id}"
        # a URL's host may be in capitals, so the id in capitals becomes one
        text = text.replace(doc.upper(), url_of[doc].replace("site", "SITE")).replace(doc, url_of[doc])
    text = text.replace("clueweb22-en0000-00-99999", "http://site00.example/p/99999")
    seeds = read_seeds(write(tmp_path / "seeds.txt", text.encode()), corpus)
    ids = [3, 8, 17]
    assert [corpus.url(int(page)) for page in seeds.pages] == [url_of[f"clueweb22-en0000-00-{i:05}"] for i in ids]
    assert seeds.unknown == [(6, "http://site00.example/p/99999"), (7, "not-an-id")]
    assert [number for number, _ in seeds.repeated] == [2, 8]
    assert seeds.heldout == []


def test_order_is_the_files(corpus, tmp_path):
    path = write(tmp_path / "s", "\n".join([URLS[9], URLS[2], "  # no comment without a scheme", URLS[30], URLS[2]]).encode())
    seeds = read_seeds(path, corpus)
    assert seeds.pages.tolist() == [9, 2, 30]
    assert seeds.repeated == [(5, URLS[2])]


def test_heldout_seeds_are_reported_and_not_used(held_corpus, tmp_path):
    heldout = held_corpus.heldout.tolist()
    assert 3 <= len(heldout) <= 25
    seeds = read_seeds(write(tmp_path / "s", "\n".join(URLS).encode()), held_corpus)
    assert seeds.heldout == [(page + 1, URLS[page]) for page in heldout]
    assert seeds.pages.tolist() == [k for k in range(40) if k not in heldout]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "has 0 URLs"),
        (b"\xef\xbb\xbf\r\n# only a comment\r\n", "has 0 URLs"),
        (
            b"https://w.example/none\nmailto:a@w.example\n",
            r"has 2 URLs, of which 2 are not in the corpus .*\(line 1: 'https://w.example/none'\)",
        ),
        (b"https://w.example/00\n\xff\xfe\n", "line 2 is not UTF-8"),
    ],
)
def test_files_without_a_usable_seed(corpus, tmp_path, content, message):
    with pytest.raises(InputError, match=message):
        read_seeds(write(tmp_path / "s", content), corpus)


def test_only_heldout_seeds(held_corpus, tmp_path):
    page = int(held_corpus.heldout[0])
    with pytest.raises(InputError, match="1 are held-out pages"):
        read_seeds(write(tmp_path / "s", URLS[page].encode()), held_corpus)


def test_a_missing_file(corpus, tmp_path):
    with pytest.raises(InputError, match="cannot be read: No such file"):
        read_seeds(tmp_path / "none", corpus)


def test_drawn_seeds(corpus, held_corpus):
    """Pages with text, not held out; a smaller draw begins a larger one; another seed set is another draw."""
    ten, twenty = draw_seeds(corpus, 10, 0).pages.tolist(), draw_seeds(corpus, 20, 0).pages.tolist()
    assert twenty[:10] == ten and len(set(twenty)) == 20
    assert all(page % 4 for page in twenty)
    assert draw_seeds(corpus, 10, 1).pages.tolist() != ten
    assert not set(draw_seeds(held_corpus, 15, 0).pages.tolist()) & set(held_corpus.heldout.tolist())


def test_more_seeds_than_pages(corpus):
    with pytest.raises(ConfigError, match="seed_count is 31 but the corpus has 30 pages with text"):
        draw_seeds(corpus, 31, 0)


def test_the_crawl_reports_lines(build, make_web, tmp_path):
    web = make_web([(u, "text", []) for u in URLS[:3]])
    path = write(tmp_path / "s", f"{URLS[1]}\n{URLS[1]}\nhttps://w.example/zz\n".encode())
    crawl = build(Stage(CrawlConfig(policy="random", budget_pages=1, seeds=External(name="seeds", path=str(path))), corpus=web))
    notes = crawl.manifest["notes"]
    assert notes["seeds_unknown"] == [[3, "https://w.example/zz"]] and notes["seeds_repeated"] == [[2, URLS[1]]]
    assert notes["stop"] == "budget"
