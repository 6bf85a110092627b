"""Scenes for every combination of layout attributes, from the vocabulary alone: no strategy."""

import itertools

from msgspec.structs import replace

from kvfuzz.model.layout import Geometry
from kvfuzz.model.plan import AttentionLayer, Batch, Plan, Sequence, StateLayer
from kvfuzz.model.scene import Scene
from kvfuzz.model.vocabulary import (
    GRANULARITIES,
    LAYOUTS,
    NESTINGS,
    ORDERS,
    PAGES,
    VALUE_SIZES,
    conflict,
)

LEVELS = {
    "layout": LAYOUTS,
    "order": ORDERS,
    "nesting": NESTINGS,
    "page": PAGES,
    "value_size": VALUE_SIZES,
    "granularity": GRANULARITIES,
    "cache_dtype": ("bf16", "e4m3fnuz"),
}
COMBINATIONS = [
    combination
    for levels in itertools.product(*LEVELS.values())
    if conflict(combination := dict(zip(LEVELS, levels, strict=True))) is None
]
VALUE_SIZE = {"same": 0, "narrower": 16, "wider": 48}
PADDING = {"bf16": (16, 6), "e4m3fnuz": (16, 4)}
"""Bytes behind a page: a multiple of 16, and an odd one of what has to be aligned."""
ONE, K_SCALE, V_SCALE = 0x3F800000, 0x3F99999A, 0x3DCCCCCD


def name_of(combination):
    """The levels, for the name of a test."""
    return "-".join(combination.values())


def covering(size):
    """Combinations that show every `size` levels that any combination shows together."""

    def shown(combination):
        return set(itertools.combinations(combination.items(), size))

    missing = set().union(*map(shown, COMBINATIONS))
    chosen = []
    while missing:
        chosen.append(max(COMBINATIONS, key=lambda each: len(missing & shown(each))))
        missing -= shown(chosen[-1])
    return chosen


def layer_of(combination, *, heads=2, blocks=5, odd=False, name="layer.1"):
    """An attention layer with the levels of `combination`; `odd` pads oddly."""
    padding = PADDING[combination["cache_dtype"]][odd]
    return AttentionLayer(
        name,
        "kv_cache",
        combination["layout"],
        combination["order"],
        Geometry(blocks, 16, heads, 32, VALUE_SIZE[combination["value_size"]]),
        combination["cache_dtype"],
        nesting=combination["nesting"],
        page_padding=padding if combination["page"] == "padded" else 0,
        granularity=combination["granularity"],
    )


def scene_of(combination, op, number=0):
    """Two runs of tokens of the middle one of three layers; of every other plain one, of one.

    `number` varies what the combination leaves open.
    """
    odd = number % 2 == 1
    layer = layer_of(combination, odd=odd)
    layers = [layer]
    if odd or layer.nesting != "layer_first":
        layers = [replace(layer, name="layer.0"), layer, replace(layer, name="layer.2")]
    if layer.layout == "hybrid":
        layers.append(StateLayer("layer.3", "kv_cache", (0, 2)))
    fp8, write = layer.cache_dtype != "bf16", op == "reshape_and_cache"
    return Scene(
        op=op,
        layer=layer.name,
        plan=Plan(tuple(layers)),
        batch=Batch(
            (Sequence((3, 1), 13, 6), Sequence((4,), 0, 2)),
            padding=(0, 4) if write else (),
            table_width=3,
        ),
        model_dtype="bf16",
        k_scale=K_SCALE if fp8 else ONE,
        v_scale=V_SCALE if fp8 else ONE,
        row_gap=24 if write else 0,
        fill_seed=number,
    )
