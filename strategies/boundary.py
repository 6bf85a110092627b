"""What a boundary is."""

import msgspec


class Boundary(msgspec.Struct, frozen=True):
    """Levels that once broke a kernel, or that engines are known to choose, and why."""

    levels: dict[str, str]
    why: str
