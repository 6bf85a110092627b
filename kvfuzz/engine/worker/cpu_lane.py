"""The cpu lane as the worker sees it: kvfuzz's Triton backend behind the Lane protocol.

No guard zones: a kernel's access outside an allocation never reaches memory here, and torch code
cannot leave the storage of a tensor, which is exactly the allocation.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from kvfuzz.cpu import Access, CpuLane, UnsupportedOp
from kvfuzz.engine.worker.lanes import GUARD_VALUE, Seen
from kvfuzz.model.verdict import Launch
from kvfuzz.oracles.observation import Stray


class CheckedCpuLane:
    """Kernels compiled for the gfx target `arch`, evaluated on the CPU, every access recorded."""

    name = "cpu"
    device = torch.device("cpu")

    def __init__(self, arch: str) -> None:
        self.arch = arch
        self._lane = CpuLane(arch=arch)
        self._lane.activate()
        self._names: list[str] = []

    def allocate(self, name: str, data: Tensor) -> Tensor:
        """A uint8 buffer registered as `name` that holds `data`."""
        buffer = self._lane.allocate(name, data.numel())
        buffer.copy_(data)
        self._names.append(name)
        return buffer

    def guard(self, name: str) -> Tensor:
        """Nothing: see the module's docstring."""
        return torch.empty(0, dtype=torch.uint8)

    def observe(
        self, call: Callable[[], None], *, poison: int = GUARD_VALUE, origins: bool = False
    ) -> Seen:
        """Run `call` with every access recorded; bytes outside an allocation read as `poison`."""
        self._lane.poison = poison
        error: BaseException | None = None
        with self._lane.observe(trace_origins=origins) as access:
            try:
                call()
            except BaseException as raised:  # sys.exit in a target is no end of the worker
                error = raised
            return self._seen(access, error, origins)

    def release(self) -> None:
        """Forget every buffer."""
        self._lane.release_all()
        self._names.clear()

    def close(self) -> None:
        """Give Triton its own backend back; only tests outlive a lane."""
        self._lane.deactivate()

    def _seen(self, access: Access, error: BaseException | None, origins: bool) -> Seen:
        launches = tuple(
            Launch(each.kernel, each.grid, _texts(each.constexprs), _texts(each.options))
            for each in access.launches
        )
        strays = tuple(
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
        return Seen(
            written={name: torch.from_numpy(access.written(name)) for name in self._names},
            strays=strays,
            launches=launches,
            origin_of=self._origin_lookup(access) if origins else None,
            error=error,
            unsupported=isinstance(error, UnsupportedOp),
        )

    def _origin_lookup(self, access: Access) -> Callable[[str, int], tuple[str, int] | None]:
        touched = {name: access.origin(name) for name in self._names if name in access.names}
        numbers = {
            int(number): access.allocation_name(int(number))
            for indices, _ in touched.values()
            for number in set(indices.tolist())
            if number >= 0
        }

        def lookup(buffer: str, byte: int) -> tuple[str, int] | None:
            if buffer not in touched:
                return None
            indices, offsets = touched[buffer]
            number = int(indices[byte])
            return None if number < 0 else (numbers[number], int(offsets[byte]))

        return lookup


def _texts(values: dict[str, object]) -> dict[str, str]:
    return {name: str(value) for name, value in values.items()}
