"""What a reference returns, elements with their addresses; a cache's scales and conversions."""

from dataclasses import dataclass

import torch
from torch import Tensor

from kvfuzz.model.case import Step
from kvfuzz.model.dtypes import DTYPES, INFINITY_AND_NAN, CacheDtype
from kvfuzz.model.layout import Field
from kvfuzz.model.steps import CACHES
from kvfuzz.model.target import Quantise
from kvfuzz.oracles.codec import decode, encode, quotient
from kvfuzz.oracles.memory import Memory
from kvfuzz.oracles.numerics import Bounded

SIDES = (("key", "key_cache", "k_scale"), ("value", "value_cache", "v_scale"))
"""Per side of a page: the parameters of its activation, its cache and its scale."""


@dataclass(frozen=True, slots=True)
class Stored:
    """Elements that an op must store into `field`: positions and codes of equal shape."""

    field: Field
    at: Tensor
    codes: Tensor
    converted: bool
    """Whether a conversion made the codes, so that a NaN is a class and not a bit pattern."""
    within: Bounded | None = None
    """Where arithmetic made them: numbers, and how far from each a result may be; the codes are
    those nearest to them."""


def stored_within(
    memory: Memory, step: Step, parameter: str, within: Bounded, **coordinates: Tensor
) -> Stored:
    """What arithmetic made, at elements of a parameter: `within` broadcasts as coordinates do."""
    field, at = memory.at(step, parameter, **coordinates)
    codes = encode(within.value.float(), DTYPES[field.dtype])
    return Stored(field, at, codes, converted=True, within=within)


def scales_at(memory: Memory, step: Step, name: str, **coordinates: Tensor) -> Tensor:
    """The scale `name` of the element at each coordinate, fp32; broadcasts with the coordinates.
    What is not fp8 has none, and no memory is read for it: 1."""
    if not DTYPES[memory.case.bound_field(step, CACHES[0]).dtype].is_quantised:
        return torch.ones((), device=memory.device)
    codes = memory.read(step, name, **coordinates)
    return codes.to(torch.int32).view(torch.float32)  # positive, so that no bit is lost


def quantised(codes: Tensor, source: str, cache: str, scale: Tensor, how: Quantise) -> Tensor:
    """The cache codes of model-dtype `codes`: a copy, or the declared quotient rounded once."""
    if source == cache:
        return codes
    x = decode(codes, DTYPES[source])
    if DTYPES[cache].is_quantised:
        x = quotient(x, scale, how)
    found = encode(x, DTYPES[cache])
    return found if how.beyond == "saturate" else overflowed(x, found, DTYPES[cache])


def overflowed(values: Tensor, codes: Tensor, dtype: CacheDtype) -> Tensor:
    """`codes` of `values`, those beyond the range of `dtype` replaced by its infinity, or its NaN.

    Beyond is what would round to more than the largest finite number.
    """
    last, quantum = dtype.decode(dtype.max_code), dtype.decode(dtype.max_code)
    quantum -= dtype.decode(dtype.max_code - 1)
    beyond = values.abs() >= last + quantum / 2
    has_infinity = dtype.specials == INFINITY_AND_NAN
    instead = dtype.max_code + 1 if has_infinity else dtype.nan_code
    signed = codes & dtype.sign_bit | instead
    return torch.where(beyond, signed if has_infinity else instead, codes)


def dequantised(codes: Tensor, cache: str, out: str, scale: Tensor) -> Tensor:
    """The output codes of cache `codes`: a copy, or code * scale in fp32 rounded once (#39122)."""
    if cache == out:
        return codes
    x = decode(codes, DTYPES[cache])
    if DTYPES[cache].is_quantised:
        x = x * scale
    return encode(x, DTYPES[out])


def rows_heads_dims(field: Field, rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Coordinates that broadcast to `[rows, heads, dims]` over a field's heads and dims."""
    heads = torch.arange(field.extents["head"], device=rows.device)
    dims = torch.arange(field.extents["dim"], device=rows.device)
    return rows[:, None, None], heads[None, :, None], dims[None, None, :]
