"""What the launches of one compiled kernel have exercised: lines, branches, masks, loops.

Filled in by the evaluator while it is watched. A *site* is a place in kernel source with a few
possible outcomes; an outcome counts when at least one active program had it.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import triton
from numpy.typing import NDArray

from kvfuzz.cpu.ir import ACCESSES, MASK_OPERAND, Location, Op

if TYPE_CHECKING:
    from kvfuzz.cpu.machine import Code

Array = NDArray[Any]
SiteKind = Literal["line", "branch", "mask", "loop"]

OUTCOMES: dict[SiteKind, tuple[str, ...]] = {
    "line": ("run",),
    "branch": ("taken", "not taken"),
    "mask": ("all", "some", "none"),
    "loop": ("0", "1", "many"),
}
"""By kind: whether the line ran, which way a program went, how many lanes of a program's access
were active, how often a program went round."""

_LIBRARY = str(Path(triton.__file__).parent)


@dataclass(frozen=True, slots=True)
class Site:
    """A place in kernel source; `column`, from 1, is that of a call or statement, 0 of a line.

    The copies of an unrolled loop or of a device function used twice are one place.
    """

    kernel: str
    file: str
    line: int
    kind: SiteKind
    column: int


@dataclass
class Coverage:
    """Outcomes by op, as bits in the order of `OUTCOMES`: possible ones, seen ones; blocks that
    ran."""

    possible: dict[int, int] = field(default_factory=dict)
    blocks: set["Code"] = field(default_factory=set)
    bits: dict[int, int] = field(default_factory=dict)
    _noted: int = 0
    _told: int = 0

    def has_news(self) -> bool:
        """Whether something was seen for the first time since this was last asked."""
        size = len(self.blocks) + self._noted
        news, self._told = size > self._told, size
        return news

    def complete(self, op: Op) -> bool:
        """Whether a mask or loop has shown all that it can, and need not be watched."""
        return not self.possible.get(id(op), 0b111) & ~self.bits.get(id(op), 0)

    def note(self, op: Op, *outcomes: bool) -> None:
        """Add the outcomes of `op` that occurred."""
        occurred = sum(each << place for place, each in enumerate(outcomes))
        known = self.bits.get(id(op), 0)
        if occurred & ~known:
            self.bits[id(op)] = known | occurred
            self._noted += 1

    def note_mask(self, op: Op, mask: Array, programs: Array | None) -> None:
        """Add what a lane mask `[P, *shape]` was for the active programs (bool [P], None: all)."""
        on = int(np.count_nonzero(mask))
        if on in (0, mask.size):  # the same for every program
            self.note(op, on > 0, False, on == 0)
            return
        lanes = mask.reshape(len(mask), -1)
        every: Array = np.logical_and.reduce(lanes, axis=1)
        some: Array = np.logical_or.reduce(lanes, axis=1)
        if programs is not None:
            if len(lanes) == 1:
                every, some = (np.broadcast_to(part, len(programs)) for part in (every, some))
            every, some = every[programs], some[programs]
        self.note(op, bool(every.any()), bool((some & ~every).any()), bool((~some).any()))

    def note_trips(self, op: Op, trips: Array, programs: Array | None) -> None:
        """Add how often the active programs went round a loop; int `[P]` or `[1]`."""
        if programs is not None:
            trips = np.broadcast_to(trips, len(programs))[programs]
        self.note(op, bool((trips <= 0).any()), bool((trips == 1).any()), bool((trips > 1).any()))

    def outcomes(self, kernel: str, codes: Iterable["Code"]) -> dict[Site, tuple[int, int]]:
        """The bits seen of every site of a kernel, and those possible. Triton's own library, which
        is inlined into kernels, is left out."""
        known = list(codes)
        found: dict[Site, tuple[int, int]] = {}
        for place, ran in self._lines(known).items():
            found[Site(kernel, place.name, place.line, "line", 0)] = int(ran), 1
        for op, kind in (each for code in known for each in _sites(code)):
            place = op.location
            site = Site(kernel, place.name, place.line, kind, place.column)
            seen, possible = found.get(site, (0, 0))
            every = (1 << len(OUTCOMES[kind])) - 1
            found[site] = (
                seen | self.bits.get(id(op), 0),
                possible | self.possible.get(id(op), every),
            )
        return found

    def _lines(self, codes: list["Code"]) -> dict[Location, bool]:
        """Whether each line ran. Where a line accesses memory only that counts: what it computes
        may have been moved out of a branch or loop."""
        every: dict[Location, bool] = {}
        accesses: dict[Location, bool] = {}
        for code in codes:
            for op in code.all_ops():
                if _is_own(op.location):
                    lines = accesses if op.name in ACCESSES else every
                    lines[op.location] = lines.get(op.location, False) or code in self.blocks
        return every | accesses


def _is_own(place: Location) -> bool:
    return place.line > 0 and not place.file.startswith(_LIBRARY)


def _sites(code: "Code") -> Iterator[tuple[Op, SiteKind]]:
    for op in code.all_ops():
        if not _is_own(op.location):
            continue
        if op.name in ("scf.if", "cf.cond_br"):
            yield op, "branch"
        elif op.name in ("scf.for", "scf.while"):
            yield op, "loop"
        elif op.name in MASK_OPERAND and len(op.operands) > MASK_OPERAND[op.name]:
            yield op, "mask"
