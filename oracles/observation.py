"""What one execution of a case showed: bytes before and after, and what the lane recorded."""

from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal

import torch
from torch import Tensor

from kvfuzz.model.axes import Domain
from kvfuzz.model.case import Case, Program
from kvfuzz.model.layer_scene import LayerScene
from kvfuzz.model.ops.op_case import OpCase
from kvfuzz.model.target import Quantise, TargetInfo
from kvfuzz.model.verdict import Launch
from kvfuzz.oracles import image
from kvfuzz.oracles.expectation import Expectation, expect
from kvfuzz.oracles.liveness import (
    dead_among,
    live_bytes,
    loaded_bytes,
    read_elements,
    written_elements,
)
from kvfuzz.oracles.memory import Elements


@dataclass(frozen=True, slots=True)
class Stray:
    """An access outside the allocation that its pointer was derived from.

    `offset` is in bytes from the start of that allocation and may be negative; `count` accesses
    of the same kind were made at the same source line.
    """

    kind: Literal["read", "write"]
    kernel: str
    where: str
    program: tuple[int, ...]
    buffer: str
    offset: int
    nbytes: int
    count: int


@dataclass(frozen=True, slots=True)
class Overflow:
    """An integer that lost bits at `lost_where` and decided an access at `where`.

    For an address `used` and `exact` are byte offsets in `buffer`, for the bound of a loop they are
    the bounds, else truth values.
    """

    reached: Literal["address", "mask", "branch", "bound"]
    kernel: str
    where: str
    lost_where: str
    program: tuple[int, ...]
    buffer: str
    used: int
    exact: int
    count: int


@dataclass(frozen=True, slots=True)
class Race:
    """Two accesses of one launch to one byte, without an order between them, that differ.

    `other_where` is empty and `other_program` None where they are not known.
    """

    kind: Literal["write/write", "read/write"]
    kernel: str
    where: str
    program: tuple[int, ...]
    other_where: str
    other_program: tuple[int, ...] | None
    buffer: str
    offset: int
    nbytes: int
    count: int


@dataclass(frozen=True, eq=False)
class Run:
    """One execution of `case`. Images and masks have an entry per held byte of a buffer
    (`kvfuzz.model.held`); masks are bool. Where accesses are not recorded there are no masks, and
    where they are, there is one for each buffer that has a byte to mark. A run equals itself alone,
    so that what is derived from it can be kept."""

    case: Program
    target: TargetInfo
    quantise: Quantise
    """How the target, or its partner, writes."""
    where: Domain
    """What the user narrowed the target's domain to."""
    before: dict[str, Tensor]
    after: dict[str, Tensor]
    written: dict[str, Tensor] | None = None
    read: dict[str, Tensor] | None = None
    torch_ops: tuple[str, ...] = ()
    """The torch operators that were handed a buffer's memory: what they read is in no record."""
    strays: tuple[Stray, ...] = ()
    launches: tuple[Launch, ...] = ()
    overflows: tuple[Overflow, ...] = ()
    races: tuple[Race, ...] = ()
    crossed: tuple[str, ...] = ()
    """Buffers of which some byte was both read and written."""
    synchronising: tuple[str, ...] = ()
    """The kernels that order their own programs, with the line; their races are not looked for."""
    outside: dict[str, int] = field(default_factory=dict)
    """By buffer: the first byte that was written although it is not held."""
    read_outside: dict[str, int] = field(default_factory=dict)
    """By buffer: the first byte that was read although it is not held."""
    guards_broken: dict[str, int] = field(default_factory=dict)
    """First changed byte of the guard zones around a buffer, relative to the buffer's start."""
    error: str = ""
    """The exception that the target raised, in one line."""
    refused: str = ""
    """The declared refusal that it raised before any launch."""
    unsupported: str = ""
    """What the lane cannot execute, with the source line."""

    @property
    def layer_case(self) -> Case | OpCase:
        """The case of a run whose scene is about one layer. Raises TypeError for others."""
        if not isinstance(self.case, Case | OpCase) or not isinstance(self.case.scene, LayerScene):
            raise TypeError(f"a run of {type(self.case).__name__}: its scene is about no layer")
        return self.case

    @property
    def token_case(self) -> Case:
        """The case of a run that has a scene. Raises TypeError for a step of a script."""
        if not isinstance(self.case, Case):
            raise TypeError(f"a run of {type(self.case).__name__}: it has no scene")
        return self.case

    @cached_property
    def expectation(self) -> Expectation:
        """What the references say about the same case."""
        return expect(self.case, self.before, self.quantise, self.target.precision)

    @cached_property
    def missed(self) -> list[str]:
        """The written buffers that do not hold exactly what the references say."""
        return self.expectation.missed(self.after)

    @cached_property
    def live(self) -> dict[str, Tensor]:
        """By buffer that has dead bytes: the bytes that a result may depend on."""
        if isinstance(self.case, OpCase):
            return loaded_bytes(self.before, self.expectation.loaded)
        return live_bytes(self.case, self.before)

    @property
    def is_read_recorded(self) -> bool:
        """Whether `read` holds every byte that was read."""
        return self.read is not None and bool(self.launches) and not self.torch_ops

    @cached_property
    def dead_reads(self) -> dict[str, Tensor]:
        """By buffer: the dead bytes that were read, where some were and reads are recorded."""
        read = self.read or {}
        if isinstance(self.case, OpCase):
            found = {name: mask & ~self.live[name] for name, mask in read.items()}
        else:
            found = dead_among(self.case, read, self.reads)
        return {name: mask for name, mask in found.items() if image.is_any(mask)}

    @property
    def device(self) -> torch.device:
        """Where the images are."""
        return next(iter(self.before.values())).device

    @cached_property
    def reads(self) -> list[Elements]:
        """What the steps read of the buffers that have dead bytes."""
        if isinstance(self.case, OpCase):
            return self.expectation.loaded
        case = self.case
        return [each for step in case.steps for each in read_elements(case, step, self.device)]

    @cached_property
    def writes(self) -> list[Elements]:
        """What the first step writes; on K and V pages by side: of K, or key, of V, or value."""
        if isinstance(self.case, OpCase):
            return [
                Elements(each.field.name, each.field, each.at) for each in self.expectation.stored
            ]
        return written_elements(self.case, self.case.steps[0], self.device)
