"""Scenes of one row a token as a family: how they become simpler, and which of two is smaller."""

import msgspec

from kvfuzz.model.batch_passes import FILL_SEEDS
from kvfuzz.model.fill import FP32_ONE, FP32_THREE, FP32_TWO
from kvfuzz.model.ops.family import OpFamily
from kvfuzz.model.ops.latent import LatentScene, check
from kvfuzz.model.ops.latent_axes import FORMS_OF, LATENT_AXES, LATENT_RULES
from kvfuzz.model.ops.latent_parts import parts
from kvfuzz.model.ops.row_passes import BATCHES, dtypes, edited, layers, sizes
from kvfuzz.model.scene import VALUES
from kvfuzz.model.search import Steps, lower_number, plainer_value, until_stable

Search = Steps[LatentScene]


def _plainer_form(scene: LatentScene) -> Search:
    """An earlier form of the same op with the same rows."""
    forms = FORMS_OF[scene.op]
    earlier = forms[: forms.index(scene.form)]
    return (
        yield from edited(scene, (msgspec.structs.replace(scene, form=form) for form in earlier))
    )


def simpler(scene: LatentScene) -> Search:
    """Candidates simpler than `scene`, pass after pass."""
    passes = (
        layers,
        BATCHES.sequences,
        sizes,
        BATCHES.runs,
        BATCHES.padding,
        BATCHES.other_bytes,
        BATCHES.blocks,
        BATCHES.table_width,
        _plainer_form,
        dtypes,
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
