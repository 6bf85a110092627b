"""What a proof says: claims about the views of a plan, each proved or refuted by a witness."""

from typing import Literal

import msgspec

from kvfuzz.errors import UsageError
from kvfuzz.model.dtypes import DTYPES, INTEGER_SIZES
from kvfuzz.model.layer_view import LayerView
from kvfuzz.model.plan_case import PlanCase
from kvfuzz.model.plan_check import MOST_BYTES


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
    shares: dict[str, str] = {}
    """By layer without a cache of its own, the layer whose cache it reads; it is in no group."""


def check_tensors(file: TensorsFile) -> None:
    """Raise UsageError with the first thing about which nothing could be proved."""

    def require(condition: bool, what: str) -> None:
        if not condition:
            raise UsageError(f"impossible tensors: {what}")

    require(file.num_blocks >= 1, f"num_blocks={file.num_blocks}, expected at least 1")
    require(bool(file.views), "no views")
    for name, nbytes in file.allocations.items():
        require(
            1 <= nbytes <= MOST_BYTES,
            f"allocation {name}: {nbytes} bytes, expected 1 to {MOST_BYTES}",
        )
    grouped = [name for group in file.groups for name in group]
    require(len(set(grouped)) == len(grouped), f"a layer is in two groups among {grouped}")
    viewed = {view.layer for view in file.views}
    require(
        viewed == {*grouped, *file.shares} and not {*grouped} & {*file.shares},
        f"views of {sorted(viewed)}, groups of {sorted(grouped)} and shares of "
        f"{sorted(file.shares)}, expected each layer in a group, or sharing a cache",
    )
    for layer, owner in file.shares.items():
        require(owner in grouped, f"{layer} shares the cache of {owner!r}, which is in no group")
    known = DTYPES.keys() | INTEGER_SIZES.keys()
    for view in file.views:
        where = f"{view.part} of {view.layer}"
        require(view.allocation in file.allocations, f"{where}: no allocation {view.allocation!r}")
        require(
            view.dtype in known, f"{where}: dtype {view.dtype!r}, expected one of {sorted(known)}"
        )
        require(
            bool(view.shape)
            and len(view.shape) == len(view.strides)
            and all(1 <= size <= MOST_BYTES for size in view.shape)
            and all(0 <= number <= MOST_BYTES for number in (*view.strides, view.offset)),
            f"{where}: shape {view.shape}, strides {view.strides}, offset {view.offset}, expected "
            f"as many strides as axes, sizes from 1 and strides from 0 to {MOST_BYTES}",
        )
        require(
            view.shape[0] % file.num_blocks == 0,
            f"{where}: {view.shape[0]} kernel blocks, expected a multiple of "
            f"num_blocks={file.num_blocks}",
        )
