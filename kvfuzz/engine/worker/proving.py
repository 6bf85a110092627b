"""Prove a plan's views: ask the target for them at a few block counts, then decide."""

import time
from collections.abc import Sequence

from kvfuzz.engine.worker.execute import one_line
from kvfuzz.errors import NotCheckedError
from kvfuzz.kernels.plan_targets import PlanAdapter
from kvfuzz.model.layer_view import LayerView
from kvfuzz.model.plan_case import PlanCase
from kvfuzz.model.plan_edits import is_planned, with_num_blocks
from kvfuzz.model.proof import Claim, Proof, TensorsFile
from kvfuzz.oracles.pieces import Affine, NotAffineError
from kvfuzz.oracles.prove import Layers, claims, layers_of

COUNTS = (3, 4, 7)
"""Block counts that a builder is asked for: more than the two that count K and V."""


def prove(target: PlanAdapter, case: PlanCase, *, every_count: bool = True) -> Proof:
    """What is proved of the views that `target` makes of the plan of `case`.

    About every number of blocks, where the plan can be made for any and the views are affine in it;
    else, or without `every_count`, about the plan's own.
    """
    started = time.perf_counter()
    counts: tuple[int, ...] = (
        COUNTS if every_count and is_planned(case.plan) else (case.plan.num_blocks,)
    )
    try:
        found, counts = _claims(target, case, counts)
    except NotCheckedError:
        raise
    except NotAffineError as error:
        return Proof(undecided=str(error))
    except Exception as error:
        refused = "refused" if isinstance(error, target.refusals) else "raised"
        return Proof(undecided=f"the target {refused}: {one_line(error)}")
    broken = next((each for each in found if each.outcome == "refuted"), None)
    counterexample = None
    if broken is not None and broken.witness is not None:
        counterexample = with_num_blocks(case, broken.witness.num_blocks)
    seconds = time.perf_counter() - started
    return Proof(found, len(counts) > 1, "", counterexample, seconds)


def _claims(
    target: PlanAdapter, case: PlanCase, counts: tuple[int, ...]
) -> tuple[tuple[Claim, ...], tuple[int, ...]]:
    """The claims, and the counts that they rest on: one, where views are not affine in it."""
    try:
        return _claims_at(target, case, counts), counts
    except NotAffineError:
        if len(counts) == 1:
            raise
        own = (case.plan.num_blocks,)
        return _claims_at(target, case, own), own


def _claims_at(target: PlanAdapter, case: PlanCase, counts: Sequence[int]) -> tuple[Claim, ...]:
    cases = [with_num_blocks(case, count) for count in counts]
    made = [_in_order(target.call(each).views) for each in cases]
    return claims(layers_of(cases[0].plan, counts), made, counts)


def _in_order(views: Sequence[LayerView]) -> list[LayerView]:
    return sorted(views, key=lambda view: (view.layer, view.part))


def prove_tensors(file: TensorsFile) -> Proof:
    """What is proved of the views of a running engine, about its own number of blocks."""
    started = time.perf_counter()
    over = Layers(
        {name: number for number, group in enumerate(file.groups) for name in group},
        {name: Affine(nbytes) for name, nbytes in file.allocations.items()},
    )
    try:
        found = claims(over, [file.views], (file.num_blocks,))
    except NotAffineError as error:
        return Proof(undecided=str(error))
    return Proof(found, seconds=time.perf_counter() - started)
