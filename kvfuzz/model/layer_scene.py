"""What a scene has, and must be, where its op works on the K and V pages of one layer of a plan."""

import math

import msgspec

from kvfuzz.model.dtypes import DTYPES
from kvfuzz.model.fill import LARGE, SPREAD
from kvfuzz.model.placement import place, scale_extents
from kvfuzz.model.plan import (
    MOST_ROWS,
    AttentionLayer,
    Batch,
    Plan,
    check_batch,
    check_layer,
    check_sharing,
    require,
)
from kvfuzz.model.vocabulary import SCALE_BYTES


class LayerScene(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One op of one attention layer of a plan, on a batch."""

    op: str
    layer: str
    """The attention layer of `plan` that the op works on."""
    plan: Plan
    batch: Batch
    model_dtype: str
    k_scale: int
    """Bit pattern of an fp32: stored = x / scale, read = stored * scale.

    Where a cache has many scales, the least of them: `kvfuzz.model.fill.ScaleFill`."""
    v_scale: int

    @property
    def attention(self) -> AttentionLayer:
        """The attention layer that the op works on."""
        return self.plan.attention(self.layer)

    @property
    def state_blocks(self) -> tuple[int, ...]:
        """The blocks of the layer's allocation that hold Mamba state."""
        states = self.plan.states(self.attention.allocation)
        return tuple(sorted(block for state in states for block in state.blocks))


def check_counts(scene: LayerScene, *names: str) -> None:
    """Raise UsageError where one of these attributes of `scene` is no sensible count of rows."""
    for name in names:
        value = getattr(scene, name)
        require(0 <= value <= MOST_ROWS, f"{name}={value}, expected 0 to {MOST_ROWS}")


def check_cache(scene: LayerScene) -> None:
    """Raise UsageError with the first thing that makes the cache of `scene` impossible."""
    names = [layer.name for layer in scene.plan.layers]
    require(len(set(names)) == len(names), f"two layers share a name among {names}")
    layer = scene.attention
    check_layer(layer)
    check_sharing(scene.plan, layer)
    require(
        scene.model_dtype in DTYPES and not DTYPES[scene.model_dtype].is_quantised,
        f"model_dtype={scene.model_dtype!r}, expected fp32, bf16 or fp16",
    )
    require(
        DTYPES[layer.cache_dtype].is_quantised or layer.cache_dtype == scene.model_dtype,
        f"cache_dtype={layer.cache_dtype} with model_dtype={scene.model_dtype}: "
        "a cache that is not quantised has the model's dtype",
    )


def check_blocks(scene: LayerScene) -> None:
    """Raise UsageError where blocks have two owners, or scales are no numbers to multiply by."""
    layer = scene.attention
    require(
        (layer.layout == "hybrid") == bool(scene.state_blocks),
        f"layout={layer.layout} with state_blocks={scene.state_blocks}: "
        "a hybrid allocation has blocks of Mamba state, and no other has",
    )
    for name, bits in (("k_scale", scene.k_scale), ("v_scale", scene.v_scale)):
        value = DTYPES["fp32"].decode(bits)
        require(0 < value < float("inf"), f"{name}=0x{bits:08x}, expected a positive fp32")
    check_batch(scene.batch, layer.geometry, scene.state_blocks)


def check_many_scales(scene: LayerScene) -> None:
    """Raise UsageError with the first thing that makes many scales of `scene` impossible."""
    layer = scene.attention
    if layer.granularity == "tensor":
        return
    top = DTYPES["fp32"].encode(float("inf")) - SPREAD
    for name, bits in (("k_scale", scene.k_scale), ("v_scale", scene.v_scale)):
        require(bits < top, f"{name}=0x{bits:08x}, expected four times as much to be finite")
    inline = layer.granularity == "token_head_inline"
    size = (
        place(layer, count=len(scene.plan.sharing(layer.allocation))).nbytes
        if inline
        else SCALE_BYTES * math.prod(scale_extents(layer).values())
    )
    require(
        size < LARGE,
        f"granularity={layer.granularity} with num_blocks={layer.geometry.num_blocks}: {size} "
        f"bytes that hold scales, expected less than {LARGE}",
    )
