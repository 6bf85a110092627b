"""Edits of a scene that keep it one scene: what depends on the edited part follows it.

Shortening a sequence moves padding rows, another block size moves the ends of every run, dropping
the Mamba layers of a hybrid makes it plain. An edit may still ask for the impossible; `lower` says
so.
"""

from collections.abc import Callable, Mapping
from typing import Any, Literal, TypeVar, cast

import msgspec

from kvfuzz.model import batch_edits
from kvfuzz.model.batch_passes import Holder
from kvfuzz.model.case import Program
from kvfuzz.model.dtypes import DTYPES, itemsize
from kvfuzz.model.fill import FP32_ONE
from kvfuzz.model.layer_scene import LayerScene
from kvfuzz.model.plan import AttentionLayer, Batch, Layer, Sequence, StateLayer

Part = Literal["scene", "layer", "geometry", "batch"]
S = TypeVar("S", bound=LayerScene)

PLAINEST_VALUES = "spread"
"""What the values of every kind of scene may be, whatever their formats."""


def part_of(scene: LayerScene, part: Part) -> msgspec.Struct:
    """A part of a scene by name; `layer` is the attention layer that the op works on."""
    parts: Mapping[Part, Callable[[], msgspec.Struct]] = {
        "scene": lambda: scene,
        "layer": lambda: scene.attention,
        "geometry": lambda: scene.attention.geometry,
        "batch": lambda: scene.batch,
    }
    return parts[part]()


def with_part(scene: S, part: Part, **changes: object) -> S:
    """The scene with some attributes of one of its parts replaced."""
    changed = msgspec.structs.replace(part_of(scene, part), **changes)
    if part == "geometry":
        return with_part(scene, "layer", geometry=changed)
    if part == "batch":
        return msgspec.structs.replace(scene, batch=changed)
    if part == "layer":
        mine = cast("AttentionLayer", changed)
        sharing = scene.plan.sharing(mine.allocation)
        # Layers that share an allocation are laid out alike.
        every = (
            msgspec.structs.replace(mine, name=layer.name) if layer in sharing else layer
            for layer in scene.plan.layers
        )
        return with_layers(scene, tuple(every))
    return cast("S", changed)


def with_layers(scene: S, layers: tuple[Layer, ...]) -> S:
    """The scene with other layers in its plan."""
    return msgspec.structs.replace(scene, plan=msgspec.structs.replace(scene.plan, layers=layers))


def with_sequences(scene: S, sequences: tuple[Sequence, ...]) -> S:
    """Other sequences; padding rows follow (`kvfuzz.model.batch_edits`)."""
    return _with_batch(scene, batch_edits.with_sequences(scene.batch, sequences))


def with_block_size(scene: S, block_size: int) -> S:
    """A smaller block size; runs follow (`kvfuzz.model.batch_edits`)."""
    before = scene.attention.geometry.block_size
    resized = with_part(scene, "geometry", block_size=block_size)
    return _with_batch(resized, batch_edits.with_block_size(scene.batch, before, block_size))


def _with_batch(scene: S, batch: Batch) -> S:
    return msgspec.structs.replace(scene, batch=batch)


def with_layout(scene: S, layout: str) -> S:
    """Another layout; one that is no hybrid has no Mamba layers beside it."""
    allocation = scene.attention.allocation
    kept = tuple(
        layer
        for layer in scene.plan.layers
        if layout == "hybrid"
        or not (isinstance(layer, StateLayer) and layer.allocation == allocation)
    )
    return with_part(with_layers(scene, kept), "layer", layout=layout)


def with_dtypes(scene: S, dtypes: tuple[str, str]) -> S:
    """Another (cache_dtype, model_dtype); a cache that is not fp8 has no scale and no ties."""
    cache, model = dtypes
    scene = with_part(with_part(scene, "layer", cache_dtype=cache), "scene", model_dtype=model)
    if DTYPES[cache].is_quantised:
        return scene
    return with_part(scene, "scene", k_scale=FP32_ONE, v_scale=FP32_ONE, values=PLAINEST_VALUES)


def blocks_of(scene: LayerScene) -> tuple[int, ...]:
    """The block ids that have an owner, sequences in their order first, then Mamba layers."""
    used = [block for sequence in scene.batch.sequences for block in sequence.block_ids]
    return tuple(dict.fromkeys((*used, *scene.state_blocks)))


def renumbered(scene: S, ids: Mapping[int, int], num_blocks: int) -> S:
    """Blocks under the new `ids`, in a cache of `num_blocks` blocks."""
    layers = tuple(
        msgspec.structs.replace(layer, blocks=tuple(sorted(ids[block] for block in layer.blocks)))
        if isinstance(layer, StateLayer) and layer.allocation == scene.attention.allocation
        else layer
        for layer in scene.plan.layers
    )
    scene = with_part(with_layers(scene, layers), "geometry", num_blocks=num_blocks)
    return _with_batch(scene, batch_edits.renumbered(scene.batch, ids))


BATCHES: Holder[Any] = Holder(
    block_size=lambda scene: scene.attention.geometry.block_size,
    num_blocks=lambda scene: scene.attention.geometry.num_blocks,
    used=blocks_of,
    renumbered=renumbered,
)
"""How a scene holds its batch."""


def as_far(edited: S, first: int, before: Program, after: Program) -> S:
    """`edited`, lowered as `after`, with its blocks moved up until the first one lies at least as
    many bytes, and as many elements, into K as block `first` of the case `before` does."""

    def per_block(of: Program) -> tuple[int, int]:
        field = of.bound_field(of.steps[0], "key_cache")
        stride = next(term.stride for term in field.terms if term.axis == "block")
        return stride, stride // itemsize(field.dtype)

    needed = max(
        -(-first * here // there)
        for here, there in zip(per_block(before), per_block(after), strict=True)
    )
    moved: S = BATCHES.from_block(edited, max(needed, min(blocks_of(edited))))
    return moved
