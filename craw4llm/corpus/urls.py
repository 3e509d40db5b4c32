"""One canonical spelling per URL, and the registered domain of a host.

    canonical_url("HTTP://Example.org:80/a/../b?x=1#top")                    -> "http://example.org/b?x=1"
    canonical_url("../c.html", base="https://example.org/a/b.html")          -> "https://example.org/c.html"
    canonical_url("mailto:a@example.org")                                    -> None
    canonical_url("https://a.example/?b=2&utm_source=x&a=1", rules=UrlRules(query="sorted", drop_tracking=True))
                                                                             -> "https://a.example/?a=1&b=2"
    domain_of("docs.example.co.uk")                                          -> "example.co.uk"

Parsing and serialising are the WHATWG URL standard's (the `ada-url` library: lower-case host, IDNA, default ports dropped, dot segments
resolved). On top: http and https only, no fragment, no user name or password, and what `UrlRules` says. Registered domains are those of
the public suffix list, as the `publicsuffixlist` library ships it.
"""

import functools
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import ada_url
from publicsuffixlist import PSLFILE, PublicSuffixList

from craw4llm.configs import UrlRules

MAX_URL_BYTES = 8192  # longer ones are traps or data; RFC 9110, 4.1 asks for at least 8,000 octets
AS_WRITTEN = UrlRules()

# URLs that the parser would give back as they are, told by their characters alone (a quarter of the time): lower-case names as host, the
# last not a number and none in Punycode, no port; no dot segment, nothing that would be percent-encoded, no fragment, no empty query.
_CANONICAL = re.compile(
    r"https?://(?:(?!xn--)[a-z0-9][a-z0-9-]*\.)*(?!xn--)[a-z][a-z0-9-]*"
    r"(?:/(?![.]|%2[eE])[A-Za-z0-9_~!$&'()*+,;=:@%.-]*)+(?:\?[A-Za-z0-9_~!$&()*+,;=:@%./?-]+)?"
)

# A link that begins with one of these is resolved against the base's folder alone, unlike "?query", "#part" and "".
_FOLDER_DECIDES = frozenset("/.abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789")

_UNKNOWN = "\0"  # what no canonical URL is

# Parameters that say through which advertisement, letter or share somebody came, and nothing about the page. A change of this list is a
# change of the corpus stage's version. Names are compared in lower case; one that ends with * is a beginning.
_TRACKING = """
    utm_* mtm_* pk_* hsa_* gclid gclsrc dclid gbraid wbraid gad_source srsltid fbclid igshid igsh twclid ttclid yclid ysclid msclkid
    li_fat_id epik sccid rdt_cid mc_cid mc_eid mkt_tok _ga _gl _hsenc _hsmi _openstat __s vero_id vero_conv oly_anon_id oly_enc_id
    rb_clickid s_cid wickedid icid cmpid trk_contact trk_msg trk_module trk_sid"""
TRACKING = frozenset(_TRACKING.split())
_BEGINNINGS = tuple(name[:-1] for name in sorted(TRACKING) if name.endswith("*"))


def canonical_url(url: str, base: str | None = None, rules: UrlRules = AS_WRITTEN) -> str | None:
    """The canonical spelling of `url` (resolved against `base`), or None if it is no web page's URL."""
    if len(url) > MAX_URL_BYTES:
        return None
    mark = url.find("#")
    if mark > 0 and url[mark - 1] > " " and url.isascii():
        url = url[:mark]  # what a parser would find there is dropped below; a space before it would be part of the path
    as_written = rules is AS_WRITTEN or rules == AS_WRITTEN
    if as_written:
        if _CANONICAL.fullmatch(url):
            return url
        if base and (joined := _joined(url, base)) and _CANONICAL.fullmatch(joined) and len(joined) <= MAX_URL_BYTES:
            return joined
    try:
        parsed = ada_url.URL(url.strip(), base=base) if base else ada_url.URL(url.strip())
        text = str(parsed.href)
    except (ValueError, UnicodeError):
        return None
    if not text.startswith(("http://", "https://")):  # these have a host, or the parser refuses them
        return None
    if "#" in text or "@" in text:
        parsed.hash = parsed.username = parsed.password = ""
        text = str(parsed.href)
    if not as_written and "?" in text:
        parsed.search = _query(parsed.search[1:], rules)
        text = str(parsed.href)
    return text if len(text) <= MAX_URL_BYTES else None


def folder_of(base: str) -> str:
    """The part of a canonical URL that relative paths are resolved against."""
    return base.partition("?")[0].rpartition("/")[0]


class LinkMemory:
    """Canonical URLs of links, remembered: links repeat within a folder of a site, page after page.

    canonical: (link, base) -> canonical URL or None; `canonical_url`, or more of the kind: what it gives depends on no fragment, and for a
    link that does not begin with "?" or "#" on the base's folder alone. limit: when it holds so many, it forgets them.
    """

    def __init__(self, canonical: Callable[[str, str], str | None], limit: int | None = None) -> None:
        self._canonical, self._limit = canonical, limit
        self._of_folder: dict[tuple[bool, str], _Known] = {}
        self._anywhere: dict[str, str | None] = {}  # whole addresses, which need no base
        self._size = 0

    def __len__(self) -> int:
        return self._size

    def of(self, links: Sequence[object], base: str) -> list[str | None]:
        """The canonical URL of each link of a page; None for one that has none, or that is no string."""
        sound = canonical_url(base)  # has a path, unlike <base href="https://example.org">
        place = (True, folder_of(sound)) if sound else (False, base)
        known = self._of_folder.get(place)
        if known is None:
            known = self._of_folder[place] = _Known(self._canonical, self._anywhere if sound else None)
        known.base, known.own = base, _UNKNOWN
        before = len(known) + len(self._anywhere)
        try:
            found = [*map(known.__getitem__, links)]
        except TypeError:  # a list or an object, which cannot be looked up
            found = [known[link] if isinstance(link, str) else None for link in links]
        self._size += len(known) + len(self._anywhere) - before
        if self._limit is not None and self._size > self._limit:
            self._of_folder.clear()
            self._anywhere.clear()
            self._size = 0
        return found


class _Known(dict[Any, str | None]):
    """Links of a folder's pages -> their canonical URLs. One that is not there yet is looked at, and kept if it leads to the same from all.

    anywhere: whole addresses, None for a folder of pages without an address, where whole addresses may fail, too. base: the page whose
    links are asked for. own: what a fragment alone leads to on it, _UNKNOWN before one is met.
    """

    def __init__(self, canonical: Callable[[str, str], str | None], anywhere: dict[str, str | None] | None) -> None:
        super().__init__({None: None})
        self._canonical, self._anywhere = canonical, anywhere
        self.base = ""
        self.own: str | None = _UNKNOWN

    def __missing__(self, link: object) -> str | None:
        if not isinstance(link, str) or len(link) > MAX_URL_BYTES:
            return None
        if link[:1] == "#" and link.isascii():
            if self.own is _UNKNOWN:
                own = self._canonical("#", self.base)
                self.own = self.base if own == self.base else own  # one object, which is compared at once
            return self.own
        if link[:1] not in _FOLDER_DECIDES:
            return self._canonical(link, self.base)
        mark = link.find("#")
        page = link[:mark] if mark > 0 and link[mark - 1] > " " and link.isascii() else link  # as in canonical_url
        pages = self._anywhere if self._anywhere is not None and page.startswith(("http://", "https://")) else self
        if page not in pages:
            pages[page] = self._canonical(page, self.base)
        found = self[link] = pages[page]
        return found


def host_of(canonical: str) -> str:
    """Host (with port, where it is not the default) of a canonical URL."""
    return canonical.split("/", 3)[2]


def domain_of(host: str) -> str:
    """The registered domain of a host (port or not): one label more than its public suffix; for an address or a bare suffix, the host."""
    name = host.rpartition(":")[0] if ":" in host and not host.endswith("]") else host
    if name.startswith("[") or name.rpartition(".")[2].isdigit():
        return name
    plain = name.rstrip(".")
    return _suffixes(plain.rpartition(".")[2]).privatesuffix(plain) or name


def _joined(link: str, base: str) -> str | None:
    """A link without scheme and host on a canonical base, as far as that is a matter of its text: the caller looks at what comes out."""
    folder = _plain_folder(base)
    if folder is None or ":" in link or link[:1] in ("", "?", "#") or link.startswith("//"):
        return None
    if link[0] == "/":
        return folder[: folder.index("/", 8)] + link if "/" in folder[8:] else folder + link
    while link.startswith(("../", "./")):
        up, _, link = link.partition("/")
        if up == ".." and "/" in folder[8:]:  # at the top it stays there
            folder = folder.rpartition("/")[0]
    return f"{folder}/{link}"


@functools.lru_cache(maxsize=1024)  # the pages of a batch and their links
def _plain_folder(base: str) -> str | None:
    """`folder_of` a canonical URL; None for any other."""
    return folder_of(base) if _CANONICAL.fullmatch(base) else None


@functools.cache
def _suffixes(top: str) -> PublicSuffixList:
    """The public suffixes below a top-level domain: parsing all of them, for every name there is, takes 60 ms."""
    return PublicSuffixList(_suffix_rules().get(top, []))


@functools.cache
def _suffix_rules() -> dict[str, list[str]]:
    """The lines of the list by top-level domain, as a canonical URL has it (in Punycode)."""
    found: dict[str, list[str]] = {}
    for line in Path(PSLFILE).read_text(encoding="utf-8").splitlines():
        if line and not line.startswith("//"):
            top = line.split(" ")[0].rstrip().rpartition(".")[2].lower()
            found.setdefault(top if top.isascii() else top.encode("idna").decode("ascii"), []).append(line)
    return found


def _query(query: str, rules: UrlRules) -> str:
    """The parameters kept, each as it is written."""
    parameters = query.split("&")
    if rules.drop_tracking:
        parameters = [p for p in parameters if not _tracks(p.partition("=")[0].lower())]
    if rules.query == "sorted":
        parameters = sorted((p for p in parameters if p), key=lambda p: p.partition("=")[0])  # stable: repeats keep their order
    return "&".join(parameters)


def _tracks(name: str) -> bool:
    return name in TRACKING or name.startswith(_BEGINNINGS)
