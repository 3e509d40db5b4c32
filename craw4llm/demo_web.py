"""Fetches the web of the default demo: pages of Debian documentation packages, and text to train a stand-in scorer from.

    fetch(Path("data/demo-web"), print)   -> "data/demo-web: 5,432 HTML files of 25 packages of Debian GNU/Linux 12 (bookworm)"

    data/demo-web/web/web.json            the sites, or the recipe of a synthetic web (craw4llm.corpus.html_tree reads it)
    data/demo-web/web/sites/<package>/    the package's HTML files, and its copyright file
    data/demo-web/scorer_text.txt         lines `__label__hq text` and `__label__cc text`, after comments that state their origin

1. `apt-cache show` says which packages this machine's lists know. 2. `apt-get download` fetches them, as any user, into a temporary
folder. 3. `dpkg-deb -x` unpacks each; the HTML below the declared folders is copied. 4. The temporary folder is renamed.
Packages that cannot be had are left out and named. If hardly any can be had, the folder holds the recipe of a synthetic web, with the
reason. A finished folder is kept as it is; an interrupted attempt leaves nothing that counts as finished.

**The scorer text is a stand-in for the training data of DCLM's classifier** (instruction data and ELI5 against web pages, arXiv
2406.11794): `hq` is tutorial and handbook prose, `cc` is reference lists, API indexes, release notes, generated class pages and stubs. It
comes from packages that are not part of the web. A classifier trained on it tells explaining text from listing text, no more.
"""

import contextlib
import dataclasses
import fcntl
import hashlib
import itertools
import json
import os
import re
import shutil
import subprocess
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Literal
from urllib.parse import unquote

from resiliparse.extract.html2text import extract_plain_text

from craw4llm.artifact import storage_errors
from craw4llm.configs import HtmlLimits, SyntheticText, SyntheticWeb
from craw4llm.corpus.html_links import decode
from craw4llm.corpus.html_tree import ENDINGS, WEB_JSON, list_files
from craw4llm.corpus.synthetic import training_lines
from craw4llm.errors import StorageError

SCORER_TEXT = "scorer_text.txt"
MIN_PAGES = 1000  # fewer are no web to crawl: the synthetic one takes their place
SYNTHETIC_PAGES = 6000  # of the web that takes the place of real pages: `tiny` keeps 400, and its oracle needs ten times as many
MIN_LINES = 200  # of each label
MAX_LINES = 1500  # of each label
LINES_PER_PACKAGE = 300
LINES_PER_FILE = 12
CHUNK_WORDS = (60, 250)
COMMAND_TIMEOUT_S = 600

Report = Callable[[str], None]


@dataclasses.dataclass(frozen=True)
class WebSite:
    """A folder of a package (a glob pattern; the first match counts) and the address that its pages are published at.

    skip: a regular expression; files whose path below the folder it finds are left out.
    """

    folder: str
    base_url: str
    max_pages: int | None = None
    aliases: tuple[str, ...] = ()
    skip: str = ""


@dataclasses.dataclass(frozen=True)
class WebPackage:
    """A package of the web. names: the same documentation under other names in other releases, the first that is known is taken."""

    names: tuple[str, ...]
    sites: tuple[WebSite, ...]


@dataclasses.dataclass(frozen=True)
class TextPackage:
    """A package whose pages are scorer text. rules: (label, folder pattern, regular expression of the files taken)."""

    name: str
    rules: tuple[tuple[Literal["hq", "cc"], str, str], ...]


_DOC = "usr/share/doc"
_MANUALS = "https://www.debian.org/doc/manuals/"
_PALLETS = "palletsprojects.com/"


def _sphinx(name: str, base_url: str, *aliases: str, max_pages: int | None = None) -> WebPackage:
    return WebPackage((name,), (WebSite(f"{_DOC}/{name}/html", base_url, max_pages, (*aliases, _installed(name))),))


def _installed(name: str) -> str:
    """Debian's packages link to each other's files as installed (/usr/share/doc/...), on whatever host the page then is."""
    return f"https://*/{_DOC}/{name}/html/"


WEB: tuple[WebPackage, ...] = (
    WebPackage(
        tuple(f"python3.{minor}-doc" for minor in (11, 13, 12, 10, 9, 14)),
        (
            WebSite(
                f"{_DOC}/python3.*/html",
                "https://docs.python.org/3/",
                aliases=(
                    "https://docs.python.org/dev/",
                    "https://docs.python.org/2/",
                    "https://docs.python.org/*.*/",
                    "https://docs.python.org/",
                    _installed("python3-doc"),
                ),
            ),
        ),
    ),
    WebPackage(
        tuple(f"postgresql-doc-{major}" for major in (15, 17, 16, 14, 13, 18)),
        (
            WebSite(
                f"{_DOC}/postgresql-doc-*/html",
                "https://www.postgresql.org/docs/current/",
                1000,
                ("https://www.postgresql.org/docs/*/static/", "https://www.postgresql.org/docs/*/"),
            ),
        ),
    ),
    WebPackage(
        ("cmake-doc",),
        (WebSite(f"{_DOC}/cmake*/html", "https://cmake.org/cmake/help/latest/", 600, ("https://cmake.org/cmake/help/*/",)),),
    ),
    WebPackage(
        ("sqlite3-doc",),
        (WebSite(f"{_DOC}/sqlite3", "https://www.sqlite.org/", 600, ("https://sqlite.org/",)),),
    ),
    WebPackage(("git-doc",), (WebSite(f"{_DOC}/git-doc", "https://git-scm.com/docs/"),)),
    WebPackage(
        ("apache2-doc",),
        (
            WebSite(
                f"{_DOC}/apache2-doc/manual/en",
                "https://httpd.apache.org/docs/2.4/",
                aliases=("https://httpd.apache.org/docs/*/en/", "https://httpd.apache.org/docs/*/"),
            ),
        ),
    ),
    WebPackage(
        ("nodejs-doc",),
        (WebSite(f"{_DOC}/nodejs/api", "https://nodejs.org/api/", aliases=("https://nodejs.org/docs/*/api/",)),),
    ),
    _sphinx("python-django-doc", "https://docs.djangoproject.com/en/stable/", "https://docs.djangoproject.com/en/*/", max_pages=600),
    _sphinx(
        "python-sqlalchemy-doc",
        "https://docs.sqlalchemy.org/en/latest/",
        "https://docs.sqlalchemy.org/en/*/",
        "https://www.sqlalchemy.org/docs/*/",
    ),
    _sphinx("python-flask-doc", f"https://flask.{_PALLETS}", f"https://flask.{_PALLETS}en/*/", "https://flask.pocoo.org/docs/*/"),
    _sphinx("python-jinja2-doc", f"https://jinja.{_PALLETS}", f"https://jinja.{_PALLETS}en/*/", "https://jinja.pocoo.org/docs/*/"),
    _sphinx("python-werkzeug-doc", f"https://werkzeug.{_PALLETS}", f"https://werkzeug.{_PALLETS}en/*/"),
    _sphinx("python-click-doc", f"https://click.{_PALLETS}", f"https://click.{_PALLETS}en/*/"),
    _sphinx(
        "python-requests-doc",
        "https://requests.readthedocs.io/en/latest/",
        "https://requests.readthedocs.io/en/*/",
        "https://docs.python-requests.org/en/*/",
    ),
    _sphinx("python-setuptools-doc", "https://setuptools.pypa.io/en/latest/", "https://setuptools.readthedocs.io/en/*/"),
    _sphinx("python-pytest-doc", "https://docs.pytest.org/en/stable/", "https://docs.pytest.org/en/*/", "https://pytest.org/latest/"),
    WebPackage(
        ("sphinx-doc",),
        (
            WebSite(
                f"{_DOC}/sphinx-doc/html",
                "https://www.sphinx-doc.org/en/master/",
                aliases=(
                    "https://www.sphinx-doc.org/en/*/",
                    "https://www.sphinx-doc.org/",
                    "https://sphinx-doc.org/",
                    _installed("sphinx-doc"),
                ),
            ),
        ),
    ),
    WebPackage(("docutils-doc",), (WebSite(f"{_DOC}/docutils-doc", "https://docutils.sourceforge.io/"),)),
    WebPackage(
        ("debian-policy",),
        (
            WebSite(f"{_DOC}/debian-policy/policy.html", "https://www.debian.org/doc/debian-policy/"),
            WebSite(f"{_DOC}/debian-policy/perl-policy.html", "https://www.debian.org/doc/packaging-manuals/perl-policy/"),
        ),
    ),
    WebPackage(
        ("debian-reference-en",),
        (WebSite("usr/share/debian-reference", f"{_MANUALS}debian-reference/", aliases=(f"{_MANUALS}reference/",)),),
    ),
    WebPackage(("maint-guide",), (WebSite(f"{_DOC}/maint-guide/html", f"{_MANUALS}maint-guide/"),)),
    WebPackage(("developers-reference",), (WebSite("usr/share/developers-reference", f"{_MANUALS}developers-reference/"),)),
    WebPackage(
        ("debian-faq",),
        (WebSite(f"{_DOC}/debian/FAQ", f"{_MANUALS}debian-faq/", aliases=("https://www.debian.org/doc/FAQ/",), skip=r"\.en\.html$"),),
    ),
    WebPackage(
        ("harden-doc",),
        (
            WebSite(
                f"{_DOC}/harden-doc/html/en-US",
                f"{_MANUALS}securing-debian-manual/",
                aliases=(f"{_MANUALS}securing-debian-howto/",),
            ),
        ),
    ),
    WebPackage(("gitmagic",), (WebSite(f"{_DOC}/gitmagic/html", "https://www-cs-students.stanford.edu/~blynn/gitmagic/"),)),
    WebPackage(("abs-guide",), (WebSite(f"{_DOC}/abs-guide/html", "https://tldp.org/LDP/abs/html/"),)),
)

TEXT: tuple[TextPackage, ...] = (
    TextPackage("mh-book", (("hq", f"{_DOC}/mh-book/html", r"^(overall|mh|exmh|xmh|mhe)/"),)),
    TextPackage("cfi-en", (("hq", f"{_DOC}/cfi-en/html", r""),)),
    TextPackage("c++-annotations-html", (("hq", f"{_DOC}/c++-annotations/html", r"^cplusplus\d"),)),
    TextPackage("gtkmm-documentation", (("hq", f"{_DOC}/gtkmm-documentation/tutorial/html", r"^(?!index)"),)),
    TextPackage("ubuntu-packaging-guide-html", (("hq", f"{_DOC}/ubuntu-packaging-guide-html", r"^[^_/]+$"),)),
    TextPackage("debian-kernel-handbook", (("hq", f"{_DOC}/debian-kernel-handbook/kernel-handbook.html", r""),)),
    TextPackage("live-manual-html", (("hq", f"{_DOC}/live-manual/html/live-manual", r"\.en\.html$"),)),
    TextPackage("aptitude-doc-en", (("hq", f"{_DOC}/aptitude/html/en", r"^(?!rn)"),)),
    TextPackage("apt-doc", (("hq", f"{_DOC}/apt-doc/guide.html", r""), ("hq", f"{_DOC}/apt-doc/offline.html", r""))),
    TextPackage(
        "mkdocs-doc", (("hq", f"{_DOC}/mkdocs/html", r"^(getting-started|user-guide)"), ("cc", f"{_DOC}/mkdocs/html", r"release-notes"))
    ),
    TextPackage("python-bs4-doc", (("hq", f"{_DOC}/python-bs4-doc/html", r"^index"),)),
    TextPackage(
        "python-scrapy-doc",
        (
            ("hq", f"{_DOC}/python-scrapy-doc/html", r"^(intro|topics)/"),
            ("cc", f"{_DOC}/python-scrapy-doc/html", r"^(news|genindex|search|py-modindex)|^_modules/"),
        ),
    ),
    TextPackage(
        "python-tornado-doc",
        (
            ("hq", f"{_DOC}/python-tornado-doc/html", r"^guide/|^faq"),
            ("cc", f"{_DOC}/python-tornado-doc/html", r"^releases/|^_modules/|^(genindex|search|py-modindex)"),
        ),
    ),
    TextPackage(
        "python-coverage-doc",
        (
            ("hq", f"{_DOC}/python-coverage-doc/html", r"^(?!changes|genindex|search|api|py-)"),
            ("cc", f"{_DOC}/python-coverage-doc/html", r"^(changes|genindex|search|py-modindex)"),
        ),
    ),
    TextPackage(
        "python-aiohttp-doc",
        (
            ("hq", f"{_DOC}/python-aiohttp-doc/html", r"quickstart|tutorial|faq|testing"),
            ("cc", f"{_DOC}/python-aiohttp-doc/html", r"reference|changes|genindex|search|py-modindex"),
        ),
    ),
    TextPackage(
        "mypy-doc",
        (
            ("hq", f"{_DOC}/mypy/html", r"^(?!genindex|search|config_file|command_line|index)"),
            ("cc", f"{_DOC}/mypy/html", r"^(genindex|search)"),
        ),
    ),
    TextPackage(
        "gnustep-base-doc",
        (("hq", "usr/share/GNUstep/Documentation", r"ProgrammingManual/"), ("cc", "usr/share/GNUstep/Documentation", r"/Reference/")),
    ),
    TextPackage("xapian-doc", (("hq", f"{_DOC}/xapian-doc", r"^[^/]+$"), ("cc", f"{_DOC}/xapian-doc", r"^apidoc/"))),
    TextPackage("libxml2-doc", (("cc", "usr/share/gtk-doc/html/libxml2", r""),)),
    TextPackage("libsoup-3.0-doc", (("cc", f"{_DOC}/libsoup-3.0", r""),)),
    TextPackage("libcairo2-doc", (("cc", "usr/share/gtk-doc/html/cairo", r""),)),
    TextPackage("libglib2.0-doc", (("cc", "usr/share/gtk-doc/html", r""),)),
    TextPackage("ncurses-doc", (("cc", f"{_DOC}/ncurses-doc/html/man", r""),)),
    TextPackage("gradle-doc", (("cc", f"{_DOC}/gradle/api", r""),)),
)


class _Unavailable(Exception):
    """Why real pages cannot be had here."""


def fetch(folder: Path, report: Report) -> str:
    """Makes `folder` hold the demo web. Returns a sentence on what it holds; `report` receives progress lines.

    Raises StorageError where `folder` is in the way or cannot be written.
    """
    with storage_errors(folder.parent):
        folder.parent.mkdir(parents=True, exist_ok=True)
        if _is_finished(folder):
            return _kept(folder)
        if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
            raise StorageError(f"{folder} exists and is no demo web; delete it or choose another folder")
        partial = folder.parent.resolve() / f".{folder.name}.partial"  # absolute: apt-get and dpkg-deb run in folders of their own
        with (folder.parent / f".{folder.name}.lock").open("a") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # ends with its process, also after kill -9
            if _is_finished(folder):
                return _kept(folder)
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir()
            try:
                said = _fill(partial, report)
                shutil.rmtree(partial / "packages", ignore_errors=True)
                os.replace(partial, folder)
            finally:
                shutil.rmtree(partial, ignore_errors=True)
    return f"{folder}: {said}"


def _is_finished(folder: Path) -> bool:
    return (folder / "web" / WEB_JSON).is_file() and (folder / SCORER_TEXT).is_file()


def _kept(folder: Path) -> str:
    record = json.loads((folder / "web" / WEB_JSON).read_text(encoding="utf-8"))
    if record["kind"] == "synthetic":
        return f"{folder} is there already: a synthetic web ({record['reason']}); delete it to try for real pages again"
    return f"{folder} is there already: {record['origin']}"


def _fill(partial: Path, report: Report) -> str:
    try:
        return _fill_real(partial, report)
    except _Unavailable as error:
        shutil.rmtree(partial / "web", ignore_errors=True)
        report(f"no real pages: {error}; the synthetic web takes their place")
        web = SyntheticWeb(pages=SYNTHETIC_PAGES)
        _write_json(partial / "web" / WEB_JSON, {"kind": "synthetic", "reason": str(error), "pages": web.pages, "seed": web.seed})
        _write_lines(partial / SCORER_TEXT, training_lines(SyntheticText()))
        return f"a synthetic web of {web.pages:,} pages, because {error}"


def _fill_real(partial: Path, report: Report) -> str:
    for tool in ("apt-cache", "apt-get", "dpkg-deb"):
        if shutil.which(tool) is None:
            raise _Unavailable(f"{tool} is not installed (real pages come from Debian packages)")
    packages = partial / "packages"
    packages.mkdir()
    sizes = _known_packages([name for package in WEB for name in package.names] + [package.name for package in TEXT])
    web = {package: next((name for name in package.names if name in sizes), None) for package in WEB}
    names = [name for name in web.values() if name] + [package.name for package in TEXT if package.name in sizes]
    if not names:
        raise _Unavailable("apt-get knows none of the documentation packages (are its lists empty? `sudo apt-get update` fills them)")
    report(f"downloading {len(names)} documentation packages, {sum(sizes[name] for name in names) / 1e6:.0f} MB")
    trouble = _download(packages, names)

    sites, had, n_pages = _take_pages(web, packages, partial / "web", report)
    lines, text_had = _take_text(packages, report)
    missing = [name or package.names[0] for package, name in web.items() if name not in had]
    missing += [package.name for package in TEXT if package.name not in text_had]
    skipped = f"left out: {', '.join(missing)}" if missing else ""
    if missing:
        report(f"{skipped}{f' ({trouble})' if trouble else ''}")
    if n_pages < MIN_PAGES:
        why = trouble or "the other packages are unknown to apt-get or could not be unpacked"
        raise _Unavailable(f"only {n_pages:,} pages could be had, {MIN_PAGES:,} are needed ({why})")
    taken = min(len(lines["hq"]), len(lines["cc"]), MAX_LINES)
    if taken < MIN_LINES:
        raise _Unavailable(f"only {taken:,} lines of scorer text of each kind could be had, {MIN_LINES:,} are needed")

    system = _system()
    ending = f"; {skipped}" if skipped else ""
    origin = f"{len(had)} documentation packages of {system} at their public addresses: {_versions(had)}{ending}"
    _write_json(partial / "web" / WEB_JSON, {"kind": "html_tree", "origin": origin, "sites": sites})
    comments = [
        f"# origin: prose (hq) and lists (cc) from {len(text_had)} documentation packages of {system}, none of them in the web: "
        + _versions(text_had),
        "# licence: each package's own, all free by the Debian Free Software Guidelines; see its copyright file",
        "# a stand-in for the training data of DCLM's classifier: hq is tutorial and handbook text, cc is references and release notes",
    ]
    kept = [line for label in lines for line in sorted(lines[label], key=_order)[:taken]]
    _write_lines(partial / SCORER_TEXT, comments + sorted(kept, key=_order))  # the labels mixed: training goes through them in order
    return f"{n_pages:,} HTML files of {len(had)} packages of {system}, {2 * taken:,} lines of scorer text{ending}"


def _take_pages(
    web: Mapping[WebPackage, str | None], packages: Path, out: Path, report: Report
) -> tuple[list[dict[str, object]], dict[str, str], int]:
    """Copies the pages of all packages. Returns (sites of web.json, name -> version of the packages that have pages, pages)."""
    sites: list[dict[str, object]] = []
    had: dict[str, str] = {}
    n_pages = 0
    for package, name in web.items():
        with _unpacked(packages, name, report) as unpacked:
            if unpacked is None or name is None:
                continue
            tree, version = unpacked
            entries = _copy_sites(package, name, version, tree, out)
        if entries:
            n_files = sum(count for _, count in entries)
            report(f"{name} {version}: {n_files:,} HTML files")
            sites += [entry for entry, _ in entries]
            had[name] = version
            n_pages += n_files
    return sites, had, n_pages


def _take_text(packages: Path, report: Report) -> tuple[dict[str, list[str]], dict[str, str]]:
    """(label -> labelled lines, name -> version of the packages that they come from)."""
    lines: dict[str, list[str]] = {"hq": [], "cc": []}
    had: dict[str, str] = {}
    for package in TEXT:
        with _unpacked(packages, package.name, report) as unpacked:
            if unpacked is None:
                continue
            tree, version = unpacked
            found = _text_lines(package, tree)
        for label, line in found:
            lines[label].append(line)
            had[package.name] = version
    return lines, had


def _versions(packages: Mapping[str, str]) -> str:
    return ", ".join(f"{name} {version}" for name, version in packages.items())


def _run(command: list[str], cwd: Path) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "LC_ALL": "C.UTF-8"}
    try:
        return subprocess.run(
            command,
            cwd=cwd,
            env=environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=COMMAND_TIMEOUT_S,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise _Unavailable(f"{command[0]} did not end within {COMMAND_TIMEOUT_S} s") from error


def _known_packages(names: list[str]) -> dict[str, int]:
    """name -> size in bytes, of those that this machine's package lists have."""
    shown = _run(["apt-cache", "show", "--no-all-versions", *names], Path.cwd()).stdout
    known: dict[str, int] = {}
    for stanza in shown.split("\n\n"):
        fields = dict(line.split(": ", 1) for line in stanza.splitlines() if ": " in line and not line.startswith(" "))
        if "Package" in fields and fields.get("Size", "").isdigit():
            known.setdefault(fields["Package"], int(fields["Size"]))
    return known


def _download(folder: Path, names: list[str]) -> str:
    """Fetches the packages into `folder`; "" or what went wrong. All at once, then one by one what did not come."""
    done = _run(["apt-get", "download", "-q", *names], folder)
    if done.returncode == 0:
        return ""
    failed = _last_error(done.stderr)
    for name in names:
        if _deb(folder, name) is None:
            done = _run(["apt-get", "download", "-q", name], folder)
            if done.returncode != 0:
                failed = _last_error(done.stderr)
                if _no_network(done.stderr):
                    break  # every further try would wait as long
    return failed


def _last_error(stderr: str) -> str:
    lines = [line.strip() for line in stderr.splitlines() if line.startswith("E:")]
    return lines[-1] if lines else "apt-get gave no reason"


def _no_network(stderr: str) -> bool:
    return "Temporary failure resolving" in stderr or "Could not connect" in stderr or "Could not resolve" in stderr


def _deb(folder: Path, name: str) -> Path | None:
    found = sorted(path for path in folder.glob("*.deb") if path.name.startswith(f"{name}_"))
    return found[0] if found else None


@contextlib.contextmanager
def _unpacked(packages: Path, name: str | None, report: Report) -> Iterator[tuple[Path, str] | None]:
    """(folder of the unpacked package, its version) while the context lasts; None if it could not be had."""
    deb = _deb(packages, name) if name else None
    if deb is None:
        yield None
        return
    tree = packages / "tree"
    shutil.rmtree(tree, ignore_errors=True)
    tree.mkdir()
    try:
        done = _run(["dpkg-deb", "-x", str(deb), str(tree)], packages)
        if done.returncode != 0:
            report(f"{deb.name} cannot be unpacked: {done.stderr.strip() or 'dpkg-deb gave no reason'}")
        yield (tree, unquote(deb.name.split("_")[1])) if done.returncode == 0 else None
    finally:
        shutil.rmtree(tree, ignore_errors=True)


def _copy_sites(package: WebPackage, name: str, version: str, tree: Path, web: Path) -> list[tuple[dict[str, object], int]]:
    """Copies a package's HTML and copyright file; (entry for web.json, number of files) per site that has any."""
    entries: list[tuple[dict[str, object], int]] = []
    for k, site in enumerate(package.sites):
        folder = _folder(tree, site.folder)
        if folder is None:
            continue
        place = f"sites/{name}/{k}"
        count = 0
        for path, relative in _html_files(tree, folder):
            if site.skip and re.search(site.skip, relative):
                continue
            target = web / place / relative
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, target)
            count += 1
        if count:
            entry: dict[str, object] = {
                "folder": place,
                "base_url": site.base_url,
                "package": name,
                "version": version,
                "max_pages": site.max_pages,
                "aliases": list(site.aliases),
            }
            entries.append((entry, count))
    licence = _inside(tree, tree / _DOC / name / "copyright")
    if entries and licence is not None and licence.is_file():
        shutil.copyfile(licence, web / "sites" / name / "copyright")
    return entries


def _folder(tree: Path, pattern: str) -> Path | None:
    """The first folder below `tree` that the pattern matches, links resolved; None where there is none inside the tree."""
    for path in sorted(tree.glob(pattern)):
        resolved = _inside(tree, path)
        if resolved is not None and resolved.is_dir():
            return resolved
    return None


def _inside(tree: Path, path: Path) -> Path | None:
    """`path` with symbolic links resolved as in the installed package ("/usr" is the tree's); None if it leads out or nowhere."""
    parts = list(path.relative_to(tree).parts)
    at = tree
    for _ in range(200):  # more links than a package has; a loop of links ends here
        if not parts:
            return at if at.exists() else None
        part = parts.pop(0)
        if part == "..":
            if at == tree:
                return None
            at = at.parent
            continue
        step = at / part
        if step.is_symlink():
            target = Path(os.readlink(step))
            if target.is_absolute():
                at, parts = tree, [*target.parts[1:], *parts]
            else:
                parts = [*target.parts, *parts]
        else:
            at = step
    return None


def _html_files(tree: Path, folder: Path) -> Iterator[tuple[Path, str]]:
    """(file to read, its path below `folder`), sorted. A linked file counts under the link's name; linked folders are not entered."""
    for path in sorted(folder.rglob("*"), key=lambda p: p.relative_to(folder).as_posix()):
        if path.name.lower().endswith(ENDINGS):
            resolved = _inside(tree, path)
            if resolved is not None and resolved.is_file():
                yield resolved, path.relative_to(folder).as_posix()


def _text_lines(package: TextPackage, tree: Path) -> list[tuple[str, str]]:
    """(label, labelled line) of a package: pieces of its pages, at most LINES_PER_PACKAGE of each label, drawn by hash."""
    found: dict[str, list[str]] = {"hq": [], "cc": []}
    for label, pattern, files in package.rules:
        folder = _folder(tree, pattern)
        for name in list_files(folder) if folder else []:
            path = (folder or tree) / name
            if not re.search(files, name) or path.stat().st_size > HtmlLimits.page_bytes:
                continue
            words = extract_plain_text(decode(path.read_bytes()), main_content=True).split()
            found[label] += itertools.islice((f"__label__{label} {piece}" for piece in _pieces(words, name, label)), LINES_PER_FILE)
    return [(label, line) for label in found for line in sorted(set(found[label]), key=_order)[:LINES_PER_PACKAGE]]


def _pieces(words: list[str], name: str, label: str) -> Iterator[str]:
    """Runs of CHUNK_WORDS words; how long each is depends on the file's name and the place in it.

    A reference page with less text than a run (an index stub, a bare declaration) is a piece of its own: without any, a classifier
    takes what is short for whatever it likes.
    """
    least, most = CHUNK_WORDS
    if label == "cc" and 0 < len(words) < least:
        yield " ".join(words)
    at = 0
    while len(words) - at >= least:
        drawn = int.from_bytes(hashlib.blake2b(f"{name}:{at}".encode(), digest_size=4).digest(), "big")
        piece = words[at : at + least + drawn % (most - least + 1)]
        yield " ".join(piece)
        at += len(piece)


def _order(line: str) -> bytes:
    return hashlib.blake2b(line.encode(), digest_size=16).digest()


def _system() -> str:
    with contextlib.suppress(OSError):
        for line in Path("/etc/os-release").read_text(encoding="utf-8").splitlines():
            if line.startswith("PRETTY_NAME="):
                return line.partition("=")[2].strip('"')
    return "this machine's Debian"


def _write_json(path: Path, record: dict[str, object]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(record, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def _write_lines(path: Path, lines: list[str]) -> None:
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
