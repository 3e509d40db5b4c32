"""External inputs: where they lie, and their content digests, remembered by path, size and modification time.

    locate(External(name="tokenizer", path="hf:EleutherAI/gpt-neox-20b/tokenizer.json"))   -> a file of the Hugging Face cache
    digests = ExternalDigests(root / "externals.json")
    digests(External(name="corpus", path="web.parquet"))   -> 64 hexadecimal digits

A path is one of this machine, or `hf:OWNER/NAME[@REVISION][/FILE]`: a file, or all files, of a Hugging Face model repository. These are
fetched once, into the cache that `HF_HOME` names, and taken from there ever after, so that a run never sees two contents. The content,
not the name, is the identity.

A file's digest is the SHA-256 of its bytes. A folder's is the SHA-256 of one line per regular file below it, sorted by path:
`<sha256>  <relative path>`. A ClueWeb22 folder is told by names, sizes and
offsets (craw4llm.corpus.clueweb22_files). The memory belongs to execution: deleting it costs one more read of the files.
"""

import functools
import hashlib
import json
import re
import time
from pathlib import Path

from craw4llm.corpus.clueweb22_files import digest, is_clueweb22, stamp
from craw4llm.errors import InputError
from craw4llm.execution import process_name
from craw4llm.fingerprint import External

HUB_ANSWERS_WITHIN_S = 5.0


def sha256_file(path: Path) -> str:
    """SHA-256 of a file's bytes, hexadecimal."""
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


_HUB = re.compile(r"hf:(?P<repo>[\w.-]+/[\w.-]+)(?:@(?P<revision>[\w.-]+))?(?:/(?P<file>[^/].*))?")


def locate(external: External) -> Path:
    """The file or folder of an external input on this machine. Raises InputError for a Hugging Face name that cannot be had; whether a
    path of this machine exists is for the caller to find out."""
    if not external.path.startswith("hf:"):
        return Path(external.path)
    if (parts := _HUB.fullmatch(external.path)) is None:
        raise InputError(
            f"{external.name}: {external.path!r} names nothing; expected hf:OWNER/NAME/FILE, hf:OWNER/NAME@REVISION/FILE, "
            "or hf:OWNER/NAME for all files"
        )
    # Imported here: it takes half a second, and few runs name a repository.
    from huggingface_hub import constants, hf_hub_download, snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    def fetch(cached: bool) -> Path:
        if parts["file"]:
            return Path(hf_hub_download(parts["repo"], parts["file"], revision=parts["revision"], local_files_only=cached))
        return Path(snapshot_download(parts["repo"], revision=parts["revision"], local_files_only=cached))

    try:
        try:
            return fetch(cached=True)
        except LocalEntryNotFoundError:
            if not constants.HF_HUB_OFFLINE and (why := _unreachable(constants.ENDPOINT)):
                raise OSError(f"it is not in the cache, and {constants.ENDPOINT} cannot be reached ({why})") from None
            return fetch(cached=False)
    except (HfHubHTTPError, HFValidationError, OSError, ValueError) as error:  # LocalEntryNotFoundError is an OSError
        raise InputError(
            f"{external.name}: {external.path} cannot be had: {str(error).splitlines()[0]}; check the name and the network, "
            "or download the file yourself and give its path"
        ) from error


@functools.cache
def _unreachable(endpoint: str) -> str:
    """Why no server answers there, asked once; "" where one does, whatever it says. Without this a machine with no network waits a third
    of a minute for each file: huggingface_hub tries five times, and cannot be told not to."""
    import ssl  # here, for the same reason as above
    import urllib.error
    import urllib.request

    why = ""
    for attempt in range(2):
        time.sleep(attempt)
        try:
            with urllib.request.urlopen(urllib.request.Request(endpoint, method="HEAD"), timeout=HUB_ANSWERS_WITHIN_S):
                return ""
        except urllib.error.HTTPError:
            return ""
        except OSError as error:
            why = str(getattr(error, "reason", error))
            if isinstance(getattr(error, "reason", error), ssl.SSLCertVerificationError):
                return ""  # a server is there; huggingface_hub brings certificates of its own
    return why


class ExternalDigests:
    """Callable: External -> content digest. Raises InputError if the file or folder is missing or unreadable."""

    def __init__(self, memory: Path | None) -> None:
        self.memory = memory
        self._known: dict[str, str] = {}
        self._told: dict[External, str] = {}  # one plan sees one content, and looks once
        self._changed = False
        if memory is not None and memory.is_file():
            try:
                self._known = dict(json.loads(memory.read_text()))
            except (OSError, ValueError, TypeError):
                self._known = {}  # it only saves time: a damaged memory is read anew

    def __call__(self, external: External) -> str:
        if external not in self._told:
            self._told[external] = self._digest(external)
        return self._told[external]

    def _digest(self, external: External) -> str:
        path = locate(external)
        if not path.exists():
            raise InputError(
                f"{external.name}: {external.path} does not exist (looked in {Path.cwd()}); give the path of the {external.name}"
            )
        try:
            if is_clueweb22(path):
                return self._clueweb22(path)
            if path.is_dir():
                return self._folder(path, external)
            return self._file(path)
        except OSError as error:
            raise InputError(f"{external.name}: {external.path} cannot be read: {error.strerror or error}") from error

    def save(self) -> None:
        """Keep what was learnt; a root that cannot be written is no error here, the stages will say so."""
        if self.memory is None or not self._changed:
            return
        try:
            self.memory.parent.mkdir(parents=True, exist_ok=True)
            temporary = self.memory.with_name(f"{self.memory.name}.{process_name()}")
            temporary.write_text(json.dumps(self._known, sort_keys=True))
            temporary.replace(self.memory)
        except OSError:
            return
        self._changed = False

    def _file(self, path: Path) -> str:
        status = path.stat()
        key = f"{path.resolve()}|{status.st_size}|{status.st_mtime_ns}"
        if key not in self._known:
            self._known[key] = sha256_file(path)
            self._changed = True
        return self._known[key]

    def _clueweb22(self, path: Path) -> str:
        key = f"{path.resolve()}|ClueWeb22|{stamp(path)}"
        if key not in self._known:
            self._known[key] = digest(path)
            self._changed = True
        return self._known[key]

    def _folder(self, path: Path, external: External) -> str:
        linked = external.path.startswith("hf:")  # the files of the Hugging Face cache are links
        files = sorted(p for p in path.rglob("*") if p.is_file() and (linked or not p.is_symlink()))
        if not files:
            raise InputError(f"{external.name}: the folder {external.path} holds no files")
        lines = [f"{self._file(p)}  {p.relative_to(path).as_posix()}\n" for p in files]
        return hashlib.sha256("".join(lines).encode()).hexdigest()
