"""The stage `select`: which pages go into training. The work is in `craw4llm.selection.stage`."""

from craw4llm.selection.stage import estimate, run

__all__ = ["estimate", "run"]
