"""Edits of a scene that keep it one scene: what depends on the edited part follows it.

Shortening a sequence moves padding rows, another block size moves the ends of every run, dropping
the Mamba layers of a hybrid makes it plain. An edit may still ask for the impossible; `lower` says
so.
"""

from collections.abc import Callable, Mapping
from typing import Literal, cast

import msgspec

from kvfuzz.model.case import Case
from kvfuzz.model.dtypes import DTYPES, itemsize
from kvfuzz.model.fill import FP32_ONE
from kvfuzz.model.plan import AttentionLayer, Layer, Sequence, StateLayer
from kvfuzz.model.scene import VALUES, Scene

Part = Literal["scene", "layer", "geometry", "batch"]


def part_of(scene: Scene, part: Part) -> msgspec.Struct:
    """A part of a scene by name; `layer` is the attention layer that the op works on."""
    parts: Mapping[Part, Callable[[], msgspec.Struct]] = {
        "scene": lambda: scene,
        "layer": lambda: scene.attention,
        "geometry": lambda: scene.attention.geometry,
        "batch": lambda: scene.batch,
    }
    return parts[part]()


def with_part(scene: Scene, part: Part, **changes: object) -> Scene:
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
    return cast("Scene", changed)


def with_layers(scene: Scene, layers: tuple[Layer, ...]) -> Scene:
    """The scene with other layers in its plan."""
    return msgspec.structs.replace(scene, plan=msgspec.structs.replace(scene.plan, layers=layers))


def with_sequences(scene: Scene, sequences: tuple[Sequence, ...]) -> Scene:
    """Other sequences; each padding row keeps the tokens before it, as far as there are as many."""
    tokens = sum(sequence.length for sequence in sequences)
    padding = tuple(
        min(row - index, tokens) + index for index, row in enumerate(scene.batch.padding)
    )
    return with_part(scene, "batch", sequences=sequences, padding=padding)


def run_of(scene: Scene, index: int, start: int, length: int, *, drop: int = 0) -> Scene:
    """Sequence `index` without its first `drop` blocks, with the run from `start` on and no block
    behind the run's last. Token positions count from what was token 0 before."""
    n = scene.attention.geometry.block_size
    sequence = scene.batch.sequences[index]
    shorter = msgspec.structs.replace(
        sequence,
        block_ids=sequence.block_ids[drop : -(-(start + length) // n)],
        start=start - drop * n,
        length=length,
    )
    sequences = scene.batch.sequences
    return with_sequences(scene, (*sequences[:index], shorter, *sequences[index + 1 :]))


def with_block_size(scene: Scene, block_size: int) -> Scene:
    """A smaller block size. Every run begins and ends in the blocks in which it did, at offsets
    that are as high as before where the smaller block has them."""
    n = scene.attention.geometry.block_size

    def moved(token: int) -> int:
        block, offset = divmod(token, n)
        return block * block_size + min(offset, block_size - 1)

    def shorter(sequence: Sequence) -> Sequence:
        start, length = moved(sequence.start), 0
        if sequence.length:
            length = moved(sequence.start + sequence.length - 1) - start + 1
        return msgspec.structs.replace(sequence, start=start, length=length)

    resized = with_part(scene, "geometry", block_size=block_size)
    return with_sequences(resized, tuple(map(shorter, scene.batch.sequences)))


def with_layout(scene: Scene, layout: str) -> Scene:
    """Another layout; one that is no hybrid has no Mamba layers beside it."""
    allocation = scene.attention.allocation
    kept = tuple(
        layer
        for layer in scene.plan.layers
        if layout == "hybrid"
        or not (isinstance(layer, StateLayer) and layer.allocation == allocation)
    )
    return with_part(with_layers(scene, kept), "layer", layout=layout)


def with_dtypes(scene: Scene, dtypes: tuple[str, str]) -> Scene:
    """Another (cache_dtype, model_dtype); a cache that is not fp8 has no scale and no ties."""
    cache, model = dtypes
    scene = with_part(with_part(scene, "layer", cache_dtype=cache), "scene", model_dtype=model)
    if DTYPES[cache].is_quantised:
        return scene
    return with_part(scene, "scene", k_scale=FP32_ONE, v_scale=FP32_ONE, values=VALUES[0])


def blocks_of(scene: Scene) -> tuple[int, ...]:
    """The block ids that have an owner, sequences in their order first, then Mamba layers."""
    used = [block for sequence in scene.batch.sequences for block in sequence.block_ids]
    return tuple(dict.fromkeys((*used, *scene.state_blocks)))


def renumbered(scene: Scene, ids: Mapping[int, int], num_blocks: int) -> Scene:
    """Blocks under the new `ids`, in a cache of `num_blocks` blocks."""

    sequences = tuple(
        msgspec.structs.replace(each, block_ids=tuple(ids[block] for block in each.block_ids))
        for each in scene.batch.sequences
    )
    layers = tuple(
        msgspec.structs.replace(layer, blocks=tuple(sorted(ids[block] for block in layer.blocks)))
        if isinstance(layer, StateLayer) and layer.allocation == scene.attention.allocation
        else layer
        for layer in scene.plan.layers
    )
    scene = with_part(with_layers(scene, layers), "geometry", num_blocks=num_blocks)
    return with_sequences(scene, sequences)


def with_num_blocks(scene: Scene, num_blocks: int) -> Scene:
    """Another number of blocks, all of which in use stay where they are."""
    return with_part(scene, "geometry", num_blocks=num_blocks)


def from_block(scene: Scene, first: int) -> Scene:
    """Every block id, and the number of blocks, moved by as much as the lowest id is to `first`."""
    by = first - min(blocks_of(scene))
    num_blocks = scene.attention.geometry.num_blocks + by
    return renumbered(scene, {block: block + by for block in blocks_of(scene)}, num_blocks)


def as_far(scene: Scene, case: Case, edited: Case) -> Scene:
    """The scene of `edited` with its blocks moved up until the first one lies at least as many
    bytes, and as many elements, into K as the first block of `case` does."""

    def per_block(of: Case) -> tuple[int, int]:
        field = of.bound_field(of.steps[0], "key_cache")
        stride = next(term.stride for term in field.terms if term.axis == "block")
        return stride, stride // itemsize(field.dtype)

    first = min(blocks_of(scene))
    needed = max(
        -(-first * before // now)
        for before, now in zip(per_block(case), per_block(edited), strict=True)
    )
    return from_block(edited.scene, max(needed, min(blocks_of(edited.scene))))
