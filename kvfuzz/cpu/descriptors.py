"""Tensor descriptors that the host makes and passes as arguments.

Triton's AMD pipeline rewrites descriptors to pointers, masks and strides, and gives a kernel that
takes one these parameters instead: the base, shape, strides, how it pads, and shape and strides
once more. Descriptors that kernels make themselves leave no trace in the compiled kernel.
"""

from collections.abc import Iterator
from typing import Any


def is_descriptor(kind: object) -> bool:
    """Whether an argument's Triton type is `tensordesc<fp32[16, 16]>` or the like."""
    return isinstance(kind, str) and kind.startswith("tensordesc<")


def taken_apart(name: str, kind: str, value: Any) -> Iterator[tuple[str, str, Any]]:
    """The parameters of one descriptor as (name, type, value), in the compiled kernel's order."""
    element = kind[len("tensordesc<") : kind.index("[")]
    shape, strides = [int(each) for each in value.shape], [int(each) for each in value.strides]
    yield name, f"*{element}", value.base
    for axis, length in enumerate(shape):
        yield f"{name}.shape.{axis}", "i64", length
    for axis, stride in enumerate(strides):
        yield f"{name}.stride.{axis}", "i64", stride
    yield f"{name}.padding", "i1", value.padding == "nan"
    if hasattr(value, "round_f32_to_tf32"):  # from Triton 3.9 on
        yield f"{name}.roundF32ToTF32", "i1", value.round_f32_to_tf32
    for axis, length in enumerate(shape):
        yield f"{name}.shape.{axis}", "i32", length
    for axis, stride in enumerate(strides):
        yield f"{name}.stride.{axis}", "i64", stride
