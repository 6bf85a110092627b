"""The compiled kernels that a lane keeps: decoded once by their text, the idlest let go first.

Triton keeps every kernel that it has ever compiled for a device, and a campaign compiles a few more
in every minute. What is let go here is let go there, too, and compiled again when it is asked for.
"""

from collections.abc import Callable
from typing import Any

import triton

from kvfuzz.cpu.decode import decode_module
from kvfuzz.cpu.errors import UnsupportedOp
from kvfuzz.cpu.machine import Program
from kvfuzz.cpu.parse import parse_module

MOST_TEXT = 32 << 20
"""Bytes of printed TTIR of the kernels that are kept, which take about nine times as much: two
thousand kernels that copy, or two hundred that compute attention."""

_HAS_MEDIAN = not triton.__version__.startswith("3.6.")


class LoadedKernels:
    """Decoded kernels by their text, and the functions of kernel source that they come from.

    `loaded` is called when one was decoded for the first time. `most_text` bounds their text, in
    bytes; the last one is kept however long it is.
    """

    def __init__(self, arch: str, device: str, loaded: Callable[[], None]) -> None:
        self._arch = arch
        self._device = device
        self._loaded = loaded
        self.most_text = MOST_TEXT
        self._text = 0
        self._decoded: dict[bytes, Program | UnsupportedOp] = {}
        self._functions: dict[int, Any] = {}

    def from_function(self, function: Any) -> None:
        """Note a `triton.jit` function of which a kernel is about to be loaded."""
        if hasattr(function, "device_caches"):
            self._functions[id(function)] = function

    def decoded(self, text: bytes) -> Program | UnsupportedOp:
        """The kernel printed as `text`, or why it cannot be decoded. Asked for before every
        launch, so that the first of them is the one that has not been launched for longest."""
        program = self._decoded.pop(text, None)
        if program is not None:
            self._decoded[text] = program
        else:
            try:
                module = parse_module(text.decode())
                program = decode_module(module, self._arch, has_median=_HAS_MEDIAN)
            except UnsupportedOp as refusal:
                program = refusal
            self._text += len(text)
            while self._decoded and self._text > self.most_text:
                self._let_go(next(iter(self._decoded)))
            self._decoded[text] = program
            self._loaded()
        return program

    def _let_go(self, text: bytes) -> None:
        program = self._decoded.pop(text)
        self._text -= len(text)
        for function in self._functions.values():
            if self._device not in function.device_caches:
                continue
            kernels, keys, *_ = function.device_caches[self._device]
            for key in [key for key, each in kernels.items() if each.function is program]:
                del kernels[key]
            keys.clear()  # of what was asked for and how it is called; made again at no cost
