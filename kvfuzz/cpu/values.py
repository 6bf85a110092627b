"""What the evaluator computes with: arrays with a leading program axis, and pointers.

A value of a type of shape `S` is an array of shape `(P, *S)` for `P` programs, where any axis may
have length 1 while the value does not vary along it. Integers are signed arrays of their width,
i1 is bool, narrow floats are raw bits.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvfuzz.cpu.ir import Location

Array = NDArray[Any]
Mask = Array | None  # bool [P]; None stands for all programs

STORAGE: dict[str, Any] = {
    "i1": np.bool_,
    "i8": np.int8,
    "i16": np.int16,
    "i32": np.int32,
    "i64": np.int64,
    "index": np.int64,
    "f8E4M3FN": np.uint8,
    "f8E4M3FNUZ": np.uint8,
    "f8E5M2": np.uint8,
    "f8E5M2FNUZ": np.uint8,
    "f16": np.uint16,
    "bf16": np.uint16,
    "f32": np.float32,
    "f64": np.float64,
}

UNRESOLVED = -1  # allocation number of a pointer that is only an absolute address


@dataclass(frozen=True, slots=True)
class Pointer:
    """`offset` bytes (int64) from the start of an allocation: a number, or one per element."""

    allocation: int | Array
    offset: Array


@dataclass(frozen=True, slots=True)
class Traced:
    """A value with, per element, where its bytes were loaded from (see `trace`).

    `exact`: the bytes are those loaded; otherwise something was computed from them.
    """

    value: Any
    origin: Array
    exact: bool


@dataclass(frozen=True, slots=True)
class Wrapped:
    """A value some of whose elements lost bits to their width (see `overflow`).

    `exact` is what 64-bit arithmetic gives for every element, all operands read with their signs:
    int64, bool for an i1; of a pointer it is the byte offset. `unsigned` is the same with narrower
    operands read without signs. `place` is where the bits were lost first.
    """

    value: Any
    exact: Array
    unsigned: Array
    place: Location


def raw(value: Any) -> Any:
    """The value without its trace, or without what it should have been."""
    return value.value if type(value) in (Traced, Wrapped) else value


def exactly(value: Any) -> Array:
    """What 64-bit arithmetic gives for an integer or for a pointer's offset."""
    if isinstance(value, Wrapped):
        return value.exact
    if isinstance(value, Pointer):
        return value.offset
    exact: Array = value if value.dtype == np.bool_ else value.astype(np.int64)
    return exact


def unsigned_exactly(value: Any) -> Array:
    """The same, where the integer's bits are read without a sign."""
    if isinstance(value, Wrapped):
        return value.unsigned
    if isinstance(value, Pointer) or value.dtype in (np.bool_, np.int64):
        return exactly(value)
    exact: Array = value.view(f"u{value.dtype.itemsize}").astype(np.int64)
    return exact


def restructure(value: Any, change: Callable[[Array], Array]) -> Any:
    """Apply a change of shape to an array, or to every array inside any other value."""
    if isinstance(value, Pointer):
        allocation = value.allocation
        changed = allocation if isinstance(allocation, int) else change(allocation)
        return Pointer(changed, change(value.offset))
    if isinstance(value, Traced):
        return Traced(restructure(value.value, change), change(value.origin), value.exact)
    if isinstance(value, Wrapped):
        inner = restructure(value.value, change)
        return Wrapped(inner, change(value.exact), change(value.unsigned), value.place)
    return change(value)


def combine(values: Sequence[Any], join: Callable[[list[Array]], Array]) -> Any:
    """Join several values of one type with a change of shape."""
    if any(isinstance(value, Traced) for value in values):
        exact = all(value.exact for value in values if isinstance(value, Traced))
        origins = join([_origin(value) for value in values])
        return Traced(combine([raw(value) for value in values], join), origins, exact)
    wrapped = next((value for value in values if isinstance(value, Wrapped)), None)
    if wrapped is not None:
        inner = combine([raw(value) for value in values], join)
        exacts, unsigned = (join([read(v) for v in values]) for read in (exactly, unsigned_exactly))
        return Wrapped(inner, exacts, unsigned, wrapped.place)
    if isinstance(values[0], Pointer):
        offset = join([value.offset for value in values])
        first = values[0].allocation
        if isinstance(first, int) and all(value.allocation is first for value in values):
            return Pointer(first, offset)
        numbers = [
            np.broadcast_to(np.asarray(value.allocation, np.int64), value.offset.shape)
            for value in values
        ]
        return Pointer(join(numbers), offset)
    return join(list(values))


def widen(value: Array, shape: tuple[int, ...]) -> Array:
    """Undo the short axes of the tensor part; the program axis keeps its length."""
    full = (value.shape[0], *shape)
    return value if value.shape == full else np.broadcast_to(value, full)


def choose(condition: Array, a: Any, b: Any) -> Any:
    """`a` where `condition` (an array), else `b`."""
    if a is b:
        return a
    if isinstance(a, Traced) or isinstance(b, Traced):
        origin = choose(condition, _origin(a), _origin(b))
        exact = all(part.exact for part in (a, b) if isinstance(part, Traced))
        return Traced(choose(condition, raw(a), raw(b)), origin, exact)
    if isinstance(a, Wrapped) or isinstance(b, Wrapped):
        exacts = np.where(condition, exactly(a), exactly(b))
        unsigned = np.where(condition, unsigned_exactly(a), unsigned_exactly(b))
        place = a.place if isinstance(a, Wrapped) else b.place
        return Wrapped(choose(condition, raw(a), raw(b)), exacts, unsigned, place)
    if isinstance(a, Pointer):
        offset = np.where(condition, a.offset, b.offset)
        if isinstance(a.allocation, int) and a.allocation == b.allocation:
            return Pointer(a.allocation, offset)
        return Pointer(np.where(condition, a.allocation, b.allocation), offset)
    return np.where(condition, a, b)


def merge(mask: Array, a: Any, b: Any) -> Any:
    """`a` for the programs in `mask` (bool [P]), else `b`."""
    if a is b:
        return a
    return choose(mask.reshape(-1, *([1] * rank(a))), a, b)


def rank(value: Any) -> int:
    """Number of tensor axes."""
    value = raw(value)
    ndim: int = (value.offset if isinstance(value, Pointer) else value).ndim
    return ndim - 1


def _origin(value: Any) -> Array:
    if isinstance(value, Traced):
        return value.origin
    return np.full([1] * (rank(value) + 1), -1, np.int64)
