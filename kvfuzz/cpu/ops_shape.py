"""Ops that make values or change their shape. Short axes stay short wherever they can.

All of them move whole elements, so they carry pointers and traces along.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvfuzz.cpu.ir import FLOAT_BITS, Op
from kvfuzz.cpu.machine import Machine, Step
from kvfuzz.cpu.numerics import encode
from kvfuzz.cpu.values import STORAGE, combine, raw, restructure, widen

Array = NDArray[Any]
Binder = Callable[[Op], Step]


def _changed(change: Callable[[Array], Array]) -> Step:
    return lambda _, value: restructure(value, change)


def _constant(op: Op) -> Step:
    text = str(op.attributes["value"])
    if text.startswith("dense<"):
        text = text[len("dense<") : -1]
    value = parse_constant(text, op.type.element)
    value = value.reshape([1] * (len(op.type.shape) + 1))
    value.flags.writeable = False
    return lambda _: value


def parse_constant(text: str, element: str) -> Array:
    """One printed constant as an array of shape `[1]`; floats are decimal or raw hexadecimal."""
    dtype = np.dtype(STORAGE[element])
    if text in ("true", "false"):
        return np.array([text == "true"])
    if element not in FLOAT_BITS:
        bits = 8 * dtype.itemsize
        return np.array([int(text, 0) % (1 << bits)], np.uint64).astype(dtype)
    if text.startswith("0x"):
        return np.array([int(text, 16)], f"u{dtype.itemsize}").view(dtype)
    return encode(np.array([float(text)], np.float64), element)


def _poison(op: Op) -> Step:
    element, ndim = op.type.element, len(op.type.shape) + 1
    return lambda machine: machine.memory.poison_value(element).reshape([1] * ndim)


def _range(op: Op) -> Step:
    bounds = op.attributes
    values = np.arange(bounds["start"], bounds["end"], dtype=np.int32)[None]  # type: ignore[call-overload]
    values.flags.writeable = False
    return lambda _: values


def _axis(op: Op) -> int:
    return "xyz".index(op.words[0])


def _program_id(op: Op) -> Step:
    axis = _axis(op)
    return lambda machine: machine.program_id(axis)


def _num_programs(op: Op) -> Step:
    axis = _axis(op)
    return lambda machine: np.array([machine.grid[axis]], np.int32)


def _splat(op: Op) -> Step:
    ones = (1,) * len(op.type.shape)

    def step(_: Machine, value: Any) -> Any:
        if type(value) is np.ndarray:
            return value.reshape(len(value), *ones)
        return restructure(value, lambda part: part.reshape(len(part), *ones))

    return step


def _unsplat(_: Op) -> Step:
    return _changed(lambda value: value.reshape(len(value)))


def _expand_dims(op: Op) -> Step:
    axis = int(str(op.attributes["axis"])) + 1
    return _changed(lambda value: np.expand_dims(value, axis))


def _reshape(op: Op) -> Step:
    source, target = op.operand_types[0].shape, op.type.shape

    def change(value: Array) -> Array:
        if value.size == len(value):
            return value.reshape(len(value), *[1] * len(target))
        return widen(value, source).reshape(len(value), *target)

    return _changed(change)


def _transpose(op: Op) -> Step:
    order = op.attributes["order"]
    axes = (0, *[int(axis) + 1 for axis in order])  # type: ignore[attr-defined]
    return _changed(lambda value: value.transpose(axes))


def _joined(op: Op, join: Callable[[list[Array]], Array]) -> Step:
    shapes = [type_.shape for type_ in op.operand_types]

    def combined(values: list[Array]) -> Array:
        programs = max(len(value) for value in values)
        return join(
            [
                np.broadcast_to(value, (programs, *shape))
                for value, shape in zip(values, shapes, strict=True)
            ]
        )

    return lambda _, *values: combine(values, combined)


def _cat(op: Op) -> Step:
    return _joined(op, lambda values: np.concatenate(values, axis=1))


def _join(op: Op) -> Step:
    return _joined(op, lambda values: np.stack(values, axis=-1))


def _split(_: Op) -> Step:
    def step(_: Machine, value: Any) -> tuple[Any, Any]:
        left = restructure(value, lambda part: part[..., 0])
        return left, restructure(value, lambda part: part[..., -1])

    return step


def _gather(op: Op) -> Step:
    axis = int(str(op.attributes["axis"])) + 1
    source, wanted = (type_.shape for type_ in op.operand_types)

    def step(_: Machine, value: Any, indices: Any) -> Any:
        indices = raw(indices)
        programs = max(len(indices), 1)

        def change(part: Array) -> Array:
            count = max(len(part), programs)
            full = np.broadcast_to(part, (count, *source))
            at = np.broadcast_to(indices, (count, *wanted))
            # Out of range is undefined, but programs that are off must not fail either.
            inside = np.clip(at.astype(np.int64), 0, source[axis - 1] - 1)
            return np.take_along_axis(full, inside, axis)

        return restructure(value, change)

    return step


SHAPE_OPS: dict[str, Binder] = {
    "arith.constant": _constant,
    "ub.poison": _poison,
    "tt.make_range": _range,
    "tt.get_program_id": _program_id,
    "tt.get_num_programs": _num_programs,
    "tt.splat": _splat,
    "tt.unsplat": _unsplat,
    "tt.expand_dims": _expand_dims,
    "tt.broadcast": lambda _op: lambda _, value: value,
    "tt.reshape": _reshape,
    "tt.trans": _transpose,
    "tt.cat": _cat,
    "tt.join": _join,
    "tt.split": _split,
    "tt.gather": _gather,
}
