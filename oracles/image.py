"""Images of memory: where an element's bytes are, reading codes from bytes, writing them back.

An image is a one-dimensional uint8 tensor with the bytes of one buffer that are held: all of them,
or some spans of a large one (`kvfuzz.model.held`). A *position* is an index into it. Positions come
from a field's mixed-radix map, never from a view. What lies on a CPU is worked on as NumPy arrays,
since of the small images of most cases the cost of a call is most of what there is.
"""

import ctypes
import math
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kvfuzz.errors import UsageError
from kvfuzz.model.case import Program
from kvfuzz.model.dtypes import itemsize
from kvfuzz.model.held import held
from kvfuzz.model.layout import Field

Array = NDArray[Any]

_memcmp = ctypes.CDLL(None).memcmp
_memcmp.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)


def positions(case: Program, field: Field, **coordinates: Tensor) -> Tensor:
    """Position of the element at each coordinate; the coordinate tensors broadcast.

    Raises UsageError where an element is not held.
    """
    at, kept = addresses(field, **coordinates), held(case, field.buffer)
    if kept.is_whole:
        return at
    starts, stops = (torch.tensor(ends, device=at.device) for ends in zip(*kept.spans, strict=True))
    number = torch.searchsorted(starts, at, right=True) - 1
    if is_any(number < 0) or is_any(at >= stops[number]):
        first = int(at[(number < 0) | (at >= stops[number])][0])
        raise UsageError(f"byte {first} of {field.buffer}, in {field.name}, is not held")
    return at - starts[number] + torch.tensor(kept.firsts, device=at.device)[number]


def addresses(field: Field, **coordinates: Tensor) -> Tensor:
    """Byte address of the element at each coordinate; the coordinate tensors broadcast.

    A coordinate whose axis has no term does not matter, not even to the shape.
    """
    device = next((each.device for each in coordinates.values()), torch.device("cpu"))
    is_host = device.type == "cpu"
    along: dict[str, Any] = {}
    for term in field.terms:
        digit: Any = coordinates[term.axis].numpy() if is_host else coordinates[term.axis]
        if term.div > 1:
            digit = digit // term.div
        if term.mod:
            digit = digit % term.mod
        part = digit * term.stride
        along[term.axis] = along[term.axis] + part if term.axis in along else part
    # An axis at a time, the longest last, so that one sum alone is as large as the result.
    result: Any = field.base
    for part in sorted(along.values(), key=lambda part: math.prod(part.shape)):
        result = part + result
    return torch.from_numpy(np.asarray(result)) if is_host else torch.as_tensor(result).to(device)


def element_bytes(at: Tensor, dtype: str) -> Tensor:
    """The positions of every byte of the elements at `at`: one more axis, of the element size."""
    return at.unsqueeze(-1) + torch.arange(itemsize(dtype), device=at.device)


def read(image: Tensor, at: Tensor, dtype: str) -> Tensor:
    """The codes of the elements of `dtype` at positions `at`; int64, little endian."""
    size = itemsize(dtype)
    if (elements := _on_host(image, at, size)) is not None:
        whole, numbers = elements
        return torch.from_numpy(np.asarray(whole.take(numbers), np.int64))
    parts = image[element_bytes(at, dtype)].to(torch.int64)
    code = parts[..., 0]
    for index in range(1, parts.shape[-1]):
        code = code | (parts[..., index] << (8 * index))
    return code


def write(image: Tensor, at: Tensor, dtype: str, codes: Tensor) -> None:
    """Put `codes` at positions `at` of `image`, little endian."""
    size = itemsize(dtype)
    if (elements := _on_host(image, at, size)) is not None:
        whole, numbers = elements
        whole[numbers] = codes.numpy()
        return
    shifts = torch.arange(size, device=at.device) * 8
    image[element_bytes(at, dtype)] = ((codes.unsqueeze(-1) >> shifts) & 0xFF).to(torch.uint8)


def mark(mask: Tensor, at: Tensor, dtype: str, *, to: bool = True) -> None:
    """Set every byte of the elements at positions `at` in a mask with an entry per byte."""
    size = itemsize(dtype)
    if (elements := _on_host(mask.view(torch.uint8), at, size)) is not None:
        whole, numbers = elements
        whole[numbers] = (0x0101010101010101 & ((1 << (8 * size)) - 1)) if to else 0
        return
    mask[element_bytes(at, dtype)] = to


def copy(source: Tensor, start: Tensor, target: Tensor, goal: Tensor, dtype: str) -> None:
    """Copy the elements at positions `start` of `source` to positions `goal` of `target`."""
    size = itemsize(dtype)
    there, here = _on_host(source, start, size), _on_host(target, goal, size)
    if there is not None and here is not None:
        here[0][here[1]] = there[0].take(there[1])
    else:
        target[element_bytes(goal, dtype)] = source[element_bytes(start, dtype)]


def _on_host(image: Tensor, at: Tensor, size: int) -> tuple[Array, Array] | None:
    """An image on a CPU as integers of `size` bytes and the place of each element in it; None where
    one lies across two of them, as a field with an odd base may ask for."""
    if image.device.type != "cpu":
        return None
    numbers = at.numpy()
    if size == 1:
        return image.numpy(), numbers
    if image.numel() % size or image.data_ptr() % size:
        return None
    if int(np.bitwise_or.reduce(numbers, axis=None)) & (size - 1):
        return None
    return image.numpy().view(f"u{size}"), numbers >> (size.bit_length() - 1)


def same(one: Tensor, other: Tensor) -> bool:
    """Whether two images, masks or tensors of codes are equal. On a CPU many bytes are looked at at
    once, where torch.equal looks at one entry."""
    if one is other:
        return True
    is_plain = one.is_contiguous() and other.is_contiguous() and one.dtype == other.dtype
    if one.device.type != "cpu" or one.shape != other.shape or not is_plain:
        return torch.equal(one, other)
    return not _memcmp(one.data_ptr(), other.data_ptr(), one.nbytes)


def is_any(mask: Tensor) -> bool:
    """Whether some entry of a mask is set; on a CPU by NumPy, as in `same`."""
    return bool(np.count_nonzero(mask.numpy()) if mask.device.type == "cpu" else mask.any())
