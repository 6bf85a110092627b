"""reshape_and_cache: store a batch of new keys and values into the slots of the paged cache.

The file stands alone: copy it, change the kernel, and run `kvfuzz run k.py:reshape_and_cache`.
Shapes (any strides unless said otherwise):

    key, value               `[num_rows, num_kv_heads, head_size]`
    key_cache, value_cache   `[num_blocks, block_size, num_kv_heads, head_size]`
    slot_mapping             `[num_rows]` int64 = block * block_size + token; negative is padding
    k_scale, v_scale         `[1]` float32; an fp8 element is stored as x / scale
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator, misc"
import torch
import triton
import triton.language as tl

FP8_MAX = {
    torch.float8_e4m3fn: 448.0,
    torch.float8_e4m3fnuz: 240.0,
    torch.float8_e5m2: 57344.0,
    torch.float8_e5m2fnuz: 57344.0,
}
"""The largest finite value of each fp8 format."""


@triton.jit
def quantised(x, scale, MAX: tl.constexpr):
    """The quotient x / scale, correctly rounded in float32 and clamped to -MAX..MAX.

    NaN passes: it is neither above nor below the range.
    """
    quotient = tl.div_rn(x.to(tl.float32), scale)
    quotient = tl.where(quotient > MAX, MAX, quotient)
    return tl.where(quotient < -MAX, -MAX, quotient)


@triton.jit
def reshape_and_cache_kernel(
    key_ptr,
    value_ptr,
    key_cache_ptr,
    value_cache_ptr,
    slot_mapping_ptr,
    k_scale_ptr,
    v_scale_ptr,
    key_row_stride: tl.int64,
    key_head_stride: tl.int64,
    key_dim_stride: tl.int64,
    value_row_stride: tl.int64,
    value_head_stride: tl.int64,
    value_dim_stride: tl.int64,
    k_block_stride: tl.int64,
    k_token_stride: tl.int64,
    k_head_stride: tl.int64,
    k_dim_stride: tl.int64,
    v_block_stride: tl.int64,
    v_token_stride: tl.int64,
    v_head_stride: tl.int64,
    v_dim_stride: tl.int64,
    block_size,
    HEAD_SIZE: tl.constexpr,
    PADDED_HEAD_SIZE: tl.constexpr,
    X: tl.constexpr,
    SHUFFLE: tl.constexpr,
    QUANT: tl.constexpr,
    MAX: tl.constexpr,
):
    """One program stores one head of one token. Strides count elements."""
    row = tl.program_id(0)
    head = tl.program_id(1)
    dim = tl.arange(0, PADDED_HEAD_SIZE)
    inside = dim < HEAD_SIZE

    slot = tl.load(slot_mapping_ptr + row)
    if slot < 0:
        return
    # Slots are int64, so every address below is computed in 64 bits.
    block = slot // block_size
    token = slot % block_size

    key_at = row * key_row_stride + head * key_head_stride + dim * key_dim_stride
    value_at = row * value_row_stride + head * value_head_stride + dim * value_dim_stride
    k = tl.load(key_ptr + key_at, mask=inside)
    v = tl.load(value_ptr + value_at, mask=inside)
    if QUANT:
        k = quantised(k, tl.load(k_scale_ptr), MAX)
        v = quantised(v, tl.load(v_scale_ptr), MAX)

    if SHUFFLE:
        # A page of K is (heads, head_size/X, block_size, X), a page of V (heads, block_size/X,
        # head_size, X). The views' inner strides do not say so; only the block stride is theirs.
        k_page = block * k_block_stride + head * HEAD_SIZE * block_size
        v_page = block * v_block_stride + head * HEAD_SIZE * block_size
        k_at = k_page + dim // X * (block_size * X) + token * X + dim % X
        v_at = v_page + token // X * (HEAD_SIZE * X) + dim * X + token % X
    else:
        k_token = block * k_block_stride + token * k_token_stride
        v_token = block * v_block_stride + token * v_token_stride
        k_at = k_token + head * k_head_stride + dim * k_dim_stride
        v_at = v_token + head * v_head_stride + dim * v_dim_stride
    tl.store(key_cache_ptr + k_at, k.to(key_cache_ptr.dtype.element_ty), mask=inside)
    tl.store(value_cache_ptr + v_at, v.to(value_cache_ptr.dtype.element_ty), mask=inside)


def reshape_and_cache(
    key: torch.Tensor,
    value: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    k_scale: torch.Tensor,
    v_scale: torch.Tensor,
    kv_cache_layout: str,
) -> None:
    """Store `key` and `value`; `kv_cache_layout` is NHD, HND or SHUFFLE.

    NHD and HND differ in the views' strides alone. Raises NotImplementedError for a SHUFFLE cache
    whose head_size or block_size is no multiple of 16 bytes of elements.
    """
    num_rows = slot_mapping.shape[0]
    num_kv_heads, head_size = key.shape[1:]
    block_size = key_cache.shape[1]
    shuffle = kv_cache_layout == "SHUFFLE"
    x = 16 // key_cache.element_size()
    if shuffle and (head_size % x or block_size % x):
        raise NotImplementedError(f"SHUFFLE: {head_size=} and {block_size=} must divide by {x}")
    if num_rows == 0:
        return
    reshape_and_cache_kernel[(num_rows, num_kv_heads)](
        key,
        value,
        key_cache,
        value_cache,
        slot_mapping,
        k_scale,
        v_scale,
        *key.stride(),
        *value.stride(),
        *key_cache.stride(),
        *value_cache.stride(),
        block_size,
        HEAD_SIZE=head_size,
        PADDED_HEAD_SIZE=triton.next_power_of_2(head_size),
        X=x,
        SHUFFLE=shuffle,
        QUANT=key_cache.dtype in FP8_MAX,
        MAX=FP8_MAX.get(key_cache.dtype, 0.0),
    )
