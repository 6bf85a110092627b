"""Prove a plan's views: ask the target for them at a few block counts, then decide."""

import time
from collections.abc import Sequence

import msgspec

from kvfuzz.engine.worker.plan_judge import run_of
from kvfuzz.kernels.plan_targets import PlanAdapter
from kvfuzz.model.layer_view import LayerView
from kvfuzz.model.plan_case import PlanCase
from kvfuzz.model.plan_edits import is_planned, with_num_blocks
from kvfuzz.model.proof import Claim, Proof, TensorsFile, Witness
from kvfuzz.oracles.overlap import Counts
from kvfuzz.oracles.pieces import Affine, NotAffineError
from kvfuzz.oracles.plan_run import PlanRun
from kvfuzz.oracles.plan_table import PLAN_PROPERTIES
from kvfuzz.oracles.prove import Layers, claims, layers_of

COUNTS = (3, 4, 7, 101)
"""Block counts that a builder is asked for: more than the two that count K and V, and many."""


def prove(target: PlanAdapter, case: PlanCase, *, every_count: bool = True) -> Proof:
    """What is proved of the views that `target` makes of the plan of `case`.

    About every number of blocks, where the plan can be made for any and the views are affine in it;
    else, or without `every_count`, about the plan's own.
    """
    started = time.perf_counter()
    own = (case.plan.num_blocks,)
    counts: Counts = COUNTS if every_count and is_planned(case.plan) else own
    try:
        try:
            found = _claims(target, case, counts)
        except NotAffineError:
            if counts == own:
                raise
            counts = own
            found = _claims(target, case, counts)
    except NotAffineError as error:
        return Proof(undecided=str(error))
    except RefusedError as error:
        return Proof(undecided=f"the target refused: {error}")
    broken = next((each for each in found if each.outcome == "refuted"), None)
    counterexample = None
    if broken is not None and broken.witness is not None:
        counterexample = with_num_blocks(case, broken.witness.num_blocks)
    seconds = time.perf_counter() - started
    return Proof(found, len(counts) > 1, "", counterexample, seconds)


class RefusedError(Exception):
    """The target declared that it takes no such plan."""


def _claims(target: PlanAdapter, case: PlanCase, counts: Counts) -> tuple[Claim, ...]:
    """Every claim, in the order of the properties; the first alone where nothing else means
    anything."""
    runs = [run_of(target, with_num_blocks(case, count)) for count in counts]
    if refused := next((run.refused for run in runs if run.refused), ""):
        raise RefusedError(refused)
    crash = _at_each("crash", runs)
    if crash.outcome == "refuted":
        return (crash,)
    shape = _at_each("shape", runs)
    if shape.outcome == "refuted":
        return (shape,)
    made = [_in_order(run.made.views) for run in runs]
    looked_up = [_at_each(name, runs) for name in ("sharing", "oracle")]
    try:
        bounds, *owned = claims(layers_of(runs[0].case.plan, counts), made, counts)
    except NotAffineError:
        if not any(each.outcome == "refuted" for each in looked_up):
            raise
        return (shape, *looked_up)
    return (bounds, shape, *owned, *looked_up)


def _at_each(name: str, runs: Sequence[PlanRun]) -> Claim:
    """What a property that counts no bytes says of the views at every count that was asked for.

    They are affine in the count, and so are the formulas that they equal.
    """
    (judge,) = [each.judge for each in PLAN_PROPERTIES["cache_views"] if each.name == name]
    for run in runs:
        found = judge(run)
        if found is not None:
            blocks = run.case.plan.num_blocks
            byte = found.place.byte if found.place else 0
            said = f"with {blocks} blocks, {found.message}"
            return Claim(name, "refuted", said, Witness(blocks, byte, 0, 0))
    return Claim(name, "proved")


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
    shared = _shared(file)
    return Proof((*found, *shared), seconds=time.perf_counter() - started)


def _shared(file: TensorsFile) -> list[Claim]:
    """Whether layers that share a cache have the views of those that own it."""
    views: dict[str, set[LayerView]] = {}
    for view in file.views:
        same = msgspec.structs.replace(view.addresses(), layer="")
        views.setdefault(view.layer, set()).add(same)
    for layer, owner in file.shares.items():
        if views[layer] != views[owner]:
            said = f"the views of {layer} are not those of {owner}, whose cache it shares"
            return [Claim("sharing", "refuted", said, Witness(file.num_blocks, 0, 0, 0))]
    return [Claim("sharing", "proved")] if file.shares else []
