"""Where Triton may put the files of a compilation: private to the process, and soon gone.

Triton's cache key has a kernel's text and line but not its path, so that a cache shared between
processes could name the wrong file in a finding. Nothing is read back once a kernel is loaded.
"""

import os
import shutil
import tempfile
from contextlib import suppress
from pathlib import Path

_PREFIX = "kvfuzz-triton-"


class Scratch:
    """A directory that is emptied whenever a kernel was loaded, and removed by `close`.

    A process that is killed leaves an empty directory, which the next one to start removes. One
    that is still in use does no harm by going: Triton makes it again.
    """

    def __init__(self) -> None:
        for left in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*"):
            with suppress(OSError):
                left.rmdir()
        self.path = tempfile.mkdtemp(prefix=_PREFIX)

    def empty(self) -> None:
        """Remove the files of past compilations."""
        with suppress(FileNotFoundError), os.scandir(self.path) as entries:
            for entry in entries:
                shutil.rmtree(entry.path, ignore_errors=True)

    def close(self) -> None:
        """Remove the directory."""
        shutil.rmtree(self.path, ignore_errors=True)
