"""What one execution of a case showed: bytes before and after, and what the lane recorded."""

from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal

from torch import Tensor

from kvfuzz.model.case import Case
from kvfuzz.model.target import Quantise
from kvfuzz.model.verdict import Launch
from kvfuzz.oracles.expectation import Expectation, expect


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


@dataclass(frozen=True)
class Run:
    """One execution of `case`. Masks are bool per byte of a buffer, None where not recorded."""

    case: Case
    quantise: Quantise
    before: dict[str, Tensor]
    after: dict[str, Tensor]
    written: dict[str, Tensor] | None = None
    strays: tuple[Stray, ...] = ()
    launches: tuple[Launch, ...] = ()
    guards_broken: dict[str, int] = field(default_factory=dict)
    """First changed byte of the guard zones around a buffer, relative to the buffer's start."""
    error: str = ""
    """The exception that the target raised, in one line."""
    refused: str = ""
    """The declared refusal that it raised before any launch."""
    unsupported: str = ""
    """What the lane cannot execute, with the source line."""

    @cached_property
    def expectation(self) -> Expectation:
        """What the references say about the same case."""
        return expect(self.case, self.before, self.quantise)
