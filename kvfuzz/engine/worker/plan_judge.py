"""Judge a plan case: call the target once, ask every property of its op.

Views are data, and every lane makes the same ones: no kernel is launched and no byte is read.
"""

import hashlib

import msgspec

from kvfuzz.engine.worker.execute import one_line
from kvfuzz.engine.worker.lanes import Lane
from kvfuzz.errors import NotCheckedError
from kvfuzz.kernels.plan_targets import PlanAdapter
from kvfuzz.model.plan_case import Made, PlanCase
from kvfuzz.model.verdict import PropertyResult, Verdict
from kvfuzz.oracles.plan_run import PlanRun
from kvfuzz.oracles.plan_table import PLAN_PROPERTIES


class PlanJudge:
    """One target of a plan op."""

    def __init__(self, target: PlanAdapter, lane: Lane) -> None:
        self.target = target
        self.lane = lane

    def verdict(self, case: PlanCase) -> Verdict:
        """The outcome of every property on `case`: there are no turns, and all is explained."""
        try:
            run = self.run(case)
        except NotCheckedError as error:
            reason = str(error)
            return Verdict(
                tuple(
                    PropertyResult(each.name, "not_checked", reason)
                    for each in PLAN_PROPERTIES[case.op]
                )
            )
        if run.refused:
            return Verdict((), refused=run.refused)
        digest = hashlib.sha256(msgspec.msgpack.encode(run.made)).hexdigest()[:16]
        return Verdict(tuple(_results(run)), digest=digest)

    def run(self, case: PlanCase) -> PlanRun:
        """What the target makes of `case`. Raises as `run_of` does."""
        return run_of(self.target, case)


def run_of(target: PlanAdapter, case: PlanCase) -> PlanRun:
    """What `target` makes of `case`, a refusal or another exception included.

    Raises NotCheckedError where it needs something that is not there.
    """
    try:
        return PlanRun(case, target.call(case))
    except NotCheckedError:
        raise
    except target.refusals as error:
        return PlanRun(case, Made(), refused=one_line(error))
    except Exception as error:
        return PlanRun(case, Made(), error=one_line(error))


def _results(run: PlanRun) -> list[PropertyResult]:
    results: list[PropertyResult] = []
    without = ""
    for each in PLAN_PROPERTIES[run.case.op]:
        if without:
            results.append(PropertyResult(each.name, "not_checked", f"means nothing: {without}"))
            continue
        found = each.judge(run)
        outcome = PropertyResult(each.name, "failed" if found else "passed", violation=found)
        results.append(outcome)
        if found and each.basic:
            without = f"{each.name} failed"
    return results
