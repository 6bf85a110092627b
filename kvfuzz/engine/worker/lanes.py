"""Where kernels run: one lane per worker process, for life.

A lane hands out buffers, runs a call and says what it saw. `cpu` is kvfuzz's own Triton backend
and records every access; `gpu` runs on the device of this torch build and sees bytes only.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from kvfuzz.errors import InfrastructureError, NotCheckedError, UsageError
from kvfuzz.model.target import LANES
from kvfuzz.model.verdict import Launch
from kvfuzz.oracles.observation import Stray

GUARD_BYTES = 4096
"""Guard zone on each side of an allocation, where writes of unchecked code would land."""
GUARD_VALUE = 0xA5


@dataclass(frozen=True, slots=True)
class Seen:
    """What a lane recorded of one call; `written` is None where it records no accesses."""

    written: dict[str, Tensor] | None = None
    strays: tuple[Stray, ...] = ()
    launches: tuple[Launch, ...] = ()
    origin_of: Callable[[str, int], tuple[str, int] | None] | None = None
    """For a written byte of a buffer: the buffer and byte that it was copied or converted from."""
    error: BaseException | None = None
    unsupported: bool = False
    """Whether `error` says that the lane cannot execute the kernel."""


class Lane(Protocol):
    """A place to run kernels."""

    name: str
    device: torch.device
    arch: str
    """The architecture that kernels are compiled for: gfx942, or sm90 on a CUDA device."""

    def allocate(self, name: str, data: Tensor) -> Tensor:
        """A uint8 buffer registered as `name` that holds `data`."""

    def guard(self, name: str) -> Tensor:
        """The bytes of both guard zones of a buffer, low side first; empty on a lane without."""

    def observe(
        self, call: Callable[[], None], *, poison: int = GUARD_VALUE, origins: bool = False
    ) -> Seen:
        """Run `call`; exceptions are returned.

        On a lane that records accesses, bytes outside an allocation read as `poison`.
        """

    def release(self) -> None:
        """Forget every buffer."""


class GuardedBuffers:
    """Allocations with a guard zone on each side, by name."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._raw: dict[str, Tensor] = {}

    def allocate(self, name: str, data: Tensor) -> Tensor:
        """A buffer that holds `data`, 256-byte aligned, between two guard zones."""
        nbytes = data.numel()
        raw = torch.full(
            (nbytes + 2 * GUARD_BYTES,), GUARD_VALUE, dtype=torch.uint8, device=self._device
        )
        inner = raw[GUARD_BYTES : GUARD_BYTES + nbytes]
        inner.copy_(data)
        self._raw[name] = raw
        return inner

    def guard(self, name: str) -> Tensor:
        """Both guard zones, low side first; uint8 `[2 * GUARD_BYTES]`."""
        raw = self._raw[name]
        return torch.cat((raw[:GUARD_BYTES], raw[-GUARD_BYTES:]))

    def release(self) -> None:
        """Forget every buffer."""
        self._raw.clear()


class GpuLane:
    """Kernels on the GPU of this torch build (CUDA or HIP); records bytes, not accesses."""

    name = "gpu"

    def __init__(self) -> None:
        if not torch.cuda.is_available():
            raise InfrastructureError(
                "lane gpu: torch sees no GPU; use --lane cpu, or a CUDA or ROCm build of torch"
            )
        self.device = torch.device("cuda")
        self.arch = _device_arch()
        self._buffers = GuardedBuffers(self.device)
        self.allocate, self.guard = self._buffers.allocate, self._buffers.guard
        self.release = self._buffers.release

    def observe(
        self, call: Callable[[], None], *, poison: int = GUARD_VALUE, origins: bool = False
    ) -> Seen:
        """Run `call` and wait for the device."""
        try:
            call()
            torch.cuda.synchronize()
        except BaseException as error:  # sys.exit in a target is no end of the worker
            return Seen(error=error)
        return Seen()


def _device_arch() -> str:
    properties = torch.cuda.get_device_properties(0)
    if torch.version.hip:
        return str(properties.gcnArchName).partition(":")[0]
    return f"sm{properties.major}{properties.minor}"


def open_lane(name: str, arch: str) -> Lane:
    """The lane called `name`; `arch` is what the cpu lane compiles for, a GPU has its own.

    Raises UsageError for an unknown lane, InfrastructureError where there is no device and
    NotCheckedError where triton is missing.
    """
    if name == "gpu":
        return GpuLane()
    if name != "cpu":
        raise UsageError(f"lane={name!r}, expected one of {', '.join(LANES)}")
    if not re.fullmatch(r"gfx[0-9a-f]{3,4}", arch):
        raise UsageError(f"arch={arch!r}, expected an AMD GPU's name such as gfx942 or gfx950")
    try:
        from kvfuzz.engine.worker.cpu_lane import CheckedCpuLane
    except ImportError as error:
        raise NotCheckedError(f"lane cpu: {error}; pip install 'kvfuzz[cpu]'") from None
    return CheckedCpuLane(arch)
