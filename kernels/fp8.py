"""Which fp8 dialect an engine uses on an architecture."""


def dialect_of(arch: str) -> str:
    """The e4m3 format of `arch`: FNUZ on CDNA 3 (gfx940 to gfx942), OCP everywhere else.

    This is the rule of vLLM's platforms (platforms/rocm.py: is_fp8_fnuz, fp8_dtype), and of the
    hardware: CDNA 4 and NVIDIA convert the OCP formats.
    """
    return "e4m3fnuz" if arch.startswith("gfx94") else "e4m3fn"
