"""One kernel that applies an op to two arrays. Run as a script it does so in the interpreter:
`arithmetic_kernels.py INPUTS.npz OUTPUTS.npz`, arrays and results by `op dtype`.
"""

# ruff: noqa: N803 (constexpr parameters of Triton kernels are upper case)
import os
import sys

if __name__ == "__main__":
    os.environ["TRITON_INTERPRET"] = "1"  # before triton is imported

import numpy as np
import torch
import triton
import triton.language as tl

INTEGER_OPS = (
    "add",
    "sub",
    "mul",
    "div",
    "mod",
    "and",
    "or",
    "xor",
    "shl",
    "shr",
    "min",
    "max",
    "less",
    "select",
    "narrow",
    "widen",
    "sum",
    "total",
    "largest",
    "cumsum",
)
FLOAT_OPS = ("add", "sub", "mul", "min", "max", "less", "select", "abs", "negate")
INTEGERS = ("int8", "int16", "int32", "int64")
LENGTH = 256


@triton.jit
def apply(a_ptr, b_ptr, out_ptr, OP: tl.constexpr, LENGTH: tl.constexpr):
    at = tl.arange(0, LENGTH)
    a = tl.load(a_ptr + at)
    b = tl.load(b_ptr + at)
    if OP == "add":
        result = a + b
    elif OP == "sub":
        result = a - b
    elif OP == "mul":
        result = a * b
    elif OP == "div":
        result = a // b
    elif OP == "mod":
        result = a % b
    elif OP == "and":
        result = a & b
    elif OP == "or":
        result = a | b
    elif OP == "xor":
        result = a ^ b
    elif OP == "shl":
        result = a << b
    elif OP == "shr":
        result = a >> b
    elif OP == "min":
        result = tl.minimum(a, b)
    elif OP == "max":
        result = tl.maximum(a, b)
    elif OP == "less":
        result = (a < b).to(out_ptr.dtype.element_ty)
    elif OP == "select":
        result = tl.where(a <= b, a, b)
    elif OP == "narrow":
        result = a.to(tl.int8).to(out_ptr.dtype.element_ty)
    elif OP == "widen":
        result = (a.to(tl.int64) * b.to(tl.int64) >> 3).to(out_ptr.dtype.element_ty)
    elif OP == "abs":
        result = tl.abs(a)
    elif OP == "negate":
        result = -a
    elif OP == "sum":
        result = tl.sum(a, axis=0, keep_dims=True).to(out_ptr.dtype.element_ty) + b
    elif OP == "total":
        result = tl.sum(a, axis=0).to(out_ptr.dtype.element_ty) + b
    elif OP == "largest":
        result = tl.max(a, axis=0).to(out_ptr.dtype.element_ty) - b
    else:
        result = tl.cumsum(a, axis=0)
    tl.store(out_ptr + at, result)


def inputs(seed: int) -> dict[str, np.ndarray]:
    """Operands `[2, LENGTH]` for each `op dtype`: random bits among the values where ops turn."""
    rng = np.random.default_rng(seed)
    drawn = {}
    for dtype in INTEGERS:
        info = np.iinfo(dtype)
        turning = np.array([0, 1, -1, 2, info.max, info.min, info.max - 1, info.min + 1], dtype)
        for op in INTEGER_OPS:
            both = rng.integers(info.min, info.max, (2, LENGTH), dtype, endpoint=True)
            both[:, ::3] = rng.choice(turning, both[:, ::3].shape)
            if op in ("div", "mod"):  # by zero, and the quotient beyond the range, are undefined
                both[1][(both[1] == 0) | (both[1] == -1)] = 3
            if op in ("shl", "shr"):  # by the width or more is undefined
                both[1] %= info.bits
            if (op, dtype) == ("total", "int32"):
                # Triton 3.6's interpreter wraps no scalar that it sums: triton-lang/triton#11531.
                both[0] //= LENGTH
            drawn[f"{op} {dtype}"] = both
    for op in FLOAT_OPS:
        bits = rng.integers(0, 1 << 32, (2, LENGTH), np.uint32)
        both = bits.view(np.float32)
        both[:, ::5] = rng.choice(np.array([0.0, -0.0, 1.0, np.inf, -np.inf], np.float32), (2, 52))
        both[np.isnan(both)] = 1.5  # which NaN comes out of arithmetic is open
        if op in ("min", "max"):  # so is, in NumPy, which of two zeros
            both[both == 0] = 2.5
        drawn[f"{op} float32"] = both
    return drawn


def results(operands: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """What the kernel makes of each."""
    made = {}
    for name, (a, b) in operands.items():
        out = torch.zeros(LENGTH, dtype=torch.from_numpy(a).dtype)
        apply[(1,)](
            torch.from_numpy(a), torch.from_numpy(b), out, OP=name.split()[0], LENGTH=LENGTH
        )
        made[name] = out.numpy()
    return made


if __name__ == "__main__":
    with np.load(sys.argv[1]) as archive, np.errstate(all="ignore"):
        np.savez(sys.argv[2], **results(dict(archive)))
