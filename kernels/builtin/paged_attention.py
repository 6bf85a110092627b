"""paged_attention: one query token of each sequence attends to its tokens in the paged cache.

Decode attention, written to be read. Nothing judges this kernel yet but
tests/unit/kernels/test_paged_attention.py: it is no target. Shapes (any strides unless said
otherwise):

    query, output            `[num_sequences, num_query_heads, head_size]`
    key_cache, value_cache   `[num_blocks, block_size, num_kv_heads, head_size]`
    block_table              `[num_sequences, width]` int32, rows contiguous
    seq_lens                 `[num_sequences]` int32, tokens in the cache; a row of 0 gives zeros
    k_scale, v_scale         `[1]` float32; an fp8 element is read as float32(byte) * scale

Query heads are grouped: `num_query_heads / num_kv_heads` neighbours share a head of the cache. The
softmax is taken online (Milakov and Gimelshein, 2018): a block at a time, with what was summed so
far scaled down whenever a larger score turns up.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator, misc"
import torch
import triton
import triton.language as tl

FP8 = (torch.float8_e4m3fn, torch.float8_e4m3fnuz, torch.float8_e5m2, torch.float8_e5m2fnuz)


@triton.jit
def paged_attention_kernel(
    query_ptr,
    key_cache_ptr,
    value_cache_ptr,
    output_ptr,
    block_table_ptr,
    seq_lens_ptr,
    k_scale_ptr,
    v_scale_ptr,
    softmax_scale,
    block_table_stride: tl.int64,
    query_row_stride: tl.int64,
    query_head_stride: tl.int64,
    query_dim_stride: tl.int64,
    k_block_stride: tl.int64,
    k_token_stride: tl.int64,
    k_head_stride: tl.int64,
    k_dim_stride: tl.int64,
    v_block_stride: tl.int64,
    v_token_stride: tl.int64,
    v_head_stride: tl.int64,
    v_dim_stride: tl.int64,
    output_row_stride: tl.int64,
    output_head_stride: tl.int64,
    output_dim_stride: tl.int64,
    QUERIES_PER_KV: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    PADDED_BLOCK_SIZE: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    PADDED_HEAD_SIZE: tl.constexpr,
    DEQUANT: tl.constexpr,
):
    """One program computes one query head of one sequence. Strides count elements."""
    sequence = tl.program_id(0)
    head = tl.program_id(1)
    kv_head = head // QUERIES_PER_KV
    slot = tl.arange(0, PADDED_BLOCK_SIZE)
    dim = tl.arange(0, PADDED_HEAD_SIZE)
    inside = dim < HEAD_SIZE

    query_at = sequence * query_row_stride + head * query_head_stride + dim * query_dim_stride
    query = tl.load(query_ptr + query_at, mask=inside, other=0.0).to(tl.float32) * softmax_scale
    k_inner = slot[:, None] * k_token_stride + kv_head * k_head_stride + dim[None, :] * k_dim_stride
    v_inner = slot[:, None] * v_token_stride + kv_head * v_head_stride + dim[None, :] * v_dim_stride

    length = tl.load(seq_lens_ptr + sequence)
    largest = float("-inf")
    total = 0.0
    weighted = tl.zeros([PADDED_HEAD_SIZE], tl.float32)
    for number in range(0, tl.cdiv(length, BLOCK_SIZE)):
        entry = sequence * block_table_stride + number
        # Block ids are int32, and block * stride passes 2**31 on caches that engines do allocate.
        block = tl.load(block_table_ptr + entry).to(tl.int64)
        # Slots past the sequence hold whatever was there before, NaN perhaps: they are not read.
        holds_token = (slot < BLOCK_SIZE) & (number * BLOCK_SIZE + slot < length)
        mask = holds_token[:, None] & inside[None, :]
        k_at = block * k_block_stride + k_inner
        v_at = block * v_block_stride + v_inner
        k = tl.load(key_cache_ptr + k_at, mask=mask, other=0.0).to(tl.float32)
        v = tl.load(value_cache_ptr + v_at, mask=mask, other=0.0).to(tl.float32)
        if DEQUANT:
            k *= tl.load(k_scale_ptr)
            v *= tl.load(v_scale_ptr)

        scores = tl.where(holds_token, tl.sum(query[None, :] * k, axis=1), float("-inf"))
        new_largest = tl.maximum(largest, tl.max(scores, axis=0))
        shrink = tl.exp(largest - new_largest)
        weights = tl.exp(scores - new_largest)
        total = total * shrink + tl.sum(weights, axis=0)
        weighted = weighted * shrink + tl.sum(weights[:, None] * v, axis=0)
        largest = new_largest

    result = weighted / tl.where(length > 0, total, 1.0)
    output_at = sequence * output_row_stride + head * output_head_stride + dim * output_dim_stride
    tl.store(output_ptr + output_at, result.to(output_ptr.dtype.element_ty), mask=inside)


def paged_attention(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    output: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    k_scale: torch.Tensor,
    v_scale: torch.Tensor,
    softmax_scale: float,
) -> None:
    """Fill `output` with softmax(query . key * softmax_scale) . value over each sequence's tokens.

    Raises NotImplementedError where query heads do not divide into groups of one size.
    """
    num_sequences, num_query_heads, head_size = query.shape
    block_size, num_kv_heads = key_cache.shape[1:3]
    if num_query_heads % num_kv_heads:
        raise NotImplementedError(f"{num_query_heads=} must be a multiple of {num_kv_heads=}")
    if num_sequences == 0:
        return
    paged_attention_kernel[(num_sequences, num_query_heads)](
        query,
        key_cache,
        value_cache,
        output,
        block_table,
        seq_lens,
        k_scale,
        v_scale,
        softmax_scale,
        block_table.stride(0),
        *query.stride(),
        *key_cache.stride(),
        *value_cache.stride(),
        *output.stride(),
        QUERIES_PER_KV=num_query_heads // num_kv_heads,
        BLOCK_SIZE=block_size,
        PADDED_BLOCK_SIZE=triton.next_power_of_2(block_size),
        HEAD_SIZE=head_size,
        PADDED_HEAD_SIZE=triton.next_power_of_2(head_size),
        DEQUANT=key_cache.dtype in FP8,
    )
