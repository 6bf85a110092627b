"""Boundary rows: the situations in which caches have broken before, drawn before anything else.

Each names some levels and where they come from; the others are drawn. Numbers are those of vLLM and
AITER pull requests unless a project is named.
"""

import functools
from collections.abc import Iterator

from kvfuzz.model.plan_case import PLAN_OPS
from kvfuzz.model.script import STATEFUL_OP
from kvfuzz.strategies.boundary import Boundary
from kvfuzz.strategies.choices import Choices, number
from kvfuzz.strategies.ops.table import OP_BOUNDARIES
from kvfuzz.strategies.rows import Row, Space

MOST_WEIGHT = 30
"""How much more often a level can come first than one that is not drawn often."""


BOUNDARIES: tuple[Boundary, ...] = (
    Boundary({"layout": "hybrid", "block_ids": "shuffled"}, "block stride, 37228"),
    Boundary({"layout": "hybrid", "order": "shuffle"}, "SHUFFLE block stride, 39192 and 43660"),
    Boundary({"layout": "blocks_first"}, "stride(0) twice the page, AITER 3498 and 3492"),
    Boundary({"layout": "content_packed"}, "K and V side by side, 44455"),
    Boundary({"layout": "kv_first", "order": "hnd"}, "head stride, 37940"),
    Boundary({"num_kv_heads": "1"}, "a head axis of size one: its stride says nothing"),
    Boundary({"num_kv_heads": "2"}, "shape[1] == 2 taken for K and V, 47685"),
    Boundary({"block_size": "2", "num_kv_heads": "2"}, "block_size equal to num_kv_heads"),
    Boundary({"block_size": "4", "num_kv_heads": "4"}, "block_size equal to num_kv_heads"),
    Boundary({"block_size": "8", "num_kv_heads": "8"}, "block_size equal to num_kv_heads"),
    Boundary({"block_size": "1"}, "a token a block"),
    Boundary({"block_size": "4"}, "slots made with another block size, 47056"),
    Boundary({"block_size": "544"}, "Qwen3-Next's page, no multiple of 64"),
    Boundary({"block_size": "784"}, "Qwen3.5's page, no multiple of a tile of 32, 39810"),
    Boundary({"block_size": "784", "last_offset": "first"}, "a tile across two blocks, 39810"),
    Boundary({"head_size": "80"}, "no power of two: masks"),
    Boundary({"head_size": "96"}, "no power of two: masks"),
    Boundary({"head_size": "192"}, "no power of two: masks"),
    Boundary({"head_size": "576"}, "a latent of 512 and 64 rotary elements"),
    Boundary({"cache_dtype": "e4m3fnuz", "scale": "general"}, "CDNA 3's fp8, 39122"),
    Boundary({"cache_dtype": "e4m3fn", "scale": "general"}, "OCP fp8, 39122"),
    Boundary({"cache_dtype": "e5m2", "scale": "power_of_two"}, "infinities in the cache"),
    Boundary({"scale": "general", "order": "shuffle"}, "SHUFFLE took every scale for 1 (0.33.0)"),
    Boundary({"values": "ties", "scale": "general"}, "x / s against x * (1/s)"),
    Boundary({"padding": "some"}, "rows with slot -1, 39444"),
    Boundary({"rows": "gapped"}, "key as a slice of qkv"),
    Boundary({"start_block": "later", "first_offset": "inside"}, "chunks inside a block"),
    Boundary({"sequences": "3", "table": "wide"}, "stale entries behind each sequence's blocks"),
    Boundary({"blocks_used": "1", "first_offset": "inside"}, "one block, not from its start"),
    Boundary({"first_offset": "edge", "last_offset": "edge"}, "whole blocks"),
    Boundary({"last_offset": "first"}, "one token past a block"),
    Boundary({"block_ids": "split_2"}, "two kernel blocks a manager block, 54877"),
    Boundary({"block_ids": "split_4"}, "four kernel blocks a manager block"),
    Boundary({"block_ids": "split_12"}, "twelve kernel blocks a manager block"),
    Boundary({"reach": "past_2g_bytes"}, "byte offsets past 2**31, 1486"),
    Boundary({"reach": "past_2g_elements"}, "element offsets past 2**31, 1486"),
)

PLAN_BOUNDARIES: tuple[Boundary, ...] = (
    Boundary({"form": "mixed", "heads": "2"}, "two storages of one allocation, 47035 and 47685"),
    Boundary({"form": "mixed", "kernel_blocks": "2"}, "two storages, and blocks that are split"),
    Boundary({"kinds": "full+mamba", "form": "kv_first"}, "[K0][V0][K1][V1] beside state, 37228"),
    Boundary({"kinds": "full+mamba", "num_blocks": "2"}, "shape[0] == 2 == shape[1]"),
    Boundary({"kinds": "full+mamba", "page_padding": "state"}, "a state smaller than its page"),
    Boundary({"kinds": "full+mamba", "page_padding": "attention"}, "a page smaller than a state"),
    Boundary({"placement": "packed", "page_order": "hnd"}, "viewed, then permuted, 47314"),
    Boundary({"form": "content_packed", "value_heads": "other"}, "K and V of two sizes"),
    Boundary({"form": "head_slots", "kv_layout": "LHBNC"}, "K of all blocks, then V"),
    Boundary({"form": "content_packed", "kv_layout": "BHLNC"}, "layers inside of heads"),
    Boundary({"kinds": "full+sliding", "geometry": "differs"}, "one page of two shapes: Gemma-4"),
    Boundary({"kinds": "full+sliding", "sharers": "several"}, "layers without a cache: Gemma-3n"),
    Boundary({"groups": "3+", "group_sizes": "uneven"}, "slots that a group leaves empty"),
    Boundary({"kinds": "mla", "layers": "3+"}, "one row a token, no V"),
    Boundary({"num_blocks": "1"}, "a block axis of size one: its stride says nothing"),
)


SCRIPT_BOUNDARIES: tuple[Boundary, ...] = (
    Boundary({"copies": "some", "layers": "2"}, "a copy on write, of every layer"),
    Boundary({"copies": "several", "kernel_blocks": "1"}, "many pairs in one copy"),
    Boundary({"rollbacks": "some", "extends": "some"}, "slots that speculation writes again"),
    Boundary({"swaps": "some", "frees": "some"}, "blocks that come back elsewhere"),
    Boundary({"zeros": "some", "kernel_blocks": "2"}, "cleared blocks that are split"),
    Boundary({"form": "mixed", "copies": "some"}, "one allocation, two groups"),
    Boundary({"form": "kv_first", "kinds": "full+mamba"}, "attention between state, 37228"),
    Boundary({"form": "kv_first", "swaps": "some"}, "K and V that lie apart"),
    Boundary({"kv_layout": "LHBNC", "copies": "some"}, "heads that lie outside of blocks"),
    Boundary({"page_order": "hnd", "copies": "some"}, "head stride, 37940"),
)


def boundaries_of(op: str) -> tuple[Boundary, ...]:
    """The boundaries of the cases of `op`."""
    if op == STATEFUL_OP:
        return SCRIPT_BOUNDARIES
    if op in OP_BOUNDARIES:
        return OP_BOUNDARIES[op]
    return PLAN_BOUNDARIES if op in PLAN_OPS else BOUNDARIES


def boundary_rows(within: Space, choices: Choices) -> Iterator[Row]:
    """The boundary rows that `within` has, each completed to a whole row by `choices`."""
    for boundary in boundaries_of(within.op):
        wanted = {}
        for axis, level in boundary.levels.items():
            at = within.axes.index(axis)
            if level in within.levels[at]:
                wanted[at] = within.levels[at].index(level)
        if len(wanted) < len(boundary.levels):
            continue
        row = within.completed(wanted, functools.partial(_drawn, within, choices))
        if row is not None:
            yield within.named(row)


def _drawn(within: Space, choices: Choices, row: list[int], possible: tuple[int, ...]) -> list[int]:
    """The levels of the next axis in a drawn order, those that are drawn often mostly first."""
    _, weights = within.options(row)
    drawn = [
        -max(number(choices, 0, 1 << 16) for _ in range(min(weight, MOST_WEIGHT)))
        for weight in weights
    ]
    return [level for _, level in sorted(zip(drawn, possible, strict=True))]
