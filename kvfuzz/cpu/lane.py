"""The cpu lane: Triton kernels on CPU tensors, evaluated exactly, every byte accounted for."""

import atexit
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from functools import lru_cache
from typing import Any

import numpy as np
import torch
import triton
from numpy.typing import NDArray
from triton import knobs
from triton.backends import Backend, backends

from kvfuzz.cpu.access import Access, Launch
from kvfuzz.cpu.arch import DEFAULT_ARCH
from kvfuzz.cpu.compiler import CpuBackend, HintlessBackend, integers_without_hints
from kvfuzz.cpu.coverage import OUTCOMES, Site
from kvfuzz.cpu.driver import CpuDriver
from kvfuzz.cpu.errors import LaneError, LaunchError, UnsupportedOp
from kvfuzz.cpu.evaluate import Order, run_grid
from kvfuzz.cpu.machine import Program
from kvfuzz.cpu.memory import Memory
from kvfuzz.cpu.numerics import encode
from kvfuzz.cpu.reserve import aligned, keep_freed_memory
from kvfuzz.cpu.scratch import Scratch, scratch_files
from kvfuzz.cpu.space import AddressSpace, Allocation
from kvfuzz.cpu.tickets import Tickets
from kvfuzz.cpu.values import Pointer

Array = NDArray[Any]

_FLOATS = {"fp16": "f16", "bf16": "bf16", "fp32": "f32", "f32": "f32", "fp64": "f64"}
_INTEGERS = {
    f"{sign}{bits}": (np.dtype(f"i{bits // 8}"), bits) for sign in "iu" for bits in (8, 16, 32, 64)
}


@lru_cache(maxsize=1 << 10)
def _integer(value: int, kind: str) -> Array:
    """An integer that wraps at its width; read only, since launches share it."""
    dtype, bits = _INTEGERS[kind]
    half = 1 << (bits - 1)
    found = np.array([(value + half) % (2 * half) - half], dtype)
    found.flags.writeable = False
    return found


class CpuLane:
    """Runs `kernel[grid](tensors)` in NumPy, for the AMD architecture `arch`.

    `poison` is the byte (0..255) that stray reads and masked-off lanes without `other` hold. `fuel`
    is how many loop iterations each chunk of programs, which go round together, may take.
    `chunk_bytes` bounds the largest value of a chunk, in bytes; the default stays in a core's
    cache. All three may be set at any time, and so may `order`: how the programs of a launch follow
    each other (see `run_grid`). Without `hints` kernels do not specialise on what no result depends
    on (see `kvfuzz.cpu.compiler`), and fewer of them are compiled.
    """

    def __init__(
        self,
        *,
        arch: str = DEFAULT_ARCH,
        poison: int = 0xA5,
        fuel: int = 1 << 16,
        chunk_bytes: int = 2 << 20,
        hints: bool = True,
    ) -> None:
        self.arch = arch
        self._hints = hints
        self.poison = poison
        self.fuel = fuel
        self.chunk_bytes = chunk_bytes
        self.order: Order = "together"
        self._space = AddressSpace()
        self._tickets = Tickets()
        self._access: Access | None = None
        self._guests: list[Allocation] = []
        self._undo = ExitStack()
        self._watched: set[Program] = set()

    def activate(self) -> None:
        """Make Triton compile for and launch on this lane. Raises `LaneError` if one is active.

        Kernels launched before on another driver are compiled again; nothing cached is shared.
        """
        if issubclass(backends["amd"].compiler, CpuBackend):
            raise LaneError("a cpu lane is active in this process already; deactivate it first")
        if knobs.runtime.interpret:
            raise LaneError(
                "TRITON_INTERPRET is set, so kernels would not reach this lane; unset it"
            )
        keep_freed_memory()
        undo = ExitStack()
        scratch = Scratch()
        undo.callback(scratch.close)
        undo.enter_context(knobs.cache.scope())
        knobs.cache.dir = scratch.path
        knobs.cache.manager_class = scratch_files
        undo.callback(setattr, triton.runtime.driver, "_active", triton.runtime.driver._active)
        triton.runtime.driver.set_active(CpuDriver(self.arch, self, scratch.empty))
        undo.callback(backends.__setitem__, "amd", backends["amd"])
        backends["amd"] = Backend(CpuBackend if self._hints else HintlessBackend, CpuDriver)
        if not self._hints:
            undo.enter_context(integers_without_hints())
        self._undo = undo
        atexit.register(undo.close)

    def deactivate(self) -> None:
        """Give Triton its own backend and driver back; a lane that is not active stays so."""
        atexit.unregister(self._undo.close)
        self._undo.close()

    def allocate(self, name: str, nbytes: int, *, zeroed: bool = True) -> torch.Tensor:
        """A zeroed uint8 tensor `[nbytes]`, 256-byte aligned, known to kernels as `name`. A caller
        who fills all of it can do without the zeros.

        Views of it, of any dtype, belong to it. From 64 MiB on it is reserved and not committed:
        only the pages that are touched cost memory. Raises `LaneError` if `name` is taken.
        """
        memory = aligned(nbytes, zeroed=zeroed)
        self._space.add(name, memory)
        return torch.from_numpy(memory)

    def memory_of(self, name: str) -> Array:
        """The bytes of the allocation `name`; uint8 `[nbytes]`. Raises `LaneError`."""
        allocation = self._space.named(name)
        if allocation is None:
            raise LaneError(f"name={name!r} is not allocated; allocate it first")
        return allocation.bytes

    def release_all(self) -> None:
        """Forget all allocations. Their tensors stay valid for torch."""
        for number in list(self._space.allocations):
            self._space.remove(number)
        self._guests.clear()
        if self._access is None:  # an observation knows allocations by their numbers
            self._space.restart()

    @contextmanager
    def observe(self, *, trace_origins: bool = False, readers: bool = False) -> Iterator[Access]:
        """Record what the kernels launched inside do. Observations do not nest (`LaneError`).

        `trace_origins` follows where each byte came from, and leaves out the checks of integers.
        `readers` also finds races between a read and a write.
        """
        if self._access is not None:
            raise LaneError("an observation is running already; leave it first")
        self._access = Access(
            self._space, self._tickets, trace_origins=trace_origins, readers=readers
        )
        try:
            yield self._access
        finally:
            self._access.races.end()
            self._access = None
            self._dismiss_guests()

    def take_watched(self) -> set[Program]:
        """The kernels that were observed since the last call."""
        watched, self._watched = self._watched, set()
        return watched

    def newly_exercised(
        self, programs: Iterable[Program] | None = None
    ) -> list[tuple[Site, tuple[tuple[str, ...], tuple[str, ...]]]]:
        """Sites of `programs` (those that were observed) that showed an outcome since the last
        call, with the outcomes seen so far and those that can still come. Every site of a kernel
        is there the first time."""
        found = []
        for program in self.take_watched() if programs is None else programs:
            if not program.coverage.has_news():
                continue
            outcomes = program.coverage.outcomes(program.name, program.codes)
            for site, (bits, possible) in outcomes.items():
                words = OUTCOMES[site.kind]
                seen = tuple(word for at, word in enumerate(words) if bits >> at & 1)
                missing = tuple(w for at, w in enumerate(words) if (possible & ~bits) >> at & 1)
                found.append((site, (seen, missing)))
        return found

    def launch(
        self,
        program: Program,
        grid: tuple[int, int, int],
        arguments: list[tuple[str, str, Any]],
        constexprs: dict[str, Any],
        options: dict[str, Any],
    ) -> None:
        """Run one launch (the driver calls this); an argument is a name, a type and a value."""
        values = [self._argument(*argument) for argument in arguments]
        if self._access is not None:
            self._watched.add(program)
            launch = Launch(program.name, grid, constexprs, options)
            self._access.begin_launch(launch, program.synchronises)
        memory = Memory(self._space, self.poison, self._access)
        try:
            run_grid(
                program,
                values,
                grid,
                memory,
                fuel=self.fuel,
                chunk_bytes=self.chunk_bytes,
                order=self.order,
            )
        finally:
            if self._access is None:
                self._dismiss_guests()

    def _argument(self, name: str, kind: str, value: Any) -> Any:
        if kind.startswith("*"):
            return self._pointer(name, value)
        if kind in _FLOATS:
            return encode(np.array([float(value)], np.float64), _FLOATS[kind])
        if kind in ("i1", "u1"):
            return np.array([bool(value)])
        if kind in _INTEGERS:
            return _integer(int(value), kind)
        raise UnsupportedOp(f"argument {name} of type {kind}")

    def _pointer(self, name: str, value: Any) -> Pointer:
        tensor = getattr(value, "base", value) if not isinstance(value, torch.Tensor) else value
        if not isinstance(tensor, torch.Tensor) or tensor.device.type != "cpu":
            raise LaunchError(f"expected a CPU tensor\nbut got  {name}={value!r}")
        storage = tensor.untyped_storage()
        allocation = self._space.at(storage.data_ptr())
        if allocation is None:
            memory = np.frombuffer(b"", np.uint8)
            if storage.nbytes():
                memory = torch.empty(0, dtype=torch.uint8).set_(storage).numpy()
            label = self._space.unused_name(f"tensor:{name}")
            allocation = self._space.add(label, memory, keeper=storage)
            self._guests.append(allocation)
        if self._access is not None:
            self._access.marks(allocation)
        return Pointer(allocation.number, np.array([tensor.data_ptr() - allocation.address]))

    def _dismiss_guests(self) -> None:
        for allocation in self._guests:
            self._space.remove(allocation.number)
        self._guests.clear()
