"""Scorers of other packages: the entry-point group `craw4llm.scorers`.

    [project.entry-points."craw4llm.scorers"]
    readability = "my_package.scoring"

The object that the entry point names (a module will do) has

    version: str                                       changes whenever its scores change; ScorerConfig repeats it
    open(options: Mapping[str, str]) -> Scorer         something with `reads` ("text" or "url") and `score` (craw4llm.scoring.scorer.Scorer)
"""

import importlib.metadata
from collections.abc import Mapping, Sequence

import numpy as np

from craw4llm.errors import ConfigError, StageError
from craw4llm.scoring.scorer import EMPTY, SCORED, UNREADABLE, Reads, Reasons, Scorer, Scores

GROUP = "craw4llm.scorers"


def open_plugin(name: str, version: str, options: Mapping[str, str]) -> Scorer:
    """The scorer of an entry point. ConfigError if none has this name, or if it is of another version."""
    found = {entry.name: entry for entry in importlib.metadata.entry_points(group=GROUP)}
    if name not in found:
        known = ", ".join(sorted(found)) or "none"
        raise ConfigError(f"scorer: no installed package registers the scorer {name!r} in {GROUP} (known: {known}); install it")
    plugin = found[name].load()
    installed = str(plugin.version)
    if installed != version:
        raise ConfigError(f"scorer: the installed scorer {name!r} is of version {installed!r}, the config says {version!r}; set `version`")
    scorer: Scorer = plugin.open(dict(options))
    if scorer.reads not in ("text", "url"):
        raise ConfigError(f"scorer: the scorer {name!r} reads {scorer.reads!r}; expected 'text' or 'url'")
    return _Checked(name, scorer)


class _Checked:
    """Holds another package's scorer to the contract: one finite float32, or NaN with a reason, for each page."""

    def __init__(self, name: str, scorer: Scorer) -> None:
        self._name, self._scorer = name, scorer
        self.reads: Reads = scorer.reads

    def score(self, texts: Sequence[str], urls: Sequence[str], pages: Sequence[int] = ()) -> tuple[Scores, Reasons]:
        given, why = self._scorer.score(texts, urls)
        scores, reasons = np.asarray(given, dtype=np.float32), np.asarray(why, dtype=np.uint8)
        count = max(len(texts), len(urls))
        if scores.shape != (count,) or reasons.shape != (count,):
            raise StageError(f"the scorer {self._name!r} gave {scores.shape} scores and {reasons.shape} reasons for {count} pages")
        if (np.isnan(scores) & (reasons == SCORED)).any() or np.isinf(scores).any() or (~np.isnan(scores) & (reasons != SCORED)).any():
            raise StageError(
                f"the scorer {self._name!r} gave a score that is not finite without a reason, or a reason beside a score; expected a "
                f"finite score with {SCORED}, or NaN with {EMPTY} (empty) or {UNREADABLE} (unreadable)"
            )
        return scores, reasons
