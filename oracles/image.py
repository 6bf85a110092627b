"""Images of memory: where an element's bytes are, reading codes from bytes, writing them back.

An image is a one-dimensional uint8 tensor with the bytes of one buffer that are held: all of them,
or some spans of a large one (`kvfuzz.model.held`). A *position* is an index into it. Positions come
from a field's mixed-radix map, never from a view.
"""

import numpy as np
import torch
from torch import Tensor

from kvfuzz.errors import UsageError
from kvfuzz.model.case import Case
from kvfuzz.model.dtypes import itemsize
from kvfuzz.model.held import held
from kvfuzz.model.layout import Field


def positions(case: Case, field: Field, **coordinates: Tensor) -> Tensor:
    """Position of the element at each coordinate; the coordinate tensors broadcast.

    Raises UsageError where an element is not held.
    """
    at, kept = addresses(field, **coordinates), held(case, field.buffer)
    if kept.is_whole:
        return at
    starts, stops = (torch.tensor(ends, device=at.device) for ends in zip(*kept.spans, strict=True))
    number = torch.searchsorted(starts, at, right=True) - 1
    if bool((number < 0).any()) or bool((at >= stops[number]).any()):
        first = int(at[(number < 0) | (at >= stops[number])][0])
        raise UsageError(f"byte {first} of {field.buffer}, in {field.name}, is not held")
    return at - starts[number] + torch.tensor(kept.firsts, device=at.device)[number]


def addresses(field: Field, **coordinates: Tensor) -> Tensor:
    """Byte address of the element at each coordinate; the coordinate tensors broadcast.

    A coordinate whose axis has no term does not matter, not even to the shape.
    """
    device = next((each.device for each in coordinates.values()), None)
    result = torch.tensor(field.base, device=device)
    for term in field.terms:
        digit = coordinates[term.axis]
        if term.div > 1:
            digit = digit // term.div
        if term.mod:
            digit = digit % term.mod
        result = result + digit * term.stride
    return result


def element_bytes(at: Tensor, dtype: str) -> Tensor:
    """The positions of every byte of the elements at `at`: one more axis, of the element size."""
    return at.unsqueeze(-1) + torch.arange(itemsize(dtype), device=at.device)


def read(image: Tensor, at: Tensor, dtype: str) -> Tensor:
    """The codes of the elements of `dtype` at positions `at`; int64, little endian."""
    size = itemsize(dtype)
    elements = _elements(image, at, size)
    if elements is not None:
        whole, numbers = elements
        return whole[numbers].to(torch.int64) & _ALL_BITS[size]
    parts = image[element_bytes(at, dtype)].to(torch.int64)
    code = parts[..., 0]
    for index in range(1, parts.shape[-1]):
        code = code | (parts[..., index] << (8 * index))
    return code


def write(image: Tensor, at: Tensor, dtype: str, codes: Tensor) -> None:
    """Put `codes` at positions `at` of `image`, little endian."""
    size = itemsize(dtype)
    elements = _elements(image, at, size)
    if elements is not None:
        whole, numbers = elements
        whole[numbers] = codes.to(whole.dtype)
        return
    shifts = torch.arange(size, device=at.device) * 8
    image[element_bytes(at, dtype)] = ((codes.unsqueeze(-1) >> shifts) & 0xFF).to(torch.uint8)


def mark(mask: Tensor, at: Tensor, dtype: str) -> None:
    """Set every byte of the elements at positions `at` in a mask with an entry per byte."""
    size = itemsize(dtype)
    elements = _elements(mask.view(torch.uint8), at, size)
    if elements is not None:
        whole, numbers = elements
        whole[numbers] = 0x0101010101010101 & (_ALL_BITS[size] >> 1)
        return
    mask[element_bytes(at, dtype)] = True


def copy(source: Tensor, start: Tensor, target: Tensor, goal: Tensor, dtype: str) -> None:
    """Copy the elements at positions `start` of `source` to positions `goal` of `target`."""
    size = itemsize(dtype)
    there, here = _elements(source, start, size), _elements(target, goal, size)
    if there is not None and here is not None:
        here[0][here[1]] = there[0][there[1]]
    else:
        target[element_bytes(goal, dtype)] = source[element_bytes(start, dtype)]


_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_ALL_BITS = {size: (1 << (8 * size)) - 1 if size < 8 else -1 for size in _INTEGERS}


def _elements(image: Tensor, at: Tensor, size: int) -> tuple[Tensor, Tensor] | None:
    """`image` as integers of `size` bytes and the place of each in it; None where one lies across
    two of them, as a field with an odd base may ask for."""
    if size == 1:
        return image, at
    if image.numel() % size or image.data_ptr() % size or is_any((at & (size - 1)) != 0):
        return None
    return image.view(_INTEGERS[size]), at >> (size.bit_length() - 1)


def same(one: Tensor, other: Tensor) -> bool:
    """Whether two images or masks, one entry a byte, are equal. On a CPU eight entries are looked
    at at once, where torch.equal looks at one."""
    if one is other:
        return True
    if one.device.type != "cpu" or one.shape != other.shape:
        return torch.equal(one, other)
    mine, theirs = one.numpy(), other.numpy()
    whole = len(mine) // 8 * 8
    return bool(
        (mine[:whole].view(np.int64) == theirs[:whole].view(np.int64)).all()
        and (mine[whole:] == theirs[whole:]).all()
    )


def is_any(mask: Tensor) -> bool:
    """Whether some entry of a mask is set; on a CPU by NumPy, as in `same`."""
    return bool(mask.numpy().any() if mask.device.type == "cpu" else mask.any())
