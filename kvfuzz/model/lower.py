"""Lower a scene to a case: the cache with its fields and views, and what the op adds.

A write case stores a batch of new tokens into the cache; a gather case copies runs of cached
tokens into a dense workspace. Both fill the cache with hash bytes first, so that every byte that
is not named must survive.
"""

from kvfuzz.model.batch_metadata import gathered, slot_mapping
from kvfuzz.model.cache_parts import cache_parts
from kvfuzz.model.case import Case
from kvfuzz.model.fill import ByteFill
from kvfuzz.model.layout import Field
from kvfuzz.model.parts import (
    Parts,
    Setting,
    activation_fill,
    gather_parts,
    group_fill,
    write_parts,
)
from kvfuzz.model.scales import SCALES, Scales, inline_scales, made_scales, scale_view, scales_of
from kvfuzz.model.scene import QUANT_OP, Scene, check
from kvfuzz.model.views import SPELT


def lower(scene: Scene) -> Case:
    """The case of `scene`. Raises UsageError where the scene is impossible."""
    check(scene)
    cache = cache_parts(scene.plan, scene.attention, scene.fill_seed)
    scales = _scales(scene, cache.inline)
    parts = OPS[scene.op](scene)
    return Case(
        buffers=(
            cache.buffer,
            *(each.buffer for each in scales if each.buffer),
            *parts.buffers,
        ),
        fields=(
            *cache.states,
            cache.k,
            cache.v,
            *(each.field for each in scales),
            *cache.others,
            *parts.fields,
        ),
        tensors=(*cache.views, *(each.view for each in scales), *parts.tensors),
        steps=(parts.step,),
        scene=scene,
    )


def _scales(scene: Scene, inline: tuple[Field, ...]) -> list[Scales]:
    layer, seed = scene.attention, scene.fill_seed
    if scene.op == QUANT_OP:  # the op makes them
        if inline:
            return [Scales(None, each, scale_view(each, layer)) for each in inline]
        return [made_scales(name, layer, ByteFill(seed)) for name in SCALES]
    least = (scene.k_scale, scene.v_scale)
    if inline:
        return [
            inline_scales(at, layer, bits, seed) for at, bits in zip(inline, least, strict=True)
        ]
    return [scales_of(name, layer, bits, seed) for name, bits in zip(SCALES, least, strict=True)]


def _setting(scene: Scene) -> Setting:
    layer = scene.attention
    return Setting(
        layer.geometry,
        layer.cache_dtype,
        scene.model_dtype,
        SPELT[layer.order],
        scene.fill_seed,
        scene.spare_rows,
        scene.spare_entries,
    )


def _write(scene: Scene) -> Parts:
    mapping = slot_mapping(scene.batch, scene.attention.geometry.block_size)
    setting = _setting(scene)
    if scene.op == QUANT_OP:
        g = scene.attention.geometry
        sizes = (g.head_size, g.value_size)
        k_fill, v_fill = (group_fill(setting, size, scene.values) for size in sizes)
    else:
        scales = (scene.k_scale, scene.v_scale)
        k_fill, v_fill = (activation_fill(setting, each, scene.values) for each in scales)
    return write_parts(setting, mapping, (k_fill, v_fill), scene.row_gap, scene.op)


def _gather(scene: Scene) -> Parts:
    num_blocks = scene.attention.geometry.num_blocks
    return gather_parts(_setting(scene), *gathered(scene.batch, num_blocks, scene.fill_seed))


OPS = {"reshape_and_cache": _write, "gather_cache": _gather, QUANT_OP: _write}
"""By op, what it adds."""
