"""By op, how its scenes are drawn from a row, and its boundaries."""

from collections.abc import Callable
from functools import partial

from kvfuzz.model.ops.attention import ATTENTION_OPS
from kvfuzz.model.ops.merge import MERGE_OP
from kvfuzz.model.ops.mla import MLA_OP
from kvfuzz.model.ops.slots import SLOT_OP
from kvfuzz.model.ops.state_axes import STATE_OP
from kvfuzz.model.ops.table import OpScene
from kvfuzz.model.steps import PAGE_OPS
from kvfuzz.strategies.boundary import Boundary
from kvfuzz.strategies.choices import Choices
from kvfuzz.strategies.ops import attention, latent, merge, mla, pages, slots, states

Draw = Callable[[Choices, dict[str, str]], OpScene]

DRAWN: dict[str, Draw] = {
    SLOT_OP: slots.drawn_scene,
    **{op: partial(pages.drawn_scene, op=op) for op in PAGE_OPS},
    STATE_OP: states.drawn_scene,
    **{op: partial(latent.drawn_scene, op=op) for op in latent.BOUNDARIES},
    **{op: partial(attention.drawn_scene, op=op) for op in ATTENTION_OPS},
    MERGE_OP: merge.drawn_scene,
    MLA_OP: mla.drawn_scene,
}

OP_BOUNDARIES: dict[str, tuple[Boundary, ...]] = {
    SLOT_OP: slots.BOUNDARIES,
    **dict.fromkeys(PAGE_OPS, pages.BOUNDARIES),
    STATE_OP: states.BOUNDARIES,
    **latent.BOUNDARIES,
    **dict.fromkeys(ATTENTION_OPS, attention.BOUNDARIES),
    MERGE_OP: merge.BOUNDARIES,
    MLA_OP: mla.BOUNDARIES,
}
