"""A plan case as tables: who shares bytes with whom, and what was found wrong about it."""

from kvfuzz.model.cache_plan import CacheLayer, CachePlan, Placement
from kvfuzz.model.plan_case import PlanCase
from kvfuzz.model.verdict import PropertyResult
from kvfuzz.reports.text import Pairs, count, numbers

MOST_LAYERS = 8
MOST_ALLOCATIONS = 3


def plan_rows(case: PlanCase) -> Pairs:
    """The plan in a row for each group and placement."""
    rows: Pairs = [("op", case.op), *cache_rows(case.plan)]
    if case.block_ids:
        held = f"{numbers(case.block_ids)}, {case.expanded.ratio} kernel blocks each"
        rows.append(("block_ids", held))
    return rows


def cache_rows(plan: CachePlan) -> Pairs:
    """A plan in a row for each group and placement."""
    rows: Pairs = [
        ("plan", f"{count(plan.num_blocks, 'block')}, {_placed(plan)}"),
    ]
    for number, group in enumerate(plan.groups):
        rows.append((f"group {number}", _format(plan.layer(group[0]))))
        rows.append(("", _listed(list(group))))
    rows += [(f"{each.name} shares", f"the cache of {each.shares}") for each in plan.sharers]
    for allocation in plan.allocations[:MOST_ALLOCATIONS]:
        rows.append((allocation.name, f"{allocation.nbytes:,} bytes"))
        over = [each for each in plan.placements if each.allocation == allocation.name]
        rows += [("", _placement(each)) for each in over[:MOST_LAYERS]]
    if rest := plan.allocations[MOST_ALLOCATIONS:]:
        total = sum(each.nbytes for each in rest)
        rows.append(("", f"and {count(len(rest), 'more allocation')}, {total:,} bytes"))
    return rows


def _placed(plan: CachePlan) -> str:
    if plan.kv_layout:
        return f"one buffer by {plan.kv_layout}"
    return "packed" if plan.placed == "packed" else "separate allocations"


def _listed(names: list[str]) -> str:
    more = f" and {len(names) - MOST_LAYERS} more" if len(names) > MOST_LAYERS else ""
    return ", ".join(names[:MOST_LAYERS]) + more


def _format(layer: CacheLayer) -> str:
    padded = f" padded to {layer.page_padded:,}" if layer.page_padded else ""
    page = f"page {layer.page_bytes:,} bytes{padded}"
    if not layer.is_attention:
        states = ", ".join(f"{state.dtype} {list(state.shape)}" for state in layer.states)
        return f"{layer.kind}, states {states}, {page}"
    split = f" ({layer.ratio} kernel blocks)" if layer.ratio > 1 else ""
    heads = f"{layer.head_size}" + (f" and {layer.head_size_v}" if layer.head_size_v else "")
    return (
        f"{layer.kind}, {layer.form} {layer.order}, block_size={layer.block_size}{split}, "
        f"num_kv_heads={layer.num_kv_heads}, head_size={heads}, {layer.cache_dtype}, {page}"
    )


def _placement(each: Placement) -> str:
    apart = f", layers {each.layer_stride:,} apart" if each.layer_stride else ""
    return (
        f"{_listed(list(each.layers))}: from byte {each.offset:,}, blocks {each.block_stride:,} "
        f"apart{apart}"
    )


def plan_evidence(result: PropertyResult) -> Pairs:
    """The first byte that shows what is wrong."""
    place = result.violation.place if result.violation else None
    if place is None:
        return []
    part = f"{place.field} of " if place.field else ""
    where = f"byte {place.byte:,} of {place.buffer}"
    block = f", block {place.coordinate['block']}" if "block" in place.coordinate else ""
    return [("first wrong", f"{part}layer {place.layer}{block}: {where}")]


def reduced_sizes(case: PlanCase) -> dict[str, str]:
    """What a smaller plan has less of."""
    return {
        "layers": str(len(case.plan.layers)),
        "groups": str(len(case.plan.groups)),
        "blocks": str(case.plan.num_blocks),
    }
