"""Where a cache layout keeps a key and a value: closed formulas, and the views engines make.

The formulas are for the references, the views for the kernels; neither is made from the other.
B blocks, N tokens a block, H heads, D and E elements of a key and of a value, x = 16 // itemsize.
"""

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Extents:
    """The sizes that a formula needs, by the letters of the layouts' names."""

    B: int
    N: int
    H: int
    D: int
    E: int
    x: int


def _x_packed_key(g: Extents, s, h, d):
    return h * g.D * g.N + d // g.x * g.N * g.x + s * g.x + d % g.x


class BlocksFirst:
    """`(B, 2, N, H, D)`."""

    def numel(self, g):
        return g.B * 2 * g.N * g.H * g.D

    def key(self, g, b, s, h, d):
        return b * 2 * g.N * g.H * g.D + s * g.H * g.D + h * g.D + d

    def value(self, g, b, s, h, d):
        return self.key(g, b, s, h, d) + g.N * g.H * g.D

    def views(self, g, flat):
        return flat.view(g.B, 2, g.N, g.H, g.D).unbind(1)


class KVFirst(BlocksFirst):
    """`(2, B, N, H, D)`."""

    def key(self, g, b, s, h, d):
        return b * g.N * g.H * g.D + s * g.H * g.D + h * g.D + d

    def value(self, g, b, s, h, d):
        return self.key(g, b, s, h, d) + g.B * g.N * g.H * g.D

    def views(self, g, flat):
        return flat.view(2, g.B, g.N, g.H, g.D).unbind(0)


class BlocksFirstHND(BlocksFirst):
    """`(B, 2, H, N, D)`, which kernels are given as `(B, N, H, D)`."""

    def key(self, g, b, s, h, d):
        return b * 2 * g.N * g.H * g.D + h * g.N * g.D + s * g.D + d

    def views(self, g, flat):
        return flat.view(g.B, 2, g.H, g.N, g.D).transpose(2, 3).unbind(1)


class ContentPacked:
    """`(B, H, N, D + E)`: a key and its value side by side (#44455)."""

    def numel(self, g):
        return g.B * g.H * g.N * (g.D + g.E)

    def key(self, g, b, s, h, d):
        return ((b * g.H + h) * g.N + s) * (g.D + g.E) + d

    def value(self, g, b, s, h, d):
        return self.key(g, b, s, h, d) + g.D

    def views(self, g, flat):
        packed = flat.view(g.B, g.H, g.N, g.D + g.E).transpose(1, 2)
        return packed.split((g.D, g.E), dim=-1)


class ContentPackedNHD(ContentPacked):
    """`(B, N, H, D + E)`."""

    def key(self, g, b, s, h, d):
        return ((b * g.N + s) * g.H + h) * (g.D + g.E) + d

    def views(self, g, flat):
        return flat.view(g.B, g.N, g.H, g.D + g.E).split((g.D, g.E), dim=-1)


class XPacked(BlocksFirst):
    """`(2, B, N*H*D)`, seen as keys `(B, H, D/x, N, x)` and values `(B, H, D, N)`."""

    def key(self, g, b, s, h, d):
        return b * g.N * g.H * g.D + _x_packed_key(g, s, h, d)

    def value(self, g, b, s, h, d):
        return (g.B + b) * g.N * g.H * g.D + h * g.D * g.N + d * g.N + s

    def views(self, g, flat):
        key, value = flat.view(2, g.B, -1)
        return key.view(g.B, g.H, g.D // g.x, g.N, g.x), value.view(g.B, g.H, g.D, g.N)


class XPackedHybrid(XPacked):
    """XPacked with the keys and values of a block side by side, as beside a Mamba layer."""

    def key(self, g, b, s, h, d):
        return b * 2 * g.N * g.H * g.D + _x_packed_key(g, s, h, d)

    def value(self, g, b, s, h, d):
        return (2 * b + 1) * g.N * g.H * g.D + h * g.D * g.N + d * g.N + s

    def views(self, g, flat):
        key, value = flat.view(g.B, 2, -1).unbind(1)
        return (
            key.unflatten(1, (g.H, g.D // g.x, g.N, g.x)),
            value.unflatten(1, (g.H, g.D, g.N)),
        )


class XPackedInterleaved(XPacked):
    """XPacked with values `(B, H, N/x, D, x)`, which kernels are given as `(B, H, D, N)`."""

    def value(self, g, b, s, h, d):
        inside = h * g.D * g.N + s // g.x * g.D * g.x + d * g.x + s % g.x
        return (g.B + b) * g.N * g.H * g.D + inside


class Latent:
    """MLA: `(B, N, 1, D)`; a value is the first E elements of its key."""

    def numel(self, g):
        return g.B * g.N * g.D

    def key(self, g, b, s, h, d):
        return (b * g.N + s) * g.D + d

    value = key

    def views(self, g, flat):
        key = flat.view(g.B, g.N, 1, g.D)
        return key, key[..., : g.E]


LAYOUTS = {
    "blocks_first": BlocksFirst(),
    "kv_first": KVFirst(),
    "blocks_first_hnd": BlocksFirstHND(),
    "content_packed": ContentPacked(),
    "content_packed_nhd": ContentPackedNHD(),
    "x_packed": XPacked(),
    "x_packed_hybrid": XPackedHybrid(),
    "x_packed_interleaved": XPackedInterleaved(),
    "latent": Latent(),
}


def indices(layout, g: Extents, blocks: list[int], length: int):
    """Element indices of keys `[length, H, D]` and values `[length, H, E]` of a sequence."""
    position = torch.arange(length)[:, None, None]
    block, slot = torch.tensor(blocks)[position // g.N], position % g.N
    head = torch.arange(g.H)[None, :, None]
    return (
        layout.key(g, block, slot, head, torch.arange(g.D)),
        layout.value(g, block, slot, head, torch.arange(g.E)),
    )
