"""A scene: one drawn intent, small enough to read, complete enough to lower to a case.

Strategies draw scenes and nothing else. `check` says in one line what makes a scene impossible;
whatever passes it can be lowered.
"""

from kvfuzz.model.dtypes import FLOATS
from kvfuzz.model.layer_scene import (
    LayerScene,
    check_blocks,
    check_cache,
    check_counts,
    check_many_scales,
)
from kvfuzz.model.plan import require
from kvfuzz.model.vocabulary import LARGEST

OPS: tuple[str, ...] = ("reshape_and_cache", "gather_cache", "per_token_head_quant")
QUANT_OP = "per_token_head_quant"
"""The op that chooses the scale of each head of a token, and stores it."""
VALUES: tuple[str, ...] = ("spread", "ties", "beyond")


class Scene(LayerScene, frozen=True, forbid_unknown_fields=True):
    """Everything that decides a case: one op of one attention layer of a plan."""

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


def check(scene: Scene) -> None:
    """Raise UsageError with the first thing that makes `scene` impossible."""
    require(scene.op in OPS, f"op={scene.op!r}, expected one of {', '.join(OPS)}")
    require(scene.values in VALUES, f"values={scene.values!r}, expected one of {VALUES}")
    check_counts(scene, "row_gap", "spare_rows", "spare_entries")
    check_cache(scene)
    check_op(scene)
    check_scales(scene)
    check_blocks(scene)


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
    if scene.op == QUANT_OP:
        return
    granularity = scene.attention.granularity
    require(
        granularity == "tensor" or scene.values != "ties",
        f"values=ties with granularity={granularity}: a tie is one of a single scale",
    )
    check_many_scales(scene)
