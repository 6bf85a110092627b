"""Which fp8 formats an architecture has, in engines and in Triton."""

from kvfuzz.model.dtypes import DTYPES
from kvfuzz.model.vocabulary import Levels


def _is_cdna3(arch: str) -> bool:
    return arch.startswith("gfx94")


def dialect_of(arch: str) -> str:
    """The e4m3 format that engines use on `arch`: FNUZ on CDNA 3 (gfx94x), OCP everywhere else.

    This is vLLM's rule (platforms/rocm.py: is_fp8_fnuz, fp8_dtype), after the hardware's native
    conversions.
    """
    return "e4m3fnuz" if _is_cdna3(arch) else "e4m3fn"


def scales_of(arch: str) -> Levels:
    """The scales by which a kernel's `/` gives the quotient that an exact oracle expects.

    On AMD, and in the cpu lane, Triton's fp32 division is IEEE. On CUDA it is `div.full.f32`, off
    by up to 2 ulp (PTX ISA), which moves a quotient across a rounding tie of fp8: seen on an H200.
    Division by a power of two is exact either way. Kernels that ask for tl.div_rn need no care.
    """
    exact = ("none", "unit", "power_of_two")
    return (*exact, "general") if arch.startswith("gfx") else exact


def formats_of(arch: str) -> Levels:
    """The cache formats that Triton can convert to on `arch`.

    FNUZ is native to CDNA 3. Triton's CUDA backend refuses it, and Triton 3.6 does not compile a
    store of it for gfx950.

    A format is in although Triton may lose its specials: where an arch has no instruction for
    e4m3fn or e5m2 (gfx942 for one), NaN and infinity become finite when converted straight to
    bf16 (`cpu/arch.py`). A kernel that goes by way of fp32, as our own readers do, keeps them,
    and one that does not is found out.
    """
    return tuple(name for name in DTYPES if _is_cdna3(arch) or not name.endswith("fnuz"))
