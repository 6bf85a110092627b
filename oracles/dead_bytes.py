"""dead_bytes: no result depends on bytes that, by contract, nothing may depend on.

What is dead is in `kvfuzz.oracles.liveness`. Two runs hold other finite bytes there, and a third
holds NaNs, which 0 * x does not hide; a target may declare that it relies on finite ones. What an
engine has written itself (tokens in front of a window) is no NaN in any of them. Stale entries of a
block table become other blocks, since an engine leaves ids of real blocks there.
Where every read is recorded and none is of a dead byte, nothing can depend on one and nothing runs
again. A dead byte that is read to no effect is a hazard.
"""

import torch
from torch import Tensor

from kvfuzz.model.case import Program
from kvfuzz.model.dtypes import DTYPES, FINITE_UNSIGNED_ZERO, itemsize
from kvfuzz.model.fill import IntegerFill
from kvfuzz.model.held import held
from kvfuzz.model.verdict import Hazard, Place, Violation
from kvfuzz.oracles import image
from kvfuzz.oracles.liveness import near_elements
from kvfuzz.oracles.observation import Run
from kvfuzz.oracles.properties import BASE, Judgement, NotChecked, Runs, Variant, Wanted
from kvfuzz.oracles.related import changed_elsewhere, ended, same_results
from kvfuzz.oracles.stored_bytes import place_of, unwritten

FINITE = {"dead_zero": 0x00, "dead_small": 0x3C}
"""Two fills that decode to finite numbers in every format."""
NAN = "dead_nan"
OPAQUE = 0xFF
"""What stands for a NaN where bytes are no numbers."""
INTEGERS = {"i32": torch.int32, "i64": torch.int64}
"""By format of metadata, how torch calls it."""
_MANNER = {
    "dead_zero": "zeros",
    "dead_small": "other finite numbers (0x3c bytes)",
    NAN: "NaNs",
}


def nan_byte(dtype: str) -> int:
    """The byte that makes a NaN of every format with the specials of `dtype`, repeated."""
    return 0x80 if DTYPES[dtype].specials == FINITE_UNSIGNED_ZERO else 0xFF


def dead_byte_variants(base: Run) -> Wanted:
    """The case with other dead bytes, unless it is on record that none was read."""
    if base.is_read_recorded and not base.dead_reads:
        return {}
    images = {
        name: _images(base, byte, by) for by, (name, byte) in enumerate(FINITE.items(), start=1)
    }
    if base.target.dead.may_hold == "nan":
        images[NAN] = _images(base, None, by=1)
    return {name: Variant(base.case, images=each) for name, each in images.items()}


def _images(base: Run, byte: int | None, by: int) -> dict[str, Tensor]:
    """The images of all buffers with dead bytes, those set to `byte`, or NaNs where it is None.

    Stale entries of a block table name the block that is `by` further on.
    """
    images = {}
    for name, live in base.live.items():
        before = base.before[name]
        fill = base.case.buffer(name).fill
        if isinstance(fill, IntegerFill) and fill.dtype in INTEGERS:
            images[name] = _other_numbers(base.case, name, before, live, by)
        elif byte is not None:
            images[name] = before.masked_fill(~live, byte)
        else:
            images[name] = _with_nans(base.case, name, before, live)
    for each in base.expectation.numbers if byte is None else ():
        if (name := each.field.buffer) in images:
            at = image.element_bytes(each.at, each.field.dtype)
            images[name][at] = base.before[name][at]
    return images


def _other_numbers(case: Program, name: str, before: Tensor, live: Tensor, by: int) -> Tensor:
    """Metadata with other stale entries, such as an engine may have left there: those of a block
    table name any block, those of other tensors are no larger than what was there."""
    fill = case.buffer(name).fill
    assert isinstance(fill, IntegerFill)  # noqa: S101  (its numbers are written out)
    numbers, size = before.view(INTEGERS[fill.dtype]), itemsize(fill.dtype)
    step, below = case.steps[0], max(fill.values, default=0) + 1
    if "block_table" in step.tensors and case.bound_buffer(step, "block_table") == name:
        below = _blocks(case) or below
    other = (numbers + by) % max(below, 1)
    return torch.where(live.view(-1, size)[:, 0], numbers, other).view(torch.uint8)


def _blocks(case: Program) -> int:
    """The blocks of the cache that the first step is about, if it is about one."""
    fields = [case.field(name) for name in case.steps[0].fields.values()]
    return next((each.extents["block"] for each in fields if "block" in each.extents), 0)


def _with_nans(case: Program, name: str, before: Tensor, live: Tensor) -> Tensor:
    """An image with NaNs for its dead elements, each in the format of its field.

    What belongs to no field gets the NaN of the first.
    """
    fields = [field for field in case.fields if field.buffer == name and field.dtype in DTYPES]
    if not fields:
        return before.masked_fill(~live, OPAQUE)
    byte = nan_byte(fields[0].dtype)
    filled = before.masked_fill(~live, byte)
    for field in fields:
        if (other := nan_byte(field.dtype)) != byte:
            at = image.element_bytes(near_elements(case, field, before.device), field.dtype)
            at = at[~live[at]]
            filled[at] = other
    return filled


def dead_bytes(runs: Runs) -> Judgement:
    """No result changes with what dead bytes hold."""
    base = runs[BASE]
    if base.read_outside:
        name, byte = next(iter(base.read_outside.items()))
        where = _sentence(place_of(base.case, name, byte))
        return NotChecked(f"the target reads {where}, far from the batch")
    return _influence(runs)


def _influence(runs: Runs) -> Judgement:
    base = runs[BASE]
    undecided: NotChecked | None = None
    for name, what in _MANNER.items():
        if name not in runs:
            continue
        found = ended(runs[name], f"with {what} in bytes that nothing may depend on")
        found = found or _changed(base, runs[name], what)
        if isinstance(found, Violation):
            return found
        undecided = undecided or found
    return undecided


def _changed(base: Run, other: Run, what: str) -> Violation | None:
    must = base.expectation.must
    # What is not written at all is `complete`'s to find.
    written = {name: mask & ~unwritten(base, name) for name, mask in must.items()}
    message = f"{what} in bytes that nothing may depend on change {{}}; {_first_read(base)}"
    found = same_results(base, other.after, written, message.format("this one"))
    if found is None and changed_elsewhere(base, base.writes, "") is None:
        return changed_elsewhere(other, base.writes, message.format("what else is written"))
    return found


def _first_read(base: Run) -> str:
    for name, mask in base.dead_reads.items():
        byte = held(base.case, name).address(int(torch.nonzero(mask)[0]))
        return f"the target reads {_sentence(place_of(base.case, name, byte))}"
    return "which of them the target reads is not recorded"


def _sentence(place: Place) -> str:
    """`byte 96 of kv_cache (layer.0 k, block 0, token 1)`."""
    parts = [f"{axis} {value}" for axis, value in place.coordinate.items()]
    named = ", ".join([f"{place.layer} {place.field}".strip(), *parts])
    return f"byte {place.byte} of {place.buffer}" + (f" ({named})" if place.field else "")


def dead_reads(runs: Runs) -> list[Hazard]:
    """Reads of dead bytes that change nothing."""
    base = runs[BASE]
    if not base.dead_reads or isinstance(_influence(runs), Violation):
        return []
    return [
        Hazard("dead_read", f"the target reads dead bytes of {_field_of(base, name, mask)}")
        for name, mask in base.dead_reads.items()
    ]


def _field_of(base: Run, name: str, mask: Tensor) -> str:
    byte = held(base.case, name).address(int(torch.nonzero(mask)[0]))
    place = place_of(base.case, name, byte)
    return f"{place.field} in {name}" if place.field not in ("", name) else name
