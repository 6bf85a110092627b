"""The write-ahead journal: the case about to be launched is on disk before it is.

Whatever takes the process down, the case that did it can be read back. One file per process; a
clean end removes it, so that a file which is still there names a case whose end nobody saw.
"""

import os
from pathlib import Path

import msgspec

from kvfuzz.model.case import Case


class Journal:
    """The journal of this process in an output folder."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / f"journal-{os.getpid()}.json"
        self._folder = folder

    def about_to_run(self, case: Case) -> None:
        """Record `case`. Not synced to disk: the kernel keeps it when only the process dies."""
        temporary = self._path.with_suffix(".tmp")
        temporary.write_bytes(msgspec.json.encode(case))
        os.replace(temporary, self._path)

    def close(self) -> None:
        """The last recorded case ended in a verdict."""
        self._path.unlink(missing_ok=True)

    def left_over(self) -> list[tuple[Path, Case]]:
        """Cases whose process never came back, oldest first; unreadable files are skipped."""
        found = []
        for path in sorted(self._folder.glob("journal-*.json"), key=lambda p: p.stat().st_mtime):
            pid = int(path.stem.partition("-")[2])
            if pid == os.getpid() or _alive(pid):
                continue
            try:
                found.append((path, msgspec.json.decode(path.read_bytes(), type=Case)))
            except (msgspec.DecodeError, OSError):
                continue
        return found


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
