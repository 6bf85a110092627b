"""What must hold of the views of a cache plan, decided by counting bytes.

Layers of one group get a block id together, so that each byte of a block is one element of one of
them. Layers of different groups share bytes, and a block id belongs to one group at a time: the
bytes of block i of one must not be bytes of block j of another (#43945, #47035, #47685).
"""

from itertools import combinations

import msgspec

from kvfuzz.model.cache_plan import CacheLayer
from kvfuzz.model.layer_view import LayerView
from kvfuzz.model.plan_views import (
    expected,
    is_in_one_piece,
    parts_of,
    preferred_views,
    storages,
)
from kvfuzz.model.verdict import Place, Violation
from kvfuzz.oracles.byte_map import disagreement, overlap, together
from kvfuzz.oracles.plan_run import PlanRun


def crash(run: PlanRun) -> Violation | None:
    """The target raises nothing but what it declares, and returns what the op asks for."""
    if run.error:
        return Violation(run.error)
    for layer in run.case.plan.layers:
        parts = [view.part for view in run.views_of[layer.name]]
        if sorted(parts) != sorted(parts_of(layer)):
            return Violation(
                f"layer {layer.name} got the views {parts}, expected {list(parts_of(layer))}"
            )
    return None


def bounds(run: PlanRun) -> Violation | None:
    """Every element of every view lies in its allocation."""
    sizes = {each.name: each.nbytes for each in run.case.plan.allocations}
    planned = run.case.plan.placement_of
    for view in run.made.views:
        owner = run.case.plan.layer(view.layer).shares or view.layer
        if view.allocation != planned[owner].allocation:
            return Violation(
                f"{_named(view)} is over {view.allocation}, not {planned[owner].allocation}",
                Place(view.allocation, view.offset, view.part, view.layer),
            )
        if view.offset < 0 or view.last_byte() >= sizes[view.allocation]:
            return Violation(
                f"{_named(view)} reaches byte {view.last_byte()} of {view.allocation}, which has "
                f"{sizes[view.allocation]}",
                Place(view.allocation, view.last_byte(), view.part, view.layer),
            )
    return None


def shape(run: PlanRun) -> Violation | None:
    """Every view has the shape and the type that its layer's kernels index (#47314)."""
    wanted = {(view.layer, view.part): view for view in preferred_views(run.case.plan)}
    for view in run.made.views:
        right = wanted[view.layer, view.part]
        if (view.shape, view.dtype) != (right.shape, right.dtype):
            return Violation(
                f"{_named(view)} is {list(view.shape)} of {view.dtype}, expected "
                f"{list(right.shape)} of {right.dtype}",
                Place(view.allocation, view.offset, view.part, view.layer),
            )
    return None


def aliasing(run: PlanRun) -> Violation | None:
    """Layers of different groups over one allocation agree on whose bytes a block id names."""
    group_of = run.case.plan.group_of
    for allocation, layers in run.over.items():
        for one, other in combinations(layers, 2):
            if group_of[one.name] == group_of[other.name] or {one.name, other.name} & run.tangled:
                continue
            found = disagreement(run.owned[one.name], run.owned[other.name])
            if found is not None:
                byte, theirs, mine = found
                return Violation(
                    f"{one.name} and {other.name} disagree on block {mine}: byte {byte} of "
                    f"{allocation} is in block {mine} of {other.name} and in block {theirs} of "
                    f"{one.name}",
                    Place(allocation, byte, "", other.name, {"block": mine}),
                )
    return None


def disjoint(run: PlanRun) -> Violation | None:
    """No byte is two elements: of a view, of two parts of a layer, of two layers of a group."""
    group_of = run.case.plan.group_of
    for layer in run.case.plan.owners:
        views = run.views_of[layer.name]
        for view in views:
            if (found := overlap(run.runs(view))) is not None:
                return _shared_byte(view.allocation, found, _named(view), _named(view), layer)
        for one, other in combinations(views, 2):
            if one.allocation == other.allocation:
                found = overlap(together([run.runs(one), run.runs(other)]))
                if found is not None:
                    return _shared_byte(one.allocation, found, _named(one), _named(other), layer)
    for allocation, layers in run.over.items():
        for first, second in combinations(layers, 2):
            apart = group_of[first.name] != group_of[second.name]
            if apart or {first.name, second.name} & run.tangled:
                continue
            found = overlap(together([run.owned[first.name], run.owned[second.name]]))
            if found is not None:
                return _shared_byte(
                    allocation, found, f"layer {first.name}", f"layer {second.name}", second
                )
    return None


def _shared_byte(
    allocation: str, found: tuple[int, int, int], one: str, other: str, layer: CacheLayer
) -> Violation:
    byte, first, second = found
    twice = "two elements of " + one if one == other else f"in {one} and in {other}"
    return Violation(
        f"byte {byte} of {allocation} is {twice}, in blocks {first} and {second}",
        Place(allocation, byte, "", layer.name, {"block": second}),
    )


def page_bytes(run: PlanRun) -> Violation | None:
    """The views of a block have the bytes of one page, and none of them is padding.

    Where a page lies in one piece, that piece is the one that the plan places.
    """
    plan = run.case.plan
    for layer in (each for each in plan.owners if each.name not in run.tangled):
        owned, at = run.owned[layer.name], plan.placement_of[layer.name]
        wanted = layer.page_bytes * len(run.blocks)
        if owned.nbytes != wanted:
            return Violation(
                f"the views of {layer.name} have {owned.nbytes} bytes in {len(run.blocks)} blocks, "
                f"expected pages of {layer.page_bytes}",
                Place(at.allocation, int(owned.starts[0]), "", layer.name),
            )
        if not is_in_one_piece(plan, layer):
            continue
        start = at.offset + at.layers.index(layer.name) * at.layer_stride
        pages = start + owned.blocks * at.block_stride
        outside = (owned.starts < pages) | (owned.ends > pages + layer.page_bytes)
        if outside.any():
            first = int(outside.argmax())
            byte, page = int(owned.starts[first]), int(pages[first])
            byte = byte if byte < page else max(byte, page + layer.page_bytes)
            return Violation(
                f"byte {byte} of {at.allocation} is of block {int(owned.blocks[first])} by the "
                f"views of {layer.name}, whose page is bytes {page} to "
                f"{page + layer.page_bytes - 1}: padding, or another layer's",
                Place(at.allocation, byte, "", layer.name),
            )
    return None


def sharing(run: PlanRun) -> Violation | None:
    """A layer that shares a cache has the views of the layer that owns it."""
    for layer in run.case.plan.sharers:
        mine = {view.part: _placed(view) for view in run.views_of[layer.name]}
        theirs = {view.part: _placed(view) for view in run.views_of[layer.shares]}
        for part, view in theirs.items():
            if mine[part] != view:
                return Violation(
                    f"{part} of layer {layer.name} is not that of {layer.shares}, whose cache it "
                    f"shares: {_described(mine[part])}, expected {_described(view)}",
                    Place(mine[part].allocation, mine[part].offset, part, layer.name),
                )
    return None


def oracle(run: PlanRun) -> Violation | None:
    """Every view lies where the formula of its form says, by one storage of its allocation."""
    plan = run.case.plan
    made = {(view.layer, view.part): view.addresses() for view in run.made.views}
    at = plan.placement_of
    for allocation in plan.allocations:
        over = [
            layer
            for layer in plan.layers
            if at[layer.shares or layer.name].allocation == allocation.name
        ]
        wrong = []
        for storage in storages(plan, allocation.name):
            views = [view.addresses() for layer in over for view in expected(plan, layer, storage)]
            bad = [view for view in views if made[view.layer, view.part] != view]
            if not bad:
                break
            wrong.append(bad)
        else:
            right = min(wrong, key=len)[0]
            got = made[right.layer, right.part]
            return Violation(
                f"{_named(right)} is {_described(got)}, expected {_described(right)}",
                Place(right.allocation, right.offset, right.part, right.layer),
            )
    return None


def _placed(view: LayerView) -> LayerView:
    """A view without the name of its layer."""
    return msgspec.structs.replace(view.addresses(), layer="")


def _named(view: LayerView) -> str:
    return f"{view.part} of layer {view.layer}"


def _described(view: LayerView) -> str:
    return (
        f"{list(view.shape)} of {view.dtype} at byte {view.offset} of {view.allocation}, strides "
        f"{list(view.strides)}"
    )
