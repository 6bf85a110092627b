"""The write-ahead journal: the case about to be launched is on disk before it is.

Whatever takes the process down, the case that did it can be read back. One file per process; a
clean end removes it, so that a file which is still there names a case whose end nobody saw.

The file stays open and is written over in place, which is far cheaper than a new one for each case.
A process that dies halfway through leaves a file that cannot be read, of a case that never ran.
"""

import os
import weakref
from pathlib import Path

import msgspec

from kvfuzz.liveness import is_alive
from kvfuzz.model.any_case import AnyCase
from kvfuzz.model.seed import SCHEMA


class Entry(msgspec.Struct, frozen=True):
    """What was about to happen: `case`, as `schema` writes it, on the target of that name."""

    target: str
    case: AnyCase
    schema: int = 1


class Journal:
    """The journal of this process in an output folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._path = folder / f"journal-{os.getpid()}.json"
        self._file: int | None = None
        self._length = 0

    def about_to_run(self, target: str, case: AnyCase) -> None:
        """Record a launch. Not synced to disk: the kernel keeps it when only the process dies."""
        if self._file is None:
            self._file = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
            self._closing = weakref.finalize(self, os.close, self._file)
        entry = msgspec.json.encode(Entry(target, case, SCHEMA))
        written = os.pwrite(self._file, entry, 0)
        while written < len(entry):
            written += os.pwrite(self._file, entry[written:], written)
        if len(entry) < self._length:
            os.ftruncate(self._file, len(entry))
        self._length = len(entry)

    def close(self) -> None:
        """The last recorded case ended in a verdict."""
        if self._file is not None:
            self._closing()
            self._file, self._length = None, 0
        self._path.unlink(missing_ok=True)

    def left_over(self, target: str) -> list[tuple[AnyCase, Path]]:
        """Cases of `target` whose process never came back, oldest first, with their files.

        The caller removes a file when its case has come to a verdict. Files that cannot be read,
        are of another version, or belong to a living process or another target are left out.
        """
        found: list[tuple[float, AnyCase, Path]] = []
        for path in self._folder.glob("journal-*.json"):
            owner = path.stem.partition("-")[2]
            if path == self._path or not owner.isdigit() or is_alive(int(owner)):
                continue
            try:
                entry = msgspec.json.decode(path.read_bytes(), type=Entry)
                when = path.stat().st_mtime
            except (msgspec.MsgspecError, OSError):
                continue
            if (entry.target, entry.schema) == (target, SCHEMA):
                found.append((when, entry.case, path))
        return [(case, path) for _, case, path in sorted(found, key=lambda each: each[0])]
