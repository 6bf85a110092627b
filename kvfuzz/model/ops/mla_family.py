"""Scenes of decode over MLA's latent as a family: how they become simpler, which one is smaller."""

import msgspec

from kvfuzz.model.batch_passes import FILL_SEEDS
from kvfuzz.model.dtypes import DTYPES
from kvfuzz.model.fill import FP32_ONE, FP32_THREE, FP32_TWO
from kvfuzz.model.ops.attended import ATTENTION_VALUES
from kvfuzz.model.ops.family import OpFamily
from kvfuzz.model.ops.mla import MLA_OP, MlaScene, check
from kvfuzz.model.ops.mla_axes import MLA_AXES, MLA_RULES, QUERY_HEADS
from kvfuzz.model.ops.mla_parts import parts
from kvfuzz.model.ops.row_passes import BATCHES, dtypes, layers, sizes
from kvfuzz.model.search import Steps, first_of, lower_number, plainer_value, until_stable


def _heads(scene: MlaScene) -> Steps[MlaScene]:
    """As few query heads as are drawn."""
    fewer = (int(heads) for heads in QUERY_HEADS if int(heads) < scene.num_query_heads)
    edited = (msgspec.structs.replace(scene, num_query_heads=heads) for heads in fewer)
    return (yield from first_of(scene, edited))


def _lse_dtype(scene: MlaScene) -> Steps[MlaScene]:
    return (yield from first_of(scene, [msgspec.structs.replace(scene, lse_dtype="fp32")]))


def simpler(scene: MlaScene) -> Steps[MlaScene]:
    """Candidates simpler than `scene`, pass after pass."""
    passes = (
        layers,
        BATCHES.sequences,
        _heads,
        sizes,
        BATCHES.runs,
        BATCHES.other_bytes,
        BATCHES.blocks,
        BATCHES.table_width,
        _lse_dtype,
        dtypes,
        lower_number("page_padding"),
        plainer_value("dense_output", False),
        lower_number("row_gap"),
        lower_number("spare_rows"),
        lower_number("spare_entries"),
        lower_number("margin"),
        plainer_value("softcap", 0, 1),
        plainer_value("softmax_scale", FP32_ONE, DTYPES["fp32"].encode(0.25)),
        plainer_value("values", *ATTENTION_VALUES),
        plainer_value("scale", FP32_ONE, FP32_TWO, FP32_THREE),
        plainer_value("fill_seed", *range(FILL_SEEDS)),
    )
    return until_stable(scene, passes)


def _size(scene: MlaScene) -> tuple[int, ...]:
    row = scene.latent_size + scene.rope_size
    return (
        scene.layers,
        scene.num_query_heads,
        scene.batch.num_rows,
        scene.block_size * row,
        scene.num_blocks,
        len(msgspec.json.encode(scene)),
    )


FAMILY = OpFamily(
    ops=(MLA_OP,),
    axes=MLA_AXES,
    rules=MLA_RULES,
    op=lambda scene: MLA_OP,
    check=check,
    parts=parts,
    simpler=simpler,
    size=_size,
    path=lambda scene: "",
)
