"""craw4llm.externals.locate: names of a Hugging Face repository, against a hub on loopback."""

import contextlib
import hashlib
import os
import socket
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from huggingface_hub import snapshot_download

from craw4llm.errors import InputError
from craw4llm.externals import ExternalDigests, locate
from craw4llm.fingerprint import External

COMMIT = "0123456789abcdef0123456789abcdef01234567"
CONTENT = b'{"model": "a tokenizer"}'

PROGRAM = """
import sys
from craw4llm.externals import ExternalDigests, locate
from craw4llm.errors import InputError
from craw4llm.fingerprint import External
external = External(name="tokenizer", path=sys.argv[1])
try:
    print(ExternalDigests(None)(external))
    print(locate(external).read_text())
except InputError as error:
    print("InputError:", error)
"""


class Hub(BaseHTTPRequestHandler):
    """What the hub answers for one file of one repository; everything else is missing."""

    asked: list[str]

    def do_HEAD(self) -> None:
        self._answer(body=False)

    def do_GET(self) -> None:
        self._answer(body=True)

    def _answer(self, body: bool) -> None:
        type(self).asked.append(f"{self.command} {self.path}")
        found = self.path == "/owner/name/resolve/main/tokenizer.json"
        content = CONTENT if found else b""
        self.send_response(200 if found else 404)
        self.send_header("Content-Length", str(len(content)))
        if found:
            self.send_header("X-Repo-Commit", COMMIT)
            self.send_header("ETag", f'"{hashlib.sha1(CONTENT).hexdigest()}"')
        else:
            self.send_header("X-Error-Code", "EntryNotFound")
        self.end_headers()
        if body:
            self.wfile.write(content)

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def hub() -> Iterator[str]:
    Hub.asked = []
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


def ask(name: str, hub: str, home: Path) -> list[str]:
    environment = os.environ | {"HF_ENDPOINT": hub, "HF_HOME": str(home), "HF_HUB_DISABLE_XET": "1", "HF_HUB_DISABLE_TELEMETRY": "1"}
    environment.pop("HF_HUB_OFFLINE", None)
    done = subprocess.run([sys.executable, "-c", PROGRAM, name], env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_a_file_of_a_repository_is_fetched_once_and_known_by_its_content(hub: str, tmp_path: Path) -> None:
    said = ask("hf:owner/name/tokenizer.json", hub, tmp_path)
    assert said == [hashlib.sha256(CONTENT).hexdigest(), CONTENT.decode()]
    assert any(line.startswith("GET") for line in Hub.asked)
    Hub.asked = []
    assert ask("hf:owner/name/tokenizer.json", hub, tmp_path) == said
    assert Hub.asked == []


def test_what_cannot_be_had_is_named(hub: str, tmp_path: Path) -> None:
    (said,) = ask("hf:owner/name/nowhere.json", hub, tmp_path)
    assert said.startswith("InputError: tokenizer: hf:owner/name/nowhere.json cannot be had: ")
    assert said.endswith("or download the file yourself and give its path")


@pytest.mark.parametrize("name", ["hf:owner/name/tokenizer.json", "hf:owner/name"])
def test_where_nobody_answers_it_gives_up_soon_and_says_so(tmp_path: Path, name: str) -> None:
    """huggingface_hub would try a file six times more, with pauses of 23 s together."""
    with socket.create_server(("127.0.0.1", 0)) as deaf:
        calls: list[None] = []

        def hang_up() -> None:
            with contextlib.suppress(OSError):  # closed below
                while True:
                    deaf.accept()[0].close()
                    calls.append(None)

        thread = threading.Thread(target=hang_up, daemon=True)
        thread.start()
        hub = f"http://127.0.0.1:{deaf.getsockname()[1]}"
        (said,) = ask(name, hub, tmp_path)
        deaf.shutdown(socket.SHUT_RDWR)
    thread.join(10)
    assert said.startswith(f"InputError: tokenizer: {name} cannot be had: it is not in the cache, and {hub} cannot be reached (")
    assert said.endswith("or download the file yourself and give its path") and len(calls) == 2


def test_a_network_that_is_not_there_is_asked_for_once(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def refused(request: urllib.request.Request, timeout: float) -> None:
        asked.append(request.full_url)
        raise urllib.error.URLError(OSError("Network is unreachable"))

    monkeypatch.setattr("urllib.request.urlopen", refused)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://hub.invalid")
    for name in ("a", "b", "c"):
        with pytest.raises(InputError, match=f"hf:nobody/{name}/file cannot be had: it is not in the cache.*Network is unreachable"):
            locate(External(name="scorer", path=f"hf:nobody/{name}/file"))
    assert asked == ["http://hub.invalid"] * 2  # it is tried twice


def test_all_files_of_a_repository_from_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    repository = tmp_path / "models--owner--encoder"
    files = {"config.json": b"{}", "model.safetensors": b"weights"}
    for name, content in files.items():
        blob = repository / "blobs" / hashlib.sha1(content).hexdigest()
        blob.parent.mkdir(parents=True, exist_ok=True)
        blob.write_bytes(content)
        link = repository / "snapshots" / COMMIT / name
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(blob)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(COMMIT)
    external = External(name="encoder", path="hf:owner/encoder")
    monkeypatch.setattr("huggingface_hub.snapshot_download", partial(snapshot_download, cache_dir=str(tmp_path)))
    assert sorted(path.name for path in locate(external).iterdir()) == sorted(files)
    copied = tmp_path / "copy"
    copied.mkdir()
    for name, content in files.items():
        (copied / name).write_bytes(content)
    assert ExternalDigests(None)(external) == ExternalDigests(None)(External(name="encoder", path=str(copied)))


@pytest.mark.parametrize("path", ["hf:", "hf:gpt2", "hf:owner/name/", "hf:owner/name@/file", "hf:/owner/name"])
def test_a_name_of_the_wrong_form_is_refused(path: str) -> None:
    with pytest.raises(InputError, match="expected hf:OWNER/NAME/FILE"):
        locate(External(name="tokenizer", path=path))
