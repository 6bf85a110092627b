"""Cases of any op, from the same integers: scenes and scripts lowered, or cache plans."""

from hypothesis import strategies as st
from hypothesis.strategies import DrawFn, SearchStrategy

from kvfuzz.model.any_case import AnyCase
from kvfuzz.model.axes import Domain
from kvfuzz.model.lower import lower
from kvfuzz.model.ops.op_case import lower_op
from kvfuzz.model.plan_case import PLAN_OPS
from kvfuzz.model.script import STATEFUL_OP
from kvfuzz.strategies.choices import Choices, FromHypothesis
from kvfuzz.strategies.ops.table import DRAWN
from kvfuzz.strategies.plans import drawn_plan_case
from kvfuzz.strategies.rows import Space, space
from kvfuzz.strategies.scenes import drawn_scene
from kvfuzz.strategies.scripts import drawn_script_case


def drawn_case(choices: Choices, within: Space) -> AnyCase:
    """The case that `choices` make; the first of them are its row."""
    if within.op == STATEFUL_OP:
        return drawn_script_case(choices, within)
    if within.op in DRAWN:
        return lower_op(DRAWN[within.op](choices, within.drawn_row(choices)))
    if within.op in PLAN_OPS:
        return drawn_plan_case(choices, within)
    return lower(drawn_scene(choices, within))


def cases(op: str, domain: Domain) -> SearchStrategy[AnyCase]:
    """Cases of `op` inside `domain`.

    Raises UsageError, when first drawn from, where the domain leaves nothing to draw.
    """

    @st.composite
    def draw_case(draw: DrawFn) -> AnyCase:
        return drawn_case(FromHypothesis(draw), space(op, domain))

    return draw_case()
