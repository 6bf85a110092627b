"""Conversions between floating-point formats, and between those and integers, as AMD does them."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvfuzz.cpu.arch import Target
from kvfuzz.cpu.errors import UnsupportedOp
from kvfuzz.cpu.ir import FLOAT_BITS, INTEGER_BITS, Block, Op, nested
from kvfuzz.cpu.machine import Machine, Step
from kvfuzz.cpu.numerics import FORMATS, decode, fused_multiply_add
from kvfuzz.cpu.ops_float import Binder, reject_fp8
from kvfuzz.cpu.ops_integer import signed, unsigned
from kvfuzz.cpu.values import STORAGE

Array = NDArray[Any]

_TWO_32 = 2.0**32


def _convert(op: Op, target: Target) -> Step:
    """Between floating-point formats; fp64 to fp8 is refused, as AMD's pipeline refuses it."""
    source, element = op.operand_types[0].element, op.type.element
    rounding = str(op.attributes.get("rounding", "rtne"))
    if rounding not in ("rtne", "rtz"):
        raise UnsupportedOp(f"{op.name} {rounding}", op.location.name, op.location.line)
    if source == "f64" and FLOAT_BITS[element] == 8:
        raise UnsupportedOp(f"{op.name} f64 to {element}", op.location.name, op.location.line)
    if element == "f32" and source in FORMATS:
        return lambda _, a: decode(a, source)
    return lambda _, a: target.convert(a, source, element, rounding)


def _from_integer(is_unsigned: bool) -> Binder:
    """To fp32 or fp64, rounded once; a narrower float is then rounded from fp32, which for bf16 is
    a second rounding (`v_cvt_f32_i32` and an fp32 to bf16 conversion, of any integer width).
    """

    def bind(op: Op, target: Target) -> Step:
        view = unsigned if is_unsigned else signed
        element = op.type.element
        reject_fp8(op, element)
        if element == "f64":
            return lambda _, a: view(a).astype(np.float64)
        return lambda _, a: target.encode(view(a).astype(np.float32), element)

    return bind


def _to_integer(is_unsigned: bool) -> Binder:
    """Toward zero. Beyond the range, undefined in MLIR, as AMD's code has it (its assembly for
    gfx942 and gfx1100; the instructions saturate, and take NaN for 0):

    - from fp16 to 8 or 16 bits, `v_cvt_i16_f16` or `v_cvt_u16_f16`, and the low bits of that;
    - to at most 32 bits otherwise, `v_cvt_i32` or `v_cvt_u32`, and the low bits of that;
    - 8 bits come from the signed instruction, whether they have a sign or not;
    - from fp16 to 64 bits, 32 bits extended; from other floats two halves, which do not saturate.

    Triton converts fp16 by way of fp32, which LLVM undoes (see `note_extended`).
    """

    def bind(op: Op, _: Target) -> Step:
        source, element = op.operand_types[0].element, op.type.element
        reject_fp8(op, source)
        dtype, bits = np.dtype(STORAGE[element]), INTEGER_BITS[element]
        is_half = source == "f16" or "from_half" in op.attributes
        if bits == 64 and not is_half:
            halves = _halves_of_double if source == "f64" else _halves_of_single

            def step(_: Machine, a: Array) -> Array:
                high, low = halves(np.trunc(decode(a, source)), is_unsigned)
                return ((high << 32) + low).astype(np.int64)

            return step
        width = 16 if is_half and bits in (8, 16) else 32
        kind = np.dtype(f"{'u' if is_unsigned and bits > 8 else 'i'}{width // 8}")

        def narrow(_: Machine, a: Array) -> Array:
            whole = _saturated(decode(a, source), kind)
            return (whole & 1).astype(np.bool_) if element == "i1" else whole.astype(dtype)

        return narrow

    return bind


def note_extended(blocks: tuple[Block, ...]) -> None:
    """Note on conversions to integers that their operand is an fp16 that was only extended.

    LLVM then converts the fp16 itself, as its IR for gfx942 shows.
    """
    ops = list(nested(blocks))
    extended = {
        op.results[0]
        for op in ops
        if op.name == "arith.extf" and op.operand_types[0].element == "f16"
    }
    for op in ops:
        if op.name in ("arith.fptosi", "arith.fptoui") and op.operands[0] in extended:
            op.attributes["from_half"] = True


def _saturated(values: Array, kind: np.dtype[Any]) -> Array:
    """Truncated to an integer of `kind` (at most 32 bits); returned as int64."""
    info = np.iinfo(kind)
    wide = np.trunc(values.astype(np.float64))
    whole: Array = np.clip(np.where(np.isnan(wide), 0, wide), info.min, info.max).astype(np.int64)
    return whole


def _halves_of_single(whole: Array, is_unsigned: bool) -> tuple[Array, Array]:
    """Both 32-bit halves of an integral fp32, in fp32; with a sign, those of its magnitude."""
    magnitude = whole if is_unsigned else np.abs(whole)
    high = np.floor(magnitude * np.float32(1 / _TWO_32))
    low = fused_multiply_add(high, np.full_like(high, -_TWO_32), magnitude)
    halves = [_saturated(half, np.dtype(np.uint32)) for half in (high, low)]
    sign = np.int64(1) if is_unsigned else np.where(np.signbit(whole), -1, 1)
    return halves[0] * sign, halves[1] * sign


def _halves_of_double(whole: Array, is_unsigned: bool) -> tuple[Array, Array]:
    high = np.floor(whole / _TWO_32)
    low = whole - high * _TWO_32
    kind = np.dtype(np.uint32 if is_unsigned else np.int32)
    return _saturated(high, kind), _saturated(low, np.dtype(np.uint32))


CONVERSIONS: dict[str, Binder] = {
    "arith.extf": _convert,
    "arith.truncf": _convert,
    "tt.fp_to_fp": _convert,
    "arith.sitofp": _from_integer(False),
    "arith.uitofp": _from_integer(True),
    "arith.fptosi": _to_integer(False),
    "arith.fptoui": _to_integer(True),
}
