"""Simpler scenes: what to try, in which order, when a failing one is to be made small.

The whole is one search (`kvfuzz.model.search`), pass after pass, that ends with a scene which no
candidate improves on. Big deletions come first. Candidates may be impossible: whoever drives the
search lowers them, and says what will do. Which values are plain is a table (`kvfuzz.model.plain`).
"""

import itertools
from collections.abc import Callable, Iterator
from functools import partial

import msgspec

from kvfuzz.errors import UsageError
from kvfuzz.model.axes import facts
from kvfuzz.model.edits import (
    as_far,
    blocks_of,
    from_block,
    renumbered,
    run_of,
    with_layers,
    with_num_blocks,
    with_part,
    with_sequences,
)
from kvfuzz.model.lower import lower
from kvfuzz.model.plain import FILL_SEEDS, SIMPLER, SIZES, Plainer
from kvfuzz.model.plan import Layer, StateLayer
from kvfuzz.model.scene import Scene
from kvfuzz.model.search import Steps, fewest, first_of, smallest, until_stable

Search = Steps[Scene]
Pass = Callable[[Scene], Search]

FEW_BLOCKS = 2
"""Up to how many blocks in use every choice of low ids is tried."""


def simplifications(scene: Scene) -> Search:
    """Candidates that are simpler than `scene`, pass after pass, until a round changes nothing."""
    return (yield from until_stable(scene, PASSES))


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
    plainer = (
        renumbered(scene, dict(zip(used, ids, strict=True)), max(ids) + 1) for ids in _low(used)
    )
    scene = yield from first_of(scene, itertools.takewhile(lambda each: each != scene, plainer))
    scene = yield from _no_spare_blocks(scene)
    first = min(blocks_of(scene))
    scene = yield from smallest(scene, first, 0, partial(from_block, scene))
    if len(used) > 1:
        for block in sorted(blocks_of(scene)):
            scene = yield from _lower_block(scene, block)
    return (yield from _no_spare_blocks(scene))


def _low(used: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    """Low ids for the blocks in `used`, the plainest first.

    One or two get any of the lowest ones: a wrong stride may relate two ids, so that neither can
    be lowered alone.
    """
    count = len(used)
    yield tuple(range(count))
    rank = {block: index for index, block in enumerate(sorted(used))}
    yield tuple(rank[block] for block in used)
    if count <= FEW_BLOCKS:
        yield from sorted(itertools.permutations(range(count + 1), count), key=max)


def _no_spare_blocks(scene: Scene) -> Search:
    num_blocks, needed = scene.attention.geometry.num_blocks, max(blocks_of(scene)) + 1
    with_blocks = partial(with_num_blocks, scene)
    return (yield from smallest(scene, num_blocks, needed, with_blocks))


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
