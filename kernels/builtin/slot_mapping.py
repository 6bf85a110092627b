"""slot_mapping: the slot of the cache that each new token of a batch goes to, on one rank.

The file stands alone: copy it, change the kernel, and run `kvfuzz run k.py:slot_mapping`. Shapes:

    idx_mapping       `[num_reqs]` int32, the row of each request in the table; -1 has none
    query_start_loc   `[num_reqs + 1]` int32, where each request's tokens begin
    positions         `[max_num_tokens]` int64, by token
    block_table       `[max_num_reqs, width]` int32, the kernel blocks of every request on this rank
    slot_mapping      `[max_num_tokens]` int64, what is written
    block_size        tokens of a kernel block
    cp_rank, cp_size  this rank of context parallelism, and how many there are
    cp_interleave     tokens in a row that one rank owns
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator, misc"
import torch
import triton
import triton.language as tl

PAD_SLOT_ID = -1

NUMBERS = (
    "block_table_stride", "max_num_tokens", "block_size", "cp_rank", "cp_size", "cp_interleave"
)  # fmt: skip
"""What the kernel is not compiled anew for."""


@triton.jit(do_not_specialize=NUMBERS)
def slot_mapping_kernel(
    idx_mapping_ptr,
    query_start_loc_ptr,
    positions_ptr,
    block_table_ptr,
    slot_mapping_ptr,
    block_table_stride: tl.int64,
    max_num_tokens,
    block_size,
    cp_rank,
    cp_size,
    cp_interleave,
    PAD: tl.constexpr,
    TILE: tl.constexpr,
):
    """One program maps the tokens of one request; the last pads what lies behind them all."""
    request = tl.program_id(0)
    lane = tl.arange(0, TILE)
    start = tl.load(query_start_loc_ptr + request)
    if request == tl.num_programs(0) - 1:
        for first in range(start, max_num_tokens, TILE):
            token = first + lane
            nowhere = tl.full([TILE], PAD, tl.int64)
            tl.store(slot_mapping_ptr + token, nowhere, mask=token < max_num_tokens)
        return

    stop = tl.load(query_start_loc_ptr + request + 1)
    row = tl.load(idx_mapping_ptr + request)
    owns_blocks = row >= 0
    for first in range(start, stop, TILE):
        token = first + lane
        inside = token < stop
        position = tl.load(positions_ptr + token, mask=inside & owns_blocks, other=0)

        # Runs of cp_interleave tokens go round the ranks; a rank keeps its own without gaps.
        turn = position // cp_interleave
        is_mine = (turn % cp_size == cp_rank) & owns_blocks
        number = turn // cp_size * cp_interleave + position % cp_interleave
        entry = row * block_table_stride + number // block_size
        block = tl.load(block_table_ptr + entry, mask=inside & is_mine, other=0).to(tl.int64)
        slot = tl.where(is_mine, block * block_size + number % block_size, PAD)
        tl.store(slot_mapping_ptr + token, slot, mask=inside)


def slot_mapping(
    idx_mapping: torch.Tensor,
    query_start_loc: torch.Tensor,
    positions: torch.Tensor,
    block_table: torch.Tensor,
    slot_mapping: torch.Tensor,
    block_size: int,
    cp_rank: int,
    cp_size: int,
    cp_interleave: int,
) -> None:
    """Fill all of `slot_mapping`: slots of this rank's tokens, -1 for every other."""
    slot_mapping_kernel[(idx_mapping.shape[0] + 1,)](
        idx_mapping,
        query_start_loc,
        positions,
        block_table,
        slot_mapping,
        block_table.stride(0),
        slot_mapping.shape[0],
        block_size,
        cp_rank,
        cp_size,
        cp_interleave,
        PAD=PAD_SLOT_ID,
        TILE=256,
    )
