"""per_token_head_quant: store new keys and values, each head of a token by a scale of its own.

The file stands alone: copy it, change the kernel, and run `kvfuzz run k.py:per_token_head_quant`.
Shapes (any strides unless said otherwise):

    key, value               `[num_rows, num_kv_heads, D]`, `[num_rows, num_kv_heads, Dv]`
    key_cache, value_cache   int8, e4m3fn or e4m3fnuz, by kv_cache_layout, as reshape_and_cache
                             takes them
    k_scale_cache, v_scale_cache   `[num_blocks, block_size, num_kv_heads]` float32, written: the
                             largest magnitude of the head by the largest number of the cache, at
                             least 1e-6
    slot_mapping             `[num_rows]` int64 = block * block_size + token; negative is padding

An element is stored as x / scale: an fp8 one rounded to nearest even, an integer to the nearest
with halves away from zero.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator, misc"
import torch
import triton
import triton.language as tl

LARGEST = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0, torch.float8_e4m3fnuz: 224.0}
"""What the largest magnitude of a head becomes; 224 of 240 leaves room for what is computed on."""

SIZES = (
    "key_row_stride",
    "key_head_stride",
    "key_dim_stride",
    "value_row_stride",
    "value_head_stride",
    "value_dim_stride",
    "k_block_stride",
    "k_token_stride",
    "k_head_stride",
    "k_chunk_stride",
    "k_dim_stride",
    "v_block_stride",
    "v_run_stride",
    "v_token_stride",
    "v_head_stride",
    "v_dim_stride",
    "k_scale_block_stride",
    "k_scale_token_stride",
    "k_scale_head_stride",
    "v_scale_block_stride",
    "v_scale_token_stride",
    "v_scale_head_stride",
    "block_size",
    "head_size",
    "head_size_v",
    "k_chunk",
    "v_run",
)
"""What the kernel is not compiled anew for: strides and sizes, of which each cache has its own."""


@triton.jit
def scale_of(x, LARGEST: tl.constexpr):
    """The scale that maps the largest magnitude of `x` to LARGEST; float32, correctly rounded."""
    return tl.maximum(tl.div_rn(tl.max(tl.abs(x)), LARGEST), 1e-6)


@triton.jit
def quantised(x, scale, LARGEST: tl.constexpr, INTEGER: tl.constexpr):
    """The quotient x / scale within the range of the cache, rounded where the cache holds integers.

    An integer has its half added and is cut off by the store's conversion.
    """
    quotient = tl.div_rn(x, scale)
    if INTEGER:
        quotient += tl.where(quotient >= 0, 0.5, -0.5)
        return tl.clamp(quotient, -LARGEST - 1, LARGEST)
    return tl.clamp(quotient, -LARGEST, LARGEST)


@triton.jit(do_not_specialize=SIZES)
def per_token_head_quant_kernel(
    key_ptr,
    value_ptr,
    key_cache_ptr,
    value_cache_ptr,
    k_scale_ptr,
    v_scale_ptr,
    slot_mapping_ptr,
    key_row_stride: tl.int64,
    key_head_stride: tl.int64,
    key_dim_stride: tl.int64,
    value_row_stride: tl.int64,
    value_head_stride: tl.int64,
    value_dim_stride: tl.int64,
    k_block_stride: tl.int64,
    k_token_stride: tl.int64,
    k_head_stride: tl.int64,
    k_chunk_stride: tl.int64,
    k_dim_stride: tl.int64,
    v_block_stride: tl.int64,
    v_run_stride: tl.int64,
    v_token_stride: tl.int64,
    v_head_stride: tl.int64,
    v_dim_stride: tl.int64,
    k_scale_block_stride: tl.int64,
    k_scale_token_stride: tl.int64,
    k_scale_head_stride: tl.int64,
    v_scale_block_stride: tl.int64,
    v_scale_token_stride: tl.int64,
    v_scale_head_stride: tl.int64,
    block_size,
    head_size,
    head_size_v,
    k_chunk,
    v_run,
    PADDED_HEAD_SIZE: tl.constexpr,
    LARGEST: tl.constexpr,
    INTEGER: tl.constexpr,
):
    """One program stores one head of one token. Strides count elements."""
    row = tl.program_id(0)
    head = tl.program_id(1)
    dim = tl.arange(0, PADDED_HEAD_SIZE)
    inside = dim < head_size
    inside_v = dim < head_size_v

    slot = tl.load(slot_mapping_ptr + row)
    if slot < 0:
        return
    # Slots are int64, so every address below is computed in 64 bits.
    block = slot // block_size
    token = slot % block_size

    # Lanes beyond a head hold zeros, which no largest magnitude is below.
    key_at = row * key_row_stride + head * key_head_stride + dim * key_dim_stride
    value_at = row * value_row_stride + head * value_head_stride + dim * value_dim_stride
    k = tl.load(key_ptr + key_at, mask=inside, other=0.0).to(tl.float32)
    v = tl.load(value_ptr + value_at, mask=inside_v, other=0.0).to(tl.float32)
    k_scale = scale_of(k, LARGEST)
    v_scale = scale_of(v, LARGEST)
    k_scale_at = block * k_scale_block_stride + token * k_scale_token_stride
    v_scale_at = block * v_scale_block_stride + token * v_scale_token_stride
    tl.store(k_scale_ptr + k_scale_at + head * k_scale_head_stride, k_scale)
    tl.store(v_scale_ptr + v_scale_at + head * v_scale_head_stride, v_scale)

    # Every layout is this one formula: K is split in its dims, V in its tokens, or neither is.
    k_at = block * k_block_stride + token * k_token_stride + head * k_head_stride
    k_at += dim // k_chunk * k_chunk_stride + dim % k_chunk * k_dim_stride
    v_at = block * v_block_stride + head * v_head_stride + dim * v_dim_stride
    v_at += token // v_run * v_run_stride + token % v_run * v_token_stride
    k = quantised(k, k_scale, LARGEST, INTEGER)
    v = quantised(v, v_scale, LARGEST, INTEGER)
    tl.store(key_cache_ptr + k_at, k.to(key_cache_ptr.dtype.element_ty), mask=inside)
    tl.store(value_cache_ptr + v_at, v.to(value_cache_ptr.dtype.element_ty), mask=inside_v)


def k_strides(key_cache: torch.Tensor, kv_cache_layout: str) -> tuple[int, ...]:
    """The chunk size of K's dims, then the block, token, head, chunk and dim stride.

    A SHUFFLE page is (heads, head_size/16, block_size, 16), whatever the inner strides of its view
    say; where K is not split, a chunk is one element and the fifth stride idle.
    """
    if kv_cache_layout == "SHUFFLE":
        block_size, _, head_size = key_cache.shape[1:]
        return 16, key_cache.stride(0), 16, block_size * head_size, block_size * 16, 1
    if kv_cache_layout in ("XPACKED", "XPACKED_V"):
        block, head, chunk, token, dim = key_cache.stride()
        return key_cache.shape[4], block, token, head, chunk, dim
    block, token, head, dim = key_cache.stride()
    return 1, block, token, head, dim, 0


def v_strides(value_cache: torch.Tensor, kv_cache_layout: str) -> tuple[int, ...]:
    """The run length of V's tokens, then the block, run, token, head and dim stride, as of K."""
    if kv_cache_layout == "SHUFFLE":
        block_size, _, head_size = value_cache.shape[1:]
        return 16, value_cache.stride(0), head_size * 16, 1, block_size * head_size, 16
    if kv_cache_layout == "XPACKED_V":
        block, head, run, dim, token = value_cache.stride()
        return value_cache.shape[4], block, run, token, head, dim
    if kv_cache_layout == "XPACKED":
        block, head, dim, token = value_cache.stride()
    else:
        block, token, head, dim = value_cache.stride()
    return 1, block, token, 0, head, dim


def per_token_head_quant(
    key: torch.Tensor,
    value: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    k_scale_cache: torch.Tensor,
    v_scale_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    kv_cache_layout: str,
) -> None:
    """Store `key` and `value` and the scales by which they were divided.

    `kv_cache_layout` says what the caches look like; a SHUFFLE one is of whole chunks of 16.
    """
    num_rows = slot_mapping.shape[0]
    num_kv_heads, head_size = key.shape[1:]
    head_size_v = value.shape[2]
    k_chunk, *k_cache_strides = k_strides(key_cache, kv_cache_layout)
    v_run, *v_cache_strides = v_strides(value_cache, kv_cache_layout)
    if num_rows == 0:
        return
    per_token_head_quant_kernel[(num_rows, num_kv_heads)](
        key,
        value,
        key_cache,
        value_cache,
        k_scale_cache,
        v_scale_cache,
        slot_mapping,
        *key.stride(),
        *value.stride(),
        *k_cache_strides,
        *v_cache_strides,
        *k_scale_cache.stride(),
        *v_scale_cache.stride(),
        k_scale_cache.shape[1],
        head_size,
        head_size_v,
        k_chunk,
        v_run,
        PADDED_HEAD_SIZE=triton.next_power_of_2(max(head_size, head_size_v)),
        LARGEST=LARGEST[key_cache.dtype],
        INTEGER=key_cache.dtype == torch.int8,
    )
