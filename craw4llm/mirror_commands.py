"""`craw4llm mirror push|pull|list`: copies of artifacts elsewhere (craw4llm.mirror)."""

from pathlib import Path

import click

from craw4llm.options import root_option

kinds = click.option("--kind", multiple=True, help="Only artifacts of this kind of stage (tokenize, train, ...); may be repeated.")


@click.group()
def mirror() -> None:
    """Copy finished artifacts to an object store (s3://...) or another folder, and back."""


@mirror.command()
@click.argument("names", nargs=-1)
@click.option("--to", required=True, metavar="ADDRESS", help="s3://BUCKET/FOLDER, or a folder.")
@kinds
@root_option
def push(names: tuple[str, ...], to: str, kind: tuple[str, ...], root: Path) -> None:
    """Copy artifacts: those of the experiments or fingerprints NAMES, all without any."""
    from craw4llm import browse, mirror

    chosen = [a for a in browse.named(names, root) if not kind or a.stage in kind]
    sent = sum(mirror.push(artifact, to, click.echo) for artifact in chosen)
    click.echo(f"{len(chosen)} artifacts, {sent:,} bytes sent to {to}")


@mirror.command()
@click.argument("names", nargs=-1)
@click.option("--from", "source", required=True, metavar="ADDRESS", help="s3://BUCKET/FOLDER, or a folder.")
@click.option("--manifests-only", is_flag=True, help="Not the files: `run --shards-from ADDRESS` fetches those that training needs.")
@kinds
@root_option
def pull(names: tuple[str, ...], source: str, manifests_only: bool, kind: tuple[str, ...], root: Path) -> None:
    """Bring artifacts here: those whose fingerprints begin with NAMES, all without any."""
    from craw4llm import mirror
    from craw4llm.artifact import Store
    from craw4llm.errors import ArtifactError

    manifests = [m for m in mirror.listed(source) if (not kind or m["stage"] in kind) and (not names or m["fingerprint"].startswith(names))]
    if names and not manifests:
        raise ArtifactError(
            f"{source} has no complete copy of {', '.join(names)}; `craw4llm mirror list --from {source}` names what it has"
        )
    for manifest in manifests:
        mirror.pull(manifest["stage"], manifest["fingerprint"], source, Store(root), manifests_only=manifests_only, say=click.echo)
    click.echo(f"{len(manifests)} artifacts are in {root}")


@mirror.command("list")
@click.option("--from", "source", required=True, metavar="ADDRESS")
def list_copies(source: str) -> None:
    """List the complete copies at ADDRESS."""
    from craw4llm import mirror

    for manifest in mirror.listed(source):
        size = sum(entry["size_bytes"] for entry in manifest["files"])
        click.echo(f"{manifest['stage']:<10} {manifest['fingerprint']}  {size:>16,} bytes  {manifest['finished']}")
