"""A cache plan: a model's whole cache, every layer's pages over the allocations of one worker.

The scenes of kernels (`kvfuzz.model.plan`) know the layers beside the one that an op works on; a
cache plan knows all layers of a model, of several kinds, and who shares bytes with whom. By era of
vLLM, the same words for each:

    a group       the layers that get a block id together; a block id belongs to one group at a time
    a placement   layers of one format, at `offset + index * layer_stride + block * block_stride`
    overlay       layers of several groups at the same place (shared_by), or placements that overlap

Until 0.29.0 a placement has one layer of each group, in an allocation of its own or packed behind
others in one buffer; from then on the layers of one group, in one buffer, by a KVCacheLayout.
"""

import math
from typing import Literal

import msgspec

from kvfuzz.errors import UsageError
from kvfuzz.model.dtypes import itemsize

Kind = Literal["full", "sliding", "chunked", "cross", "mla", "mamba"]
KINDS: tuple[str, ...] = ("full", "sliding", "chunked", "cross", "mla", "mamba")
"""What a layer attends to, or that it keeps a state: what decides which layers make a group."""

FORMS: tuple[str, ...] = (
    "kv_first",
    "blocks_first",
    "content_packed",
    "head_slots",
    "latent",
    "states",
)
"""What a layer's backend takes its pages for, B kernel blocks of N tokens:

kv_first        (2, B, N, H, D): ROCM_ATTN; AITER until #43660
blocks_first    (B, 2, N, H, D), order nhd or hnd
content_packed  (B, H, N, Dk + Dv), order by the KVCacheLayout (#44455)
head_slots      (B, 2, N, H * D): head slot 0 is K, 1 is V (customize_spec of 0.33.0)
latent          (B, N, D): MLA
states          one (B, ...) of each shape, one after the other in a page
"""

KV_LAYOUTS: tuple[str, ...] = ("LBHNC", "LBNHC", "LHBNC", "BLHNC", "BLNHC", "BHLNC")
"""The six orders of KVCacheLayout, outermost axis first: Layer, Block, Head, tokeN, Content."""


class State(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """One state of a Mamba-like layer: `shape` elements of `dtype` for each block."""

    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of the state in one block."""
        return math.prod(self.shape) * itemsize(self.dtype)


class CacheLayer(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What one layer keeps of each block of `block_size` tokens, and how it is read."""

    name: str
    kind: Kind
    form: str
    block_size: int
    """Tokens of a block, as the manager hands blocks out."""
    kernel_block_size: int
    """Tokens of the smaller blocks that kernels index; as block_size where blocks stay whole."""
    cache_dtype: str = ""
    num_kv_heads: int = 1
    head_size: int = 0
    head_size_v: int = 0
    """Elements of a head of V; 0 for a latent, which has none."""
    order: str = "nhd"
    """Of blocks_first and content_packed: whether tokens or heads come first in a page."""
    states: tuple[State, ...] = ()
    page_padded: int = 0
    """Bytes of a page with its padding; 0 says that it has none."""
    shares: str = ""
    """The layer whose cache this one reads, instead of one of its own."""

    @property
    def is_attention(self) -> bool:
        """Whether the pages hold keys and values of tokens, a latent included."""
        return self.kind != "mamba"

    @property
    def ratio(self) -> int:
        """Kernel blocks of one manager block."""
        return self.block_size // self.kernel_block_size if self.is_attention else 1

    @property
    def page_bytes(self) -> int:
        """Bytes of one block that hold something (page_size_bytes without padding)."""
        if not self.is_attention:
            return sum(state.nbytes for state in self.states)
        elements = self.num_kv_heads * (self.head_size + self.head_size_v)
        return self.block_size * elements * itemsize(self.cache_dtype)

    @property
    def page_stride(self) -> int:
        """Bytes from one page to the next where nothing else lies between them."""
        return self.page_padded or self.page_bytes


class Allocation(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """One buffer of the device."""

    name: str
    nbytes: int


class Placement(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Where `layers` lie: index l in block b from `offset + l * layer_stride + b * block_stride`.

    With a layer stride of 0 all of them lie at the same place, and belong to different groups.
    """

    allocation: str
    layers: tuple[str, ...]
    block_stride: int
    layer_stride: int = 0
    offset: int = 0
    packed: bool = False
    """Whether pages of several placements lie side by side in each block of one buffer."""


class CachePlan(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """All layers of a model that have, or share, a cache of `num_blocks` manager blocks."""

    num_blocks: int
    layers: tuple[CacheLayer, ...]
    groups: tuple[tuple[str, ...], ...]
    """The layers of each group, those that share a cache behind those that own one."""
    allocations: tuple[Allocation, ...]
    placements: tuple[Placement, ...]
    kv_layout: str = ""
    """The KVCacheLayout of the buffer; empty before there was one."""

    def layer(self, name: str) -> CacheLayer:
        """The layer called `name`. Raises UsageError where there is none."""
        for layer in self.layers:
            if layer.name == name:
                return layer
        raise UsageError(f"impossible plan: no layer {name!r}")

    @property
    def owners(self) -> tuple[CacheLayer, ...]:
        """The layers with a cache of their own."""
        return tuple(layer for layer in self.layers if not layer.shares)

    @property
    def sharers(self) -> tuple[CacheLayer, ...]:
        """The layers that read another one's cache."""
        return tuple(layer for layer in self.layers if layer.shares)

    @property
    def group_of(self) -> dict[str, int]:
        """By layer, the number of its group."""
        return {name: number for number, group in enumerate(self.groups) for name in group}

    @property
    def placement_of(self) -> dict[str, Placement]:
        """By layer with a cache of its own, its placement."""
        return {name: each for each in self.placements for name in each.layers}

    @property
    def placed(self) -> Literal["separate", "packed", "one_buffer"]:
        """Whether each slot has an allocation, slots lie side by side in each block of one buffer,
        or the buffer is laid out by a KVCacheLayout."""
        if self.kv_layout:
            return "one_buffer"
        return "packed" if any(each.packed for each in self.placements) else "separate"

    @property
    def has_state(self) -> bool:
        """Whether some layer keeps a Mamba-like state."""
        return any(not layer.is_attention for layer in self.layers)
