"""`tt.dot_scaled`: products of microscaled blocks (OCP MX), as Triton 3.9 makes them for gfx942.

Each element is multiplied by the scale of its run of 16 or 32 elements along K, in fp32, and
narrowed to bf16 (cut off, as the pass does) or, if one side is fp16, to fp16 (rounded); then both
sides are multiplied and summed in fp32. A scale is an exponent (code 0xFF is NaN, code 0 counts as
zero) or an fp8 number. gfx950's own instruction differs where a scaled element leaves the range of
bf16, and for code 0. Source: what the passes `DecomposeScaledBlocked` and `scaled_upcast` emit.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvfuzz.cpu.arch import Target
from kvfuzz.cpu.ir import Op, Type
from kvfuzz.cpu.machine import Machine, Step
from kvfuzz.cpu.numerics import convert, decode, encode
from kvfuzz.cpu.values import widen

Array = NDArray[Any]

# The eight magnitudes of e2m1, then the same with a sign: two bits of exponent, one of mantissa.
_FP4 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
_FP4_VALUES = np.concatenate([_FP4, -_FP4])

_FORMATS = {"e2m1": "i8", "e4m3": "f8E4M3FN", "e5m2": "f8E5M2", "bf16": "bf16", "fp16": "f16"}


def bind_dot_scaled(op: Op, target: Target) -> Step:
    """Bind both sides with their formats, packing and scales."""
    is_scaled: Any = op.attributes["scaled"]
    formats = [str(op.attributes[side]) for side in ("lhs", "rhs")]
    packs = [op.attributes.get(f"{side}_k_pack", True) is not False for side in ("lhs", "rhs")]
    masks_nan = op.attributes.get("fastMath") is not True
    wide = "f16" if "fp16" in formats else "bf16"
    types = list(op.operand_types[:-1])
    sides = []
    for format_, pack, has_scale in zip(formats, packs, is_scaled, strict=True):
        value = types.pop(0)
        if _FORMATS[format_] != value.element:
            raise ValueError(f"{format_} as {value.element}")
        scale = types.pop(0) if has_scale else None
        sides.append(_Side(format_, pack, wide, value, scale, masks_nan))
    left, right = sides
    right.is_right = True
    element = op.type.element

    def step(_: Machine, *operands: Array) -> Array:
        rest = list(operands)
        a = left.widened(rest.pop(0), rest.pop(0) if left.scale else None)
        b = right.widened(rest.pop(0), rest.pop(0) if right.scale else None)
        return target.encode(np.matmul(a, b) + decode(rest[0], element), element)

    return step


class _Side:
    """One side: `value` `[..., M, K]` or `[..., K, N]`; `scale` `[..., M or N, K / run]`."""

    def __init__(
        self,
        format_: str,
        packs_k: bool,
        wide: str,
        value: Type,
        scale: Type | None,
        masks_nan: bool,
    ) -> None:
        self.format = format_
        self.packs_k = packs_k
        self.wide = wide
        self.value = value
        self.scale = scale
        self.masks_nan = masks_nan
        self.is_right = False

    def widened(self, codes: Array, scale_codes: Array | None) -> Array:
        """The scaled elements in fp32, all of them values of `wide`."""
        codes = widen(codes, self.value.shape)
        if self.format == "e2m1":
            values = self._unpacked(codes)
        else:
            values = decode(convert(codes, self.value.element, self.wide), self.wide)
        if scale_codes is None or self.scale is None:
            return values
        scales, is_nan = self._scales(widen(scale_codes, self.scale.shape))
        run = values.shape[-2 if self.is_right else -1] // scales.shape[-1]
        scales, is_nan = (np.repeat(part, run, -1) for part in (scales, is_nan))
        if self.is_right:
            scales, is_nan = scales.swapaxes(-1, -2), is_nan.swapaxes(-1, -2)
        is_cut = self.wide == "bf16" and self.value.element != "bf16"
        codes = encode(values * scales, self.wide, "rtz" if is_cut else "rtne")
        scaled = decode(codes, self.wide)
        return np.where(is_nan, np.float32(np.nan), scaled) if self.masks_nan else scaled

    def _unpacked(self, codes: Array) -> Array:
        """Two elements a byte, the low half first, along K or along the other axis."""
        pairs = np.stack([codes & 15, (codes >> 4) & 15], -1)
        along_last = self.packs_k != self.is_right
        if along_last:
            numbers = pairs.reshape(*codes.shape[:-1], -1)
        else:
            numbers = np.moveaxis(pairs, -1, -2).reshape(
                *codes.shape[:-2], 2 * codes.shape[-2], codes.shape[-1]
            )
        values: Array = _FP4_VALUES[numbers]
        return values

    def _scales(self, codes: Array) -> tuple[Array, Array]:
        """The scales in fp32, and where they are NaN."""
        element = self.scale.element if self.scale else "i8"
        if element != "i8":
            scales = decode(convert(codes, element, self.wide), self.wide)
            return scales, np.isnan(scales)
        powers = (codes.view(np.uint8).astype(np.uint32) << np.uint32(23)).view(np.float32)
        return powers, codes.view(np.uint8) == 0xFF
