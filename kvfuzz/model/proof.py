"""What a proof says: claims about the views of a plan, each proved or refuted by a witness."""

from typing import Literal

import msgspec

from kvfuzz.errors import UsageError
from kvfuzz.model.dtypes import DTYPES, INTEGER_SIZES
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


def check_tensors(file: TensorsFile) -> None:
    """Raise UsageError with the first thing about which nothing could be proved."""

    def require(condition: bool, what: str) -> None:
        if not condition:
            raise UsageError(f"impossible tensors: {what}")

    require(file.num_blocks >= 1, f"num_blocks={file.num_blocks}, expected at least 1")
    require(bool(file.views), "no views")
    for name, nbytes in file.allocations.items():
        require(nbytes >= 1, f"allocation {name}: {nbytes} bytes")
    grouped = [name for group in file.groups for name in group]
    require(len(set(grouped)) == len(grouped), f"a layer is in two groups among {grouped}")
    viewed = {view.layer for view in file.views}
    require(
        viewed == set(grouped),
        f"views of {sorted(viewed)} and groups of {sorted(grouped)}, expected the same layers",
    )
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
            and all(size >= 1 for size in view.shape)
            and all(stride >= 0 for stride in view.strides)
            and view.offset >= 0,
            f"{where}: shape {view.shape}, strides {view.strides}, offset {view.offset}, expected "
            "as many strides as axes, sizes of at least 1, and nothing below 0",
        )
        require(
            view.shape[0] % file.num_blocks == 0,
            f"{where}: {view.shape[0]} kernel blocks, expected a multiple of "
            f"num_blocks={file.num_blocks}",
        )
