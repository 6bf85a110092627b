"""Where Triton may put the files of a compilation: private to the process, and soon gone.

Triton's cache key has a kernel's text and line but not its path, so that a cache shared between
processes could name the wrong file in a finding. Nothing is read back once a kernel is loaded:
files lie side by side, are written once and never looked up.
"""

import os
import shutil
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Any

from triton import knobs
from triton.runtime.cache import CacheManager, FileCacheManager

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
        with suppress(FileNotFoundError):
            for name in os.listdir(self.path):
                os.unlink(f"{self.path}/{name}")

    def close(self) -> None:
        """Remove the directory."""
        shutil.rmtree(self.path, ignore_errors=True)


def scratch_files(key: str, override: bool = False, dump: bool = False) -> Any:
    """What Triton takes for its cache manager: of a compilation, or of TRITON_KERNEL_DUMP's and
    TRITON_KERNEL_OVERRIDE's directories, which stay its own."""
    return FileCacheManager(key, override, dump) if override or dump else _Files(key)


class _Files(CacheManager):  # type: ignore[misc]
    """The files of one compilation in `knobs.cache.dir`; every compilation is the first."""

    def __init__(self, key: str) -> None:
        self._key = key

    def get_file(self, filename: str) -> None:
        """Nothing is found again."""

    def get_group(self, filename: str) -> None:
        """Nothing is found again."""

    def put_group(self, filename: str, group: dict[str, str]) -> None:
        """Nothing is found again."""

    def put(self, data: Any, filename: str, binary: bool = True) -> str:
        """Write the text of `data`, and return the path; of the TTIR before all passes, which is
        large and which nobody reads, only an empty file."""
        path = f"{knobs.cache.dir}/{self._key}-{filename}"
        with open(path, "wb") as file:
            if not filename.endswith(".source"):
                file.write(data if isinstance(data, bytes) else str(data).encode())
        return path
