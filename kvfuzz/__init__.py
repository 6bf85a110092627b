"""kvfuzz: property-based verification and fuzzing of KV-cache layouts on real Triton kernels."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvfuzz.front.testing import kernel_test

__all__ = ["__version__", "kernel_test"]

__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    """`kernel_test` when it is asked for: workers import kvfuzz too, and need no front."""
    if name == "kernel_test":
        from kvfuzz.front.testing import kernel_test

        return kernel_test
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
