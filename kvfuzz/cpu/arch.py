"""What a kernel's arithmetic depends on besides its text: the architecture, and the fp16 clamp.

Triton writes many conversions of fp8 out as integer arithmetic, some of which differs from the
general rule (`numerics`) for a few inputs. Those are the table `PECULIARITIES`. They were found by
building the LLVM IR that Triton 3.9's AMD backend makes for gfx90a, gfx942, gfx950, gfx1100,
gfx1201 and gfx1250 for the host instead, and running it on every 8-bit or 16-bit input, and on 3
million fp32 inputs. (fp32 to e5m2 with rtz was read: `cvt.pkrtz`, then the upper byte.) Where a
family has an instruction for a conversion, the general rule is taken for it.

A kernel that converts to an fp8 format anywhere runs with FP16_OVFL set from its first instruction
on (`s_setreg` of MODE, bit 23, in AMD's assembly for all six): fp16 results of finite inputs then
overflow to the largest finite value instead of infinity. Library functions and atomics are not
clamped here.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvfuzz.cpu.ir import FLOAT_BITS, Module, nested
from kvfuzz.cpu.numerics import FORMATS, convert, encode

Array = NDArray[Any]
Change = Callable[[Array, Array], Array]
"""From the source (raw codes; fp32 as numbers) and the general rule's codes to the codes given."""

DEFAULT_ARCH = "gfx942"


def _nan_above_464(source: Array, result: Array) -> Array:
    """fp16 strictly between 464 and 480, which round to 480, give the code of NaN."""
    magnitude = source & 0x7FFF
    return np.where((magnitude > 0x5F40) & (magnitude < 0x5F80), result | 0x7F, result)


def _nan_as_number(source: Array, result: Array) -> Array:
    """The NaN codes of e4m3fn give what their bits say if read as a number: +-480."""
    sign = (source.astype(np.uint16) & 0x80) << 8
    return np.where(source & 0x7F == 0x7F, sign | 0x43F0, result)


def _specials_as_numbers(source: Array, result: Array) -> Array:
    """The top exponent of e5m2 is like any other: infinity gives 65536, NaNs 81920 and more."""
    wide = source.astype(np.uint16)
    number = ((wide & 0x80) << 8) | (((wide & 0x7F) << 5) + 0x3800)
    return np.where(source & 0x7F >= 0x7C, number, result)


def _infinity_as_nan(infinity: int) -> Change:
    """Infinities (`infinity` is the code of the positive one) give the NaN of FNUZ, 0x80."""
    return lambda source, result: np.where(source & 0x7FFF == infinity, 0x80, result)


def _fp32_infinity_as_nan(source: Array, result: Array) -> Array:
    return np.where(np.isinf(source), np.uint8(0x80), result)


def _high_byte(source: Array, _: Array) -> Array:
    """The upper half of fp16: infinity stays, and a NaN of low bits only becomes infinity."""
    return source >> 8


def _fp32_infinity_stays(source: Array, result: Array) -> Array:
    """The same after a conversion to fp16 that cuts off."""
    return result + np.isinf(source)


# The families (by the start of their names) that have no instruction for a format.
_NO_OCP = ("gfx90", "gfx94", "gfx11", "gfx120")
_NO_FNUZ = ("gfx90", "gfx95", "gfx11", "gfx120", "gfx125")
_ANY = ("gfx",)

# By source, target and rounding: the families that differ, and how.
PECULIARITIES: dict[tuple[str, str, str], tuple[tuple[str, ...], Change]] = {
    ("f16", "f8E4M3FN", "rtne"): (_NO_OCP, _nan_above_464),
    ("f8E4M3FN", "bf16", "rtne"): (_NO_OCP, _nan_as_number),
    ("f8E5M2", "bf16", "rtne"): (_NO_OCP, _specials_as_numbers),
    ("f16", "f8E4M3FNUZ", "rtne"): (_NO_FNUZ, _infinity_as_nan(0x7C00)),
    ("f16", "f8E5M2FNUZ", "rtne"): (_NO_FNUZ, _infinity_as_nan(0x7C00)),
    ("bf16", "f8E4M3FNUZ", "rtne"): (_NO_FNUZ, _infinity_as_nan(0x7F80)),
    ("bf16", "f8E5M2FNUZ", "rtne"): (_NO_FNUZ, _infinity_as_nan(0x7F80)),
    ("f32", "f8E4M3FNUZ", "rtne"): (_NO_FNUZ, _fp32_infinity_as_nan),
    ("f32", "f8E5M2FNUZ", "rtne"): (_NO_FNUZ, _fp32_infinity_as_nan),
    ("f16", "f8E5M2", "rtz"): (_ANY, _high_byte),
    ("f32", "f8E5M2", "rtz"): (_ANY, _fp32_infinity_stays),
}


@dataclass(frozen=True, slots=True)
class Target:
    """Where a kernel runs: the architecture, and whether this kernel clamps fp16 results."""

    arch: str = DEFAULT_ARCH
    clamps_fp16: bool = False
    has_median: bool = True
    """Whether Triton makes one instruction of a clamp: 3.9 does, 3.6 a maximum and a minimum."""

    def convert(self, codes: Array, source: str, target: str, rounding: str = "rtne") -> Array:
        """`numerics.convert` as this target's code does it."""
        families, change = PECULIARITIES.get((source, target, rounding), ((), None))
        if change is not None and self.arch.startswith(families):
            if source in FORMATS:
                return _changed_table(source, target, rounding).take(codes)
            return change(codes, convert(codes, source, target, rounding)).astype(np.uint8)
        result = convert(codes, source, target, rounding)
        # fp64 is rounded to fp16 by integer instructions, which do not clamp.
        if target != "f16" or source == "f64" or not self.clamps_fp16:
            return result
        return _clamped(result, convert(codes, source, "f32"))

    def encode(self, values: Array, element: str) -> Array:
        """`numerics.encode` of what this target has computed."""
        codes = encode(values, element)
        return _clamped(codes, values) if element == "f16" and self.clamps_fp16 else codes


def target_of(module: Module, arch: str, has_median: bool) -> Target:
    """The target of one kernel: it clamps fp16 if it converts to any fp8 format."""
    converts = any(
        op.name == "tt.fp_to_fp" and FLOAT_BITS.get(op.type.element) == 8
        for function in module.functions.values()
        for op in nested(function.blocks)
    )
    return Target(arch, converts, has_median)


def wave_size(arch: str) -> int:
    """Lanes of a wavefront: 64 up to gfx9, 32 from gfx10 on (Triton's rule for AMD)."""
    major = arch.partition("-")[0][3:-2]
    return 32 if major.isdigit() and int(major) >= 10 else 64


def _clamped(codes: Array, values: Array) -> Array:
    """fp16 codes, the largest finite one where finite `values` have become infinity."""
    overflows = (codes & 0x7FFF == 0x7C00) & np.isfinite(values)
    return np.where(overflows, codes - codes.dtype.type(1), codes)


@cache
def _changed_table(source: str, target: str, rounding: str) -> Array:
    """Codes of `target` for every code of `source`, as its peculiarity has them."""
    codes = np.arange(1 << FORMATS[source].bits).astype(FORMATS[source].storage)
    change = PECULIARITIES[source, target, rounding][1]
    changed = change(codes, convert(codes, source, target, rounding))
    return changed.astype(FORMATS[target].storage)
