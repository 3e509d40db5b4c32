"""Identity of a stage: a short hash of its name, version, config and the fingerprints of its inputs.

    fingerprint("crawl", 1, config, {"corpus": "3f9c2a71b0de"}, digest_of) -> "8b1f0c6d2e57"

Only values with one stable form have an identity: None, booleans, integers, finite floats, strings, and tuples, string-keyed
mappings and frozen dataclasses of these. Everything else (a set, a path, a callable, NaN) is refused, because its text could
differ between two machines that mean the same thing.

Names inside a fingerprint are declared strings (`Config.stage`), never Python paths, so moving code moves no artifact.
"""

import dataclasses
import hashlib
import json
import math
from collections.abc import Callable, Mapping
from typing import Any

from craw4llm.dataclass import dataclass
from craw4llm.errors import ConfigError

HEX_DIGITS = 12  # 48 bits: a collision among a million artifacts of one stage has a chance of about 1 in 560


@dataclass(frozen=True, kw_only=True)
class External:
    """A file or folder that comes from outside the chain, known by a declared name and, once planned, by its content.

    `name` and the content's digest are part of the identity, `path` is not: a moved file changes nothing, a changed file is a
    new artifact. Neither is `stated`: counts (name, value, unit) that `plan` reckons with where the file is not at hand.
    """

    name: str
    path: str
    stated: tuple[tuple[str, int, str], ...] = ()

    def __post_init__(self) -> None:
        if not self.name or not self.path:
            raise ConfigError(f"External(name={self.name!r}, path={self.path!r}): both must be given")


DigestOf = Callable[[External], str]


def canonical(value: Any, digest_of: DigestOf, where: str = "config") -> Any:
    """The JSON form of `value` that is hashed. Raises ConfigError, naming the field, for a value with no stable form."""
    if isinstance(value, External):
        return {"external": value.name, "sha256": digest_of(value)}
    if value is None or isinstance(value, bool | str):
        return value
    if type(value) is int:
        return value
    if type(value) is float:
        if not math.isfinite(value):
            raise ConfigError(f"{where} is {value}: a config holds finite numbers; leave the field out or set None")
        return value
    if isinstance(value, tuple | list):
        return [canonical(item, digest_of, f"{where}[{i}]") for i, item in enumerate(value)]
    if isinstance(value, Mapping):
        for key in value:
            if not isinstance(key, str):
                raise ConfigError(f"{where} has the key {key!r}: keys of a config mapping are strings")
        return {key: canonical(value[key], digest_of, f"{where}.{key}") for key in sorted(value)}
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        if not value.__dataclass_params__.frozen:  # type: ignore[attr-defined]
            raise ConfigError(f"{where} is a {type(value).__name__} that can change: declare the dataclass frozen")
        return {f.name: canonical(getattr(value, f.name), digest_of, f"{where}.{f.name}") for f in dataclasses.fields(value)}
    raise ConfigError(
        f"{where} is a {type(value).__name__} ({value!r:.80}), which has no stable form; "
        "use None, bool, int, float, str, a tuple, a mapping or a frozen dataclass of these"
    )


def fingerprint(stage: str, version: int, config: Any, inputs: Mapping[str, str], digest_of: DigestOf) -> str:
    """12 hexadecimal digits that name the artifact of `stage` run on `config` and `inputs` (name -> fingerprint)."""
    identity = {
        "stage": stage,
        "version": version,
        "config": canonical(config, digest_of),
        "inputs": {name: inputs[name] for name in sorted(inputs)},
    }
    text = json.dumps(identity, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return hashlib.sha256(text.encode()).hexdigest()[:HEX_DIGITS]
