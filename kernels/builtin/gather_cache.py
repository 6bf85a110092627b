"""gather_cache: copy runs of cached tokens out of the paged cache into dense key and value rows.

The file stands alone: copy it, change the kernel, and run `kvfuzz run k.py:gather_cache`.
Shapes (any strides unless said otherwise):

    key_cache, value_cache   `[num_blocks, block_size, num_kv_heads, head_size]`
    key, value (outputs)     `[num_tokens, num_kv_heads, head_size]`
    block_table              `[num_sequences, width]` int32, rows contiguous
    seq_starts               `[num_sequences]` int32, position of the first token to gather
    cu_seqlens_kv            `[num_sequences + 1]` int32, where its rows start in the output
    token_to_batch           `[num_tokens]` int32, the sequence of each output row
    k_scale, v_scale         `[1]` float32; an fp8 element is read as float32(byte) * scale
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator, misc"
import torch
import triton
import triton.language as tl

FP8 = (torch.float8_e4m3fn, torch.float8_e4m3fnuz, torch.float8_e5m2, torch.float8_e5m2fnuz)


@triton.jit
def gather_cache_kernel(
    key_cache_ptr,
    value_cache_ptr,
    key_ptr,
    value_ptr,
    block_table_ptr,
    seq_starts_ptr,
    cu_seqlens_kv_ptr,
    token_to_batch_ptr,
    k_scale_ptr,
    v_scale_ptr,
    block_table_stride: tl.int64,
    k_block_stride: tl.int64,
    k_token_stride: tl.int64,
    k_head_stride: tl.int64,
    k_dim_stride: tl.int64,
    v_block_stride: tl.int64,
    v_token_stride: tl.int64,
    v_head_stride: tl.int64,
    v_dim_stride: tl.int64,
    key_row_stride: tl.int64,
    key_head_stride: tl.int64,
    key_dim_stride: tl.int64,
    value_row_stride: tl.int64,
    value_head_stride: tl.int64,
    value_dim_stride: tl.int64,
    block_size,
    HEAD_SIZE: tl.constexpr,
    PADDED_HEAD_SIZE: tl.constexpr,
    X: tl.constexpr,
    SHUFFLE: tl.constexpr,
    DEQUANT: tl.constexpr,
):
    """One program copies one head of one token. Strides count elements."""
    row = tl.program_id(0)
    head = tl.program_id(1)
    dim = tl.arange(0, PADDED_HEAD_SIZE)
    inside = dim < HEAD_SIZE

    sequence = tl.load(token_to_batch_ptr + row)
    start = tl.load(seq_starts_ptr + sequence)
    position = start + row - tl.load(cu_seqlens_kv_ptr + sequence)
    entry = sequence * block_table_stride + position // block_size
    # Block ids are int32, and block * stride passes 2**31 on caches that engines do allocate.
    block = tl.load(block_table_ptr + entry).to(tl.int64)
    token = position % block_size

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

    k = tl.load(key_cache_ptr + k_at, mask=inside)
    v = tl.load(value_cache_ptr + v_at, mask=inside)
    if DEQUANT:
        k = k.to(tl.float32) * tl.load(k_scale_ptr)
        v = v.to(tl.float32) * tl.load(v_scale_ptr)

    key_at = row * key_row_stride + head * key_head_stride + dim * key_dim_stride
    value_at = row * value_row_stride + head * value_head_stride + dim * value_dim_stride
    tl.store(key_ptr + key_at, k.to(key_ptr.dtype.element_ty), mask=inside)
    tl.store(value_ptr + value_at, v.to(value_ptr.dtype.element_ty), mask=inside)


def gather_cache(
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    block_table: torch.Tensor,
    seq_starts: torch.Tensor,
    cu_seqlens_kv: torch.Tensor,
    token_to_batch: torch.Tensor,
    k_scale: torch.Tensor,
    v_scale: torch.Tensor,
    kv_cache_layout: str,
) -> None:
    """Fill `key` and `value` from the cache; `kv_cache_layout` is NHD, HND or SHUFFLE.

    NHD and HND differ in the views' strides alone. Raises NotImplementedError for a SHUFFLE cache
    whose head_size or block_size is no multiple of 16 bytes of elements.
    """
    num_tokens = token_to_batch.shape[0]
    num_kv_heads, head_size = key.shape[1:]
    block_size = key_cache.shape[1]
    shuffle = kv_cache_layout == "SHUFFLE"
    x = 16 // key_cache.element_size()
    if shuffle and (head_size % x or block_size % x):
        raise NotImplementedError(f"SHUFFLE: {head_size=} and {block_size=} must divide by {x}")
    if num_tokens == 0:
        return
    gather_cache_kernel[(num_tokens, num_kv_heads)](
        key_cache,
        value_cache,
        key,
        value,
        block_table,
        seq_starts,
        cu_seqlens_kv,
        token_to_batch,
        k_scale,
        v_scale,
        block_table.stride(0),
        *key_cache.stride(),
        *value_cache.stride(),
        *key.stride(),
        *value.stride(),
        block_size,
        HEAD_SIZE=head_size,
        PADDED_HEAD_SIZE=triton.next_power_of_2(head_size),
        X=x,
        SHUFFLE=shuffle,
        DEQUANT=key_cache.dtype in FP8,
    )
