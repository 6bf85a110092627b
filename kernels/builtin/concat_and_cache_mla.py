"""concat_and_cache_mla: store the latents and rotary parts of new tokens into MLA's cache.

The file stands alone: copy it, change the kernel, and run `kvfuzz run k.py:concat_and_cache_mla`.
Shapes (rows and blocks may lie apart, the elements of a row do not):

    kv_c            `[T, R]`, the latents
    k_pe            `[T, P]`, the rotary parts
    slot_mapping    `[T]` int64 = block * block_size + token; negative is padding
    scale           `[1]` float32; an fp8 element is stored as x / scale
    kv_cache        `[num_blocks, block_size, R + P]`; with kv_cache_dtype fp8_ds_mla
                    `[num_blocks, block_size, 656]` bytes: 512 fp8 in tiles of 128, the float32
                    scale of each tile, 64 bfloat16
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator, misc"
import torch
import triton
import triton.language as tl

FP8 = {
    "e4m3fn": torch.float8_e4m3fn,
    "e4m3fnuz": torch.float8_e4m3fnuz,
}
"""What pages with computed scales can hold."""

FP8_MAX = {
    torch.float8_e4m3fn: 448.0,
    torch.float8_e4m3fnuz: 240.0,
    torch.float8_e5m2: 57344.0,
    torch.float8_e5m2fnuz: 57344.0,
}
"""The largest finite value of each fp8 format."""

TILE_MAX = {torch.float8_e4m3fn: 448.0, torch.float8_e4m3fnuz: 224.0}
"""What the absmax of a tile is mapped to."""
LEAST_SCALE = 2.0**-126
"""The scale of a tile that holds zeros: the least normal float32."""

FEWEST_LANES = 64
"""Small rows share a compilation."""

SIZES = (
    "kv_c_stride",
    "k_pe_stride",
    "block_stride",
    "token_stride",
    "block_size",
    "latent_size",
    "rope_size",
)
DS_SIZES = (
    "kv_c_stride",
    "k_pe_stride",
    "code_block_stride",
    "code_token_stride",
    "scale_block_stride",
    "scale_token_stride",
    "rope_block_stride",
    "rope_token_stride",
    "block_size",
)
"""What the kernels are not compiled anew for."""


@triton.jit
def quantised(x, scale, MAX: tl.constexpr):
    """The quotient x / scale, correctly rounded in float32 and clamped to -MAX..MAX."""
    quotient = tl.div_rn(x.to(tl.float32), scale)
    quotient = tl.where(quotient > MAX, MAX, quotient)
    return tl.where(quotient < -MAX, -MAX, quotient)


@triton.jit(do_not_specialize=SIZES)
def concat_and_cache_mla_kernel(
    kv_c_ptr,
    k_pe_ptr,
    kv_cache_ptr,
    slot_mapping_ptr,
    scale_ptr,
    kv_c_stride: tl.int64,
    k_pe_stride: tl.int64,
    block_stride: tl.int64,
    token_stride: tl.int64,
    block_size,
    latent_size,
    rope_size,
    PADDED_SIZE: tl.constexpr,
    QUANT: tl.constexpr,
    MAX: tl.constexpr,
):
    """One program stores one row. Strides count elements."""
    row = tl.program_id(0)
    dim = tl.arange(0, PADDED_SIZE)
    slot = tl.load(slot_mapping_ptr + row)
    if slot < 0:
        return
    # Slots are int64, so every address below is computed in 64 bits.
    block = slot // block_size
    token = slot % block_size
    latent_at = block * block_stride + token * token_stride + dim
    rope_at = latent_at + latent_size

    latent = tl.load(kv_c_ptr + row * kv_c_stride + dim, mask=dim < latent_size)
    rope = tl.load(k_pe_ptr + row * k_pe_stride + dim, mask=dim < rope_size)
    if QUANT:
        scale = tl.load(scale_ptr)
        latent = quantised(latent, scale, MAX)
        rope = quantised(rope, scale, MAX)
    dtype = kv_cache_ptr.dtype.element_ty
    tl.store(kv_cache_ptr + latent_at, latent.to(dtype), mask=dim < latent_size)
    tl.store(kv_cache_ptr + rope_at, rope.to(dtype), mask=dim < rope_size)


@triton.jit(do_not_specialize=DS_SIZES)
def concat_and_cache_ds_mla_kernel(
    kv_c_ptr,
    k_pe_ptr,
    code_ptr,
    scale_ptr,
    rope_ptr,
    slot_mapping_ptr,
    kv_c_stride: tl.int64,
    k_pe_stride: tl.int64,
    code_block_stride: tl.int64,
    code_token_stride: tl.int64,
    scale_block_stride: tl.int64,
    scale_token_stride: tl.int64,
    rope_block_stride: tl.int64,
    rope_token_stride: tl.int64,
    block_size,
    TILES: tl.constexpr,
    TILE: tl.constexpr,
    ROPE: tl.constexpr,
    MAX: tl.constexpr,
    LEAST: tl.constexpr,
):
    """One program stores one row: the codes and the scale of each tile, and the rotary part."""
    row = tl.program_id(0)
    tile = tl.arange(0, TILES)
    dim = tile[:, None] * TILE + tl.arange(0, TILE)[None, :]
    rope_dim = tl.arange(0, ROPE)
    slot = tl.load(slot_mapping_ptr + row)
    if slot < 0:
        return
    block = slot // block_size
    token = slot % block_size
    code_at = block * code_block_stride + token * code_token_stride + dim
    scale_at = block * scale_block_stride + token * scale_token_stride + tile
    rope_at = block * rope_block_stride + token * rope_token_stride + rope_dim

    latent = tl.load(kv_c_ptr + row * kv_c_stride + dim).to(tl.float32)
    absmax = tl.max(tl.abs(latent), axis=1)
    scale = tl.maximum(tl.div_rn(absmax, tl.full([TILES], MAX, tl.float32)), LEAST)
    codes = tl.div_rn(latent, tl.broadcast_to(scale[:, None], [TILES, TILE]))
    tl.store(code_ptr + code_at, codes.to(code_ptr.dtype.element_ty))
    tl.store(scale_ptr + scale_at, scale)
    tl.store(rope_ptr + rope_at, tl.load(k_pe_ptr + row * k_pe_stride + rope_dim))


def concat_and_cache_mla(
    kv_c: torch.Tensor,
    k_pe: torch.Tensor,
    kv_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    kv_cache_dtype: str,
    cache_dtype: str,
    scale: torch.Tensor,
) -> None:
    """Store `kv_c` and `k_pe`; `cache_dtype` is the fp8 format of a page of bytes."""
    num_rows, block_size = slot_mapping.shape[0], kv_cache.shape[1]
    latent_size, rope_size = kv_c.shape[1], k_pe.shape[1]
    if num_rows == 0:
        return
    if kv_cache_dtype == "fp8_ds_mla":
        codes = kv_cache[:, :, :512].view(FP8[cache_dtype])
        scales = kv_cache[:, :, 512:528].view(torch.float32)
        rope = kv_cache[:, :, 528:].view(torch.bfloat16)
        concat_and_cache_ds_mla_kernel[(num_rows,)](
            kv_c,
            k_pe,
            codes,
            scales,
            rope,
            slot_mapping,
            kv_c.stride(0),
            k_pe.stride(0),
            codes.stride(0),
            codes.stride(1),
            scales.stride(0),
            scales.stride(1),
            rope.stride(0),
            rope.stride(1),
            block_size,
            TILES=4,
            TILE=128,
            ROPE=64,
            MAX=TILE_MAX[codes.dtype],
            LEAST=LEAST_SCALE,
        )
        return
    concat_and_cache_mla_kernel[(num_rows,)](
        kv_c,
        k_pe,
        kv_cache,
        slot_mapping,
        scale,
        kv_c.stride(0),
        k_pe.stride(0),
        kv_cache.stride(0),
        kv_cache.stride(1),
        block_size,
        latent_size,
        rope_size,
        PADDED_SIZE=triton.next_power_of_2(max(latent_size, rope_size, FEWEST_LANES)),
        QUANT=kv_cache.dtype in FP8_MAX,
        MAX=FP8_MAX.get(kv_cache.dtype, 0.0),
    )
