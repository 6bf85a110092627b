"""Cases of every family, told apart by their type: kernels over bytes, and ops on a cache plan."""

from kvfuzz.model import case as token_cases
from kvfuzz.model import plan_case
from kvfuzz.model.case import Case
from kvfuzz.model.plan_case import PlanCase
from kvfuzz.model.steps import check_steps

AnyCase = Case | PlanCase


def op_of(case: AnyCase) -> str:
    """The op that the target is called for first."""
    return case.op if isinstance(case, PlanCase) else case.steps[0].op


def check_case(case: AnyCase) -> None:
    """Raise UsageError with the first thing that makes `case` impossible to execute or judge."""
    if isinstance(case, PlanCase):
        plan_case.check(case)
        return
    token_cases.check(case)
    check_steps(case)
