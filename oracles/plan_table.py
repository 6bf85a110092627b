"""The properties of plan cases, by op, in the order in which a finding is named after them."""

from collections.abc import Callable
from typing import NamedTuple

from kvfuzz.model.verdict import Violation
from kvfuzz.oracles import plan_properties, plan_regions
from kvfuzz.oracles.plan_run import PlanRun


class PlanProperty(NamedTuple):
    """One thing that must hold of what a target made; `judge` returns None where it does.

    Where one that is `basic` fails, those after it mean nothing and are not checked.
    """

    name: str
    judge: Callable[[PlanRun], Violation | None]
    basic: bool = False


PLAN_PROPERTIES: dict[str, tuple[PlanProperty, ...]] = {
    "cache_views": (
        PlanProperty("crash", plan_properties.crash, basic=True),
        PlanProperty("bounds", plan_properties.bounds, basic=True),
        PlanProperty("shape", plan_properties.shape, basic=True),
        PlanProperty("aliasing", plan_properties.aliasing),
        PlanProperty("disjoint", plan_properties.disjoint),
        PlanProperty("page_bytes", plan_properties.page_bytes),
        PlanProperty("sharing", plan_properties.sharing),
        PlanProperty("oracle", plan_properties.oracle),
    ),
    "transfer_regions": (
        PlanProperty("crash", plan_regions.crash, basic=True),
        PlanProperty("bounds", plan_regions.bounds, basic=True),
        PlanProperty("disjoint", plan_regions.disjoint, basic=True),
        PlanProperty("page_bytes", plan_regions.page_bytes),
    ),
    "expand_block_table": (
        PlanProperty("crash", plan_regions.crash, basic=True),
        PlanProperty("oracle", plan_regions.expanded),
    ),
}
