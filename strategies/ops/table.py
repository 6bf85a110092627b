"""By op, how its scenes are drawn from a row, and its boundaries."""

import functools
from collections.abc import Callable

from kvfuzz.model.ops.slots import SLOT_OP
from kvfuzz.model.ops.table import OpScene
from kvfuzz.strategies.boundary import Boundary
from kvfuzz.strategies.choices import Choices
from kvfuzz.strategies.ops import latent, slots

Draw = Callable[[Choices, dict[str, str]], OpScene]

DRAWN: dict[str, Draw] = {
    SLOT_OP: slots.drawn_scene,
    **{op: functools.partial(latent.drawn_scene, op=op) for op in latent.BOUNDARIES},
}

OP_BOUNDARIES: dict[str, tuple[Boundary, ...]] = {
    SLOT_OP: slots.BOUNDARIES,
    **latent.BOUNDARIES,
}
