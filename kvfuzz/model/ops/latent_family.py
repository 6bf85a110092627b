"""Scenes of one row a token as a family: how they become simpler, and which of two is smaller."""

from collections.abc import Iterator

import msgspec

from kvfuzz.model import batch_edits
from kvfuzz.model.batch_passes import FILL_SEEDS, Holder
from kvfuzz.model.dtypes import DTYPES
from kvfuzz.model.fill import FP32_ONE, FP32_THREE, FP32_TWO
from kvfuzz.model.ops.family import OpFamily
from kvfuzz.model.ops.latent import V4_UNIT, LatentScene, check
from kvfuzz.model.ops.latent_axes import (
    FORMS_OF,
    LATENT_AXES,
    LATENT_RULES,
    MODEL_DTYPES,
    SIZES_OF,
)
from kvfuzz.model.ops.latent_parts import parts
from kvfuzz.model.scene import VALUES
from kvfuzz.model.search import Steps, first_of, lower_number, plainer_value, until_stable
from kvfuzz.model.tokens import REACH
from kvfuzz.model.vocabulary import BLOCK_SIZES

Search = Steps[LatentScene]

BATCHES: Holder[LatentScene] = Holder(
    block_size=lambda scene: scene.block_size,
    num_blocks=lambda scene: scene.num_blocks,
    used=lambda scene: tuple(block for each in scene.batch.sequences for block in each.block_ids),
    renumbered=lambda scene, ids, num_blocks: msgspec.structs.replace(
        scene, batch=batch_edits.renumbered(scene.batch, ids), num_blocks=num_blocks
    ),
)


def _edited(scene: LatentScene, candidates: Iterator[LatentScene]) -> Search:
    """The first of some edits that will do; where blocks lie past 2**31 bytes, also with the blocks
    moved to where they are as far as before."""

    def near_and_far() -> Iterator[LatentScene]:
        first = min(BATCHES.used(scene)) * scene.block_stride
        for edited in candidates:
            yield edited
            stride = edited.block_stride
            if first >= REACH and stride != scene.block_stride and stride > 0:
                yield BATCHES.from_block(edited, -(-first // stride))

    return (yield from first_of(scene, near_and_far()))


def _sizes(scene: LatentScene) -> Search:
    """Smaller blocks, then smaller rows, of the sizes that are drawn."""
    smaller = (size for size in BLOCK_SIZES if size < scene.block_size)
    resized = (_repadded(_with_block_size(scene, size)) for size in smaller)
    scene = yield from _edited(scene, resized)
    latents, ropes = SIZES_OF[scene.form]
    rows = [(int(latent), int(rope)) for latent in latents for rope in ropes]
    now = (scene.latent_size, scene.rope_size)
    candidates = (
        msgspec.structs.replace(scene, latent_size=latent, rope_size=rope, row_gap=0)
        for latent, rope in rows
        if latent + rope < sum(now)
    )
    return (yield from _edited(scene, candidates))


def _with_block_size(scene: LatentScene, block_size: int) -> LatentScene:
    batch = batch_edits.with_block_size(scene.batch, scene.block_size, block_size)
    return msgspec.structs.replace(scene, block_size=block_size, batch=batch)


def _repadded(scene: LatentScene) -> LatentScene:
    """A page of DeepSeek V4 ends where its unit does."""
    if scene.form != "fp8_ds_mla_v4":
        return scene
    padding = -scene.block_size * scene.token_bytes % V4_UNIT
    return msgspec.structs.replace(scene, page_padding=padding)


def _dtypes(scene: LatentScene) -> Search:
    """Plainer formats; one that is not fp8 has no scale, no ties and none to round up."""
    pairs = [(model, model) for model in MODEL_DTYPES]
    pairs += [(cache, model) for cache in DTYPES for model in MODEL_DTYPES]
    now = pairs.index((scene.cache_dtype, scene.model_dtype))

    def with_pair(cache: str, model: str) -> LatentScene:
        changed = msgspec.structs.replace(scene, cache_dtype=cache, model_dtype=model)
        if DTYPES[cache].is_quantised:
            return changed
        return msgspec.structs.replace(changed, scale=FP32_ONE, values=VALUES[0])

    return (yield from _edited(scene, (with_pair(*pair) for pair in pairs[:now])))


def _layers(scene: LatentScene) -> Search:
    """One layer alone, or the second of two."""
    plainer = ((1, 0), (2, 0), (2, 1))
    now = (scene.layers, scene.layer)
    earlier = plainer[: plainer.index(now)] if now in plainer else plainer
    return (
        yield from _edited(
            scene,
            (msgspec.structs.replace(scene, layers=n, layer=at) for n, at in earlier),
        )
    )


def _plainer_form(scene: LatentScene) -> Search:
    """An earlier form of the same op with the same rows."""
    forms = FORMS_OF[scene.op]
    earlier = forms[: forms.index(scene.form)]
    return (
        yield from _edited(scene, (msgspec.structs.replace(scene, form=form) for form in earlier))
    )


def simpler(scene: LatentScene) -> Search:
    """Candidates simpler than `scene`, pass after pass."""
    passes = (
        _layers,
        BATCHES.sequences,
        _sizes,
        BATCHES.runs,
        BATCHES.padding,
        BATCHES.other_bytes,
        BATCHES.blocks,
        BATCHES.table_width,
        _plainer_form,
        _dtypes,
        lower_number("page_padding"),
        lower_number("row_gap"),
        plainer_value("ue8m0", False, True),
        plainer_value("values", *VALUES),
        plainer_value("scale", FP32_ONE, FP32_TWO, FP32_THREE),
        plainer_value("fill_seed", *range(FILL_SEEDS)),
    )
    return until_stable(scene, passes)


def _size(scene: LatentScene) -> tuple[int, ...]:
    row = scene.latent_size + scene.rope_size
    encoded = len(msgspec.json.encode(scene))
    page = scene.block_size * row
    return (scene.layers, scene.batch.num_rows, page, scene.num_blocks, encoded)


FAMILY = OpFamily(
    ops=tuple(FORMS_OF),
    axes=LATENT_AXES,
    rules=LATENT_RULES,
    op=lambda scene: scene.op,
    check=check,
    parts=parts,
    simpler=simpler,
    size=_size,
    path=lambda scene: scene.form,
)
