"""Which outcomes the masks, branches and loops of a kernel can have at all, told from its IR.

What depends on no argument, program or memory has one value for a compiled kernel, and is computed
here. Of other masks it is known what their parts allow: a scalar is on or off, and what is combined
with a mask that always leaves lanes out is never on in every lane. In doubt an outcome is possible.
"""

import math
from collections.abc import Iterable, Iterator
from itertools import product
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvfuzz.cpu.ir import MASK_OPERAND, Block, Module, Op, nested
from kvfuzz.cpu.ops_integer import INTEGER_OPS
from kvfuzz.cpu.ops_shape import SHAPE_OPS

Array = NDArray[Any]

_ALL, _SOME, _NONE = 1, 2, 4  # the outcomes of a mask, as in `coverage.OUTCOMES`
_ANY = 7
_MOVES = frozenset({"tt.splat", "tt.expand_dims", "tt.broadcast", "tt.reshape", "tt.trans"})
_COMPUTED = {
    **INTEGER_OPS,
    **{name: SHAPE_OPS[name] for name in (*_MOVES, "arith.constant", "tt.make_range")},
}


def possible_outcomes(module: Module) -> dict[int, int]:
    """By the `id` of an op with outcomes: those that it can have, as bits of `OUTCOMES`."""
    found: dict[int, int] = {}
    with np.errstate(all="ignore"):
        for function in module.functions.values():
            values = _Values()
            found.update(values.outcomes(function.blocks))
    return found


class _Values:
    """What is known of the values of one function, by slot."""

    def __init__(self) -> None:
        self._fixed: dict[int, Array] = {}
        self._masks: dict[int, int] = {}
        """Outcomes of masks, where fewer than their shape allows."""

    def outcomes(self, blocks: tuple[Block, ...]) -> Iterator[tuple[int, int]]:
        """The ids and the possible outcomes of the ops of some blocks and of their regions."""
        for op in nested(blocks):
            if op.name in ("scf.if", "cf.cond_br"):
                mask = self._mask(op, 0)
                yield id(op), bool(mask & _ALL) | bool(mask & _NONE) << 1
            elif op.name == "scf.for":
                yield id(op), self._trips(op)
            elif len(op.operands) > (at := MASK_OPERAND.get(op.name, len(op.operands))):
                yield id(op), self._mask(op, at)
            if op.results and not op.regions:
                self._learn(op)

    def _learn(self, op: Op) -> None:
        if op.name in _COMPUTED and all(slot in self._fixed for slot in op.operands):
            values = _COMPUTED[op.name](op)(None, *[self._fixed[slot] for slot in op.operands])
            values = values if len(op.results) > 1 else [values]
            self._fixed.update(zip(op.results, values, strict=True))
        elif op.type.element == "i1" and not op.type.is_pointer:
            self._masks[op.results[0]] = self._mask_of(op)

    def _mask_of(self, op: Op) -> int:
        """The outcomes of a result that is a mask."""
        if math.prod(op.type.shape) == 1:
            return _ALL | _NONE
        if op.name in _MOVES:
            return self._mask(op, 0)
        if op.name in COMBINED:
            pairs = product(_each(self._mask(op, 0)), _each(self._mask(op, 1)))
            return _union(COMBINED[op.name](a, b) for a, b in pairs)
        if op.name == "arith.select":
            sides = {_ALL: self._mask(op, 1), _NONE: self._mask(op, 2), _SOME: _ANY}
            return _union(sides[chosen] for chosen in _each(self._mask(op, 0)))
        return _ANY

    def _mask(self, op: Op, at: int) -> int:
        """The outcomes of a mask that is an operand."""
        slot = op.operands[at]
        if slot in self._fixed:
            value = self._fixed[slot]
            return _ALL if value.all() else _SOME if value.any() else _NONE
        of_shape = _ALL | _NONE if math.prod(op.operand_types[at].shape) == 1 else _ANY
        return self._masks.get(slot, of_shape)

    def _trips(self, op: Op) -> int:
        bounds = [self._fixed.get(slot) for slot in op.operands[:3]]
        if any(bound is None for bound in bounds):
            return 0b111
        low, high, stride = (int(bound.flat[0]) for bound in bounds if bound is not None)
        if min(low, high, stride) < 0:  # a count where the loop is unsigned
            return 0b111
        return 1 << min(len(range(low, high, stride or 1)), 2)


def _each(outcomes: int) -> list[int]:
    return [outcome for outcome in (_ALL, _SOME, _NONE) if outcomes & outcome]


def _union(outcomes: Iterable[int]) -> int:
    found = 0
    for each in outcomes:
        found |= each
    return found


def _opposite(outcomes: int) -> int:
    return _union({_ALL: _NONE, _SOME: _SOME, _NONE: _ALL}[each] for each in _each(outcomes))


def _and(a: int, b: int) -> int:
    if _NONE in (a, b):
        return _NONE
    if _ALL in (a, b):
        return a if b == _ALL else b
    return _SOME | _NONE


def _or(a: int, b: int) -> int:
    return _opposite(_and(_opposite(a), _opposite(b)))


def _xor(a: int, b: int) -> int:
    if a == b == _SOME:
        return _ANY
    a, b = (b, a) if a == _SOME else (a, b)
    return _opposite(b) if a == _ALL else b


COMBINED = {"arith.andi": _and, "arith.ori": _or, "arith.xori": _xor}
"""By op: the outcomes of a mask made of two, of which the outcome is known."""
