"""The references of caches with one row a token, as `kvfuzz.model.ops.latent` says.

Where a page has scales of its own, those are computed of each group by `kvfuzz.oracles.groups`;
else one scale is read. A gather copies codes, or multiplies them by that scale.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from kvfuzz.model.case import Step
from kvfuzz.model.dtypes import DTYPES
from kvfuzz.model.target import Quantise
from kvfuzz.oracles.codec import FP32_MANTISSA_BITS, decode
from kvfuzz.oracles.groups import group_codes, group_scales, next_powers_of_two
from kvfuzz.oracles.memory import Memory
from kvfuzz.oracles.writes import Stored, dequantised, quantised

V4_GROUPS = 7
"""Groups of a token of DeepSeek V4."""


class Rows(NamedTuple):
    """The rows of a batch that have a token, and where in the cache that is; each `[rows, 1]`."""

    row: Tensor
    block: Tensor
    token: Tensor


def _stored_rows(memory: Memory, step: Step, page: str) -> Rows:
    """By slot_mapping: a negative slot is padding."""
    count = memory.case.bound_field(step, "slot_mapping").extents["token"]
    slots = memory.integers(step, "slot_mapping", token=torch.arange(count, device=memory.device))
    size = memory.case.bound_field(step, page).extents["token"]
    rows = torch.nonzero(slots >= 0)
    return Rows(rows, slots[rows] // size, slots[rows] % size)


def _gathered_rows(memory: Memory, step: Step, page: str) -> Rows:
    """By block_table: token t is one of sequence token_to_batch[t]."""
    count = memory.case.bound_field(step, "token_to_batch").extents["token"]
    rows = torch.arange(count, device=memory.device)
    owner = memory.integers(step, "token_to_batch", token=rows)
    bounds = memory.case.bound_field(step, "cu_seqlens_kv").extents["token"]
    # A kernel may ask where its sequence ends, too.
    begin = memory.integers(step, "cu_seqlens_kv", token=torch.arange(bounds, device=memory.device))
    position = rows - begin[owner]
    if "seq_starts" in step.fields:
        position = position + memory.integers(step, "seq_starts", token=owner)
    size = memory.case.bound_field(step, page).extents["token"]
    block = memory.integers(step, "block_table", token=owner, dim=position // size)
    return Rows(rows[:, None], block[:, None], (position % size)[:, None])


def _dims(memory: Memory, step: Step, parameter: str) -> Tensor:
    extents = memory.case.bound_field(step, parameter).extents
    return torch.arange(extents["dim"], device=memory.device)[None, :]


def concat_and_cache_mla(memory: Memory, step: Step, quantise: Quantise) -> list[Stored]:
    """What the step must store: the latent, the rotary part, and computed scales."""
    rows = _stored_rows(memory, step, "cached_latent")
    if "cached_scale" in step.fields:
        stored = _groups(memory, step, rows, ("kv_c", "cached_latent"), quantise)
        return [*stored, _part(memory, step, rows, ("k_pe", "cached_rope"), quantise)]
    return [
        _part(memory, step, rows, names, quantise)
        for names in (("kv_c", "cached_latent"), ("k_pe", "cached_rope"))
    ]


def _part(
    memory: Memory, step: Step, rows: Rows, names: tuple[str, str], quantise: Quantise
) -> Stored:
    """One part of a row, by the scale that all share where it is converted to fp8."""
    source, cached = (memory.case.bound_field(step, name) for name in names)
    dim = _dims(memory, step, names[0])
    codes = memory.read(step, names[0], token=rows.row, dim=dim)
    scale = torch.ones((), device=memory.device)
    if source.dtype != cached.dtype:
        scale = _scale(memory, step)
    field, at = memory.at(step, names[1], block=rows.block, token=rows.token, dim=dim)
    codes = quantised(codes, source.dtype, cached.dtype, scale, quantise)
    return Stored(field, at, codes, source.dtype != cached.dtype)


def _scale(memory: Memory, step: Step) -> Tensor:
    everywhere = torch.zeros(1, dtype=torch.int64, device=memory.device)
    code = memory.read(step, "scale", token=everywhere)
    return code.to(torch.int32).view(torch.float32)  # positive, so that no bit is lost


def _groups(
    memory: Memory, step: Step, rows: Rows, names: tuple[str, str], quantise: Quantise
) -> list[Stored]:
    """Codes and scales of the groups of each row: as many as its page has scales."""
    count = memory.case.bound_field(step, "cached_scale").extents.get("dim", 1)
    codes, scales = _quantised_groups(memory, step, rows, names, quantise, count)
    group = torch.arange(count, device=memory.device)[None, :]
    field, at = memory.at(step, "cached_scale", block=rows.block, token=rows.token, dim=group)
    bits = scales.view(torch.int32).to(torch.int64)
    return [codes, Stored(field, at, bits, True)]


def _quantised_groups(
    memory: Memory,
    step: Step,
    rows: Rows,
    names: tuple[str, str],
    quantise: Quantise,
    count: int,
) -> tuple[Stored, Tensor]:
    """The codes of `count` groups of each row, and their scales, fp32 `[rows, count]`."""
    source, cached = (memory.case.bound_field(step, name) for name in names)
    dim = _dims(memory, step, names[1])
    codes = memory.read(step, names[0], token=rows.row, dim=dim)
    values = decode(codes, DTYPES[source.dtype]).reshape(len(codes), count, -1)
    scales = group_scales(values.abs().amax(-1), cached.dtype, quantise)
    if step.scalars.get("scale_fmt") == "ue8m0":
        scales = next_powers_of_two(scales)
    found = group_codes(values, scales[..., None], cached.dtype, quantise).reshape(codes.shape)
    field, at = memory.at(step, names[1], block=rows.block, token=rows.token, dim=dim)
    return Stored(field, at, found, True), scales


def quantize_and_insert_k_cache(memory: Memory, step: Step, quantise: Quantise) -> list[Stored]:
    """What the step must store: codes, the exponents of their scales and a zero, rotary parts."""
    rows = _stored_rows(memory, step, "cached_nope")
    names = ("k", "cached_nope")
    codes, scales = _quantised_groups(memory, step, rows, names, quantise, V4_GROUPS)
    # The exponent of a power of two plus 127 is what an fp32 stores of it.
    exponents = scales.view(torch.int32).to(torch.int64) >> FP32_MANTISSA_BITS
    exponents = torch.cat([exponents, torch.zeros_like(exponents[:, :1])], 1)
    dim = _dims(memory, step, "cached_scale")
    field, at = memory.at(step, "cached_scale", block=rows.block, token=rows.token, dim=dim)
    first = memory.case.bound_field(step, "cached_nope").extents["dim"]
    dim = _dims(memory, step, "cached_rope")
    rope = memory.read(step, "k", token=rows.row, dim=first + dim)
    to, rope_at = memory.at(step, "cached_rope", block=rows.block, token=rows.token, dim=dim)
    return [codes, Stored(field, at, exponents, False), Stored(to, rope_at, rope, False)]


def gather_mla(memory: Memory, step: Step, quantise: Quantise) -> list[Stored]:
    """What the step must store: the rows of the batch, the latent first."""
    del quantise
    rows = _gathered_rows(memory, step, "cached_latent")
    stored, first = [], 0
    for name in ("cached_latent", "cached_rope"):
        cached, dim = memory.case.bound_field(step, name), _dims(memory, step, name)
        codes = memory.read(step, name, block=rows.block, token=rows.token, dim=dim)
        out, at = memory.at(step, "out", token=rows.row, dim=first + dim)
        converted = cached.dtype != out.dtype
        scale = _scale(memory, step) if converted else torch.ones((), device=memory.device)
        codes = dequantised(codes, cached.dtype, out.dtype, scale)
        stored.append(Stored(out, at, codes, converted))
        first += dim.shape[1]
    return stored


def indexer_quant_and_cache(memory: Memory, step: Step, quantise: Quantise) -> list[Stored]:
    """What the step must store: a token's codes and its scale."""
    rows = _stored_rows(memory, step, "cached_k")
    return _groups(memory, step, rows, ("k", "cached_k"), quantise)


def gather_indexer(memory: Memory, step: Step, quantise: Quantise) -> list[Stored]:
    """What the step must store: codes and scales of the rows of the batch, bit by bit."""
    del quantise
    rows = _gathered_rows(memory, step, "cached_k")
    dim = _dims(memory, step, "k")
    codes = memory.read(step, "cached_k", block=rows.block, token=rows.token, dim=dim)
    scales = memory.read(step, "cached_scale", block=rows.block, token=rows.token)
    out, at = memory.at(step, "k", token=rows.row, dim=dim)
    scale_out, scale_at = memory.at(step, "k_scale", token=rows.row)
    return [Stored(out, at, codes, False), Stored(scale_out, scale_at, scales, False)]
