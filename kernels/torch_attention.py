"""Attention in torch, in fp64, over K and V of one sequence, and how those are taken out of pages.

The tokens of a sequence are selected first, so that whatever else its blocks hold, NaN perhaps, has
no influence.
"""

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor


def attend(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    *,
    scale: float,
    causal: bool,
    window: tuple[int, int] = (-1, -1),
) -> tuple[Tensor, Tensor]:
    """Attention of queries `[T, Hq, D]` over keys and values `[L, H, D]`, in fp64.

    Query t stands at key L - T + t; `window` is how many keys before and after it are seen, -1 is
    all. Returns the output `[T, Hq, D]` and the log-sum-exp `[Hq, T]`: zeros and -inf over no key.
    """
    group = query.shape[1] // keys.shape[1]
    keys = keys.double().repeat_interleave(group, 1)
    values = values.double().repeat_interleave(group, 1)
    count, length = len(query), len(keys)
    position = torch.arange(length - count, length, device=query.device)
    ahead = torch.arange(length, device=query.device) - position[:, None]
    seen = torch.ones_like(ahead, dtype=torch.bool)
    if causal:
        seen &= ahead <= 0
    if window[0] >= 0:
        seen &= ahead >= -window[0]
    if window[1] >= 0:
        seen &= ahead <= window[1]
    score = torch.einsum("thd,lhd->htl", query.double(), keys) * scale
    score = score.masked_fill(~seen, -math.inf)
    sums = score.logsumexp(-1)
    weight = (score - sums[..., None]).exp().masked_fill(~seen, 0.0)
    values = values.masked_fill(~seen.any(0)[:, None, None], 0.0)
    return torch.einsum("htl,lhd->thd", weight, values), sums


def attend_paged(
    out: Tensor,
    query: Tensor,
    lengths: Tensor,
    starts: Sequence[int],
    tokens: Callable[[int, int], tuple[Tensor, Tensor]],
    *,
    scale: float,
    window: tuple[int, int] = (-1, -1),
) -> None:
    """Rows `starts[i]` to `starts[i + 1]` are the last tokens of sequence i, whose K and V `tokens`
    of i and its length fetches."""
    for i, length in enumerate(lengths.tolist()):
        rows = slice(starts[i], starts[i + 1])
        keys, values = tokens(i, length)
        made, _ = attend(query[rows], keys, values, scale=scale, causal=True, window=window)
        out[rows] = made.to(out.dtype)


def first_of(scale: Tensor | None) -> float:
    """The number that a kernel of per-tensor scales finds where its pointer points."""
    return 1.0 if scale is None else float(scale.reshape(-1)[0])


def _blocks(cache: Tensor, table: Tensor, length: int, block_size: int) -> Tensor:
    """The blocks of a sequence in fp64: entries behind them are not read."""
    return cache[table[: -(-length // block_size)].long()].double()


def strided_tokens(cache: Tensor, table: Tensor, length: int) -> Tensor:
    """`[length, H, D]` of a cache `[B, N, H, D]`."""
    return _blocks(cache, table, length, cache.shape[1]).flatten(0, 1)[:length]


def packed_k_tokens(cache: Tensor, table: Tensor, length: int) -> Tensor:
    """`[length, H, D]` of K `[B, H, D/x, N, x]`."""
    found = _blocks(cache, table, length, cache.shape[3])
    return found.permute(0, 3, 1, 2, 4).flatten(3).flatten(0, 1)[:length]


def packed_v_tokens(cache: Tensor, table: Tensor, length: int) -> Tensor:
    """`[length, H, D]` of V `[B, H, N/x, D, x]`."""
    found = _blocks(cache, table, length, cache.shape[2] * cache.shape[4])
    return found.permute(0, 2, 4, 1, 3).flatten(0, 2)[:length]


def as_dense(cache: Tensor) -> Tensor:
    """A cache as a kernel sees it that takes a pointer and computes all strides from the shape."""
    strides = torch.empty(cache.shape, device="meta").stride()
    return cache.as_strided(cache.shape, strides)
