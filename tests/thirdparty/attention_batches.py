"""Batches of sequences in paged caches, to launch attention kernels on."""

import itertools
import math
from dataclasses import dataclass

import torch
from attention_launch import Launcher
from attention_layouts import LAYOUTS, Extents, indices

FP8 = torch.float8_e4m3fnuz
K_SCALE, V_SCALE = 0.5, 0.25
"""Powers of two, so that dequantising is exact in fp16; unlike, so that a swap shows."""

GARBAGE = 200.0
"""What a slot holds before it is written, where a kernel cannot stand NaN there."""

DECODE = ((36, 1), (17, 1), (69, 1), (2, 1))
PREFILL = ((0, 19), (0, 37), (0, 7))
MIXED = ((37, 5), (0, 19), (52, 1), (16, 16))
STEPS = ((0, 60), (23, 40))
"""Context and query lengths: ends inside a block, on its border, and after several."""


@dataclass(frozen=True)
class Shape:
    """A batch of sequences (context length, query length) and the cache that holds them."""

    sequences: tuple[tuple[int, int], ...]
    layout: str = "blocks_first"
    block_size: int = 16
    num_query_heads: int = 6
    num_kv_heads: int = 2
    head_size: int = 32
    head_size_v: int = 0  # head_size
    dtype: torch.dtype = torch.float16
    cache_dtype: torch.dtype = torch.float16
    poison: float = math.nan  # what slots without a token hold
    score: float = 0.0  # about what all scores are, at the usual scale

    @property
    def lean(self) -> float:
        """What the first element of a query is more, and of a key less, for scores of `score`."""
        return math.sqrt(abs(self.score) * self.head_size**0.5)

    @property
    def scales(self) -> tuple[float, float]:
        """By what stored keys and values are multiplied."""
        if self.cache_dtype.itemsize > 1:
            return 1.0, 1.0
        return K_SCALE, K_SCALE if self.layout == "latent" else V_SCALE

    def extents(self, num_blocks: int) -> Extents:
        """The sizes for the layout's formulas."""
        return Extents(
            B=num_blocks,
            N=self.block_size,
            H=self.num_kv_heads,
            D=self.head_size,
            E=self.head_size_v or self.head_size,
            x=16 // self.cache_dtype.itemsize,
        )


@dataclass
class Batch:
    """A batch in allocations. `key_cache` and `value_cache` are the engine's views of `cache`."""

    shape: Shape
    blocks: list[list[int]]
    query: torch.Tensor  # [tokens, num_query_heads, head_size]
    cache: torch.Tensor  # [elements]
    key_cache: torch.Tensor
    value_cache: torch.Tensor
    block_table: torch.Tensor  # [sequences, width] int32
    query_start_loc: torch.Tensor  # [sequences + 1] int32
    seq_lens: torch.Tensor  # [sequences] int32
    k_scale: torch.Tensor  # [1] fp32
    v_scale: torch.Tensor  # [1] fp32
    known: list[tuple[torch.Tensor, torch.Tensor]] | None = None
    """The tokens of each sequence, where the kernel reads them from another cache."""

    @property
    def max_query_len(self) -> int:
        return max(query for _, query in self.shape.sequences)

    @property
    def max_seq_len(self) -> int:
        return int(self.seq_lens.max())

    def rows(self, sequence: int) -> slice:
        """Which rows of the query belong to `sequence`."""
        return slice(*self.query_start_loc[sequence : sequence + 2].tolist())

    def tokens(self, sequence: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Dequantised fp64 keys and values `[seq_len, num_kv_heads, size]` of `sequence`."""
        if self.known is not None:
            return self.known[sequence]
        length = sum(self.shape.sequences[sequence])
        extents = self.shape.extents(self.key_cache.shape[0])
        where = indices(LAYOUTS[self.shape.layout], extents, self.blocks[sequence], length)
        key_scale, value_scale = self.shape.scales
        stored = self.cache.double()
        return stored[where[0]] * key_scale, stored[where[1]] * value_scale


def allocate(launcher: Launcher, shape: Shape, seed: int = 0) -> Batch:
    """A batch of random tokens in shuffled blocks, spare blocks between them."""
    make = torch.Generator().manual_seed(seed)
    lengths = [context + query for context, query in shape.sequences]
    queries = [query for _, query in shape.sequences]
    counts = [math.ceil(length / shape.block_size) for length in lengths]
    num_blocks = sum(counts) + 3
    blocks = torch.randperm(num_blocks, generator=make)[:-3].split(counts)
    # Rows are wider than any sequence, and their stale tails name blocks of others or of nobody.
    table = torch.randint(num_blocks, (len(blocks), max(counts) + 3), generator=make)
    for row, mine in zip(table, blocks, strict=True):
        row[: len(mine)] = mine
    query = torch.randn((sum(queries), shape.num_query_heads, shape.head_size), generator=make)
    query[..., 0] += shape.lean
    extents, layout = shape.extents(num_blocks), LAYOUTS[shape.layout]
    cache = launcher.given("cache", _stored(shape, layout, extents, blocks, lengths, make))
    key_cache, value_cache = layout.views(extents, cache)
    starts = list(itertools.accumulate(queries, initial=0))
    int32 = torch.int32
    return Batch(
        shape=shape,
        blocks=[mine.tolist() for mine in blocks],
        query=launcher.given("query", query.to(shape.dtype)),
        cache=cache,
        key_cache=key_cache,
        value_cache=value_cache,
        block_table=launcher.given("block_table", table.to(int32)),
        query_start_loc=launcher.given("query_start_loc", torch.tensor(starts, dtype=int32)),
        seq_lens=launcher.given("seq_lens", torch.tensor(lengths, dtype=int32)),
        k_scale=launcher.given("k_scale", torch.tensor([shape.scales[0]])),
        v_scale=launcher.given("v_scale", torch.tensor([shape.scales[1]])),
    )


def segments(launcher: Launcher, batch: Batch, count: int, size: int) -> dict[str, object]:
    """The arguments by which the unified kernels split a sequence into `count` segments."""
    rows = (*batch.query.shape[:2], count)
    padded = 1 << (size - 1).bit_length()
    return {
        "seq_threshold_3D": 128,
        "num_par_softmax_segments": count,
        "softmax_segm_output": launcher.room("segm_output", (*rows, padded), torch.float32),
        "softmax_segm_max": launcher.room("segm_max", rows, torch.float32),
        "softmax_segm_expsum": launcher.room("segm_expsum", rows, torch.float32),
    }


def _stored(shape, layout, extents, blocks, lengths, make) -> torch.Tensor:
    cache = torch.full((layout.numel(extents),), shape.poison).to(shape.cache_dtype)
    for mine, length in zip(blocks, lengths, strict=True):
        where = indices(layout, extents, mine.tolist(), length)
        for index, scale in zip(where, shape.scales, strict=True):
            drawn = torch.randn(index.shape, generator=make)
            if index is where[0]:
                drawn[..., 0] += math.copysign(shape.lean, shape.score)
            cache[index] = (drawn / scale).to(shape.cache_dtype)
    return cache
