"""Properties that relate two runs: determinism and roundtrip."""

import torch
from torch import Tensor

from kvfuzz.model.case import Program, Step
from kvfuzz.model.dtypes import DTYPES
from kvfuzz.model.round_trip import with_round_trip
from kvfuzz.model.verdict import Violation
from kvfuzz.oracles import image
from kvfuzz.oracles.codec import is_nan
from kvfuzz.oracles.memory import Memory
from kvfuzz.oracles.observation import Run
from kvfuzz.oracles.properties import BASE, Judgement, NotChecked, Runs, Variant, Wanted
from kvfuzz.oracles.related import ended
from kvfuzz.oracles.stored_bytes import first_violation, place_of
from kvfuzz.oracles.writes import SIDES, dequantised, quantised, rows_heads_dims, scales_at

AGAIN = "again"
ROUND_TRIP = "round_trip"


def determinism_variants(base: Run) -> Wanted:
    """The same case once more."""
    return {AGAIN: Variant(base.case)}


def determinism(runs: Runs) -> Violation | None:
    """Two runs of one case leave the same bytes everywhere."""
    base, again = runs[BASE], runs[AGAIN]
    if again.error != base.error:
        return Violation(f"a second run ended with {again.error or 'no exception'}")
    after = base.after
    changed = [name for name in after if not image.same(again.after[name], after[name])]
    wrong = {name: again.after[name] != after[name] for name in changed}
    judged = {name: torch.ones_like(data) for name, data in after.items()} if changed else {}
    message = "a second run of the same case left another byte"
    return first_violation(base, wrong, judged, message, again.after)


def round_trip_variants(base: Run) -> Wanted:
    """The case with its inverse op, where any token is stored at all."""
    step = base.case.steps[0]
    if step.op == "reshape_and_cache" and max(base.case.integers(step, "slot_mapping")) < 0:
        return NotChecked("no token is stored")
    return {ROUND_TRIP: Variant(with_round_trip(base.token_case))}


def _step(case: Program, op: str) -> Step:
    return next(step for step in case.steps if step.op == op)


def _codes(run: Run, images: dict[str, Tensor], step: Step, name: str, rows: Tensor) -> Tensor:
    field = run.case.bound_field(step, name)
    row, head, dim = rows_heads_dims(field, rows)
    at = image.positions(run.case, field, token=row, head=head, dim=dim)
    return image.read(images[field.buffer], at, field.dtype)


def _scale(run: Run, step: Step, name: str, slot: Tensor) -> Tensor:
    """The scales of slots `[rows, 1, 1]` and of all heads."""
    cache = run.case.bound_field(step, "key_cache")
    head = torch.arange(cache.extents["head"], device=slot.device)[:, None]
    block, token = slot // cache.extents["token"], slot % cache.extents["token"]
    return scales_at(Memory(run.case, run.before), step, name, block=block, token=token, head=head)


def roundtrip(runs: Runs) -> Judgement:
    """What is written and gathered back is what went in, through the cache dtype.

    Independent of every layout formula: the n-th stored row must come back as the n-th gathered
    row, whatever the addresses in between.
    """
    run = runs[ROUND_TRIP]
    if found := ended(run, "in a round trip"):
        return found
    write, gather = _step(run.case, "reshape_and_cache"), _step(run.case, "gather_cache")
    slots = torch.tensor(run.case.integers(write, "slot_mapping"))
    stored = torch.nonzero(slots >= 0).flatten()
    slot = slots[stored][:, None, None]
    for side, cache_name, scale_name in SIDES:
        source, out = run.case.bound_field(write, side), run.case.bound_field(gather, side)
        cache = run.case.bound_field(write, cache_name)
        device = run.before[cache.buffer].device
        scale = _scale(run, write, scale_name, slot.to(device))
        went_in = _codes(run, run.before, write, side, stored.to(device))
        through = quantised(went_in, source.dtype, cache.dtype, scale, run.quantise)
        expected = dequantised(through, cache.dtype, out.dtype, scale)
        came_out = _codes(run, run.after, gather, side, torch.arange(len(stored), device=device))
        dtype = DTYPES[out.dtype]
        wrong = came_out != expected
        if source.dtype != cache.dtype:
            wrong &= ~(is_nan(came_out, dtype) & is_nan(expected, dtype))
        if image.is_any(wrong):
            token, head, dim = torch.nonzero(wrong)[0].tolist()
            byte = out.byte({"token": token, "head": head, "dim": dim})
            digits = 2 * dtype.itemsize
            return Violation(
                f"{side} row {int(stored[token])} was written, and gathered back as something else",
                place_of(run.case, out.buffer, byte),
                f"0x{int(expected[token, head, dim]):0{digits}x}",
                f"0x{int(came_out[token, head, dim]):0{digits}x}",
                int(wrong.sum()) * dtype.itemsize,
                wrong.numel() * dtype.itemsize,
            )
    return None
