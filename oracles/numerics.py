"""How far roundings move a number: units of formats, numbers with bounds, what a kernel rounds.

A dot in tf32 keeps ten bits of mantissa of its operands, and drops the others or rounds them. What
a format of the model holds with as many bits, as bf16 and fp16 do, it takes as it is.
"""

from typing import NamedTuple

from torch import Tensor

from kvfuzz.model.dtypes import CacheDtype
from kvfuzz.model.target import Held, Precision

FP32 = 2.0**-24
"""The unit roundoff of fp32."""
SUMS = 2.0**-23
"""Of its sums, which tensor cores may cut off instead of rounding (Fasi, Higham, Mikaitis and
Pranesh, "Numerical behavior of NVIDIA tensor cores", 2021)."""
SHORT = 2.0**-13
"""Of sums of fp8 products on Hopper, which keeps about 14 bits (DeepSeek-V3 technical report, 2024,
section 3.3.2)."""
LEAST = 2.0**-149
"""The smallest number of fp32."""
FEW = 8
"""Units of a function of a number, such as exp2 or tanh, and of a division: a few, generously."""
CUT = 2.0**-10
"""Of an operand of which ten bits of mantissa are kept."""
EXACT_BITS, EXACT_SHORT_BITS = 20, 12
"""Bits up to which integers add up exactly in fp32, however a dot aligns them: some below 24; and
in short sums."""


class Bounded(NamedTuple):
    """Numbers in fp64, and how far from each a result may be; of one shape."""

    value: Tensor
    bound: Tensor

    def rounded(self, dtype: CacheDtype) -> "Bounded":
        """The same once it was rounded to `dtype`."""
        more = unit(dtype) * (self.value.abs() + self.bound) + smallest(dtype)
        return Bounded(self.value, self.bound + more)


class Numerics(NamedTuple):
    """What is rounded, and how: relative errors of what a kernel makes of its operands."""

    precision: Precision
    model: CacheDtype
    is_quantised: bool
    """Whether K and V are code * scale."""
    query: CacheDtype | None = None
    """The format of queries that are code * scale, too."""
    v_scale: float = 1.0
    """The least scale of V."""

    def unit(self, held: Held) -> float:
        """Of what is held as `held`."""
        return FP32 if held == "fp32" else unit(self.model)

    @property
    def cut(self) -> float:
        """Of an operand in fp32."""
        return CUT if self.precision.fp32_dot == "tf32" else 0.0

    @property
    def cached(self) -> float:
        """Of an element of K or V."""
        if self.is_quantised:
            return FP32 + max(self.unit(self.precision.dequantised), self.cut)
        return self.cut if self.model.itemsize == 4 else 0.0

    @property
    def asked(self) -> float:
        """Of an element of a query."""
        scaled = self.precision.scaled_query
        off = self.unit(scaled) if scaled else 0.0
        if self.query:
            off += FP32 + self.unit(self.precision.dequantised)
        is_fp32 = self.model.itemsize == 4 or self.query is not None or scaled is not None
        return off + self.cut if is_fp32 else off

    @property
    def weight(self) -> float:
        """Of a weight that multiplies V."""
        held = self.precision.weights
        if held == "query" and self.query:
            return max(unit(self.query), self.cut)
        return max(FP32 if held == "fp32" else unit(self.model), self.cut)

    @property
    def least_weight(self) -> float:
        """Below what a weight may vanish, where the largest one is 1."""
        how = self.precision
        if how.weights == "fp32" and how.sums == "fp32":
            return 0.0
        if how.weights == "query" and self.query:
            return smallest(self.query) / how.weights_scale.get(self.query.name, 1.0)
        return smallest(self.model) / (max(self.v_scale, LEAST) if how.weights_by_scale else 1.0)

    @property
    def dot(self) -> float:
        """Of each addition of a dot."""
        return SHORT if self._is_short else SUMS

    @property
    def exact_bits(self) -> int:
        """Bits up to which a dot adds integers exactly."""
        return EXACT_SHORT_BITS if self._is_short else EXACT_BITS

    @property
    def _is_short(self) -> bool:
        return self.query is not None and self.precision.fp8_sums == "short"


def unit(dtype: CacheDtype) -> float:
    """The largest relative error of one rounding to `dtype`."""
    return float(2.0 ** -(dtype.mantissa_bits + 1))


def smallest(dtype: CacheDtype) -> float:
    """The smallest positive number of `dtype`."""
    return float(2.0 ** (1 - dtype.bias - dtype.mantissa_bits))
