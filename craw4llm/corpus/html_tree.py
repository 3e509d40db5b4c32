"""A folder of HTML files with their public addresses as a source.

    data/demo-web/web/web.json
        {"kind": "html_tree", "origin": "24 documentation packages of Debian 12 ...",
         "sites": [{"folder": "sites/python-flask-doc/0", "base_url": "https://flask.palletsprojects.com/",
                    "package": "python-flask-doc", "version": "2.2.2-3", "max_pages": null,
                    "aliases": ["http://flask.pocoo.org/docs/"]}]}
        {"kind": "synthetic", "reason": "apt-get is not installed", "pages": 4000, "seed": 0}
    source = open_web(Path("data/demo-web/web"))

Every .html, .htm and .xhtml file below a site's folder is the page at base_url + its path; index.html is its directory. Links are resolved
as a browser would, and then folded onto the sites: http and https are one, `.../index.html` is the directory, an alias of a site is
its base_url. So links within and between the sites lead to the pages that are here.

max_pages: the site is cut to so many pages, breadth first from its index page (then from the next page by path), so that the pages
kept stay linked to each other. aliases: optional; other addresses of the same site, where * is any text within one part of the path
(older versions: "https://docs.djangoproject.com/en/*/").

Pages are read in a child process that hostile HTML may take down (craw4llm.corpus.extraction).
"""

import contextlib
import dataclasses
import json
import os
import re
from collections import deque
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import quote

from craw4llm.configs import HtmlLimits, SyntheticWeb
from craw4llm.corpus.extraction import DEFAULT_LIMITS, extractor
from craw4llm.corpus.extraction_child import read_file
from craw4llm.corpus.html_links import decode, links_of
from craw4llm.corpus.records import LinkFlag, Page, Reject, Source
from craw4llm.corpus.synthetic import open_synthetic
from craw4llm.corpus.urls import LinkMemory, canonical_url, host_of
from craw4llm.errors import InputError

WEB_JSON = "web.json"
ENDINGS = (".html", ".htm", ".xhtml")
CHUNK_FILES = 32
MOST_KNOWN_LINKS = 1 << 18  # about 100 MB

_REFRESH = int(LinkFlag.REFRESH)
_PLAIN_PATH = re.compile(r"[A-Za-z0-9/~!$&'()*+,;=:@._-]*")
_INDEX = tuple(f"index{ending}" for ending in ENDINGS)
_EXPECTED = (
    'expected {"kind": "html_tree", "origin": str, "sites": [{"folder": str, "base_url": str, "package": str, "version": str, '
    '"max_pages": int or null, "aliases": [str, ...] (optional)}, ...]} or {"kind": "synthetic", "reason": str, "pages": int, "seed": int}'
)


@dataclasses.dataclass(frozen=True)
class Site:
    """One entry of web.json, checked. base_url ends with "/"."""

    folder: Path
    base_url: str
    package: str
    version: str
    max_pages: int | None
    aliases: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class _Fold:
    """What takes the place of the beginning of a URL. prefix: matches it. host: matches the hosts of all URLs that it can match."""

    prefix: re.Pattern[str]
    host: re.Pattern[str]
    base_url: str


Folds = tuple[_Fold, ...]


@dataclasses.dataclass(frozen=True)
class FileChunk:
    """Files of one site. start: position of the first. folds: of all sites (see `_folds`)."""

    site: Site
    start: int
    files: list[str]  # relative to the site's folder
    folds: Folds
    limits: HtmlLimits

    @property
    def label(self) -> str:
        return f"{self.files[0]} to {self.files[-1]} of {self.site.package} (files {self.start:,} to {self.start + self.records - 1:,})"

    @property
    def records(self) -> int:
        return len(self.files)

    def read(self) -> Iterator[Page | Reject]:
        answers = extractor(self.limits).read([(f"{self.site.folder}/{name}", None) for name in self.files])
        resolver = _resolver(self.folds)
        for k, (name, page) in enumerate(zip(self.files, answers, strict=True)):
            url = page_url(self.site.base_url, name)
            if isinstance(page, str):
                yield Reject(self.site.package, self.start + k, url, page)
                continue
            # A page that only sends on to another is no link of the site's author: meta refreshes are left out here.
            links, anchors, flags = page.links, page.anchors, page.flags
            if any(map(_REFRESH.__and__, set(flags))):
                kept = [j for j, flag in enumerate(flags) if not flag & _REFRESH]
                links, anchors, flags = [links[j] for j in kept], [anchors[j] for j in kept], [flags[j] for j in kept]
            yield Page(
                self.site.package,
                self.start + k,
                url,
                page.text,
                resolver.links(page.base, links, url),
                anchors=anchors,
                link_flags=flags,
                canonical=page.canonical,
                signals=page.signals,
                resolved=True,
            )


def open_web(folder: Path, limits: HtmlLimits = DEFAULT_LIMITS) -> Source:
    """The folder with web.json as a source. Raises InputError where web.json or a site's folder is not as described."""
    record = _web_json(folder)
    if record["kind"] == "synthetic":
        pages, seed, reason = (
            _field(folder, record, "pages", int),
            _field(folder, record, "seed", int),
            _field(folder, record, "reason", str),
        )
        web = SyntheticWeb(pages=pages, hosts=max(1, min(SyntheticWeb.hosts, pages // 10)), seed=seed)
        return open_synthetic(web, reason)
    sites = _sites(folder, record)
    folds = _folds(sites)
    chunks: list[FileChunk] = []
    described = []
    for site in sites:
        files = list_files(site.folder)
        kept = (
            sorted(_breadth_first(site, files, folds, limits.page_bytes))
            if site.max_pages is not None and len(files) > site.max_pages
            else files
        )
        described.append(
            {
                "package": site.package,
                "version": site.version,
                "base_url": site.base_url,
                "pages": len(kept),
                "left_out_by_max_pages": len(files) - len(kept),
            }
        )
        chunks += [FileChunk(site, k, kept[k : k + CHUNK_FILES], folds, limits) for k in range(0, len(kept), CHUNK_FILES)]
    if not chunks:
        raise InputError(f"corpus: the sites of {folder / WEB_JSON} hold no file that ends with {', '.join(ENDINGS)}")
    return Source(
        chunks=chunks,
        records=sum(chunk.records for chunk in chunks),
        origin=_field(folder, record, "origin", str),
        notes={"sites": described},
    )


def list_files(folder: Path) -> list[str]:
    """Paths of the HTML files below a folder, relative to it, sorted. Symbolic links are not followed."""
    found = []
    waiting = [""]
    while waiting:
        within = waiting.pop()
        with contextlib.suppress(PermissionError), os.scandir(folder / within) as entries:
            for entry in entries:
                if entry.is_dir(follow_symlinks=False):
                    waiting.append(f"{within}{entry.name}/")
                elif entry.name.lower().endswith(ENDINGS) and entry.is_file(follow_symlinks=False):
                    found.append(within + entry.name)
    return sorted(found)


def page_url(base_url: str, name: str) -> str:
    """Public address of the file `name` of a site: base_url + its path, index.html being its directory."""
    directory, _, last = name.rpartition("/")
    if last.lower() in _INDEX:
        last = ""
    path = f"{directory}/{last}" if directory else last
    if not _PLAIN_PATH.fullmatch(path):
        # A name need not be valid Unicode on disk (surrogateescape); its bytes are what a URL quotes.
        path = quote(path.encode(errors="surrogateescape"), safe="/~!$&'()*+,;=:@-._")
    url = base_url + path
    return canonical_url(url) or url


class _Resolver:
    """Links of pages as canonical URLs, folded onto the sites."""

    def __init__(self, folds: Folds) -> None:
        self.folds = folds
        self._of_host: dict[str, tuple[re.Pattern[str], Folds]] = {}  # those that can match: tried in turn by one pattern
        self._memory = LinkMemory(lambda link, base: self._folded(canonical_url(link, base)), MOST_KNOWN_LINKS)

    def links(self, base_href: str | None, links: list[str], url: str) -> list[str | None]:
        """The links of the page `url`; None for what is no web page's URL."""
        return self._memory.of(links, (canonical_url(base_href, url) if base_href else None) or url)

    def _folded(self, url: str | None) -> str | None:
        if url is None:
            return None
        host = host_of(url)
        if host not in self._of_host:
            some = tuple(fold for fold in self.folds if fold.host.fullmatch(host))
            self._of_host[host] = re.compile("|".join(f"({fold.prefix.pattern})" for fold in some)), some
        prefixes, folds = self._of_host[host]
        matched = prefixes.match(url) if folds else None
        if matched is None or matched.lastindex is None:
            return url
        base_url = folds[matched.lastindex - 1].base_url
        directory, _, last = url[matched.end() :].rpartition("/")
        if last.lower() in _INDEX:
            last = ""
        folded = f"{base_url}{directory}/{last}" if directory else f"{base_url}{last}"
        return url if folded == url else canonical_url(folded)


_last: list[_Resolver] = []


def _resolver(folds: Folds) -> _Resolver:
    """One for all chunks that this process reads: the pages of a site share their navigation."""
    if not _last or (_last[0].folds is not folds and _last[0].folds != folds):
        _last[:] = [_Resolver(folds)]
    return _last[0]


def _folds(sites: list[Site]) -> Folds:
    """Of sites and aliases: the longest first, a site before an alias."""
    pairs = {alias: site.base_url for site in sites for alias in site.aliases} | {site.base_url: site.base_url for site in sites}
    own = {site.base_url for site in sites}
    ordered = sorted(pairs.items(), key=lambda pair: (-len(pair[0].replace("*", "")), pair[0] not in own, pair))
    return tuple(
        _Fold(re.compile("https?:" + _any(prefix.partition(":")[2])), re.compile(_any(host_of(prefix))), base) for prefix, base in ordered
    )


def _any(text: str) -> str:
    return re.escape(text).replace(r"\*", "[^/]*")


def _breadth_first(site: Site, files: list[str], folds: Folds, page_bytes: int) -> list[str]:
    """The first `max_pages` files of a site in breadth-first order from its index page, then from the next file by path."""
    assert site.max_pages is not None
    file_at = {page_url(site.base_url, name): name for name in reversed(files)}
    home = file_at.get(site.base_url)
    starts = ([home] if home else []) + files
    resolver = _resolver(folds)
    taken: dict[str, None] = {}
    for start in starts:
        if start in taken:
            continue
        if len(taken) >= site.max_pages:
            break
        taken[start] = None
        queue = deque([start])
        while queue and len(taken) < site.max_pages:
            name = queue.popleft()
            data, _ = read_file(f"{site.folder}/{name}", page_bytes)  # one that cannot be read the build rejects by name
            for url in resolver.links(*links_of(decode(data)), page_url(site.base_url, name)) if data else ():
                target = file_at.get(url or "")
                if target is not None and target not in taken and len(taken) < site.max_pages:
                    taken[target] = None
                    queue.append(target)
    return list(taken)


def _web_json(folder: Path) -> dict[str, Any]:
    path = folder / WEB_JSON
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InputError(f"corpus: {path} cannot be read ({error}); {_EXPECTED}") from error
    if not isinstance(record, dict) or record.get("kind") not in ("html_tree", "synthetic"):
        given = record.get("kind") if isinstance(record, dict) else type(record).__name__
        raise InputError(f"corpus: {path} is of kind {given!r}; {_EXPECTED}")
    return record


def _sites(folder: Path, record: Mapping[str, Any]) -> list[Site]:
    root = folder.resolve()
    sites = []
    for k, entry in enumerate(_field(folder, record, "sites", list)):
        where = f"sites[{k}]"
        if not isinstance(entry, dict):
            raise InputError(f"corpus: {folder / WEB_JSON}: {where} is {entry!r:.80}; {_EXPECTED}")
        path = (folder / _field(folder, entry, "folder", str, where)).resolve()
        if not path.is_relative_to(root):
            raise InputError(f"corpus: {folder / WEB_JSON}: {where}.folder {entry['folder']!r} leads out of {folder}")
        if not path.is_dir():
            raise InputError(f"corpus: {folder / WEB_JSON}: {where}.folder {entry['folder']!r} is no folder in {folder}")
        max_pages = entry.get("max_pages")
        if max_pages is not None and (type(max_pages) is not int or max_pages < 1):
            raise InputError(f"corpus: {folder / WEB_JSON}: {where}.max_pages is {max_pages!r}; expected at least 1, or null")
        aliases = entry.get("aliases", [])
        if not isinstance(aliases, list):
            raise InputError(f"corpus: {folder / WEB_JSON}: {where}.aliases is {aliases!r:.80}; expected a list of URLs")
        sites.append(
            Site(
                folder=path,
                base_url=_base_url(folder, _field(folder, entry, "base_url", str, where), f"{where}.base_url"),
                package=_field(folder, entry, "package", str, where),
                version=_field(folder, entry, "version", str, where),
                max_pages=max_pages,
                aliases=tuple(_base_url(folder, alias, f"{where}.aliases") for alias in aliases),
            )
        )
    if not sites:
        raise InputError(f"corpus: {folder / WEB_JSON} has no sites; {_EXPECTED}")
    return sites


def _base_url(folder: Path, given: object, where: str) -> str:
    url = canonical_url(given) if isinstance(given, str) else None
    if url is None or not url.endswith("/") or "?" in url:
        raise InputError(f"corpus: {folder / WEB_JSON}: {where} is {given!r}; expected an http or https URL that ends with /")
    return url


def _field(folder: Path, record: Mapping[str, Any], name: str, kind: type, where: str = "") -> Any:
    value = record.get(name)
    if not isinstance(value, kind) or isinstance(value, bool):
        label = f"{where}.{name}" if where else name
        raise InputError(f"corpus: {folder / WEB_JSON}: {label} is {value!r:.80}; {_EXPECTED}")
    return value
