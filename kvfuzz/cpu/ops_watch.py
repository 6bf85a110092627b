"""Ops that only watch: print, assert, assumptions and barriers."""

import re
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvfuzz.cpu.accesses import active_lanes
from kvfuzz.cpu.errors import LaunchError
from kvfuzz.cpu.ir import Op, Type
from kvfuzz.cpu.machine import Machine, Step
from kvfuzz.cpu.numerics import decode
from kvfuzz.cpu.ops_integer import unsigned
from kvfuzz.cpu.values import Pointer, raw

Array = NDArray[Any]


def _text(op: Op) -> str:
    """The op's first string, MLIR's `\\0A` and the like undone."""
    strings: Any = op.attributes.get("strings", ())
    return re.sub(r"\\([0-9A-F]{2})", lambda code: chr(int(code[1], 16)), next(iter(strings), ""))


def _assert(op: Op) -> Step:
    message, place = _text(op), str(op.location)

    def step(machine: Machine, condition: Array) -> None:
        active = active_lanes(machine, None, condition.ndim - 1)
        failed = ~condition if active is None else ~condition & active
        if failed.any():
            raise LaunchError(f"device assertion failed: {message!r} in {place}")

    return step


def _print(op: Op) -> Step:
    """One line to stderr each time the op is reached: the values of the first active program."""
    message, place = _text(op), str(op.location)
    in_hex = op.attributes.get("hex") is True
    are_signed: Any = op.attributes.get("isSigned", ())

    def step(machine: Machine, *values: Any) -> None:
        on = np.ones(machine.num_programs, np.bool_) if machine.mask is None else machine.mask
        first = int(on.argmax())
        shown = [
            _shown(raw(value), type_, first, bool(signed), in_hex)
            for value, type_, signed in zip(values, op.operand_types, are_signed, strict=True)
        ]
        who = f"program {machine.program_ids(first)}, first of {np.count_nonzero(on)}"
        line = f"{place}: {message.strip()} {', '.join(shown)}".rstrip()
        print(f"{line} ({who})", file=sys.stderr)

    return step


def _shown(value: Any, type_: Type, program: int, is_signed: bool, in_hex: bool) -> str:
    if isinstance(value, Pointer):
        return "pointer"
    values = np.broadcast_to(value[min(program, len(value) - 1)], type_.shape)
    if in_hex:
        bits = unsigned(values.copy())
        digits = 2 * bits.dtype.itemsize
        return _summary(bits, lambda code: f"0x{int(code):0{digits}x}")
    if type_.is_float:
        return _summary(decode(values, type_.element), lambda number: f"{float(number):g}")
    whole = values if is_signed else unsigned(values.copy())
    return _summary(whole, lambda number: str(int(number)))


def _summary(values: Array, form: Callable[[Any], str]) -> str:
    """All of up to eight values, else the first and last three along each axis."""
    if values.ndim == 0:
        return form(values[()])
    text = np.array2string(values, threshold=8, edgeitems=3, formatter={"all": form})
    return " ".join(text.split())


def _nothing(_: Op) -> Step:
    return lambda _, *values: None


WATCH_OPS: dict[str, Callable[[Op], Step]] = {
    "tt.assert": _assert,
    "tt.print": _print,
    "gpu.barrier": _nothing,
    "ttg.barrier": _nothing,
    "llvm.intr.assume": _nothing,
}
