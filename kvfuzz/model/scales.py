"""The scales of a cache: one number, a tensor beside it, or bytes inside its pages.

Whatever shares one scale, an oracle finds it through the field `k_scale` or `v_scale` of a block, a
head and a token: the field has terms for the axes that a scale depends on and none for the others.
A target is handed a view `[1]`, `[H]`, `[B, H]` or `[B, N, H]` of the same bytes.
"""

import math

import msgspec

from kvfuzz.model.case import Buffer, Program, Step, TensorView
from kvfuzz.model.fill import Fill, IntegerFill, ScaleFill
from kvfuzz.model.layout import Field, Term
from kvfuzz.model.placement import SCALE_AXES, scale_extents
from kvfuzz.model.plan import AttentionLayer
from kvfuzz.model.vocabulary import SCALE_BYTES

SCALES = ("k_scale", "v_scale")


class Scales(msgspec.Struct, frozen=True):
    """One side's scales: the buffer, unless they lie in the cache, the field and the view."""

    buffer: Buffer | None
    field: Field
    view: TensorView


def scales_of(name: str, layer: AttentionLayer, bits: int, seed: int) -> Scales:
    """The scales `name` of a layer that lie beside its cache; `bits` is the least of them."""
    return made_scales(name, layer, _fill(layer, bits, seed))


def made_scales(name: str, layer: AttentionLayer, fill: Fill) -> Scales:
    """The scales `name` of a layer, beside its cache, in memory that first holds `fill`."""
    extents = scale_extents(layer)
    count = math.prod(extents.values())
    buffer = Buffer(name, SCALE_BYTES * count, fill)
    terms, stride = [], SCALE_BYTES * count
    for axis in SCALE_AXES[layer.granularity]:
        stride //= extents[axis]
        terms.append(Term(axis, stride))
    field = Field(name, name, "fp32", 0, tuple(terms), extents, layer.name)
    return Scales(buffer, field, scale_view(field, layer))


def inline_scales(field: Field, layer: AttentionLayer, bits: int, seed: int) -> Scales:
    """The scales that lie in the cache, at `field`, which they fill."""
    filled = msgspec.structs.replace(field, fill=_fill(layer, bits, seed))
    return Scales(None, filled, scale_view(filled, layer))


def _fill(layer: AttentionLayer, bits: int, seed: int) -> Fill:
    if layer.granularity == "tensor":
        return IntegerFill("fp32", (bits,))
    return ScaleFill(seed, bits)


def scale_view(field: Field, layer: AttentionLayer) -> TensorView:
    """What a target is handed for the scales at `field`."""
    strides = {term.axis: term.stride for term in field.terms}
    axes = SCALE_AXES[layer.granularity]
    return TensorView(
        field.name,
        field.buffer,
        "fp32",
        tuple(field.extents[axis] for axis in axes) or (1,),
        tuple(strides[axis] for axis in axes) or (SCALE_BYTES,),
        field.base,
    )


def least_scale(case: Program, step: Step, parameter: str) -> int:
    """The bit pattern that no scale of `parameter` is below."""
    field = case.bound_field(step, parameter)
    fill = field.fill or case.buffer(field.buffer).fill
    if isinstance(fill, ScaleFill):
        return fill.least
    return min(case.integers(step, parameter))
