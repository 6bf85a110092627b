"""Launch a third-party kernel on the cpu lane and keep what it did."""

import enum
import functools
import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from kvfuzz.cpu import CpuLane
from kvfuzz.cpu.access import Overflow, Stray
from kvfuzz.cpu.races import Race
from kvfuzz.kernels.source_loader import SourceTree
from kvfuzz.kernels.stubs import Stub
from kvfuzz.kernels.vllm_stubs import known

ARCH = "gfx942"


class KVQuantMode(enum.IntEnum):
    """vllm/v1/kv_cache_interface.py; the kernels take its numbers as constexprs."""

    NONE = 0
    FP8_PER_TENSOR = 1
    INT8_PER_TOKEN_HEAD = 2
    FP8_PER_TOKEN_HEAD = 3
    INT4_PER_TOKEN_HEAD = 4


class _Workspace:
    def get_simultaneous(self, *wanted: tuple[tuple[int, ...], torch.dtype]) -> list[torch.Tensor]:
        return [torch.full(shape, torch.nan, dtype=dtype) for shape, dtype in wanted]


class _Logger(logging.Logger):
    def warning_once(self, *message: object) -> None:
        pass

    debug_once = info_once = warning_once


@functools.cache
def attention_tree(root: str) -> SourceTree:
    """The tree at `root`; what its attention files use beyond the cache kernels' stubs is real."""
    values: dict[str, dict[str, Any]] = {name: {**each} for name, each in known(ARCH).items()}
    platform = dict(vars(values["vllm.platforms"]["current_platform"]))
    del platform["_path"]
    platform |= {
        "is_device_capability_family": lambda family, device_id=0: False,
        "get_device_capability": lambda device_id=0: (9, 4),
        "num_compute_units": lambda device_id=0: 304,
    }
    values["vllm.platforms"] = {
        "current_platform": Stub("vllm.platforms.current_platform", platform)
    }
    values["vllm.platforms.rocm"] = {
        "use_rocm_custom_paged_attention": lambda *arguments: False,
        "on_gfx950": lambda: False,
        "on_gfx942": lambda: True,
        "_ON_GFX942": True,
        "_ON_GFX950": False,
    }
    values["vllm.triton_utils"] |= {"LOG2E": 1.4426950408889634, "LOGE2": 0.6931471805599453}
    values["vllm.v1.kv_cache_interface"] |= {"KVQuantMode": KVQuantMode}
    values["vllm.envs"] = {"VLLM_BATCH_INVARIANT": False}
    values["vllm.model_executor.layers.batch_invariant"] = {
        "vllm_is_batch_invariant": lambda: False
    }
    values["vllm.compilation.breakable_cudagraph"] = {"eager_break_during_capture": lambda op: op}
    values["vllm.utils.torch_utils"] |= {"direct_register_custom_op": lambda **op: None}
    values["vllm.v1.worker.workspace"] = {
        "current_workspace_manager": _Workspace,
        "is_workspace_manager_initialized": lambda: True,
    }
    values["vllm.logger"] = {"init_logger": _Logger}
    return SourceTree("vllm", Path(root), known=values, also=("aiter",))


@dataclass(frozen=True)
class Outcome:
    """What a launch did: its outputs, the inputs whose bytes changed, and what was amiss."""

    result: Any
    changed: list[str]
    strays: list[Stray]
    overflows: list[Overflow]
    races: list[Race]


@dataclass
class Launcher:
    """Runs functions that launch kernels, each key once, in a lane without other allocations."""

    lane: CpuLane
    _outcomes: dict[object, Outcome] = field(default_factory=dict)
    _inputs: dict[str, tuple[torch.Tensor, torch.Tensor]] = field(default_factory=dict)

    def once(self, key: object, launch: Callable[["Launcher"], Any]) -> Outcome:
        """The outcome of `launch(self)`, which allocates by `given` and `room`."""
        if key not in self._outcomes:
            self.lane.release_all()
            self._inputs.clear()
            with self.lane.observe() as access:
                result = launch(self)
            changed = [
                name for name, (now, before) in self._inputs.items() if not torch.equal(now, before)
            ]
            self._outcomes[key] = Outcome(
                result, changed, access.strays, access.overflows, access.found_races
            )
        return self._outcomes[key]

    def given(self, name: str, values: torch.Tensor) -> torch.Tensor:
        """An allocation that holds `values` and must not change."""
        view = self.room(name, tuple(values.shape), values.dtype)
        view.copy_(values)
        memory = view.untyped_storage()
        now = torch.empty(0, dtype=torch.uint8).set_(memory)
        self._inputs[name] = (now, now.clone())
        return view

    def room(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """An allocation to write to, full of 0xA5."""
        count = 1
        for extent in shape:
            count *= extent
        memory = self.lane.allocate(name, count * dtype.itemsize)
        memory.fill_(0xA5)
        return memory.view(dtype).view(shape)
