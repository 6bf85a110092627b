"""layout_equivariance and block_permutation: one logical cache, kept elsewhere, gives the same.

The other cache holds the same codes for each token that the op reads, and any bytes elsewhere: what
is dead, `dead_bytes` watches. Both go to a plainer case, as `kvfuzz.oracles.related` says: to a
plainer layout, and to the lowest block ids.
"""

from collections.abc import Iterator
from typing import TypeVar

import msgspec
import torch
from torch import Tensor

from kvfuzz.model.case import Case, Program
from kvfuzz.model.dtypes import itemsize
from kvfuzz.model.fill import IntegerFill
from kvfuzz.model.held import held
from kvfuzz.model.ops.op_case import OpCase
from kvfuzz.model.round_trip import touched_blocks
from kvfuzz.model.steps import CACHES, is_write
from kvfuzz.oracles.expectation import Expectation, expect
from kvfuzz.oracles.liveness import read_elements
from kvfuzz.oracles.memory import Elements
from kvfuzz.oracles.observation import Run
from kvfuzz.oracles.plainer import levels_of, plainer
from kvfuzz.oracles.properties import BASE, Judgement, NotChecked, Runs, Variant, Wanted
from kvfuzz.oracles.related import carry, ended, excluded, same_elements

P = TypeVar("P", bound=Program)
PLAINER, RENAMED = "plainer_layout", "renamed_blocks"


def layout_variants(base: Run) -> Wanted:
    """The same logical cache in a plainer layout."""
    other = plainer(base)
    if other is None:
        return NotChecked("the target takes no plainer layout of this cache")
    return excluded(base, other) or {PLAINER: _holding(base, other)}


def layout_equivariance(runs: Runs) -> Judgement:
    """A plainer layout of the same logical cache gives the same results."""
    base, other = runs[BASE], runs[PLAINER]
    here, there = (levels_of(run.layer_case) for run in (base, other))
    names = [f"{axis} {there[axis]}" for axis in there if there[axis] != here[axis]]
    where = f"in {', '.join(names)},"
    if found := ended(other, where):
        return found
    message = f"{where} the same logical cache gives another byte"
    return same_elements(base, other, base.writes, other.writes, message)


def permutation_variants(base: Run) -> Wanted:
    """The case with its blocks renamed to the lowest ids, in the order of their first use."""
    names = renaming(base.layer_case)
    if all(old == new for old, new in names.items()):
        return NotChecked("the blocks have the plainest ids already")
    other = _renamed(base.layer_case, names)
    return excluded(base, other) or {RENAMED: _holding(base, other)}


def block_permutation(runs: Runs) -> Judgement:
    """Other names for the blocks change no result."""
    base, other = runs[BASE], runs[RENAMED]
    names = renaming(base.layer_case)
    words = ", ".join(f"{old} is {new}" for old, new in names.items() if old != new)
    if found := ended(other, f"with blocks renamed ({words})"):
        return found
    message = f"with blocks renamed ({words}) the same cache gives another byte"
    return same_elements(base, other, base.writes, other.writes, message)


def renaming(case: Program) -> dict[int, int]:
    """A permutation of block ids, by id; ids that it lacks keep their name.

    Of a large cache only some blocks are held, so that those in use are renamed among themselves.
    """
    used = touched_blocks(case, case.steps[0])
    caches = {field.buffer for field in case.fields if "block" in field.extents}
    is_whole = all(held(case, name).is_whole for name in caches)
    goals = list(range(len(used))) if is_whole else sorted(used)
    displaced = sorted(set(goals) - set(used))
    freed = sorted(set(used) - set(goals))
    return dict(zip([*used, *displaced], [*goals, *freed], strict=True))


def _renamed(case: P, names: dict[int, int]) -> P:
    step = case.steps[0]
    n = case.bound_field(step, CACHES[0]).extents["token"]

    def slot_of(slot: int) -> int:
        return slot if slot < 0 else names.get(slot // n, slot // n) * n + slot % n

    rename = slot_of if is_write(step) else lambda block: names.get(block, block)
    name = case.bound_buffer(step, "slot_mapping" if is_write(step) else "block_table")
    buffers = []
    for buffer in case.buffers:
        if buffer.name == name and isinstance(buffer.fill, IntegerFill):
            values = tuple(map(rename, buffer.fill.values))
            fill = msgspec.structs.replace(buffer.fill, values=values)
            buffer = msgspec.structs.replace(buffer, fill=fill)
        buffers.append(buffer)
    fields = tuple(
        msgspec.structs.replace(
            field, blocks=tuple(sorted(names.get(block, block) for block in field.blocks))
        )
        for field in case.fields
    )
    return msgspec.structs.replace(case, buffers=tuple(buffers), fields=fields)


def _holding(base: Run, other: Case | OpCase) -> Variant:
    """A run of `other` whose slots hold what the base case's slots do, token by token."""
    images: dict[str, Tensor] = {}
    for source, goal in _pairs(base, other):
        if "block" in goal.field.extents:
            name = goal.field.buffer
            before = base.before[source.field.buffer]
            if name not in images:
                images[name] = _elsewhere(base, before, held(other, name).size)
            carry(before, source, goal, images[name])
    return Variant(other, images=images)


def _pairs(base: Run, other: Case | OpCase) -> Iterator[tuple[Elements, Elements]]:
    """What the base case reads, or holds as numbers without reading, with the same of `other`."""
    if isinstance(other, OpCase):
        there = _read_by(other, base)
        yield from zip(base.reads, there.loaded, strict=True)
        yield from zip(base.expectation.numbers, there.numbers, strict=True)
    else:
        yield from zip(base.reads, read_elements(other, other.steps[0], base.device), strict=True)


def _elsewhere(base: Run, before: Tensor, size: int) -> Tensor:
    """What the other cache holds beside: anything, or what a target asks of bytes that are dead."""
    if base.target.dead.may_hold == "finite":
        return torch.zeros(size, dtype=torch.uint8, device=base.device)
    return _resized(before, size)


def _read_by(case: OpCase, base: Run) -> Expectation:
    """What the reference of a case reads: metadata alone decide that, so that the rest is zeros."""
    images = {}
    for buffer in case.buffers:
        image_of = torch.zeros(held(case, buffer.name).size, dtype=torch.uint8, device=base.device)
        if isinstance(buffer.fill, IntegerFill):
            size = itemsize(buffer.fill.dtype)
            numbers = torch.tensor(buffer.fill.values, dtype=torch.int64, device=base.device)
            shifts = torch.arange(size, device=base.device) * 8
            image_of = (numbers[:, None] >> shifts & 0xFF).to(torch.uint8).flatten()
        images[buffer.name] = image_of
    return expect(case, images, base.quantise, base.target.precision)


def _resized(image: Tensor, size: int) -> Tensor:
    """A copy of the bytes of `image`, again and again where `size` asks for more."""
    if size <= image.numel():
        return image[:size].clone()
    return image.repeat(-(-size // image.numel()))[:size].clone()
