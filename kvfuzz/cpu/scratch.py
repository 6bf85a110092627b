"""Where Triton may put the files of a compilation: private to the process, and soon gone.

Triton's cache key has a kernel's text and line but not its path, so that a cache shared between
processes could name the wrong file in a finding. Nothing is read back once a kernel is loaded.
"""

import os
import shutil
import tempfile
from contextlib import suppress
from pathlib import Path

from kvfuzz.liveness import is_alive

_PREFIX = "kvfuzz-triton-"


class Scratch:
    """A directory that is emptied whenever a kernel was loaded, and removed by `close`.

    Its name holds the process id. A process that is killed leaves its directory, which the next
    one to start removes; the directory of a living process is never touched, since Triton creates
    and writes into it without looking twice.
    """

    def __init__(self) -> None:
        for left in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*"):
            owner = left.name.removeprefix(_PREFIX).partition("-")[0]
            if owner.isdigit() and not is_alive(int(owner)):
                shutil.rmtree(left, ignore_errors=True)
        self.path = tempfile.mkdtemp(prefix=f"{_PREFIX}{os.getpid()}-")

    def empty(self) -> None:
        """Remove the files of past compilations."""
        with suppress(FileNotFoundError), os.scandir(self.path) as entries:
            for entry in entries:
                shutil.rmtree(entry.path, ignore_errors=True)

    def close(self) -> None:
        """Remove the directory."""
        shutil.rmtree(self.path, ignore_errors=True)
