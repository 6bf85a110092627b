"""Simpler scenes: what to try, in which order, when a failing one is to be made small.

The whole is one search (`kvfuzz.model.search`), pass after pass, that ends with a scene which no
candidate improves on. Big deletions come first. Candidates may be impossible: whoever drives the
search lowers them, and says what will do. Which values are plain is a table (`kvfuzz.model.plain`);
how a batch shrinks is `kvfuzz.model.batch_passes`.
"""

import itertools
from collections.abc import Callable, Iterator
from functools import partial

import msgspec

from kvfuzz.errors import UsageError
from kvfuzz.model.axes import facts
from kvfuzz.model.edits import BATCHES, as_far, with_layers
from kvfuzz.model.lower import lower
from kvfuzz.model.plain import SIMPLER, SIZES, Plainer
from kvfuzz.model.plan import Layer, StateLayer
from kvfuzz.model.scene import Scene
from kvfuzz.model.search import Steps, fewest, first_of, until_stable

Search = Steps[Scene]
Pass = Callable[[Scene], Search]


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


PASSES: tuple[Pass, ...] = (
    _layers,
    BATCHES.sequences,
    partial(_plainer_all, SIZES),
    BATCHES.runs,
    BATCHES.padding,
    BATCHES.other_bytes,
    _state_blocks,
    BATCHES.blocks,
    partial(_plainer_all, SIMPLER),
)
"""In the order of what they are likely to save."""
