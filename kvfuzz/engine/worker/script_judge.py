"""Judge a script step by step: each is a case of its own, on the bytes that the last one left.

Before every step the cache holds what arithmetic says, since the first step that left anything else
ended the script. So each step is judged by the properties of one op, on all buffers of the cache,
the host's included.
"""

import math
from collections.abc import Mapping
from typing import NamedTuple

import msgspec
from torch import Tensor

from kvfuzz.engine.worker.execute import execute
from kvfuzz.engine.worker.judge import Patience, digest_of
from kvfuzz.engine.worker.lanes import Lane, Manner
from kvfuzz.errors import NotCheckedError
from kvfuzz.kernels.stateful import StatefulAdapter
from kvfuzz.model.axes import Domain
from kvfuzz.model.case import Program, Step
from kvfuzz.model.coverage import Exercised
from kvfuzz.model.script import ScriptCase
from kvfuzz.model.verdict import Hazard, Launch, PropertyResult, Verdict
from kvfuzz.oracles.observation import Run
from kvfuzz.oracles.properties import BASE, NotChecked, Property, Variant
from kvfuzz.oracles.table import PROPERTIES

STEP_PROPERTIES: tuple[Property, ...] = tuple(
    each for each in PROPERTIES if not each.takes_turns and each.name != "dead_bytes"
)
"""What is asked of a step: the properties that compare its bytes and accesses. The others relate
cases that have a scene."""


class Outcome(NamedTuple):
    """What one step did."""

    run: Run
    results: list[PropertyResult]
    hazards: list[Hazard]
    exercised: tuple[Exercised, ...]


class ScriptJudge:
    """The targets of a script on one lane."""

    def __init__(self, target: StatefulAdapter, lane: Lane) -> None:
        self.target = target
        self.lane = lane

    def verdict(self, case: ScriptCase, *, patience_s: float = math.inf) -> Verdict:
        """The outcome of every property over all steps, up to the first step that fails one."""
        patience = Patience(patience_s)
        images: dict[str, Tensor] = {}
        results = {
            each.name: PropertyResult(each.name, "not_checked", "no step")
            for each in STEP_PROPERTIES
        }
        launches: list[Launch] = []
        hazards: list[Hazard] = []
        exercised: list[Exercised] = []
        for number, step in enumerate(case.steps):
            program = only(case, step)
            if number and (reason := patience.spent()):
                return self._undecided(f"step {number + 1} of {len(case.steps)}: {reason}")
            try:
                outcome = self._outcome(program, step, images, patience)
            except NotCheckedError as error:
                return self._undecided(f"step {number + 1} ({step.op}): {error}")
            run = outcome.run
            if run.refused:
                return Verdict((), refused=f"step {number + 1} ({step.op}): {run.refused}")
            if run.unsupported:
                return self._undecided(f"step {number + 1} ({step.op}): {run.unsupported}")
            images |= run.after
            launches += run.launches
            hazards += [each for each in outcome.hazards if each not in hazards]
            exercised += outcome.exercised
            for each in outcome.results:
                results[each.name] = _worse(results[each.name], _placed(each, case, number))
            if any(each.outcome == "failed" for each in outcome.results):
                break
        return Verdict(
            tuple(results.values()),
            digest=digest_of(images),
            launches=tuple(launches),
            hazards=tuple(hazards),
            exercised=tuple(exercised),
        )

    def _undecided(self, why: str) -> Verdict:
        reason = f"lane {self.lane.name}: {why}"
        return Verdict(
            tuple(PropertyResult(each.name, "not_checked", reason) for each in STEP_PROPERTIES)
        )

    def _outcome(
        self, program: Program, step: Step, images: Mapping[str, Tensor], patience: Patience
    ) -> Outcome:
        runs: dict[str, Run] = {}
        variant = Variant(program)
        runs[BASE], seen = self._run(variant, step, images, patience)
        if runs[BASE].refused or runs[BASE].unsupported:
            return Outcome(runs[BASE], [], [], ())
        results = [self._result(each, step, runs, images, patience) for each in STEP_PROPERTIES]
        hazards = [] if runs[BASE].error else [h for e in STEP_PROPERTIES for h in e.hazards(runs)]
        return Outcome(runs[BASE], results, hazards, seen)

    def _run(
        self, variant: Variant, step: Step, images: Mapping[str, Tensor], patience: Patience
    ) -> tuple[Run, tuple[Exercised, ...]]:
        known = {
            buffer.name: images[buffer.name]
            for buffer in variant.case.buffers
            if buffer.name in images
        }
        with patience.timed():
            run, seen = execute(
                variant.case,
                {"target": self.target.parts[step.op]},
                self.lane,
                self.target.quantise,
                filled_before={**known, **variant.images},
                manner=Manner(variant.poison, variant.readers, variant.order),
                where=Domain(),
            )
        return run, seen.exercised()

    def _result(
        self,
        each: Property,
        step: Step,
        runs: dict[str, Run],
        images: Mapping[str, Tensor],
        patience: Patience,
    ) -> PropertyResult:
        if each.name != "crash" and runs[BASE].error:
            return PropertyResult(each.name, "not_checked", "the target raised")
        wanted = each.variants(runs[BASE])
        if isinstance(wanted, NotChecked):
            return PropertyResult(each.name, "not_checked", wanted.reason)
        for name, variant in wanted.items():
            if name not in runs:
                runs[name], _ = self._run(variant, step, images, patience)
        found = each.judge(runs)
        if isinstance(found, NotChecked):
            return PropertyResult(each.name, "not_checked", found.reason)
        return PropertyResult(each.name, "failed" if found else "passed", violation=found)


def only(case: ScriptCase, step: Step) -> Program:
    """The program of one step: what it binds, and every buffer of the cache."""
    names = {*step.tensors.values(), *step.fields.values()}
    tensors = tuple(view for view in case.tensors if view.name in names)
    caches = {field.buffer for field in case.fields if "block" in field.extents}
    caches |= {each.name for each in case.plan.allocations}
    kept = caches | {view.buffer for view in tensors}
    return Program(
        buffers=tuple(buffer for buffer in case.buffers if buffer.name in kept),
        fields=tuple(field for field in case.fields if field.buffer in kept),
        tensors=tensors,
        steps=(step,),
    )


def _worse(one: PropertyResult, other: PropertyResult) -> PropertyResult:
    """Of two outcomes of a property the one that says more: failed, then passed."""
    order = ("failed", "passed", "not_checked")
    return min(one, other, key=lambda each: order.index(each.outcome))


def _placed(result: PropertyResult, case: ScriptCase, number: int) -> PropertyResult:
    """A violation with the step and the action that it came with."""
    violation = result.violation
    if violation is None:
        return result
    said = f"step {number + 1}, {described(case, number)}: {violation.message}"
    found = msgspec.structs.replace(violation, message=said)
    return msgspec.structs.replace(result, violation=found)


def described(case: ScriptCase, number: int) -> str:
    """The op, the layer and the action of a step."""
    step = case.steps[number]
    own = next(name for name in step.tensors.values() if name[0].isdigit())
    action = case.script.actions[int(own.partition(".")[0])]
    layer = step.fields["key_cache"].rpartition(".")[0]
    return f"{step.op} of {layer} by {action.rule} {', '.join(action.sequences)}"
