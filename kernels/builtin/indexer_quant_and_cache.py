"""indexer_quant_and_cache: store the sparse indexer's keys as fp8, with a scale for each token.

The file stands alone: copy it, change the kernel, and run
`kvfuzz run k.py:indexer_quant_and_cache`. Shapes:

    k                  `[T, D]`; rows may lie apart
    slot_mapping       `[T]` int64 = block * block_size + token; negative is padding
    kv_cache           `[num_blocks, block_size, D + 4]` bytes; blocks may lie apart. A block is
                       `block_size * D` codes, then block_size float32 scales
    block_tile_size    tokens of a tile, in which 16 codes of each token lie together; 1 is row
                       after row
    scale_fmt          "ue8m0" rounds scales up to powers of two
    cache_dtype        the fp8 format, e4m3fn or e4m3fnuz
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator, misc"
import torch
import triton
import triton.language as tl

FP8 = {
    "e4m3fn": torch.float8_e4m3fn,
    "e4m3fnuz": torch.float8_e4m3fnuz,
}
MAX = {"e4m3fn": 448.0, "e4m3fnuz": 224.0}
"""What the absmax of a token is mapped to."""
LEAST_ABSMAX = 1e-4
HEAD_TILE_SIZE = 16
"""Codes of a token that lie together."""

FEWEST_LANES = 128
"""Small heads share a compilation."""

SIZES = (
    "k_stride",
    "code_block_stride",
    "scale_block_stride",
    "block_size",
    "head_size",
    "block_tile_size",
)
"""What the kernel is not compiled anew for."""


@triton.jit(do_not_specialize=SIZES)
def indexer_quant_and_cache_kernel(
    k_ptr,
    code_ptr,
    scale_ptr,
    slot_mapping_ptr,
    k_stride: tl.int64,
    code_block_stride: tl.int64,
    scale_block_stride: tl.int64,
    block_size,
    head_size,
    block_tile_size,
    HEAD_TILE: tl.constexpr,
    PADDED_HEAD_SIZE: tl.constexpr,
    MAX: tl.constexpr,
    LEAST: tl.constexpr,
    UE8M0: tl.constexpr,
):
    """One program stores the codes and the scale of one token."""
    row = tl.program_id(0)
    dim = tl.arange(0, PADDED_HEAD_SIZE)
    inside = dim < head_size
    slot = tl.load(slot_mapping_ptr + row)
    if slot < 0:
        return
    block = slot // block_size
    token = slot % block_size

    k = tl.load(k_ptr + row * k_stride + dim, mask=inside, other=0.0).to(tl.float32)
    absmax = tl.maximum(tl.max(tl.abs(k), axis=0), LEAST)
    scale = tl.div_rn(absmax, MAX)
    if UE8M0:
        scale = tl.exp2(tl.ceil(tl.log2(scale)))
    codes = tl.div_rn(k, tl.full([PADDED_HEAD_SIZE], 1.0, tl.float32) * scale)

    tile_at = token // block_tile_size * (block_tile_size * head_size)
    within_at = token % block_tile_size * HEAD_TILE + dim % HEAD_TILE
    code_at = tile_at + dim // HEAD_TILE * (block_tile_size * HEAD_TILE) + within_at
    code_at += block * code_block_stride
    tl.store(code_ptr + code_at, codes.to(code_ptr.dtype.element_ty), mask=inside)
    tl.store(scale_ptr + block * scale_block_stride + token, scale)


def indexer_quant_and_cache(
    k: torch.Tensor,
    kv_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    scale_fmt: str,
    block_tile_size: int,
    cache_dtype: str,
) -> None:
    """Store `k` and its scales."""
    num_blocks, block_size = kv_cache.shape[:2]
    head_size = k.shape[1]
    pages = kv_cache.view(num_blocks, -1)
    codes = pages[:, : block_size * head_size].view(FP8[cache_dtype])
    scales = pages[:, block_size * head_size :].view(torch.float32)
    if slot_mapping.shape[0] == 0:
        return
    indexer_quant_and_cache_kernel[(slot_mapping.shape[0],)](
        k,
        codes,
        scales,
        slot_mapping,
        k.stride(0),
        codes.stride(0),
        scales.stride(0),
        block_size,
        head_size,
        block_tile_size,
        HEAD_TILE=HEAD_TILE_SIZE,
        PADDED_HEAD_SIZE=triton.next_power_of_2(max(head_size, FEWEST_LANES)),
        MAX=MAX[cache_dtype],
        LEAST=LEAST_ABSMAX,
        UE8M0=scale_fmt == "ue8m0",
    )
