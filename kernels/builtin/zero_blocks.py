"""zero_blocks: clear whole blocks of the paged cache.

The file stands alone: copy it, change the kernel, and run `kvfuzz run k.py:zero_blocks`.
Shapes (any strides):

    key_cache, value_cache   `[num_blocks, block_size, num_kv_heads, D]` and `[..., Dv]`
    block_ids                `[n]` int64, each once
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator, misc"
import torch
import triton
import triton.language as tl

INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}
"""By element size: a zero is all bits zero, whatever the format."""

SIZES = ("block_stride", "token_stride", "head_stride", "dim_stride", "head_size")
"""What the kernel is not compiled anew for: strides and sizes, of which each cache has its own."""


@triton.jit(do_not_specialize=SIZES)
def zero_blocks_kernel(
    cache_ptr,
    block_ids_ptr,
    block_stride: tl.int64,
    token_stride: tl.int64,
    head_stride: tl.int64,
    dim_stride: tl.int64,
    head_size,
    PADDED_HEAD_SIZE: tl.constexpr,
):
    """One program clears one head of one token of a block. Strides count elements."""
    token = tl.program_id(1)
    head = tl.program_id(2)
    dim = tl.arange(0, PADDED_HEAD_SIZE)

    # Block ids are int64, so every address below is computed in 64 bits.
    block = tl.load(block_ids_ptr + tl.program_id(0))
    at = block * block_stride + token * token_stride + head * head_stride + dim * dim_stride
    tl.store(cache_ptr + at, 0, mask=dim < head_size)


def zero_blocks(
    key_cache: torch.Tensor, value_cache: torch.Tensor, block_ids: torch.Tensor
) -> None:
    """Set every byte of the blocks `block_ids` of both caches to zero."""
    for cache in (key_cache, value_cache):
        bits = cache.view(INTEGERS[cache.element_size()])
        _, block_size, num_kv_heads, head_size = bits.shape
        zero_blocks_kernel[(len(block_ids), block_size, num_kv_heads)](
            bits,
            block_ids,
            *bits.stride(),
            head_size,
            PADDED_HEAD_SIZE=triton.next_power_of_2(head_size),
        )
