"""Files: atomic writes, the output folder, and the seeds in it. Nothing saved is ever lost."""

import os
import tempfile
from pathlib import Path

from kvfuzz.errors import UsageError
from kvfuzz.model import seed as seeds
from kvfuzz.model.seed import Seed


def write_atomic(path: Path, data: bytes) -> None:
    """Replace `path` by a file with `data`: readers see the old file or the new one, whole."""
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def read_seed(path: Path) -> Seed:
    """The seed in a file. Raises UsageError where it is missing or malformed."""
    try:
        data = path.read_bytes()
    except OSError as error:
        raise UsageError(f"seed {path}: {error.strerror}") from None
    return seeds.load(data, where=str(path))


class OutputFolder:
    """OUT: seeds/, the journal and the event log of the runs that were given it."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.seeds = root / "seeds"
        try:
            self.seeds.mkdir(parents=True, exist_ok=True)
            probe = root / f".probe-{os.getpid()}"
            probe.write_bytes(b"")
            probe.unlink()
        except OSError as error:
            raise UsageError(
                f"--out {root}: cannot be written ({error.strerror}); name another folder"
            ) from None

    def save(self, seed: Seed) -> Path:
        """Write a seed under its id, and return where."""
        path = self.seeds / f"{seed.id}.json"
        write_atomic(path, seeds.dump(seed))
        return path

    def saved(self) -> list[Path]:
        """The seed files, by name."""
        return sorted(self.seeds.glob("*.json"))
