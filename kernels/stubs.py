"""Stand-ins for modules that a source file imports and a test does not need.

A stub may be named: in an annotation, as a base class, as a subscript, as an attribute of another
stub. That is what module and class bodies do with an import. A stub may not be used: calling,
comparing, iterating or testing it raises StubUsedError, so a kernel never computes with a
made-up value.
"""

from collections.abc import Mapping
from types import ModuleType
from typing import NoReturn

from kvfuzz.errors import NotCheckedError


class StubUsedError(NotCheckedError):
    """Code under test used something that was not loaded from its source tree."""


class _StubBase:
    """What a class inherits instead of a stub."""

    def __class_getitem__(cls, item: object) -> type:
        return cls


class Stub:
    """A name without a value, `known` attributes excepted."""

    def __init__(self, path: str, known: Mapping[str, object] | None = None) -> None:
        self.__dict__.update(known or {})
        self._path = path

    def __repr__(self) -> str:
        return f"<stub of {self._path}>"

    def __getattr__(self, name: str) -> "Stub":
        # Python asks for dunder names to learn what an object can do: a stub can do nothing.
        if name.startswith("__"):
            raise AttributeError(f"{self._path}.{name}")
        return Stub(f"{self._path}.{name}")

    def __getitem__(self, item: object) -> "Stub":
        return self

    def __or__(self, other: object) -> "Stub":
        return self

    __ror__ = __or__

    def __mro_entries__(self, bases: tuple[object, ...]) -> tuple[type, ...]:
        return (type("StubBase", (_StubBase,), {"__doc__": repr(self)}),)

    def _used(self, how: str) -> NoReturn:
        raise StubUsedError(
            f"{self._path} was {how}, but only a stub stands there: the file under test needs "
            f"{self._path.rpartition('.')[0]}, which kvfuzz does not load from --source"
        )

    def __call__(self, *args: object, **kwargs: object) -> NoReturn:
        """Raise StubUsedError."""
        self._used("called")

    def __bool__(self) -> bool:
        self._used("tested for truth")

    def __eq__(self, other: object) -> bool:
        # Identity must hold, or typing's caches would count as a use.
        return self is other or self._used("compared")

    __hash__ = object.__hash__

    def _compared(self, other: object) -> NoReturn:
        self._used("compared")

    __lt__ = __le__ = __gt__ = __ge__ = _compared

    def _computed(self, *others: object) -> NoReturn:
        self._used("used as a number")

    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = _computed
    __truediv__ = __rtruediv__ = __floordiv__ = __rfloordiv__ = __mod__ = __rmod__ = _computed
    __neg__ = __int__ = __float__ = __index__ = _computed

    def __iter__(self) -> NoReturn:
        self._used("iterated over")

    def __contains__(self, item: object) -> bool:
        self._used("searched")

    def __len__(self) -> int:
        self._used("measured")

    def __enter__(self) -> NoReturn:
        self._used("entered")

    def __exit__(self, *details: object) -> None:
        return None

    def __instancecheck__(self, instance: object) -> bool:
        self._used("used in isinstance")


class StubModule(ModuleType):
    """A module of stubs, except for the `known` values."""

    def __init__(self, name: str, known: Mapping[str, object] | None = None) -> None:
        super().__init__(name, f"Stub of {name}.")
        self.__dict__.update(known or {})
        self.__path__: list[str] = []

    def __getattr__(self, name: str) -> Stub:
        if name.startswith("__"):
            raise AttributeError(f"{self.__name__}.{name}")
        return Stub(f"{self.__name__}.{name}")
