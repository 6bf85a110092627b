"""What the lane says when it cannot run a kernel, or when a kernel does not end."""

from kvfuzz.errors import NotCheckedError, UsageError


class UnsupportedOp(NotCheckedError):  # noqa: N818 (reads as a noun in reports)
    """The kernel uses an operation that the lane cannot evaluate exactly. Nothing ran.

    Only a program that waits for a later one is noticed while it runs. `op` is the name in Triton's
    IR, `file` (base name) and `line` say where the kernel asks for it.
    """

    def __init__(self, op: str, file: str = "?", line: int = 0) -> None:
        super().__init__(f"op={op!r} at {file}:{line} is not supported by the cpu lane")
        self.op = op
        self.file = file
        self.line = line


class OutOfAddressesError(NotCheckedError):
    """A large piece of memory cannot even be reserved: the machine bounds its address space."""


class LaunchError(RuntimeError):
    """A launch was stopped: out of fuel, a failed device assertion, or arguments of no use here.

    Common causes: a loop bound read from poisoned memory; a tensor that is not on the CPU.
    """


class LaneError(UsageError):
    """The lane was used wrongly: a name allocated twice, a second lane while one is active."""
