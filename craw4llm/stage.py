"""Stages: a frozen config plus named input stages. No work happens here; importing this module is cheap.

    web   = Stage(CorpusConfig(source=External(name="corpus", path="web.parquet")))
    crawl = Stage(CrawlConfig(policy="quality", budget_pages=600), corpus=web, scorer=scorer)

The module that does a stage's work is found through the entry-point group `craw4llm.stages` (name -> module), so that
`craw4llm` knows the stages of `training` without importing it. Such a module has

    run(config, inputs, out, execution) -> Result
        config     the frozen config
        inputs     name -> Artifact
        out        an empty folder to write into (with RESUMES, perhaps with files of an interrupted attempt)
        execution  where and how: root, workers, device, progress
    RESUMES = True        optional: `run` goes on from what it finds in `out`
    run_part(config, inputs, out, execution, *, part, of) -> str     optional, with RESUMES: `craw4llm run --only STAGE --part 2/8`
        does the share `part` (1 to `of`) of the work in `out`, the same folder that `run` gets later, so that several tasks, on several
        hosts with a shared root, prepare it; `run` takes what is finished and does the rest. It must not matter for what `run` writes.
        All parts of one stage may run at the same time: each writes files of its own and renames them into place. Returns what was done.
    estimate(config, inputs) -> {"name": (value, unit)}   optional: what `plan` shows before anything is spent;
        inputs: name -> estimate of that input, as far as known
"""

import dataclasses
import functools
import importlib
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

from craw4llm.dataclass import dataclass
from craw4llm.errors import ConfigError
from craw4llm.fingerprint import DigestOf, External, canonical, fingerprint

ENTRY_POINTS = "craw4llm.stages"
# This package's own entry points, as pyproject.toml has them: looking through all installed packages takes a fifth of a short crawl.
OWN_STAGES = {
    "corpus": "craw4llm.corpus.stage",
    "scorer": "craw4llm.scoring.scorer_stage",
    "score": "craw4llm.scoring.score_stage",
    "crawl": "craw4llm.crawl.stage",
    "select": "craw4llm.selection",
    "tokenizer": "craw4llm.tokens.tokenizer_stage",
    "tokenize": "craw4llm.tokens.tokenize_stage",
    "overlap": "craw4llm.selection.overlap_stage",
}


@dataclass(frozen=True, kw_only=True)
class Config:
    """Base of stage configs.

    stage: the declared name, part of the identity and of paths. version: raised when a change of code changes what is written.
    inputs, optional_inputs: the names that the stage takes; `variadic` stages take any names. estimated: False where its module has no
    `estimate`, so that `plan` need not load it.
    """

    stage: ClassVar[str]
    version: ClassVar[int] = 1
    inputs: ClassVar[tuple[str, ...]] = ()
    optional_inputs: ClassVar[tuple[str, ...]] = ()
    variadic: ClassVar[bool] = False
    estimated: ClassVar[bool] = True

    def check(self) -> None:
        """Raises ConfigError for values that cannot be meant. Called when a config is built."""

    def check_inputs(self, names: frozenset[str]) -> None:
        """Raises ConfigError where this config needs an input that is not among `names`."""

    def __post_init__(self) -> None:
        self.check()

    def refuse(self, field: str, expected: str) -> ConfigError:
        """The error for a field: what was given, what was expected."""
        return ConfigError(f"{self.stage}: {field} is {getattr(self, field)!r}; expected {expected}")


class Stage:
    """One node of the graph. Two stages with equal configs and equal inputs are the same stage, wherever they were declared.

    name: a label for people and task ids, where the stage's own name would not tell it from its neighbours; a path, "quality/crawl",
        puts it into that group. Not part of identity.
    """

    def __init__(self, config: Config, name: str = "", /, **inputs: "Stage") -> None:
        wanted, optional = set(config.inputs), set(config.optional_inputs)
        given = set(inputs)
        if not config.variadic and (given - wanted - optional or wanted - given):
            takes = ", ".join([*config.inputs, *(f"[{n}]" for n in config.optional_inputs)]) or "no inputs"
            raise ConfigError(f"{config.stage}: given the inputs {', '.join(sorted(given)) or 'none'}; it takes {takes}")
        config.check_inputs(frozenset(given))
        self.config = config
        self.name = name or config.stage
        self.inputs: Mapping[str, Stage] = dict(inputs)
        self._key: str | None = None

    @property
    def key(self) -> str:
        """Identity without reading any external input: equal within one declaration for equal stages."""
        if self._key is None:
            self._key = self.fingerprint_with(lambda external: f"unread:{external.path}", lambda stage: stage.key)
        return self._key

    def fingerprint_with(self, digest_of: DigestOf, of_input: Any) -> str:
        prints = {name: of_input(stage) for name, stage in self.inputs.items()}
        return fingerprint(self.config.stage, self.config.version, self.config, prints, digest_of)

    def ancestors(self) -> Iterator["Stage"]:
        """This stage and all it is made from, inputs before users, each once."""
        seen: set[str] = set()

        def walk(stage: "Stage") -> Iterator["Stage"]:
            if stage.key in seen:
                return
            seen.add(stage.key)
            for name in sorted(stage.inputs):
                yield from walk(stage.inputs[name])
            yield stage

        yield from walk(self)

    def externals(self) -> Iterator[External]:
        """The external inputs that the config names."""
        yield from externals_of(self.config)

    def __repr__(self) -> str:
        return f"Stage({self.config!r}, {', '.join(self.inputs)})"


def externals_of(value: Any) -> Iterator[External]:
    if isinstance(value, External):
        yield value
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for f in dataclasses.fields(value):
            yield from externals_of(getattr(value, f.name))
    elif isinstance(value, tuple):
        for item in value:
            yield from externals_of(item)


class Planner:
    """Fingerprints of stages, each computed once."""

    def __init__(self, digest_of: DigestOf) -> None:
        self.digest_of = digest_of
        self._known: dict[str, str] = {}

    def fingerprint(self, stage: Stage) -> str:
        if stage.key not in self._known:
            self._known[stage.key] = stage.fingerprint_with(self.digest_of, self.fingerprint)
        return self._known[stage.key]

    def config_record(self, stage: Stage) -> Any:
        """The config as it is written into the manifest: its canonical form."""
        return canonical(stage.config, self.digest_of)


@functools.cache  # reading the entry points of a large environment takes 20 ms or more
def registered() -> Mapping[str, Any]:
    """The entry points of all installed packages' stages, by name."""
    from importlib import metadata

    return {entry.name: entry for entry in metadata.entry_points(group=ENTRY_POINTS)}


@functools.cache
def implementation(stage: str) -> Any:
    """The module that does the work of the stage of this name."""
    if stage in OWN_STAGES:
        return importlib.import_module(OWN_STAGES[stage])
    found = registered()
    if stage not in found:
        raise ConfigError(
            f"no installed package registers the stage {stage!r} (known: {', '.join(sorted(found)) or 'none'}); "
            "install the project with `pip install --no-deps -e .`"
        )
    return importlib.import_module(found[stage].value)
