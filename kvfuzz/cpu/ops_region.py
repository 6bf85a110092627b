"""Reductions and scans by evaluating their region, and matrix products.

Pairs of neighbours are combined, level by level. The order in which floats are summed is a freedom
of code generation; any order here is as good as the hardware's, and this one is always the same.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvfuzz.cpu.ir import Block, Op
from kvfuzz.cpu.machine import Code, Machine, Step
from kvfuzz.cpu.numerics import decode, encode
from kvfuzz.cpu.values import STORAGE, raw, widen

Array = NDArray[Any]
BindBlock = Callable[[Block], Code]


def _along(value: Array, axis: int, length: int) -> Array:
    shape = (*value.shape[:axis], length, *value.shape[axis + 1 :])
    return np.broadcast_to(value, shape)


def _cut(axis: int, ndim: int, part: slice | int) -> tuple[slice | int, ...]:
    return tuple(part if i == axis else slice(None) for i in range(ndim))


def bind_reduce(op: Op, bind: BindBlock) -> Step:
    """`tt.reduce`: one value per operand, the axis gone."""
    code = bind(op.regions[0][0])
    axis = int(str(op.attributes["axis"])) + 1
    length = op.operand_types[0].shape[axis - 1]

    def step(machine: Machine, *operands: Any) -> Any:
        values = [_along(raw(value), axis, length) for value in operands]
        ndim, left = values[0].ndim, length
        while left > 1:
            even, odd = slice(0, left - left % 2, 2), slice(1, left, 2)
            firsts = [value[_cut(axis, ndim, even)] for value in values]
            seconds = [value[_cut(axis, ndim, odd)] for value in values]
            results = [raw(each) for each in machine.run(code, [*firsts, *seconds])]
            if left % 2:
                tail = _cut(axis, ndim, slice(left - 1, left))
                results = [
                    np.concatenate(np.broadcast_arrays(result, value[tail]), axis)
                    for result, value in zip(results, values, strict=True)
                ]
            values = [_along(each, axis, left // 2 + left % 2) for each in results]
            left = left // 2 + left % 2
        done = [value[_cut(axis, ndim, 0)] for value in values]
        return done[0] if len(done) == 1 else done

    return step


def bind_scan(op: Op, bind: BindBlock) -> Step:
    """`tt.scan`: every prefix combined, in log2(length) rounds."""
    code = bind(op.regions[0][0])
    axis = int(str(op.attributes["axis"])) + 1
    length = op.operand_types[0].shape[axis - 1]
    backwards = bool(op.attributes.get("reverse", False))

    def step(machine: Machine, *operands: Any) -> Any:
        values = [_along(raw(value), axis, length) for value in operands]
        ndim = values[0].ndim
        flip = _cut(axis, ndim, slice(None, None, -1))
        if backwards:
            values = [value[flip] for value in values]
        distance = 1
        while distance < length:
            early = [value[_cut(axis, ndim, slice(0, length - distance))] for value in values]
            late = [value[_cut(axis, ndim, slice(distance, length))] for value in values]
            results = machine.run(code, [*early, *late])
            updated = []
            for value, result in zip(values, results, strict=True):
                joined = raw(result)
                head = value[_cut(axis, ndim, slice(0, distance))]
                joined = _along(joined, axis, length - distance)
                programs = max(len(head), len(joined))
                head = np.broadcast_to(head, (programs, *head.shape[1:]))
                joined = np.broadcast_to(joined, (programs, *joined.shape[1:]))
                updated.append(np.concatenate([head, joined], axis))
            values, distance = updated, distance * 2
        if backwards:
            values = [value[flip] for value in values]
        return values[0] if len(values) == 1 else values

    return step


def bind_dot(op: Op) -> Step:
    """`tt.dot`: fp32 products and sums (integers exact), rounded once to the result's type."""
    left, right, _ = op.operand_types
    element = op.type.element
    whole = not op.type.is_float

    def step(_: Machine, a: Array, b: Array, c: Array) -> Array:
        a, b = widen(a, left.shape), widen(b, right.shape)
        if whole:  # fp64 holds every sum of int8 products exactly
            product = np.matmul(a.astype(np.float64), b.astype(np.float64))
            total: Array = (product.astype(np.int64) + c).astype(STORAGE[element])
            return total
        product = np.matmul(decode(a, left.element), decode(b, right.element))
        return encode(product + decode(c, element), element)

    return step
