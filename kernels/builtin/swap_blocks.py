"""swap_blocks: whole blocks of one paged cache to blocks of another one, bit for bit.

An engine swaps blocks out to a cache on the host, and back in. The file stands alone: copy it,
change the kernel, and run `kvfuzz run k.py:swap_blocks`. Shapes (any strides):

    key_cache, value_cache     `[num_blocks, block_size, num_kv_heads, D]` and `[..., Dv]`
    key_target, value_target   the same, with blocks of their own number
    block_mapping              `[n, 2]` int64, pairs (block of the cache, block of the target)
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator, misc"
import torch
import triton
import triton.language as tl

INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}
"""By element size: bits are copied as integers, so that no NaN is made another."""

SIZES = (
    "block_stride",
    "token_stride",
    "head_stride",
    "dim_stride",
    "target_block_stride",
    "target_token_stride",
    "target_head_stride",
    "target_dim_stride",
    "head_size",
)
"""What the kernel is not compiled anew for: strides and sizes, of which each cache has its own."""


@triton.jit(do_not_specialize=SIZES)
def swap_blocks_kernel(
    cache_ptr,
    target_ptr,
    block_mapping_ptr,
    block_stride: tl.int64,
    token_stride: tl.int64,
    head_stride: tl.int64,
    dim_stride: tl.int64,
    target_block_stride: tl.int64,
    target_token_stride: tl.int64,
    target_head_stride: tl.int64,
    target_dim_stride: tl.int64,
    head_size,
    PADDED_HEAD_SIZE: tl.constexpr,
):
    """One program copies one head of one token of a pair. Strides count elements."""
    pair = tl.program_id(0)
    token = tl.program_id(1)
    head = tl.program_id(2)
    dim = tl.arange(0, PADDED_HEAD_SIZE)
    inside = dim < head_size

    here = tl.load(block_mapping_ptr + 2 * pair)
    there = tl.load(block_mapping_ptr + 2 * pair + 1)
    at = here * block_stride + token * token_stride + head * head_stride + dim * dim_stride
    goal = there * target_block_stride + token * target_token_stride
    goal = goal + head * target_head_stride + dim * target_dim_stride
    bits = tl.load(cache_ptr + at, mask=inside)
    tl.store(target_ptr + goal, bits, mask=inside)


def swap_blocks(
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    key_target: torch.Tensor,
    value_target: torch.Tensor,
    block_mapping: torch.Tensor,
) -> None:
    """Copy block `block_mapping[i, 0]` of each cache to `block_mapping[i, 1]` of its target."""
    for cache, target in ((key_cache, key_target), (value_cache, value_target)):
        bits = cache.view(INTEGERS[cache.element_size()])
        goal = target.view(INTEGERS[target.element_size()])
        _, block_size, num_kv_heads, head_size = bits.shape
        swap_blocks_kernel[(len(block_mapping), block_size, num_kv_heads)](
            bits,
            goal,
            block_mapping,
            *bits.stride(),
            *goal.stride(),
            head_size,
            PADDED_HEAD_SIZE=triton.next_power_of_2(head_size),
        )
