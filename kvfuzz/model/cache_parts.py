"""The K and V pages of one attention layer as parts of a case: its allocation, fields and views."""

from typing import NamedTuple

from kvfuzz.model.case import Buffer, TensorView
from kvfuzz.model.fill import ByteFill
from kvfuzz.model.layout import Field
from kvfuzz.model.placement import cache_fields, place, state_field
from kvfuzz.model.plan import AttentionLayer, Plan
from kvfuzz.model.views import cache_view


class CacheParts(NamedTuple):
    """A layer's allocation, and what lies in it."""

    buffer: Buffer
    states: tuple[Field, ...]
    """Mamba states that share the allocation. They stand before K and V, so that a byte of their
    blocks is theirs: K and V are defined over all blocks."""
    k: Field
    v: Field
    inline: tuple[Field, ...]
    """Scales that lie in the pages."""
    others: tuple[Field, ...]
    """The pages of the other attention layers."""
    views: tuple[TensorView, TensorView]
    """`key_cache` and `value_cache`."""


def cache_parts(plan: Plan, layer: AttentionLayer, fill_seed: int) -> CacheParts:
    """The parts of `layer`, which is one of the layers of `plan`."""
    sharing = plan.sharing(layer.allocation)
    count, index = len(sharing), sharing.index(layer)
    k, v, *inline = cache_fields(layer, index=index, count=count)
    return CacheParts(
        Buffer(layer.allocation, place(layer, count=count).nbytes, ByteFill(fill_seed)),
        tuple(
            state_field(layer, count, name="state", owner=state.name, blocks=state.blocks)
            for state in plan.states(layer.allocation)
        ),
        k,
        v,
        tuple(inline),
        tuple(
            field
            for number, other in enumerate(sharing)
            if number != index
            for field in cache_fields(other, index=number, count=count, prefix=f"{other.name}.")
        ),
        (cache_view("key_cache", k, layer.order), cache_view("value_cache", v, layer.order)),
    )
