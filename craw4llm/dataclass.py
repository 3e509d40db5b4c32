"""`dataclass` as `dataclasses` has it, without compiling source for each class.

    @dataclass(frozen=True, kw_only=True)
    class Budget:
        pages: int | None = None

`dataclasses` writes the source of six methods for each class and compiles it, 0.3 ms a class. Every command imports fifty of them, and a
crawl over known scores takes little longer than that start; so the classes that every start needs are made by this. Fields,
`dataclasses.replace` and `fields`, comparison, hash, text and errors are those of the original, which a type checker sees. For objects that
are made by the hundred thousand the original is better: its `__init__` is a few times as fast.
"""

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NoReturn

if TYPE_CHECKING:
    from dataclasses import dataclass as dataclass
else:

    def dataclass(*, frozen: bool = False, kw_only: bool = False) -> Callable[[type], type]:
        """A class decorator; of the original's options it knows these two."""

        def made(cls: type) -> type:
            cls.__doc__ = cls.__doc__ or cls.__qualname__  # else the original takes a signature for it
            # A frozen base wants the same of its subclasses, for which the original compiles two methods that `_FROZEN` has already.
            bases = [vars(base)["__dataclass_params__"] for base in cls.__mro__[1:] if "__dataclass_params__" in vars(base)]
            if any(params.frozen != frozen for params in bases):
                raise TypeError(f"{cls.__name__}: a frozen dataclass and one that is not cannot inherit from each other")
            for params in bases:
                params.frozen = False
            dataclasses.dataclass(init=False, repr=False, eq=False, kw_only=kw_only)(cls)
            for params in (*bases, cls.__dataclass_params__):
                params.frozen = frozen
            fields = dataclasses.fields(cls)
            assert all(f.init and f.repr and f.compare and f.hash is None for f in fields), f"{cls.__name__} wants dataclasses.dataclass"
            cls._positional = tuple(f.name for f in fields if not f.kw_only)
            for method in (*_METHODS, *(_FROZEN if frozen else ())):
                if method.__name__ not in vars(cls):
                    setattr(cls, method.__name__, method)
            if not frozen:
                cls.__hash__ = None
            return cls

        return made


def __init__(self: Any, *given: Any, **named: Any) -> None:
    name, positional = type(self).__qualname__, self._positional
    if len(given) > len(positional):
        raise TypeError(f"{name}.__init__() takes {len(positional)} positional arguments but {len(given)} were given")
    values = dict(zip(positional, given, strict=False))
    if twice := values.keys() & named.keys():
        raise TypeError(f"{name}.__init__() got multiple values for argument {min(twice)!r}")
    missing = []
    own = self.__dict__
    values |= named
    for field in dataclasses.fields(self):
        if field.name in values:
            own[field.name] = values.pop(field.name)
        elif field.default is not dataclasses.MISSING:
            own[field.name] = field.default
        elif field.default_factory is not dataclasses.MISSING:
            own[field.name] = field.default_factory()
        else:
            missing.append(field.name)
    if values:
        raise TypeError(f"{name}.__init__() got an unexpected keyword argument {next(iter(values))!r}")
    if missing:
        raise TypeError(f"{name}.__init__() missing required arguments: {', '.join(missing)}")
    if hasattr(self, "__post_init__"):
        self.__post_init__()


def __repr__(self: Any) -> str:
    values = ", ".join(f"{f.name}={getattr(self, f.name)!r}" for f in dataclasses.fields(self))
    return f"{type(self).__qualname__}({values})"


def __eq__(self: Any, other: object) -> bool:
    return _values(self) == _values(other) if type(other) is type(self) else NotImplemented


def __hash__(self: Any) -> int:
    return hash(_values(self))


def __setattr__(self: Any, name: str, value: Any) -> NoReturn:
    raise dataclasses.FrozenInstanceError(f"cannot assign to field {name!r}")


def __delattr__(self: Any, name: str) -> NoReturn:
    raise dataclasses.FrozenInstanceError(f"cannot delete field {name!r}")


def _values(self: Any) -> tuple[Any, ...]:
    return tuple([getattr(self, f.name) for f in dataclasses.fields(self)])


_METHODS = (__init__, __repr__, __eq__)
_FROZEN = (__hash__, __setattr__, __delattr__)
