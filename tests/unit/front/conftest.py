"""Running the command line in this process, in an empty folder."""

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest

from kvfuzz.front.entry import main
from kvfuzz.model.lower import lower
from kvfuzz.model.scene import Scene
from kvfuzz.model.seed import Expected, Provenance, Seed, dump


class Ended(NamedTuple):
    code: int
    out: str
    err: str


@pytest.fixture
def kvfuzz(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., Ended]:
    monkeypatch.chdir(tmp_path)

    def run(*arguments: str) -> Ended:
        code = main(arguments)
        return Ended(code, *capsys.readouterr())

    return run


@pytest.fixture
def seed_file(tmp_path: Path, gather_scene: Scene) -> Path:
    provenance = Provenance("0.1.0", "3.6.0", "2.9.0", "cpu", "gfx942", "0" * 16)
    seed = Seed(
        "builtin:gather_cache",
        "gather_cache",
        "oracle",
        lower(gather_scene),
        Expected("failed", "0" * 16),
        provenance,
    )
    path = tmp_path / "seed.json"
    path.write_bytes(dump(seed))
    return path
