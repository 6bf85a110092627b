"""scale_homogeneity: 2**n times the scale gives 2**n times what is read, and the same as is stored.

A gather multiplies a code by its scale, so that its output is 2**n times as large, bit for bit. A
write divides by the scale, so that 2**n times the scale and 2**n times x store the same code. Both
hold for elements that stay clear of the ends of their format. What shows is a constant that is
added to a scale, or a bound that it is clamped to. A scale of 1 is the plainest, and stays.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from kvfuzz.model.dtypes import DTYPES, CacheDtype
from kvfuzz.model.fill import FP32_ONE, word
from kvfuzz.oracles import image
from kvfuzz.oracles.liveness import near_elements
from kvfuzz.oracles.memory import Elements
from kvfuzz.oracles.observation import Run
from kvfuzz.oracles.properties import BASE, Judgement, NotChecked, Runs, Variant, Wanted
from kvfuzz.oracles.related import ended
from kvfuzz.oracles.stored_bytes import first_violation
from kvfuzz.oracles.writes import SIDES

SCALED = "scaled"
MOST = 16
"""The largest |n|: scales down to about 2**-22, as small activations have them."""
UP_EVERY = 4
"""One n in so many is positive: more bounds are found below a scale than above it."""
MARGIN = 2
"""Exponents next to the ends of a format that are left out, since what rounds there may cross."""


@dataclass(frozen=True, slots=True)
class Scaling:
    """The case with some scales times 2**n: its images, and which bytes must be what then."""

    n: int
    images: dict[str, Tensor]
    expected: dict[str, Tensor]
    judged: dict[str, Tensor]


class Side(NamedTuple):
    """One side of a page: its scales, its row elements with their codes, and what it writes."""

    scale_buffer: str
    scale_at: Tensor
    rows: Elements
    codes: Tensor
    written: Elements


@lru_cache(maxsize=1)
def scaling(base: Run) -> Scaling | NotChecked:
    """How the case is scaled; the sign of n is decided by the fill seed."""
    if not DTYPES[base.case.bound_field(base.case.steps[0], SIDES[0][1]).dtype].is_quantised:
        return NotChecked("a cache that is not fp8 has no scale")
    sides = list(_sides(base))
    if not sides:
        return NotChecked("all scales are 1, which others are compared with")
    dtype = DTYPES[sides[0].rows.field.dtype]
    ends = (-MOST, MOST)
    scales = [image.read(base.before[side.scale_buffer], side.scale_at, "fp32") for side in sides]
    if not all(bool(_is_usable(each, DTYPES["fp32"], n).all()) for each in scales for n in ends):
        return NotChecked("a scale is next to the ends of fp32")
    n = _exponent([side.codes for side in sides], dtype, base.token_case.scene.fill_seed)
    if not n:
        return NotChecked(f"every element is next to the ends of {dtype.name}")
    return _scaled(base, sides, n, dtype)


def _sides(base: Run) -> Iterator[Side]:
    case, step = base.case, base.case.steps[0]
    is_write = step.op == "reshape_and_cache"
    images = base.before if is_write else base.after
    written = {each.parameter: each for each in base.writes}
    rows = {each.parameter: each for each in (base.reads if is_write else base.writes)}
    for activation, cache, scale in SIDES:
        field = case.bound_field(step, scale)
        at = near_elements(case, field, base.device).flatten()
        if bool((image.read(base.before[field.buffer], at, "fp32") == FP32_ONE).all()):
            continue
        here = rows[activation]
        codes = image.read(images[here.field.buffer], here.at, here.field.dtype)
        yield Side(field.buffer, at, here, codes, written[cache if is_write else activation])


def _is_usable(codes: Tensor, dtype: CacheDtype, n: int = 0) -> Tensor:
    """Which codes are normal numbers away from the ends of `dtype`, and are so times 2**n."""
    exponent = (codes & (dtype.sign_bit - 1)) >> dtype.mantissa_bits
    top = (1 << dtype.exponent_bits) - 1 - MARGIN
    first, last = max(MARGIN, MARGIN - n), min(top, top - n)
    return (exponent >= first) & (exponent <= last)


def _exponent(codes: list[Tensor], dtype: CacheDtype, seed: int) -> int:
    """n, so that half of the elements that can be scaled at all can be scaled by 2**n; or 0."""
    every = torch.cat([each.flatten() for each in codes])
    every = every[_is_usable(every, dtype)]
    if not len(every):
        return 0
    median = int(((every & (dtype.sign_bit - 1)) >> dtype.mantissa_bits).median())
    down = min(MOST, median - MARGIN)
    up = min(MOST, (1 << dtype.exponent_bits) - 1 - MARGIN - median)
    return (-down or up) if word(seed, SCALED, 0) % UP_EVERY else (up or -down)


def _scaled(base: Run, sides: list[Side], n: int, dtype: CacheDtype) -> Scaling | NotChecked:
    is_write = base.case.steps[0].op == "reshape_and_cache"
    names = [side.scale_buffer for side in sides]
    if is_write:
        names += [side.rows.field.buffer for side in sides]
    images = {name: base.before[name].clone() for name in names}
    written = [side.written.field.buffer for side in sides]
    expected = {name: base.after[name].clone() for name in written}
    judged = {name: torch.zeros_like(each, dtype=torch.bool) for name, each in expected.items()}
    for side in sides:
        _times(images[side.scale_buffer], side.scale_at, DTYPES["fp32"], n)
        usable = _is_usable(side.codes, dtype, n)
        target = images if is_write else expected
        _times(target[side.rows.field.buffer], side.rows.at[usable], dtype, n)
        if is_write:  # a zero is a zero times anything
            usable |= side.codes & (dtype.sign_bit - 1) == 0
        field = side.written.field
        image.mark(judged[field.buffer], side.written.at[usable], field.dtype)
    return Scaling(n, images, expected, judged)


def _times(of: Tensor, at: Tensor, dtype: CacheDtype, n: int) -> None:
    """Multiply the normal elements at positions `at` by 2**n, which leaves them normal."""
    codes = image.read(of, at, dtype.name)
    image.write(of, at, dtype.name, codes + n * (1 << dtype.mantissa_bits))


def scale_variants(base: Run) -> Wanted:
    """The case with scales times 2**n and, for a write, key and value as well."""
    found = scaling(base)
    if isinstance(found, NotChecked):
        return found
    return {SCALED: Variant(base.case, images=found.images)}


def scale_homogeneity(runs: Runs) -> Judgement:
    """A power of two in the scales is a power of two in the outputs, and none in what is stored."""
    base, other = runs[BASE], runs[SCALED]
    found = scaling(base)
    if isinstance(found, NotChecked):
        return found
    is_write = base.case.steps[0].op == "reshape_and_cache"
    what = f"with scales{' and x' * is_write} times 2**{found.n},"
    if judgement := ended(other, what):
        return judgement
    wrong = {
        name: mask & (other.after[name] != found.expected[name])
        for name, mask in found.judged.items()
    }
    means = (
        "another code is stored" if is_write else f"an output is not 2**{found.n} times as large"
    )
    return first_violation(other, wrong, found.judged, f"{what} {means}", found.expected)
