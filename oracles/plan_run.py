"""What a target made of a plan case, and the bytes that each layer owns by it."""

from dataclasses import dataclass
from functools import cached_property

from kvfuzz.model.cache_plan import CacheLayer
from kvfuzz.model.layer_view import LayerView
from kvfuzz.model.plan_case import Made, PlanCase
from kvfuzz.model.plan_views import preferred_views
from kvfuzz.oracles.byte_map import (
    Runs,
    blocks_of,
    merged,
    overlap,
    runs_in_block,
    runs_of,
    together,
)


@dataclass(frozen=True, eq=False)
class PlanRun:
    """One execution of a plan case."""

    case: PlanCase
    made: Made
    error: str = ""
    """The exception that the target raised, in one line, or what is wrong with what it returned."""
    refused: str = ""
    """The declared refusal that it raised."""

    @cached_property
    def blocks(self) -> list[int]:
        """The manager blocks that are looked at."""
        plan = self.case.plan
        views = self.made.views or preferred_views(plan)
        runs = sum(runs_in_block(view, plan.num_blocks) for view in views)
        return blocks_of(plan.num_blocks, runs)

    @cached_property
    def views_of(self) -> dict[str, list[LayerView]]:
        """By layer, its views."""
        found: dict[str, list[LayerView]] = {layer.name: [] for layer in self.case.plan.layers}
        for view in self.made.views:
            found[view.layer].append(view)
        return found

    def runs(self, view: LayerView) -> Runs:
        """The runs of a view in the blocks that are looked at."""
        return runs_of(view, self.case.plan.num_blocks, self.blocks)

    @cached_property
    def _elements(self) -> dict[str, Runs]:
        """By layer with a cache of its own, the runs of all its views, which may overlap."""
        return {
            layer.name: together([self.runs(view) for view in self.views_of[layer.name]])
            for layer in self.case.plan.owners
        }

    @cached_property
    def tangled(self) -> set[str]:
        """The layers of which some byte is two elements."""
        return {name for name, runs in self._elements.items() if overlap(runs)}

    @cached_property
    def owned(self) -> dict[str, Runs]:
        """By layer with a cache of its own, the bytes of its blocks; its views must not overlap."""
        return {name: merged(runs) for name, runs in self._elements.items()}

    @cached_property
    def over(self) -> dict[str, list[CacheLayer]]:
        """By allocation, the layers with a cache of their own over it."""
        plan = self.case.plan
        found: dict[str, list[CacheLayer]] = {each.name: [] for each in plan.allocations}
        for layer in plan.owners:
            found[self.views_of[layer.name][0].allocation].append(layer)
        return found
