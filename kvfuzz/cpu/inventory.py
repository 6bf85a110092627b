"""What the lane can run, by name, read off the very tables that kernels are decoded with."""

from kvfuzz.cpu.atomics import ATOMIC_KINDS
from kvfuzz.cpu.decode import MODULE_OPS, OPS, REGION_OPS, TARGET_OPS, TERMINATORS
from kvfuzz.cpu.inline_asm import INSTRUCTIONS, READINGS
from kvfuzz.cpu.ir import FLOAT_BITS, INTEGER_BITS
from kvfuzz.cpu.ops_extern import SYMBOLS


def supported() -> dict[str, tuple[str, ...]]:
    """Names by family, each sorted: Triton's IR ops by dialect (`tt ops`, `arith ops`, ...),
    `element types`, `extern symbols`, `atomic kinds` (with their element) and `inline assembly`.
    """
    names = {*OPS, *TARGET_OPS, *REGION_OPS, *MODULE_OPS, *TERMINATORS}
    families: dict[str, set[str]] = {}
    for name in names:
        families.setdefault(f"{name.split('.')[0]} ops", set()).add(name)
    families["element types"] = {*INTEGER_BITS, *FLOAT_BITS}
    families["extern symbols"] = set(SYMBOLS)
    families["atomic kinds"] = {
        f"{kind} {element}" for kind, (_, elements) in ATOMIC_KINDS.items() for element in elements
    }
    families["inline assembly"] = {*INSTRUCTIONS, *READINGS}
    return {family: tuple(sorted(members)) for family, members in sorted(families.items())}
