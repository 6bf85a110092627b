"""Try a lane out: run our own gather on a small hybrid cache, and see what can be decided."""

import platform
from importlib.metadata import PackageNotFoundError, version

import torch

from kvfuzz.engine.worker.judge import Judge
from kvfuzz.engine.worker.lanes import Lane, open_lane
from kvfuzz.errors import KvfuzzError
from kvfuzz.kernels.resolve import resolve_kernel
from kvfuzz.model.checkup import Checkup, LaneState
from kvfuzz.model.fill import FP32_ONE
from kvfuzz.model.layout import Geometry
from kvfuzz.model.lower import lower
from kvfuzz.model.plan import CACHE, AttentionLayer, Batch, Plan, Sequence, StateLayer
from kvfuzz.model.scene import Scene
from kvfuzz.model.target import TargetSpec

PACKAGES = ("kvfuzz", "torch", "triton", "numpy", "hypothesis", "msgspec", "pytest")

SCENE = Scene(
    op="gather_cache",
    layer="layer.0",
    plan=Plan(
        (
            AttentionLayer("layer.0", CACHE, "hybrid", "nhd", Geometry(6, 16, 2, 32), "bf16"),
            StateLayer("layer.1", CACHE, (2,)),
        )
    ),
    batch=Batch((Sequence((3, 1), 13, 6), Sequence((4,), 0, 2)), table_width=3),
    model_dtype="bf16",
    k_scale=FP32_ONE,
    v_scale=FP32_ONE,
    fill_seed=7,
)


def examine(lane_name: str, arch: str) -> Checkup:
    """What this process can say about a lane. Never raises for what the lane lacks."""
    versions = {"python": platform.python_version()} | {name: _version(name) for name in PACKAGES}
    try:
        lane = open_lane(lane_name, arch)
        state = _tried(lane)
    except KvfuzzError as error:
        return Checkup(
            LaneState(lane_name, trouble=str(error).removeprefix(f"lane {lane_name}: ")), versions
        )
    return Checkup(state, versions, _supported() if lane_name == "cpu" else {})


def _tried(lane: Lane) -> LaneState:
    target = resolve_kernel(TargetSpec("builtin:gather_cache"), arch=lane.arch)
    partner = resolve_kernel(TargetSpec(target.info.partner), arch=lane.arch)
    verdict = Judge(target, partner, lane).verdict(lower(SCENE))
    wrong = [f"{each.name} failed" for each in verdict.failed]
    decided = tuple(each.name for each in verdict.results if each.outcome == "passed")
    if not decided:
        wrong += sorted({each.reason for each in verdict.results})
    cuda = lane.device.type == "cuda"
    device = torch.cuda.get_device_name(lane.device) if cuda else platform.machine()
    return LaneState(lane.name, device, lane.arch, decided, "; ".join(wrong))


def _supported() -> dict[str, tuple[str, ...]]:
    from kvfuzz.cpu.inventory import supported

    return supported()


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"
