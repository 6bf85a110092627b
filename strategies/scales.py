"""Scales of an fp8 cache as fp32 bit patterns: one, powers of two, and everything between.

K and V get different ones, so that a kernel which mixes them up is wrong. A scale is bounded so
that neither a stored nor a loaded value overflows: saturation is a property of its own.
"""

import math

from hypothesis import strategies as st
from hypothesis.strategies import DrawFn, SearchStrategy

from kvfuzz.model.axes import Domain
from kvfuzz.model.dtypes import DTYPES
from kvfuzz.strategies.formats import Format

ONE = 0x3F800000
SMALLEST_EXPONENT, LARGEST_EXPONENT = -6, 3


def scale_pairs(domain: Domain, format: Format) -> SearchStrategy[tuple[int, int]]:
    """(k_scale, v_scale) bit patterns; a cache that is not fp8 has no scale but 1."""
    cache = DTYPES[format.cache_dtype]
    kinds = [kind for kind in domain.levels("scale") if kind != "none"]
    if not cache.is_fp8 or not kinds:
        return st.just((ONE, ONE))
    headroom = math.frexp(DTYPES[format.model_dtype].max_finite / cache.max_finite)[1] - 2
    exponents = st.integers(SMALLEST_EXPONENT, min(LARGEST_EXPONENT, headroom)).map(
        lambda exponent: (exponent + DTYPES["fp32"].bias) << 23
    )

    @st.composite
    def draw_pair(draw: DrawFn) -> tuple[int, int]:
        kind = draw(st.sampled_from(kinds))
        if kind == "unit":
            return ONE, ONE
        k_scale = draw(exponents)
        v_scale = draw(exponents.filter(lambda bits: bits != k_scale))
        if kind == "power_of_two":
            return k_scale, v_scale
        mantissas = st.integers(1, (1 << 23) - 1)
        return k_scale | draw(mantissas), v_scale | draw(mantissas)

    return draw_pair()
