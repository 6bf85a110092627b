"""Targets of plan ops: how each is called, and how what it returns becomes data.

Views are made over buffers of torch's `meta` device, which have sizes and strides and no memory, so
that a plan of true size costs nothing. A function in a file, and our own, take and return:

    cache_views(allocations: dict[str, Tensor], plan) -> dict[layer, dict[part, Tensor]]
    transfer_regions(plan, views: list[LayerView]) -> list[Region]
    expand_block_table(block_ids: tuple[int, ...], ratio: int) -> list[int]
"""

import operator
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kvfuzz.kernels.torch_dtypes import TORCH_DTYPES
from kvfuzz.model.cache_plan import CachePlan
from kvfuzz.model.layer_view import LayerView, Region
from kvfuzz.model.plan_case import Made, PlanCase
from kvfuzz.model.plan_views import preferred_views
from kvfuzz.model.target import TargetInfo

NAMES = {dtype: name for name, dtype in TORCH_DTYPES.items()} | {torch.int8: "u8"}
"""int8 is what engines allocate bytes as."""

Views = Mapping[str, Mapping[str, Tensor]]
"""By layer and part."""


class WrongResultError(Exception):
    """A target returned what its op does not ask for: a tensor that is over no allocation, a layer
    that the plan does not have, no integer."""


@dataclass(frozen=True, slots=True)
class PlanAdapter:
    """A target of a plan op that can be called."""

    info: TargetInfo
    call: Callable[[PlanCase], Made]
    refusals: tuple[type[BaseException], ...] = ()
    """Exceptions by which the target declares that it refuses a plan."""


def buffers(plan: CachePlan) -> dict[str, Tensor]:
    """The allocations of a plan, uint8 `[nbytes]` each, without memory."""
    return {
        each.name: torch.empty(each.nbytes, dtype=torch.uint8, device="meta")
        for each in plan.allocations
    }


def observed(views: Views, over: Mapping[str, Tensor]) -> Made:
    """The views as data. Raises WrongResultError for what can be none."""
    owner = {_storage(tensor): name for name, tensor in over.items()}
    made = []
    for layer, parts in views.items():
        for part, tensor in parts.items():
            if _storage(tensor) not in owner:
                raise WrongResultError(
                    f"{part} of layer {layer} is a copy, not a view of its cache"
                )
            if tensor.dtype not in NAMES:
                raise WrongResultError(f"{part} of layer {layer} is of {tensor.dtype}")
            element = tensor.element_size()
            made.append(
                LayerView(
                    layer,
                    part,
                    owner[_storage(tensor)],
                    NAMES[tensor.dtype],
                    tuple(tensor.shape),
                    tuple(stride * element for stride in tensor.stride()),
                    int(tensor.storage_offset()) * element,
                )
            )
    return Made(views=tuple(made))


def _storage(tensor: Tensor) -> int:
    handle: int = tensor.untyped_storage()._cdata
    return handle


def bind(function: Callable[..., Any], op: str) -> Callable[[PlanCase], Made]:
    """The call that hands `function` what its op takes, in this order."""

    def call(case: PlanCase) -> Made:
        if op == "cache_views":
            over = buffers(case.plan)
            made = function(over, case.plan)
            names = {layer.name for layer in case.plan.layers}
            if unknown := [name for name in made if name not in names]:
                raise WrongResultError(f"views of {unknown}, which the plan does not have")
            return observed(made, over)
        if op == "transfer_regions":
            return Made(
                regions=_regions(case.plan, function(case.plan, preferred_views(case.plan)))
            )
        expanded = function(case.block_ids, case.expanded.ratio)
        return Made(kernel_blocks=tuple(_integer(each, "a kernel block") for each in expanded))

    return call


def _regions(plan: CachePlan, found: Iterable[Any]) -> tuple[Region, ...]:
    """Regions as data. Raises WrongResultError for one of no layer with a cache of its own, or over
    another allocation than its layer is."""
    placed = plan.placement_of
    regions = []
    for each in found:
        if not isinstance(each, Region):
            raise WrongResultError(f"{each!r} is no Region")
        if each.layer not in placed:
            raise WrongResultError(f"a region of {each.layer!r}, which has no cache of its own")
        if each.allocation != placed[each.layer].allocation:
            raise WrongResultError(
                f"a region of {each.layer} over {each.allocation!r}, expected "
                f"{placed[each.layer].allocation}"
            )
        numbers = (each.address, each.length, each.stride)
        regions.append(
            Region(each.layer, each.allocation, *(_integer(n, "a region") for n in numbers))
        )
    return tuple(regions)


def _integer(value: Any, what: str) -> int:
    """A Python integer of what is one in NumPy or torch. Raises WrongResultError for others."""
    try:
        return operator.index(value)
    except TypeError:
        raise WrongResultError(f"{what} is {value!r}, expected an integer") from None
