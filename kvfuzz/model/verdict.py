"""What the worker says about one case: a result per property, as data.

`passed` and `failed` were decided; `not_checked` says why nothing was. A case on which the target
declared that it refuses the input, before any launch, is `refused` and decides nothing.
"""

from typing import Literal

import msgspec

from kvfuzz.model.coverage import Exercised

PROPERTY_NAMES: tuple[str, ...] = (
    "crash",
    "no_overflow",
    "oracle",
    "complete",
    "frame",
    "immutable",
    "bounds",
    "no_race",
    "dead_bytes",
    "roundtrip",
    "determinism",
    "size1_stride",
    "scale_homogeneity",
    "layout_equivariance",
    "block_permutation",
    "batch_invariance",
    "prefix_split",
    "partition",
)
"""Every property of kernels, in the order in which a finding is named after them.

A lossy integer is the cause of what follows; a race is as often as not the consequence of a wrong
stride, whose byte says more. What relates two cases comes after what judges one, and after
`determinism`, without which no relation means anything.
"""

PLAN_PROPERTY_NAMES: tuple[str, ...] = (
    "crash",
    "bounds",
    "shape",
    "aliasing",
    "disjoint",
    "page_bytes",
    "sharing",
    "oracle",
)
"""Every property of ops on a cache plan, in the order in which a finding is named after them."""

ALL_PROPERTY_NAMES = tuple(dict.fromkeys((*PROPERTY_NAMES, *PLAN_PROPERTY_NAMES)))

CAUSES = ("crash", "no_overflow")
"""What else fails beside one of these is its consequence."""
RELATIONS = (
    "roundtrip",
    "dead_bytes",
    "layout_equivariance",
    "block_permutation",
    "size1_stride",
    "scale_homogeneity",
    "batch_invariance",
    "prefix_split",
    "partition",
    "determinism",
    "no_race",
)
"""Properties that relate runs or accesses: where bytes are wrong, they say nothing more."""

WAITING = "other properties had their turn"
"""Why a search did not check one that takes turns (`kvfuzz.oracles.table`)."""

Outcome = Literal["passed", "failed", "not_checked"]


class Place(msgspec.Struct, frozen=True):
    """A byte of a buffer and the element that owns it; `field` is empty where nothing does."""

    buffer: str
    byte: int
    field: str = ""
    layer: str = ""
    coordinate: dict[str, int] = {}


class Violation(msgspec.Struct, frozen=True):
    """Why a property failed: one sentence, and the first wrong byte where there is one."""

    message: str
    place: Place | None = None
    expected: str = ""
    """Hex of the element's expected bytes, or of the byte where no element owns it."""
    got: str = ""
    wrong: int = 0
    """Bytes that are wrong, of `judged` bytes that were compared."""
    judged: int = 0
    origin: Place | None = None
    """Whose byte was found at `place`."""
    traced: bool = False
    """Whether the lane recorded where bytes came from; if so, no origin means nobody's byte."""
    elsewhere: bool = False
    """Whether the case that this one was compared with is wrong by what the references say of it:
    then that case has the bug, and may be found by itself."""
    fields: tuple[str, ...] = ()
    """The fields with wrong bytes, the one of `place` first; of very many bytes, some are asked."""


class PropertyResult(msgspec.Struct, frozen=True):
    """The outcome of one property on one case."""

    name: str
    outcome: Outcome
    reason: str = ""
    """Why it was not checked."""
    violation: Violation | None = None


class Hazard(msgspec.Struct, frozen=True):
    """Something that had no influence on any result: reported apart, never red."""

    kind: str
    message: str


class Launch(msgspec.Struct, frozen=True):
    """One kernel launch of the launch plan."""

    kernel: str
    grid: tuple[int, ...]
    constexprs: dict[str, str]
    options: dict[str, str]


class Verdict(msgspec.Struct, frozen=True):
    """Everything the worker decided about one case."""

    results: tuple[PropertyResult, ...]
    refused: str = ""
    digest: str = ""
    """SHA-256 of every buffer's bytes after the last step, first 16 hex digits; empty where a case
    passed and nobody asked for an explanation.

    NaNs that a conversion was to make count as one, since devices differ in their bits; so do
    numbers within their bound, and those beyond it.
    """
    launches: tuple[Launch, ...] = ()
    hazards: tuple[Hazard, ...] = ()
    exercised: tuple[Exercised, ...] = ()
    """What of the kernels' source was exercised for the first time in this worker."""

    @property
    def failed(self) -> tuple[PropertyResult, ...]:
        """The properties that failed, in the order of the property table."""
        return tuple(result for result in self.results if result.outcome == "failed")
