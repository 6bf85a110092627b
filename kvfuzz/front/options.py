"""Values that people type: durations and source trees."""

import math
import re
from collections.abc import Iterable
from pathlib import Path

from kvfuzz.errors import UsageError

_UNITS = {"s": 1.0, "m": 60.0, "h": 3600.0}
_DURATION = re.compile(r"(\d+(?:\.\d+)?)([smh])")


def parse_duration(text: str, *, name: str) -> float:
    """Seconds of `60s`, `5m`, `1.5h`; `name` is the option that was given.

    Raises UsageError for anything else, for zero, and for what no clock can hold.
    """
    match = _DURATION.fullmatch(text.strip())
    value = float(match[1]) * _UNITS[match[2]] if match else 0.0
    if not 0 < value < math.inf:
        raise UsageError(f"{name} {text}: expected a number above 0 with its unit: 60s, 5m or 2h")
    return value


def parse_sources(texts: Iterable[str], *, relative_to: Path | None = None) -> dict[str, str]:
    """Folder by project of `vllm=DIR` options. Raises UsageError where a folder is missing."""
    sources: dict[str, str] = {}
    for text in texts:
        name, equals, folder = text.partition("=")
        if not (name and equals and folder):
            raise UsageError(f"--source {text}: expected PROJECT=DIR, for instance vllm=~/vllm")
        sources |= checked_sources({name: folder}, relative_to=relative_to)
    return sources


def checked_sources(sources: dict[str, str], *, relative_to: Path | None = None) -> dict[str, str]:
    """`sources` with `~` and relative folders resolved. Raises UsageError for a missing folder."""
    found = {}
    for name, folder in sources.items():
        path = Path(folder).expanduser()
        if relative_to is not None:
            path = relative_to / path
        if not path.is_dir():
            raise UsageError(f"--source {name}={folder}: no folder {path}")
        found[name] = str(path)
    return found
