"""Looking at what is in an artifact root: `craw4llm show`, `verify` and `gc`."""

import json
import shutil
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from craw4llm.artifact import Artifact, Store
from craw4llm.errors import ArtifactError
from craw4llm.runner import read_index

_NO_STAGES = ("index", "locks", "logs", "memo")


def show(name: str | None, root: Path, declared: Sequence[str]) -> str:
    """Text for `craw4llm show [NAME]`: all experiments, the runs of one, or one artifact."""
    if name is None:
        lines = ["Declared experiments:"]
        for experiment in declared:
            runs = read_index(root / "index" / f"{experiment}.json")
            lines.append(f"  {experiment}: {len(runs)} recorded runs in {root}")
        return "\n".join(lines)
    runs = read_index(root / "index" / f"{name}.json")
    if runs:
        return "\n".join(_runs(name, runs, Store(root)))
    found = [a for a in artifacts(root) if a.fingerprint.startswith(name)]
    if not found:
        known = ", ".join(declared) or "none"
        raise ArtifactError(f"{name!r} is no experiment with runs in {root} and no fingerprint there (declared experiments: {known})")
    return "\n\n".join(_artifact(a) for a in found)


def show_page(url: str, root: Path) -> str:
    """Text for `craw4llm show page URL`."""
    from craw4llm.page_life import page_life

    return page_life(url, artifacts(root))


def find(fingerprint: str, root: Path, stage: str) -> Artifact:
    """The one finished artifact of `stage` whose fingerprint begins so; ArtifactError if there is none, or more than one."""
    found = [a for a in artifacts(root) if a.stage == stage and a.fingerprint.startswith(fingerprint)]
    if len(found) != 1:
        known = ", ".join(a.fingerprint for a in (found or [a for a in artifacts(root) if a.stage == stage])) or "none"
        raise ArtifactError(
            f"{fingerprint!r} is the beginning of {len(found)} fingerprints of the stage {stage} in {root}; expected one of: {known}"
        )
    return found[0]


def named(names: Sequence[str], root: Path) -> list[Artifact]:
    """Finished artifacts that the runs of an experiment reach or whose fingerprint begins so, by stage and fingerprint; all without
    names."""
    chosen = {}
    for name in names or ("",):
        runs = read_index(root / "index" / f"{name}.json") if name else []
        wanted = reachable(runs)
        found = [a for a in artifacts(root) if ((a.stage, a.fingerprint) in wanted if runs else a.fingerprint.startswith(name))]
        if not found:
            raise ArtifactError(f"{name!r} is no experiment with finished artifacts in {root} and no fingerprint there")
        chosen.update({(a.stage, a.fingerprint): a for a in found})
    return [chosen[key] for key in sorted(chosen)]


def _runs(name: str, runs: Sequence[dict[str, Any]], store: Store) -> Iterator[str]:
    for run in runs:
        yield f"{name}  replicates {run['replicates']}  parameters {json.dumps(run['parameters'], sort_keys=True)}"
        report = store.find("report", run["report"])
        yield f"  report {run['report']}  {report.file('report.html') if report else 'not built'}"
        for replicate, arms in sorted(run["arms"].items(), key=lambda item: int(item[0])):
            for arm, stages in arms.items():
                done = sum(store.find(s["stage"], s["fingerprint"]) is not None for s in stages.values())
                own = {node_id: s for node_id, s in stages.items() if node_id not in run["shared"]}
                prints = "  ".join(f"{s['stage']} {s['fingerprint']}" for s in own.values())
                yield f"  #{replicate} {arm}: {done} of {len(stages)} stages finished  {prints}"


def _artifact(artifact: Artifact) -> str:
    manifest = artifact.manifest
    lines = [f"{artifact.stage} {artifact.fingerprint}  {artifact.path}", f"  digest   {artifact.digest}"]
    lines.append(f"  finished {manifest['finished']} in {manifest['wall_time_s']} s")
    lines.append(f"  config   {json.dumps(manifest['config'], sort_keys=True)}")
    for name, ref in manifest["inputs"].items():
        lines.append(f"  input    {name}: {ref['stage']} {ref['fingerprint']}")
    for name, entry in manifest["counts"].items():
        value = entry["value"]
        text = "missing" if value is None else f"{value:,}" if isinstance(value, int) else f"{value:.6g}"
        lines.append(f"  count    {name}: {text} {entry['unit']}")
    for name, note in manifest["notes"].items():
        lines.append(f"  note     {name}: {json.dumps(note)[:300]}")
    for entry in manifest["files"]:
        lines.append(f"  file     {entry['path']}: {entry['size_bytes']:,} bytes{' (volatile)' if entry['volatile'] else ''}")
    return "\n".join(lines)


def record(node_id: str, artifact: Artifact | None, *, built: bool) -> dict[str, Any]:
    """A finished stage in plain JSON values, for programs; `built`: by this call. A missing count is None."""
    assert artifact is not None, f"{node_id} was run and has no artifact"
    return {
        "node": node_id,
        "stage": artifact.stage,
        "fingerprint": artifact.fingerprint,
        "digest": artifact.digest,
        "path": str(artifact.path.resolve()),
        "counts": {name: entry["value"] for name, entry in artifact.manifest["counts"].items()},
        "built": built,
    }


def artifacts(root: Path) -> Iterator[Artifact]:
    """All finished artifacts, by stage and fingerprint."""
    store = Store(root)
    for stage in _folders(root):
        if stage.name in _NO_STAGES:
            continue
        for folder in _folders(stage):
            if not folder.name.startswith("."):
                found = store.find(stage.name, folder.name)
                if found is not None:
                    yield found


def verify(name: str | None, root: Path) -> tuple[list[str], int]:
    """Re-reads artifacts: all, those that an experiment's runs reach, or those whose fingerprint begins with `name`.

    Returns (one line per fault, artifacts read).
    """
    runs = read_index(root / "index" / f"{name}.json") if name else []
    if runs:
        wanted = reachable(runs)
        chosen = [a for a in artifacts(root) if (a.stage, a.fingerprint) in wanted]
    else:
        chosen = [a for a in artifacts(root) if name is None or a.fingerprint.startswith(name)]
        if name and not chosen:
            raise ArtifactError(f"{name!r} is no experiment with runs in {root} and no fingerprint there")
    faults = [f"{a.stage} {a.fingerprint}: {fault}" for a in chosen for fault in [*a.verify(), *_shard_faults(a)]]
    return faults, len(chosen)


def _shard_faults(artifact: Artifact) -> list[str]:
    """What is wrong with a tokenize artifact's shards, read against their own index."""
    if artifact.stage != "tokenize":
        return []
    from craw4llm.tokens.shards import FOLDER, verify_shards

    try:
        verify_shards(artifact.path / FOLDER, int(artifact.count("samples")))
    except ArtifactError as error:
        return [str(error)]
    return []


def reachable(runs: Iterable[dict[str, Any]]) -> set[tuple[str, str]]:
    """(stage, fingerprint) of everything that recorded runs are made of."""
    wanted = set()
    for run in runs:
        groups = [run["shared"], *(stages for arms in run["arms"].values() for stages in arms.values())]
        wanted |= {(s["stage"], s["fingerprint"]) for group in groups for s in group.values()}
    return wanted


def collect_garbage(store: Store, *, delete: bool, forget: Sequence[str]) -> str:
    """Lists (and with `delete` deletes) finished artifacts that no recorded run reaches, and partial folders nobody is writing."""
    root = store.root
    wanted: set[tuple[str, str]] = set()
    for path in sorted((root / "index").glob("*.json")):
        if path.stem not in forget:
            wanted |= reachable(read_index(path))
    lines, freed, written = [], 0, 0
    for stage in _folders(root):
        if stage.name in _NO_STAGES:
            continue
        for folder in _folders(stage):
            if (stage.name, folder.name) in wanted:
                continue
            fingerprint = folder.name.removeprefix(".partial-")
            if store.is_held(stage.name, fingerprint) or store.has_parts(stage.name, fingerprint):
                written += 1
                continue
            size = sum(p.stat().st_size for p in folder.rglob("*") if p.is_file())
            what = "interrupted" if folder.name.startswith(".") else "unreached"
            if delete:
                with store.lock(stage.name, fingerprint):
                    if store.has_parts(stage.name, fingerprint) or not folder.is_dir():  # begun, or finished, since
                        written += 1
                        continue
                    shutil.rmtree(folder)
            freed += size
            lines.append(f"{'deleted' if delete else what}  {size:>14,} bytes  {folder}")
    if delete:
        for name in forget:
            (root / "index" / f"{name}.json").unlink(missing_ok=True)
    if written:
        lines.append(f"{written} folders are being written by other processes and were left alone")
    lines.append(f"{len(lines) - bool(written)} folders, {freed:,} bytes{'' if delete else '; delete them with --delete'}")
    return "\n".join(lines)


def _folders(path: Path) -> list[Path]:
    return sorted(p for p in path.iterdir() if p.is_dir()) if path.is_dir() else []
