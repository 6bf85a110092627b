"""What must hold of the regions that a connector moves, and of an expanded block table."""

import numpy as np

from kvfuzz.model.cache_plan import CacheLayer
from kvfuzz.model.layer_view import Region
from kvfuzz.model.plan_views import expected, storages
from kvfuzz.model.verdict import Place, Violation
from kvfuzz.oracles.byte_map import Runs, merged, overlap, together
from kvfuzz.oracles.plan_run import PlanRun


def crash(run: PlanRun) -> Violation | None:
    """The target raises nothing but what it declares."""
    return Violation(run.error) if run.error else None


def bounds(run: PlanRun) -> Violation | None:
    """Every region of every block lies in its allocation."""
    sizes = {each.name: each.nbytes for each in run.case.plan.allocations}
    for region in run.made.regions:
        last = region.address + (run.case.plan.num_blocks - 1) * region.stride + region.length - 1
        if region.address < 0 or region.length < 1 or last >= sizes[region.allocation]:
            return Violation(
                f"a region of layer {region.layer} reaches byte {last} of {region.allocation}, "
                f"which has {sizes[region.allocation]}",
                Place(region.allocation, last, "", region.layer),
            )
    return None


def disjoint(run: PlanRun) -> Violation | None:
    """No byte of a layer is moved twice."""
    for layer in run.case.plan.owners:
        found = overlap(_moved(run, layer))
        if found is not None:
            byte, one, other = found
            return Violation(
                f"byte {byte} is moved twice with layer {layer.name}, in blocks {one} and {other}",
                Place(_regions(run, layer)[0].allocation, byte, "", layer.name, {"block": other}),
            )
    return None


def page_bytes(run: PlanRun) -> Violation | None:
    """The regions of a block are its page: every byte of it, of nothing else, of no padding."""
    plan = run.case.plan
    for layer in plan.owners:
        allocation = plan.placement_of[layer.name].allocation
        views = expected(plan, layer, storages(plan, allocation)[0])
        page = merged(together([run.runs(view) for view in views]))
        moved = merged(_moved(run, layer))
        if not _same(moved, page):
            return Violation(
                f"the regions of layer {layer.name} are not its pages: {moved.nbytes} bytes of "
                f"{page.nbytes}, and others from here on",
                Place(allocation, _first_difference(moved, page), "", layer.name),
            )
    return None


def expanded(run: PlanRun) -> Violation | None:
    """Kernel block `b * ratio + i` is part i of manager block b, in order."""
    ratio = run.case.expanded.ratio
    right = [block * ratio + part for block in run.case.block_ids for part in range(ratio)]
    got = list(run.made.kernel_blocks)
    if got == right:
        return None
    at = next((i for i, (a, b) in enumerate(zip(got, right, strict=False)) if a != b), len(right))
    return Violation(
        f"entry {at} of {len(got)} kernel blocks is {got[at] if at < len(got) else 'missing'}, "
        f"expected {right[at] if at < len(right) else 'no more than ' + str(len(right))} "
        f"({ratio} kernel blocks a block)"
    )


def _regions(run: PlanRun, layer: CacheLayer) -> list[Region]:
    return [region for region in run.made.regions if region.layer == layer.name]


def _moved(run: PlanRun, layer: CacheLayer) -> Runs:
    """The runs that are moved with the blocks of a layer that are looked at."""
    blocks = np.asarray(run.blocks, np.int64)
    none = np.empty(0, np.int64)
    return together(
        [
            Runs(none, none, none),
            *(
                Runs(
                    region.address + blocks * region.stride,
                    region.address + blocks * region.stride + region.length,
                    blocks,
                )
                for region in _regions(run, layer)
            ),
        ]
    )


def _same(one: Runs, other: Runs) -> bool:
    return all(np.array_equal(a, b) for a, b in zip(one, other, strict=True))


def _first_difference(one: Runs, other: Runs) -> int:
    count = min(one.starts.size, other.starts.size)
    differs = (one.starts[:count] != other.starts[:count]) | (
        one.ends[:count] != other.ends[:count]
    )
    at = int(differs.argmax()) if differs.any() else max(count - 1, 0)
    return int((one if one.starts.size > at else other).starts[at])
