"""Whole pages for targets that know bytes of blocks and no heads: rows, runs, addresses."""

from typing import NamedTuple

import torch

from kvfuzz.model.vocabulary import Levels

APART: dict[str, Levels] = {
    "layout": ("kv_first", "blocks_first", "hybrid"),
    "nesting": ("layer_first", "block_first"),
}
"""Caches whose pages of K, and of V, lie in one piece each."""


class Run(NamedTuple):
    """Bytes in one piece of every block: block b's begin `b * stride` behind `address`."""

    address: int
    stride: int
    nbytes: int


def rows(cache: torch.Tensor) -> torch.Tensor:
    """A cache `[num_blocks, block_size, num_kv_heads, D]`, whose pages lie in one piece, as
    `[num_blocks, page]`, whatever the order in a page."""
    page = cache[0].numel()
    return cache.as_strided((len(cache), page), (cache.stride(0), 1), cache.storage_offset())


def runs(key_cache: torch.Tensor, value_cache: torch.Tensor) -> list[Run]:
    """The pieces that hold a block: its page of K and that of V, or one piece where the two are
    side by side in each row."""
    found = [
        Run(each.data_ptr(), each.stride(0) * each.element_size(), each[0].nbytes)
        for each in (key_cache, value_cache)
    ]
    apart = found[1].address - found[0].address
    if apart < found[0].nbytes:
        return [found[0]._replace(nbytes=found[0].nbytes + found[1].nbytes)]
    return found
