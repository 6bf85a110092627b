"""The cpu lane as the worker sees it: kvfuzz's Triton backend behind the Lane protocol.

No guard zones: a kernel's access outside an allocation never reaches memory here, and torch code
cannot leave the storage of a tensor, which is exactly the allocation.
"""

from collections.abc import Callable
from functools import partial
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kvfuzz.cpu import Access, CpuLane, OutOfAddressesError, UnsupportedOp
from kvfuzz.cpu.machine import Program
from kvfuzz.cpu.reserve import (
    PAGE_SHIFT,
    give_back_freed_memory,
    nonzero_in,
    resident_pages,
)
from kvfuzz.engine.worker.lanes import Manner, Seen, put_held
from kvfuzz.engine.worker.torch_use import TorchUse
from kvfuzz.errors import NotCheckedError
from kvfuzz.model.coverage import Exercised, Site
from kvfuzz.model.held import Held
from kvfuzz.model.verdict import Launch
from kvfuzz.oracles.observation import Overflow, Race, Stray

LARGE_IMAGE = 4 << 20
"""Bytes of one buffer's image after which memory is given back."""


class CheckedCpuLane:
    """Kernels compiled for the gfx target `arch`, evaluated on the CPU, every access recorded."""

    name = "cpu"
    device = torch.device("cpu")

    def __init__(self, arch: str) -> None:
        self.arch = arch
        self._lane = CpuLane(arch=arch, hints=False)
        self._lane.activate()
        self._kept: dict[str, Held] = {}
        self._shown: dict[Site, tuple[set[str], set[str]]] = {}
        """By site: the outcomes that were reported as seen, and as possible."""
        self._buffers: list[Tensor] = []
        self._access: Access | None = None
        self._was_large = False

    def allocate(self, name: str, data: Tensor, kept: Held) -> Tensor:
        """A uint8 buffer registered as `name`; of a large one only touched pages take memory.

        Raises NotCheckedError where not even its addresses can be had.
        """
        try:
            buffer = self._lane.allocate(name, kept.nbytes, zeroed=not kept.is_whole)
        except OutOfAddressesError as error:
            raise NotCheckedError(f"buffer {name}: {error}") from error
        put_held(buffer, data, kept)
        self._kept[name] = kept
        self._buffers.append(buffer)
        self._was_large |= kept.size > LARGE_IMAGE
        return buffer

    def guard(self, name: str) -> Tensor:
        """Nothing: see the module's docstring."""
        return torch.empty(0, dtype=torch.uint8)

    def written_outside(self, name: str) -> int | None:
        """The first byte of a buffer that is not held, and that a kernel wrote or torch changed."""
        kept = self._kept[name]
        if kept.is_whole or self._access is None:
            return None
        memory = self._lane.memory_of(name)
        pages = resident_pages(memory)
        starts = pages << PAGE_SHIFT
        changed = nonzero_in(memory, pages[_outside(kept, starts, 1 << PAGE_SHIFT)])
        found = [changed[_outside(kept, changed, 1)]]
        if self._access.touched(name, "write"):
            written = self._access.bytes_of(name, "write")
            found.append(written[_outside(kept, written, 1)])
        return min((int(each[0]) for each in found if len(each)), default=None)

    def observe(self, call: Callable[[], None], manner: Manner) -> Seen:
        """Run `call` with every access recorded."""
        self._lane.poison = manner.poison
        self._lane.order = manner.order
        error: BaseException | None = None
        with self._lane.observe(trace_origins=manner.origins, readers=manner.readers) as access:
            self._access = access
            use = TorchUse(self._buffers)
            try:
                with use:
                    call()
            except BaseException as raised:  # sys.exit in a target is no end of the worker
                error = raised
            return self._seen(access, error, manner, tuple(use.ops))

    def release(self) -> None:
        """Forget every buffer."""
        self._lane.release_all()
        self._kept.clear()
        self._buffers.clear()
        self._access = None

    def rest(self) -> None:
        """Give freed memory back after a case with a large image: it was there a dozen times, in
        every variant's run, and the next one is small."""
        if self._was_large:
            give_back_freed_memory()
            self._was_large = False

    def close(self) -> None:
        """Give Triton its own backend back; only tests outlive a lane."""
        self._lane.deactivate()

    def _seen(
        self,
        access: Access,
        error: BaseException | None,
        manner: Manner,
        torch_ops: tuple[str, ...],
    ) -> Seen:
        launches = tuple(
            Launch(each.kernel, each.grid, _texts(each.constexprs), _texts(each.options))
            for each in access.launches
        )
        return Seen(
            written=self._marked(access, "write"),
            read=self._marked(access, "read"),
            read_outside=self._read_outside(access) if manner.far else {},
            torch_ops=torch_ops,
            strays=_strays(access),
            launches=launches,
            overflows=_overflows(access),
            races=_races(access),
            crossed=tuple(access.crossed),
            synchronising=tuple(access.synchronising),
            exercised=partial(self._exercised, self._lane.take_watched()),
            origin_of=self._origin_lookup(access) if manner.origins else None,
            error=error,
            unsupported=isinstance(error, UnsupportedOp | OutOfAddressesError | NotCheckedError),
        )

    def _marked(self, access: Access, kind: Literal["read", "write"]) -> dict[str, Tensor]:
        """By buffer of which kernels read or wrote a byte, those bytes; bool `[kept.size]`, to be
        read only."""
        found = {}
        for name, kept in self._kept.items():
            if access.touched(name, kind):
                marks = access.read(name) if kind == "read" else access.written(name)
                marked = torch.from_numpy(marks)
                if not kept.is_whole:
                    marked = torch.cat([marked[start:stop] for start, stop in kept.spans])
                found[name] = marked
        return found

    def _read_outside(self, access: Access) -> dict[str, int]:
        """By buffer, the first byte that a kernel read although it is not held."""
        first = {}
        for name, kept in self._kept.items():
            if not kept.is_whole and access.touched(name, "read"):
                read = access.bytes_of(name, "read")
                far = read[_outside(kept, read, 1)]
                if len(far):
                    first[name] = int(far[0])
        return first

    def _exercised(self, programs: set[Program]) -> tuple[Exercised, ...]:
        """What no specialisation of a kernel has shown before, or was not known to be possible."""
        found = []
        for each, (seen, missing) in self._lane.newly_exercised(programs):
            site = Site(each.kernel, each.file, each.line, each.kind, each.column)
            has_shown, can_show = self._shown.setdefault(site, (set(), set()))
            if can_show and has_shown.issuperset(seen) and can_show.issuperset(missing):
                continue
            has_shown.update(seen)
            can_show.update(seen, missing)
            found.append(Exercised(site, seen, missing))
        return tuple(found)

    def _origin_lookup(self, access: Access) -> Callable[[str, int], tuple[str, int] | None]:
        # Taken while the observation lasts: the names of released allocations are forgotten.
        touched = {name for name in self._kept if name in access.names}
        names = {number: access.allocation_name(number) for number in access.numbers}

        def lookup(buffer: str, byte: int) -> tuple[str, int] | None:
            found = access.origin_of(buffer, byte) if buffer in touched else None
            return None if found is None else (names[found[0]], found[1])

        return lookup


def _outside(kept: Held, at: NDArray[np.int64], length: int) -> NDArray[np.bool_]:
    """Which stretches of `length` bytes, from ascending offsets on, are not wholly held."""
    starts, stops = (np.array(ends) for ends in zip(*kept.spans, strict=True))
    number = np.searchsorted(starts, at, side="right") - 1
    outside: NDArray[np.bool_] = (number < 0) | (at + length > stops[number])
    return outside


def _strays(access: Access) -> tuple[Stray, ...]:
    return tuple(
        Stray(
            each.kind,
            each.kernel,
            f"{each.file}:{each.line}",
            each.program,
            each.allocation,
            each.offset,
            each.nbytes,
            each.count,
        )
        for each in access.strays
    )


def _overflows(access: Access) -> tuple[Overflow, ...]:
    return tuple(
        Overflow(
            each.reached,
            each.kernel,
            f"{each.file}:{each.line}",
            f"{each.lost_file}:{each.lost_line}",
            each.program,
            each.allocation,
            each.offset,
            each.exact,
            each.count,
        )
        for each in access.overflows
    )


def _races(access: Access) -> tuple[Race, ...]:
    return tuple(
        Race(
            each.kind,
            each.kernel,
            f"{each.file}:{each.line}",
            each.program,
            f"{each.other_file}:{each.other_line}" if each.other_file else "",
            each.other_program,
            each.allocation,
            each.offset,
            each.nbytes,
            each.count,
        )
        for each in access.found_races
    )


def _texts(values: dict[str, object]) -> dict[str, str]:
    return {name: str(value) for name, value in values.items()}
