"""gather_indexer: copy the sparse indexer's cached keys and scales into dense rows, as they are.

The file stands alone: copy it, change the kernel, and run `kvfuzz run k.py:gather_indexer`. Shapes:

    kv_cache           `[num_blocks, block_size, D + 4]` bytes; blocks may lie apart. A block is
                       `block_size * D` codes, then block_size float32 scales
    k                  `[T, D]` fp8, the codes that are written
    k_scale            `[T]` float32, the scales that are written
    block_table        `[num_sequences, width]` int32
    cu_seqlens_kv      `[num_sequences + 1]` int32, where its rows start in the output
    token_to_batch     `[T]` int32, the sequence of each output row
    block_tile_size    tokens of a tile, in which 16 codes of each token lie together; 1 is row
                       after row
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator, misc"
import torch
import triton
import triton.language as tl

HEAD_TILE_SIZE = 16
"""Codes of a token that lie together."""

FEWEST_LANES = 128
"""Small heads share a compilation."""

SIZES = (
    "block_table_stride",
    "code_block_stride",
    "scale_block_stride",
    "k_stride",
    "block_size",
    "head_size",
    "block_tile_size",
)
"""What the kernel is not compiled anew for."""


@triton.jit(do_not_specialize=SIZES)
def gather_indexer_kernel(
    code_ptr,
    scale_ptr,
    k_ptr,
    k_scale_ptr,
    block_table_ptr,
    cu_seqlens_kv_ptr,
    token_to_batch_ptr,
    block_table_stride: tl.int64,
    code_block_stride: tl.int64,
    scale_block_stride: tl.int64,
    k_stride: tl.int64,
    block_size,
    head_size,
    block_tile_size,
    HEAD_TILE: tl.constexpr,
    PADDED_HEAD_SIZE: tl.constexpr,
):
    """One program copies one token."""
    row = tl.program_id(0)
    dim = tl.arange(0, PADDED_HEAD_SIZE)
    inside = dim < head_size

    sequence = tl.load(token_to_batch_ptr + row)
    position = row - tl.load(cu_seqlens_kv_ptr + sequence)
    entry = sequence * block_table_stride + position // block_size
    # Block ids are int32, and block * stride passes 2**31 on caches that engines do allocate.
    block = tl.load(block_table_ptr + entry).to(tl.int64)
    token = position % block_size

    tile_at = token // block_tile_size * (block_tile_size * head_size)
    within_at = token % block_tile_size * HEAD_TILE + dim % HEAD_TILE
    code_at = tile_at + dim // HEAD_TILE * (block_tile_size * HEAD_TILE) + within_at
    code_at += block * code_block_stride
    codes = tl.load(code_ptr + code_at, mask=inside)
    tl.store(k_ptr + row * k_stride + dim, codes, mask=inside)
    scale = tl.load(scale_ptr + block * scale_block_stride + token)
    tl.store(k_scale_ptr + row, scale)


def gather_indexer(
    kv_cache: torch.Tensor,
    k: torch.Tensor,
    k_scale: torch.Tensor,
    block_table: torch.Tensor,
    cu_seqlens_kv: torch.Tensor,
    token_to_batch: torch.Tensor,
    block_tile_size: int,
) -> None:
    """Fill `k` and `k_scale` from the cache."""
    num_blocks, block_size = kv_cache.shape[:2]
    num_tokens, head_size = k.shape
    pages = kv_cache.view(num_blocks, -1)
    codes = pages[:, : block_size * head_size]
    scales = pages[:, block_size * head_size :].view(torch.float32)
    if num_tokens == 0:
        return
    gather_indexer_kernel[(num_tokens,)](
        codes,
        scales,
        k.view(torch.uint8),
        k_scale,
        block_table,
        cu_seqlens_kv,
        token_to_batch,
        block_table.stride(0),
        codes.stride(0),
        scales.stride(0),
        k.stride(0),
        block_size,
        head_size,
        block_tile_size,
        HEAD_TILE=HEAD_TILE_SIZE,
        PADDED_HEAD_SIZE=triton.next_power_of_2(max(head_size, FEWEST_LANES)),
    )
