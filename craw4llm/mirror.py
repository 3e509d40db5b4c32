"""Copies of artifacts in an object store, or any place that fsspec reaches: `craw4llm mirror push|pull|list`.

    push(artifact, "s3://bucket/craw4llm")        the files, then the manifest; what is there already is not sent again
    pull("tokenize", "3f9c2a71b0de", "s3://bucket/craw4llm", Store(root))

A copy lies where the artifact lies in the root, `<address>/<stage>/<fingerprint>/`, and the manifest is written last: a folder there with a
manifest is complete. What is pulled is compared with the manifest, file by file, and then renamed into the root as a stage's own work would
be. `pull(..., manifests_only=True)` brings the manifest alone: a machine that trains fetches the shards it lacks with `run --shards-from`.

Addresses: a folder, s3:// (package s3fs), gs:// (gcsfs), az:// (adlfs) and what else fsspec knows. Credentials and endpoint are the client
library's own: AWS_PROFILE, AWS_ENDPOINT_URL and so on; an address that holds a password is refused. Nothing is deleted there.
"""

import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from craw4llm.artifact import MANIFEST, Artifact, Store
from craw4llm.errors import ArtifactError, ConfigError, StorageError
from craw4llm.externals import sha256_file

THREADS = 8
Say = Callable[[str], None]


def push(artifact: Artifact, address: str, say: Say = print) -> int:
    """Copies a finished artifact. Returns the bytes sent: 0 where it is there. Raises ArtifactError where another one has its name
    there."""
    fs, base = _place(address)
    folder = f"{base}/{artifact.stage}/{artifact.fingerprint}"
    there = _manifest(fs, f"{folder}/{MANIFEST}")
    if there is not None:
        if there["digest"] != artifact.digest:
            raise ArtifactError(
                f"{folder} has the digest {there['digest'][:12]}..., this artifact {artifact.digest[:12]}...: made by another "
                "version or machine; push to another address, or delete the copy"
            )
        say(f"{artifact.stage} {artifact.fingerprint}: is there")
        return 0
    sent = sum(_in_threads(lambda entry: _send(fs, artifact, folder, entry), artifact.manifest["files"]))
    with _errors(f"{folder}/{MANIFEST}"):
        fs.pipe_file(f"{folder}/{MANIFEST}", (artifact.path / MANIFEST).read_bytes())
    say(f"{artifact.stage} {artifact.fingerprint}: {len(artifact.manifest['files'])} files, {sent:,} bytes sent")
    return sent


def pull(stage: str, fingerprint: str, address: str, store: Store, *, manifests_only: bool = False, say: Say = print) -> Artifact:
    """Brings an artifact here, unless it is. Raises ArtifactError where it is not there, or is not what its manifest says."""
    fs, base = _place(address)
    folder = f"{base}/{stage}/{fingerprint}"
    with store.lock(stage, fingerprint):
        found = store.find(stage, fingerprint)
        if found is not None and (manifests_only or not _missing(found)):
            return found
        manifest = _manifest(fs, f"{folder}/{MANIFEST}")
        if manifest is None:
            raise ArtifactError(
                f"{address}/{stage}/{fingerprint} has no manifest: it was never pushed there, or not to its end; push it again"
            )
        if found is not None and manifest["digest"] != found.digest:
            raise ArtifactError(
                f"{folder} has the digest {manifest['digest'][:12]}..., the manifest here {found.digest[:12]}...: its files are another "
                f"artifact's; delete {found.path} to take the copy"
            )
        final = store.path(stage, fingerprint)
        final.parent.mkdir(parents=True, exist_ok=True)
        partial = Path(tempfile.mkdtemp(prefix=f".pulled-{fingerprint}-", dir=final.parent))
        try:
            entries = [] if manifests_only else [e for e in manifest["files"] if found is None or not (final / e["path"]).exists()]
            _in_threads(lambda entry: _receive(fs, folder, partial, entry), entries)
            if found is None:
                (partial / MANIFEST).write_text(json.dumps(manifest, indent=2, sort_keys=True))
                if final.exists():  # without a manifest: a deletion that was interrupted
                    shutil.rmtree(final)
                partial.chmod(0o755)
                os.rename(partial, final)
            else:  # its manifest came before; now its files
                for entry in entries:
                    (final / entry["path"]).parent.mkdir(parents=True, exist_ok=True)
                    os.replace(partial / entry["path"], final / entry["path"])
        finally:
            shutil.rmtree(partial, ignore_errors=True)
    say(f"{stage} {fingerprint}: {'manifest' if manifests_only else f'{len(entries)} files'} brought")
    return store.open(stage, fingerprint)


def listed(address: str) -> list[dict[str, Any]]:
    """The manifests of all complete copies, by stage and fingerprint."""
    fs, base = _place(address)
    with _errors(base):
        paths = sorted(fs.glob(f"{base}/*/*/{MANIFEST}"))
    return [manifest for path in paths if (manifest := _manifest(fs, path)) is not None]


def fetch_file(address: str, to: Path) -> None:
    """One file of a copy. Raises what the client library raises."""
    fs, path = _place(address)
    fs.get_file(path, str(to))


def _send(fs: Any, artifact: Artifact, folder: str, entry: dict[str, Any]) -> int:
    remote, here = f"{folder}/{entry['path']}", artifact.path / entry["path"]
    with _errors(remote):
        if not here.is_file():
            raise ArtifactError(f"{here} is missing; run `craw4llm verify`, nothing incomplete is pushed")
        if sha256_file(here) != entry["sha256"]:
            raise ArtifactError(f"{here}: its SHA-256 is not the manifest's; run `craw4llm verify`, nothing damaged is pushed")
        fs.makedirs(remote.rpartition("/")[0], exist_ok=True)
        fs.put_file(str(here), remote)
        size = fs.info(remote)["size"]
        if size != entry["size_bytes"]:
            raise StorageError(f"{remote} has {size} bytes after it was sent, expected {entry['size_bytes']}; push again")
    return int(size)


def _receive(fs: Any, folder: str, partial: Path, entry: dict[str, Any]) -> int:
    to = partial / entry["path"]
    if not to.resolve().is_relative_to(partial.resolve()):
        raise ArtifactError(f"{folder}: the manifest names {entry['path']!r}, which is outside of the artifact; this is no copy of ours")
    to.parent.mkdir(parents=True, exist_ok=True)
    with _errors(f"{folder}/{entry['path']}"):
        fs.get_file(f"{folder}/{entry['path']}", str(to))
    if to.stat().st_size != entry["size_bytes"] or sha256_file(to) != entry["sha256"]:
        raise ArtifactError(f"{folder}/{entry['path']} is not what its manifest says: the copy is damaged; delete it there and push again")
    return int(entry["size_bytes"])


def _missing(artifact: Artifact) -> list[str]:
    return [entry["path"] for entry in artifact.manifest["files"] if not (artifact.path / entry["path"]).exists()]


def _manifest(fs: Any, path: str) -> dict[str, Any] | None:
    with _errors(path):
        fs.invalidate_cache()
        try:
            return dict(json.loads(fs.cat_file(path)))
        except FileNotFoundError:
            return None


def _in_threads(work: Callable[[dict[str, Any]], int], entries: Iterable[dict[str, Any]]) -> list[int]:
    with ThreadPoolExecutor(THREADS, thread_name_prefix="mirror") as pool:
        return list(pool.map(work, entries))


def _place(address: str) -> tuple[Any, str]:
    """The file system of an address, and the path in it."""
    try:
        import fsspec
    except ImportError as error:
        raise ConfigError("mirror needs the package fsspec: pip install 'craw4llm[clusters]'") from error
    url = urlsplit(address)
    if url.password or "@" in url.netloc:
        raise ConfigError(
            "mirror: the address holds a password; expected s3://BUCKET/FOLDER, and credentials where the client library looks for them"
        )
    try:
        fs, path = fsspec.core.url_to_fs(address.rstrip("/"))
    except (ImportError, ValueError) as error:
        raise ConfigError(f"mirror: {address!r} cannot be used: {error}") from error
    return fs, path


class _errors:
    """Names the place where a client library failed; each has exceptions of its own."""

    def __init__(self, where: str) -> None:
        self.where = where

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if isinstance(error, Exception) and not isinstance(error, ArtifactError | ConfigError | StorageError):
            raise StorageError(
                f"{self.where}: {type(error).__name__}: {error}; check the address, the credentials and the network"
            ) from error
