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
from kvfuzz.model.dtypes import DTYPES, INTEGER_SIZES, itemsize

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

MOST_BYTES = 1 << 38


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
    def has_state(self) -> bool:
        """Whether some layer keeps a Mamba-like state."""
        return any(not layer.is_attention for layer in self.layers)


def _require(condition: bool, what: str) -> None:
    if not condition:
        raise UsageError(f"impossible plan: {what}")


def check(plan: CachePlan) -> None:
    """Raise UsageError with the first thing that no engine could mean by `plan`."""
    names = [layer.name for layer in plan.layers]
    _require(bool(names), "no layers")
    _require(len(set(names)) == len(names), f"two layers share a name among {names}")
    _require(
        1 <= plan.num_blocks <= MOST_BYTES,
        f"num_blocks={plan.num_blocks}, expected 1 to {MOST_BYTES}",
    )
    _require(
        plan.kv_layout in ("", *KV_LAYOUTS),
        f"kv_layout={plan.kv_layout!r}, expected one of {', '.join(KV_LAYOUTS)}, or nothing",
    )
    for layer in plan.layers:
        _check_layer(layer)
    _check_groups(plan)
    for layer in plan.sharers:
        _check_sharer(plan, layer)
    _check_placements(plan)


def _check_layer(layer: CacheLayer) -> None:
    where = f"layer {layer.name}"
    _require(layer.kind in KINDS, f"{where}: kind={layer.kind!r}, expected one of {KINDS}")
    _require(layer.form in FORMS, f"{where}: form={layer.form!r}, expected one of {FORMS}")
    form = {"mla": ("latent",), "mamba": ("states",)}.get(layer.kind, FORMS[:4])
    _require(
        layer.form in form, f"{where}: form={layer.form} of kind={layer.kind}, expected {form}"
    )
    n, kernel = layer.block_size, layer.kernel_block_size
    _require(
        1 <= kernel <= n and n % kernel == 0,
        f"{where}: block_size={n}, kernel_block_size={kernel}, expected a multiple of it",
    )
    if layer.is_attention:
        _require(layer.cache_dtype in DTYPES, f"{where}: cache_dtype={layer.cache_dtype!r}")
        _require(
            1 <= layer.num_kv_heads <= MOST_BYTES
            and 1 <= layer.head_size <= MOST_BYTES
            and layer.head_size_v <= MOST_BYTES
            and not layer.states,
            f"{where}: {layer.num_kv_heads} heads of {layer.head_size}, {layer.states}",
        )
        _require(
            (layer.head_size_v == 0) == (layer.kind == "mla"),
            f"{where}: head_size_v={layer.head_size_v} of kind={layer.kind}",
        )
        same = layer.form in ("content_packed", "latent") or layer.head_size_v == layer.head_size
        _require(same, f"{where}: form={layer.form} with two head sizes")
        _require(layer.order in ("nhd", "hnd"), f"{where}: order={layer.order!r}")
    else:
        known = DTYPES.keys() | INTEGER_SIZES.keys()
        _require(bool(layer.states), f"{where}: kind=mamba without states")
        _require(
            all(state.dtype in known and bool(state.shape) for state in layer.states),
            f"{where}: states {layer.states}, expected dtypes of {sorted(known)}, and shapes",
        )
        sizes = [state.nbytes for state in layer.states]
        _require(
            all(size > 0 for size in sizes)
            and all(
                sum(sizes[:index]) % itemsize(state.dtype) == 0
                and layer.page_stride % itemsize(state.dtype) == 0
                for index, state in enumerate(layer.states)
            ),
            f"{where}: states {layer.states} do not lie at multiples of their elements",
        )
    _require(
        layer.page_padded == 0 or layer.page_padded >= layer.page_bytes,
        f"{where}: page_padded={layer.page_padded}, a page has {layer.page_bytes} bytes",
    )
    _require(
        layer.page_padded == 0 or layer.ratio == 1,
        f"{where}: a padded page cannot be split into kernel blocks",
    )


def _largest_element(layer: CacheLayer) -> int:
    """Bytes of the widest element of a layer's pages."""
    if layer.is_attention:
        return itemsize(layer.cache_dtype)
    return max(itemsize(state.dtype) for state in layer.states)


def _check_groups(plan: CachePlan) -> None:
    grouped = [name for group in plan.groups for name in group]
    _require(
        sorted(grouped) == sorted(layer.name for layer in plan.layers),
        f"groups of {sorted(grouped)}, expected every layer in one group",
    )
    for group in plan.groups:
        kinds = {plan.layer(name).kind for name in group}
        _require(len(kinds) == 1, f"group {group} of several kinds: {sorted(kinds)}")


def _check_sharer(plan: CachePlan, layer: CacheLayer) -> None:
    """Cross-layer sharing: the target owns its cache, comes earlier and has the same format."""
    names = [each.name for each in plan.layers]
    where = f"layer {layer.name} shares the cache of {layer.shares!r}"
    _require(layer.shares in names, f"{where}, which does not exist")
    target = plan.layer(layer.shares)
    _require(not target.shares, f"{where}, which shares that of {target.shares}: a chain")
    _require(
        names.index(target.name) < names.index(layer.name),
        f"{where}, which comes later: nothing is in it yet",
    )
    _require(layer.kind == target.kind, f"{where}, of another kind: {layer.kind}, {target.kind}")
    alike = msgspec.structs.replace(target, name=layer.name, shares=layer.shares) == layer
    _require(alike, f"{where}, whose format is another one")
    group_of = plan.group_of
    _require(group_of[layer.name] == group_of[target.name], f"{where}, which is in another group")


def _check_placements(plan: CachePlan) -> None:
    sizes = {each.name: each.nbytes for each in plan.allocations}
    _require(len(sizes) == len(plan.allocations), "two allocations share a name")
    for name, nbytes in sizes.items():
        _require(1 <= nbytes <= MOST_BYTES, f"allocation {name}: nbytes={nbytes}")
    placed = [name for each in plan.placements for name in each.layers]
    _require(
        sorted(placed) == sorted(layer.name for layer in plan.owners),
        "each layer that owns a cache is placed once, and no other is",
    )
    for each in plan.placements:
        where = f"placement of {', '.join(each.layers)}"
        _require(each.allocation in sizes, f"{where}: no allocation {each.allocation!r}")
        _require(
            each.offset >= 0 and each.layer_stride >= 0 and each.block_stride >= 1,
            f"{where}: offset {each.offset}, strides {each.layer_stride} and {each.block_stride}",
        )
        groups = [plan.group_of[name] for name in each.layers]
        element = max(_largest_element(plan.layer(name)) for name in each.layers)
        strides = (each.offset, each.layer_stride, each.block_stride)
        _require(
            all(stride % element == 0 for stride in strides),
            f"{where}: offset and strides {strides}, expected multiples of {element}: an element",
        )
        _require(
            each.layer_stride > 0 or len(set(groups)) == len(groups),
            f"{where}: two layers of one group at the same place",
        )
        for name in each.layers:
            layer = plan.layer(name)
            _require(
                layer.ratio == 1 or each.block_stride == layer.page_bytes,
                f"{where}: blocks {each.block_stride} bytes apart cannot be split into kernel "
                f"blocks, {name} has pages of {layer.page_bytes} bytes",
            )
