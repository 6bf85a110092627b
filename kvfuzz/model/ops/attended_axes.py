"""The axes that every attention op has, over whichever cache: read off its one step."""

from kvfuzz.model.axis import Axis, only
from kvfuzz.model.case import Program
from kvfuzz.model.ops.attended import ATTENTION_VALUES, numbers_of
from kvfuzz.model.ops.attention import SHARED
from kvfuzz.model.rules import Rule
from kvfuzz.model.vocabulary import BLOCK_SIZES, Levels

ROWS_LEVELS: Levels = ("dense", "gapped")
RESULT_ROWS_LEVELS: Levels = ("as_query", "dense")
"""Rows of an output that are apart as those of the query are; or are not, where those are cut out
of what was projected."""
FAR_APART: Levels = ("split_4", "split_12")
"""Patterns of block ids whose groups begin at a multiple: a sequence alone shows one after many
blocks."""
SHORT = 3 * BLOCK_SIZES[-1] + 48
"""Tokens of a sequence that is not long, at most: three of the largest blocks, and some."""
LEAST_LONG_BLOCK = 16
"""Tokens of a block of a long sequence, at least."""
SOME: Levels = ("none", "some")


def _softcap(case: Program) -> str:
    return SOME[int(case.steps[0].scalars["cap"]) > 0]


def _metadata(case: Program) -> str:
    step = case.steps[0]
    behind = len(case.written_out(step, "seq_lens")) > len(case.integers(step, "seq_lens"))
    return "wider" if behind else "exact"


def _result_rows(case: Program) -> str:
    return RESULT_ROWS_LEVELS[_is_gapped(case, "query") and not _is_gapped(case, "output")]


def _is_gapped(case: Program, parameter: str) -> bool:
    view = case.tensor(case.steps[0].tensors[parameter])
    return view.strides[0] > view.shape[1] * view.strides[1]


def _context(case: Program) -> str:
    """Whether some sequence is long."""
    return "long" if max(case.integers(case.steps[0], "seq_lens")) > SHORT else "short"


def _idle(case: Program) -> str:
    return SOME[0 in case.integers(case.steps[0], "seq_lens")]


def _numbers(case: Program) -> str:
    return numbers_of(case.buffer(case.bound_buffer(case.steps[0], "query")).fill)


SOFTCAP = Axis("softcap", SOME, _softcap)
METADATA = Axis("metadata", ("exact", "wider"), _metadata)
ROWS = Axis("rows", ROWS_LEVELS, lambda case: ROWS_LEVELS[_is_gapped(case, "query")])
RESULT_ROWS = Axis("result_rows", RESULT_ROWS_LEVELS, _result_rows)
RESULT_ROWS_RULE = Rule(
    ("rows", "result_rows"), lambda rows, out: out != "dense" or rows != "dense"
)
CONTEXT = Axis("context", ("short", "long"), _context, only((SHARED,), "short"))
IDLE = Axis("idle", SOME, _idle)
NUMBERS = Axis("numbers", ATTENTION_VALUES, _numbers)

FAR_APART_RULE = Rule(
    ("block_ids", "sequences"), lambda ids, count: ids not in FAR_APART or count != "1"
)

IDLE_RULES: tuple[Rule, ...] = (
    # An idle sequence is one more than those that the others need.
    Rule(("idle", "sequences"), lambda idle, count: idle == "none" or count != "1"),
    Rule(
        ("block_ids", "idle", "sequences"),
        lambda ids, idle, count: idle == "none" or count == "3" or ids not in FAR_APART,
    ),
)

CONTEXT_RULES: tuple[Rule, ...] = (
    # Of thousands of tokens, in blocks as engines have them.
    Rule(
        ("context", "block_size"),
        lambda context, size: context == "short" or int(size) >= LEAST_LONG_BLOCK,
    ),
    Rule(("context", "blocks_used"), lambda context, used: context == "short" or used != "1"),
    Rule(("context", "reach"), lambda context, reach: context == "short" or reach == "near"),
    Rule(
        ("block_ids", "context"),
        lambda ids, context: context == "short" or not ids.startswith("split"),
    ),
)
