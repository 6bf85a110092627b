"""The axes that every attention op has, over whichever cache: read off its one step."""

from kvfuzz.model.axis import Axis
from kvfuzz.model.case import Program
from kvfuzz.model.ops.attended import ATTENTION_VALUES, numbers_of
from kvfuzz.model.rules import Rule
from kvfuzz.model.vocabulary import Levels

SOME: Levels = ("none", "some")


def _softcap(case: Program) -> str:
    return SOME[int(case.steps[0].scalars["cap"]) > 0]


def _metadata(case: Program) -> str:
    step = case.steps[0]
    behind = len(case.written_out(step, "seq_lens")) > len(case.integers(step, "seq_lens"))
    return "wider" if behind else "exact"


def _rows(case: Program) -> str:
    view = case.tensor(case.steps[0].tensors["query"])
    return "gapped" if view.strides[0] > view.shape[1] * view.strides[1] else "dense"


def _idle(case: Program) -> str:
    return SOME[0 in case.integers(case.steps[0], "seq_lens")]


def _numbers(case: Program) -> str:
    return numbers_of(case.buffer(case.bound_buffer(case.steps[0], "query")).fill)


SOFTCAP = Axis("softcap", SOME, _softcap)
METADATA = Axis("metadata", ("exact", "wider"), _metadata)
ROWS = Axis("rows", ("dense", "gapped"), _rows)
IDLE = Axis("idle", SOME, _idle)
NUMBERS = Axis("numbers", ATTENTION_VALUES, _numbers)

IDLE_RULES: tuple[Rule, ...] = (
    # An idle sequence is one more than those that the others need.
    Rule(("idle", "sequences"), lambda idle, count: idle == "none" or count != "1"),
    Rule(
        ("block_ids", "idle", "sequences"),
        lambda ids, idle, count: (
            idle == "none" or count == "3" or ids not in ("split_4", "split_12")
        ),
    ),
)
