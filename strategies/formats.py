"""How a cache is laid out and what its elements are: layout, order and the two dtypes.

The four depend on each other (a cache that is not fp8 has the model's dtype; content-packed has
no SHUFFLE order; a domain forbids more), so they are drawn one after the other, each from the
levels that some complete combination still allows.
"""

import itertools
from functools import cache

import msgspec
from hypothesis import strategies as st
from hypothesis.strategies import DrawFn, SearchStrategy

from kvfuzz.errors import UsageError
from kvfuzz.model.axes import Domain
from kvfuzz.model.dtypes import DTYPES
from kvfuzz.model.vocabulary import conflict

AXES = ("layout", "order", "cache_dtype", "model_dtype")


class Format(msgspec.Struct, frozen=True):
    """One combination of the four."""

    layout: str
    order: str
    cache_dtype: str
    model_dtype: str


def _sound(format: Format) -> bool:
    plain_copy = format.cache_dtype == format.model_dtype
    possible = conflict(msgspec.structs.asdict(format)) is None
    return (plain_copy or DTYPES[format.cache_dtype].is_fp8) and possible


def allowed_formats(domain: Domain) -> list[Format]:
    """Every combination that makes sense and that `domain` accepts.

    Raises UsageError where there is none.
    """
    combinations = itertools.product(*(domain.levels(axis) for axis in AXES))
    formats = [
        format
        for format in (Format(*levels) for levels in combinations)
        if _sound(format) and domain.refusal(msgspec.structs.asdict(format)) is None
    ]
    if not formats:
        levels = ", ".join(f"{axis}={'|'.join(domain.levels(axis))}" for axis in AXES)
        raise UsageError(f"nothing to draw: no format fits {levels} ({domain.source})")
    return formats


def formats(domain: Domain) -> SearchStrategy[Format]:
    """The formats that `domain` accepts, each axis uniform over what is still possible."""
    every = allowed_formats(domain)

    @cache
    def still_possible(drawn: tuple[str, ...]) -> list[str]:
        matching = [f for f in map(msgspec.structs.astuple, every) if f[: len(drawn)] == drawn]
        return list(dict.fromkeys(f[len(drawn)] for f in matching))

    @st.composite
    def draw_format(draw: DrawFn) -> Format:
        drawn: tuple[str, ...] = ()
        for _ in AXES:
            drawn += (draw(st.sampled_from(still_possible(drawn))),)
        return Format(*drawn)

    return draw_format()
