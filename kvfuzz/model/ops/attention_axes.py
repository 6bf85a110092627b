"""The axes of attention, read off its one step, and which levels go together."""

import itertools

from kvfuzz.model import layout_facts, tokens
from kvfuzz.model.axis import Axis, only
from kvfuzz.model.case import Program
from kvfuzz.model.dtypes import DTYPES
from kvfuzz.model.fill import FP32_MANTISSA, FP32_ONE
from kvfuzz.model.layout_axes import CACHE_DTYPE, LAYOUT_AXES, SIZE_AXES, STRIDES
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
    SOME,
)
from kvfuzz.model.ops.attention import ATTENTION_OPS, PAGED, UNIFIED
from kvfuzz.model.round_trip import runs
from kvfuzz.model.rules import RULES, Rule
from kvfuzz.model.scales import SCALES, least_scale
from kvfuzz.model.vocabulary import GRANULARITIES, Levels

QUERIES: Levels = ("model", "quantised")
"""What queries are handed over as: numbers of the model, or codes of the cache's fp8 format."""
SHARERS: Levels = ("1", "2", "3")
"""Layers that attend over the cache of one target layer, one after the other."""
PHASES: Levels = ("decode", "prefill", "extend", "mixed")
"""What a batch is: one query token a sequence; whole prompts; more tokens behind a context; some of
either, or of both."""
QUERIES_PER_KV: Levels = ("1", "2", "3", "4", "8", "16", "20")
"""Query heads that share one of the cache; a program of most kernels takes up to 16 rows."""
MANY_QUERIES, FEW_HEADS = 16, 2
"""So many queries share a head of the cache where it has few."""
WINDOWS: Levels = ("none", "wide", "cuts")
"""A window that leaves every token visible is one more path, and no other result."""
LONG_HEAD_SIZE = 64
"""Elements of a head of a long sequence, at most."""
LARGEST_PROMPT_BLOCK = 128
"""Tokens of a block in which prompts are drawn, at most."""


def query_lens(case: Program) -> list[int]:
    """Query tokens of each sequence."""
    step = case.steps[0]
    if "query_start_loc" not in step.tensors:
        return [min(1, len(run)) for run in runs(case, step)]
    ends = case.integers(step, "query_start_loc")
    return [stop - start for start, stop in itertools.pairwise(ends)]


def contexts(case: Program) -> list[int]:
    """Tokens before the query tokens of each sequence."""
    lengths = [len(run) for run in runs(case, case.steps[0])]
    return [length - new for length, new in zip(lengths, query_lens(case), strict=True)]


def _phase(case: Program) -> str:
    asked = [each for each in zip(query_lens(case), contexts(case), strict=True) if each[0]]
    if all(new == 1 for new, _ in asked):
        return "decode"
    if not any(context for _, context in asked):
        return "prefill"
    return "extend" if all(context for _, context in asked) else "mixed"


def _queries_per_kv(case: Program) -> str:
    heads = case.bound_field(case.steps[0], "query").extents["head"]
    return str(heads // layout_facts.key_cache(case).extents["head"])


def _window(case: Program) -> str:
    window = int(case.steps[0].scalars["window"])
    if not window:
        return "none"
    lengths = zip(contexts(case), query_lens(case), strict=True)
    cuts = any(new and context + new > window for context, new in lengths)
    return "cuts" if cuts else "wide"


def _some(parameter: str) -> Axis:
    return Axis(parameter, SOME, lambda case: SOME[parameter in case.steps[0].tensors])


def _scale(case: Program) -> str:
    if not DTYPES[layout_facts.key_cache(case).dtype].is_quantised:
        return "none"
    least = [least_scale(case, case.steps[0], name) for name in SCALES]
    if any(bits & FP32_MANTISSA for bits in least):
        return "general"
    return "unit" if set(least) == {FP32_ONE} else "power_of_two"


def _row_count(case: Program) -> str:
    rows = case.bound_field(case.steps[0], "query").extents["token"]
    return "more" if rows > int(case.steps[0].scalars["num_rows"]) else "exact"


ATTENTION_AXES: tuple[Axis, ...] = (
    *LAYOUT_AXES,
    Axis("granularity", GRANULARITIES, layout_facts.granularity),
    CACHE_DTYPE,
    Axis(
        "model_dtype",
        ("fp32", "bf16", "fp16"),
        lambda case: case.bound_field(case.steps[0], "output").dtype,
    ),
    *SIZE_AXES,
    Axis(
        "scale",
        ("none", "unit", "power_of_two", "general", "extreme"),
        _scale,
        only(ATTENTION_OPS, "none", "unit", "power_of_two", "general"),
    ),
    STRIDES,
    Axis("query", QUERIES, lambda case: QUERIES["q_scale" in case.steps[0].tensors]),
    CONTEXT,
    Axis("phase", PHASES, _phase, only((PAGED,), "decode")),
    Axis("queries_per_kv", QUERIES_PER_KV, _queries_per_kv),
    Axis("window", WINDOWS, _window),
    SOFTCAP,
    _some("sinks"),
    _some("alibi_slopes"),
    Axis("blocks_used", ("1", "2+"), tokens.blocks_used),
    Axis("block_ids", tokens.BLOCK_IDS, tokens.block_ids),
    Axis("reach", tokens.REACHES, tokens.reach),
    Axis("last_offset", ("edge", "first", "inside"), tokens.last_offset),
    Axis("sequences", ("1", "2", "3"), tokens.sequences),
    IDLE,
    Axis("table", ("tight", "wide"), tokens.table),
    Axis("row_count", ("exact", "more"), _row_count),
    METADATA,
    ROWS,
    NUMBERS,
    RESULT_ROWS,
    Axis(
        "shared_by",
        SHARERS,
        lambda case: str(len(case.steps)),
        only((PAGED, UNIFIED), "1"),
    ),
)

_AXES = {axis.name for axis in ATTENTION_AXES}

ATTENTION_RULES: tuple[Rule, ...] = (
    *(rule for rule in RULES if {*rule.axes} <= _AXES and not rule.ops),
    Rule(
        ("granularity", "reach"),
        lambda g, reach: reach == "near" or g in ("tensor", "head"),
    ),
    Rule(
        ("cache_dtype", "scale"),
        lambda cache, scale: DTYPES[cache].is_quantised == (scale != "none"),
    ),
    Rule(
        ("granularity", "cache_dtype"),
        lambda g, cache: not DTYPES[cache].is_integer or g.startswith("token_head"),
    ),
    FAR_APART_RULE,
    # Some of a sequence alone is neither decode nor both of the others.
    Rule(("phase", "sequences"), lambda phase, count: phase != "mixed" or count != "1"),
    # A query token that has another before it takes a second token.
    Rule(
        ("phase", "blocks_used", "block_size", "last_offset"),
        lambda phase, used, size, last: phase == "decode" or used != "1" or _tokens(size, last) > 2,
    ),
    Rule(
        ("num_kv_heads", "queries_per_kv"),
        lambda heads, queries: int(queries) < MANY_QUERIES or int(heads) <= FEW_HEADS,
    ),
    Rule(("window", "blocks_used"), lambda window, used: window != "cuts" or used != "1"),
    *IDLE_RULES,
    *CONTEXT_RULES,
    RESULT_ROWS_RULE,
    Rule(
        ("context", "num_kv_heads", "head_size"),
        lambda context, heads, size: (
            context == "short" or (int(heads) <= FEW_HEADS and int(size) <= LONG_HEAD_SIZE)
        ),
    ),
    Rule(
        ("context", "queries_per_kv"),
        lambda context, queries: context == "short" or int(queries) < MANY_QUERIES,
    ),
    Rule(
        ("context", "phase"),
        lambda context, phase: context == "short" or phase in ("decode", "extend"),
    ),
    Rule(
        ("phase", "idle", "sequences"),
        lambda phase, idle, count: idle == "none" or count == "3" or phase != "mixed",
    ),
    # Every token of a prompt is a query, so that blocks of hundreds make a case of seconds.
    Rule(
        ("phase", "block_size"),
        lambda phase, size: phase in ("decode", "extend") or int(size) <= LARGEST_PROMPT_BLOCK,
    ),
    # With a sink a bias that is the same for all tokens of a query counts, and kernels count the
    # distance of ALiBi from where they like; no model has both.
    Rule(("sinks", "alibi_slopes"), lambda sinks, slopes: "none" in (sinks, slopes)),
    # Sums are exact where weights are one or zero, and scales powers of two.
    *(
        Rule((axis, "numbers"), lambda level, values: values != "exact" or level == "none")
        for axis in ("softcap", "sinks", "alibi_slopes")
    ),
    Rule(("scale", "numbers"), lambda scale, values: values != "exact" or scale != "general"),
    # Engines quantise queries where K and V of fp8 have one scale each.
    Rule(
        ("cache_dtype", "query"),
        lambda cache, query: (
            query == "model" or (DTYPES[cache].is_quantised and not DTYPES[cache].is_integer)
        ),
    ),
    Rule(("granularity", "query"), lambda g, query: query == "model" or g == "tensor"),
    # A sink would outweigh all tokens.
    Rule(("sinks", "numbers"), lambda sinks, numbers: numbers != "low" or sinks == "none"),
    # Of integers a scale of its own would make others of them.
    Rule(
        ("cache_dtype", "scale", "numbers"),
        lambda cache, scale, values: (
            values == "spread" or not DTYPES[cache].is_integer or scale == "unit"
        ),
    ),
)


def _tokens(block_size: str, last_offset: str) -> int:
    """Tokens of a sequence in one block, at least, where its last stands at such an offset."""
    return {"edge": int(block_size), "first": 1, "inside": 2}[last_offset]
