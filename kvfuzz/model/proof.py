"""What a proof says: claims about the views of a plan, each proved or refuted by a witness."""

from typing import Literal

import msgspec

from kvfuzz.model.layer_view import LayerView
from kvfuzz.model.plan_case import PlanCase


class Witness(msgspec.Struct, frozen=True):
    """Where a claim breaks: `byte` of an allocation, as block `block` and as block `other`."""

    num_blocks: int
    byte: int
    block: int
    other: int


class Claim(msgspec.Struct, frozen=True):
    """What was decided of one property, in the words of `kvfuzz.model.verdict`."""

    property: str
    outcome: Literal["proved", "refuted"]
    said: str = ""
    witness: Witness | None = None


class Proof(msgspec.Struct, frozen=True):
    """The claims about one plan, or why there are none."""

    claims: tuple[Claim, ...] = ()
    every_count: bool = False
    """Whether the claims are about every number of blocks, not about one."""
    undecided: str = ""
    """Why nothing was decided."""
    counterexample: PlanCase | None = None
    """The plan with as many blocks as the first refuted claim needs."""
    seconds: float = 0.0

    @property
    def refuted(self) -> tuple[Claim, ...]:
        """The claims that do not hold."""
        return tuple(each for each in self.claims if each.outcome == "refuted")


class TensorsFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The views of a running engine, as it prints them: what `kvfuzz prove FILE` reads."""

    num_blocks: int
    """Manager blocks of every layer."""
    groups: tuple[tuple[str, ...], ...]
    """The layers that get a block id together."""
    allocations: dict[str, int]
    """Bytes by name."""
    views: tuple[LayerView, ...]
    """[layer, part, allocation, dtype, shape, strides in bytes, offset in bytes] of each tensor."""
