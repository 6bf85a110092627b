"""shared_kv_attention: a layer without K and V attends over the cache of its target layer.

Some models have layers that project queries only and attend over what an earlier layer cached: such
a layer is handed None for key and value, and may not change a byte of that cache. Here a first
kernel gathers the tokens that queries of a sequence see into a workspace, as fp32, and a second one
attends over that: decode, extend and prefill are one. The file stands alone: copy it, change a
kernel, and run `kvfuzz run k.py:shared_kv_attention`. Shapes (any strides unless said otherwise):

    query, output            `[num_tokens, num_query_heads, D]`, `[num_tokens, num_query_heads, Dv]`
    key, value               None
    key_cache, value_cache   by kv_cache_layout, as in gather_cache.py
    block_table              `[num_sequences, width]` int32, rows contiguous
    query_start_loc          `[num_sequences + 1]` int32, where its rows start in the query
    seq_lens                 `[num_sequences]` int32, tokens in the cache, the queries' included
    k_scale, v_scale         float32, as in gather_cache.py; a byte is read as float32(byte) * scale
    q_scale                  `[1]` float32 where a query is bytes, which are read so, too; or None
    sinks, alibi_slopes      `[num_query_heads]` float32, or None
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator, misc"
import torch
import triton
import triton.language as tl

TILE_Q, TILE_K = 16, 16
"""Query tokens of a program, and tokens of a sequence that one looks at together."""
GATHER_SIZES, SIZES = range(9, 33), range(11, 26)
"""The parameters that kernels are not compiled anew for: strides and sizes of each cache."""


@triton.jit(do_not_specialize=GATHER_SIZES)
def gather_kernel(
    key_cache_ptr,
    value_cache_ptr,
    keys_ptr,
    values_ptr,
    block_table_ptr,
    query_start_loc_ptr,
    seq_lens_ptr,
    k_scale_ptr,
    v_scale_ptr,
    block_table_stride: tl.int64,
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
    k_scale_block: tl.int64,
    k_scale_token: tl.int64,
    k_scale_head: tl.int64,
    v_scale_block: tl.int64,
    v_scale_token: tl.int64,
    v_scale_head: tl.int64,
    block_size,
    head_size,
    head_size_v,
    k_chunk,
    v_run,
    room,
    window,
    PADDED_HEAD_SIZE: tl.constexpr,
    TILE_K: tl.constexpr,
    DEQUANT: tl.constexpr,
):
    """One program copies a head of TILE_K tokens of a sequence. Strides count elements."""
    kv_head, sequence = tl.program_id(1), tl.program_id(2)
    token = tl.program_id(0) * TILE_K + tl.arange(0, TILE_K)
    seq_len = tl.load(seq_lens_ptr + sequence)
    first_row = tl.load(query_start_loc_ptr + sequence)
    query_len = tl.load(query_start_loc_ptr + sequence + 1) - first_row
    # No query sees what is in front of the window of the first one.
    seen_from = tl.where(window > 0, seq_len - query_len - window + 1, 0)
    is_token = (token >= seen_from) & (token < seq_len)
    dim = tl.arange(0, PADDED_HEAD_SIZE)

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
    k_mask = is_token[:, None] & (dim < head_size)[None, :]
    v_mask = is_token[:, None] & (dim < head_size_v)[None, :]
    k = tl.load(key_cache_ptr + k_at, mask=k_mask, other=0.0).to(tl.float32)
    v = tl.load(value_cache_ptr + v_at, mask=v_mask, other=0.0).to(tl.float32)
    if DEQUANT:
        k_scale_at = block * k_scale_block + slot * k_scale_token + kv_head * k_scale_head
        v_scale_at = block * v_scale_block + slot * v_scale_token + kv_head * v_scale_head
        k *= tl.load(k_scale_ptr + k_scale_at, mask=is_token, other=0.0)[:, None]
        v *= tl.load(v_scale_ptr + v_scale_at, mask=is_token, other=0.0)[:, None]

    row = (sequence.to(tl.int64) * room + token) * tl.num_programs(1) + kv_head
    tl.store(keys_ptr + row[:, None] * head_size + dim[None, :], k, mask=k_mask)
    tl.store(values_ptr + row[:, None] * head_size_v + dim[None, :], v, mask=v_mask)


@triton.jit(do_not_specialize=SIZES)
def shared_kv_attention_kernel(
    query_ptr,
    output_ptr,
    keys_ptr,
    values_ptr,
    query_start_loc_ptr,
    seq_lens_ptr,
    q_scale_ptr,
    sinks_ptr,
    alibi_slopes_ptr,
    softmax_scale: tl.float32,
    softcap: tl.float32,
    query_row_stride: tl.int64,
    query_head_stride: tl.int64,
    query_dim_stride: tl.int64,
    output_row_stride: tl.int64,
    output_head_stride: tl.int64,
    output_dim_stride: tl.int64,
    head_size,
    head_size_v,
    num_kv_heads,
    queries_per_kv,
    room,
    window,
    has_q_scale,
    has_sinks,
    has_slopes,
    PADDED_HEAD_SIZE: tl.constexpr,
    TILE_Q: tl.constexpr,
    TILE_K: tl.constexpr,
):
    """One program computes a head of TILE_Q query tokens of a sequence, over the workspace."""
    tile_q = tl.program_id(0)
    head, sequence = tl.program_id(1), tl.program_id(2)
    dim = tl.arange(0, PADDED_HEAD_SIZE)
    inside, inside_v = (dim < head_size)[None, :], (dim < head_size_v)[None, :]

    first_row = tl.load(query_start_loc_ptr + sequence)
    query_len = tl.load(query_start_loc_ptr + sequence + 1) - first_row
    seq_len = tl.load(seq_lens_ptr + sequence)
    if tile_q * TILE_Q >= query_len:
        return
    index = tile_q * TILE_Q + tl.arange(0, TILE_Q)
    is_query = index < query_len
    # The queries are the last tokens of their sequence.
    position = seq_len - query_len + index

    row = (first_row + index)[:, None]
    query_at = row * query_row_stride + head * query_head_stride + dim[None, :] * query_dim_stride
    query = tl.load(query_ptr + query_at, mask=is_query[:, None] & inside, other=0.0).to(tl.float32)
    query *= tl.load(q_scale_ptr, mask=has_q_scale > 0, other=1.0)

    # A sink is the score of a token whose value is zero.
    sink = tl.load(sinks_ptr + head, mask=has_sinks > 0, other=float("-inf"))
    largest = tl.zeros([TILE_Q], tl.float32) + sink
    total = tl.where(largest > float("-inf"), 1.0, 0.0)
    slope = tl.load(alibi_slopes_ptr + head, mask=has_slopes > 0, other=0.0)
    weighted = tl.zeros([TILE_Q, PADDED_HEAD_SIZE], tl.float32)

    # No query of the tile sees what is in front of the window of its first one, or behind its last.
    last = tl.minimum(seq_len - query_len + (tile_q + 1) * TILE_Q, seq_len)
    first = tl.where(window > 0, seq_len - query_len + tile_q * TILE_Q - window + 1, 0)
    first = tl.maximum(first, 0)
    for start in range(first, last, TILE_K):
        token = start + tl.arange(0, TILE_K)
        is_token = token < last
        kept = (sequence.to(tl.int64) * room + token) * num_kv_heads + head // queries_per_kv
        k_at = kept[:, None] * head_size + dim[None, :]
        v_at = kept[:, None] * head_size_v + dim[None, :]
        k = tl.load(keys_ptr + k_at, mask=is_token[:, None] & inside, other=0.0)
        v = tl.load(values_ptr + v_at, mask=is_token[:, None] & inside_v, other=0.0)

        scores = tl.dot(query, tl.trans(k), input_precision="ieee") * softmax_scale
        if softcap > 0:
            # softcap * tanh: where the exponential is infinite, -softcap.
            scores = softcap * (2.0 / (1.0 + tl.exp(-2.0 * scores / softcap)) - 1.0)
        distance = position[:, None] - token[None, :]
        scores -= slope * distance.to(tl.float32)
        sees = (distance >= 0) & is_token[None, :] & ((window == 0) | (distance < window))
        scores = tl.where(sees, scores, float("-inf"))

        new_largest = tl.maximum(largest, tl.max(scores, axis=1))
        # A row that has seen nothing yet has no largest score to subtract.
        base = tl.where(new_largest == float("-inf"), 0.0, new_largest)
        shrink = tl.exp(largest - base)
        weights = tl.exp(scores - base[:, None])
        total = total * shrink + tl.sum(weights, axis=1)
        weighted = weighted * shrink[:, None] + tl.dot(weights, v, input_precision="ieee")
        largest = new_largest

    result = (weighted / tl.where(is_query, total, 1.0)[:, None]).to(output_ptr.dtype.element_ty)
    at = row * output_row_stride + head * output_head_stride + dim[None, :] * output_dim_stride
    tl.store(output_ptr + at, result, mask=is_query[:, None] & inside_v)


def k_strides(cache: torch.Tensor, kv_cache_layout: str) -> tuple[int, ...]:
    """The chunk size of K's dims, then the block, token, head, chunk and dim stride.

    Chunks of one element make the fifth stride idle. A SHUFFLE page is (heads, head_size/x,
    block_size, x), whatever the inner strides of its view say: only the block stride is theirs.
    """
    if kv_cache_layout == "SHUFFLE":
        (_, size, _, head_size), x = cache.shape, 16 // cache.element_size()
        return x, cache.stride(0), x, size * head_size, size * x, 1
    if kv_cache_layout in ("XPACKED", "XPACKED_V"):
        block, head, chunk, token, dim = cache.stride()
        return cache.shape[4], block, token, head, chunk, dim
    return 1, *cache.stride(), 0


def v_strides(cache: torch.Tensor, kv_cache_layout: str) -> tuple[int, ...]:
    """The run length of V's tokens, then the block, run, token, head and dim stride; as with K,
    where a SHUFFLE page is (heads, block_size/x, head_size, x)."""
    if kv_cache_layout == "SHUFFLE":
        (_, size, _, head_size), x = cache.shape, 16 // cache.element_size()
        return x, cache.stride(0), head_size * x, 1, size * head_size, x
    if kv_cache_layout == "XPACKED_V":
        block, head, run, dim, token = cache.stride()
        return cache.shape[4], block, run, token, head, dim
    block, token, head, dim = cache.stride()
    if kv_cache_layout == "XPACKED":
        block, head, dim, token = cache.stride()
    return 1, block, token, 0, head, dim


def scale_strides(scale: torch.Tensor) -> tuple[int, ...]:
    """The block, token and head stride of a scale; 0 along what shares one."""
    if scale.numel() == 1:
        return 0, 0, 0
    *others, head = scale.stride()
    return (*(*others, 0, 0)[:2], head)


def shared_kv_attention(
    query: torch.Tensor,
    key: None,
    value: None,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    output: torch.Tensor,
    block_table: torch.Tensor,
    query_start_loc: torch.Tensor,
    seq_lens: torch.Tensor,
    max_query_len: int,
    max_seq_len: int,
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
    """Fill `output` with the attention of every query over its sequence, as far as it sees: its own
    token and those before it, with a `window` so many of them; `softcap` 0 caps no score.

    Raises NotImplementedError where query heads do not divide into groups of one size.
    """
    num_query_heads, head_size = query.shape[1:]
    sizes = (head_size, output.shape[2])
    axes = (1, 3) if kv_cache_layout.startswith("XPACKED") else (2, 1)
    num_kv_heads, block_size = (key_cache.shape[axis] for axis in axes)
    if num_query_heads % num_kv_heads:
        raise NotImplementedError(f"{num_query_heads=} must be a multiple of {num_kv_heads=}")
    k_chunk, *k_cache_strides = k_strides(key_cache, kv_cache_layout)
    v_run, *v_cache_strides = v_strides(value_cache, kv_cache_layout)
    if max_query_len == 0:
        return
    padded = max(16, triton.next_power_of_2(max(sizes)))
    batch, count = (query_start_loc, seq_lens), len(seq_lens)
    rows = (count, max_seq_len, num_kv_heads)
    workspace = [query.new_empty((*rows, size), dtype=torch.float32) for size in sizes]
    gather_kernel[(triton.cdiv(max_seq_len, TILE_K), num_kv_heads, count)](
        key_cache,
        value_cache,
        *workspace,
        block_table,
        *batch,
        k_scale,
        v_scale,
        block_table.stride(0),
        *k_cache_strides,
        *v_cache_strides,
        *scale_strides(k_scale),
        *scale_strides(v_scale),
        block_size,
        *sizes,
        k_chunk,
        v_run,
        max_seq_len,
        window,
        PADDED_HEAD_SIZE=padded,
        TILE_K=TILE_K,
        DEQUANT=key_cache.element_size() == 1,
    )
    given = (q_scale, sinks, alibi_slopes)
    shared_kv_attention_kernel[(triton.cdiv(max_query_len, TILE_Q), num_query_heads, count)](
        query,
        output,
        *workspace,
        *batch,
        # Where there is none of these some pointer stands for it: it is not read.
        *(k_scale if each is None else each for each in given),
        softmax_scale,
        softcap,
        *query.stride(),
        *output.stride(),
        *sizes,
        num_kv_heads,
        num_query_heads // num_kv_heads,
        max_seq_len,
        window,
        *(int(each is not None) for each in given),
        PADDED_HEAD_SIZE=padded,
        TILE_Q=TILE_Q,
        TILE_K=TILE_K,
        num_stages=1,  # of a head of 576 two tiles each of K and V are too much
    )
