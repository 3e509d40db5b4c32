"""One canonical spelling per URL.

    canonical_url("HTTP://Example.org:80/a/../b?x=1#top")                    -> "http://example.org/b?x=1"
    canonical_url("../c.html", base="https://example.org/a/b.html")          -> "https://example.org/c.html"
    canonical_url("mailto:a@example.org")                                    -> None

Parsing and serialising are the WHATWG URL standard's (the `ada-url` library: lower-case host, IDNA, default ports dropped, dot segments
resolved). On top: http and https only, no fragment, no user name or password.
"""

import ada_url

MAX_URL_BYTES = 8192  # longer ones are traps or data; RFC 9110, 4.1 asks for at least 8,000 octets


def canonical_url(url: str, base: str | None = None) -> str | None:
    """The canonical spelling of `url` (resolved against `base`), or None if it is no web page's URL."""
    if len(url) > MAX_URL_BYTES:
        return None
    try:
        parsed = ada_url.URL(url.strip(), base=base) if base else ada_url.URL(url.strip())
    except (ValueError, UnicodeError):
        return None
    if parsed.protocol not in ("http:", "https:") or not parsed.hostname:
        return None
    parsed.hash = ""
    parsed.username = ""
    parsed.password = ""
    text = str(parsed.href)
    return text if len(text) <= MAX_URL_BYTES else None


def host_of(canonical: str) -> str:
    """Host (with port, where it is not the default) of a canonical URL."""
    return canonical.split("/", 3)[2]
