"""Images of memory: where an element's bytes are, reading codes from bytes, writing them back.

An image is a one-dimensional uint8 tensor with the bytes of one buffer. Addresses come from a
field's mixed-radix map, never from a view.
"""

import torch
from torch import Tensor

from kvfuzz.model.dtypes import itemsize
from kvfuzz.model.layout import Field


def addresses(field: Field, **coordinates: Tensor) -> Tensor:
    """Byte address of the element at each coordinate; the coordinate tensors broadcast."""
    result: Tensor | int = field.base
    for term in field.terms:
        digit = coordinates[term.axis]
        if term.div > 1:
            digit = digit // term.div
        if term.mod:
            digit = digit % term.mod
        result = result + digit * term.stride
    assert isinstance(result, Tensor)  # noqa: S101  (every field has a term)
    return result


def element_bytes(at: Tensor, dtype: str) -> Tensor:
    """The addresses of every byte of the elements at `at`: one more axis, of the element size."""
    return at.unsqueeze(-1) + torch.arange(itemsize(dtype), device=at.device)


def read(image: Tensor, at: Tensor, dtype: str) -> Tensor:
    """The codes of the elements of `dtype` at byte addresses `at`; int64, little endian."""
    parts = image[element_bytes(at, dtype)].to(torch.int64)
    code = parts[..., 0]
    for index in range(1, parts.shape[-1]):
        code = code | (parts[..., index] << (8 * index))
    return code


def write(image: Tensor, at: Tensor, dtype: str, codes: Tensor) -> None:
    """Put `codes` at byte addresses `at` of `image`, little endian."""
    shifts = torch.arange(itemsize(dtype), device=at.device) * 8
    image[element_bytes(at, dtype)] = ((codes.unsqueeze(-1) >> shifts) & 0xFF).to(torch.uint8)
