"""What a KV connector moves of every block of a plan: one region for each piece of a page.

Written for clarity: a page that lies in one piece is one region; where K and V, or the heads, of a
layer lie apart, each piece of a block is one. A layer that shares a cache moves nothing.
"""

from kvfuzz.model.cache_plan import CacheLayer, CachePlan
from kvfuzz.model.layer_view import Region


def transfer_regions(plan: CachePlan) -> list[Region]:
    """The regions of all layers; addresses, lengths and strides in bytes."""
    regions = []
    for layer in plan.owners:
        at = plan.placement_of[layer.name]
        start = at.offset + at.layers.index(layer.name) * at.layer_stride
        pieces, apart, stride = _pieces(plan, layer)
        for piece in range(pieces):
            regions.append(
                Region(
                    layer.name,
                    at.allocation,
                    start + piece * apart,
                    layer.page_bytes // pieces,
                    stride,
                )
            )
    return regions


def _pieces(plan: CachePlan, layer: CacheLayer) -> tuple[int, int, int]:
    """Pieces of a page, the distance of the same block's next piece, and of the next block's."""
    at = plan.placement_of[layer.name]
    if layer.form in ("content_packed", "head_slots"):
        heads = 2 if layer.form == "head_slots" else layer.num_kv_heads
        if plan.kv_layout == "LHBNC":
            return heads, plan.num_blocks * at.block_stride, at.block_stride
        if plan.kv_layout == "BHLNC":
            return heads, len(at.layers) * at.layer_stride, at.block_stride
    elif layer.form == "kv_first" and not plan.has_state and _all_kv_first(plan, at.allocation):
        half = at.block_stride // 2
        return 2, plan.num_blocks * half, half
    return 1, 0, at.block_stride


def _all_kv_first(plan: CachePlan, allocation: str) -> bool:
    over = [each for each in plan.placements if each.allocation == allocation]
    return all(plan.layer(name).form == "kv_first" for each in over for name in each.layers)
