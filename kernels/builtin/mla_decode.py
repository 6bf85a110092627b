"""mla_decode: one query token of each sequence attends to its rows in the paged cache of MLA.

Multi-head latent attention in its absorbed form (DeepSeek V2, 2.1): all query heads attend to one
row a token, whose first elements, the latent, are the values, too. Parts of a sequence are summed
by programs of their own, 16 heads each, and a second kernel merges them (split KV). The file stands
alone: copy it, change a kernel, and run `kvfuzz run k.py:mla_decode`. Shapes (any strides unless
said otherwise):

    query         `[num_sequences, num_query_heads, R + P]`
    kv_cache      `[num_blocks, block_size, R + P]`: R elements of the latent, P rotary ones
    output        `[num_sequences, num_query_heads, R]`
    lse           `[num_sequences, num_query_heads]`: log of the sum of exp(score), base e
    block_table   `[num_sequences, width]` int32, rows contiguous
    seq_lens      `[num_sequences]` int32, tokens in the cache, at least one
    k_scale       `[1]` float32; a byte is read as float32(byte) * k_scale

The softmax is taken online (Milakov and Gimelshein, 2018): a tile of tokens at a time, with what
was summed so far scaled down whenever a larger score turns up.
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
)

SIZES = (
    "softmax_scale",
    "softcap",
    "block_table_stride",
    "query_row_stride",
    "query_head_stride",
    "query_dim_stride",
    "block_stride",
    "token_stride",
    "dim_stride",
    "block_size",
    "latent_size",
    "rope_size",
    "num_heads",
)
MERGE_SIZES = (
    "output_row_stride",
    "output_head_stride",
    "output_dim_stride",
    "lse_row_stride",
    "lse_head_stride",
    "latent_size",
)
"""What kernels are not compiled anew for: numbers, strides and sizes, of which each cache has its
own."""

HEADS, TILE, PARTS = 16, 16, 4
"""Query heads of a program, tokens that are looked at together, programs that share a sequence."""


@triton.jit(do_not_specialize=SIZES)
def mla_decode_kernel(
    query_ptr,
    kv_cache_ptr,
    block_table_ptr,
    seq_lens_ptr,
    k_scale_ptr,
    weighted_ptr,
    largest_ptr,
    total_ptr,
    softmax_scale: tl.float32,
    softcap: tl.float32,
    block_table_stride: tl.int64,
    query_row_stride: tl.int64,
    query_head_stride: tl.int64,
    query_dim_stride: tl.int64,
    block_stride: tl.int64,
    token_stride: tl.int64,
    dim_stride: tl.int64,
    block_size,
    latent_size,
    rope_size,
    num_heads,
    PADDED_LATENT: tl.constexpr,
    PADDED_ROPE: tl.constexpr,
    HEADS: tl.constexpr,
    TILE: tl.constexpr,
    PARTS: tl.constexpr,
    DEQUANT: tl.constexpr,
):
    """One program sums a part of HEADS query heads of one sequence. Strides count elements."""
    sequence = tl.program_id(0)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    part = tl.program_id(2)
    is_head = head < num_heads
    dim = tl.arange(0, PADDED_LATENT)
    inside = dim < latent_size
    rotary = tl.arange(0, PADDED_ROPE)
    is_rotary = rotary < rope_size
    rope = latent_size + rotary

    query_at = sequence * query_row_stride + head[:, None] * query_head_stride
    query_mask = is_head[:, None] & inside[None, :]
    query = tl.load(query_ptr + query_at + dim[None, :] * query_dim_stride, query_mask, 0.0)
    query = query.to(tl.float32)
    rope_mask = is_head[:, None] & is_rotary[None, :]
    query_rope = tl.load(query_ptr + query_at + rope[None, :] * query_dim_stride, rope_mask, 0.0)
    query_rope = query_rope.to(tl.float32)

    length = tl.load(seq_lens_ptr + sequence)
    share = tl.cdiv(length, PARTS)
    start_of_part = part * share
    end_of_part = tl.minimum(start_of_part + share, length)
    largest = tl.full([HEADS], float("-inf"), tl.float32)
    total = tl.zeros([HEADS], tl.float32)
    weighted = tl.zeros([HEADS, PADDED_LATENT], tl.float32)
    for start in range(start_of_part, end_of_part, TILE):
        token = start + tl.arange(0, TILE)
        is_token = token < end_of_part
        entry = sequence * block_table_stride + token // block_size
        # Block ids are int32, and block * stride passes 2**31 on caches that engines do allocate.
        block = tl.load(block_table_ptr + entry, mask=is_token, other=0).to(tl.int64)
        row_at = block * block_stride + token % block_size * token_stride

        # Slots past the sequence hold whatever was there before, NaN perhaps: they are not read.
        latent_at = row_at[:, None] + dim[None, :] * dim_stride
        latent_mask = is_token[:, None] & inside[None, :]
        latent = tl.load(kv_cache_ptr + latent_at, latent_mask, 0.0).to(tl.float32)
        k_rope_at = row_at[:, None] + rope[None, :] * dim_stride
        k_rope_mask = is_token[:, None] & is_rotary[None, :]
        k_rope = tl.load(kv_cache_ptr + k_rope_at, k_rope_mask, 0.0).to(tl.float32)
        if DEQUANT:
            k_scale = tl.load(k_scale_ptr)
            latent *= k_scale
            k_rope *= k_scale

        scores = tl.dot(query, tl.trans(latent), input_precision="ieee")
        scores += tl.dot(query_rope, tl.trans(k_rope), input_precision="ieee")
        scores *= softmax_scale
        if softcap > 0:
            # tanh(x) by exp(-2|x|), which never overflows.
            shrunk = tl.exp(-2.0 * tl.abs(scores / softcap))
            capped = softcap * (1.0 - shrunk) / (1.0 + shrunk)
            scores = tl.where(scores < 0, -capped, capped)
        scores = tl.where(is_token[None, :], scores, float("-inf"))
        new_largest = tl.maximum(largest, tl.max(scores, axis=1))
        shrink = tl.exp(largest - new_largest)
        weights = tl.exp(scores - new_largest[:, None])
        total = total * shrink + tl.sum(weights, axis=1)
        weighted = weighted * shrink[:, None] + tl.dot(weights, latent, input_precision="ieee")
        largest = new_largest

    number = (sequence * num_heads + head) * PARTS + part
    weighted_at = number[:, None] * PADDED_LATENT + dim[None, :]
    tl.store(weighted_ptr + weighted_at, weighted, mask=is_head[:, None])
    tl.store(largest_ptr + number, largest, mask=is_head)
    tl.store(total_ptr + number, total, mask=is_head)


@triton.jit(do_not_specialize=MERGE_SIZES)
def merge_parts_kernel(
    weighted_ptr,
    largest_ptr,
    total_ptr,
    output_ptr,
    lse_ptr,
    output_row_stride: tl.int64,
    output_head_stride: tl.int64,
    output_dim_stride: tl.int64,
    lse_row_stride: tl.int64,
    lse_head_stride: tl.int64,
    latent_size,
    PADDED_LATENT: tl.constexpr,
    PARTS: tl.constexpr,
):
    """One program merges the parts of one query head of one sequence."""
    sequence = tl.program_id(0)
    head = tl.program_id(1)
    dim = tl.arange(0, PADDED_LATENT)
    number = (sequence * tl.num_programs(1) + head) * PARTS + tl.arange(0, PARTS)
    # A part without tokens has no largest score, and no share.
    part_largest = tl.load(largest_ptr + number)
    largest = tl.max(part_largest, axis=0)
    share = tl.exp(part_largest - largest)
    total = tl.sum(tl.load(total_ptr + number) * share, axis=0)
    weighted = tl.load(weighted_ptr + number[:, None] * PADDED_LATENT + dim[None, :])
    result = tl.sum(weighted * share[:, None], axis=0) / total
    output_at = sequence * output_row_stride + head * output_head_stride + dim * output_dim_stride
    mask = dim < latent_size
    tl.store(output_ptr + output_at, result.to(output_ptr.dtype.element_ty), mask=mask)
    lse = largest + tl.log(total)
    lse_at = sequence * lse_row_stride + head * lse_head_stride
    tl.store(lse_ptr + lse_at, lse.to(lse_ptr.dtype.element_ty))


def mla_decode(
    query: torch.Tensor,
    kv_cache: torch.Tensor,
    output: torch.Tensor,
    lse: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    k_scale: torch.Tensor,
    softmax_scale: float,
    softcap: float = 0.0,
) -> None:
    """Fill `output` and `lse` with the attention of each query over its sequence's tokens.

    `softcap` 0 caps no score. A sequence has a token at least: its query.
    """
    # A batch may be padded: it has as many rows as sequences that have a length.
    num_sequences, num_heads, latent_size = seq_lens.shape[0], query.shape[1], output.shape[2]
    block_size, rope_size = kv_cache.shape[1], kv_cache.shape[2] - latent_size
    if num_sequences == 0:
        return
    padded = triton.next_power_of_2(latent_size)
    counts = (num_sequences, num_heads, PARTS)
    weighted = torch.empty((*counts, padded), dtype=torch.float32, device=query.device)
    largest = torch.empty(counts, dtype=torch.float32, device=query.device)
    total = torch.empty(counts, dtype=torch.float32, device=query.device)
    mla_decode_kernel[(num_sequences, triton.cdiv(num_heads, HEADS), PARTS)](
        query,
        kv_cache,
        block_table,
        seq_lens,
        k_scale,
        weighted,
        largest,
        total,
        softmax_scale,
        softcap,
        block_table.stride(0),
        *query.stride(),
        *kv_cache.stride(),
        block_size,
        latent_size,
        rope_size,
        num_heads,
        PADDED_LATENT=padded,
        PADDED_ROPE=max(16, triton.next_power_of_2(rope_size)),
        HEADS=HEADS,
        TILE=TILE,
        PARTS=PARTS,
        DEQUANT=kv_cache.dtype in QUANTISED,
    )
    merge_parts_kernel[counts[:2]](
        weighted,
        largest,
        total,
        output,
        lse,
        *output.stride(),
        *lse.stride(),
        latent_size,
        PADDED_LATENT=padded,
        PARTS=PARTS,
    )
