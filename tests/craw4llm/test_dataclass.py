"""craw4llm.dataclass against the original: the same class body made by both behaves alike."""

import copy
import dataclasses
import pickle
from typing import Any

import pytest

from craw4llm.configs import CrawlConfig
from craw4llm.dataclass import dataclass
from craw4llm.fingerprint import canonical


def body() -> dict[str, Any]:
    return {
        "__annotations__": {"a": int, "b": tuple[int, ...], "c": str},
        "b": (1, 2),
        "c": dataclasses.field(default_factory=lambda: "made"),
        "__qualname__": "Row",
        "__module__": __name__,
        "twice": property(lambda self: 2 * self.a),
    }


def both(kw_only: bool) -> list[type]:
    return [maker(frozen=True, kw_only=kw_only)(type("Row", (), body())) for maker in (dataclass, dataclasses.dataclass)]


@pytest.mark.parametrize("kw_only", [False, True])
def test_objects_are_those_of_the_original(kw_only: bool) -> None:
    ours, original = both(kw_only)
    for given in ({"a": 1}, {"a": 2, "b": (3,)}, {"a": 0, "b": (), "c": "x"}):
        one, other = ours(**given), original(**given)
        assert repr(one) == repr(other) and hash(one) == hash(other) and vars(one) == vars(other)
        assert one.twice == other.twice and dataclasses.asdict(one) == dataclasses.asdict(other)
        assert one == ours(**given) and one != other and one != ours(a=7) and copy.deepcopy(one) == one
        assert vars(dataclasses.replace(one, a=5)) == vars(dataclasses.replace(other, a=5))
        assert canonical(one, lambda external: "", "x") == canonical(other, lambda external: "", "x")
    assert [f.name for f in dataclasses.fields(ours)] == [f.name for f in dataclasses.fields(original)]
    assert ours.__match_args__ == original.__match_args__


@pytest.mark.parametrize("kw_only", [False, True])
@pytest.mark.parametrize(
    "given", [((), {}), ((1,), {}), ((1, (2,), "x", 4), {}), ((1,), {"a": 2}), ((), {"a": 1, "d": 2}), ((), {"b": ()})]
)
def test_what_the_original_refuses(kw_only: bool, given: tuple[tuple[Any, ...], dict[str, Any]]) -> None:
    made, refused = [], []
    for kind in both(kw_only):
        try:
            made.append(vars(kind(*given[0], **given[1])))
        except TypeError as error:
            refused.append(str(error).split(" argument")[0].removeprefix("Row."))
    assert (len(made) == 2 and made[0] == made[1]) or len(refused) == 2


def test_frozen() -> None:
    ours, _ = both(False)
    row = ours(1)
    with pytest.raises(dataclasses.FrozenInstanceError, match="cannot assign to field 'a'"):
        row.a = 2
    with pytest.raises(dataclasses.FrozenInstanceError, match="cannot delete field 'a'"):
        del row.a
    with pytest.raises(AssertionError, match="wants dataclasses"):
        dataclass(frozen=True)(type("Odd", (), {"__annotations__": {"a": int}, "a": dataclasses.field(default=1, repr=False)}))


@dataclass(frozen=True, kw_only=True)
class Base:
    a: int = 1

    def __post_init__(self) -> None:
        if self.a < 0:
            raise ValueError(self.a)


@dataclass(frozen=True, kw_only=True)
class Ours(Base):
    b: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Original(Base):
    b: int


@pytest.mark.parametrize("kind", [Ours, Original])
def test_subclasses(kind: type[Any]) -> None:
    """Also those that an extension declares with the original: a stage's config has a base of ours."""
    made = kind(b=2)
    assert (made.a, made.b) == (1, 2) and pickle.loads(pickle.dumps(made)) == made and dataclasses.replace(made, a=3).a == 3
    with pytest.raises(dataclasses.FrozenInstanceError):
        made.b = 3
    with pytest.raises(ValueError):
        kind(a=-1, b=2)


def test_a_config_crosses_processes() -> None:
    config = CrawlConfig(policy="random", budget_pages=5, seed_count=2)
    assert pickle.loads(pickle.dumps(config)) == config and "policy='random'" in repr(config)


def test_mutable() -> None:
    ours, original = (maker(kw_only=True)(type("Row", (), body())) for maker in (dataclass, dataclasses.dataclass))
    one, other = ours(a=1), original(a=1)
    one.a = other.a = 2
    assert repr(one) == repr(other) and vars(one) == vars(other) and one == ours(a=2) and one != ours(a=1)
    for row in (one, other):
        with pytest.raises(TypeError, match="unhashable"):
            hash(row)


@pytest.mark.parametrize("frozen", [True, False])
def test_frozen_and_mutable_do_not_mix(frozen: bool) -> None:
    for maker in (dataclass, dataclasses.dataclass):
        base = maker(frozen=frozen)(type("Base", (), {"__annotations__": {"a": int}}))
        assert base.__dataclass_params__.frozen is frozen
        maker(frozen=frozen)(type("Same", (base,), {"__annotations__": {"b": int}}))
        assert base.__dataclass_params__.frozen is frozen
        with pytest.raises(TypeError, match="frozen"):
            maker(frozen=not frozen)(type("Other", (base,), {"__annotations__": {"b": int}}))
