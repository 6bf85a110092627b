"""What a layer's backend reads and writes of its cache: strided views over an allocation.

Every view begins with the axis of kernel blocks. The parts of a layer, and their other axes:

    k, v        [num_blocks, block_size, num_kv_heads, head_size]
    latent      [num_blocks, block_size, head_size]
    state_0 …   [num_blocks, *shape]
"""

import msgspec

from kvfuzz.model.dtypes import itemsize


class LayerView(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """One part of one layer; strides and offset in bytes, shape in elements of `dtype`."""

    layer: str
    part: str
    allocation: str
    dtype: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int

    def last_byte(self) -> int:
        """The largest byte address that an element occupies; strides are taken as positive."""
        reach = sum(
            (size - 1) * stride for size, stride in zip(self.shape, self.strides, strict=True)
        )
        return self.offset + reach + itemsize(self.dtype) - 1

    def addresses(self) -> "LayerView":
        """The same view with a stride of 0 where an axis has one element: it says nothing there."""
        strides = tuple(
            stride if size > 1 else 0 for size, stride in zip(self.shape, self.strides, strict=True)
        )
        return msgspec.structs.replace(self, strides=strides)


class Region(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """What a connector moves of each manager block of a layer: `length` bytes in one piece.

    Those of block b begin at `address + b * stride` of the allocation.
    """

    layer: str
    allocation: str
    address: int
    length: int
    stride: int
