"""A plan: a model's cache, layers over allocations; a batch: what one step of it touches.

The attention layers over an allocation are one group: they are laid out alike and each has a page
of its own in every block. Attention and Mamba state divide the blocks, as vLLM's groups do: a block
id belongs to one of them at a time.
"""

import msgspec

from kvfuzz.errors import UsageError
from kvfuzz.model.dtypes import DTYPES
from kvfuzz.model.layout import Geometry
from kvfuzz.model.vocabulary import (
    GRANULARITIES,
    LAYOUTS,
    NESTINGS,
    ORDERS,
    SCALE_BYTES,
    SPLIT_DIM,
    SPLIT_TOKEN,
    conflict,
    x_of,
)

CACHE = "kv_cache"
"""The name of the allocation that strategies draw."""


def require(condition: bool, what: str) -> None:
    """Raise UsageError naming what is impossible, unless `condition` holds."""
    if not condition:
        raise UsageError(f"impossible scene: {what}")


class AttentionLayer(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="attention"):
    """A layer with K and V pages over `allocation`.

    `kvfuzz.model.vocabulary` defines the words, `kvfuzz.model.placement` what they mean in bytes.
    """

    name: str
    allocation: str
    layout: str
    order: str
    geometry: Geometry
    cache_dtype: str
    nesting: str = "layer_first"
    page_padding: int = 0
    """Bytes between the end of a page and the next."""
    granularity: str = "tensor"
    """What shares one scale."""

    @property
    def levels(self) -> dict[str, str]:
        """The layer's levels of the axes that `vocabulary.CONFLICTS` is about."""
        k, v = self.geometry.head_size, self.geometry.value_size
        return {
            "layout": self.layout,
            "order": self.order,
            "nesting": self.nesting,
            "page": "padded" if self.page_padding else "exact",
            "value_size": "same" if k == v else "narrower" if v < k else "wider",
            "granularity": self.granularity,
            "cache_dtype": self.cache_dtype,
        }


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

    def sharing(self, allocation: str) -> tuple[AttentionLayer, ...]:
        """The attention layers over `allocation`, in the order in which their pages lie."""
        return tuple(
            layer
            for layer in self.layers
            if isinstance(layer, AttentionLayer) and layer.allocation == allocation
        )

    def states(self, allocation: str) -> tuple[StateLayer, ...]:
        """The state layers over `allocation`."""
        return tuple(
            layer
            for layer in self.layers
            if isinstance(layer, StateLayer) and layer.allocation == allocation
        )


MOST_ROWS, MOST_ENTRIES = 1 << 20, 1 << 24
"""Rows of a batch, and entries of its block table, at most: more is a slip in a seed."""


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
    for attribute, known in (
        ("layout", LAYOUTS),
        ("order", ORDERS),
        ("nesting", NESTINGS),
        ("granularity", GRANULARITIES),
    ):
        word = getattr(layer, attribute)
        require(word in known, f"{attribute}={word!r}, expected one of {known}")
    for name, value in msgspec.structs.asdict(g).items():
        least = 0 if name == "head_size_v" else 1
        require(value >= least, f"{name}={value}, expected at least {least}")
    require(layer.cache_dtype in DTYPES, f"cache_dtype={layer.cache_dtype!r} is unknown")
    against = conflict(layer.levels)
    require(against is None, str(against))
    x = x_of(layer.cache_dtype)
    if layer.order in SPLIT_DIM:
        require(
            g.head_size % x == 0 and g.value_size % x == 0,
            f"order={layer.order} needs head_size={g.head_size} and head_size_v={g.value_size} "
            f"divisible by {x}",
        )
    if layer.order in SPLIT_TOKEN:
        require(
            g.block_size % x == 0,
            f"order={layer.order} needs block_size={g.block_size} divisible by {x}",
        )
    _check_page(layer)


def _check_page(layer: AttentionLayer) -> None:
    """Elements, and fp32 scales among them, must lie at multiples of their size."""
    g, inline = layer.geometry, layer.granularity == "token_head_inline"
    element = SCALE_BYTES if inline else DTYPES[layer.cache_dtype].itemsize
    require(
        layer.page_padding >= 0 and layer.page_padding % element == 0,
        f"page_padding={layer.page_padding}, expected a multiple of {element} bytes",
    )
    require(
        not inline or g.head_size % SCALE_BYTES == 0 == g.value_size % SCALE_BYTES,
        f"granularity={layer.granularity} needs head_size={g.head_size} and "
        f"head_size_v={g.value_size} divisible by {SCALE_BYTES}: the scale behind is an fp32",
    )


def check_sharing(plan: Plan, layer: AttentionLayer) -> None:
    """Raise UsageError unless all layers in the allocation of `layer` are laid out as it is."""
    for other in plan.sharing(layer.allocation):
        alike = msgspec.structs.replace(other, name=layer.name) == layer
        require(
            alike,
            f"layers {layer.name} and {other.name} share allocation {layer.allocation!r} and "
            "differ in more than their names",
        )


def check_batch(batch: Batch, g: Geometry, state_blocks: tuple[int, ...] = ()) -> None:
    """Raise UsageError with the first thing that makes a batch impossible in blocks of `g`."""
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
    require(batch.num_rows <= MOST_ROWS, f"a batch of {batch.num_rows} rows, at most {MOST_ROWS}")
    entries = batch.table_width * len(batch.sequences)
    require(
        batch.table_width >= 0 and entries <= MOST_ENTRIES,
        f"table_width={batch.table_width}, expected tables of at most {MOST_ENTRIES} entries",
    )
