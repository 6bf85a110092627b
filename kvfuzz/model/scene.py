"""A scene: one drawn intent, small enough to read, complete enough to lower to a case.

Strategies draw scenes and nothing else. `check` says in one line what makes a scene impossible;
whatever passes it can be lowered.
"""

import math

import msgspec

from kvfuzz.model.dtypes import DTYPES, FLOATS
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
from kvfuzz.model.vocabulary import LARGEST, SCALE_BYTES

OPS: tuple[str, ...] = ("reshape_and_cache", "gather_cache", "per_token_head_quant")
QUANT_OP = "per_token_head_quant"
"""The op that chooses the scale of each head of a token, and stores it."""
VALUES: tuple[str, ...] = ("spread", "ties", "beyond")


class Scene(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Everything that decides a case: one op of one attention layer of a plan."""

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
    values: str = "spread"
    """What a write to an fp8 cache stores: `spread` over the range, `ties` of its rounding, or some
    `beyond` it."""
    row_gap: int = 0
    """Elements between the end of one row of key or value and the next (a slice of qkv)."""
    spare_rows: int = 0
    """Rows that key and value have behind those of the batch: an engine pads them, or gathers into
    a workspace that is larger than the batch."""
    spare_entries: int = 0
    """Entries that metadata have behind those of the batch: what an engine keeps is as long as its
    largest batch."""
    fill_seed: int = 0

    @property
    def attention(self) -> AttentionLayer:
        """The attention layer that the op works on."""
        return self.plan.attention(self.layer)

    @property
    def state_blocks(self) -> tuple[int, ...]:
        """The blocks of the layer's allocation that hold Mamba state."""
        states = self.plan.states(self.attention.allocation)
        return tuple(sorted(block for state in states for block in state.blocks))


def check(scene: Scene) -> None:
    """Raise UsageError with the first thing that makes `scene` impossible."""
    require(scene.op in OPS, f"op={scene.op!r}, expected one of {', '.join(OPS)}")
    require(scene.values in VALUES, f"values={scene.values!r}, expected one of {VALUES}")
    for name in ("row_gap", "spare_rows", "spare_entries"):
        value = getattr(scene, name)
        require(0 <= value <= MOST_ROWS, f"{name}={value}, expected 0 to {MOST_ROWS}")
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
    check_op(scene)
    require(
        (layer.layout == "hybrid") == bool(scene.state_blocks),
        f"layout={layer.layout} with state_blocks={scene.state_blocks}: "
        "a hybrid allocation has blocks of Mamba state, and no other has",
    )
    for name, bits in (("k_scale", scene.k_scale), ("v_scale", scene.v_scale)):
        value = DTYPES["fp32"].decode(bits)
        require(0 < value < float("inf"), f"{name}=0x{bits:08x}, expected a positive fp32")
    check_scales(scene)
    check_batch(scene.batch, layer.geometry, scene.state_blocks)


def check_op(scene: Scene) -> None:
    """Raise UsageError where an op does not go with the cache of `scene`."""
    layer = scene.attention
    if scene.op != QUANT_OP:
        require(
            layer.cache_dtype in FLOATS,
            f"cache_dtype={layer.cache_dtype} of {scene.op}: only {QUANT_OP} writes integers",
        )
        return
    require(
        layer.cache_dtype in LARGEST and layer.granularity.startswith("token_head"),
        f"{scene.op} of cache_dtype={layer.cache_dtype}, granularity={layer.granularity}: expected "
        f"one of {', '.join(LARGEST)} with a scale for each head of a token",
    )


def check_scales(scene: Scene) -> None:
    """Raise UsageError with the first thing that makes the scales of `scene` impossible."""
    layer = scene.attention
    if layer.granularity == "tensor" or scene.op == QUANT_OP:
        return
    require(
        scene.values != "ties",
        f"values=ties with granularity={layer.granularity}: a tie is one of a single scale",
    )
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
