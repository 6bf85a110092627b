"""The catalogue of mutants as data: what each patches, and the patched source.

Neither torch nor triton is imported, so that a parent process can list mutants.
"""

import tomllib
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from kvfuzz.errors import UsageError

CATALOGUE = Path(__file__).with_name("catalogue.toml")
BUILTIN = Path(__file__).parent.parent / "builtin"


@dataclass(frozen=True, slots=True)
class Mutant:
    """A built-in kernel with one line replaced; catalogue.toml says what the fields mean."""

    name: str
    patches: str
    old: str
    new: str
    models: str
    caught_by: str
    survives: str = ""

    @property
    def path(self) -> Path:
        """The file that is patched."""
        return BUILTIN / f"{self.patches}.py"

    def source(self) -> str:
        """The patched source. Raises UsageError unless `old` occurs exactly once."""
        original = self.path.read_text()
        if (count := original.count(self.old)) != 1:
            raise UsageError(
                f"mutant {self.name}: old={self.old!r} occurs {count} times in "
                f"{self.path.name}, expected exactly once"
            )
        return original.replace(self.old, self.new)


@cache
def mutants() -> tuple[Mutant, ...]:
    """Every mutant, in the catalogue's order."""
    tables = tomllib.loads(CATALOGUE.read_text())["mutant"]
    return tuple(Mutant(**table) for table in tables)
