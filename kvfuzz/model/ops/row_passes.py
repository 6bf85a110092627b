"""Simpler scenes of one row a token, whatever the op: fewer layers, smaller rows, plainer formats.

A scene has the attributes of `kvfuzz.model.ops.latent.LatentScene` that are about its pages.
"""

from collections.abc import Iterator
from typing import Any, TypeVar

import msgspec

from kvfuzz.model import batch_edits
from kvfuzz.model.batch_passes import Holder
from kvfuzz.model.dtypes import DTYPES
from kvfuzz.model.fill import FP32_ONE
from kvfuzz.model.ops.latent import V4_UNIT
from kvfuzz.model.ops.latent_axes import MODEL_DTYPES, SIZES_OF
from kvfuzz.model.scene import VALUES
from kvfuzz.model.search import Steps, first_of
from kvfuzz.model.tokens import REACH
from kvfuzz.model.vocabulary import BLOCK_SIZES

S = TypeVar("S", bound=Any)

BATCHES: Holder[Any] = Holder(
    block_size=lambda scene: scene.block_size,
    num_blocks=lambda scene: scene.num_blocks,
    used=lambda scene: tuple(block for each in scene.batch.sequences for block in each.block_ids),
    renumbered=lambda scene, ids, num_blocks: msgspec.structs.replace(
        scene, batch=batch_edits.renumbered(scene.batch, ids), num_blocks=num_blocks
    ),
)


def edited(scene: S, candidates: Iterator[S]) -> Steps[S]:
    """The first of some edits that will do; where blocks lie past 2**31 bytes, also with the blocks
    moved to where they are as far as before."""

    def near_and_far() -> Iterator[S]:
        first = min(BATCHES.used(scene)) * scene.block_stride
        for each in candidates:
            yield each
            stride = each.block_stride
            if first >= REACH and stride != scene.block_stride and stride > 0:
                yield BATCHES.from_block(each, -(-first // stride))

    return (yield from first_of(scene, near_and_far()))


def sizes(scene: S) -> Steps[S]:
    """Smaller blocks, then smaller rows, of the sizes that are drawn."""
    smaller = (size for size in BLOCK_SIZES if size < scene.block_size)
    resized = (_repadded(_with_block_size(scene, size)) for size in smaller)
    scene = yield from edited(scene, resized)
    latents, ropes = SIZES_OF[scene.form]
    rows = [(int(latent), int(rope)) for latent in latents for rope in ropes]
    now = (scene.latent_size, scene.rope_size)
    candidates = (
        msgspec.structs.replace(scene, latent_size=latent, rope_size=rope, row_gap=0)
        for latent, rope in rows
        if latent + rope < sum(now)
    )
    return (yield from edited(scene, candidates))


def _with_block_size(scene: S, block_size: int) -> S:
    batch = batch_edits.with_block_size(scene.batch, scene.block_size, block_size)
    return msgspec.structs.replace(scene, block_size=block_size, batch=batch)


def _repadded(scene: S) -> S:
    """A page of DeepSeek V4 ends where its unit does."""
    if scene.form != "fp8_ds_mla_v4":
        return scene
    padding = -scene.block_size * scene.token_bytes % V4_UNIT
    return msgspec.structs.replace(scene, page_padding=padding)


def dtypes(scene: S) -> Steps[S]:
    """Plainer formats; one that is not fp8 has no scale, no ties and none to round up."""
    pairs = [(model, model) for model in MODEL_DTYPES]
    pairs += [(cache, model) for cache in DTYPES for model in MODEL_DTYPES]
    now = pairs.index((scene.cache_dtype, scene.model_dtype))

    def with_pair(cache: str, model: str) -> S:
        changed = msgspec.structs.replace(scene, cache_dtype=cache, model_dtype=model)
        if DTYPES[cache].is_quantised:
            return changed
        return msgspec.structs.replace(changed, scale=FP32_ONE, values=VALUES[0])

    return (yield from edited(scene, (with_pair(*pair) for pair in pairs[:now])))


def layers(scene: S) -> Steps[S]:
    """One layer alone, or the second of two."""
    plainer = ((1, 0), (2, 0), (2, 1))
    now = (scene.layers, scene.layer)
    earlier = plainer[: plainer.index(now)] if now in plainer else plainer
    return (
        yield from edited(
            scene,
            (msgspec.structs.replace(scene, layers=n, layer=at) for n, at in earlier),
        )
    )
