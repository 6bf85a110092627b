"""Simpler scenes: what to try, in which order, when a failing one is to be made small.

The whole is one search (`kvfuzz.model.search`), pass after pass, that ends with a scene which no
candidate improves on. Big deletions come first. Candidates may be impossible: whoever drives the
search lowers them, and says what will do.

SIZES and SIMPLER are the tables of attributes with their values, the plainest first: a further
attribute of a scene is one more line.
"""

import itertools
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any, NamedTuple

import msgspec

from kvfuzz.errors import UsageError
from kvfuzz.model.axes import BLOCK_SIZES, HEAD_COUNTS, HEAD_SIZES, facts
from kvfuzz.model.dtypes import DTYPES
from kvfuzz.model.edits import (
    ONE,
    Part,
    as_far,
    blocks_of,
    part_of,
    renumbered,
    run_of,
    shifted,
    with_block_size,
    with_dtypes,
    with_layers,
    with_layout,
    with_part,
    with_sequences,
)
from kvfuzz.model.lower import lower
from kvfuzz.model.plan import Layer, StateLayer
from kvfuzz.model.scene import VALUES, Scene
from kvfuzz.model.search import Steps, fewest, first_of, smallest
from kvfuzz.model.vocabulary import GRANULARITIES, LAYOUTS, NESTINGS, ORDERS

Search = Steps[Scene]
Pass = Callable[[Scene], Search]

TWO, THREE = 0x40000000, 0x40400000
"""Bit patterns of 2.0 and of 3.0, whose reciprocal is not exact."""

FILL_SEEDS = 8
"""How many fill seeds are as plain as any other."""


class Plainer(NamedTuple):
    """An attribute of a scene: how to read it, its values from the plainest on, how to set it."""

    read: Callable[[Scene], object]
    values: Callable[[Scene], Iterable[object]]
    write: Callable[[Scene, Any], Scene]
    moves_blocks: bool = False
    """Whether it is also tried with higher blocks, so that a case beyond 2**31 stays there."""


def attribute(part: Part, name: str, *values: object) -> Plainer:
    """An attribute that stands for itself: nothing else changes with it."""
    return Plainer(
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
    for model in (("fp32", "bf16", "fp16") if DTYPES[cache].is_fp8 else (cache,))
)

SIZES: tuple[Plainer, ...] = (
    size("num_kv_heads", HEAD_COUNTS)._replace(moves_blocks=True),
    size("head_size", HEAD_SIZES),
    size("block_size", BLOCK_SIZES)._replace(write=with_block_size),
)
"""What makes a case large."""

SIMPLER: tuple[Plainer, ...] = (
    Plainer(
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
        lambda scene: (scene.attention.cache_dtype, scene.model_dtype),
        lambda scene: DTYPE_PAIRS,
        with_dtypes,
    ),
    attribute("scene", "k_scale", ONE, TWO, THREE),
    attribute("scene", "v_scale", ONE, TWO, THREE),
    attribute("scene", "values", *VALUES),
    attribute("scene", "row_gap", 0),
    Plainer(
        lambda scene: scene.batch.table_width,
        lambda scene: (max(len(each.block_ids) for each in scene.batch.sequences),),
        lambda scene, width: with_part(scene, "batch", table_width=width),
    ),
    attribute("scene", "fill_seed", *range(FILL_SEEDS)),
)
"""What makes a case hard to read."""


def simplifications(scene: Scene) -> Search:
    """Candidates that are simpler than `scene`, pass after pass, until a round changes nothing."""
    seen: list[Scene] = []
    while scene not in seen:
        seen.append(scene)
        for each in PASSES:
            scene = yield from each(scene)
    return scene


def _plainer(scene: Scene, each: Plainer) -> Search:
    current = each.read(scene)
    values = itertools.takewhile(lambda value: value != current, each.values(scene))
    edited = (each.write(scene, value) for value in values)
    if each.moves_blocks:
        edited = (near_or_far for one in edited for near_or_far in _near_and_far(scene, one))
    return (yield from first_of(scene, edited))


def _near_and_far(scene: Scene, edited: Scene) -> Iterator[Scene]:
    """An edited scene; where its blocks lie past 2**31, a second one that reaches as far."""
    yield edited
    try:
        case = lower(scene)
        if facts(case)["reach"] != "near":
            yield as_far(scene, case, lower(edited))
    except UsageError:
        return  # the edit is impossible, near or far


def _plainer_all(table: tuple[Plainer, ...], scene: Scene) -> Search:
    for each in table:
        scene = yield from _plainer(scene, each)
    return scene


def _layers(scene: Scene) -> Search:
    """Drop the layers that the op does not work on."""

    def with_others(kept: tuple[Layer, ...]) -> Scene:
        mine = (layer for layer in scene.plan.layers if layer is scene.attention or layer in kept)
        return with_layers(scene, tuple(mine))

    others = tuple(layer for layer in scene.plan.layers if layer is not scene.attention)
    return (yield from fewest(scene, others, with_others))


def _state_blocks(scene: Scene) -> Search:
    """Leave each Mamba layer as few blocks as possible."""

    def with_blocks(at: Scene, index: int, kept: tuple[int, ...]) -> Scene:
        layers = list(at.plan.layers)
        layers[index] = msgspec.structs.replace(layers[index], blocks=kept)
        return with_layers(at, tuple(layers))

    for index, layer in enumerate(scene.plan.layers):
        if isinstance(layer, StateLayer):
            rebuild = partial(with_blocks, scene, index)
            scene = yield from fewest(scene, layer.blocks, rebuild, least=1)
    return scene


def _sequences(scene: Scene) -> Search:
    sequences = scene.batch.sequences
    return (yield from fewest(scene, sequences, partial(with_sequences, scene), least=1))


def _runs(scene: Scene) -> Search:
    """Shorten each run from its end, then from its start; then let it start early."""
    for index in range(len(scene.batch.sequences)):
        scene = yield from _run(scene, index)
    return scene


def _run(scene: Scene, index: int) -> Search:
    n = scene.attention.geometry.block_size
    run = scene.batch.sequences[index]
    needed = -(-(run.start + run.length) // n)
    if needed < len(run.block_ids):
        scene = yield from first_of(scene, [run_of(scene, index, run.start, run.length)])
    at = partial(run_of, scene, index)
    scene = yield from smallest(scene, run.length, 1, lambda length: at(run.start, length))
    run, at = scene.batch.sequences[index], partial(run_of, scene, index)
    end = run.start + run.length
    scene = yield from smallest(scene, run.length, 1, lambda length: at(end - length, length))
    run, at = scene.batch.sequences[index], partial(run_of, scene, index)
    before = run.start // n
    scene = yield from smallest(
        scene, before, 0, lambda blocks: at(run.start, run.length, drop=before - blocks)
    )
    run, at = scene.batch.sequences[index], partial(run_of, scene, index)
    edge = run.start // n * n
    return (
        yield from smallest(
            scene, run.start - edge, 0, lambda offset: at(edge + offset, run.length)
        )
    )


def _padding(scene: Scene) -> Search:
    """As few padding rows as possible, at the front."""

    def padded(rows: tuple[int, ...]) -> Scene:
        before = {row: row - index for index, row in enumerate(scene.batch.padding)}
        kept = tuple(before[row] + index for index, row in enumerate(rows))
        return with_part(scene, "batch", padding=kept)

    scene = yield from fewest(scene, scene.batch.padding, padded)
    front = tuple(range(len(scene.batch.padding)))
    return (yield from first_of(scene, [with_part(scene, "batch", padding=front)]))


def _blocks(scene: Scene) -> Search:
    """Low block ids without gaps, in the order of use if that will do, and no spare block."""
    used = blocks_of(scene)
    orders = (used, sorted(used))
    plainer = (
        renumbered(scene, {block: index for index, block in enumerate(order)}, len(used))
        for order in orders
    )
    scene = yield from first_of(scene, itertools.takewhile(lambda each: each != scene, plainer))
    scene = yield from _no_spare_blocks(scene)
    first = min(blocks_of(scene))
    scene = yield from smallest(scene, first, 0, partial(_from_block, scene))
    if len(used) > 1:
        for block in sorted(blocks_of(scene)):
            scene = yield from _lower_block(scene, block)
    return (yield from _no_spare_blocks(scene))


def _no_spare_blocks(scene: Scene) -> Search:
    num_blocks, needed = scene.attention.geometry.num_blocks, max(blocks_of(scene)) + 1
    with_blocks = partial(_with_num_blocks, scene)
    return (yield from smallest(scene, num_blocks, needed, with_blocks))


def _with_num_blocks(scene: Scene, num_blocks: int) -> Scene:
    return with_part(scene, "geometry", num_blocks=num_blocks)


def _from_block(scene: Scene, first: int) -> Scene:
    return shifted(scene, first - min(blocks_of(scene)))


def _lower_block(scene: Scene, block: int) -> Search:
    """Give `block` a lower id that is free."""
    lower_ids = sorted(each for each in blocks_of(scene) if each < block)

    def moved(number: int) -> Scene:
        free = number
        for taken in lower_ids:
            free += taken <= free
        ids = {each: each for each in blocks_of(scene)} | {block: free}
        return renumbered(scene, ids, scene.attention.geometry.num_blocks)

    return (yield from smallest(scene, block - len(lower_ids), 0, moved))


def _other_bytes(scene: Scene) -> Search:
    """One token with other bytes: where a failure depends on those, more tokens were more tries."""
    if scene.batch.num_rows == 1:
        return scene
    first = scene.batch.sequences[0]
    one = with_part(scene, "batch", padding=())
    token = msgspec.structs.replace(first, block_ids=first.block_ids[:1], start=0, length=1)
    one = with_sequences(one, (token,))
    tries = (with_part(one, "scene", fill_seed=seed) for seed in range(FILL_SEEDS))
    return (yield from first_of(scene, tries))


PASSES: tuple[Pass, ...] = (
    _layers,
    _sequences,
    partial(_plainer_all, SIZES),
    _runs,
    _padding,
    _other_bytes,
    _state_blocks,
    _blocks,
    partial(_plainer_all, SIMPLER),
)
"""In the order of what they are likely to save."""
