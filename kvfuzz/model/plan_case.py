"""A case about a cache plan: an op that reads no bytes, and decides which bytes belong to whom.

cache_views         allocations and the plan in, the views of every layer out
transfer_regions    the plan in, out what a connector moves of each block of every layer
expand_block_table  the blocks that requests hold in, out the kernel blocks that a kernel indexes
"""

import msgspec

from kvfuzz.errors import UsageError
from kvfuzz.model import plan_check
from kvfuzz.model.cache_plan import CacheLayer, CachePlan
from kvfuzz.model.layer_view import LayerView, Region
from kvfuzz.model.plan_views import preferred_views

PLAN_OPS: tuple[str, ...] = ("cache_views", "transfer_regions", "expand_block_table")

MOST_BLOCK_IDS = 4096


class PlanCase(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="plan"):
    """The whole input of an op on a plan."""

    op: str
    plan: CachePlan
    block_ids: tuple[int, ...] = ()
    """Of expand_block_table: the manager blocks of one request of the first group, in order."""

    @property
    def nbytes(self) -> int:
        """Bytes of all allocations."""
        return sum(each.nbytes for each in self.plan.allocations)

    @property
    def expanded(self) -> CacheLayer:
        """The layer whose kernel blocks expand_block_table counts: the first that has some."""
        first = next((each for each in self.plan.layers if each.is_attention), None)
        return first or self.plan.layers[0]


class Made(msgspec.Struct, frozen=True):
    """What a target made of a plan case: one of the three, by op."""

    views: tuple[LayerView, ...] = ()
    regions: tuple[Region, ...] = ()
    kernel_blocks: tuple[int, ...] = ()


def check_sizes(plan: CachePlan) -> None:
    """Raise UsageError unless every view of a plan lies in its allocation."""
    sizes = {each.name: each.nbytes for each in plan.allocations}
    for view in preferred_views(plan):
        if view.last_byte() >= sizes[view.allocation]:
            raise UsageError(
                f"impossible plan: {view.part} of {view.layer} reaches byte {view.last_byte()} of "
                f"{view.allocation}, which has {sizes[view.allocation]}"
            )


def check(case: PlanCase) -> None:
    """Raise UsageError with the first thing that makes `case` impossible to execute or judge."""
    if case.op not in PLAN_OPS:
        raise UsageError(f"op={case.op!r}, expected one of {', '.join(PLAN_OPS)}")
    plan_check.check(case.plan)
    check_sizes(case.plan)
    wanted = case.op == "expand_block_table"
    if bool(case.block_ids) != wanted or len(case.block_ids) > MOST_BLOCK_IDS:
        raise UsageError(
            f"block_ids={case.block_ids} of op={case.op}: expand_block_table takes 1 to "
            f"{MOST_BLOCK_IDS} of them, other ops none"
        )
    if any(not 0 <= block < case.plan.num_blocks for block in case.block_ids):
        raise UsageError(
            f"block_ids={case.block_ids}, expected 0 to {case.plan.num_blocks - 1} (num_blocks)"
        )
