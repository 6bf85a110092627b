"""Hypothesis choices from a list: the case that failed, handed to Hypothesis for shrinking.

Searching needs no Hypothesis (`kvfuzz.strategies.choices.Drawn` makes the choices of a case); what
failed is a list of integers, and this provider makes Hypothesis draw exactly those. Hypothesis'
own generator mixes in constants that it harvests from local modules and would make the same seed
draw other cases after an unrelated edit. The provider API is documented but internal, so the range
of Hypothesis versions is bounded in pyproject.toml.
"""

from collections.abc import Sequence
from typing import Any

from hypothesis.internal.conjecture.providers import AVAILABLE_PROVIDERS, PrimitiveProvider

BACKEND = "kvfuzz"


class _Given:
    """The integers to draw; Hypothesis makes the provider, so they cannot be passed to it."""

    values: Sequence[int] = ()


def use_choices(values: Sequence[int]) -> str:
    """Draw `values` in every example; returns the backend name for Hypothesis' settings."""
    _Given.values = values
    AVAILABLE_PROVIDERS[BACKEND] = f"{__name__}.GivenProvider"
    return BACKEND


class GivenProvider(PrimitiveProvider):
    """The given integers, and the least one where they have run out."""

    lifetime = "test_case"

    def __init__(self, conjecturedata: Any, /) -> None:
        super().__init__(conjecturedata)
        self._values = iter(_Given.values)

    def draw_integer(
        self,
        min_value: int | None = None,
        max_value: int | None = None,
        *,
        weights: dict[int, float] | None = None,
        shrink_towards: int = 0,
    ) -> int:
        """The next integer, within the bounds, which every strategy of kvfuzz gives."""
        low, high = min_value or 0, max_value or 0
        return min(max(next(self._values, low), low), high)

    def draw_boolean(self, p: float = 0.5) -> bool:
        """No strategy of kvfuzz draws one."""
        return False

    def draw_float(self, **_: Any) -> float:
        """No strategy of kvfuzz draws one."""
        raise NotImplementedError

    def draw_string(self, *_: Any, **__: Any) -> str:
        """No strategy of kvfuzz draws one."""
        raise NotImplementedError

    def draw_bytes(self, *_: Any, **__: Any) -> bytes:
        """No strategy of kvfuzz draws any."""
        raise NotImplementedError
