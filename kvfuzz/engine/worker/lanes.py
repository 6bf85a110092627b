"""Where kernels run: one lane per worker process, for life.

A lane hands out buffers, runs a call and says what it saw. `cpu` is kvfuzz's own Triton backend
and records every access; `gpu` runs on the device of this torch build and sees bytes only.
"""

import os
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from kvfuzz.engine.worker.entry import LOST_DEVICE
from kvfuzz.errors import InfrastructureError, NotCheckedError, UsageError
from kvfuzz.model.coverage import Exercised
from kvfuzz.model.held import Held
from kvfuzz.model.target import LANES
from kvfuzz.model.verdict import Launch
from kvfuzz.oracles.observation import Overflow, Race, Stray
from kvfuzz.oracles.properties import Order

GUARD_BYTES = 4096
"""Guard zone on each side of an allocation, where writes of unchecked code would land."""
GUARD_VALUE = 0xA5
KEPT_ON_DEVICE = 1 << 30
"""Bytes of the device that a worker keeps between cases, at most."""
CHUNK = 1 << 30
"""Bytes of a large buffer that are searched at once."""


@dataclass(frozen=True, slots=True)
class Seen:
    """What a lane recorded of one call, as in `Run`."""

    written: dict[str, Tensor] | None = None
    read: dict[str, Tensor] | None = None
    read_outside: dict[str, int] = field(default_factory=dict)
    torch_ops: tuple[str, ...] = ()
    strays: tuple[Stray, ...] = ()
    launches: tuple[Launch, ...] = ()
    overflows: tuple[Overflow, ...] = ()
    races: tuple[Race, ...] = ()
    crossed: tuple[str, ...] = ()
    synchronising: tuple[str, ...] = ()
    exercised: Callable[[], tuple[Exercised, ...]] = tuple
    """Tells the sites of these kernels' source that showed an outcome for the first time, up to
    now, on this lane. What is never asked for is told by a later run."""
    origin_of: Callable[[str, int], tuple[str, int] | None] | None = None
    """For a written byte of a buffer: the buffer and byte that it was copied or converted from."""
    error: BaseException | None = None
    unsupported: bool = False
    """Whether `error` says that the lane cannot execute the kernel."""


@dataclass(frozen=True, slots=True)
class Manner:
    """How a call is run on a lane that records accesses; other lanes cannot tell.

    Bytes outside an allocation read as `poison`, `readers` relates reads and writes of different
    programs, `order` says how the programs of a launch follow each other, and `origins` follows
    every byte. `far` looks for accesses to bytes of a large buffer that are not held.
    """

    poison: int = GUARD_VALUE
    readers: bool = False
    order: Order = "together"
    origins: bool = False
    far: bool = True


class Lane(Protocol):
    """A place to run kernels."""

    name: str
    device: torch.device
    arch: str
    """The architecture that kernels are compiled for: gfx942, or sm90 on a CUDA device."""

    def allocate(self, name: str, data: Tensor, kept: Held) -> Tensor:
        """A uint8 buffer registered as `name`: `data` in its held bytes, zeros elsewhere.

        Raises NotCheckedError where the lane has no room for it.
        """

    def written_outside(self, name: str) -> int | None:
        """The first byte of a buffer that was written although it is not held."""

    def guard(self, name: str) -> Tensor:
        """The bytes of both guard zones of a buffer, low side first; empty on a lane without."""

    def observe(self, call: Callable[[], None], manner: Manner) -> Seen:
        """Run `call`; exceptions are returned."""

    def release(self) -> None:
        """Forget every buffer."""

    def rest(self) -> None:
        """Between cases: give back memory that only a large one needed."""


def put_held(buffer: Tensor, data: Tensor, kept: Held) -> None:
    """Copy the image `data` to where its bytes are held in `buffer`."""
    for first, (start, stop) in zip(kept.firsts, kept.spans, strict=True):
        buffer[start:stop].copy_(data[first : first + stop - start])


class GuardedBuffers:
    """Allocations with a guard zone on each side, by name."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._raw: dict[str, Tensor] = {}
        self._kept: dict[str, Held] = {}

    def allocate(self, name: str, data: Tensor, kept: Held) -> Tensor:
        """A buffer that holds `data`, 256-byte aligned, between two guard zones."""
        try:
            raw = torch.zeros(kept.nbytes + 2 * GUARD_BYTES, dtype=torch.uint8, device=self._device)
        except torch.OutOfMemoryError as error:
            raise NotCheckedError(
                f"buffer {name}: no room for {kept.nbytes:,} bytes on {self._device}; "
                "narrow with --where reach=near"
            ) from error
        raw[:GUARD_BYTES] = GUARD_VALUE
        raw[-GUARD_BYTES:] = GUARD_VALUE
        inner = raw[GUARD_BYTES : GUARD_BYTES + kept.nbytes]
        put_held(inner, data, kept)
        self._raw[name], self._kept[name] = raw, kept
        return inner

    def written_outside(self, name: str) -> int | None:
        """The first byte that is not held and no longer zero."""
        kept = self._kept[name]
        if kept.is_whole:
            return None
        inner = self._raw[name][GUARD_BYTES:-GUARD_BYTES]
        ends = [0, *[end for span in kept.spans for end in span], kept.nbytes]
        for start, stop in zip(ends[::2], ends[1::2], strict=True):
            for at in range(start, stop, CHUNK):
                chunk = inner[at : min(at + CHUNK, stop)]
                if bool(chunk.any()):
                    return at + int(torch.nonzero(chunk)[0])
        return None

    def guard(self, name: str) -> Tensor:
        """Both guard zones, low side first; uint8 `[2 * GUARD_BYTES]`."""
        raw = self._raw[name]
        return torch.cat((raw[:GUARD_BYTES], raw[-GUARD_BYTES:]))

    def release(self) -> None:
        """Forget every buffer."""
        self._raw.clear()
        self._kept.clear()


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
        self.written_outside = self._buffers.written_outside

    def observe(self, call: Callable[[], None], manner: Manner) -> Seen:
        """Run `call` and wait for the device."""
        try:
            call()
            torch.cuda.synchronize()
        except BaseException as error:  # sys.exit in a target is no end of the worker
            self._leave_if_lost(error)
            return Seen(error=error, unsupported=isinstance(error, NotCheckedError))
        return Seen()

    def rest(self) -> None:
        """Give back what a far cache took: torch keeps it, and another worker has no room then."""
        if torch.cuda.memory_reserved() > KEPT_ON_DEVICE:
            torch.cuda.empty_cache()

    def _leave_if_lost(self, error: BaseException) -> None:
        """End the process where the device answers no more: nothing can be judged in it again."""
        try:
            torch.cuda.synchronize()
        except Exception:
            text = " ".join(str(error).split())
            print(
                f"kvfuzz: the GPU is lost to this worker: {text[:300]}", file=sys.stderr, flush=True
            )
            os._exit(LOST_DEVICE)


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
