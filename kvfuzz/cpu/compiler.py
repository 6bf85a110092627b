"""Stands in for Triton's AMD compiler: its front end and its TTIR passes, and nothing after them.

The target stays `hip:<arch>`, so that kernels specialise as they do on AMD. The last stage is the
printed TTIR under an extension of our own; the backend's hash keeps it apart from real binaries.
"""

import re
from typing import Any

from triton._C.libtriton import ir, passes
from triton.backends.amd.compiler import HIPBackend

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
