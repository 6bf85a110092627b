"""Which kernels have programs that wait for each other: a lock, a flag, a look-back scan.

All programs at once would deadlock there: the one that holds the lock stands still with the others
until the slowest leaves its loop. Such a kernel runs program by program instead.
"""

from kvfuzz.cpu.ir import Function, Module, Op, nested, reached_from

_WATCHING = frozenset({"tt.atomic_rmw", "tt.atomic_cas", "tt.atomic_load", "tt.atomic_poll"})


def waits(module: Module) -> bool:
    """Whether a loop of unknown length watches memory: an atomic or a volatile load inside it."""
    return any(_function_waits(module, function) for function in module.functions.values())


def _function_waits(module: Module, function: Function) -> bool:
    cyclic = {n for n, reached in enumerate(reached_from(function.blocks)) if n in reached}
    for number, block in enumerate(function.blocks):
        for op in nested((block,)):
            if op.name == "tt.atomic_poll":
                return True
            if (op.name == "scf.while" or number in cyclic) and _watches(module, op):
                return True
    return False


def _watches(module: Module, op: Op) -> bool:
    if op.name in _WATCHING or (op.name == "tt.load" and op.attributes.get("isVolatile") is True):
        return True
    blocks = [block for region in op.regions for block in region]
    if op.name == "tt.call":
        blocks += module.functions[str(op.attributes["callee"])].blocks
    return any(_watches(module, inner) for block in blocks for inner in block.ops)
