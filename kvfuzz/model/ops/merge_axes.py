"""The axes of merges, read off the views and the log-sum-exps of their one step, and which levels
go together."""

import math

from kvfuzz.model.axis import COUNTS, Axis, count_level
from kvfuzz.model.case import Program
from kvfuzz.model.dtypes import DTYPES
from kvfuzz.model.ops.merge import EMPTY, FAR, PREFIX, SUFFIX, WITH_CONTEXT
from kvfuzz.model.rules import Rule
from kvfuzz.model.vocabulary import HEAD_COUNTS, HEAD_SIZES, Levels

ROWS: Levels = ("dense", "gapped")
"""Whether a row begins where the heads of the one before it end."""
HEADS: Levels = ("dense", "padded")
LSES: Levels = ("by_head", "wider", "by_token")
"""How log-sum-exps `[H, T]` lie: dense, the heads of more tokens, or the transpose of `[T, H]`."""
EMPTIES: Levels = (*EMPTY, "several")
"""What is empty of the tokens of which something is; of some this, of others that."""
INFINITIES: Levels = ("minus", "plus")
DIFFERENCES: Levels = ("near", "far")
"""Whether one of two parts weighs nothing somewhere, since it is that much smaller."""


def _shape(case: Program) -> tuple[int, ...]:
    return case.tensor(case.steps[0].tensors["output"]).shape


def _strides(case: Program, parameter: str) -> tuple[int, ...]:
    return case.tensor(case.steps[0].tensors[parameter]).strides


def _rows(name: str, parameter: str) -> Axis:
    def level_of(case: Program) -> str:
        row, head, _ = _strides(case, parameter)
        return ROWS[row != _shape(case)[1] * head]

    return Axis(f"{name}_rows", ROWS, level_of)


def _heads(name: str, parameter: str) -> Axis:
    def level_of(case: Program) -> str:
        _, head, element = _strides(case, parameter)
        return HEADS[head > _shape(case)[2] * element]

    return Axis(f"{name}_heads", HEADS, level_of)


def _suffix_heads(case: Program) -> str:
    prefix, suffix = (_strides(case, f"{part}_output")[1] for part in (PREFIX, SUFFIX))
    return "same" if prefix == suffix else "other"


def _lies(case: Program, parameter: str) -> str:
    head, token = _strides(case, parameter)
    if head < token:
        return "by_token"
    return "wider" if head > _shape(case)[0] * token else "by_head"


def _output_lse(case: Program) -> str:
    return _lies(case, "output_lse") if "output_lse" in case.steps[0].tensors else "none"


def _context(case: Program) -> int:
    return int(case.steps[0].scalars.get(WITH_CONTEXT, _shape(case)[0]))


def _pairs(case: Program) -> list[tuple[int, float, float]]:
    """The token and both log-sum-exps of each head of the tokens with a prefix."""
    tokens, step, decode = _shape(case)[0], case.steps[0], DTYPES["fp32"].decode
    prefix, suffix = (
        [decode(bits) for bits in case.integers(step, f"{part}_lse")] for part in (PREFIX, SUFFIX)
    )
    numbered = zip(range(len(prefix)), prefix, suffix, strict=True)
    found = ((index % tokens, one, other) for index, one, other in numbered)
    return [each for each in found if each[0] < _context(case)]


def _empties(case: Program) -> str:
    found = {EMPTY[math.isinf(one) + 2 * math.isinf(other)] for _, one, other in _pairs(case)}
    found -= {"none"}
    return "several" if len(found) > 1 else next(iter(found), "none")


def _infinity(case: Program) -> str:
    return INFINITIES[any(math.inf in pair[1:] for pair in _pairs(case))]


def _difference(case: Program) -> str:
    return DIFFERENCES[any(FAR <= abs(one - other) < math.inf for _, one, other in _pairs(case))]


def _row_count(case: Program) -> str:
    rows = case.bound_field(case.steps[0], "output").extents["token"]
    return "more" if rows > _shape(case)[0] else "exact"


MERGE_AXES: tuple[Axis, ...] = (
    Axis(
        "model_dtype",
        ("fp32", "bf16", "fp16"),
        lambda case: case.bound_field(case.steps[0], "output").dtype,
    ),
    Axis("num_tokens", COUNTS, lambda case: count_level(_shape(case)[0])),
    Axis("num_heads", tuple(map(str, HEAD_COUNTS)), lambda case: str(_shape(case)[1])),
    Axis("head_size", tuple(map(str, HEAD_SIZES)), lambda case: str(_shape(case)[2])),
    _rows(PREFIX, "prefix_output"),
    _rows(SUFFIX, "suffix_output"),
    _rows("output", "output"),
    _heads(PREFIX, "prefix_output"),
    Axis("suffix_heads", ("same", "other"), _suffix_heads),
    _heads("output", "output"),
    Axis("prefix_lse", LSES, lambda case: _lies(case, "prefix_lse")),
    Axis("suffix_lse", LSES, lambda case: _lies(case, "suffix_lse")),
    Axis("output_lse", ("none", *LSES), _output_lse),
    Axis("empties", EMPTIES, _empties),
    Axis("infinity", INFINITIES, _infinity),
    Axis("difference", DIFFERENCES, _difference),
    Axis(
        "with_context",
        ("all", "some"),
        lambda case: "some" if _context(case) < _shape(case)[0] else "all",
    ),
    Axis("row_count", ("exact", "more"), _row_count),
)


def tokens_needed(empties: str, difference: str) -> int:
    """Tokens with a prefix that show such levels, at least."""
    return {"none": 0, "several": 2}.get(empties, 1) + (difference == "far")


def _fits(count: str, empties: str, difference: str, context: str) -> bool:
    needed = tokens_needed(empties, difference) + (context == "some")
    return count == COUNTS[-1] or needed <= int(count)


MERGE_RULES: tuple[Rule, ...] = (
    Rule(("num_tokens", "empties", "difference", "with_context"), _fits),
    # Some of the tokens: not all of them.
    Rule(("num_tokens", "with_context"), lambda count, some: count != "1" or some == "all"),
    Rule(("empties", "infinity"), lambda empties, sign: empties != "none" or sign == "minus"),
    # What has one head, or one token, lies the same by head and by token.
    *(
        Rule((size, lse), lambda count, lies: count != "1" or lies != "by_token")
        for size in ("num_tokens", "num_heads")
        for lse in ("prefix_lse", "suffix_lse", "output_lse")
    ),
)
