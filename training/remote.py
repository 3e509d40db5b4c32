"""Shards that are kept elsewhere: fetched into the artifact that they belong to, before the first step.

    fetch_missing(tokens, "s3://bucket/artifacts", workers=4)

The address is that of a copy of the artifact root (`craw4llm mirror push` makes one): s3:// through fsspec where s3fs is installed; else
and for gs://, hf://, azure://, oci://, sftp:// mosaicml-streaming's downloaders, each with the client library of its service; or a folder.
An artifact that is to be completed has its manifest here; every other file of it may be missing. A file is fetched under another name,
compared with the manifest's size and SHA-256, and renamed: two runs that want the same one do not meet, and a copy that is damaged or of
another run is named before any work. Afterwards the artifact is as if it had been made here, so the order of the samples cannot differ.
"""

import importlib.util
import os
import uuid
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from urllib.parse import urlparse

from craw4llm.artifact import Artifact
from craw4llm.errors import ArtifactError, ConfigError
from craw4llm.externals import sha256_file

TIMEOUT_S = 600.0  # for one file


def fetch_missing(artifact: Artifact, address: str, workers: int = 1) -> int:
    """Fetches the files of the artifact's manifest that are not here; returns how many. An empty address fetches nothing.

    Raises ConfigError for an address that no downloader serves, ArtifactError for a file that cannot be had or is not the manifest's.
    """
    missing = [entry for entry in artifact.manifest.get("files", ()) if not (artifact.path / entry["path"]).exists()]
    if not address or not missing:
        return 0
    _downloader(address)  # before the threads, for the error
    with ThreadPoolExecutor(max(1, workers), thread_name_prefix="fetch") as pool:
        for _ in pool.map(lambda entry: _fetch(artifact, address, entry), missing):
            pass
    return len(missing)


def _fetch(artifact: Artifact, address: str, entry: Mapping[str, Any]) -> None:
    remote = f"{address.rstrip('/')}/{artifact.stage}/{artifact.fingerprint}/{entry['path']}"
    final: Path = artifact.path / entry["path"]
    if not final.resolve().is_relative_to(artifact.path.resolve()):  # the manifest may come from elsewhere, too
        raise ArtifactError(f"the manifest of {artifact.path} names {entry['path']!r}, which is outside of the artifact; delete the folder")
    partial = final.with_name(f".fetching-{uuid.uuid4().hex}-{final.name}")
    final.parent.mkdir(parents=True, exist_ok=True)
    try:
        try:
            _downloader(address).download(remote, str(partial), TIMEOUT_S)
        except ImportError as error:  # downloaders import their client when they first need it
            package = (error.name or "").split(".")[0]
            raise ConfigError(f"shards_from is {address!r}, which needs the package {package}: pip install {package}") from error
        except Exception as error:  # every service has its own
            raise ArtifactError(
                f"{remote} cannot be fetched ({type(error).__name__}: {error}); {final} is not here either: complete the copy, or run the "
                "stage that makes it here"
            ) from error
        size, found = partial.stat().st_size, sha256_file(partial)
        if size != entry["size_bytes"] or found != entry["sha256"]:
            raise ArtifactError(
                f"{remote} has {size} bytes and the SHA-256 {found[:12]}..., the manifest of {artifact.path} says {entry['size_bytes']} "
                f"and {entry['sha256'][:12]}...: the copy is damaged or of another run; copy it anew"
            )
        os.replace(partial, final)
    finally:
        partial.unlink(missing_ok=True)


class _Fsspec:
    def download(self, remote: str, local: str, timeout: float) -> None:
        from craw4llm.mirror import fetch_file

        fetch_file(remote, Path(local))


def _has_s3fs() -> bool:
    return importlib.util.find_spec("s3fs") is not None


def _downloader(address: str) -> Any:
    from craw4llm.tokens.streaming_shim import streaming

    streaming()
    from streaming.base.storage.download import CloudDownloader

    scheme = urlparse(address).scheme
    if scheme == "s3" and _has_s3fs():
        return _Fsspec()
    try:
        return CloudDownloader.get(address if scheme else None)
    except ValueError as error:
        raise ConfigError(
            f"shards_from is {address!r}; expected a folder, or an address that begins with s3://, gs://, hf://, azure://, oci:// or sftp://"
        ) from error
