"""copy_blocks: whole blocks of the paged cache to other blocks of it, bit for bit.

The file stands alone: copy it, change the kernel, and run `kvfuzz run k.py:copy_blocks`.
Shapes (any strides):

    key_cache, value_cache   `[num_blocks, block_size, num_kv_heads, D]` and `[..., Dv]`
    block_mapping            `[n, 2]` int64, pairs (from, to); no block is written twice, none both
                             read and written
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator, misc"
import torch
import triton
import triton.language as tl

INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}
"""By element size: bits are copied as integers, so that no NaN is made another."""

SIZES = ("block_stride", "token_stride", "head_stride", "dim_stride", "head_size")
"""What the kernel is not compiled anew for: strides and sizes, of which each cache has its own."""


@triton.jit(do_not_specialize=SIZES)
def copy_blocks_kernel(
    cache_ptr,
    block_mapping_ptr,
    block_stride: tl.int64,
    token_stride: tl.int64,
    head_stride: tl.int64,
    dim_stride: tl.int64,
    head_size,
    PADDED_HEAD_SIZE: tl.constexpr,
):
    """One program copies one head of one token of a pair. Strides count elements."""
    pair = tl.program_id(0)
    token = tl.program_id(1)
    head = tl.program_id(2)
    dim = tl.arange(0, PADDED_HEAD_SIZE)
    inside = dim < head_size

    # Block ids are int64, so every address below is computed in 64 bits.
    source = tl.load(block_mapping_ptr + 2 * pair)
    target = tl.load(block_mapping_ptr + 2 * pair + 1)
    within = token * token_stride + head * head_stride + dim * dim_stride
    bits = tl.load(cache_ptr + source * block_stride + within, mask=inside)
    tl.store(cache_ptr + target * block_stride + within, bits, mask=inside)


def copy_blocks(
    key_cache: torch.Tensor, value_cache: torch.Tensor, block_mapping: torch.Tensor
) -> None:
    """Copy block `block_mapping[i, 0]` of both caches to block `block_mapping[i, 1]`."""
    for cache in (key_cache, value_cache):
        bits = cache.view(INTEGERS[cache.element_size()])
        _, block_size, num_kv_heads, head_size = bits.shape
        copy_blocks_kernel[(len(block_mapping), block_size, num_kv_heads)](
            bits,
            block_mapping,
            *bits.stride(),
            head_size,
            PADDED_HEAD_SIZE=triton.next_power_of_2(head_size),
        )
