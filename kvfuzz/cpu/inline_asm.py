"""`tt.elementwise_inline_asm`: a table of the instructions that are known, and nothing else.

Inline assembly is opaque to Triton, and here too: text that is not in the table is refused. One
32-bit instruction on registers, one element at a time, is what the table holds, and the two texts
of Triton's own library for HIP (its clock and its compute unit's number).
"""

import re
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvfuzz.cpu.errors import UnsupportedOp
from kvfuzz.cpu.ir import Op
from kvfuzz.cpu.machine import Machine, Step

Array = NDArray[Any]
_WIDTH = np.uint32(31)  # shifts look at five bits


def _product_24(a: Array, b: Array) -> Array:
    low = np.uint32(0xFFFFFF)
    product: Array = (a & low) * (b & low)
    return product


def _bit_field(a: Array, start: Array, width: Array) -> Array:
    mask = (np.uint32(1) << (width & _WIDTH)) - np.uint32(1)
    field: Array = (a >> (start & _WIDTH)) & mask
    return field


def _align_bits(high: Array, low: Array, by: Array) -> Array:
    both = (high.astype(np.uint64) << np.uint64(32)) | low
    return (both >> (by & _WIDTH).astype(np.uint64)).astype(np.uint32)


def _on_signed(compute: Callable[..., Array]) -> Callable[..., Array]:
    return lambda *values: compute(*[v.view(np.int32) for v in values]).view(np.uint32)


# By opcode, on uint32 (CDNA3 instruction set, vector ALU); operands in the order they are written.
INSTRUCTIONS: dict[str, Callable[..., Array]] = {
    "v_mov_b32": lambda a: a,
    "v_not_b32": np.invert,
    "v_and_b32": np.bitwise_and,
    "v_or_b32": np.bitwise_or,
    "v_xor_b32": np.bitwise_xor,
    "v_add_u32": np.add,
    "v_sub_u32": np.subtract,
    "v_mul_lo_u32": np.multiply,
    "v_mul_u32_u24": _product_24,
    "v_min_u32": np.minimum,
    "v_max_u32": np.maximum,
    "v_min_i32": _on_signed(np.minimum),
    "v_max_i32": _on_signed(np.maximum),
    "v_lshlrev_b32": lambda by, a: a << (by & _WIDTH),
    "v_lshrrev_b32": lambda by, a: a >> (by & _WIDTH),
    "v_ashrrev_i32": _on_signed(lambda by, a: a >> (by & np.int32(31))),
    "v_and_or_b32": lambda a, b, c: (a & b) | c,
    "v_or3_b32": lambda a, b, c: a | b | c,
    "v_add3_u32": lambda a, b, c: a + b + c,
    "v_lshl_add_u32": lambda a, by, c: (a << (by & _WIDTH)) + c,
    "v_lshl_or_b32": lambda a, by, c: (a << (by & _WIDTH)) | c,
    "v_bfi_b32": lambda mask, a, b: (mask & a) | (~mask & b),
    "v_bfe_u32": _bit_field,
    "v_alignbit_b32": _align_bits,
}


def _clock(machine: Machine) -> int:
    """Time passes with every loop iteration; two reads without one in between may be equal."""
    return (1 << 62) - machine.fuel


# By the whole text: a number that the hardware is free to choose.
READINGS: dict[str, Callable[[Machine], int]] = {
    "s_memrealtime $0; s_waitcnt vmcnt(0)": _clock,
    "s_getreg_b32 $0, hwreg(4, 8, 8)": lambda _machine: 0,
}

_OPERANDS = re.compile(r"(\w+) \$0((?:, \$\d)+);?")


def bind_inline_asm(op: Op) -> Step:
    """Bind known text. Raises `UnsupportedOp` with the text for any other."""
    strings: Any = op.attributes.get("strings", ())
    text = re.sub(r"(?:\\0A|\\n|\s)+", " ", strings[0].replace("\\0A", "; ")).strip()
    text = re.sub(r"[; ]*; *", "; ", text).strip("; ")
    if len(op.results) == 1 and text in READINGS:
        reading, dtype = READINGS[text], np.dtype(f"i{op.type.nbytes}")
        ndim = len(op.type.shape) + 1
        return lambda machine: np.full([1] * ndim, reading(machine), dtype)
    match = _OPERANDS.fullmatch(text)
    compute = INSTRUCTIONS.get(match[1].removesuffix("_e32").removesuffix("_e64") if match else "")
    types = (*op.operand_types, *op.result_types)
    plain = len(op.results) == 1 and all(each.nbytes == 4 and not each.is_pointer for each in types)
    if match is None or compute is None or not plain or op.attributes.get("packed_element") != 1:
        raise UnsupportedOp(f'{op.name} "{text}"', op.location.name, op.location.line)
    order = [int(number) - 1 for number in re.findall(r"\d", match[2])]
    if sorted(order) != list(range(len(op.operands))):
        raise UnsupportedOp(f'{op.name} "{text}"', op.location.name, op.location.line)
    dtype = np.dtype(np.float32 if op.type.is_float else np.int32)
    return lambda _, *values: compute(*[values[at].view(np.uint32) for at in order]).view(dtype)
