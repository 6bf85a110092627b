"""Reductions and scans by evaluating their region, matrix products, and histograms.

Pairs of neighbours are combined, level by level. The order in which floats are summed is a freedom
of code generation; any order here is as good as the hardware's, and this one is always the same.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvfuzz.cpu.arch import Target, wave_size
from kvfuzz.cpu.errors import UnsupportedOp
from kvfuzz.cpu.ir import Block, Op
from kvfuzz.cpu.machine import Code, Machine, Step
from kvfuzz.cpu.numerics import decode
from kvfuzz.cpu.values import STORAGE, raw, widen

Array = NDArray[Any]
BindBlock = Callable[[Block], Code]


def _along(value: Array, axis: int, length: int) -> Array:
    if value.shape[axis] == length:
        return value
    shape = (*value.shape[:axis], length, *value.shape[axis + 1 :])
    return np.broadcast_to(value, shape)


def _cut(axis: int, ndim: int, part: slice | int) -> tuple[slice | int, ...]:
    return tuple(part if i == axis else slice(None) for i in range(ndim))


def _operand_axis(op: Op) -> tuple[int, int]:
    """The axis of the values (programs come first) and its length, a power of two."""
    axis = int(str(op.attributes["axis"])) + 1
    length = op.operand_types[0].shape[axis - 1]
    if length & (length - 1):
        raise ValueError(f"axis of {length} elements")
    return axis, length


def _only_step(op: Op, code: Code) -> Step | None:
    """The step of a region that is one float op on its two arguments, as in a sum or maximum."""
    if len(code.ops) != 1 or not op.type.is_float:
        return None
    bound = code.ops[0]
    alone = bound.operands == code.arguments and bound.results == code.outcome
    return bound.step if alone and len(code.arguments) == 2 else None


def bind_reduce(op: Op, bind: BindBlock) -> Step:
    """`tt.reduce`: one value per operand, the axis gone."""
    code = bind(op.regions[0][0])
    axis, length = _operand_axis(op)
    only = _only_step(op, code)
    if only is not None:
        return _reduce_by_one_op(only, axis, length)

    def step(machine: Machine, *operands: Any) -> Any:
        values = [_along(raw(value), axis, length) for value in operands]
        ndim, left = values[0].ndim, length
        even, odd = (_cut(axis, ndim, slice(start, None, 2)) for start in (0, 1))
        while left > 1:
            left //= 2
            pairs = [value[even] for value in values] + [value[odd] for value in values]
            values = [_along(raw(each), axis, left) for each in machine.run(code, pairs)]
        done = [value[_cut(axis, ndim, 0)] for value in values]
        return done[0] if len(done) == 1 else done

    return step


def _reduce_by_one_op(combine: Step, axis: int, length: int) -> Step:
    """The same pairs as in any reduction, without running a block for each level."""

    def step(machine: Machine, operand: Any) -> Any:
        value = _along(raw(operand), axis, length)
        even, odd = (_cut(axis, value.ndim, slice(start, None, 2)) for start in (0, 1))
        left = length
        while left > 1:
            left //= 2
            value = combine(machine, value[even], value[odd])
        return value[_cut(axis, value.ndim, 0)]

    return step


def bind_scan(op: Op, bind: BindBlock) -> Step:
    """`tt.scan`: every prefix combined, in log2(length) rounds."""
    code = bind(op.regions[0][0])
    axis, length = _operand_axis(op)
    backwards = bool(op.attributes.get("reverse", False))

    def step(machine: Machine, *operands: Any) -> Any:
        values = [_along(raw(value), axis, length) for value in operands]
        ndim = values[0].ndim
        flip = _cut(axis, ndim, slice(None, None, -1))
        if backwards:
            values = [value[flip] for value in values]
        distance = 1
        while distance < length:
            early = [value[_cut(axis, ndim, slice(None, -distance))] for value in values]
            late = [value[_cut(axis, ndim, slice(distance, None))] for value in values]
            results = [raw(each) for each in machine.run(code, [*early, *late])]
            head = _cut(axis, ndim, slice(None, distance))
            values = [
                _joined(value[head], _along(result, axis, length - distance), axis)
                for value, result in zip(values, results, strict=True)
            ]
            distance *= 2
        if backwards:
            values = [value[flip] for value in values]
        return values[0] if len(values) == 1 else values

    return step


def _joined(head: Array, tail: Array, axis: int) -> Array:
    """Concatenate along `axis`; their other axes may be short."""
    shape = np.broadcast_shapes(
        *[(*part.shape[:axis], 1, *part.shape[axis + 1 :]) for part in (head, tail)]
    )
    wide = [
        np.broadcast_to(part, (*shape[:axis], part.shape[axis], *shape[axis + 1 :]))
        for part in (head, tail)
    ]
    return np.concatenate(wide, axis)


def bind_dot(op: Op, target: Target) -> Step:
    """`tt.dot`: fp32 products and sums (integers exact), rounded once to the result's type.

    fp32 operands with `input_precision="tf32"`, which on gfx942 is also what a dot without one
    has, are multiplied as fp32 too. That instruction (`xf32`) keeps about 10 bits of each operand;
    how it rounds them is not published. Other precisions of fp32 are refused.
    """
    left, right, _ = op.operand_types
    precision = op.attributes.get("inputPrecision", "ieee")
    if left.element == "f32" and precision not in ("ieee", "tf32"):
        raise UnsupportedOp(f"{op.name} {precision}", op.location.name, op.location.line)
    element = op.type.element
    whole = not op.type.is_float

    def step(_: Machine, a: Array, b: Array, c: Array) -> Array:
        a, b = widen(a, left.shape), widen(b, right.shape)
        if whole:  # fp64 holds every sum of int8 products exactly
            product = np.matmul(a.astype(np.float64), b.astype(np.float64))
            total: Array = (product.astype(np.int64) + c).astype(STORAGE[element])
            return total
        product = np.matmul(decode(a, left.element), decode(b, right.element))
        return target.encode(product + decode(c, element), element)

    return step


def bind_histogram(op: Op, target: Target) -> Step:
    """`tt.histogram`: how many of the (unmasked) elements equal each bin's number.

    A value without a bin is undefined; AMD's code then looks at as many low bits as number the
    bins, of which there are no fewer than the lanes of a wavefront.
    """
    source = op.operand_types[0].shape
    bins = op.type.shape[0]
    lowest = max(bins, wave_size(target.arch)) - 1

    def step(_: Machine, value: Array, mask: Array | None = None) -> Array:
        programs = max(len(value), 1 if mask is None else len(mask))
        shape = (programs, *source)
        at = np.broadcast_to(value.astype(np.int64) & lowest, shape)
        counted = at < bins if mask is None else (at < bins) & mask
        cells = (at + bins * np.arange(programs).reshape(-1, *[1] * len(source)))[counted]
        counts = np.bincount(cells, minlength=programs * bins).reshape(programs, bins)
        return counts.astype(STORAGE[op.type.element])

    return step
