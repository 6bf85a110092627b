"""paged_attention: one query token of each sequence attends to its tokens in the paged cache.

Each part of a sequence is summed by a program of its own, and a second kernel merges them (split
KV). The file stands alone: copy it, change a kernel, and run `kvfuzz run k.py:paged_attention`.
Shapes (any strides unless said otherwise):

    query, output            `[num_sequences, num_query_heads, D]` and `[..., Dv]`
    key_cache, value_cache   by kv_cache_layout, as in gather_cache.py
    block_table              `[num_sequences, width]` int32, rows contiguous
    seq_lens                 `[num_sequences]` int32, tokens in the cache; a row of 0 gives zeros
    k_scale, v_scale         float32, as in gather_cache.py; a byte is read as float32(byte) * scale
    q_scale                  `[1]` float32 where a query is bytes, which are read so, too; or None
    sinks, alibi_slopes      `[num_query_heads]` float32, or None

`num_query_heads / num_kv_heads` neighbouring query heads share a head of the cache. The softmax is
taken online (Milakov and Gimelshein, 2018), as unified_attention.py says.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator, misc"
import torch
import triton
import triton.language as tl

SIZES = (
    "block_table_stride", "query_row_stride", "query_head_stride", "query_dim_stride",
    "k_block_stride", "k_token_stride", "k_head_stride", "k_chunk_stride", "k_dim_stride",
    "v_block_stride", "v_run_stride", "v_token_stride", "v_head_stride", "v_dim_stride",
    "k_scale_block_stride", "k_scale_token_stride", "k_scale_head_stride", "v_scale_block_stride",
    "v_scale_token_stride", "v_scale_head_stride", "block_size", "head_size", "head_size_v",
    "queries_per_kv", "k_chunk", "v_run", "window", "has_q_scale", "has_slopes",
)  # fmt: skip
MERGE_SIZES = (
    "output_row_stride", "output_head_stride", "output_dim_stride", "head_size_v", "has_sinks",
)  # fmt: skip
"""What kernels are not compiled anew for: strides and sizes, of which each cache has its own."""

TILE, PARTS = 16, 4
"""Tokens that are looked at together, and programs that share a sequence."""


@triton.jit(do_not_specialize=SIZES)
def paged_attention_kernel(
    query_ptr,
    key_cache_ptr,
    value_cache_ptr,
    block_table_ptr,
    seq_lens_ptr,
    k_scale_ptr,
    v_scale_ptr,
    q_scale_ptr,
    alibi_slopes_ptr,
    weighted_ptr,
    largest_ptr,
    total_ptr,
    softmax_scale: tl.float32,
    softcap: tl.float32,
    block_table_stride: tl.int64,
    query_row_stride: tl.int64,
    query_head_stride: tl.int64,
    query_dim_stride: tl.int64,
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
    queries_per_kv,
    k_chunk,
    v_run,
    window,
    has_q_scale,
    has_slopes,
    PADDED_HEAD_SIZE: tl.constexpr,
    TILE: tl.constexpr,
    PARTS: tl.constexpr,
    DEQUANT: tl.constexpr,
):
    """One program sums a part of one query head of one sequence. Strides count elements."""
    sequence = tl.program_id(0)
    head = tl.program_id(1)
    part = tl.program_id(2)
    kv_head = head // queries_per_kv
    dim = tl.arange(0, PADDED_HEAD_SIZE)
    inside = dim < head_size
    inside_v = dim < head_size_v

    query_at = sequence * query_row_stride + head * query_head_stride + dim * query_dim_stride
    query = tl.load(query_ptr + query_at, mask=inside, other=0.0).to(tl.float32)
    query *= tl.load(q_scale_ptr, mask=has_q_scale > 0, other=1.0)
    slope = tl.load(alibi_slopes_ptr + head, mask=has_slopes > 0, other=0.0)

    length = tl.load(seq_lens_ptr + sequence)
    # The query is the last token, and sees all of them or those in its window.
    first = tl.maximum(tl.where(window > 0, length - window, 0), 0)
    share = tl.cdiv(length - first, PARTS)
    start_of_part = first + part * share
    end_of_part = tl.minimum(start_of_part + share, length)
    largest = float("-inf")
    total = 0.0
    weighted = tl.zeros([PADDED_HEAD_SIZE], tl.float32)
    for start in range(start_of_part, end_of_part, TILE):
        token = start + tl.arange(0, TILE)
        is_token = token < end_of_part
        entry = sequence * block_table_stride + token // block_size
        # Block ids are int32, and block * stride passes 2**31 on caches that engines do allocate.
        block = tl.load(block_table_ptr + entry, mask=is_token, other=0).to(tl.int64)
        slot = token % block_size

        # Every layout is this one formula: K is split in its dims, V in its tokens, or neither is.
        k_token = block * k_block_stride + slot * k_token_stride + kv_head * k_head_stride
        k_at = k_token[:, None] + (dim // k_chunk * k_chunk_stride)[None, :]
        k_at += (dim % k_chunk * k_dim_stride)[None, :]
        v_block = block * v_block_stride + slot // v_run * v_run_stride
        v_token = v_block + slot % v_run * v_token_stride + kv_head * v_head_stride
        v_at = v_token[:, None] + (dim * v_dim_stride)[None, :]

        # Slots past the sequence hold whatever was there before, NaN perhaps: they are not read.
        k_mask = is_token[:, None] & inside[None, :]
        v_mask = is_token[:, None] & inside_v[None, :]
        k = tl.load(key_cache_ptr + k_at, mask=k_mask, other=0.0).to(tl.float32)
        v = tl.load(value_cache_ptr + v_at, mask=v_mask, other=0.0).to(tl.float32)
        if DEQUANT:
            k_scale_at = block * k_scale_block_stride + slot * k_scale_token_stride
            k_scale_at += kv_head * k_scale_head_stride
            v_scale_at = block * v_scale_block_stride + slot * v_scale_token_stride
            v_scale_at += kv_head * v_scale_head_stride
            k *= tl.load(k_scale_ptr + k_scale_at, mask=is_token, other=0.0)[:, None]
            v *= tl.load(v_scale_ptr + v_scale_at, mask=is_token, other=0.0)[:, None]

        scores = tl.sum(query[None, :] * k, axis=1) * softmax_scale
        if softcap > 0:
            # tanh(x) by exp(-2|x|), which never overflows.
            shrunk = tl.exp(-2.0 * tl.abs(scores / softcap))
            capped = softcap * (1.0 - shrunk) / (1.0 + shrunk)
            scores = tl.where(scores < 0, -capped, capped)
        scores -= slope * (length - 1 - token).to(tl.float32)
        scores = tl.where(is_token, scores, float("-inf"))
        new_largest = tl.maximum(largest, tl.max(scores, axis=0))
        shrink = tl.exp(largest - new_largest)
        weights = tl.exp(scores - new_largest)
        total = total * shrink + tl.sum(weights, axis=0)
        weighted = weighted * shrink + tl.sum(weights[:, None] * v, axis=0)
        largest = new_largest

    number = (sequence * tl.num_programs(1) + head) * PARTS + part
    tl.store(weighted_ptr + number * PADDED_HEAD_SIZE + dim, weighted)
    tl.store(largest_ptr + number, largest)
    tl.store(total_ptr + number, total)


@triton.jit(do_not_specialize=MERGE_SIZES)
def merge_parts_kernel(
    weighted_ptr,
    largest_ptr,
    total_ptr,
    sinks_ptr,
    output_ptr,
    output_row_stride: tl.int64,
    output_head_stride: tl.int64,
    output_dim_stride: tl.int64,
    head_size_v,
    has_sinks,
    PADDED_HEAD_SIZE: tl.constexpr,
    PARTS: tl.constexpr,
):
    """One program merges the parts of one query head of one sequence."""
    sequence = tl.program_id(0)
    head = tl.program_id(1)
    dim = tl.arange(0, PADDED_HEAD_SIZE)
    number = (sequence * tl.num_programs(1) + head) * PARTS + tl.arange(0, PARTS)
    largest = tl.load(largest_ptr + number)
    base = tl.max(largest, axis=0)
    # A sink is the score of a token whose value is zero.
    sink = tl.load(sinks_ptr + head, mask=has_sinks > 0, other=float("-inf"))
    base = tl.maximum(base, sink)
    # Of an empty sequence no part has a largest score.
    base = tl.where(base == float("-inf"), 0.0, base)
    share = tl.exp(largest - base)
    total = tl.sum(tl.load(total_ptr + number) * share, axis=0) + tl.exp(sink - base)
    weighted = tl.load(weighted_ptr + number[:, None] * PADDED_HEAD_SIZE + dim[None, :])
    result = tl.sum(weighted * share[:, None], axis=0) / tl.where(total > 0, total, 1.0)
    output_at = sequence * output_row_stride + head * output_head_stride + dim * output_dim_stride
    mask = dim < head_size_v
    tl.store(output_ptr + output_at, result.to(output_ptr.dtype.element_ty), mask=mask)


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
    kv_cache_layout: str = "NHD",
    window: int = 0,
    softcap: float = 0.0,
    q_scale: torch.Tensor | None = None,
    sinks: torch.Tensor | None = None,
    alibi_slopes: torch.Tensor | None = None,
) -> None:
    """Fill `output` with the attention of each query over its sequence's tokens, as far as it sees:
    with a `window` so many, its own included; `softcap` 0 caps no score. Raises NotImplementedError
    where query heads do not divide into groups of one size."""
    # A batch may be padded: it has as many rows as sequences that have a length.
    num_sequences, (num_query_heads, head_size) = seq_lens.shape[0], query.shape[1:]
    head_size_v = output.shape[2]
    is_split = kv_cache_layout.startswith("XPACKED")
    num_kv_heads, block_size = (key_cache.shape[axis] for axis in ((1, 3) if is_split else (2, 1)))
    if num_query_heads % num_kv_heads:
        raise NotImplementedError(f"{num_query_heads=} must be a multiple of {num_kv_heads=}")
    k_chunk, *k_cache_strides = k_strides(key_cache, kv_cache_layout)
    v_run, *v_cache_strides = v_strides(value_cache, kv_cache_layout)
    if num_sequences == 0:
        return
    padded = triton.next_power_of_2(max(head_size, head_size_v))
    counts = (num_sequences, num_query_heads, PARTS)
    weighted = torch.empty((*counts, padded), dtype=torch.float32, device=query.device)
    largest, total = torch.empty((2, *counts), dtype=torch.float32, device=query.device)
    paged_attention_kernel[counts](
        query,
        key_cache,
        value_cache,
        block_table,
        seq_lens,
        k_scale,
        v_scale,
        # Without its scale, or slopes, some pointer stands for them: it is not read.
        k_scale if q_scale is None else q_scale,
        k_scale if alibi_slopes is None else alibi_slopes,
        weighted,
        largest,
        total,
        softmax_scale,
        softcap,
        block_table.stride(0),
        *query.stride(),
        *k_cache_strides,
        *v_cache_strides,
        *scale_strides(k_scale),
        *scale_strides(v_scale),
        block_size,
        head_size,
        head_size_v,
        num_query_heads // num_kv_heads,
        k_chunk,
        v_run,
        window,
        int(q_scale is not None),
        int(alibi_slopes is not None),
        PADDED_HEAD_SIZE=padded,
        TILE=TILE,
        PARTS=PARTS,
        DEQUANT=key_cache.element_size() == 1,
    )
    merge_parts_kernel[counts[:2]](
        weighted,
        largest,
        total,
        k_scale if sinks is None else sinks,
        output,
        *output.stride(),
        head_size_v,
        int(sinks is not None),
        PADDED_HEAD_SIZE=padded,
        PARTS=PARTS,
    )
