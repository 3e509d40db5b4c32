"""Options that several commands of the command line share. Importing this is cheap."""

import os
from pathlib import Path

import click

ROOT_VARIABLE = "CRAW4LLM_ROOT"

root_option = click.option(
    "--root", default=lambda: os.environ.get(ROOT_VARIABLE, "artifacts"), show_default="artifacts", type=Path, help="Artifact root."
)
