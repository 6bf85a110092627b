"""The axes of scripts: those of their plans, and what happens in them."""

from collections.abc import Callable

from kvfuzz.model.axis import Axis
from kvfuzz.model.dtypes import DTYPES, FLOATS
from kvfuzz.model.fill import FP32_MANTISSA, FP32_ONE
from kvfuzz.model.plan_axes import PLAN_AXES
from kvfuzz.model.script import STATEFUL_OP, ScriptCase
from kvfuzz.model.vocabulary import Levels

CACHE_DTYPES: Levels = FLOATS
MODEL_DTYPES: Levels = tuple(name for name, dtype in DTYPES.items() if not dtype.is_quantised)
SCALED: Levels = ("none", "unit", "power_of_two", "general")
"""The scales of an fp8 cache, as kernels' axis `scale` has them."""
TOKEN_LEVELS: Levels = ("4", "16", "32")
HEADS: Levels = ("1", "2", "3", "4")
FORMS: Levels = ("kv_first", "blocks_first", "mixed", "content_packed", "head_slots")
KINDS: Levels = (
    "full",
    "sliding",
    "full+sliding",
    "full+chunked",
    "full+cross",
    "full+mamba",
    "full+sliding+mamba",
)
SOME: Levels = ("none", "some")
SEVERAL_COPIES = 3
"""Blocks that one step copies, from which on they are several."""

OF_PLANS: dict[str, Levels] = {
    "placement": ("separate", "packed", "one_buffer"),
    "kv_layout": ("none", "LBHNC", "LBNHC", "LHBNC", "BLHNC", "BLNHC", "BHLNC"),
    "kinds": KINDS,
    "form": FORMS,
    "page_order": ("nhd", "hnd"),
    "groups": ("1", "2", "3+"),
    "layers": ("1", "2"),
    "geometry": ("same", "differs"),
    "kernel_blocks": ("1", "2"),
    "tokens": TOKEN_LEVELS,
    "heads": HEADS,
}
"""The axes of plans that scripts share, with the levels that their rows draw."""


def _stored_in(case: ScriptCase) -> str:
    return next(layer.cache_dtype for layer in case.plan.owners if layer.is_attention)


def _dialects(case: ScriptCase) -> str:
    """Whether the layers of one group hold fp8 of another dialect than those of the others."""
    dtypes = {layer.cache_dtype for layer in case.plan.owners if layer.is_attention}
    return "one" if len(dtypes) == 1 else "two"


def _scaled_by(case: ScriptCase) -> str:
    if not DTYPES[_stored_in(case)].is_quantised:
        return "none"
    return max(
        (scale_kind(bits) for bits in (case.script.k_scale, case.script.v_scale)), key=SCALED.index
    )


def scale_kind(bits: int) -> str:
    """The kind of a scale with this bit pattern."""
    if bits == FP32_ONE:
        return "unit"
    return "power_of_two" if bits & FP32_MANTISSA == 0 else "general"


def _happens(rule: str) -> Callable[[ScriptCase], str]:
    """Whether an action of a rule happens in a script."""

    def level_of(case: ScriptCase) -> str:
        return "some" if any(each.rule == rule for each in case.script.actions) else "none"

    return level_of


def _copies(case: ScriptCase) -> str:
    """Whether a step copies blocks, and many of them at once."""
    pairs = [
        len(case.integers(step, "block_mapping")) // 2
        for step in case.steps
        if step.op == "copy_blocks"
    ]
    return copies_level(max(pairs, default=0))


def copies_level(pairs: int) -> str:
    """The level of a script of which no step copies more than so many blocks."""
    return "none" if not pairs else "some" if pairs < SEVERAL_COPIES else "several"


def _batches(case: ScriptCase) -> str:
    several = any(len(each.sequences) > 1 for each in case.script.actions if each.rule == "decode")
    return "some" if several else "none"


SCRIPT_AXES: tuple[Axis, ...] = (
    *(
        Axis(
            axis.name, axis.levels, axis.level_of, {**axis.by_op, STATEFUL_OP: OF_PLANS[axis.name]}
        )
        for axis in PLAN_AXES
        if axis.name in OF_PLANS
    ),
    Axis("stored_in", CACHE_DTYPES, _stored_in),
    Axis("dialects", ("one", "two"), _dialects),
    Axis("written_in", MODEL_DTYPES, lambda case: case.script.model_dtype),
    Axis("scaled_by", SCALED, _scaled_by),
    Axis("forks", SOME, _happens("fork")),
    Axis("copies", ("none", "some", "several"), _copies),
    Axis("rollbacks", SOME, _happens("rollback")),
    Axis("swaps", SOME, _happens("swap_out")),
    Axis("zeros", SOME, _happens("zero")),
    Axis("frees", SOME, _happens("free")),
    Axis("extends", SOME, _happens("extend")),
    Axis("batches", SOME, _batches),
    Axis("gathers", SOME, _happens("read")),
)
"""An axis that plans have, too, is the same question about the plan of a script."""
