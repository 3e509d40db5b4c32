"""Options that several commands of the command line share, and kinds of values for them. Importing this is cheap."""

import os
import re
from pathlib import Path

import click

ROOT_VARIABLE = "CRAW4LLM_ROOT"

root_option = click.option(
    "--root", default=lambda: os.environ.get(ROOT_VARIABLE, "artifacts"), show_default="artifacts", type=Path, help="Artifact root."
)


class Bytes(click.ParamType):
    """A number of bytes: 500M, 4G, 1048576 (powers of 1,024)."""

    name = "bytes"

    def convert(self, value: str | int, param: click.Parameter | None, ctx: click.Context | None) -> int:
        found = re.fullmatch(r"(\d+)([KMGT]?)(?:i?B)?", str(value).strip(), re.IGNORECASE)
        if not found:
            self.fail(f"{value!r}: expected a number of bytes such as 500M or 4G", param, ctx)
        return int(found[1]) << 10 * " KMGT".index(found[2].upper() or " ")


class Part(click.ParamType):
    """I/N, part I of N: (I, N)."""

    name = "I/N"

    def convert(self, value: str | tuple[int, int], param: click.Parameter | None, ctx: click.Context | None) -> tuple[int, int]:
        if isinstance(value, tuple):
            return value
        part, _, of = value.partition("/")
        if not (part.isdigit() and of.isdigit() and 1 <= int(part) <= int(of)):
            self.fail(f"{value!r}: expected I/N with I from 1 to N, such as 2/8", param, ctx)
        return int(part), int(of)
