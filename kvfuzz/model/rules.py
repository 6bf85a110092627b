"""Which levels of the axes go together: what is possible at all, before any target's domain.

A rule is about a few axes and says which combinations of their levels a case can show. Strategies
draw by the rules, covering rows are complete by them, and the share of covered facts has what they
leave as its denominator. A test holds drawing to them: a scene shows the row that it was drawn by.
Cases that were edited or reduced may show what no row has.
"""

import functools
from collections.abc import Callable

import msgspec

from kvfuzz.model.dtypes import DTYPES
from kvfuzz.model.vocabulary import (
    CONFLICTS,
    HEADS_OUTSIDE,
    SPLIT_DIM,
    SPLIT_TOKEN,
    conflict,
    x_of,
)

READ_SCALES = ("reshape_and_cache", "gather_cache")
"""The ops that are handed scales; per_token_head_quant makes them."""

BLOCK_ELEMENTS = 1 << 16
"""Most elements of one side of one block: a case stays small enough for hundreds a second."""


class Rule(msgspec.Struct, frozen=True):
    """`allows(*levels)` says whether the levels of `axes`, in this order, can be shown together.

    `ops` limits the rule to some ops; empty means all.
    """

    axes: tuple[str, ...]
    allows: Callable[..., bool]
    ops: tuple[str, ...] = ()


def _is_quantised(cache_dtype: str) -> bool:
    return DTYPES[cache_dtype].is_quantised


def _run_divides(order: str, cache_dtype: str, block_size: str) -> bool:
    """Some orders split a block of V into runs of x tokens."""
    return order not in SPLIT_TOKEN or int(block_size) % x_of(cache_dtype) == 0


def _chunk_divides(order: str, cache_dtype: str, head_size: str) -> bool:
    """Some orders split a head of K into chunks of x elements."""
    return order not in SPLIT_DIM or int(head_size) % x_of(cache_dtype) == 0


def _can_be_narrower(cache_dtype: str, head_size: str, value_size: str) -> bool:
    """Head sizes of V are drawn in steps of x, which suits every order."""
    return value_size != "narrower" or int(head_size) > x_of(cache_dtype)


def _is_possible(axes: tuple[str, ...], *levels: str) -> bool:
    return conflict(dict(zip(axes, levels, strict=True))) is None


def _offset_fits(block_size: str, offset: str) -> bool:
    """Whether a block has a token at `offset`: at its edge, the first one, or inside."""
    return {"edge": 1, "first": 2, "inside": 3}[offset] <= int(block_size)


RULES: tuple[Rule, ...] = (
    *(
        Rule(tuple(combination), functools.partial(_is_possible, tuple(combination)))
        for combination, _ in CONFLICTS
    ),
    # With one head, heads outside of blocks are nothing else.
    Rule(("nesting", "num_kv_heads"), lambda nest, h: nest != "head_first" or int(h) > 1),
    # Far away with heads outside of blocks is a cache of all its heads times as much.
    Rule(("nesting", "reach"), lambda nest, reach: reach == "near" or nest not in HEADS_OUTSIDE),
    # Scales for each block are written out, and inline ones laid over bytes that are held.
    Rule(
        ("granularity", "reach"),
        lambda g, reach: reach == "near" or g in ("tensor", "head"),
        READ_SCALES,
    ),
    Rule(
        ("granularity", "values"),
        lambda granularity, values: granularity == "tensor" or values != "ties",
        ("reshape_and_cache",),
    ),
    Rule(("cache_dtype", "head_size", "value_size"), _can_be_narrower),
    # A cache that is not quantised has the model's dtype, and no scale.
    Rule(
        ("cache_dtype", "model_dtype"), lambda cache, model: _is_quantised(cache) or cache == model
    ),
    Rule(
        ("cache_dtype", "scale"),
        lambda cache, scale: _is_quantised(cache) == (scale != "none"),
        READ_SCALES,
    ),
    Rule(
        ("cache_dtype", "values"),
        lambda cache, values: _is_quantised(cache) == (values != "bytes"),
        ("reshape_and_cache",),
    ),
    # With one token a block, HND is NHD.
    Rule(("order", "block_size"), lambda order, size: order != "hnd" or int(size) > 1),
    Rule(("order", "cache_dtype", "block_size"), _run_divides),
    Rule(("order", "cache_dtype", "head_size"), _chunk_divides),
    Rule(
        ("block_size", "num_kv_heads", "head_size"),
        lambda n, h, d: int(n) * int(h) * int(d) <= BLOCK_ELEMENTS,
    ),
    Rule(
        ("layout", "order", "strides"),
        lambda layout, order, strides: (
            (strides == "dense") == (layout == "kv_first" and order != "hnd")
        ),
    ),
    # Where an element is one byte, bytes are elements.
    Rule(
        ("cache_dtype", "reach"),
        lambda c, reach: not (_is_quantised(c) and reach == "past_2g_bytes"),
    ),
    Rule(("reach", "block_ids"), lambda reach, ids: reach == "near" or ids != "identity"),
    Rule(("blocks_used", "sequences"), lambda used, sequences: used != "1" or sequences == "1"),
    Rule(
        ("blocks_used", "block_ids"),
        lambda used, ids: used != "1" or ids in ("identity", "adjacent"),
    ),
    # Whether groups lie apart shows in the second group, which a run from the start of its sequence
    # reaches after so many blocks that it is left to batches of several sequences.
    Rule(
        ("block_ids", "sequences", "start_block"),
        lambda ids, sequences, start: (
            ids not in ("split_4", "split_12") or sequences != "1" or start == "later"
        ),
        ("gather_cache",),
    ),
    # Half precision ends where e5m2 does.
    Rule(
        ("cache_dtype", "model_dtype", "values"),
        lambda cache, model, values: (
            values != "beyond" or model != "fp16" or not cache.startswith("e5m2")
        ),
        ("reshape_and_cache",),
    ),
    # Behind the slots of a write lies padding for every row of key.
    Rule(
        ("row_count", "metadata"),
        lambda rows, metadata: rows == "exact" or metadata == "wider",
        ("reshape_and_cache", "per_token_head_quant"),
    ),
    Rule(("block_size", "first_offset"), lambda n, at: at == "edge" or int(n) > 1),
    Rule(("block_size", "last_offset"), _offset_fits),
    Rule(
        ("blocks_used", "first_offset", "last_offset"),
        lambda used, first, last: (used, first, last) != ("1", "inside", "first"),
    ),
)
"""Every rule."""
