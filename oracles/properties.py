"""The properties: what must hold of every case, each with the runs that it needs to decide.

A property names extra runs of the same case (`variants`) and judges all runs purely. The worker
executes each distinct variant once. Where a lane did not record what a property needs, the
property says so: not checked is never passed.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal

from torch import Tensor

from kvfuzz.model.case import Program
from kvfuzz.model.verdict import Hazard, Violation
from kvfuzz.oracles.observation import Run

Order = Literal["together", "forward", "backward"]

BASE = "base"
"""The run of the case as it is."""


@dataclass(frozen=True, slots=True)
class Variant:
    """A further run: of `case`, with reads outside an allocation returning `poison`.

    `images` are the bytes that some buffers hold at first, instead of their fill. `readers` asks
    the lane to relate reads and writes of different programs as well. `order` says how the programs
    of a launch follow each other: all together, op by op, or one after the other from the first or
    from the last.
    """

    case: Program
    poison: int = 0xA5
    readers: bool = False
    order: Order = "together"
    images: Mapping[str, Tensor] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class NotChecked:
    """Why a property could not be decided."""

    reason: str


Runs = Mapping[str, Run]
Judgement = Violation | NotChecked | None
Wanted = Mapping[str, Variant] | NotChecked


def no_variants(base: Run) -> Wanted:
    """Most properties need only the base run."""
    return {}


def no_hazards(runs: Runs) -> list[Hazard]:
    """Most properties report no hazards."""
    return []


@dataclass(frozen=True, slots=True)
class Property:
    """One thing that must hold: `judge` returns None where it does.

    `variants` names the further runs that it needs to decide, or says why nothing can be decided.
    One that `takes_turns` needs them of most cases, so that a search asks a few such of each case.
    """

    name: str
    judge: Callable[[Runs], Judgement]
    variants: Callable[[Run], Wanted] = no_variants
    hazards: Callable[[Runs], list[Hazard]] = no_hazards
    takes_turns: bool = False
    ops: tuple[str, ...] = ()
    """The ops that it is about; empty means all."""

    def is_about(self, op: str) -> bool:
        """Whether it can be asked of a case of `op`."""
        return not self.ops or op in self.ops
