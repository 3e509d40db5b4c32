"""The demo web, with package tools that are small scripts: packages are tar files in a folder."""

import json
import os
import re
import subprocess
import sys
import tarfile
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from craw4llm import demo_web
from craw4llm.artifact import Artifact
from craw4llm.configs import CorpusConfig, ScorerConfig
from craw4llm.corpus.html_tree import open_web
from craw4llm.corpus.urls import canonical_url
from craw4llm.demo_web import TextPackage, WebPackage, WebSite, fetch
from craw4llm.errors import StorageError
from craw4llm.fingerprint import External
from craw4llm.stage import Stage

Build = Callable[[Stage], Artifact]

TOOLS = {
    "apt-cache": r"""
        shift 2
        for name in "$@"; do
            [ -e "$REPO/$name.tar" ] && printf 'Package: %s\nVersion: 1:2.0-1\nSize: 1000\nDescription: x\n Package: fooled\n\n' "$name"
        done
        exit 0""",
    "apt-get": r"""
        shift 2
        echo "$@" >> "$REPO/asked"
        [ -e "$REPO/wait" ] && sleep 30
        code=0
        for name in "$@"; do
            if [ -e "$REPO/$name.tar" ] && [ ! -e "$REPO/$name.gone" ]; then
                [ "$#" -gt 1 ] && [ -n "$(ls "$REPO" | grep '\.gone$')" ] || cp "$REPO/$name.tar" "./${name}_1%3a2.0-1_all.deb"
            else
                echo "E: Failed to fetch $name 404 Not Found" >&2; code=100
            fi
        done
        exit $code""",
    "dpkg-deb": r"""
        [ "$1" = "-x" ] || exit 2
        tar -xf "$2" -C "$3" """,
}


def prose(seed: int, words: int = 400) -> str:
    return " ".join(f"word{(seed * 31 + k * k) % 97}" for k in range(words))


def page(text: str, *links: str) -> str:
    return f"<html><body><main><p>{text}</p>{''.join(f'<a href={link}>link</a>' for link in links)}</main></body></html>"


class Repository:
    """The packages that the machine under test knows, and its tools."""

    def __init__(self, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.root = root
        self.bin = root / "bin"
        self.bin.mkdir(parents=True)
        for name, script in TOOLS.items():
            self.tool(name, script)
        monkeypatch.setenv("REPO", str(root))
        monkeypatch.setenv("PATH", str(self.bin))

    def tool(self, name: str, script: str) -> None:
        path = self.bin / name
        path.write_text(f"#!/bin/sh\nPATH=/usr/bin:/bin\n{script}\n")
        path.chmod(0o755)

    def package(self, name: str, files: Mapping[str, str], links: Mapping[str, str] | None = None) -> None:
        with tarfile.open(self.root / f"{name}.tar", "w") as tar:
            for path, content in {f"usr/share/doc/{name}/copyright": "Licence: free", **files}.items():
                source = self.root / "content"
                source.write_text(content)
                tar.add(source, path)
            for path, target in (links or {}).items():
                entry = tarfile.TarInfo(path)
                entry.type, entry.linkname = tarfile.SYMTYPE, target
                tar.addfile(entry)


WEB = (
    WebPackage(
        ("one-doc-9", "one-doc-8"), (WebSite("usr/share/doc/one-doc*/html", "https://one.example/", None, ("https://one.example/old/",)),)
    ),
    WebPackage(("two-doc",), (WebSite("usr/share/doc/two-doc/html", "https://two.example/", 3, (), r"^skipped/"),)),
)
TEXT = (
    TextPackage("book", (("hq", "usr/share/doc/book", r"^chapter"),)),
    TextPackage("api", (("cc", "usr/share/doc/api/html", r""),)),
)


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Repository:
    monkeypatch.setattr(demo_web, "WEB", WEB)
    monkeypatch.setattr(demo_web, "TEXT", TEXT)
    monkeypatch.setattr(demo_web, "MIN_PAGES", 5)
    monkeypatch.setattr(demo_web, "MIN_LINES", 3)
    (tmp_path / "outside.html").write_text("a secret of this machine")
    made = Repository(tmp_path / "repository", monkeypatch)
    made.package(
        "one-doc-8",
        {f"usr/share/doc/one-doc-8/html/p{k}.html": page(prose(k), f"p{k + 1}.html", "/gone.html") for k in range(6)}
        | {"usr/share/doc/one-doc-8/html/logo.png": "not html", "usr/share/doc/one-doc-8/README.html": "not in the folder"},
        links={
            "usr/share/doc/one-doc-8/html/index.html": "p0.html",
            "usr/share/doc/one-doc-8/html/absolute.html": "/usr/share/doc/one-doc-8/html/p1.html",
            "usr/share/doc/one-doc-8/html/out.html": f"../../../../../{'../' * 12}{tmp_path.relative_to('/')}/outside.html",
            "usr/share/doc/one-doc-8/html/host.html": str(tmp_path / "outside.html"),
            "usr/share/doc/one-doc-8/html/loop.html": "loop.html",
            "usr/share/doc/one-doc-8/html/nowhere.html": "missing.html",
        },
    )
    made.package(
        "two-doc",
        {f"usr/share/doc/real/p{k}.html": page(prose(k + 50), "https://one.example/old/p1.html") for k in range(4)}
        | {"usr/share/doc/real/skipped/a.html": "left out"},
        links={"usr/share/doc/two-doc/html": "../real"},
    )
    made.package(
        "book",
        {f"usr/share/doc/book/chapter{k}.html": page(prose(k + 100)) for k in range(5)} | {"usr/share/doc/book/index.html": page(prose(7))},
    )
    made.package("api", {f"usr/share/doc/api/html/{k}.html": page(prose(k + 200)) for k in range(4)})
    return made


def sites(folder: Path) -> dict[str, list[str]]:
    root = folder / "web" / "sites"
    return {p.name: sorted(f.relative_to(p).as_posix() for f in p.rglob("*") if f.is_file()) for p in sorted(root.iterdir())}


def test_success(repository: Repository, tmp_path: Path, build: Build) -> None:
    folder = tmp_path / "data" / "demo-web"
    said: list[str] = []
    result = fetch(folder, said.append)
    assert "12 HTML files of 2 packages" in result and "left out" not in result
    assert sites(folder) == {
        "one-doc-8": ["0/absolute.html", "0/index.html", *(f"0/p{k}.html" for k in range(6)), "copyright"],
        "two-doc": [*(f"0/p{k}.html" for k in range(4)), "copyright"],
    }
    assert not any(path.is_symlink() for path in folder.rglob("*"))
    assert "secret" not in "".join(path.read_text() for path in folder.rglob("*.html"))
    record = json.loads((folder / "web" / "web.json").read_text())
    assert "one-doc-8 1:2.0-1, two-doc 1:2.0-1" in record["origin"]
    assert [(s["package"], s["version"], s["max_pages"]) for s in record["sites"]] == [
        ("one-doc-8", "1:2.0-1", None),
        ("two-doc", "1:2.0-1", 3),
    ]

    lines = (folder / "scorer_text.txt").read_text().splitlines()
    comments = [line for line in lines if line.startswith("# ")]
    assert lines[: len(comments)] == comments
    assert "book 1:2.0-1, api 1:2.0-1" in comments[0] and any("licence" in line for line in comments)
    labels = [line.split(" ", 1)[0] for line in lines[len(comments) :]]
    assert labels.count("__label__hq") == labels.count("__label__cc") >= 3
    assert all(60 <= len(line.split()) - 1 <= 250 for line in lines[len(comments) :])
    assert sorted(path.name for path in (tmp_path / "data").iterdir()) == [".demo-web.lock", "demo-web"]

    corpus = build(Stage(CorpusConfig(source=External(name="corpus", path=str(folder / "web")))))
    assert corpus.count("pages") == 8 + 3
    assert corpus.count("links") > 5


def test_a_relative_folder(repository: Repository, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert "12 HTML files of 2 packages" in fetch(Path("data/demo-web"), lambda line: None)


def test_a_finished_folder_is_kept(repository: Repository, tmp_path: Path) -> None:
    folder = tmp_path / "demo-web"
    fetch(folder, lambda line: None)
    before = {path: path.stat().st_mtime_ns for path in folder.rglob("*")}
    (repository.root / "asked").unlink()
    started = time.monotonic()
    result = fetch(folder, lambda line: None)
    assert time.monotonic() - started < 1
    assert "is there already: 2 documentation packages" in result
    assert {path: path.stat().st_mtime_ns for path in folder.rglob("*")} == before
    assert not (repository.root / "asked").exists()


def test_equal_packages_give_equal_bytes(repository: Repository, tmp_path: Path) -> None:
    for name in ("a", "b"):
        fetch(tmp_path / name, lambda line: None)
    contents = [{p.relative_to(tmp_path / n): p.read_bytes() for p in (tmp_path / n).rglob("*") if p.is_file()} for n in ("a", "b")]
    assert contents[0] == contents[1]


def test_a_package_that_cannot_be_had_is_left_out_and_named(repository: Repository, tmp_path: Path) -> None:
    (repository.root / "two-doc.gone").touch()
    said: list[str] = []
    result = fetch(tmp_path / "demo-web", said.append)
    assert "8 HTML files of 1 packages" in result and "left out: two-doc" in result
    assert any("left out" in line and "two-doc" in line and "404 Not Found" in line for line in said)
    assert "left out: two-doc" in json.loads((tmp_path / "demo-web" / "web" / "web.json").read_text())["origin"]
    asked = (repository.root / "asked").read_text().splitlines()
    assert asked[0].split() == ["one-doc-8", "two-doc", "book", "api"]  # all at once; then what did not come
    assert set(asked[1:]) == {"one-doc-8", "two-doc", "book", "api"}


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        ("no tools", "apt-cache is not installed"),
        ("no dpkg", "dpkg-deb is not installed"),
        ("empty lists", "are its lists empty"),
        ("no network", "only 0 pages could be had"),
        ("few pages", "only 4 pages could be had"),
        ("no scorer text", "only 0 lines of scorer text"),
        ("broken packages", "only 0 pages could be had"),
    ],
)
def test_without_packages_the_synthetic_web_takes_their_place(
    repository: Repository, tmp_path: Path, build: Build, monkeypatch: pytest.MonkeyPatch, fault: str, reason: str
) -> None:
    root = repository.root
    if fault == "no tools":
        monkeypatch.setenv("PATH", str(tmp_path))
    elif fault == "no dpkg":
        (repository.bin / "dpkg-deb").unlink()
    elif fault == "empty lists":
        for path in root.glob("*.tar"):
            path.unlink()
    elif fault == "no network":
        repository.tool("apt-get", "echo 'E: Failed to fetch http://x Temporary failure resolving' >&2; exit 100")
    elif fault == "few pages":
        (root / "one-doc-8.tar").unlink()
    elif fault == "no scorer text":
        (root / "api.tar").unlink()
    else:
        repository.tool("dpkg-deb", "echo 'dpkg-deb: not a Debian archive' >&2; exit 2")
    folder = tmp_path / "demo-web"
    said: list[str] = []
    result = fetch(folder, said.append)
    record = json.loads((folder / "web" / "web.json").read_text())
    assert record["kind"] == "synthetic"
    assert reason in record["reason"] and reason in result and any(reason in line for line in said)
    assert record["pages"] >= 6000
    if fault == "broken packages":
        assert any("cannot be unpacked: dpkg-deb: not a Debian archive" in line for line in said)
    assert sorted(path.name for path in folder.iterdir()) == ["scorer_text.txt", "web"]
    assert [path.name for path in (folder / "web").iterdir()] == ["web.json"]
    assert "synthetic web" in fetch(folder, said.append)
    corpus = build(Stage(CorpusConfig(source=External(name="corpus", path=str(folder / "web")))))
    assert reason in corpus.manifest["notes"]["origin"]


def test_the_scorer_text_trains_a_scorer(repository: Repository, tmp_path: Path, build: Build) -> None:
    (repository.bin / "apt-get").unlink()
    fetch(tmp_path / "demo-web", lambda line: None)
    text = External(name="scorer text", path=str(tmp_path / "demo-web" / "scorer_text.txt"))
    assert build(Stage(ScorerConfig(kind="train_fasttext", source=text))).count("training_lines") == 2000


def test_an_interrupted_attempt_does_not_count(repository: Repository, tmp_path: Path) -> None:
    (repository.root / "wait").touch()
    folder = tmp_path / "demo-web"
    code = (
        "import sys; from pathlib import Path; import tests.craw4llm.test_demo_web as t; from craw4llm import demo_web\n"
        "demo_web.WEB, demo_web.TEXT, demo_web.MIN_PAGES, demo_web.MIN_LINES = t.WEB, t.TEXT, 5, 3\n"
        "demo_web.fetch(Path(sys.argv[1]), print)\n"
    )
    root = Path(__file__).resolve().parents[2]
    process = subprocess.Popen([sys.executable, "-c", code, str(folder)], cwd=root, env={**os.environ, "PYTHONPATH": str(root)})
    deadline = time.monotonic() + 30
    while not (repository.root / "asked").exists():
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.05)
    process.kill()
    process.wait()
    assert not folder.exists()
    assert (tmp_path / ".demo-web.partial").exists()
    (repository.root / "wait").unlink()
    assert "12 HTML files" in fetch(folder, lambda line: None)
    assert not (tmp_path / ".demo-web.partial").exists()


def test_two_at_once_fetch_once(repository: Repository, tmp_path: Path) -> None:
    results: list[str] = []
    threads = [threading.Thread(target=lambda: results.append(fetch(tmp_path / "demo-web", lambda line: None))) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted("is there already" in result for result in results) == [False, True]
    assert len((repository.root / "asked").read_text().splitlines()) == 1


def test_what_is_in_the_way_is_left_alone(repository: Repository, tmp_path: Path) -> None:
    folder = tmp_path / "mine"
    folder.mkdir()
    assert "12 HTML files" in fetch(folder, lambda line: None)  # an empty folder is no obstacle
    other = tmp_path / "other"
    other.mkdir()
    (other / "thesis.txt").write_text("years of work")
    with pytest.raises(StorageError, match="exists and is no demo web"):
        fetch(other, lambda line: None)
    assert (other / "thesis.txt").read_text() == "years of work"


def test_the_pinned_lists_are_sound(tmp_path: Path) -> None:
    web_names = [name for package in demo_web.WEB for name in package.names]
    text_names = [package.name for package in demo_web.TEXT]
    assert len(set(web_names + text_names)) == len(web_names) + len(text_names)  # no text of the web trains its scorer
    folders = []
    for k, package in enumerate(demo_web.WEB):
        for j, site in enumerate(package.sites):
            re.compile(site.skip)
            for url in (site.base_url, *site.aliases):
                assert url == canonical_url(url), url
            path = tmp_path / f"{k}-{j}"
            path.mkdir()
            (path / "index.html").write_text("x")
            folders.append(
                {"folder": path.name, "base_url": site.base_url, "package": package.names[0], "version": "1", "aliases": list(site.aliases)}
            )
    (tmp_path / "web.json").write_text(json.dumps({"kind": "html_tree", "origin": "x", "sites": folders}))
    assert open_web(tmp_path).records == len(folders)
    assert len({site["base_url"] for site in folders}) == len(folders)
