"""unified_attention: the query tokens of each sequence attend to its tokens in the paged cache.

Prefill, extend and decode are one: a sequence has `seq_len` tokens in the cache, of which the last
few are queries. The file stands alone: copy it, change the kernel, and run
`kvfuzz run k.py:unified_attention`. Shapes (any strides unless said otherwise):

    query, output            `[num_tokens, num_query_heads, D]`, `[num_tokens, num_query_heads, Dv]`
    key_cache, value_cache   by kv_cache_layout, as in gather_cache.py
    block_table              `[num_sequences, width]` int32, rows contiguous
    query_start_loc          `[num_sequences + 1]` int32, where its rows start in the query
    seq_lens                 `[num_sequences]` int32, tokens in the cache, the queries' included
    k_scale, v_scale         float32, as in gather_cache.py; a byte is read as float32(byte) * scale
    q_scale                  `[1]` float32 where a query is bytes, which are read so, too; or None
    sinks, alibi_slopes      `[num_query_heads]` float32, or None

Query heads are grouped: `num_query_heads / num_kv_heads` neighbours share a head of the cache. The
softmax is taken online (Milakov and Gimelshein, 2018): a tile of tokens at a time, with what was
summed so far scaled down whenever a larger score turns up.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator, misc"
import torch
import triton
import triton.language as tl

QUANTISED = (
    torch.float8_e4m3fn,
    torch.float8_e4m3fnuz,
    torch.float8_e5m2,
    torch.float8_e5m2fnuz,
    torch.int8,
)

SIZES = (
    "block_table_stride", "query_row_stride", "query_head_stride", "query_dim_stride",
    "output_row_stride", "output_head_stride", "output_dim_stride", "k_block_stride",
    "k_token_stride", "k_head_stride", "k_chunk_stride", "k_dim_stride", "v_block_stride",
    "v_run_stride", "v_token_stride", "v_head_stride", "v_dim_stride", "k_scale_block_stride",
    "k_scale_token_stride", "k_scale_head_stride", "v_scale_block_stride", "v_scale_token_stride",
    "v_scale_head_stride", "block_size", "head_size", "head_size_v", "queries_per_kv", "k_chunk",
    "v_run", "window", "has_q_scale", "has_sinks", "has_slopes",
)  # fmt: skip
"""What the kernel is not compiled anew for: strides and sizes, of which each cache has its own."""

TILE_Q, TILE_K = 16, 16
"""Query tokens of a program, and tokens of the cache that it looks at together."""


@triton.jit(do_not_specialize=SIZES)
def unified_attention_kernel(
    query_ptr,
    output_ptr,
    key_cache_ptr,
    value_cache_ptr,
    block_table_ptr,
    query_start_loc_ptr,
    seq_lens_ptr,
    k_scale_ptr,
    v_scale_ptr,
    q_scale_ptr,
    sinks_ptr,
    alibi_slopes_ptr,
    softmax_scale: tl.float32,
    softcap: tl.float32,
    block_table_stride: tl.int64,
    query_row_stride: tl.int64,
    query_head_stride: tl.int64,
    query_dim_stride: tl.int64,
    output_row_stride: tl.int64,
    output_head_stride: tl.int64,
    output_dim_stride: tl.int64,
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
    has_sinks,
    has_slopes,
    PADDED_HEAD_SIZE: tl.constexpr,
    TILE_Q: tl.constexpr,
    TILE_K: tl.constexpr,
    DEQUANT: tl.constexpr,
):
    """One program computes a head of TILE_Q query tokens of a sequence. Strides count elements."""
    tile_q = tl.program_id(0)
    head = tl.program_id(1)
    sequence = tl.program_id(2)
    kv_head = head // queries_per_kv
    dim = tl.arange(0, PADDED_HEAD_SIZE)
    inside = dim < head_size
    inside_v = dim < head_size_v

    first_row = tl.load(query_start_loc_ptr + sequence)
    query_len = tl.load(query_start_loc_ptr + sequence + 1) - first_row
    seq_len = tl.load(seq_lens_ptr + sequence)
    if tile_q * TILE_Q >= query_len:
        return
    index = tile_q * TILE_Q + tl.arange(0, TILE_Q)
    is_query = index < query_len
    row = first_row + index
    # The queries are the last tokens of their sequence.
    position = seq_len - query_len + index

    query_at = row[:, None] * query_row_stride + head * query_head_stride
    query_at += dim[None, :] * query_dim_stride
    query_mask = is_query[:, None] & inside[None, :]
    query = tl.load(query_ptr + query_at, mask=query_mask, other=0.0).to(tl.float32)
    query *= tl.load(q_scale_ptr, mask=has_q_scale > 0, other=1.0)

    largest = tl.full([TILE_Q], float("-inf"), tl.float32)
    total = tl.zeros([TILE_Q], tl.float32)
    if has_sinks:
        # A sink is the score of a token whose value is zero.
        largest = tl.zeros([TILE_Q], tl.float32) + tl.load(sinks_ptr + head)
        total = tl.full([TILE_Q], 1.0, tl.float32)
    slope = tl.load(alibi_slopes_ptr + head, mask=has_slopes > 0, other=0.0)
    weighted = tl.zeros([TILE_Q, PADDED_HEAD_SIZE], tl.float32)

    # No query of the tile sees what is in front of the window of its first one, or behind its last.
    last = tl.minimum(seq_len - query_len + (tile_q + 1) * TILE_Q, seq_len)
    first = tl.where(window > 0, seq_len - query_len + tile_q * TILE_Q - window + 1, 0)
    first = tl.maximum(first, 0)
    for start in range(first, last, TILE_K):
        token = start + tl.arange(0, TILE_K)
        is_token = token < last
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

        scores = tl.dot(query, tl.trans(k), input_precision="ieee") * softmax_scale
        if softcap > 0:
            # tanh(x) by exp(-2|x|), which never overflows.
            shrunk = tl.exp(-2.0 * tl.abs(scores / softcap))
            capped = softcap * (1.0 - shrunk) / (1.0 + shrunk)
            scores = tl.where(scores < 0, -capped, capped)
        distance = position[:, None] - token[None, :]
        scores -= slope * distance.to(tl.float32)
        sees = (distance >= 0) & is_token[None, :]
        sees = sees & ((window == 0) | (distance < window))
        scores = tl.where(sees, scores, float("-inf"))

        new_largest = tl.maximum(largest, tl.max(scores, axis=1))
        # A row that has seen nothing yet has no largest score to subtract.
        base = tl.where(new_largest == float("-inf"), 0.0, new_largest)
        shrink = tl.exp(largest - base)
        weights = tl.exp(scores - base[:, None])
        total = total * shrink + tl.sum(weights, axis=1)
        weighted = weighted * shrink[:, None] + tl.dot(weights, v, input_precision="ieee")
        largest = new_largest

    result = weighted / tl.where(is_query, total, 1.0)[:, None]
    output_at = row[:, None] * output_row_stride + head * output_head_stride
    output_at += dim[None, :] * output_dim_stride
    output_mask = is_query[:, None] & inside_v[None, :]
    tl.store(output_ptr + output_at, result.to(output_ptr.dtype.element_ty), mask=output_mask)


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


def unified_attention(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    output: torch.Tensor,
    block_table: torch.Tensor,
    query_start_loc: torch.Tensor,
    seq_lens: torch.Tensor,
    max_query_len: int,
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
    """Fill `output` with the attention of every query over its sequence, as far as it sees.

    A query sees its own token and those before it, with a `window` so many of them; `softcap` 0
    caps no score. Raises NotImplementedError where query heads do not divide into groups of one
    size.
    """
    num_query_heads, head_size = query.shape[1:]
    head_size_v = output.shape[2]
    is_split = kv_cache_layout.startswith("XPACKED")
    num_kv_heads, block_size = (key_cache.shape[axis] for axis in ((1, 3) if is_split else (2, 1)))
    if num_query_heads % num_kv_heads:
        raise NotImplementedError(f"{num_query_heads=} must be a multiple of {num_kv_heads=}")
    k_chunk, *k_cache_strides = k_strides(key_cache, kv_cache_layout)
    v_run, *v_cache_strides = v_strides(value_cache, kv_cache_layout)
    if max_query_len == 0:
        return
    tiles = triton.cdiv(max_query_len, TILE_Q)
    unified_attention_kernel[(tiles, num_query_heads, seq_lens.shape[0])](
        query,
        output,
        key_cache,
        value_cache,
        block_table,
        query_start_loc,
        seq_lens,
        k_scale,
        v_scale,
        # Where there is none of the following some pointer stands for it: it is not read.
        k_scale if q_scale is None else q_scale,
        k_scale if sinks is None else sinks,
        k_scale if alibi_slopes is None else alibi_slopes,
        softmax_scale,
        softcap,
        block_table.stride(0),
        *query.stride(),
        *output.stride(),
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
        int(sinks is not None),
        int(alibi_slopes is not None),
        PADDED_HEAD_SIZE=max(16, triton.next_power_of_2(max(head_size, head_size_v))),
        TILE_Q=TILE_Q,
        TILE_K=TILE_K,
        DEQUANT=key_cache.dtype in QUANTISED,
    )
