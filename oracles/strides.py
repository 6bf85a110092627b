"""size1_stride: where a dimension has size 1, its stride says nothing.

PyTorch lets such a stride be anything: a slice keeps the one of what it was cut from, and
is_contiguous() does not look at it. A kernel that reads a size off it (#49012) is right for some
callers only. The last dimension is left alone, since asking for a last stride of 1 is usual; so are
views over split digits (SHUFFLE), whose strides are a convention and no addresses.
"""

from collections import Counter
from typing import NamedTuple

import msgspec
import torch

from kvfuzz.model.case import Program, TensorView
from kvfuzz.model.dtypes import itemsize
from kvfuzz.model.layout import Field
from kvfuzz.oracles.observation import Run
from kvfuzz.oracles.properties import BASE, Judgement, NotChecked, Runs, Variant, Wanted
from kvfuzz.oracles.related import ended, excluded, same_results, sided

OTHER_STRIDES = "other_strides"
FACTOR = 3
"""What a stride is multiplied by: odd, so that it stays as divisible as it was."""


MOST_NAMED = 3
"""Strides that a message names."""


class FreeStride(NamedTuple):
    """The stride of dimension `axis` of `view`, which has size 1 there."""

    view: TensorView
    axis: int

    @property
    def words(self) -> str:
        """`key.stride(0) is 192 instead of 64`, in elements, as a target sees it."""
        here = self.view.strides[self.axis] // itemsize(self.view.dtype)
        return f"{self.view.name}.stride({self.axis}) is {FACTOR * here} instead of {here}"


def free_strides(case: Program) -> list[FreeStride]:
    """The strides of what a case's steps are handed that say nothing."""
    field_of = {
        step.tensors[parameter]: case.field(name)
        for step in case.steps
        for parameter, name in step.fields.items()
        if parameter in step.tensors
    }
    handed = {name for step in case.steps for name in step.tensors.values()}
    return [
        FreeStride(view, axis)
        for view in case.tensors
        if view.name in handed and not (view.name in field_of and _is_split(field_of[view.name]))
        for axis, size in enumerate(view.shape[:-1])
        if size == 1
    ]


def _is_split(field: Field) -> bool:
    """Whether some axis has several digits, so that no stride says where its elements are."""
    return max(Counter(term.axis for term in field.terms).values(), default=0) > 1


def stride_variants(base: Run) -> Wanted:
    """The case with other strides where they say nothing."""
    free = free_strides(base.case)
    if not free:
        return NotChecked("no dimension has size 1")
    tensors = {view.name: view for view in base.case.tensors}
    for each in free:
        strides = list(tensors[each.view.name].strides)
        strides[each.axis] *= FACTOR
        changed = msgspec.structs.replace(tensors[each.view.name], strides=tuple(strides))
        tensors[each.view.name] = changed
    case = msgspec.structs.replace(base.case, tensors=tuple(tensors.values()))
    return excluded(base, case) or {OTHER_STRIDES: Variant(case)}


def size1_stride(runs: Runs) -> Judgement:
    """The stride of a dimension of size 1 changes no byte."""
    base, other = runs[BASE], runs[OTHER_STRIDES]
    words = _words(free_strides(base.case))
    if found := ended(other, f"where {words},"):
        return found
    judged = {
        name: torch.ones_like(base.after[name], dtype=torch.bool) for name in base.expectation.must
    }
    message = f"another byte where {words}{sided(base)}"
    return same_results(base, other.after, judged, message, same_case=False)


def _words(free: list[FreeStride]) -> str:
    more = f", and {len(free) - MOST_NAMED} more change" if len(free) > MOST_NAMED else ""
    return ", ".join(each.words for each in free[:MOST_NAMED]) + more
