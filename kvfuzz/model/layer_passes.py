"""Simpler scenes of an op on the pages of one layer: what to try, in which order.

The whole is one search (`kvfuzz.model.search`), pass after pass, that ends with a scene which no
candidate improves on. Big deletions come first. Candidates may be impossible: whoever drives the
search lowers them, and says what will do. Which values are plain is a table (`kvfuzz.model.plain`);
how a batch shrinks is `kvfuzz.model.batch_passes`.
"""

import itertools
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import msgspec

from kvfuzz.errors import UsageError
from kvfuzz.model import tokens
from kvfuzz.model.case import Program
from kvfuzz.model.edits import BATCHES, S, as_far, blocks_of, with_layers
from kvfuzz.model.plain import SIMPLER, SIZES, Plainer
from kvfuzz.model.plan import Layer, StateLayer
from kvfuzz.model.search import Steps, fewest, first_of, until_stable

Lower = Callable[[Any], Program]
"""The case of a scene. Raises UsageError where the scene is impossible."""


def simplifications(scene: S, lower: Lower, own: tuple[Plainer, ...]) -> Steps[S]:
    """Candidates that are simpler than `scene`, pass after pass, until a round changes nothing.

    `own` are the attributes that scenes of its kind have beside those of every layer's.
    """
    passes = (
        _layers,
        BATCHES.sequences,
        partial(_plainer_all, lower, SIZES),
        BATCHES.runs,
        BATCHES.padding,
        BATCHES.other_bytes,
        _state_blocks,
        BATCHES.blocks,
        partial(_plainer_all, lower, (*SIMPLER, *own)),
    )
    return (yield from until_stable(scene, passes))


def _plainer(scene: S, lower: Lower, each: Plainer) -> Steps[S]:
    current = each.read(scene)
    values = itertools.takewhile(lambda value: value != current, each.values(scene))
    edited: Iterator[Any] = (each.write(scene, value) for value in values)
    if each.moves_blocks:
        edited = (moved for one in edited for moved in _near_and_far(scene, lower, one))
    found: S = yield from first_of(scene, edited)
    return found


def _near_and_far(scene: S, lower: Lower, edited: S) -> Iterator[S]:
    """An edited scene; where its blocks lie past 2**31, a second one that reaches as far."""
    yield edited
    try:
        case = lower(scene)
        if tokens.reach(case) != "near":
            yield as_far(edited, min(blocks_of(scene)), case, lower(edited))
    except UsageError:
        return  # the edit is impossible, near or far


def _plainer_all(lower: Lower, table: tuple[Plainer, ...], scene: S) -> Steps[S]:
    for each in table:
        scene = yield from _plainer(scene, lower, each)
    return scene


def _layers(scene: S) -> Steps[S]:
    """Drop the layers that the op does not work on."""

    def with_others(kept: tuple[Layer, ...]) -> S:
        mine = (layer for layer in scene.plan.layers if layer is scene.attention or layer in kept)
        return with_layers(scene, tuple(mine))

    others = tuple(layer for layer in scene.plan.layers if layer is not scene.attention)
    return (yield from fewest(scene, others, with_others))


def _state_blocks(scene: S) -> Steps[S]:
    """Leave each Mamba layer as few blocks as possible."""

    def with_blocks(at: S, index: int, kept: tuple[int, ...]) -> S:
        layers = list(at.plan.layers)
        layers[index] = msgspec.structs.replace(layers[index], blocks=kept)
        return with_layers(at, tuple(layers))

    for index, layer in enumerate(scene.plan.layers):
        if isinstance(layer, StateLayer):
            rebuild = partial(with_blocks, scene, index)
            scene = yield from fewest(scene, layer.blocks, rebuild, least=1)
    return scene
