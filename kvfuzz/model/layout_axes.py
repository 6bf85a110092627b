"""The axes of how the K and V pages of a layer are laid out, for every op that is handed them."""

from kvfuzz.model import layout_facts
from kvfuzz.model.axis import Axis
from kvfuzz.model.dtypes import DTYPES, FLOATS
from kvfuzz.model.vocabulary import (
    BLOCK_SIZES,
    HEAD_COUNTS,
    HEAD_SIZES,
    LARGEST,
    LAYOUTS,
    NESTINGS,
    ORDERS,
    PAGES,
    VALUE_SIZES,
)

LAYOUT_AXES: tuple[Axis, ...] = (
    Axis("layout", LAYOUTS, layout_facts.layout),
    Axis("order", ORDERS, layout_facts.order),
    Axis("nesting", NESTINGS, layout_facts.nesting),
    Axis("page", PAGES, layout_facts.page),
    Axis("value_size", VALUE_SIZES, layout_facts.value_size),
)

CACHE_DTYPE = Axis(
    "cache_dtype",
    tuple(DTYPES),
    lambda case: layout_facts.key_cache(case).dtype,
    {
        "reshape_and_cache": FLOATS,
        "gather_cache": FLOATS,
        "per_token_head_quant": tuple(LARGEST),
    },
)
"""Whole pages are of any format."""

SIZE_AXES: tuple[Axis, ...] = (
    Axis(
        "block_size",
        tuple(map(str, BLOCK_SIZES)),
        lambda case: str(layout_facts.key_cache(case).extents["token"]),
    ),
    Axis(
        "num_kv_heads",
        tuple(map(str, HEAD_COUNTS)),
        lambda case: str(layout_facts.key_cache(case).extents["head"]),
    ),
    Axis(
        "head_size",
        tuple(map(str, HEAD_SIZES)),
        lambda case: str(layout_facts.key_cache(case).extents["dim"]),
    ),
)

STRIDES = Axis("strides", ("dense", "not_dense"), layout_facts.strides)
