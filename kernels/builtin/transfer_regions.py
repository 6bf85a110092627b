"""What a KV connector moves of every block of a plan: one region for each piece of a page.

Written for clarity: a page that lies in one piece is one region; where K and V lie apart each of
them is one, and where heads do, each head with its K and V. A layer that shares a cache moves
nothing.
"""

from collections.abc import Sequence

from kvfuzz.model.cache_plan import CachePlan
from kvfuzz.model.dtypes import itemsize
from kvfuzz.model.layer_view import LayerView, Region


def transfer_regions(plan: CachePlan, views: Sequence[LayerView]) -> list[Region]:
    """The regions of all layers whose caches have `views`; addresses, lengths, strides in bytes."""
    regions = []
    for layer in plan.owners:
        mine = [view for view in views if view.layer == layer.name]
        stride = mine[0].strides[0] * layer.ratio
        starts = _pieces(mine, layer.ratio, layer.page_bytes)
        for start in starts:
            length = layer.page_bytes // len(starts)
            regions.append(Region(layer.name, mine[0].allocation, start, length, stride))
    return regions


def _pieces(views: Sequence[LayerView], ratio: int, page_bytes: int) -> list[int]:
    """Where the pieces of block 0 begin; they are equally long."""
    first = min(view.offset for view in views)
    last = max(view.offset + _extent(view, ratio) for view in views)
    if last - first == page_bytes or len(views) == 1 or views[0].part != "k":
        return [first]
    if all(_extent(view, ratio) * 2 == page_bytes for view in views):
        return [view.offset for view in views]
    heads, apart = views[0].shape[2], views[0].strides[2]
    return [views[0].offset + head * apart for head in range(heads)]


def _extent(view: LayerView, ratio: int) -> int:
    """Bytes from the first to the last one of a manager block."""
    inside = zip(view.shape[1:], view.strides[1:], strict=True)
    reach = sum((size - 1) * stride for size, stride in inside)
    return (ratio - 1) * view.strides[0] + reach + itemsize(view.dtype)
