"""The axes of copies of states, read off the fields of the states, and which go together."""

from kvfuzz.model import tokens
from kvfuzz.model.axis import COUNTS, Axis
from kvfuzz.model.case import Program
from kvfuzz.model.dtypes import DTYPES, itemsize
from kvfuzz.model.layout import Field
from kvfuzz.model.ops.page_axes import METADATA, PATTERNS, metadata_level, pairs_level
from kvfuzz.model.placement import occupied
from kvfuzz.model.round_trip import touched_blocks
from kvfuzz.model.rules import Rule
from kvfuzz.model.vocabulary import PAGES, Levels

STATE_OP = "copy_states"
MOST_STATES = 3
"""States of a block: one of linear attention, two of Mamba, three and more of later models."""
COUNTS_OF_STATES: Levels = tuple(map(str, range(1, MOST_STATES + 1)))
STATE_DTYPES: Levels = tuple(name for name, dtype in DTYPES.items() if not dtype.is_quantised)
SIZES: Levels = ("words", "uneven")
"""Whether each state is a whole number of 8-byte words."""
LENGTHS: Levels = ("short", "long")
"""Whether a state has more bytes than vLLM's kernel moves at once."""
LONG = 1024


def states_of(case: Program) -> list[Field]:
    """The states of a block, in order."""
    step = case.steps[0]
    return [case.bound_field(step, name) for name in step.fields if name.startswith("state_")]


def _bytes(field: Field) -> int:
    return field.extents["dim"] * itemsize(field.dtype)


def _formats(case: Program) -> str:
    return "one" if len({field.dtype for field in states_of(case)}) == 1 else "mixed"


def _sizes(case: Program) -> str:
    return "uneven" if any(_bytes(field) % 8 for field in states_of(case)) else "words"


def _lengths(case: Program) -> str:
    return "long" if max(map(_bytes, states_of(case))) > LONG else "short"


def _rank(case: Program) -> str:
    shapes = [view.shape for view in case.tensors if view.name.startswith("state_")]
    return str(max(len(shape) - 1 for shape in shapes))


def _page(case: Program) -> str:
    fields = states_of(case)
    return "padded" if occupied(fields) < case.buffer(fields[0].buffer).nbytes else "exact"


def _reach(case: Program) -> str:
    return tokens.reach_of(states_of(case)[0], touched_blocks(case, case.steps[0]))


STATE_AXES: tuple[Axis, ...] = (
    Axis("num_states", COUNTS_OF_STATES, lambda case: str(len(states_of(case)))),
    Axis("state_dtype", STATE_DTYPES, lambda case: states_of(case)[0].dtype),
    Axis("state_dtypes", ("one", "mixed"), _formats),
    Axis("state_rank", ("1", "2", "3"), _rank),
    Axis("state_bytes", SIZES, _sizes),
    Axis("state_length", LENGTHS, _lengths),
    Axis("page", PAGES, _page),
    Axis("block_ids", tokens.BLOCK_IDS, tokens.block_ids, {STATE_OP: PATTERNS}),
    Axis("reach", tokens.REACHES, _reach),
    Axis("pairs", COUNTS, pairs_level),
    Axis("metadata", METADATA, metadata_level),
)

STATE_RULES: tuple[Rule, ...] = (
    Rule(("num_states", "state_dtypes"), lambda count, kinds: count != "1" or kinds == "one"),
    Rule(("reach", "block_ids"), lambda reach, ids: reach == "near" or ids != "identity"),
)
