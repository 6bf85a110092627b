"""Library functions that kernels call by symbol: AMD's ocml, in fp32."""

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvfuzz.cpu.errors import UnsupportedOp
from kvfuzz.cpu.ir import Op
from kvfuzz.cpu.machine import Step

Array = NDArray[Any]


def _round_half_away(a: Array) -> Array:
    whole = np.trunc(a)
    step = np.copysign((np.abs(a - whole) >= 0.5).astype(a.dtype), a)
    rounded: Array = whole + step
    return rounded


SYMBOLS: dict[str, Callable[..., Array]] = {
    "__ocml_rint_f32": np.rint,
    "__ocml_nearbyint_f32": np.rint,
    "__ocml_round_f32": _round_half_away,
    "__ocml_trunc_f32": np.trunc,
    "__ocml_floor_f32": np.floor,
    "__ocml_ceil_f32": np.ceil,
    "__ocml_fabs_f32": np.abs,
    "__ocml_sqrt_f32": np.sqrt,
    "__ocml_copysign_f32": np.copysign,
    "__ocml_isnan_f32": lambda a: np.isnan(a).astype(np.int32),
    "__ocml_isinf_f32": lambda a: np.isinf(a).astype(np.int32),
}


def bind_extern(op: Op) -> Step:
    """`tt.extern_elementwise` of a known symbol."""
    strings: Any = op.attributes.get("strings", ())
    symbol = next((text for text in strings if text.startswith("__ocml")), "")
    compute = SYMBOLS.get(symbol)
    if compute is None:
        raise UnsupportedOp(f"{op.name} {symbol}", op.location.name, op.location.line)
    return lambda _, *values: compute(*values)
