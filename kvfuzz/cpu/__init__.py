"""Real Triton kernels, run exactly on a CPU: the whole launch grid at once, in NumPy."""

from kvfuzz.cpu.access import Access, Launch, Stray
from kvfuzz.cpu.errors import LaneError, LaunchError, OutOfAddressesError, UnsupportedOp
from kvfuzz.cpu.lane import CpuLane

__all__ = [
    "Access",
    "CpuLane",
    "LaneError",
    "Launch",
    "LaunchError",
    "OutOfAddressesError",
    "Stray",
    "UnsupportedOp",
]
