import random
from pathlib import Path

import ada_url
import pytest
from publicsuffixlist import PSLFILE, PublicSuffixList

from craw4llm.configs import UrlRules
from craw4llm.corpus import urls
from craw4llm.corpus.urls import MAX_URL_BYTES, LinkMemory, canonical_url, domain_of, host_of


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("HTTP://Example.org:80/a/../b?x=1#top", "http://example.org/b?x=1"),
        ("https://example.org", "https://example.org/"),
        ("https://user:pw@example.org/", "https://example.org/"),
        ("https://bücher.example/ü", "https://xn--bcher-kva.example/%C3%BC"),
        ("https://example.org:8443/", "https://example.org:8443/"),
        ("  https://example.org/a b\n", "https://example.org/a%20b"),
    ],
)
def test_one_spelling_per_url(url: str, expected: str) -> None:
    assert canonical_url(url) == expected
    assert canonical_url(expected) == expected


@pytest.mark.parametrize(
    "url",
    ["", "mailto:a@example.org", "javascript:void(0)", "ftp://example.org/", "no scheme", "http://", "https://[::1", "http://a\ud800/"],
)
def test_what_is_no_web_page_has_no_canonical_url(url: str) -> None:
    assert canonical_url(url) is None


def test_length_limit() -> None:
    assert canonical_url("https://example.org/" + "a" * (MAX_URL_BYTES - 20)) is not None
    assert canonical_url("https://example.org/" + "a" * MAX_URL_BYTES) is None


def test_base_and_host() -> None:
    assert canonical_url("../c.html", base="https://example.org/a/b.html") == "https://example.org/c.html"
    assert host_of("https://example.org:8443/a") == "example.org:8443"


def test_the_short_way_gives_what_the_parser_gives() -> None:
    """URLs that pass by their characters alone are those that the URL standard's serialiser gives back unchanged."""
    rng = random.Random(0)
    plain = "a.example www.b.co.uk localhost a.b2 1e3.com ab--c.d a_b.example"
    odd = "xn--bcher-kva.example a.xn--p1ai 1.2.3.4 a.1 0x7f.1 a-.b -a.b a..b A.b a.example. a.0x1 a.b:80 a.b:443 u@a.b a%41.b [::1] x.0"
    pieces = [
        *"/abcXYZ0189_~!$&'()*+,;=:@%.-?#\\^|\"<>`{} \t",
        *["/.", "/..", "/%2e", "/%2E.", "%2e", "%41", "%zz", "//", "?", "é", "x=1&y=2"],
    ]
    short = 0
    for _ in range(25_000):
        path = "".join(rng.choice(pieces[:12] if rng.random() < 0.8 else pieces) for _ in range(rng.randint(0, 8)))
        url = (
            rng.choice(("https://", "http://", "HTTP://", "https:/"))
            + rng.choice((plain if rng.random() < 0.6 else odd).split())
            + rng.choice(("/", ""))
            + path
        )
        short += bool(urls._CANONICAL.fullmatch(url))
        assert canonical_url(url) == by_the_parser(url), url
    assert short > 2_000


def by_the_parser(url: str) -> str | None:
    try:
        parsed = ada_url.URL(url.strip())
    except ValueError:
        return None
    parsed.hash = parsed.username = parsed.password = ""
    return str(parsed.href) if parsed.protocol in ("http:", "https:") and parsed.hostname else None


def test_rules() -> None:
    both = UrlRules(query="sorted", drop_tracking=True)
    url = "https://a.example/p?b=2&a=%20&&b=1&utm_source=x&UTM_Medium=y&fbclid=z&gclid&utm=kept"
    assert canonical_url(url) == url
    assert canonical_url(url, rules=both) == "https://a.example/p?a=%20&b=2&b=1&utm=kept"
    assert canonical_url(url, rules=UrlRules(query="sorted")).count("&") == 7  # type: ignore[union-attr]
    assert canonical_url("?gclid=1#top", "https://a.example/p", UrlRules(drop_tracking=True)) == "https://a.example/p"
    assert canonical_url("https://a.example/p?", rules=both) == "https://a.example/p"
    assert all(name == name.lower() for name in urls.TRACKING)


@pytest.mark.parametrize(
    ("host", "domain"),
    [
        ("docs.example.co.uk", "example.co.uk"),
        ("example.com:8080", "example.com"),
        ("co.uk", "co.uk"),
        ("a.b.github.io", "b.github.io"),
        ("192.0.2.7", "192.0.2.7"),
        ("[2001:db8::1]:8080", "[2001:db8::1]"),
        ("localhost", "localhost"),
        ("www.xn--bcher-kva.example", "xn--bcher-kva.example"),
        ("a.b.unknown-suffix", "b.unknown-suffix"),
    ],
)
def test_registered_domains(host: str, domain: str) -> None:
    assert domain_of(host) == domain


def test_links_joined_as_text_are_what_the_parser_makes_of_them() -> None:
    """Odd pieces in any order, on odd bases: with the joining and without it, the same."""
    drawn = random.Random(0)
    pieces = [
        *'/?#:@&=~;[]\\"< \t\n\u00e9\ud800\0',
        "..",
        ".",
        "../",
        "./",
        "//",
        "a",
        "b.html",
        "#top",
        "%2e",
        "%2E",
        "%41",
        "http:",
        "mailto:",
    ]
    bases = [
        *(
            "https://a.example/",
            "https://a.example/x",
            "http://a.example/x/y/z.html",
            "https://a.example//x//y",
            "https://a.example/d?x=../k",
        ),
        *("https://A.example/x/", "/docs/", "https://a.example", "https://1.2.3.4/a/b", "https://u@a.example/x/y", "https://a.example/x#f"),
    ]
    joined = 0
    for _ in range(20_000):
        link, base = "".join(drawn.choice(pieces) for _ in range(drawn.randrange(6))), drawn.choice(bases)
        try:
            parsed = ada_url.URL(link.strip(), base=base)
            parsed.hash = parsed.username = parsed.password = ""
            wanted = str(parsed.href) if parsed.protocol in ("http:", "https:") else None
        except (ValueError, UnicodeError):
            wanted = None
        assert canonical_url(link, base) == wanted, (link, base)
        joined += urls._joined(link, base) is not None
    assert joined > 2000


@pytest.mark.parametrize("limit", [None, 5])
@pytest.mark.parametrize("rules", [UrlRules(), UrlRules(query="sorted", drop_tracking=True)])
def test_remembered_links_are_those_that_are_parsed_each_time(rules: UrlRules, limit: int | None) -> None:
    rng = random.Random(1)
    pieces = [
        "a",
        "b/",
        "../",
        "./",
        "/",
        "//c.example",
        "#",
        "#x y",
        " ",
        "?",
        "?b=2&a=1",
        "&utm_source=q",
        "http:",
        "https://d.example/",
        "é",
    ]
    pieces += ["%2e", "\n", "http://e.example", "HTTPS://F.example/g", "mailto:h", ":", ".", "javascript:i", "\ud800", "x" * MAX_URL_BYTES]
    bases = [
        "https://a.example/",
        "https://a.example/d/e.html",
        "https://a.example/d/f.html?q=1",
        "http://b.example/d/e/?x=/y",
        "no base",
        "data:,x",
        "https:/",
        "https://g.example",
        "https://h.example",
        "https://i.example?j=/k",
        "https://u@l.example:8080/m/#n/o",
    ]
    memory = LinkMemory(lambda link, base: canonical_url(link, base, rules), limit)
    for _ in range(3000):
        base = rng.choice(bases)
        links: list[object] = ["".join(rng.choices(pieces, k=rng.randrange(4))) for _ in range(5)]
        links.append(rng.choice([None, 7, ["a"], b"a", {}]))
        expected = [canonical_url(link, base, rules) if isinstance(link, str) else None for link in links]
        assert memory.of(links, base) == expected, (links, base)
    assert len(memory) if limit is None else len(memory) <= limit


def test_registered_domains_are_those_of_the_whole_list() -> None:
    whole = PublicSuffixList()
    rules = [line.split()[0] for line in Path(PSLFILE).read_text(encoding="utf-8").splitlines() if line and not line.startswith("//")]
    names = [rule.lstrip("!").replace("*", "star") for rule in rules[::7]] + ["localhost", "nowhere.unknown", "example.com"]
    for name in names:
        for host in (name, f"a.{name}", f"b.a.{name}"):
            host = host.encode("idna").decode()
            assert domain_of(host) == (whole.privatesuffix(host) or host)
