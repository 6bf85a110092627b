"""reshape_and_cache: store a batch of new keys and values into the slots of the paged cache.

The file stands alone: copy it, change the kernel, and run `kvfuzz run k.py:reshape_and_cache`.
Shapes (any strides unless said otherwise):

    key, value               `[num_rows, num_kv_heads, D]`, `[num_rows, num_kv_heads, Dv]`
    key_cache, value_cache   by kv_cache_layout, with D of K and Dv of V:
        NHD, HND   `[num_blocks, block_size, num_kv_heads, D]` and `[..., Dv]`
        SHUFFLE    the same shape over pages `(num_kv_heads, D/x, block_size, x)` and
                   `(num_kv_heads, block_size/x, Dv, x)`, x = 16 bytes of elements
        XPACKED    `[num_blocks, num_kv_heads, D/x, block_size, x]` and
                   `[num_blocks, num_kv_heads, Dv, block_size]`
        XPACKED_V  K as XPACKED, V `[num_blocks, num_kv_heads, block_size/x, Dv, x]`
    slot_mapping             `[num_rows]` int64 = block * block_size + token; negative is padding
    k_scale, v_scale         `[1]`, `[num_kv_heads]`, `[num_blocks, num_kv_heads]` or
                             `[num_blocks, block_size, num_kv_heads]` float32;
                             an fp8 element is stored as x / scale
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
def quantised(x, scale, MAX: tl.constexpr):
    """The quotient x / scale, correctly rounded in float32 and clamped to -MAX..MAX.

    NaN passes: it is neither above nor below the range.
    """
    quotient = tl.div_rn(x.to(tl.float32), scale)
    quotient = tl.where(quotient > MAX, MAX, quotient)
    return tl.where(quotient < -MAX, -MAX, quotient)


@triton.jit(do_not_specialize=SIZES)
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
    QUANT: tl.constexpr,
    MAX: tl.constexpr,
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

    # Every layout is this one formula: K is split in its dims, V in its tokens, or neither is.
    k_token = block * k_block_stride + token * k_token_stride
    k_at = k_token + head * k_head_stride + dim // k_chunk * k_chunk_stride
    k_at += dim % k_chunk * k_dim_stride
    v_block = block * v_block_stride + token // v_run * v_run_stride
    v_token = v_block + token % v_run * v_token_stride
    v_at = v_token + head * v_head_stride + dim * v_dim_stride

    key_at = row * key_row_stride + head * key_head_stride + dim * key_dim_stride
    value_at = row * value_row_stride + head * value_head_stride + dim * value_dim_stride
    k = tl.load(key_ptr + key_at, mask=inside)
    v = tl.load(value_ptr + value_at, mask=inside_v)
    if QUANT:
        k_scale_at = block * k_scale_block_stride + token * k_scale_token_stride
        k_scale_at += head * k_scale_head_stride
        v_scale_at = block * v_scale_block_stride + token * v_scale_token_stride
        v_scale_at += head * v_scale_head_stride
        k = quantised(k, tl.load(k_scale_ptr + k_scale_at), MAX)
        v = quantised(v, tl.load(v_scale_ptr + v_scale_at), MAX)
    tl.store(key_cache_ptr + k_at, k.to(key_cache_ptr.dtype.element_ty), mask=inside)
    tl.store(value_cache_ptr + v_at, v.to(value_cache_ptr.dtype.element_ty), mask=inside_v)


def k_strides(key_cache: torch.Tensor, kv_cache_layout: str) -> tuple[int, ...]:
    """The chunk size of K's dims, then the block, token, head, chunk and dim stride.

    Chunks of one element make the fifth stride idle. A SHUFFLE page is (heads, head_size/x,
    block_size, x), whatever the inner strides of its view say: only the block stride is theirs.
    """
    if kv_cache_layout == "SHUFFLE":
        x = 16 // key_cache.element_size()
        block_size, _, head_size = key_cache.shape[1:]
        return x, key_cache.stride(0), x, block_size * head_size, block_size * x, 1
    if kv_cache_layout in ("XPACKED", "XPACKED_V"):
        block, head, chunk, token, dim = key_cache.stride()
        return key_cache.shape[4], block, token, head, chunk, dim
    block, token, head, dim = key_cache.stride()
    return 1, block, token, head, dim, 0


def v_strides(value_cache: torch.Tensor, kv_cache_layout: str) -> tuple[int, ...]:
    """The run length of V's tokens, then the block, run, token, head and dim stride.

    As with K: runs of one token make the token stride idle, and a SHUFFLE page is (heads,
    block_size/x, head_size, x).
    """
    if kv_cache_layout == "SHUFFLE":
        x = 16 // value_cache.element_size()
        block_size, _, head_size = value_cache.shape[1:]
        return x, value_cache.stride(0), head_size * x, 1, block_size * head_size, x
    if kv_cache_layout == "XPACKED_V":
        block, head, run, dim, token = value_cache.stride()
        return value_cache.shape[4], block, run, token, head, dim
    if kv_cache_layout == "XPACKED":
        block, head, dim, token = value_cache.stride()
    else:
        block, token, head, dim = value_cache.stride()
    return 1, block, token, 0, head, dim


def scale_strides(scale: torch.Tensor) -> tuple[int, int, int]:
    """The block, token and head stride of a scale; 0 along what shares one."""
    if scale.numel() == 1:
        return 0, 0, 0
    strides = scale.stride()
    block = strides[0] if scale.dim() > 1 else 0
    token = strides[1] if scale.dim() > 2 else 0
    return block, token, strides[-1]


def check_divides(key_cache: torch.Tensor, value_cache: torch.Tensor, kv_cache_layout: str) -> None:
    """Raise NotImplementedError for a SHUFFLE cache that is not made of whole chunks of x."""
    x = 16 // key_cache.element_size()
    block_size, _, head_size = key_cache.shape[1:4]
    head_size_v = value_cache.shape[3]
    if kv_cache_layout == "SHUFFLE" and (head_size % x or head_size_v % x or block_size % x):
        raise NotImplementedError(
            f"SHUFFLE: {head_size=}, {head_size_v=} and {block_size=} must divide by {x}"
        )


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
    """Store `key` and `value`; `kv_cache_layout` says what they look like.

    NHD and HND differ in the views' strides alone. Raises NotImplementedError for a SHUFFLE cache
    whose head sizes or block_size are no multiples of 16 bytes of elements.
    """
    num_rows = slot_mapping.shape[0]
    num_kv_heads, head_size = key.shape[1:]
    head_size_v = value.shape[2]
    block_size = key_cache.shape[1 if key_cache.dim() == 4 else 3]
    check_divides(key_cache, value_cache, kv_cache_layout)
    k_chunk, *k_cache_strides = k_strides(key_cache, kv_cache_layout)
    v_run, *v_cache_strides = v_strides(value_cache, kv_cache_layout)
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
        *k_cache_strides,
        *v_cache_strides,
        *scale_strides(k_scale),
        *scale_strides(v_scale),
        block_size,
        head_size,
        head_size_v,
        k_chunk,
        v_run,
        PADDED_HEAD_SIZE=triton.next_power_of_2(max(head_size, head_size_v)),
        QUANT=key_cache.dtype in FP8_MAX,
        MAX=FP8_MAX.get(key_cache.dtype, 0.0),
    )
