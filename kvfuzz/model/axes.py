"""The axes of the case space: their levels, and the facts that a lowered case shows.

An axis is a question about a case with a closed list of answers. Facts are always read off the
lowered case, never off the scene that was meant to produce it, so a coverage figure cannot count
what did not reach the target.
"""

import difflib
from collections.abc import Mapping

import msgspec

from kvfuzz.errors import UsageError
from kvfuzz.model import layout_facts, tokens
from kvfuzz.model.any_case import AnyCase, op_of
from kvfuzz.model.axis import Axis, only
from kvfuzz.model.case import Case
from kvfuzz.model.dtypes import DTYPES, highest_inside
from kvfuzz.model.fill import FP32_MANTISSA, FP32_ONE, FloatFill, GroupFill, TieFill
from kvfuzz.model.layout_axes import CACHE_DTYPE, LAYOUT_AXES, SIZE_AXES, STRIDES
from kvfuzz.model.ops.table import BY_OP, FAMILIES
from kvfuzz.model.plan_axes import PLAN_AXES
from kvfuzz.model.plan_case import PLAN_OPS
from kvfuzz.model.scales import SCALES, least_scale
from kvfuzz.model.scene import QUANT_OP
from kvfuzz.model.script import STATEFUL_OP
from kvfuzz.model.script_axes import SCRIPT_AXES
from kvfuzz.model.steps import is_write
from kvfuzz.model.vocabulary import GRANULARITIES, Levels

EXTREME = 14
"""From how many powers of two away from one on a scale is tiny, or huge."""

FEW = 20
"""Most words that a message lists."""


def _scale_kind(case: Case) -> str:
    if case.steps[0].op == QUANT_OP:
        return "none"
    kinds = set()
    for name in SCALES:
        bits = least_scale(case, case.steps[0], name)
        kinds.add(_kind_of_scale(bits))
    if not DTYPES[layout_facts.key_cache(case).dtype].is_quantised:
        return "none"
    return next(kind for kind in ("extreme", "general", "power_of_two", "unit") if kind in kinds)


def _kind_of_scale(bits: int) -> str:
    fp32 = DTYPES["fp32"]
    if abs((bits >> fp32.mantissa_bits) - fp32.bias) >= EXTREME:
        return "extreme"
    if bits == FP32_ONE:
        return "unit"
    return "power_of_two" if bits & FP32_MANTISSA == 0 else "general"


def _values(case: Case) -> str:
    step = case.steps[0]
    if not is_write(step):
        return "bytes"
    fill = case.buffer(case.bound_buffer(step, "key")).fill
    if isinstance(fill, GroupFill):
        return "ties" if fill.ties else "spread"
    if isinstance(fill, FloatFill):
        scale = DTYPES["fp32"].decode(least_scale(case, step, "k_scale"))
        cache = DTYPES[layout_facts.key_cache(case).dtype]
        inside = highest_inside(DTYPES[fill.dtype], cache, scale)
        return "beyond" if fill.high > inside else "spread"
    return "ties" if isinstance(fill, TieFill) else "bytes"


def _rows(case: Case) -> str:
    view = case.tensor(case.steps[0].tensors["key"])
    return "gapped" if view.strides[0] > view.shape[1] * view.strides[1] else "dense"


def _row_count(case: Case) -> str:
    """Whether key has more rows than a batch; slots of a write are padding for them all, so that
    what counts rows by key stores nothing more, and what needs as many slots finds them."""
    step = case.steps[0]
    batch = case.integers(step, "slot_mapping" if is_write(step) else "token_to_batch")
    return "more" if case.bound_field(step, "key").extents["token"] > len(batch) else "exact"


def _metadata(case: Case) -> str:
    step = case.steps[0]
    name = "slot_mapping" if is_write(step) else "token_to_batch"
    wider = len(case.written_out(step, name)) > len(case.integers(step, name))
    return "wider" if wider else "exact"


_WRITES, _GATHERS = ("reshape_and_cache", QUANT_OP), ("gather_cache",)


TOKEN_AXES: tuple[Axis, ...] = (
    *LAYOUT_AXES,
    Axis(
        "granularity",
        GRANULARITIES,
        layout_facts.granularity,
        only((QUANT_OP,), "token_head", "token_head_inline"),
    ),
    CACHE_DTYPE,
    Axis(
        "model_dtype",
        ("fp32", "bf16", "fp16"),
        lambda case: case.bound_field(case.steps[0], "key").dtype,
    ),
    *SIZE_AXES,
    Axis(
        "scale",
        ("none", "unit", "power_of_two", "general", "extreme"),
        _scale_kind,
        only((QUANT_OP,), "none"),
    ),
    STRIDES,
    Axis("blocks_used", ("1", "2+"), tokens.blocks_used),
    Axis("block_ids", tokens.BLOCK_IDS, tokens.block_ids),
    Axis("reach", tokens.REACHES, tokens.reach, only((QUANT_OP,), "near", "past_2g_elements")),
    Axis("first_offset", ("edge", "inside"), tokens.first_offset),
    Axis("last_offset", ("edge", "first", "inside"), tokens.last_offset),
    Axis("sequences", ("1", "2", "3"), tokens.sequences, only(_WRITES, "1")),
    Axis("start_block", ("first", "later"), tokens.start_block, only(_WRITES, "first")),
    Axis("table", ("tight", "wide"), tokens.table, only(_WRITES, "tight")),
    Axis("padding", ("none", "some"), tokens.padding, only(_GATHERS, "none")),
    Axis("row_count", ("exact", "more"), _row_count),
    Axis("metadata", ("exact", "wider"), _metadata),
    Axis("rows", ("dense", "gapped"), _rows, only(_GATHERS, "dense")),
    Axis(
        "values",
        ("bytes", "spread", "ties", "beyond"),
        _values,
        only(_GATHERS, "bytes") | only((QUANT_OP,), "spread", "ties"),
    ),
)

OP_AXES = tuple(axis for family in FAMILIES.values() for axis in family.axes)

AXIS: dict[str, Axis] = {
    axis.name: axis for axis in (*OP_AXES, *TOKEN_AXES, *SCRIPT_AXES, *PLAN_AXES)
}
"""Every axis. Two families share a name where they share the question and its answers."""


def axes_of(op: str) -> tuple[Axis, ...]:
    """The axes of the cases of `op`."""
    if op == STATEFUL_OP:
        return SCRIPT_AXES
    if op in BY_OP:
        return BY_OP[op].axes
    return PLAN_AXES if op in PLAN_OPS else TOKEN_AXES


def facts(case: AnyCase) -> dict[str, str]:
    """The level of every axis of its family, read off the lowered case."""
    return {axis.name: axis.level_of(case) for axis in axes_of(op_of(case))}


class Domain(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a target claims to accept, as data, with the source that says so.

    `allowed` lists the levels of each restricted axis; an absent axis is unrestricted.
    `forbidden` lists combinations: a case that shows every one of a combination's levels is
    outside.
    """

    allowed: dict[str, Levels] = {}
    forbidden: tuple[dict[str, Levels], ...] = ()
    source: str = ""

    def levels(self, axis: str) -> Levels:
        """The levels of `axis` that the domain allows, in the table's order."""
        allowed = self.allowed.get(axis)
        every = AXIS[axis].levels
        return every if allowed is None else tuple(level for level in every if level in allowed)

    def refusal(self, shown: Mapping[str, str]) -> str | None:
        """Why a case with the facts `shown` (all or some axes) is outside, or None."""
        for axis, level in shown.items():
            if level not in self.levels(axis):
                return f"{axis}={level} is outside {'|'.join(self.levels(axis))}"
        for combination in self.forbidden:
            if all(shown.get(axis) in levels for axis, levels in combination.items()):
                return "forbidden: " + ",".join(f"{axis}={shown[axis]}" for axis in combination)
        return None

    def narrowed(self, op: str, where: Mapping[str, Levels] | None = None) -> "Domain":
        """This domain for cases of `op`, with the levels of `where` only.

        Raises UsageError where nothing is left of an axis.
        """
        where = where or {}
        of_op = {axis.name for axis in axes_of(op)}
        if strange := [name for name in where if name not in of_op]:
            known = ", ".join(sorted(of_op))
            raise UsageError(f"--where {strange[0]}: {op} has no such axis; its axes are {known}")
        allowed = dict(self.allowed)
        for name, axis in ((each.name, each) for each in axes_of(op)):
            possible = [each for each in self.levels(name) if each in axis.levels_for(op)]
            kept = tuple(each for each in possible if each in where.get(name, possible))
            if not kept:
                raise UsageError(
                    f"--where {name}={'|'.join(where.get(name, ()))}: {op} on this target takes "
                    f"{name}={'|'.join(possible)}"
                )
            allowed[name] = kept
        return msgspec.structs.replace(self, allowed=allowed)


def nearest(word: str, known: Mapping[str, object] | Levels) -> str:
    """`did you mean X?` for the closest known word, or the known words where they are few."""
    close = difflib.get_close_matches(word, list(known), n=1, cutoff=0.5)
    if close:
        return f"did you mean {close[0]}?"
    return f"expected one of {', '.join(known)}" if len(known) <= FEW else "see kvfuzz list"


def parse_where(text: str) -> dict[str, Levels]:
    """The levels per axis of `AXIS=LEVEL[|LEVEL],…`; an axis named twice takes both.

    Raises UsageError for an unknown axis or level, naming the nearest known one.
    """
    where: dict[str, Levels] = {}
    for part in filter(None, (piece.strip() for piece in text.split(","))):
        axis, equals, levels = (piece.strip() for piece in part.partition("="))
        if not equals:
            raise UsageError(f"--where {part!r}: expected AXIS=LEVEL")
        if axis not in AXIS:
            raise UsageError(f"--where {part!r}: no axis {axis!r}; {nearest(axis, AXIS)}")
        for level in levels.split("|"):
            if level not in AXIS[axis].levels:
                raise UsageError(
                    f"--where {part!r}: {axis} has no level {level!r}; "
                    f"{nearest(level, AXIS[axis].levels)}"
                )
            where[axis] = (*where.get(axis, ()), level)
    return where
