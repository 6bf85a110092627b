"""What is plain: the attributes of a scene with their values, the plainest first.

A further attribute of a scene is one more line of a table; `kvfuzz.model.layer_passes` tries them.
"""

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from kvfuzz.model.batch_passes import FILL_SEEDS
from kvfuzz.model.dtypes import DTYPES
from kvfuzz.model.edits import (
    Part,
    part_of,
    with_block_size,
    with_dtypes,
    with_layout,
    with_part,
)
from kvfuzz.model.fill import FP32_ONE, FP32_THREE, FP32_TWO
from kvfuzz.model.layer_scene import LayerScene
from kvfuzz.model.vocabulary import (
    BLOCK_SIZES,
    GRANULARITIES,
    HEAD_COUNTS,
    HEAD_SIZES,
    LAYOUTS,
    NESTINGS,
    ORDERS,
)


class Plainer(NamedTuple):
    """An attribute of a scene: how to read it, its values from the plainest on, how to set it."""

    name: str
    read: Callable[[Any], object]
    values: Callable[[Any], Iterable[object]]
    write: Callable[[Any, Any], LayerScene]
    moves_blocks: bool = False
    """Whether it is also tried with higher blocks, so that a case beyond 2**31 stays there."""


def attribute(part: Part, name: str, *values: object) -> Plainer:
    """An attribute that stands for itself: nothing else changes with it."""
    return Plainer(
        name,
        lambda scene: getattr(part_of(scene, part), name),
        lambda scene: values,
        lambda scene, value: with_part(scene, part, **{name: value}),
    )


def size(name: str, levels: tuple[int, ...]) -> Plainer:
    """A size of the cache: the levels below the one at hand."""
    plain = attribute("geometry", name)
    return plain._replace(
        values=lambda scene: (
            level for level in levels if level < getattr(scene.attention.geometry, name)
        )
    )


DTYPE_PAIRS = tuple(
    (cache, model)
    for cache in DTYPES
    for model in (("fp32", "bf16", "fp16") if DTYPES[cache].is_quantised else (cache,))
)

SIZES: tuple[Plainer, ...] = (
    size("num_kv_heads", HEAD_COUNTS)._replace(moves_blocks=True),
    size("head_size", HEAD_SIZES),
    size("block_size", BLOCK_SIZES)._replace(write=with_block_size),
)
"""What makes a case large."""

SIMPLER: tuple[Plainer, ...] = (
    Plainer(
        "layout",
        lambda scene: scene.attention.layout,
        lambda scene: (each for each in LAYOUTS if each != "hybrid" or scene.state_blocks),
        with_layout,
    ),
    attribute("layer", "nesting", *NESTINGS),
    attribute("layer", "page_padding", 0, 16),
    attribute("layer", "granularity", *GRANULARITIES),
    attribute("geometry", "head_size_v", 0),
    attribute("layer", "order", *ORDERS),
    Plainer(
        "dtypes",
        lambda scene: (scene.attention.cache_dtype, scene.model_dtype),
        lambda scene: DTYPE_PAIRS,
        with_dtypes,
    ),
    attribute("scene", "k_scale", FP32_ONE, FP32_TWO, FP32_THREE),
    attribute("scene", "v_scale", FP32_ONE, FP32_TWO, FP32_THREE),
    attribute("scene", "row_gap", 0),
    attribute("scene", "spare_rows", 0, 1),
    attribute("scene", "spare_entries", 0, 1),
    Plainer(
        "table_width",
        lambda scene: scene.batch.table_width,
        lambda scene: (max(len(each.block_ids) for each in scene.batch.sequences),),
        lambda scene, width: with_part(scene, "batch", table_width=width),
    ),
    attribute("scene", "fill_seed", *range(FILL_SEEDS)),
)
"""What makes a case hard to read, whatever its op."""
