"""What a target says about itself: its op, its domain, how it quantises, where it comes from.

The worker, which can load the target, sends this to the parent, which cannot.
"""

import math
from typing import Literal

import msgspec

from kvfuzz.model.axes import Domain
from kvfuzz.model.dtypes import DTYPES

LANES = ("cpu", "gpu")
"""Where a worker can run kernels."""
DEFAULT_LANE, DEFAULT_ARCH = "cpu", "gfx942"
"""The arch of the cpu lane decides, for instance, which fp8 an engine uses."""

Quotient = Literal["x/s", "x*(1/s)"]
Beyond = Literal["saturate", "nan"]
Rounding = Literal["half_even", "half_away_fp32"]
MayHold = Literal["nan", "finite"]
Held = Literal["fp32", "model"]
HeldWeights = Literal["fp32", "model", "query"]
Dot = Literal["ieee", "tf32"]
Fp8Sums = Literal["fp32", "short"]
Merged = Literal["sums", "lse"]


class Quantise(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How a write target turns x into a cache element; the oracle has one exact form for each.

    The quotient is an IEEE fp32 one, rounded once to the cache dtype, nearest even. A quotient
    beyond the range is drawn where the domain allows it (`values=beyond`), and becomes what
    `beyond` says.

    A target that computes scales gives a group `max(max(absmax, absmax_floor) / largest,
    scale_floor)`, each step in fp32.
    """

    quotient: Quotient = "x/s"
    source: str = ""
    rounding: Rounding = "half_even"
    """How a quotient becomes an integer: to nearest, ties to even, or cut off after half of one was
    added to its magnitude in fp32."""
    beyond: Beyond = "saturate"
    """What a quotient beyond the largest finite number becomes: that number, with its sign, or what
    the format has instead: NaN, or infinity in e5m2."""
    scale_floor: float = 1e-6
    """The least scale that a group is given, where the op computes scales; an fp32."""
    absmax_floor: float = 0.0
    """The least absmax of a group that is divided, an fp32."""
    largest: dict[str, float] = {}
    """By cache dtype, the number that the absmax of a group is mapped to; absent, the format's
    largest finite one."""


class Precision(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a target that attends holds in fewer bits than fp32: its error bound follows from it
    (`kvfuzz.oracles.attention_bound`). `source` says where.

    A target that says nothing may hold narrowly whatever kernels are known to. Dots are of fp32
    sums in any order, whatever it says, and what a kernel holds in more bits than it says is nearer
    to the exact result.
    """

    weights: HeldWeights = "query"
    """Of exp(score) before it multiplies V: `query` is what queries are handed over in, be that the
    model's dtype or fp8."""
    weights_scale: dict[str, float] = {}
    """By fp8 format, what weights are multiplied by while they are held in it, and are divided by
    afterwards; 1 where there is none."""
    weights_by_scale: bool = False
    """Whether weights are multiplied by the scale of V before they are held so, and V is not."""
    dequantised: Held = "model"
    """Of code * scale, before a dot."""
    scaled_query: Held | None = "model"
    """Of the query, where it is multiplied by the scale of scores before the dot; None where scores
    are, after it."""
    partial: Held = "model"
    """Of the results of parts of a sequence, before they are merged."""
    sums: Held = "fp32"
    """Of scores, of their exponentials and of what is summed over tokens."""
    merged: Merged = "lse"
    """What the result of a part is weighed by when parts are merged: its largest score and its sum,
    or, in fp32, the logarithm of both in one number, which has the fewer bits for the sum the
    larger the score is."""
    merged_part: int = 0
    """Tokens of a part, at least, where results are merged one after the other; 0 where all are at
    once."""
    fp32_dot: Dot = "tf32"
    """What a dot takes of fp32 operands: all, or ten bits of mantissa (tf32 of NVIDIA, xf32 of CDNA
    3: the default of tl.dot on both)."""
    fp8_sums: Fp8Sums = "short"
    """What a dot of fp8 operands is summed in: fp32, or what Hopper keeps of that, 13 bits."""
    tile: int = 1
    """Tokens that a sum over a sequence takes at a time, at least."""
    source: str = ""


MOST_TOKENS = 1 << 24
"""Of a tile, or a part, at most: more is a slip."""


def checked(precision: Precision) -> Precision:
    """`precision`. Raises ValueError with the first thing that makes it impossible."""
    for name, least in (("tile", 1), ("merged_part", 0)):
        if not least <= getattr(precision, name) <= MOST_TOKENS:
            said = getattr(precision, name)
            raise ValueError(f"{name}={said}, expected {least} to {MOST_TOKENS}")
    for name, scale in precision.weights_scale.items():
        if name not in DTYPES or not DTYPES[name].is_quantised:
            known = ", ".join(each for each in DTYPES if DTYPES[each].is_quantised)
            raise ValueError(f"weights_scale of {name!r}, expected one of {known}")
        if not 0 < scale < math.inf:
            raise ValueError(f"weights_scale={scale} of {name}, expected a finite number above 0")
    return precision


IN_FP32 = Precision(
    weights="fp32",
    dequantised="fp32",
    scaled_query=None,
    partial="fp32",
    merged="sums",
    fp32_dot="ieee",
    fp8_sums="fp32",
)
"""What nothing is held in fewer bits by than fp32."""


class DeadBytes(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a target asks of bytes that no result may depend on; `source` says where.

    `nan`: nothing, they may hold anything. `finite`: that they decode to finite numbers, since it
    multiplies them by zero.
    """

    may_hold: MayHold = "nan"
    source: str = ""


class TargetSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What the user asked for: a target, source trees by project, the op where ambiguous."""

    name: str
    sources: dict[str, str] = {}
    op: str = ""


class TargetInfo(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A loaded target, described as data."""

    name: str
    op: str
    domain: Domain
    quantise: Quantise
    partner: str
    """Name of the target that executes the inverse op in a round trip; empty where none does."""
    content: str
    """First 16 hex digits of the SHA-256 of the source file under test."""
    dead: DeadBytes = DeadBytes()
    precision: Precision = Precision()
    """How it attends; of other ops it says nothing."""
    batch_invariant: bool = True
    """Whether a token's bytes are promised to be the same in every batch.

    An op that copies or converts token by token has no reason to differ, so that silence promises.
    A target that adds up in an order that its batch decides says False.
    """
