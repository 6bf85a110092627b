"""Stands in for Triton's GPU driver: hands launches to the lane instead of a device."""

from collections.abc import Callable, Iterator
from itertools import count
from typing import Any, Protocol

from triton.backends.compiler import GPUTarget
from triton.backends.driver import DriverBase

from kvfuzz.cpu.arch import wave_size
from kvfuzz.cpu.descriptors import is_descriptor, taken_apart
from kvfuzz.cpu.errors import UnsupportedOp
from kvfuzz.cpu.loaded import LoadedKernels
from kvfuzz.cpu.machine import Program

_NO_LIMIT = 1 << 30
_LAUNCHER = "_kvfuzz_launcher"
"""Where the source of a compiled kernel, which belongs to one device id, keeps its launcher."""


class Host(Protocol):
    """Who runs the launches."""

    def launch(
        self,
        program: Program,
        grid: tuple[int, int, int],
        arguments: list[tuple[str, str, Any]],
        constexprs: dict[str, Any],
        options: dict[str, Any],
    ) -> None:
        """Run one launch; an argument is its name, its Triton type and its value."""


class CpuUtils:
    """What Triton asks of a device: limits no kernel reaches, and how to load a binary.

    Triton loads a binary again at every launch when it was given no module handle, and unloads a
    handle through whatever driver is active when it is collected, perhaps after this one. So there
    is no handle, and decoded kernels are kept in `kernels`.
    """

    def __init__(self, arch: str, kernels: LoadedKernels) -> None:
        self._arch = arch
        self._kernels = kernels

    def get_device_properties(self, device: object) -> dict[str, int]:
        """Limits of the device, of which the lane has none, and the size of a wavefront."""
        return {
            "max_shared_mem": _NO_LIMIT,
            "multiprocessor_count": 304,
            "warpSize": wave_size(self._arch),
        }

    def load_binary(
        self, name: str, binary: bytes, shared: int, device: object
    ) -> tuple[None, Program | UnsupportedOp, int, int, int]:
        """Decode the kernel. A refusal is kept, and raised by every launch of it."""
        return None, self._kernels.decoded(binary), 0, 0, _NO_LIMIT

    def unload_module(self, module: object) -> None:
        """A handle of a driver that was active before; it is that driver's to free."""


class CpuLauncher:
    """Triton's launcher protocol for one compiled kernel."""

    def __init__(self, host: Host, source: Any, metadata: Any) -> None:
        self._host = host
        names = source.fn.arg_names
        self._constexprs = {
            ".".join([names[path[0]], *map(str, path[1:])]): value
            for path, value in source.constants.items()
        }
        self._options = {
            name: getattr(metadata, name)
            for name in ("num_warps", "num_stages", "num_ctas", "waves_per_eu", "arch")
        }
        self._signature = list(source.signature.items())
        self._has_parts = any(
            isinstance(kind, tuple) or is_descriptor(kind) for _, kind in self._signature
        )

    def __call__(
        self,
        grid_x: int,
        grid_y: int,
        grid_z: int,
        stream: object,
        function: Program | UnsupportedOp,
        packed: object,
        launch_metadata: object,
        enter_hook: Callable[[Any], None] | None,
        exit_hook: Callable[[Any], None] | None,
        *values: Any,
    ) -> None:
        """Launch once; raises the refusal if the kernel could not be decoded."""
        if isinstance(function, UnsupportedOp):
            raise UnsupportedOp(function.op, function.file, function.line)
        arguments: list[tuple[str, str, Any]] = []
        for (name, kind), value in zip(self._signature, values, strict=True):
            if self._has_parts:
                arguments.extend(_flatten(name, kind, value))
            elif kind != "constexpr":
                arguments.append((name, kind, value))
        if enter_hook is not None:
            enter_hook(launch_metadata)
        grid = (int(grid_x), int(grid_y), int(grid_z))
        self._host.launch(function, grid, arguments, self._constexprs, self._options)
        if exit_hook is not None:
            exit_hook(launch_metadata)


def _flatten(name: str, kind: Any, value: Any) -> Iterator[tuple[str, str, Any]]:
    """The run-time arguments; tuples and descriptors come in parts, constexprs not at all."""
    if isinstance(kind, tuple):
        for number, (part_kind, part) in enumerate(zip(kind, value, strict=True)):
            yield from _flatten(f"{name}.{number}", part_kind, part)
    elif is_descriptor(kind):
        yield from taken_apart(name, kind, value)
    elif kind != "constexpr":
        yield name, kind, value


class CpuDriver(DriverBase):  # type: ignore[misc]
    """The active driver while the lane is; by its own device id it shares no cached kernel.

    `loaded` is called when a kernel has been loaded, and the files of its compilation may go.
    """

    def __init__(self, arch: str, host: Host, loaded: Callable[[], None]) -> None:
        super().__init__()
        self._target = GPUTarget("hip", arch, wave_size(arch))
        # Triton keeps compiled kernels per device id, and ours hold on to their host.
        self._device = f"kvfuzz-cpu-{arch}-{id(host):x}"
        self._host = host
        self.kernels = LoadedKernels(arch, self._device, loaded)
        self.utils = CpuUtils(arch, self.kernels)

    def launcher_cls(self, source: Any, metadata: Any) -> CpuLauncher:
        """The launcher of one compiled kernel, asked for again before every launch of it."""
        launcher = getattr(source, _LAUNCHER, None)
        if launcher is None:
            self.kernels.from_function(source.fn)
            launcher = CpuLauncher(self._host, source, metadata)
            setattr(source, _LAUNCHER, launcher)
        return launcher

    @classmethod
    def is_active(cls) -> bool:
        """Never found by searching; the lane sets it."""
        return False

    def map_python_to_cpp_type(self, ty: str) -> str:
        """No C++ is generated."""
        return ty

    def get_current_target(self) -> Any:
        """`hip:<arch>`, with the size of its wavefronts."""
        return self._target

    def get_current_device(self) -> str:
        """A device id that no GPU driver uses."""
        return self._device

    def set_current_device(self, device: object) -> None:
        """There is one device."""

    def get_current_stream(self, device: object) -> int:
        """Launches run at once."""
        return 0

    def get_active_torch_device(self) -> Any:
        """Kernels work on CPU tensors in place."""
        import torch

        return torch.device("cpu")

    def get_benchmarker(self) -> Callable[..., list[float]]:
        """Autotuning takes the first config without running any: each call "takes" longer."""
        ticks = count(1)

        def first_wins(kernel_call: object, **_: object) -> list[float]:
            return [float(next(ticks))] * 3

        return first_wins
