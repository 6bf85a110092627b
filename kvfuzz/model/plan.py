"""A plan: a model's cache, layers over allocations; a batch: what one step of it touches.

Layers that share an allocation divide its blocks among them, as vLLM's groups do: a block id
belongs to one layer at a time. Today a plan holds one attention layer and, in a hybrid, one layer
of Mamba state beside it.
"""

import msgspec

from kvfuzz.errors import UsageError
from kvfuzz.model.dtypes import DTYPES
from kvfuzz.model.layout import LAYOUTS, ORDERS, Geometry

CACHE = "kv_cache"
"""The name of the allocation that strategies draw."""


def require(condition: bool, what: str) -> None:
    """Raise UsageError naming what is impossible, unless `condition` holds."""
    if not condition:
        raise UsageError(f"impossible scene: {what}")


class AttentionLayer(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="attention"):
    """A layer with K and V pages, laid out by `layout` and `order` over `allocation`."""

    name: str
    allocation: str
    layout: str
    order: str
    geometry: Geometry
    cache_dtype: str


class StateLayer(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="mamba"):
    """A layer of Mamba state, whose pages are as large as its neighbour's and hold opaque bytes."""

    name: str
    allocation: str
    blocks: tuple[int, ...]


Layer = AttentionLayer | StateLayer


class Plan(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The layers of a model that have a cache."""

    layers: tuple[Layer, ...]

    def attention(self, name: str) -> AttentionLayer:
        """The attention layer called `name`. Raises UsageError where there is none."""
        for layer in self.layers:
            if isinstance(layer, AttentionLayer) and layer.name == name:
                return layer
        raise UsageError(f"impossible scene: no attention layer {name!r} in the plan")

    def states(self, allocation: str) -> tuple[StateLayer, ...]:
        """The state layers over `allocation`."""
        return tuple(
            layer
            for layer in self.layers
            if isinstance(layer, StateLayer) and layer.allocation == allocation
        )


class Sequence(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One request: its blocks in order, and the run of tokens that the op touches.

    Token `p` of the sequence (start <= p < start + length) lives in block
    `block_ids[p // block_size]` at offset `p % block_size`.
    """

    block_ids: tuple[int, ...]
    start: int
    length: int


class Batch(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The sequences of one step, as the engine's metadata lays them out."""

    sequences: tuple[Sequence, ...]
    padding: tuple[int, ...] = ()
    """Rows of a write, counted after insertion, whose slot is -1."""
    table_width: int = 0
    """Columns of the block table; engines allocate more than a batch needs."""

    @property
    def num_tokens(self) -> int:
        """Tokens that the op touches, padding rows not counted."""
        return sum(sequence.length for sequence in self.sequences)

    @property
    def num_rows(self) -> int:
        """Rows of a write, padding included."""
        return self.num_tokens + len(self.padding)


def check_layer(layer: AttentionLayer) -> None:
    """Raise UsageError with the first thing that makes an attention layer impossible."""
    g = layer.geometry
    require(layer.layout in LAYOUTS, f"layout={layer.layout!r}, expected one of {LAYOUTS}")
    require(layer.order in ORDERS, f"order={layer.order!r}, expected one of {ORDERS}")
    for name, value in msgspec.structs.asdict(g).items():
        require(value >= 1, f"{name}={value}, expected at least 1")
    require(layer.cache_dtype in DTYPES, f"cache_dtype={layer.cache_dtype!r} is unknown")
    if layer.order == "shuffle":
        x = 16 // DTYPES[layer.cache_dtype].itemsize
        require(layer.layout != "content_packed", "layout=content_packed has no shuffle order")
        require(
            g.head_size % x == 0 and g.block_size % x == 0,
            f"shuffle needs head_size={g.head_size} and block_size={g.block_size} divisible by {x}",
        )


def check_batch(batch: Batch, layer: AttentionLayer, state_blocks: tuple[int, ...]) -> None:
    """Raise UsageError with the first thing that makes a batch impossible on `layer`."""
    g = layer.geometry
    used = [block for sequence in batch.sequences for block in sequence.block_ids]
    owned = set(used) | set(state_blocks)
    require(len(used) + len(state_blocks) == len(owned), "a block id has two owners")
    require(
        all(0 <= block < g.num_blocks for block in owned),
        f"block ids {sorted(owned)} outside num_blocks={g.num_blocks}",
    )
    for sequence in batch.sequences:
        held = len(sequence.block_ids)
        require(
            sequence.start >= 0 and 0 <= sequence.length <= held * g.block_size - sequence.start,
            f"tokens {sequence.start}..{sequence.start + sequence.length} outside a sequence of "
            f"{held} blocks",
        )
        require(
            held <= batch.table_width,
            f"table_width={batch.table_width} is narrower than a sequence's blocks",
        )
    require(
        list(batch.padding) == sorted(set(batch.padding))
        and all(0 <= row < batch.num_rows for row in batch.padding),
        f"padding rows {batch.padding} outside a batch of {batch.num_rows} rows",
    )
    require(batch.num_tokens >= 1, "a batch without tokens")
