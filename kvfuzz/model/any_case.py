"""Cases of every family, told apart by their type: an op on K and V pages, one on something else,
an op on a plan, a script."""

from kvfuzz.errors import UsageError
from kvfuzz.model import case as token_cases
from kvfuzz.model import plan_case, script
from kvfuzz.model.case import Case
from kvfuzz.model.ops.op_case import OpCase, lower_op
from kvfuzz.model.plan_case import PlanCase
from kvfuzz.model.script import ScriptCase
from kvfuzz.model.steps import check_steps

AnyCase = Case | OpCase | PlanCase | ScriptCase


def op_of(case: AnyCase) -> str:
    """The op that the target is called for first."""
    return case.steps[0].op if isinstance(case, Case) else case.op


def check_case(case: AnyCase) -> None:
    """Raise UsageError with the first thing that makes `case` impossible to execute or judge."""
    if isinstance(case, PlanCase):
        plan_case.check(case)
        return
    token_cases.check(case)
    if isinstance(case, OpCase):
        if lower_op(case.scene) != case:
            raise UsageError("its scene and its case mean different things")
        return
    check_steps(case)
    if isinstance(case, ScriptCase):
        script.check(case.script)
