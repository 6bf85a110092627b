"""The axes of decode over MLA's latent, read off its one step, and which levels go together."""

from kvfuzz.model import tokens
from kvfuzz.model.axis import Axis
from kvfuzz.model.case import Program
from kvfuzz.model.dtypes import DTYPES, FLOATS
from kvfuzz.model.ops.attended_axes import (
    CONTEXT,
    CONTEXT_RULES,
    FAR_APART_RULE,
    IDLE,
    IDLE_RULES,
    METADATA,
    NUMBERS,
    RESULT_ROWS,
    RESULT_ROWS_RULE,
    ROWS,
    SOFTCAP,
)
from kvfuzz.model.ops.latent_axes import (
    LATENT_SIZES,
    MODEL_DTYPES,
    ROPE_SIZES,
    SIZES_OF,
    given_scale,
    nesting,
    page_level,
    page_of,
    rope_size,
)
from kvfuzz.model.ops.mla import MLA_OP
from kvfuzz.model.rules import BLOCK_ELEMENTS, RULES, Rule
from kvfuzz.model.vocabulary import BLOCK_SIZES, NESTINGS, PAGES, Levels

QUERY_HEADS: Levels = ("1", "3", "16", "20", "128")
"""Query heads of a rank: few, as many as a program takes (16 in most kernels), some more, and all
of DeepSeek V3's."""
MLA_LATENT_SIZES: Levels = ("16", "32", "48", "512")
"""Those of the other ops, and one that is no power of two, where kernels mask."""
LONG_ROW, LONG_QUERY_HEADS = 64, 20
"""Elements of a row, and query heads, of a long sequence, at most."""
LSE_DTYPES: Levels = ("fp32", "model")


def _model_dtype(case: Program) -> str:
    return case.bound_field(case.steps[0], "query").dtype


def _scale(case: Program) -> str:
    return given_scale(case, "k_scale") if DTYPES[page_of(case).dtype].is_quantised else "none"


def _query_heads(case: Program) -> str:
    return str(case.bound_field(case.steps[0], "query").extents["head"])


def _lse_dtype(case: Program) -> str:
    return LSE_DTYPES[case.bound_field(case.steps[0], "lse").dtype != "fp32"]


def _longest(case: Program) -> str:
    """Whether the host says how long the longest sequence is, or something more."""
    step = case.steps[0]
    longest = max(case.integers(step, "seq_lens"))
    return "more" if int(step.scalars["max_seq_len"]) > longest else "exact"


def _row_count(case: Program) -> str:
    step = case.steps[0]
    rows = case.bound_field(step, "query").extents["token"]
    return "more" if rows > len(case.integers(step, "seq_lens")) else "exact"


MLA_AXES: tuple[Axis, ...] = (
    Axis("nesting", NESTINGS, nesting, {MLA_OP: ("layer_first", "block_first")}),
    Axis("page", PAGES, page_level),
    Axis("cache_dtype", tuple(DTYPES), lambda case: page_of(case).dtype, {MLA_OP: FLOATS}),
    Axis("model_dtype", MODEL_DTYPES, _model_dtype),
    Axis(
        "block_size",
        tuple(map(str, BLOCK_SIZES)),
        lambda case: str(page_of(case).extents["token"]),
    ),
    Axis(
        "latent_size",
        LATENT_SIZES,
        lambda case: str(page_of(case).extents["dim"]),
        {MLA_OP: MLA_LATENT_SIZES},
    ),
    Axis("rope_size", ROPE_SIZES, rope_size, {MLA_OP: SIZES_OF["mla"][1]}),
    Axis(
        "scale",
        ("none", "unit", "power_of_two", "general", "extreme"),
        _scale,
        {MLA_OP: ("none", "unit", "power_of_two", "general")},
    ),
    Axis("query_heads", QUERY_HEADS, _query_heads),
    CONTEXT,
    SOFTCAP,
    Axis("lse_dtype", LSE_DTYPES, _lse_dtype),
    Axis("blocks_used", ("1", "2+"), tokens.blocks_used),
    Axis("block_ids", tokens.BLOCK_IDS, tokens.block_ids),
    Axis("reach", tokens.REACHES, tokens.reach),
    Axis("last_offset", ("edge", "first", "inside"), tokens.last_offset),
    Axis("sequences", ("1", "2", "3"), tokens.sequences),
    Axis("table", ("tight", "wide"), tokens.table),
    Axis("longest", ("exact", "more"), _longest),
    Axis("row_count", ("exact", "more"), _row_count),
    METADATA,
    ROWS,
    NUMBERS,
    IDLE,
    RESULT_ROWS,
)

_AXES = {axis.name for axis in MLA_AXES}

MLA_RULES: tuple[Rule, ...] = (
    *(rule for rule in RULES if {*rule.axes} <= _AXES and not rule.ops),
    Rule(
        ("block_size", "latent_size", "rope_size"),
        lambda n, latent, rope: int(n) * (int(latent) + int(rope)) <= BLOCK_ELEMENTS,
    ),
    Rule(
        ("cache_dtype", "scale"),
        lambda cache, scale: DTYPES[cache].is_quantised == (scale != "none"),
    ),
    Rule(("model_dtype", "lse_dtype"), lambda model, lse: model != "fp32" or lse == "fp32"),
    FAR_APART_RULE,
    *IDLE_RULES,
    *CONTEXT_RULES,
    RESULT_ROWS_RULE,
    Rule(
        ("context", "latent_size", "rope_size"),
        lambda context, latent, rope: context == "short" or int(latent) + int(rope) <= LONG_ROW,
    ),
    Rule(
        ("context", "query_heads"),
        lambda context, heads: context == "short" or int(heads) <= LONG_QUERY_HEADS,
    ),
    # Sums are exact where weights are one or zero, and scales powers of two.
    Rule(("softcap", "numbers"), lambda cap, numbers: numbers != "exact" or cap == "none"),
    Rule(("scale", "numbers"), lambda scale, numbers: numbers != "exact" or scale != "general"),
)
