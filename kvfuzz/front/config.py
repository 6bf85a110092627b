"""Defaults of `kvfuzz run` from kvfuzz.toml, or from [tool.kvfuzz] in pyproject.toml.

Only the current folder is looked at. kvfuzz.toml wins over pyproject.toml, flags win over both.
"""

import tomllib
from pathlib import Path
from typing import Annotated, Any

import msgspec

from kvfuzz.errors import UsageError
from kvfuzz.model.axes import nearest
from kvfuzz.model.target import DEFAULT_ARCH, DEFAULT_LANE


class Defaults(msgspec.Struct, frozen=True, kw_only=True, rename="kebab", omit_defaults=True):
    """The keys of a configuration: the options of `run`, spelled as on the command line."""

    where: str = ""
    budget: str = "60s"
    max_cases: Annotated[int, msgspec.Meta(ge=1)] | None = None
    seed: Annotated[int, msgspec.Meta(ge=0)] = 0
    lane: str = DEFAULT_LANE
    arch: str = DEFAULT_ARCH
    out: str = "kvfuzz-out"
    source: dict[str, str] = {}
    op: str = ""
    keep_going: bool = False
    until_coverage: bool = False
    case_timeout: str = "30s"


def load_config(folder: Path) -> Defaults:
    """The configuration of `folder`; the built-in defaults where it has none.

    Raises UsageError that names the file for bad TOML, an unknown key or a value of another type.
    """
    own, project = folder / "kvfuzz.toml", folder / "pyproject.toml"
    if own.is_file():
        return _defaults(_read(own), own.name)
    if project.is_file():
        tools = _read(project).get("tool", {})
        table = tools.get("kvfuzz", {}) if isinstance(tools, dict) else {}
        return _defaults(table, f"{project.name} [tool.kvfuzz]")
    return Defaults()


def _read(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text())
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UsageError(f"{path.name}: no valid TOML ({error})") from None
    except OSError as error:
        raise UsageError(f"{path.name}: {error.strerror}") from None


def _defaults(table: object, where: str) -> Defaults:
    if not isinstance(table, dict):
        raise UsageError(f"{where}: expected a table")
    known = tuple(field.encode_name for field in msgspec.structs.fields(Defaults))
    for key in table:
        if key not in known:
            raise UsageError(f"{where}: unknown key {key!r}; {nearest(key, known)}")
    try:
        return msgspec.convert(table, Defaults)
    except msgspec.ValidationError as error:
        raise UsageError(f"{where}: {error}") from None
