"""A scene of whole pages: a layer's cache, perhaps another one on the host, and which blocks."""

import msgspec

from kvfuzz.model.plan import AttentionLayer, Layer, Plan, StateLayer

LEAST_BLOCKS = 2
"""Blocks of a cache, at least: an engine keeps block 0, the null block, for itself."""
HOST = "host"
"""The allocation of the cache on the host, and what goes before the names of its fields."""


class PageScene(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="pages"):
    """Everything that decides a case of whole pages."""

    op: str
    layer: AttentionLayer
    """How each layer of the allocation is laid out; their names are numbers."""
    entries: tuple[tuple[int, ...], ...]
    """Pairs (from, to) of blocks, or blocks alone, as the op has it."""
    layers: int = 1
    """Attention layers that share the allocation."""
    index: int = 0
    """The one of them that the op works on."""
    state_blocks: tuple[int, ...] = ()
    """Blocks of the allocation that hold Mamba state, in order."""
    host: str = "none"
    """How the other cache of a swap is laid out: one of `page_axes.HOSTS`."""
    host_blocks: int = 0
    spare: int = 0
    """Entries that the metadata have behind those of the step."""
    fill_seed: int = 0

    @property
    def width(self) -> int:
        """Numbers of an entry."""
        return 1 if self.op == "zero_blocks" else 2

    @property
    def sources(self) -> tuple[int, ...]:
        """The blocks that are read, in order."""
        return () if self.width == 1 else tuple(entry[0] for entry in self.entries)

    @property
    def targets(self) -> tuple[int, ...]:
        """The blocks that are written, in order; of a swap, those of the host."""
        return tuple(entry[-1] for entry in self.entries)

    @property
    def attention(self) -> AttentionLayer:
        """The layer that the op works on."""
        return _numbered(self.layer, self.index)

    @property
    def plan(self) -> Plan:
        """All layers of the allocation."""
        states: tuple[Layer, ...] = ()
        if self.state_blocks:
            name = f"layer.{self.layers}"
            states = (StateLayer(name, self.layer.allocation, self.state_blocks),)
        return Plan((*_all(self.layer, self.layers), *states))

    @property
    def host_layer(self) -> AttentionLayer:
        """How each layer of the host's allocation is laid out: it has no states to lie between."""
        layer = self.layer
        changed: dict[str, object] = {"layout": "kv_first", "nesting": "layer_first"}
        changed["page_padding"] = 0
        if self.host == "like":
            changed = {"layout": "blocks_first" if layer.layout == "hybrid" else layer.layout}
        geometry = msgspec.structs.replace(layer.geometry, num_blocks=self.host_blocks)
        return msgspec.structs.replace(layer, allocation=HOST, geometry=geometry, **changed)

    @property
    def host_attention(self) -> AttentionLayer:
        """The layer on the host that the op works on."""
        return _numbered(self.host_layer, self.index)

    @property
    def host_plan(self) -> Plan:
        """All layers of the host's allocation."""
        return Plan(_all(self.host_layer, self.layers))


def _all(layer: AttentionLayer, count: int) -> tuple[AttentionLayer, ...]:
    return tuple(_numbered(layer, number) for number in range(count))


def _numbered(layer: AttentionLayer, number: int) -> AttentionLayer:
    return msgspec.structs.replace(layer, name=f"layer.{number}")
