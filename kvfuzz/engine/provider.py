"""Hypothesis choices from a random number generator of our own.

Hypothesis' generator mixes in constants that it harvests from local modules, which makes the same
seed draw other cases after an unrelated edit. This provider is uniform and depends on nothing but
the seed; Hypothesis takes over for shrinking. The provider API is documented but internal, so the
range of Hypothesis versions is bounded in pyproject.toml.
"""

import random
from typing import Any

from hypothesis.internal.conjecture.providers import AVAILABLE_PROVIDERS, PrimitiveProvider

BACKEND = "kvfuzz"

_UNBOUNDED = 1 << 32


class _Stream:
    """The generator that the next provider instance draws from; Hypothesis makes the instance."""

    current = random.Random(0)


def use_seed(seed: int) -> str:
    """Start a stream of choices at `seed`; returns the backend name for Hypothesis' settings."""
    _Stream.current = random.Random(seed)
    AVAILABLE_PROVIDERS[BACKEND] = f"{__name__}.SeededProvider"
    return BACKEND


class SeededProvider(PrimitiveProvider):
    """Uniform choices from the current stream."""

    lifetime = "test_function"

    def draw_boolean(self, p: float = 0.5) -> bool:
        """True with probability `p`."""
        return _Stream.current.random() < p

    def draw_integer(
        self,
        min_value: int | None = None,
        max_value: int | None = None,
        *,
        weights: dict[int, float] | None = None,
        shrink_towards: int = 0,
    ) -> int:
        """An integer in the closed range."""
        low = -_UNBOUNDED if min_value is None else min_value
        high = low + 2 * _UNBOUNDED if max_value is None else max_value
        return _Stream.current.randint(low, high)

    def draw_float(
        self,
        *,
        min_value: float = -float("inf"),
        max_value: float = float("inf"),
        allow_nan: bool = True,
        smallest_nonzero_magnitude: float,
    ) -> float:
        """A float between the bounds; no strategy of kvfuzz draws one."""
        return _Stream.current.uniform(max(min_value, -1e9), min(max_value, 1e9))

    def draw_string(self, intervals: Any, *, min_size: int = 0, max_size: int = 1 << 30) -> str:
        """A string over `intervals`; no strategy of kvfuzz draws one."""
        size = _Stream.current.randint(min_size, min(max_size, min_size + 8))
        return "".join(
            intervals.char_in_shrink_order(_Stream.current.randrange(len(intervals)))
            for _ in range(size)
        )

    def draw_bytes(self, min_size: int = 0, max_size: int = 1 << 30) -> bytes:
        """Bytes; no strategy of kvfuzz draws any."""
        return _Stream.current.randbytes(
            _Stream.current.randint(min_size, min(max_size, min_size + 8))
        )
