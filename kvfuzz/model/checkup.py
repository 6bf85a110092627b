"""What a machine can run: versions, lanes tried out, and what the cpu lane supports."""

import msgspec


class LaneState(msgspec.Struct, frozen=True):
    """A lane on which a kernel ran, on `device` for `arch`, or the `trouble` that it had."""

    name: str
    device: str = ""
    arch: str = ""
    decided: tuple[str, ...] = ()
    """The properties that this lane can decide."""
    trouble: str = ""

    @property
    def works(self) -> bool:
        """Whether a kernel ran and left the right bytes."""
        return not self.trouble


class Checkup(msgspec.Struct, frozen=True):
    """What one worker found out about one lane, and about the packages it has."""

    lane: LaneState
    versions: dict[str, str] = {}
    supported: dict[str, tuple[str, ...]] = {}
    """By family, what kernels may use on the cpu lane; empty for other lanes."""
