import pytest

from craw4llm.corpus.urls import MAX_URL_BYTES, canonical_url, host_of


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
