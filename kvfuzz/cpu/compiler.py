"""Stands in for Triton's AMD compiler: its front end and its TTIR passes, and nothing after them.

The target stays `hip:<arch>`, so that kernels specialise as they do on AMD. The last stage is the
printed TTIR under an extension of our own; the backend's hash keeps it apart from real binaries.

Of what kernels specialise on, two things are hints to code generation alone: whether an argument
is a multiple of 16, and whether a tensor's storage stays below 2 GiB. They become attributes of
arguments that no pass on TTIR reads, and yet nearly every random case has a mix of its own. A
`HintlessBackend` leaves them out, so that cases which differ in nothing else share one program.
What changes the types of a kernel's arithmetic is kept: dtypes, the width of an integer, `== 1`.
"""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from triton._C.libtriton import ir, passes
from triton.backends.amd.compiler import HIPBackend
from triton.runtime import jit

BINARY = "kvir"


def _without_descriptors(module: Any) -> Any:
    """Rewrite tensor descriptors to pointers where Triton leaves them to the hardware (gfx1250)."""
    manager = ir.pass_manager(module.context)
    passes.ttir.add_rewrite_tensor_descriptor_to_pointer(manager)
    manager.run(module, "without_descriptors")
    return module


class CpuBackend(HIPBackend):  # type: ignore[misc]
    """The AMD backend with one stage, `ttir`, and its text as the binary.

    Floating-point fusion is off: contracting a*b+c is a freedom of code generation.
    """

    def __init__(self, target: Any) -> None:
        super().__init__(target)
        self.binary_ext = BINARY

    def parse_options(self, opts: dict[str, Any]) -> Any:
        """AMD's options, with fusion settled here rather than by a default that warns."""
        return super().parse_options({**opts, "enable_fp_fusion": False})

    def add_stages(self, stages: dict[str, Any], options: Any, language: Any = None) -> None:
        """Triton's AMD passes on TTIR, then the text."""

        def ttir(module: Any, metadata: dict[str, Any]) -> Any:
            return _without_descriptors(self.make_ttir(module, metadata, options))

        def text(module: Any, metadata: dict[str, Any]) -> bytes:
            printed = str(module)
            match = re.search(r'tt\.func public @"?([^"(\s]+)', printed)
            metadata["name"] = match[1] if match else "?"
            metadata["shared"] = 0
            return printed.encode()

        stages["ttir"] = ttir
        stages[BINARY] = text

    def hash(self) -> str:
        """The cache key of this backend; never equal to AMD's own."""
        return f"kvfuzz-cpu-2-{self.target}"


class HintlessBackend(CpuBackend):
    """The same without the hints: kernels do not specialise on alignment and size of storage.

    Integers are specialised by Triton itself, so this takes `integers_without_hints` beside it.
    """

    @staticmethod
    def get_tensor_specialization(arg: Any, **kwargs: Any) -> str:
        """Nothing but its dtype."""
        return ""


@contextmanager
def integers_without_hints() -> Iterator[None]:
    """Let launches ask for integers as if each parameter were `do_not_specialize_on_alignment`.

    Triton looks the function up when a kernel is first launched on a device; kernels that were
    launched on another before keep theirs.
    """
    specialise = jit.native_specialize_impl

    def unaligned(backend: Any, arg: Any, is_const: bool, specialise_value: bool, _: bool) -> Any:
        return specialise(backend, arg, is_const, specialise_value, False)

    jit.native_specialize_impl = unaligned
    try:
        yield
    finally:
        jit.native_specialize_impl = specialise
