"""From the blocks that a request holds to the kernel blocks that a kernel indexes."""

from collections.abc import Sequence

import torch


def expand_block_table(block_ids: Sequence[int], ratio: int) -> list[int]:
    """Kernel blocks `block * ratio` to `block * ratio + ratio - 1` of each block, in order."""
    first = torch.tensor(block_ids, dtype=torch.int64) * ratio
    expanded: list[int] = (first[:, None] + torch.arange(ratio)).flatten().tolist()
    return expanded
