"""`kvfuzz list` and `kvfuzz --version`: what there is, without loading any of it."""

from importlib.metadata import PackageNotFoundError, version

import kvfuzz
from kvfuzz.kernels.catalogue import list_targets
from kvfuzz.model.axes import AXIS
from kvfuzz.model.presets import presets
from kvfuzz.reports.text import columns

MUTANT = "mutant:"


def listing_lines(what: str) -> list[str]:
    """The lines of one section, or of all."""
    targets = list_targets()
    sections: dict[str, list[tuple[str, ...]]] = {
        "targets": [tuple(each) for each in targets if not each.name.startswith(MUTANT)],
        "mutants": [tuple(each) for each in targets if each.name.startswith(MUTANT)],
        "presets": [(key, each.model, each.incomplete) for key, each in presets().items()],
        "axes": [(axis.name, ", ".join(axis.levels)) for axis in AXIS.values()],
    }
    headings = {
        "targets": "Targets, besides path/to/file.py:function",
        "mutants": "Mutants: kernels broken on purpose",
        "presets": "Presets: caches of real models, for kvfuzz prove preset:NAME",
        "axes": "Axes and their levels, for --where AXIS=LEVEL|LEVEL,...",
    }
    lines: list[str] = []
    for name, rows in sections.items():
        if what in ("all", name):
            lines += ["", headings[name], *columns(rows)]
    return lines[1:]


def version_line() -> str:
    """kvfuzz and the packages whose versions decide what a run does."""
    parts = [f"kvfuzz {kvfuzz.__version__}"]
    for package in ("triton", "torch", "hypothesis"):
        try:
            parts.append(f"{package} {version(package)}")
        except PackageNotFoundError:
            parts.append(f"{package} not installed")
    return ", ".join(parts)
