"""Properties of the bytes after a run: oracle, complete, frame, immutable.

They divide the wrong bytes among themselves, so that a finding has one name: of the bytes that
must be written, `oracle` judges those that were and `complete` those that were not; of all other
bytes, `frame` judges the buffers that the op writes and `immutable` those it only reads.
"""

from collections.abc import Mapping

import msgspec
import torch
from torch import Tensor

from kvfuzz.model.case import Program
from kvfuzz.model.dtypes import itemsize
from kvfuzz.model.held import held
from kvfuzz.model.verdict import Hazard, Place, Violation
from kvfuzz.oracles import image
from kvfuzz.oracles.observation import Run
from kvfuzz.oracles.properties import BASE, Judgement, NotChecked, Runs

ASKED = 64
"""Wrong bytes of a buffer whose owners are asked for, about."""


def place_of(case: Program, buffer: str, byte: int) -> Place:
    """A byte and the element that owns it."""
    owner = case.owner(buffer, byte)
    if owner is None:
        return Place(buffer, byte)
    field, coordinate = owner
    return Place(buffer, byte, field.name, field.layer, coordinate)


def _element_hex(case: Program, place: Place, data: Tensor) -> str:
    start, size = place.byte, 1
    if place.field:
        field = case.field(place.field)
        start = field.byte({axis: place.coordinate[axis] for axis in field.extents})
        size = itemsize(field.dtype)
    start = held(case, place.buffer).position(start)
    return "0x" + bytes(data[start : start + size].flip(0).tolist()).hex()


def _address(case: Program, buffer: str, mask: Tensor) -> int:
    """The byte address of the first true entry of a mask over held bytes."""
    return held(case, buffer).address(int(torch.nonzero(mask)[0]))


def first_violation(
    run: Run,
    wrong: Mapping[str, Tensor],
    judged: Mapping[str, Tensor],
    message: str,
    expected: Mapping[str, Tensor],
) -> Violation | None:
    """The violation of the first wrong byte of the first buffer that has one, or None.

    `wrong` and `judged` are bool per byte: which bytes are wrong, of which that were compared.
    """
    for name, mask in wrong.items():
        if not image.is_any(mask):
            continue
        place = place_of(run.case, name, _address(run.case, name, mask))
        return Violation(
            message,
            place,
            _element_hex(run.case, place, expected[name]),
            _element_hex(run.case, place, run.after[name]),
            sum(int(mask.count_nonzero()) for mask in wrong.values()),
            sum(int(mask.count_nonzero()) for mask in judged.values()),
            fields=_fields(run.case, wrong),
        )
    return None


def _fields(case: Program, wrong: Mapping[str, Tensor]) -> tuple[str, ...]:
    """The fields that own wrong bytes; of very many bytes some are asked, evenly spread."""
    found: dict[str, None] = {}
    for name, mask in wrong.items():
        at = torch.nonzero(mask).flatten()
        kept = held(case, name)
        for position in at[:: max(1, len(at) // ASKED)].tolist():
            if owner := case.owner(name, kept.address(position)):
                found[owner[0].name] = None
    return tuple(found)


def unwritten(run: Run, buffer: str) -> Tensor:
    """Bytes that no launch wrote. Without a write record: bytes that still hold their fill."""
    unchanged = run.after[buffer] == run.before[buffer]
    written = (run.written or {}).get(buffer)
    return unchanged if written is None else unchanged & ~written


def oracle(runs: Runs) -> Judgement:
    """The bytes that were written hold the right values, with zero tolerance; numbers, those within
    their bound."""
    run = runs[BASE]
    expectation = run.expectation
    wrong = {
        name: expectation.wrong(name, run.after[name]) & ~unwritten(run, name)
        for name in run.missed
    }
    message = "a byte that the op must write holds the wrong value"
    found = first_violation(run, wrong, expectation.must, message, expectation.images)
    if found is not None:
        return _in_numbers(run, found)
    if expectation.unbounded:
        return NotChecked(f"of {expectation.unbounded} numbers no error bound can be given")
    return None


def _in_numbers(run: Run, found: Violation) -> Violation:
    """`found`, saying by how much a number is off where it has a bound."""
    place = found.place
    if place is None or not place.field:
        return found
    field = run.case.field(place.field)
    byte = field.byte({axis: place.coordinate[axis] for axis in field.extents})
    position = held(run.case, place.buffer).position(byte)
    off = run.expectation.off(place.buffer, position, run.after[place.buffer])
    if not off:
        return found
    return msgspec.structs.replace(found, message=f"a number is farther off than its bound: {off}")


def complete(runs: Runs) -> Violation | None:
    """Every byte that must be written was."""
    run = runs[BASE]
    expectation = run.expectation
    wrong = {
        name: expectation.wrong(name, run.after[name]) & unwritten(run, name) for name in run.missed
    }
    message = "a byte that the op must write still holds what was there before"
    return first_violation(run, wrong, expectation.must, message, expectation.images)


def frame(runs: Runs) -> Violation | None:
    """No other byte of a written buffer changed, guard zones included."""
    run = runs[BASE]
    must = run.expectation.must
    never = {name: ~mask for name, mask in must.items()} if run.missed else {}
    wrong = {name: never[name] & (run.after[name] != run.before[name]) for name in run.missed}
    message = "a byte that the op must not touch was overwritten"
    found = first_violation(run, wrong, never, message, run.before)
    return found or _far_write(run, [name for name in run.before if name in must], "the allocation")


def _far_write(run: Run, names: list[str], what: str) -> Violation | None:
    """A write to the guard zone of a buffer, or to a byte of a large one that no block names."""
    for name in names:
        if name in run.guards_broken:
            message = f"the guard zone around {what} was overwritten"
            return Violation(message, Place(name, run.guards_broken[name]))
        if name in run.outside:
            message = f"a byte of {what} was written, far from every block that the batch names"
            return Violation(message, place_of(run.case, name, run.outside[name]))
    return None


def rewritten(runs: Runs) -> list[Hazard]:
    """Equal rewrites outside the bytes that must be written: they race, and change nothing yet."""
    run = runs[BASE]
    hazards = []
    for name, written in (run.written or {}).items():
        must = run.expectation.must.get(name)
        if must is None or image.same(written, must):
            continue
        equal = written & ~must & (run.after[name] == run.before[name])
        if image.is_any(equal):
            place = place_of(run.case, name, _address(run.case, name, equal))
            what = f"bytes of {place.field or 'no element'} in {name} that it need not write"
            hazards.append(Hazard("rewrite", f"the op rewrites {what} with equal values"))
    return hazards


def immutable(runs: Runs) -> Violation | None:
    """A buffer that the op only reads has not changed in any byte."""
    run = runs[BASE]
    only_read = [name for name in run.before if name not in run.expectation.written]
    changed = [name for name in only_read if not image.same(run.after[name], run.before[name])]
    wrong = {name: run.after[name] != run.before[name] for name in changed}
    judged = {name: torch.ones_like(run.before[name]) for name in only_read} if changed else {}
    message = "a buffer that the op only reads was changed"
    found = first_violation(run, wrong, judged, message, run.before)
    return found or _far_write(run, only_read, "a buffer that is only read")
