"""Targets of plan ops: how each is called, and how what it returns becomes data.

Views are made over buffers of torch's `meta` device, which have sizes and strides and no memory, so
that a plan of true size costs nothing. A function in a file, and our own, take and return:

    cache_views(allocations: dict[str, Tensor], plan) -> dict[layer, dict[part, Tensor]]
    transfer_regions(plan) -> list[Region]
    expand_block_table(block_ids: tuple[int, ...], ratio: int) -> list[int]
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kvfuzz.kernels.torch_dtypes import TORCH_DTYPES
from kvfuzz.model.cache_plan import CachePlan
from kvfuzz.model.layer_view import LayerView
from kvfuzz.model.plan_case import Made, PlanCase
from kvfuzz.model.target import TargetInfo

NAMES = {dtype: name for name, dtype in TORCH_DTYPES.items()} | {torch.int8: "u8"}
"""int8 is what engines allocate bytes as."""

Views = Mapping[str, Mapping[str, Tensor]]
"""By layer and part."""


class NotAViewError(Exception):
    """A target returned a tensor that is over none of the allocations, or of no cache's type."""


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
    """The views as data. Raises NotAViewError for what can be none."""
    owner = {_storage(tensor): name for name, tensor in over.items()}
    made = []
    for layer, parts in views.items():
        for part, tensor in parts.items():
            if _storage(tensor) not in owner:
                raise NotAViewError(f"{part} of layer {layer} is a copy, not a view of its cache")
            if tensor.dtype not in NAMES:
                raise NotAViewError(f"{part} of layer {layer} is of {tensor.dtype}")
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
            return observed(function(over, case.plan), over)
        if op == "transfer_regions":
            return Made(regions=tuple(function(case.plan)))
        return Made(kernel_blocks=tuple(function(case.block_ids, case.expanded.ratio)))

    return call
