"""Cache plans of real models: their layers, grouped and placed as an engine does."""

import msgspec

from kvfuzz.errors import UsageError
from kvfuzz.model import planning
from kvfuzz.model.cache_plan import KV_LAYOUTS, CacheLayer, CachePlan
from kvfuzz.model.page_rules import group_layers, kernel_block_size
from kvfuzz.model.presets import cache_layers, preset_named

LAYOUTS: tuple[str, ...] = ("separate", "packed", *KV_LAYOUTS)
"""How the layers are placed: `kvfuzz.model.planning`."""
BEFORE = ("kv_first", "blocks_first", "mixed")
SINCE = ("content_packed", "head_slots")
KERNEL_BLOCKS = ((16, 32, 64),)
"""What a backend that lists its kernel blocks accepts (FLASHINFER; ROCM_ATTN takes them, too)."""


class PresetOptions(msgspec.Struct, frozen=True):
    """How a model's cache is laid out."""

    layout: str = "separate"
    form: str = ""
    """How attention layers are read; without it the plainest of `layout`. `mixed`: decoder
    self-attention kv_first, cross-attention blocks_first."""
    cache_dtype: str = "bf16"
    num_blocks: int = 4
    split: bool = True
    """Whether blocks are split into kernel blocks where their pages are dense."""


def plan_of(key: str, options: PresetOptions) -> CachePlan:
    """The plan of the preset `key`.

    Raises UsageError for an unknown preset, for options that do not go together, and where
    `layout` cannot place the model's pages.
    """
    form = _form(options)
    preset = preset_named(key)
    asked = "kv_first" if form == "mixed" else form
    layers = cache_layers(preset, cache_dtype=options.cache_dtype, form=asked)
    if form == "mixed":
        layers = tuple(
            msgspec.structs.replace(layer, form="blocks_first") if layer.kind == "cross" else layer
            for layer in layers
        )
    if options.split:
        layers = tuple(_split(layer, options.layout) for layer in layers)
    by_name = {layer.name: layer for layer in layers}
    groups = [[by_name[name] for name in group] for group in group_layers(layers)]
    if options.layout == "separate":
        return planning.separate(groups, options.num_blocks)
    if options.layout == "packed":
        return planning.packed(groups, options.num_blocks)
    return planning.one_buffer(groups, options.num_blocks, options.layout)


def _form(options: PresetOptions) -> str:
    if options.layout not in LAYOUTS:
        raise UsageError(f"layout={options.layout!r}, expected one of {', '.join(LAYOUTS)}")
    forms: tuple[str, ...] = SINCE if options.layout in KV_LAYOUTS else BEFORE
    if options.layout == "packed":
        forms = ("blocks_first",)
    form = options.form or (forms[0] if options.layout != "separate" else "blocks_first")
    if form not in forms:
        raise UsageError(f"form={form!r} with layout={options.layout}, expected one of {forms}")
    return form


def _split(layer: CacheLayer, layout: str) -> CacheLayer:
    """The layer with kernel blocks, where nothing lies between the pages of a layer."""
    dense = layout in ("separate", "LBHNC", "LBNHC") and not layer.page_padded
    if not dense or not layer.is_attention or layer.kind == "mla":
        return layer
    size = kernel_block_size(layer.block_size, KERNEL_BLOCKS)
    return msgspec.structs.replace(layer, kernel_block_size=size)
