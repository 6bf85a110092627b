"""copy_states: the Mamba states of whole blocks to other blocks, bit for bit.

The file stands alone: copy it, change the kernel, and run `kvfuzz run k.py:copy_states`. Shapes:

    state_0, state_1, state_2   `[num_blocks, *shape]`, each in one piece inside of a block
    block_mapping               `[n, 2]` int64, pairs (from, to); no block is in two of them
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator, misc"
import torch
import triton
import triton.language as tl

INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}
"""By element size: bits are copied as integers, so that no NaN is made another."""

SIZES = ("block_stride", "state_size")
"""What the kernel is not compiled anew for, in elements."""


@triton.jit(do_not_specialize=SIZES)
def copy_states_kernel(
    state_ptr, block_mapping_ptr, block_stride: tl.int64, state_size, TILE: tl.constexpr
):
    """One program copies a tile of the state of a pair."""
    pair = tl.program_id(0)
    element = tl.program_id(1) * TILE + tl.arange(0, TILE)
    inside = element < state_size

    # Block ids are int64, so every address below is computed in 64 bits.
    source = tl.load(block_mapping_ptr + 2 * pair)
    target = tl.load(block_mapping_ptr + 2 * pair + 1)
    bits = tl.load(state_ptr + source * block_stride + element, mask=inside)
    tl.store(state_ptr + target * block_stride + element, bits, mask=inside)


def copy_states(
    state_0: torch.Tensor,
    block_mapping: torch.Tensor,
    state_1: torch.Tensor | None = None,
    state_2: torch.Tensor | None = None,
) -> None:
    """Copy every state of block `block_mapping[i, 0]` to block `block_mapping[i, 1]`."""
    for state in (state_0, state_1, state_2):
        if state is None:
            continue
        bits = state.view(INTEGERS[state.element_size()]).view(len(state), -1)
        state_size, tile = bits.shape[1], 256
        copy_states_kernel[(len(block_mapping), triton.cdiv(state_size, tile))](
            bits, block_mapping, bits.stride(0), state_size, TILE=tile
        )
