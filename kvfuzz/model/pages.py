"""Pages that are no K and V: MLA, DeepSeek's sparse pages, opaque slots, Mamba state.

Each function returns the fields of one layer's pages, its blocks `block_stride` bytes apart from
byte 0 of `buffer`; without it blocks are dense. What no field owns is padding. The formulas are
those of vLLM's backends:

    mla             [B, N, R + P] elements, a latent of R = 512 and P = 64 rotary elements
    fp8_ds_mla      a token of 656 bytes: 512 fp8, 4 fp32 scales of 128 each, 64 rotary bf16
    fp8_ds_mla_v4   N tokens of 576 bytes, 448 fp8 and 64 rotary bf16, then N times 8 bytes of
                    scale exponents (vLLM models/deepseek_v4/common/ops/cache_utils.py)
    indexer         N * D fp8 in tiles of 16 tokens, or row by row, then N fp32 scales (DeepSeek's
                    sparse indexer)
    opaque_slots    [B, H, N, slot bytes]: one slot of its quantiser per head and token
    mamba_states    the states of a layer one after the other in a page
"""

import math
from collections.abc import Sequence

from kvfuzz.errors import UsageError
from kvfuzz.model.dtypes import itemsize
from kvfuzz.model.layout import Axis, Field, Term

LATENT, ROPE = 512, 64
"""Elements of the compressed K and V of a token, and of its rotary part (DeepSeek V2, V3)."""
DS_SCALES = 4
"""fp32 scales of a token of fp8_ds_mla, each for a quarter of the latent."""
V4_NOPE, V4_SCALES = 448, 8
"""fp8 elements and scale bytes of a token of DeepSeek V4."""
TILE = 16
"""Tokens of a tile of the indexer, and the elements that lie together in it."""


def mla(
    num_blocks: int,
    block_size: int,
    dtype: str,
    *,
    buffer: str,
    layer: str,
    block_stride: int = 0,
    latent: int = LATENT,
    rope: int = ROPE,
) -> tuple[Field, ...]:
    """`latent` and `rope` of MLA: each token is so many elements of `dtype` in one piece."""
    element = itemsize(dtype)
    row = (latent + rope) * element
    page = _Tokens(num_blocks, block_size, row, buffer, layer, block_stride)
    return (
        page.field("latent", dtype, 0, latent),
        page.field("rope", dtype, latent * element, rope),
    )


def fp8_ds_mla(
    num_blocks: int, block_size: int, dtype: str, *, buffer: str, layer: str, block_stride: int = 0
) -> tuple[Field, ...]:
    """`latent` of fp8 `dtype`, `scale` and `rope`: 512 + 4 * 4 + 64 * 2 = 656 bytes a token."""
    row = LATENT + 4 * DS_SCALES + 2 * ROPE
    page = _Tokens(num_blocks, block_size, row, buffer, layer, block_stride)
    return (
        page.field("latent", dtype, 0, LATENT),
        page.field("scale", "fp32", LATENT, DS_SCALES),
        page.field("rope", "bf16", LATENT + 4 * DS_SCALES, ROPE),
    )


def fp8_ds_mla_v4(
    num_blocks: int, block_size: int, dtype: str, *, buffer: str, layer: str, block_stride: int = 0
) -> tuple[Field, ...]:
    """`nope` of fp8 `dtype` and `rope`, 448 + 64 * 2 = 576 bytes a token, and behind all of them
    `scale`, 8 bytes a token, the last of which nothing reads. vLLM pads such a page to a multiple
    of 576 bytes: its block stride says so."""
    row = V4_NOPE + 2 * ROPE
    stride = _stride(block_size * (row + V4_SCALES), block_stride)
    page = _Tokens(num_blocks, block_size, row, buffer, layer, stride)
    terms = (Term("block", stride), Term("token", V4_SCALES), Term("dim", 1))
    extents: dict[Axis, int] = {"block": num_blocks, "token": block_size, "dim": V4_SCALES}
    return (
        page.field("nope", dtype, 0, V4_NOPE),
        page.field("rope", "bf16", V4_NOPE, ROPE),
        Field("scale", buffer, "u8", block_size * row, terms, extents, layer),
    )


def indexer(
    num_blocks: int,
    block_size: int,
    head_size: int,
    dtype: str,
    *,
    buffer: str,
    layer: str,
    block_stride: int = 0,
    tile: int = TILE,
) -> tuple[Field, ...]:
    """`k` of fp8 `dtype` in tiles, and one fp32 `scale` per token behind all of them.

    In a tile of 16 tokens, 16 elements of one token lie together, then those of the next token:
    element d of token s is byte `s // 16 * 16 * D + d // 16 * 256 + s % 16 * 16 + d % 16`. With a
    `tile` of one token the elements of a token lie together, as in older releases and where a block
    is one token. Raises UsageError where block_size is no multiple of the tile, or head_size none
    of 16.
    """
    for name, size, unit in (("block_size", block_size, tile), ("head_size", head_size, TILE)):
        if size % unit:
            raise UsageError(f"indexer page: {name}={size}, expected a multiple of {unit}")
    stride = _stride(block_size * (head_size + 4), block_stride)
    terms = (
        Term("block", stride),
        Term("token", tile * head_size, tile),
        Term("dim", tile * TILE, TILE),
        *((Term("token", TILE, 1, tile),) if tile > 1 else ()),
        Term("dim", 1, 1, TILE),
    )
    extents: dict[Axis, int] = {"block": num_blocks, "token": block_size}
    scales = (Term("block", stride), Term("token", 4))
    behind = block_size * head_size
    return (
        Field("k", buffer, dtype, 0, terms, extents | {"dim": head_size}, layer),
        Field("scale", buffer, "fp32", behind, scales, extents, layer),
    )


def opaque_slots(
    num_blocks: int,
    num_kv_heads: int,
    block_size: int,
    slot_bytes: int,
    *,
    buffer: str,
    layer: str,
    block_stride: int = 0,
) -> tuple[Field, ...]:
    """`slot`: the bytes of a head and token that only its quantiser can read (TurboQuant)."""
    stride = _stride(num_kv_heads * block_size * slot_bytes, block_stride)
    terms = (
        Term("block", stride),
        Term("head", block_size * slot_bytes),
        Term("token", slot_bytes),
        Term("dim", 1),
    )
    extents: dict[Axis, int] = {
        "block": num_blocks,
        "head": num_kv_heads,
        "token": block_size,
        "dim": slot_bytes,
    }
    return (Field("slot", buffer, "u8", 0, terms, extents, layer),)


def mamba_states(
    num_blocks: int,
    states: Sequence[tuple[str, tuple[int, ...]]],
    *,
    buffer: str,
    layer: str,
    block_stride: int = 0,
) -> tuple[Field, ...]:
    """`state_0`, `state_1`, ... of (dtype, shape) each, one after the other in a page.

    A state's elements are counted along `dim`, row-major over its shape. Raises UsageError where
    a state, or the step from block to block, does not lie at a multiple of its element.
    """
    sizes = [math.prod(shape) * itemsize(dtype) for dtype, shape in states]
    stride = _stride(sum(sizes), block_stride)
    fields = []
    for number, (dtype, shape) in enumerate(states):
        element, base = itemsize(dtype), sum(sizes[:number])
        if base % element or stride % element:
            raise UsageError(
                f"mamba page: state {number} of {dtype} at byte {base} of blocks {stride} bytes "
                f"apart, expected multiples of {element}"
            )
        terms = (Term("block", stride), Term("dim", element))
        extents: dict[Axis, int] = {"block": num_blocks, "dim": math.prod(shape)}
        fields.append(Field(f"state_{number}", buffer, dtype, base, terms, extents, layer))
    return tuple(fields)


class _Tokens:
    """Pages of tokens that lie in one piece, `row` bytes each."""

    def __init__(
        self, num_blocks: int, block_size: int, row: int, buffer: str, layer: str, stride: int
    ) -> None:
        self._extents: dict[Axis, int] = {"block": num_blocks, "token": block_size}
        self._terms = (Term("block", _stride(block_size * row, stride)), Term("token", row))
        self._buffer, self._layer = buffer, layer

    def field(self, name: str, dtype: str, base: int, count: int) -> Field:
        """`count` elements of each token, from byte `base` of its row."""
        terms = (*self._terms, Term("dim", itemsize(dtype)))
        extents = self._extents | {"dim": count}
        return Field(name, self._buffer, dtype, base, terms, extents, self._layer)


def _stride(page: int, block_stride: int) -> int:
    """Bytes from block to block: `block_stride`, or `page` where that is 0."""
    if block_stride and block_stride < page:
        raise UsageError(f"block_stride={block_stride}, expected 0 or at least a page of {page}")
    return block_stride or page
