"""A case: the lowered, complete test input, a small program over named buffers.

Buffers hold bytes, fields say which logical element lies where, tensors are the views that a
target is handed, steps are the calls in order. Oracles read nothing else. The scene, or the script,
that a case was lowered from rides along: shrinking, round trips and reports start from it.
"""

import itertools
import math
from typing import Literal

import msgspec

from kvfuzz.errors import UsageError
from kvfuzz.model.dtypes import DTYPES, FLOATS, INTEGER_SIZES, itemsize
from kvfuzz.model.fill import (
    LARGE,
    SPREAD,
    ByteFill,
    ChoiceFill,
    Fill,
    FloatFill,
    GroupFill,
    IntegerFill,
    ScaleFill,
    TieFill,
)
from kvfuzz.model.layout import Field, Geometry
from kvfuzz.model.scene import Scene

MOST_BYTES = 1 << 37
"""Largest buffer of a case: what is larger is a slip in a seed, not a test."""

MOST_LARGEST = 1 << 16
"""The largest number that a group's absmax can be mapped to: e5m2's is 57344."""


class Buffer(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One allocation of `nbytes` bytes, initially holding `fill`."""

    name: str
    nbytes: int
    fill: Fill


class TensorView(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """What a target receives: strides and offset in bytes, shape in elements of `dtype`.

    An array in JSON: a seed is to stay small enough to paste into an issue.
    """

    name: str
    buffer: str
    dtype: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int = 0

    def last_byte(self) -> int:
        """The largest byte address that an element of the view occupies."""
        reach = sum(
            (size - 1) * stride for size, stride in zip(self.shape, self.strides, strict=True)
        )
        return self.offset + reach + itemsize(self.dtype) - 1


class Step(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One call of an op.

    `tensors` and `fields` map the op's parameters to names of views and fields; `scalars` holds
    its other arguments. `by` says who executes it: the target under test or its declared partner.
    """

    op: str
    tensors: dict[str, str]
    fields: dict[str, str]
    scalars: dict[str, int | str]
    by: Literal["target", "partner"] = "target"


class Program(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Buffers, what lies in them, and calls in order: all that executing and judging need."""

    buffers: tuple[Buffer, ...]
    fields: tuple[Field, ...]
    tensors: tuple[TensorView, ...]
    steps: tuple[Step, ...]
    unused: tuple[Field, ...] = ()
    """Elements that steps may leave anything in, since nobody reads them: rows of a batch that are
    no request's. After a run they are taken to hold what they held before."""

    @property
    def nbytes(self) -> int:
        """Bytes of all buffers."""
        return sum(buffer.nbytes for buffer in self.buffers)

    def buffer(self, name: str) -> Buffer:
        """The buffer called `name`."""
        return next(buffer for buffer in self.buffers if buffer.name == name)

    def field(self, name: str) -> Field:
        """The field called `name`."""
        return next(field for field in self.fields if field.name == name)

    def tensor(self, name: str) -> TensorView:
        """The view called `name`."""
        return next(tensor for tensor in self.tensors if tensor.name == name)

    def bound_field(self, step: Step, parameter: str) -> Field:
        """The field that `parameter` of `step` is bound to."""
        return self.field(step.fields[parameter])

    def bound_buffer(self, step: Step, parameter: str) -> str:
        """The name of the buffer behind the tensor that `parameter` of `step` is bound to."""
        return self.tensor(step.tensors[parameter]).buffer

    def integers(self, step: Step, parameter: str) -> tuple[int, ...]:
        """The written-out elements of the metadata tensor bound to `parameter`, without what lies
        before or behind it in its buffer."""
        view, values = self.tensor(step.tensors[parameter]), self.written_out(step, parameter)
        element = itemsize(view.dtype)
        *outer, (size, step_size) = zip(
            view.shape, (stride // element for stride in view.strides), strict=True
        )
        starts = [view.offset // element]
        for count, apart in outer:
            starts = [start + index * apart for start in starts for index in range(count)]
        rows = (values[start : start + size * step_size : step_size] for start in starts)
        return tuple(itertools.chain.from_iterable(rows))

    def written_out(self, step: Step, parameter: str) -> tuple[int, ...]:
        """All elements of the buffer behind the metadata tensor bound to `parameter`."""
        fill = self.buffer(self.bound_buffer(step, parameter)).fill
        if not isinstance(fill, IntegerFill):
            raise UsageError(f"{parameter} is bound to a buffer without written-out integers")
        return fill.values

    def owner(self, buffer: str, byte: int) -> tuple[Field, dict[str, int]] | None:
        """The field and coordinate whose element holds `byte` of `buffer`, if any."""
        for field in self.fields:
            if field.buffer == buffer and (found := field.coordinate(byte)) is not None:
                return field, {str(axis): value for axis, value in found.items()}
        return None


class Case(Program, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="tokens"):
    """The whole test input of one op on one layer."""

    scene: Scene

    @property
    def geometry(self) -> Geometry:
        """The sizes of the cache that the first step works on."""
        k = self.bound_field(self.steps[0], "key_cache").extents
        v = self.bound_field(self.steps[0], "value_cache").extents["dim"]
        return Geometry(k["block"], k["token"], k["head"], k["dim"], v if v != k["dim"] else 0)


def _require(condition: bool, what: str) -> None:
    if not condition:
        raise UsageError(f"impossible case: {what}")


def _check_buffer_fill(buffer: Buffer) -> None:
    where = f"fill of buffer {buffer.name}"
    _require(
        buffer.nbytes < LARGE or isinstance(buffer.fill, ByteFill),
        f"{where}: {buffer.nbytes} bytes, use a fill of `bytes`, or less than {LARGE}",
    )
    if isinstance(buffer.fill, FloatFill):
        _require(
            buffer.fill.dtype in FLOATS,
            f"{where}: dtype={buffer.fill.dtype!r}, expected one of {', '.join(FLOATS)}",
        )
    _check_fill(buffer.fill, f"buffer {buffer.name}")


def _check_field_fill(field: Field, nbytes: int) -> None:
    """A field may lay elements of its own format over what its buffer of `nbytes` bytes holds."""
    where = f"field {field.name} in buffer {field.buffer}"
    if isinstance(field.fill, ScaleFill):
        _require(field.dtype == "fp32", f"{where}: scales are of fp32")
        _require(nbytes < LARGE, f"{where}: scales in {nbytes} bytes, expected less than {LARGE}")
    else:
        fits = isinstance(field.fill, FloatFill | ChoiceFill) and field.fill.dtype == field.dtype
        _require(fits, f"{where}: its fill is none of {field.dtype}, of floats, choices or scales")
    if field.fill is not None:
        _check_fill(field.fill, f"field {field.name}")


def _check_fill(fill: Fill, where: str) -> None:
    where = f"fill of {where}"
    if isinstance(fill, IntegerFill):
        bits = 8 * itemsize(fill.dtype) if fill.dtype in DTYPES | INTEGER_SIZES else 0
        fits = all(-(1 << bits >> 1) <= value < 1 << bits for value in fill.values)
        _require(fits, f"{where}: a value does not fit {fill.dtype}")
        return
    _require(0 <= fill.seed < 1 << 64, f"{where}: seed={fill.seed}, expected 0 to 2**64 - 1")
    if isinstance(fill, ChoiceFill):
        known = fill.dtype in DTYPES and bool(fill.codes)
        top = 1 << (8 * itemsize(fill.dtype)) if known else 0
        _require(
            known and all(0 <= code < top for code in fill.codes),
            f"{where}: codes {fill.codes} of {fill.dtype!r}",
        )
    if isinstance(fill, TieFill | GroupFill):
        _require(
            fill.dtype in DTYPES and not DTYPES[fill.dtype].is_quantised,
            f"{where}: dtype={fill.dtype!r}, expected fp32, bf16 or fp16",
        )
    if isinstance(fill, GroupFill):
        _require(fill.group >= 1, f"{where}: group={fill.group}, expected 1 or more")
        _require(
            1 <= fill.largest <= MOST_LARGEST,
            f"{where}: largest={fill.largest}, expected 1 to {MOST_LARGEST}",
        )
    if isinstance(fill, FloatFill):
        is_float = fill.dtype in DTYPES and not DTYPES[fill.dtype].is_integer
        _require(is_float, f"{where}: dtype={fill.dtype!r}, expected a float format")
        top = (1 << DTYPES[fill.dtype].exponent_bits) - 1
        _require(0 <= fill.low <= fill.high < top, f"{where}: {fill.low}..{fill.high}")
    if isinstance(fill, TieFill):
        known = fill.cache_dtype in DTYPES and DTYPES[fill.cache_dtype].is_quantised
        _require(known, f"{where}: cache_dtype={fill.cache_dtype!r}, expected an fp8 format")
        _require(0 < fill.scale < 0x7F800000, f"{where}: scale=0x{fill.scale:08x}")
    if isinstance(fill, ScaleFill):
        _require(0 < fill.least < 0x7F800000 - SPREAD, f"{where}: least=0x{fill.least:08x}")


def check(case: Program) -> None:
    """Raise UsageError with the first thing that makes `case` impossible to execute."""
    sizes = {buffer.name: buffer.nbytes for buffer in case.buffers}
    for names in (
        [buffer.name for buffer in case.buffers],
        [field.name for field in case.fields],
        [tensor.name for tensor in case.tensors],
    ):
        _require(len(set(names)) == len(names), f"two parts share a name among {names}")
    known = DTYPES.keys() | INTEGER_SIZES.keys()
    for buffer in case.buffers:
        _require(
            1 <= buffer.nbytes <= MOST_BYTES,
            f"buffer {buffer.name}: nbytes={buffer.nbytes}, expected 1 to {MOST_BYTES}",
        )
        _check_buffer_fill(buffer)
        if isinstance(buffer.fill, IntegerFill):
            _require(buffer.fill.dtype in known, f"buffer {buffer.name}: dtype {buffer.fill.dtype}")
            written = len(buffer.fill.values) * itemsize(buffer.fill.dtype)
            _require(
                written == buffer.nbytes,
                f"buffer {buffer.name}: {written} bytes written out, nbytes={buffer.nbytes}",
            )
    placed = [(field.name, field.buffer, field.dtype) for field in case.fields]
    placed += [(tensor.name, tensor.buffer, tensor.dtype) for tensor in case.tensors]
    for name, buffer_name, dtype in placed:
        where = f"{name} in buffer {buffer_name}"
        _require(buffer_name in sizes, f"{where}: no such buffer")
        _require(dtype in known, f"{where}: unknown dtype {dtype!r}")
    for field in case.fields:
        where = f"field {field.name} in buffer {field.buffer}"
        _require(
            all(term.stride > 0 and term.div > 0 and term.mod >= 0 for term in field.terms)
            and all(extent > 0 for extent in field.extents.values())
            and all(term.axis in field.extents for term in field.terms),
            f"{where}: strides, divs and extents must be positive",
        )
        _require(
            field.base >= 0 and field.last_byte() < sizes[field.buffer],
            f"{where}: bytes {field.base}..{field.last_byte()} outside {sizes[field.buffer]} bytes",
        )
        if field.fill is not None:
            _check_field_fill(field, sizes[field.buffer])
    for view in case.tensors:
        where = f"tensor {view.name} in buffer {view.buffer}"
        element = itemsize(view.dtype)
        _require(
            len(view.shape) == len(view.strides)
            and all(size >= 0 for size in view.shape)
            and all(stride >= 0 and stride % element == 0 for stride in view.strides)
            and view.offset >= 0
            and view.offset % element == 0,
            f"{where}: shape {view.shape}, strides {view.strides}, offset {view.offset}",
        )
        _require(
            math.prod(view.shape) == 0 or view.last_byte() < sizes[view.buffer],
            f"{where}: reaches byte {view.last_byte()} of {sizes[view.buffer]}",
        )
    for step in case.steps:
        for parameter, name in (*step.tensors.items(), *step.fields.items()):
            _require(
                name in {name for name, _, _ in placed},
                f"step {step.op}: {parameter} is bound to {name!r}, which does not exist",
            )
