"""quantize_and_insert_k_cache: store new tokens into DeepSeek V4's cache, its latent as fp8.

The file stands alone: copy it, change the kernel, and run
`kvfuzz run k.py:quantize_and_insert_k_cache`. Shapes:

    k                  `[T, 512]` bfloat16; rows may lie apart
    slot_mapping       `[T]` int64 = block * block_size + token; negative is padding
    kv_cache           `[num_blocks, bytes]`; blocks may lie apart. A block is block_size tokens of
                       448 codes and 64 bfloat16, then 8 bytes for each: the exponents plus 127 of
                       the scales of seven groups of 64 codes, and a zero
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
"""What the absmax of a group is mapped to."""
LEAST_ABSMAX = 1e-4

SIZES = ("k_stride", "block_stride", "rope_block_stride", "block_size")
"""What the kernel is not compiled anew for."""


@triton.jit(do_not_specialize=SIZES)
def quantize_and_insert_k_cache_kernel(
    k_ptr,
    code_ptr,
    exponent_ptr,
    rope_ptr,
    slot_mapping_ptr,
    k_stride: tl.int64,
    block_stride: tl.int64,
    rope_block_stride: tl.int64,
    block_size,
    GROUPS: tl.constexpr,
    GROUP: tl.constexpr,
    ROPE: tl.constexpr,
    MAX: tl.constexpr,
    LEAST: tl.constexpr,
):
    """One program stores one token: seven groups of codes in eight lanes, and the rotary part."""
    row = tl.program_id(0)
    slot = tl.load(slot_mapping_ptr + row)
    if slot < 0:
        return
    block = slot // block_size
    token = slot % block_size

    group = tl.arange(0, 8)
    dim = group[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    inside = dim < GROUPS * GROUP
    k = tl.load(k_ptr + row * k_stride + dim, mask=inside, other=0.0).to(tl.float32)
    absmax = tl.maximum(tl.max(tl.abs(k), axis=1), LEAST)
    exponent = tl.ceil(tl.log2(tl.div_rn(absmax, tl.full([8], MAX, tl.float32))))
    codes = tl.div_rn(k, tl.broadcast_to(tl.exp2(exponent)[:, None], [8, GROUP]))

    row_bytes: tl.constexpr = GROUPS * GROUP + 2 * ROPE
    code_at = block * block_stride + token * row_bytes + dim
    tl.store(code_ptr + code_at, codes.to(code_ptr.dtype.element_ty), mask=inside)
    stored = tl.where(group < GROUPS, exponent + 127, 0.0).to(tl.uint8)
    exponent_at = block * block_stride + block_size * row_bytes + token * 8 + group
    tl.store(exponent_ptr + exponent_at, stored)
    rope = tl.arange(0, ROPE)
    rope_at = block * rope_block_stride + token * (row_bytes // 2) + GROUPS * GROUP // 2 + rope
    tl.store(rope_ptr + rope_at, tl.load(k_ptr + row * k_stride + GROUPS * GROUP + rope))


def quantize_and_insert_k_cache(
    k: torch.Tensor,
    kv_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    block_size: int,
    cache_dtype: str,
) -> None:
    """Store `k` and the scales of its groups."""
    if slot_mapping.shape[0] == 0:
        return
    codes, rope = kv_cache.view(FP8[cache_dtype]), kv_cache.view(torch.bfloat16)
    quantize_and_insert_k_cache_kernel[(slot_mapping.shape[0],)](
        k,
        codes,
        kv_cache,
        rope,
        slot_mapping,
        k.stride(0),
        codes.stride(0),
        rope.stride(0),
        block_size,
        GROUPS=7,
        GROUP=64,
        ROPE=64,
        MAX=MAX[cache_dtype],
        LEAST=LEAST_ABSMAX,
    )
